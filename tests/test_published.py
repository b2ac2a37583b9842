"""Published figures: the shipped file, files to refuse, and every rule on a case it must doubt and a twin it must not."""

import numpy as np
import pandas as pd
import pytest
import yaml
from stepscope.say.published import DTYPES, PublishedError, doubts, load_published, one_outlier_ms, printed

PEAKS = [{"gpu": "H100 SXM", "named": "H100", "precision": "fp32", "tflops": 66.9, "source": "vendor data sheet"}]
SMALL = {"size": "small", "context_length": 512, "batch_size": 4, "phase": "forward", "precision": "fp32"}
RULES = ["spread", "rate", "arithmetic", "clocks", "flat", "ratios", "monotone", "estimates"]


def shown(values: dict) -> dict:
    """The entry with an as_printed that shows its numbers."""
    numbers = [values[name] for name in ("mean_ms", "std_ms", "tokens_per_s", "peak_allocated_mib") if name in values]
    return {"as_printed": " / ".join(map(str, numbers))} | values


def without(values: dict, name: str) -> dict:
    return {key: value for key, value in values.items() if key != name}


@pytest.fixture
def load(tmp_path):
    def written_and_loaded(*entries: dict, **source) -> pd.DataFrame:
        path = tmp_path / "reports.yaml"
        source = {"id": "X", "gpu": "of no data sheet", "entries": [shown(entry) for entry in entries]} | source
        path.write_text(yaml.safe_dump({"peaks": PEAKS, "sources": [source]}), encoding="utf-8")
        return load_published(path)
    return written_and_loaded


@pytest.fixture
def kinds(load):
    return lambda *entries, **source: list(doubts(load(*entries, **source))["kind"])


def test_shipped_figures_are_loaded_with_types_and_units():
    figures = load_published()
    assert {name: str(kind) for name, kind in figures.dtypes.items()} == DTYPES
    assert figures.groupby("source").size().to_dict() == {"B": 9, "C": 15, "D": 54, "E": 13}
    key = ["source", "size", "context_length", "phase", "precision", "clock", "warmup_steps"]
    assert not figures.duplicated([*key, "mean_ms"]).any()
    assert figures["mean_ms"].gt(0).all() and figures["as_printed"].str.len().gt(0).all()
    found = figures.set_index("as_printed")
    assert found.loc["129.17 ± 0.11", ["size", "context_length", "phase"]].tolist() == ["large", 512, "forward"]
    row = found.loc["34.1995732 ms / 34.42309040537658 ms"]
    assert (row["mean_ms"], row["std_ms"], row["warmup_steps"], row["timed_steps"]) == (34.1995732, 34.42309040537658, 5, 10)
    assert pd.isna(row["size"]) and pd.isna(row["batch_size"])
    row = found.loc["182.841 / 0.031 / 11,201 / 17,534"]
    assert (row["gpu"], row["precision"]) == ("RTX 5090", "bf16")
    assert (row["tokens_per_s"], row["peak_allocated_mib"]) == (11201, 17534)


def test_numbers_as_printed_carry_their_rounding():
    assert printed("**9.117** / 112,312 / ~0.50 ms") == {9.117: 0.0005, 112312.0: 0.5, 0.5: 0.005}


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
    ("peaks: []\nsources: [{id: X, gpu: H100, entries: [], cpu: none}]", "sources.0.cpu: Extra inputs are not permitted"),
    ("peaks: []\nsources: [{id: X, entries: []}]", "sources.0.gpu: Field required"),
    ("peaks: []", "sources: Field required"),
    ("- 1", "valid dictionary"),
    ("peaks: [", "cannot be read as YAML"),
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


@pytest.mark.parametrize("n", [2, 10, 30])
def test_one_outlier_has_the_mean_and_deviation_it_is_made_from(n):
    slow, rest = one_outlier_ms(40.0, 10.0, n)
    samples = np.array([slow] + [rest] * (n - 1))
    assert samples.mean() == pytest.approx(40.0, rel=1e-12)
    assert samples.std(ddof=1) == pytest.approx(10.0, rel=1e-12)


def test_spread_is_taken_apart_where_one_sample_can_explain_it(load):
    samples = np.array([150.0] + [25.0] * 9)
    noisy = {"phase": "backward", "mean_ms": float(samples.mean()), "std_ms": float(samples.std(ddof=1)), "timed_steps": 10}
    found = doubts(load(noisy))
    assert list(found["kind"]) == ["spread"]
    assert found["doubt"].item().endswith("105% of the mean, what one sample of 150 ms and 9 of 25 ms would give")
    unknown = doubts(load(without(noisy, "timed_steps")))["doubt"].item()
    assert unknown.endswith("105% of the mean")  # the number of samples is not stated
    impossible = doubts(load(noisy | {"std_ms": 4 * noisy["mean_ms"]}))["doubt"].item()
    assert impossible.endswith("400% of the mean")  # the other samples would be negative


def test_spread_is_silent_below_the_threshold(kinds):
    assert kinds({"phase": "backward", "mean_ms": 100.0, "std_ms": 5.1, "timed_steps": 10}) == ["spread"]
    assert kinds({"phase": "backward", "mean_ms": 100.0, "std_ms": 4.9, "timed_steps": 10}) == []
    assert kinds({"phase": "backward", "mean_ms": 100.0, "timed_steps": 10}) == []


# One forward pass of small at context 512 and batch 4 is 0.53 TFLOP: 8 ms by the 66.9 TFLOP/s of an H100 SXM.
def test_rate_above_the_data_sheet_cannot_be(load, kinds):
    found = doubts(load(SMALL | {"mean_ms": 7.0}, gpu="one H100 80GB"))
    assert list(found["kind"]) == ["rate"]
    assert "H100 SXM (66.9) or H100 PCIe (51.2) can do in fp32 by data sheet: it cannot be" in found["doubt"].item()
    assert kinds(SMALL | {"mean_ms": 9.0}, gpu="one H100 80GB") == []  # above the PCIe card's, and it may be the other
    assert kinds(SMALL | {"mean_ms": 7.0, "precision": "bf16"}, gpu="one H100 80GB") == []
    assert kinds(SMALL | {"mean_ms": 7.0}, gpu="some TPU") == []
    backward = SMALL | {"phase": "backward"}
    assert kinds(backward | {"mean_ms": 15.0}, gpu="H100") == ["rate"]  # twice the forward's FLOPs
    assert kinds(backward | {"mean_ms": 17.0}, gpu="H100") == []


def test_rate_without_a_gpu_names_those_that_the_fastest_figure_rules_out(load, kinds):
    slower, faster = SMALL | {"mean_ms": 20.0}, SMALL | {"mean_ms": 9.0}
    found = doubts(load(faster, slower, gpu="not stated"))
    assert list(found["figure"]) == ["9.0"]
    assert "H100 PCIe (51.2) or A100 (19.5)" in found["doubt"].item() and "SXM" not in found["doubt"].item()
    assert kinds(SMALL | {"mean_ms": 30.0}, gpu="not stated") == []
    assert kinds(without(faster, "batch_size"), gpu="not stated") == []


def test_rate_says_that_the_batch_is_assumed(load):
    figure = without(SMALL, "batch_size") | {"mean_ms": 7.0}
    assert "at an assumed batch of 4" in doubts(load(figure, gpu="H100", assumed_batch_size=4))["doubt"].item()
    assert "assumed" not in doubts(load(figure | {"batch_size": 4}, gpu="H100", assumed_batch_size=8))["doubt"].item()


def test_arithmetic_allows_for_rounding_and_no_more(load, kinds):
    figure = SMALL | {"mean_ms": 215.206, "tokens_per_s": 9516, "as_printed": "215.206 / 9,516"}
    assert kinds(figure) == []
    found = doubts(load(figure | {"tokens_per_s": 9518, "as_printed": "215.206 / 9,518"}))
    assert list(found["kind"]) == ["arithmetic"]
    assert found["doubt"].item().endswith("2,048.2 to 2,048.4 tokens, batch times context is 2,048")
    coarse = SMALL | {"mean_ms": 215, "tokens_per_s": 9518, "as_printed": "215 / 9,518"}
    assert kinds(coarse) == []  # the time is printed to the millisecond
    assert kinds(figure | {"context_length": 256}) == ["arithmetic"]
    assert kinds(without(figure, "batch_size"), assumed_batch_size=8) == ["arithmetic"]


def test_clocks_that_disagree(load, kinds):
    wall = SMALL | {"clock": "wall", "mean_ms": 37.34, "std_ms": 0.42}
    nvtx = SMALL | {"clock": "nvtx", "mean_ms": 53.41, "std_ms": 0.5}
    found = doubts(load(wall, nvtx))
    assert list(found["kind"]) == ["clocks"]
    assert "1.43 times the 37.34 ms of wall, 16.1 ms more" in found["doubt"].item() and "two runs" in found["doubt"].item()
    assert kinds(wall, nvtx | {"mean_ms": 38.2}) == []  # within both spreads
    assert kinds(wall, nvtx | {"clock": "wall"}) == []
    assert kinds(wall, nvtx | {"phase": "backward"}) == []
    assert kinds(without(wall, "phase"), without(nvtx, "phase")) == []  # perhaps not the same pass
    assert kinds(wall | {"warmup_steps": 0}, nvtx | {"warmup_steps": 5}) == []
    within = doubts(load(wall | {"mean_ms": 60.0}, nvtx))
    assert "1.12 times the 53.41 ms of nvtx" in within["doubt"].item() and "two runs" not in within["doubt"].item()


def test_flat_times(load, kinds):
    steps = [SMALL | {"context_length": context, "mean_ms": ms} for context, ms in
             ((128, 33.29), (256, 33.48), (512, 33.98), (1024, 45.92))]
    found = doubts(load(*steps))
    assert list(found["kind"]) == ["flat"]  # one stretch, not its parts
    assert found["figure"].item() == "33.29 vs 33.98"
    assert "+2.1% in time up to context 512, for 4 times the tokens" in found["doubt"].item()
    growing = [step | {"mean_ms": 0.26 * step["context_length"]} for step in steps]
    assert kinds(*growing) == []
    assert kinds(steps[0], steps[1] | {"context_length": 192}) == []  # not twice the tokens
    assert kinds(steps[0], steps[1] | {"precision": "bf16"}) == []


def test_parts_that_do_not_add_up(load, kinds):
    parts = [SMALL | {"phase": phase, "mean_ms": ms} for phase, ms in
             (("forward", 169.07), ("backward", 347.68), ("forward_backward", 516.75))]
    assert kinds(*parts) == []
    found = doubts(load(*parts[:2], parts[2] | {"mean_ms": 600.0}))
    assert list(found["kind"]) == ["ratios"]
    assert "less forward it leaves 430.9 ms, and backward is printed as 347.7 ms" in found["doubt"].item()
    assert kinds(*parts[:2], parts[2] | {"mean_ms": 600.0, "precision": "bf16"}) == []
    assert kinds(parts[0], parts[2] | {"mean_ms": 600.0}) == []  # not all three are printed
    apart = [*parts[:2], parts[2] | {"mean_ms": 580.0}]  # by 63 ms; 29 ms are 5%
    assert kinds(*apart) == ["ratios"]
    assert kinds(*(part | {"std_ms": 0.04 * part["mean_ms"]} for part in apart)) == []  # spreads of 43 ms more


def test_a_larger_model_is_not_faster(load, kinds):
    xl, larger = ({"size": size, "phase": "forward_backward", "precision": "bf16", "mean_ms": ms}
                  for size, ms in (("xl", 392.463), ("2.7B", 365.09)))
    found = doubts(load(larger, xl))
    assert list(found["kind"]) == ["monotone"] and found["figure"].item() == "365.09 vs 392.463"
    assert "0.93 times the time of xl for 1.71 times the matrix FLOPs" in found["doubt"].item()
    assert kinds(larger | {"mean_ms": 400.0}, xl) == []
    assert kinds(larger | {"precision": "fp32"}, xl) == []
    assert kinds(xl, xl | {"mean_ms": 300.0}) == []  # one size twice


def test_estimates_are_doubted_and_not_compared(load, kinds):
    measured = SMALL | {"mean_ms": 100.0}
    estimate = SMALL | {"context_length": 1024, "mean_ms": 100.0, "estimated": True}
    found = doubts(load(measured, estimate))
    assert list(found["kind"]) == ["estimates"] and "1024" in found["doubt"].item()
    assert kinds(measured, estimate | {"estimated": False}) == ["flat"]
    assert kinds(measured, estimate | {"estimated": False, "mean_ms": 240.0}) == []


def test_reports_are_not_mixed(load):
    slow = load(SMALL | {"size": "small", "mean_ms": 300.0}, id="X")
    fast = load(SMALL | {"size": "medium", "mean_ms": 200.0}, id="Y")
    assert doubts(pd.concat([slow, fast], ignore_index=True)).empty
    assert list(doubts(pd.concat([slow, fast.assign(source="X")], ignore_index=True))["kind"]) == ["monotone"]


def test_no_figures_no_doubts(load):
    empty = doubts(load())
    assert empty.empty and list(empty.columns) == ["source", "gpu", "figure", "doubt", "kind"]


def test_shipped_doubts_are_sentences_about_shipped_figures():
    figures = load_published()
    found = doubts(figures)
    assert set(found["kind"]) <= set(RULES) and set(found["source"]) <= set(figures["source"])
    assert found["figure"].str.split(" vs ").explode().isin(figures["as_printed"]).all()
    by_source = found.groupby("source")["kind"].agg(set)
    assert by_source["B"] == {"clocks", "estimates"} and by_source["D"] == {"spread", "rate", "flat"}
    assert "what one sample of 132 ms and 9 of 23.3 ms would give" in " ".join(found["doubt"])
