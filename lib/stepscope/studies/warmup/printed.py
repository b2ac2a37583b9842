"""The warm-up study's tables as they are printed."""
import pandas as pd

from stepscope.say.formats import count, number, plus_minus
from stepscope.studies.warmup.facts import SHAPE


def means(facts: dict) -> pd.DataFrame:
    """Shapes down, numbers of warm-up steps across: mean and standard deviation of the timed steps."""
    cells = facts["cells"].copy()
    cells["cell"] = [plus_minus(row.mean, row.std) for row in cells.itertuples()]
    table = cells.pivot(index=SHAPE, columns="warmup_steps", values="cell")
    table.columns = [count(warmups, "warm-up") if warmups else "no warm-up" for warmups in table.columns]
    table["steady median"] = cells.groupby(SHAPE, observed=True)["steady"].median().map(number)
    return table.rename_axis(["size", "context"]).reset_index()


def costs(facts: dict) -> pd.DataFrame:
    """Shapes down, parts of the start across."""
    table, loading = facts["by_part"].copy(), facts["loading"]
    if loading:
        table["first step after a one-layer model"] = loading["after_ms"]
        table["loading at first use"] = loading["ms"]
    return table.map(number).rename_axis(["size", "context"]).reset_index()


def purposes(facts: dict) -> pd.DataFrame | None:
    """A row for each shape and purpose of a call."""
    if facts["purposes"] is None:
        return None
    sums = facts["purposes"]
    shown = sums.assign(**{column: sums[column].map(number) for column in ("first_ms", "steady_ms")},
                        **{column: sums[column].astype(int) for column in ("first_calls", "steady_calls")})
    return shown.rename(columns={"context_length": "context", "first_calls": "calls, first",
                                 "first_ms": "ms, first",
                                 "steady_calls": "calls, steady", "steady_ms": "ms, steady"})
