"""The CSV reports of ``nsys stats --format csv``, each as a DataFrame.

nsys writes a table for people: units stand in headings and change with ``--timeunit``, lines of progress and
notices come before it where output was redirected, and a report with nothing to show is one sentence. Columns
here are nsys's own headings in snake case with their unit: ``Total Time (ns)`` is ``total_time_ns``.
"""

import csv
import re
from io import StringIO
from pathlib import Path

import pandas as pd

from stepscope.traces.attribution import TraceError

# By report the columns that tell it from the others, and in it are always there.
REPORTS = {
    "cuda_gpu_trace": ("start_ns", "duration_ns", "corr_id", "device", "strm", "name"),
    "nvtx_gpu_proj_trace": ("name", "projected_start_ns", "projected_duration_ns", "num_gpu_ops"),
    "nvtx_gpu_proj_sum": ("range", "total_proj_time_ns", "range_instances"),
    "nvtx_kern_sum": ("nvtx_range", "kern_inst", "total_time_ns", "kernel_name"),
    "cuda_gpu_kern_sum": ("total_time_ns", "instances", "name"),
    "cuda_api_sum": ("total_time_ns", "num_calls", "name"),
    "cuda_gpu_mem_time_sum": ("total_time_ns", "operation"),
    "nvtx_pushpop_sum": ("total_time_ns", "instances", "range"),
}
NANOSECONDS = {
    "ns": 1,
    "nsec": 1,
    "us": 1_000,
    "μs": 1_000,
    "µs": 1_000,
    "usec": 1_000,
    "ms": 1_000_000,
    "msec": 1_000_000,
    "s": 1_000_000_000,
    "sec": 1_000_000_000,
}
OTHER_UNITS = {"%": "percent", "MB/s": "mb_per_s", "MBps": "mb_per_s", "GB/s": "gb_per_s"}
TEXTS = {
    "name",
    "kernel_name",
    "range",
    "nvtx_range",
    "operation",
    "style",
    "device",
    "range_stack",
    "src_mem_kd",
    "dst_mem_kd",
    "grid_xyz",
    "block_xyz",
    "api_name",
}
WHOLE = re.compile(r"start|duration|total|min|max")  # times that nsys counts; the rest are means
COUNTS = {"instances", "count", "num_calls", "kern_inst", "num_gpu_ops"}
EXPECTED = "expected a report of nsys stats --format csv"


def read_nsys_csv(path: Path | str) -> pd.DataFrame:
    """Read one report that ``nsys stats --format csv`` (2022 to 2026) wrote, as a file or redirected.

    Args:
        path: of the reports of :data:`REPORTS` one, with or without other columns.

    Returns:
        A row a line of the report, in its order. Columns are nsys's headings in snake case with their unit;
        times are nanoseconds, int64 where nsys counts them (``total_time_ns``, ``start_ns``), float64 where
        it averages (``avg_ns``); ``_mb`` are 10^6 bytes; ``_percent`` of 100. Counts and ids are int64, Int64
        where some rows have none. ``attrs["report"]`` is the report's name. Where nsys says that the capture
        does not contain such data: empty, with the columns of REPORTS if the file's name tells the report.

    Raises:
        TraceError: the file cannot be read, is no such report or holds several, a line is cut off, or numbers
            have separators of thousands or a decimal comma.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({error}), {EXPECTED}") from None
    return parse_nsys_csv(text, path)


def parse_nsys_csv(text: str, path: Path | str) -> pd.DataFrame:
    """As read_nsys_csv, of a report's text; path is for what is said of it."""
    lines = text.splitlines()
    headings = [(at, report) for at, line in enumerate(lines) if (report := report_of(line))]
    if not headings:
        return _without_table(text, Path(path))
    if len(headings) > 1:
        names = ", ".join(name for _, name in headings)
        raise TraceError(
            f"{path}: holds {len(headings)} reports ({names}), expected one (nsys stats --output"
            " FILE writes a file for each)"
        )
    ((first, report),) = headings
    end = next((at for at in range(first + 1, len(lines)) if not lines[at].strip()), len(lines))
    texts = {heading: str for heading in next(csv.reader([lines[first]])) if name_of(heading) in TEXTS}
    try:
        table = pd.read_csv(
            StringIO("\n".join(lines[first:end])),
            dtype=texts,
            keep_default_na=False,
            na_values=[""],
            index_col=False,
        )
    except (ValueError, OverflowError) as error:  # pandas' own errors of a file's form are ValueErrors
        raise TraceError(f"{path}: {' '.join(str(error).split())}, {EXPECTED}") from None
    if (lacking := table.iloc[:, -1].isna()).any():  # nsys leaves no last column empty
        line = lines[first + 1 + int(lacking.argmax())]
        raise TraceError(
            f"{path}: the line {line[:80]!r} is cut off, expected a value under each of"
            f" {table.shape[1]} headings"
        )
    table = pd.DataFrame({name_of(heading): _typed(heading, table[heading], path) for heading in table})
    table.attrs["report"] = report
    return table


def report_of(line: str) -> str | None:
    """The report whose table begins with this line of headings; None of any other line."""
    names = {name_of(heading) for heading in next(csv.reader([line]), [])}
    return next((report for report, needed in REPORTS.items() if names.issuperset(needed)), None)


def name_of(heading: str) -> str:
    """A column's name: "Total Time (ms)" is total_time_ns, "NumGPUOps" is num_gpu_ops."""
    words, _, unit = heading.strip().removesuffix(")").partition("(")
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", words.replace("SMem", "Smem"))
    name = re.sub(r"\W+", "_", spaced).strip("_").lower()
    unit = "ns" if unit in NANOSECONDS else OTHER_UNITS.get(unit, unit.lower())
    return f"{name}_{unit}" if unit else name


def _without_table(text: str, path: Path) -> pd.DataFrame:
    """What nsys writes where there is no such data; anything else is no report."""
    if "does not contain" not in text:
        why = " (its columns are separated by ';', as a spreadsheet writes them)" if ";" in text[:200] else ""
        raise TraceError(f"{path}: found {text.strip()[:80]!r}{why}, {EXPECTED}, one of {', '.join(REPORTS)}")
    report = next((name for name in REPORTS if path.stem.endswith(name)), None)
    table = pd.DataFrame(
        {
            name: pd.Series(dtype="int64" if name.endswith("_ns") else str)
            for name in REPORTS.get(report or "", ())
        }
    )
    table.attrs["report"] = report
    return table


def _typed(heading: str, column: pd.Series, path: Path | str) -> pd.Series:
    """A column of numbers, times in nanoseconds and whole where nsys counts; text where it is one of TEXTS,
    or has no unit and is not all numbers."""
    name, unit = name_of(heading), heading.strip().removesuffix(")").partition("(")[2]
    if name in TEXTS:
        return column.fillna("")
    factor = NANOSECONDS.get(unit)
    whole = factor is not None and WHOLE.search(name) is not None
    numeric = column.dtype.kind in "if"
    broken = numeric and whole and factor == 1 and (column.isna() | (column % 1 != 0)).any()
    if broken or (not numeric and len(column) and (unit or name in COUNTS)):
        wrong = (
            column[column.isna() | (column % 1 != 0)]
            if numeric
            else column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
        )
        found = str(wrong.iloc[0])[:40] if len(wrong) else "more than 64 bits"
        raise TraceError(
            f"{path}: has {found!r} in its column {heading.strip()!r}, expected"
            f" {'whole ' * whole}numbers without separators of thousands and with a decimal"
            " point (LC_ALL=C nsys stats --format csv)"
        )
    if not numeric:
        return column if len(column) else column.astype("int64" if whole else float)
    if whole:
        return (column * (factor or 1)).round().astype("int64")
    if factor:
        return column.astype(float) * factor
    ids = not unit and column.isna().any() and (column.dropna() % 1 == 0).all()  # that some rows have
    return column.astype("Int64") if ids else column
