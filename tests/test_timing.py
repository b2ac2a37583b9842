"""The clocks: no wall time before the device is waited for, GPU time as a union, replays and their reasons, energy."""

import gc
import json
import math
import time
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pynvml
import pytest
import torch

import cells
from conftest import TINY
from stepscope import stats
from stepscope.config import PHASES, TOTAL, StepConfig
from stepscope.measure import compiler, graph, power, rates, timing
from stepscope.measure.graph import replay
from stepscope.measure.power import PowerMonitor, Reading, mean_power_w
from stepscope.measure.timing import SAMPLE_COLUMNS, Phases, time_step, time_steps
from stepscope.model.training_step import build_step
from stepscope.traces.profiled_steps import (
    PROFILED_COLUMNS,
    CaptureError,
    by_name,
    fastest_step,
    gpu_time,
    median_step,
    profiled_operations,
)


@pytest.fixture
def tiny():
    return lambda **fields: build_step(StepConfig(**TINY | fields))


class FakeGpu:
    """A GPU with a queue and a host with a clock: launching takes the host 1 ms, and only waiting for the device
    brings the host's clock to where the work is done."""

    def __init__(self, monkeypatch):
        self.host_ms, self.done_ms, self.waits = 0.0, 0.0, 0
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(timing, "default_timer", lambda: self.host_ms / 1e3)

    def launch(self, work_ms):
        self.host_ms += 1
        self.done_ms = max(self.done_ms, self.host_ms) + work_ms

    def synchronize(self):
        self.host_ms, self.waits = max(self.host_ms, self.done_ms), self.waits + 1

    def event(self, enable_timing):
        assert enable_timing
        found = SimpleNamespace()

        def record():
            found.at_ms, found.waits = max(self.host_ms, self.done_ms), self.waits

        def elapsed_time(end):
            assert end.waits < self.waits, "read before the device was waited for"
            return end.at_ms - found.at_ms

        found.record, found.elapsed_time = record, elapsed_time
        return found


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


def phased(gpu, phases, **work_ms):
    def step(phase):
        for name, each in work_ms.items():
            with phase(name):
                gpu.launch(each)

    return {name: (round(ms, 6), round(enqueue_ms, 6)) for name, ms, enqueue_ms in time_step(step, phases)}


def test_wall_time_is_what_the_device_took_and_not_what_launching_took(gpu):
    found = phased(gpu, Phases("cuda"), forward=10, loss=20, backward=300, optimizer=40)
    assert found == {
        "forward": (11, 1),
        "loss": (20, 1),
        "backward": (300, 1),
        "optimizer": (40, 1),
        TOTAL: (371, 4),
    }
    assert gpu.waits == 2  # before and after: no phase waited


def test_what_ran_before_is_in_no_step(gpu):
    clock = Phases("cuda", expected=1)
    gpu.launch(5000)
    assert phased(gpu, clock, forward=10)[TOTAL] == (11, 1)
    gpu.launch(5000)
    assert phased(gpu, clock, forward=2, loss=3) == {"forward": (3, 1), "loss": (3, 1), TOTAL: (6, 2)}


def test_keeping_up_waits_for_each_step(gpu):
    assert timing.run_for(lambda: gpu.launch(99), "cuda", 0.25) == 3 and gpu.host_ms == 300
    cleared = []
    assert timing.run_for(lambda: gpu.launch(99), "cuda", 0, lambda: cleared.append(1)) == 1 == len(cleared)


def test_phases_that_wait_are_each_measured_by_the_host(gpu):
    assert phased(gpu, Phases("cuda", wait=True), forward=10, backward=20) == {
        "forward": (11, 11),
        "backward": (21, 21),
        TOTAL: (32, 32),
    }
    assert gpu.waits == 4


def test_phases_begin_by_themselves_where_nobody_starts_them(gpu):
    phases = Phases("cuda")
    for expected in (10, 20):
        with phases("forward"):
            gpu.launch(expected)
        gpu.synchronize()
        assert [(name, round(ms, 6)) for name, ms, _ in phases.ms()] == [("forward", expected + 1)]


def test_back_to_back_the_device_is_waited_for_before_and_after(gpu):
    gpu.launch(5000)
    assert timing.back_to_back(lambda: gpu.launch(5), "cuda", 3) == pytest.approx([6, 5, 5])
    assert gpu.waits == 2


def test_steps_go_on_until_they_have_lasted_long_enough(gpu):
    samples = time_steps(lambda phase: gpu.launch(99), 2, 1, "cuda", at_least_s=0.45)
    assert samples["warmup"].tolist() == [True] + [False] * 5
    assert len(time_steps(lambda phase: gpu.launch(99), 2, 1, "cuda")) == 3
    long = time_steps(lambda phase: gpu.launch(1499), 4, 1, "cuda", until_enough=True)
    assert len(long) == 1 + 4 and timing.wall_times_ms(long).index.tolist() == [1, 2, 3, 4]

    def step(phase):
        for name in ("forward", "loss"):
            with phase(name):
                gpu.launch(49)

    whole = time_steps(step, 1, 0, "cuda", at_least_s=0.45).query("phase == 'total'")
    assert len(whole) == 5, "of whole steps, not of one phase"


def test_a_first_step_is_over_when_the_device_is_done(gpu, monkeypatch):
    monkeypatch.setattr(compiler, "default_timer", timing.default_timer)
    assert compiler.seconds_with_compiling(lambda: gpu.launch(500), "cuda") == pytest.approx(0.501)


def test_beyond_the_shapes_that_may_be_compiled_it_fails():
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    with torch._dynamo.config.patch(
        {name: getattr(torch._dynamo.config, name) for name in names}
    ):  # set back at the end
        compiler.allow_recompiling(2)
        call = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        assert [len(call(torch.ones(length))) for length in (3, 4)] == [3, 4]
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            call(torch.ones(5))


# Plain steps


def plain_steps(step, steps, warmups=0, after=lambda: None):
    return time_steps(step, steps, warmups, step.device, before=step.clear_gradients, after=after)


@pytest.mark.parametrize("mode", PHASES)
def test_every_phase_of_every_step_has_its_row_in_order(mode, tiny):
    after = []
    samples = plain_steps(tiny(mode=mode), 3, 2, lambda: after.append(len(after)))
    assert list(samples.columns) == SAMPLE_COLUMNS and after == [0, 1, 2, 3, 4]
    assert list(samples[["step", "warmup", "phase"]].itertuples(index=False, name=None)) == [
        (step, step < 2, phase) for step in range(5) for phase in [*PHASES[mode], TOTAL]
    ]
    phases, whole = samples[samples["phase"] != TOTAL], samples[samples["phase"] == TOTAL].set_index("step")
    assert (phases["wall_ms"] == phases["enqueue_ms"]).all()  # on a CPU nothing is asynchronous
    assert (phases.groupby("step")["wall_ms"].sum() <= whole["wall_ms"]).all()


def test_gradients_are_cleared_before_each_step(tiny):
    step, seen = tiny(mode="forward_backward"), []
    step.model.register_forward_pre_hook(
        lambda model, args: seen.append(any(p.grad is not None for p in model.parameters()))
    )
    plain_steps(step, 3)
    assert seen == [False] * 3


def test_what_is_read_between_steps_is_in_no_step(tiny, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(timing, "default_timer", lambda: float(next(ticks)))
    samples = plain_steps(tiny(mode="forward"), 3, 0, lambda: [timing.default_timer() for _ in range(100)])
    assert samples[samples["phase"] == TOTAL]["wall_ms"].tolist() == [2000] * 3


# Replays


class Graphs:
    """CUDA graphs that capture nothing: what is called between capture and replay, in order."""

    def __init__(self, monkeypatch, gpu, replay=7.0, fail=None):
        self.gpu, self.called, self.fail = gpu, [], fail
        self.replay = lambda: (self.called.append("replay"), gpu.launch(replay))
        side, own = (
            SimpleNamespace(wait_stream=lambda other, name=name: self.called.append(f"{name} stream waits"))
            for name in ("side", "own")
        )
        for name, made in {
            "Stream": lambda: side,
            "current_stream": lambda: own,
            "CUDAGraph": lambda: self,
            "default_stream": lambda: own,
            "stream": self.stream,
            "graph": self.graph,
            "set_stream": lambda to: self.called.append("stream restored"),
            "empty_cache": lambda: None,
            "current_device": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, made)
        # A failed capture leaves the generator in capture mode, so its state is put back.
        generator = SimpleNamespace(
            clone_state=lambda: "state before",
            graphsafe_set_state=lambda state: self.called.append(f"generator has its {state}"),
        )
        monkeypatch.setattr(torch.cuda, "default_generators", (generator,))

    @contextmanager
    def stream(self, stream):
        self.called.append("warm-up")
        yield

    @contextmanager
    def graph(self, graph, stream):
        assert self.gpu.done_ms <= self.gpu.host_ms, "captured while the warm-up runs"
        self.called.append("capture")
        try:
            yield
        except torch.OutOfMemoryError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904


class FakeStep(SimpleNamespace):
    def clear_gradients(self):
        self.graphs.called.append("cleared")

    def __call__(self):
        if "capture" not in self.graphs.called:
            self.graphs.gpu.launch(3.0)
        self.graphs.called.append(("step", self.optimizer.param_groups[0]["capturable"]))
        if self.graphs.called.count(("step", True)) == 2 and self.graphs.fail:
            raise self.graphs.fail


def optimizer():
    weight = torch.zeros(1)
    return SimpleNamespace(param_groups=[{"capturable": False}], state={weight: {"step": torch.tensor(3.0)}})


def test_a_step_is_warmed_up_captured_and_replayed_with_a_capturable_optimizer(monkeypatch, gpu):
    graphs = Graphs(monkeypatch, gpu)
    step = FakeStep(graphs=graphs, optimizer=optimizer())
    times, reason = replay(
        step, "cuda", optimizer=step.optimizer, clear=step.clear_gradients, replays=3, at_least_s=0
    )
    assert times == pytest.approx([8.0] * 3) and not reason  # launching the graph, and its work
    assert graphs.called == [
        "cleared",
        "side stream waits",
        "warm-up",
        ("step", True),
        "own stream waits",
        "cleared",
        "capture",
        ("step", True),
        *["replay"] * 3,
        "cleared",
    ]
    assert step.optimizer.param_groups[0]["capturable"] is False and not step.optimizer.state


def test_a_graph_that_does_not_fit_says_so_and_leaves_the_step_as_it_was(monkeypatch, gpu):
    graphs = Graphs(
        monkeypatch, gpu, fail=torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB. Including x")
    )
    step = FakeStep(graphs=graphs, optimizer=optimizer())
    times, reason = replay(step, "cuda", optimizer=step.optimizer, clear=step.clear_gradients)
    assert not times and reason == "out of memory: CUDA out of memory. Tried 2 GiB."
    restored = ["stream restored", "generator has its state before", "cleared"]
    assert graphs.called[-3:] == restored and "replay" not in graphs.called
    assert step.optimizer.param_groups[0]["capturable"] is False


def test_what_cannot_be_captured_says_why(tiny):
    assert replay(tiny(), "cpu") == ([], "a CPU has no CUDA graphs")
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    times, reason = replay(tiny(), "cuda", optimizer=optimizer(), scaler=scaler)
    assert not times and "GradScaler" in reason
    assert not graph.not_capturable("cuda", None, scaler)


def test_a_graph_gives_what_its_step_gave_after_as_many_warm_ups_as_asked(monkeypatch, gpu):
    graphs, ran = Graphs(monkeypatch, gpu), []
    replayed = graph.graph_of(lambda: ran.append(1) or len(ran), lambda: None, 3)
    assert len(ran) == 4 and replayed() == replayed() == 4 and graphs.called.count("replay") == 2


def test_a_graph_keeps_alive_what_its_step_reads(monkeypatch, gpu):
    """The GPU reads a tensor at its address, whether or not anybody holds it still."""
    Graphs(monkeypatch, gpu)

    def captured():
        table = torch.ones(3)
        return graph.graph_of(lambda: len(table), lambda: None, 1), weakref.ref(table)

    replayed, table = captured()
    gc.collect()
    assert table() is not None and replayed() == 3


def test_replays_last_as_long_as_asked_and_a_failure_says_what_came_first(monkeypatch, gpu):
    Graphs(monkeypatch, gpu, replay=99.0)
    released = []
    monkeypatch.setattr(graph, "release", lambda device, after_error: released.append(after_error))
    assert len(replay(timing.noop, "cuda", at_least_s=0.75)[0]) == 8 and released == [False]

    def fails():
        try:
            raise ValueError("a tensor of the host")
        except ValueError:
            raise RuntimeError("the capture has ended")  # noqa: B904

    assert replay(fails, "cuda") == ([], "ValueError: a tensor of the host") and released == [False, True]


def test_only_a_scaler_that_scales_hinders_a_graph_and_counts_of_steps_move_to_the_weights():
    scaler = SimpleNamespace(is_enabled=lambda: False)
    assert not graph.not_capturable("cuda", optimizer(), scaler)
    own = SimpleNamespace(
        param_groups=[{}], state={torch.zeros(1, device="meta"): {"step": torch.tensor(3.0)}}
    )
    with graph.capturable(own):
        assert [state["step"].device.type for state in own.state.values()] == ["meta"]


def test_the_real_optimizer_steps_on_after_it_was_capturable(tiny):
    step = tiny()
    step()
    with graph.capturable(step.optimizer):
        pass
    step()
    assert len(step.optimizer.state) == len(list(step.model.parameters()))


def test_samples_are_told_as_the_standard_library_tells_them():
    samples = [9.0, 1.0, 4.0, 16.0, 25.0, 2.0]
    told = {
        f"wall{'' if name == 'median' else f'_{name}'}_ms": value
        for name, value in stats.location(samples).items()
    }
    assert told == pytest.approx(cells.spread(samples))
    assert stats.spread_ms(pd.DataFrame({"wall_q1_ms": [4.0], "wall_q3_ms": [9.0]})).tolist() == [5]


@pytest.mark.parametrize(
    "before, after, gain",
    [
        ({"wall_ms": 10.0}, {"wall_ms": 8.0}, 1.25),
        ({"wall_ms": 8.0}, {"wall_ms": 8.1}, 8 / 8.1),  # both are the GPU's
        ({"wall_ms": 30.0, "busy": 0.3, "wall_min_ms": 24.0}, {"wall_ms": 8.0, "wall_min_ms": 6.0}, 4),
        ({"wall_ms": 8.0, "wall_min_ms": 6.0}, {"wall_ms": 30.0, "busy": 0.3, "wall_min_ms": 24.0}, 0.25),
        ({"wall_ms": 9.0, "busy": 0.3}, {"wall_ms": 8.0}, np.nan),
        ({"wall_ms": 8.0}, {"wall_ms": 9.0, "busy": 0.3}, np.nan),
        ({"wall_ms": 9.8, "busy": 0.3}, {"wall_ms": 8.0}, 9.8 / 8),
        ({"wall_ms": 8.0}, {"wall_ms": 9.8, "busy": 0.3}, 8 / 9.8),
    ],
)
def test_a_gain_of_what_waits_for_launches_is_of_the_fastest_steps_and_none_if_small(before, after, gain):
    full = {"busy": 0.99, "gpu_ms": 7.0, "enqueue_ms": 5.0}
    pair = [
        full | {"wall_min_ms": row["wall_ms"]} | row | ({"gpu_ms": 3.0} if "busy" in row else {})
        for row in (before, after)
    ]
    assert stats.wall_speedup(*pair) == pytest.approx(gain, nan_ok=True)
    assert stats.launch_bound_rows(pd.DataFrame(pair, index=[7, 3])).to_dict() == {
        7: "busy" in before,
        3: "busy" in after,
    }


# GPU time


def test_a_union_is_that_of_counting_every_moment():
    rng = np.random.default_rng(0)
    assert stats.union(np.array([]), np.array([])) == 0
    for _ in range(50):
        starts = rng.integers(0, 80, 12)
        ends = starts + rng.integers(0, 9, 12)
        assert stats.union(starts, ends) == len({t for a, b in zip(starts, ends) for t in range(a, b)})


def event(cat, name, start, end, correlation=None, tid="1"):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": tid,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"correlation": correlation, "device": 0, "stream": 7},
    }


@pytest.fixture
def read(tmp_path):
    def captured(events):
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
        return profiled_operations(tmp_path / "trace.json")

    return captured


def phase_range(index, number, phase, start, end):
    return event("user_annotation", f"stepscope/{index}/{number}/{phase}", start, end)


def test_an_operation_belongs_to_the_phase_that_launched_it_on_any_thread(read):
    events = [
        phase_range(0, 0, "forward", 0, 10),
        phase_range(0, 0, "loss", 10, 20),
        phase_range(1, 0, "forward", 40, 50),
        event("cuda_runtime", "cudaLaunchKernel", 5, 6, 1),
        event("kernel", "late", 100, 107, 1),
        event("cuda_driver", "cuLaunchKernel", 10, 11, 2, tid="autograd"),
        event("kernel", "second", 110, 111, 2),
        event("cuda_runtime", "cudaMemsetAsync", 45, 46, 3),
        event("gpu_memset", "Memset", 120, 122, 3),
        event("cuda_runtime", "cudaLaunchKernel", 30, 31, 4),
        event("kernel", "between", 130, 140, 4),
        event("cuda_runtime", "cudaLaunchKernel", 50, 51, 5),
        event("kernel", "at its end", 150, 160, 5),
    ]
    found = read(events)
    assert found[["case", "number", "phase", "name"]].values.tolist() == [
        [0, 0, "forward", "late"],
        [0, 0, "loss", "second"],
        [1, 0, "forward", "Memset"],
    ]
    assert (found["end_ns"] - found["start_ns"]).tolist() == [7, 1, 2]


def test_a_cpus_operators_stand_for_kernels_each_for_its_self_time(read):
    operators = [
        ("mm", 1, 5),
        ("add", 5, 8),
        ("linear", 8, 15),
        ("t", 8, 9),
        ("addmm", 9, 12),
        ("view", 12, 13),
    ]
    found = read(
        [
            phase_range(0, 0, "forward", 0, 20),
            *(event("cpu_op", f"aten::{name}", *lasted) for name, *lasted in operators),
        ]
    )
    lasted = (found["end_ns"] - found["start_ns"]).groupby(found["name"]).sum()
    assert lasted.to_dict() == {
        "aten::mm": 4,
        "aten::add": 3,
        "aten::linear": 4,
        "aten::addmm": 3,
    }  # views do no work


def test_a_kernel_whose_launch_is_missing_leaves_gpu_time_unknown(read):
    events = [phase_range(0, 0, "forward", 0, 10), event("kernel", "lost", 3, 4, 1)]
    with pytest.raises(CaptureError, match="launches of 1 of 1 operations"):
        read(events)
    with pytest.raises(CaptureError, match="none of the named phases"):
        read(events[1:])


def test_gpu_time_and_names_are_of_the_step_that_nothing_disturbed():
    """A neighbour lengthened the second and the third; operations that overlap count once."""
    rows = [
        (number, "forward", name, "other", start * 1_000_000, end * 1_000_000)
        for number, longest in ((1, 40), (2, 4), (0, 6))
        for name, start, end in (("gemm", 0, longest), ("add", 1, 3), ("add", longest, longest + 1))
    ]
    rows.append((3, "forward", "gemm", "other", 0, 1))  # the profiler lost the rest of this one
    own = fastest_step(pd.DataFrame(rows, columns=PROFILED_COLUMNS[1:]))
    assert gpu_time(own) == {"gpu_ms": 5.0, "operations": 3.0}
    named = by_name(own).set_index("name")
    assert named["count"].to_dict() == {"gemm": 1, "add": 2}
    assert named["gpu_ms"].to_dict() == {"gemm": 4, "add": 3} and list(named.index) == ["gemm", "add"]
    overlapping = pd.DataFrame({"number": [0, 0, 1, 1], "start_ns": [0, 3, 0, 1], "end_ns": [3, 6, 4, 5]})
    assert set(fastest_step(overlapping)["number"]) == {1}


def test_the_middle_step_is_the_quicker_of_the_two_in_the_middle():
    ends = [(0, 9), (1, 5), (2, 8), (3, 6), (4, 7)]  # number, end
    for steps, middle in ((ends, 4), (ends[:4], 3), (ends[:1], 0)):
        rows = pd.DataFrame(steps, columns=["number", "end_ns"]).assign(start_ns=0)
        assert set(median_step(rows)["number"]) == {middle}


def timed(*enqueued_ms):
    """A mode's plain steps, of which the first is a warm-up."""
    rows = [(number, number == 0, TOTAL, 2 * ms, ms) for number, ms in enumerate(enqueued_ms)]
    return pd.DataFrame(rows, columns=SAMPLE_COLUMNS)


def test_a_launch_takes_what_the_quickest_and_the_slowest_warm_step_say(monkeypatch):
    launches = [
        ["step", number, "forward", "gemm", "other", at, at + 1]
        for number, count in ((0, 700), (1, 1000), (2, 1000))
        for at in range(count)
    ]  # of the first some are lost
    captured = SimpleNamespace(
        operations=pd.DataFrame(launches, columns=PROFILED_COLUMNS), phases=lambda case, number: None
    )
    ran, asked = [], []
    monkeypatch.setattr(
        rates,
        "time_steps",
        lambda step, steps, warmups, device, before: (
            before(),
            {(10, 2): timed(90.0, 5.0, 2.0, 3.0)}[steps, warmups],
        )[1],
    )
    monkeypatch.setattr(rates, "capture", lambda device: nullcontext(captured))
    monkeypatch.setattr(rates, "synchronizer", lambda device: lambda: None)
    monkeypatch.setattr(
        rates,
        "build_step",
        lambda config: (
            asked.append(config)
            or type(
                "Step",
                (),
                {
                    "clear_gradients": lambda self: ran.append("cleared"),
                    "__call__": lambda self, phase: ran.append("captured"),
                },
            )()
        ),
    )
    assert rates.kernel_launch_us("cuda") == (2, 5) and ran == ["cleared", *["cleared", "captured"] * 3]
    assert (asked[0].size, asked[0].batch_size, asked[0].context_length) == ("small", 1, 16), "little to do"
    assert rates.kernel_launch_us("cpu") is None
    captured.operations = captured.operations[:0]
    assert all(map(math.isnan, rates.kernel_launch_us("cuda")))


# Energy


def steady(seconds, power=500.0, every_s=0.02, counter_every_s=0.1):
    """Readings at constant power of an energy counter that is brought up to date now and then."""
    times = [i * every_s for i in range(round(seconds / every_s) + 1)]
    return [
        Reading(t, 1800.0, 7e6 + power * counter_every_s * math.floor(t / counter_every_s + 1e-9))
        for t in times
    ]


@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("seconds", [0.45, 0.5, 0.57, 2.0])
def test_a_stale_counter_gives_the_true_power_between_its_changes(seconds, late):
    """Also where the first reading is one of a counter that has long been stale."""
    assert mean_power_w(steady(seconds)[late:]) == pytest.approx(500)
    uneven = zip((0.0, 0.1, 0.29, 0.3, 0.31, 0.4, 0.48), (0, 50, 50, 150, 150, 200, 200))
    assert mean_power_w([Reading(at_s, 1800.0, energy_j) for at_s, energy_j in uneven]) == pytest.approx(500)


def test_power_is_unknown_where_the_counter_is():
    nan = float("nan")
    assert math.isnan(mean_power_w([Reading(i, nan, nan) for i in range(5)])) and math.isnan(
        mean_power_w(steady(0.15))
    )
    assert math.isnan(power.median_clock([Reading(0, nan, nan)]))
    assert power.median_clock([Reading(0, clock, 0) for clock in (1900, nan, 1400, 1980)]) == 1900


def test_energy_and_clock_are_of_counted_steps_only(monkeypatch):
    warm = [Reading(t, 1200.0, 1000.0 * t) for t in (1.0, 2.0, 3.0, 4.0, 5.0)]
    steps = ((8.0, 1980.0), (9.0, 1900.0), (11.0, 1600.0), (13.0, 1500.0))
    seen = iter([*warm, *(Reading(t, mhz, 5000 + 300.0 * (t - 5)) for t, mhz in steps)])
    monkeypatch.setattr(power, "read_gpu", lambda: next(seen))
    own = power.Power("cuda")
    for _ in range(5 + 4):
        own.read()
    assert own.per_step(4) == pytest.approx(
        {"sm_clock_mhz": 1750, "clock_reasons": None, "power_w": 300, "energy_per_step_j": 600}
    )
    own.readings = own.readings[-4:]  # without warm-ups nothing is read before the first step
    assert own.per_step(4) == pytest.approx(
        {"sm_clock_mhz": 1750, "clock_reasons": None, "power_w": 300, "energy_per_step_j": 300 * 5 / 3}
    )
    own.readings = own.readings[-1:]
    assert own.per_step(1) == pytest.approx(
        {"sm_clock_mhz": 1500, "clock_reasons": None, "power_w": math.nan, "energy_per_step_j": math.nan},
        nan_ok=True,
    )


def test_clock_reasons_are_of_counted_steps_only_and_in_words():
    bits = [pynvml.nvmlClocksEventReasonSyncBoost, pynvml.nvmlClocksEventReasonGpuIdle]
    bits.append(pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap)
    own = power.Power("cuda")
    own.readings = [Reading(at_s, 1980.0, 0.0, each) for at_s, each in enumerate([*bits, math.nan])]
    reasons = {steps: own.per_step(steps)["clock_reasons"] for steps in (1, 2, 3, 4)}
    assert reasons[1] is None and reasons[2] == reasons[3] == "power cap; thermal"
    assert reasons[4] == "power cap; thermal; sync boost"
    assert power.clock_reasons(own.readings[1:2]) == "", "between steps a GPU may be idle"


def test_short_steps_are_kept_up_for_their_energy(monkeypatch):
    monitor = SimpleNamespace(seconds=0.4, power_w=250.0)
    monkeypatch.setattr(power, "PowerMonitor", lambda: nullcontext(monitor))
    monkeypatch.setattr(
        power, "run_for", lambda step, device, seconds, before: {(2.0, "clear"): 8}[seconds, before]
    )
    assert power.sustained_power(None, "cuda", "clear") == pytest.approx(
        {"power_w": 250, "energy_per_step_j": 250 * 0.05}
    )
    assert power.sustained_power(None, "cpu") == {} == power.Power("cpu").per_step(3)
    short = power.Power("cuda")
    short.readings = [Reading(t, 1980.0, 100 * t) for t in np.linspace(0, 0.2, 11)]
    assert short.per_step(10) == pytest.approx(
        {"sm_clock_mhz": 1980, "clock_reasons": None, "power_w": math.nan, "energy_per_step_j": math.nan},
        nan_ok=True,
    )


def test_a_monitor_reads_from_a_thread_until_it_is_left():
    began, seen = time.monotonic(), []

    def read():
        seen.append(time.monotonic() - began)
        return Reading(seen[-1], 1000.0, 200.0 * seen[-1])

    with PowerMonitor(read) as monitor:
        assert monitor.readings, "one of the begin"
        while len(seen) < 6:
            time.sleep(0.01)
    assert len(monitor.readings) == len(seen) and not monitor.thread.is_alive()
    assert (
        monitor.power_w == pytest.approx(200)
        and monitor.sm_clock_mhz == 1000
        and monitor.seconds == seen[-1] - seen[0]
    )


def test_a_process_without_a_gpu_has_no_clock_even_beside_one(monkeypatch):
    monkeypatch.setattr(power, "nvml_device", lambda: "a GPU beside")
    monkeypatch.setattr(power.pynvml, "nvmlDeviceGetClockInfo", lambda device, which: 345)
    for uses, clock_mhz in ((False, float("nan")), (True, 345.0)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda uses=uses: uses)
        assert power.sm_clock_mhz() == pytest.approx(clock_mhz, nan_ok=True)


def test_what_the_driver_says_is_told_in_watts_joules_and_megahertz(monkeypatch):
    said = {
        "nvmlDeviceGetEnforcedPowerLimit": 450_000,
        "nvmlDeviceGetTotalEnergyConsumption": 8_000_000,
        "nvmlDeviceGetMaxClockInfo": 2520,
        "nvmlDeviceGetClockInfo": 1830,
        "nvmlDeviceGetCurrentClocksEventReasons": 4,
    }
    for name, number in said.items():
        monkeypatch.setattr(
            power.pynvml,
            name,
            lambda device, *which, number=number: (
                number if which in ((), (power.pynvml.NVML_CLOCK_SM,)) else 0
            ),
        )
    monkeypatch.setattr(power, "nvml_device", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    asked = (power.power_limit_w, power.highest_clock_mhz)
    for ask in asked:
        ask.cache_clear()
    try:
        assert (power.power_limit_w(), power.highest_clock_mhz(), *power.read_gpu()[1:]) == (
            450,
            2520,
            1830,
            8000,
            4,
        )

        def silent(*_):
            raise power.pynvml.NVMLError(power.pynvml.NVML_ERROR_NOT_SUPPORTED)

        monkeypatch.setattr(power.pynvml, "nvmlDeviceGetClockInfo", silent)
        assert math.isnan(power.sm_clock_mhz())
    finally:
        for ask in asked:
            ask.cache_clear()


# Ceilings and rates


def test_ceilings_leave_warm_ups_out_and_count_a_copy_in_both_directions(monkeypatch):
    lasts = iter([1000.0, 1000.0, 1.0, 1.0, 2.0, 3.0, 9.0] * 2)  # of all seven the median is 3
    monkeypatch.setattr(Phases, "ms", lambda phases: [("work", next(lasts), 0.0)])
    before = torch.get_float32_matmul_precision()
    found = rates.ceilings("cpu", ["fp32"])
    assert found["matmul_fp32"] == pytest.approx(2 * 512**3 / 2e-3 / 1e12)
    assert found["copy"] == pytest.approx(2 * (64 << 20) / 2e-3 / 1e12)
    assert torch.get_float32_matmul_precision() == before


def test_each_ceiling_is_in_its_own_precision_and_what_was_set_before_is_set_after(monkeypatch):
    randn, seen, get = torch.randn, [], torch.get_float32_matmul_precision
    monkeypatch.setattr(
        torch, "randn", lambda *shape, device, **kind: randn(*shape, **kind)
    )  # this machine has no GPU
    monkeypatch.setattr(rates, "MATRIX_SIZE", {"cuda": 4, "cpu": 4})
    monkeypatch.setattr(rates, "COPY_BYTES", {"cuda": 4096, "cpu": 4096})
    monkeypatch.setattr(
        rates,
        "median_ms",
        lambda device, work: seen.append((work.args[0].dtype, work.args[0].nbytes, get())) or 1.0,
    )
    before = get()
    torch.set_float32_matmul_precision("high")
    try:
        assert [*rates.ceilings("cuda")] == [
            "matmul_fp32",
            "matmul_tf32",
            "matmul_bf16",
            "matmul_fp16",
            "copy",
        ]
        assert get() == "high" and [*rates.ceilings("cpu")] == ["matmul_fp32", "matmul_bf16", "copy"]
    finally:
        torch.set_float32_matmul_precision(before)
    f32, *low = torch.float32, torch.bfloat16, torch.float16
    assert seen[:5] == [
        (f32, 64, "highest"),
        (f32, 64, "high"),
        *((kind, 32, "highest") for kind in low),
        (f32, 4096, "high"),
    ]


def test_a_sheets_rate_of_fp16_is_bf16s_and_a_cpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(rates, "data_sheet", {"a GPU": {"fp32": 67.0, "bf16": 989.0}}.__getitem__)
    assert [rates.sheet_tflops(name, "cuda") for name in ("fp32", "bf16", "fp16")] == [67, 989, 989]
    assert math.isnan(rates.sheet_tflops("tf32", "cuda")) and math.isnan(rates.sheet_tflops("fp32", "cpu"))


def test_rates_are_of_each_modes_and_phases_flops_and_of_its_own_precision_and_clock(monkeypatch):
    sheets, measured = (
        {"fp32": 100.0, "bf16": 900.0, "fp16": 950.0},
        {"fp32": 80.0, "bf16": 700.0, "fp16": 650.0},
    )
    clocks_mhz = iter(range(1000, 2000, 100))
    monkeypatch.setattr(rates, "sheet_tflops", lambda precision, device: sheets[precision])
    monkeypatch.setattr(rates.power, "highest_clock_mhz", lambda: 2000.0)
    config = StepConfig(**TINY | {"batch_size": 3})
    rows = [
        {
            "mode": mode,
            "precision": precision,
            "phase": phase,
            "wall_ms": 1e-3 * (len(mode) + len(phase)),
            "sm_clock_mhz": float(next(clocks_mhz)) if phase == TOTAL else np.nan,
        }
        for precision in sheets
        for mode in ("step", "forward")
        for phase in [*PHASES[mode], TOTAL]
    ]
    found = rates.with_rates(pd.DataFrame(rows), config, measured)
    forward = cells.step_flops(config) / 3
    of_phase = {"forward": forward, "loss": np.nan, "backward": 2 * forward, "optimizer": np.nan}
    own_mhz = {(row["mode"], row["precision"]): row["sm_clock_mhz"] for row in rows if row["phase"] == TOTAL}
    for given, row in zip(rows, found.to_dict("records"), strict=True):
        flops = (
            {"step": 3 * forward, "forward": forward}[row["mode"]]
            if row["phase"] == TOTAL
            else of_phase[row["phase"]]
        )
        rate, sheet = flops / given["wall_ms"] / 1e9, sheets[row["precision"]]
        expected = {
            "tflops": rate,
            "mfu": rate / sheet,
            "mfu_vs_measured_peak": rate / measured[row["precision"]],
            "mfu_clock_adjusted": rate / sheet * 2000 / own_mhz[row["mode"], row["precision"]],
            "tokens_per_s": 24 / given["wall_ms"] * 1e3 if row["phase"] == TOTAL else np.nan,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, nan_ok=True), given
