"""What attention saves for backward, in numbers."""
import numpy as np
import pandas as pd
from scipy import stats

from stepscope.config import PRECISIONS
from stepscope.say.formats import NEARLY, runs_of
from stepscope.studies.attention.cells import head, implementations, timed
from stepscope.studies.attention.config import ATTENTIONS, QUADRATIC
from stepscope.studies.attention.names import NAMES
from stepscope.studies.attention.prediction import LONG, number_bytes

NOT_WHOLE = 0.005  # an exponent this far from a whole number is that of a sum of powers
MOSTLY_SQUARE = 1.5  # above this exponent


def saved_for_backward(cells: pd.DataFrame) -> dict | None:
    """How what is saved grows with the sequence: the ``powers``, who mixes several (``mixed``), who saves so
    many bytes a row and a constant (``constants``), who as many in bf16 (``kept_wide``), who keeps squares.
"""
    rows = timed(cells)
    rows = rows[rows["saved_bytes"].notna()] if len(rows) else rows
    fits = scaling(rows) if len(rows) else pd.DataFrame()
    if fits.empty:
        return None
    fits = fits.set_index("implementation")
    d = head(rows)
    at = rows[rows["d_model"] == d]
    at = at[at["sequence"] == at["sequence"].max()]
    local = dict(iter(local_exponents(rows).groupby("implementation")))
    is_square = fits["exponent"] > MOSTLY_SQUARE
    squared, linear = list(fits.index[is_square]), list(fits.index[~is_square])
    bent = (fits["exponent"] - fits["exponent"].round()).abs() > NOT_WHOLE
    mixed = [name for name in fits.index[bent] if name in local
             and rows.loc[rows["implementation"] == name, "sequence"].nunique() > 2]
    both = bool(squared and linear)
    powers = fits.reset_index()[["implementation", "exponent", "error"]]
    return {"names": NAMES, "d": d, "sequence": at["sequence"].max(), "from": fits["from"].min(),
            "to": fits["to"].max(), "powers": powers.to_dict("records"), "mixed": mixed,
            "mixed_powers": [local[name] for name in mixed],
            "constants": constants(rows, mixed), "kept_wide": kept_wide(at), "squared": squared,
            "linear": linear, "both": both,
            "fits": fits, "local": local, "saved": saved(at), "runs": runs_of(cells)}


def scaling(rows: pd.DataFrame) -> pd.DataFrame:
    """By implementation the exponent of the saved bytes in the sequence, with its standard error: one slope
    in logarithms over all d and precisions, each with an intercept of its own, over sequences of at least
    :data:`LONG` where there are three."""
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
        fit = stats.linregress(x, y) if len(points) > 2 else None
        slope = fit.slope if fit else float((x * y).sum() / (x * x).sum())
        # Each group has taken an intercept.
        free = len(points) - points.groupby(["precision", "d_model"]).ngroups - 1
        error = fit.stderr * np.sqrt((len(points) - 2) / free) if fit and free > 0 else float("nan")
        fits.append({"implementation": name, "exponent": slope, "error": error, "points": len(points),
                     "from": int(points["sequence"].min()), "to": int(points["sequence"].max())})
    return pd.DataFrame(fits)


def local_exponents(rows: pd.DataFrame) -> pd.Series:
    """The exponent between the two longest sequences, by implementation, precision and head dimension."""
    shorter, longest = sorted(rows["sequence"].unique())[-2:]
    found = rows.pivot_table(index=["implementation", "precision", "d_model"], columns="sequence",
                             values="saved_bytes")
    return np.log(found[longest] / found[shorter]).dropna() / np.log(longest / shorter)


def constants(rows: pd.DataFrame, mixed: list[str]) -> list[dict]:
    """So many bytes a row and a constant that implementations save exactly, at every sequence."""
    found: dict[tuple[float, float], list[str]] = {}
    for name in mixed:
        points = rows[rows["implementation"] == name]
        positions = (points["batch_size"] * points["sequence"]).astype(float)
        a_row, constant = np.polyfit(positions, points["saved_bytes"].astype(float), 1).round()
        if constant and (points["saved_bytes"] == a_row * positions + constant).all():
            found.setdefault((a_row, constant), []).append(name)
    return [{"implementations": names, "row_bytes": a_row, "constant_bytes": constant}
            for (a_row, constant), names in found.items()]


def kept_wide(at: pd.DataFrame) -> list[str]:
    """Which of those that keep squares keep as many bytes in bf16 as in fp32."""
    found = at.pivot_table(index="implementation", columns="precision", values="saved_bytes")
    if not {"bf16", "fp32"} <= set(found):
        return []
    return [name for name in ATTENTIONS if name in QUADRATIC and name in found.index
            and abs(found.loc[name, "bf16"] / found.loc[name, "fp32"] - 1) < NEARLY]


def saved(at: pd.DataFrame) -> pd.DataFrame:
    """A row for each implementation and precision of one point: ``mib``, and ``squares`` (numbers for each
    pair of positions in the batch)."""
    square = at["batch_size"] * at["sequence"] ** 2 * at["precision"].map(number_bytes)
    rows = at.assign(mib=at["saved_bytes"] / 2**20, squares=at["saved_bytes"] / square)
    return rows[["implementation", "precision", "mib", "squares"]].sort_values(
        "precision", key=lambda column: column.map(PRECISIONS.index))
