"""Figures of the attention study; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from stepscope.config import ATTENTIONS
from stepscope.figures import MARKERS, PALETTE, WIDTH_IN, use_style

STYLES = {name: {"color": color, "marker": marker} for name, color, marker in zip(ATTENTIONS, PALETTE, MARKERS)}


def one_run(cells: pd.DataFrame, title: str) -> Figure:
    """One run's causal cells: time of a pass and memory in use before backward, over the sequence."""
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 3.6))
    ok = cells[(cells["status"] == "ok") & cells["causal"]]
    for axis, column, scale, label in ((axes[0], "pass_median_ms", 1, "forward and backward (ms)"),
                                       (axes[1], "in_use_bytes", 2**20, "in use before backward (MiB)")):
        _over_sequence(axis, ok, column, scale)
        axis.set(ylabel=label, title=title if axis is axes[0] else "")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


def _over_sequence(axis, cells: pd.DataFrame, column: str, scale: float = 1.0) -> None:
    """A line an implementation over the sequence, both axes logarithmic."""
    for name, own in cells.groupby("implementation", sort=False):
        own = own.sort_values("sequence")
        axis.plot(own["sequence"], own[column] / scale, label=name, linewidth=1.5, markersize=5, **STYLES[name])
    axis.set(xscale="log", yscale="log", xlabel="sequence")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
