"""The assignment's questions, answered: which letters are told, and what is computed beyond the studies' facts."""
import re
from pathlib import Path

import pandas as pd
import pytest

from reference import tables
from stepscope.report.load import chapters
from stepscope.report.story import questions, questions_facts
from stepscope.report.story.part import tell

NONE = pd.DataFrame()
NAMES = {name for question in questions.PART.questions for name in (*question.needs, *question.uses)}


def told(*studies, **replaced):
    """The part's answers by key from some studies of the committed runs alone."""
    own = {f"{study}.{name}": table for study in studies for name, table in tables(study).items()}
    given = dict.fromkeys(NAMES, NONE) | {name: own[name] for name in NAMES if name in own} | replaced
    return {one.key: one for one in tell(questions.PART, given)}


def letters(answer):
    return re.findall(r"^- \[([^\]]+)\]", answer.text, re.M)


@pytest.fixture(scope="module")
def memory():
    return told("memory")


def test_what_was_not_measured_vanishes(memory):
    assert told() == {}
    assert set(memory) == {"answers-memory"}
    assert not any(label.startswith("(f)") for label in letters(
        told("memory", **{"memory.saved": NONE})["answers-memory"]))


def test_every_link_leads_to_a_question_of_a_study():
    known = {question.key for chapter in chapters() for question in chapter.questions}
    words = Path(questions.__file__).parent / "words"
    links = {link for part in ("answers", "trust") for path in words.glob(f"{part}-*.md")
             for link in re.findall(r"\]\(#([\w-]+)\)", path.read_text(encoding="utf-8"))}
    assert links and links <= known


def test_peaks_are_the_allocators_by_context_mode_and_precision(memory):
    _, table = memory["answers-memory"].tables[0]
    runs = tables("memory")["runs"]
    row = runs[(runs["size"].astype(str) == "2.7B") & (runs["context_length"] == 512) & (runs["mode"] == "step")
               & (runs["precision"] == "fp32") & (runs["status"] == "ok")]
    cell = table.loc[table["context"] == 512, "full step, fp32 (GiB)"].iloc[0]
    assert float(cell) == pytest.approx(row["steady_peak_allocated_mib"].iloc[0] / 1024, rel=0.01)


def test_the_residual_tensor_is_derived_from_the_runs_shape(memory):
    assert "4 × 512 × 2560 × 4 bytes = 20 MiB" in memory["answers-memory"].text


def test_of_several_processes_the_fastest_eager_step_is_shown():
    pair = {"attention": "eager", "size": "small", "precision": "bf16", "mode": "step", "median_ms_after": 15.0}
    pairs = pd.DataFrame([pair | {"median_ms": 62.0}, pair | {"median_ms": 26.0},
                          pair | {"median_ms": 20.0, "attention": "sdpa"}])
    table = questions_facts.speedups({"fastest": questions_facts._fastest(pairs)})
    assert list(table["bf16 full step"]) == ["26.0 → 15.0"]


def steps(falls, falls_without, *shares):
    return {"profiles": 20, "falls": falls, "falls_without": falls_without,
            "by_context": [{"context": 128 * 2**i, "optimizer": pd.Series([share])}
                           for i, share in enumerate(shares)]}


def test_adamw_makes_the_drop_only_where_it_is_gone_without_adamw():
    pattern = questions_facts._pattern
    assert pattern(steps(19, 0, 0.2, 0.1))["adamw_makes_it"]
    assert not pattern(steps(19, 3, 0.2, 0.1))["adamw_makes_it"]
    assert not pattern(steps(5, 0, 0.2, 0.1))["adamw_makes_it"]
    assert pattern(steps(19, 0, 0.2, 0.1))["fades"]["last"]["context"] == 256
    assert pattern(steps(19, 0, 0.1, 0.2))["fades"] is None and pattern(steps(19, 0, 0.2))["fades"] is None


def test_backward_is_held_down_by_what_is_no_product():
    def of(products, rest):
        return questions_facts._backward({"backward": {"products": pd.Series(products), "rest": pd.Series(rest)}})

    assert of([1.9, 2.0], [1.7, 1.8])["holds_it_down"]
    assert not of([1.9, 2.0], [2.1, 2.2])["holds_it_down"]
    assert questions_facts._backward(None) is None


def test_gaps_alone_grew_where_the_operations_still_fit_into_the_plain_time():
    def of(operations_ms):
        by_clock = pd.DataFrame({"projected_ms": [20.0, 10.0], "unprofiled_ms": [15.0, 10.0],
                                 "operations_ms": [operations_ms, 9.0]})
        return questions_facts._gaps_alone({"agree": 0.02, "by_clock": by_clock,
                                            "slowdown": {"mismatches": [{"size": "small"}]}})

    assert of(9.0) and not of(19.0) and not questions_facts._gaps_alone(None)
