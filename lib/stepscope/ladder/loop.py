"""Measure training steps to which optimizations have been applied, one case at a time, in this process.

A case is a subject (:class:`stepscope.optimizations.transforms.TrainedSubject`) with some transforms. For each
case, :class:`Loop`

1. builds the subject, applies the transforms, compiles the step, and compares the loss and gradients with fp32;
2. times steps back to back, and measures power, energy and clock during these steps;
3. profiles steps after everything has been timed, because launches stay slower once a profiler has run.

The study of the built-in Transformer measures all of its cases in one process. The study of your own model
measures each case in a new process.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from timeit import default_timer
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from stepscope import measure
from stepscope.config import RunConfig
from stepscope.ladder import numerics
from stepscope.measure.timing import LAUNCH_BOUND_STEPS, LAUNCH_BOUND_STEPS_S, LONG_MS, MIN_STEPS
from stepscope.model.training_step import reseed
from stepscope.optimizations.any_model import WARMUPS  # used for CUDA graphs and baselines
from stepscope.optimizations.transforms import Step, TrainedSubject, Transform, Unsupported, apply
from stepscope.report.tables import number
from stepscope.stats import location
from stepscope.traces.attribution import TraceError

SETTLING_S = 0.4  # time until the clock of a power-limited step has settled
TIMED_S = 2.0  # total duration of the timed steps
PROFILED_S = 1.0  # total duration of the profiled steps if they are power-limited
# Settling time after a pause. It is longer, because the clock of a power-limited step first rises and overshoots.
SETTLING_AFTER_PAUSE_S = 1.0
MAX_STEPS = 2000
VARYING_STEPS = 100  # number of timed and profiled steps if steps do different work, unless they are long
MAX_RECOMPILES = 256  # maximum number of shapes for which a function may be compiled

Build = Callable[[int], TrainedSubject]  # builds a subject with the given batch size


@dataclass
class Case:
    """A subject with some transforms, measured at one batch size; its results fill one row.

    Args:
        needed: transforms that must apply. Any other transform is skipped if it doesn't apply.
        left_out: in an ablation, the transform that is left out; None in other cases.
    """

    name: str
    batch_size: int
    build: Build
    transforms: Sequence[Transform] = ()
    needed: Sequence[Transform] = ()
    left_out: Transform | None = None
    is_baseline: bool = False
    row: dict[str, Any] = field(init=False)
    subject: TrainedSubject | None = None  # has no weights until it is loaded
    program: Any = None  # the key of the subject's compiled code
    applied: tuple[str, ...] = ()  # names of the transforms that were applied
    # Numerical results of the first step. They show whether a transform changes anything.
    numbers: tuple[Any, ...] = ()
    precision: str = "fp32"
    moments: str = "fp32"
    compiles: bool = False

    def __post_init__(self) -> None:
        self.row = {
            "optimization": self.name,
            "batch_size": self.batch_size,
            "status": "ok",
            "reason": "",
        }


class Loop:
    """Measures cases, and writes the results into the cases' rows.

    ``replayed`` is the name of the eager case that is also timed as a CUDA graph, or "". An optimization that
    raises one of the errors ``unsupported`` doesn't apply here, for example because there is no C++ compiler.
    """

    replayed = ""
    unsupported: tuple[type[Exception], ...] = (Unsupported, torch._dynamo.exc.BackendCompilerFailed)

    def __init__(self, config: RunConfig):
        self.config = config
        self.device = config.device
        self.on_gpu = config.device == "cuda"
        self.cases: list[Case] = []
        self.programs: dict[Any, TrainedSubject] = {}  # by program: subjects whose compiled code is shared
        self.compile_s: dict[Any, float] = {}  # compile time in seconds, by program
        # The loss and gradients of the fp32 step, keyed by batch size.
        self.fp32_gradients: dict[int, tuple[float, numerics.Gradients]] = {}
        self.kernels: dict[tuple[str, int], pd.DataFrame] = {}
        self.learning_rate: float | None = None  # the negligible rate at which steps are measured

    def time(self, case: Case) -> None:
        self.visit(case, self.first_step, self.time_eager)
        if "wall_ms" not in case.row:
            self.visit(case, self.time_steps)  # loaded again, because compiling fragments the memory
        show(case)

    def time_eager(self, case: Case, subject: TrainedSubject) -> None:
        # A subject without a loss compiles its own step, and keeps the graph of its first step.
        has_loss = subject.loss is not None
        if has_loss and not subject.compiles:
            self.time_steps(case, subject)

    def visit(self, case: Case, *parts: Callable[[Case, TrainedSubject], None]) -> None:
        """Load a case's weights, run the given parts, and free the weights; on failure, set the row's reason."""
        if case.row["status"] != "ok":
            return
        failed: dict[Any, tuple[str, str]] = {}
        try:
            with measure.out_of_memory(failed, "case", f"measuring {case.name}"):
                self.run_loaded(case, parts)
        except self.unsupported as error:
            failed["case"] = "unsupported", self.reason_of(error)
        except (RuntimeError, TraceError, torch._dynamo.exc.Unsupported) as error:
            failed["case"] = "failed", self.reason_of(error)
        if not failed:
            return
        status, reason = failed["case"]
        if "wall_ms" in case.row:
            # The step was timed, so only the profile is missing.
            status, reason = "ok", f"not profiled: {reason}"
        case.row |= {"status": status, "reason": reason}
        measure.release(self.device, after_error=True)
        measure.synchronizer(self.device)()  # raises if the error made the GPU unusable

    def reason_of(self, error: BaseException) -> str:
        """Return the reason to put into the row of a case that failed with this error."""
        return measure.error_text(error)

    def run_loaded(
        self,
        case: Case,
        parts: Sequence[Callable[[Case, TrainedSubject], None]],
    ) -> None:
        subject = case.subject or self.prepare(case)
        try:
            subject.load(self.config.seed)
            for part in parts:
                part(case, subject)
        finally:
            subject.unload()

    def prepare(self, case: Case) -> TrainedSubject:
        """Build a case's subject and apply its transforms.

        Raises:
            Unsupported: If a transform that the case needs doesn't apply.
        """
        measure.allow_recompiling(MAX_RECOMPILES)
        if case.left_out:  # leaving out a transform is meaningful only if the transform applies
            self.build(case, [*case.transforms, case.left_out], [case.left_out])
        subject, applied = self.build(case, case.transforms, case.needed)
        case.applied = tuple(transform.__name__ for transform in applied)
        changing_program = [transform for transform in applied if not hasattr(transform, "keeps_program")]
        case.program = case.build, case.batch_size, tuple(changing_program)
        program = self.programs.setdefault(case.program, subject)
        if program is not subject:
            subject.share_program(program)
        if program is not subject or case.left_out:
            gc.collect()  # frees the buffers of a model that was built twice
        case.subject = subject
        case.compiles = subject.compiles
        case.precision = subject.precision
        case.moments = subject.moments
        return subject

    def build(
        self,
        case: Case,
        transforms: Sequence[Transform],
        needed: Sequence[Transform],
    ) -> tuple[TrainedSubject, list[Transform]]:
        """Build a subject without weights; return the subject and the transforms that apply.

        Raises:
            Unsupported: If a needed transform doesn't apply.
        """
        with torch.device(self.device):
            subject = case.build(case.batch_size)
            reasons = apply(transforms, subject)
        subject.find_parameters()
        subject.unload()
        for transform in needed:
            if transform.__name__ in reasons:
                raise Unsupported(reasons[transform.__name__])
        return subject, [transform for transform in transforms if transform.__name__ not in reasons]

    # The first step: compile, and compare with fp32

    def first_step(self, case: Case, subject: TrainedSubject) -> None:
        start = default_timer()
        if subject.loss is None:
            subject.step = subject.launch(subject)
            loss_tensor = subject.step()
        else:
            with subject.without_randomness():
                loss_tensor = subject.gradients()
        if case.program not in self.compile_s:
            measure.synchronizer(self.device)()
            self.compile_s[case.program] = default_timer() - start
        loss = loss_tensor.item()
        if subject.compiles:
            case.row["compile_s"] = self.compile_s[case.program]
        if not case.is_baseline:
            self.compare(case, subject, loss)
        with measure.negligible_learning_rate(subject.optimizer):
            subject.optimizer.step()  # compiles the optimizer's kernel, and creates the moments
        subject.reset()
        moments = measure.storage_bytes([*subject.optimizer.state.values()])
        case.numbers = loss, type(subject.optimizer), moments, subject.launch

    def compare(self, case: Case, subject: TrainedSubject, loss: float) -> None:
        if not case.transforms:
            self.fp32_gradients[case.batch_size] = loss, numerics.gradients_of(subject)
        fp32 = self.fp32_gradients.get(case.batch_size)
        if fp32 and case.batch_size == self.config.batch_size:
            case.row |= numerics.relative_errors(subject, loss, *fp32)

    # Time

    @contextmanager
    def launched(self, subject: TrainedSubject) -> Iterator[None]:
        """Make the step, for example a CUDA graph, and keep its learning rate negligible within the context.

        Raises:
            RuntimeError: If the step is a CUDA graph whose learning rate is a number, because replays would keep
                using this number even after the learning rate changes.
        """
        subject.step = subject.eager_step  # frees the memory of an earlier graph
        with measure.negligible_learning_rate(subject.optimizer):  # capturing a graph starts with a few steps
            subject.step = subject.launch(subject)
        rates = [group["lr"] for group in subject.optimizer.param_groups]
        has_tensor_rates = all(isinstance(rate, Tensor) for rate in rates)
        if is_launched(subject) and not has_tensor_rates:
            raise RuntimeError(
                "a CUDA graph needs a learning rate that is a tensor; use lr=torch.tensor(...)"
            )
        # Set the rate again, because the launch may have created another optimizer.
        with measure.negligible_learning_rate(subject.optimizer):
            self.learning_rate = measure.learning_rate(subject.optimizer)
            yield

    def restart(self, subject: TrainedSubject) -> None:
        """Make steps that do different work repeat their sequence, by seeding the random number generators."""
        if subject.varies:
            reseed(self.config.seed)

    def settle(self, case: Case, subject: TrainedSubject) -> float:
        """Warm up (on a GPU, until its clock has settled), and return the duration of one step in ms.

        Steps that do different work run the complete sequence that will be timed, because the first step with a
        new shape can take much longer: in bf16, a vision transformer's took 0.13 s instead of 15 ms.
        """
        self.restart(subject)
        min_warmups = WARMUPS if is_launched(subject) or case.is_baseline else 1
        warmups = max(self.config.warmup_steps, min_warmups)
        step_ms = measure.back_to_back(subject.step, self.device, warmups)[-1]
        if self.on_gpu:
            settling_steps = steps_in(SETTLING_S, step_ms)
            if subject.varies and step_ms < LONG_MS:
                settling_steps = VARYING_STEPS
            settling_ms = measure.back_to_back(subject.step, self.device, settling_steps)
            step_ms = location(settling_ms)["median"]
        self.restart(subject)
        return step_ms

    def time_steps(self, case: Case, subject: TrainedSubject) -> None:
        """Measure steps back to back: as in training, the CPU launches them without waiting for the GPU."""
        measure.reset_peak_memory(self.device)
        with self.launched(subject):
            self.time_launched(case, subject)
        self.after_timing(case, subject)

    def after_timing(self, case: Case, subject: TrainedSubject) -> None:
        """Do nothing; subclasses can override this to use a case's steps after they have been timed."""

    def time_launched(self, case: Case, subject: TrainedSubject) -> None:
        row = case.row
        step_ms = self.settle(case, subject)
        steps = self.config.timed_steps
        if self.on_gpu:
            enqueue_ms, wall_ms = time_enqueue(subject.step, self.device)
            row["enqueue_ms"] = enqueue_ms
            if step_ms < LONG_MS:
                steps = max(steps, MIN_STEPS, steps_in(TIMED_S, step_ms))
                # For launch-bound steps, only the fastest of many is reproducible.
                if measure.looks_launch_bound(enqueue_ms, wall_ms):
                    launch_bound_steps = min(LAUNCH_BOUND_STEPS, steps_in(LAUNCH_BOUND_STEPS_S, step_ms))
                    steps = max(steps, launch_bound_steps)
                if subject.varies:
                    steps = VARYING_STEPS
            self.restart(subject)
        row |= time_back_to_back(subject.step, self.device, steps)
        row |= measure.peak_memory(self.device)
        if self.on_gpu and is_launched(subject):  # the step is already a CUDA graph
            row["replayed_ms"] = row["wall_ms"]
        elif self.on_gpu and case.name == self.replayed:
            self.replay(case, subject)

    def replay(self, case: Case, subject: TrainedSubject) -> None:
        """Capture an eager step as a CUDA graph, and time the graph to show the cost of eager launches."""
        with measure.out_of_memory({}, "graph"):
            graph = measure.graph_of(subject.eager_step, subject.reset, WARMUPS)
            settling_steps = steps_in(SETTLING_S, case.row["wall_ms"])
            measure.back_to_back(graph, self.device, settling_steps)
            replays_ms = measure.back_to_back(graph, self.device, MIN_STEPS)
            case.row["replayed_ms"] = location(replays_ms)["median"]

    # Profile

    def profile_steps(self, case: Case, subject: TrainedSubject) -> None:
        """Profile steps back to back, and report the GPU time of the fastest step.

        If the steps are power-limited, they are profiled for a second, and the median step is reported, because
        the GPU's clock fluctuates. If the steps do different work, all steps that were timed are profiled, and
        the median step is reported.

        Raises:
            RuntimeError: If the profiler recorded nothing.
        """
        row = case.row
        is_limited = measure.is_power_limited(row)
        with self.launched(subject):
            operations = self.profiled_operations(case, subject, is_limited)
        takes_median = is_limited or subject.varies
        profiled = measure.median_step(operations) if takes_median else measure.fastest_step(operations)
        row |= measure.gpu_time(profiled)
        row["busy"] = row["gpu_ms"] / row["wall_ms"]
        if self.on_gpu:
            row["in_graph_share"] = float(profiled["in_graph"].mean())
            # Only steps that do the same work should take the same time.
            compared = [] if subject.varies else measure.complete_steps(operations)
            steps_ms = [measure.gpu_time_ms(step) for step in compared]
            row["inconsistent"] = measure.find_inconsistencies(row, steps_ms)
        by_kernel = measure.by_name(profiled).assign(optimization=case.name, batch_size=case.batch_size)
        columns = ["optimization", "batch_size", "name", "kernel_category", "count", "gpu_ms"]
        self.kernels[case.name, case.batch_size] = by_kernel[columns]

    def profiled_operations(
        self,
        case: Case,
        subject: TrainedSubject,
        is_limited: bool,
    ) -> pd.DataFrame:
        step_ms = self.settle(case, subject)
        steps = 3
        if subject.varies:
            steps = case.row["steps"]
        elif step_ms > 500:
            steps = 2
        elif is_limited:
            steps = max(4, steps_in(PROFILED_S, step_ms))
        with measure.StepProfiler(self.device) as profile:
            if is_limited:  # the GPU was idle while the profiler started, so the clock must settle
                settling_steps = steps_in(SETTLING_AFTER_PAUSE_S, step_ms)
                measure.back_to_back(subject.step, self.device, settling_steps)
                self.restart(subject)
            for index in range(steps):
                with profile.phases("step", index)("total"):
                    subject.step()
            measure.synchronizer(self.device)()
        if profile.reason:
            raise RuntimeError(profile.reason)
        return profile.operations

    def is_equal(self, case: Case, before: Case) -> bool:
        kernels = self.kernels.get((case.name, case.batch_size))
        kernels_before = self.kernels.get((before.name, before.batch_size))
        if kernels is None or kernels_before is None:  # one of the two cases wasn't profiled
            return False
        if case.compiles and not self.on_gpu:  # a CPU's profile doesn't show compiled code
            return False
        return case.numbers == before.numbers and counts(kernels) == counts(kernels_before)

    def repeat_impossible(self) -> None:
        for _ in range(measure.TRIES - 1):
            for case in self.cases:
                if case.row.get("inconsistent"):
                    print("measuring again:", case.name, case.batch_size, case.row["inconsistent"])
                    self.visit(case, self.time_steps, self.profile_steps)
                    show(case)


def counts(kernels: pd.DataFrame) -> dict[str, int]:
    """Return the number of operations with each name."""
    return kernels.set_index("name")["count"].to_dict()


def is_launched(subject: TrainedSubject) -> bool:
    """Return whether ``launch`` made the step; if so, Python doesn't launch the step's kernels one by one."""
    return subject.step != subject.eager_step


def steps_in(seconds: float, step_ms: float) -> int:
    """Return how many steps together take at least ``seconds``, limited to :data:`MAX_STEPS`."""
    return min(MAX_STEPS, math.ceil(seconds * 1e3 / step_ms))


def time_enqueue(step: Step, device: str) -> tuple[float, float]:
    """Return the CPU time to enqueue a step, and the wall time of a step that runs alone, both in ms."""

    def total(phases: Any) -> None:
        with phases("step"):
            step()

    samples = measure.time_steps(total, 3, 0, device).query("phase == 'total'")
    return samples["enqueue_ms"].median(), samples["wall_ms"].median()


def time_back_to_back(step: Step, device: str, steps: int) -> dict[str, Any]:
    """Run steps back to back; return their wall time and, on a GPU, their power, energy and clock."""
    with measure.PowerMonitor() as monitor:
        wall_times_ms = measure.back_to_back(step, device, steps)
    statistics = location(wall_times_ms)
    row: dict[str, Any] = {"steps": steps, "wall_ms": statistics["median"]}
    for name in ("mean", "std", "q1", "q3", "min"):
        row[f"wall_{name}_ms"] = statistics[name]
    if device == "cuda":
        row |= {
            "sm_clock_mhz": monitor.sm_clock_mhz,
            "clock_reasons": monitor.clock_reasons,
            "power_w": monitor.power_w,
            "energy_per_step_j": monitor.power_w * monitor.seconds / steps,
        }
    return row


def show(case: Case) -> None:
    """Print a case's wall time, and the reason for a failure if there is one."""
    wall = number(case.row.get("wall_ms", math.nan), "ms")
    reason = case.row["reason"]
    print(f"{case.name}, batch {case.batch_size}: {wall} {reason}")
