"""Which cells a sentence or a picture is about."""
import pandas as pd

from stepscope.studies.attention.config import ATTENTIONS

POINT = ["precision", "d_model", "sequence"]
HEAD = 64         # the head dimension that sentences speak of, where it was measured
HOST_BOUND = 1.1  # a pass that takes at most this many times as long as enqueuing it waits for the host


def timed(cells: pd.DataFrame, causal: bool = True, **values) -> pd.DataFrame:
    """Cells that were timed, with the causal mask or without, of these values of other columns."""
    if cells.empty:
        return cells
    rows = cells[(cells["status"] == "ok") & (cells["causal"] == causal)]
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def head(cells: pd.DataFrame) -> int:
    """The head dimension that sentences speak of."""
    found = sorted(cells["d_model"].unique())
    return int(HEAD if HEAD in found else found[0])


def implementations(cells: pd.DataFrame) -> list[str]:
    """Those in a table, in the study's order."""
    return [name for name in ATTENTIONS if (cells["implementation"] == name).any()]


def is_cpu(cells: pd.DataFrame) -> bool:
    return bool((cells["device"] == "cpu").all())


def waits_for_host(rows: pd.DataFrame, suffix: str = "") -> pd.Series:
    """Cells whose pass takes hardly longer than the host needs to enqueue it (on a CPU: none, as it does the
    work itself)."""
    return ((rows[f"pass_median_ms{suffix}"] < HOST_BOUND * rows[f"enqueue_ms{suffix}"])
            & (rows[f"device{suffix}"] == "cuda"))
