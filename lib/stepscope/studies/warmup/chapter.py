"""What the warm-up study brings to the report."""
from pathlib import Path

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.warmup import facts, figures, printed
from stepscope.studies.warmup.tables import all_runs


def load(store: Store, records: list[Record]) -> dict:
    """``samples`` of every step, ``costs`` of a fresh process by part, ``calls`` into CUDA under the
    profiler.
    """
    return {name: all_runs(store, records, name) for name in ("samples", "costs", "calls")}


# The benchmark's processes are fresh too, and clock their warm-up steps.
STEPS = ("warmup.samples", "benchmark.samples")

CHAPTER = Chapter(
    Path(__file__).parent, "Warm-up", load,
    questions=(
        Question("warmup", facts.what_changes, (), STEPS, printed={"means": printed.means},
                 pictures=("warmup_steps",)),
        Question("first-step", facts.first_step, ("warmup.costs",), ("warmup.calls", *STEPS),
                 printed={"costs": printed.costs, "phases": printed.phases, "purposes": printed.purposes},
                 pictures=("warmup_costs",)),
        Question("enough", facts.enough, (), STEPS),
    ),
    pictures=(
        Picture("warmup_steps", figures.warmup_steps, (), STEPS),
        Picture("warmup_costs", figures.warmup_costs, ("warmup.costs",)),
    ),
)
