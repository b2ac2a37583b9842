"""What the profiles say: of each sentence its numbers, where it holds; None where it does not; a LookupError
where there are no such profiles."""

import pandas as pd

from stepscope.config import EDITIONS, SIZES, WHOLE
from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import PLAIN, largest, reference, select
from stepscope.report.tables import all_of, listed, number, some_of
from stepscope.stats import LEAST_SHARE, SAME, SAME_WALL
from stepscope.studies.nsys.tables import (
    CONFIG,
    first_kernels,
    forward_clocks,
    profiles,
    shares,
    softmax_and_matmuls,
    with_in_process,
)
from stepscope.traces.families import ATTENTION_SOFTMAX, MATMUL
from stepscope.traces.kernel_names import short_name


def every_kernel_counted(tables: Tables) -> Claim:
    """All profiles; the operations of one step of each are those of every captured step."""
    operations, captured = tables["nsys.operations"], tables["nsys.clocks"]
    keys = [*CONFIG, "mode"]
    steps = captured[captured["captured"].astype(bool) & (captured["phase"] == WHOLE)]
    same = steps["operations"].groupby([steps[key] for key in keys]).agg(["min", "max"])
    named = operations["count"].groupby([operations[key] for key in keys]).sum().reindex(same.index)
    if len(same) and ((same["min"] == named) & (same["max"] == named)).all():
        return {"profiles": len(same), "operations": int(named.sum())}
    return None


def forward_matches_wall(tables: Tables) -> Claim:
    """(a) Where forward is GPU-bound, nsys's first to last operation (the median of captured passes) is the
    plain wall time; how far a single one is off at most."""
    rows = forward_clocks(tables)
    bound = rows[~(rows["waits"] | rows["slowed"])]
    relative_error = (bound["projected_ms"] / bound["plain_ms"] - 1).abs()
    passes = profiles(tables, "clocks", captured=True, mode="forward", phase=WHOLE)
    passes = passes.merge(bound[["size", "context_length", "plain_ms"]], on=["size", "context_length"])
    single = (passes["projected_ns"] / 1e6 / passes["plain_ms"] - 1).abs().max()
    if len(bound) and relative_error.max() < SAME_WALL:
        return {"most": relative_error.max(), "single": single}
    return None


def forward_slower_under_nsys(tables: Tables) -> Claim:
    """(a) Most passes that are launch-bound, be it only under the profiler, take clearly longer under it; the
    one that it slows most."""
    rows = forward_clocks(tables)
    rows = rows[rows["waits"] | rows["slowed"]]
    slower = int(rows["slowed"].sum())
    if 2 * slower <= len(rows):
        return None
    row = rows.loc[(rows["projected_ms"] / rows["plain_ms"]).idxmax()]
    return {
        "of": len(rows),
        "slower": slower,
        "size": row["size"],
        "context": int(row["context_length"]),
        "wall": row["plain_ms"],
        "nsys": row["projected_ms"],
    }


def forward_total(tables: Tables) -> Claim:
    """(a) The largest size at the reference context."""
    row = select(forward_clocks(tables), context_length=reference).iloc[-1]
    return {
        "size": row["size"],
        "context": int(row["context_length"]),
        "gpu": row["projected_ms"],
        "wall": row["plain_ms"],
    }


def profiled(tables: Tables) -> Claim:
    """How the profiles were made, where nsys made them."""
    runs = tables["nsys.results"]
    tools = runs["tool"].unique()
    count = len(tables["nsys.operations"].groupby(["run_id", "mode"]))
    by_nsys = len(tools) == 1 and str(tools[0]).startswith("nsys")
    return {"profiles": count, "tool": str(tools[0])} if by_nsys else None


def profiled_contexts(tables: Tables) -> Claim:
    """Between which contexts the two sizes of :func:`by_context` were profiled."""
    rows = profiles(tables, "operations")
    contexts = rows["context_length"]
    in_2026 = {ours: theirs for theirs, ours in EDITIONS[2026].items()}
    small, large = rows["size"].iloc[[0, -1]]
    if small == large:
        return None
    name = in_2026.get(large, large)
    return {
        "small": small,
        "large": large if name == large else f"{name} ({large})",
        "contexts": f"contexts {contexts.min():,} to {contexts.max():,}"
        if contexts.nunique() > 1
        else f"context {contexts.max():,}",
    }


def longer_would_fit(tables: Tables) -> Claim:
    """Whether the smallest size's step leaves nearly all of the GPU at the longest profiled context: the
    square of the context, doubled, is four times the memory."""
    rows = profiles(tables, "operations")
    size, context = rows["size"].iloc[0], int(rows["context_length"].max())
    peak = select(
        tables["benchmark.times"],
        PLAIN,
        size=size,
        context_length=context,
        precision="fp32",
        mode="step",
        phase=WHOLE,
    )["peak_gib"].iloc[0]
    gpu = tables["runs"]["machine_gpu_memory_gib"].min()
    return {"size": size, "context": context, "peak": peak, "memory": gpu} if 4 * peak < gpu else None


def first_kernel_is_a_matmul(tables: Tables) -> Claim:
    """(b) In every profile of forward the kernel with the most time is a matmul."""
    first = first_kernels(tables, "forward")
    return {"profiles": all_of(len(first), "profile")} if set(first["family"]) == {MATMUL} else None


def first_kernel_named(tables: Tables) -> Claim:
    """(b) The largest size's, at the reference context: who launches it how often."""
    rows = profiles(tables, "operations", context_length=reference, mode="forward")
    first = first_kernels(tables, "forward")
    size = rows["size"].iloc[-1]
    row = first.loc[(size, reference(rows["context_length"]))]
    own = rows[(rows["size"] == size) & (rows["name"] == row["name"])].groupby("region")["count"].sum()
    layers = SIZES[size].num_layers
    launches = [
        f"{count // layers} x {layers} layers in {region}" if count % layers == 0 else f"{count} in {region}"
        for region, count in own.sort_values(ascending=False).items()
    ]
    return {
        "size": size,
        "context": reference(rows["context_length"]),
        "kernel": short_name(row["name"]),
        "launches": int(row["count"]),
        "where": ", ".join(launches),
        "share": row["share"],
    }


def first_kernel_stays(tables: Tables) -> Claim:
    """(b) In how many profiles the same kernel is first over forward + backward; the largest size's
    contexts."""
    forward, both = (first_kernels(tables, mode) for mode in ("forward", "forward_backward"))
    common = forward.join(both.add_suffix("_both"), how="inner")
    same = common["name"] == common["name_both"]
    size = same.index[-1][0]
    contexts = [
        f"{context:,}"
        for context in same.index[same].get_level_values(1)[same.index[same].get_level_values(0) == size]
    ]
    return (
        {
            "same": some_of(int(same.sum()), len(common), "profile"),
            "size": size,
            "contexts": f"at {listed(contexts)}" if contexts else "at no context",
        }
        if same.any()
        else None
    )


def first_kernel_changes(tables: Tables) -> Claim:
    """(b) Where another kernel is first over forward + backward, it is a matmul of backward's, too."""
    forward, both = (first_kernels(tables, mode) for mode in ("forward", "forward_backward"))
    common = forward.join(both.add_suffix("_both"), how="inner")
    changed = int((common["name"] != common["name_both"]).sum())
    found = {"changed": some_of(changed, len(common), "profile")}
    return found if changed and set(common["family_both"]) == {MATMUL} else None


def remainder_of_forward(tables: Tables) -> Claim:
    """(c) What is no matmul weighs more the smaller the model: the two sizes at the ends."""
    rows = select(shares(tables, "forward").reset_index(), context_length=reference).set_index("size")
    remainder = 1 - rows[MATMUL]
    if len(remainder) > 1 and remainder.is_monotonic_decreasing:
        return {
            "small": remainder.index[0],
            "large": remainder.index[-1],
            "context": int(rows["context_length"].iloc[0]),
            "small_remainder": remainder.iloc[0],
            "large_remainder": remainder.iloc[-1],
        }
    return None


def nontrivial_kernels(tables: Tables) -> Claim:
    """(c) The families beside matmuls that take over 5% of the smallest size's forward."""
    row = select(shares(tables, "forward").reset_index(), context_length=reference).iloc[0]
    size, row = row["size"], row.drop(["size", "context_length", MATMUL])
    heavy = row[row >= LEAST_SHARE].sort_values(ascending=False)
    named = [f"{family} ({number(share, '%')})" for family, share in heavy.items()]
    return {"size": size, "families": listed(named)} if named else None


def softmax_grows(tables: Tables) -> Claim:
    """(c) Attention's softmax takes a larger share the longer the context, for the smallest size."""
    rows = shares(tables, "forward")[ATTENTION_SOFTMAX]
    own = rows[rows.index.get_level_values("size") == rows.index[0][0]].droplevel("size").sort_index()
    if len(own) > 1 and own.is_monotonic_increasing:
        return {
            "size": rows.index[0][0],
            "short": int(own.index[0]),
            "long": int(own.index[-1]),
            "short_share": own.iloc[0],
            "long_share": own.iloc[-1],
        }
    return None


def step_and_forward(tables: Tables) -> Claim:
    """(d) The matmuls' share of forward and of a full step, and AdamW's, of the smallest size."""
    return _in_step(tables)[0]


def step_and_forward_large(tables: Tables) -> Claim:
    """(d) The same of the largest size, where it is another."""
    small, large = _in_step(tables)
    return large if large["size"] != small["size"] else None


def _in_step(tables: Tables) -> list[dict]:
    """Of the smallest and the largest size."""
    forward, step = (shares(tables, mode) for mode in ("forward", "step"))
    context = reference(forward.reset_index()["context_length"])
    forward, step = (frame.xs(context, level="context_length") for frame in (forward, step))
    return [
        {
            "size": size,
            "context": context,
            "forward": forward.loc[size, MATMUL],
            "step": step.loc[size, MATMUL],
            "adamw": step.loc[size, "optimizer"],
        }
        for size in step.index[[0, -1]]
    ]


def others_in_step(tables: Tables) -> Claim:
    """(d) The two heaviest families beside matmuls and AdamW, in forward and in the step; the smallest
    size."""
    forward, step = (shares(tables, mode) for mode in ("forward", "step"))
    row = (step.index[0][0], reference(step.reset_index()["context_length"]))
    others = step.loc[row].drop([MATMUL, "optimizer"]).nlargest(2).index
    named = {
        f"{which}_{name}": value
        for which, family in zip(("first", "second"), others)
        for name, value in {
            "family": family,
            "forward": forward.loc[row, family],
            "step": step.loc[row, family],
        }.items()
    }
    return {"size": row[0]} | named


def optimizer_share(tables: Tables) -> Claim:
    """(d) AdamW's phase in a full step at the shortest and the longest context, of the largest size."""
    rows = profiles(tables, "operations", mode="step", size=largest)
    pivoted = rows.pivot_table(index="context_length", columns="phase", values="total_ns", aggfunc="sum")
    part = pivoted["optimizer"] / pivoted.sum(axis=1)
    if len(part) > 1 and part.is_monotonic_decreasing:
        return {
            "size": rows["size"].iloc[0],
            "short": int(part.index[0]),
            "long": int(part.index[-1]),
            "short_share": part.iloc[0],
            "long_share": part.iloc[-1],
        }
    return None


def _softmax(tables: Tables) -> pd.Series:
    """Attention's parts in the smallest size's forward at the reference context."""
    return select(softmax_and_matmuls(tables).reset_index(), context_length=reference).iloc[0]


def softmax_flops(tables: Tables) -> Claim:
    """(e) FLOPs and time of softmax and of both matmuls, the smallest size at the reference context."""
    row = _softmax(tables)
    return {
        "size": row["size"],
        "context": row["context_length"],
        "matmul_flops": row["matmul_flops"],
        "softmax_flops": row["softmax_flops"],
        "times": row["times"],
        "flops": row["flops"],
    }


def softmax_bytes(tables: Tables) -> Claim:
    """(e) What the same softmax moves: eight passes over the B H T^2 scores in fp32 (max 1, subtract 2,
    exponentiate 2, sum 1, divide 2), at the rate of a large copy; and its matmuls at a large matmul's."""
    row, runs = _softmax(tables), tables["benchmark.results"]
    bytes_moved = 8 * 4 * row["softmax_flops"] / 5
    copy = runs["copy_tb_s"].max()  # of all runs: what disturbs a burst only slows it
    rate = runs.loc[runs["precision"] == "fp32", "matmul_tflops"].max()
    return {
        "bytes": bytes_moved,
        "copy": copy,
        "copy_ms": bytes_moved / copy / 1e9,
        "softmax_ms": row["softmax_ms"],
        "rate": rate,
        "rate_ms": 2 * row["matmul_flops"] / rate / 1e9,
        "matmul_ms": row["scores_ms"] + row["values_ms"],
    }


def softmax_over_flops(tables: Tables) -> Claim:
    """Softmax's time over the matmuls' is several times its FLOPs over theirs, everywhere."""
    rows, row = softmax_and_matmuls(tables), _softmax(tables)
    if (rows["times"] / rows["flops"]).min() > 2:
        return {
            "size": row["size"],
            "context": row["context_length"],
            "times": row["times"],
            "flops": row["flops"],
        }
    return None


def nsys_agrees_in_process(tables: Tables) -> Claim:
    """GPU time of whole modes by nsys and by torch.profiler in another process differs by less than SAME."""
    whole = select(with_in_process(tables), phase=WHOLE)
    if whole["relative_error"].abs().max() < SAME:
        return {"cases": len(whole), "most": whole["relative_error"].abs().max()}
    return None


def nsys_in_bf16(tables: Tables) -> Claim:
    """The same in bf16, where some run at the power cap."""
    whole = select(with_in_process(tables, "bf16"), phase=WHOLE)
    return {"cases": len(whole), "most": whole["relative_error"].abs().max()}


# The assignment's questions: why, and what is said where the first sentence does not hold


def first_kernel_other(tables: Tables) -> Claim:
    """(b) Where it is no matmul in every profile: in how many it is, and what leads in the others."""
    first = first_kernels(tables, "forward")["family"]
    others = first[first != MATMUL]
    return (
        {"profiles": len(first), "matmuls": len(first) - len(others), "family": others.mode().iloc[0]}
        if len(others)
        else None
    )


def first_kernel_count(tables: Tables) -> Claim:
    """(b) Where the largest size's first kernel runs three times a block, in its feed-forward, and once in
    the head: how often that of other sizes runs, by blocks."""
    first = first_kernels(tables, "forward")["count"]
    first = first.xs(reference(first.reset_index()["context_length"]), level="context_length")
    named, (*others, size) = first_kernel_named(tables) or {}, first.index
    layers = SIZES[size].num_layers
    if named["where"] != f"3 x {layers} layers in ffn, 1 in head":
        return None
    each = [
        f"{int(first[one])} = {int(first[one]) // SIZES[one].num_layers} x {SIZES[one].num_layers}"
        + (f" + {rest}" if (rest := int(first[one]) % SIZES[one].num_layers) else "")
        + f" in {one}"
        for one in others
    ]
    return {
        "launches": named["launches"],
        "each": 3,
        "layers": layers,
        "size": size,
        "others": ", ".join(each),
    }


def first_kernel_reads(tables: Tables) -> Claim:
    """(b) What the parts of that kernel's name say, where it has them."""
    name = (first_kernel_named(tables) or {})["kernel"]
    return {} if name.startswith("sm80") and name.endswith("ffma") and "_tn_" in name else None


def others_little(tables: Tables) -> Claim:
    """(c) Where no family beside matmuls takes much of the smallest size's forward: the one that takes
    most."""
    if nontrivial_kernels(tables):
        return None
    row = select(shares(tables, "forward").reset_index(), context_length=reference).iloc[0]
    others = row.drop(["size", "context_length", MATMUL]).astype(float)
    return {"size": row["size"], "family": others.idxmax(), "share": others.max()}


def step_parts(tables: Tables) -> Claim:
    """(d) The matmuls' time of a full step over forward's, the largest size at the reference context: about
    three times, as backward has two for each of forward's."""
    rows = profiles(tables, "operations", size=largest, context_length=reference, family=MATMUL)
    sums = rows.groupby("mode")["total_ns"].sum() / 1e6
    times = sums["step"] / sums["forward"]
    found = {"size": rows["size"].iloc[0], "forward": sums["forward"], "step": sums["step"], "times": times}
    return found if abs(times / 3 - 1) < 0.15 else None


def softmax_passes(tables: Tables) -> Claim:
    """(e) One matrix of scores of the smallest size in fp32, and eight passes over it in every layer."""
    row = _softmax(tables)
    shape, batch = SIZES[row["size"]], profiles(tables, "operations")["batch_size"].iloc[0]
    matrix = 4 * int(batch) * shape.num_heads * int(row["context_length"]) ** 2
    return {
        "batch": int(batch),
        "heads": shape.num_heads,
        "context": int(row["context_length"]),
        "matrix": f"{matrix / 1e6:.1f} MB",
        "layers": shape.num_layers,
        "together": f"{8 * matrix * shape.num_layers / 1e9:.2f} GB",
    }
