"""The numbers of each sentence about the ladder: where the sentence holds, None where it does not."""

from stepscope.report.tables import digits, ratio
from stepscope.step.stats import LAUNCH_BOUND
from stepscope.studies.ladder.config import CHANGES, FILLED, PEERS
from stepscope.studies.ladder.names import COUNTS, LINES
from stepscope.studies.ladder.tables import (
    LAST,
    LEAST_GAIN,
    Tables,
    at_context,
    by_batch,
    climbed,
    gain,
    ladders,
    largest,
    moved,
    shares,
    trained,
)

Claim = dict | None


def headline(tables: Tables) -> Claim:
    _, rows = largest(tables)
    device = str(tables["runs"]["device"].iloc[0])
    speedup = ratio(rows.loc["fp32", "wall_ms"], rows.loc[LAST, "wall_ms"])
    return {"speedup": speedup, "gpu": device.removeprefix("NVIDIA ")} if speedup > 1 else None


def first_ladder(tables: Tables) -> Claim:
    shape, rows = largest(tables)
    last, results = rows.loc[LAST], tables["ladder.results"]
    own = results[(results["size"] == shape.size) & (results["vocab_size"] == shape.vocab_size)]
    return {
        "size": shape.size,
        "parameters": float(own["parameters"].iloc[0]),
        "context": shape.context_length,
        "batch": shape.batch_size,
        "plain": rows.loc["fp32", "wall_ms"],
        "changes": COUNTS[sum(LINES.values())].capitalize(),
        "lines": rows.loc["blocks", "wall_ms"],
        "last": last["wall_ms"],
        "tokens": last["tokens_per_s"],
        "mfu": last["mfu"],
    }


def first_peer(tables: Tables) -> Claim:
    _, rows = largest(tables)
    faster = ratio(rows.loc[[*PEERS], "wall_ms"].min(), rows.loc[LAST, "wall_ms"])
    return {"gain": faster} if faster > 1 else None


def first_bound(tables: Tables) -> Claim:
    _, rows = largest(tables)
    last = rows.loc[LAST]
    return {"bound": last["bound_ms"], "share": last["bound_ms"] / last["wall_ms"]}


def first_start(tables: Tables) -> Claim:
    _, rows = largest(tables)
    left = ratio(rows.loc["sdpa", "wall_ms"], rows.loc[LAST, "wall_ms"])
    return {"start": rows.loc["sdpa", "wall_ms"], "left": left} if left > 1 + LEAST_GAIN else None


def first_small(tables: Tables) -> Claim:
    shape, rows = next(iter(at_context(tables).items()))
    faster = ratio(rows.loc["blocks", "wall_ms"], rows.loc["cuda_graph", "wall_ms"])
    launch_bound = rows.loc["blocks", "busy"] < LAUNCH_BOUND
    return {"size": shape.size, "gain": faster} if launch_bound and faster > 1.5 else None


def change_matmul(tables: Tables) -> Claim:
    shape, _ = largest(tables)
    share = shares(tables["ladder.kernels"], shape, "fp32")["matrix multiply"]
    return {"share": share, "size": shape.size} if share > 0.5 else None


def change_optimizer(tables: Tables) -> Claim:
    """AdamW's share where all before it is fast, and what its own two changes then gain."""
    shape, rows = largest(tables)
    share = shares(tables["ladder.kernels"], shape, "blocks")["optimizer"]
    both = ratio(rows.loc["cuda_graph", "gpu_ms"], rows.loc[LAST, "gpu_ms"])
    return {"share": share, "size": shape.size, "gain": both} if both > 1 + LEAST_GAIN else None


def optimizer_half(tables: Tables) -> Claim:
    """AdamW's share where forward and backward are fast."""
    shape, _ = largest(tables)
    share = shares(tables["ladder.kernels"], shape, "blocks")["optimizer"]
    return {"share": share, "size": shape.size} if share > 0.15 else None


def attention_step(tables: Tables) -> Claim:
    """What fused attention gives the whole step, at the longest context of the largest size."""
    size = largest(tables)[0].size
    shape, rows = max(
        ((shape, rows) for shape, rows in ladders(tables).items() if shape.size == size),
        key=lambda item: item[0].context_length,
    )
    faster = gain(rows, "sdpa")
    if not faster or faster < 1:
        return None
    return {"size": size, "gain": faster, "context": shape.context_length}


def change_graph(tables: Tables) -> Claim:
    """The largest size up to which the CUDA graph gains more than any other change."""
    found = None
    for shape, rows in at_context(tables).items():
        gains = {change: gain(rows, change) or 1 for change in CHANGES[1:]}
        if max(gains, key=lambda change: gains[change]) != "cuda_graph":
            break
        found = {"size": shape.size, "gain": gains["cuda_graph"]}
    return found


def change_training(tables: Tables) -> Claim:
    curves = trained(tables)
    distance, seeds = moved(curves)
    own = distance.reindex([change for change in CHANGES if change in distance])
    if own.max() < seeds:
        return {"steps": int(curves["step"].max()) + 1, "most": own.max() / seeds}
    return None


def graph_by_size(tables: Tables) -> Claim:
    sizes = [*at_context(tables).items()]
    (small, of_small), (large, of_large) = sizes[0], largest(tables)
    gains = [
        ratio(rows.loc["blocks", "wall_ms"], rows.loc["cuda_graph", "wall_ms"])
        for rows in (of_small, of_large)
    ]
    if small == large or gains[0] < gains[1]:
        return None
    return {"small": small.size, "small_gain": gains[0], "large": large.size, "large_gain": gains[1] - 1}


def precision_masters(tables: Tables) -> Claim:
    shape, rows = largest(tables)
    faster = gain(rows, "bf16_weights")
    return {"gain": faster, "size": shape.size} if faster and faster > 1 else None


def moments_gain(tables: Tables) -> Claim:
    shape, rows = largest(tables)
    before, after = rows.loc["bf16_weights"], rows.loc["bf16_moments"]
    faster = gain(rows, "bf16_moments")
    if not faster or faster < 1:
        return None
    return {"size": shape.size, "gain": faster, "before": before["wall_ms"], "after": after["wall_ms"]}


def moments_rounding(tables: Tables) -> Claim:
    """Rounded to nearest the second moment does not fall; by chance it follows fp32's."""
    found = tables["ladder.results"].dropna(subset="v_nearest").iloc[0]
    exact, chance, nearest = found["v_fp32"], found["v_by_chance"], found["v_nearest"]
    if abs(chance / exact - 1) < 0.01 and nearest > 1.5 * exact:
        return {"exact": digits(exact), "chance": digits(chance), "nearest": digits(nearest)}
    return None


def optimizer_exact(tables: Tables) -> Claim:
    """No number of any run's check differs from numpy's."""
    found = tables["ladder.results"].dropna(subset="compared")
    if found[["unequal", "low_unequal"]].to_numpy().any():
        return None
    return {"numbers": int(found.iloc[0]["compared"]), "off": found["torch_off"].max()}


def peers_all(tables: Tables) -> Claim:
    """Ours is faster than the best of the peers at every shape that has them."""
    every = [
        rows for rows in ladders(tables).values() if rows["wall_ms"].reindex([LAST, *PEERS]).notna().all()
    ]
    gains = [ratio(rows.loc[[*PEERS], "wall_ms"].min(), rows.loc[LAST, "wall_ms"]) for rows in every]
    if not gains or min(gains) <= 1:
        return None
    return {"shapes": len(gains), "least": min(gains), "most": max(gains)}


def peer_graphs(tables: Tables) -> Claim:
    """What CUDA graphs give the peer, at the smallest size."""
    shape, rows = next(iter(at_context(tables).items()))
    default, graphs = rows.loc[[*PEERS], "wall_ms"]
    faster = ratio(default, graphs)
    return (
        {"size": shape.size, "default": default, "graphs": graphs, "gain": faster} if faster > 1.1 else None
    )


def fp8_small_batch(tables: Tables) -> Claim:
    """At the smallest batch FP8 gains nothing, or next to it."""
    first = by_batch(tables).groupby("size", sort=False).head(1)
    row = first.loc[first["bf16_ms"].idxmax()]
    if row["gain"] > 1 + 2 * LEAST_GAIN:
        return None
    return {"size": row["size"], "batch": int(row["batch_size"]), "gain": row["gain"] - 1,
            "bf16": row["bf16_ms"], "fp8": row["fp8_ms"]}  # fmt: skip


def fp8_large_batch(tables: Tables) -> Claim:
    """From how many tokens a step FP8 gains over 2% at every size, and what it gives at most."""
    found = by_batch(tables)
    pays = found[found["gain"] > 1 + LEAST_GAIN]
    last = found.loc[found["bf16_ms"].idxmax()]
    if pays.empty or last["gain"] <= 1 + LEAST_GAIN:
        return None
    tokens = int(pays.groupby("size")["tokens"].min().max())
    return {"size": last["size"], "tokens": tokens, "batch": int(last["batch_size"]), "gain": last["gain"],
            "joules": 1 - last["fp8_j"] / last["bf16_j"]}  # fmt: skip


def fp8_training(tables: Tables) -> Claim:
    """FP8's loss over the steps that both were trained at the largest batch."""
    curves = tables["ladder.curves"]
    own = curves[curves["batch_size"] == curves.loc[curves["change"] == "fp8", "batch_size"].max()]
    losses = own.pivot_table(index="step", columns="change", values="loss")
    off = (losses["fp8"] - losses[LAST]).abs() / losses[LAST]
    return {"steps": len(losses), "batch": int(own["batch_size"].iloc[0]), "most": off.max(),
            "first": losses[LAST].iloc[0], "last": losses[LAST].iloc[-1],
            "fp8": losses["fp8"].iloc[-1]}  # fmt: skip


def filled(tables: Tables) -> Claim:
    """The batch that fills the memory: its MFU, and that at the clock which the power cap leaves."""
    steps = tables["ladder.steps"]
    row = steps[(steps["change"] == FILLED) & steps["wall_ms"].notna()].sort_values("mfu").iloc[-1]
    fields = {"wall": "wall_ms", "tokens": "tokens_per_s", "mfu": "mfu", "at_clock": "mfu_at_clock",
              "clock": "sm_clock_mhz", "power": "power_w", "peak": "peak_gib"}  # fmt: skip
    return {"size": row["size"], "batch": int(row["batch_size"])} | {
        name: row[at] for name, at in fields.items()
    }


def filled_limit(tables: Tables) -> Claim:
    """What one large matmul after another reaches under the same cap: more than any step can."""
    results = tables["ladder.results"].dropna(subset="kept_up_tflops")
    row = filled(tables) or {}
    rate, sheet = results["kept_up_tflops"].median(), results["sheet_bf16"].iloc[0]
    return {"matmul": rate, "share": rate / sheet, "clock": results["kept_up_clock_mhz"].median(),
            "of_it": row["mfu"] * sheet / rate}  # fmt: skip


def filled_optimizer(tables: Tables) -> Claim:
    """Gradient accumulation could spare no more than the optimizer's share of the filled step."""
    kernels = tables["ladder.kernels"]
    own = kernels[kernels["change"] == FILLED]
    row = own.iloc[0]
    times = own[own["size"] == row["size"]].groupby("family")["gpu_ms"].sum()
    return {"size": row["size"], "share": times["optimizer"] / times.sum()}


def power(tables: Tables) -> Claim:
    """The largest size's last step runs into the power limit."""
    shape, rows = largest(tables)
    limit, own = tables["ladder.results"]["power_limit_w"].median(), climbed(rows)
    last = own.loc[LAST]
    if last["power_w"] < 0.95 * limit or last["sm_clock_mhz"] >= 0.97 * own["sm_clock_mhz"].max():
        return None
    return {"size": shape.size, "power": last["power_w"], "full": own["sm_clock_mhz"].max(),
            "clock": last["sm_clock_mhz"], "joules": last["step_j"],
            "cap": limit, "bound": last["energy_ms"]}  # fmt: skip


def energy_saved(tables: Tables) -> Claim:
    shape, rows = largest(tables)
    first, last = rows.loc["fp32", "step_j"], rows.loc[LAST, "step_j"]
    return {"size": shape.size, "first": first, "last": last, "less": ratio(first, last, "J")}


def chunked_memory(tables: Tables) -> Claim:
    """The chunked loss, at the largest vocabulary: what it saves and what it costs."""
    every = [(shape, rows) for shape, rows in ladders(tables).items() if "chunked" in rows.index]
    if not every:
        raise LookupError("no chunked loss")
    shape, rows = max(every, key=lambda item: item[0].vocab_size)
    plain, chunked = rows.loc[LAST], rows.loc["chunked"]
    saved = plain["peak_gib"] - chunked["peak_gib"]
    if saved <= 0:
        return None
    return {"vocabulary": shape.vocab_size, "saved": saved, "peak": plain["peak_gib"],
            "slower": ratio(chunked["wall_ms"], plain["wall_ms"]) - 1}  # fmt: skip
