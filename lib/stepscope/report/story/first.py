"""The first screen: how fast the step can be made, in one picture; of a sweep without a ladder, what it
compares."""
import pandas as pd

from stepscope.config import SIZES, StepConfig
from stepscope.report.story.part import Part
from stepscope.runs.tables import by_size
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import MODE_WORDS, number, runs_of
from stepscope.step.flops import parameter_count
from stepscope.step.timing import WHOLE
from stepscope.studies.ladder import facts as ladder_facts
from stepscope.studies.ladder.figures import hero
from stepscope.studies.ladder.names import name_of

FEW = 8  # rows of a table of the main text
HELPS = 0.02  # a gain under this share is none
VARIED = ("precision", "attention", "compile", "optimizer", "batch_size", "vocab_size")


def story(rungs: pd.DataFrame, curves: pd.DataFrame) -> dict | None:
    """The ladder of the largest size from its first rung to its fastest, and the rungs that gain most.

    ``best`` are the rungs that surely gain more than :data:`HELPS`, the most first; ``elsewhere`` the largest
    gain of one rung at another size, None where there is one size or none gains more there; ``trained`` what
    loss curves say, None where there are none.
    """
    found = ladder_facts.ladder(rungs)
    if found is None:
        return None
    rows = found["rows"]
    gained = rows[(rows["kind"] == "rung") & (rows["gain"] > 1 + HELPS) & (rows["gain_low"] > 1)]
    gained = gained.sort_values("gain", ascending=False)
    best = [{"name": name_of(row["rung"]), "gain": row["gain"]} for row in gained.to_dict("records")]
    other = rungs[(rungs["kind"] == "rung") & rungs["gain"].notna() & (rungs["gain_low"] > 1)]
    other = other[other["size"].astype(str) != found["size"]]
    elsewhere = None
    if len(other):
        most = other.loc[other["gain"].idxmax()]
        here = rows.loc[rows["rung"] == most["rung"], "gain"]
        if len(here) and most["gain"] > here.iloc[0] * (1 + HELPS):
            elsewhere = {"name": name_of(most["rung"]), "size": str(most["size"]), "gain": most["gain"],
                         "here": here.iloc[0], "useless_here": bool(here.iloc[0] < 1 + HELPS)}
    beside = found["beside"]
    told = ("size", "context", "batch", "first_ms", "best_ms", "faster", "floor_ms", "floor_share",
            "products_ms", "moving_ms", "several", "processes", "most_processes",
            "alike", "gains", "runs")
    return {name: found[name] for name in told} | {
        "parameters": _billions(found["size"], found["vocabulary"], found["context"]),
        "best": best, "changes": len(best), "elsewhere": elsewhere,
        "beside_ms": beside and beside["median_ms"], "over_beside": beside and beside["over_best"],
        "beats_beside": bool(beside and beside["over_best"] > 1 + HELPS and beside["over_best_low"] > 1),
        "trained": _trained(curves)}


def _trained(curves: pd.DataFrame) -> dict | None:
    """Whether rungs train nearer to fp32 than another seed would; None without curves of several seeds."""
    if curves.empty or curves.loc[curves["rung"] == "fp32", "seed"].nunique() < 2:
        return None
    found = ladder_facts.trained(curves)
    named = ("steps", "seeds", "training_size", "inside", "compared", "all_inside", "out")
    return {name: found[name] for name in named}


def _billions(size: str, vocabulary: int, context: int) -> float | None:
    """Parameters of a named size, in 1e9; None for a shape without a name."""
    if size not in SIZES:
        return None
    shape = SIZES[size]._asdict()
    config = StepConfig(size=size, vocab_size=vocabulary, context_length=context, device="cpu", **shape)
    return parameter_count(config) / 1e9


def compared(times: pd.DataFrame, rungs: pd.DataFrame) -> dict | None:
    """Of a sweep of one's own, pairs of runs that differ in one field, the default against the other value.

    ``pairs`` has a row a pair: size, context_length, mode, field, before, after, before_ms, after_ms and
    ``faster`` (before over after); ``fields`` those that were varied. None where there is a ladder, which
    says more, or nothing was varied.
    """
    whole = times[(times["phase"] == WHOLE) & (times["status"] == "ok")] if len(times) else times
    if len(rungs) or whole.empty:
        return None
    pairs = []
    for field in (field for field in VARIED if whole[field].nunique() > 1):
        rest = [*(other for other in VARIED if other != field), "size", "context_length", "mode"]
        for _, group in whole.groupby(rest, observed=True):
            ordered = group.drop_duplicates(field).sort_values(field, key=_defaults_first)
            before, *others = ordered.to_dict("records")
            pairs += [{"study": "benchmark", "run_id": other["run_id"], "size": other["size"],
                       "context_length": other["context_length"], "mode": other["mode"], "field": field,
                       "before": str(before[field]), "after": str(other[field]),
                       "before_ms": before["median_ms"], "after_ms": other["median_ms"],
                       "faster": before["median_ms"] / other["median_ms"]} for other in others]
    if not pairs:
        return None
    table = by_size(pd.DataFrame(pairs))
    fields = [_field(table[table["field"] == field]) for field in table["field"].unique()]
    return {"pairs": table, "fields": fields, "shown": min(FEW, len(table)), "all": len(table),
            "runs": runs_of(whole)}


def _defaults_first(values: pd.Series) -> pd.Series:
    return values.isin(["fp32", "eager", False, "foreach"]).map({True: "0", False: "1"}) + values.astype(str)


def _field(rows: pd.DataFrame) -> dict:
    most = rows.loc[rows["faster"].idxmax()]
    return {"field": rows["field"].iloc[0], "faster": rows["faster"], "one": len(rows) == 1,
            "most": {"size": str(most["size"]), "context": int(most.context_length), "mode": most["mode"],
                     "before": most.before, "after": most.after, "faster": most.faster},
            "slower": bool(rows["faster"].max() < 1)}


def pairs(facts: dict) -> pd.DataFrame:
    """Those that differ most, first."""
    rows = facts["pairs"]
    rows = rows.loc[(rows["faster"] - 1).abs().sort_values(ascending=False).index].head(FEW)
    return pd.DataFrame({
        "size": rows["size"].astype(str), "context": rows["context_length"],
        "mode": rows["mode"].map(MODE_WORDS),
        "what changes": [f"{row.field}: {row.before} to {row.after}" for row in rows.itertuples()],
        "before (ms)": rows["before_ms"].map(number), "after (ms)": rows["after_ms"].map(number),
        "times faster": rows["faster"].map(number)})


PART = Part(
    "",
    questions=(
        Question("story", story, ("ladder.rungs",), ("ladder.curves",), pictures=("ladder",)),
        Question("compared", compared, ("benchmark.times",), ("ladder.rungs",), printed={"pairs": pairs}),
    ),
    pictures=(Picture("ladder", hero, ("ladder.rungs",)),),
)
