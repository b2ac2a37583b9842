"""Which rows of a table over all runs are compared: one program, one batch, sizes in order, one context."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd

from stepscope.config import SIZES

REFERENCE = 512  # the context at which sizes are compared, where it was run
PRECISION_NAMES = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "fp16": "fp16"}
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}
ORDER = ("size", "context_length", "vocab_size", "batch_size")  # of the rows of every table that has them
RANKS = {size: shape.d_model * shape.num_layers for size, shape in SIZES.items()}


def most_common(values: pd.Series) -> Any:
    """The value that most rows have, the greater of two."""
    return values.mode().max()


def reference(contexts: pd.Series) -> int:
    """The context at which its sizes are compared: 512, else the longest there is.

    Raises:
        IndexError: there is none.
    """
    return int(REFERENCE if (contexts == REFERENCE).any() else contexts.sort_values().iloc[-1])


def largest(sizes: pd.Series) -> str:
    """The largest size; one without a name is none where others have one."""
    return str(sizes[_ranks(sizes).fillna(0).idxmax()])


def preferred(value: object) -> Callable[[pd.Series], Any]:
    """For :func:`select`: this value where there is one, else the first that there is."""
    return lambda values: value if (values == value).any() else values.iloc[0]


# The batch and vocabulary that most rows have, and in these the plain program.
SHAPE: dict[str, Any] = {"batch_size": most_common, "vocab_size": most_common}
PLAIN: dict[str, Any] = SHAPE | {
    "attention": "naive",
    "compile": "none",
    "optimizer": "foreach",
    "repeat": 0,
    "expandable_segments": False,
}


def select(
    rows: pd.DataFrame, program: Mapping[str, Any] = MappingProxyType({}), /, **wanted: object
) -> pd.DataFrame:
    """The rows of a program (:data:`PLAIN`; of its columns those that the table has) whose columns have these
    values, which may replace the program's; the smallest size, the shortest context first.

    Args:
        wanted: by column a value, a list of values, or a function of the column as the conditions before it
            leave it, which gives a value (:func:`reference`, ``max``) or which rows (``pd.Series.notna``).

    Raises:
        LookupError: there are none.
    """
    conditions = {name: value for name, value in program.items() if name in rows} | wanted
    for name, value in conditions.items():
        rows = rows[having(rows[name], value)] if len(rows) else rows
    if rows.empty:
        raise LookupError(f"no row has {', '.join(conditions)} as asked for")
    order = [name for name in ORDER if name in rows]
    return (
        rows.sort_values(
            order, kind="stable", key=lambda values: _ranks(values) if values.name == "size" else values
        )
        if order
        else rows
    )


def having(values: pd.Series, wanted: object) -> pd.Series:
    """Which of a column's values are as :func:`select` wants them."""
    found = wanted(values) if callable(wanted) else wanted
    if isinstance(found, pd.Series):
        return found
    return values.isin(found) if isinstance(found, list) else values == found


def _ranks(sizes: pd.Series) -> pd.Series:
    return sizes.astype(str).map(RANKS)


def by_size(
    rows: pd.DataFrame, columns: str, values: str, names: dict[str, str] | None = None
) -> pd.DataFrame:
    """A row a size, in the order in which they come; a column a context ("1,024") or another key, those of
    ``names`` in that order and by these names."""
    found = rows.pivot(index="size", columns=columns, values=values).loc[rows["size"].unique()]
    if names:
        found = found[[name for name in names if name in found]].rename(columns=names)
    return found.rename(columns=lambda name: name if isinstance(name, str) else f"{name:,}").rename_axis(
        columns=None
    )
