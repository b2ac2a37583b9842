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

import psutil

from stepscope import StepscopeError
from stepscope.config import StepConfig
from stepscope.files import write_text_durably
from stepscope.traces.nsys_reports import check_fresh

REPORTS = ("cuda_gpu_kern_sum", "cuda_api_sum", "cuda_gpu_mem_time_sum", "nvtx_pushpop_sum",
           "nvtx_gpu_proj_sum", "nvtx_kern_sum")
# In the folder of the process that is watched: what it is asked for, and its id.
REQUESTS, PID = "requests.json", "pid"
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
    """One configuration's profile: its file (None when there is none) and what the profiled process said of
    it.
    """

    config: StepConfig
    file: Path | None
    outcome: dict  # status (captured, oom, crashed), cause, walls (rows of watched.Steps.walls)


def profiler_here(device: str) -> tuple[str, Path | None]:
    """What profiles on this machine, in words, and the nsys that does (None: torch.profiler)."""
    if device == "cpu":
        return "torch.profiler, CPU operators", None
    nsys = find_nsys()
    if nsys is None or missing_libraries(nsys):
        return "torch.profiler (CUPTI)", None
    return f"nsys {nsys_version(nsys)}", nsys


def start_watched(place: Path, captures: int, nsys: Path | None) -> subprocess.Popen:
    """Start the process that is to be profiled, under its profiler, in a new folder ``place``.

    It gets ready, which takes seconds and touches no GPU, and then waits for the folder's requests.
    """
    place.mkdir(parents=True)
    profiler = [str(nsys), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
                "--cuda-graph-trace=node",
                "--capture-range=cudaProfilerApi", f"--capture-range-end=repeat:{captures}",
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
    if (place / PID).exists():  # nsys may end with its last capture, and the steps after that go on
        while lives(int((place / PID).read_text())):
            time.sleep(0.01)
    return said


def lives(pid: int) -> bool:
    """Whether that process goes on; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def capture(configs: list[StepConfig], folder: Path, nsys: Path | None,
            started: subprocess.Popen | None = None) -> list[Capture]:
    """Profile configurations one after another in one process, each in a capture of its own.

    Starting Python, torch and a CUDA context costs more than the steps, hence one process. A crash costs the
    profile it happens in: the rest is profiled by a process started anew. Out of memory costs that profile
    only.

    Args:
        nsys: the nsys to use; None for torch.profiler.
        started: what :func:`start_watched` gave for the place ``folder/process0`` and as many captures.

    Raises:
        NsysError: nothing could be profiled, or a profile left no file; the text ends with what the profiler
            said.
    """
    captures: list[Capture] = []
    left = list(configs)
    while left:
        place = folder / f"process{len(captures)}"
        process = started if started and not captures else start_watched(place, len(left), nsys)
        requests = json.dumps([json.loads(config.model_dump_json()) for config in left])
        write_text_durably(place / REQUESTS, requests)
        ended = _finish(process, place)
        # With repeat:1 there is one capture.nsys-rep, else capture.1.nsys-rep and so on, in the order they
        # were made.
        reports = iter(sorted(place.glob("capture*.nsys-rep"), key=lambda path: path.stat().st_mtime_ns))
        for config in left:
            said = place / f"{config.mode}.json"
            if not said.exists():
                break
            outcome = json.loads(said.read_text())
            file = None
            if outcome["status"] == "captured":
                file = next(reports, None) if nsys else place / f"{config.mode}.trace.json"
                if file is None or not file.exists():
                    raise NsysError(
                        f"no report was made of the capture of {config.mode};"
                        f" the profiler said: {ended[-2000:]}"
                    )
            captures.append(Capture(config, file, outcome))
        left = configs[len(captures):]
        if left:  # the process ended in the first of these
            captures.append(Capture(left[0], None, {"status": "crashed", "cause": ended[-2000:]}))
            left = left[1:]
    if all(item.outcome["status"] == "crashed" for item in captures):
        raise NsysError(
            f"none of {len(captures)} configurations could be profiled;"
            f" the profiler said: {captures[0].outcome['cause']}"
        )
    return captures


def make_reports(nsys: Path, report: Path, folder: Path, prefix: str,
                 reports: Iterable[str] = REPORTS) -> Path:
    """One capture's event-level export (sqlite), which is returned, and by ``nsys stats`` the CSVs
    ``<prefix>_<report>.csv`` in ``folder``.

    The reports are made side by side, each from a copy of the export: nsys does not say whether it leaves
    alone what it reads. One that nsys makes nothing of is absent.

    Raises:
        NsysError: nsys exported nothing, or made none of the reports; quotes it.
        ReportError: the export is older than the capture.
    """
    export = folder / f"{prefix}.sqlite"
    said = _say(nsys, "export", "--type=sqlite", "--force-overwrite=true", "--output", export, report)
    if not export.exists():
        raise NsysError(f"nsys export made nothing of {report.name}; it said: {said}")
    check_fresh(export, report)

    def make(name: str) -> str:
        copy = Path(shutil.copy(export, folder / f"{prefix}-{name}.sqlite"))
        try:
            return _say(nsys, "stats", "--format=csv", "--output", folder / prefix, "--report", name, copy)
        finally:
            copy.unlink()

    with ThreadPoolExecutor() as pool:
        said = "".join(pool.map(make, reports))
    if not any((folder / f"{prefix}_{name}.csv").exists() for name in reports):
        raise NsysError(f"nsys stats made nothing of {report.name}; it said: {said[-2000:]}")
    return export


def _say(nsys: Path, *arguments: str | Path) -> str:
    """The end of what nsys says of a command."""
    return subprocess.run([str(nsys), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True).stdout[-2000:]
