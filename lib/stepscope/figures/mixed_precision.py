"""Draw the mixed_precision study's figures."""

import pandas as pd
from matplotlib.ticker import NullLocator

from stepscope.report import style


@style.look()
def precision_gain(title: str, gains: pd.DataFrame) -> style.Picture:
    """Plot a precision's speedup against the context length, with one line per size.

    Args:
        gains: rows of the view ``precision_gains``, for one precision and mode.
    """
    drawn, axes = style.figure(title)
    ends = style.lines(axes, gains, "context_length", "gpu_speedup", "size", style.SIZE_COLORS)
    axes.set(xscale="log", xlabel="context length", ylabel="speedup in GPU time")
    axes.set_ylim(bottom=0)
    contexts = sorted(gains["context_length"].unique())
    labels = [f"{context:,}" for context in contexts]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(contexts, labels)
    axes.axhline(1, color=style.INK, linewidth=0.8)
    style.label_ends(axes, ends, style.SIZE_COLORS)
    return drawn


@style.look()
def norms(title: str, outputs: pd.DataFrame) -> style.Picture:
    """Plot the relative error of LayerNorm's output against the inputs' scale, with one line per precision.

    Args:
        outputs: rows of the view ``layer_norm``, for the part "output".
    """
    drawn, axes = style.figure(title)
    measured = outputs[outputs["error"].notna()]
    ends = style.lines(axes, measured, "scale", "error", "precision", style.PRECISION_COLORS)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("standard deviation of the inputs")
    axes.set_ylabel("relative error of the output")
    style.label_ends(axes, ends, style.PRECISION_COLORS)
    return drawn
