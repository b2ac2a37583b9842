"""The benchmarking study: a run's tables on a CPU, what does not fit, what cannot be captured, and its tables."""
import inspect
import math

import numpy as np
import pandas as pd
import pytest
import torch

from stepscope.config import PHASES
from stepscope.report.tables import markdown
from stepscope.step.clocks import WHOLE
from stepscope.studies.benchmark import claims, figures
from stepscope.studies.benchmark import measure as measuring
from stepscope.studies.benchmark.config import Config
from stepscope.studies.benchmark.measure import MODES, finding, measure
from stepscope.studies.benchmark.tables import CONFIG, PRINTED, SCHEMAS, largest, one_run, warm_up
from stepscope.traces import in_process

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
    assert "MFU, %" not in one_run(times) and "ms" in finding(times)


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


@pytest.mark.parametrize("broken", ["profiled", "own_records", "captured_operations"])
def test_a_capture_that_failed_leaves_the_wall_times_and_says_why(monkeypatch, broken):
    def fail(*arguments):
        raise {"profiled": RuntimeError("CUPTI_ERROR_NOT_INITIALIZED"), "own_records": in_process.TraceError("torn"),
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


def test_of_a_captured_step_that_ran_out_of_memory_the_part_is_in_no_number(monkeypatch):
    def steps(mode, index, count):
        captured_steps(mode, index, 1)
        if mode.step.mode == "step":
            with in_process.record_function(f"{in_process.RANGE}/{index}/1/forward"):
                torch.ones(2).add(1)
            raise torch.OutOfMemoryError("while capturing: no room")
    captured_steps = in_process.captured_steps
    monkeypatch.setattr(in_process, "captured_steps", steps)
    whole = measure(Config(**TINY))[0]["times"].query("phase == 'whole'").set_index("mode")
    assert whole.loc["step", "operations"] > whole.loc["forward_backward", "operations"]
    assert "no room" in whole.loc["step", "reason"]


def test_all_that_the_host_times_is_timed_before_anything_is_captured(monkeypatch):
    order = []

    def noting(name, called):
        return lambda *arguments: (order.append(name), called(*arguments))[1]
    for name in ("plain", "captured_steps", "replay"):
        monkeypatch.setattr(in_process, name, noting(name, getattr(in_process, name)))
    measure(Config(**TINY))
    assert order == ["plain"] * 3 + ["captured_steps"] * 3 + ["replay"] * 2


@pytest.mark.parametrize(("busy", "said"), [(0.4, "40% of it: launch-bound"), (0.99, "99.0% of it: GPU-bound")])
def test_a_finding_says_what_binds_the_step(busy, said):
    row = {"phase": WHOLE, "wall_ms": 100.0, "gpu_ms": 100 * busy, "busy": busy, "status": "ok",
           "sm_clock_mhz": 1980.0, "tokens_per_s": 5000.0, "reason": ""}
    assert said in finding(pd.DataFrame([row | {"mode": mode} for mode in MODES]))


# Warm-up and compiling

def cold_samples(walls, warmups=5, **config):
    return pd.DataFrame({"mode": "step"} | config | {"step": range(len(walls)), "warmup": [i < warmups for i in range(len(walls))],
                         "phase": WHOLE, "wall_ms": walls, "enqueue_ms": 0.0})


def test_warm_up_is_answered_by_leaving_out_the_first_steps():
    walls = [1000.0, 30.0, 20.0, *[10.0] * 12]
    found = warm_up(cold_samples(walls)).set_index("warmups")
    assert found["mean_ms"].to_dict() == pytest.approx({0: 112, 1: 13, 2: 11, 5: 10})
    assert found["std_ms"][0] == pytest.approx(np.std(walls[:10], ddof=1)) and found["std_ms"][5] == 0
    assert found["first_ms"].to_dict() == {0: 1000, 1: 30, 2: 20, 5: 10}
    assert warm_up(cold_samples([7.0] * 12, 2))["warmups"].tolist() == [0, 1, 2], "as far as there are steps"


@pytest.mark.parametrize("works", [True, False])
def test_compiling_is_timed_by_mode_or_says_why_it_cannot_be(monkeypatch, works):
    def modes(step):
        if not works:
            raise torch._dynamo.exc.BackendCompilerFailed("inductor", ValueError("no C++ compiler"), None)
        return {"step": 9.0, "forward_backward": 0.1, "forward": 3.0}
    monkeypatch.setattr(measuring, "compile_modes", modes)
    monkeypatch.setattr("stepscope.step.training_step.compile_parts", lambda model, parts: None)
    times = measure(Config(**TINY, compile="blocks"))[0]["times"]
    if works:
        whole = times[times["phase"] == WHOLE].set_index("mode")["compile_s"]
        assert whole.to_dict() == {"step": 9.0, "forward_backward": 0.1, "forward": 3.0}
        assert times.loc[times["phase"] != WHOLE, "compile_s"].isna().all()
    else:
        assert (times["status"] == "unsupported").all() and times["reason"].str.contains("no C").all()


# Over all runs

GPU_MS = {"small": 10.0, "large": 100.0, "2.7B": 1000.0}  # of a full fp32 step at context 512
SHARES = {"forward": 0.3, "loss": 0.02, "backward": 0.55, "optimizer": 0.13}
LAUNCH_MS = {"small": 30.0, "large": 90.0, "2.7B": 80.0}


def mode_rows(size, context, scale=1.0, fused=1.0, wall=1.0, **config):
    """One run's times: kernels in proportion to the context, launches that do not depend on it."""
    found = {"size": size, "context_length": context, "batch_size": 4, "vocab_size": 10_000, "precision": "fp32",
             "attention": "naive", "compile": "none", "optimizer": "foreach", "repeat": 0} | config
    step = GPU_MS[size] * context / 512 * scale
    for mode, names in PHASES.items():
        gpu = {phase: step * SHARES[phase] / (fused if phase == "optimizer" else 1) for phase in names}
        gpu[WHOLE] = sum(gpu.values())
        for phase, ms in gpu.items():
            wall_ms = max(ms, LAUNCH_MS[size] * sum(SHARES[name] for name in names) * wall)
            row = {"mode": mode, "phase": phase, "wall_ms": wall_ms, "wall_std_ms": wall_ms * (0.1 if ms < wall_ms else 0.001),
                   "wall_q1_ms": wall_ms, "wall_q3_ms": wall_ms, "enqueue_ms": 1.0, "gpu_ms": ms, "busy": ms / wall_ms,
                   "operations": 1000.0, "status": "ok", "reason": "", "replay_reason": ""}
            if phase == WHOLE:
                row |= {"replayed_ms": ms * 1.01, "peak_gib": step, "mfu": 0.5, "mfu_measured": 0.7, "mfu_at_clock": 0.6,
                        "sm_clock_mhz": 1980.0, "power_w": 600.0, "step_j": 6.0}
            yield found | dict.fromkeys(("replayed_ms", "peak_gib", "compile_s", "mfu"), math.nan) | row


def named(rows):
    """Of each phase two names: a matmul and another; compiled there are half as many of the other."""
    for row in rows:
        matmul = {"small": 0.6, "large": 0.7, "2.7B": 0.8}[row["size"]]
        if row["phase"] != WHOLE:
            kept = {name: row[name] for name in ("mode", "phase", "gpu_ms", *CONFIG)}
            half = 2 if row["compile"] != "none" else 1
            yield kept | {"name": "gemm", "family": "matrix multiply", "count": 100.0, "gpu_ms": row["gpu_ms"] * matmul}
            yield kept | {"name": "add", "family": "elementwise", "count": 800.0 / half,
                          "gpu_ms": row["gpu_ms"] * (1 - matmul) / half}


def campaign():
    shapes = [(size, context) for size in GPU_MS for context in (128, 512)]
    eager = [row for shape in shapes for row in mode_rows(*shape)]
    low = [row for shape in shapes for row in mode_rows(*shape, scale=0.25, precision="bf16")]
    for row in low:  # mixed_precision has no repeats
        del row["repeat"]
    blocks = [row | {"compile_s": 12.0} for size in GPU_MS
              for row in mode_rows(size, 512, 0.2, wall=0.5, precision="bf16", compile="blocks")]
    model = [row | {"compile_s": 40.0} for size in GPU_MS for row in mode_rows(size, 512, 0.8, compile="model")]
    fused = [row for size in GPU_MS for row in mode_rows(size, 512, fused=3.0, optimizer="fused")]
    again = [row for repeat, off in ((1, 1.002), (2, 0.999))
             for row in mode_rows("small", 512, off, wall=1 + repeat / 4, repeat=repeat)]
    tiny = list(mode_rows("small", 16, batch_size=1))
    own = [*eager, *blocks, *model, *fused, *again, *tiny]
    samples = [cold_samples([row["wall_ms"] * (50 if i == 0 else 1.005 if i < 4 else 1) for i in range(15)],
                            **{name: row[name] for name in ("mode", *CONFIG)}) for row in own if row["phase"] == WHOLE]
    operations = pd.DataFrame(named(row | {"repeat": 0} for row in low)).drop(columns="repeat")
    results = pd.DataFrame([{"size": size, "batch_size": 4, "vocab_size": 10_000, "parameters": 1e9} for size in GPU_MS])
    return {"benchmark.times": pd.DataFrame(own), "benchmark.results": results, "benchmark.samples": pd.concat(samples, ignore_index=True),
            "benchmark.operations": pd.DataFrame(named(own)), "mixed_precision.times": pd.DataFrame(low),
            "mixed_precision.operations": operations}


@pytest.fixture(scope="module")
def all_runs():
    return campaign()


def functions(module):
    return {name: found for name, found in vars(module).items()
            if inspect.isfunction(found) and found.__module__ == module.__name__ and not name.startswith("_")}


DRAWN = [*PRINTED.values(), *functions(figures).values()]


@pytest.mark.parametrize("say", [*functions(claims).values(), *DRAWN])
def test_all_is_said_where_there_are_data_and_nothing_of_an_empty_folder(say, all_runs):
    assert say(all_runs) is not None
    with pytest.raises(LookupError):
        say({})


def test_the_numbers_of_claims_are_those_of_the_tables(all_runs):
    bound = claims.launch_bound_forward(all_runs)
    assert (bound["size"], bound["context"], bound["operations"]) == ("small", 128, 1000)
    assert bound["gpu"] == pytest.approx(10 * 0.25 * 0.25 * 0.3) and bound["wall"] == pytest.approx(9)
    assert bound["idle"] == pytest.approx(1 - bound["gpu"] / bound["wall"]) and bound["launch"] == pytest.approx(9)
    assert claims.phases_fp32(all_runs) == pytest.approx(
        {"size": "2.7B", "context": 512, "forward": 0.3, "backward": 0.55, "optimizer": 0.13})
    assert claims.fused_adamw(all_runs) == {"size": "2.7B", "gain": pytest.approx(3.0, rel=0.01)}
    assert claims.compile_kernels(all_runs)["before"] == 2400 and claims.compile_kernels(all_runs)["after"] == 1200
    assert claims.repeats(all_runs) == pytest.approx({"processes": 3, "shapes": 1, "gpu": 1.002 / 0.999 - 1, "wall": 0.5})
    assert claims.launch_bound_where(all_runs) == {"short": 3, "long": 2, "sizes": 3, "short_context": 128, "long_context": 512}
    assert claims.launch_rate(all_runs) == pytest.approx({"low": 30.0, "high": 30.0})
    assert claims.answer_std(all_runs) == pytest.approx({"gpu_bound": 0.001, "launch_bound": 0.1})
    assert claims.answer_warmup(all_runs)["first"] == pytest.approx(30 * 49)
    assert claims.answer_warmup_one(all_runs) == {"of": 2, "most": pytest.approx(0.005)}


def with_times(all_runs, change, **which):
    times = all_runs["benchmark.times"].copy()
    rows = np.logical_and.reduce([times[name] == value for name, value in which.items()])
    times.loc[rows, list(change)] = list(change.values())
    return all_runs | {"benchmark.times": times}


def test_a_claim_that_does_not_hold_is_not_said(all_runs):
    for claim, change, which in [
            ("fused_adamw", {"gpu_ms": 1e6}, {"optimizer": "fused", "phase": "optimizer"}),
            ("backward_ratio", {"gpu_ms": 1e6}, {"phase": "backward", "compile": "none"}),
            ("compile_memory", {"peak_gib": 1e6}, {"compile": "blocks"}),
            ("compile_gain", {"gpu_ms": np.nan}, {"compile": "blocks", "size": "small"}),
            ("repeats", {"gpu_ms": 20.0}, {"repeat": 2}), ("repeats", {"wall_ms": 61.0}, {"size": "small"}),
            ("matmul_rate", {"mfu_measured": 0.3}, {"phase": WHOLE}),
            ("answer_std", {"wall_std_ms": 50.0}, {"phase": WHOLE})]:
        changed = with_times(all_runs, change, **which)
        if claim == "compile_gain":
            changed = with_times(changed, change, compile="blocks", size="large")
        assert getattr(claims, claim)(changed) is None, claim


def test_tables_have_sizes_in_order_and_what_was_measured(all_runs):
    assert list(PRINTED["times_by_context"](all_runs).index) == ["small", "large", "2.7B"]
    warm = PRINTED["warmup"](all_runs)
    assert warm.loc["small", "mean after 0, ms"] == pytest.approx(30 * (50 + 3 * 1.005 + 6) / 10)
    assert warm.loc["small", "mean after 5, ms"] == pytest.approx(30)
    cost = PRINTED["compile_cost"](all_runs).loc[("blocks", "bf16", "small")]
    assert cost["break-even (steps), n"] == pytest.approx(12_000 / 15)
    model = PRINTED["compiled_model"](all_runs)
    assert model.loc["2.7B", "full step, ms"] == 1000 and model.loc["2.7B", "full step compiled, ms"] == 800
    for name, printed in PRINTED.items():
        assert markdown(printed(all_runs)).count("\n") > len(printed(all_runs)), name


def test_modes_that_did_not_fit_are_in_no_number(all_runs):
    times = all_runs["benchmark.times"].copy()
    gone = (times["size"] == "2.7B") & (times["compile"] == "none") & (times["mode"] == "step")
    measures = times.select_dtypes("number").columns.difference(CONFIG)
    times.loc[gone, measures] = np.nan
    times.loc[gone, "status"] = "oom"
    runs = all_runs | {"benchmark.times": times[~gone | (times["phase"] == WHOLE)]}
    assert claims.answer_times(runs)["size"] == claims.phases_fp32(runs)["size"] == "large"
    assert all(say(runs) is not None for say in DRAWN)
