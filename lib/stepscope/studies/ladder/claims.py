"""The numbers of each sentence about the ladder: where the sentence holds, None where it does not."""

import pandas as pd

from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import select
from stepscope.report.tables import digits, number
from stepscope.stats import AT_CAP, LEAST_GAIN, launch_bound_rows
from stepscope.studies.ladder.config import AS_IT_COMES, FAIR, FILLED, RUNGS
from stepscope.studies.ladder.rows import (
    CAPTURED,
    LAST,
    all_of_them,
    at_clock,
    at_context,
    at_longest,
    baseline_attention,
    bounds,
    ceilings,
    cost_of,
    draws_cap,
    fair_modes,
    faster,
    gain,
    ladders,
    largest_ladder,
    launch_us,
    loss_shift,
    made_to_fit,
    measured_again,
    power_cap_w,
    seeds_apart,
    shares,
    smallest_ladder,
    timed,
    trained,
    two_batches,
    with_baseline,
    without,
)
from stepscope.studies.ladder.tables import NAMES

HOW = dict(zip(FAIR, ("compiled", "compiled and in one CUDA graph")))
SHORT = {
    "sdpa": "fused attention",
    "blocks": "compiled blocks",
    "cuda_graph": "the CUDA graph",
    "bf16_weights": "bf16 weights",
    "bf16_moments": "bf16 moments",
}


def headline(tables: Tables) -> Claim:
    speedup = faster(largest_ladder(tables)[1], LAST, "fp32")
    device = str(select(tables["runs"], study="ladder")["device"].iloc[0])
    return {"speedup": speedup, "gpu": device.removeprefix("NVIDIA ")} if speedup > 1 else None


def first_ladder(tables: Tables) -> Claim:
    return {"plain": largest_ladder(tables)[1].loc["fp32", "wall_ms"]}


def first_peer(tables: Tables) -> Claim:
    """Hugging Face's step without a mask, the quicker of compiled and as one CUDA graph, beside
    ours with PyTorch's AdamW, both with fp32 weights and moments."""
    row = select(with_baseline(tables, FAIR), largest_ladder(tables)[0]._asdict()).iloc[0]
    return {"baseline": row["baseline_ms"], "same": row["fp32_ms"], "how": HOW[row["baseline"]]}


def first_mask(tables: Tables) -> Claim:
    """What is said of Hugging Face where none of its fair modes was measured."""
    return baseline_mask(tables) if fair_modes(tables) == AS_IT_COMES else None


def first_bound(tables: Tables) -> Claim:
    """What nothing beats: the last step's FLOPs and bytes at the rates of all runs' bursts."""
    shape, rows = largest_ladder(tables)
    last = bounds(tables, rows.loc[[LAST]]).iloc[0]
    rates = ceilings(tables, last["run_id"])
    found = {
        "bound": last["bound_ms"],
        "size": shape.size,
        "runs": rates.runs,
        "low": rates.least,
        "high": rates.matmul,
    }
    return found if last["bound_ms"] < last["wall_ms"] else None


def rung_matmul(tables: Tables) -> Claim:
    shape, _ = largest_ladder(tables)
    share = shares(tables["ladder.kernels"], shape, "fp32")["matrix multiply"]
    return {"share": share, "size": shape.size} if share > 0.5 else None


def rung_optimizer(tables: Tables) -> Claim:
    """AdamW's share where all before it is fast; bf16 weights then gain something."""
    shape, rows = largest_ladder(tables)
    share = shares(tables["ladder.kernels"], shape, "blocks")["optimizer"]
    pays = (gain(rows, "bf16_weights") or 0) > 1
    return {"share": share, "size": shape.size} if share > 0.15 and pays else None


def rung_graph(tables: Tables) -> Claim:
    """The largest size up to which the CUDA graph gains most of all optimizations, unlike at the next: two
    sizes at least, or it would not be said of smaller ones."""
    found: list[dict] = []
    for shape, rows in at_context(tables).items():
        gains = {rung: gain(rows, rung) or 1 for rung in RUNGS[1:]}
        if max(gains, key=lambda rung: gains[rung]) != "cuda_graph":
            return found[-1] if len(found) > 1 else None
        found.append({"size": shape.size, "context": shape.context_length})
    return None


def rung_context(tables: Tables) -> Claim:
    """At the longest context fused attention gains more than at the reference's, and bf16 weights less, at
    every size of both; and what all optimizations give there in wall time."""
    short, long = (
        {shape.size: rows for shape, rows in found.items()}
        for found in (at_context(tables), at_longest(tables))
    )
    for size in short.keys() & long.keys():
        attention, weights = (
            [gain(rows[size], rung) or 1 for rows in (short, long)] for rung in ("sdpa", "bf16_weights")
        )
        if attention[0] >= attention[1] or weights[0] <= weights[1]:
            return None
    together = pd.Series([all_of_them(rows, "wall_ms") for rows in long.values()]).dropna()
    context = next(iter(at_longest(tables))).context_length
    return {"context": context, "low": together.min(), "high": together.max()} if len(together) else None


def fair_peer(tables: Tables) -> Claim:
    """GPU time of Hugging Face's step without a mask and as a CUDA graph, over ours with PyTorch's AdamW."""
    rows = with_baseline(tables, FAIR[1:])
    over = rows["baseline_gpu_ms"] / rows["fp32_gpu_ms"]
    return {"ladders": len(rows), "low": over.min(), "high": over.max()}


def own_remains(tables: Tables) -> Claim:
    """What bf16 weights and moments give together, in GPU time, at every shape that has a baseline."""
    rows = with_baseline(tables, fair_modes(tables))
    gains = rows["fp32_gpu_ms"] / rows["ours_gpu_ms"]
    return {"low": gains.min(), "high": gains.max()} if gains.min() > 1 + LEAST_GAIN else None


def without_most(tables: Tables) -> Claim:
    """The change without which the largest size's last step takes longest, of those tried."""
    shape, ratios = [*without(tables).items()][-1]
    if not ratios.max() > 1:
        return None
    worst = ratios.idxmax()
    return {"size": shape.size, "optimization": SHORT[worst], "longer": ratios[worst]}


def fits_with(tables: Tables) -> Claim:
    """The step of most tokens that runs out of memory without one of the optimizations."""
    shape, rung = max(made_to_fit(tables).items(), key=lambda one: one[0].batch_size * one[0].context_length)
    tokens = shape.batch_size * shape.context_length
    row = select(tables["ladder.steps"], shape._asdict(), optimization=rung).iloc[0]
    return {"size": shape.size, "tokens": tokens, "optimization": NAMES[rung], "peak": row["peak_gib"]}


def cost_billion(tables: Tables) -> Claim:
    """What a billion tokens cost at the largest size, at the batches of :func:`larger_batch`."""
    if larger_batch(tables) is None:
        return None
    rows = two_batches(tables)
    batch, most = rows["batch_size"].astype(int)
    (hours, most_hours), (kwh, most_kwh) = (cost_of(rows)[name] for name in ("billion_h", "billion_kwh"))
    return (
        {
            "batch": batch,
            "hours": hours,
            "kwh": kwh,
            "most": most,
            "most_hours": most_hours,
            "most_kwh": most_kwh,
        }
        if pd.notna([kwh, most_kwh]).all()
        else None
    )


def baseline_mask(tables: Tables) -> Claim:
    """All baselines run our attention's kernels, cuDNN's, for longer, and one kernel that makes a mask; and
    the remainder of their step takes as long as ours."""
    rows = baseline_attention(tables)
    kernels = select(tables["ladder.kernels"], optimization=[*RUNGS, *AS_IT_COMES])
    names = select(kernels, family="fused attention")["name"]
    masks = kernels[kernels["name"].str.contains("bitwise_and")]
    cudnn = names.str.contains("cudnn").all()
    masked = len(masks) and {*masks["optimization"]} <= {*AS_IT_COMES}
    low, without = rows["attention"].min(), rows["without"]
    if not (cudnn and masked and low >= 1 + LEAST_GAIN and len(rows) == len(with_baseline(tables))):
        return None
    found = {
        "ladders": len(rows),
        "low": low,
        "high": rows["attention"].max(),
        "least": without.min(),
        "most": without.max(),
        "kernel": min(masks["name"], key=len),
    }
    return found if (without - 1).abs().max() < 0.05 else None


def rungs_training(tables: Tables) -> Claim:
    shape, shifts = trained(tables)
    distance, seeds = loss_shift(shifts)
    most = distance.reindex(RUNGS).max()
    return {"size": shape.size, "steps": len(shifts), "most": most, "seeds": seeds} if most < seeds else None


def rungs_floor(tables: Tables) -> Claim:
    """How far the losses of compiled blocks are from those of the same blocks as a CUDA graph."""
    _, shifts = trained(tables)
    return {"floor": seeds_apart(shifts.reindex(columns=["blocks", "cuda_graph"], level="optimization"))[0]}


def attention_step(tables: Tables) -> Claim:
    """What fused attention gives the whole step, at the longest context of the largest size."""
    size = largest_ladder(tables)[0].size
    shape, rows = [(shape, rows) for shape, rows in ladders(tables).items() if shape.size == size][-1]
    found = gain(rows, "sdpa") or 0
    return {"size": size, "gain": found, "context": shape.context_length} if found > 1 else None


def larger_batch(tables: Tables) -> Claim:
    """The largest size's last step at the batch at which steps are compared and at the largest measured."""
    (_, compared), (_, most) = two_batches(tables).iterrows()
    more = most["tokens_per_s"] / compared["tokens_per_s"]
    how = ", the loss in chunks" if most["optimization"] == FILLED else ""
    return (
        {
            "size": compared["size"],
            "batch": int(compared["batch_size"]),
            "tokens": compared["tokens_per_s"],
            "most": int(most["batch_size"]),
            "most_tokens": most["tokens_per_s"],
            "how": how,
            "more": more,
        }
        if more > 1 + LEAST_GAIN
        else None
    )


def graph_small(tables: Tables) -> Claim:
    """The CUDA graph over compiled blocks at the smallest size, where these wait for launches."""
    shape, rows = smallest_ladder(tables)
    found, waits = faster(rows, "cuda_graph", "blocks"), launch_bound_rows(rows)["blocks"]
    return (
        {
            "size": shape.size,
            "gain": found,
            "before": rows.loc["blocks", "wall_min_ms"],
            "after": rows.loc["cuda_graph", "wall_ms"],
        }
        if waits and found > 1.5
        else None
    )


def graph_large(tables: Tables) -> Claim:
    """At the largest size the CUDA graph gains nothing, of a step that does not wait for launches."""
    shape, rows = largest_ladder(tables)
    own = timed(rows, ["blocks", "cuda_graph"])
    needless = len(own) == 2 and (gain(rows, "cuda_graph") or 0) < 1 and not launch_bound_rows(own)["blocks"]
    found = {"size": shape.size, "gain": own["wall_ms"].iloc[0] / own["wall_ms"].iloc[-1]}
    return found if needless else None


def launch_wait(tables: Tables) -> Claim:
    """Microseconds a kernel of the steps that mostly wait for launches, the least and the most."""
    each = launch_us(tables)
    return {"steps": len(each), "least": each.min(), "most": each.max()} if len(each) > 1 else None


def reserved_last(tables: Tables) -> Claim:
    """The captured step that reserves most beyond its peak, where that is clearly more than it needs."""
    rows = pd.concat([timed(own, CAPTURED).reset_index() for own in ladders(tables).values()])
    rows = rows.reset_index(drop=True)
    over = (rows["reserved_gib"] / rows["peak_gib"]).dropna()
    if over.empty:
        return None
    row = rows.loc[over.idxmax()]
    more = row["reserved_gib"] > 1.2 * row["peak_gib"]
    return (
        {
            "optimization": NAMES[row["optimization"]],
            "size": row["size"],
            "context": row["context_length"],
            "peak": row["peak_gib"],
            "reserved": row["reserved_gib"],
        }
        if more
        else None
    )


def repeats_cap(tables: Tables) -> Claim:
    """By how much GPU times of one and the same steps differ under the power cap, in one process."""
    size, apart = [*measured_again(tables).items()][-1]
    return {"size": size, "pairs": len(apart), "most": max(apart)}


def clock_apart(tables: Tables) -> Claim:
    """By how much GPU time of the same kernels differs at most, launched one by one and as a graph that runs
    into the power limit."""
    found = []
    for shape, rows in ladders(tables).items():
        own = timed(rows, ["blocks", "cuda_graph"])
        if len(own) == 2 and own["operations"].nunique() == 1 and draws_cap(tables, own)["cuda_graph"]:
            found.append(
                {
                    "size": shape.size,
                    "context": shape.context_length,
                    "operations": int(own["operations"].iloc[0]),
                    "longer": own["gpu_ms"].iloc[1] / own["gpu_ms"].iloc[0] - 1,
                }
            )
    most = max(found, key=lambda one: one["longer"], default=None)
    return most if most and most["longer"] > LEAST_GAIN else None


def precision_masters(tables: Tables) -> Claim:
    shape, rows = largest_ladder(tables)
    found = gain(rows, "bf16_weights") or 0
    return {"size": shape.size, "gain": found} if found > 1 else None


def moments_rounding(tables: Tables) -> Claim:
    """Rounded to nearest the second moment does not fall; by chance it follows fp32's."""
    found = tables["ladder.results"].dropna(subset="v_nearest").iloc[0]
    exact, chance, nearest = found["v_fp32"], found["v_stochastic"], found["v_nearest"]
    if abs(chance / exact - 1) < 0.01 and nearest > 1.5 * exact:
        return {"exact": digits(exact), "chance": digits(chance), "nearest": digits(nearest)}
    return None


def optimizer_exact(tables: Tables) -> Claim:
    """No number of any run's check differs from numpy's."""
    found = tables["ladder.results"].dropna(subset="compared")
    wrong = found[["unequal", "low_unequal"]].to_numpy().any()
    return {"numbers": int(found.iloc[0]["compared"])} if not wrong else None


def filled(tables: Tables) -> Claim:
    """The batch that fills the memory: its MFU, that at the clock which the power cap leaves, and what one
    large matmul after another reaches under the same cap."""
    rows = select(at_clock(tables, tables["ladder.steps"]), optimization=FILLED, wall_ms=pd.Series.notna)
    row = rows.sort_values("mfu").iloc[-1]
    rates = ceilings(tables, str(row.get("run_id", "")))
    rate, sheet = rates.kept_up, tables["ladder.results"]["sheet_bf16"].dropna().iloc[0]
    return {
        "size": row["size"],
        "batch": int(row["batch_size"]),
        "tokens": row["tokens_per_s"],
        "mfu": row["mfu"],
        "at_clock": row["mfu_at_clock"],
        "clock": row["sm_clock_mhz"],
        "power": row["power_w"],
        "peak": row["peak_gib"],
        "reserved": row["reserved_gib"],
        "matmul": rate,
        "share": rate / sheet,
        "matmul_clock": rates.kept_up_mhz,
        "of_it": row["mfu"] * sheet / rate,
    }


def power(tables: Tables) -> Claim:
    """From which change on all steps of the largest size run into the power limit, at lower clocks."""
    shape, rows = largest_ladder(tables)
    own = timed(rows)
    full = own["sm_clock_mhz"].max()
    at_cap = draws_cap(tables, own) & (own["sm_clock_mhz"] < AT_CAP * full)
    clocks = own["sm_clock_mhz"][at_cap[::-1].cummin()[::-1]]
    return (
        {
            "size": shape.size,
            "context": shape.context_length,
            "first": NAMES[clocks.index[0]],
            "last": NAMES[clocks.index[-1]],
            "full": full,
            "low": clocks.min(),
            "high": clocks.max(),
            "cap": power_cap_w(tables),
        }
        if len(clocks) > 1
        else None
    )


def power_read(tables: Tables) -> Claim:
    """What is read of one and the same large matmul, kept up, in all runs."""
    found = tables["ladder.results"].dropna(subset="kept_up_power_w")
    watts, clock = found["kept_up_power_w"], found["kept_up_clock_mhz"].median()
    under = watts.max() < power_cap_w(tables)
    return (
        {"runs": len(found), "low": watts.min(), "high": watts.max(), "clock": clock}
        if len(found) > 1 and under
        else None
    )


def chunked_memory(tables: Tables) -> Claim:
    """The chunked loss, at the largest shape that has it: what it saves and what it costs."""
    shape, rows = [(shape, rows) for shape, rows in ladders(tables).items() if "chunked" in rows.index][-1]
    plain, chunked = rows.loc[LAST], rows.loc["chunked"]
    saved, slower = plain["peak_gib"] - chunked["peak_gib"], faster(rows, LAST, "chunked") - 1
    cost = f"take {number(slower, '%')} longer" if slower > LEAST_GAIN else "take about as long"
    return (
        {"vocabulary": shape.vocab_size, "saved": saved, "peak": plain["peak_gib"], "cost": cost}
        if saved > 0
        else None
    )


def first_from(tables: Tables) -> Claim:
    """Where a reader stands who trains in bf16 with fused attention and AdamW, and the last rung, at the
    largest size: by both clocks, and of how few steps."""
    shape, rows = largest_ladder(tables)
    own = select(tables["ladder.results"], size=shape.size, vocab_size=shape.vocab_size)
    start, last = rows.loc["fused"], rows.loc[LAST]
    found = {
        "size": shape.size,
        "parameters": float(own["parameters"].iloc[0]),
        "context": shape.context_length,
        "batch": shape.batch_size,
        "start": start["wall_ms"],
        "last": last["wall_ms"],
        "left": start["wall_ms"] / last["wall_ms"],
        "gpu": start["gpu_ms"] / last["gpu_ms"],
        "tokens": last["tokens_per_s"],
        "mfu": last["mfu"],
        "least": int(min(start["steps"], last["steps"])),
        "most": int(max(start["steps"], last["steps"])),
    }
    return found if found["left"] > 1 + LEAST_GAIN else None


def bf16_launches(tables: Tables) -> Claim:
    """At the smallest size bf16 autocast takes GPU time off TF32's step and no wall time: its casts are
    launches."""
    shape, rows = smallest_ladder(tables)
    before, after = rows.loc["tf32"], rows.loc["bf16"]
    vain = not faster(rows, "bf16", "tf32") > 1 and after["gpu_ms"] < before["gpu_ms"]
    more = int(after["operations"] - before["operations"])
    return {"size": shape.size, "kernels": more} if vain and more > 0 else None


def attention_chosen(tables: Tables) -> Claim:
    """Which kernels PyTorch chooses by itself for fused attention, in all ladders: cuDNN's."""
    names = select(tables["ladder.kernels"], optimization="sdpa", family="fused attention")["name"]
    return {} if names.str.contains("cudnn").all() else None


def few_steps(tables: Tables) -> Claim:
    """Where a step is long, few are timed: how many medians are of three at most, and how their steps
    spread."""
    rows = tables["ladder.steps"].dropna(subset=["wall_ms", "wall_std_ms"])
    few = rows[rows["steps"] <= 3]
    spread = few["wall_std_ms"] / few["wall_ms"]
    return (
        {"few": len(few), "all": len(rows), "median": spread.median(), "most": spread.max()}
        if len(few)
        else None
    )
