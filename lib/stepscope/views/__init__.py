"""Views: a few wide, tidy tables of one dataset per study, in which documents look numbers up.

A view is a function with a key. It selects nothing: the document chooses rows by naming the key's fields. A
column's name ends in its unit (``wall_ms``, ``busy_share``); :func:`unit_of` reads it.

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

MODULES = ("ladder", "ladder_parts", "benchmark", "nsys", "mixed_precision", "memory", "attention", "across")
# What ends a column's name, and the unit that it means. A column without one is a label, a count or a truth.
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
    "tb_per_s": "TB/s",
    "tokens_per_s": "tokens/s",
}
ORDER = ("size", "context_length", "vocab_size", "batch_size")


class ViewError(StepscopeError, ValueError):
    """A view whose rows break its schema; the text names the view, and what was expected."""


class MissingTable(StepscopeError, LookupError):
    """A table that no run of a folder has."""


@dataclass(frozen=True)
class View:
    """How a view is made, and what identifies one of its rows."""

    make: Callable[["Views"], pd.DataFrame]
    key: list[str]
    columns: list[str]
    over: list[str]
    studies: list[str]

    @property
    def config(self) -> list[str]:
        """The configuration's fields that tables of these studies have."""
        fields = [
            importlib.import_module(f"stepscope.studies.{study}.tables").CONFIG for study in self.studies
        ]
        return [*dict.fromkeys(field for names in fields for field in names)]


def view(
    key: Sequence[str], columns: Sequence[str], studies: Sequence[str], over: Sequence[str] = ()
) -> Callable[[Callable], Callable]:
    """Declare a function as a view.

    Args:
        key: what identifies a row: every configuration field of its studies, and the table's own key.
        columns: the columns beside the key.
        studies: whose tables it is made of.
        over: fields of the configuration that the view joins rows over, so that they are not in its key.
    """

    def declare(make: Callable[["Views"], pd.DataFrame]) -> Callable[["Views"], pd.DataFrame]:
        make.view = View(make, [*key], [*columns], [*over], [*studies])  # type: ignore[attr-defined]
        return make

    return declare


def all_views() -> dict[str, View]:
    """Every view by its name."""
    found = {}
    for module in MODULES:
        for name, function in vars(importlib.import_module(f"stepscope.views.{module}")).items():
            if isinstance(getattr(function, "view", None), View) and function.__module__.endswith(module):
                found[name] = function.view
    return found


class Views(Mapping[str, pd.DataFrame]):
    """The views of a folder's tables, each made once, when it is first asked for.

    Raises:
        MissingTable: when a view needs a table that no run has.
        ViewError: when a view's rows break its schema.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._views = all_views()
        self._made: dict[str, pd.DataFrame] = {}

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the runs, "<study>.<table>", with the smallest size first."""
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
    """Return the declared columns of a view's rows, whose key is unique."""
    expected = [*declared.key, *declared.columns]
    if missing := [column for column in expected if column not in frame]:
        raise ViewError(f"view {name}: has no column {', '.join(missing)}, but declares it")
    repeated = frame[frame.duplicated(declared.key, keep=False)]
    if len(repeated):
        raise ViewError(
            f"view {name}: {len(repeated)} rows repeat a key, the first {_first(repeated, declared)}"
        )
    frame = frame[expected].reset_index(drop=True)
    unnamed = Names(varying(frame, declared.key))
    frame.attrs = {"view": name, "key": Names(declared.key), "unnamed": unnamed}
    return frame


class Names(tuple):
    """Names of columns among a frame's ``attrs``, which pandas copies deeply in each of its operations."""

    def __deepcopy__(self, memo: dict) -> "Names":
        return self


def _first(rows: pd.DataFrame, declared: View) -> str:
    return ", ".join(f"{name}={rows[name].iloc[0]!r}" for name in declared.key)


def varying(frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return the columns, of these, in which the rows differ."""
    return [name for name in names if name in frame and frame[name].nunique(dropna=False) > 1]


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by size, context length, vocabulary and batch size, smallest first."""
    keys = [name for name in ORDER if name in frame]
    return frame.sort_values(keys, kind="stable", key=_rank) if keys else frame


def _rank(column: pd.Series) -> pd.Series:
    return column.map(SIZE_RANKS).fillna(0) if column.name == "size" else column


def unit_of(column: str) -> str:
    """Return the unit that a column's name ends in; empty for a label, a count or a truth value."""
    endings = [suffix for suffix in UNITS if column == suffix or column.endswith(f"_{suffix}")]
    return UNITS[max(endings, key=len)] if endings else ""
