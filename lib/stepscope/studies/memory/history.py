"""From an allocation history to what each allocation was for, and to the bytes of each category at each
phase's end and peak."""
import numpy as np
import pandas as pd

from stepscope import StepscopeError
from stepscope.config import PHASE_NAMES
from stepscope.step.accounting import CATEGORIES, MIB
from stepscope.studies.memory.config import Config

Regions = list[tuple[int, str | None]]  # (allocations so far, region opened; None: one was closed)
Owners = list[tuple[int, int, str, set[int]]]  # (allocations, frees, category, addresses alive then)


def peaks(marks: pd.DataFrame) -> dict[str, float]:
    """Peaks in MiB of the first and of the last step."""
    steps = marks[marks["phase"].isin(PHASE_NAMES)]
    found: dict[str, float] = {}
    for when, index in (("first", steps["step"].min()), ("steady", steps["step"].max())):
        rows = steps[steps["step"] == index]
        found |= {f"{when}_peak_{name}_mib": rows[f"peak_{name}_bytes"].max() / MIB
                  for name in ("allocated", "requested", "reserved")}
    return found


def classified(table: pd.DataFrame, marks: pd.DataFrame, regions: Regions, owners: Owners,
               config: Config) -> pd.DataFrame:
    """An allocation history (see ``snapshot.allocations``) with what each allocation was for; addresses are
    dropped.

    Columns beside ``size`` (bytes asked for), ``allocated_at``, ``freed_at``, ``line`` and ``function``:
    ``step``, ``phase``, ``region``, ``layer`` (missing outside the blocks), ``category``. Parameters,
    gradients and optimizer state are the tensors of that name; a workspace of cuBLAS is what clearing those
    frees; an activation is made in forward or loss and freed in backward; what those phases leave behind
    without autograd's need (logits, which the step's frame holds) is other; an autocast copy has a weight's
    bytes, is made by that weight's region and outlives the product. (Where batch times context is one of the
    weight's sides, the copy of an input has the same bytes and is taken for one.)

    Raises:
        StepscopeError: the live bytes differ from the allocator's own number at some mark.
    """
    table, first = table.copy(), int(marks["allocations"].iloc[0])
    order = pd.Series(range(len(table)), index=table.index) + first  # how many allocations there were before
    begun = first + int(marks["frees"].iloc[0])
    places = [m.allocations + m.frees - begun for m in marks.itertuples()]
    marks = marks.assign(event=places)
    which = marks["allocations"].searchsorted(order, side="right").clip(max=len(marks) - 1)
    table["step"], table["phase"] = marks["step"].to_numpy()[which], marks["phase"].to_numpy()[which]
    table["region"], table["layer"] = _regions(order, regions, table, config.num_layers)
    freed = table["freed_at"].astype("float64").fillna(float("inf"))
    table["category"] = "temporaries"
    table.loc[freed >= places[-1], "category"] = "other"
    if config.mode != "forward":
        _name_activations(table, freed, marks)
    if config.precision in ("bf16", "fp16"):
        _name_copies(table, freed, config)
    for count, frees, category, addresses in owners:
        event = count + frees - begun
        alive = (table["allocated_at"] < event) & (freed >= event) & table["address"].isin(addresses)
        table.loc[alive, "category"] = category
    cleared = marks.set_index("phase")["event"]
    workspaces = (freed >= cleared["gradients cleared"]) & (freed < cleared["workspaces cleared"])
    table.loc[workspaces, "category"] = "cuBLAS workspace"
    for mark in marks.itertuples():
        live = int(table.loc[(table["allocated_at"] < mark.event) & (freed >= mark.event), "size"].sum())
        if live + int(marks["requested_bytes"].iloc[0]) != mark.requested_bytes:
            raise StepscopeError(f"allocations recorded by the end of step {mark.step}, {mark.phase}:"
                                 f" {live} bytes live, but the allocator says {mark.requested_bytes}")
    return table.drop(columns="address")


def _name_activations(table: pd.DataFrame, freed: pd.Series, marks: pd.DataFrame) -> None:
    """Name what each backward pass finds and frees, and what it finds and leaves."""
    ends = {(mark.step, mark.phase): mark.event for mark in marks.itertuples()}
    before = table["phase"].isin(["forward", "loss"])
    for index in marks.loc[marks["phase"] == "backward", "step"].unique():
        rows = (table["step"] == index) & before & (freed >= ends[index, "loss"])
        table.loc[rows, "category"] = "activations"
        table.loc[rows & (freed >= ends[index, "backward"]), "category"] = "other"


def _name_copies(table: pd.DataFrame, freed: pd.Series, config: Config) -> None:
    """Name autocast's copies of weights."""
    size_of = {"attention.qkv": 2 * config.d_model**2, "attention.output": 2 * config.d_model**2,
               "ffn": 2 * config.d_model * config.d_ff, "head": 2 * config.d_model * config.vocab_size}
    forward = table["phase"] == "forward"
    if config.mode != "forward":
        lasting = table["category"] == "activations"
    else:  # they live until autocast ends, after the last allocation of their forward
        lasting = freed > table["step"].map(table[forward].groupby("step")["allocated_at"].max())
    copies = forward & (table["size"] == table["region"].map(size_of)) & lasting
    table.loc[copies, "category"] = "autocast copies"


def _regions(order: pd.Series, regions: Regions, table: pd.DataFrame,
             layers: int) -> tuple[list[str], pd.api.extensions.ExtensionArray]:
    """Region and layer of each allocation, of whose step and phase is known. Blocks are counted as they open,
    in backward by the two sums that each ends in."""
    names: list[str] = []
    numbers: list[int | None] = []
    stack: list[str] = []
    at, blocks, sums, last = 0, -1, -1, None
    for number, now in zip(order, zip(table["step"], table["phase"])):
        if now != last:
            blocks, sums, last = -1, -1, now
        while at < len(regions) and regions[at][0] <= number:
            name = regions[at][1]
            at += 1
            if name is None:
                stack.pop()
                continue
            stack.append(name)
            blocks += name == "block"
            sums += name == "residual"
        inside = now[1] == "forward" and "block" in stack
        names.append(stack[-1] if stack else "")
        behind = now[1] == "backward" and sums >= 0 and names[-1] != "embedding"
        numbers.append(blocks if inside else layers - 1 - sums // 2 if behind else None)
    return names, pd.array(numbers, dtype="Int64")


def levels(table: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Bytes by category at the end of each phase and at its peak: columns step, phase, moment, category,
    bytes; and of a peak ``layer``, ``region``, ``line`` and ``size`` of the allocation that made it.

    What the allocator's rounding adds at a peak is the difference of its two peaks, allocated and requested.

    Raises:
        StepscopeError: a phase's peak in the history is not the allocator's own.
    """
    begun = int(marks["allocations"].iloc[0] + marks["frees"].iloc[0])
    freed = table["freed_at"].astype("float64").fillna(float("inf"))
    rows: list[dict] = []
    for mark in marks.itertuples():
        if mark.phase not in PHASE_NAMES:
            continue
        end = int(mark.allocations + mark.frees - begun)
        live = live_bytes(table, int(mark.begun_at) - begun, end)
        top, peak_event = int(live.max()), int(live.idxmax())
        if top + int(marks["requested_bytes"].iloc[0]) != mark.peak_requested_bytes:
            raise StepscopeError(f"step {mark.step}, {mark.phase}: the history peaks at {top} bytes, the"
                                 f" allocator says {mark.peak_requested_bytes}")
        made = table[table["allocated_at"] == peak_event - 1]
        what = {name: made[name].iloc[0] if len(made) else None
                for name in ("layer", "region", "line", "size")}
        at_end, at_top = (mark.allocated_bytes - mark.requested_bytes,
                          mark.peak_allocated_bytes - mark.peak_requested_bytes)
        for moment, event, rounding in (("end", end, at_end), ("peak", peak_event, at_top)):
            group = (
                table[(table["allocated_at"] < event) & (freed >= event)].groupby("category")["size"].sum()
            )
            group["allocator rounding"] = rounding
            rows += [{"step": mark.step, "phase": mark.phase, "moment": moment, "category": category,
                      "bytes": int(group.get(category, 0))} | (what if moment == "peak" else {})
                     for category in CATEGORIES]
    return pd.DataFrame(rows)


def live_bytes(table: pd.DataFrame, first: int, end: int) -> pd.Series:
    """Live bytes after so many events, by number of events from ``first`` to ``end``."""
    freed = table.dropna(subset="freed_at")
    changes = np.zeros(end + 1)
    for at, sizes in ((table["allocated_at"], table["size"]), (freed["freed_at"], -freed["size"])):
        at = at.to_numpy(dtype=int) + 1
        np.add.at(changes, at[at <= end], sizes.to_numpy()[at <= end])
    return pd.Series(changes.cumsum()[first:], range(first, end + 1))
