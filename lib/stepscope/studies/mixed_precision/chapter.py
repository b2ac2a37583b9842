"""What the mixed-precision study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.mixed_precision import (
    facts_memory,
    facts_numerics,
    facts_operations,
    facts_published,
    facts_slower,
    facts_speed,
    figures,
    printed,
)
from stepscope.studies.mixed_precision.tables import load

CHAPTER = Chapter(
    Path(__file__).parent, "Mixed precision", load,
    questions=(
        Question("mixed-sums", facts_numerics.additions, ("mixed_precision.sums", "mixed_precision.steps"),
                 printed={"sums": printed.sums}, pictures=("mixed_running",)),
        Question("mixed-toy", facts_numerics.toy, ("mixed_precision.toy",), printed={"types": printed.types}),
        Question("mixed-norms", facts_numerics.norms, ("mixed_precision.norms",),
                 ("mixed_precision.reductions",),
                 printed={"reductions": printed.reductions, "errors": printed.errors},
                 pictures=("mixed_norms",)),
        Question("mixed-speed", facts_speed.speed, ("mixed_precision.speedups", "mixed_precision.times"),
                 ("nsys.operations", "nsys.operations_low", "mixed_precision.other_times"),
                 printed={"speedups": printed.speedups, "energy": printed.energy,
                          "phases": printed.phases}),
        Question("mixed-slower", facts_slower.slower, ("mixed_precision.speedups", "mixed_precision.times"),
                 ("nsys.phases", "mixed_precision.other_times"),
                 printed={"causes": printed.causes}),
        Question("mixed-casts", facts_operations.casts, (),
                 ("mixed_precision.census", "nsys.casts"),
                 printed={"operations": printed.operations, "casts": printed.cast_times}),
        Question("mixed-left", facts_operations.left, ("nsys.operations_low",),
                 ("nsys.operations",),
                 printed={"parts": printed.parts}, pictures=("mixed_left",)),
        Question("mixed-memory", facts_memory.memory, ("mixed_precision.times",),
                 printed={"peaks": printed.peaks}, pictures=("mixed_memory",)),
        Question("mixed-health", facts_memory.health, ("mixed_precision.health",),
                 printed={"health": printed.health}, pictures=("mixed_health",)),
        Question("mixed-published", facts_published.published, ("mixed_precision.speedups",),
                 printed={"pairs": printed.pairs}),
    ),
    pictures=(
        Picture("mixed_running", figures.running, ("mixed_precision.running",)),
        Picture("mixed_norms", figures.norms, ("mixed_precision.norms",)),
        Picture("mixed_left", figures.left, ("nsys.operations_low",), ("nsys.operations",)),
        Picture("mixed_memory", figures.memory, ("mixed_precision.times",)),
        Picture("mixed_health", figures.health, ("mixed_precision.health",)),
    ),
)
