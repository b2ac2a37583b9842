"""The figure of the study of the compiled model; None where there is nothing to draw."""
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.formats import MODE_WORDS, capital, faster
from stepscope.say.selections import pick
from stepscope.say.style import WIDTH_IN, use_style
from stepscope.step.timing import WHOLE
from stepscope.studies.compile.printed import ATTENTION_WORDS, VARIANT_WORDS
from stepscope.studies.compile.tables import fastest


def one_run(times: pd.DataFrame, where: str) -> Figure:
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
    found = fastest(times)
    found = found[found["sure"] & (found["variant"] != "eager")]
    title = "No variant is surely faster than eager"
    if len(found):
        most = found.loc[found["speedup"].idxmax()]
        title = (f"{capital(MODE_WORDS[most['mode']])} with {ATTENTION_WORDS[most['attention']]} attention,"
                 f" {VARIANT_WORDS[most['variant']]}, is {faster(most['speedup'])} than eager")
    figure.suptitle(f"{title}\n({where})", x=0.01, ha="left", fontweight="bold")
    return figure
