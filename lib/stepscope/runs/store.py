"""Run folders and the records in them.

A runs folder holds ``<study>/<run id>/`` with ``record.json``, the executed ``notebook.ipynb`` and the tables. A run is
made in ``.partial/`` and renamed into its place when its record is written and synced, so what stands in place is whole,
whenever and however a sweep ended. What is in place and still not valid is moved to ``set-aside/``, never deleted.
"""
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from stepscope import StepscopeError
from stepscope.config import SIZES, ConfigError, RunConfig, configure

SCHEMA_VERSION = 1
ENDED = "sweeps/ended.csv"  # of each sweep that ran something here: when, on how many workers, how many runs, how long


class RecordError(StepscopeError, ValueError):
    """A record that cannot be used; the text names the file and what is wrong with it."""


class AlreadyBegun(StepscopeError, RuntimeError):
    """A run that was begun before in this sweep, by a worker that then died."""


class StoreError(StepscopeError, OSError):
    """A runs folder that cannot be written to."""


class StoreBusy(StepscopeError, RuntimeError):
    """Another sweep is writing into the same folder."""


class Table(BaseModel):
    """One table of a run: a CSV or Parquet file beside its record."""

    file: str
    rows: int | None = None  # None: another program's file, kept as it wrote it
    sha256: str


class Record(BaseModel):
    """How one run ended and what it found. ``oom`` is a result: the configuration does not fit this device."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    study: str
    status: Literal["ok", "oom", "failed"]
    cause: str | None = None
    config: dict[str, Any]
    results: dict[str, float | int | str | bool | None] = {}
    tables: dict[str, Table] = {}
    machine: dict[str, Any] = {}
    software: dict[str, Any] = {}
    gpu_before: dict[str, Any] = {}
    gpu_after: dict[str, Any] = {}
    started_at: datetime
    duration_s: float
    measuring_s: float = 0.0
    beside: list[str] = []  # runs that went on at the same time on the same machine, as study/run id

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do: a failed run is tried again when its sweep is resumed."""
        return self.status != "failed"


def write_text_durably(path: Path, text: str) -> None:
    """Write a file so that at every instant there is either the old one or the whole new one, on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make what is in a file, or the renames in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_table(folder: Path, name: str, table: pd.DataFrame) -> Table:
    """Write a table: Parquet when ``name`` ends so, else CSV, a header row, then numbers to 7 significant digits."""
    path = folder / name
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False, compression="zstd")
    else:
        path = folder / f"{name}.csv"
        path.write_text(table.to_csv(index=False, float_format="%.7g"), encoding="utf-8")
    return Table(file=path.name, rows=len(table), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def read_record(folder: Path, check_tables: bool = False) -> Record:
    """The record of one run folder.

    Args:
        check_tables: also compare each table with the digest that the record has of it.

    Raises:
        RecordError: no record, not JSON, not the schema, in another run's folder, or a table is missing or altered.
    """
    path = folder / "record.json"
    try:
        with open(path, "rb") as file:
            record = Record.model_validate_json(file.read())
    except FileNotFoundError:
        raise RecordError(f"{path}: no record in this run folder") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RecordError(f"{path}: not a valid record ({where}: {first['msg']})") from None
    if record.run_id != folder.name or record.study != folder.parent.name:
        raise RecordError(f"{path}: is the record of {record.study}/{record.run_id}, in the folder of another run")
    for table in record.tables.values() if check_tables else ():
        path = folder / table.file
        if not path.is_file():
            raise RecordError(f"{path}: the record names this table, and it is not there")
        if hashlib.sha256(path.read_bytes()).hexdigest() != table.sha256:
            raise RecordError(f"{path}: differs from the table that the record was written with")
    return record


class Store:
    """One runs folder."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.partial = self.root / ".partial"

    def folder(self, config: RunConfig) -> Path:
        return self.root / config.study / config.run_id

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder for one sweep; leftovers of an interrupted one are cleared away.

        Raises:
            StoreBusy: another process holds it. The lock is the kernel's and ends with its holder, however that dies.
        """
        holder = self.root / ".lock-holder"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / ".lock").touch()
            lock = (self.root / ".lock").open("r")  # locked through a reading descriptor: it keeps no file system busy
        except OSError as error:
            raise StoreError(f"{self.root}: cannot be written to ({error.strerror}); nothing was started") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                who = holder.read_text() if holder.exists() else ""
                raise StoreBusy(f"{self.root}: another sweep is writing here ({who.strip() or 'just started'});"
                                " wait for it, stop it, or choose another --runs folder") from None
            with suppress(OSError):  # a full disk is named when a run is to be written
                holder.write_text(f"process {os.getpid()}, since {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC\n")
            shutil.rmtree(self.partial, ignore_errors=True)
            try:
                yield
            finally:
                shutil.rmtree(self.partial, ignore_errors=True)
                with suppress(OSError):
                    holder.unlink()

    def begin(self, config: RunConfig, where: str = "") -> Path:
        """A fresh folder to make a run in. A *claim* beside it says where and when, for as long as the sweep goes on.

        Raises:
            AlreadyBegun: there is a claim on this run; a worker that died had it, or still has it.
        """
        claims = self.partial / "claims"
        claims.mkdir(parents=True, exist_ok=True)
        try:
            with (claims / f"{config.study}-{config.run_id}").open("x", encoding="utf-8") as claim:
                json.dump({"run": f"{config.study}/{config.run_id}", "where": where, "host": os.uname().nodename,
                           "since": time.time()}, claim)
        except FileExistsError:
            raise AlreadyBegun(f"{config.study}/{config.run_id} was begun before in this sweep") from None
        return self.folder_in_making(config)

    def folder_in_making(self, config: RunConfig) -> Path:
        folder = self.partial / f"{config.study}-{config.run_id}-{os.urandom(4).hex()}"
        folder.mkdir(parents=True)
        return folder

    def claim(self, config: RunConfig) -> dict | None:
        """Where and since when a run goes on (``run``, ``where``, ``host``, ``since`` in s); None before it has begun."""
        try:
            return json.loads((self.partial / "claims" / f"{config.study}-{config.run_id}").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):  # not begun, or in this very moment
            return None

    def unclaim(self, config: RunConfig) -> None:
        (self.partial / "claims" / f"{config.study}-{config.run_id}").unlink(missing_ok=True)

    def commit(self, folder: Path, record: Record) -> Path:
        """Write the record, last, and put the run in its place. A failed run that stood there is replaced."""
        for path in folder.rglob("*"):
            if path.is_file():
                sync(path)
        write_text_durably(folder / "record.json", record.model_dump_json(indent=1) + "\n")
        place = self.root / record.study / record.run_id
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            os.rename(place, self.partial / f"replaced-{folder.name}")
        os.rename(folder, place)
        sync(place.parent)
        return place

    def set_aside(self, folder: Path) -> Path:
        """Move a folder that cannot be used out of the way, keeping all that is in it."""
        place = self.root / "set-aside" / f"{folder.parent.name}-{folder.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        place.parent.mkdir(exist_ok=True)
        os.rename(folder, place)
        return place

    def find(self, config: RunConfig) -> Record | None:
        """The valid record of this very configuration, None where there is no run folder.

        Raises:
            RecordError: there is a folder, and its record, a table, or the configuration recorded is not what it should be.
        """
        folder = self.folder(config)
        if not folder.exists():
            return None
        record = read_record(folder, check_tables=True)
        # Compared as configurations: a field that was added since the record was written has its default in both.
        try:
            recorded = configure(**record.config)
        except ConfigError as error:
            raise RecordError(f"{folder / 'record.json'}: holds a configuration that is not valid ({error})") from None
        if recorded != config:
            ours, theirs = config.model_dump(), recorded.model_dump()
            differ = sorted(field for field in ours if ours[field] != theirs.get(field))
            raise RecordError(f"{folder / 'record.json'}: was written for another configuration (differs in {', '.join(differ)})")
        return record

    def records(self) -> tuple[list[Record], list[RecordError]]:
        """All valid records by study and run id, and what is wrong with the others."""
        records, errors = [], []
        for path in sorted(self.root.glob("[!.]*/*/")):
            if path.parent.name in ("set-aside", "figures", "sweeps"):
                continue
            try:
                records.append(read_record(path))
            except RecordError as error:
                errors.append(error)
        return records, errors

    def frame(self) -> tuple[pd.DataFrame, list[RecordError]]:
        """All valid records as :func:`runs_frame`'s rows, by study and run id, and what is wrong with the others."""
        records, errors = self.records()
        return runs_frame(records), errors


def runs_frame(records: list[Record]) -> pd.DataFrame:
    """One row a run: run_id, study, status, cause, every field of its configuration, and its results. A shape that has no
    name is named by its dimensions, so that two of them are two sizes."""
    frame = pd.DataFrame([_row(record) for record in records])
    if "size" in frame and (nameless := frame["size"] == "custom").any():
        frame.loc[nameless, "size"] = [f"d{row.d_model} f{row.d_ff} l{row.num_layers} h{row.num_heads}" for row in frame[nameless].itertuples()]
    return frame


def _row(record: Record) -> dict:
    return {**configure(**record.config).model_dump(), **record.results, "run_id": record.run_id, "study": record.study,
            "status": record.status, "cause": record.cause, "started_at": record.started_at,
            "duration_s": record.duration_s, "measuring_s": record.measuring_s,
            "device_name": record.machine.get("device_name"), "beside": len(record.beside)}


def load_table(store: Store, records: list[Record], name: str) -> pd.DataFrame:
    """The table ``name`` of every record that has one, stacked, with study and run_id: one row an observation.

    Raises:
        RecordError: a table that a record names is missing or cannot be read.
    """
    frames = []
    for record in records:
        if name in record.tables:
            rows, path = record.tables[name].rows, store.root / record.study / record.run_id / record.tables[name].file
            try:
                frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
            except (OSError, ValueError) as error:
                reason = str(error).replace(f"{store.root}/", "")
                raise RecordError(f"{path.relative_to(store.root)}: cannot be read as a table ({reason})") from None
            if rows not in (None, len(frame)):
                raise RecordError(f"{path.relative_to(store.root)}: has {len(frame)} rows, but the record says {rows}")
            frames.append(frame.assign(study=record.study, run_id=record.run_id))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def by_size(frame: pd.DataFrame) -> pd.DataFrame:
    """Sizes as an ordered category, smallest first, so that tables and figures keep that order."""
    order = sorted((size for size in frame["size"].unique() if size in SIZES), key=lambda s: SIZES[s].d_model * SIZES[s].num_layers)
    order += sorted(set(frame["size"]) - set(order))
    return frame.assign(size=pd.Categorical(frame["size"], order, ordered=True)).sort_values(
        ["size", "context_length"], kind="stable", ignore_index=True)
