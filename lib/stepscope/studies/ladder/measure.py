"""All changes of one shape in one process: time, memory, power, and whether the gradients agree.

Under the profiler launches take longer, and stay so afterwards: so every change is timed first, then
captured. Weights are there only while a change is measured. What is compiled is compiled outside of the GPU's
turn.
"""
import gc
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor

from stepscope.step.accounting import last_step_bytes
from stepscope.step.ceilings import measure_ceilings, sheet_tflops
from stepscope.step.flops import parameter_count, step_flops
from stepscope.step.stats import location
from stepscope.step.training_step import out_of_memory_names, release
from stepscope.step.turn import turn
from stepscope.step.watch import highest_clock_mhz
from stepscope.studies.ladder import bounds
from stepscope.studies.ladder.clocks import back_to_back, capture, steps_in, watched
from stepscope.studies.ladder.config import CHANGES, FILLED, MEASURES, Config
from stepscope.studies.ladder.trainer import (
    COMPILED,
    WARMUPS,
    Program,
    Trainer,
    Unsupported,
    captured,
    changes_of,
    precision_of,
)
from stepscope.studies.ladder.training import train
from stepscope.traces.attribution import TraceError
from stepscope.traces.in_process import by_name, gpu_time, operations_of, quickest, short_reason

BURST_S, CAPTURED_S = 0.4, 0.1  # a GPU's steps are timed, and captured, for at least so long
COMPARED = 2**18  # elements of a tensor's gradient that are compared with fp32's
FILL = 0.92  # of the GPU's memory, by the formula of what a step needs
KERNELS = ["change", "batch_size", "name", "family", "count", "gpu_ms"]
STEPS = ["change", "batch_size", "status", "reason", *MEASURES]
GRAPHS_PEER = "hugging_face_graphs"  # whose graphs keep their memory: it comes last


@contextmanager
def compiler_cache(device: str) -> Iterator[None]:
    """An empty folder for compiled code, so that what compiling takes does not depend on what ran before; on
    a CPU the user's own."""
    if device != "cuda":
        yield
        return
    with TemporaryDirectory(prefix="stepscope-", ignore_cleanup_errors=True) as folder, patch.dict(
            os.environ, TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton"):
        yield


def sampled(gradient: Tensor) -> Tensor:
    """At most :data:`COMPARED` elements of a gradient, evenly spread over it, in the host's memory."""
    flat = gradient.detach().flatten()
    return flat[:: -(-flat.numel() // COMPARED)].float().cpu()


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: sampled(parameter.grad) for name, parameter in trainer.named.items()
            if parameter.grad is not None}


def off(trainer: Trainer, loss: float, reference: tuple[float, dict[str, Tensor]]) -> dict[str, float]:
    """How far loss and gradient are from fp32's, relative (the gradient's norm); of a large tensor a sample
    stands for all of it."""
    expected_loss, expected = reference
    missed, whole = 0.0, 0.0
    for name, own in gradients_of(trainer).items():
        weight = trainer.program.shapes[name].numel() / own.numel()
        missed += weight * (own - expected[name]).square().sum().item()
        whole += weight * expected[name].square().sum().item()
    return {"loss_off": abs(loss / expected_loss - 1), "gradient_off": math.sqrt(missed / whole)}


def filling_batch(config: Config, memory_bytes: int) -> int:
    """The largest multiple of four whose step needs at most :data:`FILL` of the memory, by formula."""
    batch = 4
    while last_step_bytes(config.step(batch_size=batch + 4, device="cuda")) <= FILL * memory_bytes:
        batch += 4
    return batch


def reason(error: Exception) -> str:
    """An error's own words on one line, without paths of this machine."""
    return re.sub(r"/\S*/", "", short_reason(error) or type(error).__name__)


@dataclass
class Cell:
    """One change at one batch, and what is known of it."""

    name: str
    batch: int
    row: dict[str, Any]
    profiler: torch.profiler.profile | None = None  # until its trace is read


@dataclass
class Ladder:
    """What is measured of one configuration, as it comes."""

    config: Config
    programs: dict[Any, Program] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    kernels: list[pd.DataFrame] = field(default_factory=list)  # a table a change, as the next
    curves: list[pd.DataFrame] = field(default_factory=list)
    reference: tuple[float, dict[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        config = self.config
        for batch in config.batches or [config.batch_size]:
            self.cells += [self.cell(name, batch) for name in (*config.changes, *config.peers)]
        if config.fill:
            memory = torch.cuda.get_device_properties(0).total_memory if config.device == "cuda" else 0
            self.cells.append(self.cell(FILLED, filling_batch(config, memory)))

    @staticmethod
    def cell(name: str, batch: int) -> Cell:
        return Cell(name, batch, {"change": name, "batch_size": batch, "status": "ok", "reason": ""})

    def climb(self) -> None:
        """Time every change, then capture every one; the peer whose graphs keep their memory comes last."""
        graphs = [cell for cell in self.cells if cell.name == GRAPHS_PEER]
        others = [cell for cell in self.cells if cell not in graphs]
        for cell in others:
            self.visit(cell, self.first_pass, self.time)
        for cell in others:
            self.visit(cell, self.captured)
        for cell in graphs:
            self.visit(cell, self.first_pass, self.time, self.captured)

    def visit(self, cell: Cell, *parts: Callable[[Cell, Trainer], None]) -> None:
        """Load a change, do these parts, and free it. Where that cannot be, its row says why, and the others
        go on. The GPU's turn begins at once, or where a first pass compiles, after it."""
        if cell.row["status"] != "ok":
            return
        compiles = self.first_pass in parts and bool(COMPILED & changes_of(cell.name))
        status, why = "ok", ""
        try:
            with out_of_memory_names(f"measuring {cell.name}"), ExitStack() as held:
                if not compiles:
                    held.enter_context(turn())
                trainer = Trainer(self.config, cell.name, self.programs, cell.batch)
                held.callback(trainer.unload)
                for part in parts:
                    part(cell, trainer)
                    if compiles and part == self.first_pass:
                        held.enter_context(turn())
            if cell.profiler is not None:
                profiler, cell.profiler = cell.profiler, None
                self.read(cell, profiler)
        except torch.OutOfMemoryError as error:
            status, why = "oom", reason(error)
        except (Unsupported, torch._dynamo.exc.BackendCompilerFailed) as error:
            status, why = "unsupported", reason(error)
        except (RuntimeError, TraceError, torch._dynamo.exc.Unsupported) as error:  # a kernel, a capture
            status, why = "failed", reason(error)
        if status == "ok":
            return
        if "wall_ms" in cell.row:  # timed, and only not captured
            status, why = "ok", f"not captured: {why}"
        cell.row |= {"status": status, "reason": why}
        release(self.config.device, after_error=True)
        if self.config.device == "cuda":
            torch.cuda.synchronize()  # what has lost the device ends the run here

    def first_pass(self, cell: Cell, trainer: Trainer) -> None:
        """Compile, and compare loss and gradients with fp32's."""
        loss = trainer.gradients().item()
        if trainer.program.compiled:
            cell.row["compile_s"] = trainer.program.compile_s
        if cell.name == "fp32":
            self.reference = loss, gradients_of(trainer)
        if self.reference and not trainer.peer and cell.batch == self.config.batch_size:
            cell.row |= off(trainer, loss, self.reference)
        trainer.optimizer.step()  # its kernel is compiled here, and torch's moments are made
        trainer.clear_gradients()

    def warm(self, trainer: Trainer) -> float:
        """Capture, where the change is that, and run until nothing is new; a step's milliseconds."""
        trainer.capture()
        quick = trainer.peer or "cuda_graph" in trainer.changes
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

    def time(self, cell: Cell, trainer: Trainer) -> None:
        config, row, on_gpu = self.config, cell.row, self.config.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        steps = max(config.timed_steps, self.settled(trainer))
        found = location(back_to_back(trainer.step, config.device, steps))
        row |= {"steps": steps, "wall_ms": found["median"], "wall_std_ms": found["std"]}
        row |= watched(trainer.step, config.device, found["median"])
        if on_gpu:
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        self.replay(cell, trainer)
        at_largest = cell.batch == max(config.batches or [config.batch_size])
        if config.training_steps and at_largest and not trainer.peer:
            self.curves.append(train(config, trainer))

    def replay(self, cell: Cell, trainer: Trainer) -> None:
        """The step as one CUDA graph: what it is where that is among its changes; of the last that neither is
        nor is followed by its own graph, captured for this."""
        if self.config.device != "cuda":
            return
        if "cuda_graph" in trainer.changes:
            cell.row["replayed_ms"] = cell.row["wall_ms"]
        elif cell.name == "fused":
            with suppress(torch.OutOfMemoryError):
                graph = captured(trainer.plain_step, trainer.clear_gradients)
                times = back_to_back(graph, "cuda", self.config.timed_steps)
                cell.row["replayed_ms"] = location(times)["median"]

    def captured(self, cell: Cell, trainer: Trainer) -> None:
        burst = self.settled(trainer)
        steps = max(2 if burst == 1 else 3, math.ceil(burst * CAPTURED_S / BURST_S))
        cell.profiler = capture(trainer.step, self.config.device, steps)

    def read(self, cell: Cell, profiler: torch.profiler.profile) -> None:
        """Read a capture: GPU time and operations into the row; of each kernel its number and time a step.
        Before the next capture begins: after that, torch no longer has the GPU's part of this one."""
        found = quickest(operations_of(profiler))
        cell.row |= gpu_time(found)
        cell.row["busy"] = cell.row["gpu_ms"] / cell.row["wall_ms"]
        self.kernels.append(by_name(found).assign(change=cell.name, batch_size=cell.batch)[KERNELS])

    def steps(self, ceilings: dict[str, float], limit_w: float) -> pd.DataFrame:
        """A row a change and batch, with its rates and bounds."""
        rows = [cell.row for cell in self.cells]
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
        moments = "bf16" if "bf16_moments" in changes_of(row["change"]) else "fp32"
        return {
            "tokens_per_s": row["batch_size"] * config.context_length / row["wall_ms"] * 1e3,
            "mfu": mfu,
            "mfu_measured": tflops / ceilings.get(f"matmul_{precision}", math.nan),
            "mfu_at_clock": mfu * highest_clock_mhz() / row.get("sm_clock_mhz", math.nan),
            "energy_ms": row.get("step_j", math.nan) / limit_w * 1e3,
        } | bounds.lower_bound(config, moments, ceilings)


def measure_ladder(config: Config) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
    """The study's tables (see tables.py) and results: this device's ceilings and power limit."""
    with compiler_cache(config.device), warnings.catch_warnings():
        for message in ("IProgress not found", "TensorFloat32 tensor cores"):  # said by other programs
            warnings.filterwarnings("ignore", message)
        ladder = Ladder(config)
        ladder.climb()
        gc.collect()
        release(config.device)
        with turn():
            ceilings = measure_ceilings(config.device).set_index("ceiling")["value"].to_dict()
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
    return (f"batch {first['batch_size']}: {first['change']} {first['wall_ms']:.4g} ms,"
            f" {last['change']} {last['wall_ms']:.4g} ms a step")
