"""What the benchmarking study brings to the report."""
from pathlib import Path

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame
from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.benchmark import facts, facts_device, facts_published, figures, printed
from stepscope.studies.benchmark.tables import all_times


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """``times`` (a row a run and phase), ``samples`` (a row a run, step and phase) and ``ceilings``."""
    done = [record for record in records if record.study == "benchmark" and record.status == "ok"]
    samples = load_table(store, done, "samples")
    if len(samples):
        samples = samples.merge(runs_frame(done).drop(columns="study"), on="run_id")
    return {"times": all_times(store, records), "samples": samples,
            "ceilings": load_table(store, done, "ceilings")}


TIMES, CEILINGS = "benchmark.times", "benchmark.ceilings"
SPREAD = "processes.spread"
CAPTURED = "nsys.phases"  # what tells who waits for whom

CHAPTER = Chapter(
    Path(__file__).parent, "Benchmarking", load,
    questions=(
        Question("how-long", facts.how_long, (TIMES,),
                 printed={"walls": printed.walls, "phases": printed.phases}),
        Question("how-variable", facts.how_variable, (TIMES,), printed={"unsteady": printed.unsteady}),
        Question("launch-bound", facts.launch_bound, (TIMES,), (CAPTURED,),
                 printed={"launches": printed.launches}),
        Question("device-state", facts_device.device_state, (TIMES,), printed={"states": printed.states}),
        Question("utilisation", facts.utilisation, (TIMES, CEILINGS), printed={"rates": printed.rates},
                 pictures=("benchmark_utilisation",)),
        Question("optimizer", facts.optimizer, (TIMES,), (CEILINGS, SPREAD), printed={"adamw": printed.adamw},
                 pictures=("benchmark_optimizer",)),
        Question("published", facts_published.timings, (TIMES,), printed={"published": printed.published}),
    ),
    pictures=(
        Picture("benchmark_utilisation", figures.utilisation, (TIMES,), (CAPTURED,)),
        Picture("benchmark_optimizer", figures.optimizer, (TIMES,)),
    ),
)
