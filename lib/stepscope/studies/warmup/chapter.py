"""What the warm-up study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture
from stepscope.studies.warmup import answers, figures
from stepscope.studies.warmup.measure import all_runs


def load(store, records):
    return {name: all_runs(store, records, name) for name in ("samples", "costs", "calls")}


CHAPTER = Chapter(
    Path(__file__).parent, "Warm-up", load,
    old=(
        lambda t: answers.what_changes(t["warmup.samples"]),
        lambda t: answers.what_it_pays_for(t["warmup.costs"], t["warmup.calls"]),
        lambda t: answers.enough(t["warmup.samples"]),
    ),
    pictures=(
        Picture("warmup_steps", figures.warmup_steps, ("warmup.samples",)),
        Picture("warmup_costs", figures.warmup_costs, ("warmup.costs",)),
    ),
)
