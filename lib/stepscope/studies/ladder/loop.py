"""The ladder's loop: measure a training step after each optimization, on top of those before it.

    ladder = Ladder(config, transformer, [tf32, bf16, ...], beyond=[chunked, fp8], baselines={...})
    ladder.measure()
    ladder.tables      steps, kernels and curves, as the record holds them
    ladder.results     the device's rates and limits

For each optimization and batch size, :meth:`Ladder.measure`

1. builds the subject, applies the transforms, compiles, and compares loss and gradients with fp32's;
2. times steps back to back, and reads power, energy and clock over the very same steps;
3. trains on text, if the configuration asks for it.

Only after everything has been timed are the steps profiled, because launches stay slower once a profiler has
run in a process. Impossible readings are measured again, at most twice. A transform after which neither
operations nor numbers differ is refused: a wrong attribute name would otherwise give a plausible row.

The learning rate is negligible while steps are timed or profiled, so that all steps run on the same weights.

An optimization that doesn't apply, fails or doesn't fit keeps its row, which says why. Its memory is freed,
and the next one goes on. Weights are on the device only while their optimization is measured.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from timeit import default_timer
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from stepscope import measure
from stepscope.measure.timing import LAUNCH_BOUND_STEPS, LAUNCH_BOUND_STEPS_S, LONG_MS, MIN_STEPS
from stepscope.model.fit import fully_optimized_bytes
from stepscope.model.flops import parameter_count, step_flops
from stepscope.model.text import text_batches
from stepscope.optimizations import fp8
from stepscope.optimizations.transforms import Step, TrainedSubject, Transform, Unsupported, apply
from stepscope.report.schemas import LATER
from stepscope.report.tables import number
from stepscope.stats import location
from stepscope.studies.ladder import bounds, numerics, training
from stepscope.studies.ladder.config import ADDED, FILLED, MEASURES, Config
from stepscope.traces.attribution import TraceError

WARMUPS = 3  # steps before a CUDA graph is captured, and of other people's steps
SETTLES_S = 0.4  # the clock settles under the power limit
STRETCH_S = 2.0  # steps are timed this long
PROFILED_S = 1.0  # steps at the power limit are profiled this long
RESETTLES_S = 1.0  # after a rest the power limit first lets the clock rise, then overshoots
MAX_STEPS = 2000
RECOMPILES = 256  # shapes for which one function may be compiled
TRAINED_STEPS = 100  # before the gradient of trained weights is compared
FILLING = 0.92  # share of the memory that the filling batch may need by formula
EAGER_REPLAYED = "fused_adamw"  # the last eager step, which is also timed as a CUDA graph
KEEPS_MEMORY = "hugging_face_reduce_overhead"  # frees no memory afterwards, so it comes last

Build = Callable[[int], TrainedSubject]  # makes a subject with this batch size


@dataclass
class Case:
    """One row: a subject with some transforms at a batch size.

    needed: transforms that must apply; the others are left out where they don't.
    left_out: the transform that this case lacks, if it is one of ``ablations``.
    """

    name: str
    batch_size: int
    build: Build
    transforms: Sequence[Transform] = ()
    needed: Sequence[Transform] = ()
    left_out: Transform | None = None
    is_baseline: bool = False
    row: dict[str, Any] = field(init=False)
    subject: TrainedSubject | None = None  # without weights, until it is loaded
    program: Any = None  # the key of its compiled code
    applied: tuple[str, ...] = ()  # the transforms that applied
    numbers: tuple[Any, ...] = ()  # of the first step, to see whether a transform changed any
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


class Ladder:
    """Measure optimizations one on top of another.

    Args:
        config: which of them to measure, and at which batch sizes.
        build: makes the subject before any optimization, which is the row ``fp32``.
        optimizations: transforms in their order.
        beyond: transforms that are each applied to the fully optimized step.
        baselines: other people's steps by name: how to build one, and the transforms that it needs.
    """

    def __init__(
        self,
        config: Config,
        build: Build,
        optimizations: Sequence[Transform],
        beyond: Sequence[Transform] = (),
        baselines: Mapping[str, tuple[Build, Sequence[Transform]]] | None = None,
    ):
        self.config, self.device, self.on_gpu = config, config.device, config.device == "cuda"
        self.batch_sizes: list[int] = config.batch_sizes or [config.batch_size]
        self.programs: dict[Any, TrainedSubject] = {}  # compiled code, which cases share
        self.compile_s: dict[Any, float] = {}  # by program
        self.true_gradients: dict[int, tuple[float, numerics.Gradients]] = {}  # fp32's, by batch size
        self.curves: dict[str, pd.DataFrame] = {}
        self.kernels: dict[tuple[str, int], pd.DataFrame] = {}
        self.ceilings: dict[str, float] = {}
        self.sustained: dict[str, float] = {}
        self.learning_rate: float | None = None  # while steps are measured
        self.cases = self._ladder(build, optimizations, beyond)
        self.cases += self._filled(build, optimizations, beyond)
        self.cases += self._without(build, optimizations)
        self.cases += self._baselines(baselines or {})

    # What is measured

    def _ladder(
        self, build: Build, optimizations: Sequence[Transform], beyond: Sequence[Transform]
    ) -> list[Case]:
        stacks = [list(optimizations[:count]) for count in range(len(optimizations) + 1)]
        stacks += [[*optimizations, transform] for transform in beyond]
        cases = []
        for stack in stacks:
            name = stack[-1].__name__ if stack else "fp32"
            if name in self.config.optimizations:
                cases += [Case(name, batch, build, stack, stack[-1:]) for batch in self.batch_sizes]
        return cases

    def _filled(
        self, build: Build, optimizations: Sequence[Transform], beyond: Sequence[Transform]
    ) -> list[Case]:
        """The fully optimized step with the chunked loss, at the batch size that fills the memory."""
        if not self.config.fill_memory:
            return []
        memory = torch.cuda.get_device_properties(0).total_memory if self.on_gpu else 0
        chunked = [transform for transform in beyond if transform.__name__ == "chunked_loss"]
        stack = [*optimizations, *chunked]
        return [Case(FILLED, filling_batch(self.config, memory), build, stack, chunked)]

    def _without(self, build: Build, optimizations: Sequence[Transform]) -> list[Case]:
        cases = []
        for left_out in optimizations:
            if left_out.__name__ in self.config.ablations:
                name = f"without_{left_out.__name__}"
                stack = [transform for transform in optimizations if transform is not left_out]
                cases += [Case(name, batch, build, stack, (), left_out) for batch in self.batch_sizes]
        return cases

    def _baselines(self, baselines: Mapping[str, tuple[Build, Sequence[Transform]]]) -> list[Case]:
        cases = []
        for name, (build, stack) in baselines.items():
            if name in self.config.baselines:
                for batch in self.batch_sizes:
                    cases.append(Case(name, batch, build, stack, stack, is_baseline=True))
        return sorted(cases, key=lambda case: case.name == KEEPS_MEMORY)

    # The loop

    def measure(self) -> None:
        """Measure everything. If it is interrupted, :attr:`tables` hold what was measured until then."""
        first = [case for case in self.cases if case.name != KEEPS_MEMORY]
        last = [case for case in self.cases if case.name == KEEPS_MEMORY]
        of_trained_weights = any(case.name == "fp8" for case in first)
        for case in first:
            if of_trained_weights and case.name not in self.config.optimizations:
                self.compare_trained_gradients()
                of_trained_weights = False
            self.time(case)
        if of_trained_weights:
            self.compare_trained_gradients()
        for case in first:
            self.visit(case, self.profile_steps)
        for case in last:
            self.visit(case, self.first_step, self.time_steps, self.profile_steps)
            show(case)
        self.refuse_unchanged()
        self.repeat_impossible()
        self.measure_limits()

    def time(self, case: Case) -> None:
        self.visit(case, self.first_step, self.time_eager)
        if "wall_ms" not in case.row:
            self.visit(case, self.time_steps)  # loaded again, because compiling leaves memory in pieces
        show(case)

    def time_eager(self, case: Case, subject: TrainedSubject) -> None:
        makes_own_step = subject.loss is None  # it compiles, and holds the graph of its first step
        if not subject.compiles and not makes_own_step:
            self.time_steps(case, subject)

    def visit(self, case: Case, *parts: Callable[[Case, TrainedSubject], None]) -> None:
        """Load a case's weights, do these parts, and free them. If that fails, the row says why."""
        if case.row["status"] != "ok":
            return
        failed: dict[Any, tuple[str, str]] = {}
        try:
            with measure.out_of_memory(failed, "case", f"measuring {case.name}"):
                self.do_loaded(case, parts)
        except (Unsupported, torch._dynamo.exc.BackendCompilerFailed) as error:
            failed["case"] = "unsupported", measure.error_text(error)
        except (RuntimeError, TraceError, torch._dynamo.exc.Unsupported) as error:  # a kernel, a graph
            failed["case"] = "failed", measure.error_text(error)
        if not failed:
            return
        status, reason = failed["case"]
        if "wall_ms" in case.row:
            status, reason = "ok", f"not profiled: {reason}"
        case.row |= {"status": status, "reason": reason}
        measure.release(self.device, after_error=True)
        measure.synchronizer(self.device)()  # an error that has lost the GPU ends the run here

    def do_loaded(self, case: Case, parts: Sequence[Callable[[Case, TrainedSubject], None]]) -> None:
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
            Unsupported: a transform that the case needs doesn't apply.
        """
        measure.allow_recompiling(RECOMPILES)
        if case.left_out:  # which must apply to the step that it is missing from
            self.built(case, [*case.transforms, case.left_out], [case.left_out])
        subject, applied = self.built(case, case.transforms, case.needed)
        changing = tuple(each for each in applied if not hasattr(each, "keeps_program"))
        case.applied = tuple(transform.__name__ for transform in applied)
        case.program = case.build, case.batch_size, changing
        program = self.programs.setdefault(case.program, subject)
        if program is not subject:
            subject.share_program(program)
        if program is not subject or case.left_out:
            gc.collect()  # frees the buffers of a model that was built twice
        case.subject, case.compiles = subject, subject.compiles
        case.precision, case.moments = subject.precision, subject.moments
        return subject

    def built(
        self, case: Case, transforms: Sequence[Transform], needed: Sequence[Transform]
    ) -> tuple[TrainedSubject, list[Transform]]:
        """Return the subject without weights, and the transforms that apply.

        Raises:
            Unsupported: one of those needed doesn't apply.
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
        began = default_timer()
        if subject.loss is None:
            subject.step = subject.launch(subject)
            loss_tensor = subject.step()
        else:
            loss_tensor = subject.gradients()
        if case.program not in self.compile_s:
            measure.synchronizer(self.device)()
            self.compile_s[case.program] = default_timer() - began
        loss = loss_tensor.item()
        if subject.compiles:
            case.row["compile_s"] = self.compile_s[case.program]
        if not case.is_baseline:
            self.compare(case, subject, loss)
        with measure.negligible_learning_rate(subject.optimizer):
            subject.optimizer.step()  # compiles its kernel, and makes the moments
        subject.reset()
        moments = measure.storage_bytes([*subject.optimizer.state.values()])
        case.numbers = loss, type(subject.optimizer), moments, subject.launch

    def compare(self, case: Case, subject: TrainedSubject, loss: float) -> None:
        if not case.transforms:
            self.true_gradients[case.batch_size] = loss, numerics.gradients_of(subject)
        truth = self.true_gradients.get(case.batch_size)
        if truth and case.batch_size == self.config.batch_size:
            case.row |= numerics.relative_errors(subject, loss, *truth)

    def compare_trained_gradients(self) -> None:
        """Compare gradients once more after a hundred steps of training, for FP8: freshly drawn weights
        amplify the first block's rounding in any format."""
        batch = self.batch_sizes[0]
        by_name = {case.name: case for case in self.cases if case.batch_size == batch}
        compared = ["fp32", "bf16_moments", "fp8"]
        is_text = self.config.vocab_size >= 256  # the text is bytes
        if not (fp8.has_fp8(self.device) and is_text and {*compared} <= by_name.keys()):
            return
        text = text_batches(TRAINED_STEPS + 1, batch, self.config.context_length)
        weights: dict[str, torch.Tensor] = {}
        truth: list[Any] = []

        def train(case: Case, subject: TrainedSubject) -> None:
            training.losses(subject, text[:-1], self.config.seed)
            weights.update({name: weight.cpu() for name, weight in subject.weights().items()})

        def compare(case: Case, subject: TrainedSubject) -> None:
            loss, gradients = numerics.gradient_at(subject, weights, text[-1])
            if case.name == "fp32":
                truth.extend((loss, gradients))
            elif truth:
                errors = numerics.relative_errors(subject, loss, *truth)
                case.row["trained_gradient_error"] = errors["gradient_error"]

        self.visit(by_name["bf16_moments"], train)
        for name in compared:
            self.visit(by_name[name], compare)

    # Time

    @contextmanager
    def launched(self, subject: TrainedSubject) -> Iterator[None]:
        """Launch the step, for example as a CUDA graph, with a negligible learning rate meanwhile.

        Raises:
            RuntimeError: the step is a CUDA graph whose learning rate is a number. The graph would keep it.
        """
        subject.step = subject.eager_step  # frees the memory of an earlier graph
        with measure.negligible_learning_rate(subject.optimizer):  # recording a graph starts with a few steps
            subject.step = subject.launch(subject)
        rates = [group["lr"] for group in subject.optimizer.param_groups]
        if is_launched(subject) and not all(isinstance(rate, Tensor) for rate in rates):
            raise RuntimeError("a CUDA graph needs a learning rate that is a tensor: lr=torch.tensor(...)")
        # the launch may have made another optimizer
        with measure.negligible_learning_rate(subject.optimizer):
            self.learning_rate = measure.learning_rate(subject.optimizer)
            yield

    def settle(self, case: Case, subject: TrainedSubject) -> float:
        """Warm up, on a GPU until the clock has settled; return the milliseconds of one step then."""
        needed = WARMUPS if is_launched(subject) or case.is_baseline else 1
        warmups = max(self.config.warmup_steps, needed)
        step_ms = measure.back_to_back(subject.step, self.device, warmups)[-1]
        if self.on_gpu:
            settling = measure.back_to_back(subject.step, self.device, steps_in(SETTLES_S, step_ms))
            step_ms = location(settling)["median"]
        return step_ms

    def time_steps(self, case: Case, subject: TrainedSubject) -> None:
        """Time steps back to back: the host waits only for the last, as in training. Then train on text."""
        measure.reset_peak_memory(self.device)
        with self.launched(subject):
            self.time_launched(case, subject)
        is_last_batch = case.batch_size == max(self.batch_sizes)
        is_trained = self.config.training_steps and case.name in self.config.optimizations
        if is_trained and is_last_batch and case.name not in self.curves:
            self.curves[case.name] = training.train(self.config, subject, case.name)

    def time_launched(self, case: Case, subject: TrainedSubject) -> None:
        step_ms, steps, row = self.settle(case, subject), self.config.timed_steps, case.row
        if self.on_gpu:
            row["enqueue_ms"], wall_ms = enqueued(subject.step, self.device)
            if step_ms < LONG_MS:
                steps = max(steps, MIN_STEPS, steps_in(STRETCH_S, step_ms))
                if measure.looks_launch_bound(row["enqueue_ms"], wall_ms):  # only their fastest step repeats
                    needed = steps_in(LAUNCH_BOUND_STEPS_S, step_ms)
                    steps = max(steps, min(LAUNCH_BOUND_STEPS, needed))
        row |= stretch(subject.step, self.device, steps) | measure.peak_memory(self.device)
        if self.on_gpu and is_launched(subject):  # it is one CUDA graph already
            row["replayed_ms"] = row["wall_ms"]
        elif self.on_gpu and case.name == EAGER_REPLAYED:
            self.replay(case, subject)

    def replay(self, case: Case, subject: TrainedSubject) -> None:
        """Time an eager step as a CUDA graph, too, to see what its launches cost."""
        with measure.out_of_memory({}, "graph"):
            graph = measure.graph_of(subject.eager_step, subject.reset, WARMUPS)
            settling = steps_in(SETTLES_S, case.row["wall_ms"])
            measure.back_to_back(graph, self.device, settling)
            replays = measure.back_to_back(graph, self.device, MIN_STEPS)
            case.row["replayed_ms"] = location(replays)["median"]

    # Profile

    def profile_steps(self, case: Case, subject: TrainedSubject) -> None:
        """Profile steps back to back. GPU time is of the fastest step; at the power limit, where the clock
        swings, of the median step of a second.

        Raises:
            RuntimeError: the profiler gave nothing.
        """
        row, is_limited = case.row, measure.is_power_limited(case.row)
        with self.launched(subject):
            operations = self.profiled_operations(case, subject, is_limited)
        profiled = measure.median_step(operations) if is_limited else measure.fastest_step(operations)
        row |= measure.gpu_time(profiled)
        row["busy"] = row["gpu_ms"] / row["wall_ms"]
        if self.on_gpu:
            all_ms = [measure.gpu_time_ms(step) for step in measure.complete_steps(operations)]
            row["inconsistent"] = measure.find_inconsistencies(row, all_ms)
        by_kernel = measure.by_name(profiled).assign(optimization=case.name, batch_size=case.batch_size)
        columns = ["optimization", "batch_size", "name", "kernel_category", "count", "gpu_ms"]
        self.kernels[case.name, case.batch_size] = by_kernel[columns]

    def profiled_operations(self, case: Case, subject: TrainedSubject, is_limited: bool) -> pd.DataFrame:
        step_ms = self.settle(case, subject)
        steps = 2 if step_ms > 500 else max(4, steps_in(PROFILED_S, step_ms)) if is_limited else 3
        with measure.capture(self.device) as capture:
            if is_limited:  # starting the profiler was a rest
                measure.back_to_back(subject.step, self.device, steps_in(RESETTLES_S, step_ms))
            for index in range(steps):
                with capture.phases("step", index)("total"):
                    subject.step()
            measure.synchronizer(self.device)()
        if capture.reason:
            raise RuntimeError(capture.reason)
        return capture.operations

    def refuse_unchanged(self) -> None:
        """Refuse a transform after which the step has the same operations, the same first loss, an optimizer
        with as much memory, and the same launch as before it."""
        ladder = [case for case in self.cases if case.name in self.config.optimizations]
        for case in ladder:
            for before in ladder:
                is_before = before.applied == case.applied[:-1] and before.batch_size == case.batch_size
                if case.applied and is_before and self.is_equal(case, before):
                    reason = f"it changes nothing: operations, loss, optimizer and launch are {before.name}'s"
                    case.row = {name: case.row[name] for name in ("optimization", "batch_size")}
                    case.row |= {"status": "failed", "reason": reason}
                    del self.kernels[case.name, case.batch_size]
                    self.curves.pop(case.name, None)
                    print(f"{case.name}, batch {case.batch_size}: {reason}")

    def is_equal(self, case: Case, before: Case) -> bool:
        keys = [(each.name, each.batch_size) for each in (case, before)]
        if any(key not in self.kernels for key in keys):  # one of them wasn't profiled
            return False
        if case.compiles and not self.on_gpu:  # a CPU's profile shows no compiled code
            return False
        counts = [self.kernels[key].set_index("name")["count"].to_dict() for key in keys]
        return counts[0] == counts[1] and case.numbers == before.numbers

    def repeat_impossible(self) -> None:
        for _ in range(measure.TRIES - 1):
            for case in self.cases:
                if case.row.get("inconsistent"):
                    print("once more:", case.name, case.batch_size, case.row["inconsistent"])
                    self.visit(case, self.time_steps, self.profile_steps)
                    show(case)

    # The record

    def measure_limits(self) -> None:
        """Measure the device's rates, with nothing else in its memory."""
        for case in self.cases:
            case.subject = None
        self.programs.clear()
        gc.collect()
        measure.release(self.device)
        self.ceilings = measure.ceilings(self.device) | bounds.fp8_ceiling(self.device)
        self.sustained = bounds.sustained_matmul_rate(self.device)

    def rates(self, case: Case) -> dict[str, float]:
        """Return the throughput, utilization and lower bound of a timed case."""
        row, precision = case.row, case.precision
        shape = self.config.step(batch_size=case.batch_size)
        tflops = step_flops(shape) / row["wall_ms"] / 1e9
        mfu = tflops / measure.sheet_tflops(precision, self.device)
        sheet_mhz = measure.sheet_clock_mhz(precision, self.device)
        return {
            "tokens_per_s": case.batch_size * self.config.context_length / row["wall_ms"] * 1e3,
            "mfu": mfu,
            "mfu_vs_measured_peak": tflops / self.ceilings.get(f"matmul_{precision}", math.nan),
            "mfu_clock_adjusted": mfu * sheet_mhz / row.get("sm_clock_mhz", math.nan),
        } | bounds.lower_bound(shape, precision, case.moments, self.ceilings)

    @property
    def steps(self) -> pd.DataFrame:
        """One row per optimization and batch size, in the order of the configuration."""
        without = [f"without_{name}" for name in self.config.ablations]
        names = [*self.config.optimizations, *without, *self.config.baselines]
        order = [(name, batch) for batch in self.batch_sizes for name in names]
        by_key = {(case.name, case.batch_size): case for case in self.cases}
        order += [key for key in by_key if key[0] == FILLED]
        rows = []
        for key in order:
            row = dict(by_key[key].row)
            graph = by_key.get(("cuda_graph", key[1]))
            if key[0] == "compiled_blocks" and graph and "wall_ms" in graph.row:
                row["replayed_ms"] = graph.row["wall_ms"]
            if "wall_ms" in row and self.ceilings:
                row |= self.rates(by_key[key])
            rows.append(row)
        columns = [
            "optimization",
            "batch_size",
            "status",
            "reason",
            *MEASURES,
            *ADDED,
            *LATER,
            "inconsistent",
        ]
        steps = pd.DataFrame(rows, columns=columns)
        steps["inconsistent"] = steps["inconsistent"].astype(object).fillna("").astype(str)
        return steps

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        tables = {"steps": self.steps}
        if self.kernels:
            tables["kernels"] = pd.concat(self.kernels.values(), ignore_index=True)
        if self.curves:
            tables["curves"] = pd.concat(self.curves.values(), ignore_index=True)
        return tables

    @property
    def results(self) -> dict[str, float]:
        """The device's rates and limits as far as they are known, and the learning rate of measured steps."""
        known: dict[str, float | None] = {**self.ceilings, **self.sustained}
        known |= {
            "parameters": parameter_count(self.config),
            "power_limit_w": measure.power_limit_w(),
            "learning_rate": self.learning_rate,
            "sheet_bf16": measure.sheet_tflops("bf16", self.device),
        }
        return {name: value for name, value in known.items() if value is not None and not math.isnan(value)}


def filling_batch(config: Config, memory_bytes: float) -> int:
    """Return the largest multiple of four sequences whose fully optimized step needs at most
    :data:`FILLING` of the memory by formula, and at least four."""
    batch = 4
    while fully_optimized_bytes(config.step(batch_size=batch + 4, device="cuda")) <= FILLING * memory_bytes:
        batch += 4
    return batch


def is_launched(subject: TrainedSubject) -> bool:
    """Whether the step isn't run kernel by kernel from Python."""
    return subject.step != subject.eager_step


def steps_in(seconds: float, step_ms: float) -> int:
    return min(MAX_STEPS, math.ceil(seconds * 1e3 / step_ms))


def enqueued(step: Step, device: str) -> tuple[float, float]:
    """Return how long the host takes to enqueue a step, and the step's wall time, each alone, in ms."""

    def total(phases: Any) -> None:
        with phases("step"):
            step()

    samples = measure.time_steps(total, 3, 0, device).query("phase == 'total'")
    return samples["enqueue_ms"].median(), samples["wall_ms"].median()


def stretch(step: Step, device: str, steps: int) -> dict[str, Any]:
    """Run steps one after another; return their wall time, and on a GPU the power, energy and clock of the
    very same steps."""
    with measure.PowerMonitor() as monitor:  # reads between naps, in a thread
        times = location(measure.back_to_back(step, device, steps))
    row: dict[str, Any] = {"steps": steps, "wall_ms": times["median"]}
    row |= {f"wall_{name}_ms": times[name] for name in ("mean", "std", "q1", "q3", "min")}
    if device == "cuda":
        row |= {
            "sm_clock_mhz": monitor.sm_clock_mhz,
            "clock_reasons": monitor.clock_reasons,
            "power_w": monitor.power_w,
            "energy_per_step_j": monitor.power_w * monitor.seconds / steps,
        }
    return row


def show(case: Case) -> None:
    wall = number(case.row.get("wall_ms", math.nan), "ms")
    print(f"{case.name}, batch {case.batch_size}: {wall} {case.row['reason']}")
