"""The summary of a capture, one line for each fact, with its numbers. ``stepscope profile FILE`` prints it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.captures.account import COMMUNICATION, Device, covered, devices
from stepscope.captures.advice import MIN_KNOWN, SHOWN, WORTH, advice, capture_again
from stepscope.captures.capture import WHOLE_GRAPH, Capture, load_capture_or_sums
from stepscope.captures.causes import HOST_CAUSES, pauses, waits
from stepscope.captures.communication import (
    Exposed,
    collective,
    exposed_communication,
    on_compute_stream,
)
from stepscope.captures.kernel_summary import (
    categories_line,
    generated_line,
    kernel_lines,
    leading_lines,
    lines_of_sums,
    matmul_line,
    phases_line,
)
from stepscope.captures.lines import Line, clean, count_text, counted, listed, short
from stepscope.report.tables import digits, number
from stepscope.stats import LAUNCH_BOUND
from stepscope.traces.attribution import OUTSIDE, TraceError
from stepscope.traces.families import MATMUL

MIN_OPS_TO_JUDGE = 5  # operations: too few to judge what bounds them
MIN_SHARE_SHOWN = 0.0005  # of the step: less is not mentioned
MIN_WAITING = 0.05  # of exposed communication: less waiting is not mentioned
MAX_NAMED = 4  # outliers, or causes of idle time, that are named
BOUNDS = {
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
    """Summarize a capture, in one line for each fact; the first says what it is a capture of.

    Args:
        step, phases: as of ``load_capture``.
        device: the GPU to look into; None takes the busiest.
        csv: the file to write all operations to, one per line.
        from_ms, to_ms: as of ``Capture.between``.

    Raises:
        TraceError: the capture cannot be read, or has no such GPU, step or phase.
        OSError: the CSV cannot be written.
    """
    capture = load_capture_or_sums(path, step, phases)
    if isinstance(capture, Capture) and (from_ms is not None or to_ms is not None):
        capture = capture.between(from_ms, to_ms)
    if csv is not None:
        (capture.operations if isinstance(capture, Capture) else capture).to_csv(csv, index=False)
    return lines_of(capture, device) if isinstance(capture, Capture) else lines_of_sums(capture)


def lines_of(capture: Capture, device: int | None = None) -> list[Line]:
    """Summarize a capture that is loaded, as ``profile`` does."""
    gpus = list(devices(capture))
    if not gpus:
        raise TraceError(
            f"{capture.path}: all {capture.left_out:,} operations were launched before"
            f" {'its first step' if capture.steps else 'the capture'}, expected some within"
        )
    asked = [one for one in gpus if device is None or one.number == device]
    if not asked:
        numbers = ", ".join(str(number) for number in sorted({one.number for one in gpus}))
        raise TraceError(f"{capture.path}: has no work of GPU {device}, expected one of {numbers}")
    most = max(asked, key=lambda one: one.all_operations["duration_ns"].sum())
    found = pauses(most)
    causes = waits(found, len(most.middle))
    accounts = [_account(one.name if len(gpus) > 1 else "step on GPU", one) for one in gpus]
    lines = [
        _header(most, gpus),
        *accounts,
        _outliers(most),
        _start(most, found),
        phases_line(most),
        categories_line(most),
        *kernel_lines(most.kernels),
        *leading_lines(most),
        _bound(most, found, causes),
        _causes(most, causes),
        _communication(most),
        matmul_line(most),
        generated_line(most),
        *_advice(most, causes),
        _not_available(most),
    ]
    return [line for line in lines if line.text]


def phases_of(options: Sequence[str]) -> dict[str, str] | None:
    """Return the phase for each range's name or pattern, from "forward=NAME"; None without options.

    Raises:
        TraceError: one is of no such form.
    """
    found = {}
    for text in options:
        phase, _, name = text.partition("=")
        if not phase or not name:
            raise TraceError(
                f"--phase: got {clean(text)!r}, expected forward=NAME, with the name of a range"
                " or a pattern such as *(F)"
            )
        found[name] = phase
    return found or None


def _header(one: Device, gpus: Sequence[Device]) -> Line:
    capture, parts = one.capture, []
    if capture.rank and capture.rank[1] > 1:
        parts.append(f"rank {capture.rank[0]} of {capture.rank[1]}")
    name = clean(capture.gpus.get(one.number, "").removeprefix("NVIDIA ").removesuffix(" HBM3"))
    numbers, processes = {gpu.number for gpu in gpus}, {gpu.process for gpu in gpus}
    counts = [f"{len(processes)} processes"] * (len(processes) > 1) + [f"{len(numbers)} GPUs"] * (
        len(numbers) > 1
    )
    details = ", ".join(filter(None, (" on ".join(counts), f"details of {one.name}", name)))
    parts.append(details if len(gpus) > 1 else name or "a GPU without a name")
    start, end = one.windows[0, 0], one.windows[-1, 1]
    starts = one.placed["start_ns"]
    operations = int(((starts >= start) & (starts < end)).sum())
    text = "; ".join([", ".join(parts), _steps(one), counted(operations, "operation")])
    left_out = (
        (one.before[~one.before["warm_up"]], "launched before"),
        (one.before[one.before["warm_up"]], "launched in a warm-up"),
        (one.placed[starts >= end], "after the last step"),
    )
    reasons = [
        f"{len(rows):,} {where} ({number(rows['duration_ns'].sum() / 1e6, 'ms')})"
        for rows, where in left_out
        if len(rows)
    ]
    text += f"; left out: {', '.join(reasons)}" * bool(reasons)
    return Line(
        "capture",
        text,
        {
            "gpu": name,
            "gpus": len(numbers),
            "processes": len(processes),
            "steps": len(one.windows) if one.has_steps else 0,
            "empty_steps": one.empty_steps,
            "operations": operations,
            "launched_before": len(one.before),
        },
    )


def _steps(one: Device) -> str:
    """Describe how the capture is divided into steps, and how many of them have no GPU work."""
    names, count = one.host_steps["name"].tolist(), len(one.host_steps)
    if not count:
        return "no steps found: the whole capture counts as one"
    from_to = " to ".join(dict.fromkeys(clean(name) for name in (names[0], names[-1])))
    text = f"{counted(count, 'step')} ({from_to})"
    if one.empty_steps == count:
        text += ", but no operation's launch is in one of them"
    elif one.empty_steps:
        text += f", {one.empty_steps:,} of them without GPU work"
    return text if one.has_steps else f"{text}: the whole capture counts as one"


def _account(label: str, one: Device) -> Line:
    walls, median = one.accounts["wall"], one.median
    each = " ".join(digits(wall, "ms") for wall in walls.head(8)) + " ..." * (len(walls) > 8)
    shown = (median >= MIN_SHARE_SHOWN * median["wall"]) | median.index.isin(["compute", "idle"])
    several = f" (median of {each})" * (len(walls) > 1)
    parts = median[shown].drop("wall")
    if one.unseen_graphs:
        parts = parts.rename({"idle": "unknown"})
    return Line(
        label if one.has_steps else label.removeprefix("step "),
        f"{number(median['wall'], 'ms')}{several}: {listed(parts)}",
        {
            **{f"{name.replace(' ', '_')}_ms": value for name, value in median.items()},
            "steps_ms": walls.tolist(),
        },
    )


def _outliers(one: Device) -> Line:
    """Name the steps that are far from the median one, and what makes them so."""
    found = []
    for place in one.outliers[:MAX_NAMED]:
        more = (one.accounts.iloc[place] - one.median).drop("wall")
        part = str(more.abs().idxmax())
        wall = number(one.accounts["wall"].iloc[place], "ms")
        found.append(f"{clean(one.step_names[place])} {wall} ({part} {more[part]:+.3g} ms)")
    more_text = f" and {len(one.outliers) - MAX_NAMED} more" * (len(one.outliers) > MAX_NAMED)
    return Line("outliers", ", ".join(found) + more_text, {"count": len(one.outliers)})


def _start(one: Device, found: pd.DataFrame) -> Line:
    """Describe what comes before the work: in a capture without steps its start-up, in a step what the host
    does before its first operation."""
    wall = one.median["wall"]
    if one.started_ms:
        share = number(one.started_ms / wall, "%")
        text = f"{number(one.started_ms, 'ms')} ({share}) pass before the GPU computes steadily"
        begin = one.windows[0, 0]
        early = one.placed[one.placed["start_ns"] < begin + one.started_ms * 1e6]
        early = early[early["part"] == COMMUNICATION]
        lasted = number(early["duration_ns"].max() / 1e6, "ms") if len(early) else ""
        if len(early) and early["duration_ns"].max() / 1e6 > 0.5 * one.started_ms:
            longest = str(early["name"].loc[early["duration_ns"].idxmax()])
            text += f"; for {lasted} of it {short(longest)} waits for other GPUs to arrive"
        return Line("start-up", text, {"started_ms": one.started_ms})
    head = found[found["head"] & (found["ms"] > 0) & found["cause"].isin(HOST_CAUSES)]
    ms = head["ms"].sum() / len(one.middle)
    if not one.has_steps or one.unseen_graphs or head.empty or ms < (1 - LAUNCH_BOUND) * wall:
        return Line("before", "")
    longest = head.loc[head["ms"].idxmax()]
    place = f", while the host is in {clean(longest['where'])}" * bool(longest["where"])
    share = number(ms / wall, "%")
    return Line(
        "before",
        f"the GPU is idle for {number(ms, 'ms')} ({share}) before the first operation of a step{place}",
        {"before_ms": ms, "where": longest["where"]},
    )


def _bound(one: Device, found: pd.DataFrame, causes: pd.DataFrame) -> Line:
    """Name what limits the step: its GPU, or the host, and what the host does."""
    known = one.operations["launch_start_ns"].notna().sum()
    if not known:
        return Line("bound", "unknown: the capture has no launch records")
    if one.unseen_graphs:
        return Line(
            "bound",
            f"unknown: {counted(one.unseen_graphs, 'CUDA graph launch').replace('launchs', 'launches')} in"
            " these steps left no operations in the capture, so the GPU may be busy when it looks idle",
            {"unseen_graphs": one.unseen_graphs},
        )
    if len(one.operations) < MIN_OPS_TO_JUDGE:
        return Line("bound", f"unknown: too little to judge by, {counted(one.operations, 'operation')}")
    if one.known_launches < MIN_KNOWN:
        return Line(
            "bound",
            f"unknown: the capture has the launches of only {known:,} of {counted(one.operations, 'operation')}",
        )
    wall, idle, gaps = one.median["wall"], one.median["idle"], one.gaps
    late = found[found["cause"].isin(HOST_CAUSES)]
    waiting = late["ms"].sum() / len(one.middle)
    values = {"waiting_ms": waiting, "longest_gap_us": gaps["ms"].max() * 1e3 if len(gaps) else 0.0}
    if waiting <= (1 - LAUNCH_BOUND) * wall:
        ahead = f"the host is {number(max(one.ahead_ms, 0), 'ms')} ahead"
        ahead += f", longest gap {_gap(gaps['ms'].max())}" if len(gaps) else ""
        if idle <= (1 - LAUNCH_BOUND) * wall:
            return Line("GPU-bound", ahead, values)
        return Line("idle", f"{number(idle / wall, '%')}, although work is launched in time: {ahead}", values)
    host = causes[causes["cause"].isin(HOST_CAUSES)]
    label = str(host.groupby(host["cause"].map(BOUNDS))["ms"].sum().idxmax())
    each = " a step" * one.has_steps
    gap = (late["begin"] != late["end"].shift()).cumsum()  # parts of one gap follow one another
    gap_ms = late.groupby(gap)["ms"].sum()
    worst = late.loc[late.loc[gap == gap_ms.idxmax(), "ms"].idxmax()]
    following = int(worst["next"])
    before = short(one.placed["name"].iloc[following]) if following >= 0 else "the end of the step"
    place = f", in {clean(worst['where'])}" * bool(worst["where"])
    waits_for = "launches" if label == "launch-bound" else "the host"
    per_step = count_text(len(one.operations) / len(one.middle))
    return Line(
        label,
        f"the GPU is idle for {number(waiting, 'ms')}{each} ({number(waiting / wall, '%')}), waiting for"
        f" {waits_for}; {per_step} operations{each}; longest gap {_gap(gap_ms.max())}, before {before}{place}",
        values,
    )


def _gap(ms: float) -> str:
    return number(ms, "ms") if ms >= 1 else number(ms * 1e3, "µs")


def _causes(one: Device, causes: pd.DataFrame) -> Line:
    """List what the GPU waits for when it is idle."""
    shown = causes[causes["ms"] >= max(WORTH * one.median["wall"], 0.05 * one.median["idle"])]
    if shown.empty or one.unseen_graphs or set(shown["cause"]) <= {"launch", "unknown"}:
        return Line("idle time", "")
    parts = [f"{_cause(row)}: {number(row['ms'], 'ms')}" for _, row in shown.head(MAX_NAMED).iterrows()]
    return Line("idle time", " | ".join(parts), {"causes": shown.to_dict("records")})


def _cause(row: pd.Series) -> str:
    place = f" in {clean(row['where'])}" * bool(row["where"])
    return {
        "sync": f"the host is late after {count_text(row['count'])} x {clean(row['call'])}{place}",
        "call": f"the host is in {clean(row['call'])}{place}",
        "host": f"the host is{place}",
        "unnamed": f"the host does something that this capture does not name{place}",
        "launch": "the host launches",
        "device": (
            f"{short(row['where'])} is launched in time, but waits"
            if row["where"]
            else "between operations that are launched in time"
        ),
        "unknown": "before operations whose launch is not in the capture",
    }[row["cause"]]


def _communication(one: Device) -> Line:
    communicates = one.running["part"] == COMMUNICATION
    total = one.a_step(covered(one.running[communicates]))
    if not total:
        return Line("communication", "")
    exposed = one.median["exposed communication"]
    parts = exposed_communication(one)
    values = {"communication_ms": total, "exposed_ms": exposed, "waiting_ms": parts.waiting_ms}
    if np.isfinite(parts.least_ms):  # JSON has no nan
        values["least_ms"] = parts.least_ms
    text = f"{number(total, 'ms')}, {number(1 - exposed / total, '%')} hidden"
    if exposed:
        text += ", as it runs on the compute stream" * bool(on_compute_stream(one) and exposed > 0.5 * total)
        kinds = one.exposed(
            one.running["name"].astype(str).where(communicates).map(collective, na_action="ignore")
        )
        text += f"; exposed: {listed(kinds[kinds >= 0.05 * exposed])}"
        phases = one.exposed(one.running["phase"].astype(str).where(communicates))
        if phases.iloc[0] > 0.5 * exposed and phases.index[0] != OUTSIDE:
            share = number(phases.iloc[0] / exposed, "%")
            text += f", {share} of it launched by the {clean(phases.index[0])}"
        text += _waiting(one, parts)
    return Line("communication", text, values)


def _waiting(one: Device, parts: Exposed) -> str:
    """Describe how much of exposed communication is waiting for another GPU."""
    waiting = number(parts.waiting_ms, "ms")
    if np.isfinite(parts.least_ms):
        speed = f"{one.sheet['link_gb_s']:g} GB/s ({one.sheet['link']})"
        least = number(parts.least_ms, "ms")
        return (
            f"; its bytes take at least {least} at {speed}; {waiting} is latency and waiting for other GPUs"
        )
    if parts.waiting_ms >= MIN_WAITING * one.median["exposed communication"]:
        return f"; at least {waiting} is waiting for other GPUs ({short(parts.longest)})"
    return ""


def _advice(one: Device, causes: pd.DataFrame) -> list[Line]:
    if len(one.operations) < MIN_OPS_TO_JUDGE:
        return []
    if again := capture_again(one):
        return [Line("to do", again)]
    found = advice(one, causes)
    if not found:
        text = "nothing stands out: what is left is to make kernels faster, beginning with those above"
        return [Line("to do", text)]
    lines = []
    for place, (ms, what) in enumerate(found, start=1):
        saved = f"{number(ms, 'ms')} ({number(ms / one.median['wall'], '%')})"
        lines.append(
            Line(
                "" if place > 1 else "to do",
                f"{place}. {clean(what, 4 * SHOWN)}: saves up to {saved}",
                {"what": what, "at_most_ms": ms},
            )
        )
    return lines


def _not_available(one: Device) -> Line:
    """List what the capture does not show."""
    rows, lacking, capture = one.operations, [], one.capture
    if capture.rank and capture.rank[1] > 1:
        lacking.append("other ranks")
    if (rows["family"] == MATMUL).any() and one.matmuls.empty:
        why = (
            "shapes are recorded for too few"
            if capture.shapes
            else "torch.profiler records shapes with record_shapes=True"
        )
        lacking.append(f"matmul rates ({why})")
    if (rows["family"] == WHOLE_GRAPH).any():
        lacking.append("operations within CUDA graphs (nsys profile --cuda-graph-trace=node records them)")
    if 0 < (unknown := int(rows["launch_start_ns"].isna().sum())) < len(rows):
        lacking.append(f"the launches of {counted(unknown, 'operation')}")
    if capture.unfinished:
        lacking.append(f"the end of {counted(capture.unfinished, 'host event')}")
    return Line("not available", ", ".join([*lacking, "clocks", "the step without the profiler"]))
