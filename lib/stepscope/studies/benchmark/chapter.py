"""What the benchmarking study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture
from stepscope.say.published import load_published
from stepscope.runs.store import load_table
from stepscope.studies.benchmark import answers, figures, published_answers
from stepscope.studies.benchmark.measure import all_times


def load(store, records):
    """``times`` (a row a run and phase), ``ceilings`` and the ``published`` figures."""
    done = [record for record in records if record.study == "benchmark" and record.status == "ok"]
    return {"times": all_times(store, records), "ceilings": load_table(store, done, "ceilings"), "published": load_published()}


CHAPTER = Chapter(
    Path(__file__).parent, "Benchmarking", load,
    old=(
        lambda t: answers.how_long(t["benchmark.times"]),
        lambda t: answers.how_variable(t["benchmark.times"]),
        lambda t: answers.launch_bound(t["benchmark.times"]),
        lambda t: answers.utilisation(t["benchmark.times"], t["benchmark.ceilings"]),
        lambda t: answers.optimizer(t["benchmark.times"], t["benchmark.ceilings"]),
        lambda t: published_answers.beside(t["benchmark.times"], t["benchmark.published"]),
        lambda t: published_answers.cannot_be(t["benchmark.published"]),
    ),
    pictures=(
        Picture("benchmark_phases", figures.phases, ("benchmark.times",)),
        Picture("benchmark_scaling", figures.scaling, ("benchmark.times",)),
        Picture("benchmark_utilisation", figures.utilisation, ("benchmark.times",)),
        Picture("benchmark_optimizer", figures.optimizer, ("benchmark.times",)),
        Picture("benchmark_published", figures.published, ("benchmark.times", "benchmark.published")),
    ),
)
