"""Test on a fake GPU that measuring code waits for the GPU before it reads the host's clock."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from cells import run_cells
from conftest import TINY
from fake_gpu import FakeGpu
from memory_recording import stand_in
from stepscope import measure
from stepscope.config import StepConfig, configure
from stepscope.ladder import loop
from stepscope.measure import memory_history, profiled_process, protocol
from stepscope.model.training_step import build_step
from stepscope.studies.attention import protocol as attention_protocol


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch, loop)


def launch(gpu, work_ms):
    """Return a function that launches ``work_ms`` of work on the fake GPU."""
    return lambda *_: gpu.launch(work_ms)


@pytest.mark.parametrize("with_regions", [False, True])
def test_nsys_profiled_step_and_its_range_end_when_the_gpu_finishes(gpu, monkeypatch, with_regions):
    ranged = run_cells("nsys", "profile_with_nsys(ranged", {"nvtx_range": gpu.range}, device="cpu")["ranged"]
    annotation = SimpleNamespace(link_backward=lambda: None)
    monkeypatch.setattr(profiled_process, "annotated", lambda model: nullcontext(annotation))
    model, loss = launch(gpu, 10), SimpleNamespace(backward=launch(gpu, 20))
    model.loss = lambda *_: None
    step = SimpleNamespace(
        device="cuda",
        mode="forward_backward",
        optimizer=None,
        model=model,
        tokens=None,
        targets=None,
        autocast=nullcontext,
        scaler=SimpleNamespace(scale=lambda _: loss),
        clear_gradients=launch(gpu, 50),
    )
    mode = profiled_process.ProfiledMode(step, ranged)
    assert [mode.time_in_ranges(with_regions) for _ in range(2)] == pytest.approx([31] * 2)
    steps = [(action, left_ms) for name, action, left_ms in gpu.log if name == "step"]
    assert steps == [("opens", 0), ("closes", 0)] * 2
    assert ("forward", "closes", 10) in gpu.log, "phases must not wait for each other"


# Attention


def attention(gpu):
    """Return an attention function whose passes take 1 s (forward) and 2 s (backward) on the fake GPU."""

    def call(*qkv):
        gpu.launch(999)
        storage = SimpleNamespace(nbytes=lambda: 7)
        return SimpleNamespace(backward=launch(gpu, 1999), untyped_storage=lambda: storage)

    return call


def inputs(gpu):
    return SimpleNamespace(q=None, k=None, v=None, gradient=None, clear_gradients=launch(gpu, 50_000))


def attention_on(gpu, **fields):
    tiny = {"d_model": 8, "context_lengths": [8], "implementations": ["math"], "min_passes": 1}
    config = configure("attention", device="cpu", **tiny | fields).model_copy(update={"device": "cuda"})
    return attention_protocol.Protocol([("math", 8)], lambda *_: attention(gpu), None, config, math.nan)


@pytest.mark.parametrize(
    ("max_seconds_per_case", "timed_steps", "warmups", "passes"),
    [(60.0, 1000, 3, 20), (34.0, 1000, 3, 11), (12.0, 1000, 1, 4), (6.0, 1000, 1, 3), (60.0, 5, 3, 5)],
)
@pytest.mark.parametrize("is_long", [False, True])
def test_forward_and_backward_are_timed_separately_within_the_time_limit(
    gpu, monkeypatch, max_seconds_per_case, timed_steps, warmups, passes, is_long
):
    """A pass takes 3 s, and the warm-up gets a quarter of the time limit.

    If passes are long, an additional pass lets the SM clock settle before the timed passes.
    """
    monkeypatch.setattr(attention_protocol, "LONG_MS", 2999.0 if is_long else 3001.0)
    calls, call = [], attention(gpu)
    measurement = attention_on(
        gpu, warmup_steps=3, timed_steps=timed_steps, min_passes=3, max_seconds_per_case=max_seconds_per_case
    )
    times = measurement.time_passes(lambda *qkv: calls.append(qkv) or call(*qkv), inputs(gpu))
    assert times["forward"].tolist() == pytest.approx([1000] * passes)
    assert times["backward"].tolist() == pytest.approx([2000] * passes)
    assert len(calls) == warmups + is_long + passes


@pytest.mark.parametrize("is_long", [False, True])
def test_profiled_passes_start_on_an_idle_gpu_and_end_when_it_finishes(gpu, monkeypatch, is_long):
    measurement = attention_on(gpu, profiled_passes=2)
    wall_ms = attention_protocol.LONG_MS * (2 if is_long else 0.25)
    measurement.walls["math", 8] = pd.DataFrame({"forward": [wall_ms / 2], "backward": [wall_ms / 2]})
    settled = []
    monkeypatch.setattr(measure, "run_for", lambda *_: settled.append(len(gpu.log)))
    profile = SimpleNamespace(phases=lambda case, number: gpu.range)
    measurement.profile_case(("math", 8), inputs(gpu), profile)
    assert len(gpu.log) == 8 and {left_ms for _, _, left_ms in gpu.log} == {0}
    assert settled == [0] * is_long, "the clock settles before the first pass"


def test_pass_memory_is_read_on_an_idle_gpu(gpu, monkeypatch):
    counters = {"reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"}
    for name in counters:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: gpu.log.append((name, gpu.left_ms)) or 0)
    gpu.launch(50_000)
    measure.pass_memory(attention(gpu), (), None, 0, "cuda")
    assert {*gpu.log} == {(name, 0) for name in counters}


# The protocol, memory recordings and the ladder


def test_protocol_profiles_each_step_on_an_idle_gpu(gpu, monkeypatch):
    def step(phase):
        with phase("forward"):
            gpu.launch(10)

    monkeypatch.setattr(protocol, "synchronizer", lambda device: gpu.synchronize)
    subject = SimpleNamespace(reset=launch(gpu, 50), optimizer=None)
    measurement = protocol.Protocol(subject, {"forward": step}, StepConfig(**TINY))
    measurement.readings["forward"] = {}
    measurement.profile_case("forward", SimpleNamespace(phases=lambda case, number: gpu.range))
    assert gpu.log == [("forward", "opens", 0), ("forward", "closes", 10)] * 3 and gpu.left_ms == 0
    assert measurement.completed["forward"] == 3


def test_allocation_history_starts_and_ends_on_an_idle_gpu(gpu, monkeypatch):
    with stand_in(monkeypatch) as storages:
        monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)

        def record(**options):
            gpu.log.append(gpu.left_ms)
            storages.record(**options)

        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
        config = StepConfig(**TINY | {"warmup_steps": 1})
        step = build_step(config)
        step.model.register_forward_pre_hook(launch(gpu, 10))
        subject = measure.Subject(step.model, (step.tokens, step.targets), optimizer=step.optimizer)
        memory_history.record_step(subject, "step", lambda phase=nullcontext: step(phase), config)
    assert gpu.log == [0, 0]


def ladder_case():
    return loop.Case("compiled_blocks", 2, build=None)


def test_ladder_compile_time_includes_only_the_work_of_the_first_step(gpu):
    subject = SimpleNamespace(
        gradients=lambda: gpu.launch(30) or torch.ones(()),
        without_randomness=nullcontext,
        loss=print,
        launch=print,
        compiles=True,
        reset=launch(gpu, 50),
        optimizer=SimpleNamespace(step=launch(gpu, 5), state={}, param_groups=[]),
    )
    ladder = SimpleNamespace(device="cuda", compile_s={}, compare=launch(gpu, 7))
    case = ladder_case()
    loop.Loop.first_step(ladder, case, subject)
    assert case.row["compile_s"] == pytest.approx(0.031)


def test_ladder_profile_ends_when_the_gpu_finishes(gpu, monkeypatch):
    profile = SimpleNamespace(phases=lambda case, number: gpu.range, reason="lost")
    monkeypatch.setattr(measure, "StepProfiler", lambda device: nullcontext(profile))
    ladder = SimpleNamespace(device="cuda", settle=lambda *_: 1.0)
    with pytest.raises(RuntimeError, match="lost"):
        subject = SimpleNamespace(step=launch(gpu, 10), varies=False)
        loop.Loop.profiled_operations(ladder, ladder_case(), subject, False)
    assert gpu.log[0] == ("total", "opens", 0) and gpu.left_ms == 0


def test_ladder_stops_when_the_gpu_is_lost(monkeypatch):
    monkeypatch.setattr(measure, "release", lambda *_, **__: None)

    def lose_gpu(*_):
        monkeypatch.setattr(torch.cuda, "synchronize", lose_gpu)
        raise torch.AcceleratorError("unspecified launch failure")

    with pytest.raises(torch.AcceleratorError):
        ladder = SimpleNamespace(device="cuda", run_loaded=lose_gpu, reason_of=str, unsupported=())
        loop.Loop.visit(ladder, ladder_case())
