"""From a runs folder to the tables that every answer and figure is made from."""
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stepscope import PROJECT, StepscopeError, studies
from stepscope.runs.record import Record, RecordError
from stepscope.runs.selection import told_apart
from stepscope.runs.store import Store
from stepscope.say.chapter import Chapter
from stepscope.say.formats import listing


@functools.cache
def chapters() -> list[Chapter]:
    """What each study brings, in the report's order."""
    return [importlib.import_module(f"stepscope.studies.{name}.chapter").CHAPTER for name in studies.STUDIES]


@dataclass
class Data:
    """What a report is made from, and what it was measured on."""

    records: list[Record]
    aside: list[Record]  # of these, those no answer is made from (see told_apart)
    errors: list[RecordError]
    tables: dict[str, pd.DataFrame]  # by name: "<study>.<table>"
    aside_times: pd.DataFrame  # "benchmark.times" of those aside

    @property
    def device_name(self) -> str:
        names = {record.machine.get("device_name", "unknown device") for record in self.records}
        return listing(sorted(names)) if names else "no device"

    @property
    def is_preset(self) -> bool:
        """Whether these are the tiny models of the CPU preset: nothing then says anything about a GPU."""
        return bool(self.records) and all(record.config["device"] == "cpu" for record in self.records)

    @property
    def where(self) -> str:
        """What stands in every figure's title."""
        return f"CPU preset: tiny models on {self.device_name}" if self.is_preset else self.device_name


def load_data(store: Store) -> Data:
    """Read a runs folder. Records that cannot be used, or whose tables cannot, are left out and named in
    ``errors``.

    Raises:
        RecordError: there is no such folder, or its tables cannot be used together.
    """
    if not store.root.is_dir():
        raise RecordError(f"{store.root}: no such runs folder")
    everything, errors = store.records(check_tables=True)
    while True:
        records, aside = told_apart(everything)
        try:
            tables = tables_of(store, records)
            aside_times = tables_of(store, aside)["benchmark.times"] if aside else pd.DataFrame()
            return Data(everything, aside, errors, tables, aside_times)
        except RecordError:
            found = {id(record): error for record in everything if (error := _unusable(store, record))}
            if not found:
                raise
            everything = [record for record in everything if id(record) not in found]
            errors = [*errors, *found.values()]


def load(*wanted: str, runs: str | Path = "") -> dict[str, pd.DataFrame]:
    """The tables of some studies, for questions of one's own: ``load("ladder")["ladder.rungs"]``.

    They are those that the report is made from, a row an observation, with the configuration of its run and
    its ``run_id``; a column's unit is in its name. Every run is in them, also those that no answer of the
    report is made from. ``nsys``, ``compile``, ``processes`` and ``mixed_precision`` take some seconds each.

    Args:
        wanted: names of studies (``stepscope.studies.STUDIES``); none: all, which takes half a minute.
        runs: a folder of runs; empty: the committed reference.

    Returns the tables by ``"<study>.<table>"``; a study that has no runs there has empty ones.

    Raises:
        RecordError: there is no such folder, it holds no run that can be used, or its tables cannot be read.
        StepscopeError: there is no such study.
    """
    known = studies.STUDIES
    if unknown := sorted(set(wanted) - set(known)):
        raise StepscopeError(f"study: got {listing(unknown)}, but known studies are {', '.join(known)}")
    if not runs and not PROJECT:
        raise RecordError("runs: an installed package has no reference; name a folder of runs")
    store = Store(Path(runs) if runs else Path(str(PROJECT), "runs", "h200"))
    records, errors = store.records(check_tables=True)
    if not records:
        raise RecordError(f"{store.root}: {errors[0] if errors else 'no such runs folder, or an empty one'}")
    asked = [chapter for chapter in chapters() if chapter.study in (wanted or known)]
    return {f"{chapter.study}.{name}": table
            for chapter in asked for name, table in _tables(chapter, store, records).items()}


def tables_of(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """Every study's tables by their full names.

    Raises:
        RecordError: a record's tables cannot be used.
    """
    for record in records:
        if record.status == "ok" and not record.tables:
            run = f"{record.study}/{record.run_id}"
            raise RecordError(f"{run}/record.json: names no table, though its run was done")
    return {f"{chapter.study}.{name}": table
            for chapter in chapters() for name, table in _tables(chapter, store, records).items()}


def _tables(chapter: Chapter, store: Store, records: list[Record]) -> Mapping[str, pd.DataFrame]:
    try:
        return chapter.load(store, records)
    except StepscopeError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # columns or types of another table
        what = " ".join(f"{type(error).__name__}: {error}".split())
        runs = listing([f"{record.study}/{record.run_id}/record.json" for record in records[:3]])
        raise RecordError(f"{runs}: the tables named there are not those of a run ({what})") from error


def _unusable(store: Store, record: Record) -> RecordError | None:
    """Why no chapter can be made with this record; None where all can."""
    try:
        tables_of(store, [record])
    except RecordError as error:
        return error
    return None
