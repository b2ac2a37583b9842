"""What anybody's capture says, as text: a line a fact. ``stepscope profile FILE`` prints it.

wall = compute + exposed copies and communication + idle, by unions of intervals: what is exposed is the time
in which nothing else runs. A step on the GPU lasts until the next one's first operation begins.
"""
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.report.tables import digits, number
from stepscope.step.data_sheets import data_sheet
from stepscope.step.stats import LAUNCH_BOUND, union
from stepscope.traces.attribution import OUTSIDE, TraceError, matching
from stepscope.traces.capture import Capture, load_capture
from stepscope.traces.families import MATMUL
from stepscope.traces.kernel_names import short_name, words

FEW = 5      # operations: of fewer it is not told what bounds them
RATED = 0.5  # of the matmuls' time: where shapes are known of less, their rate is none of the whole
COMMUNICATION, GENERATED = "communication", "compiler-generated"
COLLECTIVE = re.compile(r"reduce ?scatter|all ?gather|all ?reduce|all ?to ?all|send ?recv|broadcast|dispatch"
                        r"|combine")  # of a name's words
HOST_COPY = re.compile(r"HtoD|DtoH|Host|Pinned|Pageable", re.IGNORECASE)  # names of copies alone are asked
TENSOR_CORES = re.compile(r"tf32|s1688|s16816|tensorop", re.IGNORECASE)  # of fp32: so it is TF32
FUSABLE = ("elementwise", "copy and cast", "reduction and norm", "softmax")
WORTH, SEEN = 0.01, 0.0005  # of the step: less is not advised; less is not mentioned
MOST = 3  # things to do
RANGES = 4  # of no phase: so many are named
SHOWN = 60  # characters of a name


@dataclass
class Device:
    """One GPU's operations within the steps, and their windows; of several processes on it, one's."""

    capture: Capture
    number: int
    name: str
    all_operations: pd.DataFrame

    @cached_property
    def windows(self) -> np.ndarray:
        """(steps, 2) ns: each step from its first operation to the next step's, the last one to its last."""
        rows = self.all_operations
        steps = rows[rows["step"] >= 0]
        ends = rows["start_ns"] + rows["duration_ns"]
        if steps.empty:
            return np.array([[rows["start_ns"].min(), ends.max()]])
        begin = np.sort(steps.groupby("step")["start_ns"].min().to_numpy())
        return np.stack([begin, np.append(begin[1:], ends[steps.index].max())], axis=1)

    @cached_property
    def operations(self) -> pd.DataFrame:
        """Those that begin within the windows, in order, with ``end_ns`` and the part that each is: compute,
        copies to and from the host, communication."""
        rows = self.all_operations
        rows = rows[(rows["start_ns"] >= self.windows[0, 0]) & (rows["start_ns"] < self.windows[-1, 1])]
        host = (rows["kind"] == "memcpy") & matching(rows["name"], HOST_COPY.search)
        part = np.where(rows["family"] == COMMUNICATION, COMMUNICATION, np.where(host, "copies", "compute"))
        return rows.assign(end_ns=rows["start_ns"] + rows["duration_ns"], part=part)

    @cached_property
    def accounts(self) -> pd.DataFrame:
        """A row a step, ms: wall, and what it is the sum of."""
        found, starts = [], self.operations["start_ns"].to_numpy()
        longest = self.operations["duration_ns"].max()
        for begin, end in self.windows:
            first = int(np.searchsorted(starts, begin - longest))  # what began before may run on
            rows = self.operations.iloc[first:int(np.searchsorted(starts, end))]
            rows = rows[rows["end_ns"] > begin]
            compute = self.union(rows[rows["part"] == "compute"], begin, end)
            local = self.union(rows[rows["part"] != COMMUNICATION], begin, end)
            busy = self.union(rows, begin, end)
            found.append({"wall": end - begin, "compute": compute, "exposed copies": local - compute,
                          "exposed communication": busy - local, "idle": end - begin - busy})
        return pd.DataFrame(found) / 1e6

    def union(self, rows: pd.DataFrame, begin: int | None = None, end: int | None = None) -> float:
        first, last = (self.windows[0, 0], self.windows[-1, 1]) if begin is None else (begin, end)
        return union(rows["start_ns"].to_numpy().clip(first, last),
                     rows["end_ns"].to_numpy().clip(first, last))

    def a_step(self, ns: Any) -> Any:
        """Of ns in all steps the ms in one."""
        return ns / 1e6 / len(self.windows)

    def summed(self, rows: pd.DataFrame, by: str) -> pd.Series:
        """The sums of operations' times by a column, ms a step, the longest first."""
        found = rows.groupby(by, observed=True)["duration_ns"].sum()
        return self.a_step(found[found > 0].sort_values(ascending=False))

    def exposed(self, labels: pd.Series) -> pd.Series:
        """By label, where there is one, the ms a step in which only its operations run, the longest first."""
        rows, busy = self.operations, self.union(self.operations)
        found = {label: busy - self.union(rows[labels != label]) for label in labels.dropna().unique()}
        return self.a_step(pd.Series(found, dtype=float).sort_values(ascending=False))

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """Pauses of the GPU: ms, the next operation's name, and whether its launch was late."""
        rows = self.operations
        reached = rows["end_ns"].cummax().shift()
        launched = rows["launch_start_ns"] + rows["launch_duration_ns"]
        found = pd.DataFrame({"ms": (rows["start_ns"] - reached) / 1e6, "name": rows["name"].astype(str),
                              "late": (launched > reached).fillna(False).astype(bool)})
        return found[found["ms"] > 0]

    @cached_property
    def ahead_ms(self) -> float:
        """How long before it runs an operation was launched: the median."""
        launched = (self.operations["launch_start_ns"] + self.operations["launch_duration_ns"]).dropna()
        ahead = self.operations.loc[launched.index, "start_ns"] - launched.astype("int64")
        return float(ahead.median()) / 1e6

    @cached_property
    def matmuls(self) -> pd.DataFrame:
        """By dtype ms a step and TFLOP/s of the matmuls whose shapes are known, the longest first; empty
        where these are too few."""
        rows = self.operations[self.operations["flops"] > 0]
        first = ~rows.duplicated("operator")  # one operator's FLOPs, of however many kernels
        cores = (rows["dtype"] == "fp32") & matching(rows["name"], TENSOR_CORES.search)
        rows = rows.assign(dtype=rows["dtype"].mask(cores, "tf32"), flops=rows["flops"].where(first, 0))
        found = rows.groupby("dtype")[["flops", "duration_ns"]].sum()
        rates = pd.DataFrame({"ms": self.a_step(found["duration_ns"]),
                              "tflops": found["flops"] / found["duration_ns"] / 1e3})
        whole = self.summed(self.operations, "family").get(MATMUL, 0)
        return rates.sort_values("ms", ascending=False)[:None if rates["ms"].sum() >= RATED * whole else 0]

    @cached_property
    def generated(self) -> pd.DataFrame:
        """By name the bytes and ns of generated kernels whose arguments' sizes are known."""
        rows = self.operations
        rows = rows[(rows["family"] == GENERATED) & (rows["bytes"] > 0) & (rows["kind"] == "kernel")]
        return rows.groupby("name", observed=True)[["bytes", "duration_ns"]].sum()

    @cached_property
    def sheet(self) -> dict[str, Any]:
        return data_sheet(self.capture.gpus.get(self.number, ""))


def profile_text(path: Path | str, step: str | None = None, phases: Mapping[str, str] | None = None,
                 device: int | None = None, csv: Path | str | None = None) -> str:
    """What a capture says, a line a fact.

    Args:
        step, phases: as of ``load_capture``.
        device: the GPU that is looked into; None takes the one that works most.
        csv: where the operations go, one a line.

    Raises:
        TraceError: the capture cannot be read, or has no such GPU, step or phase.
        OSError: the CSV cannot be written.
    """
    capture = load_capture(path, step, phases)
    if csv is not None:
        capture.operations.to_csv(csv, index=False)
    gpus = _gpus(capture)
    if not gpus:
        raise TraceError(f"{path}: all {capture.left_out:,} operations were launched before"
                         f" {'its first step' if capture.steps else 'the capture'}, expected some within")
    asked = [one for one in gpus if device is None or one.number == device]
    if not asked:
        numbers = ", ".join(str(number) for number in sorted({one.number for one in gpus}))
        raise TraceError(f"{path}: has no work of GPU {device}, expected one of {numbers}")
    most = max(asked, key=lambda one: one.operations["duration_ns"].sum())
    alone = "step on GPU" if capture.steps else "on GPU"
    lines = [(alone if len(gpus) == 1 else one.name, _account(one)) for one in gpus]
    lines += [("phase", _phases(most)), ("family", _families(most)), _bound(most),
              ("communication", _communication(most)), ("matmul", _matmuls(most)),
              ("generated", _generated(most)), *_advice(most), ("not told", _not_told(most))]
    return "\n".join([_header(most, len(gpus)), *(f"{label:<14} {text}" for label, text in lines if text)])


def phases_of(said: Sequence[str]) -> dict[str, str] | None:
    """The phase that each range's name stands for, from "forward=NAME"; None where nothing is said.

    Raises:
        TraceError: one is of no such form.
    """
    found = {}
    for text in said:
        phase, _, name = text.partition("=")
        if not phase or not name:
            raise TraceError(f"--phase: got {clean(text)!r}, expected forward=NAME, with the name of a range")
        found[name] = phase
    return found or None


def _gpus(capture: Capture) -> list[Device]:
    """Each GPU, or, where processes see one of the same number (each rank its own as GPU 0), each one's."""
    groups = capture.operations.groupby(["device", "process"])
    several = len(groups) > capture.operations["device"].nunique()
    return [Device(capture, int(device), f"GPU {device}" + f", process {process}" * several,
                   rows.reset_index(drop=True)) for (device, process), rows in groups]


def _header(one: Device, gpus: int) -> str:
    capture, parts = one.capture, []
    if capture.rank:
        parts.append(f"rank {capture.rank[0]} of {capture.rank[1]}")
    name = clean(capture.gpus.get(one.number, "").removeprefix("NVIDIA ").removesuffix(" HBM3"))
    parts.append(name or one.name if gpus == 1 else f"{gpus} GPUs, details of {one.name} {name}".rstrip())
    names = " to ".join(dict.fromkeys(clean(name) for name in (capture.steps[:1] + capture.steps[-1:])))
    steps = f"{_counted(capture.steps, 'step')} ({names})" if names else "no steps found: all of it is one"
    text = ", ".join(parts) + f"; {steps}; {_counted(one.operations, 'operation')}"
    if capture.left_out:
        lasted = number(capture.left_out_ns / 1e6, "ms")
        text += f"; {capture.left_out:,} ({lasted}) launched before are left out"
    if after := len(one.all_operations) - len(one.operations):
        text += f"; {after:,} after the last step are left out"
    return text


def _counted(things: Sized, word: str) -> str:
    return f"{len(things):,} {word}{'s' * (len(things) != 1)}"


def _account(one: Device) -> str:
    walls, mean = one.accounts["wall"], one.accounts.mean()
    each = " ".join(digits(wall, "ms") for wall in walls.head(8)) + " ..." * (len(walls) > 8)
    told = (mean >= SEEN * mean["wall"]) | mean.index.isin(["compute", "idle"])
    parts = _listed(mean[told].drop("wall"))
    return number(mean["wall"], "ms") + f" ({each})" * (len(walls) > 1) + f": {parts}"


def _phases(one: Device) -> str:
    rows = one.operations
    found = one.summed(rows, "phase").sort_index()
    least = WORTH * found.sum()
    told = found.drop(OUTSIDE, errors="ignore")
    text = _listed(told, " | ") or "none found"
    if len(told):
        overlap = found.sum() - one.a_step(one.union(rows))
        if overlap > SEEN * found.sum():
            text += f" (kernel sums; {number(overlap, 'ms')} of it overlaps)"
        text += ", by autograd's ranges" * one.capture.autograd
        if found.get(OUTSIDE, 0.0) > least:
            text += f"; outside {number(found[OUTSIDE], 'ms')}"
    inside = one.summed(rows[(rows["phase"] == OUTSIDE) & (rows["range"] != "")], "range")
    inside = inside[inside >= least].head(RANGES).rename(index=lambda name: f"{name[:SHOWN - 2]!r}")
    if len(inside):
        text += f"; in ranges of other names (--phase forward=NAME says what they are): {_listed(inside)}"
    return text


def _listed(found: pd.Series, between: str = ", ") -> str:
    """Names and their ms, "matmul 27.2 | attention 5.20 ms"; empty of none."""
    text = between.join(f"{clean(name)} {digits(value, 'ms')}" for name, value in found.items())
    return f"{text} ms" if text else ""


def _families(one: Device) -> str:
    found = one.summed(one.operations, "family").rename(index=str)
    if len(found) > 5:
        found = pd.concat([found.head(5), pd.Series({"rest": found.iloc[5:].sum()})])
    return _listed(found, " | ")


def _bound(one: Device) -> tuple[str, str]:
    mean, gaps = one.accounts.mean(), one.gaps
    if one.operations["launch_start_ns"].isna().all():
        return "bound", "not told: the capture holds no launches"
    if len(one.operations) < FEW:
        return "bound", f"not told: too little to judge by, {_counted(one.operations, 'operation')}"
    late = gaps[gaps["late"]]
    waiting = late["ms"].sum() / len(one.windows)
    if waiting <= (1 - LAUNCH_BOUND) * mean["wall"]:
        ahead = f"the host is {number(max(one.ahead_ms, 0), 'ms')} ahead"
        ahead += f", longest gap {number(gaps['ms'].max() * 1e3, 'µs')}" if len(gaps) else ""
        if mean["idle"] <= (1 - LAUNCH_BOUND) * mean["wall"]:
            return "GPU-bound", ahead
        return "idle", f"{number(mean['idle'] / mean['wall'], '%')}, though launches are early: {ahead}"
    worst, each = late.loc[late["ms"].idxmax()], " a step" * bool(one.capture.steps)
    return "launch-bound", (
        f"the GPU waits {number(waiting, 'ms')}{each} ({number(waiting / mean['wall'], '%')}) for launches,"
        f" {len(one.operations) / len(one.windows):,.0f} operations{each}; longest gap"
        f" {number(worst['ms'] * 1e3, 'µs')} before {clean(short_name(worst['name']))}")


def _collective(name: str) -> str:
    found = COLLECTIVE.search(words(name))
    return found[0].replace(" ", "-") if found else "other"


def _communication(one: Device) -> str:
    communicates = one.operations["part"] == COMMUNICATION
    whole = one.a_step(one.union(one.operations[communicates]))
    if not whole:
        return ""
    exposed = one.accounts["exposed communication"].mean()
    text = f"{number(whole, 'ms')}, {number(1 - exposed / whole, '%')} hidden"
    if exposed:
        kinds = one.exposed(one.operations["name"].astype(str).where(communicates).map(
            _collective, na_action="ignore"))
        text += f"; exposed: {_listed(kinds[kinds >= 0.05 * exposed])}"
        phases = one.exposed(one.operations["phase"].astype(str).where(communicates))
        if phases.iloc[0] > 0.5 * exposed and phases.index[0] != OUTSIDE:
            share = number(phases.iloc[0] / exposed, "%")
            text += f", {share} of it launched by the {clean(phases.index[0])}"
    return text


def _matmuls(one: Device) -> str:
    said = []
    for dtype, row in one.matmuls[one.matmuls["ms"] >= WORTH * one.matmuls["ms"].sum()].iterrows():
        most = one.sheet.get("bf16" if dtype == "fp16" else str(dtype))
        of = f" ({number(row.tflops / most, '%')} of {most:,.0f})" if most else ""
        said.append(f"{clean(str(dtype))} {number(row.tflops, 'TFLOP/s')}{of}")
    return ", ".join(said)


def _generated(one: Device) -> str:
    made = one.generated.sum()
    if not made["duration_ns"]:
        return ""
    rate, most = made["bytes"] / made["duration_ns"] / 1e3, one.sheet.get("tb_s")
    of = f" ({number(rate / most, '%')} of {most})" if most else ""
    return f"{number(rate, 'TB/s')} by argument sizes{of}"


def _advice(one: Device) -> list[tuple[str, str]]:
    """At most three things to do, each with the most ms a step that it can save."""
    mean, rows, made = one.accounts.mean(), one.operations, one.generated
    found = [(mean["exposed communication"], "hide communication behind compute"),
             (mean["exposed copies"], "hide copies to and from the host (pinned memory, an own stream)"),
             (mean["idle"], "close gaps, by a CUDA graph or fewer launches")]
    if len(made) > 1:
        rate = made["bytes"] / made["duration_ns"]
        others = (made["bytes"].sum() - made["bytes"]) / (made["duration_ns"].sum() - made["duration_ns"])
        saved = one.a_step(made["duration_ns"] - made["bytes"] / others)
        slow = saved.idxmax()
        found.append((saved[slow], f"{clean(short_name(str(slow)))} at the other generated kernels'"
                      f" {number(others[slow] / 1e3, 'TB/s')} instead of {digits(rate[slow] / 1e3, 'TB/s')}"))
    if "bf16" in one.sheet:
        found += [(row.ms * (1 - row.tflops / one.sheet["bf16"]),
                   f"{dtype} matmuls in bf16, at the data sheet's rate")
                  for dtype, row in one.matmuls.iterrows() if dtype in ("fp32", "tf32")]
    loose = rows[rows["family"].isin(FUSABLE) & (rows["phase"] != "optimizer")]
    if (rows["family"] == GENERATED).sum() < 0.05 * len(rows):
        found.append((one.a_step(loose["duration_ns"].sum()),
                      "fuse elementwise kernels, copies, norms and softmax (torch.compile)"))
    worth = sorted((one for one in found if one[0] > WORTH * mean["wall"]), reverse=True)[:MOST]
    return [("" if place > 1 else "to do", f"{place}. {what}: at most {number(saved, 'ms')}"
             f" ({number(saved / mean['wall'], '%')})") for place, (saved, what) in enumerate(worth, start=1)]


def _not_told(one: Device) -> str:
    rows, said = one.operations, []
    if one.capture.rank and one.capture.rank[1] > 1:
        said.append("other ranks")
    if (rows["family"] == MATMUL).any() and one.matmuls.empty:
        said.append("matmul rates (torch.profiler's record_shapes=True tells them)")
    if unknown := int(rows["launch_start_ns"].isna().sum()):
        said.append(f"who launched {unknown:,} operations")
    return ", ".join([*said, "clocks", "the step without profiler"])


def clean(name: object) -> str:
    """A name from a file on one line: printable, and not too long."""
    line = "".join(char if char.isprintable() else " " for char in str(name)[:4 * SHOWN])
    line = " ".join(line.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN - 1]}…"
