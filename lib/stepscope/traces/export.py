"""The records of an Nsight Systems capture: every GPU operation, launch and NVTX range.

Reads the event-level export (`nsys export --type sqlite`); :mod:`stepscope.traces.attribution` says which
phase, region and step each operation is of.
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
from stepscope.traces.families import families

# NVTX's default domain and this project's; ranges of libraries' domains are no regions
DOMAINS = ("", "stepscope")
ACTIVITIES = {kind: f"CUPTI_ACTIVITY_KIND_{kind.upper()}" for kind in KINDS}
LAUNCHES, GRAPHS = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
DIAGNOSTICS, GPUS = "DIAGNOSTIC_EVENT", "TARGET_INFO_GPU"
NVTX_TABLES = ("NVTX_EVENTS", "NVTX_EVENTS_V2")
STRINGS, COPY_KINDS = "StringIds", "ENUM_CUDA_MEMCPY_OPER"
# Names of copies by CUpti_ActivityMemcpyKind, as ENUM_CUDA_MEMCPY_OPER has them: nsys 2022 exports without it.
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
GRAPH_REPLAY = "[CUDA graph"  # begins the name of a graph that was traced as a whole
SLOW_LAUNCH_NS = 100_000  # a launch that lasts so long loads a kernel, or waits for room in the queue
PUSH_POP, START_END, DOMAIN_CREATE = 59, 60, 75  # NVTX_EVENTS.eventType
PAYLOAD_COLUMNS = ["key", "start_ns", "end_ns", "message_bytes"]
DRIVER_WORDS = re.compile(r"^\w+: \[SQLite\] Failed to prepare query: | query: SELECT .*")  # the statement
EXPECTED = "the sqlite export of a capture (nsys export --type sqlite)"
NEEDED = ("start", "end", "globalTid", "globalPid")  # columns in which a row has to have a value
LIMITS = {"start": (-LATEST, LATEST), "end": (-LATEST, LATEST), "correlationId": (-1, CORRELATIONS)}


def load_trace(path: Path | str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All GPU operations of a capture, and its NVTX push/pop ranges in DOMAINS.

    Args:
        path: the sqlite export; it is only read.

    Returns:
        operations: a row per operation, in order of start. kind (kernel, memcpy, memset), name (demangled),
            family, start_ns, duration_ns, device, stream, correlation_id (-1: none), row (in the export's
            table of its kind), bytes (of a copy or fill; -1: not known), and what
            :func:`~stepscope.traces.attribution.attribute` adds.
        ranges: a row per range, by thread and start. name, role (phase, step, region), start_ns, end_ns,
            process, thread, step.

    Raises:
        TraceError: the file is absent, no export of nsys, or has no kernels; a value is no integer, or a time
            ends before it starts; a CUDA graph was traced as a whole; the ranges of one thread cross.
        ConservationError: two phases, or two steps, of one process overlap.
    """
    return attribute(read_export(path))


def read_export(
    path: Path | str, domains: Sequence[str] | None = DOMAINS, whole_graphs: bool = False
) -> Records:
    """The records of an export; the push/pop ranges of these domains. None: push/pop and start/end ranges of
    all domains, of which those of one thread may cross.

    Args:
        whole_graphs: CUDA graphs that were traced as a whole are read as one operation for each replay.

    Raises:
        TraceError: as load_trace; graphs were traced as a whole, and whole_graphs is false.
    """
    # sqlite reads tables side by side, outside of the GIL
    with _reading(path) as connection, ThreadPoolExecutor() as pool:
        graphs = len(list(_rows(connection, GRAPHS, ["1"])))
        has_kernels = next(iter(_rows(connection, ACTIVITIES["kernel"], ["1"])), None)
        if not has_kernels and not (graphs and whole_graphs):
            raise TraceError(
                f"{path}: {ACTIVITIES['kernel']} holds no kernels, expected a capture of a"
                f" program that runs some{_diagnosis(connection)}"
            )
        if graphs and not whole_graphs:
            raise TraceError(
                f"{path}: {GRAPHS} holds {graphs} CUDA graphs traced as a whole, expected"
                " their kernels (nsys profile --cuda-graph-trace=node)"
            )
        events, calls = (
            pool.submit(_events, path, (PUSH_POP, START_END) if domains is None else (PUSH_POP,)),
            pool.submit(
                _integers,
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
    """The calls that launched CUDA graphs, (3, n): key of the thread, correlation id, start in ns; none where
    the export names no calls."""
    with _reading(path) as connection:
        columns = _columns(connection, LAUNCHES)
        ids = dict(_rows(connection, STRINGS, ["id", "value"], "value LIKE '%GraphLaunch%'"))
        if "nameId" not in columns or not ids:
            return np.zeros((3, 0), np.int64)
        wanted = f"nameId IN ({', '.join(map(str, ids))}) AND correlationId IS NOT NULL"
        rows = _rows(connection, LAUNCHES, ["globalTid", "correlationId", "start"], wanted)
        found = [row for row in rows if all(isinstance(value, int) for value in row)]
    return np.array(found, np.int64).reshape(-1, 3).T


def activity_totals(path: Path | str) -> pd.DataFrame:
    """What check_conservation compares with, counted by sqlite: operations and duration_ns, by kind.

    Raises:
        TraceError: as load_trace.
    """
    with _reading(path) as connection:
        rows = [
            next(iter(_rows(connection, table, ["count(*)", "coalesce(sum(end - start), 0)"])), (0, 0))
            for table in ACTIVITIES.values()
        ]
    return pd.DataFrame(rows, index=pd.Index(ACTIVITIES, name="kind"), columns=["operations", "duration_ns"])


def device_names(path: Path | str) -> dict[int, str]:
    """The names of the GPUs that nsys saw, by id, as far as the export has them."""
    with _reading(path) as connection:
        known = {"id", "name"} <= _columns(connection, GPUS)
        rows = _rows(connection, GPUS, ["id", "name"]) if known else ()
        return {device: str(name) for device, name in rows if isinstance(device, int)}


def waiting_calls(path: Path | str) -> pd.DataFrame:
    """The calls on the host that last (kind "call", name, key of the thread, start_ns, end_ns), but for
    launches; empty where the export names none."""
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
        found = [
            (re.sub(r"_(v\d+|ptsz)+$", "", str(name)), *times)
            for name, *times in rows
            if "Launch" not in str(name) or times[2] - times[1] >= SLOW_LAUNCH_NS
        ]
    return pd.DataFrame(found, columns=["name", "key", "start_ns", "end_ns"]).assign(kind="call")


_OPERATION = ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"]


def nccl_payloads(path: Path | str) -> pd.DataFrame:
    """Read the message sizes that NCCL attaches to its NVTX ranges.

    Only an export with ``--include-json=true`` has them; any other gives no rows.

    Returns:
        A row per range: key (the thread's), start_ns, end_ns, message_bytes.
    """
    with _reading(path) as connection:
        table, name = _nvtx(connection)
        present = _columns(connection, table)
        if "jsonText" not in present:
            return pd.DataFrame(columns=PAYLOAD_COLUMNS, dtype="int64")
        registered = (
            f"(SELECT value FROM {STRINGS} WHERE id = jsonTextId)" if "jsonTextId" in present else "NULL"
        )
        payload = f"coalesce(jsonText, {registered})"
        where = f"eventType = {PUSH_POP} AND {payload} IS NOT NULL AND {name} LIKE 'nccl%'"
        rows = [*_rows(connection, table, ["globalTid", "start", "end", payload], where)]
    sized = [(*row[:3], _message_bytes(row[3])) for row in rows]
    known = [row for row in sized if all(isinstance(value, int) for value in row)]
    return pd.DataFrame(known, columns=PAYLOAD_COLUMNS, dtype="int64")


def _message_bytes(payload: object) -> int | None:
    """Return the size in a payload of NCCL's; None where there is none."""
    try:
        content = json.loads(payload) if isinstance(payload, str) else None
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return None
    size = content.get("Message size [bytes]") if isinstance(content, dict) else None
    return size if type(size) is int and 0 <= size < 2**62 else None  # JSON's true is an int as well


@contextmanager
def _reading(path: Path | str) -> Iterator[sqlite3.Connection]:
    """An export, opened read-only; what sqlite finds wrong with it is a TraceError."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such file, expected the sqlite export of a capture")
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
                    raise TraceError(f"{path}: {view} is a view, expected a table")
            yield connection
    except (sqlite3.Error, adbc_driver_manager.Error, pa.ArrowException, UnicodeDecodeError) as error:
        what = DRIVER_WORDS.sub("", " ".join(str(error).split()))
        raise TraceError(f"{path}: {what}, expected {EXPECTED}") from error


def _diagnosis(connection: sqlite3.Connection) -> str:
    """What nsys itself says of a capture without kernels, for an error's end."""
    rows = _rows(connection, DIAGNOSTICS, ["severity", "text"], "text IS NOT NULL")
    said = sorted({(-severity, one_line(text, 200)) for severity, text in rows if isinstance(severity, int)})
    return "; nsys says: " + " ".join(text for _, text in said[:2]) if said else ""


def _uri(path: Path | str) -> str:
    return Path(path).resolve().as_uri() + "?mode=ro"


def _has(connection: sqlite3.Connection, table: str) -> bool:
    return bool(
        connection.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", [table]
        ).fetchall()
    )


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    """The columns of a table; none where there is no such table."""
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def _nvtx(connection: sqlite3.Connection) -> tuple[str, str]:
    """The table of NVTX events, and what gives the name of one: its own text, or that of a registered
    string, which not every export has."""
    table = next((name for name in NVTX_TABLES if _has(connection, name)), NVTX_TABLES[0])
    registered = f"(SELECT value FROM {STRINGS} WHERE id = textId)"
    registered = registered if "textId" in _columns(connection, table) else "NULL"
    return table, f"CAST(coalesce(nullif(text, ''), {registered}, '') AS TEXT)"


def _rows(
    connection: sqlite3.Connection, table: str, columns: Sequence[str], where: str = "1"
) -> Iterable[tuple]:
    """Rows in the order of the table; none where the capture lacks the table, as when there was no such
    event.
    """
    if not _has(connection, table):
        return ()
    return connection.execute(
        f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY {table}.rowid"
    )


def _arrow(path: Path | str, table: str, columns: Sequence[str], where: str) -> pa.Table | None:
    """Columns of a table, in its order, with no Python object per row; None where there are no rows."""
    with closing(sqlite3.connect(_uri(path), uri=True)) as connection:
        if not _has(connection, table):
            return None
        plain = {name for name in columns if name.isidentifier()} - {"rowid"}
        if lacking := sorted(plain - _columns(connection, table)):
            raise TraceError(f"{path}: {table} has no column {', '.join(lacking)}, expected {EXPECTED}")
    with adbc_driver_sqlite.dbapi.connect(_uri(path)) as connected, connected.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": "65536"})
        cursor.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY {table}.rowid")
        try:
            found = cursor.fetch_arrow_table().combine_chunks()
        except OSError as error:  # how the driver says that a later row has another type than the first ones
            raise TraceError(
                f"{path}: {table} has values of several types in one column ({error}), expected"
                " one type in each"
            ) from None
    return found if len(found) else None


def _integers(path: Path | str, table: str, columns: Sequence[str], where: str = "1") -> np.ndarray:
    """Columns of a table, (columns, rows) of int64; NULL is -1.

    Raises:
        TraceError: a value is no integer, or none where one is needed; a time or correlation id is out of
            range, or a row ends before it starts.
    """
    found = _arrow(path, table, columns, where)
    return np.zeros((len(columns), 0), np.int64) if found is None else _checked(path, table, found)


def _checked(path: Path | str, table: str, found: pa.Table) -> np.ndarray:
    """_integers of what was read of a table."""
    values = {}
    for name, column in zip(found.column_names, found.columns):
        if not pa.types.is_int64(column.type):
            raise TraceError(
                f"{path}: {table} has {column.type} values in its column {name}, expected integers"
            )
        if column.null_count and name in NEEDED:
            raise TraceError(
                f"{path}: {table} has no value in column {name} of {column.null_count} rows,"
                " expected one in each"
            )
        values[name] = column.fill_null(-1).to_numpy()
        least, most = LIMITS.get(name, (None, None))
        if least is not None and (wrong := (values[name] < least) | (values[name] >= most)).any():
            raise TraceError(
                f"{path}: {table} has {values[name][wrong.argmax()]} in its column {name},"
                f" expected {least} to {most}"
            )
    backward = values["end"] < values["start"] if "end" in values else np.zeros(0, bool)
    if backward.any():
        row = backward.argmax()
        raise TraceError(
            f"{path}: {table} has a row that ends at {values['end'][row]} ns and starts at"
            f" {values['start'][row]} ns, expected no end before its start"
        )
    return np.stack(list(values.values()))


def _operations(
    path: Path | str, connection: sqlite3.Connection, whole_graphs: bool
) -> tuple[pd.DataFrame, np.ndarray]:
    """load_trace's operations, with what their own records tell; and the globalPid of each."""
    name_ids = {"kernel": "demangledName", "memcpy": "copyKind", "memset": "0"}
    listed = COPY_LABELS | dict(_rows(connection, COPY_KINDS, ["id", "label"]))
    copies = {i: f"[CUDA memcpy {label}]" for i, label in listed.items()}
    found: list[np.ndarray] = []
    names: dict[str, int] = {}
    for code, (kind, table) in enumerate(ACTIVITIES.items()):
        has_size = "bytes" in _columns(connection, table)
        size = "coalesce(bytes, -1) AS bytes" if has_size else "-1 AS bytes"
        *values, name_id = _integers(
            path, table, ["rowid AS row", *_OPERATION, size, f"{name_ids[kind]} AS name"]
        )
        ids, index = np.unique(name_id, return_inverse=True)
        labels = {"kernel": _strings(connection, ids), "memcpy": copies, "memset": {0: "[CUDA memset]"}}[kind]
        texts = [labels.get(i, f"[CUDA {kind} {i}]") for i in ids.tolist()]
        codes = np.array([names.setdefault(text, len(names)) for text in texts], np.int64)
        found.append(np.stack([np.full(len(name_id), code), codes[index], *values]))
    if whole_graphs:
        found.append(_graph_replays(path, connection, names))
    parts = np.concatenate(found, axis=1)
    parts = parts[:, np.argsort(parts[3], kind="stable")]  # by their starts
    kinds, name_codes, row, start, end, device, stream, correlation, process, size = parts
    name = pd.Categorical.from_codes(name_codes, list(names))
    return pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(kinds, KINDS),
            "name": name,
            "family": families(name),
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
    """CUDA graphs that were traced as a whole, as rows of _operations: kernels that are named for their
    graph."""
    columns = _columns(connection, GRAPHS)
    lacking = {"streamId": "0", "correlationId": "-1", "graphId": "-1"}
    wanted = [name if name in columns else f"{lacking[name]} AS {name}" for name in (*_OPERATION, "graphId")]
    *values, graph = _integers(path, GRAPHS, ["rowid AS row", *wanted])
    texts = [f"{GRAPH_REPLAY} {i}]" if i >= 0 else f"{GRAPH_REPLAY}]" for i in graph.tolist()]
    codes = np.array([names.setdefault(text, len(names)) for text in texts], np.int64)
    return np.stack([np.zeros(len(graph), np.int64), codes, *values, np.full(len(graph), -1)])


def _strings(connection: sqlite3.Connection, ids: np.ndarray) -> dict[int, str]:
    """The strings with these ids."""
    query = (
        f"SELECT id, CAST(value AS TEXT) FROM {STRINGS} WHERE value IS NOT NULL"
        " AND id IN (SELECT value FROM json_each(?))"
    )
    return dict(connection.execute(query, [json.dumps(ids.tolist())]))


def _events(path: Path | str, types: tuple[int, ...]) -> tuple[np.ndarray, pa.DictionaryArray]:
    """All ranges of these types, (5, n): start, end, whether still open (its end is then its start),
    globalTid, domain; and their names.
    """
    with closing(sqlite3.connect(_uri(path), uri=True)) as connection:
        table, range_name = _nvtx(connection)
    columns = [
        "start",
        'coalesce("end", start) AS "end"',
        '"end" IS NULL AS open',
        "globalTid",
        "coalesce(domainId, 0) AS domainId",
        f"{range_name} AS name",
    ]
    found = _arrow(path, table, columns, f"eventType IN ({', '.join(map(str, types))})")
    if found is None:
        return np.zeros((len(columns) - 1, 0), np.int64), pa.array([], pa.string()).dictionary_encode()
    names = found["name"].combine_chunks().cast(pa.string()).dictionary_encode()
    return _checked(path, table, found.drop_columns(["name"])), names


def _ranges(
    events: np.ndarray,
    names: pa.DictionaryArray,
    connection: sqlite3.Connection,
    domains: Sequence[str] | None,
    capture_end: int,
) -> pd.DataFrame:
    """The ranges of Records; one that is still open ends with the capture."""
    start, end, still_open, thread, domain = events
    end = np.where(still_open, np.maximum(start + 1, capture_end), end)
    keep = np.full(len(start), True)
    table, range_name = _nvtx(connection)
    domain_names = {
        (tid & PROCESS, i): n
        for tid, i, n in _rows(
            connection, table, ["globalTid", "domainId", range_name], f"eventType = {DOMAIN_CREATE}"
        )
    }
    for process in np.unique(thread & PROCESS).tolist():
        for i in np.unique(domain).tolist():
            if domains is not None and domain_names.get((process, i), "") not in domains:
                keep &= (thread & PROCESS != process) | (domain != i)
    order = np.lexsort((-end, start, thread))
    order = order[keep[order]]
    name = pd.Categorical.from_codes(np.asarray(names.indices)[order], names.dictionary.to_pylist())
    return pd.DataFrame(
        {"name": name, "start_ns": start[order], "end_ns": end[order], **thread_columns(thread[order])}
    )
