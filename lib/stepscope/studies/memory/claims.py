"""The memory study's claims: the numbers of one sentence where it holds, None where it does not."""
import pandas as pd

from stepscope.config import SIZES
from stepscope.report.tables import ratio
from stepscope.step.accounting import GIB, MIB
from stepscope.studies.memory.tables import (
    Tables,
    begins_backward,
    nested,
    one_level,
    usual,
    where,
)

Claim = dict | None
SAME = 0.01  # of a peak: a smaller difference is none


def _peak(tables: Tables, mode: str, phase: str = "whole", **fields: object) -> pd.Series:
    """The usual run's row of one phase."""
    return usual(tables["memory.peaks"], mode=mode, phase=phase, **fields).iloc[0]


def _allocated(tables: Tables, what: str) -> tuple[pd.DataFrame, pd.Series]:
    """The usual run's ``allocations`` of one kind, and the sum of each row in MiB."""
    rows = usual(tables["memory.allocations"], what=what)
    return rows, rows["mib"] * rows["count"]


def _where(row: pd.Series) -> dict:
    return {"size": row["size"], "context": row["context_length"]}


def peak_parts(tables: Tables) -> Claim:
    """What a full step holds at its peak, which is where backward begins."""
    row = _peak(tables, "step")
    if not begins_backward(row) or row["saved_for_backward_gib"] < row["weights_gib"]:
        return None
    return _where(row) | {"peak": row["peak_gib"], "weights": row["weights_gib"],
                          "state": row["optimizer_state_gib"], "saved": row["saved_for_backward_gib"]}


def peak_foreach(tables: Tables) -> Claim:
    """What the default AdamW takes beside its state, and the fused one does not."""
    foreach, fused = (_peak(tables, "step", "optimizer", **fields)["temporaries_gib"]
                      for fields in ({}, {"attention": "sdpa", "optimizer": "fused"}))
    return {"temporary": foreach} if fused < SAME * foreach else None


def checkpoint_gain(tables: Tables) -> Claim:
    """What a checkpoint around every block takes off the peak of forward and backward, and costs."""
    rows = one_level(tables)
    rows = where(rows, context_length=rows["context_length"].min()).set_index("arrangement")
    one, none = rows.loc["every 1"], rows.loc["none"]
    less, more = 1 - ratio(one["peak_gib"], none["peak_gib"], "GiB"), ratio(one["gpu_ms"], none["gpu_ms"]) - 1
    return _where(one) | {"less": less, "more": more} if less > SAME and more > SAME else None


def checkpoint_best(tables: Tables) -> Claim:
    """2026: at the longest context, where a step without checkpoints does not fit, one block a checkpoint
    needs least, and larger groups keep more."""
    rows = one_level(tables)
    rows = where(rows, context_length=rows["context_length"].max()).set_index("arrangement")
    some = where(rows.drop(index="none"), status="ok")
    peaks, blocks = some["peak_gib"].tolist(), some["blocks_per_checkpoint"].astype(int).tolist()
    fits = rows.loc["none", "status"] != "oom"
    if fits or blocks[0] != 1 or peaks != sorted(peaks) or peaks[1] < (1 + SAME) * peaks[0]:
        return None
    return _where(some.iloc[0]) | {"least": peaks[0], "next": peaks[1], "next_blocks": blocks[1],
                                   "most": peaks[-1], "most_blocks": blocks[-1]}


def memory_formula(tables: Tables) -> Claim:
    """The formula is within 1 KiB of what the program asked for, in all that was recorded."""
    rows = where(tables["memory.peaks"], phase="whole", status="ok")
    off = ((rows["requested_gib"] - rows["predicted_requested_gib"]) * GIB).abs().round()
    return {"steps": len(rows), "exact": int((off == 0).sum())} if off.max() <= 1024 else None


def answer_timeline(tables: Tables) -> Claim:
    """(a): the peaks of the stages, which are of about the same height."""
    rows = {phase: _peak(tables, "step", phase) for phase in ("forward", "backward", "optimizer")}
    heights = {phase: row["peak_gib"] for phase, row in rows.items()}
    alike = min(heights.values()) > 0.9 * max(heights.values())
    return _where(rows["forward"]) | heights if alike else None


def answer_mixed_memory(tables: Tables) -> Claim:
    """(c): autocast raises forward's peak and lowers the full step's."""
    forward, step = (_peak(tables, mode, precision="bf16")["peak_gib"] / _peak(tables, mode)["peak_gib"] - 1
                     for mode in ("forward", "step"))
    context = _peak(tables, "step")["context_length"]
    found = {"context": context, "forward": forward, "step": -step}
    return found if forward > SAME and step < -SAME else None


def answer_residual(tables: Tables) -> Claim:
    """(d): one tensor of the residual stream, derived."""
    row = usual(tables["memory.peaks"], phase="whole").iloc[0]
    width = SIZES[row["size"]].d_model
    return _where(row) | {"batch": row["batch_size"], "d_model": width,
                          "mib": row["batch_size"] * row["context_length"] * width * 4 / MIB}


def answer_largest(tables: Tables) -> Claim:
    """(e): the largest allocations of forward are attention's T x T matrices."""
    rows, _ = _allocated(tables, "allocated in forward")
    most, first = rows[rows["mib"] == rows["mib"].max()], rows.sort_values("rank").iloc[0]
    squares = 4 * first["batch_size"] * SIZES[first["size"]].num_heads * first["context_length"]**2 / MIB
    if not most["region"].str.startswith("attention.").all() or first["mib"] != squares:
        return None
    return {"mib": squares, "count": int(most["count"].sum())}


def block_saves(tables: Tables) -> Claim:
    """2026 (f): what one block saves for backward, and how much of it the five largest places make."""
    rows, sums = _allocated(tables, "saved by a block")
    return _where(rows.iloc[0]) | {"saved": sums.sum(), "tensors": int(rows["count"].sum()),
                                   "five": sums.nlargest(5).sum() / sums.sum()}


def block_gradients(tables: Tables) -> Claim:
    """2026 (f): the gradients that a block produces are four bytes for each of its parameters."""
    rows, sums = _allocated(tables, "gradients of a block")
    shape, made = SIZES[rows["size"].iloc[0]], sums.sum()
    parameters = 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff + 2 * shape.d_model
    saved = _allocated(tables, "saved by a block")[1].sum() / made
    found = {"gradients": made, "parameters": parameters, "saved": saved}
    return found if made == 4 * parameters / MIB else None


def nested_start(tables: Tables) -> Claim:
    """2026: reaching every block anew from the first input keeps memory the same, whatever their number."""
    rows = where(nested(tables), arrangement="from the start").sort_values("blocks")
    few, many = rows.iloc[0], rows.iloc[-1]
    runs = many["blocks"] + many["blocks"] * (many["blocks"] + 1) / 2
    if many["beyond_gib"] > 1.1 * few["beyond_gib"] or many["block_runs"] != runs:
        return None
    return {"few": few["blocks"], "many": many["blocks"], "few_gib": few["beyond_gib"],
            "many_gib": many["beyond_gib"], "runs": int(runs)}
