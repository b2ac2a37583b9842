"""The nsys study: the captures of one size and context, as tables in which everything adds up."""
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.report.tables import number
from stepscope.step import turn
from stepscope.step.clocks import WHOLE
from stepscope.step.stats import launch_bound
from stepscope.studies.nsys.config import Config
from stepscope.studies.nsys.tables import REPLAYED, three_clocks
from stepscope.traces.attribution import OUTSIDE, UNATTRIBUTED, ConservationError
from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.export import activity_totals, load_trace
from stepscope.traces.kernel_names import short_name
from stepscope.traces.nsys_program import (
    REPLAY,
    Capture,
    capture,
    export_capture,
    make_reports,
    profiler_here,
    report_total,
)
from stepscope.traces.torch_trace import load_torch_trace

# What no region's range was open for. In backward, the engine itself sums the gradients of a tensor that was
# used twice.
UNNAMED = {"backward": "gradient accumulation", "optimizer": "optimizer", OUTSIDE: OUTSIDE}
# nsys's own sums of what ran, by the kinds of operations that are in them.
OWN_SUMS = {"cuda_gpu_kern_sum": ["kernel"], "cuda_gpu_mem_time_sum": ["memcpy", "memset"]}
WINDOW_NS = 2_000_000  # of the timeline
OPERATIONS = ["mode", "phase", "region", "family", "name", "count", "total_ns"]
CLOCKS = ["mode", "phase", "step", "captured", "wall_ms", "host_ns", "projected_ns", "operations_ns",
          "busy_ns", "operations"]
TIMELINE = ["mode", "family", "launch_ns", "launch_duration_ns", "start_ns", "duration_ns"]


def profile_run(config: Config) -> tuple[dict[str, pd.DataFrame], dict]:
    """Capture every mode of a configuration and make its tables.

    Returns:
        tables: see :func:`analyse`.
        results: tool; of each mode its status and reason; the capture's number of operations and their time,
            and nsys's own sum of that time, where nsys tells it; seconds.

    Raises:
        NsysError, TraceError, ConservationError: as the functions that this calls.
    """
    tool, nsys = profiler_here(config.device)
    with tempfile.TemporaryDirectory(prefix="stepscope-nsys-") as temporary:
        folder = Path(temporary)
        taken = capture(config, folder, nsys)
        turn.held_s += taken.seconds["turn_s"]  # by the process that was watched
        results = {"tool": tool, **taken.seconds} | {
            f"{mode}_{key}": outcome[key] for mode, outcome in taken.modes.items()
            for key in ("status", "reason")}
        if taken.file is None:
            return analyse(taken, pd.DataFrame(), pd.DataFrame()), results
        own = {}
        if nsys:
            export = export_capture(nsys, taken.file, folder / "capture.sqlite")
            operations, ranges = load_trace(export)
            totals = activity_totals(export)
            own = nsys_sums(make_reports(nsys, export, (*OWN_SUMS,)), totals)
        else:
            operations, ranges, totals = load_torch_trace(taken.file)
        check_conservation(operations, totals)
        results |= {"operations": int(totals["operations"].sum()),
                    "operations_ns": int(totals["duration_ns"].sum())}
        return analyse(taken, operations, ranges), results | own


def nsys_sums(reports: dict[str, Path], totals: pd.DataFrame) -> dict[str, int]:
    """nsys's own sums of a capture, held against what was accounted for.

    Returns:
        nsys_ns, the time of all operations; empty where a report is missing.

    Raises:
        ConservationError: a sum is another than ours.
        NsysError: a report cannot be used.
    """
    ours = {report: int(totals.loc[kinds, "duration_ns"].sum()) for report, kinds in OWN_SUMS.items()}
    for report, path in reports.items():
        if (total := report_total(path)) != ours[report]:
            raise ConservationError(f"operations sum to {ours[report]} ns, and nsys's own {report} to"
                                    f" {total} ns")
    return {"nsys_ns": sum(ours.values())} if set(reports) == set(ours) else {}


def analyse(taken: Capture, operations: pd.DataFrame, ranges: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables of one capture.

    Args:
        operations, ranges: as load_trace returns them.

    Returns:
        operations: of the captured step of each mode whose regions are named, a row for each phase, region,
            family and name: how many there are in one step, and their time.
        clocks: a row for each phase and the whole of the other captured steps (see ``phase_clocks``), and for
            the whole of each plain step (captured is False): its wall time by the host's clock.
        timeline: two milliseconds out of the middle of forward, and of it replayed as a CUDA graph (mode
            "replayed"), a row an operation: when the host launched it, and when it ran; times count from the
            window's begin.

    Raises:
        ConservationError: the capture has other steps than were run, or a table lost an operation.
    """
    plain = [{"mode": mode, "phase": WHOLE, "step": step, "captured": False, "wall_ms": wall_ms}
             for mode, outcome in taken.modes.items() for step, wall_ms in enumerate(outcome["plain_ms"])]
    clocks = pd.DataFrame(plain, columns=CLOCKS)
    if operations.empty:
        return {"operations": pd.DataFrame(columns=OPERATIONS), "clocks": clocks,
                "timeline": pd.DataFrame(columns=TIMELINE)}
    steps = int((ranges["role"] == "step").sum())
    if steps != len(taken.inside):
        raise ConservationError(f"the capture holds {steps} steps, expected the {len(taken.inside)} that were"
                                " run")
    mode = dict(enumerate(taken.inside))
    named = {taken.inside.index(name) for name in mode.values()}
    complete = {step for step, name in mode.items() if taken.modes[name]["status"] == "ok"}
    replayed = operations[operations["region"] == REPLAY]  # a graph's operations have one launch, the last
    replayed = replayed[replayed["launch_start_ns"] == replayed["launch_start_ns"].max()]
    operations = operations[operations["step"].isin(complete)].copy()
    operations["mode"] = operations["step"].map(mode)
    region = operations["region"].astype(str)
    for phase, name in UNNAMED.items():
        region = region.mask((operations["phase"] == phase) & (region == UNATTRIBUTED), name)
    operations["region"] = region
    of_named = operations["step"].isin(named)
    own = _clocks(taken, operations[~of_named], ranges[ranges["step"].isin(complete - named)])
    clocks = pd.concat([own, clocks], ignore_index=True)
    lanes = [operations[~of_named & (operations["mode"] == "forward")], replayed.assign(mode=REPLAYED)]
    windows = [_window(lane) for lane in lanes if len(lane) > 1]  # one launch of one is no graph
    return {"operations": _summed(operations[of_named]), "clocks": clocks[CLOCKS],
            "timeline": pd.concat(windows or [pd.DataFrame(columns=TIMELINE)], ignore_index=True)}


def _summed(operations: pd.DataFrame) -> pd.DataFrame:
    keys = OPERATIONS[:5]
    rows = operations.astype(dict.fromkeys(keys, str))
    summed = rows.groupby(keys)["duration_ns"].agg(count="size", total_ns="sum").reset_index()
    lost = operations["duration_ns"].sum() - summed["total_ns"].sum()
    if lost or summed["count"].sum() != len(rows):
        raise ConservationError(f"the table of operations lost {lost} ns")
    return summed


def _clocks(taken: Capture, operations: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    rows = phase_clocks(operations, ranges).astype({"phase": str})
    place = {step: taken.inside[:step].count(mode) for step, mode in enumerate(taken.inside)}
    rows["mode"] = rows["step"].map(dict(enumerate(taken.inside)))
    walls = [taken.modes[mode]["captured_ms"][place[step]] if phase == WHOLE else np.nan
             for mode, step, phase in zip(rows["mode"], rows["step"], rows["phase"])]
    return rows.assign(wall_ms=walls, captured=True, step=rows["step"].map(place) - 1)


def _window(operations: pd.DataFrame) -> pd.DataFrame:
    """Of the last step a window from its middle on, or as much earlier as it ends too soon for that."""
    rows = operations[operations["step"] == operations["step"].max()].sort_values("start_ns")
    latest = rows["start_ns"].iloc[-1] + rows["duration_ns"].iloc[-1] - WINDOW_NS
    begin = int(max(rows["start_ns"].iloc[0], min(rows["start_ns"].iloc[len(rows) // 2], latest)))
    launch = rows["launch_start_ns"].astype("int64") - begin
    rows = rows.assign(start_ns=rows["start_ns"] - begin, launch_ns=launch,
                       launch_duration_ns=rows["launch_duration_ns"].astype("int64"),
                       family=rows["family"].astype(str))
    inside = ((rows["start_ns"] < WINDOW_NS) & (rows["start_ns"] + rows["duration_ns"] > 0)
              | launch.between(0, WINDOW_NS))
    return rows.loc[inside, TIMELINE].reset_index(drop=True)


def finding(tables: dict[str, pd.DataFrame], device: str) -> str:
    """What one run says of forward, in two sentences."""
    clocks = three_clocks(tables["clocks"]) if len(tables["clocks"]) else pd.DataFrame(columns=["mode"])
    forward = clocks[clocks["mode"] == "forward"]
    if forward.empty or tables["operations"].empty:
        return "Nothing was captured."
    whole = forward.set_index("phase").loc[WHOLE]
    rows = tables["operations"][tables["operations"]["mode"] == "forward"]
    kernels = rows.groupby("name")[["count", "total_ns"]].sum().sort_values("total_ns", ascending=False)
    busy = whole["gpu_ms"] / whole["plain_ms"]
    bound = "" if device == "cpu" else ", launch-bound" if launch_bound(busy) else ", GPU-bound"
    top = kernels.iloc[0]
    share = top["total_ns"] / kernels["total_ns"].sum()
    return (f"Forward: {number(whole['gpu_ms'], 'ms')} of GPU time, {number(whole['plain_ms'], 'ms')} of wall"
            f" time: {number(busy, '%')} busy{bound}. {short_name(kernels.index[0])} takes"
            f" {number(share, '%')} of it in {int(top['count'])} launches.")
