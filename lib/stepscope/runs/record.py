"""Define the record of a run, and the checks that decide whether a record is usable.

All checks are in :func:`read_record`, so that every command rejects the same records and names them.
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
from typing_extensions import TypedDict  # pydantic doesn't support typing's TypedDict before Python 3.12

from stepscope import StepscopeError
from stepscope.config import ConfigError, RunConfig, configure, format_errors, studies, truncated_repr
from stepscope.files import open_within, read_within
from stepscope.runs import schema3

RECORD, NOTEBOOK = "record.json", "notebook.ipynb"
# A run appends its machine, its saved tables, its finding and its status to this file, one JSON object per line.
# The file is deleted once its content is in the record.
OUTCOME = "outcome.jsonl"
LOG = "kernel.log"  # output of a failed run's processes, including error messages of native code
MAX_RECORD_BYTES = 2**24


class RecordError(StepscopeError, ValueError):
    """Raised for an unusable record. The message names the file by its path in the runs folder."""


def _none_if_not_finite(value: Any) -> Any:
    """Replace NaN and infinity with None, because JSON can't represent them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Records are untrusted input, so only paths inside the folder and numbers that fit into a table are accepted.
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
    """A Parquet file with a table of the run, or another program's file. In the latter case, ``rows`` is None."""

    model_config = ConfigDict(extra="forbid")

    file: PlainPath
    rows: Count | None = None
    sha256: Digest


@with_config(ConfigDict(extra="allow"))
class Machine(TypedDict, total=False):
    """The fields that we read from a record's ``machine``; see :func:`stepscope.runs.machine.machine`."""

    device_name: str
    cpu: str
    cpu_cores: Count
    ram_gib: Number
    gpu_memory_gib: Number
    load: Number  # only if a user ran the notebook: the load average over the minute before the start


Status = Literal["ok", "oom", "failed"]


class Record(BaseModel):
    """The outcome of one run. The status ``oom`` is a result: the configuration doesn't fit on this device.

    Times must have a time zone, and are converted to UTC.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[3, 4] = 4  # stepscope.runs.schema3 converts the names of schema 3
    run_id: PlainName
    study: PlainName
    status: Status
    cause: str | None = None
    config: dict[str, Any]
    results: dict[str, Result] = {}
    tables: dict[PlainPath, Table] = {}
    notebook_sha256: Digest | None = None  # the executed notebook's digest
    machine: Machine = {}
    software: dict[str, str | Whole | None] = {}
    started_at: Moment
    duration_s: Seconds
    measuring_s: Seconds = 0.0  # the part of duration_s spent in exclusive sections

    @classmethod
    def of(cls, config: RunConfig, **fields: Any) -> "Record":
        """Build the record of a run of this configuration."""
        identity = {"run_id": config.run_id, "study": config.study, "config": config.model_dump(mode="json")}
        return cls(**fields | identity)

    @property
    def done(self) -> bool:
        """Whether the run succeeded or ran out of memory. If not, it failed, and a resumed sweep retries it."""
        return self.status != "failed"

    @property
    def notebook_source(self) -> str | None:
        """The digest of the notebook that measured the run, or None if the record predates such digests."""
        source = self.software.get("notebook_source")
        return source if isinstance(source, str) else None

    def matches_notebook(self, source: str) -> bool:
        """Return whether the notebook with this digest measured the run.

        The result is also True if the record doesn't contain a digest.
        """
        return self.notebook_source in (None, source)


def inconsistency_warnings(records: list[Record]) -> list[str]:
    """Return one warning for each run with a measurement that failed a sanity check."""
    return [
        f"{record.study}/{record.run_id}: inconsistent: {words}"
        for record in records
        if (words := record.results.get("inconsistent"))
    ]


def mixed_notebook_warnings(records: Iterable[Record]) -> list[str]:
    """Return a warning for each notebook if more than one of its versions measured the records' runs."""
    sources: dict[str, set[str]] = {}
    for record in records:
        if record.done and record.notebook_source:
            config = studies().get(record.study, RunConfig)
            name = config.notebook_for({"study": record.study} | record.config)
            sources.setdefault(name, set()).add(record.notebook_source)
    return [
        f"{name}: {len(versions)} versions of the notebook ({', '.join(sorted(versions))}) measured these runs,"
        " so differences between the runs may come from the notebook"
        for name, versions in sources.items()
        if len(versions) > 1
    ]


def plain(result: Any) -> Any:
    """Convert numpy and torch scalars in a value to Python numbers, so that JSON can represent the value."""
    return json.loads(json.dumps(result, default=lambda scalar: scalar.item()))


def append_outcome(folder: Path, **fields: Any) -> None:
    """Append a line with these fields to the outcome file in a run's folder."""
    with (folder / OUTCOME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(fields)) + "\n")


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return the merged lines of the outcome file in a run's folder, ignoring truncated lines."""
    outcome: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        for line in (folder / OUTCOME).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                fields = json.loads(line)
                fields["results"] = outcome.get("results", {}) | fields.get("results", {})
                outcome |= fields
    return outcome


def read_record(folder: Path, check_files: bool = False) -> Record:
    """Read and validate the record in a run's folder.

    Args:
        check_files: whether to also compare the executed notebook and each table with the digests in the record.

    Raises:
        RecordError: If the record is missing, isn't JSON, doesn't match the schema, is in another run's folder or
            contains an invalid configuration, or if a file is missing or has been modified.
    """
    root, run = folder.parent.parent, f"{folder.parent.name}/{folder.name}"
    try:
        record = _parse(read_within(root, f"{run}/{RECORD}", MAX_RECORD_BYTES))
    except FileNotFoundError:
        raise unusable(run, RECORD, "no such file, but a run's folder must contain a record") from None
    except OSError as error:
        raise unusable(run, RECORD, f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise unusable(run, RECORD, f"not a valid record ({format_errors(error, Record)[:500]})") from None
    try:
        config: RunConfig = configure(**record.config)
    except (ConfigError, TypeError) as error:  # TypeError: a field is named like a parameter of configure
        reason = f"contains an invalid configuration ({str(error)[:500]})"
        raise unusable(run, RECORD, reason) from None
    run_id = schema3.run_id(config) if record.schema_version == 3 else config.run_id
    names = {(config.study, run_id), (record.study, record.run_id), (folder.parent.name, folder.name)}
    # 'auto' would resolve to this machine's device
    if len(names) > 1 or record.config.get("device") != config.device:
        actual = f"{config.study}/{run_id} on {config.device}"
        raise unusable(run, RECORD, f"contains the record of another run, {actual}")
    record.config = config.model_dump(mode="json")
    if check_files:
        for table in record.tables.values():
            _check_file(root, run, table.file, table.sha256)
        if record.notebook_sha256:  # missing if the kernel never started
            _check_file(root, run, NOTEBOOK, record.notebook_sha256)
    return record


def _parse(content: bytes) -> Record:
    """Parse the content of a record.json, and convert old field names to the current names.

    Raises:
        ValidationError: If the content isn't JSON or doesn't match the schema.
    """
    with suppress(ValueError, RecursionError):
        document = json.loads(content)
        if isinstance(document, dict) and document.get("schema_version") == 3:
            return Record.model_validate_json(json.dumps(schema3.upgrade_record(document)))
    return Record.model_validate_json(content)


def unusable(run: str, file: str, reason: str) -> RecordError:
    """Return an error that says why a file of a run is unusable.

    The message is one line, even if a name contains line breaks.

    Args:
        run: the run, as study/run id.
        file: the file's path in the run's folder.
        reason: the rest of the message.
    """
    path = f"{run}/{file}"
    return RecordError(f"{path if path.isprintable() else truncated_repr(path)}: {reason}")


def _check_file(root: Path, run: str, file: str, sha256: str) -> None:
    try:
        with open_within(root, f"{run}/{file}") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        raise unusable(run, file, "no such file, but the record lists it") from None
    except OSError as error:
        raise unusable(run, file, f"cannot be read ({error.strerror})") from None
    if digest != sha256:
        raise unusable(run, file, "differs from the file that was saved with the record")
