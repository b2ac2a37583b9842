"""What attention saves for backward, in numbers."""
import numpy as np
import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.say.formats import runs_of
from stepscope.studies.attention.cells import head, implementations, timed
from stepscope.studies.attention.names import NAMES
from stepscope.studies.attention.prediction import LONG, number_bytes

NOT_WHOLE = 0.005  # an exponent this far from a whole number is that of a sum of powers
MOSTLY_SQUARE = 1.5  # above this exponent


def saved_for_backward(cells: pd.DataFrame) -> dict | None:
    """How what is saved grows with the sequence: whose parts grow with different ones
    (``mixed``), who keeps squares (``squared``), and the bytes a row of those that do not (``row_bytes``)."""
    rows = timed(cells)
    rows = rows[rows["saved_bytes"].notna()] if len(rows) else rows
    fits = scaling(rows) if len(rows) else pd.DataFrame()
    if fits.empty:
        return None
    fits = fits.set_index("implementation")
    d = head(rows)
    at = rows[rows["d_model"] == d]
    at = at[at["sequence"] == at["sequence"].max()]
    is_square = fits["exponent"] > MOSTLY_SQUARE
    squared, linear = list(fits.index[is_square]), list(fits.index[~is_square])
    bent = (fits["exponent"] - fits["exponent"].round()).abs() > NOT_WHOLE
    mixed = [name for name in fits.index[bent]
             if rows.loc[rows["implementation"] == name, "sequence"].nunique() > 2]
    both = bool(squared and linear)
    of_rows = at[at["implementation"].isin(linear)]
    return {"names": NAMES, "d": d, "sequence": at["sequence"].max(), "from": fits["from"].min(),
            "to": fits["to"].max(), "mixed": mixed, "squared": squared, "linear": linear, "both": both,
            "row_bytes": (of_rows["saved_bytes"] / (of_rows["batch_size"] * of_rows["sequence"])).tolist(),
            "fits": fits, "saved": saved(at), "runs": runs_of(cells)}


def scaling(rows: pd.DataFrame) -> pd.DataFrame:
    """By implementation the exponent of the saved bytes in the sequence: one slope, by least squares,
    in logarithms over all d and precisions, each with an intercept of its own (and of each its own slope,
    ``least`` and ``most``), over sequences of at least :data:`LONG` where there are three."""
    fits = []
    for name in implementations(rows):
        points = rows[(rows["implementation"] == name) & (rows["saved_bytes"] > 0)]
        if points.loc[points["sequence"] >= LONG, "sequence"].nunique() >= 3:
            points = points[points["sequence"] >= LONG]
        if points["sequence"].nunique() < 2:
            continue
        groups = [points["precision"], points["d_model"]]
        x, y = (values - values.groupby(groups).transform("mean")
                for values in (np.log(points["sequence"].astype(float)), np.log(points["saved_bytes"])))
        each = (x * y).groupby(groups).sum() / (x * x).groupby(groups).sum()
        fits.append({"implementation": name, "exponent": float((x * y).sum() / (x * x).sum()),
                     "least": each.min(), "most": each.max(),
                     "from": int(points["sequence"].min()), "to": int(points["sequence"].max())})
    return pd.DataFrame(fits)


def saved(at: pd.DataFrame) -> pd.DataFrame:
    """A row for each implementation and precision of one point: ``mib``, and ``squares`` (numbers for each
    pair of positions in the batch)."""
    square = at["batch_size"] * at["sequence"] ** 2 * at["precision"].map(number_bytes)
    rows = at.assign(mib=at["saved_bytes"] / 2**20, squares=at["saved_bytes"] / square)
    return rows[["implementation", "precision", "mib", "squares"]].sort_values(
        "precision", key=lambda column: column.map(PRECISIONS.index))
