"""How far to trust a timing."""

from stepscope.report.story import trust_facts as facts
from stepscope.report.story.part import Part
from stepscope.report.story.trust_figures import apart
from stepscope.say.chapter import Picture, Question

SPREAD, TIMES = "processes.spread", "benchmark.times"

PART = Part(
    "How far to trust a timing",
    questions=(
        Question(
            "trust-repeats",
            facts.repeats,
            (),
            (
                SPREAD,
                "processes.samples",
                "warmup.samples",
                "benchmark.samples",
                "warmup.costs",
                "warmup.calls",
                "nsys.phases",
                "nsys.walls",
                TIMES,
            ),
            pictures=("trust_spread",),
        ),
        Question(
            "trust-hosts",
            facts.hosts,
            (),
            ("mixed_precision.times", "compile.times", "ladder.rungs", "nsys.phases",
             "mixed_precision.other_times"),
            printed={"hosts": facts.printed_hosts},
        ),
        Question(
            "trust-clocks",
            facts.clocks_and_profilers,
            (),
            (
                "ladder.rungs",
                "compile.times",
                "mixed_precision.speedups",
                "nsys.clocks",
                "nsys.walls",
                TIMES,
            ),
        ),
        Question("trust-recipe", facts.recipe, (TIMES,), (SPREAD, "warmup.samples", "benchmark.samples")),
    ),
    pictures=(Picture("trust_spread", apart, (SPREAD,)),),
)
