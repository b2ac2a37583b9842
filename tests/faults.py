"""Notebooks for tests of faults: over at once, unless the run's seed says that it is to go wrong. Workers import this too."""
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from stepscope.runs import one_run as execute

KILLS_WORKER, HANGS, KILLS_SCHEDULER, FILLS, LOCKS, MEETS = 11, 12, 13, 14, 15, (16, 17)
FAULTS = f"""
import json, os, signal, subprocess, time
from pathlib import Path
faults = Path(os.environ["STEPSCOPE_TEST_FAULTS"])
def child(name):  # of another session, and soon of no parent: the run's descendants are not found by their parents alone
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


def make_notebooks(folder: Path) -> None:
    """A folder with the notebooks, told to this process and to all it starts."""
    content = json.loads((execute.PROJECT / "notebooks" / "benchmark.ipynb").read_text(encoding="utf-8"))
    parameters = next(cell for cell in content["cells"] if "parameters" in cell["metadata"].get("tags", []))
    content["cells"] = [parameters, parameters | {"metadata": {}, "id": "fault", "source": FAULTS}]
    (folder / "benchmark.ipynb").write_text(json.dumps(content), encoding="utf-8")


def notebook(config, folder, timeout_s, more):
    """Stands where a study's notebook is executed: executes one of these in its place, in the same way."""
    with mock.patch.object(execute, "NOTEBOOKS", Path(os.environ["STEPSCOPE_TEST_FAULTS"])):  # it may be the tests' own process
        return execute.run_notebook(config, folder, timeout_s, more)


def in_namespace(faults: str, sweep: str, seed: str) -> None:
    """In a mount namespace of its own: sweep into a small disk until it goes wrong; mend that; sweep again. Prints both ends."""
    from stepscope.runs.store import Store
    from stepscope.runs.sweep import How, run_sweep
    os.environ["STEPSCOPE_TEST_FAULTS"] = faults
    runs = Path(faults) / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", runs], check=True)
    ends, store = [], Store(runs)
    for workers in ("2", None):
        end = run_sweep([Path(sweep)], store, How(workers=workers, notebook=notebook, timeout_s=60))
        (Path(faults) / "mended").touch()
        (runs / "ballast").exists() and (runs / "ballast").unlink()
        if workers and int(seed) == LOCKS:
            subprocess.run(["umount", runs], check=True)
        ends.append({"stopped_by": end.stopped_by, "left": len(end.left), "failed": end.failed,
                     "records": {record.config["seed"]: [record.status, str(record.started_at)] for record in store.records()[0]},
                     "errors": list(map(str, store.records()[1])), "set_aside": (runs / "set-aside").exists()})
    print(json.dumps(ends))


if __name__ == "__main__":
    from faults import in_namespace as by_name  # so that workers find the notebook's function under this module's name
    by_name(*sys.argv[1:])
