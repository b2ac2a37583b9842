"""The memory study's claims: the numbers of one sentence where it holds, None where it does not."""

import pandas as pd

from stepscope.config import SIZES
from stepscope.model.accounting import GIB, MIB
from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import PLAIN, SHAPE, largest, reference, select
from stepscope.report.tables import all_of, number
from stepscope.stats import SAME
from stepscope.studies.memory.tables import (
    begins_backward,
    nested,
    one_level,
    usual,
)


def _peak(tables: Tables, mode: str, phase: str = "whole", **fields: object) -> pd.Series:
    """The usual run's row of one phase."""
    return usual(tables["memory.peaks"], mode=mode, phase=phase, **fields).iloc[0]


def _allocated(tables: Tables, what: str) -> tuple[pd.DataFrame, pd.Series]:
    """The usual run's ``allocations`` of one kind, and the sum of each row in MiB."""
    rows = usual(tables["memory.allocations"], what=what)
    return rows, rows["mib"] * rows["count"]


def _shape(row: pd.Series) -> dict:
    return {"size": row["size"], "context": row["context_length"]}


def peak_parts(tables: Tables) -> Claim:
    """What a full step holds at its peak, which is where backward begins."""
    row = _peak(tables, "step")
    if not begins_backward(row) or row["saved_for_backward_gib"] < row["weights_gib"]:
        return None
    return _shape(row) | {
        "peak": row["peak_gib"],
        "weights": row["weights_gib"],
        "state": row["optimizer_state_gib"],
        "saved": row["saved_for_backward_gib"],
    }


def peak_of_optimizer(tables: Tables) -> Claim:
    """Up to which context the plain step's peak is AdamW's, in fp32 and in bf16; beyond, it is not."""
    rows = select(tables["memory.peaks"], PLAIN, mode="step", phase="whole", status="ok", size=largest)
    found = {}
    for precision in ("fp32", "bf16"):
        own = select(rows, precision=precision).sort_values("context_length")
        adamw = own["peak_in"].eq("optimizer")
        if not adamw.any() or adamw.all() or not adamw.is_monotonic_decreasing:
            return None
        found[precision] = int(own.loc[adamw, "context_length"].max())
    return found | {"size": rows["size"].iloc[0]}


def peak_foreach(tables: Tables) -> Claim:
    """What the default AdamW takes beside its state, and the fused one does not."""
    foreach, fused = (
        _peak(tables, "step", "optimizer", **fields)["temporaries_gib"]
        for fields in ({}, {"attention": "sdpa", "optimizer": "fused"})
    )
    return {"temporary": foreach} if fused < SAME * foreach else None


def checkpoint_gain(tables: Tables) -> Claim:
    """What a checkpoint around every block takes off the peak of forward and backward, and costs; larger
    groups of blocks keep more."""
    rows = one_level(tables)
    rows = select(rows, context_length=min).set_index("checkpoint_policy")
    one, none = rows.loc["every 1"], rows.loc["none"]
    less, more = 1 - one["peak_gib"] / none["peak_gib"], one["gpu_ms"] / none["gpu_ms"] - 1
    groups = rows[rows["blocks_per_checkpoint"] > 0].sort_values("blocks_per_checkpoint")
    some = groups.iloc[len(groups) // 2]
    if less < SAME or more < SAME or not groups["peak_gib"].is_monotonic_increasing:
        return None
    return _shape(one) | {
        "attention": one["attention"],
        "less": less,
        "more": more,
        "one": one["peak_gib"],
        "group": some["peak_gib"],
        "blocks": int(some["blocks_per_checkpoint"]),
    }


def checkpoint_best(tables: Tables) -> Claim:
    """2026: at the longest context, where a step without checkpoints does not fit, one block a checkpoint
    needs least, and larger groups keep more."""
    rows = one_level(tables)
    rows = select(rows, context_length=max).set_index("checkpoint_policy")
    some = select(rows.drop(index="none"), status="ok", peak_gib=pd.Series.notna)
    peaks, blocks = some["peak_gib"].tolist(), some["blocks_per_checkpoint"].astype(int).tolist()
    fits = rows.loc["none", "status"] != "oom"
    if fits or blocks[0] != 1 or peaks != sorted(peaks) or peaks[1] < (1 + SAME) * peaks[0]:
        return None
    return _shape(some.iloc[0]) | {
        "least": peaks[0],
        "next": peaks[1],
        "next_blocks": blocks[1],
        "most": peaks[-1],
        "most_blocks": blocks[-1],
    }


def checkpoint_least(tables: Tables) -> Claim:
    """2026: where it is not so, how many blocks a checkpoint needed least at the longest context."""
    if checkpoint_best(tables):
        return None
    rows = one_level(tables)
    rows = select(rows, context_length=max, status="ok", peak_gib=pd.Series.notna)
    least = rows.loc[rows["peak_gib"].idxmin()]
    return _shape(least) | {"policy": least["checkpoint_policy"], "least": least["peak_gib"]}


def memory_formula(tables: Tables) -> Claim:
    """How far the formula is at most, under 1 KiB, from what the program asked for, in all that was recorded,
    none compiled; ``how`` in words."""
    rows = select(tables["memory.peaks"], phase="whole", status="ok")
    beyond = ((rows["requested_gib"] - rows["predicted_requested_gib"]) * GIB).abs().round()
    if beyond.max() > 1024:
        return None
    forward, exact = f"({(rows['mode'] == 'forward').sum()} of them forward alone)", int((beyond == 0).sum())
    modes = all_of(len(rows), "recorded mode")
    how = (
        f"to within {number(beyond.max(), 'B')}: of {modes} {forward}, and to the byte in {exact}"
        if exact < len(rows)
        else f"to the byte, in {modes} {forward}"
    )
    return {"how": how, "most": int(beyond.max()), "steps": len(rows), "exact": exact}


def peak_reserved(tables: Tables) -> Claim:
    """How much more than its peak a plain full step reserves: at least, at most, and with expandable
    segments."""
    rows = select(tables["memory.peaks"], mode="step", phase="whole", status="ok")
    more = rows["reserved_gib"] / rows["peak_gib"] - 1
    segments = more[rows["expandable_segments"]].max()
    plain = more[~rows["expandable_segments"].astype(bool)]
    found = {"least": plain.min(), "most": plain.max(), "segments": segments}
    return found if segments < plain.max() else None


def graph_reserved(tables: Tables) -> Claim:
    """What the largest size's step as a CUDA graph reserves, at the context at which sizes are compared, and
    how much of it the graph adds to the same step without one."""
    rows = select(
        tables["ladder.steps"],
        SHAPE,
        status="ok",
        optimization=["blocks", "cuda_graph"],
        size=largest,
        context_length=reference,
    ).set_index("optimization")
    row, added = rows.loc["cuda_graph"], rows["reserved_gib"]["cuda_graph"] - rows["reserved_gib"]["blocks"]
    found = {"reserved": row["reserved_gib"], "peak": row["peak_gib"], "added": added}
    return _shape(row) | found if row["reserved_gib"] > (1 + SAME) * row["peak_gib"] and added > 0 else None


def answer_timeline_forward(tables: Tables) -> Claim:
    """(a): forward alone saves nothing, so that it holds little beside its weights."""
    row = _peak(tables, "forward", "forward")
    share = row["weights_gib"] / row["peak_gib"]
    found = _shape(row) | {
        "peak": row["peak_gib"],
        "weights": row["weights_gib"],
        "temporaries": row["temporaries_gib"],
    }
    return found if share > 0.9 and row["saved_for_backward_gib"] == 0 else None


def _stages(tables: Tables) -> tuple[dict, bool]:
    """The peaks of the usual step's stages, and whether they are of about the same height."""
    rows = {phase: _peak(tables, "step", phase) for phase in ("forward", "backward", "optimizer")}
    heights = {phase: row["peak_gib"] for phase, row in rows.items()}
    return _shape(rows["forward"]) | heights, min(heights.values()) > 0.9 * max(heights.values())


def answer_timeline(tables: Tables) -> Claim:
    """(a): the peaks of the stages, which are of about the same height."""
    found, alike = _stages(tables)
    return found if alike else None


def answer_timeline_apart(tables: Tables) -> Claim:
    """(a): the same where they are not."""
    found, alike = _stages(tables)
    return None if alike else found


def snapshot_kept(tables: Tables) -> Claim:
    """The run that kept a snapshot for PyTorch's viewer."""
    runs = tables["runs"]
    run = select(runs[runs["keep_snapshot"].eq(True)], study="memory", status="ok").iloc[0]
    return _shape(run) | {"path": f"memory/{run['run_id']}/snapshot.pickle"}


def peaks_out(tables: Tables) -> Claim:
    """(b): the shortest context at which the full step does not fit, and forward does."""
    rows = select(tables["memory.peaks"], PLAIN, phase="whole", precision="fp32", size=largest)
    out = select(rows, mode="step", status="oom").sort_values("context_length").iloc[0]
    forward = select(rows, mode="forward", status="ok", context_length=out["context_length"]).iloc[0]
    return _shape(out) | {"need": out["predicted_gib"], "forward": forward["peak_gib"]}


def peaks_rounding(tables: Tables) -> Claim:
    """(b): a longer context that needs less, though its tensors need no less: the allocator rounds less."""
    rows = select(
        tables["memory.peaks"], PLAIN, mode="step", phase="whole", status="ok", precision="fp32", size=largest
    ).sort_values("context_length")
    short, long = rows.iloc[0], rows.iloc[1]
    if short["peak_gib"] <= long["peak_gib"] or short["requested_gib"] > long["requested_gib"]:
        return None
    return {
        "short": short["context_length"],
        "long": long["context_length"],
        "short_rounding": short["rounding_gib"],
        "long_rounding": long["rounding_gib"],
    }


def answer_mixed_memory(tables: Tables) -> Claim:
    """(c): forward's and the full step's peak in both precisions."""
    found = {
        f"{mode}_{precision}": _peak(tables, mode, precision=precision)["peak_gib"]
        for mode in ("forward", "step")
        for precision in ("fp32", "bf16")
    }
    return _shape(_peak(tables, "step")) | found


def mixed_memory_why(tables: Tables) -> Claim:
    """(c): autocast raises forward's peak by copies of the weights; in the full step it saves less for
    backward than the copies and AdamW's temporaries, now the peak, leave of it."""
    low, high = (_peak(tables, "step", "backward", precision=precision) for precision in ("bf16", "fp32"))
    forward = _peak(tables, "forward", precision="bf16")["peak_gib"] / _peak(tables, "forward")["peak_gib"]
    if (
        forward < 1 + SAME
        or low["autocast_weight_cache_gib"] == 0
        or _peak(tables, "step", precision="bf16")["peak_in"] != "optimizer"
    ):
        return None
    return {
        "copies": low["autocast_weight_cache_gib"],
        "high": high["saved_for_backward_gib"],
        "low": low["saved_for_backward_gib"],
        "temporaries": _peak(tables, "step", "optimizer", precision="bf16")["temporaries_gib"],
    }


def mixed_memory_long(tables: Tables) -> Claim:
    """(c): at the longest context at which both fit, what autocast takes off the full step's peak."""
    rows = select(tables["memory.peaks"], PLAIN, mode="step", phase="whole", status="ok", size=largest)
    pivoted = rows.pivot(index="context_length", columns="precision", values="peak_gib").dropna().sort_index()
    less = 1 - pivoted["bf16"] / pivoted["fp32"]
    found = {"context": int(pivoted.index[-1]), "less": less.iloc[-1], "low": pivoted["bf16"].iloc[-1]}
    return found if len(less) > 1 and less.iloc[-1] > SAME else None


def answer_residual(tables: Tables) -> Claim:
    """(d): one tensor of the residual stream, derived."""
    row = usual(tables["memory.peaks"], phase="whole").iloc[0]
    width = SIZES[row["size"]].d_model
    return _shape(row) | {
        "batch": row["batch_size"],
        "d_model": width,
        "mib": row["batch_size"] * row["context_length"] * width * 4 / MIB,
    }


def answer_largest(tables: Tables) -> Claim:
    """(e): the largest allocations of forward are attention's T x T matrices, as many in each block."""
    rows, _ = _allocated(tables, "allocated in forward")
    most, first = rows[rows["mib"] == rows["mib"].max()], rows.sort_values("rank").iloc[0]
    shape, context = SIZES[first["size"]], first["context_length"]
    squares, count = 4 * first["batch_size"] * shape.num_heads * context**2 / MIB, int(most["count"].sum())
    if (
        not most["region"].str.startswith("attention.").all()
        or first["mib"] != squares
        or count % shape.num_layers
    ):
        return None
    return {
        "mib": squares,
        "count": count,
        "each": count // shape.num_layers,
        "blocks": shape.num_layers,
        "batch": first["batch_size"],
        "heads": shape.num_heads,
        "context": context,
    }


def answer_largest_other(tables: Tables) -> Claim:
    """(e): the largest allocation of forward where it is another."""
    rows, _ = _allocated(tables, "allocated in forward")
    first = rows.sort_values("rank").iloc[0]
    return (
        None
        if answer_largest(tables)
        else {
            "mib": first["mib"],
            "count": f"{first['count']:,.0f} times" if first["count"] > 1 else "once",
            "region": first["region"],
            "line": first["line"],
        }
    )


def block_saves(tables: Tables) -> Claim:
    """2026 (f): what one block saves for backward, and how much of it the five largest places make."""
    rows, sums = _allocated(tables, "saved by a block")
    return _shape(rows.iloc[0]) | {
        "saved": sums.sum(),
        "tensors": int(rows["count"].sum()),
        "five": sums.nlargest(5).sum() / sums.sum(),
    }


def block_gradients(tables: Tables) -> Claim:
    """2026 (f): the gradients that a block produces, and four bytes for each of its parameters."""
    rows, sums = _allocated(tables, "gradients of a block")
    parameters = _in_block(rows["size"].iloc[0])
    saved = _allocated(tables, "saved by a block")[1].sum() / sums.sum()
    return {
        "gradients": sums.sum(),
        "parameters": parameters,
        "expected": 4 * parameters / MIB,
        "saved": saved,
    }


def _in_block(size: str) -> int:
    """Parameters of a block: four projections, three matrices of the feed-forward, two norms."""
    shape = SIZES[size]
    return 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff + 2 * shape.d_model


def nested_least(tables: Tables) -> Claim:
    """2026: the checkpoint policy that needs least over the most blocks."""
    rows = nested(tables)
    least = rows.loc[select(rows, blocks=max)["beyond_gib"].idxmin()]
    return {
        "policy": least["checkpoint_policy"],
        "blocks": int(least["blocks"]),
        "beyond": least["beyond_gib"],
    }


def nested_start(tables: Tables) -> Claim:
    """2026: reaching every block anew from the first input keeps memory the same, whatever their number."""
    rows = select(nested(tables), checkpoint_policy="from the start").sort_values("blocks")
    few, many = rows.iloc[0], rows.iloc[-1]
    runs = many["blocks"] + many["blocks"] * (many["blocks"] + 1) / 2
    if many["beyond_gib"] > 1.1 * few["beyond_gib"] or many["block_runs"] != runs:
        return None
    return {
        "few": few["blocks"],
        "many": many["blocks"],
        "few_gib": few["beyond_gib"],
        "many_gib": many["beyond_gib"],
        "runs": int(runs),
    }


def answer_10b(tables: Tables) -> Claim:
    """2026: a full step of the largest size does not fit, by its state alone; how far what is less goes."""
    rows = select(tables["memory.checkpoints"], size="10B")
    shape, vocab = SIZES["10B"], int(rows["vocab_size"].iloc[0])
    parameters = shape.num_layers * _in_block("10B") + 2 * vocab * shape.d_model + shape.d_model
    state, device = 16 * parameters / GIB, tables["runs"]["machine_gpu_memory_gib"].max()
    found = {"parameters": parameters, "state": state, "memory": device}
    return shape._asdict() | found if state > device else None


def reach_10b_best(tables: Tables) -> Claim:
    """The longest contexts at which forward, and forward and backward, of it fit."""
    rows = select(tables["memory.checkpoints"], size="10B", status="ok")
    longest = rows.groupby("mode")["context_length"].max()
    both = select(rows, mode="forward_backward", context_length=longest["forward_backward"])
    if (both["checkpoint_policy"] == "none").any():
        return None
    return {
        "forward": int(longest["forward"]),
        "both": int(longest["forward_backward"]),
        "peak": both["peak_gib"].min(),
    }


# The assignment's questions: why


def adamw_sum(tables: Tables) -> Claim:
    """The peak of PyTorch's default AdamW is five times the weights, at each context the same."""
    rows = select(
        tables["memory.peaks"],
        PLAIN,
        mode="step",
        phase="optimizer",
        precision="fp32",
        status="ok",
        size=largest,
    )
    parts = rows[["gradients_gib", "optimizer_state_gib", "temporaries_gib"]].div(rows["weights_gib"], axis=0)
    if (
        len(rows) < 2
        or (parts.max() / [1, 2, 1] - 1).abs().max() > SAME
        or (parts.min() / [1, 2, 1] - 1).abs().max() > SAME
    ):
        return None
    each = rows["weights_gib"].iloc[0]
    return {
        "size": rows["size"].iloc[0],
        "parts": 5,
        "each": each,
        "together": 5 * each,
        "contexts": len(rows),
    }


def mixed_memory_sum(tables: Tables) -> Claim:
    """(c): where backward begins, and in AdamW, in both precisions: what autocast saves less and holds
    more."""
    low, high = (_peak(tables, "step", "backward", precision=precision) for precision in ("bf16", "fp32"))
    adamw = _peak(tables, "step", "optimizer", precision="bf16")["peak_gib"]
    found = {
        "less": high["saved_for_backward_gib"] - low["saved_for_backward_gib"],
        "copies": low["autocast_weight_cache_gib"],
        "high": high["peak_gib"],
        "low": low["peak_gib"],
        "adamw": adamw,
    }
    return found if high["peak_gib"] > adamw > low["peak_gib"] and found["less"] > found["copies"] else None


def peak_without_gradients(tables: Tables) -> Claim:
    """Where the plain step peaks, at the begin of backward, nearly no gradient is there yet."""
    row = _peak(tables, "step")
    gradients = row["weights_gib"]
    return (
        {"gradients": gradients, "share": row["gradients_gib"] / gradients}
        if (begins_backward(row) and row["gradients_gib"] < 0.1 * gradients)
        else None
    )
