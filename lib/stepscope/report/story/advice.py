"""What to do: from a symptom to a change, with the gain that was measured."""
import pandas as pd

from stepscope.report.story.first import HELPS
from stepscope.report.story.part import Part
from stepscope.say.chapter import Question
from stepscope.say.formats import number
from stepscope.say.selections import pick
from stepscope.step.timing import WHOLE
from stepscope.studies.ladder.facts import runs_in
from stepscope.studies.memory.facts_options import checkpointing

# The changes that advice is given on, in the order of its rows.
ADVISED = ("tf32", "bf16", "sdpa", "fused", "blocks", "cuda_graphs", "no_casts")


def advice(rungs: pd.DataFrame, checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame,
           speedups: pd.DataFrame) -> dict | None:
    """A change a key: the shapes where it gained least and most (``single`` where that is one, ``alike``
    where all gains print as one, ``contexts`` where the shapes differ in context), and those where it did not
    surely help (``idle``; a precision's also of the eager steps in the study of precisions); ``fewest`` and
    ``most`` processes that a gain is the median of; under ``checkpoints`` what checkpointing spares and
    costs, None where that was not measured."""
    gained = rungs[rungs["gain"].notna() & rungs["rung"].isin(ADVISED)]
    if gained.empty:
        return None
    gained = gained[gained["vocab_size"] == gained["vocab_size"].min()]
    found = {rung: _gain(rows) for rung, rows in gained.groupby("rung", sort=False)}
    for rung in {"tf32", "bf16"} & found.keys():
        found[rung]["idle"] += _idle_alone(speedups, rung)
    spared: dict = checkpointing(checkpoints, runs, samples) or {} if len(checkpoints) and len(runs) else {}
    against = (spared.get("measured") or {}).get("against_none")
    return {"changes": {rung: found.get(rung) for rung in ADVISED},
            "fewest": int(gained["processes"].min()), "most": int(gained["processes"].max()),
            "alike": gained["processes"].nunique() == 1,
            "checkpoints": against and against | {"run": spared["run"]},
            "runs": sorted({*runs_in(rungs), *(spared["runs"] if against else [])})}


def _idle_alone(speedups: pd.DataFrame, precision: str) -> list[dict]:
    """Shapes whose eager full step a precision does not make faster."""
    if speedups.empty:
        return []
    rows = pick(speedups, precision=precision, mode="step", phase=WHOLE)
    rows = rows[rows["speedup"] < 1 + HELPS]
    return [{"size": str(row["size"]), "context": int(row["context_length"]), "gain": row["speedup"]}
            for row in rows.to_dict("records")]


def _gain(rows: pd.DataFrame) -> dict:
    shapes = [{"size": str(row["size"]), "context": int(row["context_length"]), "gain": row["gain"],
               "surely": bool(row["gain"] > 1 + HELPS and row["gain_low"] > 1)}
              for row in rows.sort_values("gain").to_dict("records")]
    alike = len(shapes) > 1 and number(shapes[0]["gain"]) == number(shapes[-1]["gain"])
    return {"least": shapes[0], "most": shapes[-1], "single": len(shapes) == 1, "alike": alike,
            "contexts": len({shape["context"] for shape in shapes}) > 1,
            "idle": [shape for shape in shapes if not shape["surely"]]}


PART = Part("What to do", questions=(
    Question("advice", advice, ("ladder.rungs",), (
        "memory.checkpoints", "memory.runs", "memory.samples", "mixed_precision.speedups")),))
