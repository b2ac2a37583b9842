"""What is worth doing, ranked by one measure: the time that would leave the step.

Of kernels that is the time in which nothing else runs, of pauses their length, of what moves data or
communicates what is exposed. Each is a bound: what is there to be gained at most.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from stepscope.captures.account import GENERATED, Device
from stepscope.report.tables import digits, number
from stepscope.traces.attribution import matching
from stepscope.traces.families import MATMUL
from stepscope.traces.kernel_names import short_name, words

FUSABLE = ("elementwise", "copy and cast", "reduction and norm", "softmax")
BETWEEN = (*FUSABLE, "random")  # what stands between attention's two products
NEAR = 8  # operations from a softmax to the product before and after it
LOSS = re.compile(r"nll|entropy|log ?soft ?max", re.IGNORECASE)
MISALIGNED = re.compile(r"align[12](?![0-9])")
HALF = re.compile(r"bf16|f16(?!8)|fp16|half|hgemm|tensorop|s16816|s1688", re.IGNORECASE)
PLAIN_FP32 = re.compile(r"sgemm|simt_s|gemm_f32f32_f32f32_f32|gemmSN|ffma", re.IGNORECASE)
TF32 = re.compile(r"tf32|s1688|tensorop", re.IGNORECASE)
# What a call of the driver in a pause is for.
CALLS = {
    "Malloc|Free|HostAlloc": " (the allocator grows: let sizes repeat, or"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)",
    "Memcpy": " (pinned memory, non_blocking=True)",
    "Module|Library|Launch|GetFunc|Graph": " (a kernel's first use loads it: warm up)",
}
WORTH = 0.01  # of the step: less is not advised
MOST = 3


class Advice(NamedTuple):
    ms: float
    what: str


def advice(one: Device, waits: pd.DataFrame, reason: str) -> list[Advice]:
    """At most MOST things to do, that which would take the most time out of the step first.

    Args:
        waits: of ``causes.waits``.
        reason: why communication is exposed, where that is known.
    """
    median = one.median
    found = [
        Advice(median["exposed communication"], f"hide communication behind compute{reason}"),
        Advice(median["exposed copies"], _of_copies(one)),
        *_of_waits(waits, one.started_ms),
        *_of_attention(one),
        *_of_matmuls(one),
        *_of_generated(one),
    ]
    return sorted((each for each in found if each.ms > WORTH * median["wall"]), reverse=True)[:MOST]


def _of_copies(one: Device) -> str:
    rows = one.operations[one.operations["part"] == "copies"]
    pageable = rows["name"].astype(str).str.contains("Pageable").any()
    return (
        "hide copies to and from the host ("
        + (
            "its memory is pageable: pin it, copy with non_blocking=True"
            if pageable
            else "pinned memory, an own stream"
        )
        + ")"
    )


def _of_waits(waits: pd.DataFrame, started_ms: float) -> list[Advice]:
    """Of each cause of pauses what follows from it."""
    if started_ms:
        return [
            Advice(
                started_ms,
                "capture steady steps: start the capture after the warm-up"
                " (torch.profiler.schedule, nsys --capture-range=cudaProfilerApi)",
            )
        ]
    found = []
    for cause, rows in waits.groupby("cause", sort=False):
        ms, first = float(rows["ms"].sum()), rows.iloc[0]
        place = f" in {first['where']}" * bool(first["where"])
        if cause == "sync":
            what = (
                f"let the host run ahead: no {first['call']}{place} (no .item() or .cpu(); copies from"
                " pinned memory with non_blocking=True)"
            )
        elif cause == "call":
            use = next((use for pattern, use in CALLS.items() if re.search(pattern, first["call"])), "")
            what = f"keep {first['call']}{place} out of the step{use}"
        elif cause == "host":
            what = (
                f"take {first['where']} out of the GPU's way (another process or thread, or a step earlier)"
            )
        else:
            continue
        found.append(Advice(ms, what))
    launching = waits.loc[waits["cause"].isin(["launch", "device"]), "ms"].sum()
    return [*found, Advice(float(launching), "close gaps, by a CUDA graph or fewer launches")]


def unfused_attention(rows: pd.DataFrame) -> np.ndarray:
    """Which operations stand between the two products of an attention that is not fused: softmax, and masks,
    scales, casts and dropout around it. A loss's softmax is none of them."""
    found = np.full(len(rows), False)
    family = rows["family"].astype(str).to_numpy()
    names = rows["name"].astype(str).to_numpy()
    for _, places in pd.Series(np.arange(len(rows))).groupby(rows["stream"].to_numpy()):
        at = places.to_numpy()
        for place in np.flatnonzero(family[at] == "softmax"):
            before, after = at[max(0, place - NEAR) : place][::-1], at[place + 1 : place + 1 + NEAR]
            inner = [_until_product(family, side) for side in (before, after)]
            if None in inner:
                continue
            own = [at[place], *inner[0], *inner[1]]  # type: ignore[misc]
            if not any(LOSS.search(words(names[i])) for i in own):
                found[own] = True
    return found


def _until_product(family: np.ndarray, places: np.ndarray) -> list[int] | None:
    """The places before the first product; None where there is none, or other work before it."""
    own: list[int] = []
    for i in places:
        if family[i] == MATMUL:
            return own
        if family[i] not in BETWEEN:
            return None
        own.append(i)
    return None


def _of_attention(one: Device) -> list[Advice]:
    """Fused attention, and of what else could be fused torch.compile."""
    rows = one.running
    attention = pd.Series(unfused_attention(rows), rows.index)
    loose = rows["family"].isin(FUSABLE) & (rows["phase"] != "optimizer") & ~attention
    found = [
        Advice(
            one.leaves(attention),
            "F.scaled_dot_product_attention in place of products, softmax and what is between them",
        )
    ]
    if (rows["family"] == GENERATED).sum() < 0.05 * len(rows):
        found.append(
            Advice(one.leaves(loose), "fuse elementwise kernels, copies, norms and softmax (torch.compile)")
        )
    return found


def _of_matmuls(one: Device) -> list[Advice]:
    """Products that leave tensor cores unused, or cannot use them well."""
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
                (
                    f"align the products' sizes: {int(crooked.sum() / len(one.middle)):,} are read in pieces"
                    f" ({_align(rows[crooked])}); pad dimensions and strides to multiples of 8"
                ),
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
                f"fp32 matmuls on tensor cores ({how}), such as {short_name(str(most))}",
            )
        )
    return found


def _align(rows: pd.DataFrame) -> str:
    found = MISALIGNED.search(" ".join(map(str, rows["name"].unique())))
    return found[0] if found else ""


def _faster(one: Device, chosen: pd.Series, most: float | None, now: float | None = None) -> float:
    """What would leave the step if these products ran at ``most`` TFLOP/s: by their FLOPs where these are
    known; else as if they ran at ``now``; without a data sheet all of it."""
    rows = one.running[chosen.to_numpy()]
    whole = one.leaves(chosen)
    flops = rows.loc[~rows.duplicated("operator") & (rows["flops"] > 0), "flops"].sum()
    if not most:
        return whole
    if flops:
        spent = rows.loc[rows["flops"] > 0, "duration_ns"].sum()
        return whole * max(0.0, 1 - flops / max(spent, 1) / 1e3 / most)
    return whole * (1 - now / most) if now else whole


def _of_generated(one: Device) -> list[Advice]:
    """A generated kernel that moves its bytes far slower than the others."""
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
            (
                f"{short_name(str(slow))} at the other generated kernels'"
                f" {number(others[slow] / 1e3, 'TB/s')} instead of {digits(rate[slow] / 1e3, 'TB/s')}"
            ),
        )
    ]
