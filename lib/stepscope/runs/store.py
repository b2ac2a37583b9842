"""Run folders and the records in them.

A runs folder holds ``<study>/<run id>/`` with ``record.json``, the executed ``notebook.ipynb`` and the tables. A run is
made in ``.partial/`` and renamed into its place when its record is written and synced, so what stands in place is whole,
whenever and however a sweep ended. What is in place and still not valid is moved to ``set-aside/``, never deleted.

A folder may come from anywhere. What is read of it are regular files within it, opened by :func:`open_within` only, and
:func:`read_record` alone decides whether a run can be used.
"""
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import (AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError,
                      field_validator, with_config)
from typing_extensions import TypedDict  # typing's is not enough for pydantic before Python 3.12

from stepscope import StepscopeError
from stepscope.config import ConfigError, RunConfig, configure, place_of, shown

SCHEMA_VERSION = 1
NOTEBOOK, LOG = "notebook.ipynb", "kernel.log"  # of a run, beside its record; the log: what the kernel's process wrote
MOST_RECORD_BYTES = 2**24
OTHERS = ("set-aside", "figures", "sweeps")  # folders of a runs folder that hold no runs
ENDED = "sweeps/ended.csv"  # of each sweep that ran something here: when, on how many workers, how many runs, how long


class RecordError(StepscopeError, ValueError):
    """A record that cannot be used; the text names the file and what is wrong with it."""


class AlreadyBegun(StepscopeError, RuntimeError):
    """A run that was begun before in this sweep, by a worker that then died."""


class StoreError(StepscopeError, OSError):
    """A runs folder that cannot be written to."""


class StoreBusy(StepscopeError, RuntimeError):
    """Another sweep is writing into the same folder."""


def _plain_path(path: str) -> str:
    if not all(re.fullmatch(r"[A-Za-z0-9_+][A-Za-z0-9._+-]{0,199}", part) for part in path.split("/")):
        raise ValueError(f"{shown(path)} is no plain name of letters, digits, '.', '_', '-' and '+'")
    return path


def _plain_name(name: str) -> str:
    if "/" in name:
        raise ValueError(f"{shown(name)} is no plain name: it has a '/'")
    return _plain_path(name)


def _utc(moment: datetime) -> datetime:
    if not 2000 <= moment.year < 2200:
        raise ValueError(f"got the year {moment.year}, but expected one from 2000 to 2199")
    return moment.astimezone(timezone.utc)


# What is believed of a record: what can be a path in the folder, and numbers that a table can hold.
PlainName = Annotated[str, AfterValidator(_plain_name)]
PlainPath = Annotated[str, AfterValidator(_plain_path)]
Whole = Annotated[int, Field(ge=-2**63, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=10**9)]
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
UNITS = ("_mib", "_bytes", "_ms")


class Table(BaseModel):
    """One table of a run: a CSV or Parquet file beside its record."""

    model_config = ConfigDict(extra="forbid")

    file: PlainPath
    rows: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # None: another program's file, kept as it wrote it
    sha256: Digest


@with_config(ConfigDict(extra="allow"))
class Machine(TypedDict, total=False):
    """What is read of a record's ``machine``; see :func:`stepscope.runs.machine.machine`."""

    device_name: str
    cpu: str
    cpu_cores: Whole
    ram_gib: Number
    gpu_memory_mib: Whole


@with_config(ConfigDict(extra="allow"))
class GpuState(TypedDict, total=False):
    """What is read of a record's ``gpu_before`` and ``gpu_after``; see :func:`stepscope.runs.machine.gpu_state`."""

    throttle_reasons: list[str] | None
    other_processes: Whole | None


class Record(BaseModel):
    """How one run ended and what it found. ``oom`` is a result: the configuration does not fit this device.

    Times have a zone, and are in UTC here whatever zone they were written in.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: PlainName
    study: PlainName
    status: Literal["ok", "oom", "failed"]
    cause: str | None = None
    config: dict[str, Any]
    results: dict[str, float | int | str | bool | None] = {}
    tables: dict[PlainPath, Table] = {}
    notebook_sha256: Digest | None = None  # of the executed notebook; records of before have none
    machine: Machine = {}
    software: dict[str, str | Whole | None] = {}
    gpu_before: GpuState = {}
    gpu_after: GpuState = {}
    started_at: Annotated[AwareDatetime, AfterValidator(_utc)]
    duration_s: Seconds
    measuring_s: Seconds = 0.0
    beside: list[PlainPath] = []  # runs that went on at the same time on the same machine, as study/run id

    @field_validator("results")
    @classmethod
    def results_fit_tables(cls, results: dict[str, Any]) -> dict[str, Any]:
        for name, value in results.items():
            if isinstance(value, str) and (name == "parameters" or name.endswith(UNITS)):
                raise ValueError(f"{shown(name)} is {shown(value)}, but expected a number")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise ValueError(f"{shown(name)} is {shown(value)}, which no table can hold")
        # A number that is none, or is infinite, has no JSON: it is None in the record, and so it is from the start.
        return {name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in results.items()}

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do: a failed run is tried again when its sweep is resumed."""
        return self.status != "failed"


def write_text_durably(path: Path, text: str) -> None:
    """Write a file so that at every instant there is either the old one or the whole new one, on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    if temporary.is_symlink() or temporary.exists():  # of a process that was killed, or somebody's link
        temporary.unlink()
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk
        with suppress(OSError):
            temporary.unlink()
        raise
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make what is in a file, or the renames in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_within(root: Path, name: str) -> BinaryIO:
    """Open a file of a runs folder for reading; ``name`` is its path in there. It waits for nothing, and follows no link.

    Raises:
        OSError: it is not there, is no regular file, or leads out of the folder.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise OSError(errno.EINVAL, "it is not within the folder")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Without waiting: to open a pipe is to wait for its other end.
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and none is followed") from None
        raise
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_within(root: Path, name: str, most_bytes: int) -> bytes:
    """All of a file of a runs folder; :func:`open_within` says what is raised, and a larger file raises it too."""
    with open_within(root, name) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return content


def read_record(folder: Path, check_tables: bool = False, check_notebook: bool = False) -> Record:
    """The record of one run folder. Fields that its configuration was written without have their defaults.

    Args:
        check_tables: also compare each table with the digest and the number of rows that the record has of it.
        check_notebook: also see that the executed notebook of a run that is done is there, and is the one recorded.

    Raises:
        RecordError: no record, not JSON, not the schema, in another run's folder, of a configuration that is not valid, or
            a file is missing or altered. Its text names the file by its path in the runs folder.
    """
    root, name = folder.parent.parent, f"{folder.parent.name}/{folder.name}"
    try:
        record = Record.model_validate_json(read_within(root, f"{name}/record.json", MOST_RECORD_BYTES))
    except FileNotFoundError:
        raise _unusable(name, "record.json", "no record in this run folder") from None
    except OSError as error:
        raise _unusable(name, "record.json", f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise _unusable(name, "record.json", f"not a valid record ({place_of(first) or 'the file'}: {message})") from None
    if record.run_id != folder.name or record.study != folder.parent.name:
        other = f"{record.study}/{record.run_id}"
        raise _unusable(name, "record.json", f"is the record of {other}, in the folder of another run")
    record.config |= _configuration(record, name).model_dump(mode="json")
    for table in record.tables.values() if check_tables else ():
        _check_table(root, name, table)
    if check_notebook and record.done:
        _check_notebook(root, name, record)
    return record


def _unusable(run: str, file: str, what: str) -> RecordError:
    """On one line, whatever the folder's name is."""
    path = f"{run}/{file}"
    return RecordError(f"{path if path.isprintable() else shown(path)}: {what}")


def _configuration(record: Record, name: str) -> RunConfig:
    try:
        if record.config.get("study") != record.study:
            raise ConfigError(f"study: got {shown(record.config.get('study'))}, but the record is of {record.study!r}")
        if record.config.get("device") not in ("cuda", "cpu"):  # 'auto' would be this machine's
            raise ConfigError(f"device: got {shown(record.config.get('device'))}, but expected 'cuda' or 'cpu'")
        return configure(**record.config)
    except ConfigError as error:
        raise _unusable(name, "record.json", f"holds a configuration that is not valid ({str(error)[:500]})") from None


def _check_table(root: Path, name: str, table: Table) -> None:
    digest, lines = hashlib.sha256(), 0
    try:
        with open_within(root, f"{name}/{table.file}") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
                lines += chunk.count(b"\n")
    except FileNotFoundError:
        raise _unusable(name, table.file, "the record names this table, and it is not there") from None
    except OSError as error:
        raise _unusable(name, table.file, f"cannot be read ({error.strerror})") from None
    if digest.hexdigest() != table.sha256:
        raise _unusable(name, table.file, "differs from the table that the record was written with")
    if table.file.endswith(".csv") and table.rows is not None and lines < table.rows + 1:
        raise _unusable(name, table.file, f"has fewer lines than a header and the {table.rows} rows that the record says")


def _check_notebook(root: Path, name: str, record: Record) -> None:
    try:
        with open_within(root, f"{name}/{NOTEBOOK}") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise _unusable(name, NOTEBOOK, "the run is done, and its executed notebook is not there") from None
    except OSError as error:
        raise _unusable(name, NOTEBOOK, f"cannot be read ({error.strerror})") from None
    if record.notebook_sha256 not in (None, digest):
        raise _unusable(name, NOTEBOOK, "differs from the notebook that the record was written with")


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
            StoreError: it cannot be written to, or a folder in it is a link: what is written would be elsewhere.
        """
        holder = self.root / ".lock-holder"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(self.root):
                if entry.is_symlink() and entry.is_dir():
                    raise StoreError(f"{entry.path}: is a link; remove it, or choose another --runs folder")
            lock = self._open_lock()
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self.root}: cannot be written to ({error.strerror}); nothing was started") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreBusy(f"{self.root}: another sweep is writing here ({self._holder()});"
                                " wait for it, stop it, or choose another --runs folder") from None
            with suppress(OSError):  # a full disk is named when a run is to be written
                holder.unlink(missing_ok=True)
                with holder.open("x", encoding="utf-8") as file:  # a new one: a link's target is somebody else's
                    file.write(f"process {os.getpid()}, since {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC\n")
            shutil.rmtree(self.partial, ignore_errors=True)
            try:
                yield
            finally:
                shutil.rmtree(self.partial, ignore_errors=True)
                with suppress(OSError):
                    holder.unlink()

    def _open_lock(self) -> BinaryIO:
        """The lock's file, made where it is not there. For reading: a descriptor that writes keeps a file system busy."""
        path = self.root / ".lock"
        if not path.is_symlink():
            with suppress(FileExistsError):
                path.touch(exist_ok=False)
        lock = open_within(self.root, ".lock")
        os.utime(lock.fileno())  # says at once where nothing can be written
        return lock

    def _holder(self) -> str:
        """Which process writes here, by its own account."""
        try:
            words = read_within(self.root, ".lock-holder", 200).decode(errors="replace").strip()
        except OSError:
            words = ""
        return (words if words.isprintable() else shown(words)) or "just started"

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
            name = f"{self.partial.name}/claims/{config.study}-{config.run_id}"
            return json.loads(read_within(self.root, name, MOST_RECORD_BYTES))
        except (OSError, ValueError):  # not begun, or in this very moment
            return None

    def unclaim(self, config: RunConfig) -> None:
        (self.partial / "claims" / f"{config.study}-{config.run_id}").unlink(missing_ok=True)

    def commit(self, folder: Path, record: Record) -> Path:
        """Write the record, last, and put the run in its place. A failed run that stood there is replaced."""
        for path in folder.rglob("*"):
            if path.is_file():
                sync(path)
        if (folder / NOTEBOOK).is_file():
            digest = hashlib.sha256((folder / NOTEBOOK).read_bytes()).hexdigest()
            record = record.model_copy(update={"notebook_sha256": digest})
        write_text_durably(folder / "record.json", record.model_dump_json(indent=1) + "\n")
        place = self.root / record.study / record.run_id
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(place):
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
            RecordError: there is a folder, and its record, a table, its notebook, or the configuration recorded is not what
                it should be.
        """
        folder = self.folder(config)
        if not os.path.lexists(folder):
            return None
        record = read_record(folder, check_tables=True, check_notebook=True)
        # Compared as configurations: a field that was added since the record was written has its default in both.
        ours, theirs = config.model_dump(mode="json"), configure(**record.config).model_dump(mode="json")
        if differ := sorted(field for field in ours if ours[field] != theirs.get(field)):
            raise _unusable(f"{config.study}/{config.run_id}", "record.json",
                            f"was written for another configuration (differs in {', '.join(differ)})")
        return record

    def records(self, check_tables: bool = False) -> tuple[list[Record], list[RecordError]]:
        """All usable records by study and run id, and what is wrong with the others (see :func:`read_record`)."""
        records, errors = [], []
        for path in sorted(self.root.glob("[!.]*/*/")):
            if path.parent.name in OTHERS:
                continue
            try:
                records.append(read_record(path, check_tables))
            except RecordError as error:
                errors.append(error)
        return records, errors
