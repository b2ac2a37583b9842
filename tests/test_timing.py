"""The timing harness: which rows a measurement has, and that the clocks' readings are put where they
belong.
"""
import itertools

import pytest
import torch

from conftest import HUGE
from stepscope.config import PHASES, configure
from stepscope.step import timing, training_step
from stepscope.step.timing import SAMPLE_COLUMNS, WHOLE, PhaseClock, measure
from stepscope.step.training_step import build_step


@pytest.fixture
def wait_free(monkeypatch):
    """A host clock that advances by one second whenever it is read."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(timing, "default_timer", lambda: float(next(ticks)))


# The rows

@pytest.mark.parametrize("mode", PHASES)
def test_every_phase_of_every_step_has_its_row_in_order(mode, tiny):
    samples = measure(build_step(tiny(mode=mode, warmup_steps=2, timed_steps=3)))
    assert list(samples.columns) == SAMPLE_COLUMNS
    assert list(samples[["step", "phase", "timed"]].itertuples(index=False, name=None)) == [
        (step, phase, step >= 2) for step in range(5) for phase in [*PHASES[mode], WHOLE]]
    assert samples["timed"].dtype == bool
    assert samples["sm_clock_mhz"].isna().all() and samples["sm_clock_mhz"].dtype == "float64"


@pytest.mark.parametrize("mode", PHASES)
def test_phases_fit_into_the_steps_wall_time(mode, tiny):
    samples = measure(build_step(tiny(mode=mode, timed_steps=4)))
    phases, whole = samples[samples["phase"] != WHOLE], samples[samples["phase"] == WHOLE].set_index("step")
    assert (samples[["time_ms", "enqueue_ms"]] > 0).all(axis=None)
    assert (phases["time_ms"] == phases["enqueue_ms"]).all()  # on a CPU nothing is asynchronous
    summed = phases.groupby("step")["enqueue_ms"].sum()
    assert (summed - whole["enqueue_ms"]).abs().max() < 1e-9
    assert (whole["enqueue_ms"] <= whole["time_ms"]).all()


def test_no_warm_up_means_that_the_first_step_is_timed(tiny):
    assert measure(build_step(tiny(warmup_steps=0, timed_steps=1)))["timed"].all()


def test_the_sm_clock_is_read_once_after_each_step_and_outside_the_clocks(tiny, wait_free):
    readings = iter([1500.0, None, 1400.0])

    def read_sm_clock():
        for _ in range(100):
            timing.default_timer()
        return next(readings)
    samples = measure(build_step(tiny(mode="forward", timed_steps=3)), read_sm_clock)
    assert samples.groupby("step")["sm_clock_mhz"].agg(["min", "max"]).fillna(0).values.tolist() == [
        [1500, 1500], [0, 0], [1400, 1400]]
    assert (samples[samples["phase"] == WHOLE]["time_ms"] < 10_000).all()


def test_host_times_are_the_differences_of_what_the_clock_showed(tiny, wait_free):
    samples = measure(build_step(tiny(mode="step", timed_steps=1)))
    # The clock is read at the start, at the end of each of the four phases, and at the end of the step: 5
    # seconds.
    assert samples["time_ms"].tolist() == [1000, 1000, 1000, 1000, 5000]
    assert samples["enqueue_ms"].tolist() == [1000, 1000, 1000, 1000, 4000]


# What a step does

@pytest.fixture
def watched(tiny):
    """A measured step's model, with what was true of it at the start of each forward: gradients, and the
    weights.
    """
    def watch(mode, **fields):
        step, seen = build_step(tiny(mode=mode, **fields)), []

        def look(model, args):
            parameters = list(model.parameters())
            seen.append(([p.grad is not None for p in parameters],
                         torch.cat([p.detach().flatten() for p in parameters])))
        step.model.register_forward_pre_hook(look)
        return step, seen
    return watch


@pytest.mark.parametrize("mode", PHASES)
def test_gradients_are_cleared_before_each_step_and_weights_change_in_mode_step_only(mode, watched):
    step, seen = watched(mode, timed_steps=3)
    measure(step)
    assert len(seen) == 3 and not any(any(gradients) for gradients, _ in seen)
    changed = [not torch.equal(before, after) for (_, before), (_, after) in itertools.pairwise(seen)]
    assert changed == [mode == "step"] * 2
    left = [p.grad is not None for p in step.model.parameters()]
    assert all(left) if mode != "forward" else not any(left)


def test_gradients_do_not_add_up_over_steps(tiny):
    step = build_step(tiny(mode="forward_backward", timed_steps=1))
    measure(step)
    once = [p.grad.clone() for p in step.model.parameters()]
    step = build_step(tiny(mode="forward_backward", timed_steps=4))
    measure(step)
    assert all(torch.equal(p.grad, expected) for p, expected in zip(step.model.parameters(), once))


def test_forward_alone_is_inference_and_the_other_modes_train(tiny):
    for mode in PHASES:
        step, modes = build_step(tiny(mode=mode)), []
        step.model.register_forward_hook(lambda model, args, logits: modes.append(logits.requires_grad))
        measure(step)
        assert modes == [mode != "forward"] * 2
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("precision, dtype",
                         [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_is_autocasts(precision, dtype, tiny):
    step, seen = build_step(tiny(mode="step", precision=precision)), []
    ffn = step.model.blocks[0].ffn.gate_proj
    ffn.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    before = [p.detach().clone() for p in step.model.parameters()]
    measure(step)
    assert seen == [dtype] * 2
    assert {p.dtype for p in step.model.parameters()} == {p.grad.dtype
                                                          for p in step.model.parameters()} == {torch.float32}
    assert step.scaler.is_enabled() == (precision == "fp16")
    assert all(torch.isfinite(p).all() for p in step.model.parameters())
    assert not all(torch.equal(p, was) for p, was in zip(step.model.parameters(), before))


def test_one_seed_is_one_step_and_another_seed_another(tiny):
    first, again, other = (build_step(tiny(seed=seed)) for seed in (0, 0, 1))
    for step, equal in ((again, True), (other, False)):
        assert torch.equal(first.tokens, step.tokens) == equal
        assert torch.equal(first.model.head.weight, step.model.head.weight) == equal
    assert not torch.equal(first.tokens, first.targets)
    assert first.tokens.shape == first.targets.shape == (1, 8) and int(first.tokens.max()) < 50


@pytest.mark.parametrize("optimizer, kind", [("foreach", (True, False)), ("fused", (False, True)),
                                             ("forloop", (False, False))])
def test_the_optimizer_is_the_one_asked_for(optimizer, kind, tiny):
    group = build_step(tiny(optimizer=optimizer)).optimizer.param_groups[0]
    assert (group["foreach"], group["fused"]) == kind
    assert build_step(tiny(optimizer=optimizer, mode="forward_backward")).optimizer is None


class Building(Exception):
    pass


def test_peaks_of_memory_count_from_the_building_of_the_step(tiny, monkeypatch):
    called = []

    def build(config):
        called.append("build")
        raise Building
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    monkeypatch.setattr(training_step, "TransformerLM", build)
    for device, first in (("cuda", ["empty_cache", "reset_peak_memory_stats"]), ("cpu", [])):
        called.clear()
        with pytest.raises(Building):
            build_step(tiny(device=device))
        assert called == [*first, "build"]


# Out of memory

def test_a_model_that_does_not_fit_runs_out_of_memory_by_name():
    with pytest.raises(torch.OutOfMemoryError, match="while building the model: .*can't allocate memory"):
        build_step(configure("benchmark", **HUGE))


def test_a_step_that_does_not_fit_runs_out_of_memory_by_name():
    # Logits of a million tokens over sixteen million words; weights and batch alone are a few hundred
    # megabytes.
    shape = {"context_length": 1, "batch_size": 2**20, "vocab_size": 2**24, "mode": "forward"}
    step = build_step(configure("benchmark", **HUGE | shape))
    with pytest.raises(torch.OutOfMemoryError, match="while running step 0: .*can't allocate memory"):
        measure(step)


def test_other_errors_are_not_taken_for_a_lack_of_memory(tiny):
    step = build_step(tiny())
    step.tokens += 50
    with pytest.raises(IndexError):
        measure(step)


# The GPU's clock

class FakeGpu:
    """A GPU whose work takes the given milliseconds and is done only when someone waits for it."""

    def __init__(self, work_ms):
        self.work_ms, self.now_ms, self.waits, self.made = iter(work_ms), 0.0, 0, 0

    def work(self):
        self.now_ms += next(self.work_ms)

    def synchronize(self):
        self.waits += 1

    def event(self, enable_timing):
        assert enable_timing
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at_ms, self.waits = self.gpu.now_ms, self.gpu.waits

    def elapsed_time(self, end):
        assert end.waits < self.gpu.waits, "read before the device was waited for"
        return end.at_ms - self.at_ms


def test_cuda_events_stand_at_the_borders_of_phases_and_are_read_after_the_step(monkeypatch, wait_free):
    gpu = FakeGpu([1, 20, 300, 4000, 5, 60])
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    clock = PhaseClock("cuda")

    def step(*phases):
        clock.start()
        for phase in phases:
            with clock(phase):
                gpu.work()
        return clock.stop()

    assert step("forward", "loss", "backward", "optimizer") == [
        ("forward", 1, 1000), ("loss", 20, 1000), ("backward", 300, 1000), ("optimizer", 4000, 1000),
        (WHOLE, 5000, 4000)]
    assert gpu.waits == 2  # once before and once after: no phase waited
    assert step("forward", "loss") == [("forward", 5, 1000), ("loss", 60, 1000), (WHOLE, 3000, 2000)]
    assert gpu.made == 5  # events are made once, not in the step
