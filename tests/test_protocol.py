"""Test the measurement protocol with the steps of a small model."""

import math
from contextlib import nullcontext
from functools import partial
from itertools import count, groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cells import by_name, fastest_complete_step, step_flops, times_of
from conftest import TINY
from stepscope import measure
from stepscope.config import PHASES, TOTAL, ConfigError, StepConfig, configure
from stepscope.measure import profiler, protocol
from stepscope.measure.subject import NEGLIGIBLE_RATE
from stepscope.model.training_step import build_step
from stepscope.studies.benchmark import tables as benchmark

MODES = ["step", "forward_backward", "forward"]
PAIRS = [(precision, mode) for precision in ("bf16", "fp32") for mode in MODES]
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB. Including x")
nan = math.nan


class Toy:
    """A wrapper around the library's step for a tiny model.

    For each step, ``log`` contains the case, the kind of step ("plain", "timed" or "profiled"), and whether
    AdamW's moments exist. ``before`` is called before each step.
    """

    def __init__(self):
        self.built = build_step(StepConfig(**TINY, optimizer="fused"))
        self.adamw = self.built.optimizer
        batch = (self.built.tokens, self.built.targets)
        self.subject = measure.Subject(self.built.model, batch, optimizer=self.adamw)
        self.weight = self.built.model.embedding.weight
        self.log = []
        self.before = lambda case, kind, phase: None

    def step(self, case, phase=None):
        kind = {measure.Phases: "timed", type(None): "plain"}.get(type(phase), "profiled")
        assert self.weight.grad is None, "gradients are freed before each step"
        self.log.append((case, kind, bool(self.adamw.state)))
        self.before(case, kind, phase)
        self.built.of(mode=protocol.mode_of(case))(phase or nullcontext)

    def measure(self, cases=MODES, study="benchmark", options=None, **fields):
        config = configure(study, **TINY | {"warmup_steps": 1} | fields)
        steps = {case: partial(self.step, case) for case in cases}
        return measure.steps(self.subject, steps, config, **options or {})

    def cases_of(self, kind):
        return [case for (case, each), _ in groupby(self.log, key=lambda entry: entry[:2]) if each == kind]

    def fail(self, case, kind, error, steps=0):
        """Make a case fail in the forward pass after it has completed ``steps`` steps of this kind."""

        def before(step_case, step_kind, phase):
            earlier = sum(entry[:2] == (case, kind) for entry in self.log) - 1
            if (step_case, step_kind) == (case, kind) and earlier >= steps:
                with phase("forward"):
                    raise error

        self.before = before


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(protocol, "ceilings", lambda device, names: {f"matmul_{name}": 2.0 for name in names})
    return Toy()


def totals(results, by="mode"):
    return results.times.query("phase == 'total'").set_index(by)


# Results


def test_times_and_operations_match_samples_and_profile(toy):
    results = toy.measure(timed_steps=3)
    times = results.times
    keys = [(mode, phase) for mode in MODES for phase in [*PHASES[mode], TOTAL]]
    assert [*zip(times["mode"], times["phase"])] == keys
    for row in times.to_dict("records"):
        samples = results.samples[results.samples["mode"] == row["mode"]]
        profiled = results.profiled[results.profiled["case"] == row["mode"]]
        expected = times_of(samples, profiled, row["phase"]) | {"status": "ok", "reason": ""}
        assert {name: row[name] for name in expected} == pytest.approx(expected)
    for mode, rows in results.operations.groupby("mode"):
        fastest = fastest_complete_step(results.profiled[results.profiled["case"] == mode])
        assert rows["count"].sum() == len(fastest)
        by_phase = rows.set_index(["phase", "name"])["gpu_ms"].to_dict()
        assert by_phase == pytest.approx(by_name(fastest, "phase", "name"))
    for name in ("times", "operations"):
        benchmark.SCHEMAS[name].validate(results.tables[name])


@pytest.mark.parametrize(
    ("by", "options"), [("precision", {}), ("policy", {"by": "policy", "extras": False})]
)
def test_cases_keyed_by_pairs_get_a_column_for_each_element(toy, by, options):
    results = toy.measure(
        PAIRS, "mixed_precision", options | {"unsupported": {("fp16", "step"): "no fp16 here"}}
    )
    rows = totals(results, [by, "mode"])
    assert rows.index.tolist() == [*PAIRS, ("fp16", "step")]
    assert rows["status"].tolist() == ["ok"] * 6 + ["unsupported"]
    assert rows["reason"].tolist() == [""] * 6 + ["no fp16 here"]
    for table in (results.samples, results.operations):
        assert {*zip(table[by], table["mode"])} == {*PAIRS}


def test_extras_are_skipped_when_disabled(toy, monkeypatch):
    for name in ("replay", "ceilings", "sustained_power"):
        monkeypatch.setattr(protocol, name, lambda *_, **__: pytest.fail("an extra was measured"))
    assert "mfu" not in toy.measure(options={"extras": False}).times


def test_case_without_a_mode_is_rejected(toy):
    with pytest.raises(ConfigError, match="cases: got 'backward', but expected a mode"):
        toy.measure(["backward"])


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_measuring_keeps_the_weights_and_restores_the_learning_rate(toy, rate):
    [group] = toy.adamw.param_groups
    before, group["lr"] = toy.weight.clone(), rate
    assert toy.measure().learning_rate == pytest.approx(NEGLIGIBLE_RATE)
    assert torch.equal(toy.weight, before)
    assert group["lr"] is rate and float(rate) == pytest.approx(0.1)
    toy.subject.reset()
    toy.step("step")
    assert not torch.equal(toy.weight, before)


def test_learning_rate_is_none_without_an_optimizer(toy):
    toy.subject.optimizer = None
    assert toy.measure(["forward"]).learning_rate is None


# The order


def test_all_cases_are_timed_before_any_case_is_profiled_or_replayed(toy, monkeypatch):
    """Launches are slower once a profiler has run, so all cases must be timed before the first is profiled."""
    order = []

    def replay(step, *_, optimizer, **__):
        order.append(("replay", *step.args, bool(toy.adamw.state), optimizer))
        return [1.0], ""

    toy.before = lambda case, kind, phase: order.append((kind, case, bool(toy.adamw.state)))
    monkeypatch.setattr(protocol, "reset_peak_memory", lambda _: order.append(bool(toy.adamw.state)))
    monkeypatch.setattr(protocol, "replay", replay)
    monkeypatch.setattr(protocol, "ceilings", lambda device, names: order.append("ceilings") or {})
    toy.measure()
    assert [entry for entry, _ in groupby(order)] == [
        False,
        ("timed", "step", False),
        ("timed", "step", True),
        False,
        ("timed", "forward_backward", False),
        False,
        ("timed", "forward", False),
        ("profiled", "forward", False),
        ("profiled", "forward_backward", False),
        ("plain", "step", False),
        ("profiled", "step", True),
        ("replay", "forward", False, None),
        ("replay", "step", False, toy.adamw),
        "ceilings",
    ]


@pytest.mark.parametrize(
    ("fastest_ms", "warmups", "profiled", "replays"), [(990.0, 2, 3, 5), (1010.0, 1, 2, 3)]
)
def test_long_steps_are_repeated_less_often(toy, monkeypatch, fastest_ms, warmups, profiled, replays):
    asked = []
    time_steps = protocol.time_steps

    def slow_steps(step, steps, warmups, *rest, **options):
        asked.append(warmups)
        samples = time_steps(step, steps, warmups, *rest, **options)
        samples["wall_ms"] = [5000.0] * (len(samples) - 1) + [fastest_ms]
        return samples

    def replay(*_, replays, **__):
        asked.append(replays)
        return [1.0], ""

    monkeypatch.setattr(protocol, "time_steps", slow_steps)
    monkeypatch.setattr(protocol, "replay", replay)
    results = toy.measure(warmup_steps=4)
    assert asked == [4, warmups, warmups, replays, replays]
    assert (results.profiled.groupby("case")["number"].nunique() == profiled).all()


def test_readings_and_rates_are_assigned_to_their_case(toy, monkeypatch):
    """If the timed steps are too short for the energy counter, only a full step is run again to measure power."""
    peaks, watts, replayed_ms = count(1), iter([nan, nan, 6.0]), iter([[1.0, 20.0, 3.0], [9.0, 2.0, 4.0]])
    settled = []

    def per_step(steps):
        return {"energy_per_step_j": 60 / steps, "power_w": next(watts), "sm_clock_mhz": 1990.0}

    for name, function in {
        "Power": lambda device: SimpleNamespace(read=lambda: None, per_step=per_step),
        "peak_memory": lambda device: {"peak_gib": float(next(peaks))},
        "sustained_power": lambda *_: {"power_w": 9.0, "energy_per_step_j": 8.0},
        "is_power_limited": lambda row: row["peak_gib"] == 2,
        "run_for": lambda step, *_: settled.append(step.args[0]),
        "replay": lambda *_, **__: (next(replayed_ms), ""),
    }.items():
        monkeypatch.setattr(protocol, name, function)
    results = toy.measure(precision="bf16", timed_steps=3)
    rows = totals(results).loc[MODES]
    for column, expected in {
        "peak_gib": [1, 2, 3],
        "energy_per_step_j": [8, 20, 20],
        "power_w": [9, nan, 6],
        "replayed_ms": [4, nan, 3],
    }.items():
        assert rows[column].tolist() == pytest.approx(expected, nan_ok=True)
    assert settled == ["forward_backward"], "only the power-limited case settles the clock"
    tflops = step_flops(results.config) / rows["wall_ms"] / [1, 1, 3] / 1e9
    assert rows["mfu_vs_measured_peak"].tolist() == pytest.approx((tflops / 2).tolist())


# Failures


def test_case_that_runs_out_of_memory_while_timed_gets_one_row_and_the_rest_are_measured(toy):
    toy.fail("step", "timed", FULL)
    results = toy.measure()
    columns = ["mode", "phase", "status"]
    assert results.times.loc[0, columns].tolist() == ["step", TOTAL, "oom"]
    assert (
        results.times["reason"][0]
        == "while timing step: while running step 0: CUDA out of memory. Tried 9 GiB."
    )
    assert set(results.times["status"][1:]) == {"ok"}
    assert {*results.samples["mode"]} == {*results.operations["mode"]} == {"forward", "forward_backward"}


def test_case_that_runs_out_of_memory_while_profiled_keeps_wall_time_and_complete_steps(toy):
    toy.fail("step", "profiled", FULL, steps=1)
    results = toy.measure()
    rows = totals(results)
    assert set(rows["status"]) == {"ok"} and (rows["wall_ms"] > 0).all()
    assert rows["reason"]["step"] == "not profiled: while profiling: CUDA out of memory. Tried 9 GiB."
    numbers = results.profiled.groupby("case")["number"].max()
    assert numbers.to_dict() == {"step": 0, "forward": 2, "forward_backward": 2}


def raises(error):
    def fail(*_):
        raise error

    return fail


def test_rates_are_unknown_when_measuring_ceilings_runs_out_of_memory(toy, monkeypatch):
    monkeypatch.setattr(protocol, "ceilings", raises(FULL))
    results = toy.measure()
    assert results.times["mfu_vs_measured_peak"].isna().all() and set(results.times["status"]) == {"ok"}
    assert results.limits["matmul_tflops"] is None


def test_case_that_runs_out_of_memory_while_compiling_is_still_timed(toy, monkeypatch):
    def seconds(step, device):
        step()
        if step.args == ("step",):
            raise FULL
        return 3.0

    monkeypatch.setattr(protocol, "seconds_with_compiling", seconds)
    rows = totals(toy.measure(compile="blocks")).loc[MODES]
    assert rows["compile_s"].tolist() == pytest.approx([nan, 3, 3], nan_ok=True)
    assert set(rows["status"]) == {"ok"} and (rows["wall_ms"] > 0).all()
    assert ("forward_backward", "plain", False) in toy.log, "the failed step's moments must be freed"


def test_all_cases_are_unsupported_without_a_compiler(toy, monkeypatch):
    error = torch._dynamo.exc.BackendCompilerFailed("inductor", ValueError("no C++ compiler"), None)
    monkeypatch.setattr(protocol, "seconds_with_compiling", raises(error))
    times = toy.measure(compile="blocks").times
    assert set(times["status"]) == {"unsupported"} and times["reason"].str.contains("no C").all()


@pytest.mark.parametrize("broken", ["profiled", "profiled_operations"])
def test_wall_times_are_kept_and_a_reason_is_recorded_when_the_profiler_fails(toy, monkeypatch, broken):
    monkeypatch.setattr(profiler, broken, raises(profiler.CaptureError("CUPTI_ERROR")))
    results = toy.measure()
    assert set(results.times["status"]) == {"ok"} and (results.times["wall_ms"] > 0).all()
    assert results.times[["gpu_ms", "busy", "operations"]].isna().all(axis=None) and results.operations.empty
    assert results.times["reason"].str.contains("CUPTI_ERROR").all()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupt_attaches_results_to_the_exception_and_restores_the_learning_rate(toy, kind):
    toy.fail("forward", "timed", kind())
    with pytest.raises(kind) as raised:
        toy.measure()
    results = raised.value.results
    rows = totals(results)
    assert rows["status"].to_dict() == {"step": "ok", "forward_backward": "ok", "forward": "failed"}
    assert rows["reason"]["forward"] == f"not measured: {kind.__name__}"
    assert {*results.samples["mode"]} == {"step", "forward_backward"}
    assert "sys.last_value.results" in raised.value.__notes__[0]
    assert toy.adamw.param_groups[0]["lr"] == 1e-3 and results.learning_rate == NEGLIGIBLE_RATE


# Impossible readings


def mark_inconsistent(monkeypatch, mode, tables):
    """Mark an fp32 mode as inconsistent in the first ``tables`` tables of times.

    Return a list that collects the mode's wall time from each table.
    """
    step_times, walls_ms = protocol.step_times, []

    def marked_times(*arguments):
        times = step_times(*arguments)
        is_mode = (times["precision"] == "fp32") & (times["mode"] == mode)
        walls_ms.append(times.loc[is_mode & (times["phase"] == TOTAL), "wall_ms"].item())
        is_marked = is_mode & (len(walls_ms) <= tables)
        return times.assign(inconsistent=np.where(is_marked, "as planted", ""))

    monkeypatch.setattr(protocol, "step_times", marked_times)
    return walls_ms


@pytest.mark.parametrize(("mode", "tables", "tries"), [("step", 1, 2), ("forward", 9, 3)])
def test_only_the_impossible_case_is_remeasured_at_most_twice(toy, monkeypatch, mode, tables, tries):
    walls_ms = mark_inconsistent(monkeypatch, mode, tables)
    results = toy.measure(PAIRS, "mixed_precision")
    assert len({*walls_ms}) == tries
    still_marked = results.times[results.times["inconsistent"] != ""]
    assert {*still_marked["mode"]} == ({mode} if tables >= tries else set())
    profiled = toy.cases_of("profiled")
    expected = dict.fromkeys(PAIRS, 1) | {("fp32", mode): tries}
    assert {case: profiled.count(case) for case in PAIRS} == expected
    numbers = results.profiled.groupby("case")["number"].nunique()
    assert (numbers == 3).all(), "the operations of the new profile replace those of the earlier profile"


def test_first_case_keeps_the_first_steps_of_the_process_when_remeasured(toy, monkeypatch):
    walls_ms = mark_inconsistent(monkeypatch, "step", 1)
    results = toy.measure(warmup_steps=5)
    first = results.samples.query("mode == 'step' and phase == 'total'")
    assert first["warmup"].sum() == 5 and measure.wall_times_ms(first).median() == walls_ms[0]
    assert totals(results)["wall_ms"]["step"] == walls_ms[-1] != walls_ms[0]


def test_operations_are_dropped_when_a_second_profile_runs_out_of_memory(toy, monkeypatch):
    mark_inconsistent(monkeypatch, "forward", 1)
    toy.fail("forward", "profiled", FULL, steps=3)
    results = toy.measure()
    row = totals(results).loc["forward"]
    assert math.isnan(row["gpu_ms"]) and row["wall_ms"] > 0 and "out of memory" in row["reason"]
    assert {*results.profiled["case"]} == {"step", "forward_backward"}
    assert toy.cases_of("timed").count("forward") == 2


def test_unsupported_precisions_get_a_reason(monkeypatch):
    def require(config):
        if config.precision == "tf32":
            raise ConfigError("no TF32 here")

    monkeypatch.setattr(protocol, "require_device", require)
    config = configure("mixed_precision", **TINY)
    assert protocol.supported_precisions(config) == (["bf16"], {})
    gpu_config = config.model_copy(update={"device": "cuda"})
    assert protocol.supported_precisions(gpu_config) == (["bf16", "fp16"], {"tf32": "no TF32 here"})
