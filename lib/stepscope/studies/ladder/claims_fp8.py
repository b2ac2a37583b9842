"""What FP8 gains and what it is off by: claims."""

from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import select
from stepscope.report.tables import listed
from stepscope.stats import LEAST_GAIN
from stepscope.studies.ladder.rows import LAST, PLACE
from stepscope.studies.ladder.rows_fp8 import by_batch, errors_by_size, fp8_losses, pays_at


def fp8_small_batch(tables: Tables) -> Claim:
    """At the smallest batch FP8 is not faster, and at the largest size quantizing adds what matmuls save."""
    first = by_batch(tables).groupby("size", sort=False).head(1)
    row = first.loc[first["bf16_ms"].idxmax()]
    own = select(tables["ladder.kernels"], row[PLACE])
    times = own.assign(matmul=own["family"] == "matrix multiply").pivot_table(
        index="matmul", columns="optimization", values="gpu_ms", aggfunc="sum"
    )
    more = times["fp8"] - times[LAST]
    found = {"size": row["size"], "batch": int(row["batch_size"]), "saved": -more[True], "added": more[False]}
    return found if row["gain"] < 1 + LEAST_GAIN and 0 < found["saved"] < found["added"] else None


def fp8_pays(tables: Tables) -> Claim:
    """The sizes at which FP8 clearly gains at every batch, and how much."""
    found = by_batch(tables)
    own = found[found["size"].isin(pays_at(found))]
    return (
        {
            "sizes": listed(pays_at(found)),
            "low": own["gain"].min(),
            "high": own["gain"].max(),
            "least": own["tokens"].min(),
            "most": own["tokens"].max(),
        }
        if len(own)
        else None
    )


def fp8_vain(tables: Tables) -> Claim:
    """Where others gain, the largest size of those at which FP8 gains nothing clear at any batch of two."""
    found = by_batch(tables)
    vain = [
        (size, own)
        for size, own in found.groupby("size", sort=False)
        if len(own) > 1 and not own["clear"].any()
    ]
    if not vain or not pays_at(found):
        return None
    size, own = vain[-1]
    return {"size": size, "tokens": own["tokens"].max(), "low": own["gain"].min(), "high": own["gain"].max()}


def fp8_gradient(tables: Tables) -> Claim:
    """How far FP8's gradient is from fp32's, beside bf16's, at the largest size that has both: of weights as
    drawn, and of trained ones, where it is far less."""
    size, drawn, trained = errors_by_size(tables)[-1]
    found = {
        "size": size,
        "fp8": drawn["fp8"],
        "bf16": drawn[LAST],
        "trained_fp8": trained["fp8"],
        "trained_bf16": trained[LAST],
    }
    return found if drawn["fp8"] > max(2 * drawn[LAST], 4 * trained["fp8"]) else None


def fp8_gradient_worst(tables: Tables) -> Claim:
    """The size where that of trained weights is farthest beside bf16's, if it is another."""
    both = errors_by_size(tables)
    size, _, trained = max(both, key=lambda one: one[2]["fp8"] / one[2][LAST])
    told = fp8_gradient(tables) is not None and size != both[-1][0]
    return {"size": size, "fp8": trained["fp8"], "bf16": trained[LAST]} if told else None


def fp8_training(tables: Tables) -> Claim:
    """How far FP8's loss is from bf16's at most, over the steps of both at the largest batch."""
    curves = tables["ladder.curves"]
    own = select(curves, batch_size=select(curves, optimization="fp8")["batch_size"].max())
    losses = own.pivot_table(index="step", columns="optimization", values="loss")
    found = {
        "steps": len(losses),
        "batch": int(own["batch_size"].iloc[0]),
        "most": (losses["fp8"] / losses[LAST] - 1).abs().max(),
    }
    return found if found["most"] < 0.05 else None


def fp8_trains(tables: Tables) -> Claim:
    """FP8's loss is as near to bf16's as seeds are to each other, at every size; the numbers of the size
    where it is nearest to being farther."""
    sizes, worst = fp8_losses(tables)
    return {"sizes": listed(sizes)} | worst if worst["fp8"] <= worst["high"] else None


def fp8_trains_where(tables: Tables) -> Claim:
    """What FP8 gains in the steps that it was trained with, where that is nothing clear, and elsewhere it
    pays."""
    curves = select(tables["ladder.curves"], optimization="fp8")[PLACE].drop_duplicates()
    found = by_batch(tables)
    gains = found.merge(curves, on=PLACE)
    vain = len(gains) and not gains["clear"].any() and found["clear"].any() and fp8_trains(tables)
    return {"least": gains["gain"].min(), "most": gains["gain"].max()} if vain else None


def fp8_strays(tables: Tables) -> Claim:
    """At some size it is farther: the numbers of that where it is by most."""
    _, worst = fp8_losses(tables)
    return worst if worst["fp8"] > worst["high"] else None
