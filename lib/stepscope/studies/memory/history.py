"""Classify each allocation in a recorded memory history, and add up the bytes of each kind at each phase's peak.

The kinds are those of :data:`stepscope.model.accounting.KINDS`. A phase's peak is the moment when the
live allocations' requested bytes are at their maximum. Events are allocations and frees, numbered together from
the start of the history.
"""

import linecache
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import walk_stack
from typing import Any

import numpy as np
import pandas as pd

from stepscope import PACKAGE, StepscopeError
from stepscope.measure.memory_history import MemoryHistory
from stepscope.model import transformer
from stepscope.model.accounting import GIB, MIB, peak
from stepscope.studies.memory.config import Config
from stepscope.studies.memory.tables import LIVE, column, typed
from stepscope.traces.memory_snapshot import allocations, portable

MAX_POINTS = 2000  # maximum number of rows of a timeline
MAX_GROUPS = 12  # maximum number of groups of allocations in forward
TENSOR = ["line", "region", "tensor", "size"]
NO_HISTORY = {"status": "unsupported", "reason": "PyTorch records a memory history only for CUDA"}


def predicted_peak(config: Config, mode: str) -> dict[str, Any]:
    """Return the predicted columns of a mode's row for the phase "total"."""
    predicted = peak(config, mode)
    return {
        "mode": mode,
        "phase": "total",
        "predicted_gib": predicted.allocated / GIB,
        "predicted_requested_gib": predicted.requested / GIB,
    }


def classify(recording: MemoryHistory, config: Config) -> pd.DataFrame:
    """Return the recorded step's allocations, each with its kind.

    The columns are ``size`` (requested bytes), ``allocated_at`` and ``freed_at`` (events), ``line``, ``phase``,
    ``region``, ``layer`` (missing outside the blocks) and ``kind``.

    Gradients are recognized by their addresses. Memory that forward or the loss allocates is "saved for
    backward" if backward frees it. It is "other" if it outlives backward, as the logits and the loss do,
    because the step still refers to them.

    Raises:
        StepscopeError: If the live bytes at the end or peak of a phase differ from the allocator's own count.
    """
    table = allocations(recording.snapshot)
    table["phase"] = _phase_of(table["allocated_at"], recording)
    order = recording.start.allocations + np.arange(len(table))
    regions, layers = _regions(order, table["phase"], recording.regions, config.num_layers)
    table["region"] = regions
    table["layer"] = layers
    freed = table["freed_at"]
    ends = _ends(recording)
    end_of = dict(zip(_phase_names(recording), ends, strict=True))
    table["kind"] = "temporaries"
    table.loc[freed >= ends[-1], "kind"] = "other"
    if "backward" in end_of:
        is_in_forward_or_loss = table["phase"].isin(["forward", "loss"])
        outlives_loss = is_in_forward_or_loss & (freed >= end_of["loss"])
        outlives_backward = freed >= end_of["backward"]
        table.loc[outlives_loss, "kind"] = "saved for backward"
        table.loc[outlives_loss & outlives_backward, "kind"] = "other"
        exists_before_end = table["allocated_at"] < end_of["backward"]
        has_gradient_address = table["address"].isin(recording.gradients)
        is_gradient = exists_before_end & outlives_backward & has_gradient_address
        table.loc[is_gradient, "kind"] = "gradients"
    if recording.precision in ("bf16", "fp16"):
        _classify_weight_copies(table, config, recording.mode)
    _check(table, recording)
    return table.drop(columns="address")


def _phase_names(recording: MemoryHistory) -> list[str]:
    return [name for name, _, _ in recording.phases]


def _ends(recording: MemoryHistory) -> list[int]:
    """Return the number of events from the start of the step to the end of each phase."""
    return [end.events - recording.start.events for _, _, end in recording.phases]


def _phase_of(events: Sequence[int], recording: MemoryHistory) -> np.ndarray:
    """Return the name of the phase that contains each event."""
    names = np.array(_phase_names(recording))
    index = np.searchsorted(_ends(recording), events, side="right")
    return names[index.clip(max=len(names) - 1)]


def _classify_weight_copies(table: pd.DataFrame, config: Config, mode: str) -> None:
    """Set the kind of the weight copies that autocast caches.

    An allocation counts as such a copy if it has the size of a bf16 or fp16 copy of the weight, is allocated in
    the weight's region, and outlives the matmul. If batch size times context length equals a dimension of the
    weight, the copy of an input can have the same size, and is then counted as a copy of the weight.
    """
    weight_copy_bytes = {
        "attention.qkv": 2 * config.d_model**2,
        "attention.output": 2 * config.d_model**2,
        "ffn": 2 * config.d_model * config.d_ff,
        "head": 2 * config.d_model * config.vocab_size,
    }
    is_in_forward = table["phase"] == "forward"
    if mode == "forward":  # without backward, copies live until autocast ends, after the last allocation
        last_allocation = table.loc[is_in_forward, "allocated_at"].max()
        outlives_matmul = table["freed_at"] > last_allocation
    else:
        outlives_matmul = table["kind"] == "saved for backward"
    has_weight_bytes = table["size"] == table["region"].map(weight_copy_bytes)
    table.loc[is_in_forward & has_weight_bytes & outlives_matmul, "kind"] = "autocast weight cache"


def _regions(
    order: Iterable[int],
    phases: Iterable[str],
    regions: list[tuple[int, str | None]],
    num_layers: int,
) -> tuple[list[str], list[float]]:
    """Return the region and the layer of each allocation.

    In forward, the layer follows from the number of block regions opened so far. In backward, which doesn't open
    block regions, the layer follows from the number of residual additions so far: each block has two, and the last
    layer comes first.

    Args:
        order: the number of each allocation, counted as in ``regions``.
        phases: the phase of each allocation.
        regions: pairs (number, name): after this number of allocations, the named region opens or, if the name
            is None, a region closes.
        num_layers: the number of the model's blocks.
    """
    names: list[str] = []
    layers: list[float] = []
    open_regions: list[str] = []
    next_region = 0
    current_phase = None
    block = residual = -1
    for number, phase in zip(order, phases):
        if phase != current_phase:
            block = residual = -1
            current_phase = phase
        while next_region < len(regions) and regions[next_region][0] <= number:
            opened = regions[next_region][1]
            next_region += 1
            if opened is None:
                open_regions.pop()
                continue
            open_regions.append(opened)
            block += opened == "block"
            residual += opened == "residual"
        name = open_regions[-1] if open_regions else ""
        layer = float("nan")
        if phase == "forward" and "block" in open_regions:
            layer = block
        elif phase == "backward" and residual >= 0 and name != "embedding":
            layer = num_layers - 1 - residual // 2
        names.append(name)
        layers.append(layer)
    return names, layers


def _check(table: pd.DataFrame, recording: MemoryHistory) -> None:
    """Check that the history agrees with the allocator's counts at the end and at the peak of each phase.

    Raises:
        StepscopeError: If a count differs, which means that the history is incomplete.
    """
    start = recording.start
    known_bytes = sum(recording.before.values())
    if known_bytes != start.requested:
        raise StepscopeError(
            f"{recording.mode}: weights, optimizer state, batch and workspaces add up to {known_bytes:,}"
            f" bytes, but the allocator reports {start.requested:,}"
        )
    ends = _ends(recording)
    live = known_bytes + live_bytes(table, ends[-1]).sum(axis=0)
    for (phase, begin, end), last in zip(recording.phases, ends, strict=True):
        first = begin.events - start.events
        peak_bytes = live[first : last + 1].max()
        num_allocations = (table["allocated_at"] < last).sum()
        expected_allocations = end.allocations - start.allocations
        for claim, ours, theirs in (
            (f"ends with {live[last]:,} bytes", live[last], end.requested),
            (f"peaks at {peak_bytes:,} bytes", peak_bytes, end.peak_requested),
            (f"has {num_allocations:,} allocations", num_allocations, expected_allocations),
        ):
            if ours != theirs:
                raise StepscopeError(
                    f"{recording.mode}, by the end of {phase}: the history {claim},"
                    f" but the allocator reports {theirs:,}"
                )


def live_bytes(table: pd.DataFrame, min_events: int = 0) -> np.ndarray:
    """Return the step's live bytes by kind (rows of :data:`LIVE`) after each event, as int64.

    The first column is for the time before the first event, and one column follows per event. If the table has
    fewer than ``min_events`` events, the last column is repeated.
    """
    freed = table[np.isfinite(table["freed_at"])]
    last = table["allocated_at"].max()
    if len(freed):
        last = max(last, freed["freed_at"].max())
    num_events = max(int(last) + 1, min_events)
    changes = np.zeros((len(LIVE), num_events + 1), dtype=np.int64)
    _add_sizes(changes, table, "allocated_at", 1)
    _add_sizes(changes, freed, "freed_at", -1)
    return changes.cumsum(axis=1)


def _add_sizes(changes: np.ndarray, table: pd.DataFrame, event: str, sign: int) -> None:
    row_of_kind = {kind: row for row, kind in enumerate(LIVE)}
    rows = table["kind"].map(row_of_kind).to_numpy(int)
    columns = table[event].to_numpy(int) + 1
    sizes = table["size"].to_numpy()
    np.add.at(changes, (rows, columns), sign * sizes)


def _bytes_before(recording: MemoryHistory) -> np.ndarray:
    """Return the bytes of each kind that were allocated before the step, in the order of :data:`LIVE`."""
    return np.array([recording.before.get(kind, 0) for kind in LIVE])


def peak_rows(recording: MemoryHistory, table: pd.DataFrame, config: Config) -> list[dict]:
    """Return one row for the peak of each phase, and one row for the peak of the whole mode.

    A row contains the memory by kind at the peak, and the allocation that reaches the peak. All sizes are in
    GiB. If a phase begins at its peak, no allocation reaches the peak; the allocation's size is then 0, and its
    layer is NaN.
    """
    live = live_bytes(table)
    start = recording.start.events
    rows: list[dict[str, Any]] = []
    for phase, begin, end in recording.phases:
        first = begin.events - start
        last = end.events - start
        phase_live = live[:, first : last + 1].sum(axis=0)
        event = first + int(phase_live.argmax())
        row: dict[str, Any] = {
            "mode": recording.mode,
            "phase": phase,
            "peak_gib": end.peak_allocated / GIB,
            "requested_gib": end.peak_requested / GIB,
            "reserved_gib": end.peak_reserved / GIB,
        }
        kinds_gib = (_bytes_before(recording) + live[:, event]) / GIB
        row |= dict(zip(map(column, LIVE), kinds_gib))
        row[column("rounding")] = (end.peak_allocated - end.peak_requested) / GIB
        row["peak_in"] = phase
        rows.append(row | _allocation_at(table, event))
    highest = max(rows, key=lambda row: row["peak_gib"])
    reserved = max(row["reserved_gib"] for row in rows)
    total = highest | predicted_peak(config, recording.mode)
    total["reserved_gib"] = reserved
    return [*rows, total]


def _allocation_at(table: pd.DataFrame, event: int) -> dict[str, Any]:
    """Return the columns that describe the allocation just before an event.

    If the event is preceded by a free, the size is 0, the layer is NaN, and the text columns are empty.
    """
    allocated = table[table["allocated_at"] == event - 1]
    if allocated.empty:
        return {"layer": float("nan"), "region": "", "line": "", "allocation_gib": 0.0}
    allocation = allocated.iloc[0]
    return {
        "layer": allocation["layer"],
        "region": allocation["region"],
        "line": allocation["line"],
        "allocation_gib": allocation["size"] / GIB,
    }


def timeline(recording: MemoryHistory, table: pd.DataFrame) -> pd.DataFrame:
    """Return the live memory by kind after each event of the step, in GiB, with ``mode``, ``event`` and ``phase``.

    A step with more than :data:`MAX_POINTS` events is divided into intervals. For each interval, only the
    events with the least and the most live memory are returned.
    """
    last = _ends(recording)[-1]
    live = live_bytes(table)[:, : last + 1]
    before = _bytes_before(recording)
    live_gib = (live + before[:, None]) / GIB
    total = live_gib.sum(axis=0)
    num_events = len(total)
    stretch = -(-num_events // (MAX_POINTS // 2))
    events = set()
    for first in range(0, num_events, stretch):
        part = total[first : first + stretch]
        events.add(first + int(part.argmin()))
        events.add(first + int(part.argmax()))
    shown = sorted(events)
    rows = pd.DataFrame(
        {
            "mode": recording.mode,
            "event": shown,
            "phase": _phase_of(np.array(shown) - 1, recording),
        }
    )
    for row, kind in enumerate(LIVE):
        rows[column(kind)] = live_gib[row, shown]
    return rows


def group_tensors(
    what: str,
    table: pd.DataFrame,
    order: list[str],
) -> pd.DataFrame:
    """Group tensors that have the same :data:`TENSOR` columns; return rows of a run's table ``allocations``.

    Args:
        what: the value of the column ``what``.
        table: one row per tensor, with ``line``, ``region``, ``tensor`` and ``size`` (bytes).
        order: the columns to sort by, largest values first. In addition to the table's columns, these can be
            ``count`` and ``sum`` (size times count).
    """
    groups = table.groupby(TENSOR, sort=False).size().reset_index(name="count")
    groups["sum"] = groups["size"] * groups["count"]
    rows = groups.sort_values(order, ascending=False, kind="stable")
    rows = rows.assign(
        what=what,
        rank=range(1, len(rows) + 1),
        mib=rows["size"] / MIB,
        source=rows["line"].map(source_line),
    )
    return typed("allocations", rows)


def source_line(line: str) -> str:
    """Return the source text of a line such as "stepscope/model/transformer.py:103".

    If the line is outside this package, return "".
    """
    path, _, number = line.rpartition(":")
    if not path.startswith(f"{PACKAGE.name}/"):
        return ""
    file = Path(PACKAGE.parent) / path
    return linecache.getline(str(file), int(number)).strip()


def model_line() -> tuple[str, str]:
    """Return the innermost running line of the model's code as "path:line", and the name of its region.

    The region is named by the nearest ``@region`` above the line; it is "" if there is none.
    """
    model = str(transformer.__file__)
    stack = walk_stack(sys._getframe())
    number = next(line for frame, line in stack if frame.f_code.co_filename == model)
    lines = Path(model).read_text(encoding="utf-8").splitlines()
    region = ""
    for line in reversed(lines[:number]):
        if line.strip().startswith("@region("):
            region = line.split('"')[1]
            break
    return f"stepscope/model/transformer.py:{number}", region


def tables(
    config: Config,
    recordings: Sequence[MemoryHistory],
    saved: Sequence[tuple[str, str, str, int]] = (),
    gradients: Sequence[int] = (),
) -> dict[str, pd.DataFrame]:
    """Return the tables ``peaks``, ``allocations`` and ``timeline`` for all modes.

    A mode that ran out of memory has one row in ``peaks`` with the reason. If there are no recordings, every mode
    has such a row.

    Args:
        saved: line, region, name and bytes of each tensor that one block saves for backward.
        gradients: the bytes of each gradient of this block.
    """
    peaks = []
    groups = []
    timelines = []
    if not recordings:
        peaks = [predicted_peak(config, mode) | NO_HISTORY for mode in config.modes]
    for recording in recordings:
        if recording.reason:
            outcome = {"status": "oom", "reason": recording.reason}
            peaks.append(predicted_peak(config, recording.mode) | outcome)
            continue
        table = classify(recording, config)
        for row in peak_rows(recording, table, config):
            peaks.append(row | {"status": "ok", "reason": ""})
        timelines.append(timeline(recording, table))
        if recording.mode == "forward":
            tensors = table.assign(tensor="")
            by_size = group_tensors("allocated in forward", tensors, ["size", "count"])
            groups.append(by_size.head(MAX_GROUPS))
    if saved:
        tensors = pd.DataFrame(saved, columns=TENSOR)
        groups.append(group_tensors("saved by a block", tensors, ["sum"]))
    if gradients:
        tensors = pd.DataFrame({"line": "", "region": "", "tensor": "gradient", "size": gradients})
        groups.append(group_tensors("gradients of a block", tensors, ["sum"]))
    peak_table = pd.DataFrame(peaks)
    return {
        "peaks": typed("peaks", peak_table),
        "allocations": typed("allocations", *groups),
        "timeline": typed("timeline", *timelines),
    }


def kept_files(
    config: Config,
    recordings: Sequence[MemoryHistory],
    folder: Path,
) -> list[Path]:
    """If the configuration asks for it, write the last mode's snapshot to a folder; return the written paths."""
    if not (config.save_snapshot and recordings and recordings[-1].snapshot):
        return []
    path = folder / "snapshot.pickle"
    path.write_bytes(portable(recordings[-1].snapshot))
    return [path]
