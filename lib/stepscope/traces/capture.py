"""Anybody's capture: nsys's or torch.profiler's, of a program whose ranges have names of its own.

Steps and phases are found by the names that people give ranges; what autograd's own ranges enclose is
backward. Operations that were launched before the capture, or before its first step, are left out and
counted.
"""
import gzip
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import (
    LATEST,
    NEVER,
    OUTSIDE,
    PROCESS,
    Records,
    TraceError,
    join_launches,
    matching,
)
from stepscope.traces.export import device_names, read_export
from stepscope.traces.nsys_program import export_capture, find_nsys
from stepscope.traces.torch_trace import OPERATOR, WORK, Trace, opened, ranges_of, read_trace, records_of

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
    steps: the name of each step. left_out, left_out_ns: what was launched before.
    gpus: names by id. rank: this one's, of how many. autograd: backward is told by autograd's ranges.
    """

    path: str
    operations: pd.DataFrame
    steps: list[str]
    left_out: int
    left_out_ns: int
    autograd: bool
    gpus: dict[int, str] = field(default_factory=dict)
    rank: tuple[int, int] | None = None


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
            trace = read_trace(file, SHAPED)
            found = _attributed(*_of_trace(str(path), trace), step, phases)
            found.gpus, found.rank = _header(trace.header)
            return found
        records = read_export(file, domains=None)
        records.path = str(path)
        records.operations[["flops", "dtype", "operator"]] = -1.0, "", -1
        autograd = records.ranges[matching(records.ranges["name"], AUTOGRAD.search)]  # by emit_nvtx
        found = _attributed(records, autograd, step, phases)
        found.gpus = device_names(file)
        return found


@contextmanager
def _readable(path: Path) -> Iterator[tuple[str, Path]]:
    """What a file is by its first bytes ("json", "sqlite"), and one that can be read: itself, or made from
    it."""
    with opened(path) as file:
        head, zipped = file.read(64), isinstance(file, gzip.GzipFile)
    is_export = head.startswith(b"SQLite format 3\0")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        yield "json", path
    elif is_export and not zipped:
        yield "sqlite", path
    elif is_export or path.suffix == ".nsys-rep":
        with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
            made = Path(folder, "capture.sqlite")
            (_unzip if is_export else _export)(path, made)
            try:
                yield "sqlite", made
            except TraceError as error:  # what is wrong with the one that was made
                raise TraceError(str(error).replace(str(made), str(path))) from None
    else:
        what = f"no capture: it begins with {head[:16]!r}" if head else "empty"
        raise TraceError(f"{path}: is {what}, expected nsys's .sqlite or .nsys-rep, or torch.profiler's"
                         " .json, also gzipped")


def _unzip(path: Path, made: Path) -> None:
    with opened(path) as file, made.open("wb") as out:
        shutil.copyfileobj(file, out)


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


def _of_trace(path: str, trace: Trace) -> tuple[Records, pd.DataFrame]:
    """A trace's records, and autograd's ranges."""
    events = trace.events
    operators, work = events[events["cat"] == OPERATOR], events[events["cat"].isin([*WORK])]
    if work.empty:
        only = f", only {len(operators):,} operators of the CPU" if len(operators) else ""
        raise TraceError(f"{path}: holds no GPU work{only},"
                         " expected a trace with kernels (activities=[..., ProfilerActivity.CUDA])")
    records, external = records_of(path, events, work)
    records.operations = _shaped(records.operations, trace, external)
    return records, ranges_of(operators[matching(operators["name"], AUTOGRAD.match)])


def _header(header: dict[str, Any]) -> tuple[dict[int, str], tuple[int, int] | None]:
    """What a trace says of the GPUs' names by id, and of its rank and their number."""
    devices, ranks = header.get("deviceProperties"), header.get("distributedInfo")
    gpus = {one["id"]: str(one.get("name")) for one in (devices if isinstance(devices, list) else ())
            if isinstance(one, dict) and isinstance(one.get("id"), int)}
    rank, size = (ranks.get(key) if isinstance(ranks, dict) else None for key in ("rank", "world_size"))
    return gpus, (rank, size) if isinstance(rank, int) and isinstance(size, int) else None


def _shaped(operations: pd.DataFrame, trace: Trace, external: np.ndarray) -> pd.DataFrame:
    """With FLOPs and dtype by the operator that made each operation, and the bytes of a generated kernel's
    arguments. Where one operator made several kernels, all are its first one's."""
    known = {key: _work(*operator) for key, operator in trace.operators.items()}
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
                phases: Mapping[str, str] | None) -> Capture:
    """Each operation in the step, phase and range that were open in its process when it was launched."""
    operations, process = records.operations, records.process
    join_launches(records)
    launch = operations["launch_start_ns"].to_numpy("int64", na_value=NEVER)
    ranges = _by_process(records.ranges)
    ranges["plain"] = _of_each(ranges["name"], plain_name)
    steps = _steps(records.path, ranges, records.launches, step)
    rest = ranges.drop(index=steps.index)
    rest["phase"] = _phase_names(records.path, rest, ranges, phases)
    own = rest[rest["phase"] != ""]
    others = rest[(rest["phase"] == "") & ~matching(rest["name"], OPERATOR_RANGE.search)]

    def at_launch(rows: pd.DataFrame, column: str, otherwise: Any) -> np.ndarray:
        return rows[column].reindex(_within(rows, process, launch), fill_value=otherwise).to_numpy()
    number, phase = at_launch(steps, "step", -1), at_launch(own, "phase", OUTSIDE)
    told = len(autograd) > 0 and not (own["phase"] == "backward").any()
    if told:
        back = _within(_by_process(autograd), process, launch) >= 0
        phase = np.where((phase == OUTSIDE) & back, "backward", phase)
    if told and not (own["phase"] == "forward").any():
        phase = _forward_before_backward(number, phase, launch)
    before = _before(operations["start_ns"], process, launch, steps)
    table = operations.assign(
        step=number, range=pd.Categorical(at_launch(others.astype({"name": str}), "name", "")),
        phase=pd.Categorical(phase, [*PHASE_NAMES, *sorted({*phase} - {*PHASE_NAMES, OUTSIDE}), OUTSIDE]))
    names = steps.drop_duplicates("step")["name"].astype(str).tolist()
    return Capture(records.path, table[~before].reset_index(drop=True), names, int(before.sum()),
                   int(table.loc[before, "duration_ns"].sum()), told)


def _by_process(ranges: pd.DataFrame) -> pd.DataFrame:
    """With the process's key, as operations have it."""
    return ranges.assign(process=ranges["key"] & PROCESS)


def _of_each(names: pd.Series, value: Callable[[str], str]) -> np.ndarray:
    """Some text of each name of a categorical column; of each distinct one it is made once."""
    return np.array([*map(value, names.cat.categories), ""], object)[names.cat.codes]


def _forward_before_backward(step: np.ndarray, phase: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Where only autograd tells phases: what else a step launched before its last backward operation is
    forward."""
    back = pd.Series(launch[phase == "backward"]).groupby(step[phase == "backward"]).max()
    return np.where((phase == OUTSIDE) & (launch < back.reindex(step, fill_value=-LATEST)), "forward", phase)


def _before(start: pd.Series, process: np.ndarray, launch: np.ndarray, steps: pd.DataFrame) -> np.ndarray:
    """Which operations were launched before the capture (their launch is not in it, and they begin before all
    that it saw launched), or before its first step."""
    seen = start.where(launch < NEVER, NEVER).groupby(process).transform("min").to_numpy()
    first = steps.groupby("process")["start_ns"].min().reindex(process, fill_value=-LATEST).to_numpy()
    return ((launch == NEVER) & (start < seen) & (seen < NEVER)).to_numpy() | (launch < first)


def _outermost(ranges: pd.DataFrame) -> pd.DataFrame:
    """Ranges by process and start, without those that begin within another of their process."""
    rows = ranges.sort_values(["process", "start_ns", "end_ns"], ascending=[True, True, False])
    reached = rows.groupby("process")["end_ns"].cummax().groupby(rows["process"]).shift(fill_value=-LATEST)
    return rows[rows["start_ns"] >= reached]


def _within(ranges: pd.DataFrame, process: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The index of the range that is open in the process at each time, on whatever thread; -1 for none. Of
    ranges that overlap the one that began first counts."""
    found = np.full(len(times), -1)
    for key, rows in _outermost(ranges).groupby("process"):
        own = process == key
        at = np.searchsorted(rows["start_ns"], times[own], side="right") - 1
        inside = (at >= 0) & (times[own] < rows["end_ns"].to_numpy()[at])
        found[own] = np.where(inside, rows.index.to_numpy()[at], -1)
    return found


def _phase_names(path: str, rows: pd.DataFrame, ranges: pd.DataFrame,
                 phases: Mapping[str, str] | None) -> np.ndarray:
    """The phase that each row's name says, or is said to say; "" for none."""
    said = {plain_name(name): phase for name, phase in (phases or {}).items()}
    if lacking := set(said) - {*ranges["plain"]}:
        raise _no_range(path, ", ".join(sorted(lacking)), ranges)
    return _of_each(rows["name"], lambda name: said.get(plain_name(name)) or phase_of(name) or "")


def _no_range(path: str, name: str, ranges: pd.DataFrame) -> TraceError:
    """That there is no such range; the names there are, those with the most time first."""
    rows = ranges[~matching(ranges["name"], OPERATOR_RANGE.search)]
    summed = rows.assign(time=rows["end_ns"] - rows["start_ns"]).groupby("plain").agg(
        time=("time", "sum"), name=("name", "first"), count=("time", "size")).nlargest(8, "time")
    known = ", ".join(f"{str(name)[:60]!r} ({count})" for name, count in zip(summed["name"], summed["count"]))
    return TraceError(f"{path}: no range is named {name}, expected one of"
                      f" {known or 'none: the capture has no ranges'}")


def _steps(path: str, ranges: pd.DataFrame, launches: np.ndarray, step: str | None) -> pd.DataFrame:
    """The ranges that are steps, with ``step``: their number in each process."""
    if step is not None:
        found = ranges[ranges["plain"] == plain_name(step)]
        if found.empty:
            raise _no_range(path, repr(step[:80]), ranges)
    else:
        own = matching(ranges["name"], PROFILER_STEP.search)
        found = ranges[own] if own.any() else _repeating(ranges, launches)
    found = _outermost(found)
    return found.assign(step=found.groupby("process").cumcount())


def _repeating(ranges: pd.DataFrame, launches: np.ndarray) -> pd.DataFrame:
    """The ranges of one name that repeat and hold most of all launches, best with a word for a step in it."""
    best, score = ranges[:0], (False, 0.5)
    total = max(1, launches.shape[1])
    lasted = (ranges["end_ns"] - ranges["start_ns"]).groupby(ranges["plain"]).sum()
    for name, own in ranges[ranges["plain"].isin(lasted.nlargest(CANDIDATES).index)].groupby("plain"):
        operator = OPERATOR_RANGE.search(str(own["name"].iloc[0]))
        several_threads = own["key"].nunique() > own["process"].nunique()
        if not 2 <= len(own) <= 10_000 or operator or several_threads or phase_of(str(name)):
            continue
        held = (_within(own, launches[0] & PROCESS, launches[2]) >= 0).sum() / total
        rank = (bool({*str(name).split()} & STEP_WORDS) and held > 0.2, held)
        if rank > score:
            best, score = own, rank
    return best
