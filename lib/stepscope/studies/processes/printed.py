"""The tables of the study of processes as they are printed."""
import pandas as pd

from stepscope.say.formats import MODE_WORDS, listing, number, share


def spreads(facts: dict) -> pd.DataFrame:
    """A row a cell: median over processes, and both spreads."""
    cells = facts["cells"]
    table = cells.assign(
        mode=cells["mode"].map(MODE_WORDS), median=cells["median_ms"].map(number),
        within=["±" + share(value) for value in cells["within_share"]],
        between=[share(value) for value in cells["between_share"]],
        apart=[share(value) for value in cells["range_share"]],
        waits=["not decided" if phases is None else listing(phases) if phases else "no phase"
               for phases in cells["waits_in"]])
    names = {"size": "size", "context_length": "context", "mode": "pass", "median": "median (ms)",
             "within": "within a process", "between": "between processes",
             "apart": "slowest over fastest process", "waits": "GPU waits for launches in"}
    return table[[*names]].rename(columns=names).reset_index(drop=True)
