"""Tables of text: as GitHub markdown, and as a notebook shows them."""
import re
from collections.abc import Sequence
from numbers import Integral, Real

import pandas as pd
from IPython.display import Markdown
from markupsafe import Markup

from stepscope.say.formats import MODE_WORDS, number, tiny
from stepscope.say.words import escape

MOST_COLUMNS = 8
UNITS = {"ms": "ms", "s": "s", "us": "µs", "mib": "MiB"}
HEADINGS = {"ci_low": "95% from", "ci_high": "95% to", "std": "deviation", "tflops": "TFLOP/s"}


def markdown_table(table: pd.DataFrame) -> Markup:
    """Text columns to the left, all else to the right, as a reader expects numbers. Cells are data: they are
    escaped.
    """
    def is_number(cell: object) -> bool:
        return not isinstance(cell, str) or cell[:1].isdigit() or cell[:1] in "-–"
    align = ["right" if all(map(is_number, table[column])) else "left" for column in table]
    padded = table.map(_cell).to_markdown(index=False, disable_numparse=True, colalign=align)
    # GitHub renders no file over 512 KB: no padding.
    return Markup(re.sub(r" +\|", " |", re.sub(r"\| +", "| ", re.sub(r"-{4,}", "---", padded))))


def _cell(value: object) -> object:
    if isinstance(value, str) and not value.isdecimal():
        return re.sub(r"(?<!\\)\|", r"\\|", escape(value))
    whole = isinstance(value, Integral | str) and not isinstance(value, bool)
    return f"{int(value):,}" if whole else value  # type: ignore[call-overload]


def brief(table: pd.DataFrame, columns: Sequence[str], empty: str = "Nothing.") -> pd.DataFrame | Markdown:
    """A notebook's table: at most eight columns of text, the telling ones first.

    Args:
        columns: those to show, in their order; one that the table lacks, or that has no value, is left out.
        empty: what is said where there is no row.

    Numbers have three significant digits; bytes become MiB. A column's name becomes words, with its unit in
    brackets.

    Raises:
        ValueError: more than eight columns.
    """
    if len(columns) > MOST_COLUMNS:
        raise ValueError(f"{len(columns)} columns are more than a reader takes in")
    if table.empty:
        return Markdown(empty)
    shown = {}
    for column in columns:
        if column in table and not table[column].isin(["", None]).all() and table[column].notna().any():
            cells = table[column]
            if column.endswith("bytes"):
                cells, column = cells / 2**20, column.removesuffix("bytes") + "mib"
            if pd.api.types.is_float_dtype(cells) and (cells.dropna() % 1 == 0).all():
                cells = cells.astype("Int64")  # counts, of which some are missing
            if column == "mode":
                cells = cells.replace(MODE_WORDS)
            shown[_heading(column)] = [_brief_cell(cell) for cell in cells]
    return pd.DataFrame(shown, index=[""] * len(table))  # its rows' numbers would say nothing


def _heading(column: str) -> str:
    """A column's name in words: "captured (ms)", which a narrow column can break, of "captured_ms"."""
    words, _, unit = f" {column}".rpartition("_" if "_" in column else " ")
    if unit not in UNITS or words.endswith("_per"):
        words, unit = column, ""
    words = HEADINGS.get(words.strip(), words.strip().replace("_", " "))
    return f"{words} ({UNITS[unit]})" if words and unit else words or UNITS[unit]


def _brief_cell(cell: object) -> str:
    if isinstance(cell, bool | str):
        return str(cell)
    if cell is pd.NA:
        return "–"
    if isinstance(cell, Integral):
        return f"{cell:,}"
    if not isinstance(cell, Real):
        return "–" if cell is None else str(cell)
    value = float(cell)
    if 0 < abs(value) < 1e-3:
        return tiny(value).replace("e-", "e\N{NON-BREAKING HYPHEN}")  # a line would end behind another
    return number(value)
