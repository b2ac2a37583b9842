"""The tables of the study of processes as they are printed."""
import pandas as pd

from stepscope.say.formats import MODE_WORDS, number, share


def spreads(facts: dict) -> pd.DataFrame:
    """A row a cell: median over processes, and both spreads."""
    cells = facts["cells"]
    table = cells.assign(
        mode=cells["mode"].map(MODE_WORDS), median=cells["median_ms"].map(number),
        within=["±" + share(value) for value in cells["within_share"]],
        between=[share(value) for value in cells["between_share"]],
        apart=[share(value) for value in cells["range_share"]])
    return table[["size", "context_length", "mode", "median", "within", "between", "apart"]].set_axis(
        ["size", "context", "pass", "median (ms)", "within a process", "between processes",
         "slowest over fastest process"], axis=1).reset_index(drop=True)
