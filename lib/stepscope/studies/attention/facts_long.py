"""Attention at a sequence beyond the grid, in numbers: who holds it, at what time and memory."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import precisions
from stepscope.studies.attention.cells import POINT, timed
from stepscope.studies.attention.config import QUADRATIC
from stepscope.studies.attention.facts_time import by_precision
from stepscope.studies.attention.names import NAMES
from stepscope.studies.attention.prediction import number_bytes


def at_the_longest(long: pd.DataFrame, cells: pd.DataFrame) -> dict | None:
    """The longest sequence with the causal mask; ``by_precision``: who runs, the quickest first (``ms`` of a
    pass), who is ``out`` of memory (``squares``: only such as
    hold whole squares), what is not ``supported`` there, and the bytes of one square of scores.
    ``growth``: a pass's time over that of the grid's longest sequence (``from``), as ``expected`` if it grows
    with the square; None where no cell is in both."""
    rows = long[long["causal"].astype(bool)] if len(long) else long
    if rows.empty:
        return None
    sequence = int(rows["sequence"].max())
    rows = rows[rows["sequence"] == sequence]
    first = rows.iloc[0]
    found = []
    for precision in precisions(rows):
        here = rows[rows["precision"] == precision]
        ran = here[here["status"] == "ok"].sort_values("pass_median_ms")
        square = int(first["batch_size"]) * sequence**2 * number_bytes(precision)
        found.append({"precision": precision, "square_gib": square / 2**30,
                      "ran": [{"implementation": row.implementation, "d": row.d_model,
                               "ms": row.pass_median_ms, "mib": row.in_use_bytes / 2**20}
                              for row in ran.itertuples()],
                      "out": (out := list(dict.fromkeys(here.loc[here["status"] == "oom",
                                                                 "implementation"]))),
                      "squares": set(out) <= set(QUADRATIC),
                      "refused": list(dict.fromkeys(here.loc[here["status"] == "unsupported",
                                                             "implementation"]))})
    return {"names": NAMES, "sequence": sequence, "batch": int(first["batch_size"]),
            "heads": sorted(int(d) for d in rows["d_model"].unique()), "by_precision": found,
            "growth": growth(timed(rows), timed(cells)), "cells": by_precision(rows), "runs": runs_of(rows)}


def growth(long: pd.DataFrame, cells: pd.DataFrame) -> dict | None:
    """How many times as long a pass takes at the long sequence as at the grid's longest."""
    if long.empty or cells.empty:
        return None
    before = cells[cells["sequence"] == cells["sequence"].max()]
    both = long.merge(before, on=["implementation", *POINT[:-1]], suffixes=("", "_before"))
    if both.empty:
        return None
    times = both["sequence"].iloc[0] / both["sequence_before"].iloc[0]
    return {"from": int(both["sequence_before"].iloc[0]), "times": times, "expected": times**2,
            "ratios": (both["pass_median_ms"] / both["pass_median_ms_before"]).tolist()}
