"""Steps of this process by both clocks: wall time plain, GPU time under torch.profiler, replayed as a CUDA
graph.

Under the profiler a launch takes longer, a kernel does not; and launches stay longer afterwards. So all that
is timed by the host is timed first, of all steps; then all are captured, and then replayed.
"""
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.profiler import ProfilerActivity, record_function

from stepscope.config import PHASES, StepConfig
from stepscope.step import watch
from stepscope.step.clocks import SAMPLE_COLUMNS, WHOLE, NotReplayed, keep_up, plain_steps, replay_ms
from stepscope.step.stats import location, union
from stepscope.step.training_step import Step, build_step, out_of_memory_names, release
from stepscope.step.turn import turn
from stepscope.traces.attribution import TraceError, find_launches
from stepscope.traces.families import families
from stepscope.traces.torch_trace import own_records

REPLAYED_MS, MOST_REPLAYS = 400.0, 50
LONG_MS = 1000.0  # of steps that last longer, fewer are enough where the median needs no ten
KEYS = ["mode", "precision"]
TIME_COLUMNS = [*KEYS, "phase", "wall_ms", "wall_std_ms", "wall_q1_ms", "wall_q3_ms", "enqueue_ms", "gpu_ms",
                "operations", "busy", "replayed_ms", "replay_reason", "peak_gib", "reserved_gib",
                "sm_clock_mhz", "power_w", "step_j", "compile_s", "status", "reason"]
TEXTS = [*KEYS, "phase", "replay_reason", "status", "reason"]
OPERATION_COLUMNS = [*KEYS, "phase", "name", "family", "count", "gpu_ms"]
RANGE = "stepscope"  # of a captured phase: stepscope/<which step>/<its number>/<phase>


class CaptureError(RuntimeError):
    """A capture in which GPU time cannot be told; the text says why."""


class Counts(NamedTuple):
    """How many steps of each kind. Of the first mode the warm-up is ``cold``, where given."""

    steps: int = 10
    warmups: int = 2
    cold: int | None = None
    captured: int = 3
    replays: int = 5  # at least: short ones go on for REPLAYED_MS; 0: none
    watched: Sequence[str] = tuple(PHASES)  # modes whose power is measured where plain steps are too short


PLAIN = Counts()


@dataclass
class Mode:
    """One step's readings, as far as it got."""

    step: Any  # a Step; None once all is read, so that its memory may be freed
    samples: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=SAMPLE_COLUMNS))
    readings: dict[str, Any] = field(default_factory=dict)  # of the mode as a whole
    replayed_ms: list[float] = field(default_factory=list)
    captured: int = 0  # steps in the capture
    status: str = "ok"
    reason: str = ""
    key: dict[str, str] = field(default_factory=dict)  # mode and precision

    def __post_init__(self) -> None:
        self.key = self.key or {"mode": self.step.mode, "precision": self.step.precision}

    def replays(self, least: int) -> int:
        """So many that what neighbours do on the GPU for a moment does not move their median."""
        wall_ms = self.samples[self.samples["phase"] == WHOLE]["wall_ms"].min()
        return max(min(least, 3) if self.long() else least, min(MOST_REPLAYS, round(REPLAYED_MS / wall_ms)))

    def long(self) -> bool:
        whole = self.samples[self.samples["phase"] == WHOLE]["wall_ms"]
        return bool(whole.min() > LONG_MS)


@dataclass
class Taken:
    """What was read on the device; :meth:`tables` does the rest without it, but before another capture of
    this process: once that begins, torch no longer has the GPU's part of this one."""

    modes: list[Mode]
    profiler: torch.profiler.profile | None = None
    reason: str = ""  # why nothing was captured

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """``times`` (a row a mode, precision and phase), ``samples`` (each plain step) and ``operations`` (of
        the quickest captured step, each name's count and summed time)."""
        operations = pd.DataFrame()
        try:
            operations = self._operations()
        except (CaptureError, TraceError, OSError) as error:
            self.reason = str(error)
        rows, named = [], []
        for index, mode in enumerate(self.modes):
            own = quickest(operations[operations["index"] == index]) if len(operations) else operations
            rows += mode_rows(mode, own, "" if len(own) else self.reason or "nothing was captured")
            if len(own):
                named.append(by_name(own).assign(**mode.key))
        samples = [mode.samples.assign(**mode.key) for mode in self.modes if len(mode.samples)]
        unread = {name: "" if name in TEXTS else np.nan for name in TIME_COLUMNS}
        times = pd.DataFrame([unread | row for row in rows], columns=TIME_COLUMNS)
        times = times.astype({name: str if name in TEXTS else float for name in TIME_COLUMNS})
        return (times, _stacked(samples, [*KEYS, *SAMPLE_COLUMNS]),
                _stacked(named, OPERATION_COLUMNS))

    def _operations(self) -> pd.DataFrame:
        if self.profiler is None:
            raise CaptureError(self.reason)
        found = operations_of(self.profiler)
        for index, mode in enumerate(self.modes):  # of a step that ran out of memory there is a part
            found = found[(found["index"] != index) | (found["number"] < mode.captured)]
        return found


def without_readings(modes: Sequence[str], precision: str, status: str, reason: str) -> Taken:
    """What is known where nothing could be read: every mode's outcome."""
    keys = ({"mode": mode, "precision": precision} for mode in modes)
    return Taken([Mode(None, status=status, reason=reason, key=key) for key in keys], reason=reason)


def _stacked(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def take(steps: Sequence[Step], counts: Counts = PLAIN) -> Taken:
    """Measure steps of one model: all plain, then all captured, then replayed. To be called in the GPU's
    turn.

    What runs out of memory is noted, and the others go on. What is returned holds no step."""
    modes = [Mode(step) for step in steps]
    for mode in modes:
        warmups = min(counts.warmups, 1) if any(one.long() for one in modes) else counts.warmups
        if mode is modes[0] and counts.cold is not None:
            warmups = counts.cold
        _unless_out_of_memory(mode, partial(plain, mode, counts.steps, warmups, counts.watched))
    taken = capture(modes, counts.captured)
    for mode in sorted(modes, key=lambda mode: mode.step.mode == "step"):
        if counts.replays and mode.step.mode != "forward_backward" and mode.status == "ok":
            replay(mode, mode.replays(counts.replays))
    for mode in modes:
        mode.step = None
    return taken


def _unless_out_of_memory(mode: Mode, part: Callable[[], None]) -> None:
    """One mode's part; if memory runs out the mode has the reason, and all of its memory is given back."""
    ended = False
    try:
        part()
    except torch.OutOfMemoryError as error:
        ended, mode.status, mode.reason = True, "oom", short_reason(error)
    mode.step.clear_gradients()
    if ended and mode.step.optimizer is not None:
        mode.step.optimizer.state.clear()
    release(mode.step.device, after_error=ended)  # not in the handler: the error holds what its frames hold


def short_reason(error: BaseException) -> str:
    """The first sentences of torch's error: what was asked for and what there was."""
    return " ".join(re.split(r" (?:Including|Process \d)", str(error))[0].split())[:300]


def plain(mode: Mode, count: int, warmups: int, watched: Sequence[str] = ()) -> None:
    """The plain steps, their peaks of memory, the SM clock after each, and the energy a step takes."""
    step, on_gpu = mode.step, mode.step.device == "cuda"
    if step.mode != "step" and step.optimizer is not None:
        step.optimizer.state.clear()  # the moments are no part of this mode's memory
    release(step.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seen: list[watch.Reading] = []
    mode.samples = plain_steps(step, count, warmups, lambda: seen.append(watch.reading()))
    if not on_gpu:
        return
    mode.readings = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                     "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
                     "sm_clock_mhz": watch.median_clock(seen[-count:])}
    mode.readings |= energy(mode, seen[-count - 1:], watched)


def energy(mode: Mode, seen: list[watch.Reading], watched: Sequence[str]) -> dict[str, float]:
    """``power_w`` and ``step_j`` from readings between plain steps; where these were too short, of more
    steps, of the modes that are to be watched."""
    seconds, steps = seen[-1].at_s - seen[0].at_s, len(seen) - 1
    power_w = watch.power_w(seen)
    if seconds < watch.COUNTED_S:
        if mode.step.mode not in watched:
            return {}
        with watch.Watch() as kept_up:
            steps = keep_up(mode.step, watch.KEPT_UP_S)
        seconds, power_w = kept_up.readings[-1].at_s - kept_up.readings[0].at_s, kept_up.power_w
    return {"power_w": power_w, "step_j": power_w * seconds / steps}


def replay(mode: Mode, replays: int) -> None:
    """The mode as a CUDA graph, or why not. AdamW's moments are made anew where they are needed."""
    if mode.step.optimizer is not None:
        mode.step.optimizer.state.clear()
    try:
        mode.replayed_ms = replay_ms(mode.step, replays)
    except NotReplayed as error:
        mode.readings["replay_reason"] = str(error)


@contextmanager
def profiled(activities: Sequence[ProfilerActivity] | None = None) -> Iterator[torch.profiler.profile]:
    """``torch.profiler.profile`` (of all activities that there are, where none are named); its advice on
    several cycles, which torch 2.11 gives for one as well, is not said, every other warning is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        with torch.profiler.profile(activities=activities) as profiler:
            yield profiler


def capture(modes: list[Mode], count: int) -> Taken:
    """Some steps of every mode in one capture, modes without an optimizer first, so that they may have its
    memory."""
    on_gpu = any(mode.step.device == "cuda" for mode in modes)
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]  # the CPU's: phases' ranges
    taken = Taken(modes)
    try:
        with profiled(activities) as profiler:
            for mode in sorted(modes, key=lambda mode: mode.step.mode == "step"):
                if mode.status == "ok":
                    steps = min(count, 2) if mode.long() else count
                    _unless_captured(mode, partial(captured_steps, mode, modes.index(mode), steps))
        taken.profiler = profiler
    except RuntimeError as error:  # of CUPTI, when the capture begins or ends
        taken.reason = f"torch.profiler: {short_reason(error)}"
    return taken


def _unless_captured(mode: Mode, part: Callable[[], None]) -> None:
    """What a capture lacks memory for has been timed, and stays so."""
    _unless_out_of_memory(mode, part)
    if mode.status == "oom":
        mode.status, mode.reason = "ok", f"not captured: {mode.reason}"


def captured_steps(mode: Mode, index: int, count: int) -> None:
    step = mode.step
    synchronize = torch.cuda.synchronize if step.device == "cuda" else lambda: None
    if step.mode == "step" and not step.optimizer.state:
        step.clear_gradients()
        step()  # makes the moments, which other steps find there
    for number in range(count):
        with out_of_memory_names("capturing"):
            step.clear_gradients()
            synchronize()
            step(lambda phase, number=number: record_function(f"{RANGE}/{index}/{number}/{phase}"))
            synchronize()
        mode.captured += 1


def operations_of(profiler: torch.profiler.profile) -> pd.DataFrame:
    """The captured_operations of what was profiled last in this process.

    Raises:
        CaptureError, TraceError: as captured_operations; the GPU's part of the capture is lost.
    """
    with TemporaryDirectory(prefix="stepscope-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        found = captured_operations(trace)
    if torch.cuda.is_initialized() and found["name"].str.startswith("aten::").any():
        raise CaptureError("the capture holds operators of the CPU, and nothing of the GPU")
    return found


def captured_operations(trace: Path) -> pd.DataFrame:
    """The operations that the named phases of a trace launched, on any thread: index, number, phase (of the
    range's name), name, start and end in ns. The phase is the one open when the operation was launched.

    Raises:
        CaptureError: a kernel's launch is not in the trace, so that its phase is not known.
        TraceError: the trace cannot be read.
    """
    records = own_records(trace)
    found, ranges = records.operations, records.ranges.sort_values(["start_ns", "end_ns"])
    ranges = ranges[ranges["name"].astype(str).str.startswith(f"{RANGE}/")]
    if ranges.empty:
        raise CaptureError("the capture holds none of the phases")
    launch = find_launches(records.process, found["correlation_id"].to_numpy(), records.launches)
    if unknown := int((launch < 0).sum()):
        raise CaptureError(f"the launches of {unknown} of {len(found)} operations are not in the capture")
    launched = records.launches[2][launch]
    open_range = np.searchsorted(ranges["start_ns"], launched, side="right") - 1
    inside = (open_range >= 0) & (launched < ranges["end_ns"].to_numpy()[open_range])
    opened = ranges["name"].astype(str).str.split("/", expand=True).iloc[open_range].reset_index(drop=True)
    table = pd.DataFrame({"index": opened[1].astype(int), "number": opened[2].astype(int), "phase": opened[3],
                          "name": found["name"].astype(str), "start": found["start_ns"],
                          "end": found["start_ns"] + found["duration_ns"]})
    return table[inside].reset_index(drop=True)


def quickest(operations: pd.DataFrame) -> pd.DataFrame:
    """Of one mode's captured steps the operations of the one with the least GPU time: what a neighbour has
    the GPU do for a moment only adds. A step of which the profiler lost some is none of them."""
    steps = dict(iter(operations.groupby("number")))
    most = max(map(len, steps.values()), default=0)
    covered = {number: union(rows["start"].to_numpy(), rows["end"].to_numpy())
               for number, rows in steps.items() if len(rows) == most}
    return operations[operations["number"] == min(covered, key=lambda number: covered[number], default=0)]


def by_name(operations: pd.DataFrame) -> pd.DataFrame:
    """Of one step each phase's and name's count and summed time, longest first."""
    lasted = operations.assign(gpu_ms=(operations["end"] - operations["start"]) / 1e6)
    table = lasted.groupby(["phase", "name"], sort=False)["gpu_ms"].agg(["size", "sum"]).reset_index()
    table.columns = ["phase", "name", "count", "gpu_ms"]
    table["family"] = families(table["name"]).astype(str)
    order = table["phase"].map({phase: at for at, phase in enumerate(PHASES["step"])})
    table = table.assign(order=order).sort_values(["order", "gpu_ms"], ascending=[True, False])
    return table.drop(columns="order")


def gpu_time(operations: pd.DataFrame) -> dict[str, float]:
    """Of one step, or a phase of it, the time in which at least one operation runs (``gpu_ms``), and their
    number (``operations``)."""
    if operations.empty:
        return {"gpu_ms": np.nan, "operations": np.nan}
    covered_ns = union(operations["start"].to_numpy(), operations["end"].to_numpy())
    return {"gpu_ms": covered_ns / 1e6, "operations": float(len(operations))}


def mode_rows(mode: Mode, operations: pd.DataFrame, reason: str) -> list[dict[str, Any]]:
    """A mode's rows of ``times``: one of each phase and one of the whole; of one that did not fit only
    that."""
    outcome = mode.key | {"status": mode.status, "reason": mode.reason}
    if mode.status != "ok":
        return [outcome | {"phase": WHOLE}]
    outcome["reason"] = mode.reason or reason
    plain = mode.samples[~mode.samples["warmup"].astype(bool)]
    rows = []
    for phase in [*PHASES[mode.key["mode"]], WHOLE]:
        own = plain[plain["phase"] == phase]
        wall = {f"wall{'' if name == 'median' else f'_{name}'}_ms": value
                for name, value in location(own["wall_ms"]).items()}
        gpu = dict.fromkeys(("gpu_ms", "operations"), np.nan)
        if len(operations):
            gpu = gpu_time(operations if phase == WHOLE else operations[operations["phase"] == phase])
        rows.append(outcome | {"phase": phase, **wall, "enqueue_ms": own["enqueue_ms"].median(), **gpu,
                               "busy": gpu["gpu_ms"] / wall["wall_ms"]})
    rows[-1] |= mode.readings
    if mode.replayed_ms:
        rows[-1]["replayed_ms"] = float(np.median(mode.replayed_ms))
    return rows


def launch_rate(device: str) -> tuple[float, float] | None:
    """Microseconds that this host takes for a launch, the least and the most of ten steps whose GPU work is
    tiny: the size small, batch 1, context 16. None on a CPU, which launches nothing."""
    if device != "cuda":
        return None
    shape: dict[str, Any] = {"size": "small", "batch_size": 1, "context_length": 16}
    config = StepConfig(device="cuda", **shape)
    with turn():
        taken = take([build_step(config)], Counts(replays=0))
    times, samples, _ = taken.tables()
    launches = times.loc[times["phase"] == WHOLE, "operations"].iloc[0]
    walls = samples.loc[(samples["phase"] == WHOLE) & ~samples["warmup"], "wall_ms"]
    return walls.min() / launches * 1e3, walls.max() / launches * 1e3
