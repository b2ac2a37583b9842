"""Read nsys's CSV reports as captures.

The report cuda_gpu_trace lists every GPU operation, but no launches or ranges. The report cuda_gpu_kern_sum lists
only the total time of each kernel.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import KINDS, OUTSIDE, TraceError
from stepscope.traces.kernel_categories import kernel_categories
from stepscope.traces.nsys_csv import decode_text, parse_nsys_csv
from stepscope.traces.torch_trace import open_capture

TRACE_REPORT, KERNEL_REPORT = "cuda_gpu_trace", "cuda_gpu_kern_sum"
DEVICE_NAME = re.compile(r"^(.*) \((\d+)\)$")  # "NVIDIA A100 (0)"


def read_report(file: Path) -> pd.DataFrame:
    """Read cuda_gpu_trace or cuda_gpu_kern_sum from a file, which may be gzipped.

    Raises:
        TraceError: As in ``read_nsys_csv``, or if the file contains a different report or no operations.
    """
    with open_capture(file) as stream:
        text = decode_text(stream.read(), "replace")
    table = parse_nsys_csv(text, file)
    report = table.attrs["report"]
    if table.empty:
        raise TraceError(
            f"{file}: the report contains no GPU work; expected a report on a program that runs kernels"
        )
    if report not in (TRACE_REPORT, KERNEL_REPORT):
        raise TraceError(
            f"{file}: this is the nsys report {report}; expected {TRACE_REPORT}, or {KERNEL_REPORT} for totals"
        )
    for column in ("strm", "corr_id") if report == TRACE_REPORT else ():
        if not pd.api.types.is_integer_dtype(table[column]) or table[column].isna().any():
            raise TraceError(
                f"{file}: column {column} contains a value that isn't an integer; expected integer ids"
            )
    return table


def operations_of_report(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, str]]:
    """Return a cuda_gpu_trace report's operations as a capture's table, and the GPUs' names, keyed by id.

    The operations' launches, ranges and steps are unknown.
    """
    table = table.sort_values("start_ns", kind="stable", ignore_index=True)
    matches = [DEVICE_NAME.match(name) for name in table["device"].unique()]
    gpus = {int(match[2]): match[1] for match in matches if match}
    device = table["device"].str.extract(DEVICE_NAME)[1].fillna(0).astype(int)
    name = pd.Categorical(table["name"])
    kind = np.where(
        table["name"].str.contains("memset"),
        "memset",
        np.where(table["name"].str.startswith("[CUDA memcpy"), "memcpy", "kernel"),
    )
    size = (table["bytes_mb"] * 1e6).round().fillna(-1) if "bytes_mb" in table else -1
    unknown = pd.arrays.IntegerArray(np.zeros(len(table), np.int64), np.full(len(table), True))
    return pd.DataFrame(
        {
            "kind": pd.Categorical(kind, KINDS),
            "name": name,
            "kernel_category": kernel_categories(name),
            "device": device,
            "start_ns": table["start_ns"],
            "duration_ns": table["duration_ns"],
            "stream": table["strm"],
            "correlation_id": table["corr_id"],
            "row": np.arange(len(table)),
            "bytes": size,
            "flops": -1.0,
            "dtype": "",
            "operator": -1,
            "launch_start_ns": unknown,
            "launch_duration_ns": unknown,
            "process": 0,
            "thread": -1,
            "step": -1,
            "range": pd.Categorical([""] * len(table)),
            "inner_range": pd.Categorical([""] * len(table)),
            "phase": pd.Categorical([OUTSIDE] * len(table), [*PHASE_NAMES, OUTSIDE]),
        }
    ), gpus
