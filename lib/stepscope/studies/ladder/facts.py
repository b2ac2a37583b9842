"""What the ladder's tables say, in numbers."""

import math

import pandas as pd

from stepscope.say.selections import beside as runs_beside
from stepscope.step.summary import columns_unlike, unlike_clocks
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.names import AGAINST, KERNEL_NAMES, name_of
from stepscope.studies.ladder.rungs import BRANCHES
from stepscope.studies.ladder.tables import SHAPE
from stepscope.traces.families import MATMUL
from stepscope.traces.waits import WAITED

HELPS = 0.02  # a gain or loss under this share is none
SMOOTHED = 10  # steps of training that a point of a loss curve is the mean of
GOALS = {
    "over_hugging_face": {"2.7B": 1.2, "small": 2.0},
    "floor_share": {"2.7B": 0.8},
    "of_sheet_bf16": {"2.7B": 0.55},
}
OTHER_ARITHMETIC = "fp8"
# A step's kernels by what the floor has for them: its products (attention's among them), the optimizer's
# traffic, and nothing for the rest.
PARTS = {"products": (MATMUL, "fused attention"), "optimizer": ("optimizer",), "other": ()}
OF_PART = {family: part for part, families in PARTS.items() for family in families}
PART_NAMES = {
    "products": "products and attention",
    "optimizer": "the optimizer",
    "other": "all other kernels",
    "idle": "no kernel",
}


def surely_more(rows, ratio: str = "gain"):
    """Whether a ratio of times (of a row, or a column of rows) is above 1 by over :data:`HELPS`, with no 1
    in its 95% interval."""
    return (rows[ratio] > 1 + HELPS) & (rows[f"{ratio}_low"] > 1)


def surely_less(rows, ratio: str = "gain"):
    """Likewise below 1."""
    return (rows[ratio] < 1 - HELPS) & (rows[f"{ratio}_high"] < 1)


def with_vocabulary(sizes: pd.Series, vocabularies: pd.Series) -> list[str]:
    """Sizes, with the vocabulary of those that have another than most."""
    usual = vocabularies.mode().iloc[0]
    return [
        str(size) + (f", vocabulary {vocabulary:,}" if vocabulary != usual else "")
        for size, vocabulary in zip(sizes, vocabularies)
    ]


def shape_of(row: pd.Series | dict) -> dict:
    return {
        "size": str(row["size"]),
        "context": int(row["context_length"]),
        "vocabulary": int(row["vocab_size"]),
    }


def runs_in(rungs: pd.DataFrame) -> list[str]:
    """Run folders of the table's rows."""
    return sorted({run for runs in rungs["runs"] for run in runs.split("; ")})


def by_shape(rungs: pd.DataFrame) -> list[pd.DataFrame]:
    """The table ``rungs`` by shape, smallest first."""
    if rungs.empty:
        return []
    return [own.reset_index(drop=True) for _, own in rungs.groupby(SHAPE, observed=True)]


def climbed_on_gpu(rungs: pd.DataFrame) -> bool:
    """Whether these were climbed on a GPU: only there do rungs have peaks."""
    return "peak_mib" in rungs and bool(rungs["peak_mib"].notna().any())


def reference(rungs: pd.DataFrame) -> pd.DataFrame | None:
    """What is spoken of: the largest size, of its vocabularies the smallest, of its contexts the largest up
    to 512."""
    shapes = [own for own in by_shape(rungs) if (own["status"] == "ok").any()]
    if not shapes:
        return None
    largest = [own for own in shapes if own["size"].iloc[0] == shapes[-1]["size"].iloc[0]]
    return min(
        largest,
        key=lambda own: (
            own["vocab_size"].iloc[0],
            own["context_length"].iloc[0] > 512,
            -own["context_length"].iloc[0],
        ),
    )


def timed(own: pd.DataFrame) -> pd.DataFrame:
    """The rungs of one shape that have times, branches too, but for the one with another batch."""
    return own[(own["kind"] == "rung") & (own["status"] == "ok") & (own["rung"] != "fill")]


def climbed(own: pd.DataFrame) -> pd.DataFrame:
    """The rungs of one shape that have times and stand on one another."""
    rows = timed(own)
    return rows[~rows["rung"].isin(BRANCHES)]


def best_of(own: pd.DataFrame) -> pd.Series:
    """The fastest rung of the same arithmetic."""
    same = climbed(own)
    same = same[same["rung"] != OTHER_ARITHMETIC]
    return same.loc[same["median_ms"].idxmin()]


def of_rung(own: pd.DataFrame, rung: str) -> dict | None:
    found = own[(own["rung"] == rung) & (own["status"] == "ok")]
    return found.iloc[0].to_dict() if len(found) else None


def with_unlike(rows: pd.DataFrame) -> pd.DataFrame:
    """With ``unlike``: whether a row's step and what it is compared with ran at SM clocks apart."""
    both = ["sm_clock_mhz", "sm_clock_mhz_before"]
    return rows.assign(**rows.reindex(columns=both).astype(float), unlike=columns_unlike(rows, *both))


def process_spread(rows: pd.DataFrame) -> pd.Series:
    """By how much of the fastest process's time a step takes longer in the slowest."""
    ends = rows.reindex(columns=["fastest_ms", "slowest_ms"]).astype(float)
    return ends["slowest_ms"] / ends["fastest_ms"] - 1


def is_unlike(row: dict) -> bool:
    """The same of one row."""
    return bool(with_unlike(pd.DataFrame([row]))["unlike"].iloc[0])


def ladder(rungs: pd.DataFrame, climbs: pd.DataFrame | None = None) -> dict | None:
    """One shape from its first rung to its best, the floor, and what is beside it; ``all``, every shape;
    ``climbs``: see :func:`how_climbed`."""
    own = reference(rungs)
    if own is None or climbed(own).empty:
        return None
    first, best = climbed(own).iloc[0], best_of(own)
    within = best["times_as_fast"] if first["rung"] == "fp32" else math.nan  # of times within a process
    beside, other = of_rung(own, "hugging_face"), of_rung(own, OTHER_ARITHMETIC)
    graph = of_rung(own, "graph")
    gains = climbed(own)[climbed(own)["rung"] != OTHER_ARITHMETIC]
    idle = gains[gains["gain"].notna() & ~surely_more(gains)]
    tried = own[(own["kind"] == "rung") & ~own["status"].isin(["ok", "skipped"])]
    # GPUs say so nearly always of products at full rate: their power is what bounds them.
    held = own["throttled_share"] if "throttled_share" in own else pd.Series(dtype=float)
    reasons = {one for text in own.get("throttle", pd.Series(dtype=str)).dropna() for one in text.split("; ")}
    return shape_of(best) | {
        "rows": own,
        "all": rungs,
        "peaks": climbed_on_gpu(own),
        "bf16_weights": bf16_weights(own, rungs),
        "first_ms": first["median_ms"],
        "first_name": name_of(first["rung"]),
        "best_ms": best["median_ms"],
        "best_name": name_of(best["rung"]),
        "faster": first["median_ms"] / best["median_ms"] if math.isnan(within) else within,
        "floor_ms": best["floor_ms"],
        "floor_share": best["floor_share"],
        "products_ms": best["products_ms"],
        "moving_ms": best["moving_ms"],
        "clock": clock(best, rungs),
        "tokens_per_s": best["tokens_per_s"],
        "batch": int(best["batch"]),
        "beside": beside
        and beside | {"over_best": best["over_hugging_face"]},
        "other": other and other | {
            "over_best": best["median_ms"] / other["median_ms"],
            "sure": bool(surely_more(other) | surely_less(other)),
        },
        "climbs": how_climbed(climbs),
        "graph": graph,
        "graph_unlike": bool(graph and is_unlike(graph)),
        "graph_sure": bool(graph and (surely_more(graph) | surely_less(graph))),
        "idle": idle["rung"].map(name_of).tolist(),
        "gains": surely_faster(first, best),
        "missing": [
            {"name": name_of(row["rung"]), "oom": row["status"] == "oom", "reason": row["reason"]}
            for row in tried.to_dict("records")
        ],
        "processes": int(climbed(own)["processes"].min()),
        "most_processes": int(climbed(own)["processes"].max()),
        "several": bool(climbed(own)["processes"].min() > 1),
        "alike": climbed(own)["processes"].nunique() == 1,
        "held": float(held.max()) if held.notna().any() else None,
        "reasons": sorted(one.replace("_", " ") for one in reasons - {""}),
        "apart": bool(rungs["apart"].any()),
        "kernels": attention_kernels(rungs),
        "runs": runs_in(rungs),
    }


def how_climbed(climbs: pd.DataFrame | None) -> dict | None:
    """How the processes were run: of those that ``climbed`` from the first rung how many took ``turns``
    (``all_turns``, ``no_turns``), how many ``steps`` each timed of a rung at least, after how many of
    ``warmup``, whether those of one shape are of several ``hosts`` (told apart by memory), and how many of
    all had others beside them (``neighbours``)."""
    if climbs is None or climbs.empty or not climbs["climbed"].any():
        return None
    own = climbs[climbs["climbed"]]
    turns = int((own["turns"] > 1).sum())
    return {
        "climbed": len(own),
        "turns": turns,
        "steps": own["steps"],
        "warmup": int(own["warmup"].min()),
        "all_turns": turns == len(own),
        "no_turns": not turns,
        "hosts": bool((own.groupby(SHAPE, observed=True)["ram_gib"].nunique() > 1).any()),
        "neighbours": runs_beside(climbs),
    }


def attention_kernels(rungs: pd.DataFrame) -> list[str]:
    """What fused attention took, over the shapes that recorded it."""
    taken = rungs.loc[rungs["rung"] == "sdpa", "attention_kernel"].dropna()
    return sorted({KERNEL_NAMES.get(one, one) for text in taken for one in text.split(", ") if one})


def bf16_weights(own: pd.DataFrame, rungs: pd.DataFrame) -> dict | None:
    """Hugging Face's step with weights in bf16 (without fp32 masters: another training), of this shape or
    else of the first that has it; None where it was not run."""
    for shape in (own, *by_shape(rungs)):
        if found := of_rung(shape, "hugging_face_bf16"):
            best = best_of(shape)
            return shape_of(found) | {
                "ms": found["median_ms"], "processes": int(found["processes"]),
                "best_ms": best["median_ms"], "best_processes": int(best["processes"])}
    return None


def surely_faster(first: pd.Series, best: pd.Series) -> bool:
    """Whether the interval of the whole gain lies above 1; without an fp32 rung, whether the times' own do
    not overlap."""
    low = best["times_as_fast_low"]
    return bool(low > 1 if first["rung"] == "fp32" else best["ci_high_ms"] < first["ci_low_ms"])


def clock(row: pd.Series, rungs: pd.DataFrame) -> dict | None:
    """What power lets through: the floor at the clocks of a rung's step, and what products keep up, medians
    over the ``processes`` that measured it; ``below``: of some of all rungs this floor is the lower one. None
    where none measured it."""
    if math.isnan(row.get("clock_floor_ms", math.nan)):
        return None
    return {
        "floor_ms": row["clock_floor_ms"],
        "floor_share": row["clock_floor_share"],
        "kept_up_mhz": row["kept_up_mhz"],
        "kept_up_w": row["kept_up_w"],
        "kept_up_tflops": row["kept_up_tflops"],
        "kept_up_of_sheet": row["kept_up_of_sheet"],
        "on_sheet": bool(pd.notna(row["kept_up_of_sheet"])),
        "processes": int(row["kept_up_processes"]),
        "below": bool((rungs["clock_floor_ms"] < rungs["floor_ms"]).any()),
    }


def sizes(rungs: pd.DataFrame) -> dict | None:
    """What each rung gains where: ``rows``, with whether a gain or cost is ``sure`` (its interval leaves out
    1, and it is over :data:`HELPS`); rungs that surely help at all shapes (``useful``), at none (``useless``)
    and at ``some``, and those that surely cost time (``costly``); of the pairs how many are at ``unlike``
    clocks, and in how many of these the later rung's is the lower one; what the chunked loss changes of the
    peak (``chunked``); and the seconds that compiling one ``graph`` took, and blocks at the same shapes."""
    rows = pd.concat([beside_the_rung_before(own) for own in by_shape(rungs)] or [pd.DataFrame()],
                     ignore_index=True)
    rows = rows[rows["gain"].notna()] if len(rows) else rows
    if rows.empty:
        return None
    helps = surely_more(rows)
    costs = surely_less(rows)
    called = with_vocabulary(rows["size"], rows["vocab_size"])
    rows = rows.assign(helps=helps, costs=costs, sure=helps | costs, called=called)
    of_rung = rows.groupby("rung", sort=False)
    everywhere, anywhere = of_rung["helps"].all(), of_rung["helps"].any()
    return {
        "rows": rows,
        "shares": HELPS,
        "contexts": sorted(set(rows["context_length"])),
        "useful": [name_of(rung) for rung in everywhere.index[everywhere]],
        "some": [name_of(rung) for rung in anywhere.index[anywhere & ~everywhere]],
        "unlike": unlike(rows),
        "chunked": chunked_memory(rows),
        "graph": compile_seconds(rungs),
        "useless": [name_of(rung) for rung in anywhere.index[~anywhere]],
        "costly": [
            {"rung": rung, "name": name_of(rung), "at": own[["called", "context_length"]].to_dict("records")}
            for rung, own in rows[costs].groupby("rung", sort=False)
        ],
        "runs": runs_in(rungs),
    }


def beside_the_rung_before(own: pd.DataFrame) -> pd.DataFrame:
    """The rungs of one shape, branches too, with what forward keeps for backward (``saved_mib``), also of the
    one that each is a change on (``saved_mib_before``), whether both steps' clocks are ``unlike``, and
    whether processes differ in one of both by over WAITED (``paced``), which kernels alone do not."""
    rows = timed(own)
    if rows.empty:
        return rows
    by_rung = own.drop_duplicates("rung").set_index("rung")
    saved_mib = by_rung.get("saved_bytes", pd.Series(dtype=float)).astype(float) / 2**20
    spread = process_spread(by_rung)
    paced = (rows["rung"].map(spread) > WAITED) | (rows["before"].map(spread) > WAITED)
    return with_unlike(rows.assign(saved_mib=rows["rung"].map(saved_mib), paced=paced,
                                   saved_mib_before=rows["before"].map(saved_mib)))


def compile_seconds(rungs: pd.DataFrame) -> dict | None:
    """Seconds of compiling the whole forward and, in the same process, its blocks, of each shape that has
    both; None without."""
    rows = rungs[(rungs["rung"] == "graph") & (rungs["compile_s"] > 0)]
    rows = rows.reindex(columns=["compile_s", "blocks_s"]).dropna()
    return {"own": rows["compile_s"], "blocks": rows["blocks_s"]} if len(rows) else None


def unlike(rows: pd.DataFrame) -> dict:
    """Of pairs, how many are at ``unlike`` clocks, in how many the later one's is ``lower``, and the lowest
    clock of these; ``range``, by how much processes differ at most in one rung's clock."""
    found = rows[rows["unlike"]]
    lower = found["sm_clock_mhz"] < found["sm_clock_mhz_before"]
    most = rows["clock_range_share"].max() if "clock_range_share" in rows else math.nan
    return {
        "pairs": len(rows),
        "unlike": len(found),
        "lower": int(lower.sum()),
        "all_lower": bool(lower.all()),
        "least_mhz": found["sm_clock_mhz"].min(),
        "range": None if math.isnan(most) else most,
    }


def chunked_memory(rows: pd.DataFrame) -> dict | None:
    """MiB that forward keeps for backward before and with the chunked loss, where the vocabulary is largest;
    None where that was not measured. (Peaks do not tell: they hold what the process keeps of other rungs.)"""
    rows = rows[(rows["rung"] == "chunked") & rows["saved_mib"].notna() & rows["saved_mib_before"].notna()]
    if rows.empty:
        return None
    one = rows.loc[rows["vocab_size"].idxmax()]
    return shape_of(one) | {"before_mib": one["saved_mib_before"], "mib": one["saved_mib"]}


def together(own: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """What a shape's rungs against each kind of :data:`AGAINST` gain together within each process that
    climbed all of them: processes down, kinds across."""
    rows = climbed(own)
    rows = rows[rows["gain"].notna()].set_index("rung")
    shape = [str(own["size"].iloc[0]), *own[SHAPE[1:]].iloc[0]]
    mine = steps[(steps[SHAPE].astype({"size": str}) == shape).all(axis=1)]
    ms = mine.pivot(index="run_id", columns="rung", values="step_ms")
    found = {}
    for kind, against in AGAINST.items():
        rungs = [rung for rung in against if rung in rows.index and rung in ms]
        if rungs:
            ratios = [ms[rows.loc[rung, "before"]] / ms[rung] for rung in rungs]
            found[kind] = pd.concat(ratios, axis=1).prod(axis=1, skipna=False)
    return pd.DataFrame(found).dropna()


def advice(rungs: pd.DataFrame, steps: pd.DataFrame) -> dict | None:
    """By what a step is bound: what all rungs that are good against it gain together, where it is most and
    where it is least; by shape the median over processes (``gain``, with ``low`` and ``high``, their ends),
    and what they gain most against, with whether all processes ``agree``."""
    found = []
    for own in (own for own in by_shape(rungs) if len(climbed(own))):
        within = together(own, steps)
        pairs = beside_the_rung_before(own)
        agree = bool(len(within)) and within.idxmax(axis=1).nunique() == 1
        for kind in within if len(within) else ():
            clocks = pairs[pairs["rung"].isin(AGAINST[kind]) & pairs["gain"].notna()]
            values = within[kind]
            found.append(
                shape_of(own.iloc[0])
                | {"kind": kind, "gain": values.median(), "low": values.min(), "high": values.max()}
                | {"unlike": bool(clocks["unlike"].any()), "agree": agree, "processes": len(values)}
                | {"paced": bool(clocks["paced"].any())}
            )
    if not found:
        return None
    table = pd.DataFrame(found)
    kinds = {}
    for kind, own in table.groupby("kind", sort=False):
        most, least = own.loc[own["gain"].idxmax()], own.loc[own["gain"].idxmin()]
        kinds[kind] = {
            "most": most.to_dict(),
            "least": least.to_dict(),
            "several": len(own) > 1,
            "names": [name_of(rung) for rung in AGAINST[kind]],
        }
    of_shape = ["size", "context", "vocabulary"]
    first = table.loc[table.groupby(of_shape, sort=False)["gain"].idxmax()]
    wide = table.pivot(index=of_shape, columns="kind", values="gain")
    wide = wide.reindex(index=pd.MultiIndex.from_frame(first[of_shape]), columns=[*AGAINST])
    marks, paced, low, high = (
        table.pivot(index=of_shape, columns="kind", values=name).reindex(index=wide.index, columns=[*AGAINST])
        for name in ("unlike", "paced", "low", "high")
    )
    return {
        "marks": marks,
        "paced": paced,
        "ends": (low, high),
        "unlike": int(table["unlike"].sum()),
        "agree": bool(first["agree"].all()),
        "processes": sorted(set(table["processes"])),
        "shapes": wide.assign(first=first["kind"].to_numpy(), agree=first["agree"].to_numpy()),
        "kinds": kinds,
        "first": first.to_dict("records"),
        "rungs": [*dict.fromkeys(rungs.loc[rungs["status"] == "ok", "rung"])],
        "runs": runs_in(rungs),
    }


def smoothed(curves: pd.DataFrame) -> pd.DataFrame:
    """Loss curves in means of :data:`SMOOTHED` steps over all runs' same shape: columns of SHAPE, rung, seed,
    window, loss."""
    windows = curves.assign(window=curves["step"] // SMOOTHED)
    return windows.groupby([*SHAPE, "rung", "seed", "window"], sort=False)["loss"].mean().reset_index()


def fp32_band(windows: pd.DataFrame) -> pd.DataFrame:
    """The least and the most loss of fp32's seeds in each window."""
    own = windows[windows["rung"] == "fp32"]
    return own.groupby([*SHAPE, "window"])["loss"].agg(["min", "max"]).reset_index()


def off_fp32(windows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the other rungs with ``off``, their loss less fp32's from the same weights, ``range``, how far
    apart fp32's seeds are in the same window, ``beyond``, by how much the loss is outside of their band, and
    ``edge``, whether fp32's own from these weights is that band's edge."""
    own = windows[windows["rung"] == "fp32"].rename(columns={"loss": "same"})
    rows = windows[windows["rung"] != "fp32"].merge(fp32_band(windows), on=[*SHAPE, "window"])
    rows = rows.merge(own[[*SHAPE, "seed", "window", "same"]], on=[*SHAPE, "seed", "window"])
    beyond = (rows["loss"] - rows["max"]).clip(lower=0) + (rows["min"] - rows["loss"]).clip(lower=0)
    return rows.assign(
        off=rows["loss"] - rows["same"],
        range=rows["max"] - rows["min"],
        beyond=beyond,
        edge=(rows["same"] == rows["min"]) | (rows["same"] == rows["max"]),
    )


def by_rung(rows: pd.DataFrame) -> pd.DataFrame:
    """Of :func:`off_fp32`, the most by rung: ``apart``, from fp32 in nats; ``of_range``, the same as a share
    of how far apart fp32's seeds are in that window; ``beyond`` and ``out``, by how much and in what share of
    windows it is outside of their band."""
    rows = rows.assign(apart=rows["off"].abs(), of_range=rows["off"].abs() / rows["range"])
    return rows.groupby("rung", sort=False).agg(
        apart=("apart", "max"),
        of_range=("of_range", "max"),
        beyond=("beyond", "max"),
        out=("beyond", lambda beyond: (beyond > 0).mean()),
    )


def training(rungs: pd.DataFrame, curves: pd.DataFrame, checks: pd.DataFrame | None = None) -> dict | None:
    """How far each rung's loss and gradients are from fp32's, whether its training is off it by less
    than another seed is, and whether the optimizer of the rung without casts is AdamW."""
    known = rungs[(rungs["status"] == "ok") & (rungs["kind"] == "rung")]
    known = known[known["gradient_off"].notna()] if "gradient_off" in known else known[:0]
    if known.empty:
        return None
    off = (
        known.groupby("rung", sort=False)
        .agg(
            loss_off=("loss_off", "max"),
            gradient_off=("gradient_off", "max"),
            gradient_worst=("gradient_worst", "max"),
        )
        .reset_index()
    )
    facts = {"off": off, "runs": runs_in(known), "curves": None, "out": [], "optimizer": optimizer(checks)}
    low = off[~off["rung"].isin(["fp32", "tf32", OTHER_ARITHMETIC])]
    facts["low"] = low.max(numeric_only=True).to_dict() if len(low) else None
    facts["other"] = next(iter(off[off["rung"] == OTHER_ARITHMETIC].to_dict("records")), None)
    if facts["other"]:
        facts["other"]["gradients_off"] = known.loc[known["rung"] == OTHER_ARITHMETIC, "gradient_off"]
        wide = known.pivot(index=SHAPE, columns="rung", values="gradient_off").reindex(
            columns=[OTHER_ARITHMETIC, "overlap"]
        )
        coarser = (wide[OTHER_ARITHMETIC] / wide["overlap"]).dropna()  # within a shape
        facts["other"]["coarser"] = coarser if len(coarser) else None
    if curves.empty or curves.loc[curves["rung"] == "fp32", "seed"].nunique() < 2:
        return facts
    found = trained(curves)
    products = known[known["rung"] == OTHER_ARITHMETIC].astype({"size": str})
    least = products.loc[products["gradient_off"].idxmin(), "size"] if len(products) else None
    several = products["size"].nunique() > 1
    return facts | found | {"least_off": bool(several and least == found["training_size"])}


def optimizer(checks: pd.DataFrame | None) -> dict | None:
    """The optimizer's kernel against the formula and against torch's AdamW, over all runs that tried it."""
    if checks is None or checks.empty:
        return None
    formula, torchs = (checks[checks["against"] == against] for against in ("formula", "torch"))
    return {
        "kernel": str(checks["kernel"].iloc[0]),
        "numbers": int(formula["numbers"].max()),
        "formula_steps": int(formula["steps"].max()),
        "unequal": int(formula["unequal"].max()),
        "exact": bool((formula["unequal"] == 0).all()),
        "torch_steps": int(torchs["steps"].max()),
        "off": float(torchs["off"].max()),
        "processes": checks["run_id"].nunique(),
    }


def trained(curves: pd.DataFrame) -> dict:
    """Loss curves against fp32's.

    All start from the first seed's weights, whose own fp32 curve may be an edge of the seeds' band; then
    rounding alone leads out of it. So a rung is ``inside`` if it is everywhere nearer to that curve than the
    seeds are to one another (``of_range`` < 1); ``out`` are the others. ``strictly`` counts those within the
    band, ``edge`` is the share of windows in which fp32's own curve is its edge, ``apart`` the most that a
    rung of the same arithmetic is off, ``seeds_apart`` the most that two seeds are.
    """
    windows = smoothed(curves)
    rows, band = off_fp32(windows), fp32_band(windows)
    rungs = by_rung(rows)
    width = band["max"] - band["min"]
    fp32 = windows[windows["rung"] == "fp32"]
    own = fp32[fp32["seed"] == fp32["seed"].min()].sort_values("window")
    outside = rungs[rungs["of_range"] >= 1].sort_values("of_range", ascending=False)
    same = rungs.drop(index=OTHER_ARITHMETIC, errors="ignore")
    return {
        "curves": windows,
        "by_rung": rungs,
        "compared": len(rungs),
        "inside": len(rungs) - len(outside),
        "all_inside": outside.empty,
        "out": [{"name": name_of(rung), **row} for rung, row in outside.to_dict("index").items()],
        "strictly": int((rungs["beyond"] == 0).sum()),
        "beyond": float(rungs["beyond"].max()),
        "edge": rows["edge"].mean(),
        "apart": float(same["apart"].max()) if len(same) else None,
        "seeds_apart": float(width.max()),
        "steps": int(curves["step"].max()) + 1,
        "smoothed": SMOOTHED,
        "seeds": curves.loc[curves["rung"] == "fp32", "seed"].nunique(),
        "width": width.median(),
        "start": own["loss"].iloc[0],
        "end": own["loss"].iloc[-1],
        "training_size": str(curves["size"].iloc[0]),
        "training_context": int(curves["context_length"].iloc[0]),
        "always_edge": bool(rows["edge"].all()),
    }


def goals(rungs: pd.DataFrame, kernels: pd.DataFrame) -> dict | None:
    """The best rung of every shape beside Hugging Face's step and the floor; goals that are ``reached``, and
    that are missed, with what is left there; and what steps consist of on the GPU, of the reference and where
    a goal is missed."""
    rows, reached, missed, tables = [], [], [], []
    spoken_of = reference(rungs)
    for own in by_shape(rungs):
        beside = of_rung(own, "hugging_face")
        if climbed(own).empty:
            continue
        best, filled = best_of(own), of_rung(own, "fill")
        row = shape_of(best) | {
            "best_name": name_of(best["rung"]),
            "best_ms": best["median_ms"],
            "beside_ms": beside["median_ms"] if beside else math.nan,
            "over_hugging_face": best["over_hugging_face"],
            "over_low": best["over_hugging_face_low"],
            "over_high": best["over_hugging_face_high"],
            "processes": int(min(best["processes"], beside["processes"])) if beside else 0,
            "sm_clock_mhz": best.get("sm_clock_mhz", math.nan),
            "sm_clock_mhz_before": beside.get("sm_clock_mhz", math.nan) if beside else math.nan,
            "floor_ms": best["floor_ms"],
            "floor_share": best["floor_share"],
            "clock_floor_share": best.get("clock_floor_share", math.nan),
            "of_measured": best["of_measured"],
            "of_sheet_bf16": filled["of_sheet_bf16"] if filled else math.nan,
        }
        rows += [row] if beside else []
        at = parts(own, kernels)
        found = [
            row | one | what_is_left(at, "fill" if one["goal"] == "of_sheet_bf16" else "", one)
            for one in missed_here(row, filled)
        ]
        missed += found
        asked = aims(row).items()
        reached += [
            {"size": row["size"], "context": row["context"], "goal": goal, "asked": least, "got": row[goal]}
            for goal, least in asked
            if row[goal] >= least
        ]
        if found or (spoken_of is not None and shape_of(spoken_of.iloc[0]) == shape_of(own.iloc[0])):
            tables.append(at)
    if not rows:
        return None
    table = pd.DataFrame(rows)
    table["unlike"] = unlike_clocks(table["sm_clock_mhz"], table["sm_clock_mhz_before"])
    return {
        "rows": table,
        "unlike": unlike(table),
        "ratios": table["over_hugging_face"],
        "faster": int((table["over_low"] > 1).sum()),
        "shapes": len(table),
        "reached": reached,
        "missed": missed,
        "parts": pd.concat(tables or [pd.DataFrame()], ignore_index=True),
        "least": table.loc[table["over_hugging_face"].idxmin()].to_dict(),
        "most": table.loc[table["over_hugging_face"].idxmax()].to_dict(),
        "runs": runs_in(rungs),
    }


def aims(row: dict) -> dict[str, float]:
    """The goals set for a shape, and what they ask."""
    if row["context"] != 512 or row["vocabulary"] != 10_000:
        return {}
    return {goal: sizes[row["size"]] for goal, sizes in GOALS.items() if row["size"] in sizes}


def missed_here(row: dict, filled: dict | None) -> list[dict]:
    """Goals that one shape misses: goal, asked, got, and ``over_ms``, by how much its step takes too long."""
    asked, found = aims(row), []
    for goal, least in ({"slower": 1.0} | asked).items():
        got = row["over_hugging_face" if goal == "slower" else goal]
        if got < least and not (goal == "slower" and "over_hugging_face" in asked):
            took_ms = filled["median_ms"] if filled and goal == "of_sheet_bf16" else row["best_ms"]
            found.append({"goal": goal, "asked": least, "got": got, "over_ms": took_ms * (1 - got / least)})
    return found


def parts(own: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """What the profiled steps of one shape consist of, a row a rung: shape, rung, batch, median_ms (not
    profiled, of the same processes), by part of :data:`PARTS` its kernels' time in ms and, as
    ``<part>_least``, the floor's, ``idle`` (no kernel; 0 where some run at once), and
    ``at_once``, whether they surely do."""
    shape = own.iloc[0]
    mine = kernels
    if len(kernels):
        mine = kernels[(kernels[SHAPE] == [shape[column] for column in SHAPE]).all(axis=1)]
    rows = []
    for rung, profiled in mine.groupby("rung", sort=False) if len(mine) else ():
        if (row := of_rung(own, rung)) is None:
            continue
        part = profiled["family"].map(lambda family: OF_PART.get(family, "other"))
        times = (
            profiled.assign(part=part).groupby(["run_id", "part"])["time_ms"].sum().unstack(fill_value=0.0)
        )
        times = times.reindex(columns=[*PARTS], fill_value=0.0)
        # The step's time is that of the processes that were profiled; others take other times.
        steps = profiled.groupby("run_id")["step_ms"].first() if "step_ms" in profiled else None
        median_ms = row["median_ms"] if steps is None else steps.median()
        whole = times.sum(axis=1)
        idle = (median_ms if steps is None else steps) - whole
        times = times.median()
        rows.append(
            shape_of(shape)
            | {"rung": rung, "name": name_of(rung), "batch": int(row["batch"]), "median_ms": median_ms}
            | times.to_dict()
            | {
                "products_least": row["products_ms"],
                "optimizer_least": row["moving_ms"],
                "other_least": 0.0,
                "idle": max(0.0, idle.median()),
                "at_once": bool(whole.median() > 1.05 * median_ms),
                "kept_up_of_sheet": row.get("kept_up_of_sheet", math.nan),
                "sm_clock_mhz": row.get("sm_clock_mhz", math.nan),
                "kept_up_mhz": row.get("kept_up_mhz", math.nan),
            }
        )
    return pd.DataFrame(rows)


def profiled_step(at: pd.DataFrame, kind: str = "") -> dict | None:
    """Of a shape's profiled rungs, the one at the batch that fills (``fill``) or the last one of the same
    arithmetic: rather one whose kernels ran one after another."""
    if at.empty:
        return None
    own = at[at["rung"] == kind] if kind else at[at["rung"].isin(set(RUNGS) - {"fill", OTHER_ARITHMETIC})]
    own = own.assign(place=own["rung"].map(RUNGS.index)) if not kind else own.assign(place=0)
    own = own.sort_values(["at_once", "place"], ascending=[True, False], kind="stable")
    return None if own.empty else own.iloc[0].drop("place").to_dict()


def what_is_left(at: pd.DataFrame, kind: str, one: dict) -> dict:
    """Where a goal is missed: each part over what the floor has for it, and those of which it would be enough
    if they took no longer than that (``enough``; none where parts run at once, since they do not add up);
    ``parts`` is None where it was not profiled."""
    step = profiled_step(at, kind)
    if step is None:
        return {"parts": None, "enough": []}
    over = {part: step[part] - step[f"{part}_least"] for part in PARTS} | {"idle": step["idle"]}
    enough = (
        [] if step["at_once"] else [PART_NAMES[part] for part, ms in over.items() if ms >= one["over_ms"]]
    )
    return {"parts": step, "enough": enough, "power": power(step)}


def power(step: dict) -> dict | None:
    """Whether the clock that bf16 products keep up is below that of the step; None where it was not read."""
    if math.isnan(step["kept_up_of_sheet"]):
        return None
    return {name: step[name] for name in ("kept_up_of_sheet", "kept_up_mhz", "sm_clock_mhz")}


def left(own: pd.DataFrame | None, kernels: pd.DataFrame) -> dict | None:
    """Of the reference's finished step: time on the GPU by kernels' family."""
    if own is None or kernels.empty or (step := profiled_step(parts(own, kernels))) is None:
        return None
    shape = own.iloc[0]
    mine = kernels[(kernels[SHAPE] == [shape[column] for column in SHAPE]).all(axis=1)]
    mine = mine[mine["rung"] == step["rung"]]
    families = mine.groupby(["run_id", "family"])["time_ms"].sum().groupby("family").median()
    families = families.sort_values(ascending=False)
    return {
        "name": step["name"],
        "families": [{"family": str(family), "ms": ms} for family, ms in families.items()],
        "whole_ms": families.sum(),
        "median_ms": step["median_ms"],
        "at_once": step["at_once"],
    }


def left_out(rungs: pd.DataFrame) -> dict | None:
    """What the finished step costs without each change, over the shapes where that was measured."""
    rows = pd.concat(
        [own[(own["kind"] == "left_out") & (own["status"] == "ok")] for own in by_shape(rungs)]
        or [pd.DataFrame()],
        ignore_index=True,
    )
    if rows.empty:
        return None
    over = rows["over_finished"]
    sure = surely_more(rows, "over_finished") | surely_less(rows, "over_finished")
    rows = with_unlike(rows.assign(name=rows["rung"].map(name_of), cost=over - 1, speed=1 / over, sure=sure,
                                   paced=process_spread(rows) > WAITED))
    saving = rows[rows["sure"] & (rows["cost"] < 0)].to_dict("records")
    return {
        "rows": rows,
        "saving": [shape_of(row) | {"name": row["name"], "speed": row["speed"]} for row in saving],
        "unlike": unlike(rows),
        "processes": int(rows["processes"].max()),
        "fewest": int(rows["processes"].min()),
        "runs": runs_in(rungs),
    }


def filled(rungs: pd.DataFrame) -> dict | None:
    """The finished step at the batch that fills the memory, of each shape; ``gains`` in tokens a second over
    the finished step of the same process at the usual batch."""
    rows = []
    for own in by_shape(rungs):
        fill = of_rung(own, "fill")
        if fill and len(climbed(own)):
            best = best_of(own)
            # At the usual batch, in the processes that filled the memory, too.
            fill_mhz, best_mhz = fill.get("sm_clock_mhz", math.nan), fill.get("sm_clock_mhz_before", math.nan)
            rows.append(
                fill
                | shape_of(fill)
                | {
                    "over_small": fill["batch"] / best["batch"] / fill["over_finished"],
                    "small_batch": int(best["batch"]),
                    "small_mhz": best_mhz,
                    "lower_clock": fill_mhz < best_mhz and bool(unlike_clocks(fill_mhz, best_mhz)),
                }
            )
    if not rows:
        return None
    table = pd.DataFrame(rows)
    return {
        "rows": table,
        "best": table.loc[table["of_sheet_bf16"].fillna(table["of_measured"]).idxmax()].to_dict(),
        "sheet_known": bool(table["of_sheet_bf16"].notna().all()),
        "gains": table["over_small"],
        "lower_clock": int(table["lower_clock"].sum()),
        "shapes": len(table),
        "too_large": [
            shape_of(row) | {"processes": int(row["out_of_memory"])}
            for row in rungs[(rungs["rung"] == "fill") & (rungs["out_of_memory"] > 0)].to_dict("records")
        ],
        "small_batch": int(table["small_batch"].min()),
        "runs": runs_in(rungs),
    }
