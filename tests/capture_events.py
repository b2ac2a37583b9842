"""Build captures from individual events, and read lines and advice from the captures' summaries.

Times are in µs. Correlation ids and external ids are numbered automatically.
"""

import gzip
import json
from itertools import count
from pathlib import Path

from stepscope.captures.advice import Advice, rank_advice
from stepscope.captures.capture import load_capture
from stepscope.captures.idle_time import explain_gaps, sum_by_cause
from stepscope.captures.lines import Line
from stepscope.captures.step_breakdown import Device, devices
from stepscope.captures.summary import profile

GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"
H100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
ids = count(1)


def event(cat: str, name: str, ts: float, dur: float, tid: object = 1, **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def annotation(name: str, ts: float, dur: float, tid: int = 1) -> dict:
    return event("user_annotation", name, ts, dur, tid)


def profiler_step(number: int, ts: float, dur: float) -> dict:
    return annotation(f"ProfilerStep#{number}", ts, dur)


def operator(name: str, dtype: str, *shapes: list, ts: float = 0, tid: int = 1) -> dict:
    """Return an operator event to pass to ``launch``; all of the operator's arguments have the same dtype."""
    inputs = {"Input Dims": [*shapes], "Input type": [dtype] * len(shapes)}
    return event("cpu_op", name, ts, 4, tid, **{"External id": next(ids)}, **inputs)


def launch(
    name: str,
    call: float,
    start: float,
    dur: float,
    tid: int = 1,
    cat: str = "kernel",
    operator: dict | None = None,
    gpu: int = 0,
    stream: int = 7,
    **args: object,
) -> list[dict]:
    """Return the events of a host call that takes 2 µs and of the GPU operation that it launches."""
    correlation = next(ids)
    external = {"External id": operator["args"]["External id"]} if operator else {}
    return [
        event("cuda_runtime", "cudaLaunchKernel", call, 2, tid, correlation=correlation, **external),
        event(cat, name, start, dur, 7, correlation=correlation, device=gpu, stream=stream, **args),
    ]


def kernels(
    first_call: float, number: int, name: str = GEMM, apart: float = 30, gpu: int = 0, stream: int = 7
) -> list[dict]:
    """Return the events of ``number`` 20 µs kernels and their launches; each launch is 10 µs before its kernel."""
    calls = [first_call + apart * index for index in range(number)]
    return [part for call in calls for part in launch(name, call, call + 10, 20, gpu=gpu, stream=stream)]


def unlaunched(name: str, start: float, dur: float, correlation: int = 1 << 20) -> dict:
    """Return the event of a kernel whose launch isn't in the capture."""
    return event("kernel", name, start, dur, 7, correlation=correlation, device=0, stream=7)


def write_trace(path: Path, events: list, **header: object) -> Path:
    text = json.dumps({"schemaVersion": 1, **header, "traceEvents": events, "traceName": "x"})
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def first_gpu(folder: Path, events: list[dict], **header: object) -> Device:
    return next(devices(load_capture(write_trace(folder / "a.json", events, **header))))


def advice_for(gpu: Device) -> list[Advice]:
    return rank_advice(gpu, sum_by_cause(explain_gaps(gpu), len(gpu.median_indices)))


def longest_gap(gpu: Device) -> list:
    """Return the cause, call and location of the longest part of an idle gap."""
    return explain_gaps(gpu).nlargest(1, "ms").iloc[0][["cause", "call", "where"]].tolist()


def summary_line(path: Path, label: str, **options: object) -> Line:
    """Return the first line with this label in a capture's summary; if there is none, return an empty line."""
    lines = profile(path, **options)  # type: ignore[arg-type]
    return next((line for line in lines if line.label == label), Line(label, ""))


def line_text(path: Path, label: str, **options: object) -> str:
    return summary_line(path, label, **options).text


def advice_texts(path: Path) -> list[str]:
    return [line.text.partition(". ")[2] for line in profile(path) if "at_most_ms" in line.values]
