"""A part of the main text."""
from dataclasses import dataclass
from pathlib import Path

from stepscope.say.chapter import Answer, Picture, Question, Tables, given, told


@dataclass(frozen=True)
class Part:
    """A heading of the main text and what stands under it; without a title it opens the text."""

    title: str
    questions: tuple[Question, ...] = ()
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
