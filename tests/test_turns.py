"""Runs that share a GPU: real processes that note what they do, of which one at a time is timed, alone."""
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from stepscope.config import configure
from stepscope.runs import workers
from stepscope.runs.store import Store
from stepscope.runs.sweep import How, run_sweep
from stepscope.traces import turns

# A run: at work, alone three times, at work again. It writes when each began and ended.
RUN = """
import os, random, sys, time
from pathlib import Path
from stepscope.traces.turns import alone, begin_work, end_work
mark, log = Path(sys.argv[1]) / str(os.getpid()), []
random.seed(os.getpid())
def spend(kind):
    began = time.monotonic()
    time.sleep(random.uniform(0.01, 0.1))
    log.append(f"{kind} {began} {time.monotonic()}")
begin_work(mark)
for _ in range(3):
    spend("work")
    with alone(mark):
        spend("alone")
    begin_work(mark)
    spend("work")
    end_work(mark)
    begin_work(mark)
    spend("work")
end_work(mark)
Path(sys.argv[1], f"{os.getpid()}.log").write_text("\\n".join(log))
"""


def overlapping(one, other):
    return one[0] < other[1] and other[0] < one[1]


def test_what_is_timed_has_nobody_beside_it_and_work_goes_on_side_by_side(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    spent = [(path.stem, kind, (float(began), float(ended))) for path in tmp_path.glob("*.log")
             for kind, began, ended in map(str.split, path.read_text().splitlines())]
    alone = [(run, when) for run, kind, when in spent if kind == "alone"]
    work = [(run, when) for run, kind, when in spent if kind == "work"]
    assert len(alone) == 12 and len(work) == 36
    assert not [1 for run, when in alone for other, theirs in alone + work
                if other != run and overlapping(when, theirs)]
    assert any(overlapping(when, theirs) for run, when in work for other, theirs in work if other != run)
    assert not [*tmp_path.glob(f"*{turns.WORK}"), *tmp_path.glob(f"*{turns.WANTS}")]


@pytest.mark.parametrize("suffix", [turns.WORK, turns.WANTS])
def test_what_a_dead_worker_has_left_holds_nobody_up(tmp_path, suffix):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"{dead.pid}{suffix}").touch()
    mark = tmp_path / "1"
    turns.begin_work(mark)
    with turns.alone(mark):
        assert not (tmp_path / f"1{turns.WORK}").exists()
    assert not [*tmp_path.glob("1.*")]
    turns.begin_work(mark)
    assert (tmp_path / f"1{turns.WORK}").exists()
    turns.end_work(mark)
    turns.end_work(mark)
    assert not [*tmp_path.glob("1.*")]


def test_a_run_by_itself_waits_for_nobody(monkeypatch):
    monkeypatch.delenv(turns.MARK, raising=False)
    assert turns.own_mark() is None
    turns.begin_work(None)
    with turns.alone(None):
        turns.end_work(None)


def test_only_runs_that_take_turns_share_a_gpu(monkeypatch, tmp_path, write_sweep):
    monkeypatch.setattr(workers, "gpus_here", lambda: ["0"])
    workers.check_workers("3", shared=True)
    with pytest.raises(workers.WorkersError, match="got 3, but there are 1 GPUs here"):
        workers.check_workers("3")
    assert configure("nsys", size="nano", context_length=8, device="cpu").takes_turns
    path = write_sweep([{"study": "benchmark", "fixed": {"device": "cpu", "size": "nano", "context_length": 8, "mode": "forward"}}])
    with pytest.raises(workers.WorkersError, match="two timed runs never share one"):
        run_sweep([path], Store(tmp_path / "runs"), How(workers="3"), Console(quiet=True))


def test_a_sweep_of_profiles_on_one_machine_takes_turns(tmp_path, write_sweep):
    """Real kernels, profilers and captures: two runs at once, and the steps of each while none is at work."""
    path = write_sweep([{"study": "nsys", "axes": {"context_length": [8, 12]}, "fixed": {
        "device": "cpu", "size": "nano", "vocab_size": 50, "batch_size": 1, "warmup_steps": 1, "timed_steps": 2}}])
    store, began = Store(tmp_path / "runs"), time.time()
    end = run_sweep([path], store, How(workers="2"), Console(quiet=True))
    assert end.counts["ok"] == 2 and not end.left
    records = store.records()[0]
    for record in records:
        seconds = {name: record.results[name] for name in ("ready_s", "turn_s", "steps_s", "others_s", "analysis_s")}
        assert min(seconds.values()) >= 0 and sum(seconds.values()) < time.time() - began
        assert record.results["captured_profiles"] == 3 and record.results["took_turns"] is True
    assert max(record.results["turn_s"] for record in records) > 0
    assert not list(Path(workers.tempfile.gettempdir()).glob(f"{workers.TURNS}*/*{turns.WORK}"))
