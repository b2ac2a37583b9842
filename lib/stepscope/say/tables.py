"""Tables of text as GitHub markdown."""
import re

import pandas as pd
from markupsafe import Markup

from stepscope.say.words import escape


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
    return re.sub(r"(?<!\\)\|", r"\\|", escape(value)) if isinstance(value, str) else value
