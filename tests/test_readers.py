"""Test that captures from various tools and versions load identically or are rejected with a reason."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from bench.traces import MAIN, PROCESS_KEY, write_export
from capture_events import event, profiler_step, write_trace
from stepscope.captures.capture import Capture, load_capture
from stepscope.captures.step_breakdown import devices
from stepscope.captures.summary import profile
from stepscope.traces.attribution import TraceError
from stepscope.traces.torch_trace import read_trace

STEPS, KERNELS = 3, 20  # each step lasts 1 ms, and each kernel lasts 30 µs


def trace_events(
    pid: object = 1, gpu: object = 0, device: int = 0, offset: float = 0.0, tid: object = 1
) -> list[dict]:
    """Return the events of three 1 ms steps with 20 consecutive 30 µs kernels each.

    Every call to this function uses the same correlation ids.
    """
    events: list[dict] = []
    for step in range(STEPS):
        begin = 1000.0 * step + offset
        events.append(profiler_step(step, begin, 1000.0) | {"pid": pid, "tid": tid})
        for kernel in range(KERNELS):
            ids = {"correlation": 100 * (step + 1) + kernel}
            call = event("cuda_runtime", "cudaLaunchKernel", begin + 20 + 20 * kernel, 5.0, tid, **ids)
            ids |= {"device": device, "stream": 7}
            work = event("kernel", f"gemm_{kernel % 3}", begin + 30 + 30 * kernel, 30.0, 7, **ids)
            events += [call | {"pid": pid}, work | {"pid": gpu}]
    return events


def renamed(events: list[dict], names: dict[str, str]) -> list[dict]:
    """Rename the events' categories, and write thread ids as strings."""
    return [one | {"cat": names.get(one["cat"], one["cat"]), "tid": str(one["tid"])} for one in events]


def steps_of(capture: Capture) -> list[tuple[int, float, float]]:
    """Return each GPU's step count and its median step's wall and compute times in ms, for all processes."""
    gpus = devices(capture)
    return [(len(gpu.breakdowns), *gpu.median[["wall", "compute"]].round(3)) for gpu in gpus]


STEP = (3, 1.0, 0.6)
OLD = {"user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
TWO_PROCESSES = {
    "one GPU's name": [trace_events(11), trace_events(22, offset=130.0, tid=2)],
    "two GPUs": [trace_events(11), trace_events(22, gpu=1, device=1, offset=130.0)],
    "labels, sorted by time": [
        trace_events("[TP00] 11", "[TP00] 0"),
        trace_events("[TP01] 11", "[TP01] 0", offset=130.0),
    ],
}


@pytest.mark.parametrize("case", TWO_PROCESSES)
def test_merged_traces_keep_processes_separate(tmp_path, case):
    events = [one for events in TWO_PROCESSES[case] for one in events]
    if "sorted" in case:
        events.sort(key=lambda one: one["ts"])
    path = write_trace(tmp_path / "merged.json", events)
    capture = load_capture(path)
    assert steps_of(capture) == [STEP, STEP]
    assert capture.operations.groupby("process").size().tolist() == [STEPS * KERNELS] * 2
    names = {one["pid"] for one in events if one["cat"] == "cuda_runtime"}
    if "GPUs" not in case:
        assert [line.label for line in profile(path)[1:3]] == [
            f"GPU 0 (process {name})" for name in sorted(names)
        ]
    assert {*read_trace(path).processes.values()} == {str(name) for name in names}


def test_merged_traces_without_order_or_labels_are_rejected(tmp_path):
    events = [one for events in TWO_PROCESSES["one GPU's name"] for one in events]
    events.sort(key=lambda one: one["ts"])
    with pytest.raises(
        TraceError, match="120 GPU operations that any of the processes 11, 22 may have launched"
    ):
        load_capture(write_trace(tmp_path / "merged.json", events))


def unfinished(category: str) -> dict:
    return event(category, "unfinished", 500.0, -1.0) | {"pid": 1}


def as_text(events: list[dict]) -> list[dict]:
    return [one | {"ts": f"{1747123456000000 + int(one['ts'])}.001"} for one in events]


READ_ALIKE: dict[str, Callable[[], list[dict]]] = {
    "torch 1.9": lambda: renamed(trace_events(), OLD),
    "driver calls": lambda: renamed(trace_events(), {"cuda_runtime": "cuda_driver"}),
    "xpu": lambda: renamed(trace_events(), {"cuda_runtime": "xpu_runtime"}),
    "unfinished range": lambda: [*trace_events(), unfinished("user_annotation")],
    "unfinished frame": lambda: [*trace_events(), unfinished("python_function")],
    "times as text": lambda: as_text(trace_events()),
    "control character": lambda: [*trace_events(), unfinished("cpu_op") | {"name": "a\x1bb", "dur": 9}],
}


@pytest.mark.parametrize("case", READ_ALIKE)
def test_trace_variants_load_identically(tmp_path, case):
    path = write_trace(tmp_path / "trace.json", READ_ALIKE[case]())
    path.write_text(path.read_text().replace("\\u001b", "\x1b"))
    capture = load_capture(path)
    assert steps_of(capture) == [STEP]
    assert capture.steps == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    assert capture.operations["launch_start_ns"].notna().all()


def test_unfinished_host_events_are_counted(tmp_path):
    path = write_trace(tmp_path / "trace.json", READ_ALIKE["unfinished range"]())
    assert read_trace(path).unfinished == 1
    assert "the end of 1 host event" in profile(path)[-1].text


def test_times_given_as_strings_are_exact(tmp_path):
    capture = load_capture(write_trace(tmp_path / "trace.json", as_text(trace_events())))
    assert capture.operations["start_ns"].iloc[0] == 1747123456000030_001


def test_events_of_old_versions_are_classified_by_name(tmp_path):
    names = ["forward", "enumerate(DataLoader)#_Iter.__next__", "aten::mm", "MmBackward", "detach"]
    events = [unfinished("Operator") | {"name": name, "dur": 9} for name in names]
    kept = read_trace(write_trace(tmp_path / "trace.json", events)).events
    assert kept["cat"].astype(str).tolist() == ["user_annotation"] * 2 + ["cpu_op"] * 3


BROKEN = {
    "cut in a name": (lambda text: text[:-40], "the file is truncated: it ends within line 1;"),
    "cut after a comma": (lambda text: text[: text.rindex("{")], "the file is truncated"),
    "backslashes": (
        lambda text: text.replace("gemm_1", r"torch\cuda", 1),
        r"not valid JSON in line 1, column \d+, near .*torch.*: a backslash is not escaped",
    ),
    "quotes": (
        lambda text: text.replace("gemm_1", '{"device": "cpu"}', 1),
        "not valid JSON in line 1, .*a quote in a name is not escaped",
    ),
    "two traces": (
        lambda text: text[: text.rindex(', "stream"')] + text,
        "not valid JSON in line 1, .*near .*: a second trace begins",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_json_error_states_position_and_reason(tmp_path, case):
    damage, message = BROKEN[case]
    path = write_trace(tmp_path / "trace.json", trace_events())
    path.write_text(damage(path.read_text()))
    with pytest.raises(TraceError, match=message) as error:
        load_capture(path)
    assert "\n" not in str(error.value) and ("truncated" in str(error.value)) == case.startswith("cut")


def device_event(category: str | None, name: str = "op") -> dict:
    return event("", name, 1.0, 9.0) | {"cat": category}


XLA = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}}
WITHOUT_KERNELS = {
    "mtia": ([device_event("mtia_ccp_events")] * 3, "has 3 events of the category 'mtia_ccp_events'"),
    "jax": ([XLA, device_event(None)], "is a trace from XLA .JAX or TensorFlow."),
    "mps": ([device_event("cpu_op", "aten::_mps_convolution")], "no kernels on Apple's GPUs"),
}


@pytest.mark.parametrize("case", WITHOUT_KERNELS)
def test_unsupported_accelerators_are_rejected_without_cuda_advice(tmp_path, case):
    events, message = WITHOUT_KERNELS[case]
    with pytest.raises(TraceError, match=message) as error:
        load_capture(write_trace(tmp_path / "trace.json", events))
    assert "ProfilerActivity" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "device", "expected"),
    [
        (["AMD Instinct MI300X"], 2, "AMD Instinct MI300X"),
        (["AMD Instinct MI300X"] * 2, 3, "AMD Instinct MI300X"),
        (["AMD Instinct MI300X", "AMD Radeon Pro W7900"], 1, ""),
        (["NVIDIA H100 80GB HBM3", "NVIDIA A10"], 1, "NVIDIA A10"),
    ],
)
def test_gpu_name_is_used_only_when_unambiguous(tmp_path, names, device, expected):
    listed = [{"id": number, "name": name} for number, name in enumerate(names)]
    path = write_trace(tmp_path / "trace.json", trace_events(device=device), deviceProperties=listed)
    assert load_capture(path).gpus.get(device, "") == expected


def export(path: Path, *changes: str) -> Path:
    """Write an nsys export of three steps with a 300 µs copy and ten 50 µs kernels each; apply SQL ``changes``."""
    tid, pid = MAIN, PROCESS_KEY
    rows: dict[str, list[tuple]] = {"NVTX_EVENTS": [], "CUPTI_ACTIVITY_KIND_RUNTIME": []}
    kernels, copies = [], []
    for step in range(STEPS):
        begin = 1_000_000 * step
        rows["NVTX_EVENTS"].append((begin, begin + 990_000, 59, "train_step", tid, None, 0))
        for place in range(11):
            correlation, launch = 100 * step + place, begin + 10_000 * (place + 1)
            rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append((launch, launch + 5_000, tid, correlation))
            if place == 0:
                copies.append((launch + 10_000, launch + 310_000, 0, 7, correlation, pid, 1))
            else:
                start = begin + 330_000 + 50_000 * (place - 1)
                kernels.append((start, start + 50_000, 0, 7, correlation, pid, 1))
    names = [(1, "ampere_sgemm_128x64_tn")]
    write_export(path, StringIds=names, CUPTI_ACTIVITY_KIND_KERNEL=kernels, **rows)
    with closing(sqlite3.connect(path)) as connection:
        columns = "start, end, deviceId, streamId, correlationId, globalPid, copyKind"
        connection.execute(
            f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({columns.replace(',', ' INTEGER,')} INTEGER)"
        )
        connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?)", copies)
        for change in changes:
            connection.execute(change)
        connection.commit()
    return path


EXPORTS = {
    "without names of copies": (),
    "start/end ranges": ("UPDATE NVTX_EVENTS SET eventType = 60",),
    "crossing ranges": (f"INSERT INTO NVTX_EVENTS VALUES (500000, 1500000, 60, 'crosses', {MAIN}, NULL, 0)",),
    "no registered names": ("ALTER TABLE NVTX_EVENTS DROP COLUMN textId",),
    "NVTX_EVENTS_V2": ("ALTER TABLE NVTX_EVENTS RENAME TO NVTX_EVENTS_V2",),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_export_variants_load_identically(tmp_path, case):
    capture = load_capture(export(tmp_path / "a.sqlite", *EXPORTS[case]), step="train_step")
    (one,) = devices(capture)
    accounts = one.breakdowns.round(3)
    assert accounts["compute"].tolist() == [0.5] * 3
    assert accounts["exposed copies"].tolist() == [0.3] * 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [(2, "Device-to-Host"), (11, "Unified Host-to-Device"), (8, "Device-to-Device"), (99, "99")],
)
def test_copies_use_cupti_names_without_a_name_table(tmp_path, kind, name):
    change = f"UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = {kind}"
    names = load_capture(export(tmp_path / "a.sqlite", change)).operations["name"].astype(str)
    assert (names == f"[CUDA memcpy {name}]").sum() == STEPS


def test_graph_traced_as_a_whole_counts_as_one_operation(tmp_path):
    graphs = (
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
        " (start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER, graphId INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (5000000, 5400000, 0, {PROCESS_KEY}, 6)",
    )
    operations = load_capture(export(tmp_path / "a.sqlite", *graphs)).operations
    last = operations.iloc[-1]
    assert (last["name"], last["kind"], last["duration_ns"]) == ("[CUDA graph 6]", "kernel", 400_000)
    without = ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    assert len(load_capture(export(tmp_path / "b.sqlite", *graphs, *without)).operations) == 1
    assert "operations within CUDA graphs" in profile(tmp_path / "b.sqlite")[-1].text


def test_unknown_export_version_error_omits_sql(tmp_path):
    path = export(tmp_path / "a.sqlite", "ALTER TABLE NVTX_EVENTS DROP COLUMN domainId")
    with pytest.raises(TraceError, match="no such column: domainId; expected the SQLite export") as error:
        load_capture(path)
    assert "SELECT" not in str(error.value)


REPORT = "Time (%),Total Time (ns),Instances,Avg (ns),Name\n100.0,7000000,10,700000.0,gemm\n"


def trace_report(strm: str) -> bytes:
    """Return nsys's cuda_gpu_trace report for one kernel on a stream."""
    text = f"Start (ns),Duration (ns),CorrId,Device,Strm,Name\n10,5,1,GPU (0),{strm},gemm\n"
    return text.encode()


REFUSED = {
    "tabs.csv": (REPORT.replace(",", "\t").encode(), "separated by tabs"),
    "stats.txt": (b" ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):\n\n", "--format csv"),
    "mpi.csv": (
        REPORT.replace("Name", "Source,Name").replace("gemm", "a,b").encode(),
        "report mpi_event_sum",
    ),
    "no_stream.csv": (trace_report(strm=""), "column strm contains a value that isn't an integer"),
    "text_stream.csv": (trace_report(strm="{13"), "column strm contains a value that isn't an integer"),
    "more_values.csv": (trace_report(strm="13,14,15"), "Length of header or names does not match"),
    "old.qdrep": (b"\x00qdrep", "nsys export --type sqlite old.qdrep"),
    "raw.qdstrm": (b"\x00qdstrm", "QdstrmImporter -i raw.qdstrm"),
    "log.txt": (b"epoch 1\n" * 9, "not a capture, because it begins with b'epoch 1"),
    "long_line.txt": (b"a," * 10**6, "not a capture, because it begins with b'a,a,"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_files_are_rejected_with_advice(tmp_path, name):
    content, message = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as error:
        load_capture(path)
    assert "\n" not in str(error.value) and "does not contain" not in str(error.value)
