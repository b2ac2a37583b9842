"""What is recorded of one run, and whether it can be used.

:func:`read_record` alone decides that: every command leaves out the same records, and names them.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import suppress
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
    with_config,
)
from typing_extensions import TypedDict  # typing's is not enough for pydantic before Python 3.12

from stepscope import StepscopeError
from stepscope.config import ConfigError, RunConfig, configure, format_errors, studies, truncated_repr
from stepscope.files import open_within, read_within
from stepscope.runs import schema3

RECORD, NOTEBOOK = "record.json", "notebook.ipynb"
# What a run hands over, a line of JSON each: what it runs on, what is kept, what is said, how it ended. Gone
# when it is in the record.
OUTCOME = "outcome.jsonl"
LOG = "kernel.log"  # what a failed run's processes wrote themselves: crashes below Python
MAX_RECORD_BYTES = 2**24


class RecordError(StepscopeError, ValueError):
    """A record that cannot be used; the text names the file by its path in the runs folder."""


def _none_if_not_finite(value: Any) -> Any:
    """A float that is no number, or infinite, has no JSON: the record's file has null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# What is believed of a record: what can be a path in the folder, and numbers that a table can hold.
NAME = "[A-Za-z0-9_+][A-Za-z0-9._+-]{0,199}"
PlainName = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
PlainPath = Annotated[str, StringConstraints(pattern=f"^{NAME}(/{NAME})*$")]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=10**9)]
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Moment = Annotated[
    AwareDatetime,
    Field(ge=datetime(2000, 1, 1, tzinfo=UTC), lt=datetime(2200, 1, 1, tzinfo=UTC)),
    AfterValidator(lambda moment: moment.astimezone(UTC)),
]
Result = Annotated[Whole | float | str | bool | None, AfterValidator(_none_if_not_finite)]


class Table(BaseModel):
    """One table of a run: a Parquet file beside its record; or another program's file, without ``rows``."""

    model_config = ConfigDict(extra="forbid")

    file: PlainPath
    rows: Count | None = None
    sha256: Digest


@with_config(ConfigDict(extra="allow"))
class Machine(TypedDict, total=False):
    """What is read of a record's ``machine``; see :func:`stepscope.runs.machine.machine`."""

    device_name: str
    cpu: str
    cpu_cores: Count
    ram_gib: Number
    gpu_memory_gib: Number
    load: Number  # of a run by hand alone: the load average of the minute before it began


Status = Literal["ok", "oom", "failed"]


class Record(BaseModel):
    """How one run ended and what it found. ``oom`` is a result: the configuration does not fit this device.

    Times have a zone, and are in UTC here whatever zone they were written in.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[3, 4] = 4  # 3: read under today's names by stepscope.runs.schema3
    run_id: PlainName
    study: PlainName
    status: Status
    cause: str | None = None
    config: dict[str, Any]
    results: dict[str, Result] = {}
    tables: dict[PlainPath, Table] = {}
    notebook_sha256: Digest | None = None  # of the executed notebook
    machine: Machine = {}
    software: dict[str, str | Whole | None] = {}
    started_at: Moment
    duration_s: Seconds
    measuring_s: Seconds = 0.0  # of it, in exclusive sections

    @classmethod
    def of(cls, config: RunConfig, **fields: Any) -> "Record":
        """The record of a configuration's run."""
        own = {"run_id": config.run_id, "study": config.study, "config": config.model_dump(mode="json")}
        return cls(**fields | own)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do: a failed run is tried again when its sweep is resumed."""
        return self.status != "failed"

    @property
    def notebook_source(self) -> str | None:
        """The digest of the notebook that measured; None of a run of before there was one."""
        source = self.software.get("notebook_source")
        return source if isinstance(source, str) else None

    def matches_notebook(self, source: str) -> bool:
        """Whether this notebook measured it; a record that does not say which is taken for this one's."""
        return self.notebook_source in (None, source)


def inconsistency_warnings(records: list[Record]) -> list[str]:
    """A sentence a run that has something that cannot be, or does not repeat: what, and how."""
    return [
        f"{record.study}/{record.run_id}: inconsistent, and left out of reports: {words}"
        for record in records
        if (words := record.results.get("inconsistent"))
    ]


def mixed_notebook_warnings(records: Iterable[Record]) -> list[str]:
    """A sentence for each notebook of which more than one form has measured these records."""
    sources: dict[str, set[str]] = {}
    for record in records:
        if record.done and record.notebook_source:
            config = studies().get(record.study, RunConfig)
            name = config.notebook_for({"study": record.study} | record.config)
            sources.setdefault(name, set()).add(record.notebook_source)
    return [
        f"{name}: its runs were measured by {len(own)} different notebooks ({', '.join(sorted(own))});"
        " what differs may be the notebooks"
        for name, own in sources.items()
        if len(own) > 1
    ]


def plain(said: Any) -> Any:
    """What JSON can hold: numbers of numpy and torch become Python's."""
    return json.loads(json.dumps(said, default=lambda value: value.item()))


def append_outcome(folder: Path, **said: Any) -> None:
    """Add a line to what the run in ``folder`` hands over."""
    with (folder / OUTCOME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(said)) + "\n")


def read_outcome(folder: Path) -> dict[str, Any]:
    """All that the run in ``folder`` has handed over so far; a line that was cut short is none."""
    outcome: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        for line in (folder / OUTCOME).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                said = json.loads(line)
                said["results"] = outcome.get("results", {}) | said.get("results", {})
                outcome |= said
    return outcome


def read_record(folder: Path, check_files: bool = False) -> Record:
    """The record of one run folder.

    Args:
        check_files: also compare the executed notebook and each table with the digest that the record has.

    Raises:
        RecordError: no record, not JSON, not the schema, in another run's folder, of a configuration that is
            not valid, or a file is missing or altered.
    """
    root, run = folder.parent.parent, f"{folder.parent.name}/{folder.name}"
    try:
        record = _parse(read_within(root, f"{run}/{RECORD}", MAX_RECORD_BYTES))
    except FileNotFoundError:
        raise unusable(run, RECORD, "no record in this run folder") from None
    except OSError as error:
        raise unusable(run, RECORD, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise unusable(run, RECORD, f"not a valid record ({format_errors(error, Record)[:500]})") from None
    try:
        config: RunConfig = configure(**record.config)
    except (ConfigError, TypeError) as error:  # TypeError: a field named as a parameter of configure
        what = f"holds a configuration that is not valid ({str(error)[:500]})"
        raise unusable(run, RECORD, what) from None
    run_id = schema3.run_id(config) if record.schema_version == 3 else config.run_id
    names = {(config.study, run_id), (record.study, record.run_id), (folder.parent.name, folder.name)}
    if len(names) > 1 or record.config.get("device") != config.device:  # 'auto' would be this machine's
        other = f"{config.study}/{run_id} on {config.device}"
        raise unusable(run, RECORD, f"is the record of {other}, in the folder of another run")
    record.config = config.model_dump(mode="json")
    if check_files:
        for table in record.tables.values():
            _check_file(root, run, table.file, table.sha256)
        if record.notebook_sha256:  # none of a run whose kernel never started
            _check_file(root, run, NOTEBOOK, record.notebook_sha256)
    return record


def _parse(content: bytes) -> Record:
    """Parse a record.json, under today's names.

    Raises:
        ValidationError: not JSON, or not the schema.
    """
    with suppress(ValueError, RecursionError):
        document = json.loads(content)
        if isinstance(document, dict) and document.get("schema_version") == 3:
            return Record.model_validate_json(json.dumps(schema3.upgrade_record(document)))
    return Record.model_validate_json(content)


def unusable(run: str, file: str, what: str) -> RecordError:
    """The error of a file of a run (study/run id), on one line whatever the folder's name is."""
    path = f"{run}/{file}"
    return RecordError(f"{path if path.isprintable() else truncated_repr(path)}: {what}")


def _check_file(root: Path, run: str, file: str, sha256: str) -> None:
    try:
        with open_within(root, f"{run}/{file}") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        raise unusable(run, file, "the record names this file, and it is not there") from None
    except OSError as error:
        raise unusable(run, file, f"cannot be read ({error.strerror})") from None
    if digest != sha256:
        raise unusable(run, file, "differs from the file that the record was written with")
