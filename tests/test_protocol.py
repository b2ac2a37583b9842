"""The measurement protocol, with plain steps of a small model and a profiler whose operations are known."""

import math
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, groupby
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from cells import by_name, quickest, step_flops, times_of
from conftest import TINY
from stepscope import measure
from stepscope.config import PHASES, TOTAL, ConfigError, configure
from stepscope.measure import profiler, protocol, rates
from stepscope.measure.subject import NEGLIGIBLE_RATE
from stepscope.studies.benchmark import tables as benchmark
from stepscope.studies.mixed_precision import tables as mixed_precision
from stepscope.traces.profiled_steps import PROFILED_COLUMNS

MODES = ("step", "forward_backward", "forward")
CASES = [(precision, mode) for precision in ("bf16", "fp32") for mode in MODES]
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB. Including x")


class Toy:
    """A subject and its step. ``log`` notes each step: its case, its kind (plain, timed or profiled), and
    whether AdamW's moments exist; ``before`` gets the case and the kind before each step."""

    def __init__(self):
        torch.manual_seed(0)
        model, self.log = torch.nn.Linear(4, 4), []
        self.adamw = torch.optim.AdamW(model.parameters())
        self.subject = measure.Subject(model, (torch.ones(2, 4),), optimizer=self.adamw)
        self.before = lambda case, kind, phase: None

    def step(self, case, phase=None):
        kind = {measure.Phases: "timed", type(None): "plain"}.get(type(phase), "profiled")
        mode = case[-1] if isinstance(case, tuple) else case
        assert self.subject.model.weight.grad is None, "gradients are freed before each step"
        self.log.append((case, kind, bool(self.adamw.state)))
        self.before(case, kind, phase)
        phase = phase or (lambda name: nullcontext())
        with phase("forward"):
            loss = self.subject.model(*self.subject.batch).square().mean()
        if mode == "forward":
            return
        with phase("loss"):
            loss = loss + 0
        with phase("backward"):
            loss.backward()
        if mode == "step":
            with phase("optimizer"):
                self.adamw.step()

    def measure(self, names=MODES, clock=None, unsupported=None, **fields):
        study = "benchmark" if isinstance(names[0], str) else "mixed_precision"
        config = configure(study, **TINY | {"warmup_steps": 1, "timed_steps": 2} | fields)
        cases = {case: partial(self.step, case) for case in names}
        results = measure.steps(self.subject, cases, config, clock=clock, unsupported=unsupported)
        schemas = benchmark.SCHEMAS if study == "benchmark" else mixed_precision.SCHEMAS
        for name in ("times", "operations"):
            schemas[name].validate(getattr(results, name))
        return results

    def kinds(self):
        """The order of cases and kinds, with repetitions left out."""
        return [(case, kind) for (case, kind), _ in groupby(self.log, key=lambda entry: entry[:2])]


class Capture:
    """The profiler: each phase of a step holds one operation, which takes a millisecond."""

    def __init__(self, device):
        self.rows, self.reason = [], ""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def phases(self, case, number):
        @contextmanager
        def phase(name):
            start_ns = len(self.rows) * 10**6
            self.rows.append((case, number, name, "aten::mm", "matrix multiply", start_ns, start_ns + 10**6))
            yield

        return phase

    @property
    def operations(self):
        return pd.DataFrame(self.rows, columns=PROFILED_COLUMNS)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(protocol, "StepProfiler", Capture)
    monkeypatch.setattr(protocol, "ceilings", lambda device, names: {f"matmul_{name}": 2.0 for name in names})
    return Toy()


def totals(results, by=("mode",)):
    times = results.times
    return times[times["phase"] == TOTAL].set_index([*by])


# What a call returns


def test_steps_measures_every_phase_of_every_mode_with_the_real_profiler():
    results = Toy().measure(warmup_steps=5, timed_steps=3)
    times, operations = results.times, results.operations
    expected = [(mode, phase) for mode in MODES for phase in [*PHASES[mode], TOTAL]]
    assert list(zip(times["mode"], times["phase"])) == expected
    assert (times["status"] == "ok").all() and (times["reason"] == "").all()
    for row in times.to_dict("records"):
        samples = results.samples[results.samples["mode"] == row["mode"]]
        profiled = results.profiled[results.profiled["case"] == row["mode"]]
        expected = times_of(samples, profiled, row["phase"])
        assert {name: row[name] for name in expected} == pytest.approx(expected)
    for mode, rows in operations.groupby("mode"):
        lasting = by_name(quickest(results.profiled[results.profiled["case"] == mode]), "phase", "name")
        assert rows.set_index(["phase", "name"])["gpu_ms"].to_dict() == pytest.approx(lasting)
        assert rows["count"].sum() == totals(results)["operations"][mode]
    warmups = (
        results.samples[results.samples["phase"] == TOTAL].groupby("mode")["warmup"].agg(["sum", "size"])
    )
    assert warmups.loc[[*MODES]].values.tolist() == [[5, 8], [2, 5], [2, 5]]


def test_a_cpu_has_no_graph_no_clock_and_no_data_sheet(toy):
    results = toy.measure()
    columns = [
        "replayed_ms",
        "peak_gib",
        "sm_clock_mhz",
        "clock_reasons",
        "power_w",
        "energy_per_step_j",
        "mfu",
        "mfu_clock_adjusted",
        "compile_s",
    ]
    assert results.times[columns].isna().all(axis=None)
    reasons = totals(results)["replay_reason"]
    assert reasons["step"] == reasons["forward"] == "a CPU has no CUDA graphs"
    assert results.limits == {
        "matmul_tflops": 2.0,
        "copy_tb_s": None,
        "sheet_tflops": None,
        "highest_clock_mhz": None,
    }


def test_cases_of_several_precisions_have_rows_of_their_own_and_so_do_unsupported_ones(toy):
    results = toy.measure(CASES, unsupported={("fp16", "step"): "no fp16 here"})
    rows = totals(results, ("precision", "mode"))
    assert rows.index.tolist() == [*CASES, ("fp16", "step")]
    assert rows["status"].tolist() == ["ok"] * 6 + ["unsupported"]
    assert rows["reason"]["fp16", "step"] == "no fp16 here"
    assert {*results.operations["precision"]} == {*results.samples["precision"]} == {"bf16", "fp32"}


def test_cases_of_several_policies_have_a_column_for_them_and_no_extras(toy, monkeypatch):
    """The key is checked as a whole: only the impossible case is measured again."""
    for name in ("replay", "ceilings", "sustained_power"):
        monkeypatch.setattr(protocol, name, lambda *_, **__: pytest.fail("an extra was measured"))
    real, tables = protocol.step_times, []

    def step_times(*given):
        times = real(*given)
        tables.append(times)
        odd = (times["policy"] == "b") & (times["mode"] == "step") & (len(tables) == 1)
        return times.assign(inconsistent=np.where(odd, "as planted", ""))

    monkeypatch.setattr(protocol, "step_times", step_times)
    names = [(policy, mode) for policy in "ab" for mode in ("step", "forward")]
    config = configure("benchmark", **TINY | {"warmup_steps": 1, "timed_steps": 2})
    cases = {case: partial(toy.step, case) for case in names}
    results = measure.steps(toy.subject, cases, config, by="policy", extras=False)
    assert totals(results, ("policy", "mode")).index.tolist() == names
    assert not {"precision", "mfu"} & {*results.times} and (results.times["status"] == "ok").all()
    assert results.operations.groupby(["policy", "mode"])["count"].sum().to_dict() == {
        (policy, mode): len(PHASES[mode]) for policy, mode in names
    }
    assert {*zip(results.samples["policy"], results.samples["mode"])} == {*results.readings} == {*names}
    timed = [case for case, kind in toy.kinds() if kind == "timed"]
    assert timed == [*names, ("b", "step")]


def test_a_case_without_a_mode_is_refused(toy):
    with pytest.raises(ConfigError, match="cases: got 'backward', but expected a mode"):
        toy.measure(["backward"])


def test_a_notebooks_own_clock_times_every_case_and_its_readings_are_recorded(toy):
    asked = []

    def clock(step, warmup_steps, timed_steps, after):
        toy.subject.reset()
        step()
        after()
        asked.append((warmup_steps, timed_steps))
        rows = [(0, False, phase, 42.0, 1.0) for phase in [*PHASES[step.args[0]], TOTAL]]
        return pd.DataFrame(rows, columns=["step", "warmup", "phase", "wall_ms", "enqueue_ms"])

    results = toy.measure(clock=clock, warmup_steps=7, timed_steps=9)
    assert asked == [(7, 9), (2, 9), (2, 9)] and (results.times["wall_ms"] == 42).all()


# The learning rate


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_measured_steps_leave_the_weights_as_they_are_and_the_rate_is_restored(toy, rate):
    group, weight = toy.adamw.param_groups[0], toy.subject.model.weight
    before, group["lr"] = weight.clone(), rate
    results = toy.measure()
    assert results.learning_rate == pytest.approx(NEGLIGIBLE_RATE) and torch.equal(weight, before)
    assert group["lr"] is rate and float(rate) == pytest.approx(0.1)
    toy.subject.reset()
    toy.step("step")
    assert not torch.equal(weight, before)


def test_the_rate_is_restored_when_a_call_is_interrupted(toy):
    def before(case, kind, phase):
        raise KeyboardInterrupt

    toy.before = before
    with pytest.raises(KeyboardInterrupt) as raised:
        toy.measure()
    assert toy.adamw.param_groups[0]["lr"] == 1e-3 and raised.value.results.learning_rate == NEGLIGIBLE_RATE


def test_a_subject_without_an_optimizer_has_no_learning_rate(toy):
    toy.subject.optimizer = None
    assert toy.measure(["forward"]).learning_rate is None


# The order


def test_all_cases_are_timed_before_any_is_profiled_and_then_replayed(toy, monkeypatch):
    order = []
    toy.before = lambda case, kind, phase: order.append((case, kind))
    monkeypatch.setattr(protocol, "reset_peak_memory", lambda device: order.append("forget peaks"))
    monkeypatch.setattr(
        protocol, "replay", lambda step, *_, **__: order.append(("replay", *step.args)) or ([1.0], "")
    )
    monkeypatch.setattr(protocol, "ceilings", lambda device, names: order.append("ceilings") or {})
    toy.measure()
    timed = [event for mode in MODES for event in ("forget peaks", (mode, "timed"))]
    profiled = [
        ("forward", "profiled"),
        ("forward_backward", "profiled"),
        ("step", "plain"),
        ("step", "profiled"),
    ]
    replayed = [("replay", "forward"), ("replay", "step")]
    assert [event for event, _ in groupby(order)] == [*timed, *profiled, *replayed, "ceilings"]


def test_full_steps_of_all_precisions_are_profiled_last(toy):
    toy.measure(CASES)
    profiled = [case for case, kind in toy.kinds() if kind == "profiled"]
    assert [mode for _, mode in profiled] == ["forward"] * 2 + ["forward_backward"] * 2 + ["step"] * 2


def test_moments_exist_in_full_steps_only(toy):
    toy.measure()
    first, *later = [exists for case, kind, exists in toy.log if case == "step" and kind == "timed"]
    assert not first and all(later)
    assert all(exists for case, kind, exists in toy.log if case == "step" and kind == "profiled")
    assert not any(exists for case, _, exists in toy.log if case != "step")


@pytest.mark.parametrize(
    ("lasts_ms", "warmups", "profiled", "replays"), [(990.0, 2, 3, 5), (1010.0, 1, 2, 3)]
)
def test_long_steps_are_repeated_less_often(toy, monkeypatch, lasts_ms, warmups, profiled, replays):
    asked = {"warmups": [], "replays": []}
    real = protocol.time_steps

    def time_steps(step, steps, warmups, *rest, **options):
        asked["warmups"].append(warmups)
        samples = real(step, steps, warmups, *rest, **options)
        return samples.assign(wall_ms=[5000.0] * (len(samples) - 1) + [lasts_ms])  # the fastest

    monkeypatch.setattr(protocol, "time_steps", time_steps)
    monkeypatch.setattr(
        protocol, "replay", lambda *_, replays, **__: asked["replays"].append(replays) or ([1.0], "")
    )
    results = toy.measure(warmup_steps=4)
    assert asked == {"warmups": [4, warmups, warmups], "replays": [replays] * 2}
    assert results.profiled.groupby("case")["number"].nunique().to_dict() == dict.fromkeys(MODES, profiled)


# Readings


def test_readings_belong_to_their_case_and_rates_to_their_precision(toy, monkeypatch):
    """Peaks count up. Of three replays the median counts. Only a full step too short for the energy counter
    has its power measured in a run of its own."""
    peaks, watts, replayed = (
        count(1),
        iter([math.nan, math.nan, 6.0]),
        iter([[1.0, 20.0, 3.0], [9.0, 2.0, 4.0]]),
    )
    power = SimpleNamespace(
        read=lambda: None,
        per_step=lambda steps: {
            "energy_per_step_j": 60 / steps,
            "power_w": next(watts),
            "sm_clock_mhz": 1990.0,
            "clock_reasons": "power cap",
        },
    )
    settled, replays = [], []

    def replay(step, device, *, optimizer, clear, **options):
        replays.append((step.args[0], optimizer is toy.adamw, bool(toy.adamw.state)))
        return next(replayed), ""

    for name, answer in {
        "Power": lambda device: power,
        "peak_memory": lambda device: {"peak_gib": float(next(peaks))},
        "sustained_power": lambda step, device, before: {"power_w": 9.0, "energy_per_step_j": 8.0},
        "is_power_limited": lambda row: row["peak_gib"] == 2,
        "run_for": lambda step, *_: settled.append(step.args[0]),
        "replay": replay,
        "sheet_tflops": lambda *given: {("bf16", "cpu"): 8.0}[given],
        "formula_mismatch": lambda *given: "",
    }.items():
        monkeypatch.setattr(protocol, name, answer)
    monkeypatch.setattr(rates, "sheet_tflops", protocol.sheet_tflops)
    monkeypatch.setattr(rates.power, "highest_clock_mhz", lambda: 2000.0)
    results = toy.measure(precision="bf16", timed_steps=3)
    rows = totals(results).loc[[*MODES]]
    assert rows["clock_reasons"].tolist() == ["power cap"] * 3
    assert rows["peak_gib"].tolist() == [1, 2, 3] and rows["energy_per_step_j"].tolist() == [8, 20, 20]
    assert rows["power_w"].tolist() == pytest.approx([9, math.nan, 6], nan_ok=True)
    assert rows["replayed_ms"].tolist() == pytest.approx([4, math.nan, 3], nan_ok=True)
    assert replays == [("forward", False, False), ("step", True, False)], "without earlier moments"
    assert settled == ["forward_backward"], "the only one at the power limit"
    tflops = step_flops(results.config) / rows["wall_ms"] / [1, 1, 3] / 1e9
    for column, rate in (
        ("tflops", 1),
        ("mfu", 8),
        ("mfu_vs_measured_peak", 2),
        ("mfu_clock_adjusted", 8 * 1990 / 2000),
    ):
        assert rows[column].tolist() == pytest.approx((tflops / rate).tolist())


# Out of memory, and other failures


def test_a_case_that_runs_out_of_memory_while_timed_is_a_row_and_the_others_go_on(toy):
    def before(case, kind, phase):
        if case == "step":
            raise FULL

    toy.before = before
    results = toy.measure()
    rows = results.times.set_index(["mode", "phase"])
    failed = rows.loc["step"]
    assert failed.index.tolist() == [TOTAL] and failed["status"].tolist() == ["oom"]
    assert failed["reason"].tolist() == [
        "while timing step: while running step 0: CUDA out of memory. Tried 9 GiB."
    ]
    assert (rows.loc[["forward", "forward_backward"], "status"] == "ok").all()
    assert {*results.samples["mode"]} == {*results.operations["mode"]} == {"forward", "forward_backward"}


def test_out_of_memory_while_profiling_keeps_the_wall_times_and_no_part_of_that_step(toy):
    def before(case, kind, phase):
        if (case, kind) == ("step", "profiled") and toy.log.count((case, kind, True)) == 2:
            with phase("forward"):
                raise FULL

    toy.before = before
    results = toy.measure()
    rows = totals(results)
    assert (rows["status"] == "ok").all() and (rows["wall_ms"] > 0).all()
    assert rows["reason"]["step"] == "not profiled: while profiling: CUDA out of memory. Tried 9 GiB."
    numbers = results.profiled.groupby("case")["number"].unique().map(list).to_dict()
    assert numbers == {"step": [0], "forward": [0, 1, 2], "forward_backward": [0, 1, 2]}


def test_out_of_memory_in_the_ceilings_leaves_rates_unknown(toy, monkeypatch):
    def ceilings(device, names):
        raise FULL

    monkeypatch.setattr(protocol, "ceilings", ceilings)
    results = toy.measure()
    assert results.times["mfu_vs_measured_peak"].isna().all() and (results.times["status"] == "ok").all()
    assert results.limits["matmul_tflops"] is None


def test_a_case_that_runs_out_of_memory_while_it_compiles_is_still_timed(toy, monkeypatch):
    def seconds(step, device):
        step()
        if step.args == ("step",):
            raise FULL
        return 3.0

    monkeypatch.setattr(protocol, "seconds_with_compiling", seconds)
    rows = totals(toy.measure(compile="blocks"))
    assert rows["compile_s"].loc[[*MODES]].tolist() == pytest.approx([math.nan, 3, 3], nan_ok=True)
    assert (rows["status"] == "ok").all() and (rows["wall_ms"] > 0).all()
    assert not any(exists for case, kind, exists in toy.log if kind == "plain" and case != "step")


def test_a_missing_compiler_makes_every_case_unsupported(toy, monkeypatch):
    def seconds(step, device):
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", ValueError("no C++ compiler"), None)

    monkeypatch.setattr(protocol, "seconds_with_compiling", seconds)
    times = toy.measure(compile="blocks").times
    assert (times["status"] == "unsupported").all() and times["reason"].str.contains("no C").all()


@pytest.mark.parametrize("broken", ["profiled", "profiled_operations", "read"])
def test_a_profiler_that_fails_leaves_the_wall_times_and_says_why(monkeypatch, broken):
    def fail(*arguments):
        raise {
            "profiled": RuntimeError("CUPTI_ERROR_NOT_INITIALIZED"),
            "read": profiler.TraceError("torn"),
            "profiled_operations": profiler.CaptureError("lost"),
        }[broken]

    monkeypatch.setattr(profiler, broken, fail)
    results = Toy().measure()
    assert (results.times["status"] == "ok").all() and (results.times["wall_ms"] > 0).all()
    assert results.times[["gpu_ms", "busy", "operations"]].isna().all(axis=None) and results.operations.empty
    assert results.times["reason"].str.contains("CUPTI|torn|lost").all()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_call_keeps_what_it_has_measured_on_the_exception(toy, kind):
    def before(case, kind_of_step, phase):
        if case == "forward":
            raise kind

    toy.before = before
    with pytest.raises(kind) as raised:
        toy.measure()
    results = raised.value.results
    rows = totals(results)
    assert rows["status"].to_dict() == {"step": "ok", "forward_backward": "ok", "forward": "failed"}
    assert rows["reason"]["forward"] == f"not measured: {kind.__name__}"
    assert (rows["wall_ms"][["step", "forward_backward"]] > 0).all()
    assert {*results.samples["mode"]} == {"step", "forward_backward"}
    assert "sys.last_value.results" in raised.value.__notes__[0]


# Impossible readings


def planted(monkeypatch, odd_case, times):
    """Mark a case impossible in so many of the first tables; the wall times that it had."""
    real, walls = protocol.step_times, []

    def step_times(cases, *rest):
        table = real(cases, *rest)
        rows = (table["precision"] == odd_case[0]) & (table["mode"] == odd_case[1])
        walls.append(table.loc[rows & (table["phase"] == TOTAL), "wall_ms"].item())
        return table.assign(inconsistent=np.where(rows & (len(walls) <= times), "as planted", ""))

    monkeypatch.setattr(protocol, "step_times", step_times)
    return walls


@pytest.mark.parametrize("names", [MODES, CASES])
@pytest.mark.parametrize(("mode", "times", "tries"), [("step", 1, 2), ("forward", 9, 3)])
def test_an_impossible_case_is_measured_again_at_most_twice(toy, monkeypatch, names, mode, times, tries):
    walls = planted(monkeypatch, ("fp32", mode), times)
    results = toy.measure(names)
    assert len({*walls}) == tries
    odd = results.times[results.times["inconsistent"] != ""]
    assert {*odd["mode"]} == ({mode} if times >= tries else set())
    profiled = [case for case, kind in toy.kinds() if kind == "profiled"]
    repeated = mode if names is MODES else ("fp32", mode)
    assert all(profiled.count(case) == (tries if case == repeated else 1) for case in names)
    assert results.profiled.groupby("case")["number"].nunique().eq(3).all(), "new operations replace old ones"


def test_the_first_case_keeps_the_first_steps_of_the_process_when_it_is_measured_again(toy, monkeypatch):
    walls = planted(monkeypatch, ("fp32", "step"), 1)
    results = toy.measure(warmup_steps=5)
    first = results.samples.query("mode == 'step' and phase == 'total'")
    assert first["warmup"].sum() == 5
    assert first.loc[~first["warmup"], "wall_ms"].median() == walls[0]
    assert totals(results)["wall_ms"]["step"] == walls[-1] != walls[0]


def test_nothing_of_either_profile_is_left_when_the_second_one_runs_out_of_memory(toy, monkeypatch):
    planted(monkeypatch, ("fp32", "forward"), 1)

    def before(case, kind, phase):
        if (case, kind) == ("forward", "profiled") and toy.log.count((case, kind, False)) == 4:
            with phase("forward"):
                raise FULL

    toy.before = before
    results = toy.measure()
    row = totals(results).loc["forward"]
    assert np.isnan(row["gpu_ms"]) and row["wall_ms"] > 0 and "out of memory" in row["reason"]
    assert {*results.profiled["case"]} == {"step", "forward_backward"}
    assert [case for case, kind in toy.kinds() if kind == "timed"].count("forward") == 2


# The precisions of a device


def test_precisions_that_the_device_lacks_have_their_reason(monkeypatch):
    def require(config):
        if config.precision == "tf32":
            raise ConfigError("no TF32 here")

    monkeypatch.setattr(protocol, "require_device", require)
    config = configure("mixed_precision", **TINY)
    assert protocol.supported_precisions(config) == (["bf16"], {})
    on_gpu = config.model_copy(update={"device": "cuda"})
    assert protocol.supported_precisions(on_gpu) == (["bf16", "fp16"], {"tf32": "no TF32 here"})
