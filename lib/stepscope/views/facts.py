"""Derive the writeup's few numbers that require some code, with one function per fact.

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
    """Return the mean and sample standard deviation of ten steps: one slow step and nine equal ones.

    If all but one of n numbers are equal, the standard deviation is the outlier's distance from them divided by
    the square root of n.
    """
    return {"mean_ms": (first_ms + 9 * later_ms) / 10, "std_ms": (first_ms - later_ms) / 10**0.5}


@fact
def flops_of_step(step: pd.Series) -> dict[str, float]:
    """Compute a step's FLOPs by formula, in total and by part.

    Each matmul weight requires 2 FLOPs per token in forward and 4 in backward; attention's two matmuls with T x T
    matrices account for the rest.

    Returns:
        a dict with ``tokens``, ``weights`` (the number of weights in matmuls), ``weights_tflop``,
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
