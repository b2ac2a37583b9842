"""What a capture says, as text: a line a fact. ``stepscope profile FILE`` prints it.

wall = compute + exposed copies and communication + idle, by unions of intervals: what is exposed is the time
in which nothing else runs. A step on the GPU lasts until the next one's first operation begins.
"""
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.step.data_sheets import data_sheet
from stepscope.step.stats import LAUNCH_BOUND, union
from stepscope.traces.attribution import OUTSIDE, TraceError
from stepscope.traces.capture import Capture, load_capture, matching
from stepscope.traces.families import MATMUL, OTHER
from stepscope.traces.kernel_names import short_name

FEW = 5      # operations: of fewer it is not told what bounds them
RATED = 0.5  # of the matmuls' time: where shapes are known of less, their rate is none of the whole
COMMUNICATION, GENERATED = "communication", "compiler-generated"
KINDS_OF_COMMUNICATION = [("reduce-scatter", r"reduce_?scatter"), ("all-gather", r"all_?gather"),
                          ("all-reduce", r"all_?reduce"),
                          ("all-to-all", r"all_?to_?all|send_?recv|dispatch|combine"),
                          ("broadcast", r"broadcast")]
HOST_COPY = re.compile(r"HtoD|DtoH|Host|Pinned|Pageable", re.IGNORECASE)  # names of copies alone are asked
FUSABLE = ("elementwise", "copy and cast", "reduction and norm", "softmax")
WORTH, MOST = 0.01, 3  # of the step: less is not advised; so many things to do
RANGES = 4           # of no phase: so many are named
SHOWN, LABEL = 60, 15  # characters of a name, and of a line's label


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
        host = (rows["kind"] == "memcpy") & matching(rows["name"], HOST_COPY)
        part = np.where(rows["family"] == COMMUNICATION, COMMUNICATION, np.where(host, "copies", "compute"))
        return rows.assign(end_ns=rows["start_ns"] + rows["duration_ns"], part=part)

    @property
    def steps(self) -> int:
        return len(self.windows)

    @property
    def each(self) -> str:
        return " a step" if self.capture.steps else ""

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

    def exposed_ms(self, which: pd.Series) -> float:
        """Ms a step in which only these operations run."""
        return (self.union(self.operations) - self.union(self.operations[~which])) / 1e6 / self.steps

    def ms(self, rows: pd.DataFrame) -> float:
        """The sum of operations' times, ms a step."""
        return rows["duration_ns"].sum() / 1e6 / self.steps

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """Pauses of the GPU: ms, whether the next operation's launch was late, its phase, and how far ahead.
        """
        rows = self.operations.sort_values("start_ns")
        reached = rows["end_ns"].cummax().shift()
        gap = rows["start_ns"] - reached
        launched = rows["launch_start_ns"] + rows["launch_duration_ns"]
        found = pd.DataFrame({"ms": gap / 1e6, "late": (launched > reached).fillna(False).astype(bool),
                              "phase": rows["phase"].astype(str), "name": rows["name"].astype(str)})
        return found[gap > 0]

    @cached_property
    def ahead_ms(self) -> float:
        """How long before it runs an operation was launched: the median."""
        launched = (self.operations["launch_start_ns"] + self.operations["launch_duration_ns"]).dropna()
        ahead = self.operations.loc[launched.index, "start_ns"] - launched.astype("int64")
        return float(ahead.median()) / 1e6


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
    steps = [_steps(one, len(gpus) > 1) for one in gpus]
    return "\n".join([_header(most, len(gpus)), *steps, *_looked_into(most)])


def _gpus(capture: Capture) -> list[Device]:
    """Each GPU, or, where processes see one of the same number (each rank its own as GPU 0), each one's."""
    groups = capture.operations.groupby(["device", "process"])
    several = len(groups) > capture.operations["device"].nunique()
    return [Device(capture, int(device), f"GPU {device}" + f", process {process}" * several,
                   rows.reset_index(drop=True)) for (device, process), rows in groups]


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


def _looked_into(one: Device) -> list[str]:
    matmuls, generated = _rates(one)
    facts = {"phase": _phases(one), "family": _families(one), _bound(one)[0]: _bound(one)[1],
             "communication": _communication(one), "copies": _copies(one), "matmul": matmuls,
             "generated": generated}
    lines = [f"{name:<{LABEL}}{text}" for name, text in facts.items() if text]
    advice = [f"{place}. {what}: {_ms(saved)} ms ({_percent(saved / one.accounts['wall'].mean())})"
              for place, (saved, what) in enumerate(_advice(one), start=1)]
    if advice:
        lines += [f"{'' if place else 'to do, most it can save:':<{LABEL + 10}}{text}"
                  for place, text in enumerate(advice)]
    return [*lines, f"{'not told':<{LABEL}}{_not_told(one, matmuls)}"]


def _header(one: Device, gpus: int) -> str:
    capture, parts = one.capture, []
    if capture.rank:
        parts.append(f"rank {capture.rank[0]} of {capture.rank[1]}")
    name = clean(capture.gpus.get(one.number, "").removeprefix("NVIDIA ").removesuffix(" HBM3"))
    parts.append(name or one.name if gpus == 1 else f"{gpus} GPUs, details of {one.name} {name}".rstrip())
    steps = f"{len(capture.steps)} steps ({_numbered(capture.steps)})" if len(capture.steps) > 1 else (
        f"1 step ({clean(capture.steps[0])})" if capture.steps else "no steps found: all of it is one")
    plural = "s" if len(one.operations) != 1 else ""
    text = ", ".join(parts) + f"; {steps}; {len(one.operations):,} operation{plural}"
    if capture.left_out:
        text += f"; {capture.left_out:,} ({_ms(capture.left_out_ns / 1e6)} ms) launched before are left out"
    if after := len(one.all_operations) - len(one.operations):
        text += f"; {after:,} after the last step are left out"
    return text


def _numbered(names: list[str]) -> str:
    """ProfilerStep#10-13 of names that differ in their number, else the first one's name."""
    found = [re.fullmatch(r"(.*?)(\d+)", name) for name in (names[0], names[-1])]
    if found[0] and found[1] and found[0][1] == found[1][1]:
        return clean(f"{found[0][0]}-{found[1][2]}")
    return clean(names[0])


def _steps(one: Device, several: bool) -> str:
    accounts = one.accounts
    mean = accounts.mean()
    each = " ".join(_ms(value) for value in accounts["wall"].head(8)) + (" ..." if len(accounts) > 8 else "")
    parts = [f"{name} {_ms(mean[name])}" for name in accounts.columns[1:]
             if name in ("compute", "idle") or mean[name] >= 0.0005 * mean["wall"]]
    label = one.name if several else "step on GPU" if one.capture.steps else "on GPU"
    shown = f" ({each})" if len(accounts) > 1 else ""
    return f"{label:<{LABEL}}{_ms(mean['wall'])} ms{shown}: {', '.join(parts)}"


def _phases(one: Device) -> str:
    rows = one.operations
    found = rows.groupby("phase", observed=True)["duration_ns"].sum() / 1e6 / one.steps
    told = [f"{clean(name)} {_ms(value)}" for name, value in found.items() if name != OUTSIDE]
    text = (" | ".join(told) + " ms") if told else "none found"
    overlap = one.ms(rows) - one.union(rows) / 1e6 / one.steps
    if told and overlap >= 0.0005 * one.accounts["wall"].mean():
        text += f" (kernel sums; {_ms(overlap)} ms of it overlaps)"
    if told and one.capture.autograd:
        text += ", by autograd's ranges"
    if told and found.get(OUTSIDE, 0.0) > WORTH * found.sum():
        text += f"; outside {_ms(found[OUTSIDE])} ms"
    return text + _ranges_outside(rows[rows["phase"] == OUTSIDE], one, WORTH * found.sum())


def _ranges_outside(rows: pd.DataFrame, one: Device, least: float) -> str:
    """The ranges that hold most of what is in no phase, each with its time; and how to say which phase they
    are."""
    inside = rows[rows["range"] != ""]
    found = inside.groupby("range", observed=True)["duration_ns"].sum() / 1e6 / one.steps
    found = found.sort_values(ascending=False)
    found = found[found >= least].head(RANGES)
    if found.empty:
        return ""
    said = ", ".join(f"{clean(name)!r} {_ms(value)}" for name, value in found.items())
    return f"; in ranges of other names (--phase forward=NAME says what they are): {said} ms"


def _families(one: Device) -> str:
    found = one.operations.groupby("family", observed=True)["duration_ns"].sum().sort_values(ascending=False)
    found = found[found > 0] / 1e6 / one.steps
    text = " | ".join(f"{name} {_ms(value)}" for name, value in found.head(5).items())
    text += f" | rest {_ms(found.iloc[5:].sum())}" if len(found) > 5 else ""
    if found.get(OTHER, 0) > 0.01 * found.sum():
        other = one.operations[one.operations["family"] == OTHER]
        named = other.groupby("name", observed=True)["duration_ns"].sum().idxmax()
        text += f" (of no known family {_ms(found[OTHER])}, most: {clean(named)})"
    return f"{text} ms"


def _bound(one: Device) -> tuple[str, str]:
    mean, gaps = one.accounts.mean(), one.gaps
    if one.operations["launch_start_ns"].isna().all():
        return "bound", "not told: the capture holds no launches"
    if len(one.operations) < FEW:
        return "bound", f"not told: too little to judge by, {len(one.operations):,} operations"
    late = gaps[gaps["late"]]
    waiting = late["ms"].sum() / one.steps
    if waiting <= (1 - LAUNCH_BOUND) * mean["wall"]:
        ahead = f"the host is {_ms(max(one.ahead_ms, 0))} ms ahead"
        ahead += f", longest gap {_us(gaps['ms'].max())}" if len(gaps) else ""
        if mean["idle"] <= (1 - LAUNCH_BOUND) * mean["wall"]:
            return "GPU-bound", ahead
        return "idle", f"{_percent(mean['idle'] / mean['wall'])}, though launches are early: {ahead}"
    worst = late.loc[late["ms"].idxmax()]
    return "launch-bound", (
        f"the GPU waits {_ms(waiting)} ms{one.each} ({_percent(waiting / mean['wall'])}) for launches,"
        f" {len(one.operations) / one.steps:,.0f} operations{one.each}; longest gap {_us(worst['ms'])} before"
        f" {clean(short_name(worst['name']))}")


def _communication(one: Device) -> str:
    rows = one.operations[one.operations["part"] == COMMUNICATION]
    if rows.empty:
        return ""
    whole, exposed = one.union(rows) / 1e6 / one.steps, one.accounts["exposed communication"].mean()
    text = f"{_ms(whole)} ms, {_percent(1 - exposed / whole if whole else 0)} hidden"
    communicates = one.operations["part"] == COMMUNICATION
    kinds, taken = {}, ~communicates
    for kind, pattern in [*KINDS_OF_COMMUNICATION, ("other", "")]:
        named = matching(one.operations["name"], re.compile(pattern, re.IGNORECASE))
        own = ~taken & named
        kinds[kind], taken = one.exposed_ms(own), taken | own
    said = [f"{kind} {_ms(value)}" for kind, value in sorted(kinds.items(), key=lambda item: -item[1])
            if value >= 0.05 * exposed and value > 0]
    text += f"; exposed: {', '.join(said)} ms" if said else ""
    phases = {phase: one.exposed_ms(communicates & (one.operations["phase"] == phase))
              for phase in rows["phase"].unique()}
    first = max(phases, key=lambda phase: phases[phase])
    if exposed and phases[first] > 0.5 * exposed and first != OUTSIDE:
        text += f", {_percent(phases[first] / exposed)} of it launched by the {clean(first)}"
    return text


def _copies(one: Device) -> str:
    said = []
    for name, rows in one.operations[one.operations["part"] == "copies"].groupby("name", observed=True):
        if one.ms(rows) > WORTH * one.accounts["wall"].mean():
            known = rows[rows["bytes"] >= 0]
            rate = known["bytes"].sum() / max(1, known["duration_ns"].sum())
            said.append(f"{clean(name)} {_ms(one.ms(rows))} ms"
                        + (f" at {rate:.3g} GB/s" if len(known) else ""))
    return "; ".join(said)


def _matmul_rates(one: Device) -> pd.DataFrame:
    """By dtype: ms a step and TFLOP/s of the matmuls whose shapes are known; fp32 on tensor cores is TF32."""
    rows = one.operations[one.operations["flops"] > 0]
    first = ~rows.duplicated("operator")  # one operator's FLOPs, of however many kernels
    cores = matching(rows["name"], re.compile(r"tf32|s1688|s16816|tensorop", re.IGNORECASE))
    rows = rows.assign(dtype=rows["dtype"].mask((rows["dtype"] == "fp32") & cores, "tf32"),
                       flops=rows["flops"].where(first, 0))
    found = rows.groupby("dtype")[["flops", "duration_ns"]].sum()
    return pd.DataFrame({"ms": found["duration_ns"] / 1e6 / one.steps,
                         "tflops": found["flops"] / found["duration_ns"] / 1e3})


def _rates(one: Device) -> tuple[str, str]:
    rates, sheet = _matmul_rates(one), data_sheet(one.capture.gpus.get(one.number, ""))
    said = []
    rated = rates[rates["ms"] >= WORTH * rates["ms"].sum()].sort_values("ms", ascending=False)
    for dtype, row in rated.iterrows():
        most = sheet.get("bf16" if dtype == "fp16" else str(dtype))
        of = f" ({_percent(row.tflops / most)} of {most:,.0f})" if most else ""
        said.append(f"{clean(str(dtype))} {_three(row.tflops)} TFLOP/s{of}")
    whole = one.operations.loc[one.operations["family"] == MATMUL, "duration_ns"].sum() / 1e6 / one.steps
    matmul = ", ".join(said)
    if rates["ms"].sum() < RATED * whole:
        matmul = ""
    elif said and whole and rates["ms"].sum() < 0.9 * whole:
        matmul += f"; shapes are known of {_percent(rates['ms'].sum() / whole)} of their time"
    made = _generated(one)
    if made.empty:
        return matmul, ""
    rate = made["bytes"].sum() / made["duration_ns"].sum() / 1e3
    most = f" ({_percent(rate / sheet['tb_s'])} of {sheet['tb_s']})" if sheet else ""
    return matmul, f"{_three(rate)} TB/s by argument sizes{most}"


def _generated(one: Device) -> pd.DataFrame:
    """Generated kernels whose arguments' sizes are known, by name."""
    rows = one.operations
    rows = rows[(rows["family"] == GENERATED) & (rows["bytes"] > 0) & (rows["kind"] == "kernel")]
    return rows.groupby("name", observed=True)[["bytes", "duration_ns"]].sum()


def _advice(one: Device) -> list[tuple[float, str]]:
    """At most three things to do, each with the most ms a step that it can save."""
    mean = one.accounts.mean()
    found = [(mean["exposed communication"], "hide communication behind compute"),
             (mean["exposed copies"], "hide copies to and from the host (pinned memory, an own stream)"),
             (mean["idle"], "gaps, by a CUDA graph or fewer launches")]
    made = _generated(one)
    if len(made) > 1:
        rate = made["bytes"] / made["duration_ns"]
        others = (made["bytes"].sum() - made["bytes"]) / (made["duration_ns"].sum() - made["duration_ns"])
        saved = (made["duration_ns"] - made["bytes"] / others) / 1e6 / one.steps
        slow = saved.idxmax()
        found.append((saved[slow], f"{clean(short_name(str(slow)))} at the other generated kernels' "
                      f"{others[slow] / 1e3:.3g} TB/s instead of {rate[slow] / 1e3:.3g}"))
    rates, sheet = _matmul_rates(one), data_sheet(one.capture.gpus.get(one.number, ""))
    for dtype in ("fp32", "tf32"):
        if dtype in rates.index and "bf16" in sheet:
            row = rates.loc[dtype]
            found.append((row.ms * (1 - row.tflops / sheet["bf16"]),
                          f"{dtype} matmuls in bf16, at the data sheet's rate"))
    rows = one.operations
    loose = rows[rows["family"].isin(FUSABLE) & (rows["phase"] != "optimizer")]
    if (rows["family"] == GENERATED).sum() < 0.05 * len(rows):
        found.append((one.ms(loose), "elementwise kernels, copies, norms and softmax, if all are fused"
                      " (torch.compile)"))
    worth = [(saved, what) for saved, what in found if saved > WORTH * mean["wall"]]
    return sorted(worth, reverse=True)[:MOST]


def _not_told(one: Device, matmuls: str) -> str:
    rows, said = one.operations, []
    if one.capture.rank and one.capture.rank[1] > 1:
        said.append("other ranks")
    if (rows["family"] == MATMUL).any() and not matmuls:
        said.append("matmul rates: shapes of too few" if (rows["flops"] > 0).any()
                    else "matmul rates: no shapes (record_shapes=True)"
                    if one.capture.path.rstrip(".gz").endswith("json")
                    else "matmul rates: nsys has no shapes")
    if unknown := int(rows["launch_start_ns"].isna().sum()):
        said.append(f"who launched {unknown:,} operations")
    return ", ".join([*said, "clocks", "the step without profiler"])


def clean(name: str) -> str:
    """A name from a file on one line: printable, and not too long."""
    line = "".join(char if char.isprintable() else " " for char in str(name)[:4 * SHOWN])
    line = " ".join(line.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN - 1]}…"


def _ms(value: float) -> str:
    """Milliseconds: one decimal from 1, two digits below, none from 1,000."""
    if not np.isfinite(value):
        return "?"
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 0.95 else f"{value:.2g}"


def _three(value: float) -> str:
    """Three significant digits, and no exponent of a large number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _us(ms: float) -> str:
    return f"{ms * 1e3:,.0f} µs" if ms < 1 else f"{_ms(ms)} ms"


def _percent(share: float) -> str:
    if not np.isfinite(share):
        return "?"
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"
