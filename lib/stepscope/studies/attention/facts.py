"""What attention's cells say, in numbers: correctness, the device's arithmetic, the mask.

A list of implementations has their keys; ``names`` has what they are called.
"""
import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.say.formats import NEARLY, runs_of
from stepscope.say.selections import precisions
from stepscope.step.summary import pairs_of_clocks
from stepscope.studies.attention.cells import POINT, clocks, head, implementations, timed
from stepscope.studies.attention.config import ATTENTIONS, TOLERANCE
from stepscope.studies.attention.names import NAMES

KERNEL_NUMBER = r"(?<=_attention)_\d+"  # torch numbers the kernels it makes; one reason is one reason
SMALL_SHARE = 0.1  # of a ceiling: below it a decimal tells something
SKIPPED = 1 - 4 * NEARLY  # of the time without the mask: what stays below has skipped half of the square


def same_result(cells: pd.DataFrame) -> dict:
    """Which cells agree with float64, are wrong, or do not run.

    ``errors`` has a row for each implementation and precision: cells, passed, the largest error of those that
    passed or else of the wrong ones, and the status. ``refusals`` has a row for each reason.
    """
    passed, wrong, refused = (cells[cells["status"] == status] for status in ("ok", "wrong", "unsupported"))
    worst = passed.groupby("precision")["error"].max()
    return {"names": NAMES, "cells": len(cells), "passed": len(passed), "refused": len(refused),
            "tolerances": [{"precision": p, "error": TOLERANCE[p]} for p in precisions(cells)],
            "wrong": [{"implementation": name, "precision": p, "cells": len(of), "error": of["error"].max()}
                      for (name, p), of in wrong.groupby(["implementation", "precision"], sort=False)],
            "without_tf32": without_tf32(passed), "untried": untried(cells),
            "worst": [{"precision": p, "error": worst[p]} for p in precisions(passed)],
            "errors": largest_errors(cells), "refusals": refusals(refused), "runs": runs_of(cells)}


def largest_errors(cells: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for name in implementations(cells):
        for precision in precisions(cells):
            here = cells[(cells["implementation"] == name) & (cells["precision"] == precision)]
            statuses = list(here["status"]) or ["none"]
            status = next((known for known in ("ok", "wrong") if known in statuses), statuses[0])
            rows.append({"implementation": name, "precision": precision, "status": status, "cells": len(here),
                         "passed": statuses.count("ok"),
                         "error": here.loc[here["status"] == status, "error"].max()})
    return pd.DataFrame(rows)


def refusals(refused: pd.DataFrame) -> pd.DataFrame:
    """A row for each implementation and reason of torch's, with the precisions, the head dimensions (of the
    first precision) and the cells."""
    if refused.empty:
        return refused
    refused = refused.assign(reason=refused["reason"].astype(str).str.replace(KERNEL_NUMBER, "", regex=True))
    by_precision = refused.groupby(["implementation", "precision", "reason"], sort=False).agg(
        cells=("d_model", "size"), heads=("d_model", lambda heads: sorted(set(heads)))).reset_index()
    return by_precision.groupby(["implementation", "reason"], sort=False).agg(
        precisions=("precision", lambda found: [p for p in PRECISIONS if p in set(found)]),
        heads=("heads", "first"), cells=("cells", "sum")).reset_index()


def without_tf32(passed: pd.DataFrame) -> list[str]:
    """Implementations that stay as exact as fp32 though asked for TF32."""
    worst = passed[passed["precision"] == "tf32"].groupby("implementation")["error"].max()
    return [name for name in ATTENTIONS if name in worst.index and worst[name] < TOLERANCE["fp32"]]


def untried(cells: pd.DataFrame) -> list[dict]:
    """What the grid leaves out: implementations that were not tried at head dimensions and precisions that
    others were, those left out at the same places together; ``all``: none was tried there."""
    tried = set(zip(cells["implementation"], cells["d_model"], cells["precision"], cells["causal"]))
    points = sorted(set(zip(cells["d_model"], cells["precision"])))
    left = pd.DataFrame([(name, d, precision, causal) for d, precision in points for causal in (True, False)
                         for name in implementations(cells) if (name, d, precision, causal) not in tried],
                        columns=["name", "d", "precision", "causal"])
    places: dict[tuple, list[str]] = {}
    for (causal, name), rows in left.groupby(["causal", "name"], sort=False):
        found = tuple(p for p in PRECISIONS if p in set(rows["precision"]))
        places.setdefault((bool(causal), tuple(sorted(set(rows["d"]))), found), []).append(name)
    return [{"causal": causal, "heads": list(heads), "precisions": list(found), "implementations": missing,
             "all": missing == implementations(cells)} for (causal, heads, found), missing in places.items()]


def against_ceiling(cells: pd.DataFrame) -> dict | None:
    """Shares of the measured matrix-product rate without the mask: at the longest sequence, the best of all,
    of forward + backward and of forward alone.

    ``extremes`` are at one d; ``longest`` has the cells at each d's longest sequence.
    """
    rows = timed(cells, causal=False)
    rows = rows[rows["utilisation"].notna()] if len(rows) else rows
    if rows.empty:
        return None
    longest = rows[rows["sequence"] == rows.groupby("d_model")["sequence"].transform("max")]
    d = head(longest)
    at_d = longest[longest["d_model"] == d]
    ceilings = longest["pass_tflops"] / longest["utilisation"]
    return {"names": NAMES, "d": d, "sequence": longest["sequence"].max(),
            "extremes": [highest_and_lowest(at_d, precision) for precision in precisions(at_d)],
            "rates": [{"precision": p, "tflops": ceilings[longest["precision"] == p]}
                      for p in precisions(longest)],
            "best": highest(rows), "clocks": clocks(longest),
            "written_out": highest(rows[rows["implementation"] == "eager"]),
            "longest": longest, "runs": runs_of(cells)}


def highest_and_lowest(at: pd.DataFrame, precision: str) -> dict:
    """The implementations with the highest and, of several, the lowest share of their ceiling; those whose
    intervals overlap the highest one's (``as_high``)."""
    rows = at[at["precision"] == precision].sort_values("utilisation", ascending=False)
    first = rows.iloc[0]
    near = rows[(rows["pass_ci_low_ms"] <= first["pass_ci_high_ms"])
                & (rows["pass_ci_high_ms"] >= first["pass_ci_low_ms"])]
    top, last = ({"implementation": row.implementation, "share": row.utilisation, "tflops": row.pass_tflops,
                  "mhz": None if pd.isna(mhz := getattr(row, "sm_clock_mhz", None)) else mhz}
                 for row in (rows.iloc[0], rows.iloc[-1]))
    return {"precision": precision, "top": top, "last": last if len(rows) > 1 else None,
            "as_high": [*near["implementation"].iloc[1:]]}


def highest(rows: pd.DataFrame, of: str = "utilisation") -> list[dict]:
    """Of each precision the cell with the highest share of its ceiling; ``small`` ones need a decimal."""
    best = [rows.loc[rows.loc[rows["precision"] == p, of].idxmax()] for p in precisions(rows)]
    return [{"precision": row.precision, "implementation": row.implementation, "d": row.d_model,
             "share": row[of], "small": row[of] < SMALL_SHARE} for row in best]


def the_mask(cells: pd.DataFrame) -> dict | None:
    """``gains``: time without the mask over time with it, at the longest sequence, over d and precisions; and
    who must ``skip`` half of the square; of how many ``pairs`` the SM ``clocks`` were read, and
    ``unlike``, also by implementation."""
    masked, plain = timed(cells), timed(cells, causal=False)
    both = masked.merge(plain, on=["implementation", *POINT], suffixes=("", "_plain"))
    if both.empty:
        return None
    both["ratio"] = both["pass_median_ms"] / both["pass_median_ms_plain"]
    longest = both[both["sequence"] == both["sequence"].max()]
    ratios = {name: longest.loc[longest["implementation"] == name, "ratio"]
              for name in implementations(longest)}
    mhz = longest.reindex(columns=["sm_clock_mhz", "sm_clock_mhz_plain"])
    return {"names": NAMES, "sequence": longest["sequence"].max(),
            "gains": [{"implementation": name, "gain": 1 / ratio} for name, ratio in ratios.items()],
            "skip": [name for name, ratio in ratios.items() if ratio.max() < SKIPPED],
            "unlike": [{"implementation": name, "unlike": own["unlike"], "of": own["read"]}
                       for name, rows in mhz.groupby(longest["implementation"], sort=False)
                       if (own := pairs_of_clocks(rows["sm_clock_mhz"], rows["sm_clock_mhz_plain"]))
                       and own["unlike"]],
            "pairs": len(longest), "clocks": pairs_of_clocks(mhz["sm_clock_mhz"], mhz["sm_clock_mhz_plain"]),
            "runs": runs_of(cells)}
