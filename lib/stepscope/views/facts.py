"""Compute the few numbers in the writeup that aren't cells of a view, with one function per fact.

A template calls a fact by name: ``{{ ten_steps(cold.first_ms, warm.mean_ms).mean_ms|ms }}``.
"""

from collections.abc import Callable
from typing import Any

import pandas as pd

from stepscope.config import StepConfig
from stepscope.model.flops import forward_flops

FACTS: dict[str, Callable[..., Any]] = {}


def fact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function available to templates."""
    FACTS[function.__name__] = function
    return function


@fact
def ten_steps(first_ms: float, later_ms: float) -> dict[str, float]:
    """Return the mean and the sample standard deviation of ten steps: one slow step and nine equal ones.

    If all but one of n numbers are equal, their standard deviation is the distance between the outlier and the
    other numbers, divided by the square root of n.
    """
    return {"mean_ms": (first_ms + 9 * later_ms) / 10, "std_ms": (first_ms - later_ms) / 10**0.5}


@fact
def flops_of_step(step: pd.Series) -> dict[str, float]:
    """Compute a step's FLOPs by formula, in total and by part.

    Each matmul weight requires 2 FLOPs per token in forward and 4 in backward; attention's two matmuls with T x T
    matrices account for the rest.

    Returns:
        A dictionary with ``tokens``, ``weights`` (the number of weights in matmuls), ``weights_tflop``,
        ``attention_tflop`` and ``total_tflop``.
    """
    shape: dict[str, Any] = {name: int(step[name]) for name in ("context_length", "batch_size", "vocab_size")}
    config = StepConfig(study="benchmark", device="cpu", size=step["size"], **shape)
    forward = forward_flops(config)
    tokens = config.batch_size * config.context_length
    attention = forward["attention.scores"] + forward["attention.value"]
    in_weights = sum(forward.values()) - attention
    return {
        "tokens": tokens,
        "weights": in_weights / (2 * tokens),
        "weights_tflop": 3 * in_weights / 1e12,
        "attention_tflop": 3 * attention / 1e12,
        "total_tflop": 3 * sum(forward.values()) / 1e12,
    }


@fact
def tokens_to_hide(gpus: int, gradient_bytes: int, tflops: float, gb_per_s: float) -> float:
    """Return the number of tokens per GPU at which the backward matmuls take as long as the gradients' all-reduce.

    With P parameters and T tokens, backward runs 4 P T FLOPs, and the all-reduce moves 2 (n - 1) / n times the
    bytes of the gradients over each link. Both times are proportional to P, so P cancels out.

    Args:
        gradient_bytes: bytes per element of the gradients.
        tflops: rate of the matmuls in TFLOP/s.
        gb_per_s: bus bandwidth of the all-reduce.
    """
    link_bytes = 2 * (gpus - 1) / gpus * gradient_bytes
    return link_bytes / (gb_per_s * 1e9) * tflops * 1e12 / 4


@fact
def best_bucket(gradients_gib: float, ms_per_gib: float, call_us: float) -> dict[str, float]:
    """Return the number and size of buckets that minimize the overhead s / (n w) + n o, and this overhead.

    At the minimum, the two terms are equal, so n is the square root of s / (w o).

    Args:
        gradients_gib: s, the size of all gradients.
        ms_per_gib: 1 / w, the time that an all-reduce takes per GiB.
        call_us: o, the fixed time that each all-reduce adds.
    """
    total_ms, call_ms = gradients_gib * ms_per_gib, call_us / 1e3
    count = (total_ms / call_ms) ** 0.5
    return {"count": count, "mib": gradients_gib * 1024 / count, "overhead_ms": 2 * count * call_ms}
