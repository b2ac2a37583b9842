"""What the mixed-precision study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter
from stepscope.studies.mixed_precision import answers, figures
from stepscope.studies.mixed_precision.measure import load


def _own(t):
    return {name.removeprefix("mixed_precision."): table for name, table in t.items() if name.startswith("mixed_precision.")}


CHAPTER = Chapter(
    Path(__file__).parent, "Mixed precision", load,
    old=(
        lambda t: answers.accumulation(_own(t)),
        lambda t: answers.toy(_own(t)),
        lambda t: answers.norms(_own(t)),
        lambda t: answers.speed(_own(t), t["benchmark.times"], t["nsys.operations"]),
        lambda t: answers.slower(_own(t), t["benchmark.times"], t["nsys.operations"]),
        lambda t: answers.casts(_own(t)),
        lambda t: answers.left(_own(t), t["nsys.operations"]),
        lambda t: answers.memory(_own(t)),
        lambda t: answers.health(_own(t)),
        lambda t: answers.published_speedups(_own(t), t["benchmark.published"]),
    ),
    old_pictures={
        "mixed_running": lambda t, where: figures.running(_own(t)["running"], where),
        "mixed_norms": lambda t, where: figures.norms(_own(t)["norms"], where),
        "mixed_speed": lambda t, where: figures.speed(_own(t), where),
        "mixed_left": lambda t, where: figures.left(_own(t), t["nsys.operations"], where),
        "mixed_memory": lambda t, where: figures.memory(_own(t), where),
        "mixed_health": lambda t, where: figures.health(_own(t), where),
    },
)
