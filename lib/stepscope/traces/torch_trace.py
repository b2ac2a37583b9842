"""Read traces from torch.profiler (JSON, optionally gzipped) into the same records as nsys's exports.

On a GPU, kernels come from CUPTI (as in nsys), or from the tracers of ROCm or XPU. This project's own traces of a
CPU contain no kernels. Instead, each operator that does work counts as an operation, with its self time, and as
its own launch.
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
from stepscope.traces.kernel_categories import kernel_categories
from stepscope.traces.processes import AmbiguousProcess, find_launching_processes, process_numbers

# Operators that only allocate or create views. Their time counts toward their caller.
NO_WORK = re.compile(
    r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types|expand|t$"
    r"|transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense|unflatten|flatten"
    r"|reshape$|chunk$|split|item$)"
)
GLOO = re.compile("gloo:")  # collectives on a CPU
COMPILED_LOOP = re.compile(r"graph_\d+_cpp_")  # loops that torch.compile generates for a CPU
# The event categories that we read.
WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCHES, OPERATOR, RANGE = ("cuda_runtime", "cuda_driver"), "cpu_op", "user_annotation"
GPU_RANGE = "gpu_user_annotation"
FRAME = "python_function"  # recorded with with_stack=True; only long frames are kept
CATEGORIES = [*WORK, *LAUNCHES, OPERATOR, RANGE, FRAME]
# The names of the same categories in torch 1.8 to 1.11, on XPUs, and with the plugins of other accelerators.
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
# torch 1.8 to 1.11 also wrote ranges as operators. Only events with these names are operators or autograd's nodes.
OLD_OPERATORS = re.compile(r"::|Backward\d*$|^detach_?$")
# Accelerators for which the advice to record CUDA kernels would be wrong.
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
# Bytes per element of a collective; 1 for other dtypes, such as fp8.
ELEMENT_BYTES = {
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long"), 8),
}
# The kinds of host events that the analysis of idle time distinguishes, keyed by category.
HOST_KINDS = {
    "cuda_runtime": "call",
    "cuda_driver": "call",
    OPERATOR: "operator",
    RANGE: "range",
    FRAME: "frame",
}
EXPECTED = "expected a trace from torch.profiler: JSON with a list of events called traceEvents"


def load_torch_trace(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Load all operations and ranges of one of this project's traces, and the totals for ``check_conservation``.

    Returns:
        operations, ranges: as in ``export.load_trace``.
        totals: for each kind of operation, the number of operations and their total duration_ns.

    Raises:
        TraceError: If the file is not a trace from torch.profiler, or an event has unusable times or ids.
        ConservationError: If two phases or two steps overlap.
    """
    records = records_of_own_trace(path)
    kinds = records.operations.groupby("kind", observed=False)["duration_ns"]
    totals = kinds.agg(["size", "sum"]).set_axis(["operations", "duration_ns"], axis="columns")
    return *attribute(records), totals


def records_of_own_trace(path: Path) -> Records:
    """Read the records of one of this project's traces, without PyTorch's ranges, whose names contain "#".

    Raises:
        TraceError: As in ``load_torch_trace``.
    """
    events = read_trace(path).events
    work = events[events["cat"].isin([*WORK])]
    if work.empty:
        work = self_times(events[(events["cat"] == OPERATOR) & matching(events["name"], is_cpu_work)])
    return build_records(str(path), events, work, matching(events["name"], lambda name: "#" not in name))[0]


def is_cpu_work(name: str) -> bool:
    """Return whether an event with this name computes something on a CPU."""
    return bool(COMPILED_LOOP.match(name)) or (name.startswith("aten::") and not NO_WORK.match(name))


def cpu_work(events: pd.DataFrame) -> pd.DataFrame:
    """Return a trace's CPU operators, with their self times, and gloo's collectives; both count as operations.

    The collectives are assigned to a second stream.
    """
    operators = self_times(events[(events["cat"] == OPERATOR) & matching(events["name"], is_cpu_work)])
    collectives = events[(events["cat"] == RANGE) & matching(events["name"], GLOO.match)]
    category = pd.Categorical([OPERATOR] * len(collectives), events["cat"].cat.categories)
    return pd.concat([operators, collectives.assign(cat=category, stream=1)])


def self_times(operators: pd.DataFrame) -> pd.DataFrame:
    """Replace the times of operators with their self times, which exclude the durations of their children.

    Within an outermost operator, the self time of each operator is placed before the times of its children.
    Therefore, self times don't overlap, and together they last as long as the outermost operator.
    """
    thread, start, end = (operators[column].to_numpy() for column in ("key", "start", "end"))
    _, parent, _ = enclosing(thread, start, end, thread[:0], start[:0])
    duration, has_parent = end - start, parent >= 0
    children_ns = np.zeros(len(duration), np.int64)
    np.add.at(children_ns, parent[has_parent], duration[has_parent])
    self_ns = np.maximum(duration - children_ns, 0)
    begins, next_child_start = start.copy(), start + self_ns  # the start of each operator's next child
    for index in np.lexsort((-np.maximum(end, start + 1), start, thread)):  # parents before their children
        if has_parent[index]:
            begins[index] = next_child_start[parent[index]]
            next_child_start[parent[index]] += duration[index]
            next_child_start[index] = begins[index] + self_ns[index]
    return operators.assign(start=begins, end=begins + self_ns)


def build_records(
    path: str, events: pd.DataFrame, work: pd.DataFrame, ranges: np.ndarray | bool = True
) -> tuple[Records, np.ndarray]:
    """Return a trace's records, and the "External id" of each operation's launch.

    If a launch has no such id, the operation's own "External id" takes its place.

    Args:
        path: the file, for error messages.
        events: the events of a Trace.
        work: the events that are operations. CPU operators are their own launches.
        ranges: a mask of the events that may be ranges.
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
            "kernel_category": kernel_categories(name.array),
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
    call_ids = np.append(calls["external"].to_numpy(), -1)[launch]
    annotations = build_ranges(events[(events["cat"] == RANGE) & ranges])
    records = Records(path, operations, process, launches, annotations)
    return records, np.where(call_ids >= 0, call_ids, work["external"])


def build_ranges(events: pd.DataFrame) -> pd.DataFrame:
    """Convert events to ranges, in the format of ``Records.ranges``."""
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


def host_events(events: pd.DataFrame) -> pd.DataFrame:
    """Return the long host events: driver calls, operators, ranges and Python frames.

    The columns are kind, name, key (of the thread), start_ns and end_ns.
    """
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
    """The contents of a trace.

    events: one row per complete event, with the columns :data:`COLUMNS`. cat and name are categorical. key is the
        process number times 2^24, plus a thread number; the process of a GPU operation is the process that
        launched the operation. Times are in ns, and -1 means none.
    operators: keyed by external id, the name, "Input Dims" and "Input type" of operators whose shapes determine
        their work.
    header: the rest of the trace, such as devices and ranks.
    shapes: whether shapes were recorded.
    processes: the name of each process in the trace, such as "11" or "[TP00] 11", keyed by process number.
    unread: the number of complete events in each category that we don't read.
    xla: whether the trace names devices as XLA does (JAX, TensorFlow).
    unfinished: the number of host events that were dropped because they end before they start.
    messages: for each collective, keyed by its row in ``events``, the size in bytes of its input or output,
        whichever is larger, and the number of GPUs.
    communicators: for each collective, keyed by its row in ``events``, the process group, as text that is the
        same on all ranks.
    gpu_ranges: the name, start and end (in ns) of each range on the GPU's timeline, where a range lasts from its
        first operation to the end of its last.
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
    communicators: dict[int, str]
    gpu_ranges: list[tuple[str, int, int]]


_OPERATOR, _RANGE, _FRAME = CODES[OPERATOR], CODES[RANGE], CODES[FRAME]


class _Reader:
    """Collect the numbers in a trace's events while the JSON is parsed."""

    def __init__(self, path: Path, shaped: re.Pattern | None, strict: bool = False):
        self.path, self.shaped, self.strict = path, shaped, strict
        self.values = array("q")
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}  # keyed by pid and tid
        self.operators: dict[int, tuple[str, Any, Any]] = {}
        self.shapes = self.xla = False
        self.unread: Counter[str] = Counter()
        self.unfinished = 0
        self.messages: dict[int, tuple[int, int]] = {}
        self.communicators: dict[int, str] = {}
        self.gpu_ranges: list[tuple[str, int, int]] = []

    def take(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Store an event's numbers and return None, so that the event is freed; return other objects unchanged."""
        if "ph" not in event:
            return event
        if event["ph"] != "X":
            self.xla = self.xla or _is_xla_process_name(event)
            return None
        category = str(event.get("cat"))
        code = CODES.get(category)
        if code is not None:
            self.keep_event(event, category, code)
        elif category == GPU_RANGE:
            self.keep_gpu_range(event)
        else:
            self.unread[category] += 1
        return None

    def keep_event(self, event: dict[str, Any], category: str, code: int) -> None:
        """Store the numbers of an event.

        Because a trace has millions of events, only the fields of the event's category are looked up, and
        ``have_usable_numbers`` later checks all events at once.

        Raises:
            TraceError: If the event has unusable times or ids.
        """
        args = event.get("args")
        args = args if type(args) is dict else {}
        correlation = external = sequence = size = -1
        device = stream = 0
        try:
            start, duration = event["ts"], event["dur"]
            if type(start) not in NUMBER_TYPES or type(duration) not in NUMBER_TYPES:
                start, duration = _exact_time(start), _exact_time(duration)
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
            name = event["name"] if type(event.get("name")) is str else str(event.get("name"))
            if category == OLD_OPERATOR and not OLD_OPERATORS.search(name):
                code = _RANGE
            names, threads = self.names, self.threads
            row = (
                code,
                names.setdefault(name, len(names)),
                threads.setdefault((event.get("pid"), event.get("tid")), len(threads)),
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
            except TypeError:  # part of the row may be in the array already
                del self.values[len(self.values) // len(COLUMNS) * len(COLUMNS) :]
                self.values.extend(map(_to_id, row))
            if (
                self.strict
                and not have_usable_numbers(np.array([row[:5] + tuple(map(_to_id, row[5:]))])).all()
            ):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TraceError(_event_problem(self.path, event, args)) from None
        if code < len(WORK) and "In msg nelems" in args:
            self.keep_collective(args)
        if code == _OPERATOR and "Input Dims" in args:
            self.shapes = True
            if self.shaped and self.shaped.search(name) and (key := _to_id(external)) >= 0:
                self.operators[key] = name, args["Input Dims"], args.get("Input type")

    def keep_collective(self, args: dict[str, Any]) -> None:
        """Store the size and the communicator of the collective whose row was added last."""
        row = len(self.values) // len(COLUMNS) - 1
        self.messages[row] = _message_size(args)
        self.communicators[row] = _communicator(args)

    def keep_gpu_range(self, event: dict[str, Any]) -> None:
        """Store a range from the GPU's timeline, if the range has times."""
        start, duration = event.get("ts"), event.get("dur")
        if not isinstance(start, NUMBER_TYPES) or not isinstance(duration, NUMBER_TYPES):
            return
        if 0 <= duration < LATEST // 1000:
            begin = round(start * 1000) if abs(start) < LATEST // 2000 else 0
            self.gpu_ranges.append((str(event.get("name")), begin, begin + round(duration * 1000)))


NUMBER_TYPES = (float, int)
_EXACT_TIME = re.compile(r"-?\d{1,20}(\.\d{1,12})?")


def _exact_time(time: Any) -> float | int | Decimal:
    """Convert a time in microseconds, which some tools write as text, to a number.

    Raises:
        ValueError, TypeError: If the value is neither a number nor text that contains only a number.
    """
    if type(time) in NUMBER_TYPES:
        return time
    if not _EXACT_TIME.fullmatch(time):
        raise ValueError
    return Decimal(time)


def _message_size(args: dict[str, Any]) -> tuple[int, int]:
    """Return the size in bytes of a collective's input or output, whichever is larger, and the number of GPUs.

    An unknown size is -1, and an unknown number of GPUs is 1.
    """
    sizes = [args.get(f"{side} msg nelems") for side in ("In", "Out")]
    known = [size for size in sizes if type(size) is int and 0 <= size < 2**40]
    width = ELEMENT_BYTES.get(str(args.get("dtype")).lower(), 1)
    gpus = args.get("Group size")
    return max(known, default=-1) * (width if known else 1), gpus if type(gpus) is int and gpus > 0 else 1


def _communicator(args: dict[str, Any]) -> str:
    """Return the name and the ranks of a collective's process group as text, or "" if both are unknown."""
    parts = [args.get("Process Group Name"), args.get("Process Group Ranks")]
    return " ".join(part for part in parts if isinstance(part, str))


def _is_xla_process_name(event: dict) -> bool:
    """Return whether a metadata event names a process as XLA's profiler does: "/device:GPU:0" or "/host:CPU"."""
    args = event.get("args")
    name = args.get("name") if event.get("name") == "process_name" and type(args) is dict else None
    return type(name) is str and name.startswith(("/device:", "/host:"))


def have_usable_numbers(numbers: np.ndarray) -> np.ndarray:
    """Return a mask of the events with usable times and ids."""
    _, _, _, start, end, correlation, device, stream, _, external, sequence = numbers.T
    min_id = np.minimum(np.minimum(correlation, stream), external)
    return (
        (start <= end)
        & (start > -LATEST)
        & (end < LATEST)
        & (min_id >= -1)
        & (device >= 0)
        & (np.maximum(correlation, device) < CORRELATIONS)
        & (np.maximum(stream, external) < LATEST)
        & (abs(sequence) < LATEST)
    )


def read_trace(path: Path, shaped: re.Pattern | None = None) -> Trace:
    """Read a trace. To save memory, keep only its text and numbers instead of one object per event.

    Args:
        shaped: a pattern that matches the operators whose shapes are kept, or None to keep no shapes.

    Raises:
        TraceError: If the file is not a trace from torch.profiler or is truncated, or if an event has unusable
            times or ids.
    """
    reader = _Reader(path, shaped)
    with open_capture(path) as file:
        text = file.read().decode("utf-8-sig", "replace")
    header = _parse_json(path, text, reader)
    numbers = np.frombuffer(reader.values, np.int64).reshape(-1, len(COLUMNS))
    if not have_usable_numbers(numbers).all():
        _parse_json(path, text, _Reader(path, shaped, strict=True))  # raises an error that names the event
    del text
    if isinstance(header, list):  # Chrome's format also allows a list of events
        header = {"traceEvents": header}
    if not isinstance(header, dict) or not isinstance(header.get("traceEvents"), list):
        raise TraceError(f"{path} has no list traceEvents; {EXPECTED}")
    keys, processes = _process_keys(path, numbers, [*reader.threads])
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
        reader.communicators,
        reader.gpu_ranges,
    )


def _process_keys(path: Path, numbers: np.ndarray, threads: list[tuple[Any, Any]]) -> tuple[np.ndarray, dict]:
    """Return the key of each event's process and thread, and the process names, keyed by process number.

    Raises:
        TraceError: If a GPU operation may belong to any of several processes.
    """
    category, _, thread, _, _, correlation, *_ = numbers.T
    is_work, is_launch = category < len(WORK), (category >= len(WORK)) & (category < _OPERATOR)
    names = [str(process) for process, _ in threads]
    host_threads = np.unique(thread[~is_work]).tolist()
    processes = process_numbers([names[number] for number in host_threads])
    number_of_thread = np.array([processes.get(name, 0) for name in names], np.int64)
    process = np.where(is_work, 0, number_of_thread[thread])
    # if only one process launches work, all events belong to it, although ranges may have another namespace's pid
    if len(launching := np.unique(process[is_launch])) == 1:
        process = np.where(is_work, 0, launching[0])
    try:
        process[is_work] = find_launching_processes(
            is_work, is_launch, process, correlation, thread, names, processes
        )
    except AmbiguousProcess as error:
        raise TraceError(f"{path} {error}") from None
    return process << 24 | (thread + 1), {number: name for name, number in processes.items()}


def _parse_json(path: Path, text: str, reader: _Reader) -> Any:
    """Parse a trace's JSON. During parsing, the reader stores and removes the events.

    Control characters in names are accepted, because some versions of Kineto don't escape names.

    Raises:
        TraceError: If the text is not valid JSON, or the reader rejects an event.
    """
    try:
        return json.loads(text, object_hook=reader.take, strict=False)
    except TraceError:
        raise
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}: {_json_problem(text, error)}; {EXPECTED}") from None
    except (ValueError, RecursionError) as error:  # a number with too many digits, or deeply nested lists
        raise TraceError(f"{path} is not valid JSON ({error}); {EXPECTED}") from None


def _json_problem(text: str, error: json.JSONDecodeError) -> str:
    """Describe where and why a text is not valid JSON."""
    position = error.pos
    if position >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return f"the file is truncated: it ends within line {text.count(chr(10)) + 1:,}"
    location = f"not valid JSON in line {error.lineno:,}, column {error.colno:,}"
    excerpt = one_line(text[max(0, position - 20) : position + 20], 60)
    if "escape" in error.msg:
        reason = (
            "a backslash is not escaped (which happens with Windows paths: profile without with_stack, or update"
            " torch)"
        )
    elif text[position] == "{":
        reason = "a second trace begins (each process must write its own file)"
    else:
        reason = f"{error.msg[0].lower()}{error.msg[1:]}, perhaps because a quote in a name is not escaped"
    return f"{location}, near {excerpt!r}: {reason}"


def gpu_names(header: dict[str, Any], devices: Iterable[int]) -> dict[int, str]:
    """Return the names of GPUs, keyed by the device ids of operations. GPUs without a known name are omitted.

    On ROCm, the ids of operations also count CPU sockets, but the ids in the trace's header count only GPUs.
    Therefore, the header's names are used only if they are all the same.
    """
    listed = header.get("deviceProperties")
    name_by_id = {}
    for properties in listed if isinstance(listed, list) else ():
        if not isinstance(properties, dict):
            continue
        device, name = properties.get("id"), properties.get("name")
        if isinstance(device, int) and isinstance(name, str):
            name_by_id[device] = name
    names = {name for name in name_by_id.values() if name.strip()}
    if len(names) == 1:
        return dict.fromkeys([*name_by_id, *map(int, devices)], names.pop())
    is_rocm = "roctracer_version" in header or any("AMD" in name for name in names)
    return {} if is_rocm else name_by_id


def no_work_error(path: str, trace: Trace) -> TraceError:
    """Return an error that says that a trace contains no GPU work, and explains how to record it."""
    accelerators = [category for category in trace.unread if ACCELERATOR.search(category)]
    operators = int((trace.events["cat"] == OPERATOR).sum())
    expected = "expected CUDA, ROCm or XPU kernels, recorded by torch.profiler"
    if accelerators:
        largest = max(accelerators, key=trace.unread.__getitem__)
        contents = (
            f"{trace.unread[largest]:,} events of the category {one_line(largest, 40)!r}, which stepscope doesn't"
            " read"
        )
        return TraceError(f"{path} has {contents}; {expected}")
    if trace.xla:
        return TraceError(f"{path} is a trace from XLA (JAX or TensorFlow); {expected}")
    only_operators = f", only {operators:,} CPU operators" if operators else ""
    if any(APPLE.search(str(name)) for name in trace.events["name"].cat.categories):
        return TraceError(
            f"{path} has no GPU work{only_operators}, because torch.profiler records no kernels on Apple's"
            f" GPUs; {expected}"
        )
    return TraceError(
        f"{path} has no GPU work{only_operators}; {expected} (run on such a GPU, with"
        " activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or ProfilerActivity.XPU on an XPU)"
    )


def _to_id(value: Any) -> int:
    """Convert an id to an integer. Text such as "0x0", which ROCm writes, is parsed, and None becomes -1."""
    if type(value) is int:
        return value
    return -1 if value is None else int(value, 0)


def _event_problem(path: Path, event: dict, args: dict) -> str:
    values = {key: f"{event.get(key)!r:.40}" for key in ("ts", "dur")} | {
        key: f"{args[key]!r:.40}" for key in ("correlation", "device", "stream", "External id") if key in args
    }
    text = ", ".join(f"{key} {value}" for key, value in values.items())
    return (
        f"{path}: the event {str(event.get('name'))[:80]!r} has {text};"
        " expected times in microseconds, non-negative durations, and integer ids"
    )


@contextmanager
def open_capture(path: Path) -> Iterator[IO[bytes]]:
    """Open a capture for reading, and decompress it if necessary.

    Raises:
        TraceError: If the file can't be read, which may also happen within the ``with`` block.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        opener: Any = gzip.open if zipped else open
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path} cannot be read ({reason}); expected a complete capture") from None
