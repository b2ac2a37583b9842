"""nsys's CSV reports as captures: cuda_gpu_trace is all of the GPU's side, cuda_gpu_kern_sum sums of
kernels."""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import KINDS, OUTSIDE, TraceError
from stepscope.traces.families import families
from stepscope.traces.nsys_csv import decoded, parse_nsys_csv
from stepscope.traces.torch_trace import opened

TRACE, KERNELS = "cuda_gpu_trace", "cuda_gpu_kern_sum"
DEVICE = re.compile(r"^(.*) \((\d+)\)$")  # "NVIDIA A100 (0)"


def read_report(file: Path) -> pd.DataFrame:
    """A report that is a capture, from a file, gzipped or not.

    Raises:
        TraceError: as read_nsys_csv; it is another report, or has no operations.
    """
    with opened(file) as stream:
        text = decoded(stream.read(), "replace")
    table = parse_nsys_csv(text, file)
    report = table.attrs["report"]
    if table.empty:
        raise TraceError(f"{file}: holds no GPU work, expected a report of a program that runs kernels")
    if report not in (TRACE, KERNELS):
        raise TraceError(
            f"{file}: is nsys's report {report}, expected {TRACE}, or {KERNELS} for kernels alone"
        )
    for column in ("strm", "corr_id") if report == TRACE else ():
        if not pd.api.types.is_integer_dtype(table[column]) or table[column].isna().any():
            raise TraceError(f"{file}: has a value in its column {column} that is no integer, expected ids")
    return table


def operations_of_report(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, str]]:
    """The operations of a report cuda_gpu_trace, with the columns of a capture's, and GPUs' names by id. It
    knows no launches, ranges or steps."""
    table = table.sort_values("start_ns", kind="stable", ignore_index=True)
    known = [DEVICE.match(name) for name in table["device"].unique()]
    gpus = {int(found[2]): found[1] for found in known if found}
    number = table["device"].str.extract(DEVICE)[1].fillna(0).astype(int)
    name = pd.Categorical(table["name"])
    kind = np.where(
        table["name"].str.contains("memset"),
        "memset",
        np.where(table["name"].str.startswith("[CUDA memcpy"), "memcpy", "kernel"),
    )
    size = (table["bytes_mb"] * 1e6).round().fillna(-1) if "bytes_mb" in table else -1
    none = pd.arrays.IntegerArray(np.zeros(len(table), np.int64), np.full(len(table), True))
    return pd.DataFrame(
        {
            "kind": pd.Categorical(kind, KINDS),
            "name": name,
            "family": families(name),
            "device": number,
            "start_ns": table["start_ns"],
            "duration_ns": table["duration_ns"],
            "stream": table["strm"],
            "correlation_id": table["corr_id"],
            "row": np.arange(len(table)),
            "bytes": size,
            "flops": -1.0,
            "dtype": "",
            "operator": -1,
            "launch_start_ns": none,
            "launch_duration_ns": none,
            "process": 0,
            "thread": -1,
            "step": -1,
            "range": pd.Categorical([""] * len(table)),
            "inner_range": pd.Categorical([""] * len(table)),
            "phase": pd.Categorical([OUTSIDE] * len(table), [*PHASE_NAMES, OUTSIDE]),
        }
    ), gpus
