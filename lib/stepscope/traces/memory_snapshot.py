"""Convert PyTorch's memory history into a table of allocations, or into a file for PyTorch's memory viewer.

The history comes from this process (``torch.cuda.memory._snapshot()``). To read snapshot files, which are
untrusted, use :mod:`stepscope.captures.snapshot`.
"""

import pickle
import pickletools
import re
from typing import Any

import pandas as pd

COLUMNS = ["size", "address", "allocated_at", "freed_at", "line"]
# The part of a path that does not depend on where a package is installed.
PORTABLE_PATH = re.compile(
    r"(?:^|/)(?:(?:lib|site-packages|dist-packages)/(stepscope/.+)|(?:site|dist)-packages/(.+))$"
)
RANGES_FILE = "stepscope/model/ranges.py"  # wraps the model's methods, and allocates nothing itself


def allocations(snapshot: dict) -> pd.DataFrame:
    """Return one row per allocation in the first device's history, in order, with :data:`COLUMNS`.

    ``size`` is the requested size in bytes. ``allocated_at`` and ``freed_at`` are event numbers;
    allocations and frees are numbered together, from 0. ``freed_at`` is infinite if the memory is still
    allocated. ``line`` is the innermost line in this package or in torch's optimizers, as ``path:line``. It is
    empty in the backward phase, where no Python code runs.
    """
    rows: list[list[Any]] = []
    open_at: dict[int, int] = {}
    event = 0
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            open_at[entry["addr"]] = len(rows)
            line = line_of(entry.get("frames", []))
            rows.append([entry["size"], entry["addr"], event, float("inf"), line])
        elif entry["action"] == "free_requested":
            if entry["addr"] in open_at:  # false for allocations that are older than the history
                rows[open_at.pop(entry["addr"])][3] = event
        else:
            continue
        event += 1
    return pd.DataFrame(rows, columns=COLUMNS)


def line_of(frames: list[dict]) -> str:
    """Return the "path:line" of the innermost frame in this package or in torch's optimizers.

    Frames in the module that opens ranges are skipped. If no frame remains, return "".
    """
    for frame in frames:
        match = PORTABLE_PATH.search(frame["filename"])
        path = match and (match[1] or match[2])
        if path and path.startswith(("stepscope/", "torch/optim/")) and path != RANGES_FILE:
            return f"{path}:{frame['line']}"
    return ""


def portable(snapshot: dict) -> bytes:
    """Pickle a snapshot for PyTorch's memory viewer, without absolute paths, so that it can be shared.

    Stacks keep only the frames in this package and in installed packages, with relative file names such as
    ``stepscope/...`` and ``torch/...``. Identical stacks are stored only once.
    """
    frames_by_location: dict[tuple, dict] = {}
    stacks: dict[tuple, list[dict]] = {}

    def frame(entry: dict) -> dict | None:
        match = PORTABLE_PATH.search(entry.get("filename", ""))
        if not match:
            return None
        location = match[1] or match[2], entry.get("line", 0), entry.get("name", "")
        return frames_by_location.setdefault(location, dict(zip(("filename", "line", "name"), location)))

    def stack(frames: list[dict]) -> list[dict]:
        kept = [entry for item in frames if (entry := frame(item)) is not None]
        return stacks.setdefault(tuple(map(id, kept)), kept)

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: stack(held) if key == "frames" and isinstance(held, list) else clean(held)
                for key, held in value.items()
            }
        if isinstance(value, (list, tuple)):
            return type(value)(clean(entry) for entry in value)
        return "" if isinstance(value, str) and value.startswith("/") else value

    # torch/utils/viz/MemoryViz.js reads protocols 2 to 4.
    return pickletools.optimize(pickle.dumps(clean(snapshot), protocol=4))
