"""Test how captures are interpreted: steps, causes of idle time, waiting in collectives, and advice."""

import gzip
import math
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest

from capture_events import (
    ADD,
    ALL_REDUCE,
    GEMM,
    advice_for,
    annotation,
    event,
    first_gpu,
    ids,
    kernels,
    launch,
    line_text,
    longest_gap,
    profiler_step,
    unlaunched,
    write_trace,
)
from stepscope.captures.capture import load_capture
from stepscope.captures.communication import exposed_communication
from stepscope.captures.idle_time import HOST_CAUSES, explain_gaps, sum_by_cause
from stepscope.captures.lines import rendered
from stepscope.captures.step_breakdown import devices
from stepscope.captures.summary import profile
from stepscope.traces.attribution import TraceError, outermost

A100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]}
TWO_GPUS = Path(__file__).parent / "data" / "nccl_payloads.sqlite.gz"


def steps(count: int = 3, name: str = "ProfilerStep#{}", empty: tuple[int, ...] = ()) -> list[dict]:
    """Return the events of 1 ms steps with 20 kernels in the first 610 µs; steps in ``empty`` lack kernels."""
    events = []
    for number in range(count):
        events.append(annotation(name.format(number), 1000 * number, 999))
        if number not in empty:
            events += kernels(1000 * number + 5, 20)
    return events


def layered(inner: str, outer: str = "") -> list[dict]:
    """Return the events of four iterations, each a six-layer forward pass followed by a loss."""
    events = []
    for at in range(0, 4880, 1220):
        if outer:
            events.append(annotation(outer, at, 980))
        for layer in range(6):
            begin = at + 160 * layer
            events += [annotation(inner.format(layer), begin, 150), *kernels(begin + 2, 4)]
        events += [annotation("loss", at + 985, 200), *kernels(at + 987, 3, ADD)]
    return events


def warmed_up(measured: int = 10) -> list[dict]:
    """Return the events of three 1 ms warm-up steps, followed by ``measured`` forward passes of 310 µs each."""
    events = []
    for number in range(3):
        at = 1000 * number
        events += [annotation(f"Warm-up Step {number}", at, 990), *kernels(at + 5, 30)]
    for number in range(measured):
        at = 3000 + 310 * number
        events += [annotation("Forward", at, 309), *kernels(at + 5, 8)]
    return events


def slow_host(kind: str = "", name: str = "", shift: float = 0) -> list[dict]:
    """Return the events of four 60 ms steps; in each, the host launches 100 kernels, but only after 50 ms.

    If ``kind`` is given, a host event of this kind covers these 50 ms.
    """
    events = []
    for number in range(4):
        at = shift + 60_000 * number
        events.append(profiler_step(number, at, 59_990))
        if kind:
            events.append(event(kind, name, at + 5, 49_990))
        for index in range(100):
            events += launch(GEMM, at + 50_000 + 20 * index, at + 50_010 + 95 * index, 95)
    return events


def waiting_for_an_event() -> list[dict]:
    """Return the events of a kernel that starts 100 ms after its launch, although the GPU is idle until then."""
    first = [*launch(GEMM, 0, 10, 10), *launch("waits_for_an_event", 24, 100_000, 10)]
    later = [part for i in range(20) for part in launch(ADD, 30 + i, 100_010 + 10 * i, 10)]
    return [*first, *later]


def one_known_launch() -> list[dict]:
    """Return the events of 101 kernels separated by gaps; only the first kernel's launch is included."""
    return [*launch(GEMM, 0, 7, 50), *(unlaunched(ADD, 200 * number, 50) for number in range(1, 101))]


def graph_launch(ts: float, dur: float, correlation: int = 0, name: str = "cudaGraphLaunch") -> dict:
    return event("cuda_runtime", name, ts, dur, correlation=correlation or next(ids))


def graph_without_kernels() -> list[dict]:
    events = []
    for number in range(4):
        at = 1000 * number
        events += [
            profiler_step(number, at, 999),
            *launch("prepare_inputs", at + 10, at + 20, 10),
            graph_launch(at + 30, 20),
            event("cuda_runtime", "cudaStreamSynchronize", at + 60, 900),
            *[part for i in range(6) for part in launch("sample", at + 962 + 5 * i, at + 972 + 5 * i, 20)],
        ]
    return events


def late_rank() -> list[dict]:
    """Return the events of five collectives; the first one waits 17 s for another GPU."""
    events = launch(ALL_REDUCE, 0, 10, 17_000_000)
    for number in range(4):
        at = 17_000_100 + 10_100 * number
        events += [*kernels(at, 50, apart=200), *launch(ALL_REDUCE, at + 10_040, at + 10_050, 14)]
    return events


def decode_steps() -> list[dict]:
    """Return the events of 32 steps that each replay a graph; only the first two steps include GPU operations."""
    events = []
    for number in range(32):
        at, correlation = 55_000 * number, next(ids)
        events += [
            annotation(f"step[DECODE bs=64] {number}", at, 54_900),
            graph_launch(at + 10, 50, correlation, "hipGraphLaunch"),
        ]
        for index in range(40 * (number < 2)):
            events.append(unlaunched(GEMM, at + 100 + 160 * index, 150, correlation))
    return events


# For each capture: its events, the number of steps (0 if the entire capture counts as one step), the median wall
# time and busy time in ms, the label of the step's bound, and the beginning of the first piece of advice.
CASES = {
    "baseline": (steps(), 3, 1.0, 0.4, "host-bound", "find out what the host does"),
    "layers": (layered("layer {}", "forward"), 0, 4.727, 2.16, "launch-bound", "launch fewer"),
    "attention": (layered("attention"), 0, 4.727, 2.16, "launch-bound", "launch fewer"),
    "compiled": (layered("Torch-Compiled Region: 0/0"), 0, 4.727, 2.16, "launch-bound", "launch fewer"),
    "warm-up": (warmed_up(), 10, 0.31, 0.16, "launch-bound", "launch fewer"),
    "only warm-up": (warmed_up(measured=0), 3, 1.0, 0.6, "launch-bound", "run fp32 matmuls"),
    "empty first step": (steps(5, empty=(0,)), 4, 1.0, 0.4, "host-bound", "find out what the host does"),
    "unnamed": (slow_host(), 4, 60.0, 9.5, "host-bound", "find out what the host does while"),
    "operator": (slow_host("cpu_op", "aten::stack"), 4, 60.0, 9.5, "host-bound", "call aten::stack less"),
    "frame": (
        slow_host("python_function", "a/read.py(1): get"),
        4,
        60.0,
        9.5,
        "host-bound",
        "move read.py(1)",
    ),
    "late start of time": (
        slow_host("user_annotation", "load", 1_700_000_000_000_000),
        4,
        60.0,
        9.5,
        "host-bound",
        "move load off",
    ),
    "event": (waiting_for_an_event(), 0, 100.2, 0.22, "idle", "find out what waits_for_an_event waits for"),
    "few launches": (one_known_launch(), 0, 20.043, 5.05, "bound", "capture again with the host's launches"),
    "graph": (graph_without_kernels(), 4, 1.0, 0.055, "bound", "capture again with the operations of CUDA"),
    "late rank": (late_rank(), 0, 17_040.4, 17_004.066, "GPU-bound", "capture steady steps"),
    "decode": (decode_steps(), 0, 61.39, 12.0, "bound", "capture again with the operations of CUDA"),
}


@pytest.mark.parametrize("name", CASES)
def test_profile_reports_expected_steps_times_bound_and_advice(tmp_path, name):
    events, count, wall_ms, busy_ms, label, advice = CASES[name]
    lines = profile(write_trace(tmp_path / "a.json", events, **A100))
    capture, step = lines[0].values, lines[1].values
    assert capture["steps"] == count
    assert step["wall_ms"] == pytest.approx(wall_ms, rel=0.01)
    parts = ("compute_ms", "exposed_copies_ms", "exposed_communication_ms")
    assert sum(step[part] for part in parts) == pytest.approx(busy_ms, rel=0.01)
    assert step["wall_ms"] - step["idle_ms"] == pytest.approx(busy_ms, rel=0.01)
    assert label in [line.label for line in lines]
    to_do = next(line.text for line in lines if line.label == "to do")
    assert to_do.removeprefix("1. ").startswith(advice)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[4] != "bound"])
def test_idle_time_causes_sum_to_the_idle_time(tmp_path, name):
    gpu = first_gpu(tmp_path, CASES[name][0], **A100)
    gaps = explain_gaps(gpu)
    assert gpu.ms_per_step(gaps["ms"].sum() * 1e6) == pytest.approx(gpu.median["idle"])
    sums = sum_by_cause(gaps, len(gpu.median_indices))
    assert sums["ms"].sum() == pytest.approx(gpu.median["idle"])
    host_ms = sums.loc[sums["cause"].isin(HOST_CAUSES), "ms"].sum()
    saved_ms = [advice.ms for advice in advice_for(gpu)]
    assert saved_ms == sorted(saved_ms, reverse=True)
    assert all(ms <= max(host_ms, gpu.median["wall"]) for ms in saved_ms)


# Steps


def test_layer_range_is_a_step_only_when_requested(tmp_path):
    path = write_trace(tmp_path / "a.json", layered("layer {}", "forward"))
    assert len(load_capture(path, step="layer").steps) == 24
    assert load_capture(path, step="forward").steps == ["forward"] * 4


@pytest.mark.parametrize(("outer", "has_steps"), [("forward", False), ("", True)])
def test_range_within_a_phase_does_not_count_as_a_step_despite_its_name(tmp_path, outer, has_steps):
    path = write_trace(tmp_path / "a.json", layered("micro batch {}", outer))
    assert bool(load_capture(path).steps) == has_steps


def test_range_that_begins_with_a_phase_and_outlasts_it_counts_as_a_step(tmp_path):
    starts = range(0, 400, 100)
    ranges = [
        annotation(name, start, dur)
        for start in starts
        for name, dur in (("train step", 90), ("forward", 40))
    ]
    work = [part for start in starts for part in kernels(start + 5, 3)]
    assert load_capture(write_trace(tmp_path / "a.json", [*ranges, *work])).steps == ["train step"] * 4


def test_warmup_operations_are_excluded_and_counted(tmp_path):
    path = write_trace(tmp_path / "a.json", warmed_up())
    assert "left out: 90 launched in a warm-up (1.80 ms)" in line_text(path, "capture")
    path = write_trace(tmp_path / "b.json", [annotation("warmup", 0, 2000), *steps(5, "iteration {}")])
    assert load_capture(path).steps == [f"iteration {number}" for number in (2, 3, 4)]


def test_empty_steps_are_counted_without_shifting_outlier_names(tmp_path):
    late_kernels = kernels(4800, 5)  # launched in step 4, but finish in step 5
    last_step = [profiler_step(6, 8000, 100), *kernels(8001, 2)]
    events = [*steps(6, empty=(0, 3)), *late_kernels, *last_step]
    gpu = first_gpu(tmp_path, events)
    text = line_text(tmp_path / "a.json", "capture")
    assert "7 steps (ProfilerStep#0 to ProfilerStep#6), 2 of them without GPU work" in text
    assert gpu.step_names == [f"ProfilerStep#{number}" for number in (1, 2, 4, 5, 6)]
    # The empty step 3 isn't part of step 2.
    assert gpu.breakdowns["wall"].tolist()[1] == pytest.approx(0.999)
    outliers = [gpu.step_names[index] for index in gpu.outliers]
    assert outliers == ["ProfilerStep#5", "ProfilerStep#6"]


def test_two_steps_yield_no_outliers(tmp_path):
    gpu = first_gpu(tmp_path, [*steps(2), *launch(GEMM, 1990, 2000, 3000)])
    walls = gpu.breakdowns["wall"]
    assert walls.max() > 2 * walls.min() and not gpu.outliers


def test_steps_without_known_launches_count_as_one_step(tmp_path):
    events = [each for each in steps() if each["cat"] != "cuda_runtime"]
    path = write_trace(tmp_path / "a.json", events)
    text = line_text(path, "capture")
    assert "3 steps" in text and "no operation was launched in any of them: the entire capture" in text
    assert "unknown" in line_text(path, "bound") and line_text(path, "step on GPU") == ""


@pytest.mark.parametrize("has_launches", [True, False])
def test_gpu_ranges_define_steps_when_the_host_has_no_ranges(tmp_path, has_launches):
    events = []
    for each in steps(name="step {}"):
        if each["cat"] == "user_annotation":
            events.append(each | {"cat": "gpu_user_annotation", "tid": 7})
        elif has_launches or each["cat"] != "cuda_runtime":
            events.append(each)
    capture = load_capture(write_trace(tmp_path / "a.json", events))
    assert capture.steps == ["step 0", "step 1", "step 2"]
    assert capture.operations["step"].tolist() == [number // 20 for number in range(60)]


@pytest.mark.parametrize(("size", "has_steps"), [(60, True), (15, False)])
def test_large_graph_replays_are_steps_when_there_are_no_ranges(tmp_path, size, has_steps):
    """A graph of 15 kernels doesn't count as a step, because so few kernels may be a single layer."""
    events = []
    for at in range(0, 40_000, 10_000):
        correlation = next(ids)
        events += [
            graph_launch(at, 20, correlation),
            *(unlaunched(GEMM, at + 40 + 30 * i, 25, correlation) for i in range(size)),
            *launch(ADD, at + 5000, at + 5010, 5),
        ]
    capture = load_capture(write_trace(tmp_path / "a.json", events))
    assert capture.steps == ["CUDA graph replay"] * 4 * has_steps
    assert capture.operations.groupby("step").size().tolist() == ([61] * 4 if has_steps else [64])


@pytest.mark.parametrize("seed", range(5))
def test_outermost_matches_a_plain_loop(seed):
    random = Random(seed)
    keys, lengths = [1 << 24, 2 << 24, (2 << 24) + 5], range(30)
    starts = [random.randrange(300) for _ in range(200)]
    ranges = [(start, start + random.choice(lengths), random.choice(keys)) for start in starts]
    rows = pd.DataFrame(ranges, columns=["start_ns", "end_ns", "key"])
    kept, last_end = [], {}
    for index, (start, end, key) in sorted(enumerate(ranges), key=lambda item: (item[1][0], -item[1][1])):
        process = key >> 24
        if start >= last_end.get(process, -1):
            kept.append((process, index))
        last_end[process] = max(last_end.get(process, -1), end, start + 1)
    assert outermost(rows).index.tolist() == [index for _, index in sorted(kept, key=lambda item: item[0])]


def test_time_span_includes_only_complete_steps(tmp_path):
    path = write_trace(tmp_path / "a.json", steps(6))
    capture = load_capture(path)  # the first operation starts 15 µs after the first step
    span = capture.between(0.9, 3.9)
    assert span.steps == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert len(span.operations) == 60 and len(span.excluded) == 20
    assert capture.between(1.3, None).steps == [f"ProfilerStep#{number}" for number in (2, 3, 4, 5)]
    lines = profile(path, from_ms=2.9, to_ms=3.9)
    assert lines[0].values["steps"] == 1 and lines[1].values["compute_ms"] == pytest.approx(0.4)
    message = r"no operation starts between .* expected a time span within the 5\.\d+ ms"
    with pytest.raises(TraceError, match=message):
        capture.between(90, 95)


# Idle time


@pytest.mark.parametrize(("launches", "cause"), [(0, "unnamed"), (15, "launch")])
def test_host_launching_for_another_gpu_counts_as_busy_launching(tmp_path, launches, cause):
    """Between two operations on GPU 0, the host thread launches kernels on GPU 1."""
    own = [*launch(GEMM, 0, 5, 10), *launch(GEMM, 1000, 1005, 10), *launch(ADD, 1010, 1016, 3000)]
    gpu = first_gpu(tmp_path, [*own, *kernels(50, launches, apart=60, gpu=1)])
    assert explain_gaps(gpu)["cause"].iloc[0] == cause


def merged_ranks() -> list[dict]:
    """Return the merged events of two ranks that use the same correlation ids and step names."""
    first = slow_host("user_annotation", "load")
    second = [each | {"name": "save"} if each["name"] == "load" else each for each in first]
    events = []
    for rank, (rank_events, gpu) in enumerate(((first, 0), (second, 1))):
        for each in rank_events:
            if each["cat"] == "kernel":
                events.append(each | {"args": each["args"] | {"device": gpu}})
            else:
                events.append(each | {"pid": rank, "tid": rank})
    return events


def test_idle_time_of_each_rank_is_explained_by_its_own_host(tmp_path):
    path = write_trace(tmp_path / "a.json", merged_ranks(), **A100)
    gaps = [longest_gap(gpu) for gpu in devices(load_capture(path))]
    assert gaps == [["host", "", "load"], ["host", "", "save"]]


# Communication


def collective(name: str, call: float, dur: float, elements: int, dtype: str) -> list[dict]:
    """Return the events of a collective across 8 GPUs and of its launch."""
    message = {"In msg nelems": elements, "Out msg nelems": elements, "dtype": dtype, "Group size": 8}
    return launch(name, call, call + 100, dur, **message)


def test_exposed_communication_splits_into_transfer_and_waiting(tmp_path):
    """At an A100's 300 GB/s, an all-reduce of 48 MB among 8 GPUs takes at least 280 µs."""
    events = [
        *kernels(0, 10),
        *collective(ALL_REDUCE, 300, 1000, 24_000_000, "BFloat16"),
        *kernels(350, 5, apart=300, stream=9),  # three of these kernels overlap the collective
    ]
    gpu = first_gpu(tmp_path, events, **A100)
    parts = exposed_communication(gpu)
    exposed_ms = gpu.median["exposed communication"]
    assert exposed_ms == pytest.approx(1.0 - 3 * 0.02)
    assert parts.min_transfer_ms == pytest.approx(2 * 7 / 8 * 48e6 / 300e9 * 1e3)
    assert parts.transfer_ms == pytest.approx(parts.min_transfer_ms)
    assert parts.waiting_ms == pytest.approx(exposed_ms - parts.min_transfer_ms)
    text = line_text(tmp_path / "a.json", "communication")
    assert "takes at least 0.280 ms at 300 GB/s (NVLink)" in text
    assert advice_for(gpu)[0].what.startswith("balance the GPUs: ncclDevKernel_AllReduce")


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("AllReduce_Sum_f32_RING_LL", 2 * 7 / 8),
        ("AllGather_RING_LL", 7 / 8),
        ("ReduceScatter_Sum_bf16_RING_LL", 7 / 8),
        ("SendRecv", 1),
        ("Broadcast_RING_LL", 1),
    ],
)
def test_minimum_transfer_time_depends_on_bytes_and_collective_kind(tmp_path, kind, factor):
    events = [*kernels(0, 5), *collective(f"ncclDevKernel_{kind}", 200, 10_000, 1_000_000, "Float")]
    parts = exposed_communication(first_gpu(tmp_path, events, **A100))
    assert parts.min_transfer_ms == pytest.approx(factor * 4e6 / 300e9 * 1e3)


def test_communication_of_unknown_size_counts_as_transfer_unless_unusually_long(tmp_path):
    events = []
    for number in range(6):
        at, dur = 3000 * number, 2000 if number == 3 else 20
        events += [*kernels(at, 5), *launch(ALL_REDUCE, at + 200, at + 300, dur)]
    parts = exposed_communication(first_gpu(tmp_path, events))
    assert parts.waiting_ms == pytest.approx(1.98) and parts.transfer_ms == pytest.approx(6 * 0.02)
    assert np.isnan(parts.min_transfer_ms)
    text = rendered(profile(tmp_path / "a.json"), "json")
    assert "waiting_ms" in text and "NaN" not in text


def test_nccl_payloads_separate_transfer_from_waiting():
    """On these two H200s, rank 1 computes for 10 ms longer per step, so rank 0 waits in its own collectives."""
    capture = load_capture(TWO_GPUS)
    operations = capture.operations
    sized = operations[operations["message_bytes"] >= 0]
    kinds = sized["name"].astype(str).str.extract("_(AllReduce|AllGather|ReduceScatter)_")[0]
    sizes = sized["message_bytes"].groupby(kinds.to_numpy()).agg(["min", "max"]).to_dict("split")
    assert sizes["index"] == ["AllGather", "AllReduce", "ReduceScatter"]
    # For each collective, NCCL reports only the bytes that a single rank sends.
    assert sizes["data"] == [[52_428_800] * 2, [26_214_400] * 2, [52_428_800] * 2]
    assert set(sized["group_size"]) == {2}
    early, late = (exposed_communication(gpu) for gpu in devices(capture))
    # In each of three collectives, every GPU sends and receives 26,214,400 B at 450 GB/s.
    assert early.min_transfer_ms == pytest.approx(3 * 26_214_400 / 450e9 * 1e3, rel=0.01)
    assert early.waiting_ms > 9 > 1 > late.waiting_ms


def changed_payloads(folder: Path, statement: str, *values: str):
    path = folder / "changed.sqlite"
    path.write_bytes(gzip.decompress(TWO_GPUS.read_bytes()))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)
    return load_capture(path)


def test_minimum_transfer_time_is_unknown_when_one_gpu_is_captured(tmp_path):
    """The minimum depends on how many ranks take part in the collective, but this capture doesn't say how many."""
    capture = changed_payloads(tmp_path, "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = 1")
    (gpu,) = devices(capture)
    parts = exposed_communication(gpu)
    assert math.isnan(parts.min_transfer_ms) and parts.waiting_ms == 0


@pytest.mark.parametrize("payload", ["[" * 200_000, "not JSON", "[]", '{"Message size [bytes]": true}'])
def test_nccl_payloads_without_a_size_are_unknown(tmp_path, payload):
    statement = "UPDATE NVTX_EVENTS SET jsonText = ? WHERE jsonText IS NOT NULL"
    capture = changed_payloads(tmp_path, statement, payload)
    assert (capture.operations["message_bytes"] == -1).all()


# Kernels


def test_leading_kernel_of_each_phase_is_listed_with_its_count(tmp_path):
    events = [
        annotation("forward", 0, 300),
        *kernels(2, 6, "gemm_tn"),
        *kernels(190, 2, ADD),
        annotation("backward", 300, 600),
        *kernels(302, 9, "gemm_tn"),
        *kernels(600, 8, "gemm_nt"),
        annotation("optimizer", 900, 200),
        *kernels(902, 4, ADD),
    ]
    lines = [line for line in profile(write_trace(tmp_path / "a.json", events)) if "part" in line.values]
    assert [[line.values[key] for key in ("part", "name", "count", "also")] for line in lines] == [
        ["forward", "gemm_tn", 6, ["backward"]],
        ["backward", "gemm_tn", 9, ["forward"]],
        ["optimizer", ADD, 4, []],
    ]
    assert lines[0].text == "forward: 6 x gemm_tn: 0.120 ms (75% of its kernels), also leads in backward"


def test_kernel_line_shows_median_and_extreme_times(tmp_path):
    durations = [10, 10, 12, 40]
    events = [part for i, dur in enumerate(durations) for part in launch(GEMM, 100 * i, 100 * i + 5, dur)]
    path = write_trace(tmp_path / "a.json", [*events, *launch(ADD, 500, 505, 3)])
    text = f"4 x {GEMM}: 0.0720 ms (96%), each 0.0110 ms (0.0100 to 0.0400)"
    assert line_text(path, "kernels") == text
