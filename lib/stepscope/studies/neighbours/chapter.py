"""What the comparison of runs side by side brings to the report."""
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.neighbours import facts, figures, printed, tables

SWEEPS, TIMINGS, EXPERIMENT = "neighbours.sweeps", "neighbours.timings", "neighbours.experiment"


def load(store: Store, records: list[Record]) -> Mapping[str, pd.DataFrame]:
    """The three files that a runs folder may keep."""
    return tables.load(store.root)


CHAPTER = Chapter(
    Path(__file__).parent, "Sweeps side by side", load,
    questions=(
        Question("workers-time", facts.sooner, (SWEEPS,), printed={"sweeps": printed.sweeps}),
        Question("workers-agree", facts.agree, (TIMINGS, SWEEPS), printed={"phases": printed.phases},
                 pictures=("workers_agree",)),
        Question("workers-again", facts.repeated, (EXPERIMENT,), printed={"experiment": printed.experiment}),
    ),
    pictures=(Picture("workers_agree", figures.agree, (TIMINGS,)),),
)
