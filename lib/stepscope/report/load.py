"""From a runs folder to the tables that every answer and figure is made from."""
import functools
import importlib
from dataclasses import dataclass

import pandas as pd

from stepscope import studies
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
        return listing(sorted({r.machine.get("device_name", "unknown device") for r in self.records})) if self.records else "no device"

    @property
    def is_preset(self) -> bool:
        """Whether these are the tiny models of the CPU preset: nothing then says anything about a GPU."""
        return bool(self.records) and all(record.config["device"] == "cpu" for record in self.records)

    @property
    def where(self) -> str:
        """What stands in every figure's title."""
        return f"CPU preset: tiny models on {self.device_name}" if self.is_preset else self.device_name


def load_data(store: Store) -> Data:
    """Read a runs folder. Unusable records are left out and named in ``errors``.

    Raises:
        RecordError: there is no such folder, or a table that a record names cannot be read.
    """
    if not store.root.is_dir():
        raise RecordError(f"{store.root}: no such runs folder")
    everything, errors = store.records(check_tables=True)
    records, aside = told_apart(everything)
    aside_times = tables_of(store, aside)["benchmark.times"] if aside else pd.DataFrame()
    return Data(everything, aside, errors, tables_of(store, records), aside_times)


def tables_of(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """Every study's tables by their full names."""
    return {f"{chapter.study}.{name}": table for chapter in chapters() for name, table in chapter.load(store, records).items()}
