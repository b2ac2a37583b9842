"""The benchmarking study: a run's tables on a CPU, what does not fit, what cannot be captured, and its tables."""

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
def left():
    """The names that the notebook's cells leave, its tables checked against their schemas."""
    names = run_cells("benchmark", **QUICK | {"warmup_steps": 5, "timed_steps": 10})
    tables = names["results"].tables
    return names | {"checked": {name: SCHEMAS[name].validate(table) for name, table in tables.items()}}


@pytest.fixture(scope="module")
def run(left):
    return left["checked"], left["run"].outcome["results"], left["sentence"]


def test_a_run_has_every_phase_of_every_mode_by_both_clocks(run):
    times = run[0]["times"]
    assert list(times[["mode", "phase"]].itertuples(index=False, name=None)) == [
        (mode, phase) for mode in MODES for phase in [*PHASES[mode], TOTAL]
    ]
    assert (times["status"] == "ok").all() and (times["reason"] == "").all()
    assert (times[["wall_ms", "enqueue_ms", "gpu_ms", "operations"]] > 0).all(axis=None)


def test_the_wholes_operations_are_those_of_its_phases_and_of_its_names(run):
    times, operations = run[0]["times"], run[0]["operations"]
    phases = times[times["phase"] != TOTAL].groupby("mode")["operations"].sum()
    whole = times[times["phase"] == TOTAL].set_index("mode")
    assert (
        phases.to_dict()
        == whole["operations"].to_dict()
        == operations.groupby("mode")["count"].sum().to_dict()
    )
    forward = operations[operations["phase"] == "forward"].pivot(index="name", columns="mode", values="count")
    assert forward.notna().all(axis=None) and (forward["step"] == forward["forward_backward"]).all()
    assert "matrix multiply" in set(operations["kernel_category"])


def test_what_the_cells_show_and_say_follows_from_the_tables(left):
    samples = left["checked"]["samples"].query("phase == 'total'")
    ms = left["checked"]["times"].query("mode == 'step'").set_index("phase")["wall_ms"]
    walls = samples.loc[samples["mode"] == "step", "wall_ms"].tolist()
    assert left["slowdown"] == number(walls[0] / np.median(walls), "x")
    assert "first step of this process" in left["message"]
    windows = [(skip, walls[skip : skip + 10]) for skip in (0, 1, 2, 5)]
    expected = [(skip, np.mean(window), np.std(window, ddof=1)) for skip, window in windows]
    assert left["rows"] == [pytest.approx(row) for row in expected]
    steps = left["results"].operations.query("mode == 'step'")
    assert left["longest"]["gpu_ms"].tolist() == steps["gpu_ms"].nlargest(10).tolist()
    timed = [rows["wall_ms"].tolist() for _, rows in samples[~samples["warmup"]].groupby("mode")]
    assert left["spread"] == pytest.approx(max(np.std(ms, ddof=1) / np.mean(ms) for ms in timed))
    ratio, share = number(ms["backward"] / ms["forward"], "x"), number(ms["optimizer"] / ms[TOTAL], "%")
    assert f"Backward took {ratio} as long as forward, and AdamW {share} of the step" in left["answer"]
    assert f"**{number(ms[TOTAL], 'ms')}**, {number(8 / ms[TOTAL] * 1e3, 'n')} tokens/s" in left["sentence"]


def test_results_on_a_cpu_have_no_data_sheet(run):
    results = run[1]
    assert results["sheet_tflops"] is None and results["matmul_tflops"] > 0 and results["parameters"] > 0
    assert "ms" in run[2] and "GPU" not in run[2] and "%" not in run[2]


def test_weights_that_do_not_fit_end_the_run():
    """A run that ends with this error has the status ``oom``."""

    def build(config):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run_cells("benchmark", replaced={"TransformerLM": build}, **QUICK)


def test_nothing_that_fits_leaves_a_reason_in_the_sentence():
    def clock(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB.")

    names = run_cells("benchmark", replaced={"timed": clock, "display": lambda *_: None}, **QUICK)
    assert (names["times"]["status"] == "oom").all() and "samples" not in names["results"].tables
    assert "No mode could be measured: while timing step: CUDA out of memory." in names["sentence"]


def test_doubling_the_clock_in_the_notebook_doubles_the_recorded_step(tmp_path):
    """The phases have clocks of their own, so the step takes at least twice their sum."""
    clock = "wall_ms = (default_timer() - start) * 1e3"
    doubled = edited("benchmark", tmp_path, f"        {clock}", f"        {clock.replace('(', '2 * (', 1)}")
    times = run_cells(doubled, **QUICK)["results"].times
    for mode, rows in times.groupby("mode"):
        ms = rows.set_index("phase")["wall_min_ms"]
        assert ms[TOTAL] >= 2 * ms.drop(TOTAL).sum() > 0, mode


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
            names["subject"].reset()
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
    names = run_cells("benchmark", until="measure.steps(", **QUICK)
    clock = Ticking()
    monkeypatch.setattr(timing, "default_timer", clock)
    names |= {"default_timer": clock, "subject": SimpleNamespace(reset=clock.rest)}
    rows = names["timed"](clock.step, 1, 3, clock.rest)
    expected = timing.time_steps(clock.step, 3, 1, "cpu", before=clock.rest, after=clock.rest)
    pd.testing.assert_frame_equal(rows, expected, check_exact=False)
    assert rows.loc[rows["phase"] == TOTAL, "wall_ms"].tolist() == pytest.approx([3] * 4)


def test_the_cells_clock_waits_for_the_device_before_it_is_read(monkeypatch):
    names, order = run_cells("benchmark", until="measure.steps(", **QUICK), []

    def noting(name):
        return lambda *given: (order.append(name), 0.0)[1]

    names |= {
        "default_timer": noting("clock"),
        "synchronize": noting("wait"),
        "subject": SimpleNamespace(reset=noting("reset")),
    }
    monkeypatch.setattr(names["measure"].Phases, "ms", lambda phases: [])
    names["timed"](noting("step"), 0, 1, noting("after"))
    assert order == ["reset", "wait", "clock", "step", "wait", "clock", "after"]


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
    assert said in names["sentence"]
