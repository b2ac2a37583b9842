"""Figures of the distributed study: where a step's time goes by strategy, and one step's streams."""

from collections.abc import Sequence

import pandas as pd

from stepscope.report import style
from stepscope.report.tables import number
from stepscope.studies.distributed.tables import PARTS

COLORS = {
    "compute": style.BLUE,
    "transfer": style.ORANGE,
    "waiting": style.AMBER,
    "copies": style.PINK,
    "idle": style.FILL,
    "communication": style.ORANGE,
}
WORDS = {"gpu": "GPU", "ddp": "DDP", "fsdp": "FSDP", "zero1": "ZeRO-1", "mib": "MiB"}


def label(strategy: str) -> str:
    """Return a strategy's name in words, such as "DDP 25 MiB"."""
    words = strategy.split("_")
    return " ".join(WORDS.get(word, word) for word in words)


@style.look()
def where_time_goes(parts: pd.DataFrame) -> style.Picture | None:
    """Draw a bar per strategy with the parts of its profiled step; a tick marks the unprofiled median.

    Args:
        parts: as from :func:`stepscope.studies.distributed.tables.parts`.
    """
    if parts.empty:
        return None
    rows = parts[[f"{part}_ms" for part in PARTS]].set_axis(list(PARTS), axis=1)
    communicating = parts[parts["transfer_ms"] + parts["waiting_ms"] > 0]
    fastest = communicating.sort_values("wall_ms").iloc[:1]
    message = "No strategy communicates"
    for name, wall_ms in fastest["wall_ms"].items():
        message = f"The fastest step with communication, {label(str(name))}, takes {number(wall_ms, 'ms')}"
    drawn, axes = style.figure(message, 1.4 + 0.32 * len(rows))
    style.stacked_bars(axes, rows.set_axis([label(str(name)) for name in rows.index]), COLORS)
    places = range(len(parts))
    axes.plot(
        parts["wall_ms"], places, "|", color=style.INK, markersize=12, markeredgewidth=2, label="not profiled"
    )
    axes.set(xlabel="time per step, ms", xlim=(0, None))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.18 - 0.6 / len(rows)), ncols=3)
    return drawn


@style.look()
def streams(timeline: pd.DataFrame, strategies: Sequence[str]) -> style.Picture | None:
    """Draw rank 0's compute and communication during one step of each strategy."""
    rows = timeline[timeline["strategy"].isin(strategies)]
    names = [name for name in strategies if (rows["strategy"] == name).any()]
    if not names:
        return None
    message = "Communication overlaps with compute where both rows are filled"
    drawn, panels = style.figure(
        message, 0.8 + 0.85 * len(names), rows=len(names), sharex=True, squeeze=False
    )
    for axes, name in zip(panels[:, 0], names):
        step = rows[rows["strategy"] == name]
        for place, part in enumerate(("compute", "communication")):
            pieces = step[step["part"] == part]
            spans = list(zip(pieces["start_ms"], pieces["duration_ms"]))
            axes.broken_barh(spans, (place - 0.4, 0.8), color=COLORS[part], linewidth=0)
        axes.set_yticks([0, 1], ["compute", "communication"])
        axes.set_title(label(name), loc="left")
        axes.invert_yaxis()
        axes.grid(False)
    panels[-1, 0].set(xlabel="time since the step's first kernel, ms", xlim=(0, None))
    return drawn
