"""What two options change about memory: activation checkpointing, and the allocator's expandable segments."""
import pandas as pd

from stepscope.config import StepConfig
from stepscope.say.formats import runs_of
from stepscope.step.accounting import MIB, peak, require_formulas, value
from stepscope.studies.memory.facts import GIB, config_of, shape_of
from stepscope.studies.memory.facts_checkpoints import at_longest, settings, steps_each

QUICKER = 0.02  # of a step: a smaller difference of times is not told
UNMOVED = 0.01  # a share of reserved memory that counts as no change


def curve(checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Checkpointing's settings of the largest run that measured them, of those in which a step without them
    fits if there is one, by blocks per checkpoint (0, none, last); empty where there is no run.

    Columns: ``blocks``, ``status``, ``predicted_mib``, ``peak_mib`` (missing without a GPU), ``time_ms``
    (median step, missing where none ended), run_id and the run's shape.
    """
    rows = settings(checkpoints, runs, samples, "checkpointing")
    if rows.empty:
        return rows
    if (rows["mode"] != "step").any():  # there the optimizer's peak hides the curve
        rows = rows[rows["mode"] != "step"]
    with_none = rows.loc[(rows["blocks"] == 0) & (rows["status"] == "ok"), "run_id"]
    of = runs["run_id"][runs["run_id"].isin(with_none if len(with_none) else rows["run_id"])]
    rows = rows[rows["run_id"] == of.iloc[-1]]  # they are by size and context
    return rows.sort_values("blocks", key=lambda blocks: blocks.where(blocks > 0, 10**9), ignore_index=True)


def checkpointing(checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame) -> dict | None:
    """The setting with the least peak: by formula, and as ``measured`` (None where no checkpoint's peak was).

    ``on_gpu``: peaks could be measured; ``table`` is :func:`curve`'s; ``longest`` is :func:`at_longest`'s, of
    other runs, or None.
    """
    table = curve(checkpoints, runs, samples)
    if table.empty:
        return None
    run = runs.set_index("run_id").loc[table["run_id"].iloc[0]]
    config = config_of(run)
    every = {k: peak(config, k).allocated for k in range(1, config.num_layers + 1)}
    optimum = min(every, key=lambda blocks: every[blocks])
    fitted = table[(table["blocks"] > 0) & (table["status"] == "ok")]
    on_gpu = bool(table["peak_mib"].notna().any())
    compared = on_gpu and len(fitted) > 0
    return {"run": shape_of(run), "layers": config.num_layers,
            "optimum": optimum, "optimum_gib": every[optimum] / GIB, "on_gpu": on_gpu,
            "measured": measured_optimum(table, fitted, optimum) if compared else None,
            "more_quicker": more_quicker(fitted) if compared else None,
            "why": why(config), "table": table,
            "steps": steps_each(samples, table, ["blocks_per_checkpoint"]),
            "longest": (longest := at_longest(checkpoints, runs, samples, table["run_id"].iloc[0])),
            "runs": sorted({*runs_of(table), *(longest["runs"] if longest else [])})}


def measured_optimum(table: pd.DataFrame, fitted: pd.DataFrame, optimum: int) -> dict:
    """The measured setting with the least peak, the settings measured next to it, how far predictions are
    off, and what it changes ``against_none`` (None where a step without checkpoints did not fit)."""
    place = fitted["peak_mib"].argmin()
    best, none = fitted.iloc[place], table[(table["blocks"] == 0) & (table["status"] == "ok")]
    beside = [fitted.iloc[other] for other in (place - 1, place + 1) if 0 <= other < len(fitted)]
    against = None
    if len(none):
        base = none.iloc[0]
        against = {"peak_mib": base["peak_mib"], "ms": base["time_ms"],
                   "saved_share": 1 - best["peak_mib"] / base["peak_mib"],
                   "longer_share": best["time_ms"] / base["time_ms"] - 1}
    blocks = int(best["blocks"])
    return {"blocks": blocks, "peak_mib": best["peak_mib"], "peak_gib": best["peak_mib"] * MIB / GIB,
            "as_predicted": blocks == optimum,
            "every_block": blocks == 1,
            "beside": [{"blocks": int(row["blocks"]), "peak_mib": row["peak_mib"]} for row in beside],
            "off_share": (fitted["predicted_mib"] / fitted["peak_mib"] - 1).abs().max(),
            "against_none": against}


def more_quicker(fitted: pd.DataFrame) -> dict | None:
    """The settings with the fewest and the most blocks per checkpoint where the first, of more checkpoints,
    is the quicker; else None."""
    few, many = fitted.iloc[-1], fitted.iloc[0]
    if len(fitted) < 2 or many["time_ms"] > few["time_ms"] * (1 - QUICKER):
        return None
    return {"many_blocks": int(many["blocks"]), "few_blocks": int(few["blocks"]), "many_ms": many["time_ms"],
            "few_ms": few["time_ms"]}


def why(config: StepConfig) -> dict:
    """What the optimum follows from: a checkpoint's bytes against a block's."""
    stream, saved = value("4X", config), value(require_formulas(config).saved, config)
    root = (config.num_layers * stream / saved) ** 0.5
    return {"stream_mib": stream / MIB, "saved_mib": saved / MIB, "root": root, "below_one": root < 1}


def fragmentation(runs: pd.DataFrame) -> dict | None:
    """The most and the least that is reserved beyond what is allocated (None where every run has expandable
    segments), and what expandable segments change, a row of ``pairs`` each run that was made with and without
    them."""
    ok = runs[(runs["measured"] == "history") & (runs["device"] == "cuda") & (runs["status"] == "ok")]
    if ok.empty:
        return None
    # A peak of what is reserved holds from the first step on.
    reserved = ok[["first_peak_reserved_mib", "steady_peak_reserved_mib"]].max(axis=1)
    ok = ok.assign(reserved_mib=reserved, allocated_mib=ok["steady_peak_allocated_mib"],
                   idle_share=1 - ok["steady_peak_allocated_mib"] / reserved)
    expandable = ok["expandable_segments"].astype(bool)
    plain = ok[~expandable]
    same = ["size", "context_length", "mode", "precision", "attention", "optimizer"]
    pairs = plain.merge(ok[expandable], on=same, suffixes=("", "_expandable"))
    pairs = pairs.assign(change_share=pairs["reserved_mib_expandable"] / pairs["reserved_mib"] - 1)
    by_idle = plain.sort_values("idle_share", kind="stable")
    least, most = by_idle.iloc[:1], by_idle[by_idle["idle_share"] == by_idle["idle_share"].max()].iloc[:1]
    shown = pd.concat([pairs, least, most])["run_id"]
    return {"most": idle(most), "least": idle(least),
            "changes": [change(row) for _, row in pairs.iterrows()], "pairs": pairs if len(pairs) else None,
            "runs": runs_of(ok[expandable | ok["run_id"].isin(shown)])}


def change(pair: pd.Series) -> dict:
    """What expandable segments change about what one run reserves."""
    share = pair["change_share"]
    return shape_of(pair) | {"as_much": bool(abs(share) < UNMOVED), "less": bool(share < 0),
                             "change_share": abs(share), "reserved_mib": pair["reserved_mib_expandable"]}


def idle(one: pd.DataFrame) -> dict | None:
    """What of a run's reserved memory is not allocated at its peak; None of no run."""
    columns = ["idle_share", "allocated_mib", "reserved_mib"]
    return None if one.empty else shape_of(one.iloc[0]) | one[columns].iloc[0].to_dict()
