"""The few numbers of the writeup that need an explanation in code: one function per fact.

A template calls a fact by its name: ``{{ ten_steps(cold.first_ms, warm.mean_ms).mean_ms|ms }}``.
"""

from collections.abc import Callable
from typing import Any

FACTS: dict[str, Callable[..., Any]] = {}


def fact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function available to templates."""
    FACTS[function.__name__] = function
    return function


@fact
def ten_steps(first_ms: float, later_ms: float) -> dict[str, float]:
    """Return mean and sample standard deviation of ten steps, one slow and nine alike.

    The deviation of one outlier among n equal numbers is its distance divided by the root of n.
    """
    return {"mean_ms": (first_ms + 9 * later_ms) / 10, "std_ms": (first_ms - later_ms) / 10**0.5}
