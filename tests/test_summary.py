"""What a verdict interprets: windows, why the GPU waits, phases, communication, and what to do about it."""

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

from cells import run_cells
from stepscope import PROJECT
from stepscope.captures import EXAMPLE
from stepscope.captures.advice import rank_advice, unfused_attention
from stepscope.captures.capture import load_capture
from stepscope.captures.idle_time import explain_gaps, sum_by_cause
from stepscope.captures.lines import FORMATS, rendered
from stepscope.captures.step_breakdown import devices
from stepscope.captures.summary import profile
from stepscope.data_sheets import data_sheet
from stepscope.traces.attribution import TraceError
from stepscope.traces.kernel_categories import kernel_categories
from tests.test_capture import ADD, GEMM, SAMPLE, event, launched, line, to_do, written

DATA = Path(__file__).parent / "data"
BEFORE, PREFETCH, SYNC = (
    DATA / "captures" / name
    for name in ("before_first_kernel.json.gz", "prefetch.json.gz", "sync_in_to.sqlite.gz")
)


def values(path: Path, label: str, **how: object) -> dict:
    """The numbers of the line with this label."""
    return next(one.values for one in profile(path, **how) if one.label == label)  # type: ignore[arg-type]


# Windows


def test_a_step_holds_what_the_host_does_before_its_first_operation():
    step = values(BEFORE, "step on GPU")
    assert step["wall_ms"] == pytest.approx(382.6, abs=0.5)  # its range on the host lasts 382.5 ms
    assert step["wall_ms"] == pytest.approx(
        sum(step[f"{part}_ms"] for part in ("compute", "exposed_copies", "exposed_communication", "idle"))
    )
    before = values(BEFORE, "before")
    assert before["before_ms"] == pytest.approx(218, abs=1) and before["where"].endswith("preprocess")


def test_prefetched_copies_shift_no_window():
    one = next(devices(load_capture(PREFETCH)))
    walls = one.breakdowns["wall"]
    assert len(walls) == 6 and walls.between(114, 124).all() and not one.outliers
    copies = one.classified_ops[
        (one.classified_ops["kind"] == "memcpy") & (one.classified_ops["stream"] != one.stream)
    ]
    assert (copies.groupby("step")["start_ns"].min().to_numpy() < one.windows[:, 0]).any()
    assert (one.windows[1:, 0] == one.windows[:-1, 1]).all()


def test_a_step_is_the_median_one_and_outliers_are_named(tmp_path):
    events, at = [], 0
    for number, lasts in enumerate((100, 300, 98, 104, 102)):
        events += [
            event("user_annotation", f"ProfilerStep#{number}", at, lasts),
            *launched(GEMM, at + 1, at + 3, lasts - 4, number),
        ]
        at += lasts
    path = written(tmp_path / "a.json", events)
    step = values(path, "step on GPU")
    assert step["steps_ms"] == [0.1, 0.3, 0.098, 0.104, 0.102] and step["wall_ms"] == 0.102
    assert line(path, "outliers") == "ProfilerStep#1 0.300 ms (compute +0.198 ms)"


def test_a_capture_whose_start_dominates_is_said_to_be_one(tmp_path):
    slow = [
        one
        for number in range(40)
        for one in launched(ADD, 10_000 * number, 10_000 * number + 3, 100, number)
    ]
    steady = [
        one
        for number in range(200)
        for one in launched(GEMM, 400_000 + 500 * number, 400_000 + 501 * number, 490, 50 + number)
    ]
    path = written(tmp_path / "a.json", [*slow, *steady])
    assert values(path, "start-up")["started_ms"] == pytest.approx(400, rel=0.05)
    assert to_do(path)[0].startswith("capture steady steps")
    assert not line(written(tmp_path / "b.json", steady), "start-up")


# Why it waits


def test_the_gpu_does_not_wait_while_what_was_launched_before_the_steps_runs(tmp_path):
    early = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 2, correlation=1),
        event("kernel", ADD, 5, 85, 8, correlation=1, device=0, stream=8),
    ]
    events = [
        *early,
        event("user_annotation", "ProfilerStep#1", 50, 60),
        *launched(GEMM, 52, 80, 5, 2),
        *launched(GEMM, 70, 95, 10, 3),
    ]
    one = next(devices(load_capture(written(tmp_path / "a.json", events))))
    assert one.gaps[["begin", "end"]].to_numpy().tolist() == [[90_000, 95_000], [105_000, 110_000]]
    assert one.median[["wall", "compute", "idle"]].tolist() == pytest.approx([0.06, 0.05, 0.01])


def test_a_synchronising_call_is_named_by_its_operator_and_the_advice_follows():
    assert values(SYNC, "sync-bound")["waiting_ms"] > 5
    causes = pd.DataFrame(values(SYNC, "idle time")["causes"])
    assert causes.iloc[0][["cause", "call", "where"]].tolist() == [
        "sync",
        "cudaStreamSynchronize",
        "aten::to",
    ]
    assert any("avoid cudaStreamSynchronize in aten::to" in text for text in to_do(SYNC))


def synchronising(**sync: float) -> list[dict]:
    """Ten times: 80 µs of work, for which a .to waits; then four short kernels whose launches come late."""
    found = []
    for number in range(10):
        at = 200 * number
        found += [
            *launched(GEMM, at, at + 3, 80, 10 * number),
            event("cpu_op", "aten::to", at + 5, 82),
            event("cuda_runtime", "cudaStreamSynchronize", at + 6, sync.get("lasts", 80)),
            *(
                one
                for i in range(1, 5)
                for one in launched(ADD, at + 80 + 25 * i, at + 83 + 25 * i, 3, 10 * number + i)
            ),
        ]
    return found


def test_pauses_after_a_wait_are_the_waits_as_long_as_the_host_would_be_ahead_without_it(tmp_path):
    def cause(events, steps=1):
        one = next(devices(load_capture(written(tmp_path / "a.json", events))))
        return sum_by_cause(explain_gaps(one), steps).iloc[0]

    found = cause(synchronising())
    assert (found["cause"], found["call"], found["where"], found["count"]) == (
        "sync",
        "cudaStreamSynchronize",
        "aten::to",
        10,
    )
    assert found["ms"] == pytest.approx(
        10 * (25 + 3 * 22) / 1e3
    )  # all four, of which half of the last is within its 80 µs
    of_two = cause(synchronising(), 2)
    assert of_two[["ms", "count", "longest_ms"]].tolist() == pytest.approx(
        [found["ms"] / 2, 5, found["longest_ms"]]
    )
    assert cause(synchronising(lasts=1))["cause"] == "launch"  # it was as late without


@pytest.mark.parametrize(
    ("cat", "name", "cause", "where"),
    [
        ("user_annotation", "load_batch", "host", "load_batch"),
        ("python_function", "my/data/read.py(12): decode", "host", "read.py(12): decode"),
        ("cpu_op", "aten::stack", "host", "aten::stack"),
        ("cuda_runtime", "cudaMalloc", "call", ""),
    ],
)
def test_what_fills_a_long_pause_is_its_cause(tmp_path, cat, name, cause, where):
    path = written(
        tmp_path / "a.json",
        [
            event("user_annotation", "ProfilerStep#1", 0, 2650),
            event("python_function", "torch/nn/module.py(3): call", 0, 2650),
            *launched(GEMM, 10, 20, 30, 1),
            event(cat, name, 100, 2000),
            *(one for i in range(8) for one in launched(ADD, 2200 + 50 * i, 2210 + 50 * i, 45, 2 + i)),
        ],
    )
    found = sum_by_cause(explain_gaps(next(devices(load_capture(path)))), 1).iloc[0]
    assert (found["cause"], found["where"], found["call"]) == (
        cause,
        where,
        name if cat == "cuda_runtime" else "",
    )
    assert found["ms"] == pytest.approx(2.0) and line(path, "host-bound")
    assert (where or name) in to_do(path)[0]


def test_a_launch_that_is_slow_is_a_cause_of_its_own(tmp_path):
    slow = launched(ADD, 100, 1105, 20, 2)
    slow[0] |= {"name": "hipLaunchKernel", "dur": 1000}
    path = written(
        tmp_path / "a.json",
        [
            *launched(GEMM, 10, 20, 30, 1),
            *slow,
            *(one for i in range(8) for one in launched(ADD, 1110 + i, 1125 + 20 * i, 20, 3 + i)),
        ],
    )
    assert to_do(path)[0].startswith("keep hipLaunchKernel out of the step (a kernel's first use loads it")


def test_operations_of_no_length_are_told(tmp_path):
    path = written(
        tmp_path / "a.json", [event("user_annotation", "ProfilerStep#1", 5, 0), *launched(ADD, 5, 5, 0, 1)]
    )
    assert line(path, "step on GPU").startswith("0 ms")


def test_a_pageable_copy_is_named_with_its_remedy(tmp_path):
    copies = [
        one
        for i in range(9)
        for one in launched(
            "Memcpy HtoD (Pageable -> Device)", 100 * i, 100 * i + 5, 60, 2 * i, cat="gpu_memcpy"
        )
    ]
    assert "pin it" in to_do(written(tmp_path / "a.json", [*copies, *launched(GEMM, 901, 905, 40, 99)]))[0]


# Phases


def ranged(*names: str) -> list[dict]:
    """In one outer range an inner one for each name, with a kernel; and NCCL's own range with its kernel."""
    found = [event("user_annotation", "chunk", 0, 100 * len(names) + 100)]
    for number, name in enumerate(names):
        at = 10 + 100 * number
        found += [
            event("user_annotation", name, at, 50),
            *launched(GEMM, at + 1, at + 5, 40 + number, number + 1),
        ]
    at = 10 + 100 * len(names)
    return [
        *found,
        event("user_annotation", "ncclGroupEnd", at, 20),
        *launched("ncclDevKernel_SendRecv(x)", at + 1, at + 5, 30, 90),
    ]


def test_inner_ranges_are_offered_and_a_librarys_are_not(tmp_path):
    path = written(tmp_path / "a.json", ranged("attn one", "mlp one", "attn two"))
    text = line(path, "phase")
    assert "'attn two' 0.0420, 'mlp one' 0.0410" in text and "nccl" not in text and "chunk" not in text
    assert "backward 0.0410 ms" in line(path, "phase", phases={"attn*": "forward", "mlp one": "backward"})
    assert set(load_capture(path, phases={"attn *": "forward"}).operations["phase"]) == {"forward", "outside"}
    with pytest.raises(TraceError, match=r"no range is named mlp\?x, expected one of"):
        load_capture(path, phases={"mlp?x": "forward"})
    split = written(tmp_path / "b.json", ranged("attn(F)", "mlp(B)", "mlp(W)"))
    assert line(split, "phase").startswith("forward 0.0400 | backward 0.0830 ms")


# Communication


@pytest.mark.parametrize(
    "name",
    [
        "void mine::moe_comm::dispatch<8, 7168>(int4*)",
        "void a::b::combine<true, 7168>(void*)",
        "void x::notify_dispatch<8>(int*)",
        "void dpsk::ep::internode::combine_ll<3, 7168>(void*)",
        "void q::get_dispatch_layout(long*)",
    ],
)
def test_experts_exchange_is_communication_in_any_namespace(name):
    assert kernel_categories([name])[0] == "communication"


def test_why_communication_is_not_hidden_is_said():
    assert "0% hidden, as it runs on the compute stream" in line(SYNC, "communication")
    assert "compute stream" not in line(PREFETCH, "communication")


# What to do, by the time that would leave the step


def test_what_runs_beside_something_else_would_leave_no_time():
    one = next(devices(load_capture(PREFETCH)))
    loose = one.running_ops["kernel_category"] == "elementwise"
    assert one.time_saved_without(loose) < one.ms_per_step(
        (one.running_ops["end_ns"] - one.running_ops["start_ns"])[loose].sum()
    )
    assert one.time_saved_without(one.running_ops["kernel_category"] != "") == pytest.approx(
        one.median["wall"] - one.median["idle"]
    )
    assert one.ms_per_step(one.gaps["ms"].sum() * 1e6) == pytest.approx(one.median["idle"])
    found = rank_advice(one, sum_by_cause(explain_gaps(one), len(one.median_indices)))
    assert [each.ms for each in found] == sorted((each.ms for each in found), reverse=True)
    assert all(each.ms <= one.median["wall"] for each in found)


def test_attention_that_is_not_fused_and_products_that_are_not_aligned_are_named():
    texts = to_do(BEFORE)
    assert any(text.startswith("use F.scaled_dot_product_attention") for text in texts)
    assert any("unaligned loads (align1)" in text for text in texts)
    assert not any("torch.compile" in text for text in texts)


@pytest.mark.parametrize(
    ("between", "found"),
    [
        (["scale", "softmax_warp_forward", "cast"], 3),
        (["softmax_warp_forward", "nll_loss_forward", "softmax_warp_backward"], 0),
        (["cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>"], 0),
    ],
)
def test_attentions_softmax_stands_between_products_and_the_losses_does_not(between, found):
    known = {"scale": ADD, "cast": "direct_copy_kernel_cuda"}
    names = [GEMM, *(known.get(name, name) for name in between), GEMM]
    rows = pd.DataFrame(
        {"name": pd.Categorical(names), "kernel_category": kernel_categories(names), "stream": 7}
    )
    assert unfused_attention(rows).sum() == found


def test_fp32_products_are_named_with_what_this_gpu_has_for_them():
    assert any(
        "autocast to fp16" in text and "volta_sgemm" in text for text in to_do(PREFETCH)
    )  # a V100 has no TF32
    assert any("TF32" in text and "sgemm" in text for text in to_do(SAMPLE))


@pytest.mark.parametrize("path", [BEFORE, PREFETCH, SYNC, SAMPLE], ids=lambda path: path.name)
def test_the_kernels_that_take_most_are_always_named(path):
    found = [one.values for one in profile(path) if "kernel" in one.values]
    shares = [each["share"] for each in found]
    assert len(found) == 5 and shares == sorted(shares, reverse=True)
    assert all(each["count"] >= 1 and each["ms"] > 0 for each in found)


# Small things


def test_shapes_that_are_recorded_are_not_asked_for(tmp_path):
    shaped = event(
        "cpu_op", "aten::relu", 0, 1, **{"External id": 1, "Input Dims": [[4]], "Input type": ["float"]}
    )
    assert "record_shapes" not in line(
        written(tmp_path / "a.json", [shaped, *launched(GEMM, 1, 5, 5, 1)]), "not available"
    )
    assert "record_shapes" in line(written(tmp_path / "a.json", launched(GEMM, 1, 5, 5, 1)), "not available")


def test_no_rate_is_told_of_a_kernel_that_moves_little(tmp_path):
    def rate(size):
        shaped = event(
            "cpu_op",
            "triton_poi_0",
            0,
            1,
            **{"External id": 1, "Input Dims": [[size]], "Input type": ["float"]},
        )
        return line(
            written(tmp_path / "a.json", [shaped, *launched("triton_poi_0", 1, 5, 100, 1, external=1)]),
            "generated",
        )

    assert rate(250) == "" and rate(100_000_000).startswith("4.00 TB/s")


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("Tesla T4", None),
        ("Tesla V100-SXM2-16GB", None),
        ("Tesla V100-PCIE-32GB", None),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI250X / MI250", 181),
    ],
)
def test_data_sheets_are_found_by_whole_words(name, bf16):
    sheet = data_sheet(name)
    assert sheet.get("bf16") == bf16 and sheet["fp32"] > 0 and sheet["tb_s"] > 0
    assert bf16 or sheet["fp16"] > 5 * sheet["fp32"]  # by the tensor cores that those have
    assert sheet["source"] and sheet["url"].startswith("https://")


def test_of_one_models_forms_each_has_its_own_memory():
    assert [
        data_sheet(f"NVIDIA A100{form}")["tb_s"] for form in ("-SXM4-80GB", " 80GB PCIe", "-PCIE-40GB")
    ] == [2.039, 1.935, 1.555]


def test_a_name_that_only_contains_a_gpus_has_no_sheet_of_its_own():
    others = [
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA GB200",
        "",
    ]
    assert not [name for name in others if data_sheet(name)]


def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(TraceError, match=f"{path.name}: is not a regular file, expected"):
            profile(path)


# Formats and CSV


@pytest.mark.parametrize("path", [BEFORE, SYNC, SAMPLE], ids=lambda path: path.name)
def test_all_formats_say_the_same(path):
    lines = profile(path)
    told = json.loads(rendered(lines, "json"))["lines"]
    assert [(each["label"], each["text"]) for each in told] == [(one.label, one.text) for one in lines]
    text, markdown = rendered(lines), rendered(lines, "markdown")
    for one in lines:
        assert one.text in text
        assert one.text in markdown.replace("\\", "").replace("\u2060", "")
    with pytest.raises(TraceError, match="--format: got 'html', expected one of text, json, markdown"):
        rendered(lines, "html")
    assert set(FORMATS) == {"text", "json", "markdown"}


def test_names_of_a_capture_do_nothing_in_markdown(tmp_path):
    odd = "[x](javascript:alert(1)) <script> | `a` *b*"
    path = written(
        tmp_path / "a.json",
        [event("user_annotation", odd, 0, 90), *launched(odd, 1, 5, 50, 1), *launched(GEMM, 2, 60, 5, 2)],
    )
    text = rendered(profile(path), "markdown")
    assert "<script>" not in text and "](javascript" not in text and "\\<script\\>" in text


def test_nsyss_trace_report_is_a_capture_without_launches():
    path = DATA / "nsys" / "nsys_2026_3_cuda_gpu_trace.csv"
    rows = load_capture(path).operations
    assert (
        len(rows) == 8
        and rows["duration_ns"].sum() == 3_446_707
        and set(rows["kind"]) == {"kernel", "memcpy"}
    )
    assert rows["bytes"].max() == 4_194_000 and rows["device"].tolist() == [0] * 8
    assert "unknown" in line(path, "bound") and values(path, "on GPU")["exposed_copies_ms"] == pytest.approx(
        3.43, abs=0.01
    )


def test_nsyss_sums_of_kernels_are_told_as_far_as_they_go(tmp_path):
    path = DATA / "nsys" / "sample_cuda_gpu_kern_sum.csv"
    found = profile(path, csv=tmp_path / "out.csv")
    assert found[0].values == {"kernels": 39, "launches": 1330, "kernel_ms": pytest.approx(18.266582)}
    assert found[1].values["matmul_ms"] == pytest.approx(
        load_capture(SAMPLE)
        .operations.groupby("kernel_category", observed=True)["duration_ns"]
        .sum()["matrix multiply"]
        / 1e6
    )
    assert len(pd.read_csv(tmp_path / "out.csv")) == 39 and "idle time" in found[-1].text
    with pytest.raises(
        TraceError,
        match=r"kern_sum.csv: is nsys's report cuda_gpu_kern_sum, .* expected a capture with their times",
    ):
        load_capture(path)
    with pytest.raises(
        TraceError, match=r"api_sum.csv: is nsys's report cuda_api_sum, expected cuda_gpu_trace"
    ):
        profile(DATA / "nsys" / "sample_cuda_api_sum.csv")


# What comes with it


def test_the_example_tells_a_gpu_and_names_no_machine():
    assert line(EXAMPLE, "capture").startswith("H200; 5 steps (step); 1,380 operations")
    text = gzip.decompress(EXAMPLE.read_bytes())
    assert not re.search(rb"/(home|root|tmp|usr)/|TARGET_INFO_SYSTEM_ENV|PROCESSES", text)


def test_the_notebooks_times_are_of_one_step_where_two_are_in_the_middle(tmp_path):
    path, shown = tmp_path / "a.json", []
    written(
        path,
        [
            one
            for number, lasts in enumerate((30, 50))
            for one in (
                event("user_annotation", f"step {number}", 100 * number, 100),
                *launched(GEMM, 100 * number + 2, 100 * number + 10, lasts, number + 1),
            )
        ],
    )
    found = run_cells(
        "profile", replaced={"display": shown.append, "brief": lambda frame: frame}, file=str(path)
    )
    assert found["table"]["ms"].tolist() == found["kernels"]["ms"].tolist() == [0.04]
    assert found["halved_ms"] == pytest.approx(0.08)  # 0.04 of 0.1 ms are compute, and half of that is saved


def test_the_notebook_looks_into_the_gpu_asked_for_and_around_its_longest_pause(tmp_path):
    first = [one for at in (10, 30, 200, 230) for one in launched(ADD, at - 5, at, 10, at)]
    other = launched(GEMM, 40, 50, 500, 77)
    other[1]["args"]["device"] = 1
    path = str(written(tmp_path / "a.json", [*first, *other]))
    found = run_cells("profile", replaced={"display": lambda shown: None}, file=path, device=0)
    assert found["gpu"].number == 0 and found["longest"][["begin", "end", "ms"]].tolist() == [
        40_000,
        200_000,
        0.16,
    ]
    assert (
        found["rows"]["start_ns"].tolist() == [10_000, 30_000, 200_000, 230_000]
        and found["median"]["wall"] == 0.23
    )
    assert (
        run_cells("profile", until="short_names(map", replaced={"display": lambda shown: None}, file=path)[
            "gpu"
        ].number
        == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["", str(BEFORE), str(PREFETCH), str(SYNC), str(DATA / "nsys" / "nsys_2026_3_cuda_gpu_trace.csv")]
)
def test_the_notebook_runs_from_top_to_bottom(file):
    notebook = nbformat.read(Path(str(PROJECT), "notebooks", "profile.ipynb"), as_version=4)
    notebook.cells[1].source += f"\nfile = {file!r}"
    done = NotebookClient(notebook, timeout=300).execute()
    shown = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in one.get("data", {}) for one in shown) >= 3
    assert any("to do" in one.get("text", "") for one in shown)


# Where things go another way than in the captures above


def test_pauses_are_summed_by_what_they_are_for():
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
    found = sum_by_cause(pd.DataFrame(rows, columns=["cause", "call", "where", "event", "ms"]), 2)
    assert found[["cause", "call", "where", "ms", "longest_ms", "count"]].to_numpy().tolist() == [
        ["launch", "", "", 10, 16, 1],
        ["sync", "a", "x", 4.5, 6, 1],
        ["call", "b", "x", 4, 8, 0.5],
        ["host", "", "load", 2.5, 5, 0.5],
        ["sync", "a", "y", 1.5, 3, 0.5],
        ["unknown", "", "", 0.25, 0.5, 0.5],
    ]


def kept(tmp_path, events, **header):
    return next(devices(load_capture(written(tmp_path / "a.json", events, **header))))


def test_a_pause_is_of_the_thread_that_launched_what_ended_it(tmp_path):
    """Thread 1 waits and loads; thread 2 launches what comes after the first pause, thread 1 after the second, nobody known after the third."""
    one = kept(
        tmp_path,
        [
            *launched(GEMM, 0, 5, 95, 1),
            event("cuda_runtime", "cudaDeviceSynchronize", 10, 90),
            event("user_annotation", "load", 1000, 900),
            *launched(GEMM, 600, 605, 95, 2, tid=2),
            *launched(GEMM, 1950, 1955, 45, 3),
            *launched(GEMM, 1990, 2000, 5, 4),
            event("user_annotation", "save", 2100, 800),
            event("kernel", GEMM, 3005, 10, 7, correlation=99, device=0, stream=7),
            *launched(ADD, 3010, 3015, 5, 5),
        ],
    )
    found = explain_gaps(one)
    assert found[["begin", "end", "cause", "where"]].to_numpy().tolist() == [
        [100_000, 605_000, "unnamed", ""],
        [700_000, 1_000_000, "unnamed", ""],
        [1_000_000, 1_900_000, "host", "load"],
        [1_900_000, 1_955_000, "launch", ""],
        [2_005_000, 3_005_000, "unknown", ""],
    ]


def test_what_launches_or_lasts_far_longer_than_a_pause_is_no_reason_of_it(tmp_path):
    def cause(*events):
        return (
            explain_gaps(
                kept(tmp_path, [*launched(GEMM, 0, 5, 95, 1), *launched(ADD, 1000, 1005, 95, 2), *events])
            )
            .nlargest(1, "ms")
            .iloc[0][["cause", "where"]]
            .tolist()
        )

    assert cause(event("user_annotation", "load", 150, 800)) == ["host", "load"]  # in it nothing is launched
    assert cause(event("user_annotation", "load", 150, 1600)) == ["host", "load"]  # most of it is the pause
    assert cause(event("user_annotation", "epoch", -2000, 9000))[0] == "unnamed"
    assert cause(event("cpu_op", "aten::add", 150, 852)) == ["launch", "aten::add"]  # it launches, slowly
    assert (
        cause(event("cuda_runtime", "cudaMalloc", 450, 540))[0] == "call"
        and cause(event("cuda_runtime", "cudaMalloc", 900, 90))[0] == "unnamed"
    )
    assert cause(event("cuda_runtime", "cudaMalloc", 150, 400, 2))[0] == "unnamed"  # on another thread


def test_a_pause_is_explained_until_its_launch_or_the_steps_end(tmp_path):
    def cause(*events):
        return (
            explain_gaps(kept(tmp_path, [*launched(GEMM, 0, 5, 95, 1), *events]))
            .query("cause != 'device'")
            .nlargest(1, "ms")
            .iloc[0][["cause", "where"]]
            .tolist()
        )

    assert cause(event("user_annotation", "load", 110, 285), *launched(ADD, 400, 2000, 5, 2)) == [
        "host",
        "load",
    ]  # then the GPU was slow
    assert (
        cause(event("cuda_runtime", "cudaDeviceSynchronize", 110, 880), *launched(ADD, 1000, 1005, 5, 2))[0]
        == "sync"
    )
    step = event("user_annotation", "ProfilerStep#1", -10, 3000)
    assert cause(step, event("user_annotation", "save", 200, 2700)) == [
        "host",
        "save",
    ]  # nothing is launched after it
    assert cause(step, event("user_annotation", "save", 200, 2700, 2))[0] == "unnamed"  # on another thread


def test_what_is_attentions_is_advised_once(tmp_path):
    names = [GEMM, ADD, "softmax_warp_forward", GEMM, ADD]
    one = kept(
        tmp_path,
        [one for at, name in enumerate(names) for one in launched(name, at, 10 + 100 * at, 100 - at, at + 1)],
    )
    found = {each.what[:5]: each.ms for each in rank_advice(one, sum_by_cause(explain_gaps(one), 1))}
    assert found == {
        "use F": pytest.approx(0.099 + 0.098),
        "fuse ": pytest.approx(0.096),
        "run f": pytest.approx(0.197),
    }


@pytest.mark.parametrize(
    ("name", "advised"),
    [("ampere_sgemm_tf32_128x64", set()), (ADD, {"fuse "}), ("ampere_sgemm_128x64", {"run f"})],
)
def test_only_products_without_tensor_cores_are_to_be_put_on_them_and_nothing_fused_where_much_is(
    tmp_path, name, advised
):
    def found(*others):
        one = kept(
            tmp_path,
            [*launched(name, 0, 10, 100, 1), *(one for at in others for one in launched(at, 5, 110, 10, 2))],
        )
        return {each.what[:5] for each in rank_advice(one, sum_by_cause(explain_gaps(one), 1))}

    assert found() == advised and found("triton_poi_fused_7") == advised - {"fuse "}


def test_where_is_the_outermost_operator_in_the_innermost_range_and_line(tmp_path):
    one = kept(
        tmp_path,
        [
            *launched(GEMM, 0, 5, 95, 1),
            *launched(ADD, 1000, 1005, 95, 2),
            event("user_annotation", "outer", 110, 885),
            event("user_annotation", "inner", 115, 875),
            event("python_function", "a/b/train.py(3): main", 116, 870),
            event("python_function", "a/b/loss.py(9): loss", 117, 868),
            event("python_function", "torch/nn/functional.py(9): call", 118, 866),
            event("cpu_op", "aten::item", 120, 860),
            event("cpu_op", "aten::_local_scalar_dense", 122, 855),
            event("cuda_runtime", "cudaMemcpyAsync", 130, 840),
        ],
    )
    assert explain_gaps(one).nlargest(1, "ms").iloc[0][["cause", "call", "where"]].tolist() == [
        "call",
        "cudaMemcpyAsync",
        "aten::item, inner, loss.py(9): loss",
    ]


def product(
    number: int, name: str, start: float, lasts: float, kind: str, dims: list, tid: int = 1
) -> list[dict]:
    return [
        event(
            "cpu_op",
            "aten::mm",
            start - 5,
            4,
            tid,
            **{"External id": number, "Input Dims": dims, "Input type": [kind] * 2},
        ),
        *launched(name, start - 4, start, lasts, number, tid, external=number),
    ]


def test_products_are_worth_what_their_flops_leave_on_each_gpus_rate(tmp_path):
    """On an H100 at 989.5 TFLOP/s, of two steps both in the middle: products whose operands are read in pieces, and fp32's."""
    events, dims = [], [[1000, 1000], [1000, 1000]]  # 2 GFLOP: 2.02 us at that rate
    for step in (0, 1):
        at = 1000 * step
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 1000),
            *product(10 + step, "cutlass_bf16_s16816gemm_align2", at + 10, 90, "c10::BFloat16", dims),
            *product(20 + step, "cutlass_bf16_s16816gemm_align8", at + 110, 90, "c10::BFloat16", dims),
            *product(30 + step, "volta_sgemm", at + 210, 390, "float", dims),
            *launched("splitKreduce_kernel", at + 209, at + 600, 10, 40 + step, external=30 + step),
            *launched(ADD, at + 600, at + 620, 370, 50 + step),
        ]
    one = kept(tmp_path, events, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    found = {each.what[:5]: each for each in rank_advice(one, sum_by_cause(explain_gaps(one), 2))}
    assert {name: each.ms for name, each in found.items()} == {
        "fuse ": pytest.approx(0.37),
        "run f": pytest.approx(0.4 - 2 / 989.5, rel=1e-4),
        "1 mat": pytest.approx(0.09 - 2 / 989.5, rel=1e-4),
    }
    assert "unaligned loads (align2)" in found["1 mat"].what and "such as volta_sgemm" in found["run f"].what
    unknown = kept(
        tmp_path,
        [one for one in events if one["cat"] != "cpu_op"],
        deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    )
    saved = {each.what[:5]: each.ms for each in rank_advice(unknown, sum_by_cause(explain_gaps(unknown), 2))}
    assert saved["run f"] == pytest.approx(
        0.39 * (1 - 67 / 989.5), rel=1e-2
    )  # at fp32's own rate, and without the split's sum
    partly = kept(
        tmp_path,
        [one for one in events if one["cat"] != "cpu_op" or one["ts"] < 1000],
        deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    )
    saved = {each.what[:5]: each.ms for each in rank_advice(partly, sum_by_cause(explain_gaps(partly), 2))}
    assert saved["1 mat"] == pytest.approx(
        0.09 - 2 / 989.5, rel=1e-4
    )  # at the rate of those whose FLOPs are known
    nameless = kept(tmp_path, events)
    assert {
        each.what[:5]: each.ms for each in rank_advice(nameless, sum_by_cause(explain_gaps(nameless), 2))
    }["1 mat"] == pytest.approx(0.09)


def test_softmax_is_attentions_only_among_its_own_streams_products():
    def count(names, streams):
        return unfused_attention(
            pd.DataFrame(
                {
                    "name": pd.Categorical(names),
                    "kernel_category": kernel_categories(names),
                    "stream": streams,
                }
            )
        ).sum()

    names = [GEMM, ADD, "softmax_warp_forward", GEMM]
    assert count(names, [7, 7, 7, 7]) == 2 and count([GEMM, *names], [8, 7, 7, 7, 7]) == 2
    assert (
        count(names, [8, 7, 7, 8]) == 0
        and count(["philox_kernel", "ncclDevKernel_AllReduce(x)", *names[1:]], 7) == 0
    )
    assert (
        count([GEMM, "ncclDevKernel_AllReduce(x)", *names[1:]], 7) == 0
        and count([GEMM, *[ADD] * 9, *names[2:]], 7) == 0
    )
    assert count([GEMM, *[ADD] * 7, *names[2:]], 7) == 8


def test_a_quicker_outlier_and_what_lies_after_the_steps_are_told(tmp_path):
    events, at = [], 0
    for step, lasts in enumerate((100, 104, 40, 102, 101)):
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, lasts),
            *launched(GEMM, at + 1, at + 3, lasts - 4, step),
        ]
        at += lasts
    path = written(
        tmp_path / "a.json",
        [*events, *(one for i in range(3) for one in launched(ADD, at + 3 + i, at + 10 + 10 * i, 5, 90 + i))],
    )
    assert (
        "5 steps (ProfilerStep#0 to ProfilerStep#4); 5 operations; left out: 3 after the last step (0.0150 ms)"
        in line(path, "capture")
    )
    assert line(path, "outliers") == "ProfilerStep#2 0.0400 ms (compute -0.061 ms)"


def test_the_gpu_that_is_asked_for_is_told_and_else_the_one_that_works_most(tmp_path):
    path = written(
        tmp_path / "a.json",
        [
            *(one for at in range(9) for one in launched(ADD, at, 10 + 2 * at, 1, at)),
            *(
                one | ({"args": one["args"] | {"device": 1}} if one["cat"] == "kernel" else {})
                for one in launched(GEMM, 20, 30, 500, 77)
            ),
        ],
    )
    assert "details of GPU 1" in line(path, "capture") and "; 1 operation" in line(path, "capture")
    assert "details of GPU 0" in line(path, "capture", device=0) and "; 9 operations" in line(
        path, "capture", device=0
    )


def test_all_of_two_middle_steps_is_told_of_one(tmp_path):
    """Two steps, each of twelve kernels 10 µs apart, of which each is late; on another stream something overlaps them."""
    events = []
    for step in (0, 1):
        at = 1000 * step
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 1000),
            event("user_annotation", "forward", at + 1, 300),
        ]
        events += [
            one
            for i in range(12)
            for one in launched(GEMM, at + 4 + 20 * i, at + 10 + 20 * i, 10, 100 * step + i)
        ]
        beside = launched(ADD, at + 5, at + 12, 8, 100 * step + 50)
        beside[1]["args"]["stream"] = 9
        events += beside
    path = written(tmp_path / "a.json", events)
    assert values(path, "host-bound")["waiting_ms"] == pytest.approx(0.01 + 11 * 0.01 + 0.76)
    assert "13 operations a step" in line(path, "host-bound")
    assert line(path, "phase").startswith("forward 0.128 ms (kernel sums; 0.00800 ms overlap)")
    assert values(path, "step on GPU")["compute_ms"] == pytest.approx(0.12)


def test_a_gpu_that_only_copies_has_a_stream_and_communication_off_it_is_hidden(tmp_path):
    copies = [
        one
        for i in range(6)
        for one in launched("Memcpy HtoD (Pinned -> Device)", 10 * i, 10 * i + 4, 6, i, cat="gpu_memcpy")
    ]
    assert values(written(tmp_path / "a.json", copies), "on GPU")["exposed_copies_ms"] == pytest.approx(0.036)


# What reading needs


def test_reading_imports_nothing_heavy():
    """Not torch, Dask, papermill and what draws: the first line has to come within a second."""
    program = (
        "import atexit, sys; from stepscope.cli import main; sys.argv[1:] = ['profile', sys.argv[1]];"
        "atexit.register(lambda: print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'dask', 'distributed', 'papermill',"
        " 'matplotlib', 'seaborn', 'scipy', 'pandera', 'nbformat', 'ipykernel'}))); main()"
    )
    for path in (SAMPLE, BEFORE):
        done = subprocess.run(
            [sys.executable, "-c", program, path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    done = subprocess.run(
        [sys.executable, "-c", program, Path(__file__)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
