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
    of_largest,
    one_level,
    usual,
    where,
)

SAME = 0.01  # of a peak: a smaller difference is none


def peak_parts(tables: Tables) -> dict | None:
    """What a full step holds at its peak, which is where backward begins."""
    row = usual(where(tables["memory.peaks"], mode="step", phase="whole")).iloc[0]
    if not (begins_backward(row) and row["saved_for_backward_gib"] > row["weights_gib"]):
        return None
    return {"size": row["size"], "context": row["context_length"], "peak": row["peak_gib"],
            "weights": row["weights_gib"], "state": row["optimizer_state_gib"],
            "saved": row["saved_for_backward_gib"]}


def peak_context(tables: Tables) -> dict | None:
    """The first context at which what is saved for backward is the larger part of a full step's peak."""
    rows = _steps(tables, status="ok")
    share = (rows["saved_for_backward_gib"] / rows["peak_gib"]).tolist()
    more = [context for context, part in zip(rows["context_length"], share) if part > 0.5]
    if not (share == sorted(share) and share[0] < 0.5 and more):
        return None
    return {"size": rows["size"].iloc[0], "context": more[0]}


def peak_foreach(tables: Tables) -> dict | None:
    """What the default AdamW takes beside its state, and the fused one does not."""
    optimizer = where(tables["memory.peaks"], mode="step", phase="optimizer")
    foreach, fused = usual(optimizer).iloc[0], usual(optimizer, attention="sdpa", optimizer="fused").iloc[0]
    if not (fused["temporaries_gib"] < SAME * foreach["temporaries_gib"]):
        return None
    return {"temporary": foreach["temporaries_gib"], "size": foreach["size"]}


def checkpoint_gain(tables: Tables) -> dict | None:
    """What a checkpoint around every block takes off the peak of forward and backward, and costs."""
    rows = one_level(tables).set_index("arrangement")
    one, none = rows.loc["every 1"], rows.loc["none"]
    less, more = 1 - ratio(one["peak_gib"], none["peak_gib"], "GiB"), ratio(one["gpu_ms"], none["gpu_ms"]) - 1
    if not (less > SAME and more > SAME):
        return None
    return {"size": one["size"], "context": one["context_length"], "less": less, "more": more,
            "before": none["peak_gib"], "after": one["peak_gib"]}


def checkpoint_best(tables: Tables) -> dict | None:
    """One block a checkpoint needs least, and larger groups keep more."""
    return _one_block_is_best(one_level(tables))


def checkpoint_best_longest(tables: Tables) -> dict | None:
    """The same at the longest context, where a step without checkpoints does not fit (2026)."""
    rows = one_level(tables, longest=True)
    if not ((rows.loc[rows["arrangement"] == "none", "status"] == "oom").all()):
        return None
    return _one_block_is_best(rows)


def memory_formula(tables: Tables) -> dict | None:
    """The formula is within 1 KiB of what the program asked for, in all that was recorded."""
    rows = where(tables["memory.peaks"], phase="whole", status="ok")
    off = ((rows["requested_gib"] - rows["predicted_requested_gib"]) * GIB).abs().round()
    return {"steps": len(rows), "exact": int((off == 0).sum())} if off.max() <= 1024 else None


def bf16_moments_memory(tables: Tables) -> dict | None:
    """Bytes a parameter of the ladder's last step (bf16 weights, gradients and moments, fp32 masters)."""
    row = usual(where(tables["memory.peaks"], mode="step", phase="whole")).iloc[0]
    last = last_step_bytes(config_of(row)) / GIB
    if not (last < row["peak_gib"]):
        return None
    bytes_each = MASTER + 2 * LOW + 2 * MOMENT
    return {"bytes": bytes_each, "size": row["size"], "peak": row["peak_gib"], "last": last}


def memory_segments(tables: Tables) -> dict | None:
    """What expandable segments change about what the allocator reserves beyond tensors."""
    steps = where(tables["memory.peaks"], mode="step", phase="whole")
    plain, expandable = (usual(steps, precision="bf16", expandable_segments=on).iloc[0]
                         for on in (False, True))
    if not (expandable["reserved_gib"] < (1 - SAME) * plain["reserved_gib"]):
        return None
    return {"size": plain["size"], "peak": plain["peak_gib"], "before": plain["reserved_gib"],
            "after": expandable["reserved_gib"]}


def answer_timeline(tables: Tables) -> dict | None:
    """(a): the peaks of the stages, which are of about the same height."""
    rows = usual(where(tables["memory.peaks"], mode="step")).set_index("phase")
    heights = rows.loc[["forward", "backward", "optimizer"], "peak_gib"]
    if not (heights.min() > 0.9 * heights.max()):
        return None
    return {"size": rows["size"].iloc[0], "context": rows["context_length"].iloc[0]} | heights.to_dict()


def answer_mixed_memory(tables: Tables) -> dict | None:
    """(c): autocast raises forward's peak and lowers the full step's, if anything."""
    rows = of_largest(where(tables["memory.peaks"], phase="whole", status="ok", **PLAIN))
    wide = rows.pivot(index=["mode", "context_length"], columns="precision", values="peak_gib").dropna()
    change = (wide["bf16"] / wide["fp32"] - 1).sort_index()
    copies = usual(rows[rows["mode"] == "forward"], precision="bf16").iloc[0]
    forward, step = change.loc[("forward", copies["context_length"])], change.loc["step"]
    if not (change.loc["forward"].min() > SAME and step.max() < SAME and step.min() < -SAME):
        return None
    return {"forward": forward, "step": -step.min(), "copies": copies["bf16_copies_gib"],
            "context": copies["context_length"]}


def answer_residual(tables: Tables) -> dict | None:
    """(d): one tensor of the residual stream, derived."""
    row = usual(where(tables["memory.peaks"], phase="whole")).iloc[0]
    width = SIZES[row["size"]].d_model
    batch, context = row["batch_size"], row["context_length"]
    return {"size": row["size"], "batch": batch, "context": context, "d_model": width,
            "mib": batch * context * width * 4 / MIB}


def answer_largest(tables: Tables) -> dict | None:
    """(e): the largest allocations of forward are attention's T x T matrices."""
    rows = usual(where(tables["memory.allocations"], what="allocated in forward"))
    most, first = rows[rows["mib"] == rows["mib"].max()], rows.sort_values("rank").iloc[0]
    squares = 4 * first["batch_size"] * SIZES[first["size"]].num_heads * first["context_length"]**2 / MIB
    if not (most["region"].str.startswith("attention.").all() and first["mib"] == squares):
        return None
    return first[["size", "mib", "line"]].to_dict() | {"count": int(most["count"].sum())}


def block_saves(tables: Tables) -> dict | None:
    """2026 (f): what one block saves for backward, and how much of it the five largest places make."""
    rows = usual(where(tables["memory.allocations"], what="saved by a block"))
    sums = (rows["mib"] * rows["count"]).sort_values(ascending=False)
    if not (len(sums) > 5):
        return None
    return {"size": rows["size"].iloc[0], "context": rows["context_length"].iloc[0], "saved": sums.sum(),
            "tensors": int(rows["count"].sum()), "five": sums.head(5).sum() / sums.sum()}


def block_gradients(tables: Tables) -> dict | None:
    """2026 (f): the gradients that a block produces are four bytes for each of its parameters."""
    rows = usual(where(tables["memory.allocations"], what="gradients of a block"))
    made, shape = (rows["mib"] * rows["count"]).sum(), SIZES[rows["size"].iloc[0]]
    parameters = 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff + 2 * shape.d_model
    if made != 4 * parameters / MIB:
        return None
    saved = usual(where(tables["memory.allocations"], what="saved by a block"))
    ratio_saved = (saved["mib"] * saved["count"]).sum() / made
    return {"gradients": made, "parameters": parameters, "saved": ratio_saved}


def nested_start(tables: Tables) -> dict | None:
    """2026: reaching every block anew from the first input keeps memory the same whatever the number of
    blocks."""
    rows = _nested(tables).xs("from the start", level="arrangement")
    few, many = rows.iloc[0], rows.iloc[-1]
    runs = many.name + many.name * (many.name + 1) / 2
    if not (many["beyond"] < 1.1 * few["beyond"] and many["block_runs"] == runs):
        return None
    return {"few": few.name, "many": many.name, "few_gib": few["beyond"], "many_gib": many["beyond"],
            "runs": int(many["block_runs"])}


def nested_halved(tables: Tables) -> dict | None:
    """2026: halving keeps an input a level, for fewer runs than the start; one checkpoint a block keeps them
    all."""
    rows = _nested(tables)
    last = rows.xs(rows.index.get_level_values("blocks").max(), level="blocks")
    none, halved, start, each = (last.loc[name] for name in (
        "none", "halved", "from the start", "every block"))
    if not (start["beyond"] <= halved["beyond"] < each["beyond"] < none["beyond"]):
        return None
    return {"blocks": int(last["number"].iloc[0]), "none": none["beyond"], "halved": halved["beyond"],
            "each": each["beyond"], "more": ratio(halved["gpu_ms"], none["gpu_ms"]) - 1,
            "each_more": ratio(each["gpu_ms"], none["gpu_ms"]) - 1}


def reach_state(tables: Tables) -> dict | None:
    """2026: 10B's weights, gradients and moments alone, by formula, beside the most that was measured."""
    rows = where(tables["memory.checkpoints"], size="10B")
    state, most = 16 * parameter_count(config_of(rows.iloc[0])) / GIB, rows["peak_gib"].max()
    if not (state > most):
        return None
    return {"state": state, "parameters": parameter_count(config_of(rows.iloc[0]))}


def reach_checkpoints(tables: Tables) -> dict | None:
    """2026: how far 10B's forward and backward run with a checkpoint a block, and without."""
    rows = where(tables["memory.checkpoints"], size="10B", mode="forward_backward")
    rows = rows.sort_values("context_length")
    fits = {name: own[own["status"] == "ok"] for name, own in rows.groupby("arrangement")}
    far, near = fits["every 1"].iloc[-1], fits["none"]
    without = near["context_length"].max() if len(near) else 0
    if not (without < far["context_length"]):
        return None
    return {"context": far["context_length"], "peak": far["peak_gib"], "without": int(without)}


def _steps(tables: Tables, **fields: object) -> pd.DataFrame:
    """The largest size's plain fp32 steps by context."""
    rows = where(tables["memory.peaks"], mode="step", phase="whole", precision="fp32", **PLAIN, **fields)
    return of_largest(rows).sort_values("context_length")


def _one_block_is_best(rows: pd.DataFrame) -> dict | None:
    some = rows[(rows["blocks_per_checkpoint"] > 0) & (rows["status"] == "ok")]
    some = some.sort_values("blocks_per_checkpoint")
    peaks, blocks, best = some["peak_gib"].tolist(), some["blocks_per_checkpoint"].tolist(), some.iloc[0]
    if blocks[0] != 1 or peaks != sorted(peaks) or peaks[1] < (1 + SAME) * peaks[0]:
        return None
    return {"size": best["size"], "context": best["context_length"], "least": peaks[0], "next": peaks[1],
            "next_blocks": int(blocks[1]), "most": peaks[-1], "most_blocks": int(blocks[-1])}


def _nested(tables: Tables) -> pd.DataFrame:
    """What nested arrangements take beyond weights and gradients, by (blocks, arrangement)."""
    rows = tables["memory.checkpoints"]
    rows = rows[rows["expected_kept_gib"].notna() & (rows["status"] == "ok")]
    rows = rows.assign(beyond=rows["peak_gib"] - rows["state_gib"], number=rows["blocks"])
    return where(rows, mode="forward_backward").set_index(["blocks", "arrangement"]).sort_index()
