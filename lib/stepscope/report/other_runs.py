"""The last section: runs that no answer is made from."""
from pathlib import Path

import pandas as pd

from stepscope.runs.tables import by_size
from stepscope.say.chapter import Answer, Question, told
from stepscope.say.formats import MODE_WORDS, interval_cells
from stepscope.step.timing import WHOLE


def other_runs(times: pd.DataFrame, left: list[str]) -> dict:
    """The runs that no other answer is made from.

    Args:
        times: all benchmark runs.
        left: folders of such runs, of any study.
    """
    rows = times
    if len(times):
        rows = times[(times["phase"] == WHOLE) & ("benchmark/" + times["run_id"]).isin(left)]
    return {"left": len(left), "times": by_size(rows) if len(rows) else None, "runs": left}


def others(facts: dict) -> pd.DataFrame | None:
    """Runs of the benchmark that no answer is made from; None where there are none of the benchmark."""
    rows = facts["times"]
    if rows is None:
        return None
    median = [cell if status == "ok" else "out of memory"
              for cell, status in zip(interval_cells(rows), rows["status"], strict=True)]
    return pd.DataFrame({
        "size": rows["size"].astype(str), "context": rows["context_length"], "batch": rows["batch_size"],
        "mode": rows["mode"].map(MODE_WORDS), "precision": rows["precision"],
        "attention": rows["attention"].map({"eager": "written out", "sdpa": "SDPA"}),
        "compiled": rows["compile"].map({True: "yes", False: "no"}), "AdamW": rows["optimizer"],
        "vocabulary": rows["vocab_size"],
        "seed": rows["seed"], "steps": rows["timed_steps"], "median (ms)": median})


QUESTION = Question("other-runs", other_runs, (), printed={"others": others})


def other_runs_answer(times: pd.DataFrame, left: list[str]) -> Answer:
    return told(Path(__file__).parent, QUESTION, other_runs(times, left))
