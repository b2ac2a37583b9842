"""Profiling the step: where Nsight Systems is, whether it is whole, how captures and their reports are
made.
"""
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stepscope import StepscopeError
from stepscope.config import StepConfig
from stepscope.files import write_text_durably
from stepscope.traces.nsys_reports import check_fresh
from stepscope.traces.turns import begin_work, end_work, lives, own_mark

REPORTS = ("cuda_gpu_kern_sum", "cuda_api_sum", "cuda_gpu_mem_time_sum", "nvtx_pushpop_sum",
           "nvtx_gpu_proj_sum", "nvtx_kern_sum")
# In the folder of the process that is watched: what it is asked for, its id, what it said of it, and
# torch.profiler's trace.
REQUESTS, PID, OUTCOME, TRACE = "requests.json", "pid", "outcome.json", "capture.trace.json"
PLACES = ("/opt/nvidia/nsight-systems/*/bin/nsys", "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
          "/usr/local/cuda*/bin/nsys",
          "/usr/local/bin/nsys", "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys")


class NsysError(StepscopeError, RuntimeError):
    """nsys is missing, incomplete, or made no use of a capture; quotes what it said itself."""


def find_nsys() -> Path | None:
    """The nsys to use: on the PATH, else the newest in the usual install folders, the copy inside Nsight
    Compute last.
    """
    if on_path := shutil.which("nsys"):
        return Path(on_path)
    for place in PLACES:
        if found := sorted(Path("/").glob(place.removeprefix("/"))):
            return found[-1]
    return None


def nsys_version(nsys: Path) -> str:
    """What ``nsys --version`` says of itself."""
    return subprocess.run([nsys, "--version"], capture_output=True, text=True,
                          check=True).stdout.strip().rpartition(" ")[2]


def missing_libraries(nsys: Path) -> list[str]:
    """Shared libraries that the importer, which turns a capture into a report, cannot find; empty when nsys
    is whole.

    The copy inside Nsight Compute comes without ``libdw.so.1`` and ``libelf.so.1`` and then captures, but
    reports nothing.
    """
    real = Path(os.path.realpath(nsys))
    if real.stat().st_size < 4096:  # a wrapper script: what it executes is what matters
        words = real.read_text(errors="replace").split()
        real = next((Path(word) for word in words if word.endswith("/nsys") and Path(word).exists()), real)
    missing = set()
    for host in ("host-linux-*", "linux-desktop-*"):
        for program in real.parent.parent.glob(f"{host}/QdstrmImporter"):
            listed = subprocess.run(["ldd", program], capture_output=True, text=True,
                                    env=os.environ | {"LD_LIBRARY_PATH": str(program.parent)}).stdout
            missing |= {line.split()[0] for line in listed.splitlines() if line.endswith("not found")}
    return sorted(missing)


@dataclass
class Capture:
    """The profile of one configuration's modes: their file (None when there is none) and what the profiled
    process said.
    """

    file: Path | None
    outcomes: dict[str, dict]  # by mode: status (captured, oom, crashed), cause, walls (of watched.Steps)
    inside: list[str]          # the mode of each step in the file, in order
    seconds: dict[str, float]  # ready_s, turn_s, steps_s, others_s of the process; none of one that crashed


def profiler_here(device: str) -> tuple[str, Path | None]:
    """What profiles on this machine, in words, and the nsys that does (None: torch.profiler)."""
    if device == "cpu":
        return "torch.profiler, CPU operators", None
    nsys = find_nsys()
    if nsys is None or missing_libraries(nsys):
        return "torch.profiler (CUPTI)", None
    return f"nsys {nsys_version(nsys)}", nsys


def start_watched(place: Path, nsys: Path | None) -> subprocess.Popen:
    """Start the process that is to be profiled, under its profiler, in a new folder ``place``.

    It gets ready, which takes seconds and touches no GPU, and then waits for the folder's requests.
    """
    place.mkdir(parents=True)
    profiler = [str(nsys), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
                "--cuda-graph-trace=node",
                "--capture-range=cudaProfilerApi", "--capture-range-end=repeat:1",
                "--output", str(place / "capture")] if nsys else []
    tool = "nsys" if nsys else "torch"
    return subprocess.Popen(
        [*profiler, sys.executable, "-m", "stepscope.traces.watched", tool, str(place), str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen, place: Path) -> str:
    """What the profiler said, when both it and the process that it watches have ended."""
    said = process.communicate()[0]
    if (place / PID).exists():  # nsys may end with its capture, and the steps after that go on
        while lives(int((place / PID).read_text())):
            time.sleep(0.01)
    return said


def capture(configs: list[StepConfig], folder: Path, nsys: Path | None,
            started: subprocess.Popen | None = None) -> list[Capture]:
    """Profile the modes of one configuration, in one process and one capture.

    Starting Python, torch and a CUDA context costs more than the steps, and so does ending a capture, hence
    one of each. Where the process crashes, each mode is tried in a process of its own, so that a crash costs
    the profile it happens in. Out of memory costs that profile only.

    Args:
        configs: they differ in ``mode``.
        nsys: the nsys to use; None for torch.profiler.
        started: what :func:`start_watched` gave for the place ``folder/process0``.

    Returns:
        One capture, or one for each mode after a crash.

    Raises:
        NsysError: nothing could be profiled, or a profile left no file; the text ends with what the profiler
            said.
    """
    place = folder / "process0"
    captures = [_capture(configs, place, nsys, started or start_watched(place, nsys))]
    if _crashed(captures[0]) and len(configs) > 1:
        captures = []
        for number, config in enumerate(configs, start=1):
            place = folder / f"process{number}"
            captures.append(_capture([config], place, nsys, start_watched(place, nsys)))
    if all(map(_crashed, captures)):
        cause = next(iter(captures[0].outcomes.values()))["cause"]
        raise NsysError(f"none of {len(configs)} configurations could be profiled;"
                        f" the profiler said: {cause}")
    return captures


def _crashed(made: Capture) -> bool:
    return all(outcome["status"] == "crashed" for outcome in made.outcomes.values())


def _capture(configs: list[StepConfig], place: Path, nsys: Path | None, process: subprocess.Popen) -> Capture:
    asked_at = time.time()
    requests = json.dumps([json.loads(config.model_dump_json()) for config in configs])
    write_text_durably(place / REQUESTS, requests)
    ended = _finish(process, place)
    mark = own_mark()
    end_work(mark)    # whoever waits for a turn has it before this run's analysis
    begin_work(mark)
    if not (place / OUTCOME).exists():
        crashed = {"status": "crashed", "cause": ended[-2000:]}
        return Capture(None, {config.mode: crashed for config in configs}, [], {})
    said, file = json.loads((place / OUTCOME).read_text()), None
    if said["inside"]:
        # With repeat:1 it is capture.nsys-rep, but releases differ.
        file = next(iter(place.glob("capture*.nsys-rep")), None) if nsys else place / TRACE
        if file is None or not file.exists():
            raise NsysError(f"no report was made of the capture of {', '.join(said['modes'])};"
                            f" the profiler said: {ended[-2000:]}")
    seconds = {"ready_s": max(0.0, said["ready_at"] - asked_at),
               **{name: said[name] for name in ("turn_s", "steps_s", "others_s")}}
    return Capture(file, said["modes"], said["inside"], seconds)


def export_capture(nsys: Path, report: Path, export: Path) -> Path:
    """A capture's event-level export (sqlite).

    Raises:
        NsysError: nsys exported nothing; quotes it.
        ReportError: the export is older than the capture.
    """
    said = _say(nsys, "export", "--type=sqlite", "--force-overwrite=true", "--output", export, report)
    if not export.exists():
        raise NsysError(f"nsys export made nothing of {report.name}; it said: {said}")
    check_fresh(export, report)
    return export


def make_reports(nsys: Path, export: Path, folder: Path, prefix: str,
                 reports: Iterable[str] = REPORTS) -> None:
    """By ``nsys stats`` the CSVs ``<prefix>_<report>.csv`` of an export, in ``folder``.

    The reports are made side by side, each from a copy of the export: nsys does not say whether it leaves
    alone what it reads. One that nsys makes nothing of is absent.

    Raises:
        NsysError: nsys made none of the reports; quotes it.
    """
    def make(name: str) -> str:
        copy = Path(shutil.copy(export, folder / f"{prefix}-{name}.sqlite"))
        try:
            return _say(nsys, "stats", "--format=csv", "--output", folder / prefix, "--report", name, copy)
        finally:
            copy.unlink()

    with ThreadPoolExecutor() as pool:
        said = "".join(pool.map(make, reports))
    if not any((folder / f"{prefix}_{name}.csv").exists() for name in reports):
        raise NsysError(f"nsys stats made nothing of {export.name}; it said: {said[-2000:]}")


def _say(nsys: Path, *arguments: str | Path) -> str:
    """The end of what nsys says of a command."""
    return subprocess.run([str(nsys), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True).stdout[-2000:]
