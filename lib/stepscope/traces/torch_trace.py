"""Read torch.profiler's traces (JSON, also gzipped) into the records that nsys's exports give.

On a GPU, kernels come from CUPTI (as nsys's do), from ROCm's tracer or from XPU's. This project's own traces
of a CPU have no kernels: there, each operator that does work counts as an operation for its self time, and
launches itself.
"""

import gzip
import json
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

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
    enclosing,
    find_launches,
    matching,
    thread_columns,
)
from stepscope.traces.families import families
from stepscope.traces.processes import AmbiguousProcess, process_numbers, processes_of_work

# Operators that allocate, or look at the same numbers in another shape: their time is their caller's.
NO_WORK = re.compile(
    r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types|expand|t$"
    r"|transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense|unflatten|flatten"
    r"|reshape$|chunk$|split|item$)"
)
COMPILED_LOOP = re.compile(r"graph_\d+_cpp_")  # by torch.compile on a CPU
# The categories of events that are read.
WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCHES, OPERATOR, RANGE = ("cuda_runtime", "cuda_driver"), "cpu_op", "user_annotation"
GPU_RANGE = "gpu_user_annotation"
FRAME = "python_function"  # with_stack=True; those that last are kept
CATEGORIES = [*WORK, *LAUNCHES, OPERATOR, RANGE, FRAME]
# The same categories under the names of torch 1.8 to 1.11, of XPUs and of other accelerators' plugins.
OLD_OPERATOR = "Operator"
ALIASES = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
    OLD_OPERATOR: OPERATOR,
    "xpu_runtime": "cuda_runtime",
    "xpu_driver": "cuda_driver",
    "privateuse1_runtime": "cuda_runtime",
    "privateuse1_driver": "cuda_driver",
}
CODES = {category: code for code, category in enumerate(CATEGORIES)}
CODES |= {alias: CODES[category] for alias, category in ALIASES.items()}
# torch 1.8 to 1.11 wrote ranges as operators; these names are operators and autograd's nodes.
OLD_OPERATORS = re.compile(r"::|Backward\d*$|^detach_?$")
# Other programs and accelerators, whose traces need another advice than to record CUDA's kernels.
ACCELERATOR = re.compile(r"mtia|hpu|npu|tpu|ascend|privateuse", re.IGNORECASE)
APPLE = re.compile(r"^/Users/|^/opt/homebrew/|\bmps\b|_mps_|mps::")
COLUMNS = (
    "cat",
    "name",
    "key",
    "start",
    "end",
    "correlation",
    "device",
    "stream",
    "bytes",
    "external",
    "sequence",
)
# Bytes of a collective's elements; others, such as fp8, take one.
ELEMENT_BYTES = {
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long"), 8),
}
# What a host event is to who looks for why a GPU waits, by its category.
HOST_KINDS = {
    "cuda_runtime": "call",
    "cuda_driver": "call",
    OPERATOR: "operator",
    RANGE: "range",
    FRAME: "frame",
}
EXPECTED = "expected torch.profiler's trace: JSON with a list traceEvents of events"


def load_torch_trace(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """All operations of a trace of this process, its ranges, and what check_conservation compares with.

    Returns:
        operations, ranges: as ``export.load_trace`` of nsys's capture.
        totals: operations and duration_ns by kind.

    Raises:
        TraceError: the file is no such trace, or an event has no times or ids that can be used.
        ConservationError: two phases, or two steps, overlap.
    """
    records = own_records(path)
    kinds = records.operations.groupby("kind", observed=False)["duration_ns"]
    totals = kinds.agg(["size", "sum"]).set_axis(["operations", "duration_ns"], axis="columns")
    return *attribute(records), totals


def own_records(path: Path) -> Records:
    """The records of a trace of this process; torch's own ranges, which have a "#" in their names, are left
    out.

    Raises:
        TraceError: as load_torch_trace.
    """
    events = read_trace(path).events
    found = events[events["cat"].isin([*WORK])]
    if found.empty:
        found = own_times(events[(events["cat"] == OPERATOR) & matching(events["name"], is_cpu_work)])
    return records_of(str(path), events, found, matching(events["name"], lambda name: "#" not in name))[0]


def is_cpu_work(name: str) -> bool:
    """Whether an event of this name computes something on a CPU."""
    return bool(COMPILED_LOOP.match(name)) or (name.startswith("aten::") and not NO_WORK.match(name))


def own_times(operators: pd.DataFrame) -> pd.DataFrame:
    """The operators with their self times for times: an operator's time less that of those which begin within
    it on its thread. In the span of the outermost each one's self time is laid before those of its children,
    so that no two overlap, and together they last as long as the outermost."""
    thread, start, end = (operators[column].to_numpy() for column in ("key", "start", "end"))
    _, parent, _ = enclosing(thread, start, end, thread[:0], start[:0])
    lasts, inner = end - start, parent >= 0
    within = np.zeros(len(lasts), np.int64)
    np.add.at(within, parent[inner], lasts[inner])
    own = np.maximum(lasts - within, 0)
    begins, free = start.copy(), start + own  # free: where an operator's next child is laid
    for place in np.lexsort((-np.maximum(end, start + 1), start, thread)):  # parents before their children
        if inner[place]:
            begins[place] = free[parent[place]]
            free[parent[place]] += lasts[place]
            free[place] = begins[place] + own[place]
    return operators.assign(start=begins, end=begins + own)


def records_of(
    path: str, events: pd.DataFrame, work: pd.DataFrame, ranges: np.ndarray | bool = True
) -> tuple[Records, np.ndarray]:
    """Records of a trace, and of each operation "External id" of the call that launched it, else its own.

    Args:
        events: of a Trace.
        work: those of them that are its operations; a CPU's operators are launched by themselves.
        ranges: which of them may be its ranges.
    """
    work = work.sort_values("start", kind="stable")
    calls = events[events["cat"].isin(LAUNCHES) & (events["correlation"] >= 0)]
    if (work["cat"] == OPERATOR).any():
        calls = work = work.assign(correlation=np.arange(len(work)))
    name = work["name"].cat.remove_unused_categories()
    operations = pd.DataFrame(
        {
            "kind": pd.Categorical(work["cat"].map(lambda cat: WORK.get(cat, "kernel")), KINDS),
            "name": name,
            "family": families(name.array),
            "start_ns": work["start"],
            "duration_ns": work["end"] - work["start"],
            "device": work["device"],
            "stream": work["stream"],
            "correlation_id": work["correlation"],
            "row": np.arange(len(work)),
            "bytes": work["bytes"],
        }
    ).reset_index(drop=True)
    launches = np.stack([calls[column].to_numpy() for column in ("key", "correlation", "start", "end")])
    process = work["key"].to_numpy() & PROCESS
    launch = find_launches(process, operations["correlation_id"].to_numpy(), launches)
    of_call = np.append(calls["external"].to_numpy(), -1)[launch]
    own = ranges_of(events[(events["cat"] == RANGE) & ranges])
    records = Records(path, operations, process, launches, own)
    return records, np.where(of_call >= 0, of_call, work["external"])


def ranges_of(events: pd.DataFrame) -> pd.DataFrame:
    """The ranges of Records that these events are."""
    rows = events.sort_values(["key", "start", "end"], ignore_index=True, ascending=[True, True, False])
    return pd.DataFrame(
        {
            "name": rows["name"].cat.remove_unused_categories(),
            "start_ns": rows["start"],
            "end_ns": rows["end"],
            "sequence": rows["sequence"],
            **thread_columns(rows["key"].to_numpy()),
        }
    )


def host_of(events: pd.DataFrame) -> pd.DataFrame:
    """The events of the host that last (kind, name, key of the thread, start_ns, end_ns): calls of the
    driver, operators, ranges and Python frames."""
    rows = events[events["cat"].isin(HOST_KINDS) & (events["end"] - events["start"] >= SHORT_NS)]
    return pd.DataFrame(
        {
            "kind": rows["cat"].map(HOST_KINDS).astype("category"),
            "name": rows["name"],
            "key": rows["key"],
            "start_ns": rows["start"],
            "end_ns": rows["end"],
        }
    )


@dataclass
class Trace:
    """A trace's complete events.

    events: a row an event with :data:`COLUMNS`: cat and name are categorical; key is the process's number
        times 2^24 plus a number of the thread, where a GPU operation's process is the one that launched it;
        times in ns; -1: none.
    operators: by external id, the name, "Input Dims" and "Input type" of operators whose shapes tell their
        work.
    header: what the trace says of its devices and ranks.
    shapes: whether shapes were recorded.
    processes: by number, what the trace calls each process: "11", or "[TP00] 11".
    unread: the number of complete events by category, for categories that are not read.
    xla: the trace names devices as XLA does (JAX, TensorFlow).
    unfinished: host events that were left out because they end before they begin.
    messages: by row of a collective's kernel in ``events``, its larger side in bytes and the number of GPUs.
    gpu_ranges: name, start and end (ns) of ranges as the GPU sees them, from their first operation to their
        last.
    """

    events: pd.DataFrame
    operators: dict[int, tuple[str, Any, Any]]
    header: dict[str, Any]
    shapes: bool
    processes: dict[int, str]
    unread: Counter[str]
    xla: bool
    unfinished: int
    messages: dict[int, tuple[int, int]]
    gpu_ranges: list[tuple[str, int, int]]


_OPERATOR, _RANGE, _FRAME = CODES[OPERATOR], CODES[RANGE], CODES[FRAME]


class _Reader:
    """Keeps the numbers of a trace's events, each as soon as it is parsed."""

    def __init__(self, path: Path, shaped: re.Pattern | None, strict: bool = False):
        self.path, self.shaped, self.strict = path, shaped, strict
        self.values = array("q")
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}  # by pid and tid
        self.operators: dict[int, tuple[str, Any, Any]] = {}
        self.shapes = self.xla = False
        self.unread: Counter[str] = Counter()
        self.unfinished = 0
        self.messages: dict[int, tuple[int, int]] = {}
        self.gpu_ranges: list[tuple[str, int, int]] = []

    def take(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """Return what takes an object's place in the parsed trace: nothing where it is an event."""
        if "ph" not in found:
            return found
        if found["ph"] != "X":
            self.xla = self.xla or _names_xla(found)
            return None
        category = str(found.get("cat"))
        code = CODES.get(category)
        if code is not None:
            self.keep(found, category, code)
        elif category == GPU_RANGE:
            self.keep_gpu_range(found)
        else:
            self.unread[category] += 1
        return None

    def keep(self, found: dict[str, Any], category: str, code: int) -> None:
        """Keep the numbers of an event. A trace has millions of them: each looks only for what its category
        has, and whether numbers fit is asked of all at once (``fits``).

        Raises:
            TraceError: the event has no times or ids that can be used.
        """
        args = found.get("args")
        args = args if type(args) is dict else {}
        correlation = external = sequence = size = -1
        device = stream = 0
        try:
            start, duration = found["ts"], found["dur"]
            if type(start) not in NUMBERS or type(duration) not in NUMBERS:
                start, duration = _exact(start), _exact(duration)
            start, duration = round(start * 1000), round(duration * 1000)
            if duration < 0 and code >= len(WORK):
                self.unfinished += 1
                return
            if code < _OPERATOR:
                correlation, external = args.get("correlation", -1), args.get("External id", -1)
                if code < len(WORK):
                    device, stream, size = args.get("device", 0), args.get("stream", 0), args.get("bytes", -1)
                    size = size if type(size) is int and 0 <= size < LATEST else -1
            elif code == _OPERATOR:
                external, sequence = args.get("External id", -1), args.get("Sequence number", -1)
            elif code == _FRAME and duration < SHORT_NS:
                return
            name = found["name"] if type(found.get("name")) is str else str(found.get("name"))
            if category == OLD_OPERATOR and not OLD_OPERATORS.search(name):
                code = _RANGE
            names, threads = self.names, self.threads
            row = (
                code,
                names.setdefault(name, len(names)),
                threads.setdefault((found.get("pid"), found.get("tid")), len(threads)),
                start,
                start + duration,
                correlation,
                device,
                stream,
                size,
                external,
                sequence,
            )
            try:
                self.values.extend(row)
            except TypeError:  # a part of it is in the array by now
                del self.values[len(self.values) // len(COLUMNS) * len(COLUMNS) :]
                self.values.extend(map(_id, row))
            if self.strict and not fits(np.array([row[:5] + tuple(map(_id, row[5:]))])).all():
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(_complaint(self.path, found, args)) from None
        if code < len(WORK) and "In msg nelems" in args:
            self.messages[len(self.values) // len(COLUMNS) - 1] = _message(args)
        if code == _OPERATOR and "Input Dims" in args:
            self.shapes = True
            if self.shaped and self.shaped.search(name) and (key := _id(external)) >= 0:
                self.operators[key] = name, args["Input Dims"], args.get("Input type")

    def keep_gpu_range(self, found: dict[str, Any]) -> None:
        """Keep a range as the GPU sees it, if it has times."""
        start, duration = found.get("ts"), found.get("dur")
        if isinstance(start, NUMBERS) and isinstance(duration, NUMBERS) and 0 <= duration < LATEST // 1000:
            begin = round(start * 1000) if abs(start) < LATEST // 2000 else 0
            self.gpu_ranges.append((str(found.get("name")), begin, begin + round(duration * 1000)))


NUMBERS = (float, int)
_EXACT = re.compile(r"-?\d{1,20}(\.\d{1,12})?")


def _exact(time: Any) -> float | int | Decimal:
    """A time in microseconds, which some tools write as text.

    Raises:
        ValueError, TypeError: it is neither a number nor the text of one.
    """
    if type(time) in NUMBERS:
        return time
    if not _EXACT.fullmatch(time):
        raise ValueError
    return Decimal(time)


def _message(args: dict[str, Any]) -> tuple[int, int]:
    """The larger side of a collective in bytes, and the number of GPUs, by the arguments that torch records;
    -1 and 1 where they are unknown."""
    sizes = [args.get(f"{side} msg nelems") for side in ("In", "Out")]
    known = [size for size in sizes if type(size) is int and 0 <= size < 2**40]
    width = ELEMENT_BYTES.get(str(args.get("dtype")).lower(), 1)
    gpus = args.get("Group size")
    return max(known, default=-1) * (width if known else 1), gpus if type(gpus) is int and gpus > 0 else 1


def _names_xla(event: dict) -> bool:
    """Whether this metadata names a process as XLA's profiler does: "/device:GPU:0", "/host:CPU"."""
    args = event.get("args")
    name = args.get("name") if event.get("name") == "process_name" and type(args) is dict else None
    return type(name) is str and name.startswith(("/device:", "/host:"))


def fits(numbers: np.ndarray) -> np.ndarray:
    """Which rows of COLUMNS have times and ids that can be used."""
    _, _, _, start, end, correlation, device, stream, _, external, sequence = numbers.T
    least = np.minimum(np.minimum(correlation, stream), external)
    return (
        (start <= end)
        & (start > -LATEST)
        & (end < LATEST)
        & (least >= -1)
        & (device >= 0)
        & (np.maximum(correlation, device) < CORRELATIONS)
        & (np.maximum(stream, external) < LATEST)
        & (abs(sequence) < LATEST)
    )


def read_trace(path: Path, shaped: re.Pattern | None = None) -> Trace:
    """Read a trace, of which memory holds the text and numbers, and no objects.

    Args:
        shaped: the operators whose shapes are kept.

    Raises:
        TraceError: the file is no such trace, or is cut off; an event has no times or ids that can be used.
    """
    reader = _Reader(path, shaped)
    with opened(path) as file:
        text = file.read().decode("utf-8-sig", "replace")
    header = _parsed(path, text, reader)
    numbers = np.frombuffer(reader.values, np.int64).reshape(-1, len(COLUMNS))
    if not fits(numbers).all():
        _parsed(path, text, _Reader(path, shaped, strict=True))  # raises and names the event
    del text
    if isinstance(header, list):  # Chrome's other form
        header = {"traceEvents": header}
    if not isinstance(header, dict) or not isinstance(header.get("traceEvents"), list):
        raise TraceError(f"{path}: has no list traceEvents, {EXPECTED}")
    keys, processes = _keys(path, numbers, [*reader.threads])
    events = pd.DataFrame(numbers, columns=COLUMNS)
    texts = {"cat": CATEGORIES, "name": [*reader.names]}
    named = {column: pd.Categorical.from_codes(events[column], values) for column, values in texts.items()}
    return Trace(
        events.assign(**named, key=keys),
        reader.operators,
        header,
        reader.shapes,
        processes,
        reader.unread,
        reader.xla,
        reader.unfinished,
        reader.messages,
        reader.gpu_ranges,
    )


def _keys(path: Path, numbers: np.ndarray, threads: list[tuple[Any, Any]]) -> tuple[np.ndarray, dict]:
    """The key of each event's process and thread, and what the trace calls each process.

    Raises:
        TraceError: operations of the GPU may be of several processes.
    """
    category, _, thread, _, _, correlation, *_ = numbers.T
    is_work, is_launch = category < len(WORK), (category >= len(WORK)) & (category < _OPERATOR)
    names = [str(process) for process, _ in threads]
    on_host = np.unique(thread[~is_work]).tolist()
    processes = process_numbers([names[one] for one in on_host])
    of_thread = np.array([processes.get(name, 0) for name in names], np.int64)
    process = np.where(is_work, 0, of_thread[thread])
    if len(launching := np.unique(process[is_launch])) == 1:  # ranges may have a pid of another namespace
        process = np.where(is_work, 0, launching[0])
    try:
        process[is_work] = processes_of_work(
            is_work, is_launch, process, correlation, thread, names, processes
        )
    except AmbiguousProcess as error:
        raise TraceError(f"{path}: {error}") from None
    return process << 24 | (thread + 1), {number: name for name, number in processes.items()}


def _parsed(path: Path, text: str, reader: _Reader) -> Any:
    """What is left of a trace's JSON when a reader has taken its events. Control characters in names are
    read, as kineto wrote them unescaped.

    Raises:
        TraceError: the text is no JSON, or as of the reader.
    """
    try:
        return json.loads(text, object_hook=reader.take, strict=False)
    except TraceError:
        raise
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}: {_broken(text, error)}; {EXPECTED}") from None
    except (ValueError, RecursionError) as error:  # a number of many digits, or lists within lists
        raise TraceError(f"{path}: is not valid JSON ({error}); {EXPECTED}") from None


def _broken(text: str, error: json.JSONDecodeError) -> str:
    """Why a text is no JSON, and where."""
    at = error.pos
    if at >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return f"the file is cut off: it ends within line {text.count(chr(10)) + 1:,}"
    place = f"is not valid JSON in line {error.lineno:,}, column {error.colno:,}"
    near = one_line(text[max(0, at - 20) : at + 20], 60)
    if "escape" in error.msg:
        why = (
            "a backslash is not escaped (as in paths of Windows: profile without with_stack, or update torch)"
        )
    elif text[at] == "{":
        why = "a second trace begins (each process has to write a file of its own)"
    else:
        why = f"{error.msg[0].lower()}{error.msg[1:]}, perhaps because a quote in a name is not escaped"
    return f"{place}, near {near!r}: {why}"


def gpu_names(header: dict[str, Any], devices: Iterable[int]) -> dict[int, str]:
    """The names of GPUs by the ids that operations have, as far as a trace's header tells.

    ROCm's operations have the ids of agents, which count the CPU's sockets, too, while the header counts
    GPUs. Its ids say which GPU is meant only where all of them have one name.
    """
    listed = header.get("deviceProperties")
    named = {
        one["id"]: one["name"]
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict) and isinstance(one.get("id"), int) and isinstance(one.get("name"), str)
    }
    names = {name for name in named.values() if name.strip()}
    if len(names) == 1:
        return dict.fromkeys([*named, *map(int, devices)], names.pop())
    is_rocm = "roctracer_version" in header or any("AMD" in name for name in names)
    return {} if is_rocm else named


def lacks_work(path: str, trace: Trace) -> TraceError:
    """Say that a trace holds no GPU work, and what its author can do."""
    kinds = [category for category in trace.unread if ACCELERATOR.search(category)]
    operators = int((trace.events["cat"] == OPERATOR).sum())
    expected = "expected kernels of CUDA, ROCm or XPU, recorded by torch.profiler"
    if kinds:
        most = max(kinds, key=trace.unread.__getitem__)
        held = f"{trace.unread[most]:,} events of the category {one_line(most, 40)!r}, which is not read"
        return TraceError(f"{path}: holds {held}; {expected}")
    if trace.xla:
        return TraceError(f"{path}: is a trace of XLA (JAX or TensorFlow); {expected}")
    only = f", only {operators:,} operators of the CPU" if operators else ""
    if any(APPLE.search(str(name)) for name in trace.events["name"].cat.categories):
        return TraceError(
            f"{path}: holds no GPU work{only}, as torch.profiler records no kernels of Apple's GPUs; {expected}"
        )
    return TraceError(
        f"{path}: holds no GPU work{only}; {expected} (on such a GPU, with"
        " activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] or XPU)"
    )


def _id(value: Any) -> int:
    """An id, which ROCm writes as "0x0"; none is -1."""
    if type(value) is int:
        return value
    return -1 if value is None else int(value, 0)


def _complaint(path: Path, event: dict, args: dict) -> str:
    said = {key: f"{event.get(key)!r:.40}" for key in ("ts", "dur")} | {
        key: f"{args[key]!r:.40}" for key in ("correlation", "device", "stream", "External id") if key in args
    }
    found = ", ".join(f"{key} {value}" for key, value in said.items())
    return (
        f"{path}: the event {str(event.get('name'))[:80]!r} has {found},"
        " expected times in microseconds, no negative duration, and whole numbers as ids"
    )


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A capture's bytes, unzipped where they are zipped; what is wrong with the file is a TraceError."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        opener: Any = gzip.open if zipped else open
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read ({said}), expected a whole capture") from None
