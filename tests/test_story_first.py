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
    names = ("memory.checkpoints", "memory.runs", "memory.samples", "mixed_precision.speedups",
             "mixed_precision.other_times", "ladder.curves")
    empty = {name: pd.DataFrame() for name in names}
    return empty | {"ladder.rungs": pd.DataFrame(), "benchmark.times": pd.DataFrame()} | replaced


def of_shape(rungs, size):
    """A size at the context and the vocabulary that sentences speak of."""
    return rungs[(rungs["size"].astype(str) == size) & (rungs["context_length"] == 512)
                 & (rungs["vocab_size"] == 10_000)]


def test_the_story_is_the_ladder_from_its_first_rung_to_its_fastest(rungs):
    found = first.story(rungs, pd.DataFrame())
    rows = of_shape(rungs, found["size"])
    own = rows[(rows["kind"] == "rung") & ~rows["rung"].isin(["fp8", "fill"]) & (rows["status"] == "ok")]
    assert found["first_ms"] == own.set_index("rung").loc["fp32", "median_ms"]
    assert found["best_ms"] == own["median_ms"].min()
    fastest = own.loc[own["median_ms"].idxmin()]
    assert found["faster"] == fastest["times_as_fast"] and found["gains"], "of times within a process"
    assert all(one["gain"] > 1 + first.HELPS for one in found["best"])
    [told] = tell(first.PART, given(**{"ladder.rungs": rungs}))
    assert all(one["name"] in told.text for one in found["best"]) and len(told.text.split()) <= 170
    assert found["elsewhere"]["gain"] > found["elsewhere"]["here"]


def test_a_ladder_of_one_size_names_no_other(rungs):
    own = rungs[rungs["size"].astype(str) == first.story(rungs, pd.DataFrame())["size"]]
    assert first.story(own, pd.DataFrame())["elsewhere"] is None
    [told] = tell(first.PART, given(**{"ladder.rungs": own}))
    assert "What helps depends" not in told.text


def test_a_change_that_gains_nothing_somewhere_is_said(rungs):
    found = advice.advice(rungs, *[pd.DataFrame()] * 4)
    for rung, change in found["changes"].items():
        own = rungs[(rungs["rung"] == rung) & rungs["gain"].notna()]
        sure = (own["gain"] > 1 + first.HELPS) & (own["gain_low"] > 1)
        gains = own.loc[sure, "gain"]
        assert change["most"]["gain"] == gains.max() and change["least"]["gain"] == gains.min()
        assert {one["size"] for one in change["idle"]} == set(own.loc[~sure, "size"].astype(str))
    assert found["checkpoints"] is None
    [told] = tell(advice.PART, given(**{"ladder.rungs": rungs}))
    assert "Out of memory" not in told.text and told.text.count("\n|") > 5
    assert len({row.count(" | ") for row in told.text.splitlines() if row.startswith("| ")}) == 1


def test_no_shape_is_in_the_range_of_gains_and_among_those_without_one(rungs):
    changes = advice.advice(rungs, *[pd.DataFrame()] * 4)["changes"]
    for change in changes.values():
        idle = {(one["size"], int(context)) for one in change["idle"] for context in one["contexts"]}
        assert not idle & {(one["size"], one["context"]) for one in (change["least"], change["most"])}


def test_what_leaving_a_change_out_costs_is_told_where_it_was_measured(rungs):
    """A ratio to the finished step, of each shape that has one; no column where none has."""
    found = advice.advice(rungs, *[pd.DataFrame()] * 4)
    own = rungs[(rungs["rung"] == "without_sdpa") & (rungs["status"] == "ok")]
    without = found["changes"]["sdpa"]["without"]
    assert [shape["over_finished"] for shape in without] == own["over_finished"].tolist() != []
    change, sure = found["changes"]["sdpa"], [one["over_finished"] for one in without if one["surely"]]
    assert (change["lost_least"]["over_finished"], change["lost_most"]["over_finished"]) == (min(sure), max(sure))
    assert len(sure) + len(change["not_lost"]) == len(without) > 2
    assert found["changes"]["tf32"]["without"] == [] and found["left_out"]
    same = rungs.assign(over_finished_low=0.9)
    unsure = advice.advice(same, *[pd.DataFrame()] * 4)["changes"]["sdpa"]["without"]
    assert unsure and not any(shape["surely"] for shape in unsure)
    kept = rungs[rungs["kind"] != "left_out"]
    assert not advice.advice(kept, *[pd.DataFrame()] * 4)["left_out"]
    texts = [tell(advice.PART, given(**{"ladder.rungs": table}))[0].text for table in (rungs, same, kept)]
    assert "not surely" in texts[1] and "left out" in texts[0] and "left out" not in texts[2]
    assert len({row.count(" | ") for row in texts[2].splitlines() if row.startswith("| ")}) == 1


def test_the_story_says_in_how_many_processes_and_from_where_it_is_left_out(rungs):
    found = first.story(rungs, pd.DataFrame())
    own = of_shape(rungs, found["size"]).set_index("rung")
    assert found["processes"] <= own.loc["fp32", "processes"]
    less = rungs[~rungs["rung"].isin(["fill", "hugging_face"])].assign(over_hugging_face=np.nan)
    bare = first.story(less, pd.DataFrame())
    assert bare["beside"] is None and bare["clocks"]["beside_mhz"] is None
    [told] = tell(first.PART, given(**{"ladder.rungs": less}))
    assert "Hugging Face" not in told.text


def test_clocks_that_differ_are_told_of_on_the_first_screen(rungs):
    """Of the first rung and the fastest, and of what is beside them; nothing where they are alike or unknown."""
    found = first.story(rungs, pd.DataFrame())
    own = of_shape(rungs, found["size"])
    fastest = own.loc[own["median_ms"] == found["best_ms"], "sm_clock_mhz"].item()
    assert (found["clocks"]["first_mhz"], found["clocks"]["best_mhz"]) == (own["sm_clock_mhz"].iloc[0], fastest)
    [told] = tell(first.PART, given(**{"ladder.rungs": rungs}))
    assert f"{fastest:,.0f} MHz" in told.text
    for mhz in (1980.0, np.nan):
        alike = rungs.assign(sm_clock_mhz=mhz)
        assert first.story(alike, pd.DataFrame())["clocks"] is None
        assert "MHz" not in tell(first.PART, given(**{"ladder.rungs": alike}))[0].text


def test_gains_at_unlike_clocks_are_marked(rungs):
    """A rung against the one before it, a rung left out against the finished step."""
    own = of_shape(rungs, "2.7B")
    clock = own.set_index("rung")["sm_clock_mhz"]
    changes = advice.advice(own, *[pd.DataFrame()] * 4)["changes"]
    [without] = changes["sdpa"]["without"]
    assert without["unlike"] == (abs(1 - clock["without_sdpa"] / clock["overlap"]) > 0.015)
    assert changes["no_casts"]["most"]["unlike"] == (abs(1 - clock["no_casts"] / clock["cuda_graphs"]) > 0.015)
    [told] = tell(advice.PART, given(**{"ladder.rungs": rungs}))
    [same] = tell(advice.PART, given(**{
        "ladder.rungs": rungs.assign(sm_clock_mhz=1980.0, sm_clock_mhz_before=1980.0)}))
    assert "†" in told.text and "†" not in same.text


def test_gains_of_one_process_and_of_processes_that_differ_are_marked(rungs):
    alike = rungs.assign(fastest_ms=10.0, slowest_ms=10.1, processes=3)
    apart, one = alike.assign(slowest_ms=12.0), alike.assign(processes=1)
    texts = [tell(advice.PART, given(**{"ladder.rungs": table}))[0].text for table in (alike, apart, one)]
    assert [("\\*" in text, "¹" in text) for text in texts] == [(False, False), (True, False), (False, True)]
    without = advice.advice(one, *[pd.DataFrame()] * 4)["changes"]["sdpa"]["without"]
    assert all(shape["one"] and not shape["paced"] for shape in without)


def test_a_gain_that_is_not_sure_is_none(rungs):
    """Where each interval holds 1 nothing is said to have helped, and no headline says so."""
    unsure = rungs.assign(gain_low=0.9, times_as_fast_low=0.9)
    assert not first.story(unsure, pd.DataFrame())["gains"]
    [told] = tell(first.PART, given(**{"ladder.rungs": unsure}))
    [sure] = tell(first.PART, given(**{"ladder.rungs": rungs}))
    assert "no rung" in told.text and "no rung" not in sure.text
    changes = advice.advice(unsure, *[pd.DataFrame()] * 4)["changes"]
    assert all(change["most"] is None for change in changes.values())
    assert {one["size"] for one in changes["bf16"]["idle"]} == set(rungs["size"].astype(str))
    [told] = tell(advice.PART, given(**{"ladder.rungs": unsure}))
    assert told.text.count("none sure") == len(changes)


def test_advice_says_from_how_many_processes(rungs):
    found = advice.advice(rungs.assign(processes=3), *[pd.DataFrame()] * 4)
    assert (found["fewest"], found["most"], found["alike"]) == (3, 3, True)
    [told] = tell(advice.PART, given(**{"ladder.rungs": rungs.assign(processes=3)}))
    assert "3 processes" in told.text
    one = rungs.assign(processes=[1 + index % 3 for index in range(len(rungs))])
    assert not advice.advice(one, *[pd.DataFrame()] * 4)["alike"]


def test_bf16_slower_than_tf32_is_said_where_every_process_says_so(rungs):
    mixed = tables("mixed_precision")
    found = advice.advice(rungs, *[pd.DataFrame()] * 3, mixed["speedups"], mixed["other_times"])["bf16_slower"]
    steps = [table[(table["mode"] == "step") & (table["phase"] == "step")].astype({"size": str}).set_index(
        ["size", "context_length", "run_id", "precision"])["median_ms"].unstack()
        for table in (mixed["speedups"], mixed["other_times"])]
    slower = pd.concat(steps)[["tf32", "bf16"]].dropna().diff(axis=1)["bf16"] > 0
    by_shape = slower.groupby(["size", "context_length"])
    always = by_shape.all()
    assert {(size, one["context"]) for one in found["always"] for size in one["sizes"]} == {*always.index[always]}
    assert found["sometimes"] == (by_shape.any() & ~always).sum()
    alone = advice.advice(rungs, *[pd.DataFrame()] * 3, mixed["speedups"])["bf16_slower"]
    assert alone["sometimes"] == 0 and advice.advice(rungs, *[pd.DataFrame()] * 4)["bf16_slower"] is None
    own = {name: mixed[name].astype({"size": str}).replace({"size": {"large": "d8 f8"}})
           for name in ("speedups", "other_times")}  # a shape of one's own has no name among the sizes
    named = advice.advice(rungs, *[pd.DataFrame()] * 3, *own.values())
    assert "d8 f8" in {size for one in named["bf16_slower"]["always"] for size in one["sizes"]}
    assert named["tf32_idle"][0]["sizes"][-1] == "d8 f8"


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
    assert "2.00x faster" in text and "2.00x slower" in text and "0.5" not in text
    assert "also" not in told_of(versions(times, [2.0, 3.0])) and "slower" not in told_of(versions(times, [2.0, 3.0]))
    assert "faster" not in told_of(versions(times, [0.5, 0.4]))


def test_samples_that_are_not_steady_are_said_to_be(times):
    """A difference of single processes is said to be one, and of unsteady samples marked as such."""
    calm = versions(times, [2.0, 3.0]).assign(flags="")
    noisy = calm.assign(flags=calm["flags"].mask(calm["run_id"] == "other", "noisy"))
    assert "one process each" in told_of(calm) and "unsteady" not in told_of(calm)
    assert "unsteady" in told_of(noisy)
    found = first.compared(noisy, pd.DataFrame())
    assert found["pairs"]["unsteady"].all() and found["unsteady"]
    assert all("†" in way for way in first.pairs(found)["bf16 is"])


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
