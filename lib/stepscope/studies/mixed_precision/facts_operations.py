"""What a step's operations say: their types, what casts cost, and what low precision leaves as it was."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import pick, reference
from stepscope.studies.mixed_precision.comparison import LOW
from stepscope.traces.families import MATMUL

CASTS = "copy and cast"  # a family, as MATMUL is
KINDS = ("low", "fp32", "both", "cast")  # of an operation, by the types it touches
# What a step's device time goes into, of operations by phase, region and family: the first that fits.
PARTS = {"matrix products": lambda o: o["family"] == MATMUL,
         "optimizer": lambda o: o["phase"] == "optimizer",
         "casts and copies": lambda o: o["family"] == CASTS,
         "softmax, mask, scale": lambda o: o["region"].isin([f"attention.{name}" for name in
                                                             ("softmax", "mask", "scores")]),
         "norms": lambda o: o["region"] == "norm",
         "summing gradients": lambda o: o["region"] == "gradient accumulation",
         "the rest": lambda o: o["family"].notna()}
LITTLE = 0.01  # of a step: a part that takes less at every size is not named


def casts(census: pd.DataFrame, captured: pd.DataFrame) -> dict | None:
    """Types of the step's operations (``census``) and the time of its casts in the captures of low precision
    (``cost``), each None where it was not measured. ``as_counted``: the captures have as many casts as the
    census, where it is of the same size and context."""
    cost = _cost(captured)
    if census.empty and cost is None:
        return None
    runs = set(runs_of(census)) if len(census) else set()
    if cost and len(census):
        table = cost["table"].astype({"size": str}).set_index("size")["casts"]
        counted = pick(census, operation="_to_copy", autocast=cost["precision"],
                       context_length=cost["context"])
        counts = counted.groupby(counted["size"].astype(str))["count"].sum()
        cost["as_counted"] = len(counts) > 0 and bool((table.reindex(counts.index) == counts).all())
    return {"census": _census(census) if len(census) else None, "cost": cost,
            "runs": sorted(runs | set(cost["runs"] if cost else []))}


def _census(census: pd.DataFrame) -> dict:
    """Operations by kind under bf16 (``kinds``), and each of forward and loss but casts (``shown``).
    ``lossy`` are the types in which the loss's log-softmax itself runs."""
    size, context = census["size"].iloc[0], census["context_length"].iloc[0]
    census = census[census["operation"] != "zeros_like"]  # AdamW's state, made in the first step only
    named = census.assign(kind=[kind_of(r.operation, r.reads, r.writes) for r in census.itertuples()])
    brain = pick(named, autocast="bf16")
    softmax = pick(named, operation="_log_softmax")
    shown = brain[(brain["kind"] != "cast") & brain["phase"].isin(["forward", "loss"])]
    return {"size": size, "context": context,
            "kinds": _by_kind(brain[brain["phase"].isin(["forward", "loss"])]),
            "lossy": [autocast for autocast, rows in softmax.groupby("autocast", sort=False)
                      if (rows["kind"] == "low").all()],
            "softmax_in_fp32": bool((brain.loc[brain["operation"] == "exp", "kind"] == "fp32").all()),
            "shown": shown.groupby(["phase", "kind", "operation"], sort=False)["count"].sum().reset_index()}


def _by_kind(rows: pd.DataFrame) -> dict[str, int]:
    """How many operations of each kind there are, without those of which there are none."""
    counts = rows.groupby("kind")["count"].sum()
    return {kind: int(counts[kind]) for kind in KINDS if kind in counts}


def kind_of(operation: str, reads: str, writes: str) -> str:
    """cast, low, both or fp32 (or wider, or no float at all), by the types that go in and come out."""
    if operation == "_to_copy":
        return "cast"
    given = set(f"{reads}, {writes}".split(", "))
    low, wide = given & set(LOW), given & {"fp32", "float64"}
    return "both" if low and wide else "low" if low else "fp32"


def _cost(captured: pd.DataFrame) -> dict | None:
    """Casts in captured full steps at the reference context: their number a step, ms, and share of all
    operations' time, by size; None without captures."""
    steps = pick(captured, mode="step") if len(captured) else captured
    if steps.empty:
        return None
    _, context = reference(steps)
    precision = steps["precision"].iloc[0]
    steps = pick(steps, context_length=context, precision=precision)
    table = steps.groupby("size", observed=True)[["casts", "casts_ms", "operations_ms"]].sum().reset_index()
    table["share"] = table["casts_ms"] / table["operations_ms"]
    sizes = [{"size": row.size, "share": row.share} for row in table.itertuples(index=False)]
    return {"shares": table["share"], "precision": precision, "context": context,
            "several": len(table) > 1, "first": sizes[0], "last": sizes[-1],
            "as_counted": False, "table": table, "runs": runs_of(steps)}


def parts(operations: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of a full step, for each size, context and precision, by :data:`PARTS`."""
    rows = pick(operations, mode="step") if len(operations) else operations
    if rows.empty:
        return pd.DataFrame()
    part = pd.Series("", index=rows.index)
    for name, fits in PARTS.items():
        part = part.where((part != "") | ~fits(rows), name)
    rows = rows.assign(part=pd.Categorical(part, list(PARTS)), ms=rows["total_ns"] / rows["steps"] / 1e6)
    keys = ["size", "context_length", "precision", "part"]
    table = rows.groupby(keys, observed=True)["ms"].sum().unstack(fill_value=0.0)
    return table.reindex(columns=list(PARTS), fill_value=0.0).reset_index()


def left(operations_low: pd.DataFrame, operations: pd.DataFrame) -> dict | None:
    """What of a full step in low precision faster matrix products would leave, by part and size.

    ``operations_low`` and ``operations`` are the profiles' in low precision and in fp32. Of several contexts
    in low precision, the reference one. ``limit`` is Amdahl's: how many times as fast the step's operations
    were if products cost nothing. ``rest`` are the parts' shares, the most first; ``gains`` fp32's time over
    low precision's (None without fp32's profiles).
    """
    low = parts(operations_low)
    low = low[low["precision"].isin(LOW)] if len(low) else low
    if low.empty:
        return None
    context = reference(low)[1]
    low = pick(low, context_length=context).reset_index(drop=True)
    names = list(PARTS)
    total = low[names].sum(axis=1)
    products = low["matrix products"] / total
    rest = low[names[1:]].div(total, axis=0)
    order = rest.mean().sort_values(ascending=False).index
    before = parts(operations)
    both = low.merge(before, on=["size", "context_length"], suffixes=("", "_fp32")) if len(before) else before
    limit = 1 / (1 - products)
    compared = pick(pd.concat([operations_low, operations]), mode="step", context_length=context)
    return {"precision": low["precision"].iloc[0], "context": low["context_length"].iloc[0],
            "on_gpu": "cuda" in set(operations_low["device"]), "limit": limit,
            "product_shares": products,
            "products": [{"size": size, "share": share} for size, share in zip(low["size"], products)],
            "rest": [{"part": name, "shares": rest[name]} for name in order if rest[name].max() >= LITTLE],
            "gains": _gains(both) if len(both) else None,
            "table": low.assign(total=total, limit=limit),
            "runs": runs_of(compared[compared["size"].astype(str).isin(low["size"].astype(str))])}


def _gains(both: pd.DataFrame) -> list[dict]:
    """fp32's time over low precision's by part."""
    return [{"part": name, "times": both[f"{name}_fp32"] / both[name]} for name in PARTS]
