"""Test the benchmarking study: a CPU run's tables, out-of-memory errors, and the notebook's step and timer."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from cells import edited, run_cells
from conftest import TINY
from stepscope import PACKAGE, stats
from stepscope.config import PHASES, TOTAL
from stepscope.measure import timing
from stepscope.model.training_step import build_step
from stepscope.report.tables import number
from stepscope.runs.source import code_cells
from stepscope.studies.benchmark.config import Config
from stepscope.studies.benchmark.tables import SCHEMAS

MODES = ("step", "forward_backward", "forward")
QUICK = TINY | {"warmup_steps": 1}


@pytest.fixture(scope="module")
def variables():
    """Run the notebook; return its variables and its validated tables."""
    names = run_cells("benchmark", **QUICK | {"warmup_steps": 5, "timed_steps": 10})
    tables = names["results"].tables
    return names | {"checked": {name: SCHEMAS[name].validate(table) for name, table in tables.items()}}


@pytest.fixture(scope="module")
def run(variables):
    return variables["checked"], variables["run"].outcome["results"], variables["sentence"]


def test_run_records_wall_and_gpu_time_of_every_phase_and_mode(run):
    times = run[0]["times"]
    assert list(times[["mode", "phase"]].itertuples(index=False, name=None)) == [
        (mode, phase) for mode in MODES for phase in [*PHASES[mode], TOTAL]
    ]
    assert (times["status"] == "ok").all() and (times["reason"] == "").all()
    assert (times[["wall_ms", "enqueue_ms", "gpu_ms", "operations"]] > 0).all(axis=None)


def test_notebook_outputs_agree_with_the_tables(variables):
    samples = variables["checked"]["samples"].query("phase == 'total'")
    ms = variables["checked"]["times"].query("mode == 'step'").set_index("phase")["wall_ms"]
    walls = samples.loc[samples["mode"] == "step", "wall_ms"].tolist()
    assert variables["slowdown"] == number(walls[0] / np.median(walls), "x")
    assert "first step of this process" in variables["message"]
    windows = [(skip, walls[skip : skip + 10]) for skip in (0, 1, 2, 5)]
    expected = [(skip, np.mean(window), np.std(window, ddof=1)) for skip, window in windows]
    assert variables["rows"] == [pytest.approx(row) for row in expected]
    steps = variables["results"].operations.query("mode == 'step'")
    assert variables["longest"]["gpu_ms"].tolist() == steps["gpu_ms"].nlargest(10).tolist()
    timed = [rows["wall_ms"].tolist() for _, rows in samples[~samples["warmup"]].groupby("mode")]
    assert variables["spread"] == pytest.approx(max(np.std(ms, ddof=1) / np.mean(ms) for ms in timed))
    ratio, share = number(ms["backward"] / ms["forward"], "x"), number(ms["optimizer"] / ms[TOTAL], "%")
    assert f"Backward took {ratio} as long as forward, and AdamW {share} of the step" in variables["answer"]
    assert (
        f"**{number(ms[TOTAL], 'ms')}**, {number(8 / ms[TOTAL] * 1e3, 'n')} tokens/s" in variables["sentence"]
    )


def test_cpu_results_omit_the_data_sheet_peak(run):
    results = run[1]
    assert results["sheet_tflops"] is None and results["matmul_tflops"] > 0 and results["parameters"] > 0
    assert "ms" in run[2] and "GPU" not in run[2] and "%" not in run[2]


def test_run_fails_when_weights_do_not_fit():
    """A run that raises ``OutOfMemoryError`` gets the status ``oom``."""

    def build(config):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run_cells("benchmark", replaced={"TransformerLM": build}, **QUICK)


def test_summary_gives_the_reason_when_no_mode_fits():
    def clock(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB.")

    names = run_cells("benchmark", replaced={"timed": clock, "display": lambda *_: None}, **QUICK)
    assert (names["times"]["status"] == "oom").all() and "samples" not in names["results"].tables
    assert "No mode could be measured: while timing step: CUDA out of memory." in names["sentence"]


def test_recorded_step_time_doubles_when_notebook_timer_is_doubled(tmp_path):
    """The test doubles only the total time of a step, so the total is at least twice the sum of the phases."""
    clock = "wall_ms = (default_timer() - start) * 1e3"
    doubled = edited("benchmark", tmp_path, f"        {clock}", f"        {clock.replace('(', '2 * (', 1)}")
    times = run_cells(doubled, **QUICK)["results"].times
    for mode, rows in times.groupby("mode"):
        ms = rows.set_index("phase")["wall_min_ms"]
        assert ms[TOTAL] >= 2 * ms.drop(TOTAL).sum() > 0, mode


# The notebook's step and timer are compared with the library's.


@pytest.mark.parametrize(
    "fields", [{}, {"precision": "bf16", "seed": 1}, {"precision": "fp16", "optimizer": "fused"}]
)
def test_notebook_step_produces_the_same_weights_as_the_library_step(fields):
    names = run_cells("benchmark", until="def timed(", **QUICK | fields)
    assert torch.get_float32_matmul_precision() == "highest"
    library_step, differentiable, losses = build_step(Config(**QUICK | fields)), [], []
    before = [weight.clone() for weight in library_step.model.parameters()]
    names["model"].register_forward_hook(
        lambda model, inputs, logits: differentiable.append(logits.requires_grad)
    )
    for model in (names["model"], library_step.model):
        model.loss = lambda *arguments, loss=model.loss: losses.append(loss(*arguments)) or losses[-1]
    for _ in range(3):
        for mode in ("step", "forward_backward", "forward"):
            names["subject"].reset()
            assert all(weight.grad is None for weight in names["model"].parameters())
            names["step"](mode)
            library_step.clear_gradients()
            library_step.of(mode)()
    assert differentiable == [True, True, False] * 3
    assert {loss.dtype for loss in losses} == {torch.float32}
    weights = [*library_step.model.parameters()]
    assert all(map(torch.equal, names["model"].parameters(), weights))
    assert not any(map(torch.equal, before, weights))


class Ticking:
    """A fake host clock that advances only during steps and during the pauses between steps."""

    now_ms = 0.0

    def __call__(self):
        return self.now_ms / 1e3

    def step(self, *arguments):
        for index, name in enumerate(("forward", "loss")):
            with arguments[-1](name):
                self.now_ms += index + 1

    def rest(self):
        self.now_ms += 1000


def test_notebook_timer_produces_the_same_rows_as_the_library_timer(monkeypatch):
    names = run_cells("benchmark", until="measure.steps(", **QUICK)
    clock = Ticking()
    monkeypatch.setattr(timing, "default_timer", clock)
    names |= {"default_timer": clock, "subject": SimpleNamespace(reset=clock.rest)}
    rows = names["timed"](clock.step, 1, 3, clock.rest)
    expected = timing.time_steps(clock.step, 3, 1, "cpu", before=clock.rest, after=clock.rest)
    pd.testing.assert_frame_equal(rows, expected, check_exact=False)
    assert rows.loc[rows["phase"] == TOTAL, "wall_ms"].tolist() == pytest.approx([3] * 4)


def test_notebook_timer_synchronizes_before_reading_the_clock(monkeypatch):
    names, order = run_cells("benchmark", until="measure.steps(", **QUICK), []

    def noting(name):
        return lambda *arguments: (order.append(name), 0.0)[1]

    names |= {
        "default_timer": noting("clock"),
        "synchronize": noting("wait"),
        "subject": SimpleNamespace(reset=noting("reset")),
    }
    monkeypatch.setattr(names["measure"].Phases, "ms", lambda phases: [])
    names["timed"](noting("step"), 0, 1, noting("after"))
    assert order == ["reset", "wait", "clock", "step", "wait", "clock", "after"]


@pytest.mark.parametrize(
    ("busy", "enqueue_ms", "expected_text"),
    [
        (0.4, 90.0, "40% of it: launch-bound"),
        (0.99, 99.5, "99.0% of it: GPU-bound"),
        (1.01, 50.0, "101% of it: GPU-bound"),
        (0.93, 60.0, "93% of it: GPU-bound"),
    ],
)
def test_summary_reports_whether_gpu_step_is_launch_bound(busy, enqueue_ms, expected_text):
    row = {
        "phase": TOTAL,
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
        "cases": dict.fromkeys(MODES),
        "math": math,
        "number": number,
        "launch_bound": stats.launch_bound,
        "config": SimpleNamespace(device="cuda"),
        "run": SimpleNamespace(conclude=lambda sentence: None),
    }
    exec(last, names)
    assert expected_text in names["sentence"]
