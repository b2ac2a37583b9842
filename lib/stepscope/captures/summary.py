"""Summarize a capture with one line per fact. ``stepscope profile FILE`` prints the summary."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.captures.advice import (
    MAX_NAME_CHARS,
    MIN_ADVICE_SHARE,
    MIN_KNOWN_LAUNCH_SHARE,
    capture_again,
    rank_advice,
)
from stepscope.captures.capture import WHOLE_GRAPH, Capture, load_capture_or_sums
from stepscope.captures.communication import (
    Exposed,
    collective,
    communicates_on_compute_stream,
    exposed_communication,
)
from stepscope.captures.idle_time import HOST_CAUSES, explain_gaps, sum_by_cause
from stepscope.captures.kernel_summary import (
    categories_line,
    generated_line,
    kernel_lines,
    leading_lines,
    matmul_line,
    phases_line,
    summarize_kernel_sums,
)
from stepscope.captures.lines import Line, clean, count_text, counted, listed, short
from stepscope.captures.ranks import rank_lines
from stepscope.captures.step_breakdown import COMMUNICATION, Device, busiest_device, busy_ns, devices
from stepscope.report.tables import digits, number
from stepscope.stats import LAUNCH_BOUND
from stepscope.traces.attribution import OUTSIDE, TraceError
from stepscope.traces.kernel_categories import MATMUL

MIN_OPS_TO_JUDGE = 5  # with fewer operations, the bound is unknown
MIN_SHARE_SHOWN = 0.0005  # share of the step; smaller parts are omitted
MIN_WAITING = 0.05  # share of exposed communication; shorter waiting is omitted
MAX_NAMED = 4  # maximum number of outliers or causes of idle time in one line
BOUND_BY_CAUSE = {
    "sync": "sync-bound",
    "call": "host-bound",
    "host": "host-bound",
    "unnamed": "host-bound",
    "launch": "launch-bound",
}


def profile(
    path: Path | str,
    step: str | None = None,
    phases: Mapping[str, str] | None = None,
    device: int | None = None,
    csv: Path | str | None = None,
    from_ms: float | None = None,
    to_ms: float | None = None,
) -> list[Line]:
    """Summarize a capture file with one line per fact. The first line describes the capture itself.

    Args:
        step, phases: as in ``load_capture``.
        device: the number of the GPU to summarize, or None for the busiest GPU.
        csv: a CSV file to which all operations are written, one per line.
        from_ms, to_ms: as in ``Capture.between``.

    Raises:
        TraceError: If the capture can't be read, or doesn't contain this GPU, step or phase.
        OSError: If the CSV can't be written.
    """
    capture = load_capture_or_sums(path, step, phases)
    if isinstance(capture, Capture) and (from_ms is not None or to_ms is not None):
        capture = capture.between(from_ms, to_ms)
    if csv is not None:
        (capture.operations if isinstance(capture, Capture) else capture).to_csv(csv, index=False)
    return summarize(capture, device) if isinstance(capture, Capture) else summarize_kernel_sums(capture)


def summarize(capture: Capture, device: int | None = None) -> list[Line]:
    """Summarize a loaded capture; see ``profile``."""
    busiest = busiest_device(capture, device)
    details = {(busiest.number, busiest.process): busiest}
    gpus = [details.get((gpu.number, gpu.process), gpu) for gpu in devices(capture)]
    gaps = explain_gaps(busiest)
    causes = sum_by_cause(gaps, len(busiest.median_indices))
    # compared first, because the lines about communication use the division into transfer and waiting
    compared = _rank_lines(gpus)
    breakdowns = [_breakdown_line(gpu.name if len(gpus) > 1 else "step on GPU", gpu) for gpu in gpus]
    lines = [
        _capture_line(busiest, gpus),
        *breakdowns,
        *compared,
        _outliers_line(busiest),
        _startup_line(busiest, gaps),
        phases_line(busiest),
        categories_line(busiest),
        *kernel_lines(busiest.kernels),
        *leading_lines(busiest),
        _bound_line(busiest, gaps, causes),
        _idle_line(busiest, causes),
        _communication_line(busiest),
        matmul_line(busiest),
        generated_line(busiest),
        *_advice_lines(busiest, causes),
        _not_available_line(busiest),
    ]
    return [line for line in lines if line.text]


def phases_of(options: Sequence[str]) -> dict[str, str] | None:
    """Convert options such as "forward=NAME" to a dict that maps range names or patterns to phases.

    If there are no options, return None.

    Raises:
        TraceError: If an option doesn't have the form PHASE=NAME.
    """
    phases = {}
    for text in options:
        phase, _, name = text.partition("=")
        if not phase or not name:
            raise TraceError(
                f"--phase: got {clean(text)!r}, but expected forward=NAME, with the name of a range"
                " or a pattern such as *(F)"
            )
        phases[name] = phase
    return phases or None


def _rank_lines(gpus: Sequence[Device]) -> list[Line]:
    """Compare a capture's GPUs if they have steps in common; omit times that other lines contain."""
    names = [gpu.name for gpu in gpus]
    with suppress(TraceError):
        return [line for line in rank_lines(gpus, names) if line.label not in names]
    return []


def _capture_line(gpu: Device, gpus: Sequence[Device]) -> Line:
    capture, parts = gpu.capture, []
    if capture.rank and capture.rank[1] > 1:
        parts.append(f"rank {capture.rank[0]} of {capture.rank[1]}")
    name = clean(capture.gpus.get(gpu.number, "").removeprefix("NVIDIA ").removesuffix(" HBM3"))
    numbers, processes = {gpu.number for gpu in gpus}, {gpu.process for gpu in gpus}
    counts = []
    if len(processes) > 1:
        counts.append(f"{len(processes)} processes")
    if len(numbers) > 1:
        counts.append(f"{len(numbers)} GPUs")
    details = ", ".join(filter(None, (" on ".join(counts), f"details of {gpu.name}", name)))
    parts.append(details if len(gpus) > 1 else name or "unnamed GPU")
    start, end = gpu.windows[0, 0], gpu.windows[-1, 1]
    starts = gpu.classified_ops["start_ns"]
    operations = int(((starts >= start) & (starts < end)).sum())
    text = "; ".join([", ".join(parts), _steps_text(gpu), counted(operations, "operation")])
    left_out = (
        (gpu.excluded[~gpu.excluded["warm_up"]], "launched before"),
        (gpu.excluded[gpu.excluded["warm_up"]], "launched in a warm-up"),
        (gpu.classified_ops[starts >= end], "after the last step"),
    )
    reasons = [
        f"{len(rows):,} {where} ({number(rows['duration_ns'].sum() / 1e6, 'ms')})"
        for rows, where in left_out
        if len(rows)
    ]
    if reasons:
        text += f"; left out: {', '.join(reasons)}"
    return Line(
        "capture",
        text,
        {
            "gpu": name,
            "gpus": len(numbers),
            "processes": len(processes),
            "steps": len(gpu.windows) if gpu.has_steps else 0,
            "empty_steps": gpu.empty_steps,
            "operations": operations,
            "launched_before": len(gpu.excluded),
        },
    )


def _steps_text(gpu: Device) -> str:
    """Describe the capture's steps, and count the steps without GPU work."""
    names, count = gpu.host_steps["name"].tolist(), len(gpu.host_steps)
    if not count:
        return "no steps found: the entire capture counts as one step"
    from_to = " to ".join(dict.fromkeys(clean(name) for name in (names[0], names[-1])))
    text = f"{counted(count, 'step')} ({from_to})"
    if gpu.empty_steps == count:
        text += ", but no operation was launched in any of them"
    elif gpu.empty_steps:
        text += f", {gpu.empty_steps:,} of them without GPU work"
    return text if gpu.has_steps else f"{text}: the entire capture counts as one step"


def _breakdown_line(label: str, gpu: Device) -> Line:
    walls, median = gpu.breakdowns["wall"], gpu.median
    step_times = [digits(wall, "ms") for wall in walls.head(8)]
    if len(walls) > 8:
        step_times.append("...")
    steps_text = f" (median of {' '.join(step_times)})" if len(walls) > 1 else ""
    is_shown = (median >= MIN_SHARE_SHOWN * median["wall"]) | median.index.isin(["compute", "idle"])
    parts = median[is_shown].drop("wall")
    if gpu.untraced_graphs:
        parts = parts.rename({"idle": "unknown"})
    return Line(
        label if gpu.has_steps else label.removeprefix("step "),
        f"{number(median['wall'], 'ms')}{steps_text}: {listed(parts)}",
        {
            **{f"{name.replace(' ', '_')}_ms": value for name, value in median.items()},
            "steps_ms": walls.tolist(),
        },
    )


def _outliers_line(gpu: Device) -> Line:
    """Name the steps whose wall time is far from the median, and, for each, the part that differs the most."""
    texts = []
    for index in gpu.outliers[:MAX_NAMED]:
        extra_ms = (gpu.breakdowns.iloc[index] - gpu.median).drop("wall")
        part = str(extra_ms.abs().idxmax())
        wall = number(gpu.breakdowns["wall"].iloc[index], "ms")
        texts.append(f"{clean(gpu.step_names[index])} {wall} ({part} {extra_ms[part]:+.3g} ms)")
    text = ", ".join(texts)
    if len(gpu.outliers) > MAX_NAMED:
        text += f" and {len(gpu.outliers) - MAX_NAMED} more"
    return Line("outliers", text, {"count": len(gpu.outliers)})


def _startup_line(gpu: Device, gaps: pd.DataFrame) -> Line:
    """Describe the time before the GPU starts to work in each step, or the start-up if there are no steps."""
    wall = gpu.median["wall"]
    if gpu.startup_ms:
        share = number(gpu.startup_ms / wall, "%")
        text = f"{number(gpu.startup_ms, 'ms')} ({share}) pass before the GPU is steadily busy"
        begin = gpu.windows[0, 0]
        early = gpu.classified_ops[gpu.classified_ops["start_ns"] < begin + gpu.startup_ms * 1e6]
        early = early[early["part"] == COMMUNICATION]
        longest_ms = early["duration_ns"].max() / 1e6
        if longest_ms > 0.5 * gpu.startup_ms:
            longest = str(early["name"].loc[early["duration_ns"].idxmax()])
            text += f"; {short(longest)} spends {number(longest_ms, 'ms')} of it waiting for other GPUs"
        return Line("start-up", text, {"started_ms": gpu.startup_ms})
    head = gaps[gaps["head"] & (gaps["ms"] > 0) & gaps["cause"].isin(HOST_CAUSES)]
    ms = head["ms"].sum() / len(gpu.median_indices)
    if not gpu.has_steps or gpu.untraced_graphs or head.empty or ms < (1 - LAUNCH_BOUND) * wall:
        return Line("before", "")
    longest = head.loc[head["ms"].idxmax()]
    location = f", while the host is in {clean(longest['where'])}" if longest["where"] else ""
    share = number(ms / wall, "%")
    return Line(
        "before",
        f"the GPU is idle for {number(ms, 'ms')} ({share}) before the first operation of a step{location}",
        {"before_ms": ms, "where": longest["where"]},
    )


def _bound_line(gpu: Device, gap_causes: pd.DataFrame, causes: pd.DataFrame) -> Line:
    """Describe what bounds the step: the GPU, launches, synchronization or other work on the host."""
    known = gpu.operations["launch_start_ns"].notna().sum()
    if not known:
        return Line("bound", "unknown: the capture contains no launches")
    if graphs := gpu.untraced_graphs:
        launches = f"{graphs:,} CUDA graph {'launch' if graphs == 1 else 'launches'}"
        return Line(
            "bound",
            f"unknown: the capture lacks the operations of {launches} in these steps, so the GPU may"
            " be busy when it appears idle",
            {"unseen_graphs": graphs},
        )
    if len(gpu.operations) < MIN_OPS_TO_JUDGE:
        return Line("bound", f"unknown: the capture contains only {counted(gpu.operations, 'operation')}")
    if gpu.known_launch_share < MIN_KNOWN_LAUNCH_SHARE:
        return Line(
            "bound",
            f"unknown: the capture contains launches of only {known:,} of {counted(gpu.operations, 'operation')}",
        )
    wall, idle, gaps = gpu.median["wall"], gpu.median["idle"], gpu.gaps
    late = gap_causes[gap_causes["cause"].isin(HOST_CAUSES)]
    waiting = late["ms"].sum() / len(gpu.median_indices)
    values = {"waiting_ms": waiting, "longest_gap_us": gaps["ms"].max() * 1e3 if len(gaps) else 0.0}
    if waiting <= (1 - LAUNCH_BOUND) * wall:
        lead_text = f"the host is {number(max(gpu.host_lead_ms, 0), 'ms')} ahead"
        lead_text += f", longest gap {_gap_text(gaps['ms'].max())}" if len(gaps) else ""
        if idle <= (1 - LAUNCH_BOUND) * wall:
            return Line("GPU-bound", lead_text, values)
        return Line(
            "idle", f"{number(idle / wall, '%')}, although work is launched in time: {lead_text}", values
        )
    host = causes[causes["cause"].isin(HOST_CAUSES)]
    bound = str(host.groupby(host["cause"].map(BOUND_BY_CAUSE))["ms"].sum().idxmax())
    a_step = " a step" if gpu.has_steps else ""
    gap_number = (late["begin"] != late["end"].shift()).cumsum()  # the parts of one gap are adjacent
    gap_ms = late.groupby(gap_number)["ms"].sum()
    longest = late.loc[late.loc[gap_number == gap_ms.idxmax(), "ms"].idxmax()]
    following = int(longest["next"])
    before = short(gpu.classified_ops["name"].iloc[following]) if following >= 0 else "the end of the step"
    location = f", in {clean(longest['where'])}" if longest["where"] else ""
    waits_for = "launches" if bound == "launch-bound" else "the host"
    share = number(waiting / wall, "%")
    operations = count_text(len(gpu.operations) / len(gpu.median_indices))
    text = (
        f"the GPU is idle for {number(waiting, 'ms')}{a_step} ({share}), waiting for {waits_for};"
        f" {operations} operations{a_step};"
        f" longest gap {_gap_text(gap_ms.max())}, before {before}{location}"
    )
    return Line(bound, text, values)


def _gap_text(ms: float) -> str:
    return number(ms, "ms") if ms >= 1 else number(ms * 1e3, "µs")


def _idle_line(gpu: Device, causes: pd.DataFrame) -> Line:
    """List the main causes of idle time."""
    shown = causes[causes["ms"] >= max(MIN_ADVICE_SHARE * gpu.median["wall"], 0.05 * gpu.median["idle"])]
    if shown.empty or gpu.untraced_graphs or set(shown["cause"]) <= {"launch", "unknown"}:
        return Line("idle time", "")
    parts = [f"{_cause_text(row)}: {number(row['ms'], 'ms')}" for _, row in shown.head(MAX_NAMED).iterrows()]
    return Line("idle time", " | ".join(parts), {"causes": shown.to_dict("records")})


def _cause_text(row: pd.Series) -> str:
    location = f" in {clean(row['where'])}" if row["where"] else ""
    return {
        "sync": f"the host falls behind after {count_text(row['count'])} x {clean(row['call'])}{location}",
        "call": f"the host is in {clean(row['call'])}{location}",
        "host": f"the host is{location}",
        "unnamed": f"the host does something that this capture does not name{location}",
        "launch": "the host launches",
        "device": (
            f"{short(row['where'])} is launched in time, but waits"
            if row["where"]
            else "between operations that are launched in time"
        ),
        "unknown": "before operations whose launch is not in the capture",
    }[row["cause"]]


def _communication_line(gpu: Device) -> Line:
    communicates = gpu.running_ops["part"] == COMMUNICATION
    total = gpu.ms_per_step(busy_ns(gpu.running_ops[communicates]))
    if not total:
        return Line("communication", "")
    exposed = gpu.median["exposed communication"]
    parts = exposed_communication(gpu)
    values = {"communication_ms": total, "exposed_ms": exposed, "waiting_ms": parts.waiting_ms}
    if np.isfinite(parts.min_transfer_ms):  # JSON doesn't support nan
        values["min_transfer_ms"] = parts.min_transfer_ms
    text = f"{number(total, 'ms')}, {number(1 - exposed / total, '%')} hidden"
    if exposed:
        if exposed > 0.5 * total and communicates_on_compute_stream(gpu):
            text += ", because it runs on the compute stream"
        kinds = gpu.time_saved_by_label(
            gpu.running_ops["name"].astype(str).where(communicates).map(collective, na_action="ignore")
        )
        text += f"; exposed: {listed(kinds[kinds >= 0.05 * exposed])}"
        phases = gpu.time_saved_by_label(gpu.running_ops["phase"].astype(str).where(communicates))
        if phases.iloc[0] > 0.5 * exposed and phases.index[0] != OUTSIDE:
            share = number(phases.iloc[0] / exposed, "%")
            text += f", {share} of it launched in the {clean(phases.index[0])} phase"
        text += _waiting_text(gpu, parts)
    return Line("communication", text, values)


def _waiting_text(gpu: Device, parts: Exposed) -> str:
    """Describe how much of the exposed communication time is spent waiting for other GPUs."""
    waiting = number(parts.waiting_ms, "ms")
    if parts.is_measured:
        transfer = number(parts.transfer_ms, "ms")
        return (
            f"; {transfer} is transfer and {waiting} is waiting for other GPUs (compared with their kernels)"
        )
    if np.isfinite(parts.min_transfer_ms):
        speed = f"{gpu.sheet['link_gb_s']:g} GB/s ({gpu.sheet['link']})"
        least = number(parts.min_transfer_ms, "ms")
        return (
            f"; transferring the data takes at least {least} at {speed}; {waiting} is latency and waiting for"
            " other GPUs"
        )
    if parts.waiting_ms >= MIN_WAITING * gpu.median["exposed communication"]:
        return f"; at least {waiting} is spent waiting for other GPUs ({short(parts.longest)})"
    return ""


def _advice_lines(gpu: Device, causes: pd.DataFrame) -> list[Line]:
    if len(gpu.operations) < MIN_OPS_TO_JUDGE:
        return []
    if again := capture_again(gpu):
        return [Line("to do", again)]
    items = rank_advice(gpu, causes)
    if not items:
        text = (
            "nothing stands out; to save more time, make the kernels faster, starting with those listed above"
        )
        return [Line("to do", text)]
    lines = []
    for rank, (ms, what) in enumerate(items, start=1):
        saved = f"{number(ms, 'ms')} ({number(ms / gpu.median['wall'], '%')})"
        lines.append(
            Line(
                "" if rank > 1 else "to do",
                f"{rank}. {clean(what, 4 * MAX_NAME_CHARS)}: saves up to {saved}",
                {"what": what, "at_most_ms": ms},
            )
        )
    return lines


def _not_available_line(gpu: Device) -> Line:
    """List the data that the capture doesn't contain."""
    rows, missing, capture = gpu.operations, [], gpu.capture
    if capture.rank and capture.rank[1] > 1:
        missing.append("other ranks")
    if (rows["kernel_category"] == MATMUL).any() and gpu.matmuls.empty:
        why = (
            "too few have recorded shapes"
            if capture.shapes
            else "torch.profiler records shapes with record_shapes=True"
        )
        missing.append(f"matmul rates ({why})")
    if (rows["kernel_category"] == WHOLE_GRAPH).any():
        missing.append("operations within CUDA graphs (nsys profile --cuda-graph-trace=node records them)")
    if 0 < (unknown := int(rows["launch_start_ns"].isna().sum())) < len(rows):
        missing.append(f"the launches of {counted(unknown, 'operation')}")
    if capture.unfinished:
        missing.append(f"the end of {counted(capture.unfinished, 'host event')}")
    return Line("not available", ", ".join([*missing, "clocks", "unprofiled steps"]))
