"""The assignment's questions, answered: each letter from the facts of the study that measured it."""

from collections.abc import Callable, Mapping
from itertools import chain

import pandas as pd

from stepscope.report.story import questions_2026 as edition
from stepscope.report.story import questions_facts as own
from stepscope.report.story.part import Part
from stepscope.say.chapter import Facts, Question, Tables, given
from stepscope.studies.attention.chapter import CHAPTER as ATTENTION
from stepscope.studies.benchmark.chapter import CHAPTER as BENCHMARK
from stepscope.studies.compile.chapter import CHAPTER as COMPILE
from stepscope.studies.memory.chapter import CHAPTER as MEMORY
from stepscope.studies.mixed_precision.chapter import CHAPTER as MIXED
from stepscope.studies.nsys.chapter import CHAPTER as NSYS
from stepscope.studies.processes.chapter import CHAPTER as PROCESSES
from stepscope.studies.warmup.chapter import CHAPTER as WARMUP

Add = Callable[[Facts, Tables], Facts]
Printed = Mapping[str, Callable[[Facts], pd.DataFrame | None]]


STUDIED = {
    question.key: question
    for chapter in (BENCHMARK, PROCESSES, WARMUP, NSYS, MIXED, MEMORY, ATTENTION, COMPILE)
    for question in chapter.questions
}


def answers(
    key: str,
    asks: tuple[str, ...],
    add: Add,
    uses: tuple[str, ...] = (),
    printed: Printed | None = None,
    beside: tuple[str, ...] = (),
) -> Question:
    """One question whose facts are those of several of the studies', each under its key ("nsys-a":
    ``nsys_a``) and None where it is not answered; None where none is.

    Args:
        asks: keys of the studies' questions.
        beside: keys of further ones, which alone make no answer.
        add: gives further facts from those and from the tables by name (``uses`` among them).
    """
    asked = [STUDIED[name] for name in (*asks, *beside)]
    names = tuple(dict.fromkeys(chain(uses, *((*one.needs, *one.uses) for one in asked))))

    def facts(*tables: pd.DataFrame) -> Facts | None:
        by_name = dict(zip(names, tables, strict=True))
        found: Facts = {}
        for one in asked:
            rows = given(by_name, one)
            found[one.key.replace("-", "_")] = None if rows is None else one.facts(*rows)
        known = [one for one in found.values() if one is not None]
        if all(found[name.replace("-", "_")] is None for name in asks):
            return None
        runs = sorted(set().union(*(one["runs"] for one in known)))
        return found | add(found, by_name) | {"runs": runs}

    return Question(key, facts, (), names, printed=printed or {})


PART = Part(
    "The assignment's questions, answered",
    (
        answers(
            "answers-benchmarking",
            ("how-long", "how-variable", "warmup"),
            own.benchmarking,
            beside=("nsys-phases", "between-processes", "first-step", "enough"),
        ),
        answers("answers-nsys", ("nsys-a", "nsys-b", "nsys-c", "nsys-d", "nsys-e"), own.profiles),
        answers("answers-mixed", ("mixed-sums", "mixed-toy", "mixed-norms", "mixed-speed"), own.mixed),
        answers(
            "answers-memory",
            (
                "memory-timeline",
                "memory-peaks",
                "memory-residual",
                "memory-largest",
            ),
            own.memory,
            printed={"peaks": own.peaks},
        ),
        answers(
            "answers-attention",
            ("attention-time", "attention-end", "attention-saved", "attention-tf32"),
            own.attention,
            (),
            {"written_out": own.written_out},
        ),
        answers(
            "answers-compile",
            ("compile-model", "compile-why", "compile-sdpa"),
            own.compiled,
            (),
            {"speedups": own.speedups},
        ),
        Question(
            "answers-2026-profiles",
            edition.profiles,
            ("nsys.operations", "nsys.clocks"),
            ("nsys.walls", "benchmark.times", "benchmark.ceilings", "memory.runs"),
            printed={"profiles": edition.printed_profiles},
        ),
        answers(
            "answers-2026-memory",
            ("memory-block", "memory-checkpointing", "memory-nested", "memory-reach", "attention-long"),
            edition.memory,
            ("attention.ends",),
            beside=("memory-peaks", "attention-time", "attention-end"),
        ),
    ),
)
