"""Load a runs folder into validated tables, each of which combines all runs of a study.

A faulty run is reported in one sentence and omitted, so invalid input never causes a traceback.
"""

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pandas as pd
import pandera.pandas as pa
import pyarrow.parquet as pq
from pandera.errors import SchemaErrors

from stepscope import PROJECT, StepscopeError, studies
from stepscope.config import truncated_repr
from stepscope.files import one_line, open_within
from stepscope.report.schemas import Tables
from stepscope.runs import schema3
from stepscope.runs.record import Record, inconsistency_warnings, mixed_notebook_warnings
from stepscope.runs.store import Store, runs_folder
from stepscope.stats import POWER_CAP

MAX_ROWS, MAX_BYTES = 2_000_000, 2**28  # limits on the rows of one table, and on its bytes in memory
QUIET_S = 2.0  # if checking the files takes longer, we print that runs are being read
SOFTWARE = ("torch", "cuda", "driver", "NCCL_NVLS_ENABLE")
# Columns that contain times, and columns that identify a case; a run measures all rows of a case together.
TIMED, CASES = ("wall_ms", "gpu_ms"), ("mode", "precision", "optimization", "batch_size")
# The text that `measure.find_inconsistencies` returns if only the profiled steps differ.
SPREAD = r"profiled steps range from \S+ to \S+ ms"


class RunsError(StepscopeError, ValueError):
    """Raised when a runs folder contains no usable run."""


class TableError(StepscopeError, ValueError):
    """Raised when a table is unusable; the message names the run, the table, the column and what was expected."""


@dataclass
class Read:
    """The contents of a runs folder.

    Tables are named "<study>.<table>" for each study that has runs; there is also a table ``runs``. Tables omit
    the runs in ``replaced``, because newer runs have the same keys.
    """

    records: list[Record]
    tables: Tables = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # remarks on usable runs
    replaced: list[Record] = field(default_factory=list)


def load(runs: str | Path = "", quiet: bool = False) -> Tables:
    """Load all tables of a runs folder for your own analysis: ``load()["benchmark.times"]``.

    Each table is tidy: one row per key, the configuration of its run in the first columns, and units in column
    names. ``runs`` contains one row per run, and "<study>.results" contains each run's scalar results.

    Args:
        runs: the folder, relative to the checkout if there is one, or "" for the committed reference.
        quiet: whether to suppress warnings about omitted runs.

    Raises:
        RunsError: If the folder doesn't exist or contains no usable run.
    """
    if not runs and not PROJECT:
        raise RunsError(
            "runs: expected a folder, because an installed package doesn't contain the reference runs"
        )
    found = read(Store(runs_folder(runs) if runs else Path(str(PROJECT), "runs", "h200")))
    if not found.records:
        raise RunsError(f"{runs or 'runs/h200'}: {found.errors[0] if found.errors else 'contains no runs'}")
    for words in [] if quiet else [*found.errors, *found.notes]:
        print(words, file=sys.stderr)
    return found.tables


def read(store: Store, chosen: Callable[[Record], bool] = lambda record: True) -> Read:
    """Read a runs folder; omit unusable runs, and name them in the result's ``errors``.

    Args:
        chosen: returns True for the records to read.

    Raises:
        RunsError: If the folder doesn't exist.
    """
    if not store.root.is_dir():
        raise RunsError(f"{store.root}: no such folder")
    started = time.monotonic()
    every, errors = store.records(check_files=True)
    records = [record for record in every if chosen(record)]
    found = Read(records, errors=[str(error) for error in errors], notes=mixed_notebook_warnings(records))
    if time.monotonic() - started > QUIET_S or len(records) > 500:
        print(f"Reading {len(records):,} runs.", file=sys.stderr)
    found.notes += inconsistency_warnings(records)
    usable = []
    for name in studies.STUDIES:
        study_records = [record for record in records if record.study == name]
        if study_records:
            module = importlib.import_module(f"stepscope.studies.{name}.tables")
            usable += _study(store, module, name, study_records, found)
    found.records = usable
    if usable:
        found.tables["runs"] = _runs(usable)
    return found


def _study(store: Store, module: ModuleType, name: str, records: list[Record], found: Read) -> list[Record]:
    """Add a study's tables to ``found``; return the usable records that no newer run replaces."""
    raw: dict[str, Tables] = {}
    for record in records:
        try:
            raw[record.run_id] = _files(store, module, record)
        except TableError as error:
            found.errors.append(str(error))
    typed: Tables = {}
    for table, schema in module.SCHEMAS.items():
        frames = {run: tables[table] for run, tables in raw.items() if table in tables}
        typed[table], wrong = _typed(schema, frames)
        for run, why in wrong.items():
            del raw[run]
            found.errors.append(f"{name}/{run}: invalid table {table}: {why}")
    usable = {record.run_id: record for record in records if record.run_id in raw}
    joined = {
        table: _configured(module, frame[frame["run_id"].isin([*usable])], usable)
        for table, frame in typed.items()
        if len(frame)
    }
    joined = {table: frame for table, frame in joined.items() if len(frame)}
    older = _replaced(module, joined, usable)
    tables = {
        table: frame[~frame["run_id"].isin(older)].reset_index(drop=True) for table, frame in joined.items()
    }
    if tables and hasattr(module, "tables"):
        try:
            tables |= module.tables(tables)
        except Exception as error:  # noqa: BLE001 a required table may be missing
            found.errors.append(f"{name}: cannot compute the study's derived tables ({_describe(error)})")
    found.replaced += [record for run, record in usable.items() if run in older]
    newest = [record for run, record in usable.items() if run not in older]
    results = [
        _config(module, record) | {"run_id": record.run_id} | record.results
        for record in newest
        if record.done
    ]
    if results:
        tables["results"] = pd.DataFrame(results)
    found.tables |= {f"{name}.{table}": frame for table, frame in tables.items()}
    return newest


def _files(store: Store, module: ModuleType, record: Record) -> Tables:
    """Return one run's tables by name; return an empty dictionary if the run didn't finish."""
    for name in getattr(module, "NUMBERS", ()):
        if isinstance(value := record.results.get(name), str):
            raise TableError(
                f"{record.study}/{record.run_id}: {name}: got {truncated_repr(value)}, but expected a number"
            )
    tables = {
        table: _file(store, record, table)
        for table in module.SCHEMAS
        if record.done and table in record.tables
    }
    if record.status == "ok" and not tables:
        raise TableError(
            f"{record.study}/{record.run_id}: the run has finished, but its record lists no tables"
        )
    return tables


def _file(store: Store, record: Record, table: str) -> pd.DataFrame:
    """Read one table from its file, after checking the table's size."""
    path = f"{record.study}/{record.run_id}/{record.tables[table].file}"
    try:
        with open_within(store.root, path) as file:
            parquet = pq.ParquetFile(file)
            about = parquet.metadata
            size = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
            if about.num_rows > MAX_ROWS or size > MAX_BYTES:
                raise TableError(
                    f"{path}: got {about.num_rows:,} rows and {size:,} bytes, but expected at most"
                    f" {MAX_ROWS:,} rows and {MAX_BYTES:,} bytes"
                )
            content = parquet.read().to_pandas(ignore_metadata=True)
            if record.schema_version == 3:
                return schema3.upgrade_table(record.study, content)
            return content
    except TableError:
        raise
    except Exception as error:  # noqa: BLE001 pyarrow raises many kinds of errors for invalid files
        raise TableError(f"{path}: not a readable Parquet file ({_describe(error)})") from None


def _typed(schema: pa.DataFrameSchema, frames: Tables) -> tuple[pd.DataFrame, dict[str, str]]:
    """Validate a table that combines several runs; if that fails, validate each run's part separately.

    Returns:
        The valid rows with ``run_id``, and the reason for each run whose table can't be used.
    """
    frames = {run: _with_optional(schema, frame) for run, frame in frames.items()}
    if all(set(frame) == set(schema.columns) for frame in frames.values()):
        by_run = pa.DataFrameSchema(
            schema.columns | {"run_id": pa.Column()},
            strict=schema.strict,
            checks=schema.checks,
            unique=["run_id", *schema.unique],
        )
        with suppress(Exception):  # raised by pandera, or by its checks for unexpected types
            return by_run.validate(_together(frames)), {}
    fit, wrong = {}, {}
    for run, frame in frames.items():
        try:
            fit[run] = schema.validate(frame, lazy=True)
        except SchemaErrors as error:
            wrong[run] = _why(error)
        except Exception as error:  # noqa: BLE001 checks may raise any error for unexpected types
            wrong[run] = _describe(error)
    return _together(fit), wrong


def _with_optional(schema: pa.DataFrameSchema, frame: pd.DataFrame) -> pd.DataFrame:
    """Add empty columns for the optional columns that older records omit."""
    optional = [name for name, column in schema.columns.items() if not column.required]
    return frame.assign(**{name: None for name in optional if name not in frame})


def steady(tables: Tables) -> Tables:
    """Return the tables without the rows that a run marked as inconsistent.

    If other tables contain times of the same run and case, such as times of single steps and kernels, their
    rows for this case are removed, too. Reports therefore name an inconsistent case, but show none of its
    numbers.

    A power-limited case is kept if it is inconsistent only because the times of its profiled steps differ: a
    fluctuating clock explains that.
    """
    # The tables of results are excluded: their column 'inconsistent' lists all inconsistent cases of a run.
    marked = {
        name: table
        for name, table in tables.items()
        if "inconsistent" in table and not name.endswith(".results")
    }
    kept = {}
    for name, table in tables.items():
        study = name.partition(".")[0]
        odd = [
            cases[_is_unusable(cases)]
            for other_name, cases in marked.items()
            if other_name.partition(".")[0] == study and "run_id" in cases
        ]
        for rows in [] if name in marked or not {*TIMED} & {*table} else odd:
            keys = [key for key in ("run_id", *CASES) if key in rows and key in table]
            if len(rows) and len(keys) > 1 and "run_id" in keys:
                cases = pd.MultiIndex.from_frame(table[keys])
                table = table[~cases.isin(pd.MultiIndex.from_frame(rows[keys]))]
        kept[name] = table[~_is_unusable(table)] if name in marked else table
    return kept


def _is_unusable(cases: pd.DataFrame) -> pd.Series:
    """Return a mask of the rows that are inconsistent for a reason other than a fluctuating clock."""
    is_unusable = cases["inconsistent"] != ""
    if "clock_reasons" in cases:
        is_limited = cases["clock_reasons"].str.contains(POWER_CAP, na=False)
        is_unusable &= ~(is_limited & cases["inconsistent"].str.fullmatch(SPREAD, na=False))
    return is_unusable


def _together(frames: Tables) -> pd.DataFrame:
    named = [frame.assign(run_id=run) for run, frame in frames.items()]
    return pd.concat(named, ignore_index=True) if named else pd.DataFrame(columns=["run_id"])


def _why(error: SchemaErrors) -> str:
    """Explain in one line why a table is invalid."""
    case = error.failure_cases.iloc[0]
    value = case["failure_case"]
    value = truncated_repr(value.item() if hasattr(value, "item") else value)
    wrong = {
        "column_in_schema": f"column {value} is unexpected",
        "column_in_dataframe": f"column {value} is missing",
        "multiple_fields_uniqueness": "several rows have the same key",
    }
    return wrong.get(
        str(case["check"]), f"column {truncated_repr(case['column'])}: {case['check']} fails for {value}"
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 200)}"


def _config(module: ModuleType, record: Record) -> dict:
    """Return a run's configuration columns; a custom size is named by its dimensions."""
    config = {name: record.config[name] for name in module.CONFIG}
    if config.get("size") == "custom":
        config["size"] = " ".join(
            f"{letter}{record.config[name]}"
            for letter, name in zip("dflh", ("d_model", "d_ff", "num_layers", "num_heads"))
        )
    return config


def _configured(module: ModuleType, frame: pd.DataFrame, records: dict[str, Record]) -> pd.DataFrame:
    """Return a table with the configuration columns of its runs added in front."""
    configs = pd.DataFrame([_config(module, record) for record in records.values()], [*records])
    added = configs[[name for name in configs if name not in frame]].loc[frame["run_id"]]
    return pd.concat([added.reset_index(drop=True), frame.reset_index(drop=True)], axis="columns")


def _replaced(module: ModuleType, tables: Tables, records: dict[str, Record]) -> set[str]:
    """Return the runs that share a key with a newer run."""
    older: set[str] = set()
    age = {
        run: place
        for place, run in enumerate(
            sorted(records, key=lambda run: (records[run].started_at, run), reverse=True)
        )
    }
    for table, frame in tables.items():
        key = (*module.CONFIG, *module.SCHEMAS[table].unique)
        newest_first = frame[["run_id", *key]].sort_values(
            "run_id", key=lambda runs: runs.map(age), kind="stable"
        )
        older |= set(newest_first["run_id"][newest_first.duplicated(list(key))])
    return older


def _runs(records: list[Record]) -> pd.DataFrame:
    def plain(values: Mapping[str, object], prefix: str = "") -> dict:
        return {
            f"{prefix}{name}": value for name, value in values.items() if isinstance(value, str | int | float)
        }

    return pd.DataFrame(
        [
            {
                "study": record.study,
                "run_id": record.run_id,
                "status": record.status,
                "cause": record.cause or "",
                "seconds": record.duration_s,
                "measuring_s": record.measuring_s,
                "started_at": record.started_at,
                **{name: record.software.get(name) for name in SOFTWARE},
                **plain(record.machine, "machine_"),
                **plain(record.config),
                "device": record.machine.get("device_name", ""),
            }
            for record in records
        ]
    )
