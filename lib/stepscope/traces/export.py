"""Every GPU operation of an Nsight Systems capture, and the phase, region and step of training that launched
it.

Reads the event-level export (`nsys export --type sqlite`). An operation is one kernel, copy or fill, and
belongs to what its launch was part of: the call on the host that has its correlation id says which thread
launched it, and when. NVTX push/pop ranges are a stack per thread, and autograd launches backward's kernels
from a thread of its own. Therefore

- its phase is the phase range open in the process, on *any* thread, when the call began: phases follow one
another, and
  backward() blocks its caller for as long as autograd's threads launch;
- its region is the innermost range open on the *launching* thread.
"""

import json
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

from stepscope import StepscopeError
from stepscope.config import PHASE_NAMES
from stepscope.traces.families import FAMILIES, families

STEP = "step"
# NVTX's default domain and this project's; ranges of libraries' domains are no regions
DOMAINS = ("", "stepscope")
OUTSIDE, UNATTRIBUTED = "outside", "unattributed"

ACTIVITIES = {kind: f"CUPTI_ACTIVITY_KIND_{kind.upper()}" for kind in ("kernel", "memcpy", "memset")}
LAUNCHES, GRAPHS = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX, STRINGS, COPY_KINDS = "NVTX_EVENTS", "StringIds", "ENUM_CUDA_MEMCPY_OPER"
PUSH_POP, DOMAIN_CREATE = 59, 75  # NVTX_EVENTS.eventType
PROCESS = ~0xFFFFFF  # of a globalTid, the lowest 24 bits are the thread, and the rest is its globalPid
NEVER = np.iinfo(np.int64).max
LATEST = 2**62       # ns: of two times within it, the difference fits into 64 bits
CORRELATIONS = 2**32  # CUPTI's ids are 32 bits wide
NEEDED = ("start", "end", "globalTid", "globalPid")  # columns in which a row has to have a value


class TraceError(StepscopeError, ValueError):
    """A file that cannot be read as a capture of GPU operations; the text names it and says what is wrong."""


class ConservationError(StepscopeError, ValueError):
    """Operations of a capture that do not add up: lost, counted twice, or in two phases at once."""


def load_trace(path: Path | str, phases: Sequence[str] = PHASE_NAMES, step: str = STEP,
               domains: Sequence[str] = DOMAINS) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All GPU operations of a capture, and its NVTX push/pop ranges.

    Args:
        path: the sqlite export; it is only read.
        phases: the names of the ranges that are phases of a step.
        step: the name of the ranges that are steps.
        domains: the NVTX domains whose ranges count; "" is the default one.

    Returns:
        operations: a row per operation, in order of start. kind (kernel, memcpy, memset), name (demangled),
            family, start_ns, duration_ns, device, stream, correlation_id (-1: none), row (in the export's
            table of its kind), launch_start_ns and launch_duration_ns (of the call on the host; NA: not in
            the capture), process, thread (that launched it; -1: not in the capture), phase ("outside": none
            open), phase_range (its row in ranges; -1), region ("unattributed": none open within the phase),
            step (0, 1, ... in each process; -1: none open).
        ranges: a row per range, by thread and start. name, role (phase, step, region), start_ns, end_ns,
            process, thread, step.

    Raises:
        TraceError: the file is absent, no export of nsys, or has no kernels; a value is no integer, or a time
            ends before it starts; a CUDA graph was traced as a whole; the ranges of one thread cross.
        ConservationError: two phases, or two steps, of one process overlap.
    """
    operations, process, launches, ranges = _read(path, phases, step, domains)
    launch = _find_launches(process, operations["correlation_id"].to_numpy(), launches)
    launched = launch >= 0
    thread, _, launch_start, launch_end = launches[:, launch[launched]]

    def spread(values: np.ndarray) -> np.ndarray:
        """From the operations whose launch is known to all of them; -1 for the others."""
        result = np.full(len(operations), -1)
        result[launched] = values
        return result

    innermost = spread(_nest(path, ranges, thread, launch_start))
    steps = spread(_open_range(path, ranges, "step", process[launched], launch_start))
    operations["launch_start_ns"] = pd.arrays.IntegerArray(spread(launch_start), ~launched)
    operations["launch_duration_ns"] = pd.arrays.IntegerArray(spread(launch_end - launch_start), ~launched)
    operations["process"] = process >> 24 & 0xFFFFFF
    operations["thread"] = spread(thread & 0xFFFFFF)
    operations["phase_range"] = spread(_open_range(path, ranges, "phase", process[launched], launch_start))
    phase = _pick(ranges["name"], operations["phase_range"].to_numpy(), OUTSIDE)
    operations["phase"] = phase.set_categories([*phases, OUTSIDE])
    in_region = np.append(ranges["role"] == "region", False)[innermost]
    operations["region"] = _pick(ranges["name"], np.where(in_region, innermost, -1), UNATTRIBUTED)
    operations["step"] = np.append(ranges["step"], -1)[steps]
    return operations, ranges.drop(columns="global_thread")


def _read(path: Path | str, phases: Sequence[str], step: str,
          domains: Sequence[str]) -> tuple[pd.DataFrame, np.ndarray, np.ndarray, pd.DataFrame]:
    """Of load_trace's tables what their own records tell: operations, the globalPid of each, launches,
    ranges.

    Launches are (4, n): globalTid, correlationId, start and end.
    """
    # sqlite reads tables side by side, outside of the GIL
    with _reading(path) as connection, ThreadPoolExecutor() as pool:
        if not next(iter(_rows(connection, ACTIVITIES["kernel"], ["1"])), None):
            raise TraceError(f"{path}: {ACTIVITIES['kernel']} holds no kernels, expected a capture of a program that"
                             " runs some")
        if whole_graphs := len(list(_rows(connection, GRAPHS, ["1"]))):
            raise TraceError(f"{path}: {GRAPHS} holds {whole_graphs} CUDA graphs traced as a whole, expected their"
                             " kernels (nsys profile --cuda-graph-trace=node)")
        events, calls = pool.submit(_events, path), pool.submit(
            _integers, path, LAUNCHES, ["globalTid", "correlationId", "start", "end"],
            "correlationId IS NOT NULL")
        operations, process = _operations(path, connection)
        launches = calls.result()
        ranges = _ranges(*events.result(), connection, phases, step, domains,
                         capture_end=launches[3].max(initial=0) + 1)
    # enclosing puts the times of all threads on one axis, one thread's after the other's.
    times = np.concatenate([launches[2], launches[3], ranges["start_ns"], ranges["end_ns"]])
    threads = len(pd.unique(np.concatenate([launches[0], ranges["global_thread"], process])))
    first, last = int(times.min(initial=NEVER)), int(times.max(initial=0))
    if len(times) and threads * (last - first + 2) > NEVER:
        raise TraceError(f"{path}: {threads} threads have times from {first} to {last} ns, expected so short a capture"
                         " that the times of all, one after the other, fit into 64 bits")
    return operations, process, launches, ranges


def _open_range(path: Path | str, ranges: pd.DataFrame, role: str, process: np.ndarray,
                time_ns: np.ndarray) -> np.ndarray:
    """The row of the phase or step that is open in the process at that time, on whatever thread; -1 for none.

    Raises:
        ConservationError: two of them overlap.
    """
    rows = np.flatnonzero(ranges["role"] == role)
    thread, starts, ends = (ranges[column].to_numpy()[rows]
                            for column in ("global_thread", "start_ns", "end_ns"))
    found, parent, _ = enclosing(thread & PROCESS, starts, ends, process, time_ns)
    within = np.flatnonzero(parent >= 0)
    if len(within):
        inner, outer = (ranges.loc[rows[i]] for i in (within[0], parent[within[0]]))
        raise ConservationError(f"{path}: {role} '{inner['name']}' begins at {inner['start_ns']} ns within {role} "
                                f"'{outer['name']}' of {outer['start_ns']} to {outer['end_ns']} ns,"
                                " expected none in another")
    return np.append(rows, -1)[found]


def _nest(path: Path | str, ranges: pd.DataFrame, thread: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    """Give ranges their step; returns the row of the innermost one at each time on a thread.

    Raises:
        TraceError: the ranges of one thread cross.
    """
    range_thread, starts, ends = (ranges[column].to_numpy()
                                  for column in ("global_thread", "start_ns", "end_ns"))
    innermost, parent, _ = enclosing(range_thread, starts, ends, thread, time_ns)
    crossing = np.append(ends, NEVER)[parent] < ends
    if crossing.any():
        raise TraceError(f"{path}: {NVTX} range '{ranges['name'][crossing.argmax()]:.100}' ends after the range it"
                         " began in, expected the push/pop ranges of a thread to nest")
    steps = ranges.loc[ranges["role"] == "step"]
    number = np.full(len(ranges) + 1, -1)  # the last is for "no range", which is row -1
    number[steps.index] = steps.groupby("process")["start_ns"].rank() - 1
    ranges["step"] = number[_open_range(path, ranges, "step", range_thread & PROCESS, starts)]
    return innermost


def enclosing(keys: np.ndarray, start: np.ndarray, end: np.ndarray, point_keys: np.ndarray,
              points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The innermost interval [start, end) around each point, among the intervals of the point's key.

    Args:
        keys, start, end: (n,) int64. Intervals of one key nest: of any two, one holds the other or they are
            disjoint.
        point_keys, points: (m,) int64.

    Returns:
        innermost (m,): the index of the innermost interval around each point, -1 for none.
        parent (n,): the index of the innermost interval around each interval, -1 for none.
        depth (n,): how many intervals hold each interval, itself included.
    """
    n = len(start)
    if not n:
        return np.full(len(points), -1), np.zeros(0, int), np.zeros(0, int)
    # One axis for all keys, one key's times after the other's: in between, no interval is open.
    _, codes = np.unique(np.concatenate([keys, point_keys]), return_inverse=True)
    end = np.maximum(end, start + 1)  # an empty interval, too, opens before it closes
    first = min(start.min(), points.min(initial=NEVER))
    offset = codes * (max(end.max(), points.max(initial=end[0])) - first + 1) - first
    opened, closed = start + offset[:n], end + offset[:n]

    order = np.lexsort((-closed, opened))  # of those that open together, the larger opens first
    events = np.concatenate([closed[order], opened[order]])
    by_time = np.argsort(events, kind="stable")  # at one time, closings come before openings
    events, opens, which = events[by_time], by_time >= n, np.concatenate([order, order])[by_time]
    depth = np.cumsum(np.where(opens, 1, -1))  # after each event
    # Innermost after an event is what last opened to the depth that the event leaves.
    by_depth = np.argsort(depth, kind="stable")
    last_opened = np.maximum.accumulate(np.where(opens[by_depth], np.arange(2 * n), 0))
    innermost = np.full(2 * n + 1, -1)  # the last is for "before all events", which is event -1
    innermost[by_depth] = which[by_depth][last_opened]
    innermost[:-1][depth == 0] = -1

    openings = np.flatnonzero(opens)
    parents, depths = np.empty(n, int), np.empty(n, int)
    parents[which[openings]] = innermost[openings - 1]
    depths[which[openings]] = depth[openings]
    return innermost[np.searchsorted(events, points + offset[n:], side="right") - 1], parents, depths


def activity_totals(path: Path | str) -> pd.DataFrame:
    """What check_conservation compares with, counted by sqlite: operations and duration_ns, by kind.

    Raises:
        TraceError: as load_trace.
    """
    with _reading(path) as connection:
        rows = [next(iter(_rows(connection, table, ["count(*)", "coalesce(sum(end - start), 0)"])), (0, 0))
                for table in ACTIVITIES.values()]
    return pd.DataFrame(rows, index=pd.Index(ACTIVITIES, name="kind"), columns=["operations", "duration_ns"])


# All that load_trace reads of an export: its tables, the columns it needs, and the rows.
_OPERATION = ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"]
_READ = {
    ACTIVITIES["kernel"]: ([*_OPERATION, "demangledName"], "1"),
    ACTIVITIES["memcpy"]: ([*_OPERATION, "copyKind"], "1"),
    ACTIVITIES["memset"]: (_OPERATION, "1"),
    LAUNCHES: (["start", "end", "globalTid", "correlationId"], "1"),
    GRAPHS: (["start", "end"], "1"),
    NVTX: (["start", "end", "eventType", "text", "globalTid", "textId", "domainId"],
           f"eventType IN ({PUSH_POP}, {DOMAIN_CREATE})"),
    COPY_KINDS: (["id", "label"], "1"),
}


def scrub(path: Path | str, out_path: Path | str) -> None:
    """Write a new export with only what load_trace reads, which it reads to the same result.

    A capture holds every environment variable, process name and path of its machine. The copy holds times,
    ids, the names of kernels and copies, and the names of NVTX ranges and domains: nothing else, and no
    string beside these.

    Raises:
        TraceError: as load_trace for a file that cannot be read.
        FileExistsError: out_path exists.
    """
    out_path = Path(out_path)
    with _reading(path) as source:
        tables = {table: parts for table, parts in _READ.items() if _has(source, table)}
        out_path.touch(exist_ok=False)
        with closing(sqlite3.connect(out_path.resolve().as_uri(),
                                     uri=True)) as copy, _removed_on_error(out_path):
            copy.execute("ATTACH ? AS source", [_uri(path)])
            for table, (columns, rows) in tables.items():
                copy.execute(f"CREATE TABLE {table} AS SELECT {', '.join(columns)} FROM source.{table} WHERE {rows}")
            copy.execute(f"CREATE TABLE {STRINGS} (id INTEGER PRIMARY KEY, value TEXT)")
            for table, column in ((ACTIVITIES["kernel"], "demangledName"), (NVTX, "textId")):
                if table in tables:
                    copy.execute(f"INSERT OR IGNORE INTO {STRINGS} SELECT id, value FROM source.{STRINGS} "
                                 f"WHERE id IN (SELECT {column} FROM main.{table})")
            copy.commit()


@contextmanager
def _reading(path: Path | str) -> Iterator[sqlite3.Connection]:
    """An export, opened read-only; what sqlite finds wrong with it is a TraceError."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such file, expected the sqlite export of a capture")
    try:
        with closing(sqlite3.connect(_uri(path), uri=True)) as connection:
            for (view,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'view'"):
                if view in (*_READ, STRINGS):
                    raise TraceError(f"{path}: {view} is a view, expected a table")
            yield connection
    except (sqlite3.Error, adbc_driver_manager.Error, pa.ArrowException, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}, expected the sqlite export of a capture"
                         " (nsys export --type sqlite)") from error


def _uri(path: Path | str) -> str:
    return Path(path).resolve().as_uri() + "?mode=ro"


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink()
        raise


def _has(connection: sqlite3.Connection, table: str) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?",
                                   [table]).fetchall())


def _rows(connection: sqlite3.Connection, table: str, columns: Sequence[str],
          where: str = "1") -> Iterable[tuple]:
    """Rows in the order of the table; none where the capture lacks the table, as when there was no such
    event.
    """
    if not _has(connection, table):
        return ()
    return connection.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY {table}.rowid")


def _arrow(path: Path | str, table: str, columns: Sequence[str], where: str) -> pa.Table | None:
    """Columns of a table, in its order, with no Python object per row; None where there are no rows."""
    with closing(sqlite3.connect(_uri(path), uri=True)) as connection:
        if not _has(connection, table):
            return None
    with adbc_driver_sqlite.dbapi.connect(_uri(path)) as connected, connected.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": "65536"})
        cursor.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY {table}.rowid")
        try:
            found = cursor.fetch_arrow_table().combine_chunks()
        except OSError as error:  # how the driver says that a later row has another type than the first ones
            raise TraceError(f"{path}: {table} has values of several types in one column ({error}), expected one"
                             " type in each") from None
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
    for name, column in zip(found.column_names, found.columns):
        if not pa.types.is_int64(column.type):
            raise TraceError(f"{path}: {table} has {column.type} values in its column {name}, expected integers")
        if column.null_count and name in NEEDED:
            raise TraceError(f"{path}: {table} has no value in column {name} of {column.null_count} rows, expected"
                             " one in each")
    values = {name: column.fill_null(-1).to_numpy() for name,
              column in zip(found.column_names, found.columns)}
    for name, least, most in (("start", -LATEST, LATEST), ("end", -LATEST, LATEST),
                              ("correlationId", -1, CORRELATIONS)):
        if name in values:
            wrong = (values[name] < least) | (values[name] >= most)
            if wrong.any():
                raise TraceError(f"{path}: {table} has {values[name][wrong.argmax()]} in its column {name}, expected"
                                 f" {least} to {most}")
    backward = values["end"] < values["start"] if "end" in values else np.zeros(0, bool)
    if backward.any():
        row = backward.argmax()
        raise TraceError(f"{path}: {table} has a row that ends at {values['end'][row]} ns and starts at"
                         f" {values['start'][row]} ns, expected no end before its start")
    return np.stack(list(values.values()))


def _operations(path: Path | str, connection: sqlite3.Connection) -> tuple[pd.DataFrame, np.ndarray]:
    """load_trace's operations, with what their own records tell; and the globalPid of each."""
    name_ids = {"kernel": "demangledName", "memcpy": "copyKind", "memset": "0"}
    copies = {i: f"[CUDA memcpy {label}]" for i, label in _rows(connection, COPY_KINDS, ["id", "label"])}
    found: list[np.ndarray] = []
    names: dict[str, int] = {}
    for code, (kind, table) in enumerate(ACTIVITIES.items()):
        *values, name_id = _integers(path, table, ["rowid AS row", *_OPERATION, f"{name_ids[kind]} AS name"])
        ids, index = np.unique(name_id, return_inverse=True)
        labels = {"kernel": _strings(connection, ids), "memcpy": copies, "memset": {0: "[CUDA memset]"}}[kind]
        texts = [labels.get(i, f"[CUDA {kind} {i}]") for i in ids.tolist()]
        codes = np.array([names.setdefault(text, len(names)) for text in texts], np.int64)
        found.append(np.stack([np.full(len(name_id), code), codes[index], *values]))
    parts = np.concatenate(found, axis=1)
    kinds, name, row, start, end, device, stream, correlation, process = parts[:, np.argsort(parts[3],
                                                                                             kind="stable")]
    return pd.DataFrame({
        "kind": pd.Categorical.from_codes(kinds, list(ACTIVITIES)),
        "name": pd.Categorical.from_codes(name, list(names)),
        "family": pd.Categorical.from_codes(families(names).codes[name], FAMILIES),
        "start_ns": start, "duration_ns": end - start, "device": device, "stream": stream,
        "correlation_id": correlation, "row": row,
    }), process


def _strings(connection: sqlite3.Connection, ids: np.ndarray) -> dict[int, str]:
    """The strings with these ids."""
    query = (f"SELECT id, CAST(value AS TEXT) FROM {STRINGS} WHERE value IS NOT NULL"
             " AND id IN (SELECT value FROM json_each(?))")
    return dict(connection.execute(query, [json.dumps(ids.tolist())]))


def _events(path: Path | str) -> tuple[np.ndarray, pa.DictionaryArray]:
    """All push/pop ranges, (6, n): start, end, whether still open (its end is then its start), globalTid,
    domain, textId; and their texts.
    """
    where = f"eventType = {PUSH_POP}"
    columns = ["start", 'coalesce("end", start) AS "end"', '"end" IS NULL AS open', "globalTid",
               "coalesce(domainId, 0) AS domainId", "textId", "coalesce(text, '') AS text"]
    found = _arrow(path, NVTX, columns, where)
    if found is None:
        return np.zeros((len(columns) - 1, 0), np.int64), pa.array([], pa.string()).dictionary_encode()
    texts = found["text"].combine_chunks().cast(pa.string()).dictionary_encode()
    return _checked(path, NVTX, found.drop_columns(["text"])), texts


def _ranges(events: np.ndarray, text: pa.DictionaryArray, connection: sqlite3.Connection,
            phases: Sequence[str],
            step: str, domains: Sequence[str], capture_end: int) -> pd.DataFrame:
    """load_trace's ranges, with what their own records tell and their globalTid as global_thread."""
    start, end, still_open, thread, domain, text_id = events
    end = np.where(still_open, np.maximum(start + 1, capture_end), end)
    code, names = _range_names(text, text_id, connection)
    keep = np.full(len(start), True)
    name = f"coalesce(text, (SELECT value FROM {STRINGS} WHERE id = textId), '')"
    domain_names = {(tid & PROCESS, i): n for tid, i, n in
                    _rows(connection, NVTX, ["globalTid", "domainId", name], f"eventType = {DOMAIN_CREATE}")}
    for process in np.unique(thread & PROCESS).tolist():
        for i in np.unique(domain).tolist():
            if domain_names.get((process, i), "") not in domains:
                keep &= (thread & PROCESS != process) | (domain != i)
    order = np.lexsort((-end, start, thread))
    order = order[keep[order]]
    role = np.array([1 if n in phases else 2 if n == step else 0 for n in names], np.int64)
    return pd.DataFrame({
        "name": pd.Categorical.from_codes(code[order], names),
        "role": pd.Categorical.from_codes(role[code[order]], ["region", "phase", "step"]),
        "start_ns": start[order], "end_ns": end[order],
        "process": thread[order] >> 24 & 0xFFFFFF, "thread": thread[order] & 0xFFFFFF,
        "global_thread": thread[order],
    })


def _range_names(text: pa.DictionaryArray, text_id: np.ndarray,
                 connection: sqlite3.Connection) -> tuple[np.ndarray, list[str]]:
    """The place of each range's name in a list of names; a name is in its event, or was registered and has an
    id.
    """
    texts, ids = text.dictionary.to_pylist(), np.unique(text_id)
    registered = _strings(connection, ids) if (ids >= 0).any() else {}
    spelled = texts + [registered.get(i, "") for i in ids.tolist()]
    names = {name: code for code, name in enumerate(dict.fromkeys(spelled))}
    in_event = np.asarray(text.indices)
    has_text = np.array([bool(t) for t in texts], bool)[in_event]
    spelling = np.where(has_text, in_event, len(texts) + np.searchsorted(ids, text_id))
    return np.array([names[name] for name in spelled], np.int64)[spelling], list(names)


def _find_launches(process: np.ndarray, correlation: np.ndarray, launches: np.ndarray) -> np.ndarray:
    """The column of launches (globalTid, correlationId, start, ...) with each process and correlation id; -1
    for none.
    """
    _, codes = np.unique(np.concatenate([launches[0] & PROCESS, process]), return_inverse=True)
    # Correlation ids are unique in a process; an operation without one (-1) finds nothing.
    key = codes << 32 | np.concatenate([launches[1], correlation])
    key, wanted = key[: launches.shape[1]], key[launches.shape[1]:]
    # where a runtime call made a driver call under the same id: the outer one
    order = np.lexsort((launches[2], key))
    at = np.searchsorted(key[order], wanted)
    order, key = np.append(order, -1), np.append(key, -1)
    return np.where(key[order[at]] == wanted, order[at], -1)


def _pick(values: pd.Series, rows: np.ndarray, missing: str) -> pd.Categorical:
    """values[rows] of a categorical column, `missing` where a row is -1."""
    categories = values.cat.categories.union([missing], sort=False)
    codes = np.append(values.cat.codes.astype(int), categories.get_loc(missing))
    return pd.Categorical.from_codes(codes[rows], categories).remove_unused_categories()
