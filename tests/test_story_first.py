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
    assert [one["field"] for one in found["fields"]] == ["attention"]
    assert np.allclose(found["pairs"]["faster"], 2) and found["all"] == own["mode"].nunique()
    assert set(found["pairs"]["before"]) == {"eager"}
    [told] = tell(first.PART, given(**{"benchmark.times": twice}))
    assert "sdpa" in told.text and len(told.tables) == 1
    slower = first.compared(twice.assign(median_ms=1 / twice["median_ms"]), pd.DataFrame())
    assert slower["fields"][0]["slower"]


def test_where_nothing_was_varied_or_a_ladder_says_more_nothing_is_compared(times, rungs):
    assert first.compared(times[times["optimizer"] == "foreach"], pd.DataFrame()) is None
    assert first.compared(times, rungs) is None
    assert tell(first.PART, given()) == [] and tell(advice.PART, given()) == []
