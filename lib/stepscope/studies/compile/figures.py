"""The figure of the study of the compiled model; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stepscope.say.formats import MODE_WORDS, listing, number
from stepscope.say.selections import pick, precisions
from stepscope.say.style import WIDTH_IN, use_style
from stepscope.step.timing import WHOLE
from stepscope.studies.compile.pairs import VARIANTS, relative
from stepscope.studies.compile.printed import ATTENTION_WORDS, VARIANT_WORDS

# Attention, variant and colour; eager with written-out attention is what the others are measured by.
BARS = [("eager", "eager", "0.75"), ("eager", "block", "#0072B2"), ("sdpa", "eager", "#E69F00"),
        ("sdpa", "block", "#D55E00")]
COMPILED_WORDS = {"eager": "eager", "block": "each block compiled"}
MODES = ["forward_backward", "step"]


def one_run(times: pd.DataFrame, title: str) -> Figure:
    """One run's whole steps in ms with their 95% intervals: a panel a mode, a bar for each attention and
    variant."""
    use_style()
    rows = times[times["phase"] == WHOLE]
    modes = [mode for mode in MODE_WORDS if (rows["mode"] == mode).any()] or ["step"]
    figure, axes = plt.subplots(1, len(modes), figsize=(WIDTH_IN, 3.6), squeeze=False, sharey=True)
    for axis, mode in zip(axes[0], modes):
        here = pick(rows, mode=mode).iloc[::-1]
        names = [f"{ATTENTION_WORDS[attention]}, {VARIANT_WORDS[variant]}"
                 for attention, variant in zip(here["attention"], here["variant"])]
        median = here["median_ms"]
        axis.barh(names, median, color="#0072B2", height=0.7, error_kw={"ecolor": "0.2"},
                  xerr=[median - here["ci_low_ms"], here["ci_high_ms"] - median])
        axis.set(title=MODE_WORDS[mode], xlabel="wall time of a step (ms)")
        axis.grid(axis="y", visible=False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def whole_model(times: pd.DataFrame, where: str) -> Figure | None:
    """Time by size as a multiple of eager with written-out attention in the same process, whose ms stand
    under the size: a row of panels a mode, a panel a precision. Whiskers are the farthest that both medians'
    95% intervals allow."""
    rows = relative(times)
    rows = rows[rows["variant"].isin(VARIANTS) & rows["mode"].isin(MODES)] if len(rows) else rows
    if rows.empty:
        return None
    rows = rows[rows["run_id"].isin(rows.drop_duplicates(["size", "precision"])["run_id"])]  # one run each
    use_style()
    shown, modes = precisions(rows), [mode for mode in MODES if (rows["mode"] == mode).any()]
    sizes = [str(size) for size in rows["size"].cat.remove_unused_categories().cat.categories]
    figure, axes = plt.subplots(len(modes), len(shown), figsize=(WIDTH_IN, 0.8 + 2.6 * len(modes)),
                                squeeze=False, sharey=True)
    for line, mode in zip(axes, modes):
        for axis, precision in zip(line, shown):
            bars(axis, pick(rows, mode=mode, precision=precision), sizes)
            axis.set(title=f"{MODE_WORDS[mode]}, {precision}", xlim=(-0.55, len(sizes) - 0.45))
        line[0].set_ylabel("relative time")
    handles = [Patch(color=color, label=f"{ATTENTION_WORDS[attention]}, {COMPILED_WORDS[variant]}")
               for attention, variant, color in BARS if len(pick(rows, attention=attention, variant=variant))]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    contexts = listing(str(context) for context in sorted(set(rows["context_length"])))
    figure.suptitle(f"Compiled and with SDPA against eager, context {contexts} ({where})", x=0.01, ha="left",
                    fontweight="bold")
    return figure


def bars(axis: Axes, here: pd.DataFrame, sizes: list[str]) -> None:
    """One panel: a group of bars a size."""
    for index, (attention, variant, color) in enumerate(BARS):
        rows = pick(here, attention=attention, variant=variant)
        x = np.array([sizes.index(str(size)) for size in rows["size"]]) + (index - 1.5) * 0.2
        whiskers = [rows["relative"] - rows["relative_low"], rows["relative_high"] - rows["relative"]]
        axis.bar(x, rows["relative"], 0.19, color=color, yerr=whiskers if index else None,
                 error_kw={"elinewidth": 1, "ecolor": "0.2"})
    base = here.drop_duplicates("size").astype({"size": str}).set_index("size")["base_ms"]
    labels = [f"{size}\n{number(base[size])} ms" if size in base.index else size for size in sizes]
    axis.set_xticks(range(len(sizes)), labels, fontsize=9)
    axis.axhline(1, color="0.4", linewidth=0.8, linestyle="--")
    axis.grid(axis="x", visible=False)
