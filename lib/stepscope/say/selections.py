"""Which rows of a tidy table a sentence or a picture is about."""
import functools
import operator

import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.runs.tables import by_size


def matrix(times: pd.DataFrame) -> pd.DataFrame:
    """The rows of the handout's matrix: fp32, eager, AdamW as torch runs it by default."""
    if times.empty:
        return times
    keep = ((times["precision"] == "fp32") & (times["attention"] == "eager") & ~times["compile"].astype(bool)
            & (times["optimizer"] == "foreach"))
    return by_size(times[keep])


def reference(table: pd.DataFrame) -> tuple[str, int]:
    """What sentences speak of, in a table ordered by size: the smallest size, and of its contexts the largest
    up to 512.
    """
    size = table["size"].iloc[0]
    contexts = table.loc[table["size"] == size, "context_length"]
    return str(size), int(max(c for c in contexts if c <= 512) if (contexts <= 512).any() else contexts.min())


def pick(times: pd.DataFrame, **values) -> pd.DataFrame:
    """The rows with these values, by column."""
    masks = [times[column] == value for column, value in values.items()]
    return times[functools.reduce(operator.and_, masks)]  # once: each selection copies every column


def precisions(table: pd.DataFrame) -> list[str]:
    return [precision for precision in PRECISIONS if (table["precision"] == precision).any()]


def beside(rows: pd.DataFrame) -> dict | None:
    """How many of a table's ``runs`` had others ``beside`` them on their machine (``each`` of several); None
    if none had."""
    runs = rows.drop_duplicates("run_id")
    busy = int((runs["beside"] > 0).sum()) if "beside" in runs else 0
    return {"runs": len(runs), "beside": busy, "each": busy == len(runs) > 1} if busy else None
