"""Anybody's capture: what is read of it, what is said of it, and what is refused in one sentence."""

import gzip
import json
import math
import sqlite3
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pandas as pd
import pytest

from bench.traces import MAIN, make_capture, make_trace, write_export
from stepscope.captures import capture as module
from stepscope.captures import files
from stepscope.captures.advice import rank_advice
from stepscope.captures.capture import load_capture
from stepscope.captures.idle_time import explain_gaps, sum_by_cause
from stepscope.captures.lines import rendered
from stepscope.captures.range_names import phase_of
from stepscope.captures.step_breakdown import Device, devices
from stepscope.captures.summary import phases_of, profile
from stepscope.traces.attribution import LATEST, OUTSIDE, TraceError

SAMPLE = Path(__file__).parent / "data" / "nsys" / "sample.sqlite"
OTHERS = sorted(
    Path(__file__).parents[1].parent.glob("shared/traces/*.gz")
)  # where they lie beside the checkout
GEMM, ADD = (
    "sm80_xmma_gemm_f32f32_f32f32_f32",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
)


def event(cat: str, name: str, ts: float, dur: float, tid: object = 1, **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(
    name: str,
    call: float,
    start: float,
    dur: float,
    correlation: int,
    tid: object = 1,
    cat: str = "kernel",
    external: int | None = None,
    **args: object,
) -> list[dict]:
    """A call on the host and what it launched."""
    host = {} if external is None else {"External id": external}
    return [
        event(
            "cuda_runtime", "cudaLaunchKernel", call, 2, tid, correlation=correlation, stream="0x0", **host
        ),
        event(cat, name, start, dur, 7, correlation=correlation, device=0, stream=7, **args),
    ]


def profile_text(path: Path, **how: object) -> str:
    return rendered(profile(path, **how))  # type: ignore[arg-type]


def written(path: Path, events: list[dict], **header: object) -> Path:
    text = json.dumps({"schemaVersion": 1, **header, "traceEvents": events, "traceName": "x"})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


# Two steps: forward on the main thread, backward on autograd's, the optimizer; communication half hidden.
# Before them a kernel whose launch the capture has not seen.
TRAINING = [event("kernel", ADD, 0, 5, 7, correlation=900, device=0, stream=7)]
for number in range(2):
    at = 100 + 100 * number
    TRAINING += [
        event("user_annotation", f"ProfilerStep#{number + 3}", at, 80),
        event(
            "cpu_op",
            "aten::mm",
            at + 1,
            8,
            **{
                "External id": 10 * number + 1,
                "Input Dims": [[64, 32], [32, 16]],
                "Input type": ["c10::BFloat16", "c10::BFloat16"],
            },
        ),
        *launched(GEMM, at + 2, at + 10, 20, 10 * number + 1, external=10 * number + 1),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 20, 20, 2),
        *launched(ADD, at + 22, at + 30, 30, 10 * number + 2, tid=2),
        *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", at + 24, at + 50, 20, 10 * number + 3, tid=2),
        event("user_annotation", "Optimizer.step#AdamW.step", at + 50, 20),
        *launched(
            "Memcpy HtoD (Pinned -> Device)",
            at + 52,
            at + 75,
            5,
            10 * number + 4,
            cat="gpu_memcpy",
            bytes=5000,
        ),
    ]
HEADER = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    "distributedInfo": {"rank": 1, "world_size": 4},
}


@pytest.fixture(params=["trace.json", "trace.json.gz"])
def training(request, tmp_path):
    return written(tmp_path / request.param, TRAINING, **HEADER)


def test_a_trace_is_read_with_steps_phases_bytes_and_what_was_launched_before(training):
    found = load_capture(training)
    rows = found.operations
    assert found.steps == ["ProfilerStep#3", "ProfilerStep#4"] and found.rank == (1, 4) and found.autograd
    assert (found.left_out, found.excluded["duration_ns"].sum()) == (1, 5000)
    assert rows["phase"].tolist() == ["forward", "backward", "backward", "optimizer"] * 2
    assert rows["step"].tolist() == [0] * 4 + [1] * 4
    assert rows["kind"].tolist() == ["kernel", "kernel", "kernel", "memcpy"] * 2
    assert rows["kernel_category"].tolist()[2:4] == ["communication", "memory"]
    assert rows["bytes"].tolist()[:4] == [-1, -1, -1, 5000]
    assert rows["flops"].tolist()[:2] == [2 * 64 * 32 * 16, -1] and rows["dtype"].iloc[0] == "bf16"
    assert (rows["launch_start_ns"] < rows["start_ns"]).all()


def test_the_lines_of_a_trace_and_its_operations_as_csv(training, tmp_path):
    lines = profile(training, csv=tmp_path / "operations.csv")
    table = pd.read_csv(tmp_path / "operations.csv")
    assert len(table) == 8 and {"name", "phase", "step", "start_ns", "bytes", "flops"} <= set(table)
    labels = [one.label for one in lines if one.label]
    assert labels == [
        "capture",
        "step on GPU",
        "before",
        "phase",
        "category",
        "kernels",
        "leading",
        "launch-bound",
        "idle time",
        "communication",
        "matmul",
        "to do",
        "not available",
    ]
    told = {one.label: (one.text, one.values) for one in lines if one.label}
    assert told["capture"][0].startswith("rank 1 of 4, H100 80GB; 2 steps (ProfilerStep#3 to ProfilerStep#4)")
    assert "left out: 1 launched before (0.00500 ms)" in told["capture"][0]
    # the GPU is empty when a step begins on the host: the first lasts until the second begins there, 100 µs;
    # the second 80
    step = told["step on GPU"][1]
    assert step["steps_ms"] == [0.1, 0.08] and step["wall_ms"] == pytest.approx(0.09)
    parts = ("compute", "exposed_copies", "exposed_communication", "idle")
    assert [step[f"{part}_ms"] for part in parts] == pytest.approx([0.05, 0.005, 0.01, 0.025])
    assert told["before"][1]["before_ms"] == pytest.approx(0.01)
    assert "forward 0.0200 | backward 0.0500 | optimizer 0.00500 ms" in told["phase"][0]
    assert told["launch-bound"][1] == pytest.approx({"waiting_ms": 0.02, "longest_gap_us": 20})
    assert told["communication"][1]["exposed_ms"] == pytest.approx(0.01)
    assert "100% of it launched by the backward" in told["communication"][0]
    assert told["matmul"][0] == "bf16 0.00328 TFLOP/s (under 0.001% of 990)"
    saved = [one.values["at_most_ms"] for one in lines if "at_most_ms" in one.values]
    assert saved == pytest.approx([0.02, 0.02, 0.01])
    assert told["not available"][0].startswith("other ranks, clocks")


@pytest.mark.parametrize(
    ("name", "shapes", "work"),
    [
        ("aten::mm", [[64, 32], [32, 16]], (2 * 64 * 32 * 16, "fp16", -1)),
        ("aten::bmm", [[8, 64, 32], [8, 32, 16]], (2 * 8 * 64 * 32 * 16, "fp16", -1)),
        ("aten::addmm", [[16], [64, 32], [32, 16], []], (2 * 64 * 32 * 16, "fp16", -1)),
        ("aten::baddbmm", [[8, 1, 16], [8, 64, 32], [8, 32, 16], []], (2 * 8 * 64 * 32 * 16, "fp16", -1)),
        ("triton_poi_fused_add_0", [[64, 32], [32], []], (-1, "", 2 * (64 * 32 + 32))),
        ("aten::mm", [[64, 32]], (-1, "", -1)),
    ],
)
def test_work_is_told_by_the_shapes_of_factors_and_arguments(name, shapes, work):
    types = ["c10::Half" if shape else "Scalar" for shape in shapes]
    assert module._operator_work(name, shapes, types) == work


AUTOGRAD = [
    event(
        "cpu_op", "autograd::engine::evaluate_function: MmBackward0", ts, 10, 2, **{"Sequence number": number}
    )
    for ts, number in ((10, 1), (30, 2))
]  # the second one runs what an operator made after the first one ran


def between(*forward: tuple[float, int]) -> list[dict]:
    """Launches before, within, between and after two of autograd's operations, and operators that make nodes."""
    calls = ((1, 1), (12, 2), (22, 1), (25, 1), (27, 1), (32, 2), (50, 1))
    return [
        *AUTOGRAD,
        *(event("cpu_op", "aten::mm", ts, 2, **{"Sequence number": number}) for ts, number in forward),
        *(
            one
            for number, (call, tid) in enumerate(calls)
            for one in launched(ADD, call, 100 + number, 1, number, tid=tid)
        ),
    ]


def test_between_two_backward_operations_forward_is_what_makes_nodes(tmp_path):
    """Pipelines and split backward launch more than forward there; accumulation of gradients nothing else."""

    def phases(*forward):
        return load_capture(written(tmp_path / "a.json", between(*forward))).operations["phase"].tolist()

    assert phases((0.5, 1)) == ["forward", "backward", OUTSIDE, OUTSIDE, OUTSIDE, "backward", OUTSIDE]
    assert phases((0.5, 1), (21.5, 2), (26.5, 2)) == [
        "forward",
        "backward",
        "forward",
        "forward",
        "forward",
        "backward",
        OUTSIDE,
    ]
    assert phases((0.5, 1), (24.5, 7)) == [
        "forward",
        "backward",
        OUTSIDE,
        OUTSIDE,
        OUTSIDE,
        "backward",
        OUTSIDE,
    ]


def test_an_operations_range_is_the_outermost_that_was_open_at_its_launch(tmp_path):
    path = written(
        tmp_path / "a.json",
        [
            event("user_annotation", "outer", 10, 100),
            event("user_annotation", "first", 20, 10),
            event("user_annotation", "second", 40, 10),
            event("user_annotation", "next", 110, 10),
            *(
                one
                for number, call in enumerate((10, 25, 45, 60, 110, 120))
                for one in launched(ADD, call, 200 + number, 1, number)
            ),
        ],
    )
    assert load_capture(path).operations["range"].tolist() == ["outer"] * 4 + ["next", ""]


def test_what_the_driver_launched_has_its_launch(tmp_path):
    """Triton's kernels are launched by the driver's calls, which another category has."""
    found = load_capture(
        written(
            tmp_path / "trace.json",
            [
                event("user_annotation", "forward", 0, 20),
                event("cuda_driver", "cuLaunchKernelEx", 5, 2, correlation=1),
                event("kernel", "triton_poi_fused_add_0", 10, 5, 7, correlation=1, device=0, stream=7),
                *launched(ADD, 12, 30, 5, 2),
            ],
        )
    )
    assert found.operations["phase"].tolist() == ["forward", "forward"] and not found.left_out
    assert found.operations["launch_start_ns"].tolist() == [5000, 12000]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("Forward", "forward"),
        ("## forward ##", "forward"),
        ("FORWARD_PASS", "forward"),
        ("fwd", "forward"),
        ("model.forward", "forward"),
        ("backwardPass", "backward"),
        ("Backward 3", "backward"),
        ("bwd", "backward"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("optimizer_step", "optimizer"),
        ("compute loss", "loss"),
        ("Optimizer.zero_grad#AdamW.zero_grad", None),
        ("FSDP::pre_forward (blocks.3)", None),
        ("## forward:pos_w ##", None),
        ("attn(F)", "forward"),
        ("mlp(B)", "backward"),
        ("mlp(W)", "backward"),
        ("f(x)", None),
        ("flash_attn::_flash_attn_forward", None),
        ("forward and backward", None),
        ("step", None),
        ("", None),
    ],
)
def test_phases_are_told_by_names_in_any_spelling(name, phase):
    assert phase_of(name) == phase


def user_ranges(phases: bool = True) -> list[dict]:
    """Three of a user's steps, with ranges of names of their own."""
    found = []
    for number in range(3):
        at = 100 * number
        found += [
            event(
                "user_annotation",
                f"Warm-up Step {number}" if number < 1 else f"measurement step {number}",
                at,
                90,
            ),
            event("user_annotation", "Vorwärts" if not phases else "Forward", at + 1, 30),
            event("user_annotation", "eval", at + 60, 9),
            *launched(GEMM, at + 2, at + 10, 20, 10 * number + 1),
            *launched(ADD, at + 61, at + 70, 10, 10 * number + 2),
        ]
    return found


def test_steps_are_ranges_that_repeat_or_those_named(tmp_path):
    path = written(tmp_path / "a.json", user_ranges())
    assert load_capture(path).steps == ["measurement step 1", "measurement step 2"]
    assert load_capture(path, step="warm-up step").steps == ["Warm-up Step 0"]
    measured = load_capture(path, step="Forward")
    assert measured.operations["step"].tolist() == [0, -1, 1, -1] and measured.excluded["warm_up"].all()
    with pytest.raises(
        TraceError,
        match=r"no range is named 'train', expected one of 'measurement step 1' \(2\), 'Forward' \(3\)",
    ):
        load_capture(path, step="train")
    with pytest.raises(TraceError, match=r"no range is named nowhere, expected one of"):
        load_capture(path, phases={"nowhere": "forward"})


def test_a_range_of_several_threads_is_no_step(tmp_path):
    """A loader's, or autograd's: threads that work beside one another, each in ranges of this name, hold all launches."""

    def steps(threads):
        events = [
            event("user_annotation", "train step", 100 * number + 50 * (tid - 1), 40, tid)
            for number in range(3)
            for tid in threads
        ]
        calls = [
            one
            for number in range(6)
            for one in launched(ADD, 50 * number + 10, 1000 + 50 * number, 5, number + 1)
        ]
        return load_capture(written(tmp_path / "a.json", [*events, *calls])).steps

    assert steps((1, 2)) == []
    assert steps((1,)) == ["train step"] * 3


def test_a_range_that_repeats_around_little_is_no_step(tmp_path):
    events = [one for one in user_ranges() if "step" not in one["name"].lower() and one["name"] != "Forward"]
    assert not load_capture(written(tmp_path / "a.json", [*events, *launched(GEMM, 300, 310, 5, 40)])).steps


def test_what_fits_no_phase_is_listed_with_its_time(tmp_path):
    path = written(tmp_path / "a.json", user_ranges(phases=False))
    text = profile_text(path, step="measurement step")
    assert (
        "phase          none found; in other ranges (--phase forward=NAME assigns one): 'Vorwärts' 0.0200, 'eval' 0.0100 ms"
        in text
    )
    text = profile_text(path, step="measurement step", phases={"Vorwärts": "forward", "eval": "loss"})
    assert "phase          forward 0.0200 | loss 0.0100 ms\n" in text
    path = written(tmp_path / "b.json", user_ranges())
    assert set(load_capture(path, phases={"Forward": "loss"}).operations["phase"]) == {"loss", OUTSIDE}


def device(tmp_path: Path, events: list[dict]) -> Device:
    return next(devices(load_capture(written(tmp_path / "a.json", events, **HEADER))))


def line(path: Path, label: str, **how: object) -> str:
    """The text of the lines with this label; "" where there is none."""
    return next((one.text for one in profile(path, **how) if one.label == label), "")  # type: ignore[arg-type]


def to_do(path: Path) -> list[str]:
    """What is advised, and how much it is."""
    return [one.text.partition(". ")[2] for one in profile(path) if "at_most_ms" in one.values]


def test_an_operators_work_counts_once_and_advice_is_what_could_be_saved(tmp_path):
    def shaped(external, name, *shapes):
        return event(
            "cpu_op",
            name,
            0,
            1,
            **{"External id": external, "Input Dims": [*shapes], "Input type": ["float"] * len(shapes)},
        )

    one = device(
        tmp_path,
        [
            shaped(1, "aten::mm", [4096, 2949], [2949, 4096]),
            *launched(GEMM, 1, 10, 600, 1, external=1),
            *launched("splitKreduce_kernel", 3, 610, 400, 2, external=1),
            *(shaped(2 + number, f"triton_poi_{number}", [250_000]) for number in range(2)),
            *launched("triton_poi_0", 5, 1010, 10, 3, external=2),
            *launched("triton_poi_1", 7, 1020, 100, 4, external=3),
        ],
    )
    assert one.matmuls["tflops"].to_dict() == {
        "fp32": pytest.approx(98.95, rel=1e-3)
    }  # a tenth of bf16's on the data sheet
    # by their FLOPs the matmuls take 0.1 ms at bf16's rate; the second generated kernel 0.01 ms at the first one's
    assert [round(each.ms, 4) for each in rank_advice(one, sum_by_cause(explain_gaps(one), 1))][:2] == [
        0.9,
        0.09,
    ]


@pytest.mark.parametrize(
    ("gpu", "share"), [("NVIDIA H100 80GB HBM3", "2.8% of 990"), ("Tesla V100-SXM2-16GB", "22% of 125")]
)
def test_fp16_is_held_against_its_own_rate_or_where_none_is_told_against_bf16s(tmp_path, gpu, share):
    product = event(
        "cpu_op",
        "aten::mm",
        0,
        1,
        **{"External id": 1, "Input Dims": [[4096, 4096]] * 2, "Input type": ["c10::Half"] * 2},
    )
    path = written(
        tmp_path / "a.json",
        [product, *launched("hgemm_128x128", 1, 10, 5000, 1, external=1)],
        deviceProperties=[{"id": 0, "name": gpu}],
    )
    assert line(path, "matmul") == f"fp16 27.5 TFLOP/s ({share})"


def test_what_is_hidden_is_not_exposed_and_an_optimizers_kernels_are_not_to_be_fused(tmp_path):
    path = written(
        tmp_path / "a.json",
        [
            event("user_annotation", "optimizer", 0, 50),
            *launched(ADD, 10, 100, 100, 1),
            *launched(ADD, 60, 200, 50, 2),
            *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 70, 235, 20, 3),
        ],
    )
    assert "75% hidden" in line(path, "communication")
    one = next(devices(load_capture(path)))
    # of the second kernel's 0.05 ms communication runs beside 0.015: so much would not leave the step
    assert [round(each.ms, 4) for each in rank_advice(one, sum_by_cause(explain_gaps(one), 1))] == [
        0.035,
        0.005,
    ]


def test_phases_are_named_on_the_command_line():
    assert phases_of(["forward=Vorwärts", "loss=eval=1"]) == {"Vorwärts": "forward", "eval=1": "loss"}
    assert phases_of([]) is None
    for said in ("forward", "forward=", "=eval"):
        with pytest.raises(
            TraceError, match=f"--phase: got '{said}', expected forward=NAME, with the name of a range"
        ):
            phases_of([said])


def test_work_whose_launch_is_not_told_is_kept_within_the_capture(tmp_path):
    events = [
        *launched(ADD, 0, 10, 10, 1),
        event("kernel", GEMM, 30, 10, 7, correlation=77, device="0x2", stream="0x0"),
        *launched(ADD, 50, 60, 10, 2),
    ]
    found = load_capture(written(tmp_path / "a.json", events))
    assert found.operations["launch_start_ns"].isna().tolist() == [False, True, False] and not found.left_out
    assert found.operations["device"].tolist() == [0, 2, 0]
    text = profile_text(tmp_path / "a.json", device=2)
    assert text.startswith("2 GPUs, details of GPU 2; no steps found") and "bound          unknown" in text
    with pytest.raises(TraceError, match="has no operations of GPU 1, expected one of 0, 2"):
        profile_text(tmp_path / "a.json", device=1)


@pytest.mark.parametrize("zipped", [False, True])
def test_nsys_captures_are_read_with_ranges_of_every_domain(tmp_path, zipped):
    path = SAMPLE
    if zipped:
        path = tmp_path / "sample.sqlite.gz"
        path.write_bytes(gzip.compress(SAMPLE.read_bytes()))
    found = load_capture(path)
    assert len(found.operations) == 1380 and not found.left_out and len(found.steps) == 5
    sums = found.operations.groupby("phase", observed=True)["duration_ns"].agg(["size", "sum"])
    assert sums["size"].to_dict() == {"forward": 515, "backward": 855, "optimizer": 10}
    assert sums["sum"].sum() == 18_266_582 + 153_023 + 3_680
    text = profile_text(path)
    assert (
        "5 steps (step); 1,380 operations" in text and "matmul rates (torch.profiler records shapes" in text
    )


def test_made_up_captures_of_both_kinds_say_the_same(tmp_path):
    make_capture(tmp_path / "a.sqlite", 2000, 400, steps=4)
    make_trace(tmp_path / "a.json", 2000, 400, steps=4)
    nsys, torch = load_capture(tmp_path / "a.sqlite").operations, load_capture(tmp_path / "a.json").operations
    assert len(nsys) == len(torch) == 2000
    for column in ("phase", "step", "kernel_category"):
        # whole microseconds in the trace: an operation may be launched on the other side of an edge
        assert (nsys[column].astype(str) == torch[column].astype(str)).mean() > 0.99
    assert set(nsys["phase"]) == {"forward", "backward"}


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_other_peoples_captures_add_up_and_have_families(path):
    found = load_capture(path)
    whole = found.operations["duration_ns"].sum() + found.excluded["duration_ns"].sum()
    if ".json" in path.name:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        work = [
            e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e.get("ph") == "X"
        ]
        assert len(found.operations) + found.left_out == len(work)
        assert whole == pytest.approx(sum(e["dur"] for e in work) * 1e3, rel=1e-9)
    other = found.operations.loc[found.operations["kernel_category"] == "other", "duration_ns"].sum()
    assert other <= 0.01 * found.operations["duration_ns"].sum()
    assert "not available" in profile_text(path)


# What is refused

KERNEL_EVENT = launched(ADD, 0, 10, 10, 1)
REFUSED = {
    "empty.json": (b"", "is empty"),
    "text.txt": (b"Time (%),Total\n" * 9, "is no capture: it begins with b'Time"),
    "cut.json": (
        json.dumps({"traceEvents": KERNEL_EVENT}).encode()[:-40],
        "the file is cut off: it ends within line 1",
    ),
    "cut.json.gz": (
        gzip.compress(json.dumps({"traceEvents": KERNEL_EVENT}).encode())[:-20],
        "cannot be read .*end-of-stream",
    ),
    "no_events.json": (b'{"schemaVersion": 1}', "has no list traceEvents"),
    "list.json": (b'{"traceEvents": {"a": 1}}', "has no list traceEvents"),
    "deep.json": (b'{"traceEvents": [' + b"[" * 100_000, "is not valid JSON .maximum recursion depth"),
    "cut.sqlite": (SAMPLE.read_bytes()[:40_000], "database disk image is malformed"),
    "cut.sqlite.gz": (gzip.compress(SAMPLE.read_bytes())[:20_000], "cannot be read .*end-of-stream"),
    "whole.sqlite.gz": (gzip.compress(SAMPLE.read_bytes()[:40_000]), "database disk image is malformed"),
    "cpu.json": (
        json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0, 5)] * 3}).encode(),
        "has no GPU work, only 3 operators of the CPU; expected kernels of CUDA, ROCm or XPU.*ProfilerActivity.CUDA",
    ),
    "none.json": (b'{"traceEvents": []}', "has no GPU work; expected"),
    "report.nsys-rep": (b"\x00nsys", "is nsys's own report"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_files_that_are_no_captures_are_refused_in_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "find_nsys", lambda: None)
    data, message = REFUSED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TraceError, match=message) as caught:
        profile_text(tmp_path / name)
    said = str(caught.value)
    assert (
        said.startswith(str(tmp_path / name)) and "\n" not in said and "expected" in said and len(said) < 600
    )
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            load_capture(path)


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
def test_an_event_without_times_or_ids_is_named(tmp_path, change):
    broken = event("kernel", "my\nkernel", 0, 5, correlation=1) | change
    path = written(tmp_path / "a.json", [*KERNEL_EVENT, broken])
    with pytest.raises(TraceError, match=r"a.json: the event 'my\\nkernel' has ts ") as caught:
        load_capture(path)
    assert "\n" not in str(caught.value)


def test_odd_events_are_passed_over_and_odd_names_shown_on_one_line(tmp_path):
    odd = "\x1b[31mevil\nname\u202e" + "x" * 5000
    events = [
        1,
        "a",
        None,
        [],
        {},
        {"ph": "X"},
        {"ph": "M", "cat": "kernel"},
        event("kernel", odd, 20, 10, correlation=None),
        *KERNEL_EVENT,
        event("user_annotation", odd, 0, 100),
        event("kernel", ADD, 40, 5, args="x"),
    ]
    events[-1]["args"] = "x"
    text = profile_text(written(tmp_path / "a.json", events, deviceProperties="x", distributedInfo=[1]))
    assert "\x1b" not in text and "\u202e" not in text and max(map(len, text.splitlines())) < 400
    assert len(load_capture(tmp_path / "a.json").operations) == 3
    (tmp_path / "list.json").write_text(
        "\ufeff" + json.dumps(events)
    )  # Chrome's other form, with a mark of its order
    assert len(load_capture(tmp_path / "list.json").operations) == 3


def test_an_empty_nsys_capture_says_what_nsys_says(tmp_path):
    path = tmp_path / "a.sqlite"
    write_export(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)")
        connection.executemany(
            "INSERT INTO DIAGNOSTIC_EVENT VALUES (1, ?, ?)",
            [(1, "fine"), (4, "CUDA device 0: Unified Memory cannot be traced\non this device"), (4, None)],
        )
        connection.commit()
    with pytest.raises(
        TraceError,
        match=r"has no kernels, .*; nsys says: CUDA device 0: Unified Memory cannot be traced on",
    ):
        load_capture(path)


def test_a_report_is_exported_where_nsys_is(tmp_path, monkeypatch):
    program, report = tmp_path / "nsys", tmp_path / "a.nsys-rep"
    report.write_bytes(b"\x00nsys")
    program.write_text(f'#!/bin/sh\ncp {SAMPLE} "$5"\n')
    program.chmod(0o755)
    monkeypatch.setattr(files, "find_nsys", lambda: program)
    assert len(load_capture(report).operations) == 1380
    program.write_text("#!/bin/sh\necho importer failed\n")
    with pytest.raises(
        TraceError, match=r"a.nsys-rep: nsys export could not export a.nsys-rep; its output: importer failed"
    ):
        load_capture(report)


def test_all_that_was_launched_before_the_first_step_is_an_error(tmp_path):
    events = [*launched(ADD, 0, 10, 10, 1), event("user_annotation", "ProfilerStep#1", 50, 10)]
    with pytest.raises(TraceError, match="all 1 operations were launched before its first step"):
        profile_text(written(tmp_path / "a.json", events))


def test_two_processes_have_steps_of_their_own(tmp_path):
    other = MAIN + (1 << 24)
    ranges = [
        (0, 100, "step", MAIN),
        (100, 200, "step", MAIN),
        (50, 150, "step", other),
        (150, 250, "step", other),
    ]
    launches = [(10, MAIN, 1), (110, MAIN, 2), (60, other, 1), (160, other, 2)]
    path = tmp_path / "a.sqlite"
    write_export(
        path,
        StringIds=[(1, "k")],
        NVTX_EVENTS=[(s, e, 59, name, tid, None, 0) for s, e, name, tid in ranges],
        CUPTI_ACTIVITY_KIND_RUNTIME=[(t, t + 2, tid, c) for t, tid, c in launches],
        CUPTI_ACTIVITY_KIND_KERNEL=[
            (t + 10, t + 30, tid == other, 7, c, tid & ~0xFFFFFF, 1) for t, tid, c in launches
        ],
    )
    rows = load_capture(path).operations
    assert rows["step"].tolist() == [0, 0, 1, 1] and rows["device"].tolist() == [0, 1, 0, 1]
    text = profile_text(path)
    assert "GPU 0          0.000100 ms" in text and "GPU 1          0.000100 ms" in text
    with closing(sqlite3.connect(path)) as connection:  # each rank sees its own GPU as the first
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 0")
        connection.commit()
    text = profile_text(path)
    assert (
        text.startswith("2 processes, details of GPU 0 (process 7); 2 steps")
        and "\nGPU 0 (process 8)" in text
    )
    assert set(rows["phase"]) == {OUTSIDE}


def test_of_few_operations_no_bound_is_told(tmp_path):
    assert "unknown: too few operations" in profile_text(
        written(tmp_path / "a.json", launched(ADD, 0, 5, 10, 1))
    )


@pytest.mark.parametrize(("known", "told"), [(40, False), (60, True)])
def test_no_rate_is_told_where_shapes_are_known_of_less_than_half(tmp_path, known, told):
    shaped = event(
        "cpu_op",
        "aten::mm",
        0,
        1,
        **{"External id": 1, "Input Dims": [[64, 64]] * 2, "Input type": ["float"] * 2},
    )
    path = written(
        tmp_path / "a.json",
        [shaped, *launched(GEMM, 1, 10, known, 1, external=1), *launched(GEMM, 3, 100, 100 - known, 2)],
    )
    assert bool(line(path, "matmul")) == told


def test_where_ranges_say_what_is_backward_autograds_do_not(tmp_path):
    events = [
        event("user_annotation", "backward", 0, 50),
        *launched(ADD, 5, 10, 5, 1),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 100, 50, 2),
        *launched(ADD, 110, 120, 5, 2, tid=2),
    ]
    found = load_capture(written(tmp_path / "a.json", events))
    assert found.operations["phase"].tolist() == ["backward", OUTSIDE] and not found.autograd
    found = load_capture(written(tmp_path / "a.json", [one for one in events if one["name"] != "backward"]))
    assert found.operations["phase"].tolist() == ["forward", "backward"] and found.autograd


# Accounts beside plain counting, of training that goes every way

FP32, TF32, HALF = "volta_sgemm_128x64", "cutlass_tensorop_s1688gemm", "sm80_xmma_gemm_bf16bf16_bf16f32_f32"
WORK = [
    (FP32, "float"),
    (TF32, "float"),
    (HALF, "c10::BFloat16"),
    (ADD, ""),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", ""),
    ("Memcpy HtoD (Pinned -> Device)", ""),
    ("Memcpy DtoD (Device -> Device)", ""),
    ("triton_poi_fused_7", "float"),
    ("triton_red_fused_9", "float"),
]


def training_of_two_gpus(seed: int) -> list[dict]:
    """Four or five steps of unequal length, work before, between and after them, on two streams of two GPUs; every time in whole µs,
    and on each GPU no two operations begin together."""
    random, events, free, begun = (
        Random(seed),
        [],
        dict.fromkeys([(gpu, stream) for gpu in (0, 1) for stream in (7, 9)], 0),
        set(),
    )
    call, number = 0, 0

    def work(call: int) -> None:
        nonlocal number
        number += 1
        (name, kind), place = (
            random.choice(WORK),
            random.choice([(0, 7), (0, 7), (0, 9), (1, 9), (1, 9), (1, 7)]),
        )
        start = max(free[place], call + random.choice([3, 4, 5, 30]))
        while (place[0], start) in begun:
            start += 1
        lasts = random.choice(
            [1, 7, 12, 25, 60 if "nccl" in name else 20, 150 if place[1] == 9 and not number % 7 else 9]
        )
        free[place] = start + lasts
        begun.add((place[0], start))
        if kind:
            dims = [[random.randint(1, 99), 8], [8, random.randint(1, 99)]]
            events.append(
                event(
                    "cpu_op",
                    "aten::mm" if "triton" not in name else name,
                    call - 1,
                    4,
                    **{"External id": number, "Input Dims": dims, "Input type": [kind, kind]},
                )
            )
        made = launched(
            name,
            call,
            start,
            lasts,
            number,
            external=number,
            cat="gpu_memcpy" if "Memcpy" in name else "kernel",
        )
        made[1]["args"] |= {"device": place[0], "stream": place[1]}
        events.extend(made)
        if kind and random.random() < 0.3:  # the same operator's second kernel
            again = launched(name, call + 2, free[place], 3, number + 1000, external=number)
            again[1]["args"] |= {"device": place[0], "stream": place[1]}
            if (place[0], free[place]) not in begun:
                begun.add((place[0], free[place]))
                free[place] += 3
                events.extend(again)

    def run(count: int) -> None:
        nonlocal call
        for _ in range(count):
            call += random.choice([5, 5, 6, 40])
            work(call)

    run(6)
    for step in range(random.choice([4, 5])):
        began = call = call + 10
        run(random.randint(8, 30))
        call += 10
        events.append(event("user_annotation", f"ProfilerStep#{step + 3}", began, call - began))
        run(random.choice([0, 2]))
    return events


def in_microseconds(tmp_path: Path, seed: int) -> Iterator[tuple[Device, list[dict]]]:
    """Each GPU with all of its operations, those before the steps too, in order of start."""
    capture = load_capture(written(tmp_path / "a.json", training_of_two_gpus(seed), **HEADER))
    seen = pd.concat(
        [capture.excluded.assign(early=True), capture.operations.assign(early=False)]
    ).sort_values("start_ns")
    assert seen["device"].nunique() == 2 and len(capture.excluded) >= 6
    for one in devices(capture):
        rows = seen[seen["device"] == one.number].to_dict("records")
        for row in rows:
            row["begin"], row["end"] = row["start_ns"] // 1000, (row["start_ns"] + row["duration_ns"]) // 1000
            row["part"] = (
                "communication" if "nccl" in row["name"] else "copies" if "HtoD" in row["name"] else "compute"
            )
            row["called"] = (row["launch_start_ns"] + row["launch_duration_ns"]) // 1000
        yield one, rows


def ticks(rows: list[dict], window: tuple[int, int], wanted=lambda row: True) -> set[int]:
    """The microseconds of a window in which one of these runs."""
    return {
        tick
        for row in rows
        if wanted(row)
        for tick in range(max(row["begin"], window[0]), min(row["end"], window[1]))
    }


@pytest.mark.parametrize("seed", range(6))
def test_windows_and_accounts_are_what_plain_counting_says(tmp_path, seed):
    for one, rows in in_microseconds(tmp_path, seed):
        kernels: Counter = Counter()
        for row in rows:
            if row["kind"] == "kernel" and row["part"] != "communication" and not row["early"]:
                kernels[row["stream"]] += row["duration_ns"]
        assert one.stream == kernels.most_common(1)[0][0]
        own = [row for row in rows if row["step"] >= 0 and row["stream"] == one.stream]
        hosts = one.capture.ranges.set_index("step")[["start_ns", "end_ns"]] // 1000
        firsts = sorted(
            (min(row["begin"] for row in own if row["step"] == step), step)
            for step in {row["step"] for row in own}
        )
        begins: list[int] = []
        for place, (first, step) in enumerate(firsts):
            earlier = {step for _, step in firsts[:place]}
            done = max(
                (
                    row["end"]
                    for row in rows
                    if row["step"] in earlier or (row["step"] < 0 and row["end"] <= first)
                ),
                default=-1,
            )
            begins.append(max([min(first, max(hosts.at[step, "start_ns"], done)), *begins]))

        def own_end(step: int) -> int:
            last = max(
                row["end"]
                for row in rows
                if row["step"] == step and (row["kind"] != "memcpy" or row["stream"] == one.stream)
            )
            return max(last, hosts.at[step, "end_ns"])

        windows = []
        for place, (_, step) in enumerate(firsts):
            following = firsts[place + 1][1] if place + 1 < len(firsts) else None
            end = begins[place + 1] if following is not None else own_end(step)
            if following != step + 1:  # what follows has no operations on this GPU
                end = min(end, own_end(step))
            windows.append((begins[place], max(begins[place], end)))
        assert (one.windows // 1000).tolist() == [[*window] for window in windows]
        accounts = []
        for begin, end in windows:
            compute, local, busy = (
                ticks(rows, (begin, end), lambda row, parts=parts: row["part"] in parts)
                for parts in (["compute"], ["compute", "copies"], ["compute", "copies", "communication"])
            )
            accounts.append(
                [end - begin, len(compute), len(local - compute), len(busy - local), end - begin - len(busy)]
            )
        assert (one.breakdowns * 1e3).round().to_numpy().tolist() == accounts
        order = sorted(range(len(windows)), key=lambda place: accounts[place][0])
        wall = statistics.median(account[0] for account in accounts)
        assert one.median_indices == sorted(
            order[(len(order) - 1) // 2 : len(order) // 2 + 1]
        ) and one.median["wall"] * 1e3 == pytest.approx(wall)
        assert one.outliers == [
            place for place, account in enumerate(accounts) if not 0.8 * wall <= account[0] <= 1.25 * wall
        ]


@pytest.mark.parametrize("seed", range(6))
def test_pauses_and_sums_of_a_step_are_what_plain_counting_says(tmp_path, seed):
    for one, rows in in_microseconds(tmp_path, seed):
        middle, gaps = [tuple(window) for window in (one.windows[one.median_indices] // 1000).tolist()], []
        for window in middle:
            idle = sorted({*range(*window)} - ticks(rows, window))
            for began in (tick for tick in idle if tick - 1 not in idle):
                ended = next(tick for tick in range(began, window[1] + 1) if tick not in idle)
                after = next((row for row in rows if row["begin"] >= ended), None)
                gaps.append(
                    (
                        began,
                        ended,
                        began == window[0],
                        after["begin"] if after else -1,
                        after["called"] if after else LATEST // 1000,
                    )
                )
        found = one.gaps
        following = [
            one.classified_ops["start_ns"].iloc[place] // 1000 if place >= 0 else -1
            for place in found["next"]
        ]
        assert [
            *zip(
                found["begin"] // 1000,
                found["end"] // 1000,
                found["head"],
                following,
                found["returned"] // 1000,
            )
        ] == gaps
        of_step = [
            row
            for row in rows
            if not row["early"] and any(begin <= row["begin"] < end for begin, end in middle)
        ]
        assert one.host_lead_ms * 1e3 == pytest.approx(
            statistics.median(row["begin"] - row["called"] for row in of_step)
        )
        counts, lasted = Counter(row["name"] for row in of_step), Counter()
        for row in of_step:
            lasted[row["name"]] += row["duration_ns"] / 1e6
        table = one.kernels
        assert (
            table["ms"].is_monotonic_decreasing
            and one.total_ms_by(one.operations, "kernel_category").is_monotonic_decreasing
        )
        assert table["count"].to_dict() == {name: count / len(middle) for name, count in counts.items()}
        assert table["ms"].to_dict() == pytest.approx({name: ms / len(middle) for name, ms in lasted.items()})
        assert table["share"].to_dict() == pytest.approx(
            {name: ms / sum(lasted.values()) for name, ms in lasted.items()}
        )
        for name in counts:
            alone = [
                ticks(rows, window) - ticks(rows, window, lambda row, name=name: row["name"] != name)
                for window in middle
            ]
            assert one.time_saved_without(one.running_ops["name"] == name) * 1e3 == pytest.approx(
                sum(map(len, alone)) / len(middle)
            )
        operators = {
            each["args"]["External id"]: each["args"]["Input Dims"]
            for each in training_of_two_gpus(seed)
            if each["cat"] == "cpu_op"
        }
        for dtype, name in (("fp32", FP32), ("tf32", TF32), ("bf16", HALF)):
            if mine := {
                row["operator"]: operators[row["operator"]] for row in of_step if row["name"] == name
            }:
                flops = sum(2 * left[0] * left[1] * right[1] for left, right in mine.values())
                assert one.matmuls.loc[dtype].tolist() == pytest.approx(
                    [lasted[name] / len(middle), flops / lasted[name] / 1e9]
                )
        assert one.matmuls["ms"].is_monotonic_decreasing
        bytes_of = {
            name: sum(
                4 * sum(map(math.prod, operators[row["operator"]])) for row in of_step if row["name"] == name
            )
            for name in counts
            if "triton" in name
        }
        assert one.generated["bytes"].to_dict() == bytes_of
