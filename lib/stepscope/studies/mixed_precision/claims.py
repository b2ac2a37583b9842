"""What the mixed-precision study can say: each function gives the numbers of one sentence where it holds."""
from typing import Any

from stepscope.report.shapes import reference
from stepscope.step.stats import LAUNCH_BOUND, SAME
from stepscope.studies.mixed_precision.numerics import FEATURES, STEPS
from stepscope.studies.mixed_precision.tables import (
    LOST,
    Tables,
    beside_fp32,
    gains,
    kinds,
    losses_off,
    numbers,
    trend,
    whole,
    wide,
)

Claim = dict[str, Any] | None


def _gain(tables: Tables, precision: str) -> Claim:
    """The gain of the smallest and of the largest size, where there is one."""
    found = gains(tables, precision)
    if len(found) < 2 or min(found.iloc[0], found.iloc[-1]) <= 1 + SAME:
        return None
    return {"small": str(found.index[0]), "small_gain": found.iloc[0], "large": str(found.index[-1]),
            "large_gain": found.iloc[-1], "context": reference(whole(tables))}


def precision_gain(tables: Tables) -> Claim:
    return _gain(tables, "bf16")


def precision_tf32(tables: Tables) -> Claim:
    return _gain(tables, "tf32")


def answer_trend(tables: Tables) -> Claim:
    return _gain(tables, "bf16") if gains(tables, "bf16").is_monotonic_increasing else None


def precision_why(tables: Tables) -> Claim:
    found = trend(tables).iloc[-1]
    step, slower = kinds(tables, str(found.name)), 1 / found["rest"]
    if found["matmul"] > 2 and slower > 1 + SAME:
        return {"size": found.name, "matmul": found["matmul"], "rest": slower,
                "casts": step.loc["cast", "bf16"] / step["bf16"].sum()}
    return None


def precision_launch(tables: Tables) -> Claim:
    """Shapes whose full step is GPU-bound in fp32 and launch-bound in bf16."""
    rows = beside_fp32(tables, precision="bf16", mode="step").dropna(subset=["busy", "busy_fp32"])
    count = int(((rows["busy"] < LAUNCH_BOUND) & (rows["busy_fp32"] >= LAUNCH_BOUND)).sum())
    return {"count": count, "of": len(rows)} if count > 1 else None


def precision_memory(tables: Tables) -> Claim:
    """bf16 hardly lowers the full step's peak."""
    rows = whole(tables, precision="bf16").dropna(subset=["peak_gib", "peak_gib_fp32"])
    last = rows[rows["mode"] == "step"].iloc[-1]
    low, high = last["peak_gib"], last["peak_gib_fp32"]
    return {"size": last["size"], "low": low, "high": high} if 0.9 * high < low < high else None


def answer_sums(tables: Tables) -> Claim:
    """The handout's four and bf16's, where an fp32 sum loses nothing of fp16 terms, casting them changes
    nothing, and sums in fp16 and bf16 lose more."""
    found = wide(tables, "sums")
    cases = {"fp32": "fp32 into fp32", "fp16": "fp16 into fp16", "mixed": "fp16 into fp32",
             "cast": "fp16 cast to fp32, into fp32", "bf16": "bf16 into bf16"}
    result = {name: found["result"][case] for name, case in cases.items()}
    exact = result["mixed"] == result["cast"] and found["adding"][cases["mixed"]] == 0
    if exact and 10 - result["bf16"] > 10 - result["fp16"] > abs(10 - result["mixed"]):
        return {name: f"{round(value, 4):g}" for name, value in result.items()}
    return None


def answer_toy(tables: Tables) -> Claim:
    """Under autocast on a GPU only what matmuls give is low."""
    found = wide(tables, "toy", "dtype")
    matmuls = found[["first layer's output", "logits"]]
    kept = found.drop(columns=matmuls.columns).eq("fp32").all(axis=None)
    low = matmuls.eq(found.index.to_series(), axis=0).all(axis=None)
    return {"wide": "fp32"} if kept and low else None


def answer_norm(tables: Tables) -> Claim:
    """fp16's squares overflow, bf16's never; a running sum of them in bf16 is far off."""
    lost, error = wide(tables, "norm lost"), wide(tables, "norm error")
    overflow = [scale for scale, share in lost["squares"]["fp16"].items() if share > LOST and scale >= 1]
    off = error["variance by a running sum"]["bf16", 1.0]
    if overflow and (lost.loc["bf16"] < LOST).all(axis=None) and off > 0.05:
        return {"overflow": int(min(overflow)), "terms": FEATURES, "off": off}
    return None


def health(tables: Tables) -> Claim:
    """Gradients that fp16 loses without loss scaling; nearly none with it, nor in bf16."""
    zero = wide(tables, "gradients")["zero"]
    share, scaled = zero["fp16, unscaled"], zero["fp16, scaled"]
    if share > 100 * max(scaled, zero["bf16"]):
        return {"size": numbers(tables, "gradients")["size"].iloc[0], "share": share}
    return None


def losses(tables: Tables) -> Claim:
    """Each precision's loss stays closer to fp32's than any other seed's does."""
    off = losses_off(tables)
    seeds = off.index.str.startswith("fp32")
    return {"steps": STEPS} if off[~seeds].max() < off[seeds].min() else None
