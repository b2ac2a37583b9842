"""The chapter on compiling says what the H200 records say, and other things of other records."""
import pandas as pd
import pytest

from reference import tables
from stepscope.report.story.compiling import PART, cost, cost_table, draw_gain, gain, gain_title, settled
from stepscope.report.story.part import tell
from stepscope.studies.compile.pairs import beside

NOTHING = pd.DataFrame()
INTERVAL = ["median_ms", "ci_low_ms", "ci_high_ms"]
RUNGS = pd.DataFrame({"rung": ["blocks", "graph", "cuda_graphs"], "kind": "rung", "status": "ok", "size": "2.7B",
                      "context_length": 512, "vocab_size": 10000, "median_ms": 100.0, "compile_s": [11.0, 70.0, 11.0],
                      "gain": [1.3, 1.0, 1.01], "gain_low": [1.2, 0.99, 1.005]})


@pytest.fixture(scope="module")
def times():
    return tables("compile")["times"]


def scaled(times, factor, query):
    """Times of some rows multiplied."""
    times = times.copy()
    rows = times.query(query).index
    times.loc[rows, INTERVAL] *= factor
    return times


def told(times, **replaced):
    asked = {name for question in PART.questions for name in (*question.needs, *question.uses)}
    given = dict.fromkeys(asked, NOTHING) | {"compile.times": times} | replaced
    return tell(PART, given)


def median_ms(times, **cell):
    rows = times[(times["phase"] == "step") & (times["optimizer"] == "foreach")]
    for column, value in cell.items():
        rows = rows[rows[column].astype(str) == value]
    return rows["median_ms"].min()


def test_gains_are_ratios_of_medians_of_one_process(times):
    found = gain(times, NOTHING, NOTHING)
    best = {one["precision"]: one["speedups"].max() for one in found["backward"]}
    own = {"size": "large", "precision": "bf16", "mode": "forward_backward", "attention": "eager"}
    assert best["bf16"] >= (median_ms(times, variant="eager", **own) / median_ms(times, variant="block", **own))
    assert found["all_faster"] and found["written_more"] and found["steps"][0]["precision"] == "bf16"
    after = times.query("variant == 'block' and mode == 'step' and optimizer == 'foreach' and phase != 'step'"
                        " and precision == 'bf16'")
    shares = after.set_index("phase").groupby(["run_id", "attention"])["median_ms"].apply(
        lambda phases: phases["optimizer"].iloc[0] / phases.sum()
        if not isinstance(phases["optimizer"], float) else phases["optimizer"] / phases.sum())
    assert found["adamw"]["share_after"] == pytest.approx(shares.max())


def test_of_several_processes_the_one_with_the_least_disturbed_eager_step_is_told(times):
    own = times[(times["size"].astype(str) == "medium") & (times["precision"] == "bf16")]
    own = own[own["run_id"] == settled(beside(own))["run_id"].iloc[0]]
    slow = own.assign(run_id="another")
    slow.loc[slow["variant"] == "eager", INTERVAL] *= 3
    both = settled(beside(pd.concat([own, slow], ignore_index=True)))
    assert set(both["run_id"]) == set(own["run_id"]) and len(both) == len(settled(beside(own)))


def test_other_records_take_other_words(times):
    slower = scaled(times, 4, "variant == 'block'")
    found = gain(slower, NOTHING, NOTHING)
    assert not found["all_faster"] and found["slower"] and "Slower are" in told(slower)[0].text
    assert "Slower are" not in told(times)[0].text
    steps = settled(beside(slower)).query("mode == 'step'")
    assert gain_title(steps) == "Compiling makes no bf16 step faster"
    near = {"processes.spread": tables("processes")["spread"].assign(between_share=0.001)}
    assert "fused=True" in told(times, **near)[0].more
    # What two processes may differ by is no gain.
    far = {"processes.spread": near["processes.spread"].assign(between_share=1.0)}
    assert not any("fused=True" in told(times, **spread)[0].more for spread in ({}, far))
    assert "fused=True" not in told(times[times["optimizer"] == "foreach"], **near)[0].more
    assert "clock" not in told(times.assign(sm_clock_mhz=1980.0))[0].more


def test_blocks_pay_after_their_seconds_over_what_a_step_saves(times):
    found = cost(times, NOTHING)
    row = found["table"].set_index(found["table"]["size"].astype(str)).loc["2.7B"]
    own = {"size": "2.7B", "precision": "bf16", "attention": "sdpa", "mode": "step"}
    saved_s = (median_ms(times, variant="eager", **own) - median_ms(times, variant="block", **own)) / 1e3
    assert row["earned"] == pytest.approx(row["block_s"] / saved_s)
    passes = times[(times["variant"] == "block") & (times["mode"] == "forward_backward") & (times["phase"] == "step")
                   & (times["size"].astype(str) == "2.7B") & (times["precision"] == "bf16")
                   & (times["optimizer"] == "foreach")]
    assert row["block_s"] == pytest.approx(((passes["first_ms"] - passes["median_ms"]) / 1e3).max())  # the cold one
    assert found["table_of"] == {"precision": "bf16", "attention": "SDPA", "context": 512}
    assert len(cost_table(found)) == len(found["table"]) <= 8
    never = cost(scaled(times, 4, "variant == 'block'"), NOTHING)
    assert never["table"]["earned"].isna().all() and "blocks pay after, steps" not in cost_table(never)


def test_the_whole_forward_is_told_where_it_was_run_and_by_the_ladder(times):
    found = cost(times, RUNGS)
    both = settled(beside(times, "block", "model")).query("mode == 'step'")
    better, rows = found["better"], found["table"].set_index(found["table"]["size"].astype(str))
    assert 0 < better["many"] < better["steps"] == len(both) and better["most"]["times"] == both["speedup"].max()
    own = both[(both["precision"] == "bf16") & (both["attention"] == "sdpa")].set_index("size")["speedup"]
    assert {size: one["speedup"] for size, one in rows["model"].dropna().items()} == own.to_dict()
    assert (found["rungs"]["graph"]["compile_s"], found["rungs"]["blocks"]["compile_s"]) == (70, 11)
    assert not found["rungs"]["graph"]["helps"] and "gains nothing" in told(times, **{"ladder.rungs": RUNGS})[1].more
    helping = RUNGS.assign(gain=1.2, gain_low=1.1)
    assert "gains nothing" not in told(times, **{"ladder.rungs": helping})[1].more
    alone = times[times["variant"].isin(["eager", "block"])]
    found = cost(alone, NOTHING)
    assert found["better"] is None and "One graph" not in told(alone)[1].more


def test_cuda_graphs_are_told_where_they_were_run(times):
    times = times[~times["variant"].eq("cuda_graphs")]
    model = times[(times["variant"] == "model") & (times["size"].astype(str) == "medium")
                  & (times["precision"] == "bf16")].assign(variant="cuda_graphs", cudagraph_skips=0.0)
    model[INTERVAL] /= 2
    both = pd.concat([times, model], ignore_index=True)
    assert cost(both, NOTHING)["graphs"] and not cost(times, NOTHING)["graphs"]
    assert "CUDA graphs" in told(both)[1].more and "CUDA graphs" not in told(times)[1].more
    model[INTERVAL] *= 4
    assert not cost(pd.concat([times, model], ignore_index=True), NOTHING)["graphs"]


def test_the_picture_has_a_dot_for_each_pair_and_none_without(times):
    drawn = draw_gain(times, "here")
    dots = sum(len(line.get_xdata()) for axis in drawn.axes for line in axis.lines if line.get_linestyle() == "None")
    both = settled(beside(times))
    assert dots == (both["mode"] == "step").sum() == gain(times, NOTHING, NOTHING)["shown"]
    assert draw_gain(NOTHING, "here") is None and draw_gain(times[times["variant"] == "block"], "here") is None


def test_without_records_nothing_is_said(times):
    assert told(NOTHING) == []
    assert gain(times[times["variant"] == "eager"], NOTHING, NOTHING) is None
    assert cost(times[times["variant"] == "eager"], NOTHING) is None
    one = times[times["run_id"] == times["run_id"].iloc[0]]
    assert all("nan" not in a.text + a.more for a in told(one))
