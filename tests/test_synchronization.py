"""Every reading of the host's clock that means the GPU's work waits for the GPU first: on a GPU made up, whose work
takes so long as is asked for, and none of the host's time until somebody waits."""

import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from cells import run_cells
from memory_recording import stand_in
from stepscope import measure
from stepscope.config import StepConfig, configure
from stepscope.measure import compiler, memory_history, profiled_process, protocol, rates, timing
from stepscope.model.training_step import build_step
from stepscope.studies.attention import protocol as attention_protocol
from stepscope.studies.ladder import loop
from stepscope.traces.profiled_steps import PROFILED_COLUMNS

LAUNCH_S, CLEARING_S = 0.25, 50.0


class Gpu:
    """Work is handed over in :data:`LAUNCH_S`; it is done when the host waits. All times are sums of powers of two."""

    def __init__(self, monkeypatch, *modules):
        self.now, self.left, self.log = 0.0, 0.0, []
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        for module in modules:
            monkeypatch.setattr(module, "default_timer", lambda: self.now)

    def work(self, seconds):
        self.now, self.left = self.now + LAUNCH_S, self.left + seconds

    def clear(self, *arguments):
        self.work(CLEARING_S)

    def synchronize(self):
        self.now, self.left = self.now + self.left, 0.0

    @contextmanager
    def range(self, name):
        """A range's begin and end, with what the GPU still has to do then."""
        self.log.append((name, "begins", self.left))
        yield
        self.log.append((name, "ends", self.left))


class Step:
    """A step of two phases on that GPU."""

    device, mode, optimizer = "cuda", "forward_backward", None
    model = torch.nn.Linear(1, 1)

    def __init__(self, gpu):
        self.gpu, self.clear_gradients = gpu, gpu.clear

    def __call__(self, phase=lambda name: nullcontext()):
        for name, seconds in (("forward", 1.0), ("backward", 2.0)):
            with phase(name):
                self.gpu.work(seconds)


class Ranged(Step):
    """Its parts, as the profiling notebook calls them."""

    autocast = staticmethod(nullcontext)
    tokens = targets = None

    def __init__(self, gpu):
        super().__init__(gpu)
        self.model = type(
            "Model",
            (),
            {"__call__": lambda self, tokens: gpu.work(1.0), "loss": lambda self, logits, targets: None},
        )()
        self.scaler = SimpleNamespace(scale=lambda loss: SimpleNamespace(backward=lambda: gpu.work(2.0)))


STEP_MS = (2 * LAUNCH_S + 3.0) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch, timing)


def test_a_profiled_processs_plain_step_is_all_of_its_work_and_nothing_before(gpu, events):
    mode = profiled_process.ProfiledMode(Step(gpu), lambda *_: None)
    assert mode.time_unprofiled(2, until_enough=False)["wall_ms"].tolist() == [STEP_MS] * 2


@pytest.mark.parametrize("named", [False, True])
def test_a_captured_step_and_its_range_end_with_the_gpus_work(gpu, events, monkeypatch, named):
    names = run_cells("nsys", "profile_with_nsys(ranged", {"nvtx_range": gpu.range}, device="cpu")
    ranged = names["ranged"]
    monkeypatch.setattr(
        profiled_process, "annotated", lambda model: nullcontext(SimpleNamespace(link_backward=lambda: None))
    )
    mode = profiled_process.ProfiledMode(Ranged(gpu), ranged)
    assert [mode.time_in_ranges(named) for _ in range(2)] == [STEP_MS] * 2
    ranges = [entry for entry in gpu.log if isinstance(entry, tuple)]
    whole = [(what, left) for name, what, left in ranges if name == "step"]
    assert whole == [("begins", 0.0), ("ends", 0.0)] * 2
    assert ("forward", "ends", 1.0) in gpu.log  # no phase waits for another


class Inputs:
    """Of attention on that GPU: its gradients are cleared by work."""

    q = k = v = gradient = None

    def __init__(self, gpu):
        self.clear_gradients = gpu.clear


def attention(gpu):
    """A pass whose forward takes 1 s and backward 2 s."""

    def call(*qkv):
        gpu.work(1.0)
        return SimpleNamespace(
            backward=lambda gradient: gpu.work(2.0), untyped_storage=lambda: SimpleNamespace(nbytes=lambda: 7)
        )

    return call


def attention_on(gpu, **fields):
    """The attention study's protocol with one case that runs on that GPU."""
    tiny = {"d_model": 8, "context_lengths": [8], "implementations": ["math"], "min_passes": 1}
    config = configure("attention", device="cpu", **tiny | fields).model_copy(update={"device": "cuda"})
    cases = [("math", 8)]
    return attention_protocol.Protocol(cases, lambda name, inputs: attention(gpu), None, config, math.nan)


def test_forwards_and_backwards_wall_times_are_each_ones_own(gpu):
    measurement = attention_on(gpu, warmup_steps=1, timed_steps=3, max_seconds_per_case=100.0)
    times = measurement.time_passes(attention(gpu), Inputs(gpu))
    assert times["forward"].tolist() == [(LAUNCH_S + 1) * 1e3] * 3
    assert times["backward"].tolist() == [(LAUNCH_S + 2) * 1e3] * 3


@pytest.mark.parametrize(
    "max_seconds_per_case, timed_steps, warmups, passes",
    [(70.0, 1000, 3, 20), (40.0, 1000, 3, 11), (14.0, 1000, 1, 4), (7.0, 1000, 1, 3), (70.0, 5, 3, 5)],
)
@pytest.mark.parametrize("is_long", [False, True])
def test_passes_fit_the_time_limit_by_the_last_warm_up(
    gpu, monkeypatch, max_seconds_per_case, timed_steps, warmups, passes, is_long
):
    """A pass takes 3.5 s, and warm-up ends after a quarter of the time. The clock settles before long passes."""
    monkeypatch.setattr(attention_protocol, "LONG_MS", 3499.0 if is_long else 3500.0)
    calls, call = [], attention(gpu)
    measurement = attention_on(
        gpu, warmup_steps=3, timed_steps=timed_steps, min_passes=3, max_seconds_per_case=max_seconds_per_case
    )
    times = measurement.time_passes(lambda *qkv: calls.append(qkv) or call(*qkv), Inputs(gpu))
    assert len(times) == passes and len(calls) == warmups + is_long + passes


@pytest.mark.parametrize("is_long", [False, True])
def test_profiled_passes_are_alone_and_their_ranges_hold_all_that_they_launched(gpu, monkeypatch, is_long):
    measurement = attention_on(gpu, profiled_passes=2)
    wall_ms = 2 * attention_protocol.LONG_MS if is_long else attention_protocol.LONG_MS / 4
    measurement.walls["math", 8] = pd.DataFrame({"forward": [wall_ms / 2], "backward": [wall_ms / 2]})
    settled = []
    monkeypatch.setattr(measure, "run_for", lambda *given: settled.append(len(gpu.log)))
    measurement.profile_case(("math", 8), Inputs(gpu), captured_on(gpu))
    assert len(gpu.log) == 8 and {left for _, _, left in gpu.log} == {0.0}
    assert settled == [0] * is_long  # before the first profiled pass


def test_memory_is_read_when_the_gpu_has_done_what_it_is_read_for(gpu, monkeypatch):
    counters = ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated")
    for name in counters:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: gpu.log.append((name, gpu.left)) or 0)
    gpu.clear()  # of before
    measure.pass_memory(attention(gpu), (), None, 0, "cuda")
    assert {name for name, _ in gpu.log} == {*counters} and {left for _, left in gpu.log} == {0.0}


def protocol_on(gpu):
    """The protocol with one case, whose step runs on that GPU and whose optimizer has moments."""
    adamw = SimpleNamespace(state={"moments": 1})
    subject = SimpleNamespace(reset=gpu.clear, forget_moments=adamw.state.clear, optimizer=adamw)
    config = StepConfig(device="cpu", size="nano", vocab_size=50, context_length=8, batch_size=1)
    return protocol.Protocol(subject, {"forward_backward": Step(gpu)}, config)


def test_each_step_that_the_protocol_profiles_is_alone(gpu, monkeypatch):
    monkeypatch.setattr(protocol, "synchronizer", lambda device: gpu.synchronize)
    measurement = protocol_on(gpu)
    measurement.readings["forward_backward"] = {}
    captured = SimpleNamespace(phases=lambda case, number: gpu.range)
    measurement.profile_case("forward_backward", captured)
    began = [left for name, what, left in gpu.log if name == "forward" and what == "begins"]
    assert began == [0.0] * 3 and gpu.left == 0.0 and measurement.completed["forward_backward"] == 3


def test_a_modes_peak_of_memory_excludes_another_modes_moments(gpu, monkeypatch):
    log, measurement = [], protocol_on(gpu)

    def timed(*given):
        log.append("timed")
        return pd.DataFrame(columns=timing.SAMPLE_COLUMNS)

    def reset_peak_memory(device):
        log.append("moments exist" if measurement.subject.optimizer.state else "forgotten")

    measurement.clock = timed
    monkeypatch.setattr(protocol, "reset_peak_memory", reset_peak_memory)
    monkeypatch.setattr(protocol, "peak_memory", lambda device: log.append("read") or {})
    measurement.time_case("forward_backward", 1)
    assert log == ["forgotten", "timed", "read"]


class Events:
    """torch.cuda.Event on that GPU: an event happens when all is done that was handed over before it."""

    gpu = None

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.gpu.log.append(self.gpu.left)
        self.at = self.gpu.now + self.gpu.left

    def elapsed_time(self, end):
        assert self.gpu.left == 0.0, "read before the GPU was waited for"
        return (end.at - self.at) * 1e3


@pytest.fixture
def events(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (Events,), {"gpu": gpu}))


def ladder_case():
    """A case of the ladder that has a row, and nothing that builds it."""
    return loop.Case("compiled_blocks", 2, build=None)


def test_the_ladders_compile_time_holds_the_first_steps_work(gpu, monkeypatch):
    monkeypatch.setattr(loop, "default_timer", lambda: gpu.now)
    subject = SimpleNamespace(
        gradients=lambda: gpu.work(3.0) or torch.ones(()),
        loss=print,
        launch=print,
        compiles=True,
        reset=gpu.clear,
        optimizer=SimpleNamespace(step=lambda: gpu.work(5.0), state={}, param_groups=[]),
    )
    ladder = SimpleNamespace(device="cuda", compile_s={}, compare=lambda *_: gpu.work(7.0))
    loop.Ladder.first_step(ladder, case := ladder_case(), subject)
    assert case.row["compile_s"] == LAUNCH_S + 3.0


def test_the_seconds_of_compiling_hold_the_steps_work(gpu, monkeypatch):
    monkeypatch.setattr(compiler, "default_timer", lambda: gpu.now)
    assert measure.seconds_with_compiling(lambda: gpu.work(3.0), "cuda") == LAUNCH_S + 3.0


def alone(gpu, then=0.0):
    """Whether each captured step began on an idle GPU, and was waited for before what the GPU has to do now."""
    began = [entry[2] for entry in gpu.log if isinstance(entry, tuple) and entry[:2] == ("forward", "begins")]
    return len(began) > 0 and set(began) == {0.0} and gpu.left == then


def captured_on(gpu, **also):
    return SimpleNamespace(phases=lambda case, number: gpu.range, **also)


def test_each_step_that_counts_launches_is_alone(gpu, events, monkeypatch):
    captured = captured_on(gpu, operations=pd.DataFrame(columns=PROFILED_COLUMNS))
    monkeypatch.setattr(rates, "build_step", lambda config: Step(gpu))
    monkeypatch.setattr(rates, "capture", lambda device: nullcontext(captured))
    rates.kernel_launch_us("cuda")
    assert alone(gpu)


def test_an_allocators_history_begins_and_ends_on_an_idle_gpu(gpu, monkeypatch):
    storages = stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    for name, call in (("_record_memory_history", storages.record), ("_snapshot", storages.snapshot)):
        monkeypatch.setattr(
            torch.cuda.memory,
            name,
            lambda name=name, call=call, **options: (gpu.log.append((name, gpu.left)), call(**options))[1],
        )
    config = StepConfig(
        device="cpu", size="nano", vocab_size=50, context_length=8, batch_size=1, warmup_steps=1
    )
    step = build_step(config)
    step.model.register_forward_pre_hook(lambda *_: gpu.work(1.0))
    subject = measure.Subject(step.model, (step.tokens, step.targets), optimizer=step.optimizer)
    with storages:
        memory_history.record_step(subject, "step", lambda phase=nullcontext: step(phase), config)
    assert gpu.log == [("_record_memory_history", 0.0), ("_snapshot", 0.0), ("_record_memory_history", 0.0)]


def test_the_ladders_profiled_steps_are_over_when_the_capture_is(gpu, monkeypatch):
    captured = captured_on(gpu, operations=pd.DataFrame(columns=PROFILED_COLUMNS), reason="lost")
    monkeypatch.setattr(measure, "capture", lambda device: nullcontext(captured))
    ladder = SimpleNamespace(device="cuda", settle=lambda *_: 1.0)
    with pytest.raises(RuntimeError, match="lost"):
        subject = SimpleNamespace(step=lambda: gpu.work(1.0))
        loop.Ladder.profiled_operations(ladder, ladder_case(), subject, is_limited=False)
    assert ("total", "begins", 0.0) in gpu.log and gpu.left == 0.0


def test_an_error_that_has_lost_the_device_ends_the_ladders_run(gpu, monkeypatch):
    monkeypatch.setattr(measure, "release", lambda *_, **__: None)

    def lost(*_):
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        raise torch.AcceleratorError("unspecified launch failure")

    with pytest.raises(torch.AcceleratorError):
        loop.Ladder.visit(SimpleNamespace(device="cuda", run_loaded=lost), ladder_case())
