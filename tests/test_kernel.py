"""Kernels: one ahead of its run and harmless, and nothing left of those whose owner was killed."""
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest
import yaml
from conftest import TINY
from rich.console import Console
from stepscope.runs import one_run as execute
from stepscope.runs import jupyter_kernel as kernel
from stepscope.config import configure
from stepscope.runs.store import Store
from stepscope.runs.sweep import How, run_sweep

TELLS = """
import json, pathlib, sys, time
ready = "torch" in sys.modules
import torch
json.dump({"finished": True, "results": {"ready": ready, "cuda": torch.cuda.is_initialized()}}, open("outcome.json", "w"))
pathlib.Path(".measured").touch()
time.sleep(1.5)
"""


@pytest.fixture
def telling(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    for study in ("benchmark", "warmup"):
        content = json.loads((execute.PROJECT / "notebooks" / f"{study}.ipynb").read_text(encoding="utf-8"))
        parameters = next(cell for cell in content["cells"] if "parameters" in cell["metadata"].get("tags", []))
        content["cells"] = [parameters, parameters | {"metadata": {}, "id": "tells", "source": TELLS}]
        (tmp_path / "notebooks" / f"{study}.ipynb").write_text(json.dumps(content))
    monkeypatch.setattr(execute, "NOTEBOOKS", tmp_path / "notebooks")


@pytest.mark.parametrize("prestart", [True, False])
def test_the_next_runs_kernel_is_ready_has_touched_no_gpu_and_is_no_kernel_of_one_that_times_its_imports(prestart, telling, tmp_path):
    sweep, store = tmp_path / "some.yaml", Store(tmp_path / "runs")
    sweep.write_text(yaml.safe_dump([{"study": "benchmark", "fixed": TINY, "axes": {"seed": [0, 1]}}, {"study": "warmup", "fixed": TINY}]))
    run_sweep([sweep], store, How(prestart=prestart), Console(quiet=True))
    told = {(record.study, record.config["seed"]): record.results for record in store.records()[0]}
    assert {run: results["ready"] for run, results in told.items()} == {
        ("benchmark", 0): False, ("benchmark", 1): prestart, ("warmup", 0): False}
    assert not any(results["cuda"] for results in told.values())
    assert kernel.spare.kernel is None and not store.partial.exists()
    assert {path.name for path in store.folder(configure("benchmark", **TINY, seed=1)).iterdir()} == {"record.json", "notebook.ipynb"}


def test_what_a_killed_owner_left_is_ended_and_removed_and_what_a_living_one_has_is_let_be(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    processes = {}
    for name in ("dead", "living"):
        folder = tmp_path / f"{kernel.SOCKETS}{name}"
        folder.mkdir()
        (folder / "owner").touch()
        processes[name] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True,
                                           env=os.environ | {kernel.MARK: str(folder)})
    (tmp_path / f"{kernel.SOCKETS}without-owner").mkdir()
    (tmp_path / f"{kernel.SOCKETS}pipe").mkdir()
    os.mkfifo(tmp_path / f"{kernel.SOCKETS}pipe" / "owner")  # opening this would wait for ever
    with (tmp_path / f"{kernel.SOCKETS}living" / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        kernel.clear_dead()
        assert processes["dead"].wait(30) < 0 and psutil.pid_exists(processes["living"].pid) and processes["living"].poll() is None
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{kernel.SOCKETS}living", f"{kernel.SOCKETS}without-owner"]
    processes["living"].kill()
    processes["living"].wait()


def test_a_process_in_the_middle_of_exec_has_no_environment_yet_and_is_looked_at_again(tmp_path, monkeypatch):
    process = subprocess.Popen(["sleep", "1000"])
    seen = tmp_path / str(process.pid)  # what /proc shows of it in that moment, which nothing can make last
    seen.mkdir()
    (seen / "environ").touch()
    (seen / "exe").symlink_to("/bin/sleep")
    (seen / "stat").write_text(f"{process.pid} (sleep) R{' 0' * 49}")
    monkeypatch.setattr(kernel, "PROC", tmp_path)
    with monkeypatch.context() as later:
        later.setattr(kernel.time, "sleep", lambda seconds: (seen / "environ").write_text(f"A=1\0{kernel.MARK}={tmp_path}\0"))
        kernel.end_marked(tmp_path)
    try:
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()


def test_what_lives_without_an_environment_or_has_ended_is_not_waited_for(monkeypatch):
    bare = subprocess.Popen(["sleep", "1000"], env={})
    over = subprocess.Popen(["true"])
    os.waitid(os.P_PID, over.pid, os.WEXITED | os.WNOWAIT)
    try:
        while kernel._bears(kernel.PROC / str(bare.pid), b"A=1") is None:  # it is not yet what it is to be
            pass
        assert kernel._bears(kernel.PROC / str(bare.pid), b"A=1") is False
        assert kernel._bears(kernel.PROC / str(over.pid), b"A=1") is False
    finally:
        bare.kill()
        bare.wait()
        over.wait()
