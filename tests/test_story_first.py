"""The first screen and the advice: what they stand on, and what they say of other data."""
import numpy as np
import pandas as pd
import pytest

from reference import tables
from stepscope.report.story import advice, first
from stepscope.report.story.part import tell


@pytest.fixture(scope="module")
def rungs():
    return tables("ladder")["rungs"]


@pytest.fixture(scope="module")
def times():
    return tables("benchmark")["times"]


def given(**replaced):
    names = ("memory.checkpoints", "memory.runs", "memory.samples", "mixed_precision.speedups", "ladder.curves")
    empty = {name: pd.DataFrame() for name in names}
    return empty | {"ladder.rungs": pd.DataFrame(), "benchmark.times": pd.DataFrame()} | replaced


def test_the_story_is_the_ladder_from_its_first_rung_to_its_fastest(rungs):
    found = first.story(rungs, pd.DataFrame())
    own = rungs[(rungs["size"].astype(str) == found["size"]) & (rungs["kind"] == "rung")
                & ~rungs["rung"].isin(["fp8", "fill"]) & (rungs["status"] == "ok")]
    assert found["first_ms"] == own.set_index("rung").loc["fp32", "median_ms"]
    assert found["best_ms"] == own["median_ms"].min()
    fastest = own.loc[own["median_ms"].idxmin()]
    assert found["faster"] == fastest["times_as_fast"] and found["gains"], "of times within a process"
    assert all(one["gain"] > 1 + first.HELPS for one in found["best"])
    assert found["elsewhere"]["gain"] > found["elsewhere"]["here"]


def test_a_ladder_of_one_size_names_no_other(rungs):
    own = rungs[rungs["size"].astype(str) == first.story(rungs, pd.DataFrame())["size"]]
    assert first.story(own, pd.DataFrame())["elsewhere"] is None
    [told] = tell(first.PART, given(**{"ladder.rungs": own}))
    assert "What helps depends" not in told.text


def test_a_change_that_gains_nothing_somewhere_is_said(rungs):
    found = advice.advice(rungs, *[pd.DataFrame()] * 4)
    for rung, change in found["changes"].items():
        gains = rungs.loc[(rungs["rung"] == rung) & rungs["gain"].notna(), "gain"]
        assert change["most"]["gain"] == gains.max() and change["least"]["gain"] == gains.min()
        low = rungs.loc[(rungs["rung"] == rung) & rungs["gain"].notna(), "gain_low"]
        assert len(change["idle"]) == ((gains < 1 + first.HELPS) | (low <= 1)).sum()
    assert found["checkpoints"] is None
    [told] = tell(advice.PART, given(**{"ladder.rungs": rungs}))
    assert "Out of memory" not in told.text and told.text.count("\n|") > 5


def test_a_gain_that_is_not_sure_is_none(rungs):
    """Where each interval holds 1 nothing is said to have helped, and no headline says so."""
    unsure = rungs.assign(gain_low=0.9, times_as_fast_low=0.9)
    assert not first.story(unsure, pd.DataFrame())["gains"]
    [told] = tell(first.PART, given(**{"ladder.rungs": unsure}))
    [sure] = tell(first.PART, given(**{"ladder.rungs": rungs}))
    assert "no rung" in told.text and "no rung" not in sure.text
    changes = advice.advice(unsure, *[pd.DataFrame()] * 4)["changes"]
    assert all(not shape["surely"] for change in changes.values() for shape in change["idle"])
    shapes = len(rungs[["size", "context_length"]].drop_duplicates())
    assert len(changes["bf16"]["idle"]) == shapes


def test_advice_says_from_how_many_processes(rungs):
    found = advice.advice(rungs.assign(processes=3), *[pd.DataFrame()] * 4)
    assert (found["fewest"], found["most"], found["alike"]) == (3, 3, True)
    [told] = tell(advice.PART, given(**{"ladder.rungs": rungs.assign(processes=3)}))
    assert "3 processes" in told.text
    one = rungs.assign(processes=[1 + index % 3 for index in range(len(rungs))])
    assert not advice.advice(one, *[pd.DataFrame()] * 4)["alike"]


def test_where_a_precision_alone_makes_no_step_faster_is_said(rungs):
    speedups = tables("mixed_precision")["speedups"]
    found = advice.advice(rungs, *[pd.DataFrame()] * 3, speedups)
    steps = speedups[(speedups["mode"] == "step") & (speedups["phase"] == "step")
                     & (speedups["precision"] == "bf16") & (speedups["speedup"] < 1 + first.HELPS)]
    told = {(shape["size"], shape["context"]) for shape in found["changes"]["bf16"]["idle"]}
    assert {(str(row.size_), row.context_length)
            for row in steps.rename(columns={"size": "size_"}).itertuples()} <= told


def test_a_sweep_of_ones_own_is_told_by_what_it_varied(times):
    own = times[(times["size"] == "small") & (times["context_length"] == 128)]
    plain = own.assign(attention="eager", optimizer="foreach")
    twice = pd.concat([plain, plain.assign(attention="sdpa", median_ms=plain["median_ms"] / 2, run_id="other")])
    found = first.compared(twice, pd.DataFrame())
    [change] = found["changes"]
    assert (change["field"], change["before"], change["after"]) == ("attention", "eager", "sdpa")
    assert np.allclose(found["pairs"]["faster"], 2) and len(found["pairs"]) == own["mode"].nunique()


def versions(times, ratios, interval=0.001):
    """Full steps of some sizes in fp32, and in bf16 so many times as fast."""
    plain = times[(times["context_length"] == 128) & (times["mode"] == "step") & (times["optimizer"] == "foreach")
                  & (times["phase"] == "step")].drop_duplicates("size").head(len(ratios))
    both = pd.concat([plain, plain.assign(precision="bf16", median_ms=plain["median_ms"] / ratios, run_id="other")])
    return both.assign(ci_low_ms=both["median_ms"] * (1 - interval), ci_high_ms=both["median_ms"] * (1 + interval))


def told_of(times):
    [told] = tell(first.PART, given(**{"benchmark.times": times}))
    return told.text


def test_gains_and_losses_of_one_change_are_told_in_one_direction_each(times):
    [change] = first.compared(versions(times, [2.0, 0.5, 1.001]), pd.DataFrame())["changes"]
    assert change["gain"]["faster"] == pytest.approx(2) and change["loss"]["slower"] == pytest.approx(2)
    assert change["same"] == 1 and not change["everywhere"] and not change["all_same"]
    text = told_of(versions(times, [2.0, 0.5, 1.001]))
    assert "2.0x faster" in text and "2.0x slower" in text and "0.5" not in text
    assert "also" not in told_of(versions(times, [2.0, 3.0])) and "slower" not in told_of(versions(times, [2.0, 3.0]))
    assert "faster" not in told_of(versions(times, [0.5, 0.4]))


def test_a_difference_within_the_intervals_is_none(times):
    [change] = first.compared(versions(times, [1.3, 0.8], interval=0.5), pd.DataFrame())["changes"]
    assert change["all_same"] and change["gain"] is None and change["loss"] is None
    assert "no difference can be told" in told_of(versions(times, [1.3, 0.8], interval=0.5))


def test_pairs_begin_with_the_default_and_numbers_are_ordered_as_numbers(times):
    own = versions(times, [1.0]).head(1)
    batches = pd.concat([own.assign(batch_size=size, run_id=str(size)) for size in (16, 4)])
    found = first.compared(batches, pd.DataFrame())["pairs"]
    assert found[["before", "after"]].to_numpy().tolist() == [["4", "16"]]
    attentions = pd.concat([own.assign(attention=name, run_id=name) for name in ("sdpa", "eager")])
    assert first.compared(attentions, pd.DataFrame())["pairs"]["before"].tolist() == ["eager"]


def test_where_nothing_was_varied_or_a_ladder_says_more_nothing_is_compared(times, rungs):
    assert first.compared(times[times["optimizer"] == "foreach"], pd.DataFrame()) is None
    assert first.compared(times, rungs) is None
    assert tell(first.PART, given()) == [] and tell(advice.PART, given()) == []
