"""What the ladder brings to the report."""

from pathlib import Path

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table
from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.ladder import facts, figures, printed
from stepscope.studies.ladder.tables import climbs, load_processes, over_processes, step_medians, with_runs


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``rungs`` (a row a shape and rung, over processes), ``climbs`` (a row a process), ``steps``
    (a row a process and rung), ``kernels`` of finished steps with their process's ``step_ms``, loss
    ``curves``, ``checks`` of the optimizer."""
    records = [record for record in records if record.study == "ladder" and record.status == "ok"]
    names = ("kernels", "curves", "checks")
    kept = {name: with_runs(load_table(store, records, name), records) for name in names}
    samples = load_table(store, records, "samples")
    steps = step_medians(samples, records)
    if len(kept["kernels"]):
        own = steps[["run_id", "rung", "step_ms"]]
        kept["kernels"] = kept["kernels"].merge(own, on=["run_id", "rung"], how="left")
    return {"rungs": over_processes(load_processes(store, records, samples)), "steps": steps,
            "climbs": climbs(samples, records)} | kept


RUNGS, CLIMBS, STEPS, KERNELS, CURVES, CHECKS = (
    f"ladder.{name}" for name in ("rungs", "climbs", "steps", "kernels", "curves", "checks"))

CHAPTER = Chapter(
    Path(__file__).parent,
    "The ladder",
    load,
    questions=(
        Question(
            "ladder",
            facts.ladder,
            (RUNGS,),
            (CLIMBS,),
            printed={"rungs": printed.rungs, "all": printed.everything},
        ),
        Question(
            "ladder-advice",
            facts.advice,
            (RUNGS, STEPS),
            printed={"bounds": printed.bounds, "snippets": printed.snippets},
        ),
        Question(
            "ladder-sizes",
            facts.sizes,
            (RUNGS,),
            printed={"gains": printed.gains},
            pictures=("ladder_gains",),
        ),
        Question(
            "ladder-goals",
            facts.goals,
            (RUNGS,),
            (KERNELS,),
            printed={"goals": printed.goals, "parts": printed.parts},
        ),
        Question(
            "ladder-training",
            facts.training,
            (RUNGS,),
            (CURVES, CHECKS),
            printed={"agreement": printed.agreement},
            pictures=("ladder_training",),
        ),
        Question("ladder-left-out", facts.left_out, (RUNGS,), printed={"left_out": printed.left_out}),
        Question("ladder-batch", facts.filled, (RUNGS,), printed={"filled": printed.filled}),
    ),
    pictures=(
        Picture("ladder_gains", figures.gains, (RUNGS,)),
        Picture("ladder_training", figures.curves, (CURVES,)),
    ),
)
