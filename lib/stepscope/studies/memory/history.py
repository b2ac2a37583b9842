"""From an allocation history to what each allocation was for, and to the bytes of each kind at each phase's
peak."""

import linecache
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import walk_stack

import numpy as np
import pandas as pd

from stepscope import PACKAGE, StepscopeError
from stepscope.measure.memory_history import MemoryHistory
from stepscope.model import transformer
from stepscope.model.accounting import GIB, MIB, peak
from stepscope.studies.memory.config import Config
from stepscope.studies.memory.tables import LIVE, column, typed
from stepscope.traces.memory_snapshot import allocations, portable

POINTS = 2000  # of a timeline, at most
LARGEST = 12  # groups of allocations that are kept
TENSOR = ["line", "region", "tensor", "size"]


def predicted(config: Config, mode: str) -> dict:
    """What stands in a mode's row before anything is measured: the prediction."""
    top = peak(config, mode)
    return {
        "mode": mode,
        "phase": "total",
        "predicted_gib": top.allocated / GIB,
        "predicted_requested_gib": top.requested / GIB,
    }


def classified(recording: MemoryHistory, config: Config) -> pd.DataFrame:
    """The recorded step's allocations with what each was for: ``size`` (bytes asked for), ``allocated_at``,
    ``freed_at`` (events from the history's begin), ``line``, ``phase``, ``region``, ``layer`` (missing
    outside the blocks), ``kind``.

    Gradients are the tensors of that name. What is saved for backward is made in forward or loss and freed in
    backward; what those leave behind (logits, loss: the step's frame holds them) is other; an autocast copy
    has a weight's bytes, is made by that weight's region and outlives the matmul. (Where batch times context
    is one of the weight's sides, the copy of an input has the same bytes and is taken for one.)

    Raises:
        StepscopeError: live bytes differ from the allocator's own number at the end or peak of a phase.
    """
    table = allocations(recording.snapshot)
    table["phase"] = _phase_of(table["allocated_at"], recording)
    order = recording.start.allocations + np.arange(len(table))
    table["region"], table["layer"] = _regions(order, table["phase"], recording.regions, config.num_layers)
    freed, ends = table["freed_at"], _ends(recording)
    end_of = {name: end for (name, *_), end in zip(recording.phases, ends, strict=True)}
    table["kind"] = "temporaries"
    table.loc[freed >= ends[-1], "kind"] = "other"
    if "backward" in end_of:
        waits = table["phase"].isin(["forward", "loss"]) & (freed >= end_of["loss"])
        table.loc[waits, "kind"] = "saved for backward"
        table.loc[waits & (freed >= end_of["backward"]), "kind"] = "other"
        alive = (table["allocated_at"] < end_of["backward"]) & (freed >= end_of["backward"])
        table.loc[alive & table["address"].isin(recording.gradients), "kind"] = "gradients"
    if recording.precision in ("bf16", "fp16"):
        _name_copies(table, config, recording.mode)
    _check(table, recording)
    return table.drop(columns="address")


def _ends(recording: MemoryHistory) -> list[int]:
    """Events up to the end of each phase."""
    return [end.events - recording.start.events for _, _, end in recording.phases]


def _phase_of(events: Sequence[int], recording: MemoryHistory) -> np.ndarray:
    """The phase in which each event is."""
    names = np.array([name for name, *_ in recording.phases])
    return names[np.searchsorted(_ends(recording), events, side="right").clip(max=len(names) - 1)]


def _name_copies(table: pd.DataFrame, config: Config, mode: str) -> None:
    """Name autocast's copies of weights."""
    weight_copy_bytes = {
        "attention.qkv": 2 * config.d_model**2,
        "attention.output": 2 * config.d_model**2,
        "ffn": 2 * config.d_model * config.d_ff,
        "head": 2 * config.d_model * config.vocab_size,
    }
    forward = table["phase"] == "forward"
    # without a backward they live until autocast ends, after the last allocation of forward
    lasting = (
        table["freed_at"] > table.loc[forward, "allocated_at"].max()
        if mode == "forward"
        else table["kind"] == "saved for backward"
    )
    cached = forward & (table["size"] == table["region"].map(weight_copy_bytes)) & lasting
    table.loc[cached, "kind"] = "autocast weight cache"


def _regions(
    order: Iterable[int], phases: Iterable[str], regions: list[tuple[int, str | None]], layers: int
) -> tuple[list[str], list[float]]:
    """Region and layer of each allocation. Blocks are counted as they open, in backward by the two sums that
    each ends in."""
    names: list[str] = []
    numbers: list[float] = []
    stack: list[str] = []
    at, blocks, sums, last = 0, -1, -1, None
    for number, phase in zip(order, phases):
        if phase != last:
            blocks, sums, last = -1, -1, phase
        while at < len(regions) and regions[at][0] <= number:
            name = regions[at][1]
            at += 1
            if name is None:
                stack.pop()
                continue
            stack.append(name)
            blocks += name == "block"
            sums += name == "residual"
        inside = phase == "forward" and "block" in stack
        names.append(stack[-1] if stack else "")
        behind = phase == "backward" and sums >= 0 and names[-1] != "embedding"
        numbers.append(blocks if inside else layers - 1 - sums // 2 if behind else float("nan"))
    return names, numbers


def _check(table: pd.DataFrame, recording: MemoryHistory) -> None:
    """That the history is whole: what it says at each phase's end and peak is what the allocator counted."""
    known, live = sum(recording.before.values()), live_bytes(table, _ends(recording)[-1]).sum(axis=0)
    if known != recording.start.requested:
        raise StepscopeError(
            f"{recording.mode}: weights, optimizer state, batch and workspaces are {known:,}"
            f" bytes, but the allocator says {recording.start.requested:,}"
        )
    for (phase, begin, end), at in zip(recording.phases, _ends(recording), strict=True):
        first = begin.events - recording.start.events
        compared = {
            "ends with {:,} bytes": (known + live[at], end.requested),
            "peaks at {:,} bytes": (known + live[first : at + 1].max(), end.peak_requested),
            "has {:,} allocations": (
                (table["allocated_at"] < at).sum(),
                end.allocations - recording.start.allocations,
            ),
        }
        for what, (ours, theirs) in compared.items():
            if ours != theirs:
                raise StepscopeError(
                    f"{recording.mode}, by the end of {phase}: the history"
                    f" {what.format(ours)}, but the allocator says {theirs:,}"
                )


def live_bytes(table: pd.DataFrame, end: int = 0) -> np.ndarray:
    """Live bytes of what the step made, by kind (rows of :data:`LIVE`) after each event, up to ``end`` at
    least."""
    freed = table[np.isfinite(table["freed_at"])]
    last = max(table["allocated_at"].max(), freed["freed_at"].max() if len(freed) else 0)
    live = np.zeros((len(LIVE), max(int(last) + 1, end) + 1), dtype=np.int64)
    row = {kind: number for number, kind in enumerate(LIVE)}
    for sign, rows, event in ((1, table, "allocated_at"), (-1, freed, "freed_at")):
        at = rows["kind"].map(row).to_numpy(int), rows[event].to_numpy(int) + 1
        np.add.at(live, at, sign * rows["size"].to_numpy())
    return live.cumsum(axis=1)


# What stands for the allocation that made a peak where none did: the phase began at its peak.
NOTHING = pd.Series({"layer": float("nan"), "region": "", "line": "", "size": 0})


def peak_rows(recording: MemoryHistory, table: pd.DataFrame, config: Config) -> list[dict]:
    """When each phase peaks, and the mode as a whole: what is held then by kind, where the peak is reached
    and the allocation that makes it, all in GiB."""
    live = live_bytes(table)
    base = np.array([recording.before.get(kind, 0) for kind in LIVE])
    reserved, rows = max(end.peak_reserved for _, _, end in recording.phases) / GIB, []
    for (phase, begin, _), (_, _, end), last in zip(recording.phases, recording.phases, _ends(recording)):
        first = begin.events - recording.start.events
        event = first + int(live[:, first : last + 1].sum(axis=0).argmax())
        by_kind = dict(zip(map(column, LIVE), (base + live[:, event]) / GIB))
        made = table[table["allocated_at"] == event - 1]
        what = made.iloc[0] if len(made) else NOTHING
        rows.append(
            {
                "mode": recording.mode,
                "phase": phase,
                "peak_gib": end.peak_allocated / GIB,
                "requested_gib": end.peak_requested / GIB,
                "reserved_gib": end.peak_reserved / GIB,
                **by_kind,
                column("rounding"): (end.peak_allocated - end.peak_requested) / GIB,
                "peak_in": phase,
                "layer": what["layer"],
                "region": what["region"],
                "line": what["line"],
                "allocation_gib": what["size"] / GIB,
            }
        )
    top = max(rows, key=lambda row: row["peak_gib"])
    return [*rows, top | predicted(config, recording.mode) | {"reserved_gib": reserved}]


def timeline(recording: MemoryHistory, table: pd.DataFrame) -> pd.DataFrame:
    """Live memory by kind over the step's events, in GiB: ``mode``, ``event``, ``phase`` and a column a kind;
    at most :data:`POINTS` rows, each stretch's highest and lowest moment among them."""
    base = np.array([[recording.before.get(kind, 0)] for kind in LIVE])
    live = (live_bytes(table)[:, : _ends(recording)[-1] + 1] + base) / GIB
    total, stretch = live.sum(axis=0), -(-live.shape[1] // (POINTS // 2))
    events = sorted(
        {
            first + int(pick(total[first : first + stretch]))
            for first in range(0, len(total), stretch)
            for pick in (np.argmin, np.argmax)
        }
    )
    phases = _phase_of(np.array(events) - 1, recording)
    return pd.DataFrame(
        {
            "mode": recording.mode,
            "event": events,
            "phase": phases,
            **{column(kind): live[row, events] for row, kind in enumerate(LIVE)},
        }
    )


def grouped(what: str, table: pd.DataFrame, order: list[str]) -> pd.DataFrame:
    """Tensors of one ``line``, ``region``, ``tensor`` and ``size`` (bytes) as one row of a run's
    ``allocations``, with their ``count``; the first has most of ``order`` (of these, or their ``sum``)."""
    rows = table.groupby(TENSOR, sort=False).size().reset_index(name="count")
    rows = rows.assign(sum=rows["size"] * rows["count"]).sort_values(order, ascending=False, kind="stable")
    return typed(
        "allocations",
        rows.assign(
            what=what, rank=range(1, len(rows) + 1), mib=rows["size"] / MIB, source=rows["line"].map(source)
        ),
    )


def source(line: str) -> str:
    """The text of a line of this package, such as "stepscope/model/transformer.py:103"; empty for others."""
    path, _, number = line.rpartition(":")
    if not path.startswith(f"{PACKAGE.name}/"):
        return ""
    return linecache.getline(str(Path(PACKAGE.parent) / path), int(number)).strip()


def place_here() -> tuple[str, str]:
    """The innermost line of the model that runs now, "path:line", and the region that it belongs to: that of
    the nearest ``@region`` above it."""
    model = str(transformer.__file__)
    number = next(line for frame, line in walk_stack(sys._getframe()) if frame.f_code.co_filename == model)
    above = (line.strip() for line in reversed(Path(model).read_text(encoding="utf-8").splitlines()[:number]))
    region = next((line.split('"')[1] for line in above if line.startswith("@region(")), "")
    return f"stepscope/model/transformer.py:{number}", region


def tables(
    config: Config,
    recordings: Sequence[MemoryHistory],
    saved: Sequence[tuple[str, str, str, int]] = (),
    gradients: Sequence[int] = (),
) -> dict[str, pd.DataFrame]:
    """Return ``peaks``, ``allocations`` and ``timeline`` of all modes. A mode that ran out of memory has one row
    in ``peaks``, which says why; so has every mode if nothing was recorded.

    Args:
        saved: line, region, name and bytes of each tensor that one block saves for backward.
        gradients: bytes of each gradient of that block.
    """
    nothing = {"status": "unsupported", "reason": "PyTorch keeps a history of CUDA memory only"}
    rows = [] if recordings else [predicted(config, mode) | nothing for mode in config.modes]
    lines, times = [], []
    for recording in recordings:
        if recording.reason:
            rows.append(predicted(config, recording.mode) | {"status": "oom", "reason": recording.reason})
            continue
        table = classified(recording, config)
        rows += [row | {"status": "ok", "reason": ""} for row in peak_rows(recording, table, config)]
        times.append(timeline(recording, table))
        if recording.mode == "forward":
            made = grouped("allocated in forward", table.assign(tensor=""), ["size", "count"])
            lines.append(made.head(LARGEST))
    block = {
        "saved by a block": saved,
        "gradients of a block": [("", "", "gradient", size) for size in gradients],
    }
    for what, tensors in block.items():
        if tensors:
            lines.append(grouped(what, pd.DataFrame(tensors, columns=TENSOR), ["sum"]))
    return {
        "peaks": typed("peaks", pd.DataFrame(rows)),
        "allocations": typed("allocations", *lines),
        "timeline": typed("timeline", *times),
    }


def kept_files(config: Config, recordings: Sequence[MemoryHistory], folder: Path) -> list[Path]:
    """Write the last recorded mode's snapshot to a folder if the configuration asks for it; return its path."""
    if not (config.save_snapshot and recordings and recordings[-1].snapshot):
        return []
    path = folder / "snapshot.pickle"
    path.write_bytes(portable(recordings[-1].snapshot))
    return [path]
