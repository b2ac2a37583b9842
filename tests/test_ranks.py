"""Test comparisons of a distributed step's ranks: transfer, waiting, and which rank waits for which."""

from pathlib import Path

import pytest

from capture_events import ALL_REDUCE, GEMM, launch, profiler_step, write_trace
from stepscope import PROJECT
from stepscope.captures.capture import load_capture
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
    """Write a rank's three steps, each with compute before every all-reduce.

    Args:
        delays: the delay of each rank's compute in µs; a collective begins once the latest rank has arrived.
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


def test_late_rank_is_identified_by_the_other_ranks_waiting_time(tmp_path):
    delays = (0, 20_000, 4_000)
    paths = [rank_trace(tmp_path, rank, delays) for rank in (2, 0, 1)]
    lines = {line.label: line for line in profile_ranks(paths)}
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


def test_shifted_timestamps_are_detected_and_do_not_count_as_waiting(tmp_path):
    paths = [rank_trace(tmp_path, 0, (0, 0)), rank_trace(tmp_path, 1, (0, 0), shift=20_000)]
    lines = {line.label: line for line in profile_ranks(paths)}
    assert lines["clocks"].values["offsets_ms"] == pytest.approx([0, 20])
    assert "rank 1's timestamps are 20.0 ms ahead of rank 0's" in lines["clocks"].text
    assert lines["waiting"].values["waits"] == []


def test_collectives_of_different_process_groups_are_not_matched(tmp_path):
    groups = [{"In msg nelems": 4, "Process Group Name": str(rank)} for rank in range(2)]
    paths = [rank_trace(tmp_path, rank, (0, 0), **group) for rank, group in enumerate(groups)]
    with pytest.raises(TraceError, match=r"rank0\.json: shares no collective with the others"):
        profile_ranks(paths)


def test_different_numbers_of_collectives_are_not_matched(tmp_path):
    paths = [rank_trace(tmp_path, 0, (0, 0)), rank_trace(tmp_path, 1, (0, 0), collectives=3)]
    gpus = [next(devices(load_capture(path))) for path in paths]
    comparison = compare_ranks(gpus)
    assert comparison.collectives.empty and comparison.unmatched == 3 * (2 + 3)


def test_only_common_steps_are_compared(tmp_path):
    paths = [rank_trace(tmp_path, 0, (0, 8_000)), rank_trace(tmp_path, 1, (0, 8_000), first_step=1)]
    lines = {line.label: line for line in profile_ranks(paths)}
    assert lines["ranks"].values["steps"] == 2
    (wait,) = lines["waiting"].values["waits"]
    assert wait["ms"] == pytest.approx(16)
    later = rank_trace(tmp_path, 1, (0, 0), first_step=7)
    with pytest.raises(TraceError, match="no step in common"):
        profile_ranks([paths[0], later])


@pytest.mark.skipif(not PUBLIC.is_file(), reason="needs a public capture of two GPUs")
def test_gpus_within_one_capture_are_compared():
    lines = {line.label: line for line in profile(PUBLIC)}
    gpus = list(devices(load_capture(PUBLIC)))
    steps = compare_ranks(gpus).steps
    assert steps.drop(columns="wall").sum(axis=1).to_numpy() == pytest.approx(steps["wall"].to_numpy())
    assert {wait["for"] for wait in lines["waiting"].values["waits"]} == {0, 1}
