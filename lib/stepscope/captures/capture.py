"""Read a capture of any program, from nsys or torch.profiler, and assign its operations to steps and phases.

The names of ranges determine the steps and phases. If no name denotes the backward or forward phase, autograd's
ranges mark the backward phase, and the operators that created autograd's nodes mark the forward phase. Operations
that were launched before the capture, before the capture's first step, or in a warm-up are excluded, but counted.
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

from stepscope.captures.files import readable_capture
from stepscope.captures.range_names import LIBRARY_RANGE, OPERATOR_RANGE, map_categories, phase_of, plain_name
from stepscope.captures.reports import KERNEL_REPORT, operations_of_report, read_report
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
    build_ranges,
    build_records,
    cpu_work,
    gpu_names,
    host_events,
    no_work_error,
    read_trace,
)

GRAPH_LAUNCH = re.compile(r"GraphLaunch")
WHOLE_GRAPH = "CUDA graph"  # the category of CUDA graphs that were traced as a whole
SEQUENCE_NUMBER = re.compile(r", seq = (\d+)")
MAX_RANGE_DEPTH = 4  # maximum number of levels of nested ranges that we consider
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
    """A capture's GPU operations, steps and host events.

    Attributes:
        operations: a row per operation, ordered by start. The columns, with their values for "none" or
            "unknown" in parentheses, are kind (kernel, memcpy, memset), name, kernel_category, device, stream,
            start_ns, duration_ns, launch_start_ns and launch_duration_ns (NA), thread (-1), process, phase
            ("outside"), range (the outermost range that isn't a step, a phase or a library's range; ""),
            inner_range (the innermost such range; ""), step (-1), bytes (of a copy, a fill or a generated
            kernel's arguments; -1), flops (-1) and dtype ("") of a matmul, and message_bytes (-1), group_size
            (1) and communicator ("") of a collective.
        excluded: operations launched before the capture, before the capture's first step, or in a warm-up. The
            column warm_up marks operations in a warm-up.
        ranges: the ranges of the steps on the host, with the columns process, step, name, start_ns and end_ns.
        host: long host events, with the columns kind (call, operator, range, frame), name, process, thread,
            start_ns and end_ns; empty if the capture contains none.
        autograd: whether autograd's ranges determine the backward phase.
        gpus: the names of the GPUs, keyed by id.
        rank: the process's rank and the number of ranks; None if unknown.
        base_ns: the zero point of the capture's times, in ns since 1970; 0 if unknown.
        shapes: whether the shapes of the operators' inputs were recorded.
        untraced_graphs: the launches (process, start_ns) of CUDA graphs whose operations are missing from the
            capture.
        unfinished: the number of host events that were dropped because they have no end.
        processes: the names of the processes in the capture, keyed by process number.
    """

    path: str
    operations: pd.DataFrame
    excluded: pd.DataFrame
    ranges: pd.DataFrame
    host: pd.DataFrame
    autograd: bool = False
    gpus: dict[int, str] = field(default_factory=dict)
    rank: tuple[int, int] | None = None
    base_ns: int = 0
    shapes: bool = False
    untraced_graphs: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(columns=["process", "start_ns"])
    )
    unfinished: int = 0
    processes: dict[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> list[str]:
        """The name of each step, in order, taken from the first process that ran the step."""
        return self.ranges.drop_duplicates("step")["name"].tolist()

    @cached_property
    def step_names(self) -> set[str]:
        return set(self.ranges["name"])

    def between(self, from_ms: float | None, to_ms: float | None) -> "Capture":
        """Return a time span of a capture: the operations that start in it, and the steps entirely within it.

        Args:
            from_ms, to_ms: the start and the end of the time span, in ms after the start of the first operation.
                None stands for the start or the end of the capture.

        Raises:
            TraceError: If no operation starts in the time span.
        """
        rows = pd.concat([self.excluded, self.operations])
        start, end = rows["start_ns"], rows["start_ns"] + rows["duration_ns"]
        first, last = int(start.min()), int(end.max())
        begin = first if from_ms is None else first + round(from_ms * 1e6)
        stop = last + 1 if to_ms is None else first + round(to_ms * 1e6)
        start = self.operations["start_ns"]
        is_inside = (start >= begin) & (start < stop)
        if not is_inside.any():
            raise TraceError(
                f"{self.path}: no operation starts between --from and --to; expected a time span within the"
                f" {(last - first) / 1e6:g} ms of the capture"
            )
        step_columns = ["process", "step"]
        cut_steps = pd.MultiIndex.from_frame(self.operations.loc[~is_inside, step_columns].drop_duplicates())
        operations = self.operations[is_inside].reset_index(drop=True)
        is_complete = ~pd.MultiIndex.from_frame(operations[step_columns]).isin(cut_steps)
        earlier = self.operations[start < begin].assign(warm_up=False)
        return replace(
            self,
            operations=operations.assign(step=operations["step"].where(is_complete, -1)),
            excluded=pd.concat([self.excluded, earlier], ignore_index=True),
            ranges=self.ranges[~pd.MultiIndex.from_frame(self.ranges[step_columns]).isin(cut_steps)],
        )


def load_capture(
    path: Path | str,
    step: str | None = None,
    phases: Mapping[str, str] | None = None,
    on_cpu: bool = False,
) -> Capture:
    """Read a capture file, which may be gzipped.

    The file may come from nsys (``.sqlite``; ``.nsys-rep`` if nsys is installed; or the report cuda_gpu_trace as
    ``.csv``), or from torch.profiler (``.json``) on CUDA, ROCm or XPU.

    Args:
        step: the name of the step ranges, without numbers; None to detect the name.
        phases: a dict that maps names of ranges, or patterns such as "*(F)", to phases. All other ranges get the
            phases that their own names denote.
        on_cpu: whether to read the CPU's operators and gloo's collectives if a trace contains no GPU work.

    Raises:
        TraceError: If the file isn't in one of these formats, is truncated or contains no GPU work, or if no range
            matches the name of the step or of a phase.
    """
    capture = load_capture_or_sums(path, step, phases, on_cpu)
    if not isinstance(capture, Capture):
        raise TraceError(
            f"{path}: this is the nsys report {KERNEL_REPORT}, which contains only the total time of each kernel;"
            " expected a capture with the time of every launch, such as the report cuda_gpu_trace"
        )
    return capture


def load_capture_or_sums(
    path: Path | str,
    step: str | None = None,
    phases: Mapping[str, str] | None = None,
    on_cpu: bool = False,
) -> Capture | pd.DataFrame:
    """Read a capture as ``load_capture`` does; if the file is a cuda_gpu_kern_sum report, return its table."""
    path = Path(path)
    with readable_capture(path) as (kind, file):
        if kind == "json":
            trace = read_trace(file, SHAPED)
            records, autograd, host = _records_of_trace(str(path), trace, on_cpu)
            uses_gpu_ranges = records.ranges.empty and len(trace.gpu_ranges) > 0 and len(trace.processes) <= 1
            if uses_gpu_ranges:
                records.ranges = _gpu_ranges(records, trace)
            capture = _attribute(records, autograd, host, step, phases, uses_gpu_ranges)
            capture.gpus = gpu_names(trace.header, capture.operations["device"].unique())
            capture.rank = _rank_of_trace(trace.header)
            base_ns = trace.header.get("baseTimeNanoseconds")
            capture.base_ns = base_ns if type(base_ns) is int and 0 <= base_ns < LATEST else 0
            capture.shapes, capture.unfinished = trace.shapes, trace.unfinished
            capture.processes = {key: one_line(name, 40) for key, name in trace.processes.items()}
            graphs = trace.events[matching(trace.events["name"], GRAPH_LAUNCH.search)]
            graphs = graphs[graphs["cat"].isin(LAUNCHES)]
            columns = (graphs[name].to_numpy() for name in ("key", "correlation", "start"))
            capture.untraced_graphs = _untraced_graphs(records, *columns)
            return capture
        if kind == "csv":
            table = read_report(file)
            return table if table.attrs["report"] == KERNEL_REPORT else _capture_of_report(path, table)
        records = read_export(file, domains=None, whole_graphs=True)
        records.path = str(path)
        records.operations[["flops", "dtype", "operator"]] = -1.0, "", -1
        _add_messages(records, nccl_payloads(file))
        _mark_whole_graphs(records.operations)
        host = pd.concat([_host_events_from_ranges(records.ranges), waiting_calls(file)], ignore_index=True)
        capture = _attribute(records, _autograd_from_nvtx(records.ranges), host, step, phases)
        capture.gpus = device_names(file)
        capture.untraced_graphs = _untraced_graphs(records, *graph_launches(file))
        return capture


def _gpu_ranges(records: Records, trace: Trace) -> pd.DataFrame:
    """Return the ranges that a trace contains only on the GPU's timeline, in the format of ``Records.ranges``."""
    rows = pd.DataFrame(trace.gpu_ranges, columns=["name", "start_ns", "end_ns"])
    key = np.full(len(rows), records.process[0])
    rows = rows.astype({"name": "category"}).assign(sequence=-1, **thread_columns(key))
    return rows.sort_values(["start_ns", "end_ns"], ascending=[True, False], ignore_index=True)


def _add_messages(records: Records, payloads: pd.DataFrame) -> None:
    """Add message_bytes (-1 if unknown), group_size and communicator to operations launched within NCCL's ranges.

    For an all-gather or reduce-scatter, NCCL reports the bytes per rank. We multiply them by the number of
    ranks to obtain the size of the input or output, whichever is larger. We assume that the GPUs that
    communicate in this capture are all of the ranks. If only one GPU communicates, the other ranks were
    captured separately, and the sizes stay unknown.
    """
    operations = records.operations
    operations[["message_bytes", "group_size", "communicator"]] = -1, 1, ""
    is_collective = matching(operations["name"], lambda name: "nccl" in name.lower())
    if payloads.empty or not is_collective.any():
        return
    gpus = {*zip(records.process[is_collective], operations.loc[is_collective, "device"])}
    ranks = len(gpus)  # counted per process, because every process may number its GPU 0
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
    values = {"message_bytes": sizes, "group_size": ranks, "communicator": inside["communicator"].to_numpy()}
    for name, value in values.items():
        operations.iloc[inside["row"].to_numpy(), operations.columns.get_loc(name)] = value


def _mark_whole_graphs(operations: pd.DataFrame) -> None:
    """Assign CUDA graphs that were traced as a whole to a separate category."""
    is_graph = matching(operations["name"], lambda name: name.startswith(GRAPH_REPLAY))
    if is_graph.any():
        family = operations["kernel_category"].astype(str).mask(is_graph, WHOLE_GRAPH)
        operations["kernel_category"] = family.astype("category")


def _untraced_graphs(
    records: Records, key: np.ndarray, correlation: np.ndarray, start: np.ndarray
) -> pd.DataFrame:
    """Return the launches (process, start_ns) of CUDA graphs whose operations are missing from the capture.

    Args:
        key, correlation, start: the thread key, the correlation id and the start in ns of each graph launch.
    """
    process = key & PROCESS
    if not len(process):
        return pd.DataFrame({"process": process, "start_ns": start})
    traced = pd.MultiIndex.from_arrays([records.process, records.operations["correlation_id"]])
    is_untraced = ~pd.MultiIndex.from_arrays([process, correlation]).isin(traced)
    # an operation without a known launch may belong to a graph, if its record omits the correlation id
    without_launch = (
        pd.Series(records.operations["launch_start_ns"].isna().to_numpy()).groupby(records.process).sum()
    )
    is_untraced &= pd.Series(is_untraced).groupby(process).transform(
        "sum"
    ).to_numpy() > without_launch.reindex(process, fill_value=0)
    return pd.DataFrame({"process": process[is_untraced] >> 24 & 0xFFFFFF, "start_ns": start[is_untraced]})


def _capture_of_report(path: Path, table: pd.DataFrame) -> Capture:
    operations, gpus = operations_of_report(table)
    operations[["message_bytes", "group_size", "communicator"]] = -1, 1, ""
    ranges = pd.DataFrame(columns=["process", "step", "name", "start_ns", "end_ns"])
    host = pd.DataFrame(columns=["kind", "name", "process", "thread", "start_ns", "end_ns"])
    excluded = operations[:0].assign(warm_up=False)
    return Capture(str(path), operations, excluded, ranges, host, gpus=gpus)


@dataclass
class Autograd:
    """Autograd's ranges in the backward pass, and the operators that created autograd's nodes.

    Both tables have the columns of ``Records.ranges``, and the column ``sequence``. If an operator created a node,
    the operator has the same sequence number as the node's range in the backward pass.
    """

    backward: pd.DataFrame
    operators: pd.DataFrame


def _autograd_from_nvtx(ranges: pd.DataFrame) -> Autograd:
    """Read autograd's ranges and operators, with their sequence numbers, from the ranges of emit_nvtx.

    For example, the operator "aten::addmm, seq = 7" creates the node that "autograd::engine::…, seq = 7" runs.
    """
    names = ranges["name"].cat.categories.to_series().astype(str)
    sequence = names.str.extract(SEQUENCE_NUMBER)[0].fillna("-1").astype("int64").to_numpy()
    rows = ranges.assign(sequence=np.append(sequence, -1)[ranges["name"].cat.codes])
    is_node = matching(ranges["name"], AUTOGRAD.search)
    return Autograd(rows[is_node], rows[~is_node & (rows["sequence"] >= 0)])


def _host_events_from_ranges(ranges: pd.DataFrame) -> pd.DataFrame:
    """Return long NVTX ranges as host events. The ranges of emit_nvtx become operators."""
    rows = ranges[ranges["end_ns"] - ranges["start_ns"] >= SHORT_NS]
    kind = np.where(matching(rows["name"], OPERATOR_RANGE.search), "operator", "range")
    name = rows["name"].astype(str).str.replace(r", (op_id|seq|sizes) = .*", "", regex=True)
    return rows[["key", "start_ns", "end_ns"]].assign(kind=kind, name=name)


def _records_of_trace(path: str, trace: Trace, on_cpu: bool) -> tuple[Records, Autograd, pd.DataFrame]:
    """Return a trace's records, autograd ranges and host events."""
    events = trace.events
    operators, work = events[events["cat"] == OPERATOR], events[events["cat"].isin([*WORK])]
    if work.empty and on_cpu:
        work = cpu_work(events)
    if work.empty:
        raise no_work_error(path, trace)
    records, external_ids = build_records(path, events, work)
    records.operations = _with_operator_work(records.operations, trace, external_ids)
    rows = work.sort_values("start", kind="stable").index
    messages = pd.DataFrame.from_dict(trace.messages, "index", np.int64, ["message_bytes", "group_size"])
    messages = messages.reindex(rows).fillna({"message_bytes": -1, "group_size": 1}).astype(np.int64)
    records.operations[messages.columns] = messages.to_numpy()
    communicators = pd.Series(trace.communicators, dtype=object).reindex(rows, fill_value="")
    records.operations["communicator"] = communicators.to_numpy()
    is_node = matching(operators["name"], AUTOGRAD.match)
    return (
        records,
        Autograd(
            build_ranges(operators[is_node]), build_ranges(operators[~is_node & (operators["sequence"] >= 0)])
        ),
        host_events(events),
    )


def _rank_of_trace(header: dict[str, Any]) -> tuple[int, int] | None:
    """Return a trace's rank and the number of ranks, or None if the trace doesn't contain them."""
    ranks = header.get("distributedInfo")
    rank, size = (ranks.get(key) if isinstance(ranks, dict) else None for key in ("rank", "world_size"))
    return (rank, size) if isinstance(rank, int) and isinstance(size, int) else None


def _with_operator_work(operations: pd.DataFrame, trace: Trace, external_ids: np.ndarray) -> pd.DataFrame:
    """Add columns: FLOPs and dtype of the launching operator, and the size of a generated kernel's arguments.

    If an operator runs several kernels, each of them gets the operator's total.
    """
    work_by_id = {key: _operator_work(*operator) for key, operator in trace.operators.items()}
    ids, codes = np.unique(external_ids, return_inverse=True)
    work = [work_by_id.get(key, (-1, "", -1)) for key in ids.tolist()]
    flops, dtype, size = (np.array(column)[codes] for column in zip(*work))
    return operations.assign(
        flops=flops.astype(float),
        dtype=dtype,
        operator=np.where((flops >= 0) | (size >= 0), external_ids, -1),
        bytes=operations["bytes"].where(operations["bytes"] >= 0, size.astype(np.int64)),
    )


def _operator_work(name: str, shapes: Any, types: Any) -> tuple[float, str, int]:
    """Return an operator's FLOPs (2 m n k) and dtype if it is a matmul, and otherwise the bytes of its tensors.

    Unknown numbers are -1, and an unknown dtype is "".
    """
    try:
        tensors = [
            (shape, DTYPES.get(dtype, ("fp8" if "Float8" in dtype else dtype, 1)))
            for shape, dtype in zip(shapes, types)
            if shape and dtype not in ("Scalar", "ScalarList", "")
        ]
        if not MATMULS.match(name):
            return -1, "", sum(int(np.prod(shape)) * dtype[1] for shape, dtype in tensors)
        first = 1 if name in ("aten::addmm", "aten::baddbmm") else 0
        (left, dtype), (right, _) = tensors[first], tensors[first + 1]
        return 2.0 * float(np.prod(left)) * right[-1], dtype[0], -1
    except (TypeError, ValueError, IndexError):
        return -1, "", -1


def _attribute(
    records: Records,
    autograd: Autograd,
    host: pd.DataFrame,
    step: str | None,
    phases: Mapping[str, str] | None,
    uses_gpu_ranges: bool = False,
) -> Capture:
    """Assign each operation to the step, phase and ranges that were open in its process at its launch.

    If ``uses_gpu_ranges`` is True, the ranges are on the GPU's timeline. In this case, they must be open when the
    operation starts.
    """
    operations, process = records.operations, records.process
    join_launches(records)
    launch = operations["launch_start_ns"].to_numpy("int64", na_value=NEVER)
    launch = operations["start_ns"].to_numpy("int64") if uses_gpu_ranges else launch
    ranges = records.ranges.assign(plain=map_categories(records.ranges["name"], plain_name))
    ranges["phase"] = _phases_of_ranges(records.path, ranges, phases)
    steps = find_steps(records.path, ranges, process, launch, step)
    others = ranges[~ranges.index.isin(steps.rows.index) | (ranges["phase"] != "")]
    phase_ranges = others[others["phase"] != ""]
    others = others[
        (others["phase"] == "")
        & ~matching(others["name"], OPERATOR_RANGE.search)
        & ~matching(others["name"], LIBRARY_RANGE.search)
    ].astype({"name": str})

    def at_launch(rows: pd.DataFrame, column: str, default: Any) -> np.ndarray:
        return rows[column].reindex(open_range(rows, process, launch), fill_value=default).to_numpy()

    step_number, phase = at_launch(steps.rows, "step", -1), at_launch(phase_ranges, "phase", OUTSIDE)
    by_autograd = len(autograd.backward) > 0 and not (phase_ranges["phase"] == "backward").any()
    if by_autograd:
        is_backward = open_range(autograd.backward, process, launch) >= 0
        phase = np.where((phase == OUTSIDE) & is_backward, "backward", phase)
    if by_autograd and not (phase_ranges["phase"] == "forward").any():
        has_node = _has_backward_node(autograd, steps.rows, process, launch)
        phase = _mark_forward(step_number, phase, launch, process, has_node)
    outer, inner = _nested_names(others, process, launch)
    other_phases = sorted({*phase} - {*PHASE_NAMES, OUTSIDE})
    table = operations.assign(
        step=step_number,
        range=pd.Categorical(outer),
        inner_range=pd.Categorical(inner),
        phase=pd.Categorical(phase, [*PHASE_NAMES, *other_phases, OUTSIDE]),
    )
    too_early = _launched_too_early(operations["start_ns"], process, launch, steps.rows)
    in_warm_up = open_range(steps.warm_up, process, launch) >= 0
    is_excluded = too_early | in_warm_up
    key, host_key = (rows["key"].to_numpy("int64") for rows in (steps.rows, host))
    step_ranges = steps.rows[["step", "name", "start_ns", "end_ns"]].assign(process=key >> 24 & 0xFFFFFF)
    host = host.assign(process=host_key >> 24 & 0xFFFFFF, thread=host_key & 0xFFFFFF).drop(columns="key")
    return Capture(
        records.path,
        table[~is_excluded].reset_index(drop=True),
        table[is_excluded].assign(warm_up=in_warm_up[is_excluded]).reset_index(drop=True),
        step_ranges.astype({"name": str}).reset_index(drop=True),
        host,
        autograd=by_autograd,
    )


def _nested_names(
    ranges: pd.DataFrame, process: np.ndarray, launch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the names of the outermost and the innermost range around each launch, or "" if none is open."""
    outer = inner = np.full(len(launch), "", object)
    for level in range(MAX_RANGE_DEPTH):
        if ranges.empty:
            break
        names = ranges["name"].reindex(open_range(ranges, process, launch), fill_value="").to_numpy()
        outer = names if level == 0 else outer
        inner = np.where(names != "", names, inner)
        ranges = ranges.drop(index=outermost(ranges).index)
    return outer, inner


def _has_backward_node(
    autograd: Autograd, steps: pd.DataFrame, process: np.ndarray, launch: np.ndarray
) -> np.ndarray:
    """Return a mask of the operations whose operator created a node that backward runs later in the same step."""
    operators, nodes = autograd.operators, autograd.backward
    # operators on the threads of the backward pass run inside nodes, so they don't count
    operators = operators[~operators["key"].isin(nodes["key"])]

    def with_step(rows: pd.DataFrame) -> pd.DataFrame:
        process_keys = rows["key"].to_numpy("int64") & PROCESS
        step_index = open_range(steps, process_keys, rows["start_ns"].to_numpy())
        return rows.assign(step=steps["step"].reindex(step_index, fill_value=-1).to_numpy())

    node_key = ["process", "step", "sequence"]
    last_run_ns = with_step(nodes).groupby(node_key)["start_ns"].max()
    candidates = with_step(operators)
    node_ns = last_run_ns.reindex(
        pd.MultiIndex.from_frame(candidates[node_key]), fill_value=-LATEST
    ).to_numpy()
    return open_range(candidates[node_ns > candidates["end_ns"].to_numpy()], process, launch) >= 0


def _mark_forward(
    step: np.ndarray, phase: np.ndarray, launch: np.ndarray, process: np.ndarray, has_node: np.ndarray
) -> np.ndarray:
    """Mark the forward phase in a capture whose phases are determined by autograd's ranges.

    The forward phase includes everything that a step launches before its first backward operation. Later in the
    step, the forward phase includes operations that create nodes for another backward pass, and everything between
    such operations.
    """
    order = np.lexsort((launch, step, process))
    rows = pd.DataFrame(
        {
            "group": pd.DataFrame({"process": process, "step": step}).groupby(["process", "step"]).ngroup(),
            "mark": np.where(
                phase == "backward", "backward", np.where((phase == OUTSIDE) & has_node, "forward", None)
            ),
            "phase": phase,
        }
    )[["group", "mark", "phase"]].iloc[order]
    groups = rows.groupby("group")["mark"]
    earlier, later = groups.ffill(), groups.bfill()
    is_before_backward = later.notna() & (earlier.isna() | (earlier == "forward"))
    is_forward = (rows["phase"] == OUTSIDE) & (launch[order] < NEVER) & is_before_backward
    phase = phase.copy()
    phase[order[is_forward.to_numpy()]] = "forward"
    return phase


def _launched_too_early(
    start: pd.Series, process: np.ndarray, launch: np.ndarray, steps: pd.DataFrame
) -> np.ndarray:
    """Return a mask of the operations that were launched before the capture or before the capture's first step.

    An operation was launched before the capture if the capture omits its launch, and the operation starts before
    all operations with known launches.
    """
    first_traced_ns = start.where(launch < NEVER, NEVER).groupby(process).transform("min").to_numpy()
    process_keys = steps["key"].to_numpy("int64") & PROCESS
    first_step_ns = (
        steps["start_ns"].groupby(process_keys).min().reindex(process, fill_value=-LATEST).to_numpy()
    )
    return ((launch == NEVER) & (start < first_traced_ns) & (first_traced_ns < NEVER)).to_numpy() | (
        launch < first_step_ns
    )


def _phases_of_ranges(path: str, ranges: pd.DataFrame, phases: Mapping[str, str] | None) -> np.ndarray:
    """Return each range's phase: the phase in ``phases``, or else the phase that the name denotes, or else "".

    Raises:
        TraceError: If a name in ``phases`` matches no range.
    """
    requested = phases or {}
    names = ranges["name"].cat.categories if len(ranges) else []
    if missing := [name for name in requested if not any(_matches_name(pattern, name) for pattern in names)]:
        raise no_such_range(path, ", ".join(sorted(missing)), ranges)

    def phase(name: str) -> str:
        matches = (phase for pattern, phase in requested.items() if _matches_name(name, pattern))
        return next(matches, phase_of(name) or "")

    return map_categories(ranges["name"], phase)


def _matches_name(name: str, pattern: str) -> bool:
    """Return whether a range's name matches ``pattern``.

    A pattern that contains neither "*" nor "?" is compared as a name, ignoring case, numbers and punctuation.
    """
    if set(pattern) & set("*?"):
        return fnmatch.fnmatchcase(name, pattern)
    return plain_name(name) == plain_name(pattern)
