"""The picture of how far timings are apart."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from stepscope.report.story.trust_facts import step_spreads
from stepscope.say.formats import MODE_WORDS, number
from stepscope.say.style import PALETTE, WIDTH_IN, use_style

FONT = 15  # points: read on a phone, too


def apart(spread: pd.DataFrame, where: str) -> Figure | None:
    """The same step in several processes: a bar a configuration, by how many percent the slowest takes longer
    than the fastest."""
    cells = step_spreads(spread)
    if cells.empty:
        return None
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.9 + 0.42 * len(cells)))
    longer = 100 * cells["range_share"]
    bars = axis.barh(
        [f"{size}, {context}" for size, context in zip(cells["size"], cells["context_length"], strict=True)],
        longer,
        color=PALETTE[0],
    )
    axis.bar_label(bars, [f"{number(one, 2)}%" for one in longer], padding=5, fontsize=FONT)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.18 * longer.max())
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    axis.tick_params(axis="y", labelsize=FONT)
    axis.grid(visible=False)
    mode = MODE_WORDS[cells["mode"].iloc[0]]
    axis.set_xlabel(
        f"how much longer the slowest of {cells['processes'].max():g} processes takes ({mode})", fontsize=FONT
    )
    least, widest = cells.loc[cells["range_share"].idxmin()], cells.loc[cells["range_share"].idxmax()]
    title = f"{_named(widest)} differs by {number(100 * widest['range_share'], 2)}%"
    if len(cells) > 1:
        title += f",\n{_named(least)} by {number(100 * least['range_share'], 2)}%"
    title = f"Another process, another time: {title}"
    figure.suptitle(f"{title} ({where})", x=0.01, ha="left", fontweight="bold", fontsize=FONT)
    return figure


def _named(cell: pd.Series) -> str:
    return f"{cell['size']} at {cell['context_length']}"
