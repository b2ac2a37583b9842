"""PyTorch's memory snapshots: read without running what is in them, and reduced to a table of allocations.

A snapshot is a pickle, and a pickle can name any function to be called when it is read. Those that PyTorch
writes hold plain data only, so the unpickler here refuses every name.
"""
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pandas as pd

from stepscope import StepscopeError

ALLOCATION_COLUMNS = ["size", "address", "allocated_at", "freed_at", "line", "function"]
# The part of a path that says where in which project a file is, wherever that is installed.
PLACE = re.compile(
    r"(?:^|/)(?:(?:lib|site-packages|dist-packages)/(stepscope/.+)|(?:site|dist)-packages/(.+))$"
)

# What reading a pickle that is none, or a damaged one, ends in.
DAMAGED = (pickle.UnpicklingError, EOFError, ArithmeticError, AttributeError, LookupError, MemoryError,
           TypeError, ValueError)


class SnapshotError(StepscopeError, ValueError):
    """A file that is no memory snapshot, or that holds more than plain data."""


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, tuples and dictionaries, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot holds plain data only")

    def persistent_load(self, identifier: Any) -> Any:
        raise pickle.UnpicklingError("it refers to data outside of itself")


def load_snapshot(path: Path) -> dict:
    """A snapshot as ``torch.cuda.memory._dump_snapshot`` wrote it.

    Raises:
        SnapshotError: the file cannot be read, is no pickle of plain data, or not a snapshot's dictionary.
    """
    try:
        with Path(path).open("rb") as file:
            snapshot = PlainUnpickler(file).load()
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read ({error.strerror})") from None
    except DAMAGED as error:
        raise SnapshotError(
            f"{path}: not read as a memory snapshot: {error or type(error).__name__}"
        ) from None
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise SnapshotError(
            f"{path}: expected a snapshot's dictionary with a list device_traces, and it holds none"
        )
    return snapshot


def allocations(snapshot: dict, device: int = 0) -> pd.DataFrame:
    """Every allocation of one device's history, in order: one row each, in :data:`ALLOCATION_COLUMNS`.

    ``size`` is what was asked for, in bytes. ``allocated_at`` and ``freed_at`` count the events of this kind
    from 0 on, both in one numbering; ``freed_at`` is missing while it lives. ``line`` is the innermost line
    of the model or, failing that, of an installed package, as ``path:line`` without the machine's part of the
    path; empty where no Python ran (backward).

    Raises:
        SnapshotError: the history has another shape than PyTorch's.
    """
    rows: list[list[Any]] = []
    open_at: dict[int, int] = {}
    event = 0
    try:
        for entry in snapshot["device_traces"][device]:
            if entry["action"] == "alloc":
                for number in (entry["addr"], entry["size"]):
                    if not isinstance(number, int) or not 0 <= number < 2**63:
                        raise ValueError(f"{number!r:.80} is no address or size of 64 bits")
                line, function = _place(entry.get("frames", []))
                open_at[entry["addr"]] = len(rows)
                rows.append([entry["size"], entry["addr"], event, None, line, function])
            elif entry["action"] == "free_requested":
                if entry["addr"] in open_at:  # what was there before the history began has no row
                    rows[open_at.pop(entry["addr"])][3] = event
            else:
                continue
            event += 1
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SnapshotError(f"the snapshot's history of device {device} is not as expected"
                            f" ({type(error).__name__}: {error})") from None
    return pd.DataFrame(rows, columns=ALLOCATION_COLUMNS).astype({"freed_at": "Int64"})


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
            return {key: stack(held) if key == "frames" and isinstance(held, list) else clean(held)
                    for key, held in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(clean(one) for one in value)
        return "" if isinstance(value, str) and value.startswith("/") else value

    # torch/utils/viz/MemoryViz.js reads protocols 2 to 4.
    return pickletools.optimize(pickle.dumps(clean(snapshot), protocol=4))


def _place(frames: list[dict]) -> tuple[str, str]:
    """The innermost frame in this package (its ranges aside), else in the optimizer or another package: line,
    function.
    """
    fallback = ("", "")
    for frame in frames:
        found = PLACE.search(frame["filename"])
        if not found or "annotate.py" in frame["filename"]:
            continue
        place = f"{found[1] or found[2]}:{frame['line']}", frame["name"]
        if found[1]:
            return place if not fallback[0].startswith("torch/optim") else fallback
        if not fallback[0] or (found[2].startswith("torch/optim")
                               and not fallback[0].startswith("torch/optim")):
            fallback = place
    return fallback
