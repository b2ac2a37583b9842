"""Test the comparison of ranks in a distributed step: transfer, waiting, and which rank the others wait for."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from capture_events import ALL_REDUCE, GEMM, launch, profiler_step, summary_line, write_trace
from stepscope import PROJECT
from stepscope.captures.capture import load_capture
from stepscope.captures.lines import Line, rendered
from stepscope.captures.ranks import compare_ranks, profile_ranks
from stepscope.captures.step_breakdown import devices
from stepscope.captures.summary import profile
from stepscope.traces.attribution import TraceError

STEP, COMPUTE, TRANSFER = 100_000, 10_000, 5_000  # µs
PUBLIC = (PROJECT or Path()).parent / "shared" / "traces" / "mfu_2gpu_before.sqlite.gz"


def rank_trace(
    folder: Path,
    rank: int,
    delays: tuple[float, ...],
    shift: float = 0,
    collectives: int = 2,
    first_step: int = 0,
    **group: object,
) -> Path:
    """Write a trace of a rank with three steps, in which computation precedes each all-reduce.

    Args:
        delays: the delay of each rank's computation in µs; transfers begin once the last rank has arrived.
        shift: the offset in µs that is added to all times.
        group: the collective kernels' arguments, such as their process group.
    """
    events = []
    for step in range(first_step, first_step + 3):
        begin = step * STEP + shift
        events.append(profiler_step(step, begin, STEP - 1_000))
        for number in range(collectives):
            start = begin + 100 + number * (COMPUTE + TRANSFER + max(delays))
            arrives = start + COMPUTE + delays[rank]
            end = start + COMPUTE + max(delays) + TRANSFER
            events += launch(GEMM, start - 50, start, COMPUTE)
            events += launch(ALL_REDUCE, start - 20, arrives, end - arrives, stream=20, **group)
    info = {"rank": rank, "world_size": len(delays)}
    return write_trace(folder / f"rank{rank}.json", events, distributedInfo=info)


def lines_of(paths: list[Path]) -> dict[str, Line]:
    """Return the lines of these ranks' comparison, keyed by label."""
    return {line.label: line for line in profile_ranks(paths)}


def waits_ms(lines: dict[str, Line]) -> list[float]:
    return [wait["ms"] for wait in lines["waiting"].values["waits"]]


def test_late_rank_is_identified_by_the_waiting_time_of_the_other_ranks(tmp_path):
    delays = (0, 20_000, 4_000)
    paths = [rank_trace(tmp_path, rank, delays) for rank in (2, 0, 1)]
    lines = lines_of(paths)
    waits = {(wait["rank"], wait["for"]): wait["ms"] for wait in lines["waiting"].values["waits"]}
    assert waits == pytest.approx({(0, 1): 40, (2, 1): 32})
    for rank, waiting_ms in enumerate((40, 0, 32)):
        values = lines[f"rank {rank}"].values
        assert values["waiting_ms"] == pytest.approx(waiting_ms)
        assert values["transfer_ms"] == pytest.approx(10) and values["compute_ms"] == pytest.approx(20)
        parts = ("compute", "transfer", "waiting", "copies", "idle")
        assert sum(values[f"{part}_ms"] for part in parts) == pytest.approx(values["wall_ms"])
        assert values["last"] == (2 if rank == 1 else 0)
    assert "rank 0 waits 40.0 ms per step for rank 1" in lines["waiting"].text and "clocks" not in lines


@pytest.mark.parametrize(
    ("shift_ms", "shown", "is_doubtful"), [(20, "20.0", False), (3_600_000, "3,600,000", True)]
)
def test_shifted_timestamps_are_detected_and_do_not_count_as_waiting(tmp_path, shift_ms, shown, is_doubtful):
    paths = [rank_trace(tmp_path, 0, (0, 0)), rank_trace(tmp_path, 1, (0, 0), shift=1000 * shift_ms)]
    lines = lines_of(paths)
    assert lines["clocks"].values["offsets_ms"] == pytest.approx([0, shift_ms])
    assert f"rank 1's timestamps are {shown} ms ahead of rank 0's" in lines["clocks"].text
    assert ("different runs" in lines["clocks"].text) == is_doubtful
    assert waits_ms(lines) == []
    assert [lines[f"rank {rank}"].values["last"] for rank in range(2)] == [0, 0]


def test_shifted_timestamps_are_attributed_to_the_shifted_rank(tmp_path):
    for shifted in range(3):
        shifts = [20_000 * (rank == shifted) for rank in range(3)]
        paths = [rank_trace(tmp_path, rank, (0, 0, 0), shift=shift) for rank, shift in enumerate(shifts)]
        clocks = lines_of(paths)["clocks"]
        assert clocks.values["offsets_ms"] == pytest.approx([shift / 1000 for shift in shifts])
        assert clocks.text.count("timestamps") == 1
        assert f"rank {shifted}'s timestamps are 20.0 ms ahead of" in clocks.text


def test_clocks_of_separate_process_groups_are_not_compared(tmp_path):
    paths = []
    for rank in range(4):
        group = {"In msg nelems": 4, "Process Group Name": str(rank // 2)}
        paths.append(rank_trace(tmp_path, rank, (0, 0, 0, 0), shift=20_000 * (rank == 1), **group))
    text = rendered(profile_ranks(paths), "json")
    assert "NaN" not in text
    (clocks,) = [line for line in json.loads(text)["lines"] if line["label"] == "clocks"]
    assert clocks["ranks"] == [0, 1] and clocks["offsets_ms"] == pytest.approx([0, 20])


def test_collective_times_include_the_base_time_of_the_trace(tmp_path):
    path = rank_trace(tmp_path, 0, (0, 0))
    trace = json.loads(path.read_text()) | {"baseTimeNanoseconds": 10**18}
    path.write_text(json.dumps(trace))
    gpus = [next(devices(load_capture(path))) for path in (path, rank_trace(tmp_path, 1, (0, 0)))]
    rows = compare_ranks(gpus).collectives
    assert (rows["end_ns"] - rows["start_ns"] == rows["duration_ns"]).all()
    assert (rows["start_ns"] >= 10**18).sum() == len(rows) / 2


def test_collectives_of_different_process_groups_are_not_matched(tmp_path):
    groups = [{"In msg nelems": 4, "Process Group Name": str(rank)} for rank in range(2)]
    paths = [rank_trace(tmp_path, rank, (0, 0), **group) for rank, group in enumerate(groups)]
    with pytest.raises(TraceError, match=r"rank0\.json: no collective in common"):
        profile_ranks(paths)


def test_different_numbers_of_collectives_are_not_matched(tmp_path):
    paths = [rank_trace(tmp_path, 0, (0, 8_000)), rank_trace(tmp_path, 1, (0, 8_000), collectives=3)]
    gpus = [next(devices(load_capture(path))) for path in paths]
    comparison = compare_ranks(gpus)
    assert comparison.collectives.empty and comparison.unmatched == 3 * (2 + 3)
    # each step's first all-reduce becomes a broadcast, which the ranks share
    traces = [json.loads(path.read_text()) for path in paths]
    for trace, collectives in zip(traces, (2, 3)):
        kernels = [event for event in trace["traceEvents"] if event["name"] == ALL_REDUCE]
        for kernel in kernels[::collectives]:
            kernel["name"] = "ncclDevKernel_Broadcast_RING_LL(x)"
    # in a pipeline, ranks send different numbers of messages, but different numbers of all-reduces are suspicious
    for kind, expected_ms in (("SendRecv", [8]), ("AllReduce", [])):
        for path, trace in zip(paths, traces):
            path.write_text(json.dumps(trace).replace("AllReduce", kind))
        lines = lines_of(paths)
        assert waits_ms(lines) == pytest.approx(expected_ms)
        assert ("different runs" in lines["waiting"].text) == (not expected_ms)
        assert ("matched: 1 collective per step (broadcast);" in lines["ranks"].text) == bool(expected_ms)
        assert lines["rank 1"].text.endswith("arrives last at 1 of 1 collective") == bool(expected_ms)


def test_kernels_that_end_at_different_times_are_not_one_collective(tmp_path):
    delays = (0, 8_000)
    paths = [rank_trace(tmp_path, rank, delays, collectives=3) for rank in range(2)]
    assert waits_ms(lines_of(paths)) == pytest.approx([24])
    trace = json.loads(paths[1].read_text())
    kernels = [event for event in trace["traceEvents"] if event["name"] == ALL_REDUCE]
    for kernel in kernels[2::3]:
        kernel["ts"] += 10_000
        kernel["dur"] = 1_000
    paths[1].write_text(json.dumps(trace))
    lines = lines_of(paths)
    assert lines["ranks"].values["collectives"] == 2 and lines["ranks"].values["mismatched"] == 3
    assert "excluded: 3 collectives" in lines["ranks"].text
    assert waits_ms(lines) == pytest.approx([16])
    values = lines["rank 0"].values  # per collective: 5 ms of transfer, and 8 ms of waiting for rank 1
    assert values["transfer_ms"] == pytest.approx(10) and values["unmatched_ms"] == pytest.approx(5 + 8)
    assert "unmatched communication 13.0" in lines["rank 0"].text
    for kernel in kernels[1::3]:
        kernel["ts"] += 20_000
    paths[1].write_text(json.dumps(trace))
    lines = lines_of(paths)
    assert lines["ranks"].values["collectives"] == 0 and lines["ranks"].values["mismatched"] == 6
    assert waits_ms(lines) == [] and "different runs" in lines["waiting"].text
    assert "last" not in lines["rank 1"].text and "clocks" not in lines
    assert lines["rank 0"].values["unmatched_ms"] == pytest.approx(3 * (5 + 8))


def test_waiting_in_overlapping_collectives_counts_once(tmp_path):
    """Two process groups' collectives run at the same time on each rank."""
    paths = []
    for rank in range(2):
        events = []
        for name in "12":
            group = {"In msg nelems": 4, "Process Group Name": name}
            path = rank_trace(tmp_path, rank, (0, 8_000), **group)
            added = json.loads(path.read_text())["traceEvents"]
            events += [event for event in added if name == "1" or event["cat"] != "user_annotation"]
        paths.append(write_trace(path, events, distributedInfo={"rank": rank, "world_size": 2}))
    lines = lines_of(paths)
    assert lines["ranks"].values["collectives"] == 4
    assert waits_ms(lines) == pytest.approx([16])
    assert lines["rank 0"].values["waiting_ms"] == pytest.approx(16)


def test_captures_that_are_not_of_different_ranks_of_one_job_are_rejected(tmp_path):
    path, larger = rank_trace(tmp_path, 0, (0, 0)), rank_trace(tmp_path, 1, (0, 0, 0))
    unknown, snapshot = tmp_path / "unknown.json", tmp_path / "snapshot.pickle"
    unknown.write_text(json.dumps(json.loads(path.read_text()) | {"distributedInfo": None}))
    snapshot.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    for paths, error in (
        ([path, path], f"{path} and {path}: got two captures of rank 0"),
        ([unknown, unknown], f"{unknown} and {unknown}: got two captures of the same rank"),
        ([path, larger], f"{path} and {larger}: got captures of jobs with 2 and 3 ranks"),
        ([path, snapshot], f"{snapshot}: got a memory snapshot"),
    ):
        with pytest.raises(TraceError) as raised:
            profile_ranks(paths)
        assert str(raised.value).startswith(error)


def test_missing_ranks_are_reported(tmp_path):
    delays = (0, 0, 8_000)
    paths = [rank_trace(tmp_path, rank, delays) for rank in range(3)]
    lines = profile_ranks(paths)
    assert lines[1].text.startswith("3 ranks,") and "missing" not in lines[1].text
    lines = profile_ranks(paths[:2])
    assert lines[1].text.startswith("2 of 3 ranks,")
    assert "transfer includes waiting for the ranks that are missing here" in lines[1].text
    assert lines[-1].text.startswith(
        "no rank waits for another; a rank that is missing here may arrive later"
    )
    waiting = lines_of(paths[::2])["waiting"]
    assert waiting.text.startswith(
        "rank 0 waits at least 16.0 ms per step for rank 2; a rank that is missing"
    )


def test_waits_that_are_not_listed_are_counted(tmp_path):
    delays = (0, 0, 0, 0, 0, 0, 20_000)
    paths = [rank_trace(tmp_path, rank, delays) for rank in range(7)]
    waiting = lines_of(paths)["waiting"]
    assert len(waiting.values["waits"]) == 6
    assert waiting.text.endswith("; 2 shorter waits between other pairs of ranks")


def test_only_common_steps_are_compared(tmp_path):
    paths = [rank_trace(tmp_path, 0, (0, 8_000)), rank_trace(tmp_path, 1, (0, 8_000), first_step=1)]
    lines = lines_of(paths)
    assert lines["ranks"].values["steps"] == 2
    assert waits_ms(lines) == pytest.approx([16])
    later = rank_trace(tmp_path, 1, (0, 0), first_step=7)
    with pytest.raises(TraceError, match="no step in common"):
        profile_ranks([paths[0], later])


def test_communication_within_one_capture_is_divided_into_transfer_and_waiting(tmp_path):
    """In each of a step's two all-reduces, GPU 0 waits 8 ms for GPU 1, and the transfer takes 5 ms."""
    events = []
    for gpu in range(2):
        trace = json.loads(rank_trace(tmp_path, gpu, (0, 8_000)).read_text())
        for item in trace["traceEvents"]:
            if "device" in item["args"]:
                item["args"]["device"] = gpu
        events += [item for item in trace["traceEvents"] if gpu == 0 or item["cat"] != "user_annotation"]
    path = write_trace(tmp_path / "both.json", events)
    for device, waiting in ((0, 16), (1, 0)):
        line = summary_line(path, "communication", device=device)
        assert line.values["waiting_ms"] == pytest.approx(waiting)
        assert f"10.0 ms is transfer and {waiting}" in line.text
        assert "message sizes are unknown" not in "".join(line.text for line in profile(path, device=device))


def delay_gpu(operations: pd.DataFrame, late: int, delay_ns: int) -> tuple[pd.DataFrame, int]:
    """Delay a GPU before its middle collective, as if the GPU's host had slept.

    A collective begins its transfer once the last GPU has arrived. Therefore, the other GPU waits longer, and both
    GPUs resume work later.

    Returns:
        The changed operations, and the other GPU's additional waiting time in ns. If the late GPU already
        waited in this collective, the additional waiting time is less than the delay.
    """
    rows = operations.sort_values("start_ns").copy()
    is_collective = rows["name"].astype(str).str.contains("nccl")
    middle = rows[is_collective].groupby("device").nth(is_collective.sum() // 4)
    start_ns = middle.set_index("device")["start_ns"]
    moved_ns = max(0, start_ns[late] + delay_ns - start_ns.max())
    for device, start in start_ns.items():
        at = rows.index[(rows["device"] == device) & (rows["start_ns"] == start)]
        is_later = (rows["device"] == device) & (rows["start_ns"] > start)
        arrives_ns = delay_ns if device == late else 0
        rows.loc[is_later, "start_ns"] += moved_ns
        rows.loc[at, "start_ns"] += arrives_ns
        rows.loc[at, "duration_ns"] += moved_ns - arrives_ns
    return rows.sort_values("start_ns", ignore_index=True), moved_ns


@pytest.mark.skipif(not PUBLIC.is_file(), reason="needs a public capture of two GPUs")
@pytest.mark.parametrize("late", (0, 1))
def test_delay_added_to_a_public_capture_is_attributed_to_the_late_gpu(late):
    capture = load_capture(PUBLIC)

    def waiting_ms(operations: pd.DataFrame) -> pd.Series:
        rows = compare_ranks(list(devices(replace(capture, operations=operations)))).collectives
        return rows.groupby(["rank", "last"])["waiting_ns"].sum() / 1e6

    delayed, moved_ns = delay_gpu(capture.operations, late, 20_000_000)
    added_ms = waiting_ms(delayed) - waiting_ms(capture.operations)
    assert moved_ns == pytest.approx(20_000_000, rel=0.05)
    assert added_ms[1 - late, late] == pytest.approx(moved_ns / 1e6, rel=0.05)
    assert added_ms[late, 1 - late] == pytest.approx(0, abs=1)


@pytest.mark.skipif(not PUBLIC.is_file(), reason="needs a public capture of two GPUs")
def test_gpus_within_one_capture_are_compared():
    waits = summary_line(PUBLIC, "waiting").values["waits"]
    gpus = list(devices(load_capture(PUBLIC)))
    steps = compare_ranks(gpus).steps
    assert steps.drop(columns="wall").sum(axis=1).to_numpy() == pytest.approx(steps["wall"].to_numpy())
    assert {wait["for"] for wait in waits} == {0, 1}
