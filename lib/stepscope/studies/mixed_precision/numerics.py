"""Number formats: functions for the notebook's experiments.

The results of all experiments are rows of one long table, with the columns :data:`COLUMNS`. ``case`` is the format
or the variant, and ``at`` the position on the experiment's axis (a scale or a step; 0 if it has none). A result
is a number (``value``) or the name of a type (``dtype``). Some quantities:

* ``norm error``: the median relative error, where a value that is inf or NaN counts as 1;
* ``norm lost``: the share of values that are inf or NaN, or wrongly 0;
* ``gradients``: ``zero`` is the share of the elements that are 0, but not in fp32; ``norm off`` and ``loss off``
  are relative distances from fp32's.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

COLUMNS = ["experiment", "case", "quantity", "at", "value", "dtype"]
NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}

FEATURES = 1024  # of the norm's inputs
STEPS = 200  # of each training run


def table(rows: Sequence[tuple]) -> pd.DataFrame:
    """Return the rows of experiments as a table for the record, where inf becomes nan."""
    results = pd.DataFrame(rows, columns=COLUMNS)
    results = results.astype({"at": "float64", "value": "float64"})
    is_infinite = results["value"] == float("inf")
    value = results["value"].mask(is_infinite)
    return results.assign(value=value)


def running_sum(x: Tensor) -> Tensor:
    """Sum the last dimension term by term, with each partial sum in the type of ``x``.

    Args:
        x: (rows, features).

    Returns:
        (rows, 1).
    """
    total = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        total = total + term
    return total.unsqueeze(-1)


def error_and_lost(value: Tensor, true: Tensor) -> tuple[float, float]:
    """Return the median relative error of values, and the share of them that is inf, NaN or wrongly 0."""
    is_finite = value.isfinite()
    relative_errors = ((value - true) / true).abs()
    errors = relative_errors.where(is_finite, 1.0)
    median_error = errors.median()
    is_wrongly_zero = (value == 0) & (true != 0)
    is_lost = ~is_finite | is_wrongly_zero
    lost_share = is_lost.double().mean()
    return median_error.item(), lost_share.item()
