"""Test the sanity checks of readings, the required sample sizes, and how reports treat inconsistent rows."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stepscope import measure
from stepscope.config import PHASES, TOTAL
from stepscope.measure import sanity_checks
from stepscope.measure.timing import has_enough_samples
from stepscope.report import load
from stepscope.runs.notebook import inconsistent_rows
from stepscope.stats import launch_bound

MODES = [(mode, phase) for mode in PHASES for phase in [*PHASES[mode], TOTAL]]
ROW = {"wall_ms": 100.0, "gpu_ms": 99.0, "operations": 1000.0, "sm_clock_mhz": 1980.0}
LIMITED = {"sm_clock_mhz": 1700.0, "wall_ms": 110.0}
FLUCTUATING = [99, 104, 98, 103, 99, 104, 98, 103]


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(sanity_checks, "highest_clock_mhz", lambda: 1980.0)
    monkeypatch.setattr(sanity_checks, "power_limit_w", lambda: 700.0)


@pytest.mark.parametrize(
    ("row", "profiled_ms", "message"),
    [
        ({"gpu_ms": 101.9}, [], ""),
        ({"gpu_ms": 102.5}, [], "102.5 ms of GPU time in 100 ms of wall time"),
        ({"gpu_ms": 102.9, "sm_clock_mhz": 1700.0}, [], ""),
        ({"gpu_ms": 103.5, "sm_clock_mhz": 1700.0}, [], "103.5 ms of GPU time in 100 ms of wall time"),
        ({"gpu_ms": 0.12, "wall_ms": 0.1}, [], ""),
        ({"replayed_ms": 103.0}, [], ""),
        ({"replayed_ms": 105.0}, [], "replayed in 105 ms, but its operations take 99 ms"),
        ({"gpu_ms": 1.0, "replayed_ms": 2.9}, [], ""),
        ({"gpu_ms": 1.0, "replayed_ms": 3.1}, [], "replayed in 3.1 ms, but its operations take 1 ms"),
        ({"power_w": 713.0}, [], ""),
        ({"power_w": 748.0}, [], "748 W, but the power limit is 700 W"),
        ({}, [99, 100, 101.9], ""),
        ({}, [99, 100, 102.1], "profiled steps range from 99 to 102.1 ms"),
        ({}, [0.01, 0.02], ""),
        ({}, FLUCTUATING, "profiled steps range from 98 to 104 ms"),
        (LIMITED, FLUCTUATING, ""),
        (LIMITED, [98, 100, 104, 106], "profiled steps range from 99 to 105 ms"),
        (LIMITED, [99, 104, 99], "profiled steps range from 99 to 104 ms"),
        (
            {"gpu_ms": 150.0, "power_w": 748.0},
            [],
            "150 ms of GPU time in 100 ms of wall time; 748 W, but the power limit is 700 W",
        ),
        (dict.fromkeys(ROW, np.nan), [], ""),
    ],
)
def test_impossible_readings_are_described_with_numbers(row, profiled_ms, message):
    assert measure.find_inconsistencies(ROW | row, profiled_ms) == message


@pytest.mark.parametrize(
    ("row", "is_limited"),
    [
        ({"sm_clock_mhz": 1900.0}, True),
        ({"sm_clock_mhz": 1950.0}, False),
        ({}, False),
        ({"sm_clock_mhz": 1700.0, "highest_clock_mhz": 1700.0}, False),
    ],
)
def test_step_is_power_limited_when_the_clock_is_low(row, is_limited):
    assert measure.is_power_limited(row) == is_limited


@pytest.mark.parametrize(
    ("changed", "gpu_ms", "others_ms", "modes"),
    [
        (("forward", "forward"), 10.9, 10.0, []),
        (("forward", "forward"), 11.5, 10.0, ["forward", "step"]),
        (("forward", "forward"), 5.0, 10.0, []),
        (("forward_backward", "backward"), 8.0, 10.0, ["forward_backward", "step"]),
        (("forward_backward", "loss"), 0.01, 0.05, []),
        (("step", "forward"), 12.0, 10.0, ["forward_backward", "step"]),
        (("step", "optimizer"), 99.0, 10.0, []),
        (("step", "loss"), np.nan, 10.0, []),
    ],
)
def test_phases_that_disagree_compares_a_phase_alone_and_within_the_step(changed, gpu_ms, others_ms, modes):
    times = pd.DataFrame(MODES, columns=["mode", "phase"])
    # only phases are compared, so totals may differ
    times["gpu_ms"] = np.where(times["phase"] == TOTAL, times["mode"].str.len(), others_ms)
    times.loc[MODES.index(changed), "gpu_ms"] = gpu_ms
    rows = times.loc[[*sanity_checks.phases_that_disagree(times)]]
    assert {*rows["mode"]} == {*modes} and {*rows["phase"]} <= {TOTAL}


def test_inconsistencies_are_described_in_all_rows_of_a_case():
    """In the mode ``forward``, every bf16 step and one fp32 step take 20 ms; all other phases take 10 ms."""
    cases = [(precision, mode) for precision in ("bf16", "fp32") for mode in ("step", "forward")]
    rows, samples = [], {}
    for case in cases:
        phases = [*PHASES[case[1]]]
        samples[case] = pd.DataFrame(
            {"phase": [*phases, TOTAL], "warmup": False, "wall_ms": 100.0, "enqueue_ms": 1.0}
        )
        for number in range(3):
            is_slow = case == ("bf16", "forward") or (*case, number) == ("fp32", "forward", 2)
            rows += [
                (case, number, phase, place, 20 if is_slow else 10) for place, phase in enumerate(phases)
            ]
    operations = pd.DataFrame(rows, columns=["case", "number", "phase", "place", "ms"])
    operations["start_ns"] = operations["place"] * 10**8
    operations["end_ns"] = operations["start_ns"] + operations["ms"] * 10**6
    keys = {case: dict(zip(("precision", "mode"), case)) for case in cases}
    readings = {case: {"replayed_ms": 90.0, "sm_clock_mhz": 1980.0} for case in cases}
    readings["bf16", "step"]["power_w"] = 900.0
    times = measure.step_times(keys, samples, operations, readings, {}, "", "cuda")
    by_case = times.groupby(["precision", "mode"])["inconsistent"].unique().map(list)
    # the replayed time of a full step isn't checked, because its graph contains different kernels
    replayed = "replayed in 90 ms, but its operations take"
    phase = "forward takes 20 ms in mode forward, but 10 ms in mode step"
    assert by_case.to_dict() == {
        ("bf16", "forward"): [f"{replayed} 20 ms; {phase}"],
        ("bf16", "step"): [f"900 W, but the power limit is 700 W; {phase}"],
        ("fp32", "forward"): [f"{replayed} 10 ms; profiled steps range from 10 to 20 ms"],
        ("fp32", "step"): [""],
    }


# Sample sizes


@pytest.mark.parametrize(
    ("wall_ms", "enqueue_ms", "device", "steps"),
    [
        (50.0, 10.0, "cuda", 30),
        (100.0, 10.0, "cuda", 20),
        (500.0, 10.0, "cuda", 10),
        (1500.0, 10.0, "cuda", 7),
        (20.0, 18.0, "cuda", 100),
        (150.0, 140.0, "cuda", 20),
        (700.0, 690.0, "cuda", 10),
        (50.0, 50.0, "cpu", 7),
    ],
)
def test_has_enough_samples_depends_on_step_count_and_duration(wall_ms, enqueue_ms, device, steps):
    """On a GPU, 30 steps or 2 s of steps are enough; launch-bound steps require 100 steps or 3 s.

    For long steps, and on a CPU, the requested number of steps is enough.
    """
    rows = [(0, True, TOTAL, 9e9, 0.0), (1, False, "forward", 9e9, 0.0)]
    rows += [(1, False, TOTAL, wall_ms, enqueue_ms)] * steps
    assert has_enough_samples(rows, 7, device)
    assert not has_enough_samples(rows[:-1], 7, device)
    assert not has_enough_samples(rows, 120, device)


@pytest.mark.parametrize(
    ("busy", "enqueue_ms", "gpu_ms", "is_bound"),
    [
        (0.94, 10.5, 18.4, False),
        (0.46, 57.0, 30.3, True),
        (0.96, 99.0, 50.0, False),
        (0.5, np.nan, np.nan, True),
        (0.95, 57.0, 30.3, False),
        (np.nan, 5.0, 1.0, False),
    ],
)
def test_step_is_launch_bound_when_the_gpu_waits_for_a_slower_host(busy, enqueue_ms, gpu_ms, is_bound):
    assert launch_bound(busy, enqueue_ms, gpu_ms) is is_bound


# Reports


def test_inconsistent_rows_describes_each_row():
    table = pd.DataFrame({"mode": ["step", "forward"], "precision": "bf16", "phase": TOTAL, "wall_ms": 9.0})
    tables = {"times": table.assign(inconsistent=["too long", ""]), "other": table}
    assert inconsistent_rows(tables) == "bf16 step total: too long"


def test_steady_drops_inconsistent_cases_from_the_time_tables_of_the_study():
    """All other rows differ from the inconsistent row in one key field, so they stay in the tables."""
    keys = ["run_id", "mode", "precision", "optimization", "batch_size"]
    samples = pd.DataFrame("a", index=range(6), columns=keys).assign(wall_ms=1.0)
    for row, key in enumerate(keys, 1):
        samples.loc[row, key] = "b"
    marked = samples.assign(inconsistent=["odd", *[""] * 5])
    tables = {
        "benchmark.times": marked,
        "benchmark.samples": samples,
        "benchmark.operations": samples.rename(columns={"wall_ms": "gpu_ms"}),
        "benchmark.memory": samples.drop(columns="wall_ms"),
        "benchmark.results": marked[["run_id", "wall_ms", "inconsistent"]],
        "benchmark_more.samples": samples,
        "runs": samples,
    }
    first_rows = [table.index[0] for table in load.steady(tables).values()]
    assert first_rows == [1, 1, 1, 0, 0, 0, 0]
    assert all(table.index[-1] == 5 for table in load.steady(tables).values())


def test_power_limited_step_stays_in_reports_if_only_its_profiled_steps_differ():
    """The code that reads records must recognize the text that the sanity check writes."""
    row = {"gpu_ms": 5.0, "wall_ms": 5.0}
    spread = measure.find_inconsistencies(row, [5.0, 5.5])
    spread_and_busy = measure.find_inconsistencies(row | {"wall_ms": 4.0}, [5.0, 5.5])
    steps = pd.DataFrame(
        [
            {"clock_reasons": "power cap; thermal", "inconsistent": spread},
            {"clock_reasons": "power cap", "inconsistent": spread_and_busy},
            {"clock_reasons": None, "inconsistent": spread},
            {"clock_reasons": None, "inconsistent": ""},
        ]
    ).assign(run_id="a", wall_ms=5.0)
    assert list(load.steady({"ladder.steps": steps})["ladder.steps"].index) == [0, 3]


@pytest.mark.parametrize("order", [1, -1])
def test_newest_run_replaces_earlier_runs_of_a_configuration(order):
    """Among runs with equal start times, the one whose name sorts last counts as the newest."""
    runs = [
        ("early", 1, "small", "step"),
        ("a_late", 3, "small", "step"),
        ("other_size", 0, "xl", "step"),
        ("other_mode", 0, "small", "forward"),
        ("same_a", 2, "large", "step"),
        ("same_b", 2, "large", "step"),
    ][::order]
    times = pd.DataFrame(runs, columns=["run_id", "start", "size", "mode"])
    records = {run: SimpleNamespace(started_at=start) for run, start, *_ in runs}
    module = SimpleNamespace(CONFIG=("size",), SCHEMAS={"times": SimpleNamespace(unique=["mode"])})
    assert load._replaced(module, {"times": times}, records) == {"early", "same_a"}
