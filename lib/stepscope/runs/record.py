"""What is recorded of one run, and whether it can be used.

:func:`read_record` alone decides that: every command leaves out the same records, and names them.
"""
import hashlib
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    with_config,
)
from typing_extensions import TypedDict  # typing's is not enough for pydantic before Python 3.12

from stepscope import StepscopeError
from stepscope.config import ConfigError, RunConfig, configure, place_of, shown
from stepscope.files import open_within, read_within

RECORD, NOTEBOOK = "record.json", "notebook.ipynb"
LOG = "kernel.log"  # what the kernel's process itself wrote: crashes below Python
OUTCOME = "outcome.json"  # what a notebook hands over; gone when it is in the record
SAID = "said.txt"  # what a notebook prints while it runs; gone when it has ended
MOST_RECORD_BYTES = 2**24


class RecordError(StepscopeError, ValueError):
    """A record that cannot be used; the text names the file by its path in the runs folder."""


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
    return moment.astimezone(UTC)


# What is believed of a record: what can be a path in the folder, and numbers that a table can hold.
PlainName = Annotated[str, AfterValidator(_plain_name)]
PlainPath = Annotated[str, AfterValidator(_plain_path)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=10**9)]
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
UNITS = ("_mib", "_bytes", "_ms")  # a result whose name ends so is a number


class Table(BaseModel):
    """One table of a run: a CSV or Parquet file beside its record."""

    model_config = ConfigDict(extra="forbid")

    file: PlainPath
    rows: Count | None = None  # None: another program's file, kept as it wrote it
    sha256: Digest


@with_config(ConfigDict(extra="allow"))
class Machine(TypedDict, total=False):
    """What is read of a record's ``machine``; see :func:`stepscope.runs.machine.machine`."""

    device_name: str
    cpu: str
    cpu_cores: Count
    ram_gib: Number
    gpu_memory_mib: Count


@with_config(ConfigDict(extra="allow"))
class GpuState(TypedDict, total=False):
    """What is read of ``gpu_before`` and ``gpu_after``; see :func:`stepscope.runs.machine.gpu_state`."""

    throttle_reasons: list[str] | None
    other_processes: Count | None


Status = Literal["ok", "oom", "failed"]


class Record(BaseModel):
    """How one run ended and what it found. ``oom`` is a result: the configuration does not fit this device.

    Times have a zone, and are in UTC here whatever zone they were written in.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    run_id: PlainName
    study: PlainName
    status: Status
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
        # A float that is no number, or infinite, has no JSON: the record's file has null, and this None from
        # the start.
        return {name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in results.items()}

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do: a failed run is tried again when its sweep is resumed."""
        return self.status != "failed"


def read_record(folder: Path, check_tables: bool = False) -> Record:
    """The record of one run folder. Fields that its configuration was written without have their defaults.

    Args:
        check_tables: also compare each table with the digest and the rows that the record has of it.

    Raises:
        RecordError: no record, not JSON, not the schema, in another run's folder, of a configuration that is
            not valid, or a file is missing or altered.
    """
    root, run = folder.parent.parent, f"{folder.parent.name}/{folder.name}"
    try:
        record = Record.model_validate_json(read_within(root, f"{run}/{RECORD}", MOST_RECORD_BYTES))
    except FileNotFoundError:
        raise unusable(run, RECORD, "no record in this run folder") from None
    except OSError as error:
        raise unusable(run, RECORD, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{place_of(first) or 'the file'}: {first['msg'].removeprefix('Value error, ')}"
        raise unusable(run, RECORD, f"not a valid record ({what})") from None
    if record.run_id != folder.name or record.study != folder.parent.name:
        other = f"{record.study}/{record.run_id}"
        raise unusable(run, RECORD, f"is the record of {other}, in the folder of another run")
    record.config |= _configuration(record, run).model_dump(mode="json")
    for table in record.tables.values() if check_tables else ():
        _check_table(root, run, table)
    return record


def unusable(run: str, file: str, what: str) -> RecordError:
    """The error of a file of a run (study/run id), on one line whatever the folder's name is."""
    path = f"{run}/{file}"
    return RecordError(f"{path if path.isprintable() else shown(path)}: {what}")


def _configuration(record: Record, run: str) -> RunConfig:
    study, device = record.config.get("study"), record.config.get("device")
    try:
        if study != record.study:
            raise ConfigError(f"study: got {shown(study)}, but the record is of {record.study!r}")
        if device not in ("cuda", "cpu"):  # 'auto' would be this machine's
            raise ConfigError(f"device: got {shown(device)}, but expected 'cuda' or 'cpu'")
        return configure(**record.config)
    except ConfigError as error:
        what = f"holds a configuration that is not valid ({str(error)[:500]})"
        raise unusable(run, RECORD, what) from None


def _check_table(root: Path, run: str, table: Table) -> None:
    digest, lines = hashlib.sha256(), 0
    try:
        with open_within(root, f"{run}/{table.file}") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
                lines += chunk.count(b"\n")
    except FileNotFoundError:
        raise unusable(run, table.file, "the record names this table, and it is not there") from None
    except OSError as error:
        raise unusable(run, table.file, f"cannot be read ({error.strerror})") from None
    if digest.hexdigest() != table.sha256:
        raise unusable(run, table.file, "differs from the table that the record was written with")
    if table.file.endswith(".csv") and table.rows is not None and lines < table.rows + 1:
        what = f"has fewer lines than a header and the {table.rows} rows that the record says"
        raise unusable(run, table.file, what)


def check_notebook(root: Path, record: Record) -> None:
    """See that the executed notebook of a run in this runs folder is there, and is the one that was recorded.

    Raises:
        RecordError: it is not.
    """
    run = f"{record.study}/{record.run_id}"
    try:
        with open_within(root, f"{run}/{NOTEBOOK}") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise unusable(run, NOTEBOOK, "the run's executed notebook is not there") from None
    except OSError as error:
        raise unusable(run, NOTEBOOK, f"cannot be read ({error.strerror})") from None
    if record.notebook_sha256 not in (None, digest):
        raise unusable(run, NOTEBOOK, "differs from the notebook that the record was written with")
