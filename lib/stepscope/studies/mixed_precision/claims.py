"""What the mixed-precision study can say: each function gives the numbers of one sentence where it holds."""

import math

from stepscope.report.schemas import Claim, Tables
from stepscope.stats import LOST, SAME, launch_bound_rows
from stepscope.studies.mixed_precision.numerics import FEATURES, STEPS
from stepscope.studies.mixed_precision.tables import (
    context,
    gains,
    kinds,
    loss_shift,
    numbers,
    pivoted,
    trend,
    with_fp32,
)

SUMS = {
    "fp32": "fp32 into fp32",
    "fp16": "fp16 into fp16",
    "mixed": "fp16 into fp32",
    "cast": "fp16 cast to fp32, into fp32",
    "bf16": "bf16 into bf16",
}


def _gain(tables: Tables, precision: str) -> Claim:
    """The gain of the smallest and of the largest size, where there is one."""
    found = gains(tables, precision)
    if len(found) < 2 or min(found.iloc[0], found.iloc[-1]) <= 1 + SAME:
        return None
    return {
        "small": str(found.index[0]),
        "small_gain": found.iloc[0],
        "large": str(found.index[-1]),
        "large_gain": found.iloc[-1],
        "context": context(tables),
    }


def tensor_cores(tables: Tables) -> Claim:
    """Rates of large matmuls in bf16 and in fp32, the fastest of the benchmark's runs."""
    rates = tables["benchmark.results"].groupby("precision")["matmul_tflops"].max()
    times = rates["bf16"] / rates["fp32"]
    return {"bf16": rates["bf16"], "fp32": rates["fp32"], "times": times} if times > 2 else None


def precision_gain(tables: Tables) -> Claim:
    return _gain(tables, "bf16")


def precision_tf32(tables: Tables) -> Claim:
    return _gain(tables, "tf32")


def answer_trend(tables: Tables) -> Claim:
    """bf16's gain of the smallest and of the largest size, whatever it is.

    Raises:
        LookupError: fewer than two sizes were measured.
    """
    found = gains(tables, "bf16")
    if len(found) < 2:
        raise LookupError("one size has no trend")
    return {
        "small": str(found.index[0]),
        "small_gain": found.iloc[0],
        "large": str(found.index[-1]),
        "large_gain": found.iloc[-1],
        "context": context(tables),
    }


def trend_why(tables: Tables) -> Claim:
    """The gain grows with the size, and so does the matmuls' share of the fp32 step."""
    found = trend(tables)
    grow = len(found) > 1 and found["step"].is_monotonic_increasing and found["share"].is_monotonic_increasing
    return {"small_share": found["share"].iloc[0], "large_share": found["share"].iloc[-1]} if grow else None


def precision_why(tables: Tables) -> Claim:
    found = trend(tables).iloc[-1]
    step, slower = kinds(tables, str(found.name)), 1 / found["remainder"]
    if found["matmul"] > 2 and slower > 1 + SAME:
        return {
            "size": found.name,
            "matmul": found["matmul"],
            "remainder": slower,
            "casts": step.loc["cast", "bf16"] / step["bf16"].sum(),
        }
    return None


def precision_launch(tables: Tables) -> Claim:
    """Shapes whose full step is GPU-bound in fp32 and launch-bound in bf16."""
    rows = with_fp32(tables, precision="bf16", mode="step").dropna(subset=["busy", "busy_fp32"])
    exact = rows.filter(like="_fp32").rename(columns=lambda name: name.removesuffix("_fp32"))
    count = int((launch_bound_rows(rows) & ~launch_bound_rows(exact)).sum())
    if not count:
        return None
    some = f"{count} of {len(rows)} shapes {'is' if count == 1 else 'are'}"
    return {"shapes": some if len(rows) > 1 else f"{rows['size'].iloc[0]}'s step is"}


def precision_memory(tables: Tables) -> Claim:
    """How much bf16 lowers the full step's peak at most, and that it is nothing at the shortest context."""
    rows = with_fp32(tables, precision="bf16", mode="step").dropna(subset=["peak_gib", "peak_gib_fp32"])
    if rows.empty:
        raise LookupError("no shape has both")
    less = 1 - rows["peak_gib"] / rows["peak_gib_fp32"]
    most, short = rows.loc[less.idxmax()], rows["context_length"].min()
    if less.max() < SAME or less[rows["context_length"] == short].abs().max() > SAME:
        return None
    return {"most": less.max(), "size": most["size"], "context": most["context_length"], "short": int(short)}


def answer_sums(tables: Tables) -> Claim:
    """The handout's four sums and bf16's."""
    found = pivoted(tables, "sums")["result"]
    return {name: f"{round(found[case], 4):g}" for name, case in SUMS.items()}


def sums_why(tables: Tables) -> Claim:
    """An fp32 sum loses nothing of fp16 terms, casting them changes nothing, and a sum in fp16 loses more."""
    found = pivoted(tables, "sums")
    result = {name: found["result"][case] for name, case in SUMS.items()}
    exact = result["mixed"] == result["cast"] and found["adding"][SUMS["mixed"]] == 0
    return {"off": 10 - result["fp16"]} if exact and 10 - result["fp16"] > abs(10 - result["mixed"]) else None


def sums_stall(tables: Tables) -> Claim:
    """bf16's sum ends at 4, where half the distance to the next number is more than the term."""
    result = pivoted(tables, "sums")["result"][SUMS["bf16"]]
    return {"sum": f"{result:g}", "step": "1/32"} if result == 4 else None


def answer_toy(tables: Tables) -> Claim:
    """Which tensors are fp32 under autocast, and which are in its type."""
    found = pivoted(tables, "toy", "dtype")
    exact = found.eq("fp32").all()
    return {"exact": ", ".join(found.columns[exact]), "low": ", ".join(found.columns[~exact])}


def toy_why(tables: Tables) -> Claim:
    """Under autocast on a GPU only what matmuls give is low."""
    found = pivoted(tables, "toy", "dtype")
    matmuls = found[["first layer's output", "logits"]]
    exact = found.drop(columns=matmuls.columns).eq("fp32").all(axis=None)
    return {} if exact and matmuls.eq(found.index.to_series(), axis=0).all(axis=None) else None


def answer_norm(tables: Tables) -> Claim:
    """fp16's squares overflow and underflow, bf16's never; a running sum of them in bf16 is far off."""
    lost, error = pivoted(tables, "norm lost"), pivoted(tables, "norm error")
    overflow = [scale for scale, share in lost["squares"]["fp16"].items() if share > LOST and scale >= 1]
    relative_error = error["variance by a running sum"]["bf16", 1.0]
    small = [scale for scale, share in lost["squares"]["fp16"].items() if share > LOST and scale < 1]
    if overflow and small and (lost.loc["bf16"] < LOST).all(axis=None) and relative_error > 0.05:
        return {
            "overflow": int(min(overflow)),
            "underflow": f"{max(small):g}",
            "terms": FEATURES,
            "error": relative_error,
        }
    return None


def health(tables: Tables) -> Claim:
    """Gradients that fp16 loses without loss scaling; nearly none with it, nor in bf16."""
    zero = pivoted(tables, "gradients")["zero"]
    share, scaled = zero["fp16, unscaled"], zero["fp16, scaled"]
    if share > 100 * max(scaled, zero["bf16"]):
        return {"size": numbers(tables, "gradients")["size"].iloc[0], "share": share}
    return None


def losses(tables: Tables) -> Claim:
    """Each precision's loss stays closer to fp32's than any other seed's does."""
    shift = loss_shift(tables)
    seeds = shift.index.str.startswith("fp32")
    return {"last": STEPS // 4, "steps": STEPS} if shift[~seeds].max() < shift[seeds].min() else None


# The assignment's questions: why, and what is said where the first sentence does not hold


def sums_half_step(tables: Tables) -> Claim:
    """bf16 has eight digits: from 4 on its numbers are 1/32 apart, of which half is more than the term."""
    stalls = sums_stall(tables)
    return stalls | {"half": "1/64 = 0.0156", "term": "0.01"} if stalls else None


def norm_other(tables: Tables) -> Claim:
    """Where :func:`answer_norm` does not hold: how far a running sum is off, what squares lose at most."""
    if answer_norm(tables):
        return None
    lost = pivoted(tables, "norm lost")
    error = pivoted(tables, "norm error")["variance by a running sum"]
    found = {"terms": FEATURES, "bf16": error["bf16", 1.0], "bf16_lost": lost.loc["bf16"].max(axis=None)}
    return found | {"fp16": error["fp16", 1.0], "fp16_lost": lost.loc["fp16"]["squares"].max()}


def norm_overflow(tables: Tables) -> Claim:
    """The share of fp16's squares that overflow at a deviation of 100, which is that of normal numbers beyond
    256: the square of 256 is the first power of two that fp16 does not hold."""
    found = pivoted(tables, "norm lost")["squares"]["fp16", 100.0]
    expected = math.erfc(2.56 / math.sqrt(2))
    return {"share": found, "expected": expected} if abs(found / expected - 1) < 0.1 else None


def norm_running(tables: Tables) -> Claim:
    """A running sum of as many squares of mean 1 in bf16 is far off: from 256 on its numbers are 2 apart."""
    error = pivoted(tables, "norm error")["variance by a running sum"]["bf16", 1.0]
    return {"terms": FEATURES, "error": error} if FEATURES > 256 and error > 0.05 else None
