"""The CSV reports of `nsys stats` that captures are checked against."""
import csv
from pathlib import Path

import pandas as pd

from stepscope import StepscopeError

TEXTS = ("Range",)


class ReportError(StepscopeError, ValueError):
    """A report that cannot be used; the text names the file, where in it, what was found and what was
    expected."""


def load_report(path: Path, *headings: str) -> pd.DataFrame:
    """Columns of a report: whole numbers, and ranges without the colon of the default domain. No rows where
    nsys says that the capture does not contain such data.

    Raises:
        ReportError: the file is absent, truncated, or another report; a field is no number.
    """
    try:  # a line ends where nsys ends it: kernels' names may hold Unicode's other ends
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read ({error}), expected a report of nsys stats") from None
    rows = list(csv.reader(lines))
    top = next((at for at, row in enumerate(rows) if {*headings} <= {*row}), None)
    if top is None:
        if any("does not contain" in line for line in lines):
            return pd.DataFrame(columns=[*headings])
        raise ReportError(f"{path}: no line has columns for {', '.join(headings)}, expected a report of nsys"
                          f" stats, found {(lines or ['nothing'])[0].strip()[:80]!r}")
    if not lines[-1].endswith("\n"):
        raise ReportError(f"{path}: its last line is cut off, expected the file to end with an end of line")
    found: dict[str, list[int | str]] = {heading: [] for heading in headings}
    for number, row in enumerate(rows[top + 1:], start=top + 2):
        if not row:
            break
        if len(row) != len(rows[top]):
            raise ReportError(f"{path}: line {number} has {len(row)} fields, expected {len(rows[top])}")
        for heading, values in found.items():
            field = row[rows[top].index(heading)].strip()
            if heading not in TEXTS and not field.isdecimal():
                raise ReportError(f"{path}: line {number}, column {heading!r}: found {field[:80]!r}, expected"
                                  " a number")
            values.append(field.removeprefix(":") if heading in TEXTS else int(field))
    return pd.DataFrame(found)
