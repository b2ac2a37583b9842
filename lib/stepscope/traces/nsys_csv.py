"""The CSV reports of ``nsys stats --format csv``, each as a DataFrame.

nsys writes a table for people: units stand in headings and change with ``--timeunit``, lines of progress and
notices come before it where output was redirected, and a report with nothing to show is one sentence. Columns
here are nsys's own headings in snake case with their unit: ``Total Time (ns)`` is ``total_time_ns``.
"""

import codecs
import csv
import re
import warnings
from io import StringIO
from pathlib import Path

import pandas as pd

from stepscope.traces.attribution import TraceError

# By report, the columns that every version of nsys writes. A report's other columns are STATISTICS, but for a
# trace, which has many more.
REPORTS = {
    "cuda_gpu_trace": ("start_ns", "duration_ns", "corr_id", "device", "strm", "name"),
    "nvtx_gpu_proj_trace": ("name", "projected_start_ns", "projected_duration_ns", "num_gpu_ops"),
    "nvtx_gpu_proj_sum": ("range", "total_proj_time_ns", "range_instances"),
    "nvtx_kern_sum": ("nvtx_range", "kern_inst", "total_time_ns", "kernel_name"),
    "cuda_gpu_kern_sum": ("total_time_ns", "instances", "name"),
    "cuda_api_sum": ("total_time_ns", "num_calls", "name"),
    "cuda_gpu_mem_time_sum": ("total_time_ns", "operation"),
    "nvtx_pushpop_sum": ("total_time_ns", "instances", "range"),
    "cuda_gpu_sum": ("total_time_ns", "instances", "category", "operation"),
    "mpi_event_sum": ("total_time_ns", "instances", "source", "name"),
    "osrt_sum": ("total_time_ns", "num_calls", "name"),  # as cuda_api_sum, of other calls
}
TRACES = {"cuda_gpu_trace", "nvtx_gpu_proj_trace", "nvtx_gpu_proj_sum", "nvtx_kern_sum"}
STATISTICS = {"time_percent", "avg_ns", "average_ns", "med_ns", "min_ns", "max_ns", "std_dev_ns"}
STATISTICS |= {"count", "grid_xyz", "block_xyz", "style"}
CUDA_CALL = re.compile(r"(cu|cuda|__cuda)[A-Z]")
# What nsys writes for people: a title with the report's name, or headings that spaces separate.
TEXT_TABLE = re.compile(r"^ *\*\* .*\(\w+\): *$|^ *(Time ?\(%\)|Start ?\(\w+\)) {2,}\S", re.MULTILINE)
NO_DATA = re.compile(r"^\s*SKIPPED: .*does not contain", re.MULTILINE)
OTHER_SEPARATORS = {";": "';', as a spreadsheet writes them", "\t": "tabs"}
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
        text = decoded(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({error}), {EXPECTED}") from None
    return parse_nsys_csv(text, path)


def decoded(data: bytes, errors: str = "strict") -> str:
    """Text in UTF-8, or in UTF-16 as PowerShell's > writes it, by its byte order mark."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors)


def is_report(text: str) -> bool:
    """Whether a text is nsys's report, or is one in a form that parse_nsys_csv can name."""
    return bool(NO_DATA.search(text) or TEXT_TABLE.search(text) or _separator(text)) or any(
        map(report_of, text.splitlines())
    )


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
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # values beyond the last heading
            table = pd.read_csv(
                StringIO("\n".join(lines[first:end])),
                dtype=texts,
                keep_default_na=False,
                na_values=[""],
                index_col=False,
            )
    # pandas' own errors of a file's form are ValueErrors
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}, {EXPECTED}") from None
    if (lacking := table.iloc[:, -1].isna()).any():  # nsys leaves no last column empty
        line = lines[first + 1 + int(lacking.argmax())]
        raise TraceError(
            f"{path}: the line {line[:80]!r} is cut off, expected a value under each of"
            f" {table.shape[1]} headings"
        )
    table = pd.DataFrame({name_of(heading): _typed(heading, table[heading], path) for heading in table})
    if report == "cuda_api_sum" and not table["name"].map(CUDA_CALL.match).any():
        report = "osrt_sum" if len(table) else report
    table.attrs["report"] = report
    return table


def report_of(line: str) -> str | None:
    """The report whose table begins with this line of headings; None of any other line."""
    if "," not in line:
        return None
    try:
        names = {name_of(heading) for heading in next(csv.reader([line]), [])}
    except csv.Error:  # a field of more than 128 KiB
        return None
    for report, needed in REPORTS.items():
        others = names.difference(needed)
        if names.issuperset(needed) and (report in TRACES or others <= STATISTICS):
            return report
    return None


def _separator(text: str) -> str | None:
    """What separates the columns of a report instead of commas."""
    for separator in OTHER_SEPARATORS:
        if any(separator in line and report_of(line.replace(separator, ",")) for line in text.splitlines()):
            return separator
    return None


def name_of(heading: str) -> str:
    """A column's name: "Total Time (ms)" is total_time_ns, "NumGPUOps" is num_gpu_ops."""
    words, _, unit = heading.strip().removesuffix(")").partition("(")
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", words.replace("SMem", "Smem"))
    name = re.sub(r"\W+", "_", spaced).strip("_").lower()
    unit = "ns" if unit in NANOSECONDS else OTHER_UNITS.get(unit, unit.lower())
    return f"{name}_{unit}" if unit else name


def _without_table(text: str, path: Path) -> pd.DataFrame:
    """An empty table where nsys says that there is no such data; anything else is no report."""
    if TEXT_TABLE.search(text):
        raise TraceError(
            f"{path}: is nsys's table for people to read, {EXPECTED}"
            " (nsys stats --report cuda_gpu_trace --format csv --output . FILE.nsys-rep)"
        )
    if not NO_DATA.search(text):
        separator = _separator(text)
        why = f" (its columns are separated by {OTHER_SEPARATORS[separator]})" if separator else ""
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
