"""How long attention takes and how much memory is in use, in numbers."""
import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.say.formats import runs_of
from stepscope.say.selections import beside, precisions
from stepscope.studies.attention.cells import POINT, clocks, head, is_cpu, launching_as_long, timed
from stepscope.studies.attention.config import ATTENTIONS
from stepscope.studies.attention.names import NAMES

WIDE = 0.02  # of a median: an interval that reaches no further says nothing
# The points that the assignment asks for.
ASKED = {"d_model": (16, 32, 64, 128), "sequence": (256, 1024, 4096, 8192, 16384)}


def how_long(cells: pd.DataFrame) -> dict | None:
    """Times and memory of causal passes, by precision at ``d`` and the longest ``sequence``, and over all.

    ``tops`` are the fastest at that point; ``fastest`` and ``slower`` are None where nothing stands beside
    written-out attention or nothing is slower; ``fewer`` is of cells that were timed fewer times than asked;
    ``clocks``: see ``cells.clocks``; ``one_core``: see :func:`launching_from_one_core`.
    """
    rows = timed(cells)
    if rows.empty:
        return None
    d = head(rows)
    sequence = rows.loc[rows["d_model"] == d, "sequence"].max()
    at = cells[cells["causal"] & (cells["d_model"] == d) & (cells["sequence"] == sequence)]
    best = fastest(rows)
    return {"names": NAMES, "grid": grid(rows), "shortest": rows["sequence"].min(),
            "longest": rows["sequence"].max(), "d": d, "sequence": sequence,
            "times": [{"precision": p, "cells": ranked(timed(at), p)}
                      for p in precisions(rows[rows["d_model"] == d])],
            "tops": tops(best, d, sequence), "fastest": gains(best), "slower": slower(rows),
            "wide_share": WIDE,
            "most_passes": int(rows["timed_steps"].max()), "on_cpu": is_cpu(cells),
            "fewer": fewer_passes(rows), "clocks": clocks(rows), "one_core": launching_from_one_core(rows),
            "neighbours": beside(rows), "unsteady": unsteady(rows),
            "written_out": by_precision(cells[(cells["implementation"] == "eager") & cells["causal"]]),
            "at": by_precision(at[at["status"] != "unsupported"]), "asked": asked(cells),
            "asked_in": precisions(rows)[0], "runs": runs_of(cells)}


def launching_from_one_core(rows: pd.DataFrame) -> int:
    """How many runs had one core to launch from."""
    return int((rows.drop_duplicates("run_id")["cpu_cores"] == 1).sum()) if "cpu_cores" in rows else 0


def grid(rows: pd.DataFrame) -> list[dict]:
    """Precisions by the head dimensions they were measured at."""
    found: dict[tuple, list[str]] = {}
    for precision in precisions(rows):
        heads = sorted(rows.loc[rows["precision"] == precision, "d_model"].unique())
        found.setdefault(tuple(heads), []).append(precision)
    return [{"heads": list(heads), "precisions": shown} for heads, shown in found.items()]


def ranked(at: pd.DataFrame, precision: str) -> list[dict]:
    """Implementations of one point and precision, the fastest first, with ``ms`` of a pass and the SM clock
    in ``mhz`` (nan where it was not read)."""
    rows = at[at["precision"] == precision].sort_values("pass_median_ms")
    return [{"implementation": row.implementation, "ms": row.pass_median_ms,
             "mhz": getattr(row, "sm_clock_mhz", float("nan"))} for row in rows.itertuples()]


def by_precision(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of precisions, head dimensions, sequences and implementations."""
    ranks = {"precision": PRECISIONS.index, "implementation": ATTENTIONS.index}

    def ranked(column: pd.Series) -> pd.Series:
        return column.map(ranks[column.name]) if column.name in ranks else column
    return rows.sort_values([*POINT, "implementation"], key=ranked)


def against_eager(rows: pd.DataFrame, among: pd.DataFrame | None = None) -> pd.DataFrame:
    """Rows with ``eager_ms``, ``speedup``, ``eager_launching`` (see ``launching_as_long``) and the interval
    of the written-out attention of the same precision, d and sequence (found ``among`` others, default the
    rows themselves)."""
    among = rows if among is None else among
    among = among.assign(eager_launching=launching_as_long(among))
    parts = {"median": "eager_ms", "ci_low": "eager_low_ms", "ci_high": "eager_high_ms"}
    columns = {f"pass_{part}_ms": name for part, name in parts.items()}
    eager = among[among["implementation"] == "eager"].set_index(POINT)[[*columns, "eager_launching"]]
    both = rows.join(eager.rename(columns=columns), on=POINT, how="inner")
    return both.assign(speedup=both["eager_ms"] / both["pass_median_ms"])


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each precision, d and sequence the fastest implementation, with ``eager_ms`` and ``speedup`` against
    it; ``sure``: whether the second fastest's interval is apart; ``launching``: launching it or the
    written-out one took as long as the pass."""
    of_point = against_eager(rows).sort_values("pass_median_ms").groupby(POINT, sort=False)
    best, second = of_point.nth(0).set_index(POINT), of_point.nth(1).set_index(POINT)
    sure = second["pass_ci_low_ms"].reindex(best.index) > best["pass_ci_high_ms"]
    best = best.assign(sure=sure, launching=launching_as_long(best) | best["eager_launching"])
    return best.reset_index().sort_values(POINT, ignore_index=True)


def tops(best: pd.DataFrame, d: int, sequence: int) -> list[dict]:
    """The fastest of each precision at one point: ``gains`` unless it is the written-out attention itself."""
    at = by_precision(best[(best["d_model"] == d) & (best["sequence"] == sequence)]) if len(best) else best
    return [{"implementation": row.implementation, "precision": row.precision, "ms": row.pass_median_ms,
             "speedup": row.speedup, "gains": row.implementation != "eager"} for row in at.itertuples()]


def gains(best: pd.DataFrame) -> dict | None:
    """What the fastest implementations gain over written out, of points where neither's launching took
    as long as the pass; ``untold``: how many of them the second fastest's interval overlaps."""
    own = best[~best["launching"]] if len(best) else best
    if own.empty:
        return None
    return {"points": len(own), "speedups": own["speedup"], "untold": int((~own["sure"]).sum()),
            "wins": [{"implementation": name, "points": points}
                     for name, points in own["implementation"].value_counts().items()]}


def slower(rows: pd.DataFrame) -> dict | None:
    """Cells that are slower than written out by more than both intervals allow, of those whose
    launching took less than the pass."""
    both = against_eager(rows[~launching_as_long(rows)], rows)
    losers = both[both["pass_ci_low_ms"] > both["eager_high_ms"]]
    if losers.empty:
        return None
    worst = losers.loc[losers["speedup"].idxmin()]
    return {"cells": len(losers), "of": int((both["implementation"] != "eager").sum()),
            "worst": {"implementation": worst.implementation, "precision": worst.precision,
                      "d": worst.d_model, "sequence": worst.sequence, "ms": worst.pass_median_ms,
                      "eager_ms": worst.eager_ms}}


def fewer_passes(rows: pd.DataFrame) -> dict | None:
    """Cells with fewer passes than asked for, and the ``least``."""
    fewer = rows[rows["passes"] < rows["timed_steps"]]
    return None if fewer.empty else {"cells": len(fewer), "least": int(fewer["passes"].min())}


def unsteady(rows: pd.DataFrame) -> dict:
    """How many cells have samples that are not one steady state, apart those whose launching took as long
    as the pass."""
    noisy, launching = rows["pass_flags"].fillna("") != "", launching_as_long(rows)
    return {"cells": len(rows), "unsteady": int(noisy.sum()), "launching": int(launching.sum()),
            "launching_unsteady": int((noisy & launching).sum()), "others": int((~launching).sum()),
            "others_unsteady": int((noisy & ~launching).sum())}


def asked(cells: pd.DataFrame) -> pd.DataFrame:
    """The assignment's table in the first precision that was measured: causal cells of the written-out
    attention at :data:`ASKED` (at all points, where none of these was measured), with the compiled one's
    times (``_compiled``, missing where there is none), how many times faster each phase is (``_ratio``),
    whether the intervals overlap (``_overlaps``), and ``launching``: that of one of both took as long as
    its pass."""
    causal = cells[cells["causal"] & (cells["precision"] == precisions(timed(cells))[0])]
    here = causal["d_model"].isin(ASKED["d_model"]) & causal["sequence"].isin(ASKED["sequence"])
    rows = causal[here] if here.any() else causal
    compiled = timed(rows, implementation="compiled")
    both = rows[rows["implementation"] == "eager"].merge(
        compiled, on=["d_model", "sequence"], suffixes=("", "_compiled"), how="left")
    for phase in ("forward", "backward"):
        both[f"{phase}_overlaps"] = ((both[f"{phase}_ci_low_ms"] <= both[f"{phase}_ci_high_ms_compiled"])
                                     & (both[f"{phase}_ci_low_ms_compiled"] <= both[f"{phase}_ci_high_ms"]))
        both[f"{phase}_ratio"] = both[f"{phase}_median_ms"] / both[f"{phase}_median_ms_compiled"]
    both["launching"] = launching_as_long(both) | launching_as_long(both, "_compiled")
    return both.sort_values(["d_model", "sequence"])
