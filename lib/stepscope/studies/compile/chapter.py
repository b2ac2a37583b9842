"""What the study of the compiled model brings to the report."""
from pathlib import Path

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.compile import facts, facts_launches, figures, printed
from stepscope.studies.compile.tables import all_times


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``times``: a row for each run, attention, variant, mode and phase."""
    return {"times": all_times(store, records)}


NEEDS = ("compile.times",)

CHAPTER = Chapter(
    Path(__file__).parent, "The compiled model", load,
    questions=(
        Question("compile-model", facts.whole_model, NEEDS, printed={"times": printed.times},
                 pictures=("compile_model",)),
        Question("compile-launches", facts_launches.launches, NEEDS,
                 printed={"shares": printed.shares, "fused": printed.fused}),
        Question("compile-memory", facts.peak_memory, NEEDS, printed={"peaks": printed.peaks}),
        Question("compile-cost", facts_launches.cost, NEEDS,
                 printed={"seconds": printed.seconds, "whole": printed.whole}),
        Question("compile-sdpa", facts.sdpa, NEEDS, printed={"steps": printed.steps}),
    ),
    pictures=(Picture("compile_model", figures.whole_model, NEEDS),),
)
