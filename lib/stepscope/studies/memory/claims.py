"""The memory study's claims: the numbers of one sentence where it holds, None where it does not."""
import pandas as pd

from stepscope.config import SIZES
from stepscope.report.tables import ratio
from stepscope.step.accounting import GIB, LOW, MASTER, MIB, MOMENT, last_step_bytes
from stepscope.step.flops import parameter_count
from stepscope.studies.memory.tables import (
    PLAIN,
    Tables,
    begins_backward,
    config_of,
    nested,
    of_largest,
    one_level,
    usual,
    where,
)

Claim = dict | None
SAME = 0.01  # of a peak: a smaller difference is none


def _allocated(tables: Tables, what: str) -> tuple[pd.DataFrame, pd.Series]:
    """The usual run's ``allocations`` of one kind, and the sum of each row in MiB."""
    rows = usual(where(tables["memory.allocations"], what=what))
    return rows, rows["mib"] * rows["count"]


def _where(row: pd.Series) -> dict:
    return {"size": row["size"], "context": row["context_length"]}


def peak_parts(tables: Tables) -> Claim:
    """What a full step holds at its peak, which is where backward begins."""
    row = usual(where(tables["memory.peaks"], mode="step", phase="whole")).iloc[0]
    if not begins_backward(row) or row["saved_for_backward_gib"] < row["weights_gib"]:
        return None
    return _where(row) | {"peak": row["peak_gib"], "weights": row["weights_gib"],
                          "state": row["optimizer_state_gib"], "saved": row["saved_for_backward_gib"]}


def peak_context(tables: Tables) -> Claim:
    """The first context at which what is saved for backward is the larger part of a full step's peak."""
    rows = where(tables["memory.peaks"], mode="step", phase="whole", precision="fp32", status="ok", **PLAIN)
    rows = of_largest(rows).sort_values("context_length")
    share = rows["saved_for_backward_gib"] / rows["peak_gib"]
    more = rows.loc[share > 0.5, "context_length"].tolist()
    return {"context": more[0]} if more and share.is_monotonic_increasing and share.iloc[0] < 0.5 else None


def peak_foreach(tables: Tables) -> Claim:
    """What the default AdamW takes beside its state, and the fused one does not."""
    rows = where(tables["memory.peaks"], mode="step", phase="optimizer")
    foreach, fused = (usual(rows, **fields).iloc[0]["temporaries_gib"]
                      for fields in ({}, {"attention": "sdpa", "optimizer": "fused"}))
    return {"temporary": foreach} if fused < SAME * foreach else None


def checkpoint_gain(tables: Tables) -> Claim:
    """What a checkpoint around every block takes off the peak of forward and backward, and costs."""
    rows = one_level(tables).set_index("arrangement")
    one, none = rows.loc["every 1"], rows.loc["none"]
    less, more = 1 - ratio(one["peak_gib"], none["peak_gib"], "GiB"), ratio(one["gpu_ms"], none["gpu_ms"]) - 1
    return _where(one) | {"less": less, "more": more} if less > SAME and more > SAME else None


def checkpoint_best(tables: Tables) -> Claim:
    """One block a checkpoint needs least, and larger groups keep more."""
    return _one_block_is_best(one_level(tables))


def checkpoint_best_longest(tables: Tables) -> Claim:
    """The same at the longest context, where a step without checkpoints does not fit (2026)."""
    rows = one_level(tables, longest=True)
    without = rows.loc[rows["arrangement"] == "none", "status"]
    return _one_block_is_best(rows) if (without == "oom").all() else None


def _one_block_is_best(rows: pd.DataFrame) -> Claim:
    some = rows[(rows["blocks_per_checkpoint"] > 0) & (rows["status"] == "ok")]
    peaks, blocks = some["peak_gib"].tolist(), some["blocks_per_checkpoint"].tolist()
    if blocks[0] != 1 or peaks != sorted(peaks) or peaks[1] < (1 + SAME) * peaks[0]:
        return None
    return _where(some.iloc[0]) | {"least": peaks[0], "next": peaks[1], "next_blocks": int(blocks[1]),
                                   "most": peaks[-1], "most_blocks": int(blocks[-1])}


def memory_formula(tables: Tables) -> Claim:
    """The formula is within 1 KiB of what the program asked for, in all that was recorded."""
    rows = where(tables["memory.peaks"], phase="whole", status="ok")
    off = ((rows["requested_gib"] - rows["predicted_requested_gib"]) * GIB).abs().round()
    return {"steps": len(rows), "exact": int((off == 0).sum())} if off.max() <= 1024 else None


def bf16_moments_memory(tables: Tables) -> Claim:
    """Bytes a parameter of the ladder's last step (bf16 weights, gradients and moments, fp32 masters)."""
    row = usual(where(tables["memory.peaks"], mode="step", phase="whole")).iloc[0]
    less = last_step_bytes(config_of(row)) / GIB < row["peak_gib"]
    return {"bytes": MASTER + 2 * LOW + 2 * MOMENT} if less else None


def memory_segments(tables: Tables) -> Claim:
    """What expandable segments change about what the allocator reserves beyond tensors."""
    steps = where(tables["memory.peaks"], mode="step", phase="whole")
    plain, expandable = (usual(steps, precision="bf16", expandable_segments=on).iloc[0]
                         for on in (False, True))
    before, after = plain["reserved_gib"], expandable["reserved_gib"]
    found = {"size": plain["size"], "peak": plain["peak_gib"], "before": before, "after": after}
    return found if after < (1 - SAME) * before else None


def answer_timeline(tables: Tables) -> Claim:
    """(a): the peaks of the stages, which are of about the same height."""
    rows = usual(where(tables["memory.peaks"], mode="step")).set_index("phase")
    heights = rows.loc[["forward", "backward", "optimizer"], "peak_gib"]
    return _where(rows.iloc[0]) | heights.to_dict() if heights.min() > 0.9 * heights.max() else None


def answer_mixed_memory(tables: Tables) -> Claim:
    """(c): autocast raises forward's peak and lowers the full step's, if anything."""
    rows = of_largest(where(tables["memory.peaks"], phase="whole", status="ok", **PLAIN))
    wide = rows.pivot(index=["mode", "context_length"], columns="precision", values="peak_gib").dropna()
    change = (wide["bf16"] / wide["fp32"] - 1).sort_index()
    context = usual(rows[rows["mode"] == "forward"], precision="bf16").iloc[0]["context_length"]
    step = change.loc["step"]
    holds = change.loc["forward"].min() > SAME > step.max() and step.min() < -SAME
    return {"forward": change.loc[("forward", context)], "step": -step.min()} if holds else None


def answer_residual(tables: Tables) -> Claim:
    """(d): one tensor of the residual stream, derived."""
    row = usual(where(tables["memory.peaks"], phase="whole")).iloc[0]
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
    return {"mib": squares, "line": first["line"], "count": int(most["count"].sum())}


def block_saves(tables: Tables) -> Claim:
    """2026 (f): what one block saves for backward, and how much of it the five largest places make."""
    rows, sums = _allocated(tables, "saved by a block")
    return _where(rows.iloc[0]) | {"saved": sums.sum(),
            "tensors": int(rows["count"].sum()), "five": sums.nlargest(5).sum() / sums.sum()}


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


def nested_halved(tables: Tables) -> Claim:
    """2026: halving keeps an input a level, for fewer runs than the start; one checkpoint a block all."""
    rows = nested(tables)
    blocks = rows["blocks"].max()
    last = where(rows, blocks=blocks).set_index("arrangement")
    start, halved, each, none = (last.loc[name, "beyond_gib"] for name in (
        "from the start", "halved", "every block", "none"))
    more, each_more = (ratio(last.loc[name, "gpu_ms"], last.loc["none", "gpu_ms"]) - 1
                       for name in ("halved", "every block"))
    found = {"blocks": blocks, "none": none, "halved": halved, "each": each, "more": more,
             "each_more": each_more}
    return found if start <= halved < each < none else None


def reach_state(tables: Tables) -> Claim:
    """2026: 10B's weights, gradients and moments alone, by formula, are more than all that was measured."""
    rows = where(tables["memory.checkpoints"], size="10B")
    parameters = parameter_count(config_of(rows.iloc[0]))
    state = 16 * parameters / GIB
    return {"state": state, "parameters": parameters} if state > rows["peak_gib"].max() else None


def reach_checkpoints(tables: Tables) -> Claim:
    """2026: how far 10B's forward and backward run with a checkpoint a block, and without."""
    rows = where(tables["memory.checkpoints"], size="10B", mode="forward_backward", status="ok")
    far = where(rows, arrangement="every 1").sort_values("context_length").iloc[-1]
    without = rows.loc[rows["arrangement"] == "none", "context_length"].max()
    without = 0 if pd.isna(without) else int(without)
    found = {"context": far["context_length"], "peak": far["peak_gib"], "without": without}
    return found if without < far["context_length"] else None
