"""Published figures: the shipped file, files to refuse, and that the doubts beside the figures follow from
them.
"""
import json
import math

import pandas as pd
import pytest

from stepscope.config import configure
from stepscope.say.published import DTYPES, KINDS, PublishedError, doubts, load_published, printed
from stepscope.step.flops import forward_flops, phase_flops

SMALL = {"size": "small", "context_length": 512, "batch_size": 4, "phase": "forward", "precision": "fp32"}


def shown(values: dict) -> dict:
    """The entry with an as_printed that shows its numbers."""
    fields = ("mean_ms", "std_ms", "tokens_per_s", "peak_allocated_mib")
    numbers = [values[name] for name in fields if name in values]
    return {"as_printed": " / ".join(map(str, numbers))} | values


@pytest.fixture
def load(tmp_path):
    def written_and_loaded(*entries: dict, **source) -> pd.DataFrame:
        path = tmp_path / "reports.yaml"
        source = {"id": "X", "gpu": "of some kind", "entries": [shown(entry) for entry in entries]} | source
        path.write_text(json.dumps({"sources": [source]}), encoding="utf-8")
        return load_published(path)
    return written_and_loaded


def test_shipped_figures_are_loaded_with_types_and_units():
    figures = load_published()
    assert figures.dtypes.astype(str).to_dict() == DTYPES
    assert figures.groupby("source").size().to_dict() == {"B": 9, "C": 15, "D": 54, "E": 13}
    key = ["source", "size", "context_length", "phase", "precision", "clock", "warmup_steps"]
    assert not figures.duplicated([*key, "mean_ms"]).any()
    assert figures["mean_ms"].gt(0).all() and figures["as_printed"].str.len().gt(0).all()
    found = figures.set_index("as_printed")
    assert found.loc["129.17 ± 0.11", ["size", "context_length", "phase"]].tolist() == ["large", 512,
                                                                                        "forward"]
    row = found.loc["34.1995732 ms / 34.42309040537658 ms"]
    assert (row["mean_ms"], row["std_ms"], row["warmup_steps"],
            row["timed_steps"]) == (34.1995732, 34.42309040537658, 5, 10)
    assert pd.isna(row["size"]) and pd.isna(row["batch_size"])
    row = found.loc["182.841 / 0.031 / 11,201 / 17,534"]
    assert (row["gpu"], row["precision"]) == ("RTX 5090", "bf16")
    assert (row["tokens_per_s"], row["peak_allocated_mib"]) == (11201, 17534)


def test_numbers_as_printed():
    assert printed("**9.117** / 112,312 / ~0.50 ms") == [9.117, 112312.0, 0.5]


@pytest.mark.parametrize("change, words", [
    ({"mean": 3.0}, ["mean: Extra inputs are not permitted"]),
    ({"mean_ms": -33.29}, ["mean_ms: Input should be greater than 0", "-33.29"]),
    ({"std_ms": -0.1}, ["std_ms: Input should be greater than or equal to 0", "-0.1"]),
    ({"size": "huge"}, ["size: ", "'huge'"]),
    ({"phase": "forwards"}, ["phase: ", "'forwards'"]),
    ({"warmup_steps": "none"}, ["warmup_steps: ", "'none'"]),
    ({"as_printed": "33.92 ± 0.71"}, ["mean_ms = 33.29 does not stand in as_printed"]),
    ({"as_printed": "133.29 ± 0.71"}, ["mean_ms = 33.29 does not stand in as_printed"]),
])
def test_a_wrong_entry_is_named(load, change, words):
    good = {**SMALL, "mean_ms": 33.29, "std_ms": 0.71}
    assert len(load(good, good)) == 2
    with pytest.raises(PublishedError) as error:
        load(good, good | change)
    for word in ["reports.yaml, source X, entry 2: ", *words]:
        assert word in str(error.value)


def test_a_missing_time_and_several_mistakes_are_one_error(load):
    with pytest.raises(PublishedError, match="source X, entry 1: (.|\n)*colour: Extra(.|\n)*") as error:
        load({"as_printed": "1 ms", "colour": "red"})
    assert "mean_ms: Field required" in str(error.value)


@pytest.mark.parametrize("text, words", [
    ("sources: [{id: X, gpu: H100, entries: [], cpu: none}]",
     "sources.0.cpu: Extra inputs are not permitted"),
    ("sources: [{id: X, entries: []}]", "sources.0.gpu: Field required"),
    ("{}", "sources: Field required"),
    ("- 1", "valid dictionary"),
    ("sources: [", "line 2, column 1"),
    ("sources: []\nsources: []", "the key 'sources' is there twice"),
])
def test_a_wrong_file_is_named(tmp_path, text, words):
    path = tmp_path / "reports.yaml"
    path.write_text(text)
    with pytest.raises(PublishedError) as error:
        load_published(path)
    assert "reports.yaml: " in str(error.value) and words in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PublishedError, match="absent.yaml: cannot be read"):
        load_published(tmp_path / "absent.yaml")


DOUBTED = SMALL | {"mean_ms": 53.41, "as_printed": "53.41 ms", "doubts": [
    {"kind": "estimates", "says": "it is an estimate"},
    {"kind": "spread", "beside": ["1 ms", "2 ms"], "says": "two runs"}]}


def test_doubts_are_told_by_kind_each_with_its_figures_and_their_setting(load):
    plain = SMALL | {"mean_ms": 7.0}
    found = doubts(load(plain, DOUBTED, DOUBTED | {"phase": "step", "warmup_steps": 1}))
    assert found["kind"].tolist() == ["spread", "spread", "estimates", "estimates"]
    assert found["doubt"].tolist()[:2] == ["small, context 512, forward, fp32: two runs",
                                           "small, context 512, step, fp32, 1 warm-up step: two runs"]
    assert found["figure"].tolist() == ["53.41 ms vs 1 ms vs 2 ms"] * 2 + ["53.41 ms"] * 2
    none = doubts(load(plain))
    assert none.empty and list(none.columns) == list(found.columns)


def test_a_doubt_of_an_unknown_kind_is_named(load):
    with pytest.raises(PublishedError, match=r"entry 1: doubts.0.kind: .*'hunch'"):
        load(DOUBTED | {"doubts": [{"kind": "hunch", "says": "so"}]})


# The stored doubts against the stored figures

SHEETS = {"A100": 19.5}  # fp32 TFLOP/s by data sheet, of the GPUs that a doubt names


def by_arithmetic(kind: str, rows: list[pd.Series]) -> list[str]:
    """What a doubt of this kind about these figures has to say, made from the figures anew."""
    first, *others = rows
    ms = [row["mean_ms"] for row in rows]
    if kind == "spread":
        n, std = first["timed_steps"], first["std_ms"]
        share = f"standard deviation is {std / ms[0]:.0%} of the mean"
        if pd.isna(n):
            return [share]
        slow, rest = ms[0] + std * (n - 1) / math.sqrt(n), ms[0] - std / math.sqrt(n)
        return [share, f"one sample of {slow:.3g} ms and {n - 1} of {rest:.3g} ms would give"]
    if kind == "rate":
        config = configure("benchmark", size=first["size"], device="cpu",
                           context_length=int(first["context_length"]),
                           batch_size=int(first["assumed_batch_size"]))
        tflops = phase_flops(config)[first["phase"]] / ms[0] / 1e9
        return [f"{tflops:.3g} TFLOP/s",
                *(f"{gpu} ({most:g})" for gpu, most in SHEETS.items() if tflops > most)]
    if kind == "clocks":
        return [f"{ms[0] / ms[1]:.2f} times the {ms[1]:.4g} ms of {others[0]['clock']},",
                f" {ms[0] - ms[1]:.3g} ms more"]
    if kind == "flat":
        contexts = [row["context_length"] for row in rows]
        more = contexts[1] // contexts[0]
        return [f"{ms[1] / ms[0] - 1:+.1%} in time up to context {contexts[1]}, for {more} times the tokens"]
    if kind == "ratios":
        return [f"leaves {ms[0] - ms[1]:.4g} ms, and backward is printed as {ms[2]:.4g} ms"]
    if kind == "monotone":
        configs = [configure("benchmark", size=row["size"], context_length=1, device="cpu") for row in rows]
        work = [sum(forward_flops(config).values()) for config in configs]
        return [f"{ms[0] / ms[1]:.2f} times the time of {others[0]['size']}",
                f"for {work[0] / work[1]:.2f} times the matrix FLOPs"]
    return [f"{ms[0]:.4g} ms is the report's estimate"]


def test_the_numbers_of_the_shipped_doubts_are_those_of_the_shipped_figures():
    figures = load_published()
    found = [(row, doubt) for _, row in figures.iterrows() for doubt in row["doubts"]]
    assert len(found) > 10 and {doubt["kind"] for _, doubt in found} == set(KINDS)
    for row, doubt in found:
        printed_by = figures[figures["source"] == row["source"]].drop_duplicates("as_printed").set_index("as_printed")
        rows = [row, *(printed_by.loc[text] for text in doubt["beside"])]
        assert all(words in doubt["says"] for words in by_arithmetic(doubt["kind"], rows)), doubt
