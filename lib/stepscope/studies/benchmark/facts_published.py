"""This machine's timings beside those that other reports print, and which of theirs are in doubt."""
import pandas as pd

from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.published import KINDS, doubts, source_name
from stepscope.say.selections import matrix
from stepscope.step.timing import WHOLE

PASS = ["size", "context_length", "phase"]


def measured(times: pd.DataFrame) -> pd.DataFrame:
    """Our figures in the published ones' terms: size, context_length, phase (forward, backward,
    forward_backward, step).
    """
    times = matrix(times)
    if times.empty:
        return times
    times = times[times["status"] == "ok"]
    wall = times[times["phase"] == WHOLE].assign(phase=lambda t: t["mode"])
    backward = times[(times["phase"] == "backward") & (times["mode"] == "forward_backward")]
    return pd.concat([wall, backward], ignore_index=True)


def fp32_only(published: pd.DataFrame) -> pd.DataFrame:
    """Figures of plain fp32 steps, or that do not state their precision."""
    return published[published["precision"].isin(["fp32"]) | published["precision"].isna()]


def compared(times: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Published fp32 figures with a size and a context that was measured here too, joined with ours
    (``_here``).
    """
    here = measured(times)
    if here.empty:
        return here
    theirs = fp32_only(published).dropna(subset=PASS)
    theirs = theirs[~theirs["estimated"] & (theirs["warmup_steps"].isna() | (theirs["warmup_steps"] > 0))]
    both = theirs.merge(here.assign(size=here["size"].astype(str)), on=PASS, suffixes=("", "_here"))
    both = both.assign(source_name=[source_name(row) for _, row in both.iterrows()],
                       ratio=both["mean_ms"] / both["median_ms"])
    return by_size(both)


def beside(published: pd.DataFrame, times: pd.DataFrame) -> dict | None:
    """Published times over ours, by source; and where several reports print one pass, how far they are apart.
    """
    both = compared(times, published)
    if both.empty:
        return None if times.empty else {"common": None, "table": None, "runs": []}
    several = both.groupby(PASS, observed=True).filter(lambda rows: rows["source_name"].nunique() > 1)
    spread = None
    if len(several):
        spread = several.groupby(PASS, observed=True)["mean_ms"].agg(lambda times: times.max() / times.min())
    size, context, phase = spread.idxmax() if spread is not None else (None, None, None)
    return {"common": [{"source": name, "ratio": ratios, "figures": len(ratios)}
                       for name, ratios in both.groupby("source_name", sort=True)["ratio"]],
            "several": None if spread is None else {"spread": spread.max(), "size": size, "context": context,
                                                    "phase": phase},
            "table": both, "runs": runs_of(both)}


def cannot_be(published: pd.DataFrame) -> dict:
    """Doubts about printed fp32 figures, by kind, and the figure with the widest spread."""
    figures = fp32_only(published)
    found = doubts(figures)
    widest = figures.assign(spread=lambda p: p["std_ms"] / p["mean_ms"]).nlargest(1, "spread")
    kinds = found["kind"].value_counts()
    return {"doubts": len(found), "figures": len(figures),
            "kinds": [{"kind": kind, "count": kinds[kind]} for kind in KINDS if kind in kinds],
            "widest": widest.iloc[0].to_dict() | {"source_name": source_name(widest.iloc[0])}
            if len(widest) else None,
            "table": found.assign(report=[source_name(row) for _, row in found.iterrows()]), "runs": []}
