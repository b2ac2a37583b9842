"""Sanity checks of readings, the sample sizes that are reliable, and inconsistent rows in reports."""

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
        (dict.fromkeys(ROW, np.nan), [], ""),
    ],
)
def test_impossible_readings_are_described_with_their_numbers(row, profiled_ms, message):
    assert measure.find_inconsistencies(ROW | row, profiled_ms) == message


def test_every_impossible_reading_is_described():
    messages = measure.find_inconsistencies(ROW | {"gpu_ms": 150.0, "replayed_ms": 200.0, "power_w": 900.0})
    assert messages.count(";") == 2
    assert measure.find_inconsistencies({}) == ""


@pytest.mark.parametrize(
    ("row", "is_limited"),
    [
        ({"sm_clock_mhz": 1900.0}, True),
        ({"sm_clock_mhz": 1950.0}, False),
        ({}, False),
        ({"sm_clock_mhz": 1700.0, "highest_clock_mhz": 1700.0}, False),
    ],
)
def test_step_is_power_limited_when_its_clock_is_low(row, is_limited):
    assert measure.is_power_limited(row) == is_limited


@pytest.mark.parametrize(
    ("changed", "gpu_ms", "modes"),
    [
        (("forward", "forward"), 10.9, []),
        (("forward", "forward"), 11.5, ["forward", "step"]),
        (("forward", "forward"), 5.0, []),
        (("forward_backward", "backward"), 8.0, ["forward_backward", "step"]),
        (("step", "forward"), 12.0, ["forward_backward", "step"]),
        (("step", "optimizer"), 99.0, []),
        (("step", "loss"), np.nan, []),
    ],
)
def test_phase_takes_as_long_alone_as_within_the_step(changed, gpu_ms, modes):
    times = pd.DataFrame(MODES, columns=["mode", "phase"])
    times["gpu_ms"] = [gpu_ms if row == changed else 10.0 for row in MODES]
    rows = times.loc[[*sanity_checks.phases_that_disagree(times)]]
    assert {*rows["mode"]} == {*modes} and {*rows["phase"]} <= {TOTAL}


def test_table_describes_each_case_in_all_of_its_rows():
    """Each phase takes 10 ms, except forward alone in bf16, and one of the steps of forward and backward."""
    cases = {
        (precision, mode): {"precision": precision, "mode": mode}
        for precision in ("bf16", "fp32")
        for mode in PHASES
    }
    lasting_ms = dict.fromkeys([("bf16", "forward", number) for number in range(3)], 20)
    lasting_ms["fp32", "forward_backward", 2] = 30
    rows = []
    for case in cases.keys() - {("fp32", "step")}:
        for number in range(3):
            for start_ns, phase in enumerate(PHASES[case[1]]):
                end_ns = start_ns * 10**8 + lasting_ms.get((*case, number), 10) * 10**6
                rows.append((case, number, phase, start_ns * 10**8, end_ns))
    operations = pd.DataFrame(rows, columns=["case", "number", "phase", "start_ns", "end_ns"])
    samples = {}
    for case in cases:
        phases = pd.DataFrame({"phase": [*PHASES[case[1]], TOTAL]})
        samples[case] = phases.assign(warmup=False, wall_ms=100.0, enqueue_ms=1.0)
    readings = {case: {"sm_clock_mhz": 1980.0} for case in cases}
    readings["bf16", "step"] |= {"replayed_ms": 90.0, "power_w": 900.0}  # a step's graph has other kernels
    readings["fp32", "forward"] |= {"replayed_ms": 90.0}
    status = {("fp32", "step"): ("ok", "not profiled: why")}
    times = measure.step_times(cases, samples, operations, readings, status, "late", "cuda")
    by_case = times.groupby(["precision", "mode"])["inconsistent"].agg(["nunique", "first"])
    assert (by_case["nunique"] == 1).all()
    assert by_case["first"][by_case["first"] != ""].to_dict() == {
        ("bf16", "forward"): "forward 20 ms in forward, 10 ms in step",
        ("bf16", "step"): "900 W, but the power limit is 700 W; forward 20 ms in forward, 10 ms in step",
        ("fp32", "forward"): "replayed in 90 ms, but its operations take 10 ms",
        ("fp32", "forward_backward"): "profiled steps range from 30 to 90 ms",
    }
    assert {*times["reason"]} == {"", "not profiled: why"}


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
def test_samples_are_enough_when_their_statistic_repeats(wall_ms, enqueue_ms, device, steps):
    """Enough are 30 steps or 2 s; 100 steps or 3 s if launch-bound; 7, as requested, of long steps."""
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


def test_inconsistent_rows_are_named():
    table = pd.DataFrame({"mode": ["step", "forward"], "precision": "bf16", "phase": TOTAL, "wall_ms": 9.0})
    tables = {"times": table.assign(inconsistent=["too long", ""]), "other": table}
    assert inconsistent_rows(tables) == "bf16 step total: too long"


def test_inconsistent_case_is_in_no_table_of_times_of_its_study():
    """Each of the other rows differs from the inconsistent one in one key."""
    keys = ("run_id", "mode", "precision", "optimization", "batch_size")
    rows = [("a",) * 5, *(("a",) * place + ("b",) + ("a",) * (4 - place) for place in range(5))]
    samples = pd.DataFrame(rows, columns=keys).assign(wall_ms=1.0)
    marks = ["odd", *[""] * 5]
    tables = {
        "benchmark.times": samples.assign(inconsistent=marks),
        "benchmark.samples": samples,
        "benchmark.operations": samples.rename(columns={"wall_ms": "gpu_ms"}),
        "benchmark.memory": samples.drop(columns="wall_ms"),
        "benchmark.results": samples[["run_id", "wall_ms"]].assign(inconsistent=marks),
        "benchmark_more.samples": samples,
        "runs": samples,
    }
    kept = {name: [*table.index] for name, table in load.steady(tables).items()}
    others = [*range(1, 6)]
    complete = [*range(6)]
    assert kept == dict(zip(tables, [others] * 3 + [complete] * 4))


@pytest.mark.parametrize("order", [1, -1])
def test_newest_run_of_a_configuration_replaces_the_others(order):
    """Of runs that start at the same time, the last by name is the newest."""
    started = {"a_late": 3, "early": 1, "other": 0, "same_a": 2, "same_b": 2, "apart": 0}
    times = [
        ("early", "small", "step"),
        ("a_late", "small", "step"),
        ("other", "xl", "step"),
        ("apart", "small", "forward"),
    ]
    peaks = [("same_b", "xl"), ("same_a", "xl")]
    tables = {
        "times": pd.DataFrame(times[::order], columns=["run_id", "size", "mode"]),
        "peaks": pd.DataFrame(peaks[::order], columns=["run_id", "size"]),
    }
    records = {run: SimpleNamespace(started_at=started[run]) for run in [*started][::order]}
    schemas = {"times": SimpleNamespace(unique=["mode"]), "peaks": SimpleNamespace(unique=[])}
    module = SimpleNamespace(CONFIG=("size",), SCHEMAS=schemas)
    assert load._replaced(module, tables, records) == {"early", "same_a"}
