"""The CSV reports of `nsys stats`, as typed tables: the same columns and units whichever release wrote
them.
"""

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from stepscope import StepscopeError

# Far beyond any report: a field of CSV has at most 128 Ki characters in Python.
LARGEST_FILE, LONGEST_LINE = 2**28, 2**20  # bytes
HEADER_WITHIN, MOST_COLUMNS = 1000, 100    # lines that may come before the header, and its columns
INT64 = 2**63


class ReportError(StepscopeError, ValueError):
    """A report that cannot be used; the text names the file, where in it, what was found and what was
    expected.
    """


# A report's columns: our name -> (what releases call it, by "|", without its unit and case; its type). The
# types:
WHOLE, NAME = "int64", "str"  # must be there
# NA where a release, or a row, does not have it
MAYBE_WHOLE, MAYBE_NUMBER, MAYBE_NAME = "Int64", "float64", "string"
# Times (_ns) have their unit in the header, whatever --timeunit made it; old releases wrote it at the total
# only.
_STATISTICS = {"avg_ns": ("avg|average", MAYBE_NUMBER), "med_ns": ("med|median", MAYBE_NUMBER),
               "min_ns": ("min|minimum", MAYBE_NUMBER), "max_ns": ("max|maximum", MAYBE_NUMBER),
               "stddev_ns": ("stddev|std dev", MAYBE_NUMBER)}
_PROJECTED = {f"proj_{name}": (re.sub(r"(^|\|)", r"\1proj ", headers), kind) for name,
              (headers, kind) in _STATISTICS.items()}
_TOTAL = {"total_time_ns": ("total time", WHOLE)}
_SUMMARY = {"time_percent": ("time", MAYBE_NUMBER), **_TOTAL}
_THREAD = {"style": ("style", MAYBE_NAME), "process": ("pid", MAYBE_WHOLE), "thread": ("tid", MAYBE_WHOLE)}
REPORTS = {
    "cuda_gpu_kern_sum": {**_SUMMARY, "instances": ("instances", WHOLE), **_STATISTICS,
                          "name": ("name", NAME)},
    "cuda_api_sum": {**_SUMMARY, "num_calls": ("num calls|calls", WHOLE), **_STATISTICS,
                     "name": ("name", NAME)},
    "cuda_gpu_mem_time_sum": {**_SUMMARY, "count": ("count|operations|instances", WHOLE), **_STATISTICS,
                              "operation": ("operation", NAME)},
    "nvtx_pushpop_sum": {**_SUMMARY, "instances": ("instances", WHOLE), **_STATISTICS,
                         "range": ("range", NAME)},
    "nvtx_gpu_proj_sum": {
        "range": ("range", NAME), "style": ("style", MAYBE_NAME),
        "total_proj_time_ns": ("total proj time", WHOLE),
        "total_range_time_ns": ("total range time", WHOLE), "range_instances": ("range instances", WHOLE),
        **_PROJECTED,
        "total_gpu_ops": ("total gpu ops", WHOLE), "avg_gpu_ops": ("avg gpu ops", MAYBE_NUMBER),
        "avg_range_level": ("avg range lvl", MAYBE_NUMBER), "avg_num_child": ("avg num child", MAYBE_NUMBER)},
    "nvtx_kern_sum": {
        "range": ("nvtx range", NAME), **_THREAD, "range_instances": ("nvtx inst", WHOLE),
        "kernel_instances": ("kern inst", WHOLE), **_TOTAL, **_STATISTICS,
        "kernel_name": ("kernel name", NAME)},
    "nvtx_gpu_proj_trace": {
        "range": ("name", NAME), "projected_start_ns": ("projected start", WHOLE),
        "projected_duration_ns": ("projected duration", WHOLE), "range_start_ns": ("orig start", WHOLE),
        "range_duration_ns": ("orig duration", WHOLE), **_THREAD, "gpu_ops": ("numgpuops", WHOLE),
        "level": ("lvl", MAYBE_WHOLE), "num_child": ("numchild", MAYBE_WHOLE),
        "range_id": ("rangeid", MAYBE_WHOLE),
        "parent_id": ("parentid", MAYBE_WHOLE), "range_stack": ("rangestack", MAYBE_NAME)},
}
# What the reports were called until 2022, in the names of their files.
OLD_NAMES = {"cuda_gpu_kern_sum": "gpukernsum", "cuda_api_sum": "cudaapisum",
             "cuda_gpu_mem_time_sum": "gpumemtimesum",
             "nvtx_pushpop_sum": "nvtxppsum", "nvtx_kern_sum": "nvtxkernsum",
             "nvtx_gpu_proj_trace": "nvtxgpuproj"}
UNITS_NS: dict[str, float] = {"ns": 1, "nsec": 1, "us": 1e3, "µs": 1e3, "μs": 1e3, "usec": 1e3, "ms": 1e6,
                              "msec": 1e6, "s": 1e9, "sec": 1e9}
SHOWN, LONGEST_NUMBER = 80, 40  # characters: of what was found, in an error; of a number
_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?([eE][-+]?\d+)?")


def load_reports(folder: Path | str, prefix: str,
                 reports: Iterable[str] = tuple(REPORTS)) -> tuple[dict[str, pd.DataFrame],
                                                                   list[ReportError]]:
    """The reports `<prefix>_<report>.csv` of a folder, and an error for each that cannot be used.

    Returns:
        frames: load_report's table of each report that can be used, by report name.
        errors: the others', absent files included: one bad report does not take the rest with it.
    """
    frames, errors = {}, []
    for report in reports:
        paths = [Path(folder, f"{prefix}_{name}.csv") for name in (report, OLD_NAMES.get(report)) if name]
        try:
            frames[report] = load_report(next((path for path in paths if path.exists()), paths[0]), report)
        except ReportError as error:
            errors.append(error)
    return frames, errors


def load_report(path: Path | str, report: str | None = None) -> pd.DataFrame:
    """One report as a table with the columns of REPORTS[report], times in ns.

    Args:
        path: the CSV; lines that nsys printed before the table are passed over.
        report: a key of REPORTS; by default what the file's name ends in.

    Returns:
        A row per line, in its order; ranges without the colon of the default domain (":forward" is
        "forward"). Where nsys says that the capture does not contain such data, no rows.

    Raises:
        ReportError: the file is absent, empty, truncated, or another report; a column is missing or has an
            unknown unit; a field is not a number.
    """
    path = Path(path)
    report = report or next((r for r in REPORTS if path.stem.endswith((r, OLD_NAMES.get(r, r)))), None)
    if report not in REPORTS:
        raise ReportError(f"{path}: the file's name tells no report, expected it to end in one of {', '.join(REPORTS)}")
    columns, lines = REPORTS[report], _lines(path, report)
    top = next((i for i, line in enumerate(lines[:HEADER_WITHIN]) if len(_places(line, columns)) >= 3), None)
    if top is None:
        return _nothing(path, report, lines)
    places = _places(lines[top], columns)
    missing = [name for name, (_, kind) in columns.items() if kind in (WHOLE, NAME) and name not in places]
    if missing:
        raise ReportError(f"{path}: line {top + 1} has no column for {', '.join(missing)}, expected the header of"
                          f" {report}, found {lines[top].strip()[:SHOWN]!r}")
    rows = _rows(path, lines[top:], top)
    values = {name: [_value(row[place], name, columns[name][1], factor,
                            f"{path}: line {number}, column {heading!r}")
                     for number, row in rows]
              for name, (place, heading, factor) in _factors(path, places).items()}
    if "range" in values:
        values["range"] = [str(name).removeprefix(":") for name in values["range"]]
    frame = _table(values, columns)
    # Each row's share is rounded to a tenth, and all make 100: a file cut between two lines shows in nothing
    # else.
    total = frame["time_percent"].sum() if rows and "time_percent" in values else 100
    if total < 100 - 0.05 * (len(rows) + 1):
        raise ReportError(f"{path}: the percentages of its {len(rows)} rows sum to {total:.1f}, expected 100: the last"
                          " are missing")
    return frame


def check_fresh(export: Path | str, capture: Path | str) -> None:
    """Check that an export (.sqlite or .csv) is not older than the capture (.nsys-rep) that it should be made
    from.

    Raises:
        ReportError: it is older, or one of the two is absent.
    """
    times = []
    for path in (export, capture):
        try:
            times.append(Path(path).stat().st_mtime)
        except FileNotFoundError:
            raise ReportError(f"{path}: no such file, expected a capture and its export") from None
    if times[0] < times[1]:
        raise ReportError(f"{export}: is {times[1] - times[0]:.0f} s older than {capture}, expected an export made after the "
                          "capture (nsys stats --force-export=true)")


def _lines(path: Path, report: str) -> list[str]:
    """The file's lines with their ends. A line ends where nsys ends it: kernels' names may hold Unicode's
    other ends.
    """
    expected = f"expected the report {report} of nsys stats"
    lines: list[str] = []
    before = 0
    try:
        if path.exists() and not path.is_file():
            raise ReportError(f"{path}: is no regular file, {expected}")
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise ReportError(f"{path}: line {len(lines) + 1} is longer than {LONGEST_LINE:,} bytes, {expected}")
                lines.append(line.decode())
                before += len(line)
                if before > LARGEST_FILE:
                    raise ReportError(f"{path}: is larger than {LARGEST_FILE:,} bytes, {expected}")
    except FileNotFoundError:
        raise ReportError(f"{path}: no such file, {expected}") from None
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror}), {expected}") from None
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: byte {before + error.start} is not UTF-8, {expected}") from None
    return [line.removeprefix("\ufeff") for line in lines[:1]] + lines[1:]


def _nothing(path: Path, report: str, lines: list[str]) -> pd.DataFrame:
    """The empty table of a file in which nsys says that there is nothing, instead of a header.

    Raises:
        ReportError: it does not say so.
    """
    said = [line.strip() for line in lines if line.strip()] or ["nothing"]
    for line in said:
        if "does not contain" in line:
            return _table({}, REPORTS[report])
    raise ReportError(f"{path}: no line is the header of {report}, expected its columns, found {said[0][:SHOWN]!r}")


def _places(line: str, columns: dict) -> dict[str, tuple[int, str, str]]:
    """Which columns a header line has: our name -> (its place, the heading, the unit in it)."""
    places: dict[str, tuple[int, str, str]] = {}
    try:
        headings = next(csv.reader([line]), [])
    except csv.Error:
        return places
    for place, heading in enumerate(headings if len(headings) <= MOST_COLUMNS else []):
        base, unit = heading.strip(), ""
        if base.endswith(")") and "(" in base:
            base, _, unit = base[:-1].rpartition("(")
        for name, (headers, _) in columns.items():
            if base.strip().lower() in headers.split("|") and name.endswith("_percent") == (unit == "%"):
                places[name] = place, heading.strip()[:SHOWN], unit.lower()
    return places


def _factors(path: Path, places: dict[str, tuple[int, str, str]]) -> dict[str, tuple[int, str, float]]:
    """Of each column its place, its heading, and what its numbers are multiplied by: times become ns.

    Raises:
        ReportError: a column of times has no known unit.
    """
    found = {}
    for name, (place, heading, unit) in places.items():
        factor = 1.0
        if name.endswith("_ns"):
            unit = unit or places.get("total_time_ns", (0, "", ""))[2]
            if unit not in UNITS_NS:
                raise ReportError(f"{path}: column {heading!r} has no known unit of time, expected one of"
                                  f" {', '.join(UNITS_NS)}")
            factor = UNITS_NS[unit]
        found[name] = place, heading, factor
    return found


def _rows(path: Path, lines: list[str], before: int) -> list[tuple[int, list[str]]]:
    """The fields of each line below the header (the first of lines) and above a blank one, with the line's
    number.
    """
    if not lines[-1].endswith("\n"):
        raise ReportError(f"{path}: line {before + len(lines)} is cut off, expected the file to end with an end of line")
    reader, rows = csv.reader(lines, strict=True), []
    width = len(next(reader))
    try:
        for row in reader:
            if not row:
                break
            if len(row) != width:
                raise ReportError(f"{path}: line {before + reader.line_num} has {len(row)} fields, expected {width}")
            rows.append((before + reader.line_num, row))
    except csv.Error as error:
        raise ReportError(f"{path}: line {before + reader.line_num} is not CSV ({error}), expected {width} fields") from None
    return rows


def _value(field: str, name: str, kind: str, factor: float, where: str) -> int | float | str | None:
    """One field of the column `name` as its type, times in ns; `where` begins the error."""
    field = field.strip()
    if kind in (NAME, MAYBE_NAME):
        return field if field or kind == NAME else None
    if not field and kind != WHOLE:
        return None
    found = f"{where}: found {field[:SHOWN]!r}"
    if len(field) > LONGEST_NUMBER or not _NUMBER.fullmatch(field):
        raise ReportError(f"{found}, expected a number")
    digits = field.replace(",", "")
    number = int(digits) if factor == 1 and digits.lstrip("+-").isdigit() else float(digits) * factor
    if not math.isfinite(number) or abs(number) >= INT64:
        raise ReportError(f"{found}, expected a number that fits into 64 bits")
    if number < 0 and not name.endswith("start_ns"):
        raise ReportError(f"{found}, expected no negative number")
    if kind == MAYBE_NUMBER:
        return number
    if factor == 1 and int(number) != number:
        raise ReportError(f"{found}, expected a whole number")
    return round(number)


def _table(values: dict[str, list], columns: dict) -> pd.DataFrame:
    """All columns with their types, those without values missing throughout."""
    none = [None] * max(map(len, values.values()), default=0)
    return pd.DataFrame({name: pd.Series(values.get(name, none), dtype=kind) for name,
                         (_, kind) in columns.items()})
