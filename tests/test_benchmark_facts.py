"""The benchmarking study's facts on the committed runs and on data changed; its words follow."""
import pandas as pd
import pytest

from reference import answered, changed, tables
from stepscope.studies.benchmark import facts, facts_device, facts_published, printed


@pytest.fixture(scope="module")
def times():
    return tables("benchmark")["times"]


@pytest.fixture(scope="module")
def captured():
    return tables("nsys")["phases"]


@pytest.fixture(scope="module")
def ceilings():
    return tables("benchmark")["ceilings"]


def test_backward_over_forward_follows_the_data(times):
    before = facts.how_long(times)
    doubled = changed(times, lambda t: t["phase"] == "backward", median_ms=lambda t: t["median_ms"] * 2)
    after = facts.how_long(doubled)
    assert after["backward_to_forward"].to_list() == pytest.approx(list(2 * before["backward_to_forward"]))
    assert not before["nothing_fits"] and before["several"]
    assert answered("benchmark", "how-long", times=doubled).text != answered("benchmark", "how-long").text


def test_out_of_memory_is_told(times):
    big = (times["size"] == "2.7B") & (times["context_length"] == 1024) & (times["mode"] == "step")
    left = changed(
        times[~big | (times["phase"] == "step")],
        lambda t: big.loc[t.index],
        status="oom",
        median_ms=float("nan"),
        mean_ms=float("nan"),
    )
    found = facts.how_long(left)
    assert found["out_of_memory"] == [{"size": "2.7B", "context_length": 1024, "mode": "step"}]
    assert (printed.walls(found) == "out of memory").to_numpy().sum() == 1
    assert facts.how_long(times)["out_of_memory"] == []
    assert "ut of memory" in answered("benchmark", "how-long", times=left).text


def test_where_nothing_fits_that_is_the_answer(times):
    oom = times[times["phase"] == "step"].assign(status="oom", median_ms=float("nan"), mean_ms=float("nan"))
    found = facts.how_long(oom)
    assert found["nothing_fits"] and printed.phases(found) is None
    answer = answered("benchmark", "how-long", times=oom)
    assert answer.text and len(answer.tables) == 1


def test_unsteady_runs_are_counted(times):
    assert facts.how_variable(times)["flagged_runs"] > 0
    steady = facts.how_variable(times.assign(flags=""))
    assert steady["flagged_runs"] == 0 and printed.unsteady(steady) is None
    assert facts.how_variable(times.assign(std_ms=0.0))["worst_share"] == 0


def test_who_waits_is_decided_by_the_plain_time_beside_the_capture(times, captured):
    found = facts.launch_bound(times, captured)
    assert found["decided"] == found["phases"] == 120 and found["undecided"] == 0
    assert found["waiting"] + found["full"] + found["neither"] == 120 and found["waiting"]
    slow = changed(times, lambda t: t["phase"] == "forward", median_ms=lambda t: t["median_ms"] * 2)
    more = facts.launch_bound(slow, captured)
    assert more["waiting"] > found["waiting"] and more["most"]["waited_share"] > 0.4
    deep = facts.launch_bound(slow, captured.assign(deepest=1022.0))
    assert deep["full"] == 120 and deep["most"] is None and deep["shapes"] == []
    nothing = facts.launch_bound(times, captured[:0])
    assert nothing["decided"] == 0 and nothing["undecided"] == 120 and nothing["unsure"] == deep["unsure"] == 0
    sharp = times.assign(ci_low_ms=times["median_ms"], ci_high_ms=times["median_ms"])
    wide = times.assign(ci_low_ms=0.0, ci_high_ms=1e6)
    assert facts.launch_bound(sharp, captured)["unsure"] == 0
    assert facts.launch_bound(wide, captured)["unsure"] == found["waiting"] + found["neither"]
    assert not facts.launch_bound(times.assign(device="cpu"), captured)["arises"]
    texts = {answered("benchmark", "launch-bound", times=own, **{"nsys.phases": capture}).text
             for own, capture in ((times, captured), (slow, captured), (times, captured[:0]),
                                  (times.assign(device="cpu"), captured))}
    assert len(texts) == 4


def test_a_capture_of_other_work_decides_nothing(times, captured):
    sdpa = facts.launch_bound(times, captured.assign(attention="sdpa"))
    assert sdpa["decided"] == 0
    forward = facts.launch_bound(times, captured[captured["mode"] == "forward"])
    assert (forward["decided"], forward["undecided"]) == (20, 100)
    assert printed.launches(forward)["backward"].eq("not decided").all()


def test_a_whole_steps_share_is_its_phases_together(times, captured):
    rows = facts.with_waits(facts.matrix(times), captured)
    for _, own in rows[rows["mode"] == "step"].groupby("run_id"):
        phases = own[own["phase"] != "step"]
        share = own.loc[own["phase"] == "step", "waited_share"].item()
        assert share == pytest.approx(phases["waited_ms"].sum() / phases["median_ms"].sum())
    none = facts.with_waits(facts.matrix(times), captured[captured["phase"] != "forward"])
    assert none.loc[none["phase"] == "step", "waited_share"].isna().all()


def test_which_optimizer_is_faster_is_decided_by_the_data(times, ceilings):
    spread = spread_of(times, 0.001)
    found = facts.optimizer(times, ceilings, spread)
    assert found["fused_faster"] and found["better"] and not found["worse"] and found["between_known"]
    swapped = times.assign(optimizer=times["optimizer"].map({"foreach": "fused", "fused": "foreach"}))
    other = facts.optimizer(swapped, ceilings, spread)
    assert (
        other["foreach_faster"]
        and not other["better"]
        and len(other["worse"]) == len(found["better"])
    )
    assert list(other["fused_over_foreach"]) == pytest.approx(list(found["foreach_over_fused"]))
    level = times.assign(median_ms=times["phase"].map(lambda phase: 5.0 if phase == "optimizer" else 100.0),
                         ci_low_ms=1.0, ci_high_ms=200.0)
    same = facts.optimizer(level, ceilings, spread)
    assert not (same["fused_faster"] or same["foreach_faster"] or same["better"] or same["worse"])
    assert (
        len({answered("benchmark", "optimizer", times=table, **{"processes.spread": spread}).text
             for table in (times, swapped, level)}) == 3
    )
    assert facts.optimizer(times[times["optimizer"] == "foreach"], ceilings, spread) is None


def spread_of(times, share):
    """Cells measured in several processes whose medians differ by so much."""
    cells = times.loc[times["mode"] == "step", ["size", "context_length", "mode", "phase"]].drop_duplicates()
    return cells.assign(between_share=share, host_ahead_share=0.5)


def test_two_processes_are_told_apart_by_the_spread_between_processes_alone(times, ceilings):
    known, wide, unknown = (facts.optimizer(times, ceilings, spread)
                            for spread in (spread_of(times, 0.001), spread_of(times, 0.2), pd.DataFrame()))
    assert len(known["better"]) == len(known["steps"]) and not wide["better"] and wide["between_known"]
    assert not unknown["between_known"] and not unknown["better"] and not unknown["worse"]
    assert (wide["steps"]["high"] > known["steps"]["high"]).all()
    slower = changed(times, lambda t: t["optimizer"] == "fused", sm_clock_mhz=1700.0)
    assert facts.optimizer(slower, ceilings, pd.DataFrame())["unlike"] == len(known["steps"])
    texts = {answered("benchmark", "optimizer", **{"processes.spread": spread}).text
             for spread in (spread_of(times, 0.001), spread_of(times, 0.2), pd.DataFrame())}
    assert len(texts) == 3


def test_clocks_held_back_are_told_by_samples_and_by_counters(times):
    times = times.drop(columns=[name for name in times if name.startswith(("timed_throttled", "kept_up_", "step_energy"))])
    times = times.assign(sm_clock_mhz=1980.0, sm_clock_least_mhz=1980.0)
    free = facts_device.device_state(times)
    assert free["total"] > 60 and not free["counted"] and free["power_w"] is None is free["energy_check"]
    one = times["run_id"] == times["run_id"].iloc[0]
    slow = times.assign(sm_clock_least_mhz=times["sm_clock_least_mhz"].where(~one, 1395.0))
    assert facts_device.device_state(slow)["held_runs"] == free["held_runs"] + 1
    assert facts_device.device_state(slow)["lowest_mhz"] == 1395
    watched = times.assign(timed_watched_s=2.0, timed_throttled_power_cap_us=0.0, kept_up_power_w=600.0,
                           kept_up_sm_clock_median_mhz=1980.0,
                           kept_up_energy_s=0.4, kept_up_energy_j=240.0, kept_up_energy_polled_j=230.4,
                           kept_up_step_ms=times["median_ms"], step_energy_j=5.0)
    watched["timed_throttled_power_cap_us"] = watched["timed_throttled_power_cap_us"].where(~one, 5e5)
    found = facts_device.device_state(watched)
    assert found["reasons"] == [{"reason": "power_cap", "runs": 1, "most": 0.25}] and found["counted"]
    assert found["energy_check"]["furthest"] == pytest.approx(0.04)
    off = facts_device.energy_check(pd.DataFrame({
        "kept_up_energy_j": 100.0, "kept_up_energy_polled_j": [100.0, 99, 102, 97, 120], "kept_up_energy_s": 0.5,
        "size": "small", "context_length": [1, 2, 3, 4, 5], "mode": "step"}))
    assert (off["median"], off["furthest"], off["at"]["context_length"]) == (pytest.approx(0.02), pytest.approx(0.2), 5)
    assert 0.03 < off["nine_of_ten"] < 0.2 and off["runs"] == 5
    loaded = watched.assign(kept_up_sm_clock_median_mhz=1700.0)
    assert facts_device.device_state(loaded)["slow_runs"] == found["total"]
    assert len({answered("benchmark", "device-state", times=table).text for table in (times, slow, watched)}) == 3
    assert facts_device.device_state(times.assign(sm_clock_mhz=float("nan"))) is None
    few, several = printed.states(facts_device.device_state(slow)), printed.states(found)
    assert printed.states(free) is None and len(few) == 1 and several.shape[1] == few.shape[1] + 4


def test_utilisation_is_against_the_ceilings_of_the_runs(times, ceilings):
    found = facts.utilisation(times, ceilings)
    assert found["fp32_tflops"] == ceilings.loc[ceilings["ceiling"] == "matmul_fp32", "value"].median()
    halved = facts.utilisation(times.assign(utilisation=times["utilisation"] / 2), ceilings)
    assert halved["best"]["utilisation"] == pytest.approx(found["best"]["utilisation"] / 2)
    assert 0 < found["worst"]["utilisation"] < found["best"]["utilisation"] < 1


def test_published_times_are_set_beside_those_here(times):
    before = facts_published.timings(times)
    assert sum(before["places"].values()) == before["figures"] == len(before["table"]) > 5
    assert before["reports"]["figures"].sum() == before["figures"]
    slower = facts_published.timings(times.assign(median_ms=times["median_ms"] * 100))
    assert slower["places"] == {"below": before["figures"], "within": 0, "above": 0}
    stated = ~before["table"]["context_length"].isna()
    assert list(slower["table"]["ratio"][stated]) == pytest.approx(list(before["table"]["ratio"][stated] / 100))
    assert facts_published.timings(times[:0]) is None


def test_times_of_other_sizes_say_nothing_of_what_others_published(times):
    own = times.assign(size="custom")
    assert facts_published.timings(own) is None
    said = answered("benchmark", "published", times=own)
    assert "Not answered here" in said.text and not said.tables


def test_no_rows_are_no_facts(times, ceilings):
    other = times.assign(precision="bf16")
    assert (
        facts.how_long(other) is None
        and facts.how_variable(other) is None
        and facts.launch_bound(other, pd.DataFrame()) is None
    )
    assert facts.utilisation(other, ceilings) is None
    assert "Not answered here" in answered("benchmark", "how-long", times=pd.DataFrame()).text
