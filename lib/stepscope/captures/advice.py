"""Rank possible optimizations by the time that each could save per step.

Optimizing a kernel can save the time during which only that kernel runs, closing an idle gap saves the length of
the gap, and hiding a copy or a collective saves its exposed time. These savings are upper bounds. Each piece of
advice concerns a single place in the program, and names that place.
"""

import math
import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from stepscope.captures.communication import communicates_on_compute_stream, exposed_communication
from stepscope.captures.step_breakdown import GENERATED, Device
from stepscope.files import one_line
from stepscope.report.tables import number
from stepscope.stats import LAUNCH_BOUND
from stepscope.traces.attribution import matching
from stepscope.traces.kernel_categories import MATMUL
from stepscope.traces.kernel_names import short_names, words

FUSABLE = ("elementwise", "copy and cast", "reduction and norm", "softmax")
BETWEEN_MATMULS = (*FUSABLE, "random")  # categories of the kernels between attention's two matmuls
MAX_OPS_TO_MATMUL = 8  # maximum distance, in operations, between a softmax and the matmul before or after it
LOSS = re.compile(r"nll|entropy|log ?soft ?max", re.IGNORECASE)
MISALIGNED = re.compile(r"align[12](?![0-9])")
HALF_PRECISION = re.compile(r"bf16|f16(?!8)|fp16|half|hgemm|tensorop|s16816|s1688", re.IGNORECASE)
PLAIN_FP32 = re.compile(r"sgemm|simt_s|gemm_f32f32_f32f32_f32|gemmSN|ffma", re.IGNORECASE)
TF32 = re.compile(r"tf32|s1688|tensorop", re.IGNORECASE)
# Remedies for driver calls in idle gaps, keyed by a pattern that matches the call's name.
CALL_REMEDIES = {
    "Malloc|Free|HostAlloc": " (the allocator grows: reuse sizes, or set"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)",
    "Memcpy": " (use pinned memory and non_blocking=True)",
    "Module|Library|Launch|GetFunc|Graph": " (a kernel's first use loads it: warm up first)",
}
MIN_ADVICE_SHARE = 0.01  # share of the step; smaller savings don't justify advice
MAX_ADVICE = 3
MAX_NAME_CHARS = 60
MIN_KNOWN_LAUNCH_SHARE = 0.5  # share of operations with known launches; causes are unknown below it
OPERATOR = re.compile(r"^[\w.]+::")  # such as "aten::item"


class Advice(NamedTuple):
    ms: float
    what: str


def rank_advice(gpu: Device, causes: pd.DataFrame) -> list[Advice]:
    """Return at most MAX_ADVICE pieces of advice, starting with the largest possible saving.

    Args:
        causes: the idle time by cause, as returned by ``sum_by_cause``.
    """
    candidates = [
        *_advice_for_communication(gpu),
        Advice(gpu.median["exposed copies"], _copy_advice_text(gpu)),
        *_advice_for_idle(causes, gpu.startup_ms),
        *_advice_for_attention(gpu),
        *_advice_for_matmuls(gpu),
        *_advice_for_generated(gpu),
    ]
    min_ms = MIN_ADVICE_SHARE * gpu.median["wall"]
    worthwhile = [item for item in candidates if item.ms > min_ms]
    return sorted(worthwhile, reverse=True)[:MAX_ADVICE]


def _advice_for_communication(gpu: Device) -> list[Advice]:
    """Advise hiding transfers, and balancing the work among GPUs that wait for one another.

    If the capture contains a start-up, the result is empty.
    """
    if gpu.startup_ms:
        return []
    parts = exposed_communication(gpu)
    hide = "hide communication behind compute"
    if communicates_on_compute_stream(gpu):
        hide += " (it runs on the compute stream: use a separate stream)"
    if math.isnan(parts.min_transfer_ms) and not parts.is_measured:
        hide += "; its message sizes are unknown, so part of it may be waiting for another GPU"
    balance = (
        f"balance the GPUs: {short_kernel_name(parts.longest)} waits for another GPU, which arrives later (compare"
        " the ranks' captures)"
    )
    return [
        Advice(parts.transfer_ms, hide),
        Advice(parts.waiting_ms, balance),
    ]


def _copy_advice_text(gpu: Device) -> str:
    rows = gpu.operations[gpu.operations["part"] == "copies"]
    is_pageable = rows["name"].astype(str).str.contains("Pageable").any()
    how = (
        "the memory is pageable: pin it, and copy with non_blocking=True"
        if is_pageable
        else "use pinned memory and a separate stream"
    )
    return f"hide copies to and from the host ({how})"


def capture_again(gpu: Device) -> str:
    """Describe what a new capture should record, or return "" if this capture is sufficient for advice."""
    if gpu.untraced_graphs:
        return "capture again with the operations of CUDA graphs: without them, the idle time is unknown"
    has_mostly_empty_steps = len(gpu.host_steps) > 0 and not gpu.has_steps
    is_idle = gpu.median["idle"] > (1 - LAUNCH_BOUND) * gpu.median["wall"]
    if gpu.known_launch_share < MIN_KNOWN_LAUNCH_SHARE and (is_idle or has_mostly_empty_steps):
        return (
            "capture again with the host's launches (torch.profiler's ProfilerActivity.CPU, nsys's"
            " --trace=cuda): without them, neither the steps nor the causes of idle time are known"
        )
    if has_mostly_empty_steps:
        return (
            f"capture again: {gpu.empty_steps:,} of {len(gpu.host_steps):,} steps have no GPU work in this"
            " capture"
        )
    return ""


def _advice_for_idle(causes: pd.DataFrame, startup_ms: float) -> list[Advice]:
    """Give advice for each cause of idle time at each place in the program.

    If the capture contains a start-up, the only advice is to start the capture later.
    """
    if startup_ms:
        return [
            Advice(
                startup_ms,
                "capture steady steps: start the capture after the warm-up"
                " (torch.profiler.schedule, nsys --capture-range=cudaProfilerApi)",
            )
        ]
    rows = causes[causes["cause"].isin(TEXT_BY_CAUSE)].to_dict("records")
    return [Advice(row["ms"], TEXT_BY_CAUSE[row["cause"]](row["call"], row["where"])) for row in rows]


def _text_for_sync(call: str, place: str) -> str:
    return (
        f"avoid {call}{_location_text(place)}, so that the host can run ahead (no .item() or .cpu();"
        " copy from pinned memory with non_blocking=True)"
    )


def _text_for_call(call: str, place: str) -> str:
    remedy = next((remedy for pattern, remedy in CALL_REMEDIES.items() if re.search(pattern, call)), "")
    return f"keep {call}{_location_text(place)} out of the step{remedy}"


def _text_for_host(_: str, place: str) -> str:
    name = one_line(place, MAX_NAME_CHARS)
    if OPERATOR.match(place):
        return f"call {name} less often, or compile it (torch.compile): the host spends its time there"
    return f"move {name} off the critical path (another process or thread, or one step earlier)"


def _text_for_unnamed(_: str, place: str) -> str:
    return (
        f"find out what the host does{_location_text(place)} while the GPU is idle: this capture does not name it"
        " (captures with with_stack=True, record_function or NVTX ranges do)"
    )


def _text_for_device(_: str, place: str) -> str:
    if not place:
        return "use fewer, larger kernels to shorten the gaps between operations that are already queued"
    return (
        f"find out what {short_kernel_name(place)} waits for (an event, another stream or another GPU): it was"
        " launched in time"
    )


def _text_for_launches(_: str, __: str) -> str:
    return "launch fewer kernels: use a CUDA graph, torch.compile or larger kernels"


def short_kernel_name(name: str) -> str:
    """Return a kernel's short name of at most MAX_NAME_CHARS characters."""
    return short_names([name], MAX_NAME_CHARS)[name]


def _location_text(place: str) -> str:
    """Return " in " followed by the place, or "" if the place is unknown."""
    return f" in {one_line(place, MAX_NAME_CHARS)}" if place else ""


TEXT_BY_CAUSE = {
    "sync": _text_for_sync,
    "call": _text_for_call,
    "host": _text_for_host,
    "unnamed": _text_for_unnamed,
    "device": _text_for_device,
    "launch": _text_for_launches,
}


def unfused_attention(rows: pd.DataFrame) -> np.ndarray:
    """Return a mask of the operations between the two matmuls of unfused attention.

    These operations are attention's softmax, and the masking, scaling, casting and dropout around it. The softmax
    of a loss is excluded.
    """
    is_unfused = np.full(len(rows), False)
    family = rows["kernel_category"].astype(str).to_numpy()
    names = rows["name"].astype(str).to_numpy()
    for _, group in pd.Series(np.arange(len(rows))).groupby(rows["stream"].to_numpy()):
        stream_indices = group.to_numpy()
        for position in np.flatnonzero(family[stream_indices] == "softmax"):
            first, last = max(0, position - MAX_OPS_TO_MATMUL), position + MAX_OPS_TO_MATMUL
            before, after = stream_indices[first:position][::-1], stream_indices[position + 1 : last + 1]
            sides = [_indices_until_matmul(family, neighbors) for neighbors in (before, after)]
            if None in sides:
                continue
            around_softmax = [stream_indices[position], *sides[0], *sides[1]]  # type: ignore[misc]
            if not any(LOSS.search(words(names[i])) for i in around_softmax):
                is_unfused[around_softmax] = True
    return is_unfused


def _indices_until_matmul(family: np.ndarray, indices: np.ndarray) -> list[int] | None:
    """Return the indices before the first matmul; None if unrelated work precedes it or there is no matmul."""
    between: list[int] = []
    for index in indices:
        if family[index] == MATMUL:
            return between
        if family[index] not in BETWEEN_MATMULS:
            return None
        between.append(index)
    return None


def _advice_for_attention(gpu: Device) -> list[Advice]:
    """Advise using fused attention, and torch.compile for other operations that could be fused."""
    rows = gpu.running_ops
    is_attention = pd.Series(unfused_attention(rows), rows.index)
    is_fusable = rows["kernel_category"].isin(FUSABLE) & (rows["phase"] != "optimizer") & ~is_attention
    items = [
        Advice(
            gpu.time_saved_without(is_attention),
            "use F.scaled_dot_product_attention instead of separate matmul and softmax kernels",
        )
    ]
    if (rows["kernel_category"] == GENERATED).sum() < 0.05 * len(rows):
        items.append(
            Advice(
                gpu.time_saved_without(is_fusable),
                "fuse elementwise, copy, norm and softmax kernels (torch.compile)",
            )
        )
    return items


def _advice_for_matmuls(gpu: Device) -> list[Advice]:
    """Advise on matmuls that don't use tensor cores, and on matmuls that load unaligned data."""
    rows, sheet = gpu.running_ops, gpu.sheet
    is_matmul = rows["kernel_category"] == MATMUL
    is_half = is_matmul & (
        rows["dtype"].isin(["bf16", "fp16"])
        | (rows["dtype"] == "") & matching(rows["name"], HALF_PRECISION.search)
    )
    is_misaligned = is_half & matching(rows["name"], MISALIGNED.search)
    is_plain_fp32 = matching(rows["name"], PLAIN_FP32.search) & ~matching(rows["name"], TF32.search)
    is_fp32 = is_matmul & ((~is_half & is_plain_fp32) | (rows["dtype"] == "fp32"))
    items = []
    half_tflops = sheet.get("bf16", sheet.get("fp16"))
    if is_misaligned.any():
        matmuls = _matmul_count_text(is_misaligned.sum() / len(gpu.median_indices))
        alignment = _alignment_text(rows[is_misaligned])
        text = f"{matmuls} unaligned loads ({alignment}): pad their dimensions and strides to multiples of 8"
        items.append(Advice(_time_saved_at_rate(gpu, is_misaligned, half_tflops), text))
    if is_fp32.any():
        longest = rows[is_fp32].groupby("name", observed=True)["duration_ns"].sum().idxmax()
        remedy = (
            "autocast to fp16"
            if "fp16" in sheet
            else "torch.set_float32_matmul_precision('high') for TF32, or autocast to bf16"
        )
        text = f"run fp32 matmuls, such as {short_kernel_name(str(longest))}, on tensor cores ({remedy})"
        items.append(Advice(_time_saved_at_rate(gpu, is_fp32, half_tflops, sheet.get("fp32")), text))
    return items


def _matmul_count_text(matmuls: float) -> str:
    return "1 matmul uses" if matmuls == 1 else f"{matmuls:,.0f} matmuls use"


def _alignment_text(rows: pd.DataFrame) -> str:
    match = MISALIGNED.search(" ".join(map(str, rows["name"].unique())))
    return match[0] if match else ""


def _time_saved_at_rate(
    gpu: Device, is_matmul: pd.Series, target_tflops: float | None, current_tflops: float | None = None
) -> float:
    """Return the time in ms per step that running these matmuls at ``target_tflops`` would save.

    The matmuls' FLOPs determine their current rate. If the FLOPs are unknown, ``current_tflops`` is assumed. If
    there is no target, or the current rate is unknown, all of the matmuls' time counts as saved.
    """
    rows = gpu.running_ops[is_matmul.to_numpy()]
    total = gpu.time_saved_without(is_matmul)
    flops = rows.loc[~rows.duplicated("operator") & (rows["flops"] > 0), "flops"].sum()
    if not target_tflops:
        return total
    if flops:
        rated_ns = rows.loc[rows["flops"] > 0, "duration_ns"].sum()
        return total * max(0.0, 1 - flops / max(rated_ns, 1) / 1e3 / target_tflops)
    return total * (1 - current_tflops / target_tflops) if current_tflops else total


def _advice_for_generated(gpu: Device) -> list[Advice]:
    """Advise on the compiler-generated kernel that loses the most time because of low memory throughput."""
    kernels = gpu.generated
    if len(kernels) < 2:
        return []
    size, duration = kernels["bytes"], kernels["duration_ns"]
    rates = size / duration
    other_rates = (size.sum() - size) / (duration.sum() - duration)
    saved_ms = gpu.ms_per_step(duration - size / other_rates)
    slowest = saved_ms.idxmax()
    exposed_ms = gpu.time_saved_without(gpu.running_ops["name"] == slowest)
    exposed_share = exposed_ms / max(gpu.ms_per_step(duration[slowest]), 1e-9)
    name = short_kernel_name(str(slowest))
    rate, other_rate = (number(values[slowest] / 1e3, "TB/s") for values in (rates, other_rates))
    return [
        Advice(
            float(saved_ms[slowest]) * min(1.0, exposed_share),
            f"speed up {name}: it reaches {rate}, but the other generated kernels reach {other_rate}",
        )
    ]
