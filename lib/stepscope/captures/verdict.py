"""What anybody's capture says: a line a fact, with its numbers. ``stepscope profile FILE`` prints it."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from stepscope.captures.account import COMMUNICATION, Device, covered, devices
from stepscope.captures.advice import WORTH, advice
from stepscope.captures.capture import Capture, load_capture_or_sums
from stepscope.captures.causes import pauses, waits
from stepscope.files import one_line
from stepscope.report.tables import MOST_TEXT, digits, escape, number
from stepscope.stats import LAUNCH_BOUND
from stepscope.traces.attribution import OUTSIDE, TraceError
from stepscope.traces.families import MATMUL, families
from stepscope.traces.kernel_names import short_names, words

FORMATS = ("text", "json", "markdown")
FEW = 5  # operations: of fewer it is not told what bounds them
SEEN = 0.0005  # of the step: less is not mentioned
TOP = 5  # kernels that are named
SAID = 4  # ranges, or causes of pauses, that are named
SHOWN = 60  # characters of a name
MOST_WORK = 0.9  # of all of it: a range that holds so much is no phase
RATE_BYTES = 1e8  # moved by generated kernels: of less a rate says nothing, it fits into caches
COLLECTIVE = re.compile(
    r"reduce ?scatter|all ?gather|all ?reduce|all ?to ?all|send ?recv|broadcast|dispatch"
    r"|combine|barrier"
)  # of a name's words
BOUNDS = {"sync": "sync-bound", "call": "host-bound", "host": "host-bound", "launch": "launch-bound"}


@dataclass
class Line:
    """One fact: a label, a text in words, and its numbers with their units at the ends of their names."""

    label: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


def profile(
    path: Path | str,
    step: str | None = None,
    phases: Mapping[str, str] | None = None,
    device: int | None = None,
    csv: Path | str | None = None,
) -> list[Line]:
    """What a capture says, a line a fact; the first is what it is a capture of.

    Args:
        step, phases: as of ``load_capture``.
        device: the GPU that is looked into; None takes the one that works most.
        csv: where the operations go, one a line.

    Raises:
        TraceError: the capture cannot be read, or has no such GPU, step or phase.
        OSError: the CSV cannot be written.
    """
    capture = load_capture_or_sums(path, step, phases)
    if csv is not None:
        (capture.operations if isinstance(capture, Capture) else capture).to_csv(csv, index=False)
    return lines_of(capture, device) if isinstance(capture, Capture) else _of_sums(capture)


def lines_of(capture: Capture, device: int | None = None) -> list[Line]:
    """As profile, of a capture that is loaded."""
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
    alone = "step on GPU" if capture.steps else "on GPU"
    accounts = [_account(alone if len(gpus) == 1 else one.name, one) for one in gpus]
    lines = [
        _header(most, len(gpus)),
        *accounts,
        _outliers(most),
        _start(most, found),
        _phases(most),
        _families(most),
        *_top(most.kernels),
        _bound(most, found, causes),
        _causes(most, causes),
        _communication(most),
        _matmuls(most),
        _generated(most),
        *_advice(most, causes),
        _not_told(most),
    ]
    return [line for line in lines if line.text]


def rendered(lines: Sequence[Line], how: str = "text") -> str:
    """The lines as text, markdown or JSON, which say the same.

    Raises:
        TraceError: there is no such format.
    """
    if how == "json":
        told = [{"label": line.label, "text": line.text, **line.values} for line in lines]
        return json.dumps({"lines": told}, ensure_ascii=False, indent=1, default=float)
    if how == "markdown":
        label, found = "", []
        for line in lines[1:]:
            label = line.label or label
            found.append(f"* **{escape(label)}**: {escape_all(line.text)}")
        return "\n".join([escape_all(lines[0].text), "", *found])
    if how != "text":
        raise TraceError(f"--format: got {clean(how)!r}, expected one of {', '.join(FORMATS)}")
    return "\n".join([lines[0].text, *(f"{line.label:<14} {line.text}" for line in lines[1:])])


def escape_all(text: str) -> str:
    """A line's text as markdown, however long it is. It never begins a line of it, so no number makes a
    list."""
    parts = textwrap.wrap(text, MOST_TEXT - 2, break_on_hyphens=False)
    return " ".join(escape(f"x {part}")[2:] for part in parts)


def phases_of(said: Sequence[str]) -> dict[str, str] | None:
    """The phase that each range's name, or pattern, stands for, from "forward=NAME"; None where nothing is
    said.

    Raises:
        TraceError: one is of no such form.
    """
    found = {}
    for text in said:
        phase, _, name = text.partition("=")
        if not phase or not name:
            raise TraceError(
                f"--phase: got {clean(text)!r}, expected forward=NAME, with the name of a range"
                " or a pattern such as *(F)"
            )
        found[name] = phase
    return found or None


def _header(one: Device, gpus: int) -> Line:
    capture, parts = one.capture, []
    if capture.rank and capture.rank[1] > 1:
        parts.append(f"rank {capture.rank[0]} of {capture.rank[1]}")
    name = clean(capture.gpus.get(one.number, "").removeprefix("NVIDIA ").removesuffix(" HBM3"))
    several = f"{gpus} GPUs, details of {one.name} {name}".rstrip()
    parts.append(several if gpus > 1 else name or "a GPU without a name")
    names = " to ".join(dict.fromkeys(clean(name) for name in (capture.steps[:1] + capture.steps[-1:])))
    steps = f"{_counted(capture.steps, 'step')} ({names})" if names else "no steps found: all of it is one"
    operations = int(
        ((one.placed["start_ns"] >= one.windows[0, 0]) & (one.placed["start_ns"] < one.windows[-1, 1])).sum()
    )
    text = ", ".join(parts) + f"; {steps}; {operations:,} operation{'s' * (operations != 1)}"
    if len(one.before):
        lasted = number(one.before["duration_ns"].sum() / 1e6, "ms")
        text += f"; {len(one.before):,} ({lasted}) launched before are left out"
    if after := int((one.placed["start_ns"] >= one.windows[-1, 1]).sum()):
        text += f"; {after:,} after the last step are left out"
    return Line(
        "capture",
        text,
        {
            "gpu": name,
            "gpus": gpus,
            "steps": len(capture.steps),
            "operations": operations,
            "launched_before": len(one.before),
        },
    )


def _counted(things: Sized, word: str) -> str:
    return f"{len(things):,} {word}{'s' * (len(things) != 1)}"


def _account(label: str, one: Device) -> Line:
    walls, median = one.accounts["wall"], one.median
    each = " ".join(digits(wall, "ms") for wall in walls.head(8)) + " ..." * (len(walls) > 8)
    told = (median >= SEEN * median["wall"]) | median.index.isin(["compute", "idle"])
    several = f" (median of {each})" * (len(walls) > 1)
    return Line(
        label,
        f"{number(median['wall'], 'ms')}{several}: {_listed(median[told].drop('wall'))}",
        {
            **{f"{name.replace(' ', '_')}_ms": value for name, value in median.items()},
            "steps_ms": walls.tolist(),
        },
    )


def _outliers(one: Device) -> Line:
    """The steps that are far from the median one, and what makes them so."""
    names, found = one.capture.steps, []
    for place in one.outliers[:SAID]:
        more = (one.accounts.iloc[place] - one.median).drop("wall")
        part = str(more.abs().idxmax())
        name = clean(names[place]) if place < len(names) else str(place)
        found.append(f"{name} {number(one.accounts['wall'].iloc[place], 'ms')} ({part} {more[part]:+.3g})")
    more_text = f" and {len(one.outliers) - SAID} more" * (len(one.outliers) > SAID)
    return Line("outliers", ", ".join(found) + more_text, {"count": len(one.outliers)})


def _start(one: Device, found: pd.DataFrame) -> Line:
    """What comes before the work: of a capture without steps its start-up, of a step what the host does
    before its first operation."""
    wall = one.median["wall"]
    if one.started_ms:
        share = number(one.started_ms / wall, "%")
        return Line(
            "start-up",
            f"{number(one.started_ms, 'ms')} ({share}) pass before the GPU has steady"
            " work: this is a start more than a step",
            {"started_ms": one.started_ms},
        )
    head = found[found["head"] & (found["ms"] > 0)]
    ms = head["ms"].sum() / len(one.middle)
    if not one.capture.steps or head.empty or ms < (1 - LAUNCH_BOUND) * wall:
        return Line("before", "")
    longest = head.loc[head["ms"].idxmax()]
    place = f", in {clean(longest['where'])}" * bool(longest["where"])
    share = number(ms / wall, "%")
    return Line(
        "before",
        f"the first operation of a step the GPU waits {number(ms, 'ms')} ({share}){place}",
        {"before_ms": ms, "where": longest["where"]},
    )


def _phases(one: Device) -> Line:
    rows = one.operations
    found = one.summed(rows, "phase").sort_index()
    least = WORTH * found.sum()
    told = found.drop(OUTSIDE, errors="ignore")
    text = _listed(told, " | ") or "none found"
    if len(told):
        overlap = found.sum() - one.a_step(covered(one.running))
        if overlap > SEEN * found.sum():
            text += f" (kernel sums; {number(overlap, 'ms')} of it overlaps)"
        text += ", by autograd's ranges" * one.capture.autograd
        if found.get(OUTSIDE, 0.0) > least:
            text += f"; outside {number(found[OUTSIDE], 'ms')}"
    if hints := _ranges(one, least):
        text += f"; in ranges of other names (--phase forward=NAME says what they are): {hints}"
    return Line("phase", text, {f"{name}_ms": value for name, value in found.items()})


def _ranges(one: Device, least: float) -> str:
    """The ranges of no phase that hold work, not only communication: outer ones, or, where one of them holds
    nearly all of it, the ones within."""
    rows = one.operations[(one.operations["phase"] == OUTSIDE) & (one.operations["part"] != COMMUNICATION)]
    for column in ("range", "inner_range"):
        found = one.summed(rows[rows[column] != ""], column)
        found = found[found >= least]
        if found.max() < MOST_WORK * one.a_step(rows["duration_ns"].sum()):
            break
    else:
        return ""
    return _listed(found.head(SAID).rename(index=lambda name: f"{name[: SHOWN - 2]!r}"))


def _listed(found: pd.Series, between: str = ", ") -> str:
    """Names and their ms, "matmul 27.2 | attention 5.20 ms"; empty of none."""
    text = between.join(f"{clean(name)} {digits(value, 'ms')}" for name, value in found.items())
    return f"{text} ms" if text else ""


def _families(one: Device) -> Line:
    found = one.summed(one.operations, "family").rename(index=str)
    values = {f"{name}_ms": value for name, value in found.items()}
    if len(found) > 5:
        found = pd.concat([found.head(5), pd.Series({"rest": found.iloc[5:].sum()})])
    return Line("family", _listed(found, " | "), values)


def _top(kernels: pd.DataFrame) -> list[Line]:
    """The kernels (and copies) with the most time, a line each: count, ms and share of all operations'
    time."""
    top = kernels.head(TOP)
    shown = short_names([str(name) for name in top.index], SHOWN)
    return [
        Line(
            "" if place else "kernels",
            f"{_count(row['count'])} x {clean(shown[str(name)])}: {number(row['ms'], 'ms')}"
            f" ({number(row['share'], '%')})",
            {"kernel": str(name), "count": row["count"], "ms": row["ms"], "share": row["share"]},
        )
        for place, (name, row) in enumerate(top.iterrows())
    ]


def _count(value: float) -> str:
    """A count a step, of which two steps may have different ones."""
    return digits(value, "n" if value == round(value) or value >= 100 else "")


def _bound(one: Device, found: pd.DataFrame, causes: pd.DataFrame) -> Line:
    """What the step waits for: its GPU, or the host, and there for what."""
    if one.operations["launch_start_ns"].isna().all():
        return Line("bound", "not told: the capture holds no launches")
    if len(one.operations) < FEW:
        return Line("bound", f"not told: too little to judge by, {_counted(one.operations, 'operation')}")
    wall, idle, gaps = one.median["wall"], one.median["idle"], one.gaps
    late = found[found["cause"] != "device"]
    waiting = late["ms"].sum() / len(one.middle)
    values = {"waiting_ms": waiting, "longest_gap_us": gaps["ms"].max() * 1e3 if len(gaps) else 0.0}
    if waiting <= (1 - LAUNCH_BOUND) * wall:
        ahead = f"the host is {number(max(one.ahead_ms, 0), 'ms')} ahead"
        ahead += f", longest gap {_gap(gaps['ms'].max())}" if len(gaps) else ""
        if idle <= (1 - LAUNCH_BOUND) * wall:
            return Line("GPU-bound", ahead, values)
        return Line("idle", f"{number(idle / wall, '%')}, though launches are early: {ahead}", values)
    label = BOUNDS[causes[causes["cause"] != "device"].groupby("cause")["ms"].sum().idxmax()]
    worst, each = late.loc[late["ms"].idxmax()], " a step" * bool(one.capture.steps)
    name = one.placed["name"].iloc[int(worst["next"])] if worst["next"] >= 0 else "the step's end"
    place = f", in {clean(worst['where'])}" * bool(worst["where"])
    return Line(
        label,
        (
            f"the GPU waits {number(waiting, 'ms')}{each} ({number(waiting / wall, '%')}) for"
            f" {'launches' if label == 'launch-bound' else 'the host'},"
            f" {len(one.operations) / len(one.middle):,.0f} operations{each}; longest gap"
            f" {_gap(worst['ms'])} before {clean(short_names([str(name)], SHOWN)[str(name)])}{place}"
        ),
        values,
    )


def _gap(ms: float) -> str:
    return number(ms, "ms") if ms >= 1 else number(ms * 1e3, "µs")


def _causes(one: Device, causes: pd.DataFrame) -> Line:
    """What the GPU waits for in its pauses, by what the host did then."""
    told = causes[causes["ms"] >= max(WORTH * one.median["wall"], 0.05 * one.median["idle"])]
    if told.empty or set(told["cause"]) <= {"device", "launch"}:
        return Line("waits for", "")
    parts = [f"{_cause(row)} {number(row['ms'], 'ms')}" for _, row in told.head(SAID).iterrows()]
    return Line("waits for", " | ".join(parts), {"causes": told.to_dict("records")})


def _cause(row: pd.Series) -> str:
    place = f" in {clean(row['where'])}" * bool(row["where"])
    return {
        "sync": f"the host after {_count(row['count'])} x {clean(row['call'])}{place}:",
        "call": f"{clean(row['call'])}{place}:",
        "host": f"{clean(row['where'])}:",
        "launch": "launches:",
        "device": "what is launched:",
    }[row["cause"]]


def _collective(name: str) -> str:
    found = COLLECTIVE.search(words(name))
    return found[0].replace(" ", "-") if found else "other"


def _reason(one: Device) -> str:
    """Why communication is exposed, where its stream says so."""
    rows = one.operations[one.operations["part"] == COMMUNICATION]
    own = rows.loc[rows["stream"] == one.stream, "duration_ns"].sum()
    return "on compute's own stream" if own > 0.5 * max(1, rows["duration_ns"].sum()) else ""


def _communication(one: Device) -> Line:
    communicates = one.running["part"] == COMMUNICATION
    whole = one.a_step(covered(one.running[communicates]))
    if not whole:
        return Line("communication", "")
    exposed = one.median["exposed communication"]
    text = f"{number(whole, 'ms')}, {number(1 - exposed / whole, '%')} hidden"
    if exposed:
        reason = _reason(one)
        text += f", as it runs {reason}" * bool(reason and exposed > 0.5 * whole)
        kinds = one.exposed(
            one.running["name"].astype(str).where(communicates).map(_collective, na_action="ignore")
        )
        text += f"; exposed: {_listed(kinds[kinds >= 0.05 * exposed])}"
        phases = one.exposed(one.running["phase"].astype(str).where(communicates))
        if phases.iloc[0] > 0.5 * exposed and phases.index[0] != OUTSIDE:
            share = number(phases.iloc[0] / exposed, "%")
            text += f", {share} of it launched by the {clean(phases.index[0])}"
    return Line("communication", text, {"communication_ms": whole, "exposed_ms": exposed})


def _matmuls(one: Device) -> Line:
    said = []
    for dtype, row in one.matmuls[one.matmuls["ms"] >= WORTH * one.matmuls["ms"].sum()].iterrows():
        most = one.sheet.get(str(dtype), one.sheet.get("bf16") if dtype == "fp16" else None)
        of = f" ({number(row.tflops / most, '%')} of {most:,.0f})" if most else ""
        said.append(f"{clean(str(dtype))} {number(row.tflops, 'TFLOP/s')}{of}")
    rates = {f"{dtype}_tflops": row.tflops for dtype, row in one.matmuls.iterrows()}
    return Line("matmul", ", ".join(said), rates)


def _generated(one: Device) -> Line:
    made = one.generated.sum()
    if made["bytes"] < RATE_BYTES:
        return Line("generated", "")
    rate, most = made["bytes"] / made["duration_ns"] / 1e3, one.sheet.get("tb_s")
    of = f" ({number(rate / most, '%')} of {most})" if most else ""
    return Line("generated", f"{number(rate, 'TB/s')} by argument sizes{of}", {"tb_s": rate})


def _advice(one: Device, causes: pd.DataFrame) -> list[Line]:
    if len(one.operations) < FEW:
        return []
    reason = _reason(one)
    found = advice(one, causes, f" (it runs {reason}: give it one of its own)" * bool(reason))
    if not found:
        return [Line("to do", "nothing stands out: quicker kernels, those above first, are what is left")]
    lines = []
    for place, (ms, what) in enumerate(found, start=1):
        saved = f"{number(ms, 'ms')} ({number(ms / one.median['wall'], '%')})"
        lines.append(
            Line(
                "" if place > 1 else "to do",
                f"{place}. {clean(what, 3 * SHOWN)}: at most {saved}",
                {"what": what, "at_most_ms": ms},
            )
        )
    return lines


def _not_told(one: Device) -> Line:
    rows, said, capture = one.operations, [], one.capture
    if capture.rank and capture.rank[1] > 1:
        said.append("other ranks")
    if (rows["family"] == MATMUL).any() and one.matmuls.empty:
        said.append(
            "matmul rates ("
            + (
                "shapes are recorded of too few"
                if capture.shapes
                else "torch.profiler's record_shapes=True tells them"
            )
            + ")"
        )
    if 0 < (unknown := int(rows["launch_start_ns"].isna().sum())) < len(rows):
        said.append(f"who launched {unknown:,} operations")
    return Line("not told", ", ".join([*said, "clocks", "the step without profiler"]))


def _of_sums(table: pd.DataFrame) -> list[Line]:
    """What nsys's sums of kernels tell."""
    name = table["name"].astype("category")
    whole = table["total_time_ns"].sum()
    kernels = pd.DataFrame(
        {
            "count": table["instances"],
            "ms": table["total_time_ns"] / 1e6,
            "share": table["total_time_ns"] / max(1, whole),
        }
    ).set_index(name)
    family = (table["total_time_ns"] / 1e6).groupby(families(name.array)).sum().sort_values(ascending=False)
    found = family.rename(index=str)[family > 0]
    text = (
        f"sums of {_counted(table, 'kernel')}, all of the capture; {table['instances'].sum():,} launches"
        f" of {number(whole / 1e6, 'ms')}"
    )
    return [
        Line(
            "capture",
            text,
            {"kernels": len(table), "launches": int(table["instances"].sum()), "kernel_ms": whole / 1e6},
        ),
        Line("family", _listed(found, " | "), {f"{name}_ms": ms for name, ms in found.items()}),
        *_top(kernels.sort_values("ms", ascending=False)),
        Line(
            "not told",
            "steps, phases, pauses, copies, communication beside compute: nsys's report"
            " cuda_gpu_trace or its export has more",
        ),
    ]


def clean(name: object, most: int = SHOWN) -> str:
    """A name from a file on one line: printable, and not too long."""
    return one_line(name, most)
