"""Nsight Systems as a program: where it is, whether it is whole, how a capture and its reports are made."""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pandas as pd

from stepscope import StepscopeError
from stepscope.config import StepConfig

# In the folder of the process that is watched: what it said of its steps, and torch.profiler's trace.
OUTCOME, TRACE = "outcome.json", "capture.trace.json"
REPLAY = "replay"  # the range in which it makes forward a CUDA graph and replays that, outside of any step
TIME = "Total Time (ns)"  # in the reports of nsys stats
PLACES = ("/opt/nvidia/nsight-systems/*/bin/nsys", "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
          "/usr/local/cuda*/bin/nsys", "/usr/local/bin/nsys",
          "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys")
# Sampling the CPU costs minutes and gigabytes, and tells nothing of the GPU.
FLAGS = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
         "--capture-range=cudaProfilerApi", "--capture-range-end=repeat:1")


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
    """The captured steps of one configuration's modes.

    modes: of each its status, reason, and wall times plain_ms and captured_ms. inside: the mode of each step
    in the file. seconds: waited_s for the turn, turn_s of it.
    """

    file: Path | None  # None: nothing was captured
    modes: dict[str, dict]
    inside: list[str]
    seconds: dict[str, float]


def profiler_here(device: str) -> tuple[str, Path | None]:
    """What profiles on this machine, in words, and the nsys that does (None: torch.profiler)."""
    if device == "cpu":
        return "torch.profiler, CPU operators", None
    nsys = find_nsys()
    if nsys is None or missing_libraries(nsys):
        return "torch.profiler (CUPTI)", None
    return f"nsys {nsys_version(nsys)}", nsys


def capture(config: StepConfig, folder: Path, nsys: Path | None) -> Capture:
    """Run and capture the modes of one configuration, in a process of their own.

    Args:
        folder: empty; the capture is left in it.
        nsys: the nsys to use; None for torch.profiler.

    Raises:
        NsysError: the process failed, or the profiler left no file; the text ends with what was said.
    """
    profiler = [str(nsys), "profile", *FLAGS, "--output", str(folder / "capture")] if nsys else []
    fields = config.model_dump(include={*StepConfig.model_fields} - {"study", "size", "mode"}, mode="json")
    said = _say(*profiler, sys.executable, "-m", "stepscope.traces.watched", "nsys" if nsys else "torch",
                folder,
                json.dumps(fields))
    if not (folder / OUTCOME).exists():
        raise NsysError(f"the profiled process ended before its steps did; it said: {said}")
    outcome, file = json.loads((folder / OUTCOME).read_text()), None
    if outcome["inside"]:
        # With repeat:1 it is capture.nsys-rep, but releases differ.
        file = next(iter(folder.glob("capture*.nsys-rep")), None) if nsys else folder / TRACE
        if file is None or not file.exists():
            raise NsysError(f"no report was made of the capture; the profiler said: {said}")
    return Capture(file, outcome["modes"], outcome["inside"],
                   {name: outcome[name] for name in ("waited_s", "turn_s")})


def export_capture(nsys: Path, report: Path, export: Path) -> Path:
    """A capture's event-level export (sqlite).

    Raises:
        NsysError: nsys exported nothing; quotes it.
    """
    said = _say(nsys, "export", "--type=sqlite", "--force-overwrite=true", "--output", export, report)
    if not export.exists():
        raise NsysError(f"nsys export made nothing of {report.name}; it said: {said}")
    return export


def make_reports(nsys: Path, export: Path, reports: tuple[str, ...]) -> dict[str, Path]:
    """By ``nsys stats``, beside an export, its CSV reports; one that nsys makes nothing of is absent.

    Raises:
        NsysError: nsys made none; quotes it.
    """
    # A copy: nsys does not say whether it leaves alone what it reads.
    copy = Path(shutil.copy(export, export.with_name("stats.sqlite")))
    said = _say(nsys, "stats", "--format=csv", "--output", export.with_name("stats"),
                "--report", ",".join(reports), copy)
    made = {name: export.with_name(f"stats_{name}.csv") for name in reports}
    if not any(path.exists() for path in made.values()):
        raise NsysError(f"nsys stats made nothing of {export.name}; it said: {said}")
    return {name: path for name, path in made.items() if path.exists()}


def report_total(path: Path) -> int:
    """The ns that all rows of one of ``nsys stats``' reports sum to; 0 where nsys says that the capture does
    not contain such data.

    Raises:
        NsysError: the file is no such report.
    """
    expected = f"expected a report of nsys stats with a column {TIME}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise NsysError(f"{path}: cannot be read ({error}), {expected}") from None
    before, found, rest = text.partition(f"{TIME},")
    if not found:
        if "does not contain" in text:
            return 0
        raise NsysError(f"{path}: found {text.strip()[:80]!r}, {expected}")
    heading = before.rpartition("\n")[2]  # what stands before it on its line
    try:
        table = (heading + found + rest).partition("\n\n")[0]
        return int(pd.read_csv(StringIO(table), usecols=[TIME], dtype={TIME: "int64"})[TIME].sum())
    except (ValueError, OverflowError) as error:
        raise NsysError(f"{path}: {' '.join(str(error).split())}, {expected} of whole numbers") from None


def _say(*command: str | Path) -> str:
    """The end of what a command says."""
    return subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace").stdout[-2000:]
