"""The first screen: how fast the step can be made, in one picture; of a sweep without a ladder, what it
compares."""
import numpy as np
import pandas as pd

from stepscope.config import SIZES, StepConfig
from stepscope.report.story.part import Part
from stepscope.runs.tables import by_size
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import MODE_WORDS, apart, number, runs_of
from stepscope.say.formats import faster as faster_words
from stepscope.step.flops import parameter_count
from stepscope.step.summary import unlike_clocks
from stepscope.step.timing import WHOLE
from stepscope.studies.ladder import facts as ladder_facts
from stepscope.studies.ladder.facts import HELPS
from stepscope.studies.ladder.figures import hero
from stepscope.studies.ladder.names import name_of

FEW = 8  # rows of a table of the main text
NEARLY = 0.95  # of a gain, as a power of it
VARIED = ("precision", "attention", "compile", "optimizer", "batch_size", "vocab_size")


def story(rungs: pd.DataFrame, curves: pd.DataFrame) -> dict | None:
    """The ladder of the largest size from its first rung to its fastest, and the rungs that gain most.

    ``best`` are of the rungs that surely gain more than :data:`HELPS` the fewest that make nearly all of it
    (see :func:`_nearly_all`), in the ladder's order; ``elsewhere`` the largest gain of one rung at another
    size and this context, None where there is one size or none gains more there; ``trained`` what loss curves
    say, None where there are none; ``clocks``: see :func:`_clocks`.
    """
    found = ladder_facts.ladder(rungs)
    if found is None:
        return None
    rows = found["rows"]
    steps = ladder_facts.climbed(rows)
    gained = steps[ladder_facts.surely_more(steps)]
    best = [{"name": name_of(row["rung"]), "gain": row["gain"]}
            for row in _nearly_all(gained).to_dict("records")]
    other = rungs[(rungs["kind"] == "rung") & ladder_facts.surely_more(rungs)]
    other = other[(other["size"].astype(str) != found["size"]) & (other["context_length"] == found["context"])
                  & (other["vocab_size"] == found["vocabulary"])]
    elsewhere = None
    if len(other):
        most = other.loc[other["gain"].idxmax()]
        here = rows.loc[rows["rung"] == most["rung"], "gain"]
        if len(here) and most["gain"] > here.iloc[0] * (1 + HELPS):
            elsewhere = {"name": name_of(most["rung"]), "size": str(most["size"]), "gain": most["gain"],
                         "low": most["gain_low"], "high": most["gain_high"], "here": here.iloc[0],
                         "here_helps": bool(here.iloc[0] > 1 + HELPS)}
    told = ("size", "context", "batch", "first_ms", "best_ms", "faster", "floor_ms", "floor_share",
            "gains", "runs")
    return {name: found[name] for name in told} | {
        "parameters": _billions(found["size"], found["vocabulary"], found["context"]),
        "best": best, "elsewhere": elsewhere, "processes": _processes(rows),
        "beside": _beside(rows), "clocks": _clocks(rows),
        "trained": _trained(curves)}


def _nearly_all(gained: pd.DataFrame) -> pd.DataFrame:
    """The fewest rungs whose gains multiply to at least the whole to the power of :data:`NEARLY`."""
    part = np.log(gained["gain"]).sort_values(ascending=False)
    before = part.cumsum() - part
    return gained[gained.index.isin(part.index[before < NEARLY * part.sum()])]


def _processes(rows: pd.DataFrame) -> int:
    """In how many processes both the first and the fastest rung were measured, at most."""
    ends = (ladder_facts.climbed(rows).iloc[0], ladder_facts.best_of(rows))
    return int(min(row["processes"] for row in ends))


def _beside(rows: pd.DataFrame) -> dict | None:
    """How many times faster a shape's fastest rung is than Hugging Face's step; None where it is not surely
    faster."""
    best = ladder_facts.best_of(rows)
    if not ladder_facts.surely_more(best, "over_hugging_face"):
        return None
    return {"over": best["over_hugging_face"]}


def _clocks(rows: pd.DataFrame) -> dict | None:
    """The SM clocks, in MHz, of a shape's first rung and of its fastest, and of Hugging Face's step where
    that is unlike the fastest's (``beside_mhz``); ``by_power``: the driver's reason is the power cap. None
    where the two are alike or not known."""
    first, best = ladder_facts.climbed(rows).iloc[0], ladder_facts.best_of(rows)
    other = ladder_facts.of_rung(rows, "hugging_face")
    if not unlike_clocks(first["sm_clock_mhz"], best["sm_clock_mhz"]):
        return None
    beside = other and unlike_clocks(other["sm_clock_mhz"], best["sm_clock_mhz"])
    return {"first_mhz": first["sm_clock_mhz"], "best_mhz": best["sm_clock_mhz"],
            "beside_mhz": other["sm_clock_mhz"] if other and beside else None,
            "falls": bool(best["sm_clock_mhz"] < first["sm_clock_mhz"]),
            "by_power": best["throttle"] == "power_cap"}


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
    """Of a sweep of one's own, pairs of runs that differ in one field, the default against another value.

    ``pairs`` has a row a pair: size, context_length, mode, field, before, after, before_ms, after_ms,
    ``faster`` (before over after), whether a difference can be ``told`` (beyond :data:`HELPS`, and the
    intervals do not overlap) and whether samples of either are ``unsteady`` (flagged); either is of one
    process, whose interval does not show how far another would be; ``changes`` what was varied, each with its
    largest gain and its largest loss; ``unsteady``: some pair is.
    None where there is a ladder, which says more, or nothing was varied.
    """
    whole = times[(times["phase"] == WHOLE) & (times["status"] == "ok")] if len(times) else times
    if len(rungs) or whole.empty:
        return None
    found = []
    for field in (field for field in VARIED if whole[field].nunique() > 1):
        rest = [*(other for other in VARIED if other != field), "size", "context_length", "mode"]
        for _, group in whole.groupby(rest, observed=True):
            ordered = group.drop_duplicates(field).sort_values(field, key=_defaults_first)
            before, *others = ordered.to_dict("records")
            found += [_pair(field, before, other) for other in others]
    if not found:
        return None
    table = by_size(pd.DataFrame(found))
    table["size"] = table["size"].astype(str)
    changes = [_change(own) for _, own in table.groupby(["field", "before", "after"], sort=False)]
    return {"pairs": table, "changes": changes, "one_mode": table["mode"].nunique() == 1,
            "mode": table["mode"].iloc[0], "unsteady": bool(table["unsteady"].any()), "runs": runs_of(whole)}


def _defaults_first(values: pd.Series) -> pd.Series:
    """The order of a field's values: its default first, then as numbers or words are ordered."""
    defaults = ("fp32", "eager", False, "foreach")
    ordered = sorted(values.unique(), key=lambda value: (value not in defaults, value))
    return values.map({value: place for place, value in enumerate(ordered)})


def _pair(field: str, before: dict, after: dict) -> dict:
    faster = before["median_ms"] / after["median_ms"]
    return {"study": "benchmark", "run_id": after["run_id"], "size": after["size"],
            "context_length": after["context_length"], "mode": after["mode"], "field": field,
            "before": str(before[field]), "after": str(after[field]), "before_ms": before["median_ms"],
            "after_ms": after["median_ms"], "faster": faster,
            "unsteady": any(one["flags"] != "" for one in (before, after)),
            "told": bool(abs(faster - 1) > HELPS and apart(pd.Series(before), pd.Series(after)))}


def _change(rows: pd.DataFrame) -> dict:
    """One value against another over all that was run with both: the largest gain and the largest loss that
    can be told, and in how many pairs none can."""
    told = rows[rows["told"]]
    gains, losses = told[told["faster"] > 1], told[told["faster"] < 1]
    most = gains.loc[gains["faster"].idxmax()].to_dict() if len(gains) else None
    least = losses.loc[losses["faster"].idxmin()].to_dict() if len(losses) else None
    first = rows.iloc[0]
    return {"field": first["field"], "before": first["before"], "after": first["after"], "gain": most,
            "loss": least and least | {"slower": 1 / least["faster"]}, "pairs": len(rows),
            "one": len(rows) == 1, "same": len(rows) - len(told), "all_same": told.empty,
            "everywhere": len(told) == len(rows)}


def pairs(facts: dict) -> pd.DataFrame:
    """All pairs, those that differ most first."""
    rows = facts["pairs"]
    rows = rows.loc[np.log(rows["faster"]).abs().sort_values(ascending=False, kind="stable").index]
    own = facts["changes"][0]
    one = len(facts["changes"]) == 1  # then its values name the columns
    table = {"size": rows["size"], "context": rows["context_length"]}
    if not facts["one_mode"]:
        table["mode"] = rows["mode"].map(MODE_WORDS)
    if not one:
        table["what changes"] = [f"{row.field}: {row.before} to {row.after}" for row in rows.itertuples()]
    return pd.DataFrame(table | {
        f"{own['before'] if one else 'before'} (ms)": rows["before_ms"].map(number),
        f"{own['after'] if one else 'after'} (ms)": rows["after_ms"].map(number),
        f"{own['after'] if one else 'after'} is": [_way(row) for row in rows.itertuples()]})


def _way(row) -> str:
    way = faster_words(row.faster) if row.told else "not told apart"
    return way + (" †" if row.unsteady else "")


PART = Part(
    "",
    questions=(
        Question("story", story, ("ladder.rungs",), ("ladder.curves",), pictures=("ladder",)),
        Question("compared", compared, ("benchmark.times",), ("ladder.rungs",), printed={"pairs": pairs}),
    ),
    pictures=(Picture("ladder", hero, ("ladder.rungs",)),),
)
