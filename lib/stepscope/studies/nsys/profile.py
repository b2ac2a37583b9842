"""Profile the modes of a training step: with Nsight Systems, or with torch.profiler where nsys is missing.

    profile = profile_with_nsys(ranged, config)
    profile.operations   one step of each mode: count and time by phase, region, kernel category and kernel
    profile.clocks       every other step: wall time, enqueue time, GPU time
    profile.timeline     two milliseconds from the middle of forward, also replayed as a CUDA graph
    profile.events       one step of forward and of the full step, operation by operation

Every sum is checked to the nanosecond. If one doesn't add up, the call raises a ConservationError.
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
# nsys's own sums by report, and the kinds of operations in them
NSYS_SUMS = {"cuda_gpu_kern_sum": ["kernel"], "cuda_gpu_mem_time_sum": ["memcpy", "memset"]}
REPORTS = (*NSYS_SUMS, "cuda_gpu_trace", "nvtx_gpu_proj_trace", "nvtx_kern_sum")
# Names for operations outside every region: in backward autograd itself sums the gradients of a tensor that
# was used twice.
UNNAMED = {"backward": "gradient accumulation", "optimizer": "optimizer", OUTSIDE: OUTSIDE}
OPERATIONS = ["mode", "phase", "region", "kernel_category", "name", "count", "total_ns"]
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
    """Run ``ranged`` for every mode in a process of its own, under the profiler, and read the profile.

    Profiled steps that take more GPU time than unprofiled ones, or that differ from each other, are profiled
    again, at most twice; what stays impossible is marked.

    Args:
        ranged: runs one step in NVTX ranges; it gets the step, the annotation and ``synchronize``.

    Raises:
        NsysError: the process failed, or the profiler left no file.
        ConservationError: the operations don't add up.
    """
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="stepscope-nsys-") as folder:
            profile = profile_once(ranged, config, Path(folder))
        if not profile.impossible:
            break
        print("once more:", profile.impossible)
    print("profiled by", profile.tool, "- steps profiled:", *profile.modes.step_modes)
    profile.check()
    return profile


def profile_once(ranged: Callable[..., None], config: StepConfig, folder: Path) -> "Profile":
    tool, nsys = profiler_here(config.device)
    (folder / "ranged.py").write_text(IMPORTS + inspect.getsource(ranged))
    fields = config.model_dump(include={*StepConfig.model_fields} - {"study", "size", "mode"}, mode="json")
    program = [
        sys.executable,
        "-m",
        "stepscope.measure.profiled_process",
        "nsys" if nsys else "torch",
        str(folder),
        json.dumps(fields),
    ]
    if nsys:
        program = [str(nsys), "profile", *NSYS_OPTIONS, "--output", str(folder / "capture"), *program]
    ended = subprocess.run(
        program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    modes = read_profiled_modes(folder, nsys is not None, ended.stdout)
    profile = Profile(config, tool, modes)
    if modes.file and nsys:
        export = export_capture(nsys, modes.file, folder / "capture.sqlite")
        profile.reports = {
            name: read_nsys_csv(path) for name, path in make_reports(nsys, export, REPORTS).items()
        }
        profile.trace, profile.ranges = load_trace(export)
        profile.totals = activity_totals(export)
    elif modes.file:
        profile.trace, profile.ranges, profile.totals = load_torch_trace(modes.file)
    return profile


@dataclass
class Profile:
    """One configuration's profile.

    trace: every operation of the capture. ranges: the NVTX ranges. totals: number and time of the operations
    by kind. reports: nsys's CSV reports by name; empty without nsys.
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
        """By mode the first step, which has a range for each region of the model."""
        return {
            mode: self.modes.step_modes.index(mode)
            for mode in self.modes.step_modes
            if self.modes.modes[mode]["status"] == "ok"
        }

    @cached_property
    def impossible(self) -> dict[str, str]:
        """By mode the readings that can't be true; a CPU's operators don't show any."""
        if self.config.device == "cpu" or not self.has_capture:
            return {}
        steps = phase_clocks(self.trace[self.trace["step"] >= 0], self.ranges).query("phase == 'total'")
        gpu_ms, impossible = steps.set_index("step")["busy_ns"] / 1e6, {}
        for mode, outcome in self.modes.modes.items():
            mode_steps = [step for step, name in self.mode_of_step.items() if name == mode][1:]
            row = outcome["clock"] | {
                "wall_ms": pd.Series(outcome["unprofiled_ms"]).median(),
                "gpu_ms": gpu_ms.reindex(mode_steps).median(),
            }
            if words := find_inconsistencies(row, gpu_ms.reindex(mode_steps).dropna().tolist()):
                impossible[mode] = words
        return impossible

    # Conservation

    def check(self) -> None:
        """Check that nothing was lost or counted twice, on the way from the capture to the tables."""
        if not self.has_capture:
            return
        check_conservation(self.trace, self.totals)
        for report, kinds in NSYS_SUMS.items():
            if report in self.reports:
                ours = int(self.totals.loc[kinds, "duration_ns"].sum())
                theirs = int(self.reports[report]["total_time_ns"].sum())
                if ours != theirs:
                    raise ConservationError(
                        f"operations sum to {ours} ns, and nsys's own {report} to {theirs} ns"
                    )
        steps = int((self.ranges["role"] == "step").sum())
        if steps != len(self.modes.step_modes):
            raise ConservationError(
                f"the capture holds {steps} steps, expected the {len(self.modes.step_modes)} that were run"
            )
        named_ns = self.named["duration_ns"].sum()
        lost_ns = named_ns - self.operations["total_ns"].sum()
        if lost_ns or self.operations["count"].sum() != len(self.named):
            raise ConservationError(f"the table of operations lost {lost_ns} ns")

    @cached_property
    def results(self) -> dict[str, Any]:
        """What the record keeps besides the tables."""
        results: dict[str, Any] = {"tool": self.tool, "learning_rate": self.modes.learning_rate}
        if self.impossible:
            results["inconsistent"] = str(self.impossible)
        for mode, outcome in self.modes.modes.items():
            results |= {f"{mode}_status": outcome["status"], f"{mode}_reason": outcome["reason"]}
        if self.has_capture:
            results |= {
                "operations": int(self.totals["operations"].sum()),
                "operations_ns": int(self.totals["duration_ns"].sum()),
            }
        if {*NSYS_SUMS} <= {*self.reports}:
            results["nsys_ns"] = results["operations_ns"]
        return results

    # The tables

    @cached_property
    def complete(self) -> pd.DataFrame:
        """The operations of every step of a mode that ended well, with mode, and a name for each region."""
        mode_of_step = {step: mode for step, mode in self.mode_of_step.items() if mode in self.named_step}
        operations = self.trace[self.trace["step"].isin(mode_of_step)].copy()
        operations["mode"] = operations["step"].map(mode_of_step)
        region = operations["region"].astype(str)
        for phase, name in UNNAMED.items():
            region = region.mask((operations["phase"] == phase) & (region == UNATTRIBUTED), name)
        return operations.assign(region=region)

    @property
    def named(self) -> pd.DataFrame:
        return self.complete[self.complete["step"].isin(self.named_step.values())]

    @property
    def unnamed(self) -> pd.DataFrame:
        return self.complete[~self.complete["step"].isin(self.named_step.values())]

    @cached_property
    def operations(self) -> pd.DataFrame:
        """Count and time in one step of each mode, by phase, region, kernel category and kernel."""
        if not self.has_capture:
            return pd.DataFrame(columns=OPERATIONS)
        keys = OPERATIONS[:5]
        rows = self.named.astype(dict.fromkeys(keys, str))
        return rows.groupby(keys)["duration_ns"].agg(count="size", total_ns="sum").reset_index()

    @cached_property
    def clocks(self) -> pd.DataFrame:
        """Each profiled step but the named ones, by phase, and each unprofiled step."""
        plain = pd.DataFrame(
            [
                {
                    "mode": mode,
                    "phase": TOTAL,
                    "step": number,
                    "profiled": False,
                    "wall_ms": wall_ms,
                    "enqueue_ms": enqueue_ms,
                }
                for mode, outcome in self.modes.modes.items()
                for number, (wall_ms, enqueue_ms) in enumerate(
                    zip(outcome["unprofiled_ms"], outcome["enqueue_ms"])
                )
            ],
            columns=CLOCKS,
        )
        if not self.has_capture:
            return plain
        named_steps = {*self.named_step.values()}
        steps = {step for step, mode in self.mode_of_step.items() if mode in self.named_step} - named_steps
        rows = phase_clocks(self.unnamed, self.ranges[self.ranges["step"].isin(steps)])
        rows = rows.astype({"phase": str})
        rows["mode"] = rows["step"].map(self.mode_of_step)
        place = rows["step"].map(
            {step: self.modes.step_modes[:step].count(mode) for step, mode in self.mode_of_step.items()}
        )
        wall_times_ms = [
            self.modes.modes[mode]["profiled_ms"][number] if phase == TOTAL else np.nan
            for mode, number, phase in zip(rows["mode"], place, rows["phase"])
        ]
        rows = rows.assign(wall_ms=wall_times_ms, enqueue_ms=np.nan, profiled=True, step=place - 1)
        return pd.concat([rows, plain], ignore_index=True)[CLOCKS]

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """Two milliseconds from the middle of forward, and of forward replayed as a CUDA graph; times count
        from the start of the window."""
        empty = pd.DataFrame(columns=TIMELINE)
        if not self.has_capture:
            return empty
        replayed = self.trace[self.trace["region"] == REPLAY]  # a graph's operations share the last launch
        replayed = replayed[replayed["launch_start_ns"] == replayed["launch_start_ns"].max()]
        forward = self.unnamed[self.unnamed["mode"] == "forward"]
        lanes = [forward, replayed.assign(mode=REPLAYED)]
        windows = [window(lane) for lane in lanes if len(lane) > 1]  # a launch of one operation is no graph
        return pd.concat(windows or [empty], ignore_index=True)

    # The same from nsys's CSV reports

    @cached_property
    def events(self) -> pd.DataFrame:
        """The operations of one step of forward and of the full step: from nsys's CSV reports, or without
        nsys from the capture itself."""
        trace = self.reports.get("cuda_gpu_trace", pd.DataFrame())
        projected = self.reports.get("nvtx_gpu_proj_trace", pd.DataFrame())
        modes = [mode for mode in ("forward", "step") if mode in self.named_step]
        if modes and not trace.empty and not projected.empty:
            return pd.concat([cut(trace, projected, mode, self.named_step[mode]) for mode in modes])
        return self.named if self.has_capture else pd.DataFrame(columns=EVENTS)

    @cached_property
    def report_check(self) -> pd.DataFrame:
        """Number and time of the operations by the CSV reports, next to :attr:`operations`.

        Raises:
            ConservationError: the times differ. (The tables are kept by then.)
        """
        unit = "operators" if self.config.device == "cpu" else "operations"
        rows = []
        for mode in (mode for mode in ("forward", "step") if mode in self.named_step):
            events = self.events[self.events["mode"] == mode]
            table = self.operations[self.operations["mode"] == mode]
            rows.append(
                {
                    "mode": mode,
                    f"{unit} in the reports": len(events),
                    "time in the reports, ms": events["duration_ns"].sum() / 1e6,
                    f"{unit} in the table": table["count"].sum(),
                    "differs by, ns": events["duration_ns"].sum() - table["total_ns"].sum(),
                }
            )
        if any(row["differs by, ns"] for row in rows):
            raise ConservationError(f"the CSV reports and the table of operations differ: {rows}")
        return pd.DataFrame(rows)


def window(lane: pd.DataFrame) -> pd.DataFrame:
    """The last step's window, from its middle on, or earlier if the step ends too soon for that."""
    rows = lane[lane["step"] == lane["step"].max()].sort_values("start_ns")
    latest = rows["start_ns"].iloc[-1] + rows["duration_ns"].iloc[-1] - WINDOW_NS
    begin = int(max(rows["start_ns"].iloc[0], min(rows["start_ns"].iloc[len(rows) // 2], latest)))
    launch = rows["launch_start_ns"].astype("int64") - begin
    rows = rows.assign(
        start_ns=rows["start_ns"] - begin,
        launch_ns=launch,
        kernel_category=rows["kernel_category"].astype(str),
        launch_duration_ns=rows["launch_duration_ns"].astype("int64"),
    )
    ends = rows["start_ns"] + rows["duration_ns"]
    inside = (rows["start_ns"] < WINDOW_NS) & (ends > 0) | launch.between(0, WINDOW_NS)
    return rows.loc[inside, TIMELINE].reset_index(drop=True)


def cut(trace: pd.DataFrame, projected: pd.DataFrame, mode: str, number: int) -> pd.DataFrame:
    """The operations of one step by nsys's reports: those that start within the step's projection.

    Backward has nearly no operations of its own there, because another thread launches its kernels; so
    whatever runs between the loss and the optimizer is backward.
    """
    spans = projected.assign(range=projected["name"].str.rpartition(":")[2])
    spans["end_ns"] = spans["projected_start_ns"] + spans["projected_duration_ns"]
    spans = spans.sort_values("projected_start_ns", kind="stable")
    step = spans[spans["range"] == "step"].iloc[number]
    rows = trace[trace["start_ns"].between(step["projected_start_ns"], step["end_ns"] - 1)]
    rows = rows.assign(
        mode=mode, phase="backward", region="", kernel_category=kernel_categories(rows["name"]).astype(str)
    )
    spans = spans[spans["projected_start_ns"].between(step["projected_start_ns"], step["end_ns"])]
    for span in spans.itertuples():
        within = rows["start_ns"].between(span.projected_start_ns, span.end_ns - 1)
        if span.range in ("forward", "loss", "optimizer"):
            rows.loc[within, "phase"] = span.range
        elif span.range.startswith("attention."):
            rows.loc[within, "region"] = span.range
    return rows
