"""What a runs folder keeps of sweeps side by side: three CSV files."""
from pathlib import Path

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from stepscope.runs.record import RecordError
from stepscope.runs.tables import read_table

KEPT = "neighbours"  # in a runs folder
TEXT, NUMBER, MAYBE, TRUTH = "text", "a number", "a number or nothing", "True or False"
COLUMNS = {  # of each file, with what they hold
    "sweeps": {"condition": TEXT, "workers": MAYBE, "wall_s": MAYBE, "runs": NUMBER, "at_once": NUMBER,
               "ram_gib": MAYBE, "mean_run_s": NUMBER, "counted": NUMBER, "different": NUMBER},
    "timings": {"run_id": TEXT, "size": TEXT, "context_length": NUMBER, "beside": NUMBER, "mode": TEXT,
                "phase": TEXT, "busy_share": MAYBE, "gpu_ms": MAYBE, "operations_ms": MAYBE,
                "condition": TEXT},
    "experiment": {"size": TEXT, "context_length": NUMBER, "mode": TEXT, "condition": TEXT, "runs": NUMBER,
                   "median_ms": MAYBE, "ci_low_ms": MAYBE, "ci_high_ms": MAYBE, "ratio": MAYBE,
                   "agrees": TRUTH},
}


def load(root: Path) -> dict[str, pd.DataFrame]:
    """``sweeps`` and ``timings`` of ``compare_folders``, and ``experiment``; each empty where it was not
    made.

    Raises:
        RecordError: a file cannot be read, or holds something else than what is written to it.
    """
    tables = {name: read(root, f"{KEPT}/{name}.csv", columns) for name, columns in COLUMNS.items()}
    if len(tables["sweeps"]) and len(tables["timings"]):
        known, timed = tables["sweeps"]["condition"], tables["timings"]["condition"].unique()
        if known.duplicated().any() or not set(timed) <= set(known):
            raise RecordError(f"{KEPT}/sweeps.csv: expected one row for each condition of timings.csv"
                              f" ({', '.join(timed)}), and it has {', '.join(known)}")
    return tables


def read(root: Path, name: str, columns: dict[str, str]) -> pd.DataFrame:
    """One of the files, by its path in the runs folder; empty where there is none.

    Raises:
        RecordError: it cannot be read, has no rows, lacks a column, or a column holds something else.
    """
    if not (root / name).exists():
        return pd.DataFrame()
    table = read_table(root, name)
    if lacking := [column for column in columns if column not in table]:
        raise RecordError(f"{name}: lacks the columns {', '.join(lacking)}; expected {', '.join(columns)}")
    if table.empty:
        raise RecordError(f"{name}: holds no rows, only a header")
    for column, kind in columns.items():
        if not holds(table[column], kind):
            raise RecordError(f"{name}: column {column}: expected {kind} in every row")
    return table.astype({column: str for column, kind in columns.items() if kind == TEXT})


def holds(column: pd.Series, kind: str) -> bool:
    """Whether every row of a column is of a kind."""
    if kind == MAYBE and column.isna().all():
        return True
    if kind != MAYBE and column.isna().any():
        return False
    return kind == TEXT or (is_bool_dtype(column) if kind == TRUTH else
                            is_numeric_dtype(column) and not is_bool_dtype(column))
