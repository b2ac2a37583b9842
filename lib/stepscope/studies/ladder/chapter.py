"""What the ladder brings to the report."""

from pathlib import Path

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table
from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.ladder import facts, figures, printed
from stepscope.studies.ladder.tables import all_times, with_runs


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``times`` (a row a run and rung), ``kernels`` of finished steps, loss ``curves``."""
    records = [record for record in records if record.study == "ladder" and record.status == "ok"]
    kept = {name: with_runs(load_table(store, records, name), records) for name in ("kernels", "curves")}
    return {"times": all_times(store, records)} | kept


TIMES, KERNELS, CURVES = "ladder.times", "ladder.kernels", "ladder.curves"

CHAPTER = Chapter(
    Path(__file__).parent,
    "The ladder",
    load,
    questions=(
        Question("ladder", facts.ladder, (TIMES,), printed={"rungs": printed.rungs}, pictures=("ladder",)),
        Question("ladder-advice", facts.advice, (TIMES,), printed={"snippets": printed.snippets}),
        Question(
            "ladder-sizes",
            facts.sizes,
            (TIMES,),
            printed={"gains": printed.gains},
            pictures=("ladder_gains",),
        ),
        Question(
            "ladder-goals",
            facts.goals,
            (TIMES,),
            (KERNELS,),
            printed={"goals": printed.goals, "kernels": printed.kernels},
        ),
        Question(
            "ladder-training",
            facts.training,
            (TIMES,),
            (CURVES,),
            printed={"agreement": printed.agreement},
            pictures=("ladder_training",),
        ),
        Question("ladder-left-out", facts.left_out, (TIMES,), printed={"left_out": printed.left_out}),
        Question("ladder-batch", facts.filled, (TIMES,), printed={"filled": printed.filled}),
    ),
    pictures=(
        Picture("ladder", figures.hero, (TIMES,)),
        Picture("ladder_gains", figures.gains, (TIMES,)),
        Picture("ladder_training", figures.curves, (CURVES,)),
    ),
)
