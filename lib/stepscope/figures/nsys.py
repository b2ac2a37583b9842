"""Draw the nsys study's figures."""

import pandas as pd

from stepscope.report import style
from stepscope.studies.nsys.figures import ON_GPU, draw_lanes, draw_shares

# The phases to draw. The loss is omitted, because it is too short to see.
PHASES = {"forward": "forward", "backward": "backward", "optimizer": "AdamW"}


@style.look()
def kernel_categories_by_size(title: str, categories: pd.DataFrame) -> style.Picture:
    """Draw a bar for each size and phase, divided into kernel categories, as shares of the full step's GPU time.

    Args:
        categories: rows of the view ``profile_categories`` for one mode, one row per size, phase and category.
    """
    is_drawn = categories["phase"].isin([*PHASES])
    rows = categories[is_drawn]
    phase = rows["phase"].map(PHASES)
    named = rows.assign(bar=rows["size"] + ": " + phase)
    shares = named.pivot(index="bar", columns="kernel_category", values="share")
    widths = shares.sum().sort_values(ascending=False)
    sizes = rows["size"].unique()
    bars = [f"{size}: {name}" for size in sizes for name in PHASES.values()]
    shares = shares.reindex(index=bars, columns=widths.index)
    shares = shares.fillna(0.0)

    height = 1.6 + 0.34 * len(bars)
    drawn, axes = style.figure(title, height)
    draw_shares(axes, shares, least=0.07)
    axes.set_xlabel("share of the step's GPU time")
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


@style.look()
def launches_timeline(title: str, operations: pd.DataFrame) -> style.Picture:
    """Draw the CPU launches and the GPU kernels in one millisecond of the forward pass.

    The figure also shows the GPU kernels of a forward pass that is replayed as a CUDA graph.

    Args:
        operations: rows of the view ``launch_timeline`` for one configuration.
    """
    names = {mode: name for mode, name in ON_GPU.items() if (operations["mode"] == mode).any()}
    return draw_lanes(title, operations, names, "CPU launches")
