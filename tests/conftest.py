"""Define shared fixtures: tiny configurations, sweep files, records, and notebooks that fail."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from stepscope import PROJECT
from stepscope.config import RunConfig, configure, studies
from stepscope.runs.record import Record
from stepscope.runs.store import Store

# Test results must not depend on the number of cores, and tests that run in parallel must share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Skip Inductor's check of the vector instructions that the processor reports, because the check takes 15
# seconds of CPU time in each process that compiles.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Compile in this process, because there is little to compile and each compile worker would import torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The smallest useful run: a few thousand parameters, two timed steps, no warm-up.
TINY: dict[str, Any] = {
    "device": "cpu",
    "size": "nano",
    "vocab_size": 50,
    "context_length": 8,
    "batch_size": 1,
    "warmup_steps": 0,
    "timed_steps": 2,
}

# In sweep tests, a run's seed selects how the run behaves. The runs don't need torch, and end immediately unless
# they are meant to wait. The child process is orphaned in a separate session, so that a walk of the process tree
# can't find it.
RAISES, LACKS_MEMORY, DIES, HANGS, KILLS_WORKER, UNFINISHED, TURNS, BAD_RESULT, PATHS, KILLS_RUN = range(
    1, 11
)
PRINTS = 99  # ordinary runs in other tests have seeds 20 to 37
FAULTS = f"""
import json, os, signal, subprocess, sys, time
from pathlib import Path
faults = Path(os.environ["STEPSCOPE_NOTEBOOKS"])
def child():
    (faults / "child").unlink(missing_ok=True)
    subprocess.run(["sh", "-c", f"setsid sleep 1000 & echo $! > {{faults}}/child.new"], check=True)
    (faults / "child.new").rename(faults / "child")
with open(faults / "began", "a") as began:
    began.write(f"{{seed}} {{os.getpid()}}\\n")
mended = (faults / "mended").exists()
results = {{"seed": seed, "finding": f"**seed** [{{seed}}](#there)"}}
if seed == {RAISES} and not mended:
    raise ValueError("as asked")
if seed == {LACKS_MEMORY}:
    class OutOfMemoryError(RuntimeError): pass
    raise OutOfMemoryError("CUDA out of memory")
if seed == {DIES}:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == {KILLS_RUN}:
    os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)
if seed == {HANGS} and not mended:
    child(); time.sleep(1000)
if seed == {KILLS_WORKER} and not mended:
    child()
    worker = int(Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGKILL); time.sleep(1000)
if seed == {BAD_RESULT}:
    results["list"] = [1, 2]
if seed == {PATHS}:
    print(Path.cwd(), sys.prefix, Path.home(), os.uname().nodename, os.environ["TMPDIR"])
if seed == {PRINTS}:
    print("half done")
    while not (faults / "shown").exists():
        time.sleep(0.05)
if seed == {TURNS} or 11 <= seed < 20:
    here = faults / ("gpu" + os.environ["CUDA_VISIBLE_DEVICES"])
    here.touch(exist_ok=False); time.sleep(0.05); here.unlink()
name = {{"device_name": (faults / "device").read_text()}} if (faults / "device").exists() else {{}}
(Path(run_folder) / "outcome.jsonl").write_text(json.dumps(
    {{"machine": name, "results": results}} | ({{}} if seed == {UNFINISHED} else {{"tables": {{}}}})) + "\\n")
"""


def _cell(source: str, **metadata) -> dict:
    return {
        "cell_type": "code",
        "id": uuid.uuid4().hex[:8],
        "metadata": metadata,
        "source": source,
        "outputs": [],
        "execution_count": None,
    }


@pytest.fixture
def threads_of_torch(monkeypatch):
    """Restore torch's thread count after a test, because a notebook limits a tiny model to one thread."""
    import torch  # imported lazily: most tests don't need torch

    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def faults(tmp_path, monkeypatch) -> Path:
    """Make every study's runs execute a notebook that contains ``FAULTS``; return the notebook's folder."""
    folder = tmp_path / "faults"
    folder.mkdir()
    content = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "cells": [_cell("", tags=["parameters"]), _cell(FAULTS)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    }
    for study in studies():
        (folder / f"{study}.ipynb").write_text(json.dumps(content))
    monkeypatch.setenv("STEPSCOPE_NOTEBOOKS", str(folder))
    return folder


@pytest.fixture
def tiny():
    """Return a function that makes a tiny configuration with the given fields replaced."""

    def make(**fields) -> RunConfig:
        return configure(**{"study": "benchmark", **TINY, **fields})

    return make


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def write_sweep(tmp_path):
    """Return a function that writes a sweep file; strings are written unchanged, and other content as YAML."""

    def write(content: object, name: str = "some.yaml") -> Path:
        path = tmp_path / name
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            YAML(typ="safe", pure=True).dump(content, path)
        return path

    return write


def record_of(config: RunConfig, **fields) -> Record:
    """Return the record of a successful run of this configuration, with the given fields replaced."""
    defaults = {"status": "ok", "started_at": datetime(2025, 1, 2, tzinfo=UTC), "duration_s": 1.0}
    return Record.of(config, **defaults | fields)


def put(store: Store, config: RunConfig, **fields) -> Path:
    """Make a record with ``record_of``, and commit it to a runs folder; return the run's folder."""
    return store.commit(store.new_staging_folder(), record_of(config, **fields))


class Program:
    """A ``stepscope`` command in a separate session; an environment variable marks all of its processes."""

    def __init__(self, folder: Path, *arguments: object):
        self.mark = f"STEPSCOPE_TEST_{uuid.uuid4().hex}"
        self.output_file = folder / f"output-{uuid.uuid4().hex[:8]}.txt"
        with self.output_file.open("w") as stream:
            # If a shell started the tests in the background, they ignore SIGINT, and the program would inherit
            # that.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stepscope.cli", *map(str, arguments)],
                stdout=stream,
                stderr=stream,
                env=os.environ | {self.mark: "1"},
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait_for(self, sign) -> None:
        deadline = time.monotonic() + 120
        while not sign():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output_file.read_text()
            time.sleep(0.01)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self.mark in process.environ():
                    found.append(process)
        return found

    def all_ended(self, within_s: float = 30) -> bool:
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not left

    def end(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


@pytest.fixture
def program(tmp_path):
    """Yield a function that starts a command in its own process; after the test, end all started processes."""
    made: list[Program] = []

    def start(*arguments: object) -> Program:
        made.append(Program(tmp_path, *arguments))
        return made[-1]

    yield start
    for each in made:
        each.end()


def ended(pid: int, within_s: float = 30) -> bool:
    """Wait for a process to end; return whether it ended in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="session")
def campaign() -> SimpleNamespace:
    """Read the reference and render the writeup once for all tests.

    Returns:
        A namespace with these fields: ``found`` is the reference as it was read, ``tables`` are its tables
            without inconsistent rows, ``views`` are the views of these tables, ``others`` maps the name of each
            other dataset of the writeup to its tables, and ``report`` is the rendered writeup.
    """
    from stepscope.report import load, writeup  # imported lazily: they import matplotlib
    from stepscope.views import Views

    if PROJECT is None:
        pytest.skip("not in a checkout")
    runs = Path(str(PROJECT), "runs", "h200")
    found = load.read(Store(runs))
    tables = load.steady(found.tables)
    views = Views(tables)
    others = {name: load.steady(each.tables) for name, each in writeup.other_datasets(runs).items()}
    report = writeup.compose(found, runs, Path(str(PROJECT)), views)
    return SimpleNamespace(found=found, tables=tables, views=views, others=others, report=report)
