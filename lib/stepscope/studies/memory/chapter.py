"""What the memory study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter
from stepscope.studies.memory import answers, figures, options_answers
from stepscope.studies.memory.measure import all_runs
from stepscope.studies.memory.timeline_page import timeline_page


def _own(t):
    return {name.removeprefix("memory."): table for name, table in t.items() if name.startswith("memory.")}


def _timeline(t, where, mode):
    memory = _own(t)
    run = answers.reference(memory, mode)
    if run is None:
        return None
    table = memory["allocations.parquet"]
    words = answers.MODE_WORDS[mode]
    return figures.timeline(table[table["run_id"] == run["run_id"]],
                            f"{run['size']}, context {run['context_length']}, {words}, {run['precision']}, {where}")


def _page(t, where):
    """The page with the allocations of the full step and of forward alone, fp32 and bf16; None where there are none."""
    memory, shown = _own(t), {}
    for mode, precision in (("step", "fp32"), ("forward", "fp32"), ("forward", "bf16")):
        if (run := answers.reference(memory, mode, precision)) is not None:
            table = memory["allocations.parquet"]
            name = f"{answers.MODE_WORDS[mode]}, {precision}, {run['size']}, context {run['context_length']}"
            shown[name] = table[table["run_id"] == run["run_id"]]
    return timeline_page(f"Live memory by category, {where}", shown) if shown else None


CHAPTER = Chapter(
    Path(__file__).parent, "Memory", all_runs,
    old=(
        lambda t: answers.timeline(_own(t)),
        lambda t: answers.peaks(_own(t)),
        lambda t: answers.accounting(_own(t)),
        lambda t: answers.residual(_own(t)),
        lambda t: answers.largest_of_forward(_own(t)),
        lambda t: answers.block(_own(t)),
        lambda t: options_answers.checkpointing(_own(t)),
        lambda t: options_answers.fragmentation(_own(t)),
    ),
    old_pictures={
        "memory_timeline": lambda t, where: _timeline(t, where, "step"),
        "memory_timeline_forward": lambda t, where: _timeline(t, where, "forward"),
        "memory_peaks": lambda t, where: figures.peaks(answers.matrix(_own(t)), where),
        "memory_checkpoints": lambda t, where: figures.checkpoints(options_answers.curve(_own(t)), where),
    },
    old_pages={answers.TIMELINE: _page},
)
