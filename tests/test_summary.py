"""Test capture summaries: step windows, idle time, communication, advice and output formats."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from capture_events import (
    ADD,
    ALL_REDUCE,
    GEMM,
    H100,
    advice_for,
    advice_texts,
    annotation,
    event,
    first_gpu,
    kernels,
    launch,
    line_text,
    longest_gap,
    operator,
    profiler_step,
    summary_line,
    unlaunched,
    write_trace,
)
from cells import run_cells
from stepscope import PROJECT
from stepscope.captures import EXAMPLE
from stepscope.captures.advice import unfused_attention
from stepscope.captures.capture import load_capture
from stepscope.captures.idle_time import explain_gaps, sum_by_cause
from stepscope.captures.lines import FORMATS, rendered
from stepscope.captures.step_breakdown import devices
from stepscope.captures.summary import profile
from stepscope.data_sheets import data_sheet
from stepscope.traces.attribution import TraceError
from stepscope.traces.kernel_categories import kernel_categories

DATA = Path(__file__).parent / "data"
BEFORE, PREFETCH, SYNC = (
    DATA / "captures" / name
    for name in ("before_first_kernel.json.gz", "prefetch.json.gz", "sync_in_to.sqlite.gz")
)
SAMPLE = DATA / "nsys" / "sample.sqlite"
GPU_TRACE = DATA / "nsys" / "nsys_2026_3_cuda_gpu_trace.csv"
COPY = "Memcpy HtoD (Pinned -> Device)"


# Steps


def test_step_time_includes_host_work_before_the_first_operation():
    step = summary_line(BEFORE, "step on GPU").values
    assert step["wall_ms"] == pytest.approx(382.6, abs=0.5)  # the step's range takes 382.5 ms on the host
    before = summary_line(BEFORE, "before").values
    assert before["before_ms"] == pytest.approx(218, abs=1) and before["where"].endswith("preprocess")


def test_prefetched_copies_do_not_shift_step_windows():
    gpu = next(devices(load_capture(PREFETCH)))
    walls = gpu.breakdowns["wall"]
    assert len(walls) == 6 and walls.between(114, 124).all() and not gpu.outliers
    ops = gpu.classified_ops
    copies = ops[(ops["kind"] == "memcpy") & (ops["stream"] != gpu.stream)]
    assert (copies.groupby("step")["start_ns"].min().to_numpy() < gpu.windows[:, 0]).any()
    assert (gpu.windows[1:, 0] == gpu.windows[:-1, 1]).all()


def test_summary_reports_median_step_time_outliers_and_later_work(tmp_path):
    events, at = [], 0
    for number, dur in enumerate((100, 300, 40, 98, 104, 102, 101)):
        events += [profiler_step(number, at, dur), *launch(GEMM, at + 1, at + 3, dur - 4)]
        at += dur
    path = write_trace(tmp_path / "a.json", [*events, *kernels(at + 3, 3)])
    step = summary_line(path, "step on GPU").values
    assert step["steps_ms"] == [0.1, 0.3, 0.04, 0.098, 0.104, 0.102, 0.101] and step["wall_ms"] == 0.101
    outliers = "ProfilerStep#1 0.300 ms (compute +0.199 ms), ProfilerStep#2 0.0400 ms (compute -0.061 ms)"
    assert line_text(path, "outliers") == outliers
    capture = line_text(path, "capture")
    assert "(ProfilerStep#0 to ProfilerStep#6); 7 operations; left out: 3 after the last step" in capture


def test_startup_is_reported_when_it_dominates_the_capture(tmp_path):
    slow = [part for at in range(0, 400_000, 10_000) for part in launch(ADD, at, at + 3, 100)]
    steady = [part for at in range(400_000, 500_000, 500) for part in launch(GEMM, at, at + 3, 490)]
    path = write_trace(tmp_path / "a.json", [*slow, *steady])
    assert summary_line(path, "start-up").values["started_ms"] == pytest.approx(400, rel=0.05)
    assert advice_texts(path)[0].startswith("capture steady steps")
    assert not line_text(write_trace(tmp_path / "b.json", steady), "start-up")


def test_step_time_is_zero_for_a_step_without_duration(tmp_path):
    path = write_trace(tmp_path / "a.json", [profiler_step(1, 5, 0), *launch(ADD, 5, 5, 0)])
    assert line_text(path, "step on GPU").startswith("0 ms")


def test_kernel_overlap_within_a_phase_is_reported(tmp_path):
    forward = [annotation("forward", 0, 300), *kernels(5, 6)]
    path = write_trace(tmp_path / "a.json", [*forward, *launch(ADD, 7, 17, 8, stream=9)])
    assert line_text(path, "phase").startswith("forward 0.128 ms (sums of kernel times; 0.00800 ms overlap)")


def test_copies_are_exposed_when_the_gpu_runs_no_kernels(tmp_path):
    copies = [part for at in range(6) for part in launch(COPY, 10 * at, 10 * at + 4, 6, cat="gpu_memcpy")]
    path = write_trace(tmp_path / "a.json", copies)
    assert summary_line(path, "on GPU").values["exposed_copies_ms"] == pytest.approx(0.036)


# Idle time


def test_advice_names_the_synchronizing_call_and_operator():
    assert summary_line(SYNC, "sync-bound").values["waiting_ms"] > 5
    cause = pd.DataFrame(summary_line(SYNC, "idle time").values["causes"]).iloc[0]
    assert cause[["cause", "call", "where"]].tolist() == ["sync", "cudaStreamSynchronize", "aten::to"]
    assert any("avoid cudaStreamSynchronize in aten::to" in text for text in advice_texts(SYNC))


@pytest.mark.parametrize(("sync_us", "cause"), [(80, "sync"), (1, "launch")])
def test_synchronization_explains_later_gaps_up_to_its_duration(tmp_path, sync_us, cause):
    """Each of ten ``.to`` calls waits for 80 µs of GPU work and precedes four short kernels separated by gaps."""
    events = []
    for at in range(0, 2000, 200):
        events += [
            *launch(GEMM, at, at + 3, 80),
            event("cpu_op", "aten::to", at + 5, 82),
            event("cuda_runtime", "cudaStreamSynchronize", at + 6, sync_us),
        ]
        for call in range(at + 105, at + 205, 25):
            events += launch(ADD, call, call + 3, 3)
    gaps = explain_gaps(first_gpu(tmp_path, events))
    total = sum_by_cause(gaps, 1).iloc[0]
    assert total["cause"] == cause
    if cause == "sync":
        assert total[["call", "where", "count"]].tolist() == ["cudaStreamSynchronize", "aten::to", 10]
        # the 80 µs of synchronization explain only half of the last gap
        assert total["ms"] == pytest.approx(10 * (25 + 3 * 22) / 1e3)


def test_slow_launch_explains_a_gap(tmp_path):
    call, kernel = launch(ADD, 100, 1105, 20)
    slow_call = call | {"name": "hipLaunchKernel", "dur": 1000}
    path = write_trace(tmp_path / "a.json", [*launch(GEMM, 10, 20, 30), slow_call, kernel, *kernels(1120, 8)])
    advice = "keep hipLaunchKernel out of the step (a kernel's first use loads it"
    assert advice_texts(path)[0].startswith(advice)


def test_gaps_are_summed_by_cause_call_and_place():
    rows = [
        ("sync", "a", "x", 7, 2.0),
        ("sync", "a", "x", 7, 6.0),
        ("sync", "a", "x", 9, 1.0),
        ("sync", "a", "y", 9, 3.0),
        ("launch", "", "x", -1, 4.0),
        ("launch", "", "y", -1, 16.0),
        ("host", "", "load", 3, 5.0),
        ("unknown", "", "z", -1, 0.5),
        ("call", "b", "x", 4, 8.0),
    ]
    sums = sum_by_cause(pd.DataFrame(rows, columns=["cause", "call", "where", "event", "ms"]), 2)
    assert sums[["cause", "call", "where", "ms", "longest_ms", "count"]].to_numpy().tolist() == [
        ["launch", "", "", 10, 16, 1],
        ["sync", "a", "x", 4.5, 6, 1],
        ["call", "b", "x", 4, 8, 0.5],
        ["host", "", "load", 2.5, 5, 0.5],
        ["sync", "a", "y", 1.5, 3, 0.5],
        ["unknown", "", "", 0.25, 0.5, 0.5],
    ]


def test_gap_is_explained_by_the_thread_launching_the_next_operation(tmp_path):
    """Thread 1 synchronizes, and runs the ranges ``load`` and ``save``.

    The operations that end the gaps are launched by thread 2, thread 1 and an unknown thread.
    """
    events = [
        *launch(GEMM, 0, 5, 95),
        event("cuda_runtime", "cudaDeviceSynchronize", 10, 90),
        annotation("load", 1000, 900),
        *launch(GEMM, 600, 605, 95, tid=2),
        *launch(GEMM, 1950, 1955, 45),
        *launch(GEMM, 1990, 2000, 5),
        annotation("save", 2100, 800),
        unlaunched(GEMM, 3005, 10),
        *launch(ADD, 3010, 3015, 5),
    ]
    gaps = explain_gaps(first_gpu(tmp_path, events))
    assert gaps[["begin", "end", "cause", "where"]].to_numpy().tolist() == [
        [100_000, 605_000, "unnamed", ""],
        [700_000, 1_000_000, "unnamed", ""],
        [1_000_000, 1_900_000, "host", "load"],
        [1_900_000, 1_955_000, "launch", ""],
        [2_005_000, 3_005_000, "unknown", ""],
    ]


@pytest.mark.parametrize(
    ("cat", "name", "ts", "dur", "tid", "cause"),
    [
        ("user_annotation", "load", 150, 800, 1, "host"),  # this range launches nothing
        ("user_annotation", "load", 150, 1600, 1, "host"),  # the gap takes up most of the range
        ("user_annotation", "epoch", -2000, 9000, 1, "unnamed"),
        ("cpu_op", "aten::add", 150, 852, 1, "launch"),  # this operator launches the next kernel, but slowly
        ("cuda_runtime", "cudaMalloc", 450, 540, 1, "call"),
        ("cuda_runtime", "cudaMalloc", 900, 90, 1, "unnamed"),
        ("cuda_runtime", "cudaMalloc", 150, 400, 2, "unnamed"),  # this event is on a different thread
        ("cuda_runtime", "cudaDeviceSynchronize", 110, 880, 1, "sync"),
    ],
)
def test_event_explains_a_gap_only_if_it_fills_the_gap_without_launching(
    tmp_path, cat, name, ts, dur, tid, cause
):
    """The GPU is idle from 100 to 1005 µs."""
    ops = [*launch(GEMM, 0, 5, 95), *launch(ADD, 1000, 1005, 95)]
    assert longest_gap(first_gpu(tmp_path, [*ops, event(cat, name, ts, dur, tid)]))[0] == cause


def test_gap_is_explained_until_the_next_launch_or_the_end_of_the_step(tmp_path):
    first = launch(GEMM, 0, 5, 95)
    late_start = [annotation("load", 105, 290), *launch(ADD, 400, 2000, 5)]
    gaps = explain_gaps(first_gpu(tmp_path, [*first, *late_start]))
    assert gaps[["cause", "where"]].to_numpy().tolist() == [["host", "load"], ["device", ADD]]
    first.append(profiler_step(1, -10, 3000))
    for tid, expected in ((1, ["host", "", "save"]), (2, ["unnamed", "", ""])):
        gpu = first_gpu(tmp_path, [*first, annotation("save", 200, 2700, tid)])
        assert longest_gap(gpu) == expected


def test_gap_location_is_the_outermost_operator_in_the_innermost_range_and_frame(tmp_path):
    nested = [
        ("user_annotation", "outer"),
        ("user_annotation", "inner"),
        ("python_function", "a/b/train.py(3): main"),
        ("python_function", "a/b/loss.py(9): loss"),
        ("python_function", "torch/nn/functional.py(9): call"),
        ("cpu_op", "aten::item"),
        ("cpu_op", "aten::_local_scalar_dense"),
        ("cuda_runtime", "cudaMemcpyAsync"),
    ]
    events = [event(*names, 110 + 2 * depth, 885 - 4 * depth) for depth, names in enumerate(nested)]
    gpu = first_gpu(tmp_path, [*launch(GEMM, 0, 5, 95), *launch(ADD, 1000, 1005, 95), *events])
    assert longest_gap(gpu) == ["call", "cudaMemcpyAsync", "aten::item, inner, loss.py(9): loss"]


# Phases and communication


def ranged(*names: str) -> list[dict]:
    """Return the events of an outer range that contains one inner range per name, and finally an NCCL range.

    Each inner range encloses one kernel launch.
    """
    events = [annotation("chunk", 0, 100 * len(names) + 100)]
    for number, name in enumerate(names):
        at = 10 + 100 * number
        events += [annotation(name, at, 50), *launch(GEMM, at + 1, at + 5, 40 + number)]
    at = 10 + 100 * len(names)
    return [*events, annotation("ncclGroupEnd", at, 20), *launch(ALL_REDUCE, at + 1, at + 5, 30)]


def test_inner_ranges_are_listed_excluding_library_ranges(tmp_path):
    path = write_trace(tmp_path / "a.json", ranged("attn one", "mlp one", "attn two"))
    text = line_text(path, "phase")
    assert "'attn two' 0.0420, 'mlp one' 0.0410" in text and "nccl" not in text and "chunk" not in text
    phases = {"attn*": "forward", "mlp one": "backward"}
    assert "forward 0.0820 | backward 0.0410 ms" in line_text(path, "phase", phases=phases)
    with pytest.raises(TraceError, match=r"no range is named mlp\?x; expected one of"):
        load_capture(path, phases={"mlp?x": "forward"})
    path = write_trace(tmp_path / "b.json", ranged("attn(F)", "mlp(B)", "mlp(W)"))
    assert line_text(path, "phase").startswith("forward 0.0400 | backward 0.0830 ms")


def test_communication_on_the_compute_stream_is_reported():
    assert "0% hidden, because it runs on the compute stream" in line_text(SYNC, "communication")
    assert "compute stream" not in line_text(PREFETCH, "communication")


# Advice


def test_advice_recommends_pinning_pageable_copies(tmp_path):
    name = "Memcpy HtoD (Pageable -> Device)"
    copies = [part for at in range(0, 900, 100) for part in launch(name, at, at + 5, 60, cat="gpu_memcpy")]
    path = write_trace(tmp_path / "a.json", [*copies, *launch(GEMM, 901, 905, 40)])
    assert "pin it" in advice_texts(path)[0]


def test_advice_covers_unfused_attention_and_unaligned_matmuls_in_a_real_capture():
    texts = advice_texts(BEFORE)
    assert any(text.startswith("use F.scaled_dot_product_attention") for text in texts)
    assert any("unaligned loads (align1)" in text for text in texts)
    assert not any("torch.compile" in text for text in texts)


@pytest.mark.parametrize(
    ("names", "streams", "count"),
    [
        ([ADD, "softmax_warp_forward", "direct_copy_kernel_cuda"], 7, 3),
        (["softmax_warp_forward", "nll_loss_forward", "softmax_warp_backward"], 7, 0),
        (["cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>"], 7, 0),
        ([ADD, "softmax_warp_forward"], 7, 2),
        ([ADD, "softmax_warp_forward"], [8, 7, 7, 8], 0),  # the matmuls run on a different stream
        (["ncclDevKernel_AllReduce(x)", "softmax_warp_forward"], 7, 0),
        ([*[ADD] * 7, "softmax_warp_forward"], 7, 8),
        ([*[ADD] * 9, "softmax_warp_forward"], 7, 0),
    ],
)
def test_unfused_attention_requires_a_softmax_between_matmuls_on_the_same_stream(names, streams, count):
    names = [GEMM, *names, GEMM]
    columns = {"name": pd.Categorical(names), "kernel_category": kernel_categories(names), "stream": streams}
    assert unfused_attention(pd.DataFrame(columns)).sum() == count


def test_fp32_matmul_advice_depends_on_the_gpu():
    """A V100 doesn't support TF32."""
    assert any("autocast to fp16" in text and "volta_sgemm" in text for text in advice_texts(PREFETCH))
    assert any("TF32" in text and "sgemm" in text for text in advice_texts(SAMPLE))


def advised_ms(gpu) -> dict[str, float]:
    """Return the time in ms that each piece of advice promises to save, keyed by its first five characters."""
    return {advice.what[:5]: advice.ms for advice in advice_for(gpu)}


def test_advice_counts_attention_kernels_once(tmp_path):
    names = [GEMM, ADD, "softmax_warp_forward", GEMM, ADD]
    events = [part for at, name in enumerate(names) for part in launch(name, at, 10 + 100 * at, 100 - at)]
    expected = {"use F": 0.099 + 0.098, "fuse ": 0.096, "run f": 0.197}
    assert advised_ms(first_gpu(tmp_path, events)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "advised"),
    [("ampere_sgemm_tf32_128x64", set()), (ADD, {"fuse "}), ("ampere_sgemm_128x64", {"run f"})],
)
def test_advice_recommends_tensor_cores_for_fp32_and_fusion_without_compiled_kernels(tmp_path, name, advised):
    events = launch(name, 0, 10, 100)
    assert {*advised_ms(first_gpu(tmp_path, events))} == advised
    events += launch("triton_poi_fused_7", 5, 110, 10)
    assert {*advised_ms(first_gpu(tmp_path, events))} == advised - {"fuse "}


def matmul(name: str, start: float, dur: float, dtype: str) -> list[dict]:
    """Return the events of a 2 GFLOP matmul; at an H100's 989.5 TFLOP/s, it would take 2.02 µs."""
    source = operator("aten::mm", dtype, [1000, 1000], [1000, 1000], ts=start - 5)
    return [source, *launch(name, start - 4, start, dur, operator=source)]


def test_matmul_advice_uses_the_peak_rate_of_the_gpu(tmp_path):
    events = []
    for number in (0, 1):
        at = 1000 * number
        slow = matmul("volta_sgemm", at + 210, 390, "float")
        events += [
            profiler_step(number, at, 1000),
            *matmul("cutlass_bf16_s16816gemm_align2", at + 10, 90, "c10::BFloat16"),
            *matmul("cutlass_bf16_s16816gemm_align8", at + 110, 90, "c10::BFloat16"),
            *slow,
            *launch("splitKreduce_kernel", at + 209, at + 600, 10, operator=slow[0]),
            *launch(ADD, at + 600, at + 620, 370),
        ]
    at_peak = 2 / 989.5
    gpu = first_gpu(tmp_path, events, **H100)
    expected = {"fuse ": 0.37, "run f": 0.4 - at_peak, "1 mat": 0.09 - at_peak}
    assert advised_ms(gpu) == pytest.approx(expected, rel=1e-4)
    texts = " ".join(advice.what for advice in advice_for(gpu))
    assert "unaligned loads (align2)" in texts and "such as volta_sgemm" in texts
    # without the GPU's name, its peak rate is unknown
    assert advised_ms(first_gpu(tmp_path, events))["1 mat"] == pytest.approx(0.09)
    # With unknown FLOPs, the data sheet's fp32 rate is used, and the split-K sum doesn't count as a matmul.
    kernels_only = [each for each in events if each["cat"] != "cpu_op"]
    saved_ms = advised_ms(first_gpu(tmp_path, kernels_only, **H100))["run f"]
    assert saved_ms == pytest.approx(0.39 * (1 - 67 / 989.5), rel=1e-2)


# Kernels and data sheets


def test_record_shapes_is_listed_as_missing_only_without_shapes(tmp_path):
    kernel = launch(GEMM, 1, 5, 5)
    path = write_trace(tmp_path / "a.json", [operator("aten::relu", "float", [4]), *kernel])
    assert "record_shapes" not in line_text(path, "not available")
    path = write_trace(tmp_path / "b.json", kernel)
    assert "record_shapes" in line_text(path, "not available")


@pytest.mark.parametrize(("size", "rate"), [(250, ""), (100_000_000, "4.00 TB/s")])
def test_bandwidth_is_omitted_for_kernels_that_move_little(tmp_path, size, rate):
    source = operator("triton_poi_0", "float", [size])
    path = write_trace(tmp_path / "a.json", [source, *launch("triton_poi_0", 1, 5, 100, operator=source)])
    assert line_text(path, "generated")[:9] == rate


BF16_TFLOPS = {
    "NVIDIA B200": 2250,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H20": 148,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121,
    "NVIDIA GH200 480GB": 989.5,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "Tesla T4": None,
    "Tesla V100-SXM2-16GB": None,
    "Tesla V100-PCIE-32GB": None,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI250X / MI250": 181,
}


@pytest.mark.parametrize("name", BF16_TFLOPS)
def test_data_sheet_is_found_by_gpu_name(name):
    sheet = data_sheet(name)
    assert sheet.get("bf16") == BF16_TFLOPS[name] and sheet["fp32"] > 0 and sheet["tb_s"] > 0
    assert BF16_TFLOPS[name] or sheet["fp16"] > 5 * sheet["fp32"]  # a GPU with tensor cores
    assert sheet["source"] and sheet["url"].startswith("https://")


def test_data_sheets_list_memory_and_link_bandwidth():
    variants = ("-SXM4-80GB", " 80GB PCIe", "-PCIE-40GB")
    assert [data_sheet(f"NVIDIA A100{variant}")["tb_s"] for variant in variants] == [2.039, 1.935, 1.555]
    links = {"NVIDIA H100 80GB HBM3": 450, "NVIDIA A100-SXM4-80GB": 300, "Tesla T4": 16}
    assert {name: data_sheet(name)["link_gb_s"] for name in links} == links


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA GB200",
        "",
    ],
)
def test_data_sheet_is_empty_for_similar_gpu_names(name):
    assert not data_sheet(name)


# Files and formats


def test_profile_rejects_pipes_and_devices_without_reading_them(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(TraceError, match=f"{path.name}: not a regular file; expected"):
            profile(path)


@pytest.mark.parametrize("path", [BEFORE, SYNC, SAMPLE], ids=lambda path: path.name)
def test_all_formats_contain_the_same_lines(path):
    lines = profile(path)
    facts = json.loads(rendered(lines, "json"))["lines"]
    assert [(fact["label"], fact["text"]) for fact in facts] == [(line.label, line.text) for line in lines]
    text = rendered(lines)
    markdown = rendered(lines, "markdown").replace("\\", "").replace("\u2060", "")
    assert all(line.text in text and line.text in markdown for line in lines)
    with pytest.raises(TraceError, match=f"got 'html', but expected one of {', '.join(FORMATS)}"):
        rendered(lines, "html")


def test_markdown_escapes_names_from_the_capture(tmp_path):
    name = "[x](javascript:alert(1)) <script> | `a` *b*"
    events = [annotation(name, 0, 90), *launch(name, 1, 5, 50), *launch(GEMM, 2, 60, 5)]
    text = rendered(profile(write_trace(tmp_path / "a.json", events)), "markdown")
    assert "<script>" not in text and "](javascript" not in text and "\\<script\\>" in text


def test_nsys_gpu_trace_report_loads_as_a_capture_without_launches():
    rows = load_capture(GPU_TRACE).operations
    assert (len(rows), rows["duration_ns"].sum()) == (8, 3_446_707)
    assert set(rows["kind"]) == {"kernel", "memcpy"}
    assert rows["bytes"].max() == 4_194_000 and rows["device"].tolist() == [0] * 8
    assert "unknown" in line_text(GPU_TRACE, "bound")
    copies_ms = summary_line(GPU_TRACE, "on GPU").values["exposed_copies_ms"]
    assert copies_ms == pytest.approx(3.43, abs=0.01)


def test_nsys_kernel_sum_report_gets_a_short_summary(tmp_path):
    path = DATA / "nsys" / "sample_cuda_gpu_kern_sum.csv"
    lines = profile(path, csv=tmp_path / "out.csv")
    assert lines[0].values == {"kernels": 39, "launches": 1330, "kernel_ms": pytest.approx(18.266582)}
    assert len(pd.read_csv(tmp_path / "out.csv")) == 39 and "idle time" in lines[-1].text
    with pytest.raises(TraceError, match=r"kern_sum.csv: this is the nsys report .* expected a capture with"):
        load_capture(path)
    with pytest.raises(TraceError, match=r"the nsys report cuda_api_sum; expected cuda_gpu_trace"):
        profile(DATA / "nsys" / "sample_cuda_api_sum.csv")


def test_example_capture_names_its_gpu_but_omits_machine_details():
    assert line_text(EXAMPLE, "capture").startswith("H200; 5 steps (step); 1,380 operations")
    data = gzip.decompress(EXAMPLE.read_bytes())
    assert not re.search(rb"/(home|root|tmp|usr)/|TARGET_INFO_SYSTEM_ENV|PROCESSES", data)


def test_notebook_shows_the_requested_gpu_and_times_per_step(tmp_path):
    """The test requests GPU 0, although GPU 1 is busier and would be shown by default."""
    events = launch(GEMM, 40, 50, 500, gpu=1)
    for number, dur in enumerate((30, 50)):
        at = 1000 * number
        events += [profiler_step(number, at, 1000), *launch(ADD, at + 2, at + 10, dur)]
    path = str(write_trace(tmp_path / "a.json", events))
    quiet = {"display": lambda output: None, "brief": lambda frame: frame}
    names = run_cells("profile", replaced=quiet, file=path, device=0)
    assert names["gpu"].number == 0
    assert names["table"]["ms"].tolist() == names["kernels"]["ms"].tolist() == [0.04]
    assert names["halved_ms"] == pytest.approx(names["median"]["wall"] - 0.02)
    assert names["longest"][["begin", "end"]].tolist() == [40_000, 1_000_000]
    names = run_cells("profile", until="short_names(map", replaced=quiet, file=path)
    assert names["gpu"].number == 1


@pytest.mark.slow
@pytest.mark.parametrize("file", ["", str(BEFORE), str(PREFETCH), str(SYNC), str(GPU_TRACE)])
def test_profile_notebook_runs_from_top_to_bottom(file):
    notebook = nbformat.read(Path(str(PROJECT), "notebooks", "profile.ipynb"), as_version=4)
    notebook.cells[1].source += f"\nfile = {file!r}"
    executed = NotebookClient(notebook, timeout=300).execute()
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert any("to do" in output.get("text", "") for output in outputs)


HEAVY = "torch dask distributed papermill matplotlib seaborn scipy pandera nbformat ipykernel"


@pytest.mark.parametrize("path", [SAMPLE, BEFORE, Path(__file__)], ids=lambda path: path.name)
def test_profile_command_imports_nothing_heavy(path):
    """Importing heavy modules would delay the first line of output by more than a second."""
    program = f"""
import atexit, sys
from stepscope.cli import main
sys.argv[1:] = ["profile", {str(path)!r}]
atexit.register(lambda: print({{name.split(".")[0] for name in sys.modules}} & {{*{HEAVY.split()}}}))
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    if path.suffix == ".py":
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0
