"""Record every allocation of one training step.

    subject = measure.Subject(model, (tokens, targets), optimizer=adamw)
    cases = {mode: partial(step, mode) for mode in ("forward", "step")}
    recordings = measure.record_memory(subject, cases, config)
    recordings.histories       every allocation of one step of each case

The allocator's history itself is read by :mod:`stepscope.traces.memory_snapshot`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import nvtx
import torch

from stepscope.config import StepConfig
from stepscope.measure.oom import out_of_memory
from stepscope.measure.subject import Subject, learning_rate, negligible_learning_rate
from stepscope.model import ranges
from stepscope.model.training_step import out_of_memory_names, release

Step = Callable[..., Any]  # runs one step; takes an optional ``phase``


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


@dataclass
class Recordings:
    """What :func:`record_memory` recorded.

    histories: one per case; none on a CPU, whose allocator keeps no history.
    learning_rate: of the optimizer while steps were recorded; None if no step uses one.
    """

    histories: list[MemoryHistory]
    learning_rate: float | None


class Recorder:
    """The ``phase`` that a step is called with, and the ranges that its model opens: both are noted in numbers
    of allocations so far.

    Standing in for NVTX's ranges, it knows regions in backward, too, where the allocator's history has no
    Python stack.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.annotation = model, ranges.Annotation()
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
        if error:  # such as out of memory: the error is the outcome
            return
        self.phases.append((self.name, self.begin, allocator_counts()))
        if self.name == "loss":
            self.annotation.link_backward()
        elif self.name == "backward":
            self.gradients = set(addresses(p.grad for p in self.model.parameters()))


def addresses(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the pieces of memory that tensors lie in, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def living(subject: Subject, mode: str) -> dict[str, int]:
    """Return the bytes of a subject's tensors by kind, between two steps of a mode."""
    states = subject.optimizer.state.values() if mode == "step" else ()
    device = subject.batch[0].device
    moments = (t for state in states for t in state.values() if torch.is_tensor(t) and t.device == device)
    of = {
        "weights": subject.model.parameters(),
        "optimizer state": moments,
        "other": (*subject.batch, *subject.model.buffers()),
    }
    return {kind: sum(addresses(tensors).values()) for kind, tensors in of.items()}


def keeps_history(device: str) -> bool:
    """Whether PyTorch can record the allocations of this device."""
    return device == "cuda"


def record_memory(subject: Subject, cases: Mapping[str, Step], config: StepConfig) -> Recordings:
    """Record one step of every case, after its warm-up steps. The learning rate is negligible meanwhile.

    If a case runs out of memory, its history says why, and the other cases continue. Between cases gradients
    and moments are freed, because the next mode has memory of its own.

    Args:
        subject: the model, batch and optimizer that the steps use.
        cases: the steps by mode, in the order in which they are recorded. A step takes an optional ``phase``,
            and wraps each of its phases in ``with phase("forward"):``.
    """
    histories: list[MemoryHistory] = []
    with negligible_learning_rate(subject.optimizer):
        if keeps_history(config.device):
            histories = [record_case(subject, mode, step, config) for mode, step in cases.items()]
        return Recordings(histories, learning_rate(subject.optimizer))


def record_case(subject: Subject, mode: str, step: Step, config: StepConfig) -> MemoryHistory:
    """Record a case, or say why it ran out of memory, and free what it held."""
    failed: dict[Any, tuple[str, str]] = {}
    with out_of_memory(failed, mode):
        history = record_step(subject, mode, step, config)
    if failed:
        history = MemoryHistory.lost(mode, config.precision, failed[mode][1])
    subject.reset()
    subject.forget_moments()
    release(config.device, after_error=mode in failed)
    return history


def record_step(subject: Subject, mode: str, step: Step, config: StepConfig) -> MemoryHistory:
    """Record a step. Its warm-up makes the optimizer's state and cuBLAS's workspaces.

    Raises:
        torch.OutOfMemoryError: names the step.
    """
    recorder = Recorder(subject.model)
    for index in range(config.warmup_steps):
        with out_of_memory_names(f"warming up, step {index}"):
            subject.reset()
            step()
            torch.cuda.synchronize()
    subject.reset()
    before, start = living(subject, mode), allocator_counts()
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
    try:
        ranges.use_ranges(recorder)
        with out_of_memory_names("running the step"), ranges.annotated(subject.model) as recorder.annotation:
            step(recorder)
            torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        ranges.use_ranges(nvtx.get_domain(ranges.DOMAIN))
    subject.reset()
    requested = allocator_counts().requested
    torch._C._cuda_clearCublasWorkspaces()  # so that what is freed here is known to be one
    before["workspaces"] = requested - allocator_counts().requested
    return MemoryHistory(
        mode,
        config.precision,
        before,
        start,
        recorder.phases,
        recorder.regions,
        recorder.gradients,
        snapshot,
    )
