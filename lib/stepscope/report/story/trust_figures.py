"""The picture of how far timings are apart."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from stepscope.report.story.trust_facts import step_spreads
from stepscope.say.formats import MODE_WORDS, number
from stepscope.say.style import PALETTE, WIDTH_IN, use_style

FONT = 15  # points: read on a phone, too


def apart(spread: pd.DataFrame, where: str) -> Figure | None:
    """The same step in several processes: a row a configuration, slowest process over fastest beside the
    interval that one process gives."""
    cells = step_spreads(spread)
    if cells.empty:
        return None
    use_style()
    cells = cells.iloc[::-1].reset_index(drop=True)
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.9 + 0.42 * len(cells)))
    axis.hlines(
        cells.index,
        100 * cells["within_share"],
        100 * cells["range_share"],
        color="0.75",
        linewidth=2,
        zorder=1,
    )
    axis.scatter(
        100 * cells["within_share"],
        cells.index,
        s=80,
        facecolor="white",
        edgecolor=PALETTE[5],
        linewidth=2,
        zorder=2,
        label="one process: its interval (±)",
    )
    axis.scatter(
        100 * cells["range_share"],
        cells.index,
        s=80,
        marker="s",
        color=PALETTE[0],
        zorder=2,
        label=f"{cells['processes'].max():g} processes: slowest over fastest",
    )
    axis.legend(
        loc="upper left",
        bbox_to_anchor=(-0.2, 1.0),
        ncols=2,
        fontsize=FONT,
        handletextpad=0.1,
        labelcolor=[PALETTE[5], PALETTE[0]],
    )
    axis.set_yticks(
        cells.index,
        [
            f"{row.size_name}, {row.context_length}"
            for row in cells.rename(columns={"size": "size_name"}).itertuples()
        ],
        fontsize=FONT,
    )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="x", labelsize=FONT)
    axis.set_ylim(-0.6, len(cells) + 0.4)
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)
    mode = MODE_WORDS[cells["mode"].iloc[0]]
    axis.set_xlabel(f"difference of the same {mode} (size, context)", fontsize=FONT)
    least, widest = cells.loc[cells["range_share"].idxmin()], cells.loc[cells["range_share"].idxmax()]
    title = f"{_named(widest)} differs by {number(100 * widest['range_share'], 2)}%"
    if len(cells) > 1:
        title += f",\n{_named(least)} by {number(100 * least['range_share'], 2)}%"
    title = f"Another process, another time: {title}"
    figure.suptitle(f"{title} ({where})", x=0.01, ha="left", fontweight="bold", fontsize=FONT)
    return figure


def _named(cell: pd.Series) -> str:
    return f"{cell['size']} at {cell['context_length']}"
