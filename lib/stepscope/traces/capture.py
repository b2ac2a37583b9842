"""Anybody's capture: nsys's or torch.profiler's, of a program whose ranges have names of its own.

Steps and phases are found by the names that people give ranges; what autograd's own ranges enclose is
backward. Operations that were launched before the capture, or before its first step, are left out and
counted.
"""
import gzip
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.traces.attribution import (
    KINDS,
    OUTSIDE,
    PROCESS,
    Records,
    TraceError,
    find_launches,
    thread_columns,
)
from stepscope.traces.export import device_names, read_export
from stepscope.traces.families import FAMILIES, families
from stepscope.traces.nsys_program import export_capture, find_nsys
from stepscope.traces.torch_trace import (
    CATEGORIES,
    LAUNCHES,
    OPERATOR,
    PROCESS_KEY,
    RANGE,
    WORK,
    Events,
    read_trace,
)

OPERATOR_RANGE = re.compile(r", (op_id|seq) = \d+|^autograd::|^ProfilerStep")  # emit_nvtx's, and torch's own
AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function")
OPTIMIZER = re.compile(r"^Optimizer\.step#")
STEP_WORDS = {"step", "steps", "iter", "iteration", "batch"}
CANDIDATES = 50  # names of ranges, those with the most time, among which steps are looked for
PROFILER_STEP = re.compile(r"^ProfilerStep\s?#\d+$")
# What people call a phase, in any case; beside these words a name may have only those of FILL.
PHASE_WORDS = {"forward": "forward", "fwd": "forward", "loss": "loss", "criterion": "loss",
               "backward": "backward",
               "bwd": "backward", "backprop": "backward", "optimizer": "optimizer", "optim": "optimizer",
               "opt": "optimizer", "adamw": "optimizer", "adam": "optimizer", "sgd": "optimizer"}
FILL = {"pass", "step", "model", "the", "compute", "train", "training", "phase", "update", "calc", "run"}
PHASES = ("forward", "loss", "backward", "optimizer")
MATMULS = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_int_mm)$")
SHAPED = re.compile(rf"{MATMULS.pattern}|^triton_")
DTYPES = {"float": ("fp32", 4), "double": ("fp64", 8), "c10::BFloat16": ("bf16", 2), "c10::Half": ("fp16", 2),
          "long": ("int64", 8), "long int": ("int64", 8), "int": ("int32", 4), "short": ("int16", 2),
          "bool": ("bool", 1), "unsigned char": ("uint8", 1), "signed char": ("int8", 1)}


@dataclass
class Capture:
    """A capture's GPU work.

    operations: a row an operation in order of start: kind (kernel, memcpy, memset), name, family, device,
        stream, start_ns, duration_ns, launch_start_ns and launch_duration_ns (NA: not in the capture), thread
        (-1), process, phase ("outside"), range (the outermost one that is no step and no phase; ""), step
        (-1), bytes (of a copy or fill, or a generated kernel's arguments; -1), flops (-1) and dtype of a
        matmul whose shapes are known ("").
    ranges: name, start_ns, end_ns, process, thread, role (step, phase, region), phase.
    steps: the name of each step. left_out, left_out_ns: what was launched before.
    """

    path: str
    operations: pd.DataFrame
    ranges: pd.DataFrame
    steps: list[str]
    left_out: int = 0
    left_out_ns: int = 0
    gpus: dict[int, str] = field(default_factory=dict)
    rank: tuple[int, int] | None = None
    autograd: bool = False  # backward is told by autograd's ranges


def load_capture(path: Path | str, step: str | None = None,
                 phases: Mapping[str, str] | None = None) -> Capture:
    """Read a capture: nsys's ``.sqlite`` (also ``.gz``) or ``.nsys-rep`` where nsys is installed,
    torch.profiler's ``.json`` or ``.json.gz``, from CUDA or ROCm.

    Args:
        step: the name of the ranges that are steps, without their numbers; None finds them.
        phases: the phase that a range's name stands for; what is not among them goes by its name.

    Raises:
        TraceError: the file is none of these, is cut off, or has no GPU work; no range has the step's or a
            phase's name.
    """
    path = Path(path)
    with _readable(path) as (kind, file):
        if kind == "json":
            events = read_trace(file, SHAPED)
            records, extra, autograd = _of_events(str(path), events)
            gpus, rank = _header(events)
        else:
            records = _exported(path, file)
            extra, autograd = {}, _autograd_of(records.ranges)
            gpus, rank = device_names(file), None
    return _attributed(records, extra, autograd, step, phases, gpus, rank)


def _exported(path: Path, file: Path) -> Records:
    try:
        records = read_export(file, domains=None)
    except TraceError as error:
        raise TraceError(str(error).replace(str(file), str(path))) from None
    records.path = str(path)
    return records


@contextmanager
def _readable(path: Path) -> Iterator[tuple[str, Path]]:
    """What a file is by its first bytes ("json", "sqlite"), and one that can be read: itself, or made from
    it."""
    wanted = "expected nsys's .sqlite or .nsys-rep, or torch.profiler's .json, also gzipped"
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with (gzip.open if zipped else open)(path, "rb") as file:
            head = file.read(64)
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read ({said}), {wanted}") from None
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        yield "json", path
    elif path.suffix == ".nsys-rep" or (head.startswith(b"SQLite format 3\0") and zipped):
        with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
            yield "sqlite", _unzipped(path, Path(folder)) if zipped else _report(path, Path(folder))
    elif head.startswith(b"SQLite format 3\0"):
        yield "sqlite", path
    else:
        what = f"no capture: it begins with {head[:16]!r}" if head else "empty"
        raise TraceError(f"{path}: is {what}, {wanted}")


def _unzipped(path: Path, folder: Path) -> Path:
    made = folder / "capture.sqlite"
    try:
        with gzip.open(path, "rb") as file, made.open("wb") as out:
            shutil.copyfileobj(file, out)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be unzipped ({error}), expected a whole .sqlite.gz") from None
    return made


def _report(path: Path, folder: Path) -> Path:
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(f"{path}: is nsys's own report, and nsys is not installed here; expected its export:"
                         f" run 'nsys export --type sqlite {path.name}' where nsys is")
    try:
        return export_capture(nsys, path, folder / "capture.sqlite")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = " ".join(str(error).split())
        raise TraceError(f"{path}: {said}, expected a report that nsys can export") from None


def _header(events: Events) -> tuple[dict[int, str], tuple[int, int] | None]:
    """The GPUs' names by id, and the rank of how many."""
    devices, ranks = events.header.get("deviceProperties"), events.header.get("distributedInfo")
    gpus = {one["id"]: str(one.get("name")) for one in devices if isinstance(one, dict)
            and isinstance(one.get("id"), int)
            } if isinstance(devices, list) else {}
    ranks = ranks if isinstance(ranks, dict) else {}
    rank, size = ranks.get("rank"), ranks.get("world_size")
    return gpus, (rank, size) if isinstance(rank, int) and isinstance(size, int) else None


def _of_events(path: str, events: Events) -> tuple[Records, dict[str, np.ndarray], pd.DataFrame]:
    """A trace's records; more columns of its operations; and autograd's ranges."""
    cat, name, tid, start, end = (events.column(column) for column in ("cat", "name", "tid", "start", "end"))
    code = {category: place for place, category in enumerate(CATEGORIES)}
    work = np.flatnonzero(cat < len(WORK))
    if not len(work):
        operators = int((cat == code[OPERATOR]).sum())
        only = f", only {operators:,} operators of the CPU" if operators else ""
        raise TraceError(f"{path}: holds no GPU work{only},"
                         " expected a trace with kernels (activities=[..., ProfilerActivity.CUDA])")
    work = work[np.argsort(start[work], kind="stable")]
    key = PROCESS_KEY | (tid + 1)
    kinds = [KINDS.index(kind) for kind in WORK.values()]
    used, codes = np.unique(name[work], return_inverse=True)
    texts = [events.names[place] for place in used]
    correlation = events.column("correlation")
    operations = pd.DataFrame({
        "kind": pd.Categorical.from_codes(np.array(kinds)[cat[work]], KINDS),
        "name": pd.Categorical.from_codes(codes, texts),
        "family": pd.Categorical.from_codes(families(texts).codes[codes], FAMILIES),
        "start_ns": start[work], "duration_ns": end[work] - start[work],
        "device": events.column("device")[work],
        "stream": events.column("stream")[work], "correlation_id": correlation[work],
        "bytes": events.column("bytes")[work]})
    calls = np.flatnonzero(np.isin(cat, [code[category] for category in LAUNCHES]) & (correlation >= 0))
    launches = np.stack([key[calls], correlation[calls], start[calls], end[calls]])
    process = np.full(len(work), PROCESS_KEY)
    launch = find_launches(process, operations["correlation_id"].to_numpy(), launches)
    external = events.column("external")
    of_call = np.append(external[calls], -1)[launch]
    extra = _shaped(events, np.where(of_call >= 0, of_call, external[work]))

    def ranges(rows: np.ndarray) -> pd.DataFrame:
        rows = rows[np.lexsort((-end[rows], start[rows], key[rows]))]
        used, codes = np.unique(name[rows], return_inverse=True)
        return pd.DataFrame({"name": pd.Categorical.from_codes(codes,
                                                               [events.names[place] for place in used]),
                             "start_ns": start[rows], "end_ns": end[rows], **thread_columns(key[rows])})
    own = np.array([bool(AUTOGRAD.match(text)) for text in events.names], bool)
    return (Records(path, operations, process, launches, ranges(np.flatnonzero(cat == code[RANGE]))), extra,
            ranges(np.flatnonzero((cat == code[OPERATOR]) & own[name])))


def _shaped(events: Events, external: np.ndarray) -> dict[str, np.ndarray]:
    """By the operator that made each operation its FLOPs and dtype, and the bytes of a generated kernel's
    arguments. Where one operator made several kernels, all are its first one's."""
    known = {key: _work(*operator) for key, operator in events.operators.items()}
    ids, codes = np.unique(external, return_inverse=True)
    found = [known.get(key, (-1, "", -1)) for key in ids.tolist()]
    flops, dtype, size = (np.array(column)[codes] for column in zip(*found))
    return {"flops": flops.astype(float), "dtype": dtype, "arguments": size.astype(np.int64),
            "operator": np.where((flops >= 0) | (size >= 0), external, -1)}


def _work(name: str, shapes: Any, types: Any) -> tuple[float, str, int]:
    """FLOPs (2 m n k a matmul) and dtype of a matmul, or the bytes of a generated kernel's tensors; -1: not
    told."""
    try:
        tensors = [(shape, DTYPES.get(kind, ("fp8" if "Float8" in kind else kind, 1))) for shape, kind in
                   zip(shapes, types) if shape and kind not in ("Scalar", "ScalarList", "")]
        if not MATMULS.match(name):
            return -1, "", sum(int(np.prod(shape)) * kind[1] for shape, kind in tensors)
        first = 1 if name in ("aten::addmm", "aten::baddbmm") else 0
        (left, kind), (right, _) = tensors[first], tensors[first + 1]
        return 2.0 * float(np.prod(left)) * right[-1], kind[0], -1
    except (TypeError, ValueError, IndexError):
        return -1, "", -1


def _autograd_of(ranges: pd.DataFrame) -> pd.DataFrame:
    """Autograd's ranges among nsys's, where the program ran under torch.autograd.profiler.emit_nvtx."""
    return ranges[matching(ranges["name"], AUTOGRAD)]


def matching(names: pd.Series, pattern: re.Pattern) -> pd.Series:
    """Whether each name of a categorical column matches somewhere; each distinct one is asked once."""
    found = np.array([bool(pattern.search(str(name))) for name in names.cat.categories], bool)
    return pd.Series(found[names.cat.codes] if len(found) else False, names.index, dtype=bool)


def plain_name(name: str) -> str:
    """A range's name without numbers and signs, in lower case: "ProfilerStep#7" is "profilerstep"."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def phase_of(name: str) -> str | None:
    """The phase that a range's name says, in any case and spelling: "## Forward pass ##" is forward."""
    if OPTIMIZER.match(name):
        return "optimizer"
    said = plain_name(name).split()
    found = {PHASE_WORDS[word] for word in said if word in PHASE_WORDS}
    whole = set(said) <= {*PHASE_WORDS, *FILL} and "#" not in name.strip("# ")
    return found.pop() if whole and len(found) == 1 else None


def _attributed(records: Records, extra: dict[str, np.ndarray], autograd: pd.DataFrame, step: str | None,
                phases: Mapping[str, str] | None, gpus: dict[int, str],
                rank: tuple[int, int] | None) -> Capture:
    operations, ranges, launches = records.operations, records.ranges, records.launches
    launch = find_launches(records.process, operations["correlation_id"].to_numpy(), launches)
    known = launch >= 0
    thread, _, launch_start, launch_end = (np.append(values, -1)[launch] for values in launches)
    ranges = ranges.assign(role="region", phase="")
    steps = _steps(records.path, ranges, launches, step)
    ranges.loc[steps.index, "role"] = "step"
    ranges["phase"] = _phase_names(records.path, ranges, phases)
    ranges.loc[(ranges["phase"] != "") & (ranges["role"] != "step"), "role"] = "phase"

    place = _within(steps, records.process, launch_start)
    phase = np.full(len(operations), OUTSIDE, object)
    if len(autograd) and not (ranges["phase"] == "backward").any():
        phase[known & (_within(autograd, records.process, launch_start) >= 0)] = "backward"
    own = ranges[ranges["role"] == "phase"]
    at = _within(own, records.process, launch_start)
    phase = np.where(known & (at >= 0), np.append(own["phase"].to_numpy(object), OUTSIDE)[at], phase)
    others = ranges[(ranges["role"] == "region") & ~matching(ranges["name"], OPERATOR_RANGE)]
    outermost = _within(others, records.process, launch_start)
    named = np.append(others["name"].astype(str).to_numpy(object), "")[outermost]
    before = _before(operations, records.process, known, launch_start, steps)
    number = np.append(np.arange(len(steps)) if steps.empty else steps["step"].to_numpy(), -1)[place]
    table = operations.assign(
        launch_start_ns=pd.arrays.IntegerArray(launch_start.astype(np.int64), ~known),
        launch_duration_ns=pd.arrays.IntegerArray((launch_end - launch_start).astype(np.int64), ~known),
        process=records.process >> 24 & 0xFFFFFF, thread=np.where(known, thread & 0xFFFFFF, -1),
        step=np.where(known, number, -1), range=pd.Categorical(np.where(known, named, "")), flops=-1.0,
        dtype="", operator=-1)
    if extra:
        size = np.where(table["bytes"] >= 0, table["bytes"], extra["arguments"])
        table = table.assign(flops=extra["flops"], dtype=extra["dtype"], operator=extra["operator"],
                             bytes=size)
    told = len(autograd) > 0 and not (ranges["phase"] == "backward").any()
    if told and not (ranges["phase"] == "forward").any():
        phase = _forward_before_backward(table["step"].to_numpy(), phase, launch_start, known)
    table["phase"] = pd.Categorical(phase, [*PHASES, *sorted({*phase} - {*PHASES, OUTSIDE}), OUTSIDE])
    names = steps.drop_duplicates("step")["name"].astype(str).tolist()
    return Capture(records.path, table[~before].reset_index(drop=True), ranges.drop(columns="key"), names,
                   int(before.sum()), int(table.loc[before, "duration_ns"].sum()), gpus, rank, told)


def _forward_before_backward(step: np.ndarray, phase: np.ndarray, launch: np.ndarray,
                             known: np.ndarray) -> np.ndarray:
    """Where only autograd tells phases: what else a step launched before its last backward operation is
    forward."""
    back = pd.Series(launch[phase == "backward"]).groupby(step[phase == "backward"]).max()
    last = pd.Series(step).map(back).to_numpy(float)
    return np.where((phase == OUTSIDE) & known & (launch < last), "forward", phase)


def _before(operations: pd.DataFrame, process: np.ndarray, known: np.ndarray, launch: np.ndarray,
            steps: pd.DataFrame) -> np.ndarray:
    """Which operations were launched before the capture (their launch is not in it, and they begin before all
    that it saw launched), or before its first step."""
    before = np.zeros(len(operations), bool)
    for one in np.unique(process):
        own = process == one
        begin = operations["start_ns"].to_numpy()[own & known].min(initial=np.iinfo(np.int64).max)
        if (own & known).any():
            before |= own & ~known & (operations["start_ns"].to_numpy() < begin)
        first = steps.loc[steps["key"] & PROCESS == one, "start_ns"]
        if len(first):
            before |= own & known & (launch < first.min())
    return before


def _within(ranges: pd.DataFrame, process: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The place of the range that is open in the process at each time, on whatever thread; -1 for none. Of
    ranges that overlap the one that began first counts."""
    found = np.full(len(times), -1)
    for one in np.unique(process):
        rows = np.flatnonzero((ranges["key"].to_numpy() & PROCESS) == one)
        start, end = (ranges[column].to_numpy()[rows] for column in ("start_ns", "end_ns"))
        order = np.lexsort((-end, start))
        rows, start, end = rows[order], start[order], end[order]
        reached = np.maximum.accumulate(end) if len(end) else end
        outer = np.append(True, start[1:] >= reached[:-1])[:len(start)]
        rows, start, end = rows[outer], start[outer], end[outer]
        own = process == one
        at = np.searchsorted(start, times[own], side="right") - 1
        found[own] = np.where((at >= 0) & (times[own] < np.append(end, 0)[at]), np.append(rows, -1)[at], -1)
    return found


def _phase_names(path: str, ranges: pd.DataFrame, phases: Mapping[str, str] | None) -> np.ndarray:
    names = ranges["name"].cat.categories
    said = {plain_name(name): phase for name, phase in (phases or {}).items()}
    each = [said.get(plain_name(name)) or phase_of(name) or "" for name in names]
    if (lacking := set(said) - {plain_name(name) for name in names}):
        raise TraceError(f"{path}: no range is named {', '.join(sorted(lacking))}, expected one of"
                         f" {', '.join(named_ranges(ranges)) or 'none: the capture has no ranges'}")
    return np.append(np.array(each, object), "")[ranges["name"].cat.codes]


def _steps(path: str, ranges: pd.DataFrame, launches: np.ndarray, step: str | None) -> pd.DataFrame:
    """The ranges that are steps, with ``step``: their number in each process."""
    plain = ranges["name"].astype(object).map({name: plain_name(name)
                                               for name in ranges["name"].cat.categories})
    if step is not None:
        found = ranges[plain == plain_name(step)]
        if found.empty:
            raise TraceError(f"{path}: no range is named {step[:80]!r}, expected one of"
                             f" {', '.join(named_ranges(ranges)) or 'none: the capture has no ranges'}")
    else:
        own = matching(ranges["name"], PROFILER_STEP)
        found = ranges[own] if own.any() else _repeating(ranges, plain, launches)
    found = found.sort_values(["process", "start_ns"])
    reached = found.groupby("process")["end_ns"].cummax().groupby(found["process"]).shift()
    found = found[~(found["start_ns"] < reached)]  # one within another is no step of its own
    return found.assign(step=found.groupby("process").cumcount())


def _repeating(ranges: pd.DataFrame, plain: pd.Series, launches: np.ndarray) -> pd.DataFrame:
    """The ranges of one name that repeat and hold most of all launches, best with a word for a step in it."""
    best, score = ranges[:0], (False, 0.5)
    total = max(1, launches.shape[1])
    longest = (ranges["end_ns"] - ranges["start_ns"]).groupby(plain).sum().nlargest(CANDIDATES).index
    for name, own in ranges[plain.isin(longest)].groupby(plain):
        said = set(str(name).split())
        operator = OPERATOR_RANGE.search(str(own["name"].iloc[0]))
        if not 2 <= len(own) <= 10_000 or operator or phase_of(str(name)):
            continue
        if own["key"].nunique() > own["process"].nunique():
            continue  # on several threads of a process
        held = (_within(own, launches[0] & PROCESS, launches[2]) >= 0).sum() / total
        rank = (bool(said & STEP_WORDS) and held > 0.2, held)
        if rank > score:
            best, score = own, rank
    return best


def named_ranges(ranges: pd.DataFrame, most: int = 8) -> list[str]:
    """The names that ranges have, without numbers, those with the most time first, with how many there are.
    """
    if ranges.empty:
        return []
    rows = ranges[~matching(ranges["name"], OPERATOR_RANGE)]
    rows = rows.assign(plain=rows["name"].astype(str).map(plain_name),
                       time=rows["end_ns"] - rows["start_ns"])
    summed = rows.groupby("plain").agg(time=("time", "sum"), name=("name", "first"), count=("time", "size"))
    rows = summed.sort_values("time", ascending=False).head(most)
    return [f"{str(row.name_)[:60]!r} ({row.count_})" for row in rows.rename(
        columns={"name": "name_", "count": "count_"}).itertuples()]

