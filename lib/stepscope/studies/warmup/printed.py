"""The warm-up study's tables as they are printed."""
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.say.formats import MODE_WORDS, count, number, percent
from stepscope.step.timing import WHOLE
from stepscope.studies.warmup.facts import SHAPE, WARM_UPS


def means(facts: dict) -> pd.DataFrame:
    """A row a pass and context: how many steps are slow, and errors of median and mean."""
    table = facts["table"]
    cells = pd.DataFrame({"pass": table["mode"].map(MODE_WORDS), "context": table["context_length"],
                          "processes": table["processes"], "slow steps at first": table["slow"],
                          "median, no warm-up": [percent(share, 1) for share in table["median_0"]]})
    for warmups in WARM_UPS:
        if f"mean_{warmups}" in table:
            name = f"mean, {count(warmups, 'warm-up')}"
            cells[name] = [percent(share, 1) if share == share else "–" for share in table[f"mean_{warmups}"]]
    return cells


def costs(facts: dict) -> pd.DataFrame:
    """Shapes down, parts of the start across."""
    table, once = facts["by_part"].copy(), facts["once"]
    if once:
        table["first step after a one-layer model"] = once["after_ms"]
    return table.map(number).rename_axis(["size", "context"]).reset_index()


def phases(facts: dict) -> pd.DataFrame | None:
    """A row a size and pass: extra of a first step by phase, without the loss's."""
    extra = facts["by_phase"]
    if extra is None:
        return None
    cells = pd.DataFrame({"size": extra["size"], "pass": extra["mode"].map(MODE_WORDS)})
    for phase in (*PHASE_NAMES, WHOLE):
        if f"{phase}_low" in extra and phase != "loss":
            cells[phase] = [f"{number(low)} to {number(high)}" if low == low else "–"
                            for low, high in zip(extra[f"{phase}_low"], extra[f"{phase}_high"], strict=True)]
    return cells


def purposes(facts: dict) -> pd.DataFrame | None:
    """Shapes down, purposes of calls across: ms in a first and in a steady step."""
    sums = facts["purposes"]
    if sums is None:
        return None
    sums = sums.assign(cell=[f"{number(first)} / {number(steady)}" for first, steady in
                             zip(sums["first_ms"], sums["steady_ms"], strict=True)])
    wide = sums.pivot(index=SHAPE, columns="purpose", values="cell")
    return wide.rename_axis(["size", "context"]).reset_index()
