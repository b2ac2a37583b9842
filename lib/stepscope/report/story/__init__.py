"""The main text: what the studies together say, in the order in which a reader wants to know it.

A part has questions as a study has them (:class:`stepscope.say.chapter.Question`): facts that are computed
from the studies' tables and facts, and words in ``words/<key>.md``. What cannot be told from the runs at hand
is left out; one line of the main text names it.
"""
from dataclasses import dataclass
from pathlib import Path

from stepscope.say.chapter import Answer, Picture, Question, Tables, given, told


@dataclass(frozen=True)
class Part:
    """A heading of the main text and what stands under it."""

    title: str
    questions: tuple[Question, ...]
    pictures: tuple[Picture, ...] = ()


def tell(part: Part, tables: Tables) -> list[Answer]:
    """What these tables say of a part; nothing where they say nothing."""
    answers = []
    for question in part.questions:
        asked = given(tables, question)
        facts = None if asked is None else question.facts(*asked)
        if facts is not None:
            answers.append(told(Path(__file__).parent, question, facts))
    return answers


STORY: tuple[Part, ...] = ()
