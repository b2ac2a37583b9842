"""Define views: a few wide, tidy tables per study, in which documents look up numbers.

A view is a function that returns a table, and a key that identifies the table's rows. A document selects rows by
giving values for key fields. The name of a column with a unit ends with this unit (``wall_ms``, ``busy_share``);
:func:`unit_of` parses it.

    @view(key=[*CONFIG, "optimization", "batch_size"], columns=["wall_ms", "speedup"], studies=["ladder"])
    def steps(data: Views) -> pd.DataFrame: ...

    views = Views(tables)
    views["steps"]
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from stepscope import StepscopeError
from stepscope.config import SIZE_RANKS
from stepscope.report.schemas import Tables

MODULES = (
    "ladder",
    "ladder_parts",
    "benchmark",
    "nsys",
    "mixed_precision",
    "memory",
    "attention",
    "your_model",
    "distributed",
    "across",
)
# Units by column name suffix. A column without one of these suffixes contains labels, counts or booleans.
UNITS = {
    "ms": "ms",
    "s": "s",
    "us": "us",
    "ns": "ns",
    "h": "h",
    "gib": "GiB",
    "mib": "MiB",
    "bytes": "B",
    "mhz": "MHz",
    "w": "W",
    "j": "J",
    "kwh": "kWh",
    "nats": "nats",
    "share": "%",
    "busy": "%",
    "mfu": "%",
    "error": "%",
    "speedup": "x",
    "ratio": "x",
    "tflops": "TFLOP/s",
    "flops": "n",
    "gb_per_s": "GB/s",
    "tb_per_s": "TB/s",
    "tokens_per_s": "tokens/s",
}
ORDER = ("size", "context_length", "vocab_size", "batch_size")


class ViewError(StepscopeError, ValueError):
    """Raised when a view violates its schema; the message names the view and the problem."""


class MissingTable(StepscopeError, LookupError):
    """Raised when a required table is missing, because no run in the folder contains it."""


@dataclass(frozen=True)
class View:
    """A view's function, and the columns that identify its rows."""

    make: Callable[["Views"], pd.DataFrame]
    key: list[str]
    columns: list[str]
    over: list[str]
    studies: list[str]

    @property
    def config(self) -> list[str]:
        """Return the configuration fields in these studies' tables, without duplicates."""
        fields = [
            importlib.import_module(f"stepscope.studies.{study}.tables").CONFIG for study in self.studies
        ]
        return [*dict.fromkeys(field for names in fields for field in names)]


def view(
    key: Sequence[str], columns: Sequence[str], studies: Sequence[str], over: Sequence[str] = ()
) -> Callable[[Callable], Callable]:
    """Declare a function as a view.

    Args:
        key: columns that identify a row: the studies' configuration fields, and the table's own key.
        columns: the remaining columns.
        studies: studies whose tables the view reads.
        over: configuration fields over which the view aggregates, and which its key therefore omits.
    """

    def declare(make: Callable[["Views"], pd.DataFrame]) -> Callable[["Views"], pd.DataFrame]:
        make.view = View(make, [*key], [*columns], [*over], [*studies])  # type: ignore[attr-defined]
        return make

    return declare


def all_views() -> dict[str, View]:
    """Return all views by name."""
    found = {}
    for module in MODULES:
        for name, function in vars(importlib.import_module(f"stepscope.views.{module}")).items():
            if isinstance(getattr(function, "view", None), View) and function.__module__.endswith(module):
                found[name] = function.view
    return found


class Views(Mapping[str, pd.DataFrame]):
    """The views of a folder's tables, keyed by name; each view is computed once, when it is first looked up.

    Raises:
        MissingTable: If a view requires a table that no run contains.
        ViewError: If a view's rows violate its schema.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._views = all_views()
        self._made: dict[str, pd.DataFrame] = {}

    def table(self, name: str) -> pd.DataFrame:
        """Return the table named "<study>.<table>" for all runs, smallest model size first."""
        if name not in self._tables:
            raise MissingTable(f"no run here has the table {name}")
        return in_order(self._tables[name].copy())

    def has(self, name: str) -> bool:
        return name in self._tables

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._made:
            self._made[name] = _checked(name, self._views[name], self._views[name].make(self))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def _checked(name: str, declared: View, frame: pd.DataFrame) -> pd.DataFrame:
    """Check that a view's keys are unique, and return its declared columns."""
    expected = [*declared.key, *declared.columns]
    if missing := [column for column in expected if column not in frame]:
        raise ViewError(f"view {name} doesn't return these declared columns: {', '.join(missing)}")
    repeated = frame[frame.duplicated(declared.key, keep=False)]
    if len(repeated):
        raise ViewError(
            f"view {name}: {len(repeated)} rows don't have unique keys; the first is {_first(repeated, declared)}"
        )
    frame = frame[expected].reset_index(drop=True)
    unnamed = Names(varying(frame, declared.key))
    frame.attrs = {"view": name, "key": Names(declared.key), "unnamed": unnamed}
    return frame


class Names(tuple):
    """Column names in a frame's ``attrs``, which pandas operations share instead of copying deeply."""

    def __deepcopy__(self, memo: dict) -> "Names":
        return self


def _first(rows: pd.DataFrame, declared: View) -> str:
    return ", ".join(f"{name}={rows[name].iloc[0]!r}" for name in declared.key)


def varying(frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return the named columns that contain more than one value."""
    return [name for name in names if name in frame and frame[name].nunique(dropna=False) > 1]


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by model size, context length, vocabulary size and batch size, smallest first."""
    keys = [name for name in ORDER if name in frame]
    return frame.sort_values(keys, kind="stable", key=_rank) if keys else frame


def _rank(column: pd.Series) -> pd.Series:
    return column.map(SIZE_RANKS).fillna(0) if column.name == "size" else column


def unit_of(column: str) -> str:
    """Return the unit in the suffix of a column's name ("" for labels, counts and booleans)."""
    endings = [suffix for suffix in UNITS if column == suffix or column.endswith(f"_{suffix}")]
    return UNITS[max(endings, key=len)] if endings else ""
