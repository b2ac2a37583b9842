"""What the memory study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Page, Picture, Question
from stepscope.studies.memory import (
    facts,
    facts_accounting,
    facts_checkpoints,
    facts_options,
    figures,
    printed,
)
from stepscope.studies.memory.tables import all_runs
from stepscope.studies.memory.timeline_page import reference_page

RUNS, LEVELS, ALLOCATIONS, SAVED = "memory.runs", "memory.levels", "memory.allocations", "memory.saved"
CHECKPOINTS = ("memory.checkpoints", RUNS)
STACKS = ("memory.stacks", RUNS)

CHAPTER = Chapter(
    Path(__file__).parent, "Memory", all_runs,
    questions=(
        Question("memory-timeline", facts.timeline, (RUNS,), (LEVELS,), printed={"phases": printed.phases}),
        Question("memory-peaks", facts.peaks, (RUNS,), (LEVELS,),
                 printed={"by_context": printed.by_context, "when": printed.when},
                 pictures=("memory_peaks",)),
        Question("memory-accounting", facts_accounting.accounting, (RUNS,),
                 (LEVELS, "memory.predicted", "memory.foretold"),
                 printed={"checked": printed.checked, "by_category": printed.by_category,
                          "fits": printed.fits}),
        Question("memory-residual", facts.residual, (RUNS,)),
        Question("memory-largest", facts.largest, (RUNS,), (ALLOCATIONS, SAVED),
                 printed={"largest": printed.largest}),
        Question("memory-block", facts.block, (SAVED, RUNS), (ALLOCATIONS,),
                 printed={"five": printed.five, "by_run": printed.by_run}),
        Question("memory-checkpointing", facts_options.checkpointing, CHECKPOINTS, ("memory.samples",),
                 printed={"curve": printed.curve, "longest": printed.longest},
                 pictures=("memory_checkpoints",)),
        Question("memory-nested", facts_checkpoints.nested, STACKS, ("memory.samples",),
                 printed={"arrangements": printed.arrangements, "nested": printed.nested},
                 pictures=("memory_nested",)),
        Question("memory-reach", facts_checkpoints.reach, CHECKPOINTS, ("memory.samples",),
                 printed={"reach": printed.reach}),
        Question("memory-fragmentation", facts_options.fragmentation, (RUNS,),
                 printed={"pairs": printed.pairs}),
    ),
    pictures=(
        Picture("memory_peaks", figures.peaks, (RUNS,)),
        Picture("memory_checkpoints", figures.checkpoints, CHECKPOINTS, ("memory.samples",)),
        Picture("memory_nested", figures.nested, STACKS, ("memory.samples",)),
    ),
    pages=(Page("memory_timeline.html", reference_page, (RUNS, ALLOCATIONS)),),
)
