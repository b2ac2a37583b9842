"""Draw the distributed study's figures, which show a step's parts by strategy and the streams of one step."""

from collections.abc import Sequence

import pandas as pd

from stepscope.report import style
from stepscope.report.tables import number
from stepscope.studies.distributed.config import STRATEGIES
from stepscope.studies.distributed.tables import PARTS

COLORS = {
    "compute": style.BLUE,
    "transfer": style.ORANGE,
    "waiting": style.AMBER,
    "copies": style.PINK,
    "idle": style.FILL,
    "communication": style.ORANGE,
}
MAX_PIXELS = 1000  # width of a figure; gaps shorter than a pixel are not drawn
WORDS = {"gpu": "GPU", "ddp": "DDP", "fsdp": "FSDP", "zero1": "ZeRO-1", "mib": "MiB"}


def label(strategy: str) -> str:
    """Return a strategy's name in words, such as "DDP 25 MiB"."""
    words = strategy.split("_")
    return " ".join(WORDS.get(word, word) for word in words)


def where_time_goes(parts: pd.DataFrame) -> style.Picture | None:
    """Draw a bar per strategy with the parts of its profiled step; a tick marks the unprofiled steps' median.

    Args:
        parts: the result of :func:`stepscope.studies.distributed.tables.parts`.
    """
    if parts.empty:
        return None
    communicates = [STRATEGIES[str(name)].control != "" for name in parts.index]
    fastest = parts[communicates].sort_values("wall_ms").iloc[:1]
    message = "No strategy communicates"
    for name, wall_ms in fastest["wall_ms"].items():
        message = f"The fastest step with communication, {label(str(name))}, takes {number(wall_ms, 'ms')}"
    return draw_parts(message, parts.set_axis([label(str(name)) for name in parts.index]))


@style.look()
def draw_parts(message: str, parts: pd.DataFrame) -> style.Picture:
    """Draw one bar per row.

    Args:
        message: the title.
        parts: the columns of :data:`PARTS` in ms, and wall_ms. The index contains the bars' labels.
    """
    rows = parts[[f"{part}_ms" for part in PARTS]].set_axis(list(PARTS), axis=1)
    drawn, axes = style.figure(message, 1.4 + 0.32 * len(rows))
    style.stacked_bars(axes, rows, COLORS)
    places = range(len(parts))
    axes.plot(
        parts["wall_ms"], places, "|", color=style.INK, markersize=12, markeredgewidth=2, label="wall time"
    )
    axes.set(xlabel="time per step, ms", xlim=(0, None))
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


def streams(timeline: pd.DataFrame, strategies: Sequence[str]) -> style.Picture | None:
    """Draw rank 0's compute and communication during one step of each strategy."""
    names = [name for name in strategies if (timeline["strategy"] == name).any()]
    if not names:
        return None
    steps = pd.concat([timeline[timeline["strategy"] == name] for name in names])
    named = steps.assign(name=steps["strategy"].map(label))
    return draw_streams("Communication overlaps with compute where both rows are filled", named)


@style.look()
def draw_streams(message: str, timeline: pd.DataFrame) -> style.Picture:
    """Draw two rows per step, compute and communication.

    Args:
        timeline: the columns name (of the step), part, start_ms and duration_ms. Gaps too short to see are filled.
    """
    names = list(timeline["name"].unique())
    drawn, panels = style.figure(
        message, 0.8 + 0.85 * len(names), rows=len(names), sharex=True, squeeze=False
    )
    ends_ms = timeline["start_ms"] + timeline["duration_ms"]
    for axes, name in zip(panels[:, 0], names):
        step = timeline[timeline["name"] == name]
        for place, part in enumerate(("compute", "communication")):
            spans = without_gaps(step[step["part"] == part], ends_ms.max() / MAX_PIXELS)
            axes.broken_barh(spans, (place - 0.4, 0.8), color=COLORS[part], linewidth=0)
        axes.set_yticks([0, 1], ["compute", "communication"])
        axes.set_title(name, loc="left")
        axes.invert_yaxis()
        axes.grid(False)
    panels[-1, 0].set(xlabel="time since the step began, ms", xlim=(0, None))
    return drawn


def without_gaps(pieces: pd.DataFrame, min_gap_ms: float) -> list[tuple[float, float]]:
    """Return intervals as (start, duration) in ms, joined across gaps shorter than ``min_gap_ms``."""
    spans: list[tuple[float, float]] = []
    for start_ms, duration_ms in pieces.sort_values("start_ms")[["start_ms", "duration_ms"]].to_numpy():
        if spans and start_ms - sum(spans[-1]) < min_gap_ms:
            first_ms, _ = spans.pop()
            spans.append((first_ms, start_ms + duration_ms - first_ms))
        else:
            spans.append((start_ms, duration_ms))
    return spans
