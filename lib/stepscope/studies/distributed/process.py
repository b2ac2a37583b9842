"""Run one rank, which torchrun starts as ``stepscope.studies.distributed.process FOLDER CONFIG NAMES``.

The rank times all strategies and then profiles them, because launches stay slower once a profiler has run. For
each strategy, rank 0 writes ``<name>.json``, and every rank writes its profile. An error ends the process, because
a rank that fails leaves the other ranks in the middle of a collective. The launcher then restarts the ranks for
the remaining measurements.
"""

import gc
import json
import os
import re
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from timeit import default_timer
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepscope.files import write_text_durably
from stepscope.measure.graph import graph_of
from stepscope.measure.oom import error_text
from stepscope.measure.power import PowerMonitor
from stepscope.measure.profiler import profiled
from stepscope.measure.timing import noop
from stepscope.model.training_step import is_out_of_memory
from stepscope.optimizations import distributed_step
from stepscope.optimizations.distributed_step import Batch, Distributed, communication_only, compile_blocks
from stepscope.optimizations.fast_step import Model
from stepscope.studies.distributed.config import STRATEGIES, Config, Strategy
from stepscope.studies.distributed.tables import KINDS

COLLECTIVES, NUMERICS = "collectives", "numerics"  # names of measurements that are not strategies
PROFILE = ".profile"  # suffix of the name of a strategy's profile
ERROR, PLACE = "error", "place"  # names of files of each rank; the suffix is the rank
STRATEGIES_FILE = "strategies.py"
MAX_STEPS, TIMED_MS = 50, 1500  # on a GPU, steps are timed for this many ms, but at most this many steps
POWER_MS = 2000  # in a shorter time, the energy counter would change too few times
PROFILED_STEPS = 3
GIB, MIB = 2**30, 2**20


class Memory:
    """Hooks that record the peak memory before and during the optimizer's step.

    On a CPU, the peaks are NaN.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.highest_gib = 0.0
        self.restart()
        self.is_on = False  # off while steps are timed
        self.depth = 0  # depth of nested optimizers: the ZeRO optimizer contains an AdamW
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, *_: object) -> None:
        if self.depth == 0:
            self.note("peak_backward_gib")
        self.depth += 1

    def _after(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.note("peak_optimizer_gib")

    def note(self, part: str) -> None:
        """Record the peak since the previous call as the peak of this part of the step."""
        if self.is_on and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
            self.peaks[part] = torch.cuda.max_memory_allocated() / GIB
            self.highest_gib = max(self.highest_gib, self.peaks[part])
            torch.cuda.reset_peak_memory_stats()

    def restart(self) -> None:
        self.peaks = {"peak_backward_gib": np.nan, "peak_optimizer_gib": np.nan}
        self.highest_gib = 0.0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


class Rank:
    """The measurements that one rank makes, and the state that they share."""

    def __init__(self, folder: Path, config: Config):
        self.folder, self.config = folder, config
        self.device = distributed_step.start_process_group(for_graph=True)
        self.on_gpu = self.device.type == "cuda"
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.memory = Memory()
        self.functions = vars(distributed_step) | runpy.run_path(str(folder / STRATEGIES_FILE))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def build(self, strategy: Strategy, precision: str = "bf16") -> tuple[Model, Batch]:
        """Build the model, which is the same on all ranks, and this rank's batch of tokens."""
        config = self.config
        torch.manual_seed(config.seed)
        shape = config.d_model, config.d_ff, config.num_layers, config.num_heads
        with self.device:
            model = Model(*shape, config.vocab_size, config.context_length)
            tokens, targets = self.tokens(self.rank)
        batch = Batch(tokens, targets, precision)
        if strategy.is_compiled and config.compile == "blocks":
            compile_blocks(model)
        return model, batch

    def tokens(self, rank: int) -> torch.Tensor:
        """Return a rank's tokens and targets as one tensor, (2, B, T)."""
        config = self.config
        torch.manual_seed(config.seed + 1 + rank)
        shape = 2, config.batch_size, config.context_length
        return torch.randint(config.vocab_size, shape, device=self.device)

    def apply(self, strategy: Strategy, model: Model, batch: Batch) -> Distributed:
        return self.functions[strategy.function](model, batch, **strategy.options)

    def agree(self, count: int) -> int:
        """Return rank 0's count on every rank, so that all ranks run the same number of steps."""
        counts = torch.tensor([count], device=self.device)
        dist.broadcast(counts, 0)
        return int(counts.item())

    def timed(self, step: Callable[[], object], steps: int) -> tuple[list[float], list[float]]:
        """Run a number of steps; return each step's wall time and enqueue time in ms."""
        wall_ms, enqueue_ms = [], []
        dist.barrier()
        for _ in range(steps):
            self.synchronize()
            start = default_timer()
            step()
            enqueue_ms.append((default_timer() - start) * 1e3)
            self.synchronize()
            wall_ms.append((default_timer() - start) * 1e3)
        return wall_ms, enqueue_ms

    def steps_within(self, milliseconds: float, step_ms: float) -> int:
        return self.agree(int(milliseconds / step_ms) + 1)

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank."""
        values = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def write(self, name: str, result: Any) -> None:
        """Write a measurement's result once all ranks have finished it."""
        dist.barrier()
        if self.rank == 0:
            write_text_durably(self.folder / f"{name}.json", json.dumps(result))
        dist.barrier()

    # -- strategies ----------------------------------------------------------------------------------------------

    def measure(self, name: str) -> None:
        """Measure a strategy's memory, wall time and power, and the time of its communication alone."""
        strategy = STRATEGIES[name]
        self.memory.restart()
        self.memory.is_on = True
        model, batch = self.build(strategy)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        built_gib = torch.cuda.memory_allocated() / GIB if self.on_gpu else np.nan
        distributed = self.apply(strategy, model, batch)
        for _ in range(self.config.warmup_steps):
            distributed.step()
        self.synchronize()
        self.memory.is_on = False
        warm_ms, _ = self.timed(distributed.step, 3)
        steps = self.config.timed_steps
        if self.on_gpu:
            steps = min(max(steps, self.steps_within(TIMED_MS, float(np.median(warm_ms)))), MAX_STEPS)
        wall_ms, enqueue_ms = self.timed(distributed.step, steps)
        result = {
            "parameters": parameters,
            "wall_ms": wall_ms,
            "enqueue_ms": enqueue_ms,
            "built_gib": built_gib,
        }
        result |= self.memory.peaks | self.power(distributed.step, float(np.median(wall_ms)))
        if self.on_gpu:
            result["peak_gib"] = max(self.memory.highest_gib, torch.cuda.max_memory_allocated() / GIB)
            result["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        result |= self.communication(distributed, strategy.is_graph)
        self.write(name, self.gathered(result))

    def power(self, step: Callable[[], object], step_ms: float) -> dict[str, float]:
        if not self.on_gpu:
            return {}
        steps = self.steps_within(POWER_MS, step_ms)
        with PowerMonitor() as monitor:
            start = default_timer()
            for _ in range(steps):
                step()
            self.synchronize()
            ms = (default_timer() - start) * 1e3
        powers = {"power_w": monitor.power_w, "sm_clock_mhz": monitor.sm_clock_mhz}
        return powers | {"power_step_ms": ms / steps}

    def communication(self, distributed: Distributed, is_graph: bool) -> dict[str, Any]:
        """Time the step's collectives without the rest of the step, and count the bytes that they transfer.

        If the step is a CUDA graph, they run in one, too, because the host might launch them too slowly.
        """
        messages = distributed.messages()
        if not messages:
            return {"communication_only_ms": [], "messages": 0, "message_gib": 0.0}
        step = communication_only(messages, self.device)
        if is_graph:
            step = graph_of(step, noop, warmups=1)
        for _ in range(3):
            step()
        wall_ms, _ = self.timed(step, self.config.timed_steps)
        gib = sum(message.bytes for message in messages) / GIB
        return {"communication_only_ms": wall_ms, "messages": len(messages), "message_gib": gib}

    def profile(self, name: str) -> None:
        """Profile a few steps of a strategy.

        The first step isn't marked with a range, because it may be slow, and because the ranks' profilers don't
        start at the same time.
        """
        strategy = STRATEGIES[name]
        distributed = self.apply(strategy, *self.build(strategy))
        for _ in range(self.config.warmup_steps):
            distributed.step()
        self.synchronize()
        step = distributed.step
        with profiled() as profiler:
            step()
            self.synchronize()
            dist.barrier()
            self.synchronize()
            for number in range(PROFILED_STEPS):
                with torch.profiler.record_function(f"step {number}"):
                    step()
                    self.synchronize()
        profiler.export_chrome_trace(str(self.folder / f"{name}.rank{self.rank}.trace.json"))
        self.write(f"{name}{PROFILE}", {})

    # -- collectives and numerics --------------------------------------------------------------------------------

    def collectives(self) -> None:
        """Time each kind and size of collective by itself, in series of 20, which run in a CUDA graph on GPUs."""
        sizes_mib = (1, 4, 16, 64, 256, 1024) if self.on_gpu else (1, 4)
        rows = []
        for kind in KINDS:
            for mib in sizes_mib:
                message = distributed_step.Message(kind, mib * MIB // 4, torch.float32)
                step = communication_only([message] * 20, self.device)
                if self.on_gpu:
                    step = graph_of(step, noop, warmups=1)
                step()
                wall_ms, _ = self.timed(step, 5)
                rows.append({"kind": kind, "mib": mib, "time_ms": float(np.median(wall_ms)) / 20})
        self.write(COLLECTIVES, rows)

    def numerics(self) -> None:
        """Compare each measured strategy's loss and gradients with those of gradient accumulation on one GPU.

        The GPU accumulates gradients over the batches of all ranks.
        """
        torch.set_float32_matmul_precision("highest")
        rows = []
        for precision in ("fp32", "bf16"):
            expected_loss, expected = self.accumulated(precision)
            for name in self.config.names:
                strategy = STRATEGIES[name]
                has_run = (self.folder / f"{name}.json").exists()
                if has_run and strategy.control:
                    errors = self.errors(strategy, precision, expected_loss, expected)
                    rows.append({"strategy": name, "compared_in": precision} | errors)
                    release(self.device)
        self.write(NUMERICS, rows)

    def errors(
        self, strategy: Strategy, precision: str, expected_loss: torch.Tensor, expected: list[torch.Tensor]
    ) -> dict[str, float]:
        """Compare the loss and gradients of a strategy's first step, which the optimizer doesn't clear."""
        model, batch = self.build(strategy, precision)
        loss = self.apply(strategy, model, batch).step()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        gradients = [gradient_of(parameter) for parameter in model.parameters()]
        return {
            "loss_error": float(abs(loss - expected_loss) / expected_loss),
            "gradient_error": relative_error(gradients, expected),
        }

    def accumulated(self, precision: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the mean loss and gradients over the batches of all ranks, computed on this rank alone."""
        model, _ = self.build(STRATEGIES["alone"], precision)
        loss = torch.zeros((), device=self.device)
        for rank in range(self.ranks):
            tokens, targets = self.tokens(rank)
            loss += distributed_step.compute(model, Batch(tokens, targets, precision))
        return loss / self.ranks, [parameter.grad / self.ranks for parameter in model.parameters()]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's complete gradient, even if FSDP has sharded it."""
    gradient = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def relative_error(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the global norm of the differences, divided by the global norm of the expected tensors."""
    difference = torch.stack([(a.double() - b.double()).norm() for a, b in zip(tensors, expected)]).norm()
    return float(difference / torch.stack([b.double().norm() for b in expected]).norm())


def end_with_launcher(place: Path) -> None:
    """End the process when the launcher ends, or when it closes the pipe because a rank hangs.

    First write which function the main thread runs, to distinguish a rank that hangs from those that wait for it.
    """
    sys.stdin.buffer.read()
    try:
        code = sys._current_frames()[threading.main_thread().ident or 0].f_code
        place.write_text(f"{code.co_name} of {Path(code.co_filename).name}")
    finally:
        os._exit(1)


def release(device: torch.device) -> None:
    """Free the memory that the process no longer uses, so that the next measurement doesn't count it.

    All ranks must call this function, because it communicates: a process group keeps the tensors of its last
    collectives until NCCL's watchdog, which runs every 100 ms, has seen that they are done and another collective
    of the group starts.
    """
    gc.collect()
    if device.type == "cuda":
        time.sleep(0.2)
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one per stream, and each graph has a stream of its own
        torch.cuda.empty_cache()


def describe(error: BaseException) -> tuple[str, str]:
    """Return the status and the reason to record for an error.

    The status is "oom" if the error or one of its causes says that memory ran out. For example, running out of
    memory can make a graph capture fail, and NCCL reports it in its own words.
    """
    cause: BaseException | None = error
    while cause is not None:
        if is_out_of_memory(cause) or re.search("out of memory|ALLOC_FAILED", str(cause), re.IGNORECASE):
            return "oom", error_text(cause)
        cause = cause.__cause__ or cause.__context__
    return "failed", f"{type(error).__name__}: {error_text(error)}"


def main(folder: Path, config: Config, names: list[str]) -> None:
    number = os.environ["RANK"]
    place = folder / f"{PLACE}.{number}"
    threading.Thread(target=end_with_launcher, args=[place], daemon=True).start()
    try:
        rank = Rank(folder, config)
        others = {COLLECTIVES: rank.collectives, NUMERICS: rank.numerics}
        for name in names:
            if name in others:
                others[name]()
            elif name.endswith(PROFILE):
                rank.profile(name.removesuffix(PROFILE))
            else:
                rank.measure(name)
            release(rank.device)
    except (Exception, SystemExit) as error:  # noqa: BLE001 any error that a strategy raises is a result
        try:
            traceback.print_exc()
            status, reason = describe(error)
            fields = {"status": status, "reason": f"rank {number}: {reason}", "time_ns": time.time_ns()}
            write_text_durably(folder / f"{ERROR}.{number}", json.dumps(fields))
        finally:
            os._exit(1)
    dist.barrier()
    os._exit(0)  # on a normal exit, gloo may hang


if __name__ == "__main__":
    main(Path(sys.argv[1]), Config(**json.loads(sys.argv[2])), sys.argv[3].split(","))
