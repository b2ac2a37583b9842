"""The warm-up study's facts on the committed runs and on data changed; its words follow."""
import pandas as pd
import pytest

from reference import answered, changed, tables
from stepscope.studies.warmup import facts, printed


@pytest.fixture(scope="module")
def samples():
    return tables("warmup")["samples"]


@pytest.fixture(scope="module")
def costs():
    return tables("warmup")["costs"]


def of_step(index):
    return lambda t: (t["step"] == index) & (t["phase"] == "step")


@pytest.fixture(scope="module")
def benchmarks():
    return tables("benchmark")["samples"]


NONE = pd.DataFrame()


def test_of_too_few_steps_nothing_is_told(samples):
    assert facts.what_changes(samples[samples["step"] < 2], NONE) is None


def test_without_a_warm_up_the_mean_is_above_steady(samples):
    found = facts.what_changes(samples, NONE)
    assert found["cold"]["mean"]["above"] and not found["cold"]["mean"]["small"]
    slower = changed(samples, of_step(0), time_ms=lambda t: t["time_ms"] * 3)
    assert facts.what_changes(slower, NONE)["cold"]["mean"]["high"] > found["cold"]["mean"]["high"]
    level = facts.what_changes(samples.assign(time_ms=100.0), NONE)
    assert level["cold"]["mean"]["small"] and level["cold"]["mean"]["furthest"] == 0
    texts = {answered("warmup", "warmup", samples=table, **{"benchmark.samples": NONE}).text
             for table in (samples, samples.assign(time_ms=100.0))}
    assert len(texts) == 2


def process(times, **fields):
    """One process's whole steps, as the samples of all runs hold them."""
    run = {"study": "warmup", "run_id": "one", "size": "small", "context_length": 128, "mode": "forward",
           "precision": "fp32", "attention": "eager", "compile": False, "optimizer": "foreach", "phase": "step",
           "sm_clock_mhz": 1980.0} | fields
    return pd.DataFrame([run | {"step": i, "timed": True, "time_ms": t} for i, t in enumerate(times)])


def test_to_leave_out_the_first_steps_is_to_have_them_as_warm_up():
    cold = process([50.0, 12.0] + [10.0] * 13)
    found = {row["warmups"]: row for row in facts.what_changes(cold, NONE)["by_warmups"]}
    assert found[0]["mean"]["high"] == pytest.approx((50 + 12 + 80) / 100 - 1)
    assert found[1]["mean"]["high"] == pytest.approx((12 + 90) / 100 - 1) and found[2]["mean"]["high"] == 0
    assert all(row["median"]["high"] == 0 for row in found.values())
    short = facts.what_changes(process([50.0] + [10.0] * 4), NONE)
    assert [row["warmups"] for row in short["by_warmups"]] == [0]  # what is left of the others is too little


def test_a_row_of_the_table_is_over_the_sizes_of_a_mode_and_context():
    both = pd.concat([process([50.0] + [10.0] * 14),
                      process([50.0, 30.0, 20.0] + [10.0] * 12, run_id="two", size="large"),
                      process([10.0] * 15, run_id="three", context_length=512)], ignore_index=True)
    table = facts.what_changes(both, NONE)["table"].set_index("context_length")
    assert table["slow"].to_dict() == {128: 3, 512: 0} and table["processes"].to_dict() == {128: 2, 512: 1}
    assert table.loc[128, "mean_0"] == pytest.approx(0.7) and table.loc[512, "mean_0"] == 0
    assert len(printed.means({"table": table.reset_index()})) == 2


def test_the_benchmarks_processes_count_too(samples, benchmarks):
    alone, both = facts.enough(samples, NONE), facts.enough(samples, benchmarks)
    assert both["processes"] == alone["processes"] + facts.enough(NONE, benchmarks)["processes"]
    assert {row["mode"] for _, row in facts.what_changes(samples, benchmarks)["table"].iterrows()} == {
        "forward", "forward_backward", "step"}
    assert both["more_than_one"] > 0 and both["slowest"]["context_length"] < 512  # there the host sets the pace
    assert both["clocks_alike"] == (pd.concat([samples, benchmarks])["sm_clock_mhz"].nunique() == 1)


def test_processes_in_which_something_ran_before_are_not_cold(samples):
    for before in ("one_layer_first", "profile"):
        primed = samples.assign(**{before: True})
        assert facts.what_changes(primed, NONE) is None and facts.enough(primed, NONE) is None
    assert facts.what_changes(NONE, NONE) is None


def test_slow_steps_are_counted_from_the_first_to_the_first_that_is_not():
    def slow(*times):
        return facts.enough(process([*times] + [10.0] * 10), NONE)
    level, one, two, later = slow(10.0), slow(50.0), slow(50.0, 10.3), slow(50.0, 10.1, 30.0)
    assert level["none_slow"] and level["one_was_enough"] and level["most"] == 0
    assert one["most"] == 1 and one["one_was_enough"] and not one["none_slow"]
    assert two["most"] == 2 and not two["one_was_enough"] and two["more_than_one"] == 1
    assert later["most"] == 1 and not later["three"]  # its third is slow, but not its second
    assert two["second_furthest"] == pytest.approx(0.03) and not two["three"]
    three = slow(50.0, 12.0, 10.5)
    assert three["three"] and three["third_furthest"] == pytest.approx(0.05)
    assert two["slow_counts"] == [{"steps": 2, "processes": 1}]
    restless = facts.enough(process([50.0, 10.3] + [10.0, 10.0, 10.0, 10.0, 10.5] * 2), NONE)
    assert (two["scattered"], restless["scattered"]) == (0, 1) and restless["slow_counts"] == two["slow_counts"]
    texts = {answered("warmup", "enough", samples=process([*times] + [10.0] * 10), **{"benchmark.samples": NONE}).text
             for times in ([10.0], [50.0], [50.0, 10.3])}
    assert len(texts) == 3


def test_the_first_steps_extra_is_told_by_phase(samples, benchmarks):
    extra = facts.extra_by_phase(facts.first_steps(samples, benchmarks))
    assert list(extra["mode"])[:3] == ["forward", "forward_backward", "step"]
    step = extra[extra["mode"] == "step"].iloc[0]
    assert step["forward_low"] > step["backward_low"] > 0 and step["step_high"] >= step["step_low"] > 0
    assert extra.loc[extra["mode"] == "forward", "backward_low"].isna().all()
    made = process([50.0] + [10.0] * 9, phase="forward")
    made = pd.concat([made, process([51.0] + [10.0] * 9), process([31.0] + [10.0] * 9, context_length=512,
                                                                  run_id="two")], ignore_index=True)
    [row] = facts.extra_by_phase(facts.first_steps(made)).to_dict("records")
    assert (row["forward_low"], row["forward_high"], row["step_low"], row["step_high"]) == (40, 40, 21, 41)


def beyond_ms(costs, cold, primed):
    """What the first step takes beyond a steady one, in a cold process and after a one-layer model."""
    return changed(costs, lambda t: t["part"] == facts.BEYOND,
                   time_ms=lambda t: t["one_layer_first"].astype(bool).map({True: primed, False: cold}))


@pytest.mark.parametrize("primed, clear", [(10.0, True), (180.0, True), (500.0, False)])
def test_what_is_done_once_a_process_is_decided_by_the_data(costs, primed, clear):
    table = beyond_ms(costs, 200.0, primed)
    once = facts.first_step(table, NONE, NONE, NONE)["once"]
    assert once["clear"] == clear
    assert list(once["ms"]) == pytest.approx([200.0 - primed] * len(once["ms"]))


def test_without_a_one_layer_model_nothing_is_said_of_it(costs):
    found = facts.first_step(costs[~costs["one_layer_first"].astype(bool)], NONE, NONE, NONE)
    assert found["once"] is None and found["purposes"] is None
    assert found["by_phase"] is None and printed.phases(found) is None
    assert facts.first_step(costs[costs["one_layer_first"].astype(bool)], NONE, NONE, NONE) is None
