"""Read a capture of any program, by nsys or torch.profiler, and attribute its operations.

Steps and phases follow from the names that people give ranges. What autograd's ranges enclose is backward,
and what made the nodes that it runs is forward. Operations that were launched before the capture, before its
first step or in a warm-up are left out and counted.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.captures.files import readable
from stepscope.captures.range_names import LIBRARY_RANGE, OPERATOR_RANGE, of_each, phase_of, plain_name
from stepscope.captures.reports import KERNELS, operations_of_report, read_report
from stepscope.captures.steps import find_steps, no_such_range
from stepscope.config import PHASE_NAMES
from stepscope.files import one_line
from stepscope.traces.attribution import (
    LATEST,
    NEVER,
    OUTSIDE,
    PROCESS,
    SHORT_NS,
    Records,
    TraceError,
    find_launches,
    join_launches,
    matching,
    open_range,
    outermost,
    thread_columns,
)
from stepscope.traces.export import (
    GRAPH_REPLAY,
    device_names,
    graph_launches,
    nccl_payloads,
    read_export,
    waiting_calls,
)
from stepscope.traces.torch_trace import (
    LAUNCHES,
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

GRAPH_LAUNCH = re.compile(r"GraphLaunch")
WHOLE_GRAPH = "CUDA graph"  # the category of one that was traced as a whole
SEQUENCE = re.compile(r", seq = (\d+)")
LEVELS = 4  # of ranges within ranges that are looked into
AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function")
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
        arguments; -1), flops (-1) and dtype of a matmul whose shapes are known (""), message_bytes (-1) and
        group_size (1) of a collective.
    before: operations that are left out: launched before the capture or its first step, or (warm_up) in a
        warm-up.
    ranges: of steps, by process and step: name, start_ns and end_ns on the host.
    host: what the host does that lasts: kind (call, operator, range, frame), name, process, thread, start_ns,
        end_ns; empty where the capture does not tell.
    gpus: names by id. rank: this one's, of how many. autograd: backward follows from autograd's ranges.
    shapes: operators' shapes were recorded. unseen_graphs: launches of CUDA graphs (process, start_ns) none
        of whose operations is in the capture. unfinished: host events without an end, which are left out.
    processes: what the capture calls each process, by number.
    """

    path: str
    operations: pd.DataFrame
    before: pd.DataFrame
    ranges: pd.DataFrame
    host: pd.DataFrame
    autograd: bool = False
    gpus: dict[int, str] = field(default_factory=dict)
    rank: tuple[int, int] | None = None
    shapes: bool = False
    unseen_graphs: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=["process", "start_ns"]))
    unfinished: int = 0
    processes: dict[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> list[str]:
        """The name of each step, of all processes together."""
        return self.ranges.drop_duplicates("step")["name"].tolist()

    @cached_property
    def step_names(self) -> set[str]:
        return set(self.ranges["name"])

    @property
    def left_out(self) -> int:
        return len(self.before)

    def between(self, from_ms: float | None, to_ms: float | None) -> "Capture":
        """Return the part of the capture that begins in a span of time, without steps that lie in it only
        partly.

        Args:
            from_ms, to_ms: after the capture's first operation; None is the beginning, or the end.

        Raises:
            TraceError: no operation begins in the span.
        """
        rows = pd.concat([self.before, self.operations])
        start, end = rows["start_ns"], rows["start_ns"] + rows["duration_ns"]
        first, last = int(start.min()), int(end.max())
        begin = first if from_ms is None else first + round(from_ms * 1e6)
        stop = last + 1 if to_ms is None else first + round(to_ms * 1e6)
        start = self.operations["start_ns"]
        inside = (start >= begin) & (start < stop)
        if not inside.any():
            raise TraceError(
                f"{self.path}: no operation begins between --from and --to, expected a span within the"
                f" {(last - first) / 1e6:g} ms of the capture"
            )
        step = ["process", "step"]
        cut = pd.MultiIndex.from_frame(self.operations.loc[~inside, step].drop_duplicates())
        operations = self.operations[inside].reset_index(drop=True)
        kept = ~pd.MultiIndex.from_frame(operations[step]).isin(cut)
        earlier = self.operations[start < begin].assign(warm_up=False)
        return replace(
            self,
            operations=operations.assign(step=operations["step"].where(kept, -1)),
            before=pd.concat([self.before, earlier], ignore_index=True),
            ranges=self.ranges[~pd.MultiIndex.from_frame(self.ranges[step]).isin(cut)],
        )


def load_capture(
    path: Path | str, step: str | None = None, phases: Mapping[str, str] | None = None
) -> Capture:
    """Read a capture: nsys's ``.sqlite`` or ``.nsys-rep`` where nsys is installed, torch.profiler's ``.json``
    from CUDA or ROCm, or nsys's report cuda_gpu_trace as ``.csv``; gzipped or not.

    Args:
        step: the name of the ranges that are steps, without their numbers; None finds them.
        phases: the phase that a range's name, or a pattern such as "*(F)", means; other ranges go by their
            names.

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
    """Read a capture as load_capture does, or nsys's report cuda_gpu_kern_sum as a table (see
    ``read_nsys_csv``)."""
    path = Path(path)
    with readable(path) as (kind, file):
        if kind == "json":
            trace = read_trace(file, SHAPED)
            records, autograd, host = _of_trace(str(path), trace)
            on_gpu = records.ranges.empty and len(trace.gpu_ranges) > 0 and len(trace.processes) <= 1
            if on_gpu:
                records.ranges = _ranges_on_gpu(records, trace)
            found = _attributed(records, autograd, host, step, phases, on_gpu)
            found.gpus = gpu_names(trace.header, found.operations["device"].unique())
            found.rank = _rank(trace.header)
            found.shapes, found.unfinished = trace.shapes, trace.unfinished
            found.processes = {key: one_line(name, 40) for key, name in trace.processes.items()}
            graphs = trace.events[matching(trace.events["name"], GRAPH_LAUNCH.search)]
            graphs = graphs[graphs["cat"].isin(LAUNCHES)]
            launch = (graphs[name].to_numpy() for name in ("key", "correlation", "start"))
            found.unseen_graphs = _unseen_graphs(records, *launch)
            return found
        if kind == "csv":
            table = read_report(file)
            return table if table.attrs["report"] == KERNELS else _of_report(path, table)
        records = read_export(file, domains=None, whole_graphs=True)
        records.path = str(path)
        records.operations[["flops", "dtype", "operator"]] = -1.0, "", -1
        _add_messages(records, nccl_payloads(file))
        _mark_whole_graphs(records.operations)
        host = pd.concat([_host_of_ranges(records.ranges), waiting_calls(file)], ignore_index=True)
        found = _attributed(records, _nvtx_of_autograd(records.ranges), host, step, phases)
        found.gpus = device_names(file)
        found.unseen_graphs = _unseen_graphs(records, *graph_launches(file))
        return found


def _ranges_on_gpu(records: Records, trace: Trace) -> pd.DataFrame:
    """Return the ranges that a trace has on its GPU alone, as ranges of Records."""
    rows = pd.DataFrame(trace.gpu_ranges, columns=["name", "start_ns", "end_ns"])
    key = np.full(len(rows), records.process[0])
    rows = rows.astype({"name": "category"}).assign(sequence=-1, **thread_columns(key))
    return rows.sort_values(["start_ns", "end_ns"], ascending=[True, False], ignore_index=True)


def _add_messages(records: Records, payloads: pd.DataFrame) -> None:
    """Add message_bytes (-1: unknown) and group_size to operations that were launched inside NCCL's ranges.

    NCCL counts the bytes per rank, so gathering and scattering have as many times that on their larger side as
    there are ranks. The ranks are taken to be the GPUs that communicate in this capture; where that is one
    GPU, the others are in captures of their own, and the sizes stay unknown.
    """
    operations = records.operations
    operations[["message_bytes", "group_size"]] = -1, 1
    is_collective = matching(operations["name"], lambda name: "nccl" in name.lower())
    if payloads.empty or not is_collective.any():
        return
    gpus = {*zip(records.process[is_collective], operations.loc[is_collective, "device"])}
    ranks = len(gpus)  # of each process, because each may call its own GPU the first
    if ranks < 2:
        return
    launch = find_launches(records.process, operations["correlation_id"].to_numpy(), records.launches)
    launched = np.flatnonzero(is_collective & (launch >= 0))
    calls = pd.DataFrame(
        {
            "row": launched,
            "key": records.launches[0][launch[launched]],
            "launch_ns": records.launches[2][launch[launched]],
        }
    )
    inside = pd.merge_asof(
        calls.sort_values("launch_ns"),
        payloads.sort_values("start_ns"),
        left_on="launch_ns",
        right_on="start_ns",
        by="key",
    )
    inside = inside[inside["launch_ns"] <= inside["end_ns"]]
    names = operations["name"].iloc[inside["row"]].astype(str)
    is_per_rank = names.str.contains("AllGather|ReduceScatter").to_numpy()
    sizes = inside["message_bytes"].to_numpy("int64") * np.where(is_per_rank, ranks, 1)
    columns = [operations.columns.get_loc(name) for name in ("message_bytes", "group_size")]
    operations.iloc[inside["row"].to_numpy(), columns[0]] = sizes
    operations.iloc[inside["row"].to_numpy(), columns[1]] = ranks


def _mark_whole_graphs(operations: pd.DataFrame) -> None:
    """Give CUDA graphs that were traced as a whole a category of their own."""
    is_graph = matching(operations["name"], lambda name: name.startswith(GRAPH_REPLAY))
    if is_graph.any():
        family = operations["family"].astype(str).mask(is_graph, WHOLE_GRAPH)
        operations["family"] = family.astype("category")


def _unseen_graphs(
    records: Records, key: np.ndarray, correlation: np.ndarray, start: np.ndarray
) -> pd.DataFrame:
    """Return the launches of CUDA graphs (process, start_ns) that left no operation in the capture.

    Args:
        key, correlation, start: of each launch of a graph, the thread's key, its id and its time.
    """
    process = key & PROCESS
    if not len(process):
        return pd.DataFrame({"process": process, "start_ns": start})
    seen = pd.MultiIndex.from_arrays([records.process, records.operations["correlation_id"]])
    unseen = ~pd.MultiIndex.from_arrays([process, correlation]).isin(seen)
    # operations without a launch may be a graph's whose records have no id
    unknown = (
        pd.Series(records.operations["launch_start_ns"].isna().to_numpy()).groupby(records.process).sum()
    )
    unseen &= pd.Series(unseen).groupby(process).transform("sum").to_numpy() > unknown.reindex(
        process, fill_value=0
    )
    return pd.DataFrame({"process": process[unseen] >> 24 & 0xFFFFFF, "start_ns": start[unseen]})


def _of_report(path: Path, table: pd.DataFrame) -> Capture:
    operations, gpus = operations_of_report(table)
    operations[["message_bytes", "group_size"]] = -1, 1
    ranges = pd.DataFrame(columns=["process", "step", "name", "start_ns", "end_ns"])
    host = pd.DataFrame(columns=["kind", "name", "process", "thread", "start_ns", "end_ns"])
    before = operations[:0].assign(warm_up=False)
    return Capture(str(path), operations, before, ranges, host, gpus=gpus)


@dataclass
class Autograd:
    """Autograd's ranges, and the operators that have a sequence number: the number of the node that the
    operator makes, which the node's range in backward has again. Both as ranges of Records with sequence."""

    backward: pd.DataFrame
    operators: pd.DataFrame


def _nvtx_of_autograd(ranges: pd.DataFrame) -> Autograd:
    """Pair emit_nvtx's ranges: "aten::addmm, seq = 7" makes what "autograd::engine::…, seq = 7" runs."""
    names = ranges["name"].cat.categories.to_series().astype(str)
    sequence = names.str.extract(SEQUENCE)[0].fillna("-1").astype("int64").to_numpy()
    rows = ranges.assign(sequence=np.append(sequence, -1)[ranges["name"].cat.codes])
    own = matching(ranges["name"], AUTOGRAD.search)
    return Autograd(rows[own], rows[~own & (rows["sequence"] >= 0)])


def _host_of_ranges(ranges: pd.DataFrame) -> pd.DataFrame:
    """Return the NVTX ranges that last, as events of the host; emit_nvtx's are operators."""
    rows = ranges[ranges["end_ns"] - ranges["start_ns"] >= SHORT_NS]
    kind = np.where(matching(rows["name"], OPERATOR_RANGE.search), "operator", "range")
    name = rows["name"].astype(str).str.replace(r", (op_id|seq|sizes) = .*", "", regex=True)
    return rows[["key", "start_ns", "end_ns"]].assign(kind=kind, name=name)


def _of_trace(path: str, trace: Trace) -> tuple[Records, Autograd, pd.DataFrame]:
    """Return a trace's records, its autograd ranges, and what its host does."""
    events = trace.events
    operators, work = events[events["cat"] == OPERATOR], events[events["cat"].isin([*WORK])]
    if work.empty:
        raise lacks_work(path, trace)
    records, external = records_of(path, events, work)
    records.operations = _shaped(records.operations, trace, external)
    rows = work.sort_values("start", kind="stable").index
    messages = pd.DataFrame.from_dict(trace.messages, "index", np.int64, ["message_bytes", "group_size"])
    messages = messages.reindex(rows).fillna({"message_bytes": -1, "group_size": 1}).astype(np.int64)
    records.operations[messages.columns] = messages.to_numpy()
    own = matching(operators["name"], AUTOGRAD.match)
    return (
        records,
        Autograd(ranges_of(operators[own]), ranges_of(operators[~own & (operators["sequence"] >= 0)])),
        host_of(events),
    )


def _rank(header: dict[str, Any]) -> tuple[int, int] | None:
    """Return a trace's rank and the number of ranks."""
    ranks = header.get("distributedInfo")
    rank, size = (ranks.get(key) if isinstance(ranks, dict) else None for key in ("rank", "world_size"))
    return (rank, size) if isinstance(rank, int) and isinstance(size, int) else None


def _shaped(operations: pd.DataFrame, trace: Trace, external: np.ndarray) -> pd.DataFrame:
    """Add FLOPs and dtype by the operator that made each operation, and the bytes of a generated kernel's
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
    """Return FLOPs (2 m n k a matmul) and dtype of a matmul, or the bytes of a generated kernel's tensors; -1
    where they are unknown."""
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


def _attributed(
    records: Records,
    autograd: Autograd,
    host: pd.DataFrame,
    step: str | None,
    phases: Mapping[str, str] | None,
    on_gpu: bool = False,
) -> Capture:
    """Attribute each operation to the step, phase and ranges that were open in its process when it was
    launched; or, where the ranges are those on the GPU, when it began."""
    operations, process = records.operations, records.process
    join_launches(records)
    launch = operations["launch_start_ns"].to_numpy("int64", na_value=NEVER)
    launch = operations["start_ns"].to_numpy("int64") if on_gpu else launch
    ranges = records.ranges.assign(plain=of_each(records.ranges["name"], plain_name))
    ranges["phase"] = _phase_names(records.path, ranges, phases)
    steps = find_steps(records.path, ranges, process, launch, step)
    others = ranges[~ranges.index.isin(steps.rows.index) | (ranges["phase"] != "")]
    phase_ranges = others[others["phase"] != ""]
    others = others[
        (others["phase"] == "")
        & ~matching(others["name"], OPERATOR_RANGE.search)
        & ~matching(others["name"], LIBRARY_RANGE.search)
    ].astype({"name": str})

    def at_launch(rows: pd.DataFrame, column: str, otherwise: Any) -> np.ndarray:
        return rows[column].reindex(open_range(rows, process, launch), fill_value=otherwise).to_numpy()

    number, phase = at_launch(steps.rows, "step", -1), at_launch(phase_ranges, "phase", OUTSIDE)
    by_autograd = len(autograd.backward) > 0 and not (phase_ranges["phase"] == "backward").any()
    if by_autograd:
        back = open_range(autograd.backward, process, launch) >= 0
        phase = np.where((phase == OUTSIDE) & back, "backward", phase)
    if by_autograd and not (phase_ranges["phase"] == "forward").any():
        made = _made_nodes(autograd, steps.rows, process, launch)
        phase = _forward(number, phase, launch, process, made)
    outer, inner = _nested_names(others, process, launch)
    other_phases = sorted({*phase} - {*PHASE_NAMES, OUTSIDE})
    table = operations.assign(
        step=number,
        range=pd.Categorical(outer),
        inner_range=pd.Categorical(inner),
        phase=pd.Categorical(phase, [*PHASE_NAMES, *other_phases, OUTSIDE]),
    )
    before = _before(operations["start_ns"], process, launch, steps.rows)
    in_warm_up = open_range(steps.warm_up, process, launch) >= 0
    left_out = before | in_warm_up
    key, host_key = (rows["key"].to_numpy("int64") for rows in (steps.rows, host))
    within = steps.rows[["step", "name", "start_ns", "end_ns"]].assign(process=key >> 24 & 0xFFFFFF)
    host = host.assign(process=host_key >> 24 & 0xFFFFFF, thread=host_key & 0xFFFFFF).drop(columns="key")
    return Capture(
        records.path,
        table[~left_out].reset_index(drop=True),
        table[left_out].assign(warm_up=in_warm_up[left_out]).reset_index(drop=True),
        within.astype({"name": str}).reset_index(drop=True),
        host,
        autograd=by_autograd,
    )


def _nested_names(
    ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the names of the outermost and of the innermost (of at most LEVELS) range around each launch; ""."""
    outer = inner = np.full(len(launch), "", object)
    for level in range(LEVELS):
        if ranges.empty:
            break
        names = ranges["name"].reindex(open_range(ranges, process, launch), fill_value="").to_numpy()
        outer = names if level == 0 else outer
        inner = np.where(names != "", names, inner)
        ranges = ranges.drop(index=outermost(ranges).index)
    return outer, inner


def _made_nodes(
    autograd: Autograd, steps: pd.DataFrame, process: np.ndarray, launch: np.ndarray
) -> np.ndarray:
    """Return which operations an operator launched whose node runs backward later in the same step."""
    operators, nodes = autograd.operators, autograd.backward
    operators = operators[~operators["key"].isin(nodes["key"])]  # what runs within a node is backward

    def keyed(rows: pd.DataFrame) -> pd.DataFrame:
        of_process = rows["key"].to_numpy("int64") & PROCESS
        within = open_range(steps, of_process, rows["start_ns"].to_numpy())
        return rows.assign(step=steps["step"].reindex(within, fill_value=-1).to_numpy())

    node = ["process", "step", "sequence"]
    last = keyed(nodes).groupby(node)["start_ns"].max()
    made = keyed(operators)
    node_ns = last.reindex(pd.MultiIndex.from_frame(made[node]), fill_value=-LATEST).to_numpy()
    return open_range(made[node_ns > made["end_ns"].to_numpy()], process, launch) >= 0


def _forward(
    step: np.ndarray, phase: np.ndarray, launch: np.ndarray, process: np.ndarray, made: np.ndarray
) -> np.ndarray:
    """Add forward where only autograd's ranges show phases: forward is what a step launches before its first
    backward operation; after that, only what made nodes of a later backward, and what lies between two such
    operations."""
    order = np.lexsort((launch, step, process))
    rows = pd.DataFrame(
        {
            "group": pd.DataFrame({"process": process, "step": step}).groupby(["process", "step"]).ngroup(),
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
    """Return which operations were launched before the capture (their launch is not in it, and they begin before
    all that it saw launched), or before its first step."""
    seen = start.where(launch < NEVER, NEVER).groupby(process).transform("min").to_numpy()
    of_process = steps["key"].to_numpy("int64") & PROCESS
    first = steps["start_ns"].groupby(of_process).min().reindex(process, fill_value=-LATEST).to_numpy()
    return ((launch == NEVER) & (start < seen) & (seen < NEVER)).to_numpy() | (launch < first)


def _phase_names(path: str, ranges: pd.DataFrame, phases: Mapping[str, str] | None) -> np.ndarray:
    """Return the phase that each range's name says, or that ``phases`` says it is; "" for none.

    Raises:
        TraceError: no range has a name of ``phases``.
    """
    asked = phases or {}
    known = ranges["name"].cat.categories if len(ranges) else []
    if lacking := [name for name in asked if not any(_is_named(each, name) for each in known)]:
        raise no_such_range(path, ", ".join(sorted(lacking)), ranges)

    def phase(name: str) -> str:
        given = (phase for each, phase in asked.items() if _is_named(name, each))
        return next(given, phase_of(name) or "")

    return of_each(ranges["name"], phase)


def _is_named(name: str, asked: str) -> bool:
    """Whether a range has a name, numbers and signs aside, or fits a pattern with "*" or "?"."""
    if set(asked) & set("*?"):
        return fnmatch.fnmatchcase(name, asked)
    return plain_name(name) == plain_name(asked)
