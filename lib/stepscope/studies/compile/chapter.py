"""What the study of the compiled model brings to the report."""
from pathlib import Path

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.say.chapter import Chapter, Question
from stepscope.studies.compile import facts, facts_kernels, facts_launches, printed
from stepscope.studies.compile.tables import all_kernels, all_times


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``times``: a row for each run, attention, variant, mode and phase; ``kernels``: a row a kernel."""
    return {"times": all_times(store, records), "kernels": all_kernels(store, records)}


NEEDS = ("compile.times",)
KERNELS = ("compile.kernels",)
SPREAD = "processes.spread"

CHAPTER = Chapter(
    Path(__file__).parent, "The compiled model", load,
    questions=(
        Question("compile-model", facts.whole_model, NEEDS,
                 printed={"times": printed.times, "energy": printed.energy}),
        Question("compile-why", facts_kernels.why, (*NEEDS, *KERNELS),
                 printed={"kernels": printed.kernels}),
        Question("compile-launches", facts_launches.launches, NEEDS, (*KERNELS, SPREAD),
                 printed={"busy": printed.busy, "graphed": printed.graphed, "fused": printed.fused}),
        Question("compile-memory", facts.peak_memory, NEEDS, printed={"peaks": printed.peaks}),
        Question("compile-cost", facts_launches.cost, NEEDS,
                 printed={"seconds": printed.seconds, "whole": printed.whole}),
        Question("compile-sdpa", facts.sdpa, NEEDS, printed={"steps": printed.steps}),
    ),
)
