"""What cannot be, or does not repeat, is seen; of what was measured again the last counts, and it is in no sentence."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stepscope import measure
from stepscope.config import PHASES, TOTAL
from stepscope.measure import sanity_checks, timing
from stepscope.measure.timing import has_enough_samples
from stepscope.report import load
from stepscope.runs.notebook import inconsistent_rows
from stepscope.stats import launch_bound

FULL_MHZ = 1980.0


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(sanity_checks, "highest_clock_mhz", lambda: FULL_MHZ)
    monkeypatch.setattr(sanity_checks, "power_limit_w", lambda: 700.0)


def found(captured_ms=(), **row):
    return measure.find_inconsistencies(
        {"wall_ms": 100.0, "gpu_ms": 99.0, "operations": 1000.0, "sm_clock_mhz": FULL_MHZ} | row, captured_ms
    )


@pytest.mark.parametrize(
    "steady_one, odd_one, words",
    [
        ({"gpu_ms": 101.9}, {"gpu_ms": 102.5}, "102.5 ms of GPU time in 100 ms"),
        (
            {"gpu_ms": 102.9, "sm_clock_mhz": 1700.0},
            {"gpu_ms": 103.5, "sm_clock_mhz": 1700.0},
            "103.5 ms of GPU time",
        ),
        ({"replayed_ms": 103.0}, {"replayed_ms": 105.0}, "replayed in 105 ms"),
        (
            {"gpu_ms": 1.0, "wall_ms": 9.0, "replayed_ms": 2.9},
            {"gpu_ms": 1.0, "wall_ms": 9.0, "replayed_ms": 3.1},
            "replayed in 3.1",
        ),
        (
            {"captured_ms": [99, 100, 101.9]},
            {"captured_ms": [99, 100, 102.1]},
            "profiled steps range from 99 to 102.1 ms",
        ),
        ({"power_w": 713.0}, {"power_w": 748.0}, "748 W, but the power limit is 700 W"),
    ],
)
def test_what_cannot_be_is_told_with_its_numbers(steady_one, odd_one, words):
    assert found(**steady_one) == "" and words in found(**odd_one)


def test_what_is_not_known_is_nothing_odd():
    assert (
        measure.find_inconsistencies({}) == ""
        and found(gpu_ms=np.nan, replayed_ms=np.nan, power_w=np.nan) == ""
    )
    assert found(gpu_ms=0.12, wall_ms=0.1) == ""  # within what a clock's ticks can make
    assert found([0.01, 0.02], gpu_ms=0.01, wall_ms=0.1) == ""
    assert not sanity_checks.phases_that_disagree(times(forward_backward_loss=0.01, step_loss=0.05))


def test_all_that_is_odd_is_said_and_watts_are_held_against_this_gpus_cap(monkeypatch):
    assert found(gpu_ms=150.0, replayed_ms=200.0).count(";") == 1
    monkeypatch.setattr(sanity_checks, "power_limit_w", lambda: 400.0)
    assert found(power_w=407.0) == "" and found(power_w=409.0) == "409 W, but the power limit is 400 W"


def test_a_table_says_of_each_precisions_modes_what_is_odd_of_them_in_all_their_rows():
    """Each phase takes 10 ms; forward alone in bf16 takes 20, of fp32's forward and backward the last step 30 a phase."""
    cases = {
        (precision, mode): {"precision": precision, "mode": mode}
        for precision in ("bf16", "fp32")
        for mode in PHASES
    }
    lasting = {("bf16", "forward", number): 20 for number in range(3)} | {("fp32", "forward_backward", 2): 30}
    operations = pd.DataFrame(
        [
            {
                "case": case,
                "number": number,
                "phase": phase,
                "name": "gemm",
                "kernel_category": "other",
                "start_ns": at * 10**8,
                "end_ns": at * 10**8 + lasting.get((*case, number), 10) * 10**6,
            }
            for case in cases
            for number in range(3)
            for at, phase in enumerate(PHASES[case[1]])
        ]
    )
    samples = {
        case: pd.DataFrame(
            [(0, False, phase, 100.0, 1.0) for phase in [*PHASES[case[1]], TOTAL]],
            columns=timing.SAMPLE_COLUMNS,
        )
        for case in cases
    }
    readings = {case: {"sm_clock_mhz": FULL_MHZ} for case in cases}
    readings["bf16", "step"]["replayed_ms"] = readings["fp32", "forward"]["replayed_ms"] = (
        90.0  # a step's graph has other kernels
    )
    readings["bf16", "step"]["power_w"] = 900.0
    status = {("fp32", "step"): ("ok", "not profiled: why")}
    found = measure.step_times(
        cases, samples, operations[operations["case"] != ("fp32", "step")], readings, status, "late", "cuda"
    )
    said = found.groupby(["precision", "mode"])["inconsistent"].unique().map(list)
    assert said.map(len).eq(1).all() and {case: words[0] for case, words in said.items() if words[0]} == {
        ("bf16", "forward"): "forward 20 ms in forward, 10 ms in step",
        ("fp32", "forward"): "replayed in 90 ms, but its operations take 10 ms",
        ("bf16", "step"): "900 W, but the power limit is 700 W; forward 20 ms in forward, 10 ms in step",
        ("fp32", "forward_backward"): "profiled steps range from 30 to 90 ms",
    }
    assert {*found.query("precision == 'fp32' and mode == 'step'")["reason"]} == {"not profiled: why"}


def test_at_the_power_cap_a_stretchs_halves_are_compared(monkeypatch):
    swings = [99, 104, 98, 103, 99, 104, 98, 103]
    assert found(swings, sm_clock_mhz=1700.0) == "" and "profiled steps" in found(swings)
    assert found([99, 99, 99, 120, 99, 99, 99, 99], sm_clock_mhz=1700.0) == "", "its halves' medians"
    assert "range from 99 to 104" in found([99] * 4 + [104] * 4, sm_clock_mhz=1700.0, wall_ms=110)
    assert "range from 99 to 105" in found([98, 100, 104, 106], sm_clock_mhz=1700.0, wall_ms=110)
    assert "range from 99 to 104" in found([99, 104, 99], sm_clock_mhz=1700.0, wall_ms=110), (
        "too few for halves"
    )
    assert (
        measure.is_power_limited({"sm_clock_mhz": 1900.0})
        and not measure.is_power_limited({"sm_clock_mhz": 1950.0})
        and not measure.is_power_limited({})
    )
    assert not measure.is_power_limited({"sm_clock_mhz": 1700.0, "highest_clock_mhz": 1700.0})


def times(**gpu_ms):
    rows = [
        (mode, phase, gpu_ms.get(f"{mode}_{phase}", 10.0))
        for mode in PHASES
        for phase in [*PHASES[mode], TOTAL]
    ]
    return pd.DataFrame(rows, columns=["mode", "phase", "gpu_ms"])


@pytest.mark.parametrize(
    "odd, modes",
    [
        ({}, []),
        ({"forward_forward": 10.9}, []),
        ({"forward_forward": 11.5}, ["forward", "step"]),
        ({"forward_forward": 5.0}, []),
        ({"forward_backward_backward": 8.0}, ["forward_backward", "step"]),
        ({"step_forward": 12.0}, ["forward_backward", "step"]),
        ({"step_optimizer": 99.0}, []),
    ],
)
def test_a_mode_is_what_it_is_within_the_step(odd, modes):
    table = times(**odd)
    said = sanity_checks.phases_that_disagree(table)
    assert {table.loc[index, "mode"] for index in said} == {*modes}
    assert all(table.loc[index, "phase"] == TOTAL for index in said)


def rows(wall_times_ms, enqueue_ms=0.0, warmups=1):
    return [
        (step, step < warmups, TOTAL, wall_ms, enqueue_ms)
        for step, wall_ms in enumerate([5.0] * warmups + [*wall_times_ms])
    ]


@pytest.mark.parametrize(
    "wall_ms, enqueue_ms, steps",
    [
        (50.0, 10.0, 30),
        (100.0, 10.0, 20),
        (500.0, 10.0, 10),
        (1500.0, 10.0, 7),
        (20.0, 18.0, 100),
        (150.0, 140.0, 20),
        (700.0, 690.0, 10),
    ],
)
def test_steps_are_enough_where_their_median_or_the_fastest_repeats(wall_ms, enqueue_ms, steps):
    """Thirty, or two seconds; a hundred, or three seconds, where the host sets the pace; of long ones what was asked for."""
    assert not has_enough_samples(
        rows([wall_ms] * (steps - 1), enqueue_ms), 7, "cuda"
    ) and has_enough_samples(rows([wall_ms] * steps, enqueue_ms), 7, "cuda")
    assert not has_enough_samples(rows([wall_ms] * 6), 7, "cpu") and has_enough_samples(
        rows([wall_ms] * 7), 7, "cpu"
    )
    assert not has_enough_samples(rows([wall_ms] * steps, enqueue_ms), 120, "cuda")


@pytest.mark.parametrize(
    "busy, enqueue_ms, gpu_ms, waits",
    [
        (0.94, 10.5, 18.4, False),
        (0.46, 57.0, 30.3, True),
        (0.96, 99.0, 50.0, False),
        (0.5, np.nan, np.nan, True),
        (0.95, 57.0, 30.3, False),
        (np.nan, 5.0, 1.0, False),
    ],
)
def test_launch_bound_is_who_waits_for_whom(busy, enqueue_ms, gpu_ms, waits):
    assert launch_bound(busy, enqueue_ms, gpu_ms) is waits


def test_what_is_unsteady_is_named_by_row_and_is_in_no_table_of_the_report():
    table = pd.DataFrame(
        {
            "mode": ["step", "forward"],
            "precision": "bf16",
            "phase": TOTAL,
            "wall_ms": [9.0, 3.0],
            "inconsistent": ["4 ms of GPU time in 3 ms of wall time", ""],
        }
    )
    assert inconsistent_rows({"times": table, "other": table[["mode"]]}) == (
        "bf16 step total: 4 ms of GPU time in 3 ms of wall time"
    )
    kept = load.steady({"benchmark.times": table, "runs": table[["mode"]]})
    assert kept["benchmark.times"]["mode"].tolist() == ["forward"] and len(kept["runs"]) == 2


def test_an_unsteady_case_takes_its_own_single_steps_along_and_no_others():
    """Rows of the same run and case in the same study, in tables that have times; each other row differs in one thing."""
    odd = {"run_id": "a", "mode": "step", "precision": "bf16", "optimization": "fp8", "batch_size": 8}
    others = {
        "run_id": "b",
        "mode": "forward",
        "precision": "fp32",
        "optimization": "compiled_blocks",
        "batch_size": 4,
    }
    samples = pd.DataFrame([odd, *(odd | {name: other} for name, other in others.items())]).assign(
        wall_ms=1.0
    )
    times = samples.assign(inconsistent=["odd", *[""] * len(others)])
    tables = {
        "benchmark.samples": samples,
        "benchmark.times": times,
        "benchmark.operations": samples.rename(columns={"wall_ms": "gpu_ms"}),
        "benchmark.memory": samples.drop(columns="wall_ms"),
        "benchmark.results": samples[["run_id", "wall_ms"]].assign(
            inconsistent=["step: odd", *[np.nan] * len(others)]
        ),
        "benchmark_more.samples": samples,
    }
    kept = {name: len(table) for name, table in load.steady(tables).items()}
    assert kept == dict(zip(tables, (5, 5, 5, 6, 6, 6)))
    assert load.steady(tables)["benchmark.samples"].index.tolist() == [1, 2, 3, 4, 5]


def test_of_runs_of_one_key_the_one_that_started_last_stays():
    """By its beginning, and of two at once by its name; one of another configuration or key is in nobody's way."""
    runs = {"a_late": 3, "early": 1, "other": 0, "same_a": 2, "same_b": 2, "apart": 0}
    schemas = {"times": SimpleNamespace(unique=["mode"]), "peaks": SimpleNamespace(unique=[])}
    module = SimpleNamespace(CONFIG=("size",), SCHEMAS=schemas)
    times = pd.DataFrame(
        [
            ("early", "small", "step"),
            ("a_late", "small", "step"),
            ("other", "xl", "step"),
            ("apart", "small", "forward"),
        ],
        columns=["run_id", "size", "mode"],
    )
    peaks = pd.DataFrame([("same_b", "xl"), ("same_a", "xl")], columns=["run_id", "size"])
    records = {run: SimpleNamespace(started_at=at) for run, at in runs.items()}
    for order in (1, -1):
        tables = {"times": times[::order], "peaks": peaks[::order]}
        assert load._replaced(module, tables, dict([*records.items()][::order])) == {"early", "same_a"}
