"""The main text: what the studies together say, in the order in which a reader wants to know it.

A part has questions as a study has them (:class:`stepscope.say.chapter.Question`): facts that are computed
from the studies' tables and facts, and words in ``words/<key>.md``. What cannot be told from the runs at hand
is left out; one line of the main text names it.
"""
from stepscope.report.story import (
    advice,
    attention,
    compiling,
    first,
    memory,
    precision,
    questions,
    step_time,
    trust,
    waiting,
)

STORY = tuple(module.PART for module in (
    first, advice, step_time, waiting, precision, attention, compiling, memory, trust, questions))
