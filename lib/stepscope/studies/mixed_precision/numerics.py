"""Compute the results of the notebook's experiments on number formats.

The results of all experiments are rows of one long table, with the columns :data:`COLUMNS`. ``case`` is the
format or the variant, and ``at`` is the position on the experiment's axis (a scale or a step; 0 if there is no
axis). The result is a number (``value``) or the name of a dtype (``dtype``). Some of the experiments and their
quantities are:

* ``norm error``: the median relative error; a value that is inf or NaN counts as an error of 1.
* ``norm lost``: the share of values that are inf, NaN or incorrectly 0.
* ``gradients``: ``zero`` is the share of elements that are 0 in this format but not in fp32. ``norm off`` and
  ``loss off`` are the relative errors of the gradient norm and of the loss, compared with fp32.
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

FEATURES = 1024  # size of the norm's last dimension
STEPS = 200  # steps of each training run


def table(rows: Sequence[tuple]) -> pd.DataFrame:
    """Return the rows of experiments as a table for the record, with NaN instead of inf."""
    results = pd.DataFrame(rows, columns=COLUMNS)
    results = results.astype({"at": "float64", "value": "float64"})
    is_infinite = results["value"] == float("inf")
    value = results["value"].mask(is_infinite)
    return results.assign(value=value)


def running_sum(x: Tensor) -> Tensor:
    """Sum the last dimension term by term, rounding each partial sum to the dtype of ``x``.

    Args:
        x: (rows, features).

    Returns:
        The sums, (rows, 1).
    """
    total = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        total = total + term
    return total.unsqueeze(-1)


def error_and_lost(value: Tensor, true: Tensor) -> tuple[float, float]:
    """Return the median relative error of values, and the share of values that are inf, NaN or incorrectly 0."""
    is_finite = value.isfinite()
    relative_errors = ((value - true) / true).abs()
    errors = relative_errors.where(is_finite, 1.0)
    median_error = errors.median()
    is_wrongly_zero = (value == 0) & (true != 0)
    is_lost = ~is_finite | is_wrongly_zero
    lost_share = is_lost.double().mean()
    return median_error.item(), lost_share.item()
