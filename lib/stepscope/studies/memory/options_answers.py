"""What two options change about memory: activation checkpointing, and the allocator's expandable segments."""
import pandas as pd

from stepscope.step.accounting import MIB, peak, require_formulas, value
from stepscope.say.formats import Answer, count, listing, ms, no_data, number, percent, runs_of
from stepscope.say.formats import MODE_WORDS
from stepscope.studies.memory.answers import NO_HISTORY, Tables, config_of, gib, mib
from stepscope.step.timing import WHOLE

QUICKER = 0.02  # of a step: a smaller difference of times is not explained
UNMOVED = 0.01  # a share of reserved memory that counts as no change


def curve(tables: Tables) -> pd.DataFrame:
    """Checkpointing's settings of the largest run that measured them, by blocks per checkpoint (0, none, last).

    Columns: ``blocks``, ``status``, ``predicted_mib``, ``peak_mib`` (missing without a GPU), ``time_ms`` (median step), run_id and
    the run's shape.
    """
    table, samples = tables["checkpoints"], tables["samples"]
    if table.empty:
        return table
    runs = tables["runs"].set_index("run_id")
    ids = [run_id for run_id in runs.index if run_id in set(table["run_id"])]  # by size and context
    own, run = table[table["run_id"] == ids[-1]], runs.loc[ids[-1]]
    steps = samples[(samples["run_id"] == ids[-1]) & (samples["phase"] == WHOLE) & samples["timed"].astype(bool)]
    own = own.assign(blocks=own["blocks_per_checkpoint"], predicted_mib=[peak(config_of(run), int(k)).allocated / MIB for k in own["blocks_per_checkpoint"]],
                     peak_mib=own["peak_allocated_bytes"] / MIB if "peak_allocated_bytes" in own else float("nan"),
                     time_ms=own["blocks_per_checkpoint"].map(steps.groupby("blocks_per_checkpoint")["time_ms"].median()), study="memory")
    return own.sort_values("blocks", key=lambda blocks: blocks.where(blocks > 0, 10**9), ignore_index=True)


def checkpointing(tables: Tables) -> Answer:
    question = "Activation checkpointing: how many blocks per checkpoint use the least memory, and what does it cost?"
    table = curve(tables)
    if table.empty:
        return no_data("memory-checkpointing", question, "memory")
    run = tables["runs"].set_index("run_id").loc[table["run_id"].iloc[0]]
    config = config_of(run)
    every = {k: peak(config, k).allocated for k in range(1, config.num_layers + 1)}
    optimum = min(every, key=every.get)
    at = peak(config, optimum)
    measured = table["peak_mib"].notna().any()
    with_ = table[(table["blocks"] > 0) & (table["status"] == "ok")]
    text = (f"{run['size']} at context {run['context_length']}, {MODE_WORDS[run['mode']]}, {run['precision']}. (Not the full step: there the optimizer's own peak, which"
            f" checkpointing does not touch, hides the curve.) Of all block sizes from 1 to {config.num_layers}, the formulas give the lowest peak,"
            f" {gib(at.allocated)}, to {count(optimum, 'block')} per checkpoint.")
    finding = ""
    numbers = {"predicted_optimum": optimum}
    none = table[table["blocks"] == 0]
    if measured:
        best = with_.loc[with_["peak_mib"].idxmin()]
        order = with_["blocks"].tolist().index(best["blocks"])
        neighbours = with_.iloc[[place for place in (order - 1, order + 1) if 0 <= place < len(with_)]]
        agree = int(best["blocks"]) == optimum
        text += (f" Measured, the lowest is {mib(best['peak_mib'])} at {count(int(best['blocks']), 'block')}: {'the predicted one' if agree else 'not the predicted one'};"
                 f" {'its neighbours take' if len(neighbours) > 1 else 'its neighbour takes'} {listing(f'{mib(r.peak_mib)} (at {int(r.blocks)})' for r in neighbours.itertuples())}.")
        off = (with_["predicted_mib"] / with_["peak_mib"] - 1).abs().max()
        text += f" The predicted peaks are within {percent(off, 2)} of the measured ones."
        numbers |= {"measured_optimum": int(best["blocks"]), "off": off}
        if len(none) and none["status"].iloc[0] == "ok":
            base = none.iloc[0]
            text += (f" Against no checkpoints ({mib(base['peak_mib'])}, {ms(base['time_ms'])}) that is {percent(1 - best['peak_mib'] / base['peak_mib'])} less memory for"
                     f" {percent(best['time_ms'] / base['time_ms'] - 1)} more time.")
            finding = (f"**Checkpointing every {'block' if best['blocks'] == 1 else count(int(best['blocks']), 'block')} takes {percent(1 - best['peak_mib'] / base['peak_mib'])} off the peak"
                       f" of {MODE_WORDS[run['mode']]} for {percent(best['time_ms'] / base['time_ms'] - 1)} more time** ({run['size']}, context {run['context_length']}).")
        text += _stops_early(with_)
    else:
        text += " " + NO_HISTORY.split(".")[0] + ": times are measured, peaks are predicted."
    text += _why(config, optimum)
    cells = pd.DataFrame({"blocks per checkpoint": ["none" if b == 0 else str(b) for b in table["blocks"]],
                          "predicted peak, MiB": table["predicted_mib"].map(lambda v: f"{v:,.1f}")})
    if measured:
        cells["measured peak, MiB"] = ["out of memory" if s == "oom" else f"{v:,.1f}" for s, v in zip(table["status"], table["peak_mib"])]
    cells["step, ms"] = table["time_ms"].map(number)
    return Answer("memory-checkpointing", question, text, finding, numbers, [("Peak and time by blocks per checkpoint.", cells)],
                  [("memory_checkpoints", "Peak and step time by blocks per checkpoint")], runs_of(table))


def _stops_early(with_: pd.DataFrame) -> str:
    """More checkpoints may be quicker: PyTorch stops running a part again at the last tensor that backward needs of it."""
    few, many = with_.iloc[-1], with_.iloc[0]
    parts = {row.blocks: -(-int(with_["blocks"].max()) // row.blocks) for row in with_.itertuples()}  # as many parts as there are checkpoints
    spared = parts[many["blocks"]] - parts[few["blocks"]]
    if spared <= 0 or many["time_ms"] > few["time_ms"] * (1 - QUICKER):
        return ""
    each = (few["time_ms"] - many["time_ms"]) / spared
    return (f" {count(int(many['blocks']), 'block')} per checkpoint is also quicker than {int(few['blocks'])} ({ms(many['time_ms'])} against {ms(few['time_ms'])}):"
            f" running a part again stops at the last tensor that backward needs of it, which spares the part's last product, {ms(each)} for each part more.")


def _why(config, optimum: int) -> str:
    """What the optimum follows from: a checkpoint's bytes against a block's."""
    stream, saved = value("4X", config), value(require_formulas(config).saved, config)
    root = (config.num_layers * stream / saved) ** 0.5
    return (f" A checkpoint is one residual tensor, {number(stream / MIB)} MiB, and a block that is run again keeps {number(saved / MIB)} MiB: L/k checkpoints and k blocks"
            f" are least at k = √(L × {number(stream / MIB)} / {number(saved / MIB)}) = {number(root)}, so {'no fewer than one block can be run again' if root < 1 else 'near ' + str(optimum)}.")


def fragmentation(tables: Tables) -> Answer:
    question = "How much is reserved beyond what is allocated, and what do expandable segments change?"
    runs = tables["runs"]
    if runs.empty:
        return no_data("memory-fragmentation", question, "memory")
    ok = runs[(runs["measured"] == "history") & (runs["device"] == "cuda") & (runs["status"] == "ok")]
    if ok.empty:
        return Answer("memory-fragmentation", question, NO_HISTORY)
    # A peak of what is reserved holds from the first step on.
    reserved = ok[["first_peak_reserved_mib", "steady_peak_reserved_mib"]].max(axis=1)
    ok = ok.assign(reserved=reserved, idle=1 - ok["steady_peak_allocated_mib"] / reserved, expandable=ok["expandable_segments"].astype(bool))
    plain = ok[~ok["expandable"]]
    most, least = plain.loc[plain["idle"].idxmax()], plain.loc[plain["idle"].idxmin()]
    def named(row) -> str:
        return f"{row['size']}, context {row['context_length']}, {MODE_WORDS[row['mode']]}, {row['precision']}"
    text = (f"At most {percent(most['idle'], 1)} of what is reserved lies idle at the peak ({named(most)}: {mib(most['steady_peak_allocated_mib'])} allocated,"
            f" {mib(most['reserved'])} reserved), at least {percent(least['idle'], 1)} ({named(least)}).")
    keys = ["size", "context_length", "mode", "precision"]
    pairs = plain.merge(ok[ok["expandable"]], on=keys, suffixes=("", "_expandable"))
    tables_, shown = [], pd.concat([ok[ok["expandable"]], plain[plain["run_id"].isin([*pairs["run_id"], most["run_id"], least["run_id"]])]])
    if len(pairs):
        changes = pairs["reserved_expandable"] / pairs["reserved"] - 1
        text += " With expandable segments, which grow and shrink by pages instead of being taken whole, " + listing(
            f"{named(row)} reserves {'as much' if abs(change) < UNMOVED else percent(abs(change), 1) + (' less' if change < 0 else ' more')}"
            f" ({mib(row['reserved_expandable'])})" for (_, row), change in zip(pairs.iterrows(), changes)) + "."
        for column in ("steady_peak_allocated_mib", "reserved"):
            pairs[[column, f"{column}_expandable"]] = pairs[[column, f"{column}_expandable"]].map(lambda v: f"{v:,.1f}")
        columns = {"size": "size", "context_length": "context", "mode": "mode", "steady_peak_allocated_mib": "allocated",
                   "reserved": "reserved", "steady_peak_allocated_mib_expandable": "allocated, expandable", "reserved_expandable": "reserved, expandable"}
        tables_ = [("Peaks in MiB with and without expandable segments.", pairs.astype({"size": str}).assign(mode=pairs["mode"].map(MODE_WORDS))[list(columns)].rename(columns=columns))]
    return Answer("memory-fragmentation", question, text, "", {"most_idle": most["idle"]}, tables_, [], runs_of(shown))
