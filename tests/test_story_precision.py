"""The chapter on precision says what the H200 records say, and other things of other records."""
import pandas as pd
import pytest

from reference import changed, tables
from stepscope.report.story.part import tell
from stepscope.report.story.precision import (
    PART,
    _parts,
    _slowdown,
    draw_map,
    map_title,
    memory,
    numerics,
    speeds,
    whole_steps,
)

LADDER = pd.DataFrame({"rung": ["cuda_graphs", "no_casts"], "kind": "rung", "status": "ok", "size": "2.7B",
                       "context_length": 512, "vocab_size": 10000, "median_ms": [110.0, 100.0],
                       "gain": [1.01, 1.1], "gain_low": [1.0, 1.09], "runs": "ladder/some"})
NOTHING = pd.DataFrame()


@pytest.fixture(scope="module")
def mixed():
    return tables("mixed_precision")


def facts_of(mixed, speedups=None, nsys=None, rungs=NOTHING):
    nsys = nsys or {}
    captures = [nsys.get(name, NOTHING) for name in ("operations", "operations_low", "casts")]
    return speeds(mixed["speedups"] if speedups is None else speedups, mixed["times"], *captures, rungs)


def given(mixed, **replaced):
    """All tables that the part asks for: this study's, and nothing of the others."""
    asked = {name for question in PART.questions for name in (*question.needs, *question.uses)}
    own = {f"mixed_precision.{name}": table for name, table in (mixed | replaced).items()}
    return {name: own.get(name, NOTHING) for name in asked}


def step_ms(mixed, **cell):
    rows = mixed["times"].query("mode == 'step' and phase == 'step'")
    for column, value in cell.items():
        rows = rows[rows[column].astype(str) == str(value)]
    return float(rows["median_ms"].iloc[0])


def test_ratios_are_of_the_medians(mixed):
    found, own = facts_of(mixed), {"size": "2.7B", "context_length": 512}
    for one in found["last"]["all"]:
        assert one["times"] == pytest.approx(step_ms(mixed, precision="fp32", **own)
                                             / step_ms(mixed, precision=one["precision"], **own))
    assert [one["precision"] for one in found["last"]["all"]] == ["bf16", "tf32", "fp16"]


def test_how_much_slower_is_over_all_processes_and_sure_where_all_say_so(mixed):
    slower = mixed["speedups"].query("change == 'slower' and mode == 'step' and phase == 'step'")
    slower = slower[slower["precision"] == "bf16"].head(1)
    shape = {"size": str(slower["size"].iloc[0]), "context": slower["context_length"].iloc[0]}

    def told(speedup, sure):
        other = shape | {"speedups": [{"precision": "bf16", "speedup": speedup}], "slower": ["bf16"] if sure else []}
        return _slowdown(slower, [other, other | {"size": "none"}], "bf16")

    assert told(0.5, True)["times"].tolist() == pytest.approx([1 / slower["speedup"].iloc[0], 2])
    assert told(0.5, True)["sure"] and told(0.5, True)["processes"] == 2
    assert not told(0.97, False)["sure"] and not _slowdown(slower, [], "bf16")["sure"]


def test_why_a_larger_model_gains_more_is_of_the_captures(mixed):
    nsys = tables("nsys")
    found = facts_of(mixed, nsys=nsys, rungs=LADDER)
    steps = nsys["operations"].query("mode == 'step' and size == '2.7B' and context_length == 512")
    share = (steps.loc[steps["family"] == "matrix multiply", "total_ns"].sum() / steps["total_ns"].sum())
    assert found["trend"]["last"]["share"] == pytest.approx(share)
    assert found["rest_slower"] and found["no_casts"]["gain"] == 1.1
    assert not facts_of(mixed, rungs=LADDER.assign(gain_low=0.99))["no_casts"]


def test_other_records_take_other_words(mixed):
    speedups = mixed["speedups"]
    quick = changed(speedups, lambda t: t["change"] == "slower", change="none", speedup=1.0)
    slow = speedups.assign(speedup=speedups["speedup"] / 10, change="slower")
    said = [tell(PART, given(mixed, speedups=table, other_times=NOTHING))[0].text for table in (speedups, quick, slow)]
    assert [" is slower for" in text for text in said] == [True, False, True]
    assert "faster" not in said[2] and "makes no full step faster" in map_title(whole_steps(slow), "bf16")
    assert "also slower" not in map_title(whole_steps(quick), "bf16")
    cell = changed(speedups, lambda t: t["size"].astype(str) == "small", size="small")
    labels = {text.get_text() for axis in draw_map(cell, "here").axes for text in axis.texts}
    assert "4.3x" in labels and any("slower" in label for label in labels)


def test_forward_grows_by_copies_of_the_weights_and_the_step_hardly_shrinks(mixed):
    found = memory(mixed["times"])
    own = mixed["times"].query("mode == 'forward' and phase == 'step' and context_length == 128 and size == 'xl'")
    peaks, parameters = own.set_index("precision")["peak_allocated_mib"], own["parameters"].iloc[0]
    assert (peaks["bf16"] - peaks["fp32"]) * 2**20 / parameters == pytest.approx(2, rel=0.1)
    assert found["copies_explain"] and found["little_mostly"] and found["forward_more"].min() > 0
    more = changed(mixed["times"], lambda t: (t["mode"] == "forward") & (t["precision"] == "bf16"),
                   peak_allocated_mib=lambda rows: 2 * rows["peak_allocated_mib"])
    assert not memory(more)["copies_explain"]
    assert memory(mixed["times"].assign(peak_allocated_mib=float("nan"))) is None


def test_numbers_are_those_of_the_gradients_and_training_needs_its_curves(mixed):
    found = numerics(mixed["health"], mixed["sums"], mixed["steps"], mixed["norms"], NOTHING, NOTHING, NOTHING)
    own = mixed["health"].set_index(["run_id", "precision", "scale"])["gradient_norm"].unstack("run_id")
    assert found["bf16"]["norm_off"] == pytest.approx((own.loc["bf16", 1] / own.loc["fp32", 1] - 1).abs().max())
    assert found["sums"]["worst"]["type"] == "bf16" and found["trained"] is None and found["gradient_off"] is None
    assert numerics(mixed["health"], *[NOTHING] * 6)["sums"] is None


def test_without_records_nothing_is_said(mixed):
    assert tell(PART, dict.fromkeys(given(mixed), NOTHING)) == []
    assert speeds(mixed["speedups"].iloc[:0], mixed["times"], *[NOTHING] * 4) is None
    assert draw_map(mixed["speedups"].iloc[:0], "here") is None
    for size in ("small", "2.7B"):  # one size at one context has no trend and no map of several
        one = {name: table[(table["size"].astype(str) == size) & (table["context_length"] == 512)]
               for name, table in mixed.items() if name in ("speedups", "times")}
        told = tell(PART, given({}, **one))
        assert "; " not in told[0].text.split(size)[0] and "nan" not in " ".join(a.text + a.more for a in told)


def test_casts_explain_the_rest_only_where_they_cost_more_than_it_saves():
    table = pd.DataFrame({"matrix products": [10.0], "casts and copies": [8.0], "norms": [4.0]})
    def left(norms):
        gains = {"matrix products": 10.0, "casts and copies": 0.25, "norms": norms}
        return {"table": table, "gains": [{"part": part, "times": pd.Series([times])} for part, times in gains.items()]}
    assert list(_parts(left(2.0))["casts"]) == [4.0]
    assert _parts(left(3.0)) is None and _parts({"gains": None}) is None


def test_both_processes_of_one_step_are_told(mixed):
    """The quickest is the headline; what a slower process says of the same step stands beside it."""
    told = speeds(mixed["speedups"], mixed["times"], *[NOTHING] * 4, mixed["other_times"])
    slower = mixed["other_times"].query("mode == 'step' and phase == 'step' and context_length == 512")
    ms = slower[slower["size"].astype(str) == "small"].set_index("precision")["median_ms"]
    [other] = told["first"]["others"]
    times = ms["bf16"] / ms["fp32"]
    assert other["slower"] == (times > 1) and other["times"] == pytest.approx(max(times, 1 / times))
    of_small = mixed["other_times"][mixed["other_times"]["size"].astype(str) == "small"]
    told_of_small = speeds(mixed["speedups"], mixed["times"], *[NOTHING] * 4, of_small)
    assert told_of_small["last"]["others"] == [] and told_of_small["first"]["others"] == [other]
    alone = speeds(mixed["speedups"], mixed["times"], *[NOTHING] * 4)
    assert alone["first"]["others"] == [] and alone["first"]["main"] == told["first"]["main"]
    texts = [next(one for one in tell(PART, given(mixed, other_times=others)) if one.key == "precision-speed").text
             for others in (mixed["other_times"], NOTHING)]
    assert "in another" in texts[0] and "in another" not in texts[1]
