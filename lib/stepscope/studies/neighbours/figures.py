"""What busy neighbours change, drawn."""
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.style import WIDTH_IN, use_style
from stepscope.studies.neighbours.facts import SAME, ratios
from stepscope.studies.neighbours.printed import GROUPS


def agree(timings: pd.DataFrame, where: str) -> Figure | None:
    """A point a phase: its ratio to the first condition over its time, a panel for each other condition."""
    both = ratios(timings)
    if both.empty:
        return None
    use_style()
    conditions = list(both["condition"].unique())
    figure, axes = plt.subplots(1, len(conditions), figsize=(WIDTH_IN, 4.2), sharex=True, sharey=True,
                                squeeze=False)
    for axis, condition in zip(axes[0], conditions):
        axis.axhspan(1 - SAME, 1 + SAME, color="0.85", linewidth=0, label=f"within {SAME:.0%}")
        for (busy, words), (color, marker) in zip(GROUPS.items(), (("#0072B2", "o"), ("#D55E00", "^"))):
            rows = both[(both["condition"] == condition) & (both["busy"] == busy)]
            axis.plot(rows["gpu_ms_first"], rows["ratio"], marker, color=color, markersize=4, label=words)
        axis.set_xscale("log")
        axis.set_title(condition.replace(", ", ",\n"), fontsize=12)
        axis.set_xlabel("time with one (ms)")
    axes[0, 0].set_ylabel("times as long")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  handletextpad=0.3)
    first, gpu = timings["condition"].iloc[0], both[both["busy"].astype(bool)]
    same = (gpu["ratio"] - 1).abs() < SAME
    figure.suptitle(f"{same.sum()} of {len(gpu)} times of phases that keep the GPU busy stay within"
                    f" {SAME:.0%}\nof “{first}” ({where})", x=0.01, ha="left", fontweight="bold")
    return figure
