"""The assignment's questions, answered: which letters are told, and what is computed beyond the studies' facts."""
import re
from pathlib import Path

import pandas as pd
import pytest

from reference import tables
from stepscope.report.load import chapters
from stepscope.report.story import STORY, questions, questions_2026, questions_facts
from stepscope.report.story.part import tell
from stepscope.studies.attention import facts_compile
from test_attention_facts import gpu_cells

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
    assert set(memory) == {"answers-memory", "answers-2026-memory"}
    assert any(label.startswith("(f)") for label in letters(memory["answers-2026-memory"]))
    without = told("memory", **{"memory.saved": NONE})["answers-2026-memory"]
    assert not any(label.startswith("(f)") for label in letters(without))


def test_every_link_leads_to_a_question():
    known = {question.key for holder in (*chapters(), *STORY) for question in holder.questions}
    words = Path(questions.__file__).parent / "words"
    links = {link for path in words.glob("*.md")
             for link in re.findall(r"\]\(#([\w-]+)\)", path.read_text(encoding="utf-8"))}
    assert links and links <= known


def test_peaks_are_the_allocators_by_context_mode_and_precision(memory):
    _, table = memory["answers-memory"].tables[0]
    runs = tables("memory")["runs"]
    row = runs[(runs["size"].astype(str) == "2.7B") & (runs["context_length"] == 512) & (runs["mode"] == "step")
               & (runs["precision"] == "fp32") & (runs["status"] == "ok") & (runs["attention"] == "eager")
               & (runs["measured"] == "history")]
    cell = table.loc[table["context"] == 512, "full step, fp32 (GiB)"].iloc[0]
    assert float(cell) == pytest.approx(row["steady_peak_allocated_mib"].iloc[0] / 1024, rel=0.01)


def test_tf32_is_said_of_a_gpu_alone():
    given = {"attention.cells": gpu_cells(device="cpu")}
    found = {"attention_time": None, "attention_tf32": facts_compile.tf32(given["attention.cells"])}
    assert found["attention_tf32"]["on_cpu"] and questions_facts.attention(found, given)["tf32_ends"] == []


def test_the_residual_tensor_is_derived_from_the_runs_shape(memory):
    assert "4 × 512 × 2,560 × 4 bytes = 20 MiB" in memory["answers-memory"].text


def test_of_several_processes_the_fastest_eager_step_is_shown():
    pair = {"attention": "eager", "size": "small", "precision": "bf16", "mode": "step", "median_ms_after": 15.0,
            "unlike": False, "flagged": False}
    pairs = pd.DataFrame([pair | {"median_ms": 62.0}, pair | {"median_ms": 26.0},
                          pair | {"median_ms": 20.0, "attention": "sdpa"}])
    table = questions_facts.speedups({"fastest": questions_facts._fastest(pairs)})
    assert list(table["bf16 full step"]) == ["26.0 → 15.0"]
    marked = questions_facts.speedups({"fastest": questions_facts._fastest(pairs.assign(unlike=True, flagged=True))})
    assert list(marked["bf16 full step"]) == ["26.0 → 15.0 ≠ †"]


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


def profiled(*shapes):
    return pd.DataFrame([{"size": size, "context_length": context, "mode": "step"}
                         for size, contexts in shapes for context in contexts])


def test_2026_takes_two_of_its_sizes_and_three_powers_of_two_above_128():
    chosen = questions_2026.chosen
    wide = (128, 256, 384, 512, 1024, 2048)
    assert chosen(profiled(("small", wide), ("xl", wide), ("large", wide), ("2.7B", wide))) == (
        ["large", "2.7B"], [512, 1024, 2048])  # 2025's xl is none of 2026's
    assert chosen(profiled(("small", wide), ("2.7B", wide[:5]))) == (["small", "2.7B"], [256, 512, 1024])
    assert chosen(profiled(("small", wide), ("2.7B", (128, 256, 512)))) is None
    assert chosen(profiled(("small", wide), ("custom", wide), ("xl", wide))) is None


@pytest.fixture(scope="module")
def profiles():
    return told("nsys", "benchmark", "memory")["answers-2026-profiles"]


def test_2026_answers_every_letter_of_six_profiles(profiles):
    assert [label[:3] for label in letters(profiles)] == ["(a)", "(b)", "(c)", "(d)", "(e)"]
    _, table = profiles.tables[0]
    assert set(table["size"]) == {"large", "2.7B (2026's xl)"} and len(table) == 6
    clocks = tables("nsys")["clocks"]
    rows = clocks[(clocks["size"].astype(str) == "2.7B") & (clocks["context_length"] == 512)
                  & (clocks["mode"] == "forward") & (clocks["phase"] == "forward")]
    cell = table.loc[(table["context"] == "512") & table["size"].str.startswith("2.7B"), "(a) device, host (ms)"]
    assert float(cell.iloc[0].split(",")[0]) == pytest.approx(rows["projected_ns"].median() / 1e6, rel=0.01)


def test_2026_says_the_longest_context_only_of_a_gpu_that_holds_no_longer_one():
    runs = tables("memory")["runs"]
    found = questions_2026.longest(["large", "2.7B"], 1024, 4, runs)
    assert found["next"] == 2048 and min(one["gib"] for one in found["needs"]) > found["gpu_gib"]
    assert questions_2026.longest(["small", "2.7B"], 1024, 4, runs) is None
    assert questions_2026.longest(["large", "2.7B"], 1024, 4, runs.assign(gpu_memory_mib=float("nan"))) is None


def test_2026_xl_is_said_of_its_own_size_alone(memory):
    assert "2.7B, which is 2026's xl" in memory["answers-2026-memory"].text

    def xl(size):
        peaks = {"size": size, "by_context": pd.DataFrame({"context_length": [512, 2048]}), "out_of_memory": []}
        found = {"memory_peaks": peaks, "memory_block": None}
        return questions_2026.memory(found, {"attention.ends": NONE})["xl"]

    assert xl("2.7B")["longest"] == 2048 and xl("xl") is None  # 2025's xl is another


def test_2026_long_attention_is_of_probes_that_fit():
    row = {"part": "pass", "implementation": "flash", "sequence": 65536, "status": "ok"}
    beyond = questions_2026.beyond
    assert beyond(pd.DataFrame([row, row | {"implementation": "eager", "status": "oom"}]))["fits"] == [
        questions_2026.NAMES["flash"]]
    assert beyond(pd.DataFrame([row | {"sequence": 32768}])) is None
    assert beyond(pd.DataFrame([row | {"part": "mask"}])) is None and beyond(NONE) is None
