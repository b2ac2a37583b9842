"""Test that PyTorch's memory snapshots load safely, and that summaries show the peak and what holds memory."""

import gzip
import pickle
import struct
from pathlib import Path

import pandas as pd
import pytest

from stepscope.captures.snapshot import (
    allocations_of,
    is_pickle,
    peak_of,
    read_snapshot,
    snapshot_lines,
)
from stepscope.traces.attribution import TraceError

RUN = Path(__file__).parents[1] / "runs/h200/memory/small-ctx512-fp32-15a1cda7"
MIB = 2**20


def frame(file: str, line: int, name: str) -> dict:
    return {"filename": file, "line": line, "name": name}


TORCH = frame("/env/lib/python3.11/site-packages/torch/nn/functional.py", 9, "linear")
MODEL = frame("/data/project/model.py", 12, "forward")
TRAIN = frame("/data/project/train.py", 30, "main")
NODE = frame("??", 0, "torch::autograd::generated::MmBackward0::apply(std::vector)")


def event(action: str, addr: int, mib: float, *frames: dict, **more: int) -> dict:
    entry = {"action": action, "addr": addr, "size": int(mib * MIB), "stream": 0, "frames": [*frames]}
    return entry | more


# Already allocated when the history begins: 100 MiB at address 1 (freed later), 50 MiB at address 2 (never freed).
HISTORY = [
    event("segment_alloc", 1000, 600),
    event("alloc", 3, 200, TORCH, MODEL, TRAIN),
    event("free_requested", 1, 100),
    event("free_completed", 1, 100),
    event("alloc", 4, 30, TORCH, MODEL, TRAIN),
    event("alloc", 5, 300, NODE, frame("??", 0, "start_thread")),
    event("segment_free", 2000, 64),
    event("oom", 0, 4096, TORCH, TRAIN, device_free=700 * MIB),
    event("free_requested", 3, 200),
]


def block(address: int, mib: int, state: str, *frames: dict) -> dict:
    sizes = {"size": (mib + 1) * MIB, "requested_size": mib * MIB}
    return {"address": address, "state": state, "frames": [*frames]} | sizes


BLOCKS = [
    block(2, 50, "active_allocated", TRAIN),
    block(4, 30, "active_allocated"),
    block(5, 300, "active_allocated"),
    block(1, 100, "inactive"),
]
SNAPSHOT = {
    "segments": [{"device": 0, "address": 1, "total_size": 900 * MIB, "blocks": BLOCKS}],
    "device_traces": [HISTORY, []],
}


def written(path: Path, content: object) -> Path:
    data = pickle.dumps(content, protocol=4)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.pickle", "a.pickle.gz"])
def test_snapshot_shows_its_peak_and_the_holders_of_memory(tmp_path, name):
    path = written(tmp_path / name, SNAPSHOT)
    assert is_pickle(path)
    lines = snapshot_lines(path)
    values = {line.label: line.values for line in lines if line.label}
    assert values["peak"] == {
        "peak_bytes": 580
        * MIB,  # 50 MiB allocated before the history, and 200 + 30 + 300 MiB allocated during it
        "allocations": 4,
        "reserved_bytes": 964 * MIB,  # including a 64 MiB segment that is released later
        "event": 5,
    }
    holders = [line for line in lines if "function" in line.values]
    held = [(line.values["bytes"] // MIB, line.values["line"]) for line in holders]
    assert held == [(300, 0), (230, 12), (50, 30)]
    assert "autograd's MmBackward0" in holders[0].text
    assert "230 MiB (40%) in 2 allocations: project/model.py:12 in forward" in holders[1].text
    assert values["at the end"] == {"end_bytes": 380 * MIB, "end_reserved_bytes": 900 * MIB}
    assert values["older"]["older_bytes"] == 50 * MIB
    assert values["out of memory"]["asked_bytes"] == 4096 * MIB


def test_snapshot_without_history_shows_current_allocations(tmp_path):
    for content in (SNAPSHOT | {"device_traces": []}, SNAPSHOT["segments"]):
        lines = snapshot_lines(written(tmp_path / "a.pickle", content))
        assert [line.label for line in lines[:2]] == ["snapshot", "allocated"]
        assert lines[1].values["peak_bytes"] == 380 * MIB


def test_reused_address_counts_once(tmp_path):
    trace = [event("alloc", 1, 10), event("alloc", 1, 20), event("free_requested", 1, 20)]
    snapshot = {"segments": [], "device_traces": [trace]}
    assert peak_of(allocations_of(tmp_path, snapshot, 0)) == (1, 20 * MIB)


def test_snapshot_lines_show_the_requested_gpu_and_write_its_allocations(tmp_path):
    other = {"device": 1, "address": 9, "total_size": MIB, "blocks": [BLOCKS[0]]}
    path = written(tmp_path / "a.pickle", SNAPSHOT | {"segments": [*SNAPSHOT["segments"], other]})
    assert snapshot_lines(path)[0].values["device"] == 0
    assert snapshot_lines(path, device=1, csv=tmp_path / "a.csv")[1].values["peak_bytes"] == 50 * MIB
    table = pd.read_csv(tmp_path / "a.csv")
    assert table["size"].tolist() == [50 * MIB] and table["freed_at"].tolist() == [-1]
    with pytest.raises(TraceError, match=r"no allocations on GPU 2; expected one of \[0, 1\]"):
        snapshot_lines(path, device=2)


@pytest.mark.skipif(not RUN.is_dir(), reason="not in a checkout")
def test_real_snapshot_peak_matches_its_run():
    peaks = pd.read_parquet(RUN / "peaks.parquet")
    path = RUN / "snapshot.pickle"
    _, peak = peak_of(allocations_of(path, read_snapshot(path), 0))
    assert peak / 2**30 == pytest.approx(peaks["requested_gib"].max(), rel=1e-12)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


REFUSED = {
    "code": (
        pickle.dumps(SNAPSHOT | {"more": Evil()}),
        "plain data: it refers to pathlib.Path.*, which is code",
    ),
    "old code": (b"\x80\x02cos\nsystem\n(Vtouch executed\ntR.", "it refers to os.system, which is code"),
    "cut": (pickle.dumps(SNAPSHOT)[:-300], "truncated"),
    "memory": (
        b"\x80\x02Nr" + struct.pack("<I", 2**28) + b".",
        "needs far more memory than its size suggests",
    ),
    "number": (pickle.dumps(3), "is a pickle without the lists segments and device_traces"),
    "form": (pickle.dumps({"segments": [1], "device_traces": []}), "unknown format"),
    "sizes": (
        pickle.dumps({"segments": [], "device_traces": [[event("alloc", 1, -5)]]}),
        "unknown format .ValueError size -5242880",
    ),
    "empty": (pickle.dumps({"segments": [], "device_traces": []}), "no allocations"),
    "stack": (b"\x80\x04...", "cannot be read as plain data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_pickle_raises_a_one_line_error_without_running_code(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    content, message = REFUSED[case]
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    assert is_pickle(path)
    with pytest.raises(TraceError, match=message) as error:
        snapshot_lines(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text and "expected a memory snapshot" in text
    assert not Path("executed").exists()
