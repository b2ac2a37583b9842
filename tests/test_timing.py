"""Test timers (on a fake GPU), CUDA graphs, the GPU time of profiled steps, power and rates."""

import gc
import json
import math
import time
import weakref
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pynvml
import pytest
import torch

import cells
from conftest import TINY
from fake_gpu import FakeGpu
from stepscope import stats
from stepscope.config import TOTAL, StepConfig
from stepscope.measure import compiler, graph, power, rates, timing
from stepscope.measure.graph import replay
from stepscope.measure.power import PowerMonitor, Reading, mean_power_w
from stepscope.measure.timing import Phases, time_step, time_steps
from stepscope.traces.profiled_steps import (
    CaptureError,
    fastest_step,
    gpu_time,
    median_step,
    profiled_operations,
)

nan = math.nan


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


def phase_times(gpu, phases, **work_ms):
    def step(phase):
        for name, ms in work_ms.items():
            with phase(name):
                gpu.launch(ms)

    return {name: (round(ms, 6), round(enqueue_ms, 6)) for name, ms, enqueue_ms in time_step(step, phases)}


# Clocks


def test_phase_times_exclude_earlier_gpu_work(gpu):
    phases = Phases("cuda", expected=1)
    gpu.launch(5000)
    assert phase_times(gpu, phases, forward=10, loss=20, backward=300) == {
        "forward": (11, 1),
        "loss": (20, 1),
        "backward": (300, 1),
        TOTAL: (331, 3),
    }
    assert gpu.synchronized == 2, "phases must not wait for each other"
    gpu.launch(5000)
    assert phase_times(gpu, phases, forward=2)[TOTAL] == (3, 1)


def test_repeated_steps_start_on_an_idle_device(gpu):
    gpu.launch(5000)
    assert timing.back_to_back(lambda: gpu.launch(5), "cuda", 3) == pytest.approx([6, 5, 5])
    assert gpu.synchronized == 2
    assert timing.run_for(lambda: gpu.launch(99), "cuda", 0.25) == 3
    assert gpu.synchronized == 5
    cleared = []
    assert timing.run_for(lambda: gpu.launch(99), "cuda", 0, lambda: cleared.append(1)) == 1 == len(cleared)


@pytest.mark.parametrize(
    ("options", "timed_steps"),
    [({}, 2), ({"at_least_s": 3.1}, 3), ({"until_enough": True}, 2)],
)
def test_time_steps_stops_after_enough_steps(gpu, options, timed_steps):
    """A step takes 1.1 s, so the requested number of steps is enough, and phases don't count as steps."""

    def step(phase):
        for name in ("forward", "loss"):
            with phase(name):
                gpu.launch(549)

    samples = time_steps(
        step, 2, 1, "cuda", before=lambda: gpu.launch(7), after=lambda: gpu.launch(8), **options
    )
    totals = samples[samples["phase"] == TOTAL]
    assert totals["warmup"].tolist() == [True] + [False] * timed_steps
    assert timing.wall_times_ms(samples).tolist() == pytest.approx([1099] * timed_steps)


def test_seconds_with_compiling_includes_work_on_the_device(gpu, monkeypatch):
    monkeypatch.setattr(compiler, "default_timer", timing.default_timer)
    assert compiler.seconds_with_compiling(lambda: gpu.launch(500), "cuda") == pytest.approx(0.501)


def test_compiling_more_shapes_than_allowed_raises():
    limits = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "fail_on_recompile_limit_hit": False}
    with torch._dynamo.config.patch(limits):  # restores the limits after the test
        compiler.allow_recompiling(2)
        call = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        call(torch.ones(3))
        call(torch.ones(4))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            call(torch.ones(5))


# CUDA graphs


class Graphs:
    """Fake CUDA graphs, which don't record any work; ``log`` lists the calls in order."""

    def __init__(self, monkeypatch, gpu, replay_ms=7.0):
        self.gpu, self.log = gpu, []
        self.replay = lambda: gpu.launch(replay_ms)
        self.earlier_stream, stream = (SimpleNamespace(wait_stream=id) for _ in range(2))
        generator = SimpleNamespace(
            clone_state=lambda: "earlier state",
            graphsafe_set_state=self.log.append,
        )
        for name, value in {
            "Stream": lambda: stream,
            "current_stream": lambda: self.earlier_stream,
            "CUDAGraph": lambda: self,
            "stream": lambda stream: nullcontext(),
            "graph": self.graph,
            "set_stream": self.log.append,
            "empty_cache": lambda: None,
            "current_device": lambda: 0,
            "is_current_stream_capturing": lambda: False,
            "default_generators": (generator,),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def graph(self, graph, stream):
        assert self.gpu.left_ms == 0, "captured while the warm-up runs"
        self.log.append("capture")
        try:
            yield
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904


def optimizer(device="cpu"):
    weight = torch.zeros(1, device=device)
    return SimpleNamespace(param_groups=[{"capturable": False}], state={weight: {"step": torch.tensor(3.0)}})


def test_replay_captures_a_step_after_warmup_and_times_replays(monkeypatch, gpu):
    graphs, adamw = Graphs(monkeypatch, gpu), optimizer()

    def step():
        assert adamw.param_groups[0]["capturable"]
        graphs.log.append("step")
        if "capture" not in graphs.log:
            gpu.launch(3.0)

    times_ms, reason = replay(
        step, "cuda", optimizer=adamw, clear=lambda: graphs.log.append("clear"), replays=3, at_least_s=0.03
    )
    assert times_ms == pytest.approx([8.0] * 4) and not reason
    assert graphs.log == ["clear", "step", "step", "clear", "capture", "step", "clear"]
    assert adamw.param_groups[0]["capturable"] is False and not adamw.state


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("out. Tried 2 GiB. Including x"), "out of memory: out. Tried 2 GiB."),
        (RuntimeError("a tensor\nof the host"), "RuntimeError: a tensor"),
    ],
)
def test_replay_reports_the_first_error_and_restores_state_when_capture_fails(
    monkeypatch, gpu, error, reason
):
    graphs, adamw, released = Graphs(monkeypatch, gpu), optimizer(), []
    monkeypatch.setattr(graph, "release", lambda device, after_error: released.append(after_error))

    def step():
        if "capture" in graphs.log:
            raise error

    assert replay(step, "cuda", optimizer=adamw) == ([], reason) and released == [True]
    assert graphs.log[-2:] == [graphs.earlier_stream, "earlier state"]
    assert adamw.param_groups[0]["capturable"] is False


@pytest.mark.parametrize(
    ("device", "adamw", "is_scaling", "reason"),
    [
        ("cpu", None, False, "CUDA graphs are not available on a CPU"),
        ("cuda", optimizer(), True, "GradScaler checks"),
        ("cuda", optimizer(), False, ""),
        ("cuda", None, True, ""),
    ],
)
def test_not_capturable_returns_a_reason(device, adamw, is_scaling, reason):
    scaler = SimpleNamespace(is_enabled=lambda: is_scaling)
    found = graph.not_capturable(device, adamw, scaler)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_graph_keeps_tensors_read_by_its_step_alive(monkeypatch, gpu):
    """A replay reads tensors by address, so it would read freed memory if Python had freed a tensor."""
    Graphs(monkeypatch, gpu)

    def capture():
        table = torch.ones(3)
        return graph.graph_of(lambda: len(table), lambda: None, 1), weakref.ref(table)

    replayed, table = capture()
    gc.collect()
    assert table() is not None and replayed() == 3


def test_code_that_only_runs_in_a_capture_is_warmed_up_before_the_capture(monkeypatch, gpu):
    """A capture can't compile the code, so a warm-up step must have compiled it."""
    Graphs(monkeypatch, gpu)
    is_capturing = []
    graph.graph_of(lambda: is_capturing.append(torch.cuda.is_current_stream_capturing()), lambda: None, 2)
    *warmups, _ = is_capturing
    assert warmups == [False, False, True]


def test_capturable_optimizer_keeps_step_counts_on_the_device_of_the_weights():
    adamw = optimizer("meta")
    with graph.capturable(adamw):
        [state] = adamw.state.values()
        assert state["step"].device.type == "meta"


# Statistics


@pytest.mark.parametrize(
    ("are_bound", "median_ms", "fastest_ms", "speedup"),
    [
        ((False, False), (8.0, 8.1), (1, 1), 8 / 8.1),
        ((True, False), (30.0, 8.0), (24.0, 6.0), 4),
        ((True, False), (9.8, 1), (9.8, 8.0), 9.8 / 8),
        ((True, False), (30.0, 8.0), (9.0, 8.0), nan),
        ((True, True), (30.0, 8.0), (9.0, 8.0), nan),
    ],
)
def test_speedup_compares_fastest_steps_when_launch_bound(are_bound, median_ms, fastest_ms, speedup):
    before, after = (
        pd.DataFrame({"launch_bound": [is_bound], "wall_ms": median, "wall_min_ms": fastest})
        for is_bound, median, fastest in zip(are_bound, median_ms, fastest_ms)
    )
    assert [*stats.wall_speedup(before, after)] == pytest.approx([speedup], nan_ok=True)
    assert [*stats.wall_speedup(after, before)] == pytest.approx([1 / speedup], nan_ok=True)


def test_union_counts_overlapping_time_once():
    rng = np.random.default_rng(0)
    for size in [0, 12] * 25:
        starts = rng.integers(0, 80, size)
        ends = starts + rng.integers(0, 9, size)
        covered = set().union(*map(range, starts, ends))
        assert stats.union(starts, ends) == len(covered)


# GPU time


def event(cat, name, start_us, end_us, correlation=None, tid="1"):
    args = {"correlation": correlation, "device": 0, "stream": 7}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": tid,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": args,
    }


@pytest.fixture
def read(tmp_path):
    def read_events(events):
        trace = tmp_path / "trace.json"
        trace.write_text(json.dumps({"traceEvents": events}))
        return profiled_operations(trace)

    return read_events


def phase_range(index, number, phase, start, end):
    return event("user_annotation", f"stepscope/{index}/{number}/{phase}", start, end)


def test_operations_belong_to_the_launching_phase_on_any_thread(read):
    launches = [
        ("kernel", "late", 5, "1"),
        ("kernel", "autograd's", 10, "2"),
        ("gpu_memset", "Memset", 45, "1"),
        ("kernel", "between phases", 30, "1"),
        ("kernel", "at the end of a phase", 50, "1"),
    ]
    events = [
        phase_range(0, 0, "forward", 0, 10),
        phase_range(0, 0, "loss", 10, 20),
        phase_range(1, 2, "forward", 40, 50),
    ]
    for correlation, (kind, name, launched, tid) in enumerate(launches):
        events.append(event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation, tid))
        start = 100 + 10 * correlation
        events.append(event(kind, name, start, start + correlation + 1, correlation))
    operations = read(events)
    operations["us"] = (operations["end_ns"] - operations["start_ns"]) / 1e3
    assert operations[["case", "number", "phase", "name", "us"]].values.tolist() == [
        [0, 0, "forward", "late", 1],
        [0, 0, "loss", "autograd's", 2],
        [1, 2, "forward", "Memset", 3],
    ]


def test_kernel_without_a_launch_raises_capture_error(read):
    kernel = event("kernel", "lost", 3, 4, 1)
    with pytest.raises(CaptureError, match="launches of 1 of 1 operations"):
        read([phase_range(0, 0, "forward", 0, 10), kernel])
    with pytest.raises(CaptureError, match="no named phases"):
        read([kernel])


def operations_of(rows):
    """Return a table of operations, given as rows of a step number, a start in ms and an end in ms."""
    return pd.DataFrame(rows, columns=["number", "start_ns", "end_ns"]) * [1, 10**6, 10**6]


@pytest.mark.parametrize(
    ("rows", "fastest", "gpu_ms"),
    [
        ([(1, 0, 40), (1, 1, 3), (2, 0, 4), (2, 1, 3), (0, 0, 6), (0, 1, 3)], 2, 4),
        ([(0, 0, 3), (0, 3, 6), (1, 0, 4), (1, 1, 5)], 1, 5),
        ([(0, 0, 3), (0, 5, 6), (1, 0, 1)], 0, 4),
    ],
    ids=["disturbed", "overlapping", "incomplete"],
)
def test_fastest_step_is_the_complete_step_with_the_least_gpu_time(rows, fastest, gpu_ms):
    step = fastest_step(operations_of(rows))
    assert {*step["number"]} == {fastest} and gpu_time(step) == {"gpu_ms": gpu_ms, "operations": 2}


@pytest.mark.parametrize(("steps", "median"), [(5, 4), (4, 3), (1, 0)])
def test_median_step_is_the_faster_of_the_two_middle_steps(steps, median):
    rows = [(number, 0, end) for number, end in enumerate([9, 5, 8, 6, 7])]
    assert {*median_step(operations_of(rows[:steps]))["number"]} == {median}


def test_launch_time_is_warm_enqueue_time_divided_by_the_launches_of_a_complete_step(monkeypatch, gpu):
    # the times of warm-up, timed and profiled steps, in this order
    enqueue_ms = iter([90, 80, 5, 5, 2, 5, 5, 9, *[5] * 4, *[70] * 3])
    rows = [(0, 0, 1)] * 700 + [(1, 0, 1)] * 1000  # step 0 lacks operations that the profiler missed
    profile = SimpleNamespace(operations=operations_of(rows), phases=lambda *_: nullcontext)

    def step(phases):
        assert gpu.left_ms == 0
        with phases("forward"):
            gpu.host_ms += next(enqueue_ms)

    step.clear_gradients = lambda: gpu.launch(50.0)
    monkeypatch.setattr(rates, "StepProfiler", lambda device: nullcontext(profile))
    monkeypatch.setattr(rates, "build_step", lambda config: step)
    assert rates.kernel_launch_us("cuda") == pytest.approx((2, 9))
    assert not [*enqueue_ms] and rates.kernel_launch_us("cpu") is None


# Power


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("seconds", [0.45, 0.5, 0.57, 2.0])
def test_mean_power_uses_intervals_between_energy_counter_updates(seconds, first):
    """The energy counter is updated only every 0.1 s, so the first reading may be stale."""
    times = [index * 0.02 for index in range(round(seconds / 0.02) + 1)]
    readings = [Reading(t, 1800.0, 7e6 + 500 * 0.1 * math.floor(t / 0.1 + 1e-9)) for t in times]
    assert mean_power_w(readings[first:]) == pytest.approx(500)
    assert math.isnan(mean_power_w(readings[:8])), "the counter changed only once, so no interval is complete"
    assert math.isnan(mean_power_w([Reading(t, nan, nan) for t in times]))


SYNC_BOOST, IDLE = pynvml.nvmlClocksEventReasonSyncBoost, pynvml.nvmlClocksEventReasonGpuIdle
HOT = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap
WARMUP = [Reading(1, 1200, 0, SYNC_BOOST), Reading(2, 1200, 900, IDLE)]
TIMED = [
    Reading(5, 1980, 1800, IDLE),
    Reading(6, 1900, 2100, HOT),
    Reading(8, nan, 2700, nan),
    Reading(10, 1500, 3300, IDLE),
]


@pytest.mark.parametrize(
    ("readings", "steps", "clock_mhz", "reasons", "watts", "joules"),
    [
        ([*WARMUP, *TIMED], 4, 1900, "power cap; thermal", 300, 600),
        (TIMED, 4, 1900, "power cap; thermal", 300, 500),
        (TIMED, 1, 1500, "", nan, nan),
        (WARMUP, 2, 1200, "sync boost", nan, nan),
        (TIMED[2:3], 1, nan, None, nan, nan),
    ],
)
def test_power_and_clock_cover_the_timed_steps(
    monkeypatch, readings, steps, clock_mhz, reasons, watts, joules
):
    reading = iter(readings)
    monkeypatch.setattr(power, "read_gpu", lambda: next(reading))
    meter = power.Power("cuda")
    for _ in readings:
        meter.read()
    row = meter.per_step(steps)
    assert row.pop("clock_reasons") == reasons
    expected = {"sm_clock_mhz": clock_mhz, "power_w": watts, "energy_per_step_j": joules}
    assert row == pytest.approx(expected, nan_ok=True)


def test_sustained_power_repeats_short_steps(monkeypatch):
    monitor = SimpleNamespace(seconds=0.4, power_w=250.0)
    monkeypatch.setattr(power, "PowerMonitor", lambda: nullcontext(monitor))
    monkeypatch.setattr(power, "run_for", lambda *_: 8)
    row = power.sustained_power(print, "cuda")
    assert row == pytest.approx({"power_w": 250, "energy_per_step_j": 250 * 0.4 / 8})
    assert power.sustained_power(print, "cpu") == {} == power.Power("cpu").per_step(3)


def test_power_monitor_reads_in_a_thread_until_its_block_exits():
    seconds = count()
    with PowerMonitor(lambda: Reading(s := next(seconds), 1000.0, 200.0 * s)) as monitor:
        while len(monitor.readings) < 6:
            time.sleep(0.01)
    assert monitor.power_w == pytest.approx(200) and monitor.sm_clock_mhz == 1000
    assert monitor.seconds == len(monitor.readings) - 1 and not monitor.thread.is_alive()


@pytest.fixture
def nvml(monkeypatch):
    """Fake an NVML driver with one GPU, which this process uses."""
    for name, value in {
        "EnforcedPowerLimit": 450_000,
        "TotalEnergyConsumption": 8_000_000,
        "MaxClockInfo": 2520,
        "ClockInfo": 1830,
        "CurrentClocksEventReasons": 4,
    }.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", lambda device, *clock, value=value: value)
    monkeypatch.setattr(power, "nvml_device", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_gpu_readings_use_watts_joules_and_megahertz(nvml):
    limits = (power.power_limit_w.__wrapped__(), power.highest_clock_mhz.__wrapped__())
    assert limits == (450, 2520) and power.read_gpu()[1:] == (1830, 8000, 4)


def test_clock_is_unknown_when_the_process_uses_no_gpu(nvml, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert math.isnan(power.sm_clock_mhz())


def test_clock_is_unknown_when_the_driver_fails(nvml, monkeypatch):
    def fail(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", fail)
    assert math.isnan(power.sm_clock_mhz())


# Rates


def test_ceilings_exclude_warmups_and_count_copied_bytes_twice(monkeypatch):
    monkeypatch.setattr(rates, "REPEATS", 3)
    times_ms = iter([1.0, 1.0, 9.0, 2.0, 3.0] * 3)
    calls = []
    monkeypatch.setattr(Phases, "ms", lambda phases: [("work", next(times_ms), 0.0)])
    assert rates.fastest_ms("cpu", lambda: calls.append(1)) == 2 and len(calls) == 5
    tera_per_s = 1e12 * 2e-3
    assert rates.ceilings("cpu", ["fp32"]) == pytest.approx(
        {"matmul_fp32": 2 * 512**3 / tera_per_s, "copy": 2 * (64 << 20) / tera_per_s}
    )


def test_ceilings_use_their_precision_and_restore_the_previous_one(monkeypatch):
    randn, precision, used = torch.randn, ["high"], []
    monkeypatch.setattr(torch, "randn", lambda *shape, device, **kind: randn(*shape, **kind))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision[-1])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    monkeypatch.setattr(rates, "MATRIX_SIZE", {"cuda": 4})
    monkeypatch.setattr(rates, "COPY_BYTES", {"cuda": 4096})

    def fastest_ms(device, work):
        used.append((work.args[0].dtype, precision[-1]))
        return 1.0

    monkeypatch.setattr(rates, "fastest_ms", fastest_ms)
    assert dict(zip(rates.ceilings("cuda"), used)) == {
        "matmul_fp32": (torch.float32, "highest"),
        "matmul_tf32": (torch.float32, "high"),
        "matmul_bf16": (torch.bfloat16, "highest"),
        "matmul_fp16": (torch.float16, "highest"),
        "copy": (torch.float32, "high"),
    }


def test_sheet_tflops_are_equal_for_half_precisions_and_unknown_for_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(rates, "data_sheet", {"a GPU": {"fp32": 67.0, "bf16": 989.0}}.__getitem__)
    names = ("fp32", "bf16", "fp16", "tf32")
    tflops = [rates.sheet_tflops(name, "cuda") for name in names]
    assert tflops == pytest.approx([67, 989, 989, nan], nan_ok=True)
    assert math.isnan(rates.sheet_tflops("fp32", "cpu"))


@pytest.mark.parametrize(
    ("precision", "device", "clock_mhz"),
    [("bf16", "cuda", 1830), ("fp32", "cuda", 1980), ("bf16", "cpu", 1980)],
)
def test_sheet_clock_is_the_tensor_core_clock_of_the_data_sheet(monkeypatch, precision, device, clock_mhz):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(rates, "data_sheet", {"a GPU": {"tensor_mhz": 1830}}.__getitem__)
    monkeypatch.setattr(power, "highest_clock_mhz", lambda: 1980.0)
    assert rates.sheet_clock_mhz(precision, device) == clock_mhz


def test_rates_use_the_flops_precision_and_clock_of_each_row(monkeypatch):
    monkeypatch.setattr(
        rates, "sheet_tflops", lambda precision, device: {"bf16": 10.0, "fp32": 8.0}[precision]
    )
    monkeypatch.setattr(rates, "sheet_clock_mhz", lambda precision, device: 2000.0)
    config = StepConfig(**TINY | {"batch_size": 3})
    forward_ms = cells.step_flops(config) / 3 / 1e9  # the time at 1 TFLOP/s
    rows = [
        ("bf16", "step", "backward", forward_ms, nan),
        ("bf16", "step", "loss", forward_ms, nan),
        ("bf16", "step", TOTAL, forward_ms, 1000.0),
        ("fp32", "forward", "forward", forward_ms, nan),
        ("fp32", "forward", TOTAL, forward_ms / 4, 500.0),
    ]
    times = pd.DataFrame(rows, columns=["precision", "mode", "phase", "wall_ms", "sm_clock_mhz"])
    found = rates.with_rates(times, config, {"bf16": 4.0, "fp32": 1.0})
    tokens_per_s = 24 / forward_ms * 1e3
    for column, expected in {
        "tflops": [2, nan, 3, 1, 4],
        "mfu": [0.2, nan, 0.3, 0.125, 0.5],
        "mfu_vs_measured_peak": [0.5, nan, 0.75, 1, 4],
        "mfu_clock_adjusted": [0.4, nan, 0.6, 0.5, 2],
        "tokens_per_s": [nan, nan, tokens_per_s, nan, 4 * tokens_per_s],
    }.items():
        assert found[column].tolist() == pytest.approx(expected, nan_ok=True)
