"""What the attention study brings to the report."""
from pathlib import Path

from stepscope.say.chapter import Chapter, Picture
from stepscope.studies.attention import answers, figures, memory_answers
from stepscope.studies.attention.measure import all_tables


def _own(t):
    return {name.removeprefix("attention."): table for name, table in t.items() if name.startswith("attention.")}


CHAPTER = Chapter(
    Path(__file__).parent, "Attention", all_tables,
    old=(
        lambda t: answers.same_result(t["attention.cells"]),
        lambda t: answers.how_long(t["attention.cells"]),
        lambda t: answers.against_ceiling(t["attention.cells"]),
        lambda t: answers.the_mask(t["attention.cells"]),
        lambda t: answers.compile_cost(t["attention.cells"]),
        lambda t: answers.tf32(t["attention.cells"]),
        lambda t: memory_answers.saved_for_backward(t["attention.cells"]),
        lambda t: memory_answers.where_it_ends(_own(t)),
    ),
    pictures=(
        Picture("attention_time", figures.over_sequence, ("attention.cells",), ("attention.ends",)),
        Picture("attention_speedup", figures.speedup, ("attention.cells",)),
        Picture("attention_ceiling", figures.ceiling, ("attention.cells",)),
    ),
)
