"""Figures of the benchmarking study, each one call over a tidy table; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from stepscope.runs.tables import by_size
from stepscope.say.formats import MODE_WORDS, number, percent
from stepscope.say.selections import matrix, pick
from stepscope.say.style import MARKERS, PALETTE, WIDTH_IN, use_style
from stepscope.step.timing import WHOLE
from stepscope.studies.benchmark.facts import with_waits
from stepscope.traces.waits import GPU, WAITED


def utilisation(times: pd.DataFrame, captured: pd.DataFrame, where: str) -> Figure | None:
    """Share of the measured ceiling over context, a panel a mode, a line a size."""
    rows = whole_steps(times, captured)
    if rows.empty or rows["utilisation"].isna().all():
        return None
    use_style()
    figure, axes = plt.subplots(1, len(MODE_WORDS), figsize=(WIDTH_IN, 3.5), sharey=True)
    for axis, (mode, words) in zip(axes, MODE_WORDS.items()):
        _lines(axis, pick(rows, mode=mode), "utilisation")
        axis.set(title=words.capitalize(), xlabel="context", ylim=(0, 1))
    axes[0].set_ylabel("share of the measured\nfp32 matrix-product rate")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    known = rows[rows["utilisation"].notna()]
    shares = known["utilisation"]
    least, most = known.loc[shares.idxmin()], known.loc[shares.idxmax()]
    low, high = (f"{percent(one['utilisation'])} ({one['size']} at {one['context_length']},"
                 f" {MODE_WORDS[one['mode']]})" for one in (least, most))
    figure.suptitle(f"A step reaches {low if low == high else f'{low} to {high}'}\n"
                    f"of the product rate measured on the same device ({where})",
                    x=0.01, ha="left", fontweight="bold")
    return figure


def whole_steps(times: pd.DataFrame, captured: pd.DataFrame) -> pd.DataFrame:
    """The whole steps that were timed, with the share of each in which the GPU waits for launches."""
    rows = matrix(times)
    rows = pick(rows, status="ok") if len(rows) else rows
    return pick(with_waits(rows, captured), phase=WHOLE) if len(rows) else rows


def _lines(axis, rows: pd.DataFrame, column: str) -> None:
    """A line a size over context; hollow where the GPU waits for launches, whiskers the 95% interval (or what
    it makes of a rate).
    """
    for index, (size, group) in enumerate(rows.groupby("size", observed=True)):
        color, marker = PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]
        bound = group["waited_share"] > WAITED
        low, high = ((group["ci_low_ms"], group["ci_high_ms"]) if column == "median_ms" else
                     (group[column] * group["median_ms"] / group["ci_high_ms"],
                      group[column] * group["median_ms"] / group["ci_low_ms"]))
        axis.errorbar(
            group["context_length"],
            group[column],
            yerr=[group[column] - low, high - group[column]],
            color=color,
            linewidth=1.6,
        )
        axis.plot(
            group["context_length"], group[column], color=color, marker=marker, label=size, linewidth=1.6
        )
        axis.plot(group["context_length"][bound], group[column][bound], color=color, marker=marker,
                  linestyle="none",
                  markerfacecolor="white", markeredgewidth=1.6)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(rows["context_length"].unique()))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    if (rows["waited_share"] > WAITED).any():
        axis.plot([], [], "ko", markerfacecolor="white", label=GPU)


def optimizer(times: pd.DataFrame, where: str) -> Figure | None:
    """Optimizer phase by implementation and size."""
    if times.empty:
        return None
    rows = by_size(pick(times, mode="step", phase="optimizer", status="ok"))
    keys = ["size", "context_length", "precision"]
    both = rows[rows["optimizer"] == "foreach"].merge(rows[rows["optimizer"] == "fused"], on=keys,
                                                      suffixes=("_foreach", "_fused"))
    if both.empty:
        return None
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN * 0.72, 3.4))
    for offset, name, color in ((-0.2, "foreach", "#0072B2"), (0.2, "fused", "#E69F00")):
        x = np.arange(len(both)) + offset
        median = both[f"median_ms_{name}"]
        bars = axis.bar(x, median, 0.4, color=color, label=name,
                        yerr=[median - both[f"ci_low_ms_{name}"], both[f"ci_high_ms_{name}"] - median])
        axis.bar_label(bars, [f"{value:.3g}" for value in median], padding=2, fontsize=9)
    axis.set_xticks(range(len(both)), [f"{row.size}" for row in both.itertuples()]
                    if both["context_length"].nunique() == 1 else
                    [f"{row.size}\n{row.context_length}" for row in both.itertuples()])
    gains = both["median_ms_foreach"] / both["median_ms_fused"]
    low, high = number(gains.min(), 2), number(gains.max(), 2)
    axis.set(ylabel="optimizer phase (ms)",
             title=f"AdamW, fused: {low if low == high else f'{low} to {high}'}x faster ({where})")
    axis.legend()
    axis.grid(axis="x", visible=False)
    return figure
