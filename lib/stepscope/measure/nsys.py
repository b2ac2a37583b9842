"""The modes of a step under Nsight Systems, or torch.profiler, in a process of their own."""

import json
from dataclasses import dataclass
from pathlib import Path

from stepscope.traces.nsys_tool import NsysError, find_nsys, missing_libraries, nsys_version

# In the folder of the profiled process: the function that runs a step in ranges, what the process said of its
# steps, and torch.profiler's trace.
RANGED, OUTCOME, TRACE = "ranged.py", "outcome.json", "capture.trace.json"
REPLAY = "replay"  # the range in which it makes forward a CUDA graph and replays that, outside of any step


@dataclass
class ProfiledModes:
    """The captured steps of one configuration's modes.

    modes: of each its status, reason, wall times plain_ms and captured_ms, the plain ones' enqueue_ms and
    their clock. inside: the mode of each step in the file. learning_rate: of AdamW meanwhile; None where the
    weights did not fit.
    """

    file: Path | None  # None: nothing was captured
    modes: dict[str, dict]
    inside: list[str]
    learning_rate: float | None = None


def profiler_here(device: str) -> tuple[str, Path | None]:
    """What profiles on this machine, in words, and the nsys that does (None: torch.profiler)."""
    if device == "cpu":
        return "torch.profiler, CPU operators", None
    nsys = find_nsys()
    if nsys is None or missing_libraries(nsys):
        return "torch.profiler (CUPTI)", None
    return f"nsys {nsys_version(nsys)}", nsys


def captured_modes(folder: Path, by_nsys: bool, said: str) -> ProfiledModes:
    """What the profiled process and its profiler left in ``folder``.

    Args:
        said: by both of them; the error quotes its end.

    Raises:
        NsysError: the process failed, or the profiler left no file.
    """
    said = said[-2000:]
    if not (folder / OUTCOME).exists():
        raise NsysError(f"the profiled process ended before its steps did; it said: {said}")
    outcome, file = json.loads((folder / OUTCOME).read_text()), None
    if outcome["inside"]:
        # With repeat:1 it is capture.nsys-rep, but releases differ.
        file = next(iter(folder.glob("capture*.nsys-rep")), None) if by_nsys else folder / TRACE
        if file is None or not file.exists():
            raise NsysError(f"no report was made of the capture; the profiler said: {said}")
    return ProfiledModes(file, outcome["modes"], outcome["inside"], outcome["learning_rate"])
