"""What the mixed-precision study can say: each function gives one sentence's numbers where it holds, else None."""
from typing import Any

from stepscope.config import SIZES
from stepscope.report.tables import ratio
from stepscope.step.clocks import WHOLE
from stepscope.step.stats import LAUNCH_BOUND, SAME, SAME_CAPPED
from stepscope.studies.mixed_precision.numerics import FEATURES, STEPS
from stepscope.studies.mixed_precision.tables import (
    LOST,
    Tables,
    beside_fp32,
    gains,
    kinds,
    losses_off,
    numbers,
    reference,
    trend,
    whole,
    wide,
)
from stepscope.traces.families import MATMUL

Claim = dict[str, Any] | None


def _ends(tables: Tables, precision: str) -> dict[str, Any]:
    """The gain of the smallest and of the largest size."""
    found = gains(tables, precision)
    if len(found) < 2:
        raise IndexError("one size has no trend")
    return {"small": str(found.index[0]), "small_gain": found.iloc[0], "large": str(found.index[-1]),
            "large_gain": found.iloc[-1], "context": reference(whole(tables))}


def precision_gain(tables: Tables) -> Claim:
    found = _ends(tables, "bf16")
    return found if min(found["small_gain"], found["large_gain"]) > 1 + SAME else None


def precision_tf32(tables: Tables) -> Claim:
    found = _ends(tables, "tf32")
    return found if min(found["small_gain"], found["large_gain"]) > 1 + SAME else None


def precision_fp16(tables: Tables) -> Claim:
    """fp16 is no faster than bf16."""
    bf16, fp16 = _ends(tables, "bf16"), _ends(tables, "fp16")
    if fp16["large_gain"] < bf16["large_gain"] * (1 + SAME_CAPPED):
        return {"large": bf16["large"], "fp16": fp16["large_gain"], "bf16": bf16["large_gain"]}
    return None


def precision_why(tables: Tables) -> Claim:
    size = str(gains(tables, "bf16").index[-1])
    step, found = kinds(tables, size), trend(tables).loc[size]
    slower = 1 / found["all else, x"]
    if found["matmuls, x"] > 2 and slower > 1 + SAME:
        return {"size": size, "matmul": found["matmuls, x"], "rest": slower,
                "casts": step.loc["cast", "bf16"] / step["bf16"].sum()}
    return None


def precision_trend(tables: Tables) -> Claim:
    """The larger the model, the larger the share of its matmuls, and the more these gain."""
    found, sizes = trend(tables), list(SIZES)
    found = found.loc[sorted(found.index, key=sizes.index)]
    first, last = found.iloc[0], found.iloc[-1]
    share, gain = "matmuls in fp32, %", "matmuls, x"
    if len(found) > 1 and last[share] > first[share] and last[gain] > first[gain]:
        return {"small": found.index[0], "large": found.index[-1], "small_share": first[share],
                "large_share": last[share], "small_matmul": first[gain], "large_matmul": last[gain]}
    return None


def answer_trend(tables: Tables) -> Claim:
    found = _ends(tables, "bf16")
    return found if gains(tables, "bf16").is_monotonic_increasing else None


def precision_launch(tables: Tables) -> Claim:
    """Shapes whose full step is GPU-bound in fp32 and launch-bound in bf16."""
    rows = beside_fp32(tables)
    rows = rows[(rows["precision"] == "bf16") & (rows["mode"] == "step") & (rows["phase"] == WHOLE)]
    rows = rows.dropna(subset=["busy", "busy_fp32"])
    count = int(((rows["busy"] < LAUNCH_BOUND) & (rows["busy_fp32"] >= LAUNCH_BOUND)).sum())
    return {"count": count, "of": len(rows)} if count > 1 else None


def precision_memory(tables: Tables) -> Claim:
    rows = whole(tables, precision="bf16").dropna(subset=["peak_gib", "peak_gib_fp32"])
    size = rows[rows["mode"] == "step"]["size"].iloc[-1]
    own = rows[rows["size"] == size].set_index("mode")
    step, forward = own.loc["step"], own.loc["forward"]
    if 0.9 * step["peak_gib_fp32"] < step["peak_gib"] < step["peak_gib_fp32"] and forward["peak_gib"] > forward["peak_gib_fp32"]:
        return {"size": size, "low": step["peak_gib"], "high": step["peak_gib_fp32"],
                "forward": forward["peak_gib_fp32"], "forward_low": forward["peak_gib"]}
    return None


def precision_energy(tables: Tables) -> Claim:
    row = whole(tables, precision="bf16", mode="step").dropna(subset=["step_j", "step_j_fp32"]).iloc[-1]
    less = ratio(row["step_j_fp32"], row["step_j"], "J")
    return {"size": row["size"], "less": less, "joules": row["step_j"]} if less > 1 + SAME else None


def sums_bf16(tables: Tables) -> Claim:
    found = wide(tables, "sums").droplevel("at")["result"]
    bf16, fp16 = found["bf16 into bf16"], found["fp16 into fp16"]
    return {"bf16": f"{bf16:g}", "fp16": f"{fp16:.2f}"} if abs(bf16 - 10) > 1 > abs(fp16 - 10) > 0.01 else None


def answer_sums(tables: Tables) -> Claim:
    """The handout's four, where an fp32 sum loses nothing of fp16 terms and casting them changes nothing."""
    found = wide(tables, "sums").droplevel("at")
    cases = {"fp32": "fp32 into fp32", "fp16": "fp16 into fp16", "mixed": "fp16 into fp32",
             "cast": "fp16 cast to fp32, into fp32"}
    result = {name: found["result"][case] for name, case in cases.items()}
    if result["mixed"] == result["cast"] and found["adding"][cases["mixed"]] == 0:
        return {name: f"{value:.4f}" for name, value in result.items()}
    return None


def answer_toy(tables: Tables) -> Claim:
    """What is fp32 and what is low under autocast, on a GPU."""
    found = wide(tables, "toy", "dtype").droplevel("at")
    expected = {"parameters": "fp32", "LayerNorm's output": "fp32", "loss": "fp32", "gradients": "fp32"}
    low = {name: found[name] for name in ("first layer's output", "logits")}
    kept = all((found[name] == dtype).all() for name, dtype in expected.items())
    return {"wide": "fp32"} if kept and all((values == values.index).all() for values in low.values()) else None


def answer_norm(tables: Tables) -> Claim:
    """fp16's squares overflow, bf16's never; a running sum of them in bf16 is far off."""
    lost, error = wide(tables, "norm lost"), wide(tables, "norm error")
    large = lost.loc["fp16"]["squares"]
    overflow = [at for at, share in large.items() if share > LOST and at >= 1]
    off = error["variance by a running sum"]["bf16", 1.0]
    if overflow and (lost.loc["bf16"] < LOST).all(axis=None) and off > 0.05:
        return {"overflow": int(min(overflow)), "terms": FEATURES, "off": off}
    return None


def norm_inside(tables: Tables) -> Claim:
    """PyTorch's own norm is right where the parts overflow."""
    error = wide(tables, "norm error").loc["fp16"]
    broken = error[error["output"] == 1]
    return {"scale": int(broken.index[0])} if (broken["PyTorch's output"] < LOST).all() and len(broken) else None


def gradients_lost(tables: Tables) -> Claim:
    zero = wide(tables, "gradients").droplevel("at")["zero"]
    share, rest = zero["fp16, unscaled"], max(zero["fp16, scaled"], zero["bf16"])
    size = str(numbers(tables, "gradients")["size"].iloc[0])
    return {"size": size, "share": share} if share > 100 * rest else None


def losses(tables: Tables) -> Claim:
    """Each precision's loss stays closer to fp32's than any other seed's does."""
    off = losses_off(tables)
    seeds = off.index.str.startswith("fp32")
    return {"steps": STEPS} if off[~seeds].max() < off[seeds].min() else None
