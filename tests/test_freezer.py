"""While one run measures the others are frozen; whoever is killed, soon nobody is frozen and nothing is left."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stepscope import freezer
from stepscope.gpu_lock import exclusive
from stepscope.runs.run import _wait, end_marked, make_run

SPINS = "import os, sys, time\nprint(os.getpid(), flush=True)\nwhile True: time.sleep(0.001)"
# A holder of the lock, and what ends it: its standard input, as a run's.
HOLDS = """import sys, threading, os
from stepscope.gpu_lock import exclusive
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
with exclusive():
    print("holds", flush=True)
    threading.Event().wait()
"""
WITHIN_S = 5


@pytest.fixture
def lock(tmp_path):
    place = tmp_path / "lock"
    yield str(place)
    for process in freezer.processes(str(place)):
        with suppress(OSError):
            os.kill(process, 9)


@pytest.fixture
def start(lock):
    """A process of a run that shares the lock, as its worker starts it: with a pipe to its input."""
    started = []

    def begin(run, source=SPINS):
        environment = os.environ | {freezer.LOCK: lock, freezer.RUN: run}
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        process.stdout.readline()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def stopped(process):
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def within(what, seconds=WITHIN_S):
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def freezers():
    """Processes that freeze for somebody."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if freezer.__file__ in process.cmdline():
                found.append(process)
    return found


def test_others_stand_still_and_go_on_and_know_for_how_long(lock, start, monkeypatch):
    monkeypatch.setenv(freezer.LOCK, lock)
    monkeypatch.setenv(freezer.RUN, "/runs/own")
    other, own = start("/runs/other"), start("/runs/own")
    began = time.monotonic()
    with exclusive():
        assert stopped(other) and not stopped(own)
        time.sleep(0.2)
        assert 0.2 <= freezer.frozen_s(began, lock, "/runs/other") <= time.monotonic() - began  # so far
    lasted = freezer.frozen_s(began, lock, "/runs/other")
    assert within(lambda: not stopped(other)) and 0.2 <= lasted <= time.monotonic() - began
    assert freezer.frozen_s(began) == 0 and freezer.frozen_s(time.monotonic(), lock, "/runs/other") == 0
    assert freezer.frozen_s(began + 0.1, lock, "/runs/other") < lasted


@pytest.mark.parametrize(
    "run, since, seconds",
    [
        ("/runs/other", 0, 4 + 1 + 3),
        ("/runs/other", 12, 2 + 1 + 3),
        ("/runs/other", 14, 1 + 3),
        ("/runs/other", 31, 2),
        ("/runs/other", 40, 0),
        ("/runs/a run", 0, 1),
        ("/runs/third", 0, 4 + 3),
    ],
)
def test_a_pause_is_what_others_measured_since_then_until_now(lock, monkeypatch, run, since, seconds):
    monkeypatch.setattr(freezer, "time", SimpleNamespace(monotonic=lambda: 33.0))
    monkeypatch.delenv(freezer.LOCK, raising=False)
    assert freezer.frozen_s(since, lock, run) == 0, "nobody has been frozen"
    Path(f"{lock}.frozen").write_text(
        "freeze 10 /runs/a run\nthaw 14 /runs/a run\nfreeze 20 /runs/third\nthaw 21 \nfreeze 30 /runs/a run\n"
    )
    assert freezer.frozen_s(since, lock, run) == seconds and freezer.frozen_s(since, None, run) == 0


def test_who_is_of_no_run_or_of_another_worker_is_none_of_the_others(lock, start):
    own, other = start("/runs/own"), start("/runs/other")
    for environment in ({freezer.LOCK: lock}, {freezer.LOCK: f"{lock}2", freezer.RUN: "/runs/third"}):
        process = start(
            "/runs/own",
            f"import os, subprocess, sys\nchild = subprocess.Popen(['sleep', '99'], env={environment})\n"
            "print(1, flush=True)\nsys.stdin.read()\nchild.kill()",
        )
        assert freezer.processes(lock, "/runs/own") == {other.pid}
        assert {own.pid, other.pid, process.pid} <= freezer.processes(lock)
        process.stdin.close()
        process.wait()


def test_freezing_ends_when_all_that_there_are_have_stopped(monkeypatch):
    """The third process was started while the others were stopped, and one of these takes its time."""
    found, sent, busy = iter([{1, 2}, {1, 2, 3}, {1, 2, 3}]), [], [2, 2]
    monkeypatch.setattr(freezer, "processes", lambda lock, but: next(found))
    monkeypatch.setattr(freezer, "_send", lambda processes, number: sent.append(processes))
    monkeypatch.setattr(freezer, "_runs", lambda process: process in busy and bool(busy.pop()))
    assert freezer.freeze("", "") == {1, 2, 3} and sent == [{1, 2}, {3}] and not busy


def test_a_process_is_stopped_whatever_its_name(tmp_path):
    program = tmp_path / "a) S"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "99"])
    assert within(lambda: psutil.Process(process.pid).name() == "a) S") and freezer._runs(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert within(lambda: not freezer._runs(process.pid))
    process.kill()
    assert within(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE) and not freezer._runs(
        process.pid
    )
    process.wait()
    assert not freezer._runs(process.pid)


def test_runs_begin_beside_one_another_and_what_a_killed_one_left_frozen_goes_on(lock, start):
    other = start("/runs/other")
    other.send_signal(signal.SIGSTOP)
    assert within(lambda: stopped(other))
    with freezer.none_measures(lock), Path(lock).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with Path(lock).open() as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        freezer.thaw_if_none_measures(lock)
        assert within(lambda: not stopped(other))


def test_what_a_run_has_started_stands_still_as_well(lock, start, monkeypatch):
    monkeypatch.setenv(freezer.LOCK, lock)
    monkeypatch.setenv(freezer.RUN, "/runs/own")
    child = (
        "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', 'while True: pass'],"
        " start_new_session=True).pid, flush=True)\nwhile True: pass"
    )
    parent = start("/runs/other", child)
    (young,) = psutil.Process(parent.pid).children()
    with exclusive():
        assert stopped(young) and stopped(parent)
    young.kill()


@pytest.mark.parametrize("killed", ["holder", "freezer", "both", "worker", "all"])
def test_whoever_is_killed_nobody_stays_frozen(lock, start, killed):
    """A worker that dies is seen by its runs' inputs, which end with it."""
    before = {one.pid for one in freezers()}
    waits = "import sys\nprint(1, flush=True)\nsys.stdin.read()"  # a run that ends with its worker
    other, holder = start("/runs/other", waits), start("/runs/holder", HOLDS)
    (own,) = [one for one in freezers() if one.pid not in before]
    assert stopped(other)
    if killed in ("holder", "both", "all"):
        holder.kill()
    if killed in ("freezer", "both", "all"):
        own.kill()
    if killed in ("worker", "all"):
        holder.stdin.close()
        other.stdin.close()
    if killed == "freezer":  # the section goes on, and when it ends so does the others' sleep
        assert holder.poll() is None
        holder.kill()
    holder.wait(WITHIN_S)
    if killed in ("freezer", "both", "all"):
        freezer.thaw_if_none_measures(lock)  # as the holder's worker does when its run has ended
    assert within(lambda: not stopped(other)), "still frozen"
    if killed in ("worker", "all"):
        assert other.wait(WITHIN_S) == 0
    assert within(lambda: not own.is_running() or own.status() == psutil.STATUS_ZOMBIE), "the freezer is left"
    assert freezer.frozen_s(0, lock, "/runs/other") == freezer.frozen_s(0, lock, "/runs/other") > 0, (
        "the pause is over"
    )


def test_nobody_is_thawed_while_somebody_measures(lock, start):
    other, _ = start("/runs/other"), start("/runs/holder", HOLDS)
    freezer.thaw_if_none_measures(lock)
    assert stopped(other)


def test_a_killed_freezer_is_made_good_at_the_sections_end(lock, start, monkeypatch):
    monkeypatch.setenv(freezer.LOCK, lock)
    monkeypatch.setenv(freezer.RUN, "/runs/own")
    other = start("/runs/other")
    with exclusive():
        psutil.Process(freezer._freezer(lock, "/runs/own").program.pid).kill()
    assert within(lambda: not stopped(other))
    assert freezer.frozen_s(0, lock, "/runs/other") == freezer.frozen_s(0, lock, "/runs/other") > 0, (
        "the pause is over"
    )
    with exclusive():
        assert stopped(other)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_signal_that_asks_it_to_ends_the_freezer(lock, monkeypatch, number):
    monkeypatch.setenv(freezer.LOCK, lock)
    monkeypatch.setenv(freezer.RUN, "/runs/own")
    with exclusive():
        asked = freezer._freezer(lock, "/runs/own")
        process = psutil.Process(asked.program.pid)
        assert os.getsid(process.pid) == process.pid and not {freezer.LOCK, freezer.RUN} & {
            *process.environ()
        }, "outlives its run"
        asked.program.send_signal(number)
        assert asked.ask("freeze")


def test_what_a_freezer_has_thawed_it_does_not_thaw_again_when_its_run_ends(lock, start):
    other, asked = start("/runs/other"), freezer.Freezer(lock, "/runs/own")
    assert asked.ask("freeze") and stopped(other) and asked.ask("thaw")
    other.send_signal(signal.SIGSTOP)  # by who measures now
    assert within(lambda: stopped(other))
    asked.program.stdin.close()
    asked.program.wait(WITHIN_S)
    assert stopped(other) and [
        line.split()[0] for line in Path(f"{lock}.frozen").read_text().splitlines()
    ] == ["freeze", "thaw"]


def test_a_run_begins_between_two_measurements(tmp_path, lock, start, tiny, faults):
    folder, records = tmp_path / "run", []
    folder.mkdir()
    holder = start("/runs/holder", HOLDS)
    thread = threading.Thread(target=lambda: records.append(make_run(tiny(), folder, {freezer.LOCK: lock})))
    thread.start()
    time.sleep(0.5)
    assert not freezer.processes(lock, "/runs/holder"), "it has begun beside a measurement"
    holder.kill()
    thread.join(60)
    assert [record.status for record in records] == ["ok"]


@pytest.mark.parametrize("frozen, over", [(0.0, True), (30.0, False)])
def test_a_time_limit_leaves_pauses_out(frozen, over):
    process = subprocess.Popen(["sleep", "1.5"])
    reason = _wait(process, 0.5, lambda: False, lambda: frozen)
    process.kill()
    process.wait()
    assert bool(reason) == over


def test_a_frozen_run_is_killed_like_any_other(tmp_path, lock, start):
    other = start(str(tmp_path))
    start("/runs/holder", HOLDS)
    assert stopped(other)
    end_marked(Path(tmp_path))
    assert other.wait(WITHIN_S) == -9
