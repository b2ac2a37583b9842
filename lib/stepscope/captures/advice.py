"""What is worth optimizing, ranked by one measure: the time that would leave the step.

For kernels that is the time in which nothing else runs, for idle gaps their length, for copies and
communication what is exposed. Each is a bound: an optimization saves at most that. Each piece of advice
covers one place and names it.
"""

import math
import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from stepscope.captures.account import GENERATED, Device
from stepscope.captures.communication import exposed_communication, on_compute_stream
from stepscope.files import one_line
from stepscope.report.tables import number
from stepscope.stats import LAUNCH_BOUND
from stepscope.traces.attribution import matching
from stepscope.traces.families import MATMUL
from stepscope.traces.kernel_names import short_names, words

FUSABLE = ("elementwise", "copy and cast", "reduction and norm", "softmax")
BETWEEN = (*FUSABLE, "random")  # what stands between attention's two matmuls
NEAR = 8  # operations from a softmax to the matmul before and after it
LOSS = re.compile(r"nll|entropy|log ?soft ?max", re.IGNORECASE)
MISALIGNED = re.compile(r"align[12](?![0-9])")
HALF = re.compile(r"bf16|f16(?!8)|fp16|half|hgemm|tensorop|s16816|s1688", re.IGNORECASE)
PLAIN_FP32 = re.compile(r"sgemm|simt_s|gemm_f32f32_f32f32_f32|gemmSN|ffma", re.IGNORECASE)
TF32 = re.compile(r"tf32|s1688|tensorop", re.IGNORECASE)
# What a call of the driver in an idle gap is for.
CALLS = {
    "Malloc|Free|HostAlloc": " (the allocator grows: reuse sizes, or set"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)",
    "Memcpy": " (use pinned memory and non_blocking=True)",
    "Module|Library|Launch|GetFunc|Graph": " (a kernel's first use loads it: warm up first)",
}
WORTH = 0.01  # of the step: less is not advised
MOST = 3
SHOWN = 60  # characters of a name
MIN_KNOWN = 0.5  # of the operations: where fewer launches are known, nobody knows whether they are early
OPERATOR = re.compile(r"^[\w.]+::")  # "aten::item", of a place


class Advice(NamedTuple):
    ms: float
    what: str


def advice(one: Device, waits: pd.DataFrame) -> list[Advice]:
    """Return at most MOST things to do, first the one that would take the most time out of the step.

    Args:
        waits: of ``causes.waits``.
    """
    if again := capture_again(one):
        return [Advice(0.0, again)]
    found = [
        *_of_communication(one),
        Advice(one.median["exposed copies"], _of_copies(one)),
        *_of_waits(waits, one.started_ms),
        *_of_attention(one),
        *_of_matmuls(one),
        *_of_generated(one),
    ]
    return sorted((each for each in found if each.ms > WORTH * one.median["wall"]), reverse=True)[:MOST]


def _of_communication(one: Device) -> list[Advice]:
    """Hide what is transfer; balance what waits for another GPU. A start-up is neither."""
    if one.started_ms:
        return []
    parts = exposed_communication(one)
    separate = " (it runs on the compute stream: use a separate one)" * on_compute_stream(one)
    waiting = (
        f"balance the GPUs: {shortened(parts.longest)} waits for another GPU, which arrives later (compare"
        " the ranks' captures)"
    )
    unknown = "; its message sizes are unknown, so part of it may be waiting for another GPU"
    hide = f"hide communication behind compute{separate}" + unknown * math.isnan(parts.least_ms)
    return [
        Advice(parts.transfer_ms, hide),
        Advice(parts.waiting_ms, waiting),
    ]


def _of_copies(one: Device) -> str:
    rows = one.operations[one.operations["part"] == "copies"]
    pageable = rows["name"].astype(str).str.contains("Pageable").any()
    how = (
        "the memory is pageable: pin it, and copy with non_blocking=True"
        if pageable
        else "use pinned memory and a separate stream"
    )
    return f"hide copies to and from the host ({how})"


def capture_again(one: Device) -> str:
    """Return what a second capture should record, where this one lacks what advice follows from; "" where it
    does not."""
    if one.unseen_graphs:
        return "capture again with the operations of CUDA graphs: without them, the idle time is unknown"
    undivided = len(one.host_steps) > 0 and not one.has_steps
    idle = one.median["idle"] > (1 - LAUNCH_BOUND) * one.median["wall"]
    if one.known_launches < MIN_KNOWN and (idle or undivided):
        return (
            "capture again with the host's launches (torch.profiler's ProfilerActivity.CPU, nsys's"
            " --trace=cuda): without them, neither steps nor the reason of idle time are known"
        )
    if undivided:
        return (
            f"capture again: {one.empty_steps:,} of {len(one.host_steps):,} steps have no GPU work in this"
            " capture"
        )
    return ""


def _of_waits(waits: pd.DataFrame, started_ms: float) -> list[Advice]:
    """Return what follows from each cause of idle time, at each place."""
    if started_ms:
        return [
            Advice(
                started_ms,
                "capture steady steps: start the capture after the warm-up"
                " (torch.profiler.schedule, nsys --capture-range=cudaProfilerApi)",
            )
        ]
    rows = waits[waits["cause"].isin(ADVISED)].to_dict("records")
    return [Advice(row["ms"], ADVISED[row["cause"]](row["call"], row["where"])) for row in rows]


def _of_sync(call: str, place: str) -> str:
    return (
        f"avoid {call}{_in(place)}, so that the host can run ahead (no .item() or .cpu(); copy from pinned"
        " memory with non_blocking=True)"
    )


def _of_call(call: str, place: str) -> str:
    use = next((use for pattern, use in CALLS.items() if re.search(pattern, call)), "")
    return f"keep {call}{_in(place)} out of the step{use}"


def _of_host(_: str, place: str) -> str:
    if OPERATOR.match(place):
        return (
            f"call {one_line(place, SHOWN)} less often, or compile it (torch.compile): the host is busy in it"
        )
    return f"move {one_line(place, SHOWN)} off the critical path (another process or thread, or one step earlier)"


def _of_unnamed(_: str, place: str) -> str:
    return (
        f"find out what the host does{_in(place)} while the GPU is idle: this capture does not name it"
        " (with_stack=True, record_function or NVTX ranges do)"
    )


def _of_device(_: str, place: str) -> str:
    if not place:
        return "shorten the gaps between operations that are already queued, by fewer, larger kernels"
    return (
        f"find out what {shortened(place)} waits for: it was launched in time (an event, another stream or"
        " another GPU)"
    )


def _of_launches(_: str, __: str) -> str:
    return "launch less: use a CUDA graph, torch.compile or fewer, larger kernels"


def shortened(name: str) -> str:
    """Return the short name of a kernel."""
    return short_names([name], SHOWN)[name]


def _in(place: str) -> str:
    """Name a place, without the ranges and lines around it."""
    return f" in {one_line(place, SHOWN)}" if place else ""


ADVISED = {
    "sync": _of_sync,
    "call": _of_call,
    "host": _of_host,
    "unnamed": _of_unnamed,
    "device": _of_device,
    "launch": _of_launches,
}


def unfused_attention(rows: pd.DataFrame) -> np.ndarray:
    """Return which operations stand between the two matmuls of an attention that is not fused: softmax, and
    masks, scales, casts and dropout around it. A loss's softmax is not among them."""
    found = np.full(len(rows), False)
    family = rows["family"].astype(str).to_numpy()
    names = rows["name"].astype(str).to_numpy()
    for _, places in pd.Series(np.arange(len(rows))).groupby(rows["stream"].to_numpy()):
        at = places.to_numpy()
        for place in np.flatnonzero(family[at] == "softmax"):
            before, after = at[max(0, place - NEAR) : place][::-1], at[place + 1 : place + 1 + NEAR]
            inner = [_until_matmul(family, side) for side in (before, after)]
            if None in inner:
                continue
            own = [at[place], *inner[0], *inner[1]]  # type: ignore[misc]
            if not any(LOSS.search(words(names[i])) for i in own):
                found[own] = True
    return found


def _until_matmul(family: np.ndarray, places: np.ndarray) -> list[int] | None:
    """Return the places before the first matmul; None where there is none, or other work before it."""
    own: list[int] = []
    for i in places:
        if family[i] == MATMUL:
            return own
        if family[i] not in BETWEEN:
            return None
        own.append(i)
    return None


def _of_attention(one: Device) -> list[Advice]:
    """Advise fused attention, and torch.compile for what else could be fused."""
    rows = one.running
    attention = pd.Series(unfused_attention(rows), rows.index)
    loose = rows["family"].isin(FUSABLE) & (rows["phase"] != "optimizer") & ~attention
    found = [
        Advice(
            one.leaves(attention),
            "use F.scaled_dot_product_attention instead of separate matmul and softmax kernels",
        )
    ]
    if (rows["family"] == GENERATED).sum() < 0.05 * len(rows):
        found.append(
            Advice(one.leaves(loose), "fuse elementwise, copy, norm and softmax kernels (torch.compile)")
        )
    return found


def _of_matmuls(one: Device) -> list[Advice]:
    """Advise on matmuls that leave tensor cores unused, or cannot use them well."""
    rows, sheet = one.running, one.sheet
    products = rows["family"] == MATMUL
    half = products & (
        rows["dtype"].isin(["bf16", "fp16"]) | (rows["dtype"] == "") & matching(rows["name"], HALF.search)
    )
    crooked = half & matching(rows["name"], MISALIGNED.search)
    plain = matching(rows["name"], PLAIN_FP32.search) & ~matching(rows["name"], TF32.search)
    single = products & ((~half & plain) | (rows["dtype"] == "fp32"))
    found = []
    if crooked.any():
        found.append(
            Advice(
                _faster(one, crooked, sheet.get("bf16", sheet.get("fp16"))),
                f"{_counted(crooked.sum() / len(one.middle))} unaligned loads ({_align(rows[crooked])}): pad"
                " their dimensions and strides to multiples of 8",
            )
        )
    if single.any():
        most = rows[single].groupby("name", observed=True)["duration_ns"].sum().idxmax()
        how = (
            "autocast to fp16"
            if "fp16" in sheet
            else "torch.set_float32_matmul_precision('high') for TF32, or autocast to bf16"
        )
        found.append(
            Advice(
                _faster(one, single, sheet.get("bf16", sheet.get("fp16")), sheet.get("fp32")),
                f"run fp32 matmuls, such as {shortened(str(most))}, on tensor cores ({how})",
            )
        )
    return found


def _counted(matmuls: float) -> str:
    return "1 matmul uses" if matmuls == 1 else f"{matmuls:,.0f} matmuls use"


def _align(rows: pd.DataFrame) -> str:
    found = MISALIGNED.search(" ".join(map(str, rows["name"].unique())))
    return found[0] if found else ""


def _faster(one: Device, chosen: pd.Series, most: float | None, now: float | None = None) -> float:
    """Return the ms that would leave the step if these matmuls ran at ``most`` TFLOP/s: by their FLOPs where
    these are known; else as if they ran at ``now``; without a data sheet all of their time."""
    rows = one.running[chosen.to_numpy()]
    total = one.leaves(chosen)
    flops = rows.loc[~rows.duplicated("operator") & (rows["flops"] > 0), "flops"].sum()
    if not most:
        return total
    if flops:
        spent = rows.loc[rows["flops"] > 0, "duration_ns"].sum()
        return total * max(0.0, 1 - flops / max(spent, 1) / 1e3 / most)
    return total * (1 - now / most) if now else total


def _of_generated(one: Device) -> list[Advice]:
    """Advise on a generated kernel that moves its bytes far slower than the others."""
    made = one.generated
    if len(made) < 2:
        return []
    rate = made["bytes"] / made["duration_ns"]
    others = (made["bytes"].sum() - made["bytes"]) / (made["duration_ns"].sum() - made["duration_ns"])
    saved = one.a_step(made["duration_ns"] - made["bytes"] / others)
    slow = saved.idxmax()
    share = one.leaves(one.running["name"] == slow) / max(one.a_step(made.at[slow, "duration_ns"]), 1e-9)
    return [
        Advice(
            float(saved[slow]) * min(1.0, share),
            f"speed up {shortened(str(slow))}: it moves {number(rate[slow] / 1e3, 'TB/s')}, the other"
            f" generated kernels {number(others[slow] / 1e3, 'TB/s')}",
        )
    ]
