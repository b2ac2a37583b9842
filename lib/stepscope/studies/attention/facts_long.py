"""Attention at a sequence beyond the grid, in numbers: who holds it, at what time and memory."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import precisions
from stepscope.studies.attention.cells import clocks
from stepscope.studies.attention.config import QUADRATIC
from stepscope.studies.attention.facts_time import WIDE, by_precision
from stepscope.studies.attention.names import NAMES
from stepscope.studies.attention.prediction import number_bytes


def at_the_longest(long: pd.DataFrame) -> dict | None:
    """The longest sequence with the causal mask; ``by_precision``: who runs, the quickest first (``ms`` of a
    pass), who is ``out`` of memory (``squares``: only such as hold whole squares), and the size of one
    square of scores; SDPA math's, which is fp32's, where that is another (``math_gib``); ``clocked``: the SM
    clock was read."""
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
        out = list(dict.fromkeys(here.loc[here["status"] == "oom", "implementation"]))
        pairs_gi = int(first["batch_size"]) * sequence**2 / 2**30
        found.append({"precision": precision, "square_gib": pairs_gi * number_bytes(precision),
                      "math_gib": pairs_gi * number_bytes("fp32") if "math" in out and precision != "fp32"
                      else None,
                      "ran": [{"implementation": row.implementation, "ms": row.pass_median_ms}
                              for row in ran.itertuples()],
                      "out": out, "squares": set(out) <= set(QUADRATIC)})
    return {"names": NAMES, "sequence": sequence, "batch": int(first["batch_size"]),
            "heads": sorted(int(d) for d in rows["d_model"].unique()), "by_precision": found,
            "wide_share": WIDE,
            "clocked": clocks(rows) is not None,
            "cells": by_precision(rows), "runs": runs_of(rows)}
