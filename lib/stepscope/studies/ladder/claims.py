"""The numbers of each sentence about the ladder: where the sentence holds, None where it does not."""
import pandas as pd

from stepscope.report.tables import digits, ratio
from stepscope.step.stats import LAUNCH_BOUND
from stepscope.studies.ladder.config import CHANGES, FILLED, PEERS
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
    pays_from,
    shares,
    smallest,
    trained,
)

Claim = dict | None
PAYS = 1 + LEAST_GAIN


def _faster(rows: pd.DataFrame, change: str, than: str) -> float:
    """How many times faster a change's step is than another's, in wall time."""
    return ratio(rows.loc[than, "wall_ms"], rows.loc[change, "wall_ms"])


def headline(tables: Tables) -> Claim:
    speedup = _faster(largest(tables)[1], LAST, "fp32")
    runs = tables["runs"]
    device = str(runs.loc[runs["study"] == "ladder", "device"].iloc[0])
    return {"speedup": speedup, "gpu": device.removeprefix("NVIDIA ")} if speedup > 1 else None


def first_ladder(tables: Tables) -> Claim:
    shape, rows = largest(tables)
    last, results = rows.loc[LAST], tables["ladder.results"]
    own = results[(results["size"] == shape.size) & (results["vocab_size"] == shape.vocab_size)]
    return {"size": shape.size, "parameters": float(own["parameters"].iloc[0]),
            "context": shape.context_length, "batch": shape.batch_size, "plain": rows.loc["fp32", "wall_ms"],
            "lines": rows.loc["blocks", "wall_ms"], "last": last["wall_ms"], "tokens": last["tokens_per_s"],
            "mfu": last["mfu"]}


def first_peer(tables: Tables) -> Claim:
    """The last step against the best of the peers'."""
    walls = largest(tables)[1]["wall_ms"]
    found = ratio(walls[[*PEERS]].min(), walls[LAST])
    return {"gain": found} if found > 1 else None


def first_bound(tables: Tables) -> Claim:
    last = largest(tables)[1].loc[LAST]
    found = {"bound": last["bound_ms"], "energy": last["energy_ms"]}
    return found if found["bound"] < last["wall_ms"] else None


def first_start(tables: Tables) -> Claim:
    rows = largest(tables)[1]
    left = _faster(rows, LAST, "sdpa")
    return {"start": rows.loc["sdpa", "wall_ms"], "left": left} if left > PAYS else None


def change_matmul(tables: Tables) -> Claim:
    shape, _ = largest(tables)
    share = shares(tables["ladder.kernels"], shape, "fp32")["matrix multiply"]
    return {"share": share, "size": shape.size} if share > 0.5 else None


def change_optimizer(tables: Tables) -> Claim:
    """AdamW's share where all before it is fast; its own two changes then gain something."""
    shape, rows = largest(tables)
    share = shares(tables["ladder.kernels"], shape, "blocks")["optimizer"]
    both = ratio(rows.loc["cuda_graph", "gpu_ms"], rows.loc[LAST, "gpu_ms"])
    return {"share": share, "size": shape.size} if share > 0.15 and both > PAYS else None


def change_graph(tables: Tables) -> Claim:
    """The largest size up to which the CUDA graph gains more than any other change, unlike at the next."""
    found = None
    for shape, rows in at_context(tables).items():
        gains = {change: gain(rows, change) or 1 for change in CHANGES[1:]}
        if max(gains, key=lambda change: gains[change]) != "cuda_graph":
            return found
        found = {"size": shape.size}
    return None


def change_training(tables: Tables) -> Claim:
    _, off = trained(tables)
    distance, seeds = moved(off)
    return {"steps": len(off)} if distance.reindex(CHANGES).max() < seeds else None


def attention_step(tables: Tables) -> Claim:
    """What fused attention gives the whole step, at the longest context of the largest size."""
    size = largest(tables)[0].size
    shape, rows = [(shape, rows) for shape, rows in ladders(tables).items() if shape.size == size][-1]
    found = gain(rows, "sdpa") or 0
    return {"size": size, "gain": found, "context": shape.context_length} if found > 1 else None


def graph_by_size(tables: Tables) -> Claim:
    """The CUDA graph over compiled blocks: much where these wait for launches, less at the largest size."""
    (small, of_small), (large, of_large) = smallest(tables), largest(tables)
    small_gain, large_gain = (_faster(rows, "cuda_graph", "blocks") for rows in (of_small, of_large))
    if of_small.loc["blocks", "busy"] >= LAUNCH_BOUND or small_gain < max(1.5, large_gain) or small == large:
        return None
    return {"small": small.size, "small_gain": small_gain, "large": large.size, "large_gain": large_gain - 1}


def precision_masters(tables: Tables) -> Claim:
    found = gain(largest(tables)[1], "bf16_weights") or 0
    return {"gain": found} if found > 1 else None


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
    wrong = found[["unequal", "low_unequal"]].to_numpy().any()
    return {"numbers": int(found.iloc[0]["compared"])} if not wrong else None


def fp8_small_batch(tables: Tables) -> Claim:
    """At the smallest batch FP8 is not faster."""
    first = by_batch(tables).groupby("size", sort=False).head(1)
    row = first.loc[first["bf16_ms"].idxmax()]
    return row[["size", "batch_size", "bf16_ms", "fp8_ms"]].to_dict() if row["gain"] < PAYS else None


def fp8_large_batch(tables: Tables) -> Claim:
    """From how many tokens a step FP8 gains at every size, and what it gives at most."""
    found = by_batch(tables)
    last, tokens = found.loc[found["bf16_ms"].idxmax()], pays_from(found)
    if tokens is None or last["gain"] < PAYS:
        return None
    return {"tokens": tokens, "batch": int(last["batch_size"]), "gain": last["gain"],
            "joules": 1 - last["fp8_mj"] / last["bf16_mj"]}


def fp8_training(tables: Tables) -> Claim:
    """How far FP8's loss is from bf16's at most, over the steps of both at the largest batch."""
    curves = tables["ladder.curves"]
    own = curves[curves["batch_size"] == curves.loc[curves["change"] == "fp8", "batch_size"].max()]
    losses = own.pivot_table(index="step", columns="change", values="loss")
    found = {"steps": len(losses), "batch": int(own["batch_size"].iloc[0]),
             "most": (losses["fp8"] / losses[LAST] - 1).abs().max()}
    return found if found["most"] < 0.05 else None


def filled(tables: Tables) -> Claim:
    """The batch that fills the memory: its MFU, that at the clock which the power cap leaves, and what one
    large matmul after another reaches under the same cap, more than any step can."""
    steps, results = tables["ladder.steps"], tables["ladder.results"].dropna(subset="kept_up_tflops")
    row = steps[(steps["change"] == FILLED) & steps["wall_ms"].notna()].sort_values("mfu").iloc[-1]
    rate, sheet = results["kept_up_tflops"].median(), results["sheet_bf16"].iloc[0]
    return {"size": row["size"], "batch": int(row["batch_size"]), "tokens": row["tokens_per_s"],
            "mfu": row["mfu"], "at_clock": row["mfu_at_clock"], "clock": row["sm_clock_mhz"],
            "power": row["power_w"], "peak": row["peak_gib"], "matmul": rate, "share": rate / sheet,
            "matmul_clock": results["kept_up_clock_mhz"].median(), "of_it": row["mfu"] * sheet / rate}


def power(tables: Tables) -> Claim:
    """The largest size's last step runs into the power limit."""
    shape, rows = largest(tables)
    limit, full = tables["ladder.results"]["power_limit_w"].median(), climbed(rows)["sm_clock_mhz"].max()
    last = rows.loc[LAST]
    if last["power_w"] < 0.95 * limit or last["sm_clock_mhz"] >= 0.97 * full:
        return None
    return {"size": shape.size, "full": full, "clock": last["sm_clock_mhz"],
            "joules": last["step_j"], "cap": limit, "bound": last["energy_ms"]}


def chunked_memory(tables: Tables) -> Claim:
    """The chunked loss, at the largest shape that has it: what it saves and what it costs."""
    shape, rows = [(shape, rows) for shape, rows in ladders(tables).items() if "chunked" in rows.index][-1]
    plain, chunked = rows.loc[LAST], rows.loc["chunked"]
    saved = plain["peak_gib"] - chunked["peak_gib"]
    return {"vocabulary": shape.vocab_size, "saved": saved, "peak": plain["peak_gib"],
            "slower": _faster(rows, LAST, "chunked") - 1} if saved > 0 else None
