"""A sweep that is killed again and again ends with the records of one that was left alone."""
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import yaml

from conftest import HUGE, TINY
from faults import HANGS
from stepscope.config import configure
from stepscope.runs.store import Store

CONFIGS = [configure("benchmark", **TINY, mode="forward"), configure("benchmark", **HUGE),
           configure("warmup", **TINY, mode="forward_backward"), configure("warmup", **TINY),
           *(configure("benchmark", **TINY, mode="forward", seed=seed) for seed in (1, 2, 3, 4))]
# When a kill is due: so many seconds at most after the first sign of a stage in the folder of the run that is being made
# (or in the runs folder). Waits, signals and their order are drawn; with the seed below each signal meets each stage that
# comes three times.
STAGES = {"starting": ("", 2.5), "kernel starts": (".partial/*/", 0.8), "measuring": (".partial/*/outcome.json", 0.8),
          "finishing": (".partial/*/samples.csv", 0.4), "committing": ("*/*/record.json", 0.01)}
KILLS = {"starting": 6, "kernel starts": 6, "measuring": 4, "finishing": 2, "committing": 2}
SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER


@pytest.fixture
def mark():
    """Environment that tells this test's processes; and orphans come to this process, not to init.

    Under a desktop's session manager orphans are not init's children either, and who waits for that waits forever.
    """
    name, temporary = f"STEPSCOPE_TEST_{uuid.uuid4().hex}", tempfile.mkdtemp()  # not tmp_path: socket paths are short
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(SUBREAPER, 1, 0, 0, 0) == 0
    mark = {name: "1", "TMPDIR": temporary}
    yield mark
    prctl(SUBREAPER, 0, 0, 0, 0)
    for process in marked(mark):
        os.kill(process, signal.SIGKILL)
    shutil.rmtree(temporary)
    for child in Path("/proc/self/task").glob("*/children"):
        for process in map(int, child.read_text().split()):
            if "Z" in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2][:3]:
                os.waitpid(process, 0)


def marked(mark):
    """The living processes that bear the mark."""
    name, found = next(iter(mark)), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if name.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:  # ended meanwhile, or another's
            pass
    return found


def start(sweep, runs, mark, said):
    with said.open("a") as stream:
        # A shell's background job is started with SIGINT ignored, and would hand that down: here it is to be heard.
        return subprocess.Popen([sys.executable, "-m", "stepscope.cli", "sweep", str(sweep), "--runs", str(runs)],
                                env=os.environ | mark, stdout=stream, stderr=stream,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def wait_for(sign, process, runs, there_before):
    """Until there is a new path of this pattern, or the process has ended."""
    while process.poll() is None and sign and not set(runs.glob(sign)) - there_before:
        time.sleep(0.001)


def records(store):
    """The bytes of every record there is; each must be whole, whatever has just been killed."""
    found = {(config.study, config.run_id): store.find(config) for config in CONFIGS}
    return {name: (store.root / name[0] / name[1] / "record.json").read_bytes() for name, record in found.items() if record}


@pytest.mark.trials
def test_twenty_kills_lose_nothing_and_double_nothing(tmp_path, mark):
    sweep = tmp_path / "some.yaml"
    sweep.write_text(yaml.safe_dump([{"study": c.study, "fixed": c.model_dump(mode="json", exclude={"study", "size"})}
                                     for c in CONFIGS]))
    alone = start(sweep, tmp_path / "alone", mark, tmp_path / "alone.txt")  # beside the other, in its own folder
    store, chance, kills, before = Store(tmp_path / "runs"), random.Random(224), [], {}
    stages = [stage for stage, count in KILLS.items() for _ in range(count)]
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL] * 7
    chance.shuffle(stages)
    chance.shuffle(signals)
    for stage, number in zip(stages, signals):
        sign, most = STAGES[stage]
        said, there_before = tmp_path / f"{len(kills):02}.txt", set(store.root.glob(sign)) if sign else set()
        process = start(sweep, store.root, mark, said)
        wait_for(sign, process, store.root, there_before)
        time.sleep(chance.uniform(0, most))
        process.send_signal(number)
        status = process.wait(timeout=60)
        kills.append((stage, number.name, status, len(before)))
        if number == signal.SIGKILL:
            assert status == -signal.SIGKILL, (kills, said.read_text())
        elif stage == "starting":  # Python's own way to end; but it was not over, nor did a dead sweep's lock stop it
            assert status not in (0, 2), (kills, said.read_text())
        else:
            assert status == 75 and f"stopped by {number.name}" in said.read_text(), (kills, said.read_text())
            assert not store.partial.exists()
        after = records(store)
        assert before.items() <= after.items(), kills  # what is done is not lost, and not done again
        before = after
    assert len(kills) == 20
    assert 0 < len(before) < len(CONFIGS), kills  # the kills let some runs through, and met a sweep with work to do

    last = start(sweep, store.root, mark, tmp_path / "last.txt")
    assert last.wait(timeout=300) == 0 == alone.wait(timeout=300)
    undisturbed = Store(tmp_path / "alone")
    assert records(store).keys() == records(undisturbed).keys() == {(c.study, c.run_id) for c in CONFIGS}
    assert before.items() <= records(store).items()
    for each in (store, undisturbed):
        assert [each.find(config).status for config in CONFIGS] == ["ok", "oom"] + ["ok"] * 6
    # No run twice, nothing half-made, nothing set aside: file for file the same folder.
    assert paths(store.root) == paths(undisturbed.root)
    assert not any(".tmp" in path or "set-aside" in path or ".partial" in path for path in paths(store.root))

    deadline = time.monotonic() + 30
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(mark) == []  # also the kernels of killed sweeps have ended


def paths(root):
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_sweep_that_is_killed_and_then_stopped_goes_on_and_leaves_nothing_that_runs(program, fault_folder, write_sweep, tmp_path):
    sweep = write_sweep({"study": "benchmark", "fixed": TINY, "axes": {"seed": [0, HANGS]}})
    runs, hanging = tmp_path / "runs", fault_folder / "of_the_hanging"
    statuses, seen, seeds = [], [], []
    for number in (signal.SIGKILL, signal.SIGTERM, None):
        sweeping = program("sweep", sweep, "--runs", runs)
        if number:
            sweeping.wait_for(hanging.exists)
            sweeping.process.send_signal(number)
        statuses.append(sweeping.process.wait(60))
        # Of a sweep that is killed, the next ends what a kernel had put into another session; all others end that themselves.
        assert sweeping.all_ended(but=[int(hanging.read_text())] if number == signal.SIGKILL else ()), number
        assert "Traceback" not in sweeping.said.read_text()
        seen.append({path: path.read_bytes() for path in runs.glob("*/*/record.json")})
        seeds.append({json.loads(record)["config"]["seed"] for record in seen[-1].values()})
        hanging.unlink(missing_ok=True)
        if number == signal.SIGTERM:
            assert "stopped by SIGTERM; 1 left" in sweeping.said.read_text()
            (fault_folder / "mended").touch()
    assert statuses == [-signal.SIGKILL, 75, 0] and seeds == [{0}, {0}, {0, HANGS}]
    assert seen[0].items() <= seen[1].items() <= seen[2].items()  # what is done is not lost, and not done again
    assert not any(".tmp" in path or "set-aside" in path or ".partial" in path for path in paths(runs))
