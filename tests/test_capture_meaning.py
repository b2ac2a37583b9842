"""What a capture means: its steps, why its GPU is idle, whose operations these are, and what to do."""

import gzip
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stepscope.captures.advice import rank_advice
from stepscope.captures.capture import load_capture
from stepscope.captures.communication import exposed_communication
from stepscope.captures.idle_time import HOST_CAUSES, explain_gaps, sum_by_cause
from stepscope.captures.lines import rendered
from stepscope.captures.step_breakdown import Device, devices
from stepscope.captures.summary import profile
from stepscope.data_sheets import data_sheet
from stepscope.traces.attribution import TraceError, outermost
from tests.test_capture import ADD, GEMM, event, launched, line, to_do, written

A100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]}
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"


def kernels(
    first_call: float, count: int, correlation: int, name: str = GEMM, apart: float = 30
) -> list[dict]:
    """So many kernels of 20 µs, one after the other, each launched 10 µs before it starts."""
    return [
        one
        for number in range(count)
        for one in launched(
            name, first_call + apart * number, first_call + apart * number + 10, 20, correlation + number
        )
    ]


def steps(
    count: int = 3, name: str = "ProfilerStep#{}", lasts: float = 1000, empty: frozenset = frozenset()
) -> list:
    """Steps, each with 20 kernels in its first 610 µs, except for those that are empty."""
    events = []
    for number in range(count):
        at = lasts * number
        events.append(event("user_annotation", name.format(number), at, lasts - 1))
        if number not in empty:
            events += kernels(at + 5, 20, 100 * number)
    return events


def layered(inner: str, outer: str | None = "forward") -> list[dict]:
    """Four iterations of a forward with six layers, and a loss after it."""
    events = []
    for iteration in range(4):
        at = 1220 * iteration
        if outer is not None:
            events.append(event("user_annotation", outer, at, 980))
        for layer in range(6):
            begin = at + 160 * layer
            events.append(event("user_annotation", inner.format(layer), begin, 150))
            events += kernels(begin + 2, 4, 1000 * iteration + 10 * layer)
        events.append(event("user_annotation", "loss", at + 985, 200))
        events += kernels(at + 987, 3, 1000 * iteration + 900, ADD)
    return events


def warmed_up(measured: bool = True) -> list[dict]:
    """Three warm-up steps of 900 µs, then ten measured forwards of 310 µs."""
    events = []
    for number in range(3):
        events.append(event("user_annotation", f"Warm-up Step {number}", 1000 * number, 990))
        events += kernels(1000 * number + 5, 30, 100 * number)
    for number in range(10 * measured):
        at = 3000 + 310 * number
        events.append(event("user_annotation", "Forward", at, 309))
        events += kernels(at + 5, 8, 1000 + 100 * number)
    return events


def slow_host(kind: str | None = None, name: str = "", shift: float = 0) -> list[dict]:
    """Four steps of 60 ms: 50 ms in which the host launches nothing, then 100 kernels of 95 µs."""
    events = []
    for number in range(4):
        at = shift + 60_000 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", at, 59_990))
        if kind is not None:
            events.append(event(kind, name, at + 5, 49_990))
        for each in range(100):
            call = at + 50_000 + 20 * each
            start = at + 50_010 + 95 * each
            events += launched(GEMM, call, start, 95, 1000 * number + each)
    return events


def waiting_for_an_event() -> list[dict]:
    """A kernel that was launched 6 µs after the GPU became idle, and starts 100 ms later."""
    return [
        *launched(GEMM, 0, 10, 10, 1),
        *launched("waits_for_an_event", 24, 100_000, 10, 2),
        *(one for i in range(20) for one in launched(ADD, 30 + i, 100_010 + 10 * i, 10, 10 + i)),
    ]


def one_known_launch() -> list[dict]:
    """A hundred kernels with gaps, of which the capture has one launch."""
    return [
        *launched(GEMM, 0, 7, 50, 1),
        *(
            event("kernel", ADD, 200 * i, 50, 7, correlation=100 + i, device=0, stream=7)
            for i in range(1, 101)
        ),
    ]


def graph_without_kernels() -> list[dict]:
    events = []
    for number in range(4):
        at = 1000 * number
        events += [
            event("user_annotation", f"ProfilerStep#{number}", at, 999),
            *launched("prepare_inputs", at + 10, at + 20, 10, 100 * number),
            event("cuda_runtime", "cudaGraphLaunch", at + 30, 20, correlation=100 * number + 1),
            event("cuda_runtime", "cudaStreamSynchronize", at + 60, 900, correlation=100 * number + 2),
            *kernels(at + 962, 6, 100 * number + 10, "sample_tokens", apart=5),
        ]
    return events


def late_rank() -> list[dict]:
    """A collective that waits 17 s for another GPU at the start, and four that do not."""
    events = launched(ALL_REDUCE, 0, 10, 17_000_000, 1)
    at = 17_000_100
    for number in range(4):
        at += 10_100
        events += kernels(at - 10_100, 50, 100 * number + 10, apart=200)
        events += launched(ALL_REDUCE, at - 60, at - 50, 14, 100 * number + 90)
    return events


def decode_steps() -> list[dict]:
    """32 steps that replay a graph, whose operations the profiler recorded in two of them."""
    events = []
    for number in range(32):
        at = 55_000 * number
        events += [
            event("user_annotation", f"step[DECODE bs=64] {number}", at, 54_900),
            event("cuda_runtime", "hipGraphLaunch", at + 10, 50, correlation=10 + number),
        ]
        for each in range(40 * (number < 2)):
            start = at + 100 + 160 * each
            events.append(event("kernel", GEMM, start, 150, 7, correlation=10 + number, device=0, stream=7))
    return events


def merged(first: list[dict], second: list[dict], device: int) -> list[dict]:
    """The traces of two ranks in one file: correlation ids and step numbers repeat."""
    events = []
    for rank, own in ((11, first), (22, second)):
        for one in own:
            on_gpu = one["cat"] == "kernel"
            args = one["args"] | ({"device": device if rank == 22 else 0} if on_gpu else {})
            events.append(one | {"args": args} | ({} if on_gpu else {"pid": rank, "tid": rank}))
    return events


# name: events, steps (0: the capture counts as one), median wall and busy time in ms, label of what bounds
# it, and the place that the first piece of advice names
CASES = {
    "baseline": (steps(), 3, 1.0, 0.4, "host-bound", "find out what the host does"),
    "layers": (layered("layer {}"), 0, 4.727, 2.16, "launch-bound", "launch fewer"),
    "attention": (layered("attention", None), 0, 4.727, 2.16, "launch-bound", "launch fewer"),
    "compiled": (
        layered("Torch-Compiled Region: 0/0", None),
        0,
        4.727,
        2.16,
        "launch-bound",
        "launch fewer",
    ),
    "warm-up": (warmed_up(), 10, 0.31, 0.16, "launch-bound", "launch fewer"),
    "only warm-up": (warmed_up(measured=False), 3, 1.0, 0.6, "launch-bound", "run fp32 matmuls"),
    "empty first step": (
        steps(5, empty=frozenset({0})),
        4,
        1.0,
        0.4,
        "host-bound",
        "find out what the host does",
    ),
    "unnamed": (slow_host(), 4, 60.0, 9.5, "host-bound", "find out what the host does while"),
    "loader": (slow_host("user_annotation", "load"), 4, 60.0, 9.5, "host-bound", "move load off"),
    "operator": (slow_host("cpu_op", "aten::stack"), 4, 60.0, 9.5, "host-bound", "call aten::stack less"),
    "epoch": (
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


@pytest.mark.parametrize("name", list(CASES))
def test_capture_has_its_steps_times_bound_and_advice(tmp_path, name):
    events, count, wall, busy, label, what = CASES[name]
    path = written(tmp_path / "a.json", events, **A100)
    found = profile(path)
    capture, step = found[0].values, found[1].values
    assert capture["steps"] == count
    assert step["wall_ms"] == pytest.approx(wall, rel=0.01)
    parts = ("compute_ms", "exposed_copies_ms", "exposed_communication_ms")
    assert sum(step[part] for part in parts) == pytest.approx(busy, rel=0.01)
    assert step["wall_ms"] - step["idle_ms"] == pytest.approx(busy, rel=0.01)
    assert label in [one.label for one in found]
    assert next(one.text for one in found if one.label == "to do").removeprefix("1. ").startswith(what)


def device(tmp_path: Path, events: list[dict], **header: object) -> Device:
    return next(devices(load_capture(written(tmp_path / "a.json", events, **(header or A100)))))


# What may be a step


def test_layer_is_a_step_when_it_is_asked_for(tmp_path):
    path = written(tmp_path / "a.json", layered("layer {}"))
    assert len(load_capture(path, step="layer").steps) == 24
    assert load_capture(path, step="forward").steps == ["forward"] * 4


def test_range_with_a_word_for_a_step_in_a_phase_is_no_step(tmp_path):
    assert not load_capture(written(tmp_path / "a.json", layered("micro batch {}"))).steps
    assert load_capture(written(tmp_path / "b.json", layered("micro batch {}", None))).steps


def test_warm_up_is_left_out_and_counted(tmp_path):
    path = written(tmp_path / "a.json", warmed_up())
    found = load_capture(path)
    assert len(found.excluded) == 90 and found.excluded["warm_up"].all()
    assert "left out: 90 launched in a warm-up (1.80 ms)" in line(path, "capture")
    inside = [event("user_annotation", "warmup", 0, 2000), *steps(5, "iteration {}")]
    assert load_capture(written(tmp_path / "b.json", inside)).steps == [f"iteration {i}" for i in (2, 3, 4)]


def test_empty_steps_are_counted_and_outliers_have_their_own_names(tmp_path):
    events = steps(6, empty=frozenset({0, 3}))
    events += kernels(4800, 5, 900)  # of the last but one: ends late
    events.append(event("user_annotation", "ProfilerStep#6", 8000, 100))
    path = written(tmp_path / "a.json", [*events, *kernels(8001, 2, 950)])
    assert "7 steps (ProfilerStep#0 to ProfilerStep#6), 2 of them without GPU work" in line(path, "capture")
    one = next(devices(load_capture(path)))
    assert one.step_names == [f"ProfilerStep#{i}" for i in (1, 2, 4, 5, 6)]
    walls = one.breakdowns["wall"].tolist()
    assert walls[1] == pytest.approx(0.999), "an empty step follows, and its time is not this one's"
    assert [one.step_names[place] for place in one.outliers] == ["ProfilerStep#5", "ProfilerStep#6"]


def test_neither_of_two_steps_is_an_outlier(tmp_path):
    events = [*steps(2), *launched(GEMM, 1990, 2000, 3000, 500)]
    one = device(tmp_path, events)
    assert one.breakdowns["wall"].max() > 2 * one.breakdowns["wall"].min() and not one.outliers


def test_steps_are_not_known_without_launches(tmp_path):
    events = [one for one in steps() if one["cat"] != "cuda_runtime"]
    path = written(tmp_path / "a.json", events)
    text = line(path, "capture")
    assert "3 steps" in text and "no operation's launch is in one of them: the whole capture" in text
    assert "unknown" in line(path, "bound") and line(path, "step on GPU") == ""


def test_steps_come_from_the_gpus_ranges_where_the_host_has_none(tmp_path):
    events = [
        one | {"cat": "gpu_user_annotation", "pid": 0, "tid": 7} if one["cat"] == "user_annotation" else one
        for one in steps(name="step {}")
    ]
    for launches in (True, False):
        own = [one for one in events if launches or one["cat"] != "cuda_runtime"]
        found = load_capture(written(tmp_path / "a.json", own))
        assert found.steps == ["step 0", "step 1", "step 2"]
        assert found.operations["step"].tolist() == [i // 20 for i in range(60)]


def test_graph_replays_are_steps_where_nothing_has_ranges(tmp_path):
    def replays(size: int) -> list[dict]:
        events = []
        for number in range(4):
            at = 10_000 * number
            events.append(event("cuda_runtime", "cudaGraphLaunch", at, 20, correlation=number + 1))
            events += [
                event("kernel", GEMM, at + 40 + 30 * i, 25, 7, correlation=number + 1, device=0, stream=7)
                for i in range(size)
            ]
            events += launched(ADD, at + 5000, at + 5010, 5, 100 + number)
        return events

    found = load_capture(written(tmp_path / "a.json", replays(60)))
    assert found.steps == ["CUDA graph replay"] * 4
    assert found.operations.groupby("step").size().tolist() == [61] * 4
    assert not load_capture(written(tmp_path / "b.json", replays(15))).steps, "a layer's graph"


def test_outermost_ranges_are_those_that_plain_comparison_finds():
    random = np.random.default_rng(1)
    start = random.integers(0, 300, 200)
    rows = pd.DataFrame(
        {
            "start_ns": start,
            "end_ns": start + random.integers(0, 30, 200),
            "key": random.choice([1 << 24, 2 << 24, (2 << 24) + 5], 200),
        }
    )
    order = rows.assign(process=rows["key"].to_numpy() >> 24).sort_values(
        ["process", "start_ns", "end_ns"], ascending=[True, True, False], kind="stable"
    )
    kept, reached = [], {}
    for index, row in order.iterrows():
        if row["start_ns"] >= reached.get(row["process"], -1):
            kept.append(index)
        reached[row["process"]] = max(reached.get(row["process"], -1), row["end_ns"], row["start_ns"] + 1)
    assert outermost(rows).index.tolist() == kept


def test_span_of_a_capture_has_the_steps_that_lie_in_it(tmp_path):
    path = written(tmp_path / "a.json", steps(6))
    capture = load_capture(path)  # the first operation begins 15 µs after the first step
    found = capture.between(0.9, 3.9)
    assert found.steps == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert len(found.operations) == 60 and len(found.excluded) == 20
    assert capture.between(1.3, None).steps == [f"ProfilerStep#{i}" for i in (2, 3, 4, 5)]
    only = profile(path, from_ms=2.9, to_ms=3.9)
    assert only[0].values["steps"] == 1 and only[1].values["compute_ms"] == pytest.approx(0.4)
    with pytest.raises(
        TraceError, match=r"no operation begins between .* expected a span within the 5\.\d+ ms"
    ):
        capture.between(90, 95)


# A launch must be seen


def test_idle_time_is_the_hosts_until_the_launch_returned(tmp_path):
    found = explain_gaps(device(tmp_path, waiting_for_an_event())).groupby("cause")["ms"].sum()
    assert found.to_dict() == pytest.approx({"launch": 0.006, "device": 99.974})


def test_gap_that_ends_soon_after_its_launch_is_the_hosts(tmp_path):
    one = device(tmp_path, [*launched(GEMM, 0, 5, 10, 1), *launched(GEMM, 100, 109, 10, 2)])
    assert explain_gaps(one)[["cause", "ms"]].to_numpy().tolist() == [["launch", 0.094]]


def test_idle_time_before_an_unknown_launch_is_unknown(tmp_path):
    events = [
        *launched(GEMM, 0, 5, 10, 1),
        event("kernel", ADD, 400, 10, 7, correlation=99, device=0, stream=7),
        *launched(GEMM, 420, 426, 10, 2),
    ]
    found = explain_gaps(device(tmp_path, events)).groupby("cause")["ms"].sum()
    assert found.to_dict() == pytest.approx({"unknown": 0.385, "launch": 0.016})


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[4] != "bound"])
def test_causes_together_last_as_long_as_the_idle_time(tmp_path, name):
    one = device(tmp_path, CASES[name][0])
    found = explain_gaps(one)
    assert one.ms_per_step(found["ms"].sum() * 1e6) == pytest.approx(one.median["idle"])
    summed = sum_by_cause(found, len(one.median_indices))
    assert summed["ms"].sum() == pytest.approx(one.median["idle"])
    hosts = summed.loc[summed["cause"].isin(HOST_CAUSES), "ms"].sum()
    assert all(each.ms <= max(hosts, one.median["wall"]) for each in rank_advice(one, summed))


def test_host_that_launches_for_another_gpu_is_not_silent(tmp_path):
    """Between two operations of GPU 0, the thread launches for GPU 1."""
    events = [*launched(GEMM, 0, 5, 10, 1), *launched(GEMM, 1000, 1005, 10, 2)]
    events += [*launched(ADD, 1010, 1016, 3000, 3)]
    between = kernels(50, 15, 100, apart=60)
    for one in between:
        one["args"] |= {"device": 1} if one["cat"] == "kernel" else {}
    alone, beside = (device(tmp_path, [*events, *more]) for more in ([], between))
    assert (
        explain_gaps(alone)["cause"].iloc[0] == "unnamed"
        and explain_gaps(beside)["cause"].iloc[0] == "launch"
    )


# Nanoseconds stay integers


# Whose operations these are


def test_idle_time_of_a_rank_is_explained_by_its_own_host(tmp_path):
    first, second = slow_host("user_annotation", "load"), slow_host("user_annotation", "save")
    path = written(tmp_path / "a.json", merged(first, second, 1), **A100)
    places = [explain_gaps(one).nlargest(1, "ms")["where"].iloc[0] for one in devices(load_capture(path))]
    assert places == ["load", "save"]


# Each piece of advice covers one place


def test_advice_covers_one_place_and_names_it(tmp_path):
    events = []
    for number in range(3):
        at = 10_000 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", at, 9_990))
        for place, (name, lasts) in enumerate((("load", 1200), ("log", 1100), ("save", 1000))):
            begin = at + 3_000 * place
            events.append(event("user_annotation", name, begin + 5, lasts))
            events += kernels(begin + lasts + 10, 80, 1000 * number + 100 * place, "my_kernel", apart=21)
    found = [each for each in profile(written(tmp_path / "a.json", events)) if "at_most_ms" in each.values]
    saved = {each.values["what"].split()[1]: each.values["at_most_ms"] for each in found}
    assert [saved.get(name) for name in ("load", "log")] == pytest.approx([1.2, 1.1], rel=0.05)


# Communication


def message(elements: int, dtype: str = "BFloat16", gpus: int = 8) -> dict:
    return {"In msg nelems": elements, "Out msg nelems": elements, "dtype": dtype, "Group size": gpus}


def test_exposed_communication_is_transfer_and_waiting(tmp_path):
    """On an A100 at 300 GB/s, an all-reduce of 48 MB among 8 GPUs takes at least 280 µs."""
    events = [
        *kernels(0, 10, 1),
        *launched(ALL_REDUCE, 300, 400, 1000, 50, **message(24_000_000)),
        *kernels(350, 5, 60, apart=300),
    ]
    for one in events[-10:]:
        if one["cat"] == "kernel":  # beside the collective, on another stream
            one["args"]["stream"] = 9
    one = device(tmp_path, events)
    parts = exposed_communication(one)
    exposed = one.median["exposed communication"]
    assert exposed == pytest.approx(1.0 - 3 * 0.02)
    assert parts.least_ms == pytest.approx(2 * 7 / 8 * 48e6 / 300e9 * 1e3)
    assert parts.transfer_ms == pytest.approx(parts.least_ms)
    assert parts.waiting_ms == pytest.approx(exposed - parts.least_ms)
    path = tmp_path / "a.json"
    assert "take at least 0.280 ms at 300 GB/s (NVLink)" in line(path, "communication")
    assert any(text.startswith("balance the GPUs: ncclDevKernel_AllReduce") for text in to_do(path))


@pytest.mark.parametrize(
    ("kernel", "factor"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2 * 7 / 8),
        ("ncclDevKernel_AllGather_RING_LL", 7 / 8),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 7 / 8),
        ("ncclDevKernel_SendRecv", 1),
        ("ncclDevKernel_Broadcast_RING_LL", 1),
    ],
)
def test_least_time_follows_from_bytes_and_kind(tmp_path, kernel, factor):
    events = [*kernels(0, 5, 1), *launched(kernel, 200, 300, 10_000, 50, **message(1_000_000, "Float"))]
    parts = exposed_communication(device(tmp_path, events))
    assert parts.least_ms == pytest.approx(factor * 4e6 / 300e9 * 1e3)


def test_communication_of_unknown_size_is_transfer_unless_it_is_far_longer_than_others(tmp_path):
    events = []
    for number in range(6):
        at = 3000 * number
        lasts = 2000 if number == 3 else 20
        events += [
            *kernels(at, 5, 100 * number),
            *launched(ALL_REDUCE, at + 200, at + 300, lasts, 90 + 100 * number),
        ]
    parts = exposed_communication(device(tmp_path, events))
    assert parts.waiting_ms == pytest.approx(1.98) and parts.transfer_ms == pytest.approx(6 * 0.02)
    assert np.isnan(parts.least_ms)
    text = rendered(profile(tmp_path / "a.json"), "json")
    assert "waiting_ms" in text and "NaN" not in text


@pytest.mark.parametrize(
    ("gpu", "gb_s"), [("NVIDIA H100 80GB HBM3", 450), ("NVIDIA A100-SXM4-80GB", 300), ("Tesla T4", 16)]
)
def test_data_sheets_have_the_links_bandwidth(gpu, gb_s):
    sheet = data_sheet(gpu)
    assert sheet["link_gb_s"] == gb_s and sheet["link"]


# Kernels


def test_leading_kernel_of_each_phase_is_named_with_its_count(tmp_path):
    events = [
        event("user_annotation", "forward", 0, 300),
        *kernels(2, 6, 1, "gemm_tn"),
        *kernels(190, 2, 20, ADD),
        event("user_annotation", "backward", 300, 600),
        *kernels(302, 9, 40, "gemm_tn"),
        *kernels(600, 8, 60, "gemm_nt"),
        event("user_annotation", "optimizer", 900, 200),
        *kernels(902, 4, 80, ADD),
    ]
    path = written(tmp_path / "a.json", events)
    found = [one for one in profile(path) if "part" in one.values]
    told = {
        one.values["part"]: (one.values["name"], one.values["count"], one.values["also"]) for one in found
    }
    assert told == {
        "forward": ("gemm_tn", 6, ["backward"]),
        "backward": ("gemm_tn", 9, ["forward"]),
        "optimizer": (ADD, 4, []),
    }
    assert found[0].text == "forward: 6 x gemm_tn: 0.120 ms (75% of its kernels), leads in backward too"


def test_kernels_show_the_median_and_the_extremes_of_their_times(tmp_path):
    lasts = [10, 10, 12, 40]
    events = [
        one for i, each in enumerate(lasts) for one in launched(GEMM, 100 * i, 100 * i + 5, each, i + 1)
    ]
    path = written(tmp_path / "a.json", [*events, *launched(ADD, 500, 505, 3, 9)])
    top = next(one for one in profile(path) if one.label == "kernels")
    assert top.text == f"4 x {GEMM}: 0.0720 ms (96%), each 0.0110 ms (0.0100 to 0.0400)"
    assert [top.values[f"{name}_ms"] for name in ("median", "shortest", "longest")] == [0.011, 0.01, 0.04]


# Graphs that nsys traced as a whole


def test_nccl_payloads_separate_transfer_from_waiting():
    """Two H200s: rank 1 computes for 10 ms longer in each step, so rank 0 waits in its all-reduce of 26,214,400 B."""
    capture = load_capture(Path(__file__).parent / "data" / "nccl_payloads.sqlite.gz")
    operations = capture.operations
    sized = operations[operations["message_bytes"] >= 0]
    kinds = sized["name"].astype(str).str.extract("_(AllReduce|AllGather|ReduceScatter)_")[0]
    sizes = sized.groupby(kinds.to_numpy())["message_bytes"].unique()
    assert {kind: found.tolist() for kind, found in sizes.items()} == {
        "AllReduce": [26_214_400],
        "AllGather": [52_428_800],  # NCCL counts what one rank sends
        "ReduceScatter": [52_428_800],
    }
    assert set(sized["group_size"]) == {2}
    exposed = {}
    for one in devices(capture):
        exposed[one.number] = exposed_communication(one)
    # 26,214,400 B at 450 GB/s, once in and out of each of two GPUs, for each of three collectives
    assert exposed[0].least_ms == pytest.approx(3 * 26_214_400 / 450e9 * 1e3, rel=0.01)
    assert exposed[0].waiting_ms > 9 > 1 > exposed[1].waiting_ms


def _changed_payloads(path, statement, *values):
    """Write the sample of two GPUs with one change."""
    sample = Path(__file__).parent / "data" / "nccl_payloads.sqlite.gz"
    path.write_bytes(gzip.decompress(sample.read_bytes()))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)
    return load_capture(path)


def test_nccl_payloads_say_nothing_when_one_gpu_is_captured(tmp_path):
    """How many ranks share the message is unknown there, so its least time is, too."""
    only = "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = 1"
    capture = _changed_payloads(tmp_path / "one.sqlite", only)
    (one,) = devices(capture)
    exposed = exposed_communication(one)
    assert math.isnan(exposed.least_ms)
    assert exposed.waiting_ms == 0


@pytest.mark.parametrize("payload", ["[" * 200_000, "not JSON", "[]", '{"Message size [bytes]": true}'])
def test_nccl_payloads_without_a_size_are_unknown(tmp_path, payload):
    change = "UPDATE NVTX_EVENTS SET jsonText = ? WHERE jsonText IS NOT NULL"
    capture = _changed_payloads(tmp_path / "changed.sqlite", change, payload)
    assert (capture.operations["message_bytes"] == -1).all()
