"""Record every allocation of one training step.

    subject = measure.Subject(model, (tokens, targets), optimizer=adamw)
    cases = {mode: partial(step, mode) for mode in ("forward", "step")}
    recordings = measure.record_memory(subject, cases, config)
    recordings.histories       every allocation of one step of each case

:mod:`stepscope.traces.memory_snapshot` converts the allocator's history into a table.
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
    """Statistics of PyTorch's CUDA allocator.

    allocations, frees: the number of allocations and the number of frees so far.
    requested: the bytes that were requested for live tensors.
    peak_requested, peak_allocated, peak_reserved: the peaks since the last reset, in bytes.
    """

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
    count = stats["allocation"]["all"]
    requested = stats["requested_bytes"]["all"]
    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]
    return AllocatorCounts(
        allocations=count["allocated"],
        frees=count["freed"],
        requested=requested["current"],
        peak_requested=requested["peak"],
        peak_allocated=allocated["peak"],
        peak_reserved=reserved["peak"],
    )


@dataclass
class MemoryHistory:
    """The recorded allocations of one step in a mode.

    before: the live bytes when the recording started, keyed by kind.
    start: the allocator's statistics when the recording started.
    phases: each phase's name, and the allocator's statistics when the phase started and ended.
    regions: for each time that a region was opened or closed, the number of allocations so far, and the region's
        name (None if a region was closed).
    gradients: the addresses of the gradients at the end of the backward phase.
    snapshot: the snapshot of PyTorch's allocator, which contains the history.
    reason: the error message if the step ran out of memory, in which case there is no history; otherwise "".
    """

    mode: str
    precision: str
    before: dict[str, int]
    start: AllocatorCounts
    phases: list[tuple[str, AllocatorCounts, AllocatorCounts]]
    regions: list[tuple[int, str | None]]
    gradients: set[int]
    snapshot: dict[str, Any]
    reason: str = ""

    @classmethod
    def failed(cls, mode: str, precision: str, reason: str) -> "MemoryHistory":
        """Return the empty history of a mode that ran out of memory."""
        zeros = AllocatorCounts(*[0] * 6)
        return cls(mode, precision, {}, zeros, [], [], set(), {}, reason)


@dataclass
class Recordings:
    """The result of :func:`record_memory`.

    histories: one per case; empty on a CPU, whose allocator doesn't keep a history.
    learning_rate: the optimizer's learning rate while steps were recorded; None if no step uses an optimizer.
    """

    histories: list[MemoryHistory]
    learning_rate: float | None


class Recorder:
    """Records the number of allocations so far whenever a phase or a range starts or ends.

    A step is called with the recorder as its ``phase``, and the model opens its ranges with the recorder instead
    of the NVTX domain. Therefore, the recorder also covers the regions of the backward phase. The allocator's
    history can't show these regions, because it doesn't contain Python stacks for the backward phase.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.annotation = ranges.Annotation()
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
        if error:  # such as running out of memory, which the caller records
            return
        self.phases.append((self.name, self.begin, allocator_counts()))
        if self.name == "loss":
            self.annotation.link_backward()
        elif self.name == "backward":
            gradients = (parameter.grad for parameter in self.model.parameters())
            self.gradients = set(storage_sizes(gradients))


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the size in bytes of each tensor's storage, keyed by the storage's address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def live_bytes(subject: Subject, mode: str) -> dict[str, int]:
    """Return the bytes that a subject's tensors occupy between two steps of a mode, keyed by kind."""
    tensors: dict[str, Iterable[torch.Tensor]] = {
        "weights": subject.model.parameters(),
        "optimizer state": _moments(subject) if mode == "step" else [],
        "other": [*subject.batch, *subject.model.buffers()],
    }
    return {kind: sum(storage_sizes(group).values()) for kind, group in tensors.items()}


def _moments(subject: Subject) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state that are on the device (AdamW's step counts are on the CPU)."""
    device = subject.batch[0].device
    moments = []
    for state in subject.optimizer.state.values():
        tensors = filter(torch.is_tensor, state.values())
        moments += [tensor for tensor in tensors if tensor.device == device]
    return moments


def keeps_history(device: str) -> bool:
    """Return whether PyTorch can record the allocations on this device."""
    return device == "cuda"


def record_memory(subject: Subject, cases: Mapping[str, Step], config: StepConfig) -> Recordings:
    """Record the allocations of one step of every case, with a negligible learning rate.

    Each case is warmed up first. If a case runs out of memory, its history gives the reason, and the other cases
    continue. Gradients and moments are freed between cases, because not every mode has them.

    Args:
        subject: the model, batch and optimizer that the steps use.
        cases: the steps by mode, in the order in which they are recorded. A step takes an optional ``phase``,
            and wraps each of its phases in ``with phase("forward"):``.
        config: provides the number of warm-up steps, the precision and the device.
    """
    histories: list[MemoryHistory] = []
    with negligible_learning_rate(subject.optimizer):
        if keeps_history(config.device):
            histories = [record_case(subject, mode, step, config) for mode, step in cases.items()]
        return Recordings(histories, learning_rate(subject.optimizer))


def record_case(subject: Subject, mode: str, step: Step, config: StepConfig) -> MemoryHistory:
    """Record one step of a case, or the reason why the step ran out of memory; then free the case's memory."""
    failed: dict[Any, tuple[str, str]] = {}
    with out_of_memory(failed, mode):
        history = record_step(subject, mode, step, config)
    if failed:
        _, reason = failed[mode]
        history = MemoryHistory.failed(mode, config.precision, reason)
    subject.reset()
    subject.forget_moments()
    release(config.device, after_error=mode in failed)
    return history


def record_step(subject: Subject, mode: str, step: Step, config: StepConfig) -> MemoryHistory:
    """Record one step, after warm-up steps that create the optimizer's state and cuBLAS's workspaces.

    Raises:
        torch.OutOfMemoryError: If memory runs out; the message names the step.
    """
    recorder = Recorder(subject.model)
    for index in range(config.warmup_steps):
        with out_of_memory_names(f"warming up, step {index}"):
            subject.reset()
            step()
            torch.cuda.synchronize()
    subject.reset()
    before = live_bytes(subject, mode)
    start = allocator_counts()
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
    torch._C._cuda_clearCublasWorkspaces()  # frees only the workspaces, so the difference is their size
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
