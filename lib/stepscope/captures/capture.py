"""Anybody's capture: nsys's or torch.profiler's, of a program whose ranges have names of its own.

Steps and phases are found by the names that people give ranges; what autograd's own ranges enclose is
backward, and what made the nodes that it runs is forward. Operations that were launched before the capture,
or before its first step, are left out and counted.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.captures.files import readable
from stepscope.captures.reports import KERNELS, operations_of_report, read_report
from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import (
    LATEST,
    NEVER,
    OUTSIDE,
    PROCESS,
    SHORT_NS,
    Records,
    TraceError,
    join_launches,
    matching,
)
from stepscope.traces.export import device_names, read_export, waiting_calls
from stepscope.traces.torch_trace import (
    OPERATOR,
    WORK,
    Trace,
    gpu_names,
    host_of,
    lacks_work,
    ranges_of,
    read_trace,
    records_of,
)

OPERATOR_RANGE = re.compile(r", (op_id|seq) = \d+|^autograd::|^ProfilerStep")  # emit_nvtx's, and torch's own
LIBRARY_RANGE = re.compile(r"^(nccl|cuBLAS|cuDNN|cub::|thrust::|TRITON|c10d::)[A-Z:_]?|^## Call Compiled")
SEQUENCE = re.compile(r", seq = (\d+)")
SPLIT_PHASES = {"F": "forward", "B": "backward", "W": "backward"}  # pipelines': "attn(F)", "mlp(B)"
SPLIT_PHASE = re.compile(r"\((F|B|W)\)$")
LEVELS = 4  # of ranges within ranges that are looked into
AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function")
OPTIMIZER = re.compile(r"^Optimizer\.step#")
STEP_WORDS = {"step", "steps", "iter", "iteration", "batch"}
CANDIDATES = 50  # names of ranges, those with the most time, among which steps are looked for
PROFILER_STEP = re.compile(r"^ProfilerStep\s?#\d+$")
# What people call a phase, in any case; beside these words a name may have only those of FILL.
PHASE_WORDS = {
    word: phase
    for phase, words in {
        "forward": "forward fwd",
        "loss": "loss criterion",
        "backward": "backward bwd backprop",
        "optimizer": "optimizer optim opt adamw adam sgd",
    }.items()
    for word in words.split()
}
FILL = {"pass", "step", "model", "the", "compute", "train", "training", "phase", "update", "calc", "run"}
MATMULS = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_int_mm)$")
SHAPED = re.compile(rf"{MATMULS.pattern}|^triton_")
DTYPES = {
    "float": ("fp32", 4),
    "double": ("fp64", 8),
    "c10::BFloat16": ("bf16", 2),
    "c10::Half": ("fp16", 2),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "bool": ("bool", 1),
    "unsigned char": ("uint8", 1),
    "signed char": ("int8", 1),
}


@dataclass
class Capture:
    """A capture's GPU work.

    operations: a row an operation in order of start: kind (kernel, memcpy, memset), name, family, device,
        stream, start_ns, duration_ns, launch_start_ns and launch_duration_ns (NA: not in the capture), thread
        (-1), process, phase ("outside"), range (the outermost one that is no step, no phase and no library's;
        ""), inner_range (the innermost such), step (-1), bytes (of a copy or fill, or a generated kernel's
        arguments; -1), flops (-1) and dtype of a matmul whose shapes are known ("").
    steps: the name of each step. before: operations that were launched before the first one.
    ranges: of steps, by process and step: name, start_ns and end_ns on the host.
    host: what the host does that lasts: kind (call, operator, range, frame), name, process, thread, start_ns,
        end_ns; empty where the capture does not tell.
    gpus: names by id. rank: this one's, of how many. autograd: backward is told by autograd's ranges.
    shapes: operators' shapes were recorded.
    """

    path: str
    operations: pd.DataFrame
    steps: list[str]
    before: pd.DataFrame
    ranges: pd.DataFrame
    host: pd.DataFrame
    autograd: bool = False
    gpus: dict[int, str] = field(default_factory=dict)
    rank: tuple[int, int] | None = None
    shapes: bool = False

    @property
    def left_out(self) -> int:
        return len(self.before)


def load_capture(
    path: Path | str, step: str | None = None, phases: Mapping[str, str] | None = None
) -> Capture:
    """Read a capture: nsys's ``.sqlite`` or ``.nsys-rep`` where nsys is installed, torch.profiler's ``.json``
    from CUDA or ROCm, or nsys's report cuda_gpu_trace as ``.csv``; gzipped or not.

    Args:
        step: the name of the ranges that are steps, without their numbers; None finds them.
        phases: the phase that a range's name, or a pattern such as "*(F)", stands for; what is not among them
            goes by its name.

    Raises:
        TraceError: the file is none of these, is cut off, or has no GPU work; no range has the step's or a
            phase's name.
    """
    found = load_capture_or_sums(path, step, phases)
    if not isinstance(found, Capture):
        raise TraceError(
            f"{path}: is nsys's report {KERNELS}, which sums kernels, expected a capture with"
            " their times, such as its report cuda_gpu_trace"
        )
    return found


def load_capture_or_sums(
    path: Path | str, step: str | None = None, phases: Mapping[str, str] | None = None
) -> Capture | pd.DataFrame:
    """As load_capture; of nsys's report cuda_gpu_kern_sum its table (see ``read_nsys_csv``)."""
    path = Path(path)
    with readable(path) as (kind, file):
        if kind == "json":
            trace = read_trace(file, SHAPED)
            found = _attributed(*_of_trace(str(path), trace), step, phases)
            found.gpus = gpu_names(trace.header, found.operations["device"].unique())
            found.rank = _rank(trace.header)
            found.shapes = trace.shapes
            return found
        if kind == "csv":
            table = read_report(file)
            return table if table.attrs["report"] == KERNELS else _of_report(path, table)
        records = read_export(file, domains=None, whole_graphs=True)
        records.path = str(path)
        records.operations[["flops", "dtype", "operator"]] = -1.0, "", -1
        host = pd.concat([_host_of_ranges(records.ranges), waiting_calls(file)], ignore_index=True)
        found = _attributed(records, _nvtx_of_autograd(records.ranges), host, step, phases)
        found.gpus = device_names(file)
        return found


def _of_report(path: Path, table: pd.DataFrame) -> Capture:
    operations, gpus = operations_of_report(table)
    ranges = pd.DataFrame(columns=["process", "step", "name", "start_ns", "end_ns"])
    host = pd.DataFrame(columns=["kind", "name", "process", "thread", "start_ns", "end_ns"])
    return Capture(str(path), operations, [], operations[:0], ranges, host, gpus=gpus)


@dataclass
class Autograd:
    """Autograd's ranges, and the operators that have a sequence number: the number of the node that the
    operator makes, which the node's range in backward has again. Both as ranges of Records with sequence."""

    backward: pd.DataFrame
    operators: pd.DataFrame


def _nvtx_of_autograd(ranges: pd.DataFrame) -> Autograd:
    """What emit_nvtx's ranges tell: "aten::addmm, seq = 7" makes what "autograd::engine::…, seq = 7" runs."""
    names = ranges["name"].cat.categories.to_series().astype(str)
    sequence = names.str.extract(SEQUENCE)[0].fillna("-1").astype("int64").to_numpy()
    rows = ranges.assign(sequence=np.append(sequence, -1)[ranges["name"].cat.codes])
    own = matching(ranges["name"], AUTOGRAD.search)
    return Autograd(rows[own], rows[~own & (rows["sequence"] >= 0)])


def _host_of_ranges(ranges: pd.DataFrame) -> pd.DataFrame:
    """NVTX ranges that last, as what the host does; emit_nvtx's are operators."""
    rows = ranges[ranges["end_ns"] - ranges["start_ns"] >= SHORT_NS]
    kind = np.where(matching(rows["name"], OPERATOR_RANGE.search), "operator", "range")
    name = rows["name"].astype(str).str.replace(r", (op_id|seq|sizes) = .*", "", regex=True)
    return rows[["key", "start_ns", "end_ns"]].assign(kind=kind, name=name)


def _of_trace(path: str, trace: Trace) -> tuple[Records, Autograd, pd.DataFrame]:
    """A trace's records, what autograd's ranges tell, and what its host does."""
    events = trace.events
    operators, work = events[events["cat"] == OPERATOR], events[events["cat"].isin([*WORK])]
    if work.empty:
        raise lacks_work(path, trace)
    records, external = records_of(path, events, work)
    records.operations = _shaped(records.operations, trace, external)
    own = matching(operators["name"], AUTOGRAD.match)
    return (
        records,
        Autograd(ranges_of(operators[own]), ranges_of(operators[~own & (operators["sequence"] >= 0)])),
        host_of(events),
    )


def _rank(header: dict[str, Any]) -> tuple[int, int] | None:
    """A trace's rank and the number of ranks."""
    ranks = header.get("distributedInfo")
    rank, size = (ranks.get(key) if isinstance(ranks, dict) else None for key in ("rank", "world_size"))
    return (rank, size) if isinstance(rank, int) and isinstance(size, int) else None


def _shaped(operations: pd.DataFrame, trace: Trace, external: np.ndarray) -> pd.DataFrame:
    """With FLOPs and dtype by the operator that made each operation, and the bytes of a generated kernel's
    arguments. Where one operator made several kernels, all are its first one's."""
    known = {key: _work(*operator) for key, operator in trace.operators.items()}
    ids, codes = np.unique(external, return_inverse=True)
    found = [known.get(key, (-1, "", -1)) for key in ids.tolist()]
    flops, dtype, size = (np.array(column)[codes] for column in zip(*found))
    return operations.assign(
        flops=flops.astype(float),
        dtype=dtype,
        operator=np.where((flops >= 0) | (size >= 0), external, -1),
        bytes=operations["bytes"].where(operations["bytes"] >= 0, size.astype(np.int64)),
    )


def _work(name: str, shapes: Any, types: Any) -> tuple[float, str, int]:
    """FLOPs (2 m n k a matmul) and dtype of a matmul, or the bytes of a generated kernel's tensors; -1: not
    told."""
    try:
        tensors = [
            (shape, DTYPES.get(kind, ("fp8" if "Float8" in kind else kind, 1)))
            for shape, kind in zip(shapes, types)
            if shape and kind not in ("Scalar", "ScalarList", "")
        ]
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
    """The phase that a range's name says, in any case and spelling: "## Forward pass ##" and "attn(F)" are
    forward."""
    if OPTIMIZER.match(name):
        return "optimizer"
    if split := SPLIT_PHASE.search(name):
        return SPLIT_PHASES[split[1]]
    said = plain_name(name).split()
    found = {PHASE_WORDS[word] for word in said if word in PHASE_WORDS}
    whole = set(said) <= {*PHASE_WORDS, *FILL} and "#" not in name.strip("# ")
    return found.pop() if whole and len(found) == 1 else None


def _attributed(
    records: Records,
    autograd: Autograd,
    host: pd.DataFrame,
    step: str | None,
    phases: Mapping[str, str] | None,
) -> Capture:
    """Each operation in the step, phase and ranges that were open in its process when it was launched."""
    operations, process = records.operations, records.process
    join_launches(records)
    launch = operations["launch_start_ns"].to_numpy("int64", na_value=NEVER)
    ranges = _by_process(records.ranges)
    ranges["plain"] = _of_each(ranges["name"], plain_name)
    steps = _steps(records.path, ranges, records.launches, step)
    others = ranges.drop(index=steps.index)
    others["phase"] = _phase_names(records.path, others, ranges, phases)
    own = others[others["phase"] != ""]
    others = others[
        (others["phase"] == "")
        & ~matching(others["name"], OPERATOR_RANGE.search)
        & ~matching(others["name"], LIBRARY_RANGE.search)
    ].astype({"name": str})

    def at_launch(rows: pd.DataFrame, column: str, otherwise: Any) -> np.ndarray:
        return rows[column].reindex(_within(rows, process, launch), fill_value=otherwise).to_numpy()

    number, phase = at_launch(steps, "step", -1), at_launch(own, "phase", OUTSIDE)
    told = len(autograd.backward) > 0 and not (own["phase"] == "backward").any()
    if told:
        back = _within(_by_process(autograd.backward), process, launch) >= 0
        phase = np.where((phase == OUTSIDE) & back, "backward", phase)
    if told and not (own["phase"] == "forward").any():
        made = _made_nodes(autograd, steps, process, launch)
        phase = _forward(number, phase, launch, process, made)
    before = _before(operations["start_ns"], process, launch, steps)
    outer, inner = _nested_names(others, process, launch)
    table = operations.assign(
        step=number,
        range=pd.Categorical(outer),
        inner_range=pd.Categorical(inner),
        phase=pd.Categorical(phase, [*PHASE_NAMES, *sorted({*phase} - {*PHASE_NAMES, OUTSIDE}), OUTSIDE]),
    )
    names = steps.drop_duplicates("step")["name"].astype(str).tolist()
    key, host_key = (rows["key"].to_numpy("int64") for rows in (steps, host))
    within = steps[["step", "name", "start_ns", "end_ns"]].assign(process=key >> 24 & 0xFFFFFF)
    host = host.assign(process=host_key >> 24 & 0xFFFFFF, thread=host_key & 0xFFFFFF).drop(columns="key")
    return Capture(
        records.path,
        table[~before].reset_index(drop=True),
        names,
        table[before].reset_index(drop=True),
        within.reset_index(drop=True),
        host,
        told,
    )


def _nested_names(
    ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The names of the outermost and of the innermost (of at most LEVELS) range around each launch; ""."""
    outer = inner = np.full(len(launch), "", object)
    for level in range(LEVELS):
        if ranges.empty:
            break
        names = ranges["name"].reindex(_within(ranges, process, launch), fill_value="").to_numpy()
        outer = names if level == 0 else outer
        inner = np.where(names != "", names, inner)
        ranges = ranges.drop(index=_outermost(ranges).index)
    return outer, inner


def _by_process(ranges: pd.DataFrame) -> pd.DataFrame:
    """With the process's key, as operations have it."""
    return ranges.assign(process=ranges["key"] & PROCESS)


def _of_each(names: pd.Series, value: Callable[[str], str]) -> np.ndarray:
    """Some text of each name of a categorical column; of each distinct one it is made once."""
    return np.array([*map(value, names.cat.categories), ""], object)[names.cat.codes]


def _made_nodes(
    autograd: Autograd, steps: pd.DataFrame, process: np.ndarray, launch: np.ndarray
) -> np.ndarray:
    """Which operations an operator launched whose node runs backward later in the same step."""
    operators, nodes = _by_process(autograd.operators), _by_process(autograd.backward)
    operators = operators[~operators["key"].isin(nodes["key"])]  # what runs within a node is backward

    def keyed(rows: pd.DataFrame) -> pd.DataFrame:
        within = _within(steps, rows["process"].to_numpy(), rows["start_ns"].to_numpy())
        return rows.assign(step=steps["step"].reindex(within, fill_value=-1).to_numpy())

    last = keyed(nodes).groupby(["process", "step", "sequence"])["start_ns"].max().rename("node_ns")
    found = keyed(operators).join(last, on=["process", "step", "sequence"])
    return _within(found[found["node_ns"] > found["end_ns"]], process, launch) >= 0


def _forward(
    step: np.ndarray, phase: np.ndarray, launch: np.ndarray, process: np.ndarray, made: np.ndarray
) -> np.ndarray:
    """Where only autograd tells phases: forward is what a step launches before its first backward operation;
    after that only what made nodes of a later backward, and what lies between two such."""
    order = np.lexsort((launch, step, process))
    rows = pd.DataFrame(
        {
            "group": pd.factorize(pd.Series(process * 1_000_003 + step))[0],
            "mark": np.where(
                phase == "backward", "backward", np.where((phase == OUTSIDE) & made, "forward", None)
            ),
            "phase": phase,
        }
    )[["group", "mark", "phase"]].iloc[order]
    groups = rows.groupby("group")["mark"]
    earlier, later = groups.ffill(), groups.bfill()
    ahead = later.notna() & (earlier.isna() | (earlier == "forward"))
    inside = (rows["phase"] == OUTSIDE) & (launch[order] < NEVER) & ahead
    phase = phase.copy()
    phase[order[inside.to_numpy()]] = "forward"
    return phase


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


def _phase_names(
    path: str, rows: pd.DataFrame, ranges: pd.DataFrame, phases: Mapping[str, str] | None
) -> np.ndarray:
    """The phase that each row's name says, or is said to say; "" for none."""
    said = phases or {}
    known = ranges["name"].cat.categories if len(ranges) else []
    if lacking := [asked for asked in said if not any(_is_named(name, asked) for name in known)]:
        raise _no_range(path, ", ".join(sorted(lacking)), ranges)
    return _of_each(
        rows["name"],
        lambda name: next(
            (phase for asked, phase in said.items() if _is_named(name, asked)), phase_of(name) or ""
        ),
    )


def _is_named(name: str, asked: str) -> bool:
    """Whether a range has a name, numbers and signs aside, or fits a pattern with "*" or "?"."""
    if set(asked) & set("*?"):
        return fnmatch.fnmatchcase(name, asked)
    return plain_name(name) == plain_name(asked)


def _no_range(path: str, name: str, ranges: pd.DataFrame) -> TraceError:
    """That there is no such range; the names there are, those with the most time first."""
    rows = ranges[~matching(ranges["name"], OPERATOR_RANGE.search)]
    summed = (
        rows.assign(time=rows["end_ns"] - rows["start_ns"])
        .groupby("plain")
        .agg(time=("time", "sum"), name=("name", "first"), count=("time", "size"))
        .nlargest(8, "time")
    )
    known = ", ".join(f"{str(name)[:60]!r} ({count})" for name, count in zip(summed["name"], summed["count"]))
    return TraceError(
        f"{path}: no range is named {name}, expected one of {known or 'none: the capture has no ranges'}"
    )


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
        share = (_within(own, launches[0] & PROCESS, launches[2]) >= 0).sum() / total
        rank = (bool({*str(name).split()} & STEP_WORDS) and share > 0.2, share)
        if rank > score:
            best, score = own, rank
    return best
