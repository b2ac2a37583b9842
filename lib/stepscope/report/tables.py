"""Format all numbers and tables, and escape the text that tables contain.

A column's heading ends with its unit, as in "wall, ms". A share of 0.742 is printed as 74%.
"""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import pandas as pd

from stepscope.stats import launch_bound

NONE = "–"
MAX_ROWS = 15
MAX_TEXT_CHARS = 200  # maximum number of characters printed from a record's text
# The suffix that each unit adds to a number in a sentence. The unit "n" is for counts, "" is for numbers without a
# unit, and "billion" formats numbers as "3.41 billion" or "129 million".
UNITS = {"%": "%", "x": "x", "n": "", "": "", "billion": "", "us": " µs"} | {
    unit: f" {unit}"
    for unit in (
        "ms",
        "µs",
        "s",
        "min",
        "h",
        "GiB",
        "MiB",
        "KiB",
        "B",
        "MHz",
        "W",
        "J",
        "TFLOP/s",
        "TB/s",
        "GB/s",
        "tokens/s",
        "kWh",
        "nats",
    )
}
MIN_PERCENT = 0.001  # smaller nonzero percentages are printed as "under 0.001"
IN_CELLS = ("x", "%")  # units printed in each cell, not in the heading
# Units by the suffix of a column's name.
SUFFIXES = {"us": "µs"} | {unit.lower(): unit for unit in ("ms", "s", "GiB", "MiB", "KiB", "MHz", "W", "J")}
# Units of columns in runs' tables whose names don't contain the unit: shares, and counts that may be missing.
UNSAID = dict.fromkeys(
    ("busy", "share", "efficiency", "mfu", "mfu_vs_measured_peak", "mfu_clock_adjusted"), "%"
) | dict.fromkeys(("operations", "count", "passes", "steps", "launches", "kernels"), "n")
WORDS = {
    "gpu": "GPU time",
    "sm clock": "SM clock",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "times_one_gpu": "times one GPU",
}


def digits(value: Any, unit: str = "") -> str:
    """Format a number without its unit; return "–" if the number is missing.

    Numbers have three significant digits, with commas between thousands.

    Counts and bytes are printed as integers, and shares with two digits (74%, 4.6%), or with three from 99%
    (99.6%). Ratios are printed with one decimal (3.3x), but with two decimals below 2 (1.02x) and without decimals
    from 100.
    """
    if missing(value):
        return NONE
    value = float(value) * (100 if unit == "%" else 1)
    size = abs(value)
    if unit == "billion":
        for scale, word in ((1e9, " billion"), (1e6, " million")):
            if size >= scale * 0.9995:
                return digits(value / scale) + word
        return _significant(value, 3)
    if unit in ("n", "B", "MHz", "W"):
        return f"{value:,.0f}"
    if unit == "x" and size >= 0.095:
        return f"{value:,.{2 if size < 1.995 else 1 if size < 99.95 else 0}f}"
    if unit == "%" and 99 <= size < 99.95:
        return f"{value:.1f}"
    if unit == "%" and 0 < size < MIN_PERCENT:
        return f"under {MIN_PERCENT}"
    return _significant(value, 2 if unit in IN_CELLS else 3)


def missing(value: Any) -> bool:
    """Return whether a value is missing (None, NA, NaN) or infinite."""
    return value is None or value is pd.NA or (isinstance(value, Real) and not math.isfinite(value))


def _significant(value: float, count: int) -> str:
    if value == 0:
        return "0"
    rounded = float(f"{value:.{count - 1}e}")  # rounds first: 9.996 becomes 10.0, which has one decimal
    decimals = count - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{decimals}f}" if decimals >= 0 else f"{value if abs(value) < 1e4 else rounded:,.0f}"


def number(value: Any, unit: str = "") -> str:
    """Format a number with its unit: "1,092 ms", "94.2 ms", "74%", "3.3x", "128,625,408".

    Raises:
        ValueError: If the unit is unknown.
    """
    if unit not in UNITS:
        raise ValueError(f"unit: got {unit!r}, but expected one of {', '.join(filter(None, UNITS))}")
    return NONE if missing(value) else digits(value, unit) + UNITS[unit]


def escape(text: object, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Escape a record's text for markdown, so that it is displayed literally, on one line and without links."""
    cut = str(text)[: max_chars + 1]
    line = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in cut)
    line = unicodedata.normalize("NFC", " ".join(line.split()))
    if len(line) > max_chars:
        line = f"{line[:max_chars]}…"
    line = re.sub(r"([\\`*_\[\]<>|&~$])", r"\\\1", line)
    line = re.sub(
        r"^([-+#=]|\d+(?=[.)]( |$)))",
        lambda start: start[1][:-1] + f"&#{ord(start[1][-1])};" if start[1][0].isdigit() else f"\\{start[1]}",
        line,
    )
    addresses = r"(?i):(?=//)|@(?=\w)|\bwww(?=\.)|\b(mailto|xmpp|javascript|data)(?=:)"
    return re.sub(addresses, lambda at: at[0] + "\u2060", line)  # an invisible word joiner breaks the address


def listed(words: Sequence[str]) -> str:
    """Join words as "a", "a and b" or "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def headed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rename a frame's columns to headings, such as "wall, ms" for wall_ms and "peak, GiB" for peak_gib."""

    def heading(name: Any) -> Any:
        if not isinstance(name, str) or ", " in name:
            return name
        words, _, unit = name.rpartition("_")
        if name in WORDS or unit not in SUFFIXES:
            return WORDS.get(name, name.replace("_", " "))
        words = words.replace("_", " ")
        return f"{WORDS.get(words, words)}, {SUFFIXES[unit]}" if words else SUFFIXES[unit]

    return frame.rename(columns=heading)


def _cells(frame: pd.DataFrame, common: str) -> tuple[list[str], list[list[str]], list[str]]:
    """Return a frame's headings, its cells as text by column, and its units ("text" for text columns)."""
    headings, columns, units = [], [], []
    for place, name in enumerate(frame.columns):
        heading, values = str(name), list(frame.iloc[:, place])
        words, comma, unit = heading.rpartition(", ")
        numeric = all(missing(value) or (isinstance(value, Real) and not _is_bool(value)) for value in values)
        if not comma or unit not in UNITS:
            words, unit = heading, common if any(isinstance(value, float) for value in values) else ""
        elif unit not in IN_CELLS:
            words = f"{words}, {UNITS[unit].strip() or unit}" if unit not in ("n", "billion") else words
        headings.append(escape(words))
        units.append(unit if numeric else "text")
        sign = unit if unit in IN_CELLS else ""
        columns.append([_cell(value, unit, sign) for value in values])
    return headings, columns, units


def _cell(value: Any, unit: str, sign: str) -> str:
    if _is_bool(value):
        return "yes" if value else "no"
    if missing(value):
        return NONE
    if isinstance(value, Integral) and not unit:
        return f"{value:,}"
    return digits(value, unit) + sign if isinstance(value, Real) else escape(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool"  # includes NumPy's bool


def markdown(frame: pd.DataFrame, unit: str = "", rows: int = MAX_ROWS) -> str:
    """Format a frame as a GitHub table with escaped text; named index levels become columns.

    Args:
        unit: the unit of numeric columns whose headings don't contain a unit, such as the columns of a
            pivot table.
        rows: the maximum number of rows to print.
    """
    if any(frame.index.names):
        frame = frame.reset_index()
    more = len(frame) - rows
    headings, columns, units = _cells(frame.head(rows), unit)
    left = [unit == "text" for unit in units]
    lines = [headings, [":--" if text else "--:" for text in left], *map(list, zip(*columns))]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if more > 0:
        text += f"\n\n{more:,} more rows are in the runs' tables."
    return text


def quartiles(rows: pd.DataFrame) -> pd.Series:
    """Format each row's ``wall_q1_ms`` and ``wall_q3_ms`` as "58.3 to 58.6", or None if the case did not run."""
    texts = [
        None if missing(low) else f"{digits(low, 'ms')} to {digits(high, 'ms')}"
        for low, high in zip(rows["wall_q1_ms"], rows["wall_q3_ms"])
    ]
    return pd.Series(texts, rows.index, dtype=object)


def wall_cell(row: Mapping[str, Any]) -> str:
    """Format a wall time as "58.5 (58.3 to 58.6)": the median and the quartiles.

    For a launch-bound case, also give the fastest step, as "at best 43.6".
    """
    if missing(row.get("wall_ms")):
        return NONE
    median, low, high, fastest = (digits(row[f"wall_{name}ms"], "ms") for name in ("", "q1_", "q3_", "min_"))
    waits = launch_bound(*(row.get(name, math.nan) for name in ("busy", "enqueue_ms", "gpu_ms")))
    return f"{median} ({low} to {high})" + f", at best {fastest}" * waits


def brief(frame: pd.DataFrame, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return the selected columns of a notebook's table, formatted like the report's tables.

    Headings include units, numbers have three significant digits, shares are percentages, and counts are integers.
    The table has no index.
    """
    rows = frame[list(columns)] if columns is not None else frame
    named = {
        name: f"{WORDS.get(name, name).replace('_', ' ')}, {UNSAID[name]}" for name in rows if name in UNSAID
    }
    rows = headed(rows.rename(columns=named))
    headings, cells, _ = _cells(rows.reset_index() if any(rows.index.names) else rows, "")
    plain = [[re.sub(r"\\(.)", r"\1", cell) for cell in column] for column in cells]
    return pd.DataFrame(
        dict(zip((re.sub(r"\\(.)", r"\1", name) for name in headings), plain)), index=[""] * len(frame)
    )
