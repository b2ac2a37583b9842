"""Test loading captures of any program: steps, phases, operations, step times and errors."""

import gzip
import json
import sqlite3
import statistics
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random

import pandas as pd
import pytest

from bench.traces import write_export
from capture_events import (
    ADD,
    ALL_REDUCE,
    GEMM,
    H100,
    advice_for,
    annotation,
    event,
    first_gpu,
    launch,
    line_text,
    operator,
    profiler_step,
    unlaunched,
    write_trace,
)
from stepscope.captures import files
from stepscope.captures.capture import load_capture
from stepscope.captures.lines import rendered
from stepscope.captures.range_names import phase_of
from stepscope.captures.step_breakdown import Device, devices
from stepscope.captures.summary import phases_of, profile
from stepscope.traces.attribution import LATEST, OUTSIDE, TraceError

DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "nsys" / "sample.sqlite"
CAPTURES = [
    *sorted((DATA / "captures").glob("*.gz")),
    # captures in a folder next to the checkout, if that folder exists
    *sorted(Path(__file__).parents[1].parent.glob("shared/traces/*.gz")),
]
COPY = "Memcpy HtoD (Pinned -> Device)"
NODE = "autograd::engine::evaluate_function: MmBackward0"


def profile_text(path: Path, **options: object) -> str:
    return rendered(profile(path, **options))  # type: ignore[arg-type]


def training_step(number: int, at: float) -> list[dict]:
    """Return the events of a training step.

    The main thread runs the forward pass and the optimizer, and autograd's thread runs the backward pass.
    Half of the communication overlaps computation.
    """
    matmul = operator("aten::mm", "c10::BFloat16", [64, 32], [32, 16], ts=at + 1)
    return [
        profiler_step(number, at, 80),
        matmul,
        *launch(GEMM, at + 2, at + 10, 20, operator=matmul),
        event("cpu_op", NODE, at + 20, 20, 2),
        *launch(ADD, at + 22, at + 30, 30, tid=2),
        *launch(ALL_REDUCE, at + 24, at + 50, 20, tid=2),
        annotation("Optimizer.step#AdamW.step", at + 50, 20),
        *launch(COPY, at + 52, at + 75, 5, cat="gpu_memcpy", bytes=5000),
    ]


@pytest.fixture(params=["trace.json", "trace.json.gz"])
def training(request, tmp_path):
    """Write a trace that contains a kernel without a recorded launch, followed by two steps."""
    events = [unlaunched(ADD, 0, 5), *training_step(3, 100), *training_step(4, 200)]
    ranks = {"rank": 1, "world_size": 4}
    return write_trace(tmp_path / request.param, events, **H100, distributedInfo=ranks)


def test_load_capture_assigns_steps_phases_and_work_to_trace_operations(training):
    capture = load_capture(training)
    rows = capture.operations
    assert capture.steps == ["ProfilerStep#3", "ProfilerStep#4"]
    assert capture.rank == (1, 4) and capture.autograd
    assert capture.excluded["duration_ns"].tolist() == [5000]
    assert rows["phase"].tolist() == ["forward", "backward", "backward", "optimizer"] * 2
    assert rows["step"].tolist() == [0] * 4 + [1] * 4
    assert rows["kind"].tolist() == ["kernel", "kernel", "kernel", "memcpy"] * 2
    assert rows["kernel_category"].tolist()[2:4] == ["communication", "memory"]
    assert rows["bytes"].tolist()[:4] == [-1, -1, -1, 5000]
    assert rows["flops"].tolist()[:2] == [2 * 64 * 32 * 16, -1] and rows["dtype"].iloc[0] == "bf16"
    assert (rows["launch_start_ns"] < rows["start_ns"]).all()


def test_profile_reports_step_times_and_advice_for_a_trace(training, tmp_path):
    lines = profile(training, csv=tmp_path / "operations.csv")
    table = pd.read_csv(tmp_path / "operations.csv")
    assert len(table) == 8 and {"name", "phase", "step", "start_ns", "bytes", "flops"} <= set(table)
    text = {line.label: line.text for line in lines}
    values = {line.label: line.values for line in lines}
    assert text["capture"].startswith("rank 1 of 4, H100 80GB; 2 steps (ProfilerStep#3 to ProfilerStep#4)")
    assert "left out: 1 launched before (0.00500 ms)" in text["capture"]
    # The GPU is idle when each step begins on the host, so the first step lasts until the second begins: 100 µs.
    step = values["step on GPU"]
    assert step["steps_ms"] == [0.1, 0.08] and step["wall_ms"] == pytest.approx(0.09)
    parts = ("compute", "exposed_copies", "exposed_communication", "idle")
    assert [step[f"{part}_ms"] for part in parts] == pytest.approx([0.05, 0.005, 0.01, 0.025])
    assert values["before"]["before_ms"] == pytest.approx(0.01)
    assert "forward 0.0200 | backward 0.0500 | optimizer 0.00500 ms" in text["phase"]
    assert values["launch-bound"] == pytest.approx({"waiting_ms": 0.02, "longest_gap_us": 20})
    assert values["communication"]["exposed_ms"] == pytest.approx(0.01)
    assert "100% of it launched in the backward phase" in text["communication"]
    assert text["matmul"] == "bf16 0.00328 TFLOP/s (under 0.001% of 990)"
    saved_ms = [line.values["at_most_ms"] for line in lines if "at_most_ms" in line.values]
    assert saved_ms == pytest.approx([0.02, 0.02, 0.01])
    assert text["not available"].startswith("other ranks, clocks")


FLOPS = 2 * 64 * 32 * 16


@pytest.mark.parametrize(
    ("name", "shapes", "work"),
    [
        ("aten::mm", [[64, 32], [32, 16]], (FLOPS, "fp16", -1)),
        ("aten::addmm", [[16], [64, 32], [32, 16]], (FLOPS, "fp16", -1)),
        ("aten::baddbmm", [[8, 1, 16], [8, 64, 32], [8, 32, 16]], (8 * FLOPS, "fp16", -1)),
        ("triton_poi_fused_add_0", [[64, 32], [32]], (-1, "", 2 * (64 * 32 + 32))),
        ("aten::mm", [[64, 32]], (-1, "", -1)),
    ],
)
def test_flops_and_bytes_are_computed_from_operand_shapes(tmp_path, name, shapes, work):
    call = operator(name, "c10::Half", *shapes)
    kernel = launch(name if "triton" in name else GEMM, 1, 5, 10, operator=call)
    rows = load_capture(write_trace(tmp_path / "a.json", [call, *kernel])).operations
    assert tuple(rows[["flops", "dtype", "bytes"]].iloc[0]) == work


@pytest.mark.parametrize(
    ("operators", "between"),
    [
        ([(0.5, 1)], OUTSIDE),
        ([(0.5, 1), (21.5, 2), (26.5, 2)], "forward"),
        ([(0.5, 1), (24.5, 7)], OUTSIDE),
    ],
)
def test_operations_between_backward_nodes_are_forward_only_when_launched_by_node_creators(
    tmp_path, operators, between
):
    """Pipeline parallelism and split backward passes run forward operations between backward nodes."""
    nodes = [event("cpu_op", NODE, ts, 10, 2, **{"Sequence number": 1 + (ts > 10)}) for ts in (10, 30)]
    creators = [event("cpu_op", "aten::mm", ts, 2, **{"Sequence number": number}) for ts, number in operators]
    calls = ((1, 1), (12, 2), (22, 1), (25, 1), (27, 1), (32, 2), (50, 1))
    work = [part for call, tid in calls for part in launch(ADD, call, 100 + call, 1, tid=tid)]
    rows = load_capture(write_trace(tmp_path / "a.json", [*nodes, *creators, *work])).operations
    assert rows["phase"].tolist() == ["forward", "backward", *[between] * 3, "backward", OUTSIDE]


def test_operation_is_assigned_to_the_outermost_range_open_at_its_launch(tmp_path):
    ranges = [
        annotation("outer", 10, 100),
        annotation("first", 20, 10),
        annotation("second", 40, 10),
        annotation("next", 110, 10),
    ]
    work = [part for call in (10, 25, 45, 60, 110, 120) for part in launch(ADD, call, 200 + call, 1)]
    rows = load_capture(write_trace(tmp_path / "a.json", [*ranges, *work])).operations
    assert rows["range"].tolist() == ["outer"] * 4 + ["next", ""]


@pytest.mark.parametrize(
    ("phase", "names"),
    [
        ("forward", ["## forward ##", "FORWARD_PASS", "fwd", "model.forward", "attn(F)"]),
        ("backward", ["backwardPass", "Backward 3", "bwd", "mlp(B)", "mlp(W)"]),
        ("optimizer", ["Optimizer.step#AdamW.step", "optimizer_step"]),
        ("loss", ["compute loss"]),
        (
            None,
            ["Optimizer.zero_grad#AdamW.zero_grad", "FSDP::pre_forward (blocks.3)", "## forward:pos_w ##"],
        ),
        (None, ["f(x)", "flash_attn::_flash_attn_forward", "forward and backward", "step", ""]),
    ],
)
def test_phase_of_recognizes_spelling_variants(phase, names):
    assert {name: phase_of(name) for name in names} == dict.fromkeys(names, phase)


def annotated_steps(forward: str = "Forward") -> list[dict]:
    """Return the events of three steps in ranges with user-defined names."""
    events = []
    for number in range(3):
        at = 100 * number
        name = f"measurement step {number}" if number else "Warm-up Step 0"
        events += [
            annotation(name, at, 90),
            annotation(forward, at + 1, 30),
            annotation("eval", at + 60, 9),
            *launch(GEMM, at + 2, at + 10, 20),
            *launch(ADD, at + 61, at + 70, 10),
        ]
    return events


def test_load_capture_uses_repeating_ranges_as_steps_unless_step_is_given(tmp_path):
    path = write_trace(tmp_path / "a.json", annotated_steps())
    assert load_capture(path).steps == ["measurement step 1", "measurement step 2"]
    assert load_capture(path, step="warm-up step").steps == ["Warm-up Step 0"]
    forward = load_capture(path, step="Forward")
    assert forward.operations["step"].tolist() == [0, -1, 1, -1] and forward.excluded["warm_up"].all()
    expected = "expected one of 'measurement step 1' \\(2\\), 'Forward' \\(3\\)"
    with pytest.raises(TraceError, match=f"no range is named 'train'; {expected}"):
        load_capture(path, step="train")
    with pytest.raises(TraceError, match=f"no range is named nowhere; {expected}"):
        load_capture(path, phases={"nowhere": "forward"})


@pytest.mark.parametrize(("threads", "steps"), [((1, 2), []), ((1,), ["train step"] * 3)])
def test_range_on_several_threads_does_not_count_as_a_step(tmp_path, threads, steps):
    """The ranges on two threads (such as autograd's and a data loader's) together enclose all launches."""
    starts = [(100 * number + 50 * (tid - 1), tid) for number in range(3) for tid in threads]
    ranges = [annotation("train step", start, 40, tid) for start, tid in starts]
    work = [part for call in range(10, 300, 50) for part in launch(ADD, call, 1000 + call, 5)]
    assert load_capture(write_trace(tmp_path / "a.json", [*ranges, *work])).steps == steps


def test_repeating_range_around_little_work_does_not_count_as_a_step(tmp_path):
    names = {"Forward", "Warm-up Step 0", "measurement step 1", "measurement step 2"}
    events = [each for each in annotated_steps() if each["name"] not in names]
    assert not load_capture(write_trace(tmp_path / "a.json", [*events, *launch(GEMM, 300, 310, 5)])).steps


def test_ranges_without_a_phase_are_listed_and_can_be_assigned(tmp_path):
    path = write_trace(tmp_path / "a.json", annotated_steps("Vorwärts"))
    text = line_text(path, "phase", step="measurement step")
    assert text.startswith("none found") and text.endswith("'Vorwärts' 0.0200, 'eval' 0.0100 ms")
    phases = {"Vorwärts": "forward", "eval": "loss"}
    text = line_text(path, "phase", step="measurement step", phases=phases)
    assert text == "forward 0.0200 | loss 0.0100 ms"
    path = write_trace(tmp_path / "b.json", annotated_steps())
    assert set(load_capture(path, phases={"Forward": "loss"}).operations["phase"]) == {"loss", OUTSIDE}


def test_generated_kernel_is_compared_with_the_rate_of_a_faster_kernel(tmp_path):
    fast, slow = (operator(f"triton_poi_{number}", "float", [250_000]) for number in range(2))
    events = [
        fast,
        slow,
        *launch("triton_poi_0", 5, 1010, 10, operator=fast),
        *launch("triton_poi_1", 7, 1020, 100, operator=slow),
    ]
    (advice,) = [each for each in advice_for(first_gpu(tmp_path, events)) if "speed up" in each.what]
    assert "triton_poi_1" in advice.what
    # the kernel takes 0.1 ms, but would take 0.01 ms at the other kernel's rate
    assert advice.ms == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("gpu", "kernel", "dtype", "text"),
    [
        ("NVIDIA H100 80GB HBM3", "hgemm_128x128", "c10::Half", "fp16 27.5 TFLOP/s (2.8% of 990)"),
        ("Tesla V100-SXM2-16GB", "hgemm_128x128", "c10::Half", "fp16 27.5 TFLOP/s (22% of 125)"),
        ("NVIDIA H100 80GB HBM3", "volta_sgemm_128x64", "float", "fp32 27.5 TFLOP/s (41% of 67)"),
        ("NVIDIA H100 80GB HBM3", "cutlass_s1688gemm", "float", "tf32 27.5 TFLOP/s (5.6% of 494)"),
    ],
)
def test_matmul_rate_is_compared_with_the_peak_rate_of_its_dtype(tmp_path, gpu, kernel, dtype, text):
    """A V100 doesn't support bf16, and an H100's data sheet lists the same peak rate for fp16 and bf16."""
    matmul = operator("aten::mm", dtype, [4096, 4096], [4096, 4096])
    events = [matmul, *launch(kernel, 1, 10, 5000, operator=matmul)]
    path = write_trace(tmp_path / "a.json", events, deviceProperties=[{"id": 0, "name": gpu}])
    assert line_text(path, "matmul") == text


def test_advice_ignores_hidden_communication_and_optimizer_fusion(tmp_path):
    events = [
        annotation("optimizer", 0, 50),
        *launch(ADD, 10, 100, 100),
        *launch(ADD, 60, 200, 50),
        *launch(ALL_REDUCE, 70, 235, 20),
    ]
    saved_ms = [advice.ms for advice in advice_for(first_gpu(tmp_path, events))]
    assert "75% hidden" in line_text(tmp_path / "a.json", "communication")
    # The second kernel takes 0.05 ms, and its last 0.015 ms overlap communication, so removing the kernel saves
    # 0.035 ms.
    assert saved_ms == pytest.approx([0.035, 0.005])


def test_phases_of_parses_phase_options():
    assert phases_of(["forward=Vorwärts", "loss=eval=1"]) == {"Vorwärts": "forward", "eval=1": "loss"}
    assert phases_of([]) is None
    for option in ("forward", "forward=", "=eval"):
        with pytest.raises(TraceError, match=f"--phase: got '{option}', but expected forward=NAME"):
            phases_of([option])


def test_operation_without_a_launch_is_kept(tmp_path):
    kernel = event("kernel", GEMM, 30, 10, 7, correlation=1 << 20, device="0x2", stream="0x0")
    path = write_trace(tmp_path / "a.json", [*launch(ADD, 0, 10, 10), kernel])
    rows = load_capture(path).operations
    assert rows["launch_start_ns"].isna().tolist() == [False, True] and rows["device"].tolist() == [0, 2]
    assert line_text(path, "capture", device=2).startswith("2 GPUs, details of GPU 2; no steps found")
    with pytest.raises(TraceError, match="no operations on GPU 1; expected one of 0, 2"):
        profile(path, device=1)


@pytest.mark.parametrize("suffix", [".sqlite", ".sqlite.gz"])
def test_load_capture_finds_phases_and_steps_in_an_nsys_export(tmp_path, suffix):
    data = SAMPLE.read_bytes()
    path = tmp_path / f"sample{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    capture = load_capture(path)
    assert len(capture.operations) == 1380 and capture.excluded.empty and len(capture.steps) == 5
    assert capture.operations["phase"].value_counts()[lambda counts: counts > 0].to_dict() == {
        "backward": 855,
        "forward": 515,
        "optimizer": 10,
    }
    assert capture.operations["duration_ns"].sum() == 18_266_582 + 153_023 + 3_680
    assert "5 steps (step); 1,380 operations" in line_text(path, "capture")
    assert "matmul rates (torch.profiler records shapes" in line_text(path, "not available")


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_real_captures_lose_no_time_and_at_most_one_percent_is_uncategorized(path):
    capture = load_capture(path)
    total_ns = capture.operations["duration_ns"].sum() + capture.excluded["duration_ns"].sum()
    if ".json" in path.name:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        categories = ("kernel", "gpu_memcpy", "gpu_memset")
        work = [each for each in events if each.get("cat") in categories and each.get("ph") == "X"]
        assert len(capture.operations) + len(capture.excluded) == len(work)
        assert total_ns == pytest.approx(sum(each["dur"] for each in work) * 1e3, rel=1e-9)
    is_other = capture.operations["kernel_category"] == "other"
    assert capture.operations.loc[is_other, "duration_ns"].sum() <= 0.01 * total_ns
    assert line_text(path, "not available")


# Errors

KERNEL_EVENTS = launch(ADD, 0, 10, 10)
TRACE = json.dumps({"traceEvents": KERNEL_EVENTS}).encode()
INVALID = {
    "empty.json": (b"", "empty"),
    "text.txt": (b"Time (%),Total\n" * 9, "not a capture, because it begins with b'Time"),
    "cut.json": (TRACE[:-40], "the file is truncated: it ends within line 1"),
    "cut.json.gz": (gzip.compress(TRACE)[:-20], "cannot be read .*end-of-stream"),
    "no_events.json": (b'{"schemaVersion": 1}', "has no list traceEvents"),
    "list.json": (b'{"traceEvents": {"a": 1}}', "has no list traceEvents"),
    "deep.json": (b'{"traceEvents": [' + b"[" * 100_000, "is not valid JSON .maximum recursion depth"),
    "cut.sqlite": (SAMPLE.read_bytes()[:40_000], "database disk image is malformed"),
    "cut.sqlite.gz": (gzip.compress(SAMPLE.read_bytes())[:20_000], "cannot be read .*end-of-stream"),
    "inner.sqlite.gz": (gzip.compress(SAMPLE.read_bytes()[:40_000]), "database disk image is malformed"),
    "cpu.json": (
        json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0, 5)] * 3}).encode(),
        "has no GPU work, only 3 CPU operators; expected CUDA, ROCm or XPU kernels.*ProfilerActivity.CUDA",
    ),
    "none.json": (b'{"traceEvents": []}', "has no GPU work; expected"),
    "report.nsys-rep": (b"\x00nsys", "nsys is not installed"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_capture_raises_a_one_line_error(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "find_nsys", lambda: None)
    data, pattern = INVALID[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TraceError, match=pattern) as error:
        profile(path)
    message = str(error.value)
    assert message.startswith(str(path)) and "expected" in message
    assert "\n" not in message and len(message) < 600


@pytest.mark.parametrize("name", ["absent.json", ""])
def test_missing_file_or_folder_raises_trace_error(tmp_path, name):
    with pytest.raises(TraceError, match="cannot be read"):
        load_capture(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        {"ts": "soon"},
        {"ts": None},
        {"ts": float("nan")},
        {"ts": 1e300},
        {"dur": -1},
        {"dur": [1]},
        {"args": {"correlation": "x"}},
        {"args": {"correlation": 1.5}},
        {"args": {"correlation": 2**40}},
        {"args": {"device": -3}},
        {"args": {"stream": {"a": 1}}},
    ],
)
def test_error_names_the_event_with_invalid_times_or_ids(tmp_path, change):
    broken = event("kernel", "my\nkernel", 0, 5, correlation=1) | change
    path = write_trace(tmp_path / "a.json", [*KERNEL_EVENTS, broken])
    with pytest.raises(TraceError, match=r"a.json: the event 'my\\nkernel' has ts ") as error:
        load_capture(path)
    assert "\n" not in str(error.value)


def test_malformed_events_are_skipped_and_hostile_names_are_escaped(tmp_path):
    name = "\x1b[31mevil\nname\u202e" + "x" * 5000
    events = [
        *[1, "a", None, [], {}, {"ph": "X"}, {"ph": "M", "cat": "kernel"}],
        event("kernel", name, 20, 10, correlation=None),
        *KERNEL_EVENTS,
        annotation(name, 0, 100),
        event("kernel", ADD, 40, 5) | {"args": "x"},
    ]
    path = write_trace(tmp_path / "a.json", events, deviceProperties="x", distributedInfo=[1])
    text = profile_text(path)
    assert "\x1b" not in text and "\u202e" not in text and max(map(len, text.splitlines())) < 400
    assert len(load_capture(path).operations) == 3
    path.write_text("\ufeff" + json.dumps(events))  # Chrome's array format, with a byte-order mark
    assert len(load_capture(path).operations) == 3


def execute(path: Path, statement: str, *rows: tuple) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(statement, rows or [()])


def test_error_quotes_nsys_diagnostics_when_the_capture_is_empty(tmp_path):
    path = tmp_path / "a.sqlite"
    write_export(path)
    execute(path, "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)")
    diagnostics = [
        (1, "fine"),
        (4, "CUDA device 0: Unified Memory cannot be traced\non this device"),
        (4, None),
    ]
    execute(path, "INSERT INTO DIAGNOSTIC_EVENT VALUES (1, ?, ?)", *diagnostics)
    quote = "nsys reports: CUDA device 0: Unified Memory cannot be traced on"
    with pytest.raises(TraceError, match=f"has no kernels; .*; {quote}"):
        load_capture(path)


def test_nsys_report_is_exported_when_nsys_is_installed(tmp_path, monkeypatch):
    nsys, report = tmp_path / "nsys", tmp_path / "a.nsys-rep"
    report.write_bytes(b"\x00nsys")
    nsys.write_text(f'#!/bin/sh\ncp {SAMPLE} "$5"\n')
    nsys.chmod(0o755)
    monkeypatch.setattr(files, "find_nsys", lambda: nsys)
    assert len(load_capture(report).operations) == 1380
    nsys.write_text("#!/bin/sh\necho importer failed\n")
    with pytest.raises(TraceError, match=r"a.nsys-rep: nsys export .* its output: importer failed"):
        load_capture(report)


def test_capture_with_all_launches_before_the_first_step_is_rejected(tmp_path):
    path = write_trace(tmp_path / "a.json", [*launch(ADD, 0, 10, 10), profiler_step(1, 50, 10)])
    with pytest.raises(TraceError, match="all 1 operations were launched before the first step"):
        profile(path)


def test_bound_is_unknown_when_there_are_too_few_operations(tmp_path):
    path = write_trace(tmp_path / "a.json", launch(ADD, 0, 5, 10))
    assert "unknown: the capture contains only 1 operation" in line_text(path, "bound")


@pytest.mark.parametrize(("known_us", "has_rate"), [(40, False), (60, True)])
def test_matmul_rate_requires_shapes_for_half_of_the_matmul_time(tmp_path, known_us, has_rate):
    matmul = operator("aten::mm", "float", [64, 64], [64, 64])
    known = launch(GEMM, 1, 10, known_us, operator=matmul)
    path = write_trace(tmp_path / "a.json", [matmul, *known, *launch(GEMM, 3, 100, 100 - known_us)])
    assert bool(line_text(path, "matmul")) == has_rate


@pytest.mark.parametrize(
    ("is_annotated", "phases"), [(True, ["backward", OUTSIDE]), (False, ["forward", "backward"])]
)
def test_annotated_backward_takes_precedence_over_autograd(tmp_path, is_annotated, phases):
    events = [
        *[annotation("backward", 0, 50)] * is_annotated,
        *launch(ADD, 5, 10, 5),
        event("cpu_op", NODE, 100, 50, 2),
        *launch(ADD, 110, 120, 5, tid=2),
    ]
    capture = load_capture(write_trace(tmp_path / "a.json", events))
    assert capture.operations["phase"].tolist() == phases and capture.autograd == (not is_annotated)


# Step times recomputed microsecond by microsecond

NAMES = [
    GEMM,
    ADD,
    ALL_REDUCE,
    COPY,
    "Memcpy DtoD (Device -> Device)",
    "triton_poi_fused_7",
]
GPU_STREAMS = [(0, 7), (0, 7), (0, 9), (1, 9), (1, 9), (1, 7)]


def training_on_two_gpus(seed: int) -> list[dict]:
    """Return the events of four or five steps of different lengths on two GPUs, and of work outside the steps.

    Each GPU uses two streams. All times are integer µs, and each GPU's operations start at distinct times.
    """
    random, events, call = Random(seed), [], 0
    busy_until, starts = Counter(), set()

    def add_work(count):
        nonlocal call
        for _ in range(count):
            call += random.choice([5, 5, 6, 40])
            name, (gpu, stream) = random.choice(NAMES), random.choice(GPU_STREAMS)
            dur = random.choice([1, 7, 9, 12, 25, 60 if "nccl" in name else 20])
            if stream == 9 and random.random() < 0.05:
                dur = 150
            start = max(call + random.choice([3, 4, 5, 30]), busy_until[gpu, stream])
            while (gpu, start) in starts:
                start += 1
            starts.add((gpu, start))
            busy_until[gpu, stream] = start + dur
            cat = "gpu_memcpy" if "Memcpy" in name else "kernel"
            events.extend(launch(name, call, start, dur, cat=cat, gpu=gpu, stream=stream))

    add_work(6)
    for step in range(random.choice([4, 5])):
        begin = call = call + 10
        add_work(random.randint(8, 30))
        call += 10
        events.append(profiler_step(step + 3, begin, call - begin))
        add_work(random.choice([0, 2]))
    return events


def gpus_with_rows(path: Path, events: list[dict]) -> list[tuple[Device, list[dict]]]:
    """Return each GPU with all of its operations, including those before the steps, sorted by start time."""
    capture = load_capture(write_trace(path, events, **H100))
    early, later = capture.excluded.assign(is_early=True), capture.operations.assign(is_early=False)
    operations = pd.concat([early, later]).sort_values("start_ns")
    gpus = list(devices(capture))
    assert len(gpus) == 2 and len(early) >= 6
    end_ns = operations["start_ns"] + operations["duration_ns"]
    returned_ns = operations["launch_start_ns"] + operations["launch_duration_ns"]
    operations = operations.assign(
        begin=operations["start_ns"] // 1000, end=end_ns // 1000, returned=returned_ns // 1000
    )
    return [(gpu, operations[operations["device"] == gpu.number].to_dict("records")) for gpu in gpus]


def busy_ticks(rows: list[dict], begin: int, end: int) -> set[int]:
    """Return each microsecond of the window in which at least one of these operations is running."""
    spans = [range(max(row["begin"], begin), min(row["end"], end)) for row in rows]
    return {tick for span in spans for tick in span}


def expected_windows(gpu: Device, rows: list[dict]) -> list[tuple[int, int]]:
    """Return the start and end of each step on the GPU, in µs."""
    host = gpu.capture.ranges.set_index("step")[["start_ns", "end_ns"]] // 1000
    on_stream = [row for row in rows if row["step"] >= 0 and row["stream"] == gpu.stream]
    first = {row["step"]: row["begin"] for row in reversed(on_stream)}
    order = sorted(first, key=first.__getitem__)
    begins: list[int] = []
    for index, step in enumerate(order):
        earlier = [
            row["end"]
            for row in rows
            if row["step"] in order[:index] or (row["step"] < 0 and row["end"] <= first[step])
        ]
        ready = max([host.at[step, "start_ns"], *earlier])
        begins.append(max([min(first[step], ready), *begins]))
    windows = []
    for index, (begin, step) in enumerate(zip(begins, order)):
        ends = [
            row["end"]
            for row in rows
            if row["step"] == step and (row["kind"] != "memcpy" or row["stream"] == gpu.stream)
        ]
        end = max([host.at[step, "end_ns"], *ends])
        if index + 1 < len(order):
            following = begins[index + 1]
            end = following if order[index + 1] == step + 1 else min(following, end)
        windows.append((begin, max(begin, end)))
    return windows


def part_of(row: dict) -> str:
    return {ALL_REDUCE: "communication", COPY: "copies"}.get(row["name"], "compute")


@pytest.mark.parametrize("seed", range(6))
def test_step_breakdown_matches_counting_microseconds(tmp_path, seed):
    for gpu, rows in gpus_with_rows(tmp_path / "a.json", training_on_two_gpus(seed)):
        kernel_ns: Counter = Counter()
        for row in rows:
            if row["kind"] == "kernel" and row["name"] != ALL_REDUCE and not row["is_early"]:
                kernel_ns[row["stream"]] += row["duration_ns"]
        assert gpu.stream == max(kernel_ns, key=kernel_ns.__getitem__)
        windows = expected_windows(gpu, rows)
        assert (gpu.windows // 1000).tolist() == [[*window] for window in windows]
        breakdowns = []
        for begin, end in windows:
            compute = busy_ticks([row for row in rows if part_of(row) == "compute"], begin, end)
            local = busy_ticks([row for row in rows if part_of(row) != "communication"], begin, end)
            busy = busy_ticks(rows, begin, end)
            exposed = [len(local - compute), len(busy - local)]
            breakdowns.append([end - begin, len(compute), *exposed, end - begin - len(busy)])
        assert (gpu.breakdowns * 1e3).round().to_numpy().tolist() == breakdowns
        walls = [breakdown[0] for breakdown in breakdowns]
        wall = statistics.median(walls)
        middle = sorted(walls)[(len(walls) - 1) // 2 : len(walls) // 2 + 1]
        assert sorted(walls[index] for index in gpu.median_indices) == middle
        assert gpu.median["wall"] * 1e3 == pytest.approx(wall)
        outliers = [index for index, each in enumerate(walls) if not 0.8 * wall <= each <= 1.25 * wall]
        assert gpu.outliers == outliers


def gaps_by_counting(gpu: Device, rows: list[dict], begin: int, end: int) -> list[tuple]:
    """Return a tuple for each idle gap in a window, with times in µs.

    The tuple contains the gap's start and end, whether the gap is at the start of the window, and the times at
    which the next operation starts and at which its launch call returns.
    """
    idle = set(range(begin, end)) - busy_ticks(rows, begin, end)
    gaps = []
    for start in sorted(tick for tick in idle if tick - 1 not in idle):
        stop = next(tick for tick in range(start, end + 1) if tick not in idle)
        following = [row for row in rows if row["begin"] >= stop]
        start_of_next, returned = -1, LATEST // 1000
        if following:
            start_of_next, returned = following[0]["begin"], following[0]["returned"]
        gaps.append((start, stop, start == begin, start_of_next, returned))
    return gaps


@pytest.mark.parametrize("seed", range(6))
def test_gaps_and_kernel_times_match_counting_microseconds(tmp_path, seed):
    for gpu, rows in gpus_with_rows(tmp_path / "a.json", training_on_two_gpus(seed)):
        windows = [tuple(window) for window in (gpu.windows[gpu.median_indices] // 1000).tolist()]
        starts = [*gpu.classified_ops["start_ns"] // 1000, -1]
        columns = (gpu.gaps["begin"] // 1000, gpu.gaps["end"] // 1000, gpu.gaps["head"])
        next_starts = [starts[row] for row in gpu.gaps["next"]]
        gaps = [gap for window in windows for gap in gaps_by_counting(gpu, rows, *window)]
        assert [*zip(*columns, next_starts, gpu.gaps["returned"] // 1000)] == gaps
        in_step = [
            row
            for row in rows
            if not row["is_early"] and any(begin <= row["begin"] < end for begin, end in windows)
        ]
        lead = statistics.median(row["begin"] - row["returned"] for row in in_step)
        assert gpu.host_lead_ms * 1e3 == pytest.approx(lead)
        steps, count, ms = len(windows), Counter(row["name"] for row in in_step), Counter()
        for row in in_step:
            ms[row["name"]] += row["duration_ns"] / 1e6
        assert gpu.kernels["ms"].is_monotonic_decreasing
        assert gpu.total_ms_by(gpu.operations, "kernel_category").is_monotonic_decreasing
        for name in count:
            by_name = gpu.kernels.loc[name, ["count", "ms", "share"]].tolist()
            assert by_name == pytest.approx([count[name] / steps, ms[name] / steps, ms[name] / ms.total()])
            others = [row for row in rows if row["name"] != name]
            alone = [len(busy_ticks(rows, *each) - busy_ticks(others, *each)) for each in windows]
            saved_ms = gpu.time_saved_without(gpu.running_ops["name"] == name)
            assert saved_ms * 1e3 == pytest.approx(sum(alone) / steps)
