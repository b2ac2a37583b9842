"""What a study brings to the report: its tables, its questions and its pictures, each by name.

A question has facts (a function from tables to numbers, named booleans and small tables, without a word) and
words (a template that holds no arithmetic and no comparison, see :mod:`stepscope.say.words`). So facts are
tested by numbers, and words are read and changed as text.
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from stepscope.say.words import Words

Tables = Mapping[str, pd.DataFrame]  # by name: "<study>.<table>"
Facts = dict


@dataclass(frozen=True)
class Question:
    """One question: what it is computed from, and what is shown with it. Its words are ``words/<key>.md``.

    Args:
        key: its anchor in the report.
        facts: called with the tables of ``needs`` and ``uses``, in that order; None where they tell nothing.
            Under ``runs`` it gives the run folders (relative to the runs folder) that the facts stand on.
        needs: tables that must have rows, else the question is not answered.
        uses: tables that may be empty.
        printed: tables to print, by name: functions from the facts to a table of text, or to None. The words
            have the caption, as block ``table_<name>``.
        pictures: stems of figures to show. The words have the caption, as block ``figure_<stem>``; where that
            is empty, the figure is not shown.
    """

    key: str
    facts: Callable[..., Facts | None]
    needs: tuple[str, ...]
    uses: tuple[str, ...] = ()
    printed: Mapping[str, Callable[[Facts], pd.DataFrame | None]] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """One figure. ``draw`` is called with the tables of ``needs`` and ``uses`` and with the words for what
    was measured on (``where=``); None where there is nothing to draw."""

    stem: str
    draw: Callable[..., Figure | None]
    needs: tuple[str, ...]
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """One HTML file beside the figures, made as a :class:`Picture` is."""

    name: str
    make: Callable[..., str | None]
    needs: tuple[str, ...]
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chapter:
    """A study in the report.

    Args:
        folder: the study's folder, in which ``words/`` is.
        title: the heading.
        load: from a store and its records to this study's tables by name, without the study's own name before
            it.
    """

    folder: Path
    title: str
    load: Callable[..., Mapping[str, pd.DataFrame]]
    questions: tuple[Question, ...] = ()
    pictures: tuple[Picture, ...] = ()
    pages: tuple[Page, ...] = ()

    @property
    def study(self) -> str:
        return self.folder.name


@dataclass
class Answer:
    """The answer to one question, ready to be laid out: markdown, and tables of text ready to print."""

    key: str
    question: str
    text: str
    more: str = ""  # what follows the tables: why it is so, and what to do
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)  # (caption, table)
    figures: list[tuple[str, str]] = field(default_factory=list)  # (stem, caption)
    runs: list[str] = field(default_factory=list)


def given(tables: Tables, asks: Question | Picture | Page) -> list[pd.DataFrame] | None:
    """The tables that something asks for, in its order; None where one that it needs is empty.

    Raises:
        KeyError: no study brings a table of that name.
    """
    if any(tables[name].empty for name in asks.needs):
        return None
    return [tables[name] for name in (*asks.needs, *asks.uses)]


def answer(chapter: Chapter, question: Question, tables: Tables) -> Answer:
    """Facts, words, tables and captions of one question; what to measure where there is nothing to answer it
    from."""
    asked = given(tables, question)
    facts = None if asked is None else question.facts(*asked)
    if facts is None:
        words = Words(chapter.folder / "words", f"{question.key}.md")
        why = words.block("not_answered", {"has_records": asked is not None})
        return Answer(question.key, words.block("question"), why or words.not_answered(chapter.study))
    return told(chapter.folder, question, facts)


def told(folder: Path, question: Question, facts: Facts) -> Answer:
    """The facts of a question in words, with their tables and captions; ``folder`` has its ``words/``."""
    words = Words(folder / "words", f"{question.key}.md")
    printed = {name: table for name, make in question.printed.items() if (table := make(facts)) is not None}
    return Answer(
        question.key,
        words.block("question"),
        words.block("text", facts),
        words.block("more", facts),
        [(words.block(f"table_{name}", facts), table) for name, table in printed.items()],
        [(stem, caption) for stem in question.pictures if (caption := words.block(f"figure_{stem}", facts))],
        list(facts["runs"]),
    )
