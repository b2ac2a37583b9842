"""Notebooks for tests of faults: over at once, unless the run's seed says that it is to go wrong. Workers
import this too.

As a program: the command line (``cli ARGUMENTS``) with these notebooks in the place of the studies' own, or
:func:`in_namespace`.
"""
import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

# jsonschema imports it where JupyterLab brought it, for web addresses in notebooks: most of a program's start.
sys.modules.update(dict[str, Any](rfc3987_syntax=None))

from stepscope.runs import one_run  # noqa: E402

# Of programs that import this checkout, and this module.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(one_run.PACKAGE.parent)])}

KILLS_WORKER, HANGS, KILLS_SCHEDULER, FILLS, LOCKS, MEETS = 11, 12, 13, 14, 15, (16, 17)
FAULTS = f"""
import json, os, signal, subprocess, time
from pathlib import Path
faults = Path(os.environ["STEPSCOPE_TEST_FAULTS"])
def child(name):  # of another session, and soon of no parent: parents alone do not find the run's descendants
    subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $! > " + str(faults / name)])
mended = (faults / "mended").exists()
if seed == {KILLS_WORKER} and not mended:
    child("of_the_killed")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
if seed == {HANGS} and not mended:
    child("of_the_hanging")
    time.sleep(1000)
if seed == {KILLS_SCHEDULER} and not mended:
    os.kill(int((faults / "scheduler").read_text()), signal.SIGKILL)
    time.sleep(1000)
if seed in {MEETS}:  # goes on until the other is there as well
    (faults / str(seed)).touch()
    while not all((faults / str(other)).exists() for other in {MEETS}):
        time.sleep(0.05)
runs = Path.cwd().parent.parent
if seed == {FILLS} and not mended:
    with open(runs / "ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
if seed == {LOCKS} and not mended:
    subprocess.run(["mount", "--bind", runs, runs], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", runs], check=True)
json.dump({{"finished": True, "results": {{"seed": seed}}}}, open("outcome.json", "w"))
"""


def short_notebook(source: str) -> str:
    """The benchmark study's notebook (JSON) with nothing in it but its parameters and this code."""
    content = json.loads((one_run.NOTEBOOKS / "benchmark.ipynb").read_text(encoding="utf-8"))
    parameters = next(cell for cell in content["cells"] if "parameters" in cell["metadata"].get("tags", []))
    content["cells"] = [parameters, parameters | {"metadata": {}, "id": "added", "source": source}]
    return json.dumps(content)


def make_notebooks(folder: Path) -> None:
    """A folder with these notebooks, to be named in the environment variable STEPSCOPE_TEST_FAULTS."""
    (folder / "benchmark.ipynb").write_text(short_notebook(FAULTS), encoding="utf-8")


def notebook(config, folder, timeout_s, abandoned):
    """Stands where a study's notebook is executed: executes one of these in its place, in the same way."""
    faults = Path(os.environ["STEPSCOPE_TEST_FAULTS"])
    with mock.patch.object(one_run, "NOTEBOOKS", faults):  # it may be the tests' own process
        return one_run.run_notebook(config, folder, timeout_s, abandoned)


def finished(config, folder, timeout_s, abandoned):
    """Stands there as well, and starts no kernel at all."""
    (folder / "outcome.json").write_text('{"finished": true}')
    return "ok", None


class Program:
    """The command line as a program in a session of its own, with the notebooks above; its processes bear a
    mark."""

    def __init__(self, folder, temporary, *arguments):
        self.mark = f"STEPSCOPE_TEST_{Path(temporary).name}"
        self.said = folder / "said.txt"
        with self.said.open("w") as stream:
            # A shell that starts tests in the background lets them ignore SIGINT, and would hand that down.
            self.process = subprocess.Popen(
                [sys.executable, __file__, "cli", *map(str, arguments)], stdout=stream, stderr=stream,
                env=os.environ | ENVIRONMENT | {self.mark: "1", "TMPDIR": temporary}, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def wait_for(self, sign):
        deadline = time.monotonic() + 120
        while not sign():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.02)

    def processes(self):
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self.mark in process.environ():
                    found.append(process)
        return found

    def all_ended(self, but=(), within_s=30):
        deadline = time.monotonic() + within_s
        while (
            left := [process for process in self.processes() if process.pid not in but]
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not left

    def end(self):
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


def ended(pid: int, within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def command_line(*arguments: str) -> int:
    """The exit status of the command line; its sweeps execute these notebooks."""
    from stepscope import cli
    from stepscope.runs import sweep
    how = functools.partial(sweep.How, notebook=notebook)
    with mock.patch.object(sweep, "How", how), mock.patch.object(sys, "argv", ["stepscope", *arguments]):
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def in_namespace(faults: str, sweep: str, fault: str, *workers: str) -> None:
    """In a mount namespace of its own: sweep into a small disk until it goes wrong; mend that; sweep again.

    Before that, the same into a disk that is full, and one that is read-only, from the start. Prints a JSON
    object: of each, the exit status, the files that there are, and the records.
    """
    runs, seen = Path(faults) / "runs", {}
    runs.mkdir()

    def look(name: str, *options: str) -> None:
        status = command_line("sweep", sweep, "--runs", str(runs), "--timeout", "60s", *options)
        seen[name] = {
            "status": status,
            "files": sorted(str(path.relative_to(runs)) for path in runs.rglob("*")),
            "records": {
                str(json.loads(path.read_text())["config"]["seed"]): json.loads(path.read_text())
                for path in runs.glob("benchmark/*/record.json")
            },
        }

    def mount(*options: str) -> None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join(("size=2m", *options)), "tmpfs", runs], check=True
        )

    mount()
    with suppress(OSError), (runs / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
    look("full at the start")
    subprocess.run(["umount", runs], check=True)
    mount("ro")
    look("read-only at the start")
    subprocess.run(["umount", runs], check=True)
    mount()
    look("stopped", *workers)
    (Path(faults) / "mended").touch()
    if int(fault) == LOCKS:
        subprocess.run(["umount", runs], check=True)
    else:
        (runs / "ballast").unlink()
    look("resumed")
    print(json.dumps(seen))


if __name__ == "__main__":
    import faults  # so that workers find the notebook's function under this module's name
    if sys.argv[1] == "cli":
        sys.exit(faults.command_line(*sys.argv[2:]))
    faults.in_namespace(*sys.argv[2:])
