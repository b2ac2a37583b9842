"""Apply the ladder to a user's model by measuring each optimization on top of the optimizations that helped.

    ladder = Ladder(find(model, folder), config, folder)
    ladder.measure()
    ladder.tables      steps, kernels and modules, for the record
    ladder.results     the model's parameters and FLOPs, and the optimizations that were kept

Each optimization runs in a new process, because a failed CUDA graph, a crash or a compiler that hangs can leave a
process unusable. An optimization is kept if it makes the step faster than the fastest step so far, or if the step
is launch-bound and the optimization saves GPU time. Compiling the blocks and compiling the complete model are
alternatives: both are measured on top of the same optimizations, and the one that helps more is kept.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stepscope import StepscopeError, measure
from stepscope.report.tables import number
from stepscope.stats import MIN_LAUNCH_BOUND_GAIN, launch_bound
from stepscope.studies.your_model.config import MEASURES, Config
from stepscope.studies.your_model.isolation import call_isolated, libraries_in
from stepscope.studies.your_model.rows import COMPILED_CODE, FP32, Job, Outcome, measure_modules, measure_row
from stepscope.studies.your_model.source import ModelError, Source

COMPILED = ("compiled_blocks", "compiled_model")
# Groups are measured in order. The optimizations of a group are alternatives, of which one is kept.
GROUPS = (
    ("tf32",),
    ("channels_last",),
    ("bf16",),
    ("fused_adamw",),
    COMPILED,
    ("cuda_graph",),
    ("bf16_weights",),
    ("bf16_moments",),
)
# Optimizations that need others, which are then applied even if they didn't help by themselves.
NEEDS = {"bf16_weights": ("bf16",), "bf16_moments": ("bf16", "bf16_weights")}
MIN_SPEEDUP = 1.01  # an optimization is kept if its speedup exceeds this minimum
# The minimum for steps whose times fluctuate: power-limited steps, and steps that do different work.
MIN_NOISY_SPEEDUP = 1.03
# The kernels of a graph take about as long as without it: in 12 public models at most 4% longer. In a ViT that
# gets an attention mask while it is captured, they took 36% longer.
MAX_GRAPH_RATIO = 1.1
BETTER_ALTERNATIVE = "it helps, but its alternative helps more"
COLUMNS = ("optimization", "stack", "kept", "status", "reason", *MEASURES, "clock_reasons", "inconsistent")


class Ladder:
    """Measure a user's model after each optimization.

    Args:
        source: the function that builds the model.
        folder: a folder for compiled code and for files that the processes share.
    """

    def __init__(self, source: Source, config: Config, folder: Path):
        self.source = source
        self.config = config
        self.folder = folder
        self.libraries = libraries_in(source.path.read_text("utf-8", errors="replace"))
        self.outcomes: dict[str, Outcome] = {}
        self.modules = pd.DataFrame()
        self.kept: tuple[str, ...] = ()
        self.eager: tuple[str, ...] = ()  # the kept optimizations before compiling

    def measure(self) -> None:
        """Measure all optimizations.

        Raises:
            StepscopeError: If the model can't be built or trained in fp32. The user's traceback is printed.
        """
        try:
            best = self.call(measure_row, FP32, ())
        except StepscopeError as error:
            trace = getattr(error, "trace", "")
            print(trace.replace(f"{self.source.root}/", ""))
            raise
        if best.row["status"] == "failed":
            raise ModelError(f"the step in fp32 failed: {best.row['reason']}")
        self.keep(best, FP32, (), best)
        for group in GROUPS:
            if group == COMPILED:
                self.eager = self.kept
            names = [name for name in group if name in self.config.optimizations]
            best = self.measure_group(names, best)
        try:
            self.modules = self.call(measure_modules, "modules", self.eager)
        except StepscopeError as error:
            print(f"could not measure the time by module: {error}")
        shutil.rmtree(self.folder / COMPILED_CODE, ignore_errors=True)

    def measure_group(self, names: Sequence[str], before: Outcome) -> Outcome:
        """Measure alternatives on top of the kept optimizations, and keep at most one.

        An alternative replaces another if it would be kept on top of it, so less GPU time also counts.

        Returns:
            The best step so far.
        """
        best = before
        kept = self.kept
        for name in names:
            missing = [other for other in NEEDS.get(name, ()) if other not in kept]
            more = [other for other in missing if other in self.outcomes and self.outcomes[other].is_timed]
            stack = (*kept, *more, name)
            outcome = self.outcome_of(name, stack)
            reason = why_dropped(outcome, before) if outcome.is_timed else outcome.row["reason"]
            if not reason and best is not before:
                if why_dropped(outcome, best):
                    reason = BETTER_ALTERNATIVE
                else:
                    best.row |= {"kept": "no", "reason": BETTER_ALTERNATIVE}
            if not reason:
                best = outcome
                self.kept = stack
                reason = remark_on_kept(outcome, before)
            if name == "cuda_graph":
                reason = "; ".join(filter(None, [reason, remark_on_graph(outcome.row, before.row)]))
            self.keep(outcome, name, stack, best, reason)
        return best

    def outcome_of(self, name: str, stack: tuple[str, ...]) -> Outcome:
        facts = self.outcomes[FP32].facts or {}
        if name == "cuda_graph" and facts.get("varying"):
            varies = f"{facts['varying']} does different work in each step"
            reason = f"{varies}, but a CUDA graph would replay the work of one step"
            return Outcome({"status": "unsupported", "reason": reason})
        try:
            return self.call(measure_row, name, stack)
        except StepscopeError as error:
            return Outcome({"status": "failed", "reason": str(error)})

    def keep(
        self, outcome: Outcome, name: str, stack: tuple[str, ...], best: Outcome, reason: str = ""
    ) -> None:
        """Complete an outcome's row, and print it."""
        self.outcomes[name] = outcome
        facts = self.outcomes[FP32].facts or {}
        row = outcome.row
        if name == "cuda_graph" and row["status"] != "ok" and facts.get("synchronizing"):
            where = f"uncompiled, {facts['synchronizing']} reads a number from the device"
            reason = where if reason.startswith(facts["synchronizing"]) else f"{where}; {reason}"
        row |= {
            "optimization": name,
            "stack": " + ".join(stack),
            "kept": "yes" if outcome is best and outcome.is_timed else "no",
            "reason": reason or row["reason"],
            "speedup": speedup(self.outcomes[FP32], outcome),
        }
        wall = ""
        if outcome.is_timed:
            flops = facts.get("flops") or math.nan  # 0 means that the counter knows none of the operators
            if outcome.varies:
                flops = math.nan  # the counted step may have done more or less work than the timed steps
            row["mfu"] = flops / row["wall_ms"] / 1e9 / row.get("sheet_tflops", math.nan)
            wall = number(row["wall_ms"], "ms")
            if is_launch_bound(row) and not outcome.varies:
                wall += f" (fastest {number(row['wall_min_ms'], 'ms')})"
        print(f"{name}: {'; '.join(filter(None, [wall, row['reason']]))}")

    def call(self, function: Callable[[Job], Any], name: str, stack: tuple[str, ...]) -> Any:
        """Create a job, and call a function with it in a new process.

        Raises:
            StepscopeError: If the process failed, or the model can't be built or trained.
        """
        varies = FP32 in self.outcomes and self.outcomes[FP32].varies
        job = Job(self.source, self.config, self.folder, name, stack, varies)
        return call_isolated(function, self.config.limit_s, job, preload=self.libraries)

    @property
    def steps(self) -> pd.DataFrame:
        """One row per optimization, in the order of measurement."""
        rows = [outcome.row for outcome in self.outcomes.values()]
        steps = pd.DataFrame(rows, columns=COLUMNS)
        return steps.assign(inconsistent=steps["inconsistent"].astype(object).fillna("").astype(str))

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        kernels = [outcome.kernels for outcome in self.outcomes.values() if outcome.kernels is not None]
        tables = {"steps": self.steps, "modules": self.modules}
        if kernels:
            tables["kernels"] = pd.concat(kernels, ignore_index=True).drop(columns="batch_size")
        return {name: table for name, table in tables.items() if len(table)}

    @property
    def results(self) -> dict[str, Any]:
        facts = self.outcomes[FP32].facts or {}
        return facts | {"kept": " + ".join(self.kept), "eager": " + ".join(self.eager)}


def is_launch_bound(row: Mapping[str, Any]) -> bool:
    if "enqueue_ms" not in row:
        return False
    return launch_bound(row.get("busy", math.nan), row["enqueue_ms"], row.get("gpu_ms", math.nan))


def speedup(before: Outcome, outcome: Outcome) -> float:
    """Return the ratio of two steps' wall times: of their minima if either is launch-bound, else of their medians.

    The medians are also compared if the steps do different work.
    """
    is_bound = is_launch_bound(before.row) or is_launch_bound(outcome.row)
    name = "wall_min_ms" if is_bound and not outcome.varies else "wall_ms"
    return before.row.get(name, math.nan) / outcome.row.get(name, math.nan)


def why_dropped_launch_bound(outcome: Outcome, before: Outcome) -> str:
    """Return why an optimization isn't kept, or "" if it is kept.

    At least one of the two steps must be launch-bound. The wall times of launch-bound steps are less reproducible,
    so the times must differ by a larger factor. An optimization that saves GPU time is kept even if the wall time
    doesn't improve, because a later CUDA graph removes the launches and then shows the gain. If steps do different
    work, there can be no CUDA graph.
    """
    row = outcome.row
    wall_speedup = speedup(before, outcome)
    gpu_speedup = before.row.get("gpu_ms", math.nan) / row.get("gpu_ms", math.nan)
    # A step that isn't launch-bound, such as a CUDA graph, has a reproducible time.
    min_speedup = 1 + MIN_LAUNCH_BOUND_GAIN if is_launch_bound(row) else MIN_NOISY_SPEEDUP
    is_slower = wall_speedup < 1 / (1 + MIN_LAUNCH_BOUND_GAIN)
    helps_in_graph = gpu_speedup > MIN_NOISY_SPEEDUP and not is_slower and not outcome.varies
    if wall_speedup > min_speedup or helps_in_graph or math.isnan(wall_speedup):
        return ""
    compared = "median" if outcome.varies else "fastest"
    ratio = f"its {compared} step has {number(wall_speedup, 'x')} the speed of the last kept one"
    if is_slower:
        return f"slower: {ratio}"
    return f"not clearly faster: {ratio}, which is within the noise of launch-bound steps"


def why_dropped(outcome: Outcome, before: Outcome) -> str:
    """Return why an optimization isn't kept, or "" if its loss is finite and the time saved exceeds the noise."""
    row = outcome.row
    if not math.isfinite(row.get("loss_error", 0.0)):
        return "its loss isn't finite"
    if is_launch_bound(row) or is_launch_bound(before.row):
        return why_dropped_launch_bound(outcome, before)
    wall_speedup = speedup(before, outcome)
    is_noisy = measure.is_power_limited(row) or outcome.varies
    min_speedup = MIN_NOISY_SPEEDUP if is_noisy else MIN_SPEEDUP
    # The speedup is NaN if the previous step ran out of memory, and therefore has no time.
    if wall_speedup > min_speedup or math.isnan(wall_speedup):
        return ""
    if outcome.signature is not None and outcome.signature == before.signature:
        return (
            "it changes nothing: operations, loss, optimizer and launch are the same as in the last kept step"
        )
    word = "slower" if wall_speedup < 1 / MIN_SPEEDUP else "no faster"
    return f"{word}: {number(wall_speedup, 'x')} the speed of the last kept step"


def remark_on_kept(outcome: Outcome, before: Outcome) -> str:
    """Return why a kept optimization is kept if it doesn't reduce the wall time, or "" if it does."""
    if not speedup(before, outcome) <= 1:
        return ""
    before_gpu, gpu = (number(one.row["gpu_ms"], "ms") for one in (before, outcome))
    return f"not faster, but its GPU time falls from {before_gpu} to {gpu}, which helps in a CUDA graph"


def remark_on_graph(row: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return that a graph's kernels take longer than those of the same step without the graph, or "" if not."""
    graph_ms, before_ms = (one.get("gpu_ms", math.nan) for one in (row, before))
    if not graph_ms > MAX_GRAPH_RATIO * before_ms:
        return ""
    return (
        f"its kernels take {number(graph_ms, 'ms')}, but {number(before_ms, 'ms')} without the graph, so the"
        " model may do different work while it is captured"
    )
