"""Profile the modes of a step with Nsight Systems, or with torch.profiler, in a separate process."""

import json
from dataclasses import dataclass
from pathlib import Path

from stepscope.traces.nsys_tool import NsysError, find_nsys, missing_libraries, nsys_version

# Files in the profiled process's folder: the function that runs a step in ranges, the outcome of each mode, and
# torch.profiler's trace.
RANGED, OUTCOME, TRACE = "ranged.py", "outcome.json", "capture.trace.json"
REPLAY = "replay"  # the range, outside all steps, in which the forward pass is replayed as a CUDA graph


@dataclass
class ProfiledModes:
    """The profile of a configuration's modes.

    file: nsys's report or torch.profiler's trace; None if nothing was profiled.
    modes: keyed by mode, a dict with the status and its reason; unprofiled_ms and profiled_ms, the wall times of
        the mode's steps; and enqueue_ms and clock (sm_clock_mhz and highest_clock_mhz), from the unprofiled steps.
    step_modes: the mode of each step in the file, in order.
    learning_rate: AdamW's learning rate during these steps; None if the weights didn't fit into memory.
    """

    file: Path | None
    modes: dict[str, dict]
    step_modes: list[str]
    learning_rate: float | None = None


def profiler_here(device: str) -> tuple[str, Path | None]:
    """Return a description of this machine's profiler, and the path of nsys.

    The path is None if the profiler is torch.profiler.
    """
    if device == "cpu":
        return "torch.profiler, CPU operators", None
    nsys = find_nsys()
    if nsys is None or missing_libraries(nsys):
        return "torch.profiler (CUPTI)", None
    return f"nsys {nsys_version(nsys)}", nsys


def read_profiled_modes(folder: Path, uses_nsys: bool, output: str) -> ProfiledModes:
    """Read the files that the profiled process and its profiler wrote to ``folder``.

    Args:
        uses_nsys: whether the profiler was nsys rather than torch.profiler.
        output: the output of the process and the profiler; error messages quote the end of this output.

    Raises:
        NsysError: If the process failed, or the profiler wrote no file.
    """
    last_output = output[-2000:]
    if not (folder / OUTCOME).exists():
        raise NsysError(
            f"the profiled process ended before it completed its steps; its output: {last_output}"
        )
    text = (folder / OUTCOME).read_text()
    outcome = json.loads(text)
    file = None
    if outcome["step_modes"]:
        # the report's name depends on the nsys release if capture-range-end is repeat:1
        reports = folder.glob("capture*.nsys-rep")
        file = next(iter(reports), None) if uses_nsys else folder / TRACE
        if file is None or not file.exists():
            raise NsysError(f"the profiler wrote no report; its output: {last_output}")
    return ProfiledModes(file, outcome["modes"], outcome["step_modes"], outcome["learning_rate"])
