"""Anybody's capture: nsys's or torch.profiler's, of a program whose ranges have names of its own.

Steps and phases are found by the names that people give ranges; what autograd's own ranges enclose is
backward. Operations that were launched before the capture, or before its first step, are left out and
counted.
"""
import gzip
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import OUTSIDE, PROCESS, Records, TraceError, find_launches
from stepscope.traces.export import device_names, read_export
from stepscope.traces.nsys_program import export_capture, find_nsys
from stepscope.traces.torch_trace import (
    CATEGORIES,
    OPERATOR,
    RANGE,
    WORK,
    Events,
    ranges_of,
    read_trace,
    records_of,
)

OPERATOR_RANGE = re.compile(r", (op_id|seq) = \d+|^autograd::|^ProfilerStep")  # emit_nvtx's, and torch's own
AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function")
OPTIMIZER = re.compile(r"^Optimizer\.step#")
STEP_WORDS = {"step", "steps", "iter", "iteration", "batch"}
CANDIDATES = 50  # names of ranges, those with the most time, among which steps are looked for
PROFILER_STEP = re.compile(r"^ProfilerStep\s?#\d+$")
# What people call a phase, in any case; beside these words a name may have only those of FILL.
PHASE_WORDS = {word: phase for phase, words in {
    "forward": "forward fwd", "loss": "loss criterion", "backward": "backward bwd backprop",
    "optimizer": "optimizer optim opt adamw adam sgd"}.items() for word in words.split()}
FILL = {"pass", "step", "model", "the", "compute", "train", "training", "phase", "update", "calc", "run"}
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
            records, autograd, gpus, rank = _of_trace(str(path), read_trace(file, SHAPED))
        else:
            records, gpus, rank = read_export(file, domains=None), device_names(file), None
            records.path = str(path)
            records.operations[["flops", "dtype", "operator"]] = -1.0, "", -1
            autograd = records.ranges[matching(records.ranges["name"], AUTOGRAD)]  # by emit_nvtx
    return _attributed(records, autograd, step, phases, gpus, rank)


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
    is_export = head.startswith(b"SQLite format 3\0")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        yield "json", path
    elif path.suffix == ".nsys-rep" or (is_export and zipped):
        with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
            made = Path(folder, "capture.sqlite")
            (_unzip if zipped else _export)(path, made)
            try:
                yield "sqlite", made
            except TraceError as error:  # what is wrong with the one that was made
                raise TraceError(str(error).replace(str(made), str(path))) from None
    elif is_export:
        yield "sqlite", path
    else:
        what = f"no capture: it begins with {head[:16]!r}" if head else "empty"
        raise TraceError(f"{path}: is {what}, {wanted}")


def _unzip(path: Path, made: Path) -> None:
    try:
        with gzip.open(path, "rb") as file, made.open("wb") as out:
            shutil.copyfileobj(file, out)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be unzipped ({error}), expected a whole .sqlite.gz") from None


def _export(path: Path, made: Path) -> None:
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(f"{path}: is nsys's own report, and nsys is not installed here; expected its export:"
                         f" run 'nsys export --type sqlite {path.name}' where nsys is")
    try:
        export_capture(nsys, path, made)
    except (OSError, RuntimeError) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}, expected a report that nsys can"
                         " export") from None


def _of_trace(path: str, events: Events) -> tuple[Records, pd.DataFrame, dict[int, str],
                                                  tuple[int, int] | None]:
    """A trace's records, autograd's ranges, the GPUs' names by id, and the rank of how many."""
    cat = events.column("cat")
    operators, found = cat == CATEGORIES.index(OPERATOR), np.flatnonzero(cat < len(WORK))
    if not len(found):
        only = f", only {operators.sum():,} operators of the CPU" if operators.any() else ""
        raise TraceError(f"{path}: holds no GPU work{only},"
                         " expected a trace with kernels (activities=[..., ProfilerActivity.CUDA])")
    records, external = records_of(path, events, found, np.flatnonzero(cat == CATEGORIES.index(RANGE)))
    records.operations = _shaped(records.operations, events, external)
    own = np.array([bool(AUTOGRAD.match(text)) for text in events.names], bool)[events.column("name")]
    devices, ranks = events.header.get("deviceProperties"), events.header.get("distributedInfo")
    gpus = {one["id"]: str(one.get("name")) for one in (devices if isinstance(devices, list) else ())
            if isinstance(one, dict) and isinstance(one.get("id"), int)}
    rank, size = (ranks.get(key) if isinstance(ranks, dict) else None for key in ("rank", "world_size"))
    known = (rank, size) if isinstance(rank, int) and isinstance(size, int) else None
    return records, ranges_of(events, np.flatnonzero(operators & own)), gpus, known


def _shaped(operations: pd.DataFrame, events: Events, external: np.ndarray) -> pd.DataFrame:
    """With FLOPs and dtype by the operator that made each operation, and the bytes of a generated kernel's
    arguments. Where one operator made several kernels, all are its first one's."""
    known = {key: _work(*operator) for key, operator in events.operators.items()}
    ids, codes = np.unique(external, return_inverse=True)
    found = [known.get(key, (-1, "", -1)) for key in ids.tolist()]
    flops, dtype, size = (np.array(column)[codes] for column in zip(*found))
    return operations.assign(
        flops=flops.astype(float), dtype=dtype, operator=np.where((flops >= 0) | (size >= 0), external, -1),
        bytes=operations["bytes"].where(operations["bytes"] >= 0, size.astype(np.int64)))


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


def _attributed(records: Records, autograd: pd.DataFrame, step: str | None,
                phases: Mapping[str, str] | None, gpus: dict[int, str],
                rank: tuple[int, int] | None) -> Capture:
    operations, launches = records.operations, records.launches
    launch = find_launches(records.process, operations["correlation_id"].to_numpy(), launches)
    known = launch >= 0
    thread, _, launch_start, launch_end = (np.append(values, -1)[launch] for values in launches)

    def at_launch(rows: pd.DataFrame, values: Any, otherwise: Any) -> np.ndarray:
        """The value of the range that was open when each operation was launched."""
        place = np.where(known, _within(rows, records.process, launch_start), -1)
        return np.append(np.asarray(values, object), otherwise)[place]
    ranges = records.ranges.assign(role="region", phase="")
    steps = _steps(records.path, ranges, launches, step)
    ranges.loc[steps.index, "role"] = "step"
    ranges["phase"] = _phase_names(records.path, ranges, phases)
    ranges.loc[(ranges["phase"] != "") & (ranges["role"] != "step"), "role"] = "phase"
    own = ranges[ranges["role"] == "phase"]
    others = ranges[(ranges["role"] == "region") & ~matching(ranges["name"], OPERATOR_RANGE)]
    number = at_launch(steps, steps["step"], -1).astype(int)
    phase = at_launch(own, own["phase"], OUTSIDE)
    told = len(autograd) > 0 and not (ranges["phase"] == "backward").any()
    if told:
        back = at_launch(autograd, np.full(len(autograd), "backward"), OUTSIDE)
        phase = np.where(phase == OUTSIDE, back, phase)
    if told and not (ranges["phase"] == "forward").any():
        phase = _forward_before_backward(number, phase, launch_start, known)
    before = _before(operations, records.process, known, launch_start, steps)
    table = operations.assign(
        launch_start_ns=pd.arrays.IntegerArray(launch_start, ~known),
        launch_duration_ns=pd.arrays.IntegerArray(launch_end - launch_start, ~known),
        process=records.process >> 24 & 0xFFFFFF, thread=np.where(known, thread & 0xFFFFFF, -1),
        step=number, range=pd.Categorical(at_launch(others, others["name"].astype(str), "")),
        phase=pd.Categorical(phase, [*PHASE_NAMES, *sorted({*phase} - {*PHASE_NAMES, OUTSIDE}), OUTSIDE]))
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
    before, start = np.zeros(len(operations), bool), operations["start_ns"].to_numpy()
    for one in np.unique(process):
        own, seen = process == one, (process == one) & known
        if seen.any():
            before |= own & ~known & (start < start[seen].min())
        first = steps.loc[steps["key"] & PROCESS == one, "start_ns"].min()  # NaN: there is none
        before |= seen & (launch < first)
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
    if lacking := set(said) - {plain_name(name) for name in names}:
        raise _no_range(path, ", ".join(sorted(lacking)), ranges)
    each = [said.get(plain_name(name)) or phase_of(name) or "" for name in names]
    return np.append(np.array(each, object), "")[ranges["name"].cat.codes]


def _no_range(path: str, name: str, ranges: pd.DataFrame) -> TraceError:
    return TraceError(f"{path}: no range is named {name}, expected one of"
                      f" {', '.join(_named(ranges)) or 'none: the capture has no ranges'}")


def _steps(path: str, ranges: pd.DataFrame, launches: np.ndarray, step: str | None) -> pd.DataFrame:
    """The ranges that are steps, with ``step``: their number in each process."""
    plain = ranges["name"].astype(object).map({name: plain_name(name)
                                               for name in ranges["name"].cat.categories})
    if step is not None:
        found = ranges[plain == plain_name(step)]
        if found.empty:
            raise _no_range(path, repr(step[:80]), ranges)
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
        operator = OPERATOR_RANGE.search(str(own["name"].iloc[0]))
        several_threads = own["key"].nunique() > own["process"].nunique()
        if not 2 <= len(own) <= 10_000 or operator or several_threads or phase_of(str(name)):
            continue
        held = (_within(own, launches[0] & PROCESS, launches[2]) >= 0).sum() / total
        rank = (bool({*str(name).split()} & STEP_WORDS) and held > 0.2, held)
        if rank > score:
            best, score = own, rank
    return best


def _named(ranges: pd.DataFrame, most: int = 8) -> list[str]:
    """The names that ranges have, without numbers, those with the most time first, with how many there are.
    """
    rows = ranges[~matching(ranges["name"], OPERATOR_RANGE)]
    plain = rows["name"].astype(str).map(plain_name)
    summed = rows.assign(time=rows["end_ns"] - rows["start_ns"]).groupby(plain).agg(
        time=("time", "sum"), name=("name", "first"), count=("time", "size"))
    summed = summed.sort_values("time", ascending=False).head(most)
    return [f"{str(name)[:60]!r} ({count})" for name, count in zip(summed["name"], summed["count"])]
