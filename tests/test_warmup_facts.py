"""The warm-up study's facts on the committed runs and on data changed; its words follow."""
import pandas as pd
import pytest

from reference import answered, changed, tables
from stepscope.studies.warmup import facts


@pytest.fixture(scope="module")
def samples():
    return tables("warmup")["samples"]


@pytest.fixture(scope="module")
def costs():
    return tables("warmup")["costs"]


def of_step(index):
    return lambda t: (t["step"] == index) & (t["phase"] == "step")


def test_without_a_warm_up_the_mean_is_above_steady(samples):
    found = facts.what_changes(samples)
    assert found["cold"]["error"]["above"] and not found["cold"]["error"]["small"]
    slower = changed(samples, of_step(0), time_ms=lambda t: t["time_ms"] * 3)
    assert facts.what_changes(slower)["cold"]["error"]["high"] > found["cold"]["error"]["high"]
    level = facts.what_changes(samples.assign(time_ms=100.0))
    assert level["cold"]["error"]["small"] and level["cold"]["error"]["furthest"] == 0
    assert (
        answered("warmup", "warmup", samples=samples.assign(time_ms=100.0)).text
        != answered("warmup", "warmup").text
    )


def test_processes_in_which_something_ran_before_are_not_cold(samples):
    primed = samples.assign(one_layer_first=True)
    assert facts.what_changes(primed) is None and facts.enough(primed) is None
    assert facts.what_changes(samples[samples["warmup_steps"] > 0])["cold"] is None


def test_how_many_warm_up_steps_are_enough_is_decided_by_the_samples(samples):
    level = samples.assign(time_ms=100.0)
    assert facts.enough(level)["one_was_enough"] and facts.enough(level)["last_late_step"] is None
    second = changed(level, of_step(1), time_ms=200.0)
    assert facts.enough(second)["two_were_enough"] and not facts.enough(second)["one_was_enough"]
    late = facts.enough(changed(level, of_step(3), time_ms=200.0))
    assert late["last_late_step"] == 4 and late["late"] == late["late_processes"] > 0
    assert not late["one_was_enough"] and not late["two_were_enough"]
    texts = {answered("warmup", "enough", samples=table).text for table in
             (level, second, changed(level, of_step(3), time_ms=200.0))}
    assert len(texts) == 3


def beyond_ms(costs, cold, primed):
    """What the first step takes beyond a steady one, in a cold process and after a one-layer model."""
    return changed(costs, lambda t: t["part"] == facts.BEYOND,
                   time_ms=lambda t: t["one_layer_first"].astype(bool).map({True: primed, False: cold}))


@pytest.mark.parametrize(
    "primed, clear, most", [(10.0, True, True), (180.0, True, False), (500.0, False, False)]
)
def test_what_loading_costs_is_decided_by_the_data(costs, primed, clear, most):
    table = beyond_ms(costs, 200.0, primed)
    loading = facts.first_step(table, pd.DataFrame())["loading"]
    assert (loading["clear"], loading["most"]) == (clear, most)
    assert list(loading["ms"]) == pytest.approx([200.0 - primed] * len(loading["ms"]))
    assert bool(answered("warmup", "first-step", costs=table).finding) == clear


def test_without_a_one_layer_model_nothing_is_said_of_loading(costs):
    found = facts.first_step(costs[~costs["one_layer_first"].astype(bool)], pd.DataFrame())
    assert found["loading"] is None and found["memory_calls"] is None and found["purposes"] is None
    assert facts.first_step(costs[costs["one_layer_first"].astype(bool)], pd.DataFrame()) is None
