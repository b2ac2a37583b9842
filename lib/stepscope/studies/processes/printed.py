"""The tables of the study of processes as they are printed."""
import pandas as pd

from stepscope.say.formats import MODE_WORDS, number, percent


def spreads(facts: dict) -> pd.DataFrame:
    """A row a cell: median over processes, and both spreads."""
    cells = facts["cells"]
    table = cells.assign(
        mode=cells["mode"].map(MODE_WORDS), median=cells["median_ms"].map(number),
        within=["±" + percent(share, 2) for share in cells["within_share"]],
        between=[percent(share, 2) for share in cells["between_share"]],
        apart=[percent(share, 1) for share in cells["range_share"]])
    return table[["size", "context_length", "mode", "median", "within", "between", "apart"]].set_axis(
        ["size", "context", "pass", "median (ms)", "within a process", "between processes",
         "slowest over fastest process"], axis=1).reset_index(drop=True)
