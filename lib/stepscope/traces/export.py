"""Read an Nsight Systems capture: every GPU operation, launch and NVTX range.

The input is the event-level export (``nsys export --type sqlite``); :mod:`stepscope.traces.attribution` assigns
each operation to a phase, a region and a step.
"""

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import adbc_driver_manager
import adbc_driver_sqlite.dbapi
import numpy as np
import pandas as pd
import pyarrow as pa

from stepscope.files import one_line
from stepscope.traces.attribution import (
    CORRELATIONS,
    KINDS,
    LATEST,
    PROCESS,
    SHORT_NS,
    Records,
    TraceError,
    attribute,
    thread_columns,
)
from stepscope.traces.kernel_categories import kernel_categories

# The domains whose ranges are phases, regions and steps: NVTX's default domain and this project's.
DOMAINS = ("", "stepscope")
ACTIVITIES = {kind: f"CUPTI_ACTIVITY_KIND_{kind.upper()}" for kind in KINDS}
LAUNCHES, GRAPHS = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
DIAGNOSTICS, GPUS = "DIAGNOSTIC_EVENT", "TARGET_INFO_GPU"
NVTX_TABLES = ("NVTX_EVENTS", "NVTX_EVENTS_V2")
STRINGS, COPY_KINDS = "StringIds", "ENUM_CUDA_MEMCPY_OPER"
# The names of copies, keyed by CUpti_ActivityMemcpyKind. nsys 2022 does not export the table with these names,
# ENUM_CUDA_MEMCPY_OPER.
COPY_LABELS = {
    1: "Host-to-Device",
    2: "Device-to-Host",
    3: "Host-to-Array",
    4: "Array-to-Host",
    5: "Array-to-Array",
    6: "Array-to-Device",
    7: "Device-to-Array",
    8: "Device-to-Device",
    9: "Host-to-Host",
    10: "Peer-to-Peer",
    11: "Unified Host-to-Device",
    12: "Unified Device-to-Host",
    13: "Unified Device-to-Device",
}
GRAPH_REPLAY = "[CUDA graph"  # the start of the names of CUDA graphs that were traced as a whole
MIN_SLOW_LAUNCH_NS = 100_000  # slower launches load a kernel, or wait because the launch queue is full
PUSH_POP, START_END, DOMAIN_CREATE = 59, 60, 75  # NVTX_EVENTS.eventType
PAYLOAD_COLUMNS = ["key", "start_ns", "end_ns", "message_bytes", "communicator"]
# the driver's messages quote the SQL statement
DRIVER_BOILERPLATE = re.compile(r"^\w+: \[SQLite\] Failed to prepare query: | query: SELECT .*")
EXPECTED = "the SQLite export of a capture (nsys export --type sqlite)"
NOT_NULL_COLUMNS = ("start", "end", "globalTid", "globalPid")  # columns that must not be NULL
LIMITS = {"start": (-LATEST, LATEST), "end": (-LATEST, LATEST), "correlationId": (-1, CORRELATIONS)}


def load_trace(path: Path | str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Load all GPU operations in a capture, and its NVTX push/pop ranges in the domains DOMAINS.

    Args:
        path: the SQLite export, which is opened read-only.

    Returns:
        operations: one row per operation, ordered by start, with the columns kind (kernel, memcpy, memset), name
            (demangled), kernel_category, start_ns, duration_ns, device, stream, correlation_id (-1 if there is
            none), row (in the export's table of that kind), bytes (of a copy or fill; -1 if unknown), and the
            columns that :func:`~stepscope.traces.attribution.attribute` adds.
        ranges: one row per range, ordered by thread and start, with the columns name, role (phase, step, region),
            start_ns, end_ns, process, thread and step.

    Raises:
        TraceError: If the file is missing, is not an nsys export, or has no kernels; if a value is not an integer,
            or an event ends before it starts; if a CUDA graph was traced as a whole; or if the ranges of a thread
            cross.
        ConservationError: If two phases or two steps of a process overlap.
    """
    return attribute(read_export(path))


def read_export(
    path: Path | str, domains: Sequence[str] | None = DOMAINS, whole_graphs: bool = False
) -> Records:
    """Read the records of an export.

    Args:
        domains: the NVTX domains whose push/pop ranges are read. If it is None, the push/pop and start/end
            ranges of all domains are read, and these may cross on a thread.
        whole_graphs: whether a replay of a CUDA graph that was traced as a whole is read as one operation.

    Raises:
        TraceError: As in ``load_trace``, except that graphs may be traced as a whole if ``whole_graphs`` is True.
    """
    # tables are read in parallel threads, because SQLite releases the GIL
    with _reading(path) as connection, ThreadPoolExecutor() as pool:
        graphs = len(list(_rows(connection, GRAPHS, ["1"])))
        has_kernels = next(iter(_rows(connection, ACTIVITIES["kernel"], ["1"])), None)
        if not has_kernels and not (graphs and whole_graphs):
            raise TraceError(
                f"{path}: {ACTIVITIES['kernel']} has no kernels; expected a capture of a"
                f" program that runs kernels{_diagnostics_text(connection)}"
            )
        if graphs and not whole_graphs:
            raise TraceError(
                f"{path}: {GRAPHS} has {graphs} CUDA graphs traced as a whole; expected"
                " the kernels of these graphs (nsys profile --cuda-graph-trace=node)"
            )
        events, calls = (
            pool.submit(_events, path, (PUSH_POP, START_END) if domains is None else (PUSH_POP,)),
            pool.submit(
                _integer_columns,
                path,
                LAUNCHES,
                ["globalTid", "correlationId", "start", "end"],
                "correlationId IS NOT NULL",
            ),
        )
        operations, process = _operations(path, connection, bool(graphs))
        launches = calls.result()
        ranges = _ranges(*events.result(), connection, domains, capture_end=launches[3].max(initial=0) + 1)
    return Records(str(path), operations, process, launches, ranges)


def graph_launches(path: Path | str) -> np.ndarray:
    """Return the thread key, the correlation id and the start in ns of each CUDA graph launch.

    The result is an array of shape (3, launches). It is empty if the export does not name calls.
    """
    with _reading(path) as connection:
        columns = _columns(connection, LAUNCHES)
        ids = dict(_rows(connection, STRINGS, ["id", "value"], "value LIKE '%GraphLaunch%'"))
        if "nameId" not in columns or not ids:
            return np.zeros((3, 0), np.int64)
        condition = f"nameId IN ({', '.join(map(str, ids))}) AND correlationId IS NOT NULL"
        rows = _rows(connection, LAUNCHES, ["globalTid", "correlationId", "start"], condition)
        launches = [row for row in rows if all(isinstance(value, int) for value in row)]
    return np.array(launches, np.int64).reshape(-1, 3).T


def activity_totals(path: Path | str) -> pd.DataFrame:
    """Return the totals for ``check_conservation``: the number of operations and their total duration_ns, by kind.

    SQLite computes these totals, so they don't depend on the code that reads the operations.

    Raises:
        TraceError: As in ``load_trace``.
    """
    with _reading(path) as connection:
        rows = [
            next(iter(_rows(connection, table, ["count(*)", "coalesce(sum(end - start), 0)"])), (0, 0))
            for table in ACTIVITIES.values()
        ]
    return pd.DataFrame(rows, index=pd.Index(ACTIVITIES, name="kind"), columns=["operations", "duration_ns"])


def device_names(path: Path | str) -> dict[int, str]:
    """Return the names of GPUs, keyed by id. GPUs that the export doesn't name are omitted."""
    with _reading(path) as connection:
        has_names = {"id", "name"} <= _columns(connection, GPUS)
        rows = _rows(connection, GPUS, ["id", "name"]) if has_names else ()
        return {device: str(name) for device, name in rows if isinstance(device, int)}


def waiting_calls(path: Path | str) -> pd.DataFrame:
    """Return long host calls, with the columns kind ("call"), name, key (of the thread), start_ns and end_ns.

    Launches are omitted unless they are slow. The result is empty if the export does not name calls.
    """
    with _reading(path) as connection:
        rows = (
            _rows(
                connection,
                LAUNCHES,
                [f"(SELECT value FROM {STRINGS} WHERE id = nameId)", "globalTid", "start", '"end"'],
                f'"end" - start >= {SHORT_NS}',
            )
            if "nameId" in _columns(connection, LAUNCHES)
            else ()
        )
        calls = [
            (re.sub(r"_(v\d+|ptsz)+$", "", str(name)), *times)
            for name, *times in rows
            if "Launch" not in str(name) or times[2] - times[1] >= MIN_SLOW_LAUNCH_NS
        ]
    return pd.DataFrame(calls, columns=["name", "key", "start_ns", "end_ns"]).assign(kind="call")


_OPERATION = ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"]


def nccl_payloads(path: Path | str) -> pd.DataFrame:
    """Read the message sizes and communicators that NCCL attaches to its NVTX ranges.

    Only exports made with ``--include-json=true`` contain these payloads. For other exports, the result is empty.

    Returns:
        One row per range with the columns key (of the thread), start_ns, end_ns, message_bytes, and communicator
        (NCCL's id as text, which is the same on all ranks; "" if unknown).
    """
    with _reading(path) as connection:
        table, name = _nvtx_table_and_name(connection)
        present = _columns(connection, table)
        if "jsonText" not in present:
            return pd.DataFrame(columns=PAYLOAD_COLUMNS)
        registered_text = (
            f"(SELECT value FROM {STRINGS} WHERE id = jsonTextId)" if "jsonTextId" in present else "NULL"
        )
        payload = f"coalesce(jsonText, {registered_text})"
        where = f"eventType = {PUSH_POP} AND {payload} IS NOT NULL AND {name} LIKE 'nccl%'"
        rows = [*_rows(connection, table, ["globalTid", "start", "end", payload], where)]
    sized = [(*row[:3], *_message(row[3])) for row in rows]
    complete = [row for row in sized if all(isinstance(value, int) for value in row[:4])]
    return pd.DataFrame(complete, columns=PAYLOAD_COLUMNS)


def _message(payload: object) -> tuple[int | None, str]:
    """Return the message size in bytes (None if unknown) and the communicator ("" if unknown) in a payload."""
    try:
        content = json.loads(payload) if isinstance(payload, str) else None
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return None, ""
    if not isinstance(content, dict):
        return None, ""
    size, communicator = content.get("Message size [bytes]"), content.get("Communicator ID")
    is_size = type(size) is int and 0 <= size < 2**62  # not isinstance, because True is an int, too
    return size if is_size else None, str(communicator) if type(communicator) is int else ""


@contextmanager
def _reading(path: Path | str) -> Iterator[sqlite3.Connection]:
    """Open an export read-only.

    Raises:
        TraceError: If SQLite can't read the export, which may also happen within the ``with`` block.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such file; expected the SQLite export of a capture")
    try:
        with closing(sqlite3.connect(_uri(path), uri=True)) as connection:
            for (view,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'view'"):
                if view in (
                    *ACTIVITIES.values(),
                    LAUNCHES,
                    GRAPHS,
                    *NVTX_TABLES,
                    STRINGS,
                    COPY_KINDS,
                    DIAGNOSTICS,
                    GPUS,
                ):
                    raise TraceError(f"{path}: {view} is a view; expected a table")
            yield connection
    except (sqlite3.Error, adbc_driver_manager.Error, pa.ArrowException, UnicodeDecodeError) as error:
        what = DRIVER_BOILERPLATE.sub("", " ".join(str(error).split()))
        raise TraceError(f"{path}: {what}; expected {EXPECTED}") from error


def _diagnostics_text(connection: sqlite3.Connection) -> str:
    """Return nsys's diagnostics in a form that can be appended to an error message."""
    rows = _rows(connection, DIAGNOSTICS, ["severity", "text"], "text IS NOT NULL")
    messages = sorted(
        {(-severity, one_line(text, 200)) for severity, text in rows if isinstance(severity, int)}
    )
    return "; nsys reports: " + " ".join(text for _, text in messages[:2]) if messages else ""


def _uri(path: Path | str) -> str:
    return Path(path).resolve().as_uri() + "?mode=ro"


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of a table's columns, or an empty set if there is no such table."""
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def _nvtx_table_and_name(connection: sqlite3.Connection) -> tuple[str, str]:
    """Return the table of NVTX events, and the SQL expression for an event's name.

    The name is the event's text, or, in exports with registered strings, the string to which the event refers.
    """
    table = next((name for name in NVTX_TABLES if _columns(connection, name)), NVTX_TABLES[0])
    registered_text = f"(SELECT value FROM {STRINGS} WHERE id = textId)"
    registered_text = registered_text if "textId" in _columns(connection, table) else "NULL"
    return table, f"CAST(coalesce(nullif(text, ''), {registered_text}, '') AS TEXT)"


def _rows(
    connection: sqlite3.Connection, table: str, columns: Sequence[str], where: str = "1"
) -> Iterable[tuple]:
    """Select rows in the table's order. If an export has no such table, the result is empty."""
    if not _columns(connection, table):
        return ()
    return connection.execute(
        f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY {table}.rowid"
    )


def _arrow_columns(path: Path | str, table: str, columns: Sequence[str], where: str) -> pa.Table | None:
    """Read columns in the table's order, without creating an object per row; return None if there are no rows."""
    with closing(sqlite3.connect(_uri(path), uri=True)) as connection:
        if not _columns(connection, table):
            return None
        plain_columns = {name for name in columns if name.isidentifier()} - {"rowid"}
        if missing := sorted(plain_columns - _columns(connection, table)):
            raise TraceError(f"{path}: {table} has no column {', '.join(missing)}; expected {EXPECTED}")
    with (
        adbc_driver_sqlite.dbapi.connect(_uri(path)) as arrow_connection,
        arrow_connection.cursor() as cursor,
    ):
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": "65536"})
        cursor.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY {table}.rowid")
        try:
            rows = cursor.fetch_arrow_table().combine_chunks()
        except OSError as error:  # the driver raises it if a later row has a different type
            raise TraceError(
                f"{path}: {table} has values of several types in one column ({error}); expected"
                " one type in each column"
            ) from None
    return rows if len(rows) else None


def _integer_columns(path: Path | str, table: str, columns: Sequence[str], where: str = "1") -> np.ndarray:
    """Read columns of a table as an int64 array of shape (columns, rows), in which NULL becomes -1.

    Raises:
        TraceError: If a value is not an integer, or is missing in one of NOT_NULL_COLUMNS; if a time or
            correlation id is out of range; or if a row ends before it starts.
    """
    rows = _arrow_columns(path, table, columns, where)
    return np.zeros((len(columns), 0), np.int64) if rows is None else _check_values(path, table, rows)


def _check_values(path: Path | str, table: str, rows: pa.Table) -> np.ndarray:
    """Check the rows that ``_integer_columns`` reads, and convert them to an array."""
    values = {}
    for name, column in zip(rows.column_names, rows.columns):
        if not pa.types.is_int64(column.type):
            raise TraceError(
                f"{path}: {table} has {column.type} values in its column {name}; expected integers"
            )
        if column.null_count and name in NOT_NULL_COLUMNS:
            raise TraceError(
                f"{path}: {table} has no value in column {name} in {column.null_count} rows;"
                " expected a value in each row"
            )
        values[name] = column.fill_null(-1).to_numpy()
        least, most = LIMITS.get(name, (None, None))
        if least is not None and (wrong := (values[name] < least) | (values[name] >= most)).any():
            raise TraceError(
                f"{path}: {table} has {values[name][wrong.argmax()]} in its column {name};"
                f" expected {least} to {most}"
            )
    ends_early = values["end"] < values["start"] if "end" in values else np.zeros(0, bool)
    if ends_early.any():
        row = ends_early.argmax()
        raise TraceError(
            f"{path}: {table} has a row that ends at {values['end'][row]} ns and starts at"
            f" {values['start'][row]} ns; expected no row to end before it starts"
        )
    return np.stack(list(values.values()))


def _operations(
    path: Path | str, connection: sqlite3.Connection, whole_graphs: bool
) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the operations of ``load_trace`` before attribution, and the globalPid of each operation."""
    name_ids = {"kernel": "demangledName", "memcpy": "copyKind", "memset": "0"}
    copy_labels = COPY_LABELS | dict(_rows(connection, COPY_KINDS, ["id", "label"]))
    copies = {i: f"[CUDA memcpy {label}]" for i, label in copy_labels.items()}
    parts: list[np.ndarray] = []
    names: dict[str, int] = {}
    for code, (kind, table) in enumerate(ACTIVITIES.items()):
        has_size = "bytes" in _columns(connection, table)
        size = "coalesce(bytes, -1) AS bytes" if has_size else "-1 AS bytes"
        *values, name_id = _integer_columns(
            path, table, ["rowid AS row", *_OPERATION, size, f"{name_ids[kind]} AS name"]
        )
        ids, index = np.unique(name_id, return_inverse=True)
        labels = {"kernel": _strings(connection, ids), "memcpy": copies, "memset": {0: "[CUDA memset]"}}[kind]
        texts = [labels.get(i, f"[CUDA {kind} {i}]") for i in ids.tolist()]
        codes = np.array([names.setdefault(text, len(names)) for text in texts], np.int64)
        parts.append(np.stack([np.full(len(name_id), code), codes[index], *values]))
    if whole_graphs:
        parts.append(_graph_replays(path, connection, names))
    table = np.concatenate(parts, axis=1)
    table = table[:, np.argsort(table[3], kind="stable")]  # sorted by start
    kinds, name_codes, row, start, end, device, stream, correlation, process, size = table
    name = pd.Categorical.from_codes(name_codes, list(names))
    return pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(kinds, KINDS),
            "name": name,
            "kernel_category": kernel_categories(name),
            "start_ns": start,
            "duration_ns": end - start,
            "device": device,
            "stream": stream,
            "correlation_id": correlation,
            "row": row,
            "bytes": size,
        }
    ), process


def _graph_replays(path: Path | str, connection: sqlite3.Connection, names: dict[str, int]) -> np.ndarray:
    """Return the replays of CUDA graphs that were traced as a whole, as kernels that are named after the graph.

    The array has the same rows as the arrays that ``_operations`` concatenates.
    """
    columns = _columns(connection, GRAPHS)
    defaults = {"streamId": "0", "correlationId": "-1", "graphId": "-1"}
    selected = [
        name if name in columns else f"{defaults[name]} AS {name}" for name in (*_OPERATION, "graphId")
    ]
    *values, graph = _integer_columns(path, GRAPHS, ["rowid AS row", *selected])
    texts = [f"{GRAPH_REPLAY} {i}]" if i >= 0 else f"{GRAPH_REPLAY}]" for i in graph.tolist()]
    codes = np.array([names.setdefault(text, len(names)) for text in texts], np.int64)
    return np.stack([np.zeros(len(graph), np.int64), codes, *values, np.full(len(graph), -1)])


def _strings(connection: sqlite3.Connection, ids: np.ndarray) -> dict[int, str]:
    """Return the export's strings with these ids, keyed by id."""
    query = (
        f"SELECT id, CAST(value AS TEXT) FROM {STRINGS} WHERE value IS NOT NULL"
        " AND id IN (SELECT value FROM json_each(?))"
    )
    return dict(connection.execute(query, [json.dumps(ids.tolist())]))


def _events(path: Path | str, types: tuple[int, ...]) -> tuple[np.ndarray, pa.DictionaryArray]:
    """Return all NVTX events of these types, and their names.

    The events are an array of shape (5, events) with the rows start, end, whether the event is still open (in
    which case its end equals its start), globalTid and domain.
    """
    with closing(sqlite3.connect(_uri(path), uri=True)) as connection:
        table, range_name = _nvtx_table_and_name(connection)
    columns = [
        "start",
        'coalesce("end", start) AS "end"',
        '"end" IS NULL AS open',
        "globalTid",
        "coalesce(domainId, 0) AS domainId",
        f"{range_name} AS name",
    ]
    rows = _arrow_columns(path, table, columns, f"eventType IN ({', '.join(map(str, types))})")
    if rows is None:
        return np.zeros((len(columns) - 1, 0), np.int64), pa.array([], pa.string()).dictionary_encode()
    names = rows["name"].combine_chunks().cast(pa.string()).dictionary_encode()
    return _check_values(path, table, rows.drop_columns(["name"])), names


def _ranges(
    events: np.ndarray,
    names: pa.DictionaryArray,
    connection: sqlite3.Connection,
    domains: Sequence[str] | None,
    capture_end: int,
) -> pd.DataFrame:
    """Return the ranges in the format of ``Records.ranges``. Ranges that are still open end with the capture."""
    start, end, still_open, thread, domain = events
    end = np.where(still_open, np.maximum(start + 1, capture_end), end)
    is_kept = np.full(len(start), True)
    table, range_name = _nvtx_table_and_name(connection)
    domain_names = {
        (thread_key & PROCESS, domain_id): domain_name
        for thread_key, domain_id, domain_name in _rows(
            connection, table, ["globalTid", "domainId", range_name], f"eventType = {DOMAIN_CREATE}"
        )
    }
    for process in np.unique(thread & PROCESS).tolist():
        for domain_id in np.unique(domain).tolist():
            if domains is not None and domain_names.get((process, domain_id), "") not in domains:
                is_kept &= (thread & PROCESS != process) | (domain != domain_id)
    order = np.lexsort((-end, start, thread))
    order = order[is_kept[order]]
    name = pd.Categorical.from_codes(np.asarray(names.indices)[order], names.dictionary.to_pylist())
    return pd.DataFrame(
        {"name": name, "start_ns": start[order], "end_ns": end[order], **thread_columns(thread[order])}
    )
