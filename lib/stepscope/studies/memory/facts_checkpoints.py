"""What checkpoints make possible, in numbers: the block size at a long context, how far a model runs on one
GPU, and checkpoints inside one another."""
import numpy as np
import pandas as pd

from stepscope.config import size_label
from stepscope.say.formats import MODE_WORDS, runs_of
from stepscope.step.accounting import MIB, peak, require_formulas, value
from stepscope.step.timing import WHOLE
from stepscope.studies.memory.facts import GIB, config_of, shape_of

SAME_TIME = 0.01    # of a step: times this close are not ranked
SAME_PEAK = 0.005   # of a peak
SETTING = ["run_id", "context_length", "blocks_per_checkpoint"]


def step_times(samples: pd.DataFrame, by: list[str]) -> pd.Series:
    """Median ms of a timed step, by columns of the samples; of what had no warm-up step, none."""
    if samples.empty or not set(by) <= set(samples):
        return pd.Series(dtype=float)
    warm = samples.groupby("run_id")["timed"].transform(lambda timed: not timed.all())
    steps = samples[(samples["phase"] == WHOLE) & samples["timed"].astype(bool) & warm.astype(bool)]
    return steps.groupby(by)["time_ms"].median()


def steps_each(samples: pd.DataFrame, rows: pd.DataFrame, by: list[str]) -> int:
    """How many timed steps each setting of these rows' runs has at least; 0 where none was timed."""
    if samples.empty or not {*by} <= set(samples):
        return 0
    own = samples[samples["run_id"].isin(rows["run_id"]) & samples["timed"].astype(bool)]
    counts = own[own["phase"] == WHOLE].groupby(["run_id", *by]).size()
    return int(counts.min()) if len(counts) else 0


def settings(checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Settings of runs of a kind (``measured``): with mode, precision and optimizer of their runs,
    ``predicted_mib`` (by today's formulas), ``peak_mib`` (missing without a GPU) and ``time_ms``."""
    own = runs[runs["measured"] == kind].set_index("run_id", drop=False)
    rows = checkpoints[checkpoints["run_id"].isin(own.index)].reset_index(drop=True)
    if rows.empty:
        return rows
    configs = [config_of(own.loc[row.run_id]).model_copy(update={"context_length": int(row.context_length)})
               for row in rows.itertuples()]
    # A context of its own is in the samples of runs at several; those of before have one.
    known = samples.merge(own[["run_id", "context_length"]].reset_index(drop=True), on="run_id", how="inner",
                          suffixes=("", "_of_run")) if len(samples) else samples
    if "context_length_of_run" in known:
        known["context_length"] = known["context_length"].fillna(known["context_length_of_run"]).astype(int)
    times = step_times(known, SETTING)
    mib = rows["peak_allocated_bytes"] / MIB if "peak_allocated_bytes" in rows else float("nan")
    return rows.assign(
        study="memory", blocks=rows["blocks_per_checkpoint"], peak_mib=mib,
        **{name: rows["run_id"].map(own[name]) for name in ("mode", "precision", "optimizer")},
        predicted_mib=[peak(config, int(blocks)).allocated / MIB
                       for config, blocks in zip(configs, rows["blocks_per_checkpoint"])],
        time_ms=[times.get(tuple(key), float("nan")) for key in rows[SETTING].itertuples(index=False)])


def at_longest(checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame,
               other: str) -> dict | None:
    """Block sizes of one level at the longest context of the largest size, apart from the run ``other``; None
    without a GPU's peaks. ``best``: which setting needs least in which cases. ``cases``, a mode and precision
    each: ``least`` and ``quickest`` setting with checkpoints (``same``: the first is as quick, within
    :data:`SAME_TIME`), whether a step without them fits, and what the next larger takes more; ``steps``, on
    how many timed ones each rests at least."""
    rows = settings(checkpoints, runs[runs["run_id"] != other], samples, "checkpointing")
    if rows.empty or rows["peak_mib"].isna().all():
        return None
    last = runs.loc[runs["run_id"].isin(rows["run_id"])].iloc[-1]
    rows = rows[(rows["size"].astype(str) == str(last["size"]))
                & (rows["context_length"] == last["context_length"])]
    rows = rows.sort_values(["mode", "precision", "blocks"], ascending=[True, False, True], ignore_index=True)
    groups = list(rows.groupby(["mode", "precision"], sort=False))
    cases = [one for (mode, precision), group in groups if (one := case(mode, precision, group))]
    ok = rows[(rows["status"] == "ok") & (rows["blocks"] > 0)]
    return {"run": shape_of(last), "label": size_label(str(last["size"])),
            "batch": int(last["batch_size"]), "cases": cases,
            "steps": steps_each(samples, rows, ["blocks_per_checkpoint"]),
            "best": [{"least": least, "same": same,
                      "cases": [f"{MODE_WORDS[one['mode']]} ({one['precision']})" for one in cases
                                if (one["least"], one["same"]) == (least, same)]}
                     for least, same in dict.fromkeys((one["least"], one["same"]) for one in cases)],
            "off_share": (ok["predicted_mib"] / ok["peak_mib"] - 1).abs().max() if len(ok) else None,
            "table": rows, "runs": runs_of(rows)}


def case(mode: str, precision: str, rows: pd.DataFrame) -> dict | None:
    """The best settings of one mode and precision; None where no setting with checkpoints fits."""
    ok = rows[(rows["status"] == "ok") & (rows["blocks"] > 0)].reset_index(drop=True)
    if ok.empty:
        return None
    none, least = rows[rows["blocks"] == 0], ok.loc[ok["peak_mib"].idxmin()]
    quickest = ok.loc[ok["time_ms"].idxmin()] if ok["time_ms"].notna().any() else None
    larger = ok[ok["blocks"] > least["blocks"]].head(1)
    beside = None
    if len(larger):
        one = larger.iloc[0]
        longer = one["time_ms"] / least["time_ms"] - 1
        beside = {"blocks": int(one["blocks"]), "peak_gib": one["peak_mib"] * MIB / GIB,
                  "more_share": one["peak_mib"] / least["peak_mib"] - 1,
                  "same_peak": bool(abs(one["peak_mib"] / least["peak_mib"] - 1) < SAME_PEAK),
                  "longer_share": longer, "as_quick": bool(abs(longer) < SAME_TIME),
                  "slower": bool(longer > 0), "timed": bool(np.isfinite(longer))}
    return {"mode": mode, "precision": precision, "least": int(least["blocks"]),
            "every_block": bool(least["blocks"] == 1), "peak_gib": least["peak_mib"] * MIB / GIB,
            "ms": least["time_ms"], "quickest": None if quickest is None else int(quickest["blocks"]),
            "same": quickest is not None
            and bool(least["time_ms"] <= quickest["time_ms"] * (1 + SAME_TIME)),
            "none_tried": len(none) > 0, "none_fits": bool((none["status"] == "ok").any()),
            "none_predicted_gib": none["predicted_mib"].iloc[0] * MIB / GIB if len(none) else None,
            "beside": beside}


def reach(checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame) -> dict | None:
    """How far the largest model runs that was tried at several contexts on a GPU. ``ways``, a mode,
    checkpoints and precision each: the longest context that ``fits`` and the first that ``fails`` (each
    None), with peaks measured and predicted; ``as_predicted``: every one that fits was predicted below the
    GPU's memory, and every one that fails above (``surprises`` were not). ``bytes_each``: what weights,
    gradients and AdamW's moments take a parameter.
    """
    rows = settings(checkpoints, runs, samples, "reach")
    if rows.empty:
        return None
    last = runs.loc[runs["run_id"].isin(rows["run_id"])].iloc[-1]
    rows = rows[rows["size"].astype(str) == str(last["size"])].sort_values(
        ["mode", "blocks", "precision", "context_length"], ignore_index=True)
    gpu_mib = last["gpu_memory_mib"]
    if np.isnan(gpu_mib):
        return None
    ways = [way(key, group) for key, group in
            rows.groupby(["mode", "blocks", "precision", "optimizer"], sort=False)]
    expected = (rows["status"] == "ok") == (rows["predicted_mib"] <= gpu_mib)
    measured = rows[(rows["status"] == "ok") & rows["peak_mib"].notna()]
    parameters = last["parameters_bytes"] / 4
    return {"size": str(last["size"]), "batch": int(last["batch_size"]), "parameters": parameters,
            "billions": parameters / 1e9, "weights_gib": last["parameters_bytes"] / GIB,
            "gpu_gib": gpu_mib * MIB / GIB, "bytes_each": 16,
            "states_gib": 16 * parameters / GIB, "ways": ways,
            "steps": steps_each(samples, rows, ["blocks_per_checkpoint"]),
            "step": next((one for one in ways if one["mode"] == "step"), None),
            "as_predicted": bool(expected.all()), "surprises": rows[~expected].to_dict("records"),
            "off_share": (measured["predicted_mib"] / measured["peak_mib"] - 1).abs().max()
            if len(measured) else None, "table": rows, "runs": runs_of(rows)}


def way(key: tuple, rows: pd.DataFrame) -> dict:
    """How far one mode, checkpointing and precision runs."""
    def one(found: pd.DataFrame, place: int) -> dict | None:
        if found.empty:
            return None
        row = found.iloc[place]
        return {"context": int(row["context_length"]), "peak_gib": row["peak_mib"] * MIB / GIB,
                "predicted_gib": row["predicted_mib"] * MIB / GIB, "ms": row["time_ms"]}
    mode, blocks, precision, optimizer = key
    return {"mode": mode, "forward": mode == "forward", "blocks": int(blocks), "precision": precision,
            "fused": mode == "step" and optimizer == "fused",
            "checkpoints": bool(blocks), "every_block": int(blocks) == 1,
            "fits": one(rows[rows["status"] == "ok"], -1), "fails": one(rows[rows["status"] == "oom"], 0)}


def stacked_blocks(stacks: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Arrangements of the largest run that measured them: ``blocks``, ``arrangement``, ``status``,
    ``block_runs``, ``kept_mib`` (expected), ``beyond_mib`` (measured: peak less the state before the step;
    missing without a GPU, and where it is less than is kept) and ``time_ms``."""
    run_id = runs.loc[runs["run_id"].isin(stacks["run_id"]), "run_id"].iloc[-1]
    rows = stacks[stacks["run_id"] == run_id].reset_index(drop=True)
    times = step_times(samples, ["run_id", "blocks", "arrangement"])
    beyond = ((rows["peak_allocated_bytes"] - rows["state_bytes"]) / MIB if "state_bytes" in rows
              else pd.Series(float("nan"), rows.index)).where(rows["status"] == "ok")
    kept = rows["expected_kept_bytes"] / MIB
    beyond = beyond.where(beyond >= kept)  # else something of the state was freed during the step
    return rows.assign(study="memory", kept_mib=kept, beyond_mib=beyond,
                       time_ms=[times.get((run_id, row.blocks, row.arrangement), float("nan"))
                                for row in rows.itertuples()])


def nested(stacks: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame) -> dict | None:
    """Arrangements of checkpoints against the number of blocks. ``most``: the largest number of blocks of
    which all fit, ``at_most`` its arrangements by what they take, the least first, with ``times``, how much
    longer than without checkpoints; ``growth``: how many times as much the most takes as the fewest, beside
    how many times as many blocks."""
    rows = stacked_blocks(stacks, runs, samples)
    run = runs.set_index("run_id").loc[rows["run_id"].iloc[0]]
    config = config_of(run)
    on_gpu = bool(rows["beyond_mib"].notna().any())
    by = "beyond_mib" if on_gpu else "kept_mib"
    whole = rows.groupby("blocks")["status"].apply(lambda status: (status == "ok").all())
    if not whole.any():
        return None
    most, fewest = int(whole[whole].index.max()), int(whole[whole].index.min())
    at_most, at_fewest = (rows[rows["blocks"] == number].set_index("arrangement")
                          for number in (most, fewest))
    base = at_most["time_ms"].get("none", float("nan"))
    at_most = at_most.assign(times=at_most["time_ms"] / base, growth=at_most[by] / at_fewest[by],
                             run_times=at_most["block_runs"] / most).sort_values(by, kind="stable")
    stream, saved = value("4X", config) / MIB, value(require_formulas(config).saved, config) / MIB
    named = at_most.reset_index().to_dict("records")
    by_name = {row["arrangement"]: row for row in named}
    every = by_name.get("every block")
    return {"run": shape_of(run), "label": size_label(str(run["size"])), "batch": int(run["batch_size"]),
            "on_gpu": on_gpu, "steps": steps_each(samples, rows, ["blocks", "arrangement"]),
            "numbers": sorted(rows["blocks"].unique().tolist()), "most": most, "fewest": fewest,
            "as_many": most / fewest, "stream_mib": stream, "saved_mib": saved, "ratio": saved / stream,
            # sqrt(N) (saved + stream) is more than N stream + saved as long as sqrt(N) < saved / stream.
            "crossing": (saved / stream) ** 2,
            "runs_as_expected": bool((rows["block_runs"] == rows["expected_runs"]).all()),
            "least": named[0], "at_most": named, "none": by_name.get("none"), "every": every,
            "without": by_name.get("none"),  # in a template, none by itself is no fact
            "root": by_name.get("square root"), "halved": by_name.get("halved"),
            "start": by_name.get("from the start"),
            "root_worse": every is not None and "square root" in by_name
            and bool(by_name["square root"][by] > every[by]),
            "out_of_memory": rows.loc[rows["status"] == "oom", ["blocks", "arrangement"]].to_dict("records"),
            "freed": bool(on_gpu and pd.concat([at_most, at_fewest])["beyond_mib"].isna().any()),
            "table": rows, "runs": runs_of(rows)}
