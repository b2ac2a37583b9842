"""Who waits for whom: the launch queue, the verdict, the committed profiles, and the study that tries it."""
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from reference import tables as of_study
from stepscope.config import configure
from stepscope.say.words import Words
from stepscope.studies.nsys import measure as profiles
from stepscope.studies.nsys.facts import every_phase
from stepscope.studies.waits import facts, printed
from stepscope.studies.waits import measure as trial
from stepscope.studies.waits.tables import arm_phases
from stepscope.traces.waits import (
    CONFIGURATION,
    ENOUGH,
    FULL_QUEUE,
    GPU,
    HOST,
    NEITHER,
    QUEUE,
    TOLD,
    UNDECIDED,
    beside_captures,
    captured_phases,
    launch_queue,
    who_waits,
)

EXPORT = Path(__file__).parent / "data" / "nsys" / "step.sqlite"
LONG = 30_000  # ns


def operations(*rows):
    return pd.DataFrame(rows, columns=["start_ns", "duration_ns", "launch_ns", "call"]).astype(
        {"launch_ns": "Int64"})


def test_the_queue_counts_launches_that_have_begun_and_whose_work_has_not():
    queue = launch_queue(operations((100, 50, 0, 1), (200, 50, 10, 2), (300, 50, 20, 3), (400, 5, 350, 4)))
    assert queue["pending"].tolist() == [1, 2, 3, 1]


def test_operations_of_one_call_are_one_launch_and_one_without_a_call_waits_for_none():
    queue = launch_queue(operations((100, 50, 0, 1), (150, 50, 0, 1), (210, 50, 10, 2), (300, 5, None, -2)))
    assert queue["pending"].tolist() == [1, 1, 2, 0]


def test_only_gaps_before_what_was_launched_long_before_are_the_devices():
    queue = launch_queue(operations((LONG, LONG, 0, 1), (2 * LONG + 1500, LONG, 10, 2),
                                    (4 * LONG, 10, 3 * LONG + 1500, 3)))
    assert queue["queued_gap_ns"].isna().tolist() == [True, False, True]
    assert queue["queued_gap_ns"][1] == 1500


def test_the_order_of_rows_says_nothing():
    rows = operations((LONG, LONG, 0, 1), (2 * LONG + 1500, LONG, 10, 2), (4 * LONG, 10, 20, 3))
    turned = launch_queue(rows[::-1])
    pd.testing.assert_frame_equal(turned.sort_index(), launch_queue(rows))


@pytest.mark.parametrize("plain_ms, deepest, verdict", [
    (10.0, 5, NEITHER), (10.5, 5, NEITHER), (10.6, 5, GPU), (20.0, 5, GPU), (20.0, FULL_QUEUE, HOST),
    (10.0, FULL_QUEUE, HOST), (float("nan"), 5, UNDECIDED), (float("nan"), FULL_QUEUE, HOST)])
def test_the_verdict(plain_ms, deepest, verdict):
    phase = pd.DataFrame([{"plain_ms": plain_ms, "operations_ms": 9.0, "operations": 1000, "gap_us": 1.0,
                           "deepest": deepest}])
    found = who_waits(phase).iloc[0]
    assert found.waits == verdict and found.back_to_back_ms == 10
    if verdict == GPU:
        assert found.waited_ms == pytest.approx(plain_ms - 10)
    assert who_waits(phase.assign(gap_us=np.nan, deepest=5))["waits"].tolist() == [UNDECIDED]


def test_a_short_phase_may_be_longer_by_the_marks_at_its_ends():
    loss = pd.DataFrame([{"plain_ms": 0.030, "operations_ms": 0.025, "operations": 2, "gap_us": 0.0,
                          "deepest": 2}])
    assert who_waits(loss)["waits"].tolist() == [NEITHER]


def test_a_timeline_tells_of_the_queue_what_the_clocks_of_its_step_do():
    tables = {name: table.assign(run_id="one", mode="step") for name, table in profiles.analyse(EXPORT).items()}
    clocks, timeline = tables["clocks"], tables["timeline"]
    first = clocks[clocks["step"] == 0]
    told = captured_phases(first, timeline).set_index("phase")
    by_timeline = captured_phases(first.drop(columns=QUEUE), timeline).set_index("phase")
    pd.testing.assert_frame_equal(told, by_timeline)
    assert told["gap_us"].between(0.5, 5).all() and told.loc["forward", "captured_steps"] == 1
    nothing = captured_phases(first.drop(columns=QUEUE), timeline[:0])
    assert nothing[["deepest", "gap_us"]].isna().all(axis=None)
    assert captured_phases(clocks, timeline)["spread"].between(0, 0.05).all()


def test_a_phase_with_few_gaps_has_its_modes():
    clocks = pd.DataFrame({"run_id": "one", "mode": "step", "phase": ["loss", "backward"], "step": 0,
                           "operations_ns": 1e6, "operations": 5, "projected_ns": 1e6, "deepest": 3,
                           "queued_gaps": [ENOUGH - 1, ENOUGH], "queued_gap_ns": [0, 2000 * ENOUGH]})
    gaps = captured_phases(clocks, pd.DataFrame()).set_index("phase")["gap_us"]
    assert gaps["backward"] == 2 and gaps["loss"] == pytest.approx(2 * ENOUGH / (2 * ENOUGH - 1))


@pytest.fixture(scope="module")
def committed():
    """Every phase of the committed benchmark runs beside its capture."""
    times, captured = of_study("benchmark")["times"], of_study("nsys")["phases"]
    return beside_captures(times[times["phase"] != "step"].rename(columns={"median_ms": "plain_ms"}), captured)


def test_of_the_captured_processes_time_and_queue_agree():
    """Two measurements that know nothing of each other, of one process: where the queue was full nothing was
    waited for, and where the GPU waits the queue was all but empty when the host left the phase."""
    nsys = of_study("nsys")
    rows = every_phase(nsys["phases"], nsys["operations"], nsys["walls"], of_study("benchmark")["times"])["by_phase"]
    long = rows[rows["plain_ms"] > 1]
    full, waits = long[long["waits"] == HOST], long[long["waits"] == GPU]
    assert len(full) and len(waits)
    assert (full["plain_ms"] < 1.05 * full["back_to_back_ms"]).all()
    assert (waits["deepest"] < FULL_QUEUE / 5).all()
    assert long["busy_share"].between(0.1, 1.02).sum() == long["waits"].ne(UNDECIDED).sum()


def test_a_full_queue_is_never_waited_for_in_the_benchmarks_processes_either(committed):
    full = committed[(committed["waits"] == HOST) & (committed["plain_ms"] > 1)]
    assert len(full) and (full["plain_ms"] < 1.05 * full["back_to_back_ms"]).all()


def test_the_committed_verdicts_are_those_of_the_recomputed_sums(committed):
    """By operations.parquet and 1.7 us a gap, which is neither the table nor the gap that facts use."""
    operations, keys = of_study("nsys")["operations"], ["size", "context_length", "mode", "phase"]
    sums = operations[operations["phase"] != "loss"].groupby(keys, observed=True).agg(
        ns=("total_ns", "sum"), count=("count", "sum"), steps=("steps", "first")).reset_index()
    sums["back_ms"] = (sums["ns"] + 1700 * sums["count"]) / sums["steps"] / 1e6
    both = committed[committed["optimizer"] == "foreach"].astype({"size": str}).merge(
        sums.astype({"size": str}), on=keys)
    assert len(both) == 120
    over = both["plain_ms"] / both["back_ms"] - 1
    assert (both["waits"] == GPU)[over > 0.1].all()
    assert not (both["waits"] == GPU)[over < 0].any()


def test_what_was_captured_of_other_work_tells_nothing(committed):
    captured = of_study("nsys")["phases"]
    for column, other in (("attention", "sdpa"), ("optimizer", "forloop"), ("precision", "tf32"),
                          ("batch_size", 5)):
        assert column in CONFIGURATION
        plain = committed.drop(columns=["waits", *TOLD])
        assert (beside_captures(plain, captured.assign(**{column: other}))["waits"] == UNDECIDED).all()


# The study that tries it


@pytest.fixture(scope="module")
def on_cpu():
    config = configure("waits", device="cpu", size="nano", vocab_size=50, context_length=8, batch_size=1,
                       warmup_steps=0, timed_steps=2, host_delays_us=[0, 10])
    return trial.measure_arms(config)


def test_every_arm_makes_the_same_calls_and_is_slowed_by_what_is_said(on_cpu):
    tables = on_cpu
    arms = tables["arms"]
    assert arms["arm"].nunique() == 3 and set(arms["gpu_load_us"]) == {0}  # a CPU can be given no GPU's load
    assert arms.groupby("phase")["calls"].nunique().eq(1).all() and (arms["calls"] > 0).all()
    slow = arms[arms["host_delay_us"] == 10]
    assert slow["added_host_ms"].tolist() == pytest.approx((slow["calls"] / 100).tolist())
    assert set(tables["samples"]["arm"]) == set(tables["clocks"]["arm"]) == set(arms["arm"])


def test_a_cpu_has_nothing_to_wait_for(on_cpu):
    tables = on_cpu
    phases = arm_phases(*(tables[name].assign(run_id="one") for name in ("arms", "samples", "clocks")))
    phases = phases.assign(size="nano", context_length=8, device="cpu")
    assert set(phases["waits"]) == {UNDECIDED} and not facts.verdicts(phases)["arises"]
    assert "nothing to wait for" in said(phases) and "nothing to wait for" in facts.reading(phases)


def said(phases):
    return Words(Path(facts.__file__).parent / "words", "waits-follow.md").block("text", facts.verdicts(phases))


def arm(delay, load, plain_ms, back_ms, deepest=10, enqueue_ms=9, operations=0):
    return {"run_id": "one", "size": "small", "context_length": 128, "device": "cuda", "phase": "forward",
            "host_delay_us": delay, "gpu_load_us": load, "plain_ms": plain_ms, "operations_ms": back_ms,
            "operations": operations, "gap_us": 1.0, "deepest": deepest, "enqueue_ms": enqueue_ms,
            "added_host_ms": 0 if np.isnan(delay) else delay, "added_gpu_ms": load / 100}


def test_what_was_done_settles_some_verdicts_and_others_would_be_told():
    arms = [arm(np.nan, 0, 9, 6), arm(0, 0, 12, 6), arm(20, 0, 32, 6), arm(100, 0, 112, 6),
            arm(np.nan, 1500, 21, 21, 300)]
    found = facts.verdicts(who_waits(pd.DataFrame(arms)))
    assert (found["must_wait"], found["waits"], found["cannot_wait"], found["busy"]) == (2, 2, 1, 1)
    assert found["settled"] == 3 and list(found["slopes"]) == [1.0]
    assert printed.arms(found)["verdict"].tolist() == [GPU, GPU, GPU, GPU, NEITHER]
    arms[3]["plain_ms"] = 6  # as if the delay had changed nothing
    wrong = facts.verdicts(who_waits(pd.DataFrame(arms)))
    assert (wrong["must_wait"], wrong["waits"]) == (2, 1)
    arms[4]["plain_ms"] = 30  # as if the GPU had waited all the same
    assert facts.verdicts(who_waits(pd.DataFrame(arms)))["busy"] == 0
    assert facts.verdicts(who_waits(pd.DataFrame(arms[:1])))["slopes"] is None
    assert said(who_waits(pd.DataFrame(arms)))


def test_a_queue_has_to_fill_where_the_load_lets_the_gpu_reach_too_few_blocks():
    def found(deepest, operations=2000, load=2000):  # ten blocks: of 2 ms each the GPU has half when all is enqueued
        rows = [arm(np.nan, 0, 10, 6, operations=operations),
                arm(np.nan, load, 20, 18, deepest, enqueue_ms=18, operations=operations)]
        return facts.verdicts(who_waits(pd.DataFrame(rows)))

    few = found(1022)
    assert (few["must_fill"], few["settled"], few["cannot_wait"]) == (0, 1, 1)
    full = found(1022, load=9000)
    assert (full["must_fill"], full["full"], full["held"].tolist()) == (1, 1, [2.0])
    assert found(300, load=9000)["full"] == 0, "as if the host had not waited"
    assert found(1022, operations=1200, load=9000)["must_fill"] == 0, "not enough of them to fill it"
    assert "queue has to fill" in printed.arms(full)["settled by that"].iloc[1]
    rows = pd.DataFrame([arm(np.nan, 0, 10, 6, operations=2000)])
    assert said(who_waits(rows))
