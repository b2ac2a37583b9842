"""Profile the modes of a training step with Nsight Systems, or with torch.profiler if nsys is missing.

    profile = profile_with_nsys(ranged, config)
    profile.operations   one step of each mode: operation counts and times by phase, region, category and kernel
    profile.clocks       all other steps: wall time, enqueue time and GPU time
    profile.timeline     two milliseconds from the middle of the forward pass, eager and as a CUDA graph
    profile.events       every operation of one forward pass and of one full step

The first profiled step of each mode is the named step, in which each region of the model has a range. Every sum is
checked to the nanosecond, and a ConservationError is raised if operations are missing or counted twice.
"""

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.config import TOTAL, StepConfig
from stepscope.measure.nsys import REPLAY, ProfiledModes, profiler_here, read_profiled_modes
from stepscope.measure.sanity_checks import TRIES, find_inconsistencies
from stepscope.studies.nsys.tables import REPLAYED
from stepscope.traces.attribution import OUTSIDE, UNATTRIBUTED, ConservationError
from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.export import activity_totals, load_trace
from stepscope.traces.kernel_categories import kernel_categories
from stepscope.traces.nsys_csv import read_nsys_csv
from stepscope.traces.nsys_tool import export_capture, make_reports
from stepscope.traces.torch_trace import load_torch_trace

NSYS_OPTIONS = [
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=repeat:1",
]
IMPORTS = "import torch\n\nfrom stepscope.model.ranges import nvtx_range\n\n\n"
# nsys's summary reports, and the kinds of operations that each of them covers.
NSYS_SUMS = {"cuda_gpu_kern_sum": ["kernel"], "cuda_gpu_mem_time_sum": ["memcpy", "memset"]}
REPORTS = (*NSYS_SUMS, "cuda_gpu_trace", "nvtx_gpu_proj_trace", "nvtx_kern_sum")
# Names for operations outside all regions, by phase. In backward, autograd itself runs such operations, to add up
# the gradients of a tensor that is used more than once.
DEFAULT_REGIONS = {"backward": "gradient accumulation", "optimizer": "optimizer", OUTSIDE: OUTSIDE}
OPERATION = ["mode", "phase", "region", "kernel_category", "name"]
OPERATIONS = [*OPERATION, "count", "total_ns"]
CLOCKS = [
    "mode",
    "phase",
    "step",
    "profiled",
    "wall_ms",
    "enqueue_ms",
    "host_ns",
    "projected_ns",
    "operations_ns",
    "busy_ns",
    "operations",
]
TIMELINE = ["mode", "kernel_category", "launch_ns", "launch_duration_ns", "start_ns", "duration_ns"]
EVENTS = ["mode", "phase", "region", "kernel_category", "name", "start_ns", "duration_ns"]
WINDOW_NS = 2_000_000


def profile_with_nsys(ranged: Callable[..., None], config: StepConfig) -> "Profile":
    """Run ``ranged`` for every mode in a new process under the profiler, and read the resulting profile.

    If the GPU time of profiled steps exceeds the wall time of unprofiled steps, or if profiled steps differ from
    each other, everything is profiled again, at most twice. Readings that are still impossible are marked.

    Args:
        ranged: runs one step in NVTX ranges; its arguments are the step, the annotation and ``synchronize``.

    Raises:
        NsysError: If the process fails or the profiler doesn't write a file.
        ConservationError: If the operations don't add up.
    """
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="stepscope-nsys-") as folder:
            profile = profile_once(ranged, config, Path(folder))
        if not profile.impossible:
            break
        print("measuring again:", profile.impossible)
    print("profiled by", profile.tool, "- profiled steps:", *profile.modes.step_modes)
    profile.check()
    return profile


def profile_once(ranged: Callable[..., None], config: StepConfig, folder: Path) -> "Profile":
    tool, nsys = profiler_here(config.device)
    (folder / "ranged.py").write_text(IMPORTS + inspect.getsource(ranged))
    names = {*StepConfig.model_fields} - {"study", "size", "mode"}
    fields = config.model_dump(include=names, mode="json")
    program = [
        sys.executable,
        "-m",
        "stepscope.measure.profiled_process",
        "nsys" if nsys else "torch",
        str(folder),
        json.dumps(fields),
    ]
    if nsys:
        output = str(folder / "capture")
        program = [str(nsys), "profile", *NSYS_OPTIONS, "--output", output, *program]
    process = subprocess.run(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    modes = read_profiled_modes(folder, nsys is not None, process.stdout)
    profile = Profile(config, tool, modes)
    if modes.file and nsys:
        export = export_capture(nsys, modes.file, folder / "capture.sqlite")
        report_paths = make_reports(nsys, export, REPORTS)
        profile.reports = {name: read_nsys_csv(path) for name, path in report_paths.items()}
        profile.trace, profile.ranges = load_trace(export)
        profile.totals = activity_totals(export)
    elif modes.file:
        profile.trace, profile.ranges, profile.totals = load_torch_trace(modes.file)
    return profile


@dataclass
class Profile:
    """One configuration's profile.

    Args:
        tool: the profiler and its version.
        modes: the outcome and the unprofiled times of each mode.
        trace: every operation of the capture.
        ranges: the NVTX ranges.
        totals: the number of operations and their total time, by kind.
        reports: nsys's CSV reports by name, or an empty dictionary if nsys is missing.
    """

    config: StepConfig
    tool: str
    modes: ProfiledModes
    trace: pd.DataFrame = field(default_factory=pd.DataFrame)
    ranges: pd.DataFrame = field(default_factory=pd.DataFrame)
    totals: pd.DataFrame = field(default_factory=pd.DataFrame)
    reports: dict[str, pd.DataFrame] = field(default_factory=dict)

    @property
    def has_capture(self) -> bool:
        return self.modes.file is not None

    @property
    def mode_of_step(self) -> dict[int, str]:
        return dict(enumerate(self.modes.step_modes))

    @cached_property
    def named_step(self) -> dict[str, int]:
        """The index of the named step of each mode, except for modes that ran out of memory."""
        steps: dict[str, int] = {}
        for step, mode in enumerate(self.modes.step_modes):
            outcome = self.modes.modes[mode]
            if mode not in steps and outcome["status"] == "ok":
                steps[mode] = step
        return steps

    @cached_property
    def impossible(self) -> dict[str, str]:
        """The impossible readings of each mode.

        The result is empty on a CPU, because CPU operators are not checked.
        """
        if self.config.device == "cpu" or not self.has_capture:
            return {}
        in_steps = self.trace[self.trace["step"] >= 0]
        totals = phase_clocks(in_steps, self.ranges).query("phase == 'total'")
        gpu_ms = totals.set_index("step")["busy_ns"] / 1e6
        impossible = {}
        for mode, outcome in self.modes.modes.items():
            mode_steps = [step for step, name in self.mode_of_step.items() if name == mode]
            mode_gpu_ms = gpu_ms.reindex(mode_steps[1:])  # without the named step
            row = dict(outcome["clock"])
            row["wall_ms"] = pd.Series(outcome["unprofiled_ms"]).median()
            row["gpu_ms"] = mode_gpu_ms.median()
            inconsistency = find_inconsistencies(row, mode_gpu_ms.dropna().tolist())
            if inconsistency:
                impossible[mode] = inconsistency
        return impossible

    # Conservation

    def check(self) -> None:
        """Check that no operation was lost or counted twice between the capture and the tables.

        Raises:
            ConservationError: If the sums over operations, nsys's reports, steps or tables differ.
        """
        if not self.has_capture:
            return
        check_conservation(self.trace, self.totals)
        for report, kinds in NSYS_SUMS.items():
            if report not in self.reports:
                continue
            ours = int(self.totals.loc[kinds, "duration_ns"].sum())
            theirs = int(self.reports[report]["total_time_ns"].sum())
            if ours != theirs:
                raise ConservationError(
                    f"the operations take {ours} ns in total, but nsys's report {report} gives {theirs} ns"
                )
        num_steps = int((self.ranges["role"] == "step").sum())
        expected_steps = len(self.modes.step_modes)
        if num_steps != expected_steps:
            raise ConservationError(
                f"the capture contains {num_steps} steps, but {expected_steps} steps were run"
            )
        named = self.named_operations
        lost_ns = named["duration_ns"].sum() - self.operations["total_ns"].sum()
        lost_count = len(named) - self.operations["count"].sum()
        if lost_ns or lost_count:
            raise ConservationError(
                f"the table lacks {lost_count} operations ({lost_ns} ns) that the capture contains"
            )

    @cached_property
    def results(self) -> dict[str, Any]:
        """The run's results for the record, in addition to the tables."""
        results: dict[str, Any] = {"tool": self.tool, "learning_rate": self.modes.learning_rate}
        if self.impossible:
            results["inconsistent"] = str(self.impossible)
        for mode, outcome in self.modes.modes.items():
            results[f"{mode}_status"] = outcome["status"]
            results[f"{mode}_reason"] = outcome["reason"]
        if self.has_capture:
            results["operations"] = int(self.totals["operations"].sum())
            results["operations_ns"] = int(self.totals["duration_ns"].sum())
        if {*NSYS_SUMS} <= {*self.reports}:
            results["nsys_ns"] = results["operations_ns"]
        return results

    # The tables

    @cached_property
    def complete_operations(self) -> pd.DataFrame:
        """Every step's operations with their mode and region, except for modes that ran out of memory."""
        mode_of_step = {step: mode for step, mode in self.mode_of_step.items() if mode in self.named_step}
        operations = self.trace[self.trace["step"].isin(mode_of_step)].copy()
        operations["mode"] = operations["step"].map(mode_of_step)
        region = operations["region"].astype(str)
        for phase, name in DEFAULT_REGIONS.items():
            is_unattributed = (operations["phase"] == phase) & (region == UNATTRIBUTED)
            region = region.mask(is_unattributed, name)
        return operations.assign(region=region)

    @property
    def named_operations(self) -> pd.DataFrame:
        """The operations of the named steps."""
        is_named = self.complete_operations["step"].isin(self.named_step.values())
        return self.complete_operations[is_named]

    @property
    def unnamed_operations(self) -> pd.DataFrame:
        """The operations of all other steps."""
        is_named = self.complete_operations["step"].isin(self.named_step.values())
        return self.complete_operations[~is_named]

    @cached_property
    def operations(self) -> pd.DataFrame:
        """Operation counts and times in one step of each mode, by phase, region, category and kernel."""
        if not self.has_capture:
            return pd.DataFrame(columns=OPERATIONS)
        rows = self.named_operations.astype(dict.fromkeys(OPERATION, str))
        durations = rows.groupby(OPERATION)["duration_ns"]
        return durations.agg(count="size", total_ns="sum").reset_index()

    @cached_property
    def clocks(self) -> pd.DataFrame:
        """The times of profiled steps by phase (excluding the named steps), and the times of unprofiled steps."""
        unprofiled = self._unprofiled_clocks()
        if not self.has_capture:
            return unprofiled
        named_steps = {*self.named_step.values()}
        steps = []
        number_in_mode = {}
        for step, mode in self.mode_of_step.items():
            number_in_mode[step] = self.modes.step_modes[:step].count(mode)
            if mode in self.named_step and step not in named_steps:
                steps.append(step)
        ranges = self.ranges[self.ranges["step"].isin(steps)]
        rows = phase_clocks(self.unnamed_operations, ranges).astype({"phase": str})
        rows["mode"] = rows["step"].map(self.mode_of_step)
        numbers = rows["step"].map(number_in_mode)
        wall_times_ms = []
        for mode, number, phase in zip(rows["mode"], numbers, rows["phase"]):
            profiled_ms = self.modes.modes[mode]["profiled_ms"]
            wall_times_ms.append(profiled_ms[number] if phase == TOTAL else np.nan)
        rows = rows.assign(wall_ms=wall_times_ms, enqueue_ms=np.nan, profiled=True, step=numbers - 1)
        return pd.concat([rows, unprofiled], ignore_index=True)[CLOCKS]

    def _unprofiled_clocks(self) -> pd.DataFrame:
        rows = []
        for mode, outcome in self.modes.modes.items():
            times_ms = zip(outcome["unprofiled_ms"], outcome["enqueue_ms"])
            for number, (wall_ms, enqueue_ms) in enumerate(times_ms):
                row = {
                    "mode": mode,
                    "phase": TOTAL,
                    "step": number,
                    "profiled": False,
                    "wall_ms": wall_ms,
                    "enqueue_ms": enqueue_ms,
                }
                rows.append(row)
        return pd.DataFrame(rows, columns=CLOCKS)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """The operations in two milliseconds from the middle of the forward pass, both eager and as a CUDA graph.

        Times are relative to the start of each window.
        """
        empty = pd.DataFrame(columns=TIMELINE)
        if not self.has_capture:
            return empty
        replayed = self.trace[self.trace["region"] == REPLAY]
        last_launch = replayed["launch_start_ns"].max()  # the same for all operations of the graph
        graph = replayed[replayed["launch_start_ns"] == last_launch]
        unnamed = self.unnamed_operations
        forward = unnamed[unnamed["mode"] == "forward"]
        lanes = [forward, graph.assign(mode=REPLAYED)]
        windows = [cut_window(lane) for lane in lanes if len(lane) > 1]  # a single operation isn't a graph
        return pd.concat(windows or [empty], ignore_index=True)

    # The same operations from nsys's CSV reports

    @cached_property
    def events(self) -> pd.DataFrame:
        """The operations of one step in mode "forward" and one in mode "step" (the full step).

        They come from nsys's CSV reports, or from the capture itself if there are no reports.
        """
        trace = self.reports.get("cuda_gpu_trace", pd.DataFrame())
        projected = self.reports.get("nvtx_gpu_proj_trace", pd.DataFrame())
        steps = self._reported_steps()
        if steps and not trace.empty and not projected.empty:
            parts = [cut_step(trace, projected, mode, step) for mode, step in steps.items()]
            return pd.concat(parts)
        return self.named_operations if self.has_capture else pd.DataFrame(columns=EVENTS)

    def _reported_steps(self) -> dict[str, int]:
        return {mode: self.named_step[mode] for mode in ("forward", "step") if mode in self.named_step}

    @cached_property
    def report_check(self) -> pd.DataFrame:
        """The number of operations and their total time, in the CSV reports and in :attr:`operations`.

        Raises:
            ConservationError: If the times differ.
        """
        unit = "operators" if self.config.device == "cpu" else "operations"
        rows: list[dict[str, Any]] = []
        for mode in self._reported_steps():
            events = self.events[self.events["mode"] == mode]
            table = self.operations[self.operations["mode"] == mode]
            events_ns = events["duration_ns"].sum()
            row = {
                "mode": mode,
                f"{unit} in the reports": len(events),
                "time in the reports, ms": events_ns / 1e6,
                f"{unit} in the table": table["count"].sum(),
                "differs by, ns": events_ns - table["total_ns"].sum(),
            }
            rows.append(row)
        if any(row["differs by, ns"] for row in rows):
            raise ConservationError(f"the CSV reports differ from the table of operations: {rows}")
        return pd.DataFrame(rows)


def cut_window(lane: pd.DataFrame) -> pd.DataFrame:
    """Return the operations of the last step that run or are launched within a window of :data:`WINDOW_NS`.

    The window begins at the middle operation, or earlier if the rest of the step is shorter than the window.
    """
    rows = lane[lane["step"] == lane["step"].max()].sort_values("start_ns")
    starts = rows["start_ns"]
    latest_begin = starts.iloc[-1] + rows["duration_ns"].iloc[-1] - WINDOW_NS
    middle = starts.iloc[len(rows) // 2]
    begin = int(max(starts.iloc[0], min(middle, latest_begin)))
    start_ns = starts - begin
    launch_ns = rows["launch_start_ns"].astype("int64") - begin
    rows = rows.assign(
        start_ns=start_ns,
        launch_ns=launch_ns,
        kernel_category=rows["kernel_category"].astype(str),
        launch_duration_ns=rows["launch_duration_ns"].astype("int64"),
    )
    end_ns = start_ns + rows["duration_ns"]
    runs_inside = (start_ns < WINDOW_NS) & (end_ns > 0)
    is_launched_inside = launch_ns.between(0, WINDOW_NS)
    return rows.loc[runs_inside | is_launched_inside, TIMELINE].reset_index(drop=True)


def cut_step(
    trace: pd.DataFrame,
    projected: pd.DataFrame,
    mode: str,
    number: int,
) -> pd.DataFrame:
    """Return the operations in nsys's reports that start within one step's projection onto the GPU.

    nsys's projection of the backward pass contains hardly any operations, because another thread launches its
    kernels. Therefore, all operations between the loss and the optimizer count as backward.

    Args:
        trace: the report ``cuda_gpu_trace``.
        projected: the report ``nvtx_gpu_proj_trace``.
        mode: the step's mode, which fills the column ``mode``.
        number: the step's index in the capture.
    """
    spans = projected.assign(range=projected["name"].str.rpartition(":")[2])
    spans["end_ns"] = spans["projected_start_ns"] + spans["projected_duration_ns"]
    spans = spans.sort_values("projected_start_ns", kind="stable")
    step = spans[spans["range"] == "step"].iloc[number]
    step_start, step_end = step["projected_start_ns"], step["end_ns"]
    rows = trace[trace["start_ns"].between(step_start, step_end - 1)]
    rows = rows.assign(
        mode=mode,
        phase="backward",
        region="",
        kernel_category=kernel_categories(rows["name"]).astype(str),
    )
    is_in_step = spans["projected_start_ns"].between(step_start, step_end)
    for span in spans[is_in_step].itertuples():
        starts_inside = rows["start_ns"].between(span.projected_start_ns, span.end_ns - 1)
        if span.range in ("forward", "loss", "optimizer"):
            rows.loc[starts_inside, "phase"] = span.range
        elif span.range.startswith("attention."):
            rows.loc[starts_inside, "region"] = span.range
    return rows
