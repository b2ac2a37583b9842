"""What the attention study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture, Question
from stepscope.studies.attention import (
    facts,
    facts_compile,
    facts_ends,
    facts_generations,
    facts_long,
    facts_memory,
    facts_published,
    facts_time,
    figures,
    printed,
)
from stepscope.studies.attention.tables import load

CELLS = ("attention.cells",)
ENDS = ("attention.ends", "attention.predicted", "attention.accounting")

CHAPTER = Chapter(
    Path(__file__).parent, "Attention", load,
    questions=(
        Question("attention-same", facts.same_result, CELLS,
                 printed={"errors": printed.errors, "refusals": printed.refusals}),
        Question("attention-time", facts_time.how_long, CELLS,
                 printed={"at_one_point": printed.at_one_point, "asked": printed.asked},
                 pictures=("attention_speedup",)),
        Question("attention-ceiling", facts.against_ceiling, CELLS, printed={"ceilings": printed.ceilings},
                 pictures=("attention_ceiling",)),
        Question("attention-generations", facts_generations.generations, ("attention.generations",),
                 printed={"generations": printed.generations}),
        Question("attention-causal", facts.the_mask, CELLS),
        Question("attention-compile", facts_compile.compile_cost, CELLS),
        Question("attention-tf32", facts_compile.tf32, CELLS, printed={"changes": printed.changes}),
        Question("attention-saved", facts_memory.saved_for_backward, CELLS, printed={"saved": printed.saved}),
        Question("attention-end", facts_ends.where_it_ends, CELLS, ENDS,
                 printed={"ends": printed.ends, "account": printed.account}),
        Question("attention-long", facts_long.at_the_longest, ("attention.long",),
                 printed={"long": printed.long}),
        Question("attention-published", facts_published.grid, CELLS,
                 printed={"ratios": printed.published_ratios, "tf32": printed.published_tf32}),
    ),
    pictures=(
        Picture("attention_speedup", figures.speedup, CELLS),
        Picture("attention_ceiling", figures.ceiling, CELLS),
    ),
)
