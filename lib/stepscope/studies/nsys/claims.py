"""What the profiles say: of each sentence its numbers, where it holds; None where it does not; a LookupError
where there are no such profiles."""
from stepscope.report.tables import number
from stepscope.step.clocks import WHOLE
from stepscope.step.stats import LAUNCH_BOUND, SAME
from stepscope.studies.nsys.tables import (
    Tables,
    at_reference,
    beside_in_process,
    first_kernels,
    forward_clocks,
    profiles,
    reference,
    shares,
    softmax_and_matmuls,
)
from stepscope.traces.families import ATTENTION_SOFTMAX, MATMUL
from stepscope.traces.kernel_names import short_name

Numbers = dict | None
AGREE = 0.05  # of a wall time: what a reader calls the same
WEIGHS = 0.05  # of forward: a share that is not trivial


def every_kernel_counted(tables: Tables) -> Numbers:
    """All profiles; the operations of one step of each are those of every captured step."""
    operations, captured = tables["nsys.operations"], tables["nsys.clocks"]
    keys = ["size", "context_length", "precision", "attention", "optimizer", "mode"]
    steps = captured[captured["captured"].astype(bool) & (captured["phase"] == WHOLE)]
    same = steps["operations"].groupby([steps[key] for key in keys]).agg(["min", "max"])
    named = operations["count"].groupby([operations[key] for key in keys]).sum().reindex(same.index)
    if len(same) and ((same["min"] == named) & (same["max"] == named)).all():
        return {"profiles": len(same), "operations": int(named.sum())}
    return None


def forward_matches_wall(tables: Tables) -> Numbers:
    """(a) Where forward is GPU-bound, nsys's first to last operation is the plain wall time."""
    rows = forward_clocks(tables)
    bound = rows[rows["gpu_ms"] >= LAUNCH_BOUND * rows["plain_ms"]]
    off = (bound["projected_ms"] / bound["plain_ms"] - 1).abs()
    if len(bound) and off.max() < AGREE:
        return {"most": off.max()}
    return None


def forward_slower_under_nsys(tables: Tables) -> Numbers:
    """(a) Where the GPU waits most for launches, a profiler makes it wait longer."""
    rows = forward_clocks(tables)
    rows = rows[rows["gpu_ms"] < LAUNCH_BOUND * rows["plain_ms"]]
    row = rows.loc[(rows["gpu_ms"] / rows["plain_ms"]).idxmin()] if len(rows) else None
    if row is not None and row["projected_ms"] > (1 + AGREE) * row["plain_ms"]:
        return {"size": row["size"], "context": int(row["context_length"]), "wall": row["plain_ms"],
                "nsys": row["projected_ms"]}
    return None


def forward_total(tables: Tables) -> Numbers:
    """(a) The largest size at the reference context."""
    rows = forward_clocks(tables)
    row = rows[rows["context_length"] == reference(rows)].iloc[-1]
    return {"size": row["size"], "context": int(row["context_length"]), "gpu": row["projected_ms"],
            "wall": row["plain_ms"]}


def first_kernel_is_a_matmul(tables: Tables) -> Numbers:
    """(b) In every profile of forward the kernel with the most time is a matmul; the largest size's."""
    rows, first = at_reference(tables, "forward"), first_kernels(tables, "forward")
    row = first.loc[(rows["size"].iloc[-1], reference(rows))]
    if set(first["family"]) == {MATMUL}:
        return {"size": rows["size"].iloc[-1], "context": reference(rows), "kernel": short_name(row["name"]),
                "launches": int(row["count"]), "share": row["share"], "profiles": len(first)}
    return None


def first_kernel_changes(tables: Tables) -> Numbers:
    """(b) In some profiles another kernel is first over forward + backward: a matmul, too."""
    forward, both = (first_kernels(tables, mode) for mode in ("forward", "forward_backward"))
    common = forward.join(both.add_suffix("_both"), how="inner")
    changed = int((common["name"] != common["name_both"]).sum())
    if changed and set(common["family_both"]) == {MATMUL}:
        return {"changed": changed, "profiles": len(common)}
    return None


def rest_of_forward(tables: Tables) -> Numbers:
    """(c) What is no matmul weighs more the smaller the model: the two sizes at the ends."""
    wide = shares(tables, "forward").reset_index()
    rest = 1 - wide[wide["context_length"] == reference(wide)].set_index("size")[MATMUL]
    if len(rest) > 1 and rest.is_monotonic_decreasing:
        return {"small": rest.index[0], "large": rest.index[-1], "context": reference(wide),
                "small_rest": rest.iloc[0], "large_rest": rest.iloc[-1]}
    return None


def nontrivial_kernels(tables: Tables) -> Numbers:
    """(c) The families beside matmuls that take over 5% of the smallest size's forward."""
    rows = shares(tables, "forward").reset_index()
    row = rows[rows["context_length"] == reference(rows)].iloc[0]
    size, row = row["size"], row.drop(["size", "context_length", MATMUL])
    heavy = row[row >= WEIGHS].sort_values(ascending=False)
    named = [f"{family} ({number(share, '%')})" for family, share in heavy.items()]
    families = " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))
    return {"size": size, "families": families} if named else None


def softmax_grows(tables: Tables) -> Numbers:
    """(c) Attention's softmax takes a larger share the longer the context, for the smallest size."""
    rows = shares(tables, "forward")[ATTENTION_SOFTMAX]
    own = rows[rows.index.get_level_values("size") == rows.index[0][0]].droplevel("size").sort_index()
    if len(own) > 1 and own.is_monotonic_increasing:
        return {"size": rows.index[0][0], "short": int(own.index[0]), "long": int(own.index[-1]),
                "short_share": own.iloc[0], "long_share": own.iloc[-1]}
    return None


def matmul_share_falls(tables: Tables) -> Numbers:
    """(d) The matmuls' share of a full step is below forward's in every profile at the reference context."""
    forward, step = (shares(tables, mode)[MATMUL] for mode in ("forward", "step"))
    context = reference(forward.reset_index())
    both = forward.rename("forward").to_frame().join(step.rename("step"), how="inner").xs(context, level=1)
    if len(both) and (both["step"] < both["forward"]).all():
        return {"size": both.index[0], "context": context, "forward": both["forward"].iloc[0],
                "step": both["step"].iloc[0], "large": both.index[-1],
                "large_forward": both["forward"].iloc[-1], "large_step": both["step"].iloc[-1],
                "adamw": shares(tables, "step").loc[(both.index[0], context), "optimizer"]}
    return None


def optimizer_share(tables: Tables) -> Numbers:
    """(d) AdamW's phase in a full step at the shortest and the longest context, of the largest size."""
    rows = profiles(tables, "operations")
    rows = rows[(rows["mode"] == "step") & (rows["size"] == rows["size"].iloc[-1])]
    wide = rows.pivot_table(index="context_length", columns="phase", values="total_ns", aggfunc="sum")
    part = wide["optimizer"] / wide.sum(axis=1)
    if len(part) > 1 and part.is_monotonic_decreasing:
        return {"size": rows["size"].iloc[0], "short": int(part.index[0]), "long": int(part.index[-1]),
                "short_share": part.iloc[0], "long_share": part.iloc[-1]}
    return None


def softmax_beside_flops(tables: Tables) -> Numbers:
    """(e) Softmax's time over the matmuls' is several times its FLOPs over theirs, everywhere."""
    rows = softmax_and_matmuls(tables)
    context = reference(rows.reset_index())
    row = rows.xs(context, level=1).iloc[0]
    if (rows["times"] / rows["flops"]).min() > 2:
        return {"size": row.name, "context": context, "times": row["times"], "flops": row["flops"]}
    return None


def nsys_agrees_in_process(tables: Tables) -> Numbers:
    """GPU time of whole modes by nsys and by torch.profiler in another process differs by less than SAME."""
    rows = beside_in_process(tables)
    whole = rows[rows["phase"] == WHOLE]
    if len(whole) and whole["off"].abs().max() < SAME:
        return {"cells": len(whole), "most": whole["off"].abs().max()}
    return None
