"""Tables of text as GitHub markdown."""
import re

import pandas as pd


def markdown_table(table: pd.DataFrame) -> str:
    """Text columns to the left, all else to the right, as a reader expects numbers."""
    def is_number(cell: object) -> bool:
        return not isinstance(cell, str) or cell[:1].isdigit() or cell[:1] in "-–"
    align = ["right" if all(map(is_number, table[column])) else "left" for column in table]
    padded = table.to_markdown(index=False, disable_numparse=True, colalign=align)
    return re.sub(r" +\|", " |", re.sub(r"\| +", "| ", re.sub(r"-{4,}", "---", padded)))  # GitHub renders no file over 512 KB
