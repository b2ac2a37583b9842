"""PyTorch's memory history: as a table of allocations, and as a file for PyTorch's memory viewer.

The history comes from this process (``torch.cuda.memory._snapshot()``), not from a file; other people's
snapshots are read by :mod:`stepscope.captures.snapshot`.
"""

import pickle
import pickletools
import re
from typing import Any

import pandas as pd

COLUMNS = ["size", "address", "allocated_at", "freed_at", "line"]
# The part of a path that says where in which project a file is, wherever that is installed.
PLACE = re.compile(
    r"(?:^|/)(?:(?:lib|site-packages|dist-packages)/(stepscope/.+)|(?:site|dist)-packages/(.+))$"
)
RANGES = "stepscope/model/ranges.py"  # calls the model's methods, and makes nothing


def allocations(snapshot: dict) -> pd.DataFrame:
    """Every allocation of the first device's history, in order: one row each, in :data:`COLUMNS`.

    ``size`` is what was asked for, in bytes. ``allocated_at`` and ``freed_at`` count the events of this kind
    from 0 on, both in one numbering; ``freed_at`` is infinite while it lives. ``line`` is the innermost line
    of this package or of torch's optimizers, as ``path:line``; empty where no Python ran (backward).
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
            if entry["addr"] in open_at:  # what was there before the history began has no row
                rows[open_at.pop(entry["addr"])][3] = event
        else:
            continue
        event += 1
    return pd.DataFrame(rows, columns=COLUMNS)


def line_of(frames: list[dict]) -> str:
    """The innermost frame in this package (its ranges aside) or in torch's optimizers: "path:line"."""
    for frame in frames:
        found = PLACE.search(frame["filename"])
        path = found and (found[1] or found[2])
        if path and path.startswith(("stepscope/", "torch/optim/")) and path != RANGES:
            return f"{path}:{frame['line']}"
    return ""


def portable(snapshot: dict) -> bytes:
    """A snapshot for others, as a pickle that PyTorch's memory viewer reads.

    Of each stack it has the frames of this package and of installed ones, their files named as
    ``stepscope/...`` and ``torch/...``; no other text is an absolute path. Equal stacks are stored once.
    """
    places: dict[tuple, dict] = {}
    stacks: dict[tuple, list[dict]] = {}

    def frame(one: dict) -> dict | None:
        found = PLACE.search(one.get("filename", ""))
        if not found:
            return None
        place = found[1] or found[2], one.get("line", 0), one.get("name", "")
        return places.setdefault(place, dict(zip(("filename", "line", "name"), place)))

    def stack(frames: list[dict]) -> list[dict]:
        kept = [one for each in frames if (one := frame(each)) is not None]
        return stacks.setdefault(tuple(map(id, kept)), kept)

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: stack(held) if key == "frames" and isinstance(held, list) else clean(held)
                for key, held in value.items()
            }
        if isinstance(value, (list, tuple)):
            return type(value)(clean(one) for one in value)
        return "" if isinstance(value, str) and value.startswith("/") else value

    # torch/utils/viz/MemoryViz.js reads protocols 2 to 4.
    return pickletools.optimize(pickle.dumps(clean(snapshot), protocol=4))
