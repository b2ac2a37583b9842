"""The benchmarking study: a run's tables on a CPU, what does not fit, what cannot be captured, and its tables."""

import math
from contextlib import nullcontext
from itertools import count, groupby
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from cells import by_name, executed, quickest, reference, run_cells, step_flops, times_of
from conftest import TINY
from stepscope import PACKAGE, measure, stats
from stepscope.config import PHASES, WHOLE
from stepscope.measure import clocks, profiler, rates
from stepscope.model import training_step
from stepscope.model.training_step import build_step
from stepscope.report.tables import number
from stepscope.runs.source import code_cells
from stepscope.studies.benchmark.config import Config
from stepscope.studies.benchmark.tables import SCHEMAS

MODES = ("step", "forward_backward", "forward")
QUICK = TINY | {"warmup_steps": 1}


def measured(replaced=None, **parameters):
    """The names that the notebook's cells leave, its tables checked against their schemas."""
    names = run_cells("benchmark", replaced=replaced, **QUICK | parameters)
    names["checked"] = {name: SCHEMAS[name].validate(table) for name, table in names["tables"].items()}
    return names


@pytest.fixture(scope="module")
def left():
    return measured(warmup_steps=5, timed_steps=10)


@pytest.fixture(scope="module")
def run(left):
    return left["checked"], left["results"], left["sentence"]


def test_a_run_has_every_phase_of_every_mode_by_both_clocks(run):
    times = run[0]["times"]
    assert list(times[["mode", "phase"]].itertuples(index=False, name=None)) == [
        (mode, phase) for mode in MODES for phase in [*PHASES[mode], WHOLE]
    ]
    assert (times["status"] == "ok").all() and (times["reason"] == "").all()
    assert (times[["wall_ms", "enqueue_ms", "gpu_ms", "operations"]] > 0).all(axis=None)


def test_the_wholes_operations_are_those_of_its_phases_and_of_its_names(run):
    times, operations = run[0]["times"], run[0]["operations"]
    phases = times[times["phase"] != WHOLE].groupby("mode")["operations"].sum()
    whole = times[times["phase"] == WHOLE].set_index("mode")
    assert (
        phases.to_dict()
        == whole["operations"].to_dict()
        == operations.groupby("mode")["count"].sum().to_dict()
    )
    forward = operations[operations["phase"] == "forward"].pivot(index="name", columns="mode", values="count")
    assert forward.notna().all(axis=None) and (forward["step"] == forward["forward_backward"]).all()
    assert "matrix multiply" in set(operations["family"])


def test_the_full_step_is_sampled_from_the_first_of_the_process(run):
    samples = run[0]["samples"]
    whole = samples[samples["phase"] == WHOLE]
    assert whole.groupby("mode")["step"].max().to_dict() == {
        "step": 14,
        "forward_backward": 11,
        "forward": 11,
    }
    assert whole.groupby("mode")["warmup"].sum().to_dict() == {"step": 5, "forward_backward": 2, "forward": 2}


def test_times_and_operations_follow_from_samples_and_the_capture(left):
    tables, kernels, config = left["checked"], left["kernels"], left["config"]
    for row in tables["times"].to_dict("records"):
        samples = tables["samples"][tables["samples"]["mode"] == row["mode"]]
        found = times_of(samples, kernels[kernels["case"] == row["mode"]], row["phase"])
        if row["phase"] == WHOLE:
            found["tokens_per_s"] = config.batch_size * config.context_length / found["wall_ms"] * 1e3
        assert {name: row[name] for name in found} == pytest.approx(found), row["phase"]
    for mode, own in tables["operations"].groupby("mode"):
        lasting = by_name(quickest(kernels[kernels["case"] == mode]), "phase", "name")
        assert own.set_index(["phase", "name"])["gpu_ms"].to_dict() == pytest.approx(lasting)


def test_what_the_cells_show_and_say_follows_from_the_tables(left):
    samples, ms = (
        left["checked"]["samples"].query("phase == 'whole'"),
        left["checked"]["times"].query("mode == 'step'").set_index("phase")["wall_ms"],
    )
    walls = samples.loc[samples["mode"] == "step", "wall_ms"].tolist()
    assert left["slower"] == number(walls[0] / np.median(walls), "x")
    assert left["rows"] == [
        (n, pytest.approx(np.mean(walls[n : n + 10])), pytest.approx(np.std(walls[n : n + 10], ddof=1)))
        for n in (0, 1, 2, 5)
    ]
    overlapping = pd.DataFrame(
        {"case": "step", "number": 0, "start_ns": [0, 2, 3, 9], "end_ns": [6, 4, 8, 10]}
    )
    shown = executed("benchmark", "moments_ms", left | {"kernels": overlapping, "display": lambda *_: None})
    assert [shown["summed_ms"], shown["moments_ms"]] == pytest.approx([14e-6, 9e-6])
    of_step = left["tables"]["operations"].query("mode == 'step'")
    assert shown["longest"]["gpu_ms"].tolist() == of_step["gpu_ms"].nlargest(10).tolist() and left["cold"]
    timed = [own["wall_ms"].tolist() for _, own in samples[~samples["warmup"]].groupby("mode")]
    assert left["spread"] == pytest.approx(max(np.std(ms, ddof=1) / np.mean(ms) for ms in timed))
    shares = number(ms["backward"] / ms["forward"], "x"), number(ms["optimizer"] / ms[WHOLE], "%")
    assert left["answer"] == "Backward took {} forward's time, and AdamW {} of the step.".format(*shares)
    assert f"**{number(ms[WHOLE], 'ms')}**, {number(8 / ms[WHOLE] * 1e3, 'n')} tokens/s" in left["sentence"]


def test_beside_a_cpus_run_stands_the_references_plain_fp32_step_of_each_size():
    plain = {
        "mode": "step",
        "phase": WHOLE,
        "precision": "fp32",
        "context_length": 512,
        "repeat": 0,
        "compile": "none",
        "optimizer": "foreach",
        "batch_size": 4,
        "attention": "naive",
        "size": "small",
    } | dict.fromkeys(["wall_ms", "gpu_ms", "busy", "replayed_ms"], 1.0)
    others = {
        "mode": "forward",
        "phase": "forward",
        "precision": "tf32",
        "context_length": 128,
        "repeat": 1,
        "compile": "model",
        "optimizer": "fused",
        "batch_size": 2,
        "attention": "sdpa",
    }
    rows = pd.DataFrame([*(plain | {name: value, "size": "other"} for name, value in others.items()), plain])
    found = executed(
        "benchmark",
        "gpu = load()",
        {
            "config": SimpleNamespace(device="cpu"),
            "PROJECT": "here",
            "run_folder": "",
            "load": lambda: {"benchmark.times": rows},
            "display": print,
            "brief": print,
        },
    )["gpu"]
    assert found["size"].tolist() == ["small"]


def noting(order):
    """A step that notes its mode, whether it is timed, captured or plain, and whether AdamW's moments are there."""

    def wrap(own):
        def step(*case):
            kind = {"Phases": "timed", "function": "captured"}.get(
                type(case[-1]).__name__ if case else "", "plain"
            )
            order.append(
                ((*case[:-1],) if kind != "plain" else case, kind, bool(own.__globals__["adamw"].state))
            )
            return own(*case)

        return step

    return {"step": wrap}


def test_each_modes_memory_is_its_own(monkeypatch):
    """Peaks are forgotten before the weights and each mode; moments are there in full steps only, and once they are made."""
    order = []
    monkeypatch.setattr(measure, "forget_peaks", lambda device: order.append("forget"))
    run_cells("benchmark", wrapped=noting(order), **QUICK)
    step, both, forward = ((mode,) for mode in MODES)
    assert order.pop(0) == "forget"
    assert [event for event, _ in groupby(order)] == [
        "forget",
        (step, "timed", False),
        (step, "timed", True),
        ((), "plain", True),
        "forget",
        (both, "timed", False),
        "forget",
        (forward, "timed", False),
        (forward, "captured", False),
        (both, "captured", False),
        ((), "plain", False),
        (step, "captured", True),
    ]


def test_the_wrong_time_is_read_before_the_device_is_waited_for():
    now, shown = [0.0], []

    def passes(ms):
        return lambda *_: now.append(now.pop() + ms / 1e3)

    executed(
        "benchmark",
        "# nobody has waited",
        {
            "samples": {"step": 1},
            "status": {},
            "zero_grad": passes(1000),
            "synchronize": passes(50),
            "step": passes(7),
            "brief": shown.append,
            "default_timer": lambda: now[0],
            "pd": pd,
            "display": lambda *_: None,
        },
    )
    assert shown[0]["wall_ms"].tolist() == pytest.approx([7, 57])


def test_a_mode_that_runs_short_while_it_compiles_is_timed_all_the_same(monkeypatch):
    def seconds(step, device):
        assert all(weight.grad is None for weight in step.func.__globals__["model"].parameters())
        step()
        if step.args == ("step",):
            raise FULL
        states.append(bool(step.func.__globals__["adamw"].state))
        return 3.0

    states = []
    monkeypatch.setattr(measure, "seconds_with_compiling", seconds)
    monkeypatch.setattr(training_step, "compile_parts", lambda model, parts: None)
    whole = (
        run_cells("benchmark", **QUICK, compile="blocks")["times"].query("phase == 'whole'").set_index("mode")
    )
    assert whole["compile_s"].tolist() == pytest.approx([math.nan, 3, 3], nan_ok=True) and states == [
        False,
        False,
    ]
    assert (whole["status"] == "ok").all() and (whole["wall_ms"] > 0).all()


def test_what_is_read_of_a_mode_is_its_own_and_its_rates_are_of_the_runs_precision(monkeypatch):
    """Peaks are counted up, and energy is of steps that count; of three replays the middle one's time is told."""
    peaks, answers, asked, kept_up = count(1), iter(([1.0, 20.0, 3.0], [9.0, 2.0, 4.0])), [], []
    watts = iter([5.0, math.nan, 6.0])
    power = SimpleNamespace(
        read=lambda: None,
        per_step=lambda steps: {"step_j": 60 / steps, "power_w": next(watts), "sm_clock_mhz": 1990.0},
    )

    def replay(step, device, *, optimizer, scaler, clear, replays):
        own = step.func.__globals__
        asked.append(
            (
                *step.args,
                optimizer is own["adamw"],
                scaler is own["scaler"],
                clear is own["zero_grad"],
                bool(own["adamw"].state),
            )
        )
        return next(answers), ""

    monkeypatch.setattr(
        measure, "kept_up_power", lambda step, device, before: {"power_w": 9.0, "step_j": len(step.args[0])}
    )
    monkeypatch.setattr(measure, "keep_up", lambda step, *_: kept_up.append(step.args[0]))
    for name, answer in {
        "Power": lambda device: power,
        "peak_memory": lambda device: {"peak_gib": float(next(peaks))},
        "replay": replay,
        "at_cap": lambda row: row["peak_gib"] == 2,
        "sheet_tflops": lambda *of: {("bf16", "cpu"): 8.0}[of],
        "ceilings": lambda device, precisions: {f"matmul_{name}": 2.0 for name in precisions} | {"copy": 3.0},
    }.items():
        monkeypatch.setattr(measure, name, answer)
    monkeypatch.setattr(rates, "sheet_tflops", measure.sheet_tflops)
    monkeypatch.setattr(rates.power, "highest_clock_mhz", lambda: 2000.0)
    names = measured(precision="bf16", warmup_steps=2, timed_steps=3, batch_size=3)
    whole = names["checked"]["times"].query("phase == 'whole'").set_index("mode").loc[list(MODES)]
    assert whole["peak_gib"].tolist() == [1, 2, 3] and whole["step_j"].tolist() == [20, len(MODES[1]), 20]
    assert whole["power_w"].tolist() == [5, 9, 6], "where the energy counter was too slow, of a step kept up"
    assert whole["replayed_ms"].tolist() == pytest.approx([4, math.nan, 3], nan_ok=True), (
        "the full step's is the last"
    )
    assert asked == [("forward", False, True, True, False), ("step", True, True, True, False)], (
        "without moments of before"
    )
    assert kept_up == ["forward_backward"], "whose clock is that of the power cap"
    tflops = step_flops(names["config"]) / whole["wall_ms"] / [1, 1, 3] / 1e9
    for column, of in (("tflops", 1), ("mfu", 8), ("mfu_measured", 2), ("mfu_at_clock", 8 * 1990 / 2000)):
        assert whole[column].tolist() == pytest.approx((tflops / of).tolist())
    assert names["results"] == {
        "matmul_tflops": 2.0,
        "copy_tb_s": 3.0,
        "sheet_tflops": 8.0,
        "highest_clock_mhz": None,
    }


def test_on_a_cpu_there_is_no_graph_no_clock_and_no_sheet(run):
    times, results = run[0]["times"], run[1]
    of_gpu = [
        "replayed_ms",
        "peak_gib",
        "sm_clock_mhz",
        "power_w",
        "step_j",
        "mfu",
        "mfu_at_clock",
        "compile_s",
    ]
    assert times[of_gpu].isna().all(axis=None)
    told = times.set_index(["mode", "phase"])["replay_reason"]
    assert told["step", WHOLE] == told["forward", WHOLE] == "a CPU has no CUDA graphs"
    assert results["sheet_tflops"] is None and results["matmul_tflops"] > 0
    assert "ms" in run[2] and "GPU" not in run[2] and "%" not in run[2]


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB. Including x")


def failing(names, name, when):
    """A cell's function that runs out of memory where ``when`` says so of its arguments."""

    def function(*arguments, **options):
        if when(*arguments):
            raise FULL
        return own(*arguments, **options)

    own = names[name]
    return function


@pytest.fixture
def stepwise():
    """The notebook executed cell by cell: ``change`` gets the names once the cell with ``after`` is done."""

    def go(after, change, **parameters):
        names = {"__name__": "__main__"}
        for cell in code_cells(PACKAGE / "notebooks" / "benchmark.ipynb"):
            exec(compile(cell.source, "cell", "exec"), names)
            if "parameters" in cell.tags:
                names |= QUICK | parameters
            names |= {"load": reference} if "load" in names else {}
            if after in cell.source:
                change(names)
        for name, table in names["tables"].items():
            if len(table):
                SCHEMAS[name].validate(table)
        return names

    return go


def test_what_does_not_fit_is_a_row_and_the_other_modes_go_on(stepwise):
    def change(names):
        names["timed"] = failing(names, "timed", lambda mode, *_: mode == "step")

    names = stepwise("def timed(", change)
    times = names["times"].set_index(["mode", "phase"])
    assert times.loc[("step", WHOLE), ["status", "reason"]].tolist() == [
        "oom",
        "while timing a full step: CUDA out of memory. Tried 9 GiB.",
    ]
    assert len(times.loc["step"]) == 1 and math.isnan(times.loc[("step", WHOLE), "wall_ms"])
    assert (
        times.loc[("forward", WHOLE), "gpu_ms"] > 0 and times.loc[("forward_backward", WHOLE), "gpu_ms"] > 0
    )
    assert (
        {*names["tables"]["samples"]["mode"]}
        == {*names["tables"]["operations"]["mode"]}
        == {"forward", "forward_backward"}
    )
    assert "Forward + backward" in names["sentence"]


def test_weights_that_do_not_fit_are_a_row_a_mode():
    huge = {
        "size": "custom",
        "d_model": 2,
        "d_ff": 1,
        "num_layers": 1,
        "num_heads": 1,
        "vocab_size": 2,
        "context_length": 12_000_000,
    }
    names = run_cells("benchmark", **QUICK | huge)
    times = names["times"]
    assert times[["mode", "phase", "status"]].values.tolist() == [[mode, WHOLE, "oom"] for mode in MODES]
    assert (
        times["reason"].str.contains("building the model").all() and "building the model" in names["sentence"]
    )
    assert "samples" not in names["tables"] and names["tables"]["operations"].empty


@pytest.mark.parametrize("broken", ["profiled", "captured_operations", "export"])
def test_a_capture_that_failed_leaves_the_wall_times_and_says_why(monkeypatch, broken):
    def fail(*arguments):
        raise {
            "profiled": RuntimeError("CUPTI_ERROR_NOT_INITIALIZED"),
            "export": profiler.TraceError("torn"),
            "captured_operations": profiler.CaptureError("lost"),
        }[broken]

    monkeypatch.setattr(profiler, "read" if broken == "export" else broken, fail)
    names = run_cells("benchmark", **QUICK)
    times = SCHEMAS["times"].validate(names["times"])
    assert (times["status"] == "ok").all() and (times["wall_ms"] > 0).all()
    assert (
        times[["gpu_ms", "busy", "operations"]].isna().all(axis=None) and names["tables"]["operations"].empty
    )
    assert times["reason"].str.contains("CUPTI|torn|lost").all() and times["reason"][0] in names["sentence"]


def test_out_of_memory_in_the_capture_leaves_the_wall_times_of_that_mode_alone(stepwise):
    """Of the step that ran short there is a part in the capture, which is in no number."""

    def change(names):
        calls = []

        def step(mode="step", phase=nullcontext):
            if mode == "step" and phase is not nullcontext and "complete" in names:
                calls.append(mode)
                with phase("forward"):
                    torch.ones(2).add(1)
                raise FULL
            return own(mode, phase)

        own, names["step"] = names["step"], step

    whole = stepwise("def step(", change)["times"].query("phase == 'whole'").set_index("mode")
    assert (whole["wall_ms"] > 0).all() and (whole["status"] == "ok").all()
    assert math.isnan(whole.loc["step", "gpu_ms"])
    assert whole.loc["step", "reason"].startswith("not captured: while capturing: CUDA out of memory")
    assert whole.loc["forward", "gpu_ms"] > 0


def test_all_that_the_host_times_is_timed_before_anything_is_captured(stepwise, monkeypatch):
    order = []
    replay = measure.replay
    monkeypatch.setattr(
        measure, "replay", lambda *given, **how: (order.append("replay"), replay(*given, **how))[1]
    )
    monkeypatch.setattr(measure, "ceilings", lambda *given: order.append("ceilings") or {})

    def change(names):
        def step(mode="step", phase=nullcontext):
            order.append(f"{mode} {'plain' if phase is nullcontext else type(phase).__name__}")
            return own(mode, phase)

        own, names["step"] = names["step"], step

    stepwise("def step(", change)
    assert list(dict.fromkeys(order)) == [
        "step Phases",
        "step plain",
        "forward_backward Phases",
        "forward Phases",
        "forward function",
        "forward_backward function",
        "step function",
        "replay",
        "ceilings",
    ]
    assert order.count("forward Phases") == 2 + 2 and order.count("step Phases") == 1 + 2


# The twins: the cells' step and clock, and the library's.


@pytest.mark.parametrize(
    "fields", [{}, {"precision": "bf16", "seed": 1}, {"precision": "fp16", "optimizer": "fused"}]
)
def test_the_cells_step_gives_the_weights_of_the_librarys(fields):
    names = run_cells("benchmark", until="def timed(", **QUICK | fields)
    assert torch.get_float32_matmul_precision() == "highest"
    theirs, differentiable, losses = build_step(Config(**QUICK | fields)), [], []
    before = [weight.clone() for weight in theirs.model.parameters()]
    names["model"].register_forward_hook(
        lambda model, given, logits: differentiable.append(logits.requires_grad)
    )
    for model in (names["model"], theirs.model):
        model.loss = lambda *given, loss=model.loss: losses.append(loss(*given)) or losses[-1]
    for _ in range(3):
        for mode in ("step", "forward_backward", "forward"):
            names["zero_grad"]()
            assert all(weight.grad is None for weight in names["model"].parameters())
            names["step"](mode)
            theirs.clear_gradients()
            theirs.of(mode)()
    assert differentiable == [True, True, False] * 3
    assert {loss.dtype for loss in losses} == {torch.float32}
    weights = [*theirs.model.parameters()]
    assert all(map(torch.equal, names["model"].parameters(), weights))
    assert not any(map(torch.equal, before, weights))


class Ticking:
    """A host's clock that only a step moves, by a millisecond in each phase, and what is done between steps."""

    now_ms = 0.0

    def __call__(self):
        return self.now_ms / 1e3

    def step(self, *given):
        for at, name in enumerate(("forward", "loss")):
            with given[-1](name):
                self.now_ms += at + 1

    def rest(self):
        self.now_ms += 1000


def test_the_cells_clock_gives_the_rows_of_the_librarys(monkeypatch):
    names = run_cells("benchmark", until="def take(", **QUICK)
    clock = Ticking()
    monkeypatch.setattr(clocks, "default_timer", clock)
    names |= {"default_timer": clock, "step": clock.step, "zero_grad": clock.rest}
    own = names["timed"]("step", 1, 3, clock.rest)
    theirs = clocks.time_steps(clock.step, 3, 1, "cpu", before=clock.rest, after=clock.rest)
    pd.testing.assert_frame_equal(own, theirs, check_exact=False)
    assert own.loc[own["phase"] == WHOLE, "wall_ms"].tolist() == pytest.approx([3] * 4)


def test_the_cells_clock_waits_for_the_device_before_it_is_read(monkeypatch):
    names, order = run_cells("benchmark", until="def take(", **QUICK), []

    def noting(name):
        return lambda *given: (order.append(name), 0.0)[1]

    names |= {
        "default_timer": noting("clock"),
        "step": noting("step"),
        "synchronize": noting("wait"),
        "zero_grad": noting("clear"),
    }
    monkeypatch.setattr(names["measure"].Phases, "ms", lambda phases: [])
    names["timed"]("step", 0, 1, noting("after"))
    assert order == ["clear", "wait", "clock", "step", "wait", "clock", "after"]


@pytest.mark.parametrize(
    ("busy", "enqueue_ms", "said"),
    [
        (0.4, 90.0, "40% of it: launch-bound"),
        (0.99, 99.5, "99.0% of it: GPU-bound"),
        (1.01, 50.0, "101% of it: GPU-bound"),
        (0.93, 60.0, "93% of it: GPU-bound"),
    ],
)
def test_a_sentence_says_what_binds_the_step_of_a_gpu(busy, enqueue_ms, said):
    row = {
        "phase": WHOLE,
        "wall_ms": 100.0,
        "gpu_ms": 100 * busy,
        "busy": busy,
        "enqueue_ms": enqueue_ms,
        "status": "ok",
        "operations": 5.0,
        "tokens_per_s": 5000.0,
        "reason": "",
    }
    last = code_cells(PACKAGE / "notebooks" / "benchmark.ipynb")[-1].source
    names = {
        "times": pd.DataFrame([row | {"mode": mode} for mode in MODES]),
        "MODES": MODES,
        "math": math,
        "number": number,
        "launch_bound": stats.launch_bound,
        "config": SimpleNamespace(device="cuda"),
        "run": SimpleNamespace(say=lambda sentence: None),
    }
    exec(last, names)
    assert said in names["sentence"]


@pytest.mark.parametrize(("lasts_ms", "expected"), [(990.0, (2, 3, 5)), (1010.0, (1, 2, 3))])
def test_of_long_steps_there_are_fewer(stepwise, monkeypatch, lasts_ms, expected):
    seen = {"replays": []}
    monkeypatch.setattr(
        measure, "replay", lambda *_, replays, **__: (seen["replays"].append(replays), ([1.0], ""))[1]
    )

    def change(names):
        def timed(mode, warmups, steps, after):
            seen[mode] = warmups
            found = own(mode, warmups, steps, after)
            found.loc[found["phase"] == WHOLE, "wall_ms"] = [5000.0] * (found["step"].nunique() - 1) + [
                lasts_ms
            ]  # its quickest
            return found

        own, names["timed"] = names["timed"], timed

    names = stepwise("def timed(", change)
    warmups, captured, replays = expected
    assert (seen["step"], seen["forward_backward"], seen["forward"]) == (1, warmups, warmups)
    assert seen["replays"] == [replays] * 2 and set(names["complete"].values()) == {captured}


# Warm-up and compiling


@pytest.mark.parametrize("works", [True, False])
def test_compiling_is_timed_by_mode_or_says_why_it_cannot_be(monkeypatch, works):
    def seconds(step, device):
        if not works:
            raise torch._dynamo.exc.BackendCompilerFailed("inductor", ValueError("no C++ compiler"), None)
        return {"step": 9.0, "forward_backward": 0.1, "forward": 3.0}[step.args[0]]

    monkeypatch.setattr(measure, "seconds_with_compiling", seconds)
    monkeypatch.setattr(training_step, "compile_parts", lambda model, parts: None)
    names = run_cells("benchmark", **QUICK, compile="blocks")
    times, cold = names["times"], names["cold"]
    if works:
        whole = times[times["phase"] == WHOLE].set_index("mode")["compile_s"]
        assert not cold
        assert whole.to_dict() == {"step": 9.0, "forward_backward": 0.1, "forward": 3.0}
        assert times.loc[times["phase"] != WHOLE, "compile_s"].isna().all()
    else:
        assert (times["status"] == "unsupported").all() and times["reason"].str.contains("no C").all()


# Over all runs
