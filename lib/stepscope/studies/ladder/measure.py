"""All optimizations of one shape in one process: time, memory, power, and whether the gradients agree.

Under the profiler launches take longer, and stay so afterwards: so every one is timed first, then captured.
Weights are there only while one is measured. What is compiled is compiled outside of the exclusive section.
"""
import gc
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from stepscope import measure as room
from stepscope.measure import back_to_back, highest_clock_mhz, sheet_tflops
from stepscope.model.fit import last_step_bytes
from stepscope.model.flops import parameter_count, step_flops
from stepscope.model.training_step import release
from stepscope.optimizations.trainer import COMPILED, WARMUPS, Program, Trainer, Unsupported
from stepscope.stats import location
from stepscope.studies.ladder import bounds
from stepscope.studies.ladder.config import (
    CHANGES,
    FILLED,
    MEASURES,
    Config,
    optimizations_of,
    precision_of,
)
from stepscope.studies.ladder.training import train
from stepscope.traces.attribution import TraceError
from stepscope.traces.captured import CaptureError

BURST_S, CAPTURED_S = 0.4, 0.1  # a GPU's steps are timed, and captured, for at least so long
POWER_S = 0.5  # the energy counter is brought up to date ten times a second
MOST_STEPS = 300  # of a burst
COMPARED = 2**18  # elements of a tensor's gradient that are compared with fp32's
FILL = 0.92  # of the GPU's memory, by the formula of what a step needs
KERNELS = ["change", "batch_size", "name", "family", "count", "gpu_ms"]
STEPS = ["change", "batch_size", "status", "reason", *MEASURES]
GRAPHS_BASELINE = "hugging_face_graphs"  # its graphs keep their memory: it comes last


def trainer_of(config: Config, name: str, programs: dict[Any, Program], batch: int | None = None) -> Trainer:
    """The step of this name in the ladder.

    Raises:
        Unsupported, torch.OutOfMemoryError: as Trainer.
    """
    return Trainer(config, optimizations_of(name), programs, batch, required=name)


def steps_in(seconds: float, step_ms: float) -> int:
    return min(MOST_STEPS, math.ceil(seconds * 1e3 / step_ms))


def measure_power(step: Callable[[], Any], device: str, step_ms: float) -> dict[str, float]:
    """The step kept up for half a second: ``sm_clock_mhz``, ``power_w``, ``step_j``; empty on a CPU."""
    if device != "cuda":
        return {}
    steps = steps_in(POWER_S, step_ms)
    with room.PowerMonitor() as monitor:
        times = back_to_back(step, device, steps)
    step_s = sum(times) / steps / 1e3
    return {"sm_clock_mhz": monitor.sm_clock_mhz, "power_w": monitor.power_w,
            "step_j": monitor.power_w * step_s}


def sampled(gradient: Tensor) -> Tensor:
    """At most :data:`COMPARED` elements of a gradient, evenly spread over it, in the host's memory."""
    flat = gradient.detach().flatten()
    return flat[:: -(-flat.numel() // COMPARED)].float().cpu()


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: sampled(parameter.grad) for name, parameter in trainer.named.items()
            if parameter.grad is not None}


def relative_errors(trainer: Trainer, loss: float, reference: tuple[float, dict[str, Tensor]]
                    ) -> dict[str, float]:
    """How far loss and gradient are from fp32's, relative (the gradient's norm); of a large tensor a sample
    stands for all of it."""
    expected_loss, expected = reference
    squared_error, squared_norm = 0.0, 0.0
    for name, own in gradients_of(trainer).items():
        weight = trainer.program.shapes[name].numel() / own.numel()
        squared_error += weight * (own - expected[name]).square().sum().item()
        squared_norm += weight * expected[name].square().sum().item()
    return {"loss_off": abs(loss / expected_loss - 1),
            "gradient_off": math.sqrt(squared_error / squared_norm)}


def filling_batch(config: Config, memory_bytes: int) -> int:
    """The largest multiple of four whose step needs at most :data:`FILL` of the memory, by formula."""
    batch = 4
    while last_step_bytes(config.step(batch_size=batch + 4, device="cuda")) <= FILL * memory_bytes:
        batch += 4
    return batch


@dataclass
class Case:
    """One optimization (or baseline) at one batch, and what is known of it."""

    name: str
    batch: int
    row: dict[str, Any]
    capture: room.capture | None = None  # until it is read


@dataclass
class Ladder:
    """What is measured of one configuration, as it comes."""

    config: Config
    programs: dict[Any, Program] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    kernels: list[pd.DataFrame] = field(default_factory=list)  # a table a case, as the next
    curves: list[pd.DataFrame] = field(default_factory=list)
    reference: tuple[float, dict[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        config = self.config
        for batch in config.batches or [config.batch_size]:
            self.cases += [self.case(name, batch) for name in (*config.changes, *config.peers)]
        if config.fill:
            memory = torch.cuda.get_device_properties(0).total_memory if config.device == "cuda" else 0
            self.cases.append(self.case(FILLED, filling_batch(config, memory)))

    @staticmethod
    def case(name: str, batch: int) -> Case:
        return Case(name, batch, {"change": name, "batch_size": batch, "status": "ok", "reason": ""})

    def run(self) -> None:
        """Time every case, then capture every one; the baseline whose graphs keep their memory comes last."""
        graphs = [case for case in self.cases if case.name == GRAPHS_BASELINE]
        others = [case for case in self.cases if case not in graphs]
        for case in others:
            self.visit(case, self.first_pass, self.time)
        for case in others:
            self.visit(case, self.captured)
        for case in graphs:
            self.visit(case, self.first_pass, self.time, self.captured)

    def visit(self, case: Case, *parts: Callable[[Case, Trainer], None]) -> None:
        """Load a case, do these parts, and free it. Where that cannot be, its row says why, and the others go
        on. The exclusive section begins at once, or where a first pass compiles, after it."""
        if case.row["status"] != "ok":
            return
        failed: dict[Hashable, tuple[str, str]] = {}
        try:
            with room.out_of_memory(failed, "case", f"measuring {case.name}"), ExitStack() as opened:
                self.do(parts, case, opened)
            if case.capture is not None:
                capture, case.capture = case.capture, None
                self.read(case, capture)
        except (Unsupported, torch._dynamo.exc.BackendCompilerFailed) as error:
            failed["case"] = "unsupported", room.error_text(error)
        except (RuntimeError, TraceError, torch._dynamo.exc.Unsupported) as error:  # a kernel, a capture
            failed["case"] = "failed", room.error_text(error)
        if not failed:
            return
        status, why = failed["case"]
        if "wall_ms" in case.row:  # timed, and only not captured
            status, why = "ok", f"not captured: {why}"
        case.row |= {"status": status, "reason": why}
        release(self.config.device, after_error=True)
        room.synchronizer(self.config.device)()  # what has lost the device ends the run here

    def do(self, parts: Sequence[Callable[[Case, Trainer], None]], case: Case, opened: ExitStack) -> None:
        compiles = self.first_pass in parts and bool(COMPILED & optimizations_of(case.name))
        if not compiles:
            opened.enter_context(room.exclusive())
        trainer = trainer_of(self.config, case.name, self.programs, case.batch)
        opened.callback(trainer.unload)
        for part in parts:
            part(case, trainer)
            if compiles and part == self.first_pass:
                opened.enter_context(room.exclusive())

    def first_pass(self, case: Case, trainer: Trainer) -> None:
        """Compile, and compare loss and gradients with fp32's."""
        loss = trainer.gradients().item()
        if trainer.program.compiled:
            case.row["compile_s"] = trainer.program.compile_s
        if case.name == "fp32":
            self.reference = loss, gradients_of(trainer)
        if self.reference and not trainer.baseline and case.batch == self.config.batch_size:
            case.row |= relative_errors(trainer, loss, self.reference)
        trainer.optimizer.step()  # its kernel is compiled here, and torch's moments are made
        trainer.clear_gradients()

    def warm(self, trainer: Trainer) -> float:
        """Capture, where the change is that, and run until nothing is new; a step's milliseconds."""
        trainer.capture()
        quick = trainer.baseline or "cuda_graph" in trainer.optimizations
        warmups = max(self.config.warmup_steps, WARMUPS if quick else 1)
        return back_to_back(trainer.step, self.config.device, warmups)[-1]

    def settled(self, trainer: Trainer) -> int:
        """Warm up, and on a GPU go on until the power cap has settled the clock: in so many steps, which last
        for BURST_S; none on a CPU."""
        step_ms = self.warm(trainer)
        if self.config.device != "cuda":
            return 0
        times = back_to_back(trainer.step, "cuda", steps_in(BURST_S, step_ms))
        return steps_in(BURST_S, location(times)["median"])

    def time(self, case: Case, trainer: Trainer) -> None:
        config, row = self.config, case.row
        if config.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps = max(config.timed_steps, self.settled(trainer))
        found = location(back_to_back(trainer.step, config.device, steps))
        row |= {"steps": steps, "wall_ms": found["median"], "wall_std_ms": found["std"]}
        row |= measure_power(trainer.step, config.device, found["median"]) | room.peak_memory(config.device)
        self.replay(case, trainer)
        at_largest = case.batch == max(config.batches or [config.batch_size])
        if config.training_steps and at_largest and not trainer.baseline:
            self.curves.append(train(config, trainer, case.name))

    def replay(self, case: Case, trainer: Trainer) -> None:
        """The step as one CUDA graph: what it is where that is among its optimizations; of the last that
        neither is nor is followed by its own graph, captured for this."""
        if self.config.device != "cuda":
            return
        if "cuda_graph" in trainer.optimizations:
            case.row["replayed_ms"] = case.row["wall_ms"]
        elif case.name == "fused":
            with room.out_of_memory({}, "graph"):
                graph = room.graph_of(trainer.plain_step, trainer.clear_gradients, WARMUPS)
                times = back_to_back(graph, "cuda", self.config.timed_steps)
                case.row["replayed_ms"] = location(times)["median"]

    def captured(self, case: Case, trainer: Trainer) -> None:
        """Capture some steps, each waited for and a range of its own."""
        burst, synchronize = self.settled(trainer), room.synchronizer(self.config.device)
        with room.capture(self.config.device) as capture:
            for number in range(max(2 if burst == 1 else 3, math.ceil(burst * CAPTURED_S / BURST_S))):
                with capture.phases("step", number)("whole"):
                    trainer.step()
                    synchronize()
        case.capture = capture

    def read(self, case: Case, capture: room.capture) -> None:
        """Read a capture: GPU time and operations into the row; of each kernel its number and time a step.
        Before the next capture begins: after that, torch no longer has the GPU's part of this one."""
        found = room.quickest_step(capture.operations)
        if capture.reason:
            raise CaptureError(capture.reason)
        case.row |= room.gpu_time(found)
        case.row["busy"] = case.row["gpu_ms"] / case.row["wall_ms"]
        self.kernels.append(room.by_name(found).assign(change=case.name, batch_size=case.batch)[KERNELS])

    def steps(self, ceilings: dict[str, float], limit_w: float) -> pd.DataFrame:
        """A row a case, with its rates and bounds."""
        rows = [case.row for case in self.cases]
        named = {(row["change"], row["batch_size"]): row for row in rows}
        for row in rows:
            after = named.get(("cuda_graph", row["batch_size"]), {})
            if row["change"] == "blocks" and "wall_ms" in after:
                row["replayed_ms"] = after["wall_ms"]
            if "wall_ms" in row:
                row |= self.rates(row, ceilings, limit_w)
        return pd.DataFrame(rows, columns=STEPS)

    def rates(self, row: dict[str, Any], ceilings: dict[str, float], limit_w: float) -> dict[str, float]:
        config = self.config.step(batch_size=row["batch_size"])
        precision = precision_of(row["change"])
        tflops = step_flops(config) / row["wall_ms"] / 1e9
        mfu = tflops / sheet_tflops(precision, config.device)
        moments = "bf16" if "bf16_moments" in optimizations_of(row["change"]) else "fp32"
        return {
            "tokens_per_s": row["batch_size"] * config.context_length / row["wall_ms"] * 1e3,
            "mfu": mfu,
            "mfu_measured": tflops / ceilings.get(f"matmul_{precision}", math.nan),
            "mfu_at_clock": mfu * highest_clock_mhz() / row.get("sm_clock_mhz", math.nan),
            "energy_ms": row.get("step_j", math.nan) / limit_w * 1e3,
        } | bounds.lower_bound(config, moments, ceilings)


def measure_ladder(config: Config) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
    """The study's tables (see tables.py) and results: this device's ceilings and power limit."""
    cache = room.fresh_compiler_cache() if config.device == "cuda" else nullcontext()
    with cache, warnings.catch_warnings():
        for message in ("IProgress not found", "TensorFloat32 tensor cores"):  # said by other programs
            warnings.filterwarnings("ignore", message)
        ladder = Ladder(config)
        ladder.run()
        gc.collect()
        release(config.device)
        with room.exclusive():
            ceilings = room.ceilings(config.device)
            kept_up = bounds.kept_up(config.device)
    limit_w = bounds.power_limit_w(config.device)
    tables = {"steps": ladder.steps(ceilings, limit_w)} | {
        name: pd.concat(frames, ignore_index=True)
        for name, frames in {"kernels": ladder.kernels, "curves": ladder.curves}.items() if frames}
    results = ceilings | kept_up | {"parameters": parameter_count(config), "power_limit_w": limit_w,
                                    "sheet_bf16": sheet_tflops("bf16", config.device)}
    return tables, {name: value for name, value in results.items() if not math.isnan(value)}


def finding(steps: pd.DataFrame) -> str:
    """One sentence for a sweep's progress."""
    timed = steps[steps["wall_ms"].notna()]
    if timed.empty:
        return "no change could be timed"
    timed = timed[timed["batch_size"] == timed["batch_size"].iloc[0]]
    first, last = timed.iloc[0], timed[timed["change"].isin(CHANGES)].iloc[-1]
    ends = dict.fromkeys(f"{row['change']} {row['wall_ms']:.4g} ms" for row in (first, last))
    return f"batch {first['batch_size']}: {', '.join(ends)} a step"
