"""Parse the CSV reports of ``nsys stats --format csv`` into DataFrames.

nsys writes its tables for people: headings contain units that change with ``--timeunit``, redirected output starts
with progress messages and notices, and an empty report consists of a sentence. Our columns are nsys's headings in
snake case, including the unit: ``Total Time (ns)`` becomes ``total_time_ns``.
"""

import codecs
import csv
import re
import warnings
from io import StringIO
from pathlib import Path

import pandas as pd

from stepscope.traces.attribution import TraceError

# The columns that every version of nsys writes, keyed by report. Any other columns must be among STATISTICS,
# except in OPEN_ENDED_REPORTS, which have many other columns.
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
    "osrt_sum": ("total_time_ns", "num_calls", "name"),  # same columns as cuda_api_sum, but other calls
}
OPEN_ENDED_REPORTS = {"cuda_gpu_trace", "nvtx_gpu_proj_trace", "nvtx_gpu_proj_sum", "nvtx_kern_sum"}
STATISTICS = {"time_percent", "avg_ns", "average_ns", "med_ns", "min_ns", "max_ns", "std_dev_ns"}
STATISTICS |= {"count", "grid_xyz", "block_xyz", "style"}
CUDA_CALL = re.compile(r"(cu|cuda|__cuda)[A-Z]")
# A table in text format has a title with the report's name, or headings separated by spaces.
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
TEXT_COLUMNS = {
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
INTEGER_TIMES = re.compile(r"start|duration|total|min|max")  # other times are averages
COUNT_COLUMNS = {"instances", "count", "num_calls", "kern_inst", "num_gpu_ops"}
EXPECTED = "expected a report of nsys stats --format csv"


def read_nsys_csv(path: Path | str) -> pd.DataFrame:
    """Read a report from ``nsys stats --format csv`` (2022 to 2026): a file that nsys wrote, or redirected output.

    Args:
        path: the path of one of the reports in :data:`REPORTS`, possibly with additional columns.

    Returns:
        One row per line of the report, in the report's order. Columns are nsys's headings in snake case with their
        units. Times are in nanoseconds: int64 for single times and totals (``start_ns``, ``total_time_ns``), and
        float64 for averages (``avg_ns``). Columns that end with ``_mb`` are in 10^6 bytes, and columns that end
        with ``_percent`` are percentages. Counts and ids are int64, or Int64 if they are missing in some rows.
        The report's name is in ``attrs["report"]``. If the report says that the capture contains no such data,
        the table is empty, and has the columns in REPORTS if the file name ends with the report's name.

    Raises:
        TraceError: If the file can't be read, is not such a report, or contains several reports; if a line is
            truncated; or if numbers have thousands separators or a decimal comma.
    """
    path = Path(path)
    try:
        text = decode_text(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read ({error}); {EXPECTED}") from None
    return parse_nsys_csv(text, path)


def decode_text(data: bytes, errors: str = "strict") -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark (which ``>`` in PowerShell writes)."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors)


def is_report(text: str) -> bool:
    """Return whether a text is a report from nsys, possibly in a format that ``parse_nsys_csv`` rejects."""
    return bool(NO_DATA.search(text) or TEXT_TABLE.search(text) or _separator(text)) or any(
        map(report_with_headings, text.splitlines())
    )


def parse_nsys_csv(text: str, path: Path | str) -> pd.DataFrame:
    """Parse the text of a report as ``read_nsys_csv`` does. The path is for error messages."""
    lines = text.splitlines()
    heading_lines = [
        (index, report) for index, line in enumerate(lines) if (report := report_with_headings(line))
    ]
    if not heading_lines:
        return _empty_table(text, Path(path))
    if len(heading_lines) > 1:
        names = ", ".join(name for _, name in heading_lines)
        raise TraceError(
            f"{path} contains {len(heading_lines)} reports ({names}); expected one (nsys stats --output"
            " FILE writes a file for each)"
        )
    ((first, report),) = heading_lines
    end = next((index for index in range(first + 1, len(lines)) if not lines[index].strip()), len(lines))
    headings = next(csv.reader([lines[first]]))
    text_types = {heading: str for heading in headings if column_name(heading) in TEXT_COLUMNS}
    try:
        with warnings.catch_warnings():
            # pandas warns if a line has more values than there are headings
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                StringIO("\n".join(lines[first:end])),
                dtype=text_types,
                keep_default_na=False,
                na_values=[""],
                index_col=False,
            )
    # pandas' parser errors are ValueErrors
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}; {EXPECTED}") from None
    if (is_cut_off := table.iloc[:, -1].isna()).any():  # nsys never leaves the last column empty
        line = lines[first + 1 + int(is_cut_off.argmax())]
        raise TraceError(
            f"{path}: the line {line[:80]!r} is truncated; expected a value under each of"
            f" {table.shape[1]} headings"
        )
    columns = {column_name(heading): _convert_column(heading, table[heading], path) for heading in table}
    table = pd.DataFrame(columns)
    if report == "cuda_api_sum" and not table["name"].map(CUDA_CALL.match).any():
        report = "osrt_sum" if len(table) else report
    table.attrs["report"] = report
    return table


def report_with_headings(line: str) -> str | None:
    """Return the name of the report that has this line of headings, or None for any other line."""
    if "," not in line:
        return None
    try:
        names = {column_name(heading) for heading in next(csv.reader([line]), [])}
    except csv.Error:  # for example, a field of more than 128 KiB
        return None
    for report, required in REPORTS.items():
        others = names.difference(required)
        if names.issuperset(required) and (report in OPEN_ENDED_REPORTS or others <= STATISTICS):
            return report
    return None


def _separator(text: str) -> str | None:
    """Return a report's separator if it isn't a comma; return None for any other text."""
    for separator in OTHER_SEPARATORS:
        lines = [line.replace(separator, ",") for line in text.splitlines() if separator in line]
        if any(map(report_with_headings, lines)):
            return separator
    return None


def column_name(heading: str) -> str:
    """Convert a heading to a column name: "Total Time (ms)" to total_time_ns, "NumGPUOps" to num_gpu_ops."""
    words, _, unit = heading.strip().removesuffix(")").partition("(")
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", words.replace("SMem", "Smem"))
    name = re.sub(r"\W+", "_", spaced).strip("_").lower()
    unit = "ns" if unit in NANOSECONDS else OTHER_UNITS.get(unit, unit.lower())
    return f"{name}_{unit}" if unit else name


def _empty_table(text: str, path: Path) -> pd.DataFrame:
    """Return an empty table if the report says that the capture contains no such data.

    Raises:
        TraceError: If the report doesn't say so.
    """
    if TEXT_TABLE.search(text):
        raise TraceError(
            f"{path} is a report in text format; {EXPECTED}"
            " (nsys stats --report cuda_gpu_trace --format csv --output . FILE.nsys-rep)"
        )
    if not NO_DATA.search(text):
        separator = _separator(text)
        hint = f" (its columns are separated by {OTHER_SEPARATORS[separator]})" if separator else ""
        raise TraceError(f"{path}: got {text.strip()[:80]!r}{hint}; {EXPECTED}, one of {', '.join(REPORTS)}")
    report = next((name for name in REPORTS if path.stem.endswith(name)), None)
    table = pd.DataFrame(
        {
            name: pd.Series(dtype="int64" if name.endswith("_ns") else str)
            for name in REPORTS.get(report or "", ())
        }
    )
    table.attrs["report"] = report
    return table


def _convert_column(heading: str, column: pd.Series, path: Path | str) -> pd.Series:
    """Convert times to nanoseconds, as integers unless they are averages; leave other numbers unchanged.

    The columns in TEXT_COLUMNS remain text, and so do columns without a unit that contain values other than
    numbers.

    Raises:
        TraceError: If a column of times or counts contains values that can't be converted.
    """
    name, unit = column_name(heading), heading.strip().removesuffix(")").partition("(")[2]
    if name in TEXT_COLUMNS:
        return column.fillna("")
    factor = NANOSECONDS.get(unit)
    is_integer = factor is not None and INTEGER_TIMES.search(name) is not None
    is_numeric = column.dtype.kind in "if"
    has_bad_times = is_numeric and is_integer and factor == 1 and (column.isna() | (column % 1 != 0)).any()
    if has_bad_times or (not is_numeric and len(column) and (unit or name in COUNT_COLUMNS)):
        wrong = (
            column[column.isna() | (column % 1 != 0)]
            if is_numeric
            else column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
        )
        value = str(wrong.iloc[0])[:40] if len(wrong) else "more than 64 bits"
        raise TraceError(
            f"{path} has {value!r} in its column {heading.strip()!r}; expected"
            f" {'whole ' if is_integer else ''}numbers without thousands separators and with a decimal"
            " point (LC_ALL=C nsys stats --format csv)"
        )
    if not is_numeric:
        return column if len(column) else column.astype("int64" if is_integer else float)
    if is_integer:
        return (column * (factor or 1)).round().astype("int64")
    if factor:
        return column.astype(float) * factor
    is_optional_id = not unit and column.isna().any() and (column.dropna() % 1 == 0).all()
    return column.astype("Int64") if is_optional_id else column
