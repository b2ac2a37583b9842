"""Which rows of a table over all runs are compared: one program, one batch, sizes in order, one context."""
import pandas as pd

from stepscope.config import SIZES

REFERENCE = 512  # the context at which sizes are compared, where it was run
PLAIN = {"attention": "naive", "compile": "none", "optimizer": "foreach", "repeat": 0}
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


def chosen(frame: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The rows that have these values, in the batch and vocabulary that most have if no others are named; the
    smallest size first. A column that is not there is not asked for."""
    wanted = {name: frame[name].mode().max() for name in ("batch_size", "vocab_size")} | values
    for name, value in wanted.items():
        frame = frame[frame[name] == value] if name in frame else frame
    order = {size: at for at, size in enumerate(SIZES)}
    return frame.sort_values("size", key=lambda sizes: sizes.astype(str).map(order), kind="stable")


def reference(frame: pd.DataFrame) -> int:
    """The context at which its sizes are compared: 512, else the longest there is.

    Raises:
        IndexError: it has no rows.
    """
    contexts = frame["context_length"]
    return int(REFERENCE if (contexts == REFERENCE).any() else contexts.sort_values().iloc[-1])


def by_size(rows: pd.DataFrame, columns: str, values: str, names: dict[str, str] | None = None
            ) -> pd.DataFrame:
    """A row a size, in the order in which they come; a column a context ("1,024") or another key, those of
    ``names`` in that order and by these names."""
    found = rows.pivot(index="size", columns=columns, values=values).loc[rows["size"].unique()]
    if names:
        found = found[[name for name in names if name in found]].rename(columns=names)
    return found.rename(columns=lambda name: name if isinstance(name, str) else f"{name:,}").rename_axis(
        columns=None)
