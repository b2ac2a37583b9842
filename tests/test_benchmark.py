"""The benchmarking study: a run's tables on a CPU, what does not fit, what cannot be captured, and its tables."""
import math

import numpy as np
import pandas as pd
import pytest
import torch

from stepscope.config import PHASES
from stepscope.step.clocks import WHOLE
from stepscope.studies.benchmark import measure as measuring
from stepscope.studies.benchmark.config import Config
from stepscope.studies.benchmark.measure import MODES, finding, measure
from stepscope.studies.benchmark.tables import SCHEMAS, largest, one_run, warm_up
from stepscope.traces import in_process
from stepscope.traces.in_process import launch_rate

TINY = {"device": "cpu", "size": "nano", "vocab_size": 50, "context_length": 8, "batch_size": 1}


def checked(tables):
    return {name: SCHEMAS[name].validate(table) for name, table in tables.items()}


@pytest.fixture(scope="module")
def run():
    tables, results = measure(Config(**TINY))
    return checked(tables), results


def test_a_run_has_every_phase_of_every_mode_by_both_clocks(run):
    times = run[0]["times"]
    assert list(times[["mode", "phase"]].itertuples(index=False, name=None)) == [
        (mode, phase) for mode in MODES for phase in [*PHASES[mode], WHOLE]]
    assert (times["status"] == "ok").all() and (times["reason"] == "").all()
    assert (times[["wall_ms", "enqueue_ms", "gpu_ms", "operations"]] > 0).all(axis=None)
    assert (times["wall_q1_ms"] <= times["wall_ms"]).all() and (times["wall_ms"] <= times["wall_q3_ms"]).all()
    assert np.allclose(times["busy"], times["gpu_ms"] / times["wall_ms"])


def test_the_wholes_operations_are_those_of_its_phases_and_of_its_names(run):
    times, operations = run[0]["times"], run[0]["operations"]
    phases = times[times["phase"] != WHOLE].groupby("mode")["operations"].sum()
    whole = times[times["phase"] == WHOLE].set_index("mode")
    assert phases.to_dict() == whole["operations"].to_dict() == operations.groupby("mode")["count"].sum().to_dict()
    forward = operations[operations["phase"] == "forward"].pivot(index="name", columns="mode", values="count")
    assert forward.notna().all(axis=None) and (forward["step"] == forward["forward_backward"]).all()
    assert "matrix multiply" in set(operations["family"])


def test_the_full_step_is_sampled_from_the_first_of_the_process(run):
    samples = run[0]["samples"]
    whole = samples[samples["phase"] == WHOLE]
    assert whole.groupby("mode")["step"].max().to_dict() == {"step": 14, "forward_backward": 11, "forward": 11}
    assert whole.groupby("mode")["warmup"].sum().to_dict() == {"step": 5, "forward_backward": 2, "forward": 2}
    times = run[0]["times"].set_index(["mode", "phase"])["wall_ms"]
    warm = whole[~whole["warmup"]].groupby("mode")["wall_ms"].median()
    assert all(times[mode, WHOLE] == pytest.approx(warm[mode]) for mode in MODES)


def test_on_a_cpu_there_is_no_graph_no_clock_and_no_sheet(run):
    times, results = run[0]["times"], run[1]
    of_gpu = ["replayed_ms", "peak_gib", "sm_clock_mhz", "power_w", "step_j", "mfu", "mfu_at_clock", "compile_s"]
    assert times[of_gpu].isna().all(axis=None)
    told = times.set_index(["mode", "phase"])["replay_reason"]
    assert told["step", WHOLE] == told["forward", WHOLE] == "a CPU has no CUDA graphs"
    assert results["sheet_tflops"] is None and results["matmul_tflops"] > 0 and results["parameters"] > 0
    assert launch_rate("cpu") is None


def test_reading_a_run_in_its_notebook(run):
    shown = one_run(run[0]["times"])
    assert len(shown) == len(run[0]["times"]) and "MFU, %" not in shown and "wall, ms" in shown
    assert "ms" in finding(run[0]["times"])


def test_what_does_not_fit_is_a_row_and_the_other_modes_go_on(monkeypatch):
    def steps(step, *arguments):
        if step.mode == "step":
            raise torch.OutOfMemoryError("while running step 0: CUDA out of memory. Tried 9 GiB. Including x")
        return plain_steps(step, *arguments)
    plain_steps = in_process.plain_steps
    monkeypatch.setattr(in_process, "plain_steps", steps)
    tables = checked(measure(Config(**TINY))[0])
    times = tables["times"].set_index(["mode", "phase"])
    assert times.loc[("step", WHOLE), ["status", "reason"]].tolist() == [
        "oom", "while running step 0: CUDA out of memory. Tried 9 GiB."]
    assert len(times.loc["step"]) == 1 and math.isnan(times.loc[("step", WHOLE), "wall_ms"])
    assert times.loc[("forward", WHOLE), "gpu_ms"] > 0 and times.loc[("forward_backward", WHOLE), "gpu_ms"] > 0
    assert set(tables["samples"]["mode"]) == set(tables["operations"]["mode"]) == {"forward", "forward_backward"}
    assert "Forward + backward" in finding(tables["times"])


def test_weights_that_do_not_fit_are_a_row_a_mode():
    huge = {"d_model": 2, "d_ff": 1, "num_layers": 1, "num_heads": 1, "vocab_size": 2, "context_length": 12_000_000}
    tables, results = measure(Config(**huge, device="cpu"))
    times = checked(tables)["times"]
    assert times[["mode", "phase", "status"]].values.tolist() == [[mode, WHOLE, "oom"] for mode in MODES]
    assert times["reason"].str.contains("building the model").all() and results["parameters"] > 0
    assert "building the model" in finding(times)
    assert warm_up(tables["samples"]).empty and largest(tables["operations"]).empty


@pytest.mark.parametrize("broken", ["profiled", "read_events", "captured_operations"])
def test_a_capture_that_failed_leaves_the_wall_times_and_says_why(monkeypatch, broken):
    def fail(*arguments):
        raise {"profiled": RuntimeError("CUPTI_ERROR_NOT_INITIALIZED"), "read_events": in_process.TraceError("torn"),
               "captured_operations": in_process.CaptureError("lost")}[broken]
    monkeypatch.setattr(in_process, broken, fail)
    tables = checked(measure(Config(**TINY))[0])
    times = tables["times"]
    assert (times["status"] == "ok").all() and (times["wall_ms"] > 0).all()
    assert times[["gpu_ms", "busy", "operations"]].isna().all(axis=None) and tables["operations"].empty
    assert times["reason"].str.contains("CUPTI|torn|lost").all() and times["reason"][0] in finding(times)


def test_out_of_memory_in_the_capture_leaves_the_wall_times_of_that_mode_alone(monkeypatch):
    def steps(mode, index, count):
        if mode.step.mode == "step":
            raise torch.OutOfMemoryError("while capturing: no room")
        captured_steps(mode, index, count)
    captured_steps = in_process.captured_steps
    monkeypatch.setattr(in_process, "captured_steps", steps)
    whole = measure(Config(**TINY))[0]["times"].query("phase == 'whole'").set_index("mode")
    assert (whole["wall_ms"] > 0).all() and (whole["status"] == "ok").all()
    assert math.isnan(whole.loc["step", "gpu_ms"]) and "no room" in whole.loc["step", "reason"]
    assert whole.loc["forward", "gpu_ms"] > 0


def test_all_that_the_host_times_is_timed_before_anything_is_captured(monkeypatch):
    order = []

    def noting(name, called):
        return lambda *arguments: (order.append(name), called(*arguments))[1]
    for name in ("plain", "captured_steps", "replay"):
        monkeypatch.setattr(in_process, name, noting(name, getattr(in_process, name)))
    measure(Config(**TINY))
    assert order == ["plain"] * 3 + ["captured_steps"] * 3 + ["replay"] * 2


def test_modes_without_an_optimizer_have_none_of_its_memory(monkeypatch):
    states = {}

    def steps(step, *arguments):
        states[step.mode] = len(step.optimizer.state)
        return plain_steps(step, *arguments)
    plain_steps = in_process.plain_steps
    monkeypatch.setattr(in_process, "plain_steps", steps)
    measure(Config(**TINY))
    assert states == {"step": 0, "forward_backward": 0, "forward": 0}


def test_a_repeat_is_another_run():
    assert len({Config(**TINY, repeat=repeat).run_id for repeat in range(3)}) == 3
    assert Config(**TINY, repeat=0).run_id == Config(**TINY).run_id


# The findings

def gpu_times(**whole):
    rows = [{"mode": mode, "phase": WHOLE, "wall_ms": 100.0, "gpu_ms": 40.0, "busy": 0.4, "replayed_ms": 41.0,
             "sm_clock_mhz": 1980.0, "tokens_per_s": 5000.0, "mfu_measured": 0.5, "status": "ok", "reason": ""} | whole
            for mode in MODES]
    return pd.DataFrame(rows)


def test_a_launch_bound_finding_is_in_gpu_time_and_says_so():
    assert all(word in finding(gpu_times()) for word in ("launch-bound", "40.0 ms", "100 ms", "60%", "CUDA graph", "41.0 ms"))
    assert "CUDA graph" not in finding(gpu_times(replayed_ms=math.nan))
    bound = finding(gpu_times(gpu_ms=99.0, busy=0.99))
    assert "GPU-bound" in bound and "launch-bound" not in bound and "50%" in bound


# Warm-up

def cold_samples(walls, warmups=5, **config):
    return pd.DataFrame({"mode": "step", "step": range(len(walls)), "warmup": [i < warmups for i in range(len(walls))],
                         "phase": WHOLE, "wall_ms": walls, "enqueue_ms": 0.0, **config})


def test_warm_up_is_answered_by_leaving_out_the_first_steps():
    walls = [1000.0, 30.0, 20.0, *[10.0] * 12]
    found = warm_up(cold_samples(walls)).set_index("warmups")
    assert found["mean_ms"].to_dict() == pytest.approx({0: 112, 1: 13, 2: 11, 5: 10})
    assert found["std_ms"][0] == pytest.approx(np.std(walls[:10], ddof=1)) and found["std_ms"][5] == 0
    assert found["first_ms"].to_dict() == {0: 1000, 1: 30, 2: 20, 5: 10}


def test_warm_up_is_told_by_configuration_and_as_far_as_there_are_steps():
    both = pd.concat([cold_samples([9.0] * 15, size="small", repeat=0), cold_samples([7.0] * 12, 2, size="large", repeat=0)])
    found = warm_up(both)
    assert found.groupby("size")["warmups"].apply(list).to_dict() == {"small": [0, 1, 2, 5], "large": [0, 1, 2]}
    assert warm_up(both.iloc[:0]).empty


def test_compiling_is_timed_by_mode_and_before_the_turn(monkeypatch):
    compiled = []

    def modes(step):
        compiled.append(step.config.compile)
        return {"step": 9.0, "forward_backward": 0.1, "forward": 3.0}
    monkeypatch.setattr(measuring, "compile_modes", modes)
    monkeypatch.setattr("stepscope.step.training_step.compile_parts", lambda model, parts: None)
    times = measure(Config(**TINY, compile="blocks"))[0]["times"]
    whole = times[times["phase"] == WHOLE].set_index("mode")["compile_s"]
    assert compiled == ["blocks"] and whole.to_dict() == {"step": 9.0, "forward_backward": 0.1, "forward": 3.0}
    assert times.loc[times["phase"] != WHOLE, "compile_s"].isna().all()


def test_without_a_compiler_that_works_every_mode_says_so(monkeypatch):
    def modes(step):
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", ValueError("no C++ compiler"), None)
    monkeypatch.setattr(measuring, "compile_modes", modes)
    monkeypatch.setattr("stepscope.step.training_step.compile_parts", lambda model, parts: None)
    times = measure(Config(**TINY, compile="blocks"))[0]["times"]
    assert (times["status"] == "unsupported").all() and times["reason"].str.contains("no C").all()
