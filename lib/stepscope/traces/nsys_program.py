"""Profiling the step: where Nsight Systems is, whether it is whole, how captures and their reports are
made.
"""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stepscope import StepscopeError
from stepscope.config import StepConfig
from stepscope.traces.nsys_reports import check_fresh

REPORTS = ("cuda_gpu_kern_sum", "cuda_api_sum", "cuda_gpu_mem_time_sum", "nvtx_pushpop_sum",
           "nvtx_gpu_proj_sum", "nvtx_kern_sum")
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
    outcome: dict  # status (captured, oom, crashed), cause, before_ms, within_ms


def capture(configs: list[StepConfig], folder: Path, nsys: Path | None) -> list[Capture]:
    """Profile configurations one after another in one process, each in a capture of its own.

    Starting Python, torch and a CUDA context costs more than the steps, hence one process. A crash costs the
    profile it happens in: the rest is profiled by a process started anew. Out of memory costs that profile
    only.

    Args:
        nsys: the nsys to use; None for torch.profiler.

    Raises:
        NsysError: nothing could be profiled, or a profile left no file; the text ends with what the profiler
            said.
    """
    captures: list[Capture] = []
    left = list(configs)
    while left:
        place = folder / f"process{len(captures)}"
        place.mkdir(parents=True)
        (place / "requests.json").write_text(json.dumps([json.loads(config.model_dump_json())
                                                       for config in left]))
        profiler = [str(nsys), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
                    "--capture-range=cudaProfilerApi", f"--capture-range-end=repeat:{len(left)}",
                    "--output", str(place / "capture")] if nsys else []
        tool = "nsys" if nsys else "torch"
        ended = subprocess.run(
            [*profiler, sys.executable, "-m", "stepscope.traces.watched", tool, str(place)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
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
                        f" the profiler said: {ended.stdout[-2000:]}"
                    )
            captures.append(Capture(config, file, outcome))
        left = configs[len(captures):]
        if left:  # the process ended in the first of these
            captures.append(Capture(left[0], None, {"status": "crashed", "cause": ended.stdout[-2000:]}))
            left = left[1:]
    if all(item.outcome["status"] == "crashed" for item in captures):
        raise NsysError(
            f"none of {len(captures)} configurations could be profiled;"
            f" the profiler said: {captures[0].outcome['cause']}"
        )
    return captures


def make_reports(nsys: Path, report: Path, folder: Path, prefix: str) -> Path:
    """``nsys stats`` of one capture: the CSVs ``<prefix>_<report>.csv`` in ``folder``; returns the
    event-level export (sqlite).

    Raises:
        NsysError: nsys stats failed; quotes it.
        ReportError: the export is older than the capture.
    """
    ended = subprocess.run([nsys, "stats", "--force-export=true", "--format", "csv", "--output",
                            str(folder / prefix),
                            *(part for name in REPORTS for part in ("--report", name)), str(report)],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    export = report.with_suffix(".sqlite")
    if ended.returncode or not export.exists():
        raise NsysError(
            f"nsys stats made nothing of {report.name} (exit status {ended.returncode});"
            f" it said: {ended.stdout[-2000:]}"
        )
    check_fresh(export, report)
    return export
