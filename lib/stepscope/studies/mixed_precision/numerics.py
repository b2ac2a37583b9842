"""Number formats: what the notebook's experiments on them need beside their cells.

Every experiment gives rows of one long table, :data:`COLUMNS`: ``case`` is the format or the way, ``at`` the
place on an experiment's axis (a scale, a step; 0 where it has none), and what was found is a number
(``value``) or a type's name (``dtype``). Of ``norm error`` it is the median relative error, where a value
that is inf or NaN counts as 1; of ``norm lost`` the share of values that are inf or NaN, or wrongly 0. Of
``gradients``, ``zero`` is the share of the elements that are not 0 in fp32 and are 0 here, and ``norm off``
and ``loss off`` are relative distances from fp32's.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

COLUMNS = ["experiment", "case", "quantity", "at", "value", "dtype"]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

FEATURES = 1024  # of the norm's inputs
STEPS = 200  # of each training run


def table(rows: Sequence[tuple]) -> pd.DataFrame:
    """Experiments' rows as the record's table; what overflowed has no number."""
    found = pd.DataFrame(rows, columns=COLUMNS).astype({"at": "float64", "value": "float64"})
    return found.replace({"value": {float("inf"): float("nan")}})


def running_sum(x: Tensor) -> Tensor:
    """(rows, features) to (rows, 1): one term after another, each partial sum in the type of ``x``."""
    total = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        total = total + term
    return total.unsqueeze(-1)


def error_and_lost(value: Tensor, true: Tensor) -> tuple[float, float]:
    """The median relative error of values, and the share of them that is lost."""
    errors = ((value - true) / true).abs().where(value.isfinite(), 1.0)
    lost = ~value.isfinite() | ((value == 0) & (true != 0))
    return errors.median().item(), lost.double().mean().item()
