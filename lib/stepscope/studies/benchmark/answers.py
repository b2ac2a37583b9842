"""The benchmarking questions, answered from the tidy table of ``stepscope.benchmark.all_times``."""
import pandas as pd

from stepscope.say.formats import (Answer, apart, count, listing, ms, no_data, number, percent, plus_minus, runs_of, span)
from stepscope.runs.tables import by_size
from stepscope.step.timing import WHOLE

MODE_WORDS = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}
NEARLY = 0.05  # two figures this close count as the same in words


def matrix(times: pd.DataFrame) -> pd.DataFrame:
    """The rows of the handout's matrix: fp32, eager, AdamW as torch runs it by default."""
    if times.empty:
        return times
    keep = ((times["precision"] == "fp32") & (times["attention"] == "eager") & ~times["compile"].astype(bool)
            & (times["optimizer"] == "foreach"))
    return by_size(times[keep])


def reference(table: pd.DataFrame) -> tuple[str, int]:
    """What sentences speak of, in a table ordered by size: the smallest size, and of its contexts the largest up to 512."""
    size = table["size"].iloc[0]
    contexts = table.loc[table["size"] == size, "context_length"]
    return str(size), int(max(c for c in contexts if c <= 512) if (contexts <= 512).any() else contexts.min())


def pick(times: pd.DataFrame, **values) -> pd.DataFrame:
    for column, value in values.items():
        times = times[times[column] == value]
    return times


def how_long(times: pd.DataFrame) -> Answer:
    question = "How long is a forward pass, how long a backward pass, how long a full step?"
    times = matrix(times)
    if times.empty:
        return no_data("how-long", question, "benchmark")
    if not (times["status"] == "ok").any():
        return Answer("how-long", question, f"Nothing fits: {count(len(times), 'run')} ended out of memory, and no other was made.",
                      tables=[("What was tried.", wall_table(times))], runs=runs_of(times))
    ok = times[times["status"] == "ok"]
    size, context = reference(ok)
    walls = pick(ok, size=size, context_length=context, phase=WHOLE).set_index("mode")
    phases = pick(ok, size=size, context_length=context, mode="step").set_index("phase")
    text = [f"For {size} at context {context}: " + listing(
        f"{MODE_WORDS[mode]} {ms(walls.median_ms[mode])}" for mode in MODE_WORDS if mode in walls.index)
        + " (medians of host wall time, device synchronised)."]
    numbers = {f"{mode}_ms": walls.median_ms[mode] for mode in walls.index}
    both = ok[ok["mode"].isin(["forward_backward", "step"])].pivot_table(
        index=["size", "context_length", "mode"], columns="phase", values="median_ms", observed=True).reindex(columns=["forward", "backward"])
    ratio = (both["backward"] / both["forward"]).dropna()
    if "backward" in phases.index:
        text.append(f"Within its step, by GPU events: forward {ms(phases.median_ms['forward'])}, loss {ms(phases.median_ms['loss'])},"
                    f" backward {ms(phases.median_ms['backward'])}, optimizer {ms(phases.median_ms['optimizer'])}."
                    if "cuda" in set(ok["device"]) else
                    f"Within its step: forward {ms(phases.median_ms['forward'])}, backward {ms(phases.median_ms['backward'])},"
                    f" optimizer {ms(phases.median_ms['optimizer'])}.")
        text.append(f"Backward takes {span(ratio, digits=3)} times as long as forward over all sizes and contexts; by FLOPs it would"
                    f" be 2.")
        numbers |= {"ratio_low": ratio.min(), "ratio_high": ratio.max()}
    steps = pick(ok, mode="step", phase=WHOLE)
    finding = ""
    if len(steps):
        low, high = steps.loc[steps["median_ms"].idxmin()], steps.loc[steps["median_ms"].idxmax()]
        finding = (f"**A full training step takes {ms(low.median_ms)} ({low['size']}, context {low.context_length}) to"
                   f" {ms(high.median_ms)} ({high['size']}, context {high.context_length}).**")
        if len(ratio):
            finding += f" Backward takes {span(ratio)} times as long as forward."
    oom = times[times["status"] == "oom"]
    if len(oom):
        text.append("Out of memory: " + listing(f"{row['size']} at context {row.context_length}, {MODE_WORDS[row['mode']]}"
                                                for _, row in oom.iterrows()) + ".")
    caption = "Host wall time in ms, mean ± standard deviation of the timed steps; fp32."
    return Answer("how-long", question, " ".join(text), finding, numbers,
                  [(caption, wall_table(times))] + ([(("GPU time" if "cuda" in set(ok["device"]) else "Time")
                                                      + " of each phase of the full step in ms, median [95% interval].", phase_table(times))]
                                                    if len(steps) else []),
                  [("benchmark_phases", "Where a full step's time goes, by size and context")], runs_of(times))


def wall_table(times: pd.DataFrame) -> pd.DataFrame:
    """Sizes and contexts down, modes across."""
    cells = pick(times, phase=WHOLE).copy()
    cells["cell"] = [plus_minus(row.mean_ms, row.std_ms) + ("\\*" if row.flags else "") if row.status == "ok" else "out of memory"
                     for row in cells.itertuples()]
    table = cells.pivot(index=["size", "context_length"], columns="mode", values="cell").reindex(columns=list(MODE_WORDS))
    return table.rename(columns=MODE_WORDS).rename_axis(["size", "context"]).astype(object).fillna("–").reset_index()


def phase_table(times: pd.DataFrame) -> pd.DataFrame:
    rows = times[(times["mode"] == "step") & (times["phase"] != WHOLE) & (times["status"] == "ok")].copy()
    rows["cell"] = [f"{number(r.median_ms)} [{number(r.ci_low_ms)}, {number(r.ci_high_ms)}]" for r in rows.itertuples()]
    table = rows.pivot(index=["size", "context_length"], columns="phase", values="cell")
    order = [phase for phase in ("forward", "loss", "backward", "optimizer") if phase in table]
    return table[order].rename_axis(["size", "context"]).reset_index()


def how_variable(times: pd.DataFrame) -> Answer:
    question = "How variable are the timings?"
    times = matrix(times)
    walls = times[(times["phase"] == WHOLE) & (times["status"] == "ok")] if len(times) else times
    if walls.empty:
        return no_data("how-variable", question, "benchmark")
    spread = walls["std_ms"] / walls["mean_ms"]
    flagged = walls[walls["flags"] != ""]
    text = (f"The standard deviation is {percent(spread.median(), 2)} of the mean in the median run and {percent(spread.max(), 1)} in"
            f" the worst; in {count(int((spread < 0.01).sum()), 'run')} of {len(walls)} it is under 1%. ")
    if len(flagged):
        text += (f"{count(len(flagged), 'run').capitalize()} {'is' if len(flagged) == 1 else 'are'} marked (\\*), since samples"
                 " that drift, fall into two groups or scatter by more than 5% do not stand for one steady state; their medians,"
                 " not their means, are used in every comparison:")
    else:
        text += "No run drifts, falls into two groups or scatters by more than 5%."
    tables = []
    if len(flagged):
        shown = flagged.assign(mode=flagged["mode"].map(MODE_WORDS), median=flagged["median_ms"].map(number),
                               mean=flagged["mean_ms"].map(number), std=flagged["std_ms"].map(number))
        tables = [("Runs whose samples are not one steady state; ms.",
                   shown[["size", "context_length", "mode", "median", "mean", "std", "flags"]]
                   .rename(columns={"context_length": "context", "flags": "why"}))]
    return Answer("how-variable", question, text,
                  numbers={"median_spread": spread.median(), "worst_spread": spread.max(), "flagged": len(flagged)},
                  tables=tables, runs=runs_of(flagged if len(flagged) else walls))


def launch_bound(times: pd.DataFrame) -> Answer:
    question = "Is the step limited by the GPU or by the host's launches?"
    times = matrix(times)
    if times.empty:
        return no_data("launch-bound", question, "benchmark")
    if "launch_bound_share" not in times:
        return Answer("launch-bound", question, "Does not arise here: on a CPU the host does the work itself and every"
                                                " operation ends before the next begins.", runs=runs_of(times))
    phases = times[(times["status"] == "ok") & (times["phase"] == "forward")]
    bound = phases[phases["launch_bound_share"] == 1]
    text = ("The GPU's and the host's clock start together at each step. Where the GPU is done with a phase less than 10% of its"
            " time after the host enqueued its last kernel, it waited for launches: the phase is launch-bound. ")
    if bound.empty:
        finding = f"**No forward pass here is launch-bound**: the GPU is the slower side in all {len(phases)}."
    else:
        where = list(dict.fromkeys((r["size"], r.context_length) for _, r in bound.iterrows()))
        finding = (f"**{listing(f'{s} at context {c}' for s, c in where)} {'is' if len(where) == 1 else 'are'} launch-bound in"
                   f" forward** ({len(bound)} of {len(phases)} runs): there the host's launches set the time, not the GPU.")
    text += finding.replace("**", "")
    flat = _flat_sizes(times)
    if flat:
        text += " " + " ".join(f"For {size}, forward goes from {ms(a)} to {ms(b)} when the context doubles from {c} to {2 * c}"
                               f" ({number(b / a)} times the time for at least twice the FLOPs)." for size, c, a, b in flat)
    table = phases[phases["mode"] == "forward"].assign(
        gpu=phases["median_ms"].map(number), host=phases["enqueue_ms"].map(number), lag=phases["trailing_ms"].map(number),
        bound=phases["launch_bound_share"].map({1.0: "launches", 0.0: "GPU"}))
    return Answer("launch-bound", question, text, finding, {"bound": len(bound), "of": len(phases)},
                  [("Forward pass, medians in ms: GPU time by events, time until the host has enqueued it (with waiting for a full"
                    " launch queue), and how long after that"
                    " the GPU is done.", table[["size", "context_length", "gpu", "host", "lag", "bound"]].rename(columns={
                        "context_length": "context", "gpu": "GPU time", "host": "enqueue time", "lag": "GPU ends after host",
                        "bound": "limited by"}))],
                  [("benchmark_scaling", "Forward time over context; hollow points are launch-bound")], runs_of(phases))


def _flat_sizes(times: pd.DataFrame) -> list[tuple[str, int, float, float]]:
    """Where a doubled context costs less than half of what its doubled work would: (size, context, before, after)."""
    forward = pick(times, mode="forward", phase=WHOLE, status="ok")
    found = []
    for size, group in forward.groupby("size", observed=True):
        median = group.set_index("context_length")["median_ms"]
        found += [(size, c, median[c], median[2 * c]) for c in median.index if 2 * c in median.index and median[2 * c] < 1.5 * median[c]]
    return found


def utilisation(times: pd.DataFrame, ceilings: pd.DataFrame) -> Answer:
    question = "How many tokens a second, and how much of the device's arithmetic is used?"
    times = matrix(times)
    walls = times[(times["phase"] == WHOLE) & (times["status"] == "ok")] if len(times) else times
    if walls.empty or ceilings.empty:
        return no_data("utilisation", question, "benchmark")
    values = ceilings.groupby("ceiling")["value"].median()
    mode = [mode for mode in MODE_WORDS if (walls["mode"] == mode).any()][-1]
    steps = walls[walls["mode"] == mode]
    best, worst = steps.loc[steps["utilisation"].idxmax()], steps.loc[steps["utilisation"].idxmin()]
    unit = "TFLOP/s"
    limits = listing(f"{name.removeprefix('matmul_').upper().replace('FP', 'fp').replace('BF', 'bf')} {number(value)} {unit}"
                     for name, value in values.items() if name.startswith("matmul"))
    text = (f"Ceilings measured in the same runs (medians of {len(ceilings['run_id'].unique())} runs): matrix products {limits}; copy"
            f" {number(values['copy'])} TB/s. Against the fp32 product, {MODE_WORDS[mode]} reaches {percent(worst.utilisation)}"
            f" ({worst['size']}, context {worst.context_length}) to {percent(best.utilisation)} ({best['size']}, context"
            f" {best.context_length}). FLOPs are those of the matrix products, by formula, backward twice forward.")
    finding = (f"**Model FLOPs utilisation of the fp32 {MODE_WORDS[mode]} is {percent(worst.utilisation)} to {percent(best.utilisation)}** of the"
               f" {number(values['matmul_fp32'])} TFLOP/s that a large fp32 matrix product reaches on the same device.")
    tables = [(f"{MODE_WORDS[mode].capitalize()}: tokens/s, achieved TFLOP/s and share of the measured fp32 ceiling.",
               steps.assign(tokens=steps["tokens_per_s"].map(lambda v: number(v, 4)), rate=steps["tflops"].map(number),
                            share=steps["utilisation"].map(percent))[["size", "context_length", "tokens", "rate", "share"]]
               .rename(columns={"context_length": "context", "tokens": "tokens/s", "rate": "TFLOP/s", "share": "utilisation"}))]
    return Answer("utilisation", question, text, finding,
                  {"best": best.utilisation, "worst": worst.utilisation} | values.to_dict(), tables,
                  [("benchmark_utilisation", "Share of the measured fp32 ceiling, by mode, size and context")], runs_of(walls))


def optimizer(times: pd.DataFrame, ceilings: pd.DataFrame) -> Answer:
    question = "What does the choice of AdamW implementation cost?"
    if times.empty:
        return no_data("optimizer", question, "benchmark")
    rows = by_size(pick(times, mode="step", status="ok"))
    rows = rows[rows["phase"].isin(["optimizer", WHOLE])]
    keys = ["size", "context_length", "precision", "phase"]
    both = rows[rows["optimizer"] == "foreach"].merge(rows[rows["optimizer"] == "fused"], on=keys, suffixes=("", "_fused"))
    if both.empty:
        return no_data("optimizer", question, "benchmark")
    phase, whole = both[both["phase"] == "optimizer"], both[both["phase"] == WHOLE]
    ratio, saved = phase["median_ms"] / phase["median_ms_fused"], 1 - whole["median_ms_fused"] / whole["median_ms"]
    told_apart = [apart(row[["ci_low_ms", "ci_high_ms"]], row[["ci_low_ms_fused", "ci_high_ms_fused"]].set_axis(["ci_low_ms", "ci_high_ms"]))
                  for _, row in whole.iterrows()]
    which = "fused" if ratio.median() > 1 + NEARLY else "foreach" if ratio.median() < 1 - NEARLY else ""
    if which:
        factor = ratio if which == "fused" else 1 / ratio
        text = (f"The optimizer phase is {span(factor)} times as fast with the {which} implementation"
                f"{' as with foreach' + (', torch’s default on a GPU' if (rows['device'] == 'cuda').all() else '') if which == 'fused' else ''}.")
    else:
        text = f"Foreach over fused time of the optimizer phase is {span(ratio)}: neither is clearly faster."
    better = [f"{percent(s, 1)} ({size})" for s, size, sure in zip(saved, whole["size"], told_apart) if sure and s > 0]
    worse = [str(size) for s, size, sure in zip(saved, whole["size"], told_apart) if sure and s < 0]
    text += f" Of the whole step, fused saves {listing(better)}." if better else " It makes no step measurably shorter."
    if worse:
        text += f" It makes the step longer for {listing(worse)}."
    finding = (f"**`AdamW(fused=True)` makes the optimizer phase {span(ratio)} times as fast**"
               f" and saves {percent(saved.min(), 1)} to {percent(saved.max(), 1)} of the step." if which == "fused" and better else "")
    # Per parameter AdamW has to read weight, gradient and both moments and write all but the gradient: 7 x 4 bytes.
    moved = 28 * phase["parameters"] / phase["median_ms_fused"] / 1e9
    copy = ceilings.loc[ceilings["ceiling"] == "copy", "value"].median()
    text += (f" The fused kernel moves the 28 bytes per parameter that AdamW in fp32 has to at {span(moved)} TB/s,"
             f" {percent((moved / copy).min())} to {percent((moved / copy).max())} of what a large copy reaches here.")
    table = phase.assign(a=phase["median_ms"].map(number), b=phase["median_ms_fused"].map(number), r=ratio.map(number),
                         s=[percent(v, 1) for v in saved])
    table = table[["size", "context_length", "a", "b", "r", "s"]].set_axis(
        ["size", "context", "foreach (ms)", "fused (ms)", "foreach / fused", "saved of the step"], axis=1)
    runs = sorted(set(runs_of(both)) | set("benchmark/" + both["run_id_fused"]))
    return Answer("optimizer", question, text, finding, {"ratio_low": ratio.min(), "ratio_high": ratio.max()},
                  [("Optimizer phase, median time, by implementation.", table)],
                  [("benchmark_optimizer", "AdamW: torch's default (foreach) and the fused kernel")], runs)


def other_runs(times: pd.DataFrame, left: list[str]) -> Answer:
    """The runs that no other answer is made from.

    Args:
        times: all benchmark runs.
        left: folders of such runs, of any study.
    """
    question = "What was run that no answer is made from?"
    text = ("Answers are made from steps with the default settings and, of runs that differ in batch, vocabulary, seed or number of steps only, from"
            f" one. {count(len(left), 'run').capitalize()} besides {'is' if len(left) == 1 else 'are'} in none.")
    rows = times[(times["phase"] == WHOLE) & ("benchmark/" + times["run_id"]).isin(left)] if len(times) else times
    if rows.empty:
        return Answer("other-runs", question, text, runs=left)
    rows = by_size(rows)
    table = pd.DataFrame({"size": rows["size"].astype(str), "context": rows["context_length"], "batch": rows["batch_size"], "mode": rows["mode"].map(MODE_WORDS),
                          "precision": rows["precision"], "attention": rows["attention"].map({"eager": "written out", "sdpa": "SDPA"}),
                          "compiled": rows["compile"].map({True: "yes", False: "no"}), "AdamW": rows["optimizer"],
                          "vocabulary": rows["vocab_size"], "seed": rows["seed"], "steps": rows["timed_steps"],
                          "median (ms)": [f"{number(row.median_ms)} [{number(row.ci_low_ms)}, {number(row.ci_high_ms)}]" if row.status == "ok" else "out of memory"
                                          for row in rows.itertuples()]})
    return Answer("other-runs", question, text, tables=[("Host wall time of those of the benchmark, median [95% interval].", table)], runs=left)
