"""Nsight Systems: where it is, whether it is whole, and how a capture and its reports are made."""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from stepscope import StepscopeError
from stepscope.config import RunConfig

REPORTS = ("cuda_gpu_kern_sum", "cuda_api_sum", "cuda_gpu_mem_time_sum", "nvtx_pushpop_sum", "nvtx_gpu_proj_sum", "nvtx_kern_sum")
PLACES = ("/opt/nvidia/nsight-systems/*/bin/nsys", "/opt/nvidia/nsight-systems-cli/*/bin/nsys", "/usr/local/cuda*/bin/nsys",
          "/usr/local/bin/nsys", "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys")


class NsysError(StepscopeError, RuntimeError):
    """nsys is missing, incomplete, or made no use of a capture; quotes what it said itself."""


def find_nsys() -> Path | None:
    """The nsys to use: on the PATH, else the newest in the usual install folders, the copy inside Nsight Compute last."""
    if on_path := shutil.which("nsys"):
        return Path(on_path)
    for place in PLACES:
        if found := sorted(glob(place)):
            return Path(found[-1])
    return None


def nsys_version(nsys: Path) -> str:
    """What ``nsys --version`` says of itself."""
    return subprocess.run([nsys, "--version"], capture_output=True, text=True, check=True).stdout.strip().rpartition(" ")[2]


def missing_libraries(nsys: Path) -> list[str]:
    """Shared libraries that the importer, which turns a capture into a report, cannot find; empty when nsys is whole.

    The copy inside Nsight Compute comes without ``libdw.so.1`` and ``libelf.so.1`` and then captures, but reports nothing.
    """
    real = Path(os.path.realpath(nsys))
    if real.stat().st_size < 4096:  # a wrapper script: what it executes is what matters
        words = real.read_text(errors="replace").split()
        real = next((Path(word) for word in words if word.endswith("/nsys") and Path(word).exists()), real)
    missing = set()
    for importer in real.parent.parent.glob("host-linux-*/QdstrmImporter"), real.parent.parent.glob("linux-desktop-*/QdstrmImporter"):
        for program in importer:
            listed = subprocess.run(["ldd", program], capture_output=True, text=True,
                                    env=os.environ | {"LD_LIBRARY_PATH": str(program.parent)}).stdout
            missing |= {line.split()[0] for line in listed.splitlines() if line.endswith("not found")}
    return sorted(missing)


@dataclass
class Capture:
    """One configuration's profile: its report file (None when there is none) and what the profiled process said of it."""

    config: RunConfig
    report: Path | None
    outcome: dict


def capture(configs: list[RunConfig], folder: Path, nsys: Path) -> list[Capture]:
    """Profile configurations one after another in one process, each in a capture of its own.

    Starting Python, torch and a CUDA context costs more than the steps, hence one process. A crash costs the profile it
    happens in: the rest is profiled by a process started anew. Out of memory costs that profile only.

    Raises:
        NsysError: nothing could be profiled; the text ends with what nsys said.
    """
    captures, left = [], list(configs)
    for attempt in range(len(configs)):
        own = folder / f"process{attempt}"
        own.mkdir(parents=True)
        (own / "requests.json").write_text(json.dumps([json.loads(config.model_dump_json()) for config in left]))
        command = [str(nsys), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
                   "--capture-range=cudaProfilerApi", f"--capture-range-end=repeat:{len(left)}", "--output", str(own / "capture"),
                   sys.executable, "-m", "stepscope.profiled", str(own)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        reports = iter(sorted(own.glob("capture*.nsys-rep"), key=lambda path: [int(n) for n in path.name.split(".") if n.isdigit()]))
        done = 0
        for config in left:
            said = own / f"{config.mode}.json"
            if not said.exists():
                break
            outcome = json.loads(said.read_text())
            captures.append(Capture(config, next(reports, None) if outcome["status"] == "captured" else None, outcome))
            done += 1
        left = left[done:]
        if left and done < len(left) + done:  # the process ended early, in the first that is left
            captures.append(Capture(left[0], None, {"status": "crashed", "cause": ended.stdout[-2000:]}))
            left = left[1:]
        if not left:
            break
    if all(item.outcome["status"] == "crashed" for item in captures):
        raise NsysError(f"nsys profiled none of {len(captures)} configurations; it said: {captures[0].outcome['cause']}")
    for item in captures:
        if item.outcome["status"] == "captured" and item.report is None:
            raise NsysError(f"nsys made no report of {item.config.mode}; it said: {ended.stdout[-2000:]}")
    return captures


def make_reports(report: Path, folder: Path, prefix: str) -> Path:
    """``nsys stats`` of one capture: the CSVs ``<prefix>_<report>.csv`` in ``folder``; returns the event-level export (sqlite).

    Raises:
        NsysError: nsys stats failed; quotes it.
    """
    ended = subprocess.run([find_nsys(), "stats", "--force-export=true", "--format", "csv", "--output", str(folder / prefix),
                            *(part for name in REPORTS for part in ("--report", name)), str(report)],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    export = report.with_suffix(".sqlite")
    if ended.returncode or not export.exists():
        raise NsysError(f"nsys stats made nothing of {report.name} (exit status {ended.returncode}); it said: {ended.stdout[-2000:]}")
    return export
