"""The CSV reports of `nsys stats` that captures are checked against, as typed tables: the same columns and
units whichever release wrote them.
"""
import csv
import re
from pathlib import Path

import pandas as pd

from stepscope import StepscopeError

# Our column -> what releases call it (without its unit and case, by "|"). Columns in _ns have their unit in
# the header, whatever --timeunit made it.
REPORTS = {
    "cuda_gpu_kern_sum": {"total_time_ns": "total time", "instances": "instances", "name": "name"},
    "cuda_gpu_mem_time_sum": {"total_time_ns": "total time", "count": "count|operations|instances",
                              "operation": "operation"},
    "nvtx_gpu_proj_sum": {"range": "range", "total_proj_time_ns": "total proj time",
                          "total_range_time_ns": "total range time", "range_instances": "range instances",
                          "total_gpu_ops": "total gpu ops"},
}
TEXTS = ("name", "operation", "range")
UNITS_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
LARGEST_FILE, HEADER_WITHIN = 2**28, 1000  # bytes; lines that nsys may print before the header
_NUMBER = re.compile(r"\d{1,19}(\.\d{1,9})?")


class ReportError(StepscopeError, ValueError):
    """A report that cannot be used; the text names the file, where in it, what was found and what was
    expected."""


def load_report(path: Path | str, report: str) -> pd.DataFrame:
    """One report as a table with the columns of REPORTS[report]: whole numbers, times in ns, and texts.

    Returns:
        A row per line, in its order; ranges without the colon of the default domain (":forward" is
        "forward"). Where nsys says that the capture does not contain such data, no rows.

    Raises:
        ReportError: the file is absent, truncated, or another report; a column is missing or has an unknown
            unit; a field is no number.
    """
    path, columns = Path(path), REPORTS[report]
    lines = _lines(path, report)
    rows = list(csv.reader(lines))
    top = next((at for at, row in enumerate(rows[:HEADER_WITHIN])
                if len(_places(path, row, columns)) == len(columns)),
               None)
    if top is None:
        if any("does not contain" in line for line in lines):
            return _table([], columns)
        raise ReportError(f"{path}: no line has columns for {', '.join(columns)}, expected the report"
                          f" {report} of nsys stats, found {(lines or ['nothing'])[0].strip()[:80]!r}")
    if not lines[-1].endswith("\n"):
        raise ReportError(f"{path}: its last line is cut off, expected the file to end with an end of line")
    places, found = _places(path, rows[top], columns), []
    for number, row in enumerate(rows[top + 1:], start=top + 2):
        if not row:
            break
        if len(row) != len(rows[top]):
            raise ReportError(f"{path}: line {number} has {len(row)} fields, expected {len(rows[top])}")
        found.append([_value(row[place], name, factor, f"{path}: line {number}, column {rows[top][place]!r}")
                      for name, (place, factor) in places.items()])
    return _table(found, columns)


def _lines(path: Path, report: str) -> list[str]:
    """The file's lines with their ends; a line ends where nsys ends it: kernels' names may hold Unicode's
    others."""
    expected = f"expected the report {report} of nsys stats"
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ReportError(f"{path}: is larger than {LARGEST_FILE:,} bytes, {expected}")
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            return list(file)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror}), {expected}") from None
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: byte {error.start} is not UTF-8, {expected}") from None


def _places(path: Path, row: list[str], columns: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Of each column that a header has: its place, and what its numbers are multiplied by.

    Raises:
        ReportError: a column of times has no known unit.
    """
    places = {}
    for place, heading in enumerate(row):
        base, _, unit = heading.strip().removesuffix(")").partition(" (")
        for name, headings in columns.items():
            if base.strip().lower() in headings.split("|") and unit != "%":
                if name.endswith("_ns") and unit not in UNITS_NS:
                    raise ReportError(f"{path}: column {heading[:80]!r} has no known unit of time, expected"
                                      f" one of {', '.join(UNITS_NS)}")
                places[name] = place, UNITS_NS[unit] if name.endswith("_ns") else 1
    return {name: places[name] for name in columns if name in places}


def _value(field: str, name: str, factor: int, where: str) -> int | str:
    field = field.strip()
    if name in TEXTS:
        return field.removeprefix(":") if name == "range" else field
    if not _NUMBER.fullmatch(field):
        raise ReportError(f"{where}: found {field[:80]!r}, expected a number")
    return round(float(field) * factor) if "." in field else int(field) * factor


def _table(rows: list[list], columns: dict[str, str]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(columns))
    return table.astype({name: "str" if name in TEXTS else "int64" for name in columns})
