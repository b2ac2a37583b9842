"""From samples to statements, on samples whose statements are known."""
import numpy as np
import pandas as pd
import pytest

from stepscope.step.summary import (
    flags,
    median_interval,
    ratio_between_processes,
    ratio_interval,
    ratio_of_two_processes,
    spread_of_processes,
    summarize,
    trailing_ms,
    unlike_clocks,
)
from stepscope.step.timing import SAMPLE_COLUMNS


def steady(n, near=100.0, spread=0.2, seed=0):
    return near + spread * np.random.default_rng(seed).standard_normal(n)


def samples_of(times, phase="step", warmup=0):
    return pd.DataFrame([(i, i >= warmup, phase, t, t / 4, np.nan) for i, t in enumerate(times)],
                        columns=SAMPLE_COLUMNS)


def test_a_row_says_n_mean_sample_deviation_median_and_interval():
    row = summarize(samples_of([1000.0, 2.0, 4.0, 9.0], warmup=1), ["phase"]).iloc[0]
    assert row["n"] == 3  # the warm-up does not count
    assert row["mean_ms"] == 5 and row["median_ms"] == 4 and row["enqueue_ms"] == 1
    assert row["std_ms"] == pytest.approx(13**0.5)  # (9 + 1 + 16) / (3 - 1)
    assert (row["ci_low_ms"], row["ci_high_ms"]) == (2, 9)
    assert row["trailing_ms"] == 3


def test_a_group_is_told_by_all_the_columns_asked_for_and_they_stay_in_order():
    frames = [samples_of([near] * 4, phase).assign(run_id=run) for run,
              near in (("b", 2.0), ("a", 1.0)) for phase in
              ("forward", "step")]
    rows = summarize(pd.concat(frames, ignore_index=True), ["run_id", "phase"])
    assert rows[["run_id", "phase", "median_ms"]].values.tolist() == [
        ["b", "forward", 2], ["b", "step", 2], ["a", "forward", 1], ["a", "step", 1]]


def test_a_single_sample_has_no_spread_and_says_so():
    row = summarize(samples_of([3.0]), ["phase"]).iloc[0]
    assert row["median_ms"] == row["mean_ms"] == 3
    assert np.isnan([row["std_ms"], row["ci_low_ms"], row["ci_high_ms"]]).all()
    assert row["flags"] == "fewer than 4 samples"


def test_equal_samples_are_steady_with_an_interval_of_no_width():
    row = summarize(samples_of([3.0] * 10), ["phase"]).iloc[0]
    assert (row["std_ms"], row["ci_low_ms"], row["ci_high_ms"], row["flags"]) == (0, 3, 3, "")


def test_the_same_samples_always_have_the_same_interval():
    for seed in range(20):
        times = steady(40, seed=seed)
        low, high = median_interval(times)
        assert median_interval(times.copy()) == (low, high)
        assert times.min() < low < np.median(times) < high < times.max()


def test_the_interval_covers_the_median_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    true_median = np.exp(1.0)
    hits = [low <= true_median <= high for low,
            high in (median_interval(random.lognormal(1, 0.5, 15)) for _ in range(200))]
    assert 0.89 <= np.mean(hits) <= 0.99  # 0.95, give or take three standard errors of 200 trials


# Flags

def test_steady_samples_bear_no_flag():
    for seed in range(200):
        assert flags(steady(10, seed=seed)) == []


@pytest.mark.parametrize("n, few", [(1, True), (3, True), (4, False)])
def test_too_few_samples(n, few):
    assert (flags(np.array([100.0, 100.1, 100.2, 100.1])[:n]) == ["fewer than 4 samples"]) == few


def test_the_published_backward_of_34_ms_give_or_take_34_is_noticed():
    times = np.r_[132.12, [23.32] * 9]  # a mean of 34.2 and a standard deviation of 34.4, as printed
    assert flags(times) == [
        "noisy: standard deviation is 101% of the mean (sample 1 of 10 is 5.67 times the median)"
    ]


def test_noise_just_below_and_just_above_five_percent():
    shape = np.array([1.0, -1.0, 0.3, -0.3, 0.9, -0.9, 0.5, -0.5, 0.1, -0.1])
    shape /= shape.std(ddof=1)
    assert not any("noisy" in flag for flag in flags(100 + 4.9 * shape))
    assert any("noisy: standard deviation is 5% of the mean" in flag for flag in flags(100 + 5.1 * shape))


@pytest.mark.parametrize("rise", [0.022, 0.04, -0.04])
def test_drift_up_and_down(rise):
    times = 100 * (1 + rise * np.linspace(-0.5, 0.5, 10)) + 1e-3 * steady(10, near=0)
    assert flags(times) == [f"drifting: {rise:+.1%} from first to last sample"]


def test_a_drift_below_two_percent_and_one_that_chance_could_make_are_none():
    assert flags(100 * (1 + 0.015 * np.linspace(0, 1, 10))) == []
    assert not any("drifting" in flag
                   for flag in flags(np.array([100, 103, 99, 104, 101, 105, 100.5, 104.5, 102, 103.5])))


def test_one_slow_sample_is_neither_a_drift_nor_a_second_mode():
    times = steady(10)
    times[-1] = 108
    assert flags(times) == []


def test_two_modes_are_told_with_their_sizes_and_places():
    times = np.where(np.arange(10) % 3 == 0, 107.0, 100.0) + 0.01 * np.arange(10)
    assert flags(times) == ["bimodal: 6 samples near 100 ms, 4 near 107 ms"]


def test_two_wide_groups_with_a_gap_no_wider_than_they_are_none():
    assert not any("bimodal" in flag
                   for flag in flags(np.array([90, 93, 96, 99, 100, 106, 108, 110, 112, 115.0])))


def test_all_reasons_are_given_together():
    row = summarize(samples_of(np.r_[100 + 0.1 * np.arange(5), 150 + 0.1 * np.arange(5)]), ["phase"]).iloc[0]
    assert [reason.split(":")[0] for reason in row["flags"].split("; ")] == ["noisy", "drifting", "bimodal"]


# Trailing

def test_trailing_is_how_far_the_gpu_is_behind_the_host_at_a_phases_end():
    rows = [(step, True, phase, time, enqueue, np.nan) for step in (0, 1) for phase, time, enqueue in
            (("forward", 10, 4), ("backward", 20, 30 * step), ("optimizer", 5, 1),
             ("step", 36, 5 + 30 * step))]
    samples = pd.DataFrame(rows, columns=SAMPLE_COLUMNS)
    assert trailing_ms(samples).tolist() == [6, 26, 30, 31, 6, -4, 0, 1]


def test_trailing_does_not_mix_runs():
    one = samples_of([8.0], "forward").assign(run_id="a")
    both = pd.concat([one, one.assign(run_id="b")], ignore_index=True)
    assert trailing_ms(both).tolist() == [6, 6]


# Clocks, and between processes

def test_clocks_are_of_timed_steps():
    samples = samples_of([5.0] * 5, warmup=1).assign(sm_clock_mhz=[100.0, 1980, 1400, 1980, 1980])
    row = summarize(samples, ["phase"]).iloc[0]
    assert (row["sm_clock_mhz"], row["sm_clock_least_mhz"]) == (1980, 1400)
    assert np.isnan(summarize(samples_of([5.0] * 5), ["phase"])["sm_clock_mhz"].iloc[0])


def test_clocks_are_unlike_beyond_two_of_the_drivers_steps_and_unknown_ones_are_not():
    assert unlike_clocks(1702.0, 1980.0) and unlike_clocks(1980.0, 1935.0)
    assert not unlike_clocks(1980.0, 1965.0) and not unlike_clocks(np.nan, 1980.0)
    columns = pd.Series([1980.0, 1900.0]), pd.Series([1980.0, 1980.0])
    assert unlike_clocks(*columns).tolist() == [False, True]


def processes(n, between, within=0.002, near=100.0, seed=0):
    """Ten steps of each of so many processes, whose own levels differ by so much."""
    rng = np.random.default_rng(seed)
    return [near * np.exp(between * rng.standard_normal() + within * rng.standard_normal(10))
            for _ in range(n)]


def test_spread_within_and_between_processes_are_told_apart():
    found = spread_of_processes(processes(50, between=0.05))
    assert found["processes"] == 50 and found["median_ms"] == pytest.approx(100, rel=0.03)
    assert found["within_share"] < 0.003 and found["between_share"] == pytest.approx(0.05, rel=0.3)
    assert found["range_share"] > 2 * found["between_share"]
    alone = spread_of_processes(processes(1, between=0.05))
    assert np.isnan(alone["between_share"]) and alone["within_share"] > 0


def test_an_interval_between_processes_covers_about_as_often_as_it_says_and_one_within_does_not():
    covers = {"between": 0, "within": 0}
    for seed in range(100):
        above, below = processes(8, 0.03, seed=seed), processes(8, 0.03, near=50.0, seed=1000 + seed)
        _, low, high = ratio_between_processes(above, below)
        covers["between"] += low <= 2 <= high
        low, high = ratio_interval(above[0], below[0])
        covers["within"] += low <= 2 <= high
    assert covers["between"] >= 85 and covers["within"] <= 30


def test_with_one_process_a_side_the_spread_is_borrowed_or_there_is_no_interval():
    ratio, low, high = ratio_between_processes(processes(1, 0.03), processes(3, 0.03))
    assert ratio > 0 and np.isnan([low, high]).all()
    ratio, low, high = ratio_of_two_processes((200.0, 199.0, 201.0), (100.0, 99.5, 100.5), 0.0)
    assert ratio == 2 and high / 2 - 1 == pytest.approx(0.005 * 2**0.5, rel=0.01)
    ratio, low, high = ratio_of_two_processes((200.0, 200.0, 200.0), (100.0, 100.0, 100.0), 0.03)
    assert high / low == pytest.approx(np.exp(2 * 1.96 * 0.03 * 2**0.5), rel=1e-3)
    assert np.isnan(ratio_of_two_processes((200.0, 199.0, 201.0), (100.0, 99.5, 100.5), np.nan)[1])
