"""Where a step's time goes on one GPU: its windows, what they are the sum of, and its idle gaps.

wall = compute + exposed copies and communication + idle, by unions of intervals. Exposed is the time in which
nothing else runs. All numbers are those of the median step (the mean of the two in the middle, if the number
of steps is even), so that they add up and no outlier is among them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from stepscope.captures.capture import Capture
from stepscope.data_sheets import data_sheet
from stepscope.stats import union
from stepscope.traces.attribution import LATEST, OUTSIDE, matching
from stepscope.traces.families import MATMUL

COMMUNICATION, GENERATED = "communication", "compiler-generated"
HOST_COPY = re.compile(r"HtoD|DtoH|Host|Pinned|Pageable", re.IGNORECASE)  # names of copies alone are asked
TENSOR_CORES = re.compile(r"tf32|s1688|s16816|tensorop|hmma|wgmma", re.IGNORECASE)  # of fp32: so it is TF32
MIN_SHARE_RATED = 0.5  # of the matmuls' time: where shapes are known for less, no rate is reported
OUTLIER_RATIO = 1.25  # of a step's time to the median, or the reverse: beyond it, the step is an outlier
STARTUP_BUSY_RATIO = 2  # of the busy share after a start-up to that in it
MIN_OPS_FOR_STARTUP = 100  # operations
MIN_SHARE_OF_STEPS = 0.5  # that have operations: of fewer none is typical


@dataclass
class Device:
    """The operations of one process on one GPU, and the windows of its steps."""

    capture: Capture
    number: int
    name: str
    all_operations: pd.DataFrame

    @cached_property
    def before(self) -> pd.DataFrame:
        """What was launched before the first step or in a warm-up."""
        rows = self.capture.before
        return rows[(rows["device"] == self.number) & (rows["process"] == self.process)]

    @cached_property
    def stream(self) -> int:
        """The stream that computes most."""
        rows = self.all_operations
        rows = rows[(rows["kind"] == "kernel") & (rows["family"] != COMMUNICATION)]
        rows = rows if len(rows) else self.all_operations
        return int(rows.groupby("stream")["duration_ns"].sum().idxmax())

    @cached_property
    def process(self) -> int:
        return int(self.all_operations["process"].iloc[0])

    @cached_property
    def host_steps(self) -> pd.DataFrame:
        """The ranges on the host of this process's steps, by step: name, start_ns, end_ns."""
        ranges = self.capture.ranges
        return ranges[ranges["process"] == self.process].set_index("step").sort_index()

    @cached_property
    def first_starts(self) -> pd.Series:
        """By step, in order of time, the start in ns of its first operation on the stream that computes most;
        empty where most of the steps have no operation, so that none of them is typical."""
        rows = self.all_operations
        rows = rows[(rows["step"] >= 0) & (rows["stream"] == self.stream)]
        first = rows.groupby("step")["start_ns"].min().sort_values()
        return first if len(first) >= MIN_SHARE_OF_STEPS * len(self.host_steps) else first[:0]

    @cached_property
    def empty_steps(self) -> int:
        """How many steps launched nothing that ran on this GPU."""
        steps = self.all_operations["step"]
        return len(self.host_steps) - steps[steps >= 0].nunique()

    @property
    def has_steps(self) -> bool:
        return len(self.first_starts) > 0

    @cached_property
    def step_names(self) -> list[str]:
        """The name of the step of each window; none where the capture is not divided into steps."""
        return self.host_steps["name"].reindex(self.first_starts.index).astype(str).tolist()

    @cached_property
    def windows(self) -> np.ndarray:
        """(steps, 2) ns: a step begins with its first operation on the stream that computes most, or, where
        the GPU has nothing to do before that, with its range on the host; it lasts until the next one begins.
        The last one, and one that a step without operations follows, ends with its operations and its range.
        """
        rows = self.all_operations
        ends = rows["start_ns"] + rows["duration_ns"]
        first = self.first_starts
        if first.empty:
            return np.array([[rows["start_ns"].min(), ends.max()]])
        # when the GPU had finished what had been launched before the step; integers, as float64 has no room
        # for nanoseconds since 1970
        step_ends = ends.groupby(rows["step"]).max().reindex(first.index).cummax()
        done = step_ends.shift(fill_value=-LATEST).to_numpy("int64")
        before = self.before["start_ns"] + self.before["duration_ns"]
        loose = np.sort(np.append(ends[rows["step"] < 0], before)).astype("int64")
        place = np.searchsorted(loose, first.to_numpy(), side="right") - 1
        done = np.maximum(done, np.append(loose, -LATEST)[place])
        host_start = self.host_steps["start_ns"].reindex(first.index, fill_value=-LATEST).to_numpy("int64")
        begin = np.minimum(first.to_numpy("int64"), np.maximum(host_start, done))
        begin = np.maximum.accumulate(begin)
        end = np.append(begin[1:], LATEST)
        followed = np.append(np.diff(first.index) == 1, False)  # by a step with operations
        for window in np.flatnonzero(~followed):
            end[window] = min(end[window], self._own_end(int(first.index[window])))
        return np.stack([begin, np.maximum(begin, end)], axis=1)

    def _own_end(self, step: int) -> int:
        """When a step's operations, without copies beside them, and its range on the host have ended, ns."""
        rows = self.all_operations
        own = rows[(rows["step"] == step) & ((rows["kind"] != "memcpy") | (rows["stream"] == self.stream))]
        last = int((own["start_ns"] + own["duration_ns"]).max())
        return max(last, int(self.host_steps["end_ns"].get(step, last)))

    @cached_property
    def placed(self) -> pd.DataFrame:
        """All operations in order, with ``end_ns`` and the part that each is: compute, copies to and from the
        host, communication."""
        return self._placed(self.all_operations)

    def _placed(self, rows: pd.DataFrame) -> pd.DataFrame:
        host = (rows["kind"] == "memcpy") & matching(rows["name"], HOST_COPY.search)
        part = np.where(rows["family"] == COMMUNICATION, COMMUNICATION, np.where(host, "copies", "compute"))
        return rows.assign(end_ns=rows["start_ns"] + rows["duration_ns"], part=part)

    @cached_property
    def working(self) -> pd.DataFrame:
        """As ``placed``, with what was launched before the first step and may run on in it; ``place``: of an
        operation in ``placed``, -1 of what was launched before."""
        rows = pd.concat(
            [
                self._placed(self.before).assign(place=-1),
                self.placed.assign(place=np.arange(len(self.placed))),
            ]
        )
        return rows.sort_values("start_ns", kind="stable")

    @cached_property
    def pieces(self) -> list[pd.DataFrame]:
        """Of each window the operations that run in it, cut to it; what began before may run on."""
        rows = self.working
        starts, reach = rows["start_ns"].to_numpy(), rows["end_ns"].cummax().to_numpy()
        found = []
        for begin, end in self.windows:
            first, last = np.searchsorted(reach, begin, "right"), np.searchsorted(starts, end)
            cut = rows.iloc[int(first) : int(last)]
            cut = cut[cut["end_ns"] > begin]
            found.append(
                cut.assign(start_ns=cut["start_ns"].clip(begin, end), end_ns=cut["end_ns"].clip(begin, end))
            )
        return found

    @cached_property
    def accounts(self) -> pd.DataFrame:
        """A row a step, ms: wall, and what it is the sum of."""
        found = []
        for (begin, end), rows in zip(self.windows, self.pieces):
            compute, busy = covered(rows[rows["part"] == "compute"]), covered(rows)
            local = covered(rows[rows["part"] != COMMUNICATION])
            found.append(
                {
                    "wall": end - begin,
                    "compute": compute,
                    "exposed copies": local - compute,
                    "exposed communication": busy - local,
                    "idle": end - begin - busy,
                }
            )
        return pd.DataFrame(found) / 1e6

    @cached_property
    def middle(self) -> list[int]:
        """The median step, or the two in the middle."""
        order = np.argsort(self.accounts["wall"].to_numpy(), kind="stable")
        return sorted(order[(len(order) - 1) // 2 : len(order) // 2 + 1].tolist())

    @cached_property
    def median(self) -> pd.Series:
        """The account of the median step, ms."""
        return self.accounts.iloc[self.middle].mean()

    @cached_property
    def outliers(self) -> list[int]:
        """The windows that are far from the median one; none of fewer than three, as neither of two is
        typical."""
        walls = self.accounts["wall"]
        far = (walls > OUTLIER_RATIO * self.median["wall"]) | (walls * OUTLIER_RATIO < self.median["wall"])
        return np.flatnonzero(far).tolist() if len(walls) > 2 else []

    @cached_property
    def running(self) -> pd.DataFrame:
        """The operations that run in the median step, cut to it."""
        return pd.concat([self.pieces[place] for place in self.middle])

    @cached_property
    def operations(self) -> pd.DataFrame:
        """The operations that begin in the median step."""
        rows = self.placed
        inside = np.full(len(rows), False)
        for begin, end in self.windows[self.middle]:
            inside |= ((rows["start_ns"] >= begin) & (rows["start_ns"] < end)).to_numpy()
        return rows[inside]

    def a_step(self, ns: Any) -> Any:
        """Convert ns in the median step, or in the two in the middle, to ms in one step."""
        return ns / 1e6 / len(self.middle)

    def summed(self, rows: pd.DataFrame, by: str) -> pd.Series:
        """Return the sums of operations' times by a column, ms a step, the longest first."""
        found = rows.groupby(by, observed=True)["duration_ns"].sum()
        return self.a_step(found[found > 0].sort_values(ascending=False))

    def leaves(self, chosen: pd.Series) -> float:
        """Return the ms that would leave a step without these of the running operations: the time in which
        nothing else runs."""
        return float(self.a_step(covered(self.running) - covered(self.running[~chosen.to_numpy()])))

    def exposed(self, labels: pd.Series) -> pd.Series:
        """Return by label of the running operations the ms that would leave a step without them."""
        found = {label: self.leaves(labels == label) for label in labels.dropna().unique()}
        return pd.Series(found, dtype=float).sort_values(ascending=False)

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """Idle gaps of the GPU in the median step.

        begin, end (ns), next (the place in ``placed`` of the operation that ends the gap; -1: the step ends),
        head (before the first operation of the step), returned (ns: when the call that launched this
        operation returned; LATEST: the step ends without one; -LATEST: its launch is not in the capture).
        Together they last as long as the account's idle time.
        """
        rows = self.working
        starts = rows["start_ns"].to_numpy()
        ends = np.append(rows["end_ns"].cummax().to_numpy(), LATEST)
        begins = np.append(-LATEST, ends[:-1])
        returned = (rows["launch_start_ns"] + rows["launch_duration_ns"]).to_numpy("int64", na_value=-LATEST)
        found = []
        for begin, end in self.windows[self.middle]:
            gap = pd.DataFrame(
                {
                    "begin": begins.clip(begin, end),
                    "end": np.append(starts, end).clip(begin, end),
                    "next": np.append(rows["place"], -1),
                    "returned": np.append(returned, LATEST),
                }
            )
            gap = gap[gap["end"] > gap["begin"]]
            found.append(gap.assign(head=gap["begin"] == begin))
        return pd.concat(found, ignore_index=True).assign(ms=lambda gap: (gap["end"] - gap["begin"]) / 1e6)

    @cached_property
    def unseen_graphs(self) -> int:
        """How many CUDA graphs of this process were launched in the windows, none of whose operations is in
        the capture, so that what looks idle may be their work; all, where there are no steps."""
        graphs = self.capture.unseen_graphs
        start = graphs.loc[graphs["process"] == self.process, "start_ns"]
        if not self.has_steps:
            return len(start)
        return int(((start >= self.windows[0, 0]) & (start < self.windows[-1, 1])).sum())

    @cached_property
    def known_launches(self) -> float:
        """The share of the median step's operations whose launch is in the capture."""
        return float(self.operations["launch_start_ns"].notna().mean()) if len(self.operations) else 0.0

    @cached_property
    def ahead_ms(self) -> float:
        """The median time in ms from an operation's launch to its start."""
        launched = (self.operations["launch_start_ns"] + self.operations["launch_duration_ns"]).dropna()
        ahead = self.operations.loc[launched.index, "start_ns"] - launched.astype("int64")
        return float(ahead.median()) / 1e6

    @cached_property
    def started_ms(self) -> float:
        """In a capture without steps the time that its start takes, where that is most of it: until then the
        GPU computes far less than after, because it is idle or its communication waits for other GPUs."""
        rows = self.placed[self.placed["part"] != COMMUNICATION].reset_index(drop=True)
        if self.has_steps or len(rows) < MIN_OPS_FOR_STARTUP:
            return 0.0
        begin, end = self.windows[0]
        starts, reached = rows["start_ns"].to_numpy(), np.append(begin, rows["end_ns"].cummax()[:-1])
        idle = np.maximum(starts - reached, 0).cumsum()
        passed, left = starts - begin, end - starts
        busy_before = (passed - idle)[1:] / np.maximum(passed[1:], 1)
        busy_after = (left - (idle[-1] - idle))[1:] / np.maximum(left[1:], 1)
        fits = (busy_after > STARTUP_BUSY_RATIO * busy_before) & (passed[1:] > 0.5 * (end - begin))
        fits[-MIN_OPS_FOR_STARTUP // 2 :] = False  # steady work is more than a last burst
        # Where the two parts differ most, each by how long it is (Otsu's threshold).
        apart = np.where(fits, passed[1:] * left[1:] * (busy_after - busy_before) ** 2.0, 0)
        return float(passed[1:][apart.argmax()]) / 1e6 if fits.any() else 0.0

    @cached_property
    def matmuls(self) -> pd.DataFrame:
        """By dtype ms a step and TFLOP/s of the matmuls whose shapes are known, the longest first; empty
        where these are too few."""
        rows = self.operations[self.operations["flops"] > 0]
        first = ~rows.duplicated("operator")  # one operator's FLOPs, of however many kernels
        cores = (rows["dtype"] == "fp32") & matching(rows["name"], TENSOR_CORES.search)
        rows = rows.assign(dtype=rows["dtype"].mask(cores, "tf32"), flops=rows["flops"].where(first, 0))
        found = rows.groupby("dtype")[["flops", "duration_ns"]].sum()
        rates = pd.DataFrame(
            {"ms": self.a_step(found["duration_ns"]), "tflops": found["flops"] / found["duration_ns"] / 1e3}
        )
        total = self.summed(self.operations, "family").get(MATMUL, 0)
        enough = rates["ms"].sum() >= MIN_SHARE_RATED * total
        return rates.sort_values("ms", ascending=False)[: None if enough else 0]

    @cached_property
    def generated(self) -> pd.DataFrame:
        """By name the bytes and ns of generated kernels whose arguments' sizes are known."""
        rows = self.operations
        rows = rows[(rows["family"] == GENERATED) & (rows["bytes"] > 0) & (rows["kind"] == "kernel")]
        return rows.groupby("name", observed=True)[["bytes", "duration_ns"]].sum()

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """By name, in order of their time: count and ms a step, the share of all operations' time, and the
        median, shortest and longest time of one operation, ms."""
        return self._by_name(self.operations)

    def _by_name(self, rows: pd.DataFrame) -> pd.DataFrame:
        lasted = rows.groupby("name", observed=True)["duration_ns"].agg(
            ["size", "sum", "median", "min", "max"]
        )
        lasted = lasted.sort_values("sum", ascending=False)
        return pd.DataFrame(
            {
                "count": lasted["size"] / len(self.middle),
                "ms": self.a_step(lasted["sum"]),
                "share": lasted["sum"] / max(1, lasted["sum"].sum()),
                "median_ms": lasted["median"] / 1e6,
                "shortest_ms": lasted["min"] / 1e6,
                "longest_ms": lasted["max"] / 1e6,
            }
        )

    @cached_property
    def leading_kernels(self) -> pd.DataFrame:
        """By phase, or by range where no phase is known, the kernel with the most time: part (the phase's or
        range's name), name, and the columns of ``kernels``; share is of the part's time."""
        rows = self.operations
        rows = rows[(rows["kind"] == "kernel") & (rows["part"] != COMMUNICATION)]
        by = "phase" if (rows["phase"] != OUTSIDE).any() else "range"
        rows = rows[(rows[by] != OUTSIDE) & (rows[by] != "")]
        leading = []
        for part, own in rows.groupby(by, observed=True):
            kernel = self._by_name(own).iloc[[0]].rename_axis("name").reset_index()
            leading.append(kernel.assign(part=str(part), part_ms=self.a_step(own["duration_ns"].sum())))
        if not leading:
            return pd.DataFrame(columns=["part", "part_ms", "name", "count", "ms", "share"])
        return pd.concat(leading, ignore_index=True)

    @cached_property
    def sheet(self) -> dict[str, Any]:
        return data_sheet(self.capture.gpus.get(self.number, ""))


def devices(capture: Capture) -> Iterator[Device]:
    """Yield each GPU of each process; processes may all call their own GPU the first."""
    groups = capture.operations.groupby(["device", "process"])
    several = len(groups) > capture.operations["device"].nunique()
    for (device, process), rows in groups:
        yield Device(
            capture,
            int(device),
            f"GPU {device}" + f" (process {capture.processes.get(process, process)})" * several,
            rows.reset_index(drop=True),
        )


def covered(rows: pd.DataFrame) -> float:
    """Return the ns in which at least one of these runs."""
    return union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
