"""One step with the allocator's history on: every allocation, and what is noted while it runs.

The history itself is read by :mod:`stepscope.traces.memory_snapshot`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import nvtx
import torch

from stepscope.model import ranges
from stepscope.model.training_step import Step, out_of_memory_names


class AllocatorCounts(NamedTuple):
    """The allocator's own numbers: allocations and frees so far; bytes now and at most since the last
    reset."""

    allocations: int
    frees: int
    requested: int
    peak_requested: int
    peak_allocated: int
    peak_reserved: int

    @property
    def events(self) -> int:
        return self.allocations + self.frees


def allocator_counts() -> AllocatorCounts:
    stats = torch.cuda.memory_stats_as_nested_dict()
    number, most = (
        stats["allocation"]["all"],
        {name: stats[f"{name}_bytes"]["all"] for name in ("requested", "allocated", "reserved")},
    )
    return AllocatorCounts(
        number["allocated"],
        number["freed"],
        most["requested"]["current"],
        *(most[name]["peak"] for name in most),
    )


@dataclass
class MemoryHistory:
    """One mode's step, as it was noted.

    ``before`` is what lived when the history began, in bytes by kind; ``start`` the allocator's numbers then;
    ``phases`` are (name, numbers at its begin, at its end); ``regions`` (allocations so far, region that
    opened, None where one closed); ``gradients`` the addresses of the gradients where backward ends.
    """

    mode: str
    precision: str
    before: dict[str, int]
    start: AllocatorCounts
    phases: list[tuple[str, AllocatorCounts, AllocatorCounts]]
    regions: list[tuple[int, str | None]]
    gradients: set[int]
    snapshot: dict[str, Any]
    reason: str = ""  # why there is no more than this: the step ran out of memory

    @classmethod
    def lost(cls, mode: str, precision: str, reason: str) -> "MemoryHistory":
        """Of a mode that did not fit: nothing but why."""
        return cls(mode, precision, {}, AllocatorCounts(*[0] * 6), [], [], set(), {}, reason)


class Recorder:
    """The ``phase`` that a :class:`Step` is called with, and the ranges that its model opens: both are noted
    in numbers of allocations so far.

    Standing in for NVTX's ranges, it knows regions in backward, too, where the allocator's history has no
    Python stack.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.annotation = step, ranges.Annotation()
        self.phases: list[tuple[str, AllocatorCounts, AllocatorCounts]] = []
        self.regions: list[tuple[int, str | None]] = []
        self.gradients: set[int] = set()

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, name: str) -> None:
        self.regions.append((allocator_counts().allocations, name))

    def pop_range(self) -> None:
        self.regions.append((allocator_counts().allocations, None))

    def __call__(self, name: str) -> "Recorder":
        self.name = name
        return self

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.begin = allocator_counts()

    def __exit__(self, error, *rest) -> None:
        if error:  # such as out of memory, which is to be told as it is
            return
        self.phases.append((self.name, self.begin, allocator_counts()))
        if self.name == "loss":
            self.annotation.link_backward()
        elif self.name == "backward":
            self.gradients = set(addresses(p.grad for p in self.step.model.parameters()))


def addresses(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the pieces of memory that tensors lie in, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def living(step: Step) -> dict[str, int]:
    """Bytes of the step's own tensors by kind, between two steps."""
    states = step.optimizer.state.values() if step.mode == "step" else ()
    moments = (
        t for state in states for t in state.values() if torch.is_tensor(t) and t.device.type == step.device
    )
    of = {
        "weights": step.model.parameters(),
        "optimizer state": moments,
        "other": (step.tokens, step.targets, *step.model.buffers()),
    }
    return {kind: sum(addresses(tensors).values()) for kind, tensors in of.items()}


def record_memory_history(step: Step, warmups: int = 1) -> MemoryHistory:
    """Run a step after a warm-up, which makes the optimizer's state and cuBLAS's workspaces, and note it all.

    Raises:
        torch.OutOfMemoryError: names the step.
    """
    recorder = Recorder(step)
    for index in range(warmups):
        with out_of_memory_names(f"warming up, step {index}"):
            step.clear_gradients()
            step()
            torch.cuda.synchronize()
    step.clear_gradients()
    before, start = living(step), allocator_counts()
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
    try:
        ranges.use_ranges(recorder)
        with out_of_memory_names("running the step"), ranges.annotated(step.model) as recorder.annotation:
            step(recorder)
            torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        ranges.use_ranges(nvtx.get_domain(ranges.DOMAIN))
    step.clear_gradients()
    requested = allocator_counts().requested
    torch._C._cuda_clearCublasWorkspaces()  # so that what is freed here is known to be one
    before["workspaces"] = requested - allocator_counts().requested
    return MemoryHistory(
        step.mode,
        step.precision,
        before,
        start,
        recorder.phases,
        recorder.regions,
        recorder.gradients,
        snapshot,
    )
