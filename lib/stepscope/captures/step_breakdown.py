"""Break down a step's time on one GPU into compute, exposed copies, exposed communication and idle time.

Each part is a union of intervals, and the parts don't overlap, so they add up to the wall time. Copies are exposed
while no compute runs, and communication is exposed while nothing else runs. All numbers describe the median step
(averaged over the two middle steps if the number of steps is even), so they add up, and outliers don't distort
them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from stepscope.captures.capture import Capture
from stepscope.data_sheets import data_sheet
from stepscope.stats import union
from stepscope.traces.attribution import LATEST, OUTSIDE, TraceError, matching
from stepscope.traces.kernel_categories import MATMUL

COMMUNICATION, GENERATED = "communication", "compiler-generated"
HOST_COPY = re.compile(r"HtoD|DtoH|Host|Pinned|Pageable", re.IGNORECASE)  # applies only to names of copies
# an fp32 matmul that runs on tensor cores uses TF32
TENSOR_CORES = re.compile(r"tf32|s1688|s16816|tensorop|hmma|wgmma", re.IGNORECASE)
MIN_SHARE_RATED = 0.5  # minimum share of matmul time with known shapes; below it, no rate is reported
OUTLIER_RATIO = 1.25  # a step this many times slower or faster than the median is an outlier
STARTUP_BUSY_RATIO = 2  # how many times as busy the GPU must be after the start-up as during the start-up
MIN_OPS_FOR_STARTUP = 100  # with fewer operations, we don't look for a start-up
MIN_SHARE_OF_STEPS = 0.5  # minimum share of steps with operations; below it, no step is typical


@dataclass
class Device:
    """One process's operations on one GPU, divided into steps.

    transfer_ns: the transfer time in ns of each collective that was compared with the kernels of other GPUs, keyed
        by the collective's row in ``classified_ops``; empty if there was no comparison.
    """

    capture: Capture
    number: int
    name: str
    all_operations: pd.DataFrame
    transfer_ns: pd.Series = field(default_factory=lambda: pd.Series(dtype="int64"))

    @cached_property
    def excluded(self) -> pd.DataFrame:
        """This GPU's operations that were launched before the capture, before the first step or in a warm-up."""
        rows = self.capture.excluded
        return rows[(rows["device"] == self.number) & (rows["process"] == self.process)]

    @cached_property
    def stream(self) -> int:
        """The main compute stream: the stream with the most kernel time, excluding communication."""
        rows = self.all_operations
        rows = rows[(rows["kind"] == "kernel") & (rows["kernel_category"] != COMMUNICATION)]
        rows = rows if len(rows) else self.all_operations
        return int(rows.groupby("stream")["duration_ns"].sum().idxmax())

    @cached_property
    def process(self) -> int:
        return int(self.all_operations["process"].iloc[0])

    @cached_property
    def host_steps(self) -> pd.DataFrame:
        """The ranges of the process's steps on the host: name, start_ns and end_ns, indexed by step."""
        ranges = self.capture.ranges
        return ranges[ranges["process"] == self.process].set_index("step").sort_index()

    @cached_property
    def first_starts(self) -> pd.Series:
        """The start time in ns of each step's first operation on the main stream, ordered by time.

        If most steps don't run any operation on the main stream, the result is empty, because no step is typical.
        """
        rows = self.all_operations
        rows = rows[(rows["step"] >= 0) & (rows["stream"] == self.stream)]
        first = rows.groupby("step")["start_ns"].min().sort_values()
        return first if len(first) >= MIN_SHARE_OF_STEPS * len(self.host_steps) else first[:0]

    @cached_property
    def empty_steps(self) -> int:
        """The number of steps that launched nothing on this GPU."""
        steps = self.all_operations["step"]
        return len(self.host_steps) - steps[steps >= 0].nunique()

    @property
    def has_steps(self) -> bool:
        return len(self.first_starts) > 0

    @cached_property
    def step_names(self) -> list[str]:
        """The names of the steps, in the order of ``windows``; empty if the capture contains no steps."""
        return self.host_steps["name"].reindex(self.first_starts.index).astype(str).tolist()

    @cached_property
    def windows(self) -> np.ndarray:
        """Each step's start and end in ns, as an array of shape (steps, 2).

        A step starts with its first operation on the main stream. If the GPU is idle before this operation, the
        step starts earlier: when its range on the host has started and the GPU has finished all earlier work. A
        step ends when the next step starts. The last step, and any step followed by a step without operations,
        ends when both its operations and its host range have ended.
        """
        rows = self.all_operations
        ends = rows["start_ns"] + rows["duration_ns"]
        first = self.first_starts
        if first.empty:
            return np.array([[rows["start_ns"].min(), ends.max()]])
        # The times when the GPU finished the work launched before each step. They remain integers, because
        # float64 cannot represent nanoseconds since 1970 exactly.
        step_ends = ends.groupby(rows["step"]).max().reindex(first.index).cummax()
        gpu_idle_from = step_ends.shift(fill_value=-LATEST).to_numpy("int64")
        excluded_ends = self.excluded["start_ns"] + self.excluded["duration_ns"]
        other_ends = np.sort(np.append(ends[rows["step"] < 0], excluded_ends)).astype("int64")
        previous = np.searchsorted(other_ends, first.to_numpy(), side="right") - 1
        gpu_idle_from = np.maximum(gpu_idle_from, np.append(other_ends, -LATEST)[previous])
        host_start = self.host_steps["start_ns"].reindex(first.index, fill_value=-LATEST).to_numpy("int64")
        begin = np.minimum(first.to_numpy("int64"), np.maximum(host_start, gpu_idle_from))
        begin = np.maximum.accumulate(begin)
        end = np.append(begin[1:], LATEST)
        has_next_step = np.append(np.diff(first.index) == 1, False)
        for window in np.flatnonzero(~has_next_step):
            end[window] = min(end[window], self._end_of_step(int(first.index[window])))
        return np.stack([begin, np.maximum(begin, end)], axis=1)

    def _end_of_step(self, step: int) -> int:
        """Return the time in ns when a step's host range and its operations have ended.

        Copies on streams other than the main stream are ignored.
        """
        rows = self.all_operations
        operations = rows[
            (rows["step"] == step) & ((rows["kind"] != "memcpy") | (rows["stream"] == self.stream))
        ]
        last = int((operations["start_ns"] + operations["duration_ns"]).max())
        return max(last, int(self.host_steps["end_ns"].get(step, last)))

    @cached_property
    def classified_ops(self) -> pd.DataFrame:
        """All operations, ordered by start, with the additional columns ``end_ns`` and ``part``.

        The part is compute, copies (to or from the host) or communication.
        """
        return self._classify(self.all_operations)

    def _classify(self, rows: pd.DataFrame) -> pd.DataFrame:
        is_host_copy = (rows["kind"] == "memcpy") & matching(rows["name"], HOST_COPY.search)
        part = np.where(
            rows["kernel_category"] == COMMUNICATION,
            COMMUNICATION,
            np.where(is_host_copy, "copies", "compute"),
        )
        return rows.assign(end_ns=rows["start_ns"] + rows["duration_ns"], part=part)

    @cached_property
    def ops_with_carryover(self) -> pd.DataFrame:
        """The classified operations and the excluded operations, which may still run in the first step.

        The column ``position`` contains an operation's row in ``classified_ops``, or -1 for excluded operations.
        """
        rows = pd.concat(
            [
                self._classify(self.excluded).assign(position=-1),
                self.classified_ops.assign(position=np.arange(len(self.classified_ops))),
            ]
        )
        return rows.sort_values("start_ns", kind="stable")

    @cached_property
    def ops_per_step(self) -> list[pd.DataFrame]:
        """The operations that run in each window of ``windows``, clipped to this window."""
        rows = self.ops_with_carryover
        starts, latest_ends = rows["start_ns"].to_numpy(), rows["end_ns"].cummax().to_numpy()
        pieces = []
        for begin, end in self.windows:
            first, last = np.searchsorted(latest_ends, begin, "right"), np.searchsorted(starts, end)
            piece = rows.iloc[int(first) : int(last)]
            piece = piece[piece["end_ns"] > begin]
            pieces.append(
                piece.assign(
                    start_ns=piece["start_ns"].clip(begin, end), end_ns=piece["end_ns"].clip(begin, end)
                )
            )
        return pieces

    @cached_property
    def breakdowns(self) -> pd.DataFrame:
        """A row per step with the wall time and the parts that add up to the wall time, in ms."""
        records = []
        for (begin, end), rows in zip(self.windows, self.ops_per_step):
            compute_ns, any_ns = busy_ns(rows[rows["part"] == "compute"]), busy_ns(rows)
            local_ns = busy_ns(rows[rows["part"] != COMMUNICATION])
            records.append(
                {
                    "wall": end - begin,
                    "compute": compute_ns,
                    "exposed copies": local_ns - compute_ns,
                    "exposed communication": any_ns - local_ns,
                    "idle": end - begin - any_ns,
                }
            )
        return pd.DataFrame(records) / 1e6

    @cached_property
    def median_indices(self) -> list[int]:
        """The median step's index, or the two middle steps' indices if the number of steps is even."""
        order = np.argsort(self.breakdowns["wall"].to_numpy(), kind="stable")
        return sorted(order[(len(order) - 1) // 2 : len(order) // 2 + 1].tolist())

    @cached_property
    def median(self) -> pd.Series:
        """The median step's breakdown in ms."""
        return self.breakdowns.iloc[self.median_indices].mean()

    @cached_property
    def outliers(self) -> list[int]:
        """The indices of the steps whose wall time is far from the median.

        The result is empty if there are fewer than three steps, because neither of two steps is more
        typical than the other.
        """
        walls = self.breakdowns["wall"]
        is_outlier = (walls > OUTLIER_RATIO * self.median["wall"]) | (
            walls * OUTLIER_RATIO < self.median["wall"]
        )
        return np.flatnonzero(is_outlier).tolist() if len(walls) > 2 else []

    @cached_property
    def running_ops(self) -> pd.DataFrame:
        """The operations that run in the median step, clipped to this step."""
        return pd.concat([self.ops_per_step[index] for index in self.median_indices])

    @cached_property
    def operations(self) -> pd.DataFrame:
        """The operations that start in the median step."""
        rows = self.classified_ops
        inside = np.full(len(rows), False)
        for begin, end in self.windows[self.median_indices]:
            inside |= ((rows["start_ns"] >= begin) & (rows["start_ns"] < end)).to_numpy()
        return rows[inside]

    def ms_per_step(self, ns: Any) -> Any:
        """Convert a sum in ns over the median step, or over the two middle steps, to ms per step."""
        return ns / 1e6 / len(self.median_indices)

    def total_ms_by(self, rows: pd.DataFrame, by: str) -> pd.Series:
        """Sum the durations of operations by the values of a column; return ms per step, longest first."""
        sums = rows.groupby(by, observed=True)["duration_ns"].sum()
        return self.ms_per_step(sums[sums > 0].sort_values(ascending=False))

    def time_saved_without(self, is_removed: pd.Series) -> float:
        """Return the time in ms per step that removing some of ``running_ops`` would save.

        This is the time during which only the removed operations run.

        Args:
            is_removed: a mask of ``running_ops``.
        """
        return float(
            self.ms_per_step(busy_ns(self.running_ops) - busy_ns(self.running_ops[~is_removed.to_numpy()]))
        )

    def time_saved_by_label(self, labels: pd.Series) -> pd.Series:
        """Return, for each label, the time in ms per step that removing its operations would save.

        Args:
            labels: the label of each operation in ``running_ops``; missing if the operation has no label.
        """
        saved_ms = {label: self.time_saved_without(labels == label) for label in labels.dropna().unique()}
        return pd.Series(saved_ms, dtype=float).sort_values(ascending=False)

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """The GPU's idle gaps in the median step, which add up to the breakdown's idle time.

        Columns:
            begin, end: the gap's start and end in ns; ms: its duration.
            next: the row in ``classified_ops`` of the operation that ends the gap; -1 if the step ends the gap.
            head: whether the gap precedes the step's first operation.
            returned: the time in ns when the call that launched ``next`` returned; LATEST if the step ends the
                gap, -LATEST if the capture omits the launch.
        """
        operations = self.ops_with_carryover
        starts = operations["start_ns"].to_numpy()
        ends = np.append(operations["end_ns"].cummax().to_numpy(), LATEST)
        begins = np.append(-LATEST, ends[:-1])
        returned = operations["launch_start_ns"] + operations["launch_duration_ns"]
        returned = returned.to_numpy("int64", na_value=-LATEST)
        parts = []
        for begin, end in self.windows[self.median_indices]:
            rows = pd.DataFrame(
                {
                    "begin": begins.clip(begin, end),
                    "end": np.append(starts, end).clip(begin, end),
                    "next": np.append(operations["position"], -1),
                    "returned": np.append(returned, LATEST),
                }
            )
            rows = rows[rows["end"] > rows["begin"]]
            parts.append(rows.assign(head=rows["begin"] == begin))
        return pd.concat(parts, ignore_index=True).assign(ms=lambda rows: (rows["end"] - rows["begin"]) / 1e6)

    @cached_property
    def untraced_graphs(self) -> int:
        """The number of CUDA graphs that were launched within steps, but whose operations the capture omits.

        The GPU may be running these graphs when it appears idle. If there are no steps, all launched graphs count.
        """
        graphs = self.capture.untraced_graphs
        launch_ns = graphs.loc[graphs["process"] == self.process, "start_ns"]
        if not self.has_steps:
            return len(launch_ns)
        return int(((launch_ns >= self.windows[0, 0]) & (launch_ns < self.windows[-1, 1])).sum())

    @cached_property
    def known_launch_share(self) -> float:
        """The share of the operations in the median step whose launches are in the capture."""
        return float(self.operations["launch_start_ns"].notna().mean()) if len(self.operations) else 0.0

    @cached_property
    def host_lead_ms(self) -> float:
        """The median time in ms between the end of an operation's launch and the start of the operation."""
        launched = (self.operations["launch_start_ns"] + self.operations["launch_duration_ns"]).dropna()
        lead_ns = self.operations.loc[launched.index, "start_ns"] - launched.astype("int64")
        return float(lead_ns.median()) / 1e6

    @cached_property
    def startup_ms(self) -> float:
        """The duration of the start-up in ms, or 0 if there are steps or no start-up is found.

        A start-up takes at least half of the capture. During this time, the GPU is far less busy than afterwards,
        because it is idle or its communication waits for other GPUs.
        """
        rows = self.classified_ops[self.classified_ops["part"] != COMMUNICATION].reset_index(drop=True)
        if self.has_steps or len(rows) < MIN_OPS_FOR_STARTUP:
            return 0.0
        begin, end = self.windows[0]
        starts, previous_ends = rows["start_ns"].to_numpy(), np.append(begin, rows["end_ns"].cummax()[:-1])
        idle_ns = np.maximum(starts - previous_ends, 0).cumsum()
        elapsed_ns, remaining_ns = starts - begin, end - starts
        busy_before = (elapsed_ns - idle_ns)[1:] / np.maximum(elapsed_ns[1:], 1)
        busy_after = (remaining_ns - (idle_ns[-1] - idle_ns))[1:] / np.maximum(remaining_ns[1:], 1)
        is_busier_after = busy_after > STARTUP_BUSY_RATIO * busy_before
        is_candidate = is_busier_after & (elapsed_ns[1:] > 0.5 * (end - begin))
        is_candidate[-MIN_OPS_FOR_STARTUP // 2 :] = False  # a short burst at the end isn't steady work
        # Otsu's threshold: the split that makes the two parts differ most, weighted by their lengths.
        weights = elapsed_ns[1:] * remaining_ns[1:]
        separation = np.where(is_candidate, weights * (busy_after - busy_before) ** 2.0, 0)
        return float(elapsed_ns[1:][separation.argmax()]) / 1e6 if is_candidate.any() else 0.0

    @cached_property
    def matmuls(self) -> pd.DataFrame:
        """A row per dtype with the ms per step and the TFLOP/s of matmuls with known shapes, longest time first.

        The table is empty if too few matmuls have known shapes.
        """
        rows = self.operations[self.operations["flops"] > 0]
        is_tf32 = (rows["dtype"] == "fp32") & matching(rows["name"], TENSOR_CORES.search)
        dtype = rows["dtype"].mask(is_tf32, "tf32")
        # an operator's FLOPs count once, regardless of the number of kernels that it runs
        flops = rows["flops"].mask(rows.duplicated("operator"), 0)
        rows = rows.assign(dtype=dtype, flops=flops)
        sums = rows.groupby("dtype")[["flops", "duration_ns"]].sum()
        rates = pd.DataFrame(
            {"ms": self.ms_per_step(sums["duration_ns"]), "tflops": sums["flops"] / sums["duration_ns"] / 1e3}
        )
        total = self.total_ms_by(self.operations, "kernel_category").get(MATMUL, 0)
        is_enough = rates["ms"].sum() >= MIN_SHARE_RATED * total
        return rates.sort_values("ms", ascending=False)[: None if is_enough else 0]

    @cached_property
    def generated(self) -> pd.DataFrame:
        """A row per compiler-generated kernel with known argument sizes: the argument bytes and the time in ns."""
        rows = self.operations
        rows = rows[(rows["kernel_category"] == GENERATED) & (rows["bytes"] > 0) & (rows["kind"] == "kernel")]
        return rows.groupby("name", observed=True)[["bytes", "duration_ns"]].sum()

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """The operations of the median step by name, longest total time first.

        Columns: count and ms (both per step), share (of the total time of all operations), and median_ms,
        shortest_ms and longest_ms (of single operations).
        """
        return self._by_name(self.operations)

    def _by_name(self, rows: pd.DataFrame) -> pd.DataFrame:
        lasted = rows.groupby("name", observed=True)["duration_ns"].agg(
            ["size", "sum", "median", "min", "max"]
        )
        lasted = lasted.sort_values("sum", ascending=False)
        return pd.DataFrame(
            {
                "count": lasted["size"] / len(self.median_indices),
                "ms": self.ms_per_step(lasted["sum"]),
                "share": lasted["sum"] / max(1, lasted["sum"].sum()),
                "median_ms": lasted["median"] / 1e6,
                "shortest_ms": lasted["min"] / 1e6,
                "longest_ms": lasted["max"] / 1e6,
            }
        )

    @cached_property
    def leading_kernels(self) -> pd.DataFrame:
        """The kernel with the most time in each phase, or in each range if no phase is known.

        Columns: part (the phase or range), part_ms, name, and the columns of ``kernels``, where share is relative
        to the part's time.
        """
        rows = self.operations
        rows = rows[(rows["kind"] == "kernel") & (rows["part"] != COMMUNICATION)]
        by = "phase" if (rows["phase"] != OUTSIDE).any() else "range"
        rows = rows[(rows[by] != OUTSIDE) & (rows[by] != "")]
        leading = []
        for part, part_rows in rows.groupby(by, observed=True):
            kernel = self._by_name(part_rows).iloc[[0]].rename_axis("name").reset_index()
            leading.append(
                kernel.assign(part=str(part), part_ms=self.ms_per_step(part_rows["duration_ns"].sum()))
            )
        if not leading:
            return pd.DataFrame(columns=["part", "part_ms", "name", "count", "ms", "share"])
        return pd.concat(leading, ignore_index=True)

    @cached_property
    def sheet(self) -> dict[str, Any]:
        return data_sheet(self.capture.gpus.get(self.number, ""))


def devices(capture: Capture) -> Iterator[Device]:
    """Yield each GPU of each process in a capture. GPUs of different processes may have the same number."""
    groups = capture.operations.groupby(["device", "process"])
    has_several_processes = len(groups) > capture.operations["device"].nunique()
    for (device, process), rows in groups:
        name = f"GPU {device}"
        if has_several_processes:
            name += f" (process {capture.processes.get(process, process)})"
        yield Device(capture, int(device), name, rows.reset_index(drop=True))


def busiest_device(capture: Capture, number: int | None = None) -> Device:
    """Return the GPU whose operations take the most time.

    Args:
        number: consider only GPUs with this number; None to consider all GPUs.

    Raises:
        TraceError: If the capture contains no operations in steps, or none on that GPU.
    """
    gpus = list(devices(capture))
    if not gpus:
        raise TraceError(
            f"{capture.path}: all {len(capture.excluded):,} operations were launched before"
            f" {'the first step' if capture.steps else 'the capture'}; expected operations after that"
        )
    candidates = [gpu for gpu in gpus if number is None or gpu.number == number]
    if not candidates:
        numbers = ", ".join(str(number) for number in sorted({gpu.number for gpu in gpus}))
        raise TraceError(f"{capture.path}: no operations on GPU {number}; expected one of {numbers}")
    return max(candidates, key=lambda gpu: gpu.all_operations["duration_ns"].sum())


def busy_ns(rows: pd.DataFrame) -> float:
    """Return the time in ns during which at least one of the operations runs."""
    return union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
