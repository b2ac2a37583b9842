"""What the benchmarking study brings to the report."""
from pathlib import Path

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table
from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.say.published import load_published
from stepscope.studies.benchmark import facts, facts_published, figures, printed
from stepscope.studies.benchmark.tables import all_times


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``times`` (a row a run and phase), ``ceilings`` and the ``published`` figures."""
    done = [record for record in records if record.study == "benchmark" and record.status == "ok"]
    return {"times": all_times(store, records), "ceilings": load_table(store, done, "ceilings"),
            "published": load_published()}


TIMES, CEILINGS, PUBLISHED = "benchmark.times", "benchmark.ceilings", "benchmark.published"
CAPTURED = "nsys.phases"  # what tells who waits for whom

CHAPTER = Chapter(
    Path(__file__).parent, "Benchmarking", load,
    questions=(
        Question("how-long", facts.how_long, (TIMES,),
                 printed={"walls": printed.walls, "phases": printed.phases},
                 pictures=("benchmark_phases",)),
        Question("how-variable", facts.how_variable, (TIMES,), printed={"unsteady": printed.unsteady}),
        Question("launch-bound", facts.launch_bound, (TIMES,), (CAPTURED,),
                 printed={"launches": printed.launches},
                 pictures=("benchmark_scaling",)),
        Question("utilisation", facts.utilisation, (TIMES, CEILINGS), printed={"rates": printed.rates},
                 pictures=("benchmark_utilisation",)),
        Question("optimizer", facts.optimizer, (TIMES,), (CEILINGS,), printed={"adamw": printed.adamw},
                 pictures=("benchmark_optimizer",)),
        Question("published", facts_published.beside, (PUBLISHED,), (TIMES,),
                 printed={"published": printed.published},
                 pictures=("benchmark_published",)),
        Question("published-doubts", facts_published.cannot_be, (PUBLISHED,),
                 printed={"doubted": printed.doubted}),
    ),
    pictures=(
        Picture("benchmark_phases", figures.phases, (TIMES,), (CAPTURED,)),
        Picture("benchmark_scaling", figures.scaling, (TIMES,), (CAPTURED,)),
        Picture("benchmark_utilisation", figures.utilisation, (TIMES,), (CAPTURED,)),
        Picture("benchmark_optimizer", figures.optimizer, (TIMES,)),
        Picture("benchmark_published", figures.published, (TIMES, PUBLISHED)),
    ),
)
