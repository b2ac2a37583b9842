"""Test that a repeatedly killed sweep ends with the same records as an undisturbed sweep."""

import json
import os
import random
import re
import signal
import time
from contextlib import suppress

import psutil
import pytest

from conftest import HANGS, LACKS_MEMORY, RAISES, TINY, ended
from stepscope.runs.run import MARK
from stepscope.runs.sweep import semaphores


@pytest.fixture
def sweep(write_sweep):
    def write(seeds):
        return write_sweep({"study": "benchmark", "fixed": TINY, "axes": {"seed": seeds}})

    return write


def records(store):
    """Check that every record is complete; return the records' bytes, keyed by seed."""
    found, errors = store.records(check_files=True)
    assert not errors
    return {
        record.config["seed"]: (store.root / "benchmark" / record.run_id / "record.json").read_bytes()
        for record in found
    }


def begun(faults, what="seed"):
    """Return the seeds of the runs that have started or, for ``what="pid"``, the process ids of their kernels."""
    path = faults / "began"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[what == "pid"]) for line in lines]


def send(started, number, group):
    """Send a signal to the sweep's process or, if ``group`` is true, to its process group, as a terminal does."""
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(started.process.pid, number)


def quiet(started):
    """Return whether the output is free of errors, warnings and retries; also return the output itself."""
    output = started.output_file.read_text()
    return not re.search("Traceback|Error|Warning|running it again", output), output


@pytest.mark.parametrize(
    "number, group",
    [
        (signal.SIGKILL, False),
        (signal.SIGTERM, True),
        *(
            pytest.param(number, group, marks=pytest.mark.slow)
            for number, group in [
                (signal.SIGKILL, True),
                (signal.SIGTERM, False),
                (signal.SIGHUP, False),
                (signal.SIGHUP, True),
                (signal.SIGINT, False),
                (signal.SIGINT, True),
            ]
        ),
    ],
)
def test_stopped_sweep_cleans_up_and_can_be_continued(
    program, sweep, store, faults, number, group, tmp_path, monkeypatch
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    path = sweep([0, HANGS])
    first = program("sweep", path, "--runs", store.root)
    first.wait_for((faults / "child").exists)
    send(first, number, group)
    assert first.process.wait(60) == (-9 if number == signal.SIGKILL else 75)
    child = int((faults / "child").read_text())
    if number == signal.SIGKILL:  # multiprocessing may report that it cleans up after the killed process
        assert first.all_ended()  # when the sweep ends, its workers end, and so do their runs
    else:
        assert quiet(first)[0], quiet(first)[1]
        assert f"stopped by {number.name}; runs left: 1" in first.output_file.read_text()
        assert first.all_ended(5)
        assert not store.partial.exists()
    assert ended(child)
    assert not [path for path in temporary.iterdir() if not path.name.startswith("pymp")]
    before = records(store)
    assert before.keys() == {0}

    (faults / "mended").touch()
    second = program("sweep", path, "--runs", store.root)
    assert second.process.wait(120) == 0
    assert records(store).keys() == {0, HANGS} and before.items() <= records(store).items()
    assert begun(faults) == [0, HANGS, HANGS]
    assert not store.partial.exists() and second.all_ended(5)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_run_is_not_recorded_as_failed_when_sweep_is_stopped_after_worker_death(
    program, sweep, store, faults, number
):
    path = sweep([HANGS])
    first = program("sweep", path, "--runs", store.root)
    first.wait_for((faults / "child").exists)
    kernel = psutil.Process(begun(faults, "pid")[0])
    (faults / "child").unlink()
    kernel.parent().parent().kill()
    first.wait_for((faults / "child").exists)
    send(first, number, group=True)
    assert first.process.wait(60) == 75 and first.all_ended(5)
    output = first.output_file.read_text()
    assert output.count("running it again") == 1 and "Traceback" not in output and "failed:" not in output
    assert "0 failed" in output and f"stopped by {number.name}; runs left: 1" in output
    assert store.records() == ([], []) and not store.partial.exists()
    (faults / "mended").touch()
    assert program("sweep", path, "--runs", store.root).process.wait(120) == 0
    assert records(store).keys() == {HANGS}


def test_second_signal_ends_sweep_immediately(program, sweep, store, faults):
    first = program("sweep", sweep([HANGS]), "--runs", store.root)
    first.wait_for((faults / "child").exists)
    sweeping = psutil.Process(first.process.pid)
    first.process.send_signal(signal.SIGINT)
    time.sleep(1.2)  # signals in quick succession count as one request
    with suppress(psutil.NoSuchProcess):
        sweeping.send_signal(signal.SIGINT)
    # the status depends on how far the first stop has progressed
    assert first.process.wait(30) in (75, 130, -2)
    assert first.all_ended() and ended(int((faults / "child").read_text()))


def test_next_sweep_ends_runs_of_a_dead_sweep(program, sweep, store, faults):
    """Kill the sweep, the worker and the run: only an environment variable then identifies the run's children."""
    path = sweep([HANGS])
    first = program("sweep", path, "--runs", store.root)
    first.wait_for((faults / "child").exists)
    child = psutil.Process(int((faults / "child").read_text()))
    assert child.environ()[MARK].startswith(str(store.partial))
    killed = [process for process in first.processes() if process.pid != child.pid]
    for process in killed:
        process.suspend()
    for process in killed:
        process.kill()
    assert first.process.wait(30) == -9 and child.is_running()
    assert semaphores(store.root)  # left over, because multiprocessing's resource tracker was killed, too
    (faults / "mended").touch()
    assert program("sweep", path, "--runs", store.root).process.wait(120) == 0
    assert ended(child.pid) and records(store).keys() == {HANGS} and not semaphores(store.root)


def _victims(started):
    """Return the running processes, keyed by kind: sweep, worker, run or kernel."""
    found = {"sweep": [psutil.Process(started.process.pid)], "worker": [], "run": [], "kernel": []}
    for process in started.processes():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            kind = (
                "kernel"
                if "ipykernel_launcher" in line
                else "run"
                if "stepscope.runs.run" in line
                else "worker"
                if "spawn_main" in line
                else None
            )
            if kind:
                found[kind].append(process)
    return found


@pytest.mark.parametrize(
    "chance, seeds, kills, within_s",
    [
        (2, [0, LACKS_MEMORY, 20, 21], 2, 8),
        *(
            pytest.param(seed, [0, LACKS_MEMORY, *range(20, 38)], 7, 14, marks=pytest.mark.slow)
            for seed in range(4)
        ),
    ],
)
def test_random_kills_neither_lose_nor_repeat_runs(
    program, sweep, store, faults, chance, seeds, kills, within_s
):
    path, chance, before = sweep(seeds), random.Random(chance), {}
    for number in range(kills):
        started = program("sweep", path, "--runs", store.root, "--workers", 2)
        time.sleep(chance.uniform(0, within_s))
        kind = chance.choice(["sweep", "sweep", "worker", "run", "kernel"])
        for process in _victims(started)[kind][:1]:
            with suppress(psutil.Error):
                process.send_signal(
                    signal.SIGKILL
                    if kind != "sweep"
                    else chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
                )
        if kind != "sweep" and started.process.poll() is None:
            time.sleep(chance.uniform(0, 3))
            with suppress(ProcessLookupError):
                started.process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
        status = started.process.wait(90)
        assert started.all_ended(), (number, kind)
        done = {seed: text for seed, text in records(store).items() if json.loads(text)["status"] != "failed"}
        assert before.items() <= done.items(), (number, kind, status)  # no run was lost or repeated
        assert "Traceback" not in started.output_file.read_text(), started.output_file.read_text()
        before = done
    last = program("sweep", path, "--runs", store.root, "--workers", 2)
    assert last.process.wait(300) == 0, last.output_file.read_text()
    assert records(store).keys() == set(seeds) and before.items() <= records(store).items()
    assert last.all_ended(5)
    assert {path.name for path in store.root.iterdir()} == {
        ".lock",
        "benchmark",
    }  # no partial or temporary files


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_full_disk_stops_sweep_without_losing_runs(program, sweep, store, faults):
    import subprocess

    store.root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", store.root], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        (store.root / "ballast").write_bytes(bytes(3 * 2**20 - 600_000))
        started = program("sweep", sweep([0, 20, 21, RAISES]), "--runs", store.root)
        status = started.process.wait(120)
        output = started.output_file.read_text()
        assert status in (1, 2, 75) and "Traceback" not in output
        before = records(store)
        (store.root / "ballast").unlink()
        (faults / "mended").touch()
        assert program("sweep", sweep([0, 20, 21, RAISES]), "--runs", store.root).process.wait(120) == 0
        after = records(store)
        assert after.keys() == {0, 20, 21, RAISES}
        ok = {seed: text for seed, text in before.items() if json.loads(text)["status"] == "ok"}
        assert ok.items() <= after.items()
    finally:
        subprocess.run(["umount", "--lazy", store.root], check=True)
