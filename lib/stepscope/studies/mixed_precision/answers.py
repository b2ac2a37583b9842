"""The mixed-precision questions, answered from the tables of ``stepscope.mixed_precision.load``."""
from decimal import Decimal

import numpy as np
import pandas as pd

from stepscope.say.formats import Answer, capital, count, listing, ms, no_data, number, percent, runs_of, span
from stepscope.say.formats import MODE_WORDS
from stepscope.say.selections import matrix, pick, reference
from stepscope.say.published import source_name
from stepscope.traces.families import MATMUL
from stepscope.studies.mixed_precision.measure import LOW, SAME
from stepscope.studies.mixed_precision.numerics import ADDITIONS, DTYPES, EPS, TERM
from stepscope.runs.tables import by_size
from stepscope.step.timing import WHOLE

# The handout's four loops, and what another report (E of data/published.yaml) prints for each.
PUBLISHED_SUMS = {"fp32 into fp32": "10.0001", "fp16 into fp16": "9.9531", "fp16 into fp32": "10.0021",
                  "fp16 cast to fp32, into fp32": "10.0021"}
DEVICE_WORDS = {"cuda": "the GPU", "cpu": "the CPU"}
OTHERS = ("tf32", "bf16", "fp16")  # beside fp32
EXACT = 1e-12     # an error that is none, but for the arithmetic that computes it
LOST = 0.01       # of a tensor's values: how many may overflow or become zero before it counts as lost
NORM_OFF = 0.01   # relative error from which a norm's output counts as wrong
FEW = 0.0001      # a share below which one speaks of hardly any
CASTS = "copy and cast"
PARAGRAPH = "\0"  # between sentences: here the next paragraph begins
PHASES = ("forward", "loss", "backward", "optimizer")

Tables = dict[str, pd.DataFrame]


def accumulation(mixed: Tables) -> Answer:
    question = "What do a thousand additions of 0.01 make in each combination of types, and where does the error come from?"
    sums, fine = mixed["sums"], mixed["steps"]
    if sums.empty:
        return no_data("mixed-sums", question, "mixed_precision")
    devices = list(dict.fromkeys(sums["device"]))
    own, fine = pick(sums, device=devices[-1]).set_index("way"), pick(fine, device=devices[-1]).set_index("dtype")
    loops = [way for way in PUBLISHED_SUMS if way in own.index]
    other = [way for way in loops if any(f"{value:.4f}" != PUBLISHED_SUMS[way]
                                         for value in sums.loc[sums["way"] == way, "result"])]
    text = ["To four decimals: " + "; ".join(f"{way} {own.result[way]:.4f}" for way in loops) + "; "
            + ("all as in the published reports." if not other else "printed elsewhere, and not what comes out here: " + "; ".join(
                f"{way} {PUBLISHED_SUMS[way]}" for way in other) + ".")]
    if len(devices) > 1:
        bits = sums.pivot_table(index="way", columns="device", values="bits", aggfunc="first")
        differ = list(bits.index[bits.nunique(axis=1) > 1])
        text.append("CPU and GPU " + (f"agree in every bit of all {len(bits)} sums." if not differ
                                      else f"differ in {'; '.join(differ)}."))
    terms = own.drop_duplicates("term_type").set_index("term_type")["error_of_term"]
    text.append(f"No binary type holds {TERM}: over {ADDITIONS:,} terms, storing it costs"
                f" {listing(f'{signed(v)} in {name}' for name, v in terms.items())}."
                " The rest of the error is lost in adding, since a sum keeps only its own type's numbers; at 10 these are"
                f" {listing(f'{tiny(step)} apart in {name}' for name, step in fine['step_at_10'].items())}.")
    by_adding = own["error_of_adding"].abs() > own["error_of_term"].abs()
    for yes, words in ((True, "adding"), (False, "storing 0.01")):
        if ways := [way for way in loops if by_adding[way] == yes]:
            text.append(f"Mostly wrong by {words}: {'; '.join(ways)}.")
    plain = own[~own.index.str.contains("pairwise|Kahan")]
    if clean := [way for way in plain.index if abs(plain.error_of_adding[way]) < EXACT]:
        text.append(f"Adding loses nothing at all in {'; '.join(clean)}.")
    direct, cast = (own.result.get(way) for way in loops[2:4]) if len(loops) == 4 else (0, 1)
    if direct == cast:
        text.append("Casting the term up first changes nothing: adding fp16 to fp32 does that anyway, and what the term"
                    " lost when it was stored does not come back.")
    stops = fine["stops_after"]
    text.append("Adding 0.01 changes nothing any more at " + listing(
        f"{at:,.0f} in {name}" + (f" (the running sum is there after {stops[name]:,.0f} additions)"
                                  if stops[name] == stops[name] else "")
        for name, at in fine["stops_at"].items()) + ": from there the next number is more than twice the term away.")
    careful = own[own.index.str.contains("pairwise|Kahan")]
    if len(careful):
        off = careful["error"].abs().max()
        text.append("Pairwise and Kahan sums end " + ("at exactly 10 in every type, the terms' own error rounded away."
                                                      if off < EXACT else
                                                      f"within {tiny(off)} of 10 in every type."))
    worst = plain["error"].abs().idxmax()
    mended = next((way for way in plain.index if plain.term_type[way] == plain.term_type[worst]
                   and plain.sum_type[way] == "fp32" and way != worst), None)
    finding = (f"**A thousand times 0.01 is {plain.result[worst]:g} when summed in {plain.sum_type[worst]}**"
               + (f", and {plain.result[mended]:g} when the same terms are summed in fp32." if mended else "."))
    table = pd.DataFrame([{"way": way, "printed": f"{r.result:.4f}", "exactly": exactly(r.result), "bits": f"`{r.bits}`",
                           "error": signed(r.error),
                           "from storing 0.01": signed(r.error_of_term), "from adding": signed(r.error_of_adding)} for way,
                          r in own.iterrows()])
    return Answer("mixed-sums", question, " ".join(text), finding, own["result"].to_dict(),
                  [(f"0.01 added {ADDITIONS:,} times on {DEVICE_WORDS[devices[-1]]}, in full; errors against exactly 10.",
                    table)],
                  [("mixed_running", "Error of the running sum over a thousand additions")], runs_of(sums))


def exactly(value: float) -> str:
    """All decimals of a binary number."""
    return f"{Decimal(value):f}"


def joined(sentences: list[str]) -> str:
    """Sentences as paragraphs, which :data:`PARAGRAPH` parts."""
    return "\n\n".join(filter(None, (part.strip() for part in " ".join(sentences).split(PARAGRAPH))))


def signed(value: float) -> str:
    """An error with its sign, to three digits."""
    return "0" if abs(value) < EXACT else f"{value:+.3g}".replace("e-0", "e-")


def tiny(value: float, digits: int = 1) -> str:
    """Scientific where that is shorter."""
    if value == 0 or 0.001 <= abs(value) < 1e4:
        return f"{float(f'{value:.3g}'):g}"
    return f"{value:.{digits}e}".replace("e-0", "e-").replace("e+0", "e")


def toy(mixed: Tables) -> Answer:
    question = "Which type has each tensor of the assignment's ToyModel under autocast?"
    rows = mixed["toy"]
    if rows.empty:
        return no_data("mixed-toy", question, "mixed_precision")
    devices = list(dict.fromkeys(rows["device"]))
    wide = rows.pivot_table(index="tensor", columns=["device", "autocast"], values="dtype", aggfunc="first", sort=False)
    own, text = wide[devices[-1]], []
    kept = [tensor for tensor in wide.index if (own.loc[tensor] == "fp32").all()]
    cast = [tensor for tensor in wide.index if (own.loc[tensor] == own.columns).all()]
    text.append(f"On {DEVICE_WORDS[devices[-1]]}, under fp16 as under bf16, fp32 have {listing(kept)}; the low type have"
                f" {listing(cast)}.")
    if mixed_up := [tensor for tensor in wide.index if tensor not in kept + cast]:
        text.append(f"Not the same under both: {listing(mixed_up)}.")
    for device in devices[:-1]:
        differ = [tensor for tensor in wide.index if wide[device].loc[tensor].tolist() != own.loc[tensor].tolist()]
        text.append(f"On {DEVICE_WORDS[device]} another type has"
                    f" {listing(f'{t} ({listing(dict.fromkeys(wide[device].loc[t]))})' for t in differ)}: each device has"
                    " its own"
                    " list of operations that stay in fp32." if differ else f"On {DEVICE_WORDS[device]} the types are the"
                                                                            " same.")
    table = wide.set_axis([f"{autocast} on {DEVICE_WORDS[device]}" for device, autocast in wide.columns], axis=1)
    return Answer("mixed-toy", question, " ".join(text), "", {"kept": len(kept), "cast": len(cast)},
                  [("Types noted by hooks on the running model.", table.reset_index())], [], runs_of(rows))


def norms(mixed: Tables) -> Answer:
    question = "Which parts of LayerNorm and RMSNorm are sensitive, and is that still so in bf16?"
    table = mixed["norms"]
    if table.empty:
        return no_data("mixed-norms", question, "mixed_precision")
    rows = pick(table, device=table["device"].iloc[-1])
    text, harmless = [f"Normal numbers times a scale from {tiny(rows['scale'].min(), 0)} to {tiny(rows['scale'].max(), 0)},"
                      " each step of the norm in one type; a"
                      f" quantity counts as lost where more than {percent(LOST)} of its values overflow or wrongly become"
                      " zero."], []
    for dtype in LOW:
        text.append(PARAGRAPH)
        own = pick(rows, dtype=dtype)
        over, gone = own[own["nonfinite"] > LOST], own[own["zero"] > LOST]
        if over.empty and gone.empty:
            harmless.append(dtype)
            text.append(f"{dtype} loses nothing at any scale: it only rounds.")
        else:
            for norm in own["norm"].unique():
                high, low = pick(over, norm=norm), pick(gone, norm=norm)
                kinds = [("overflow", high, "min", "from"), ("become zero", low[low["scale"] < 1], "max", "up to"),
                         ("become zero at large scales, being divided by an overflow", low[low["scale"] >= 1], "min",
                          "from")]
                text.append(f"{norm} in {dtype}: " + "; ".join(f"{words}: {by_scale(found, which, word)}" for words, found,
                                                               which, word in kinds if len(found)) + ".")
        output = pick(own, quantity="output")
        good = output[(output["relative_error"] < NORM_OFF) & (output["nonfinite"] <= LOST) & (output["zero"] <= LOST)]
        ranges = good.groupby("norm", sort=False)["scale"].agg(["min", "max"])
        text.append(f"The output in {dtype} is right to {percent(NORM_OFF)} at scales " + listing(
            f"{tiny(r['min'], 0)} to {tiny(r['max'], 0)} ({norm})" for norm, r in ranges.iterrows()) + "." if len(ranges)
                    else f"The output in {dtype} is right nowhere.")
    wide = pick(rows, quantity="output").pivot_table(index=["norm", "scale"], columns="dtype",
                                                     values="relative_error").dropna()
    off = wide[wide["fp16"] < NORM_OFF].median()
    text.append(PARAGRAPH)
    text.append(f"Where all types give an output, its median relative error is"
                f" {listing(f'{tiny(off[name])} in {name}' for name in DTYPES)}.")
    variances = rows[(rows["dtype"] == "fp16") & rows["quantity"].isin(["variance", "mean square"])]
    under = variances[(variances["zero"] > LOST) & (variances["scale"] < 1)]
    under = under.merge(pick(rows, dtype="fp16", quantity="output"), on=["norm", "scale"], suffixes=("", "_output"))
    kept = under[under["relative_error_output"] < NORM_OFF]
    if len(kept):
        text.append(f"At scale {tiny(kept['scale'].max(), 0)} fp16's variance is zero and its output still right: so far"
                    " below the square root of epsilon"
                    f" ({tiny(EPS**0.5)}) epsilon alone decides.")
    coarse = pick(rows, dtype="bf16").groupby(["norm", "quantity"], sort=False)["relative_error"].median()
    text.append(f"What bf16 rounds most is {coarse.idxmax()[0]}'s {coarse.idxmax()[1]}: {percent(coarse.max(), 1)} off in"
                " the median"
                + (", a sum whose terms cancel." if coarse.idxmax()[1] == "mean" else "."))
    finding, over = "", variances[variances["nonfinite"] > LOST]
    if len(over) and "bf16" in harmless:
        finding = (f"**A norm in fp16 loses its variance to overflow from inputs of scale {tiny(over['scale'].min(), 0)}"
                   " on; in bf16 nothing is lost, only rounded**:"
                   f" to {tiny(off['bf16'])} of the output, where fp32 rounds to {tiny(off['fp32'])}.")
        text.append("So in fp16 a norm has to leave the type for its range, in bf16 only for its digits.")
    shown = rows[rows["dtype"].isin(LOW) & (rows["quantity"] != "input")]
    shown = shown.assign(cell=[norm_cell(r) for r in shown.itertuples()])
    shown = shown.pivot(index=["norm", "dtype", "quantity"], columns="scale", values="cell")
    shown = shown.reindex([key for norm, own in rows[rows["quantity"] != "input"].groupby("norm", sort=False)
                           for dtype in LOW
                           for key in [(norm, dtype, quantity) for quantity in dict.fromkeys(own["quantity"])]]).fillna("– ↑")
    shown.columns = [tiny(value, 0) for value in shown.columns]
    return Answer("mixed-norms", question, joined(text), finding, off.to_dict(),
                  [("By scale of the inputs: median relative error against float64; ↑ overflowed (in the last column the"
                    " input itself), ↓ became zero.",
                    shown.reset_index())], [("mixed_norms", "Every quantity inside both norms over twelve decades of inputs")], runs_of(table))


def by_scale(rows: pd.DataFrame, which: str, word: str) -> str:
    """Quantities by the scale from (or up to) which they are lost: "squares and variance from 100"."""
    at = rows.groupby("quantity", sort=False)["scale"].agg(which)
    return ", ".join(f"{listing(names)} {word} {tiny(value, 0)}" for value,
                     names in at.groupby(at, sort=True).groups.items())


def norm_cell(row) -> str:
    text = "–" if pd.isna(row.relative_error) else f"{row.relative_error:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{text} {'↑' if row.nonfinite > LOST else ''}{'↓' if row.zero > LOST else ''}".strip()


def factor(row) -> str:
    """A speed-up with its interval; "none" where there is no change."""
    if row.change == "none":
        return "– none"
    return f"{number(row.speedup)} [{number(row.speedup_low)}, {number(row.speedup_high)}]"


def factor_words(row) -> str:
    if row.change == "none":
        return "unchanged"
    return f"{number(row.speedup)} times as fast" if row.change == "faster" else f"{number(1 / row.speedup)} times as long"


def speed(mixed: Tables, times: pd.DataFrame, operations: pd.DataFrame) -> Answer:
    """``times`` is the benchmark's, whose fp32 is measured here again; ``operations`` the nsys study's in fp32."""
    question = "How much faster is lower precision than fp32, by phase, and how does that change with the model's size?"
    rows = mixed["speedups"]
    if rows.empty:
        return no_data("mixed-speed", question, "mixed_precision")
    walls, (_, context) = rows[rows["phase"] == WHOLE], reference(rows)
    precisions = [precision for precision in OTHERS if precision in set(walls["precision"])]
    parts, numbers = [], {}
    for precision in precisions:
        own = pick(walls, precision=precision, mode="step", context_length=context)
        first, last = own.iloc[0], own.iloc[-1]
        numbers |= {f"{precision}_first": first.speedup, f"{precision}_last": last.speedup}
        trend = (", more with every size" if own["speedup"].is_monotonic_increasing
                 else ", not more with every size") if len(own) > 1 else ""
        parts.append(f"{precision} {number(first.speedup)} ({first['size']})" + (f" to {number(last.speedup)}"
                                                                                 f" ({last['size']}){trend}" if len(own) > 1 else ""))
    text = [f"A full step at context {context}, fp32's median time over the other's: {'; '.join(parts)}."]
    best, largest = walls.loc[walls["speedup"].idxmax()], walls["size"].iloc[-1]
    text.append(f"The most of all is {number(best.speedup)}: {best.precision} in {MODE_WORDS[best['mode']]} of"
                f" {best['size']} at context {best.context_length}.")
    for precision in precisions if len(precisions) == 1 else [p for p in ("bf16",) if p in precisions]:
        own = pick(rows, size=largest, context_length=context, mode="step", precision=precision).set_index("phase")
        text.append(f"By phase of {largest}'s step in {precision}:"
                    f" {listing(f'{phase} {factor_words(own.loc[phase])}' for phase in PHASES if phase in own.index)}.")
    steps = pick(walls, mode="step")
    beyond = steps[steps["context_length"] == 2 * context].merge(steps[steps["context_length"] == context],
                                                                 on=["size", "precision"], suffixes=("", "_before"))
    if len(beyond):
        less = beyond[beyond["speedup"] < beyond["speedup_before"]]
        text.append(f"From context {context} to {2 * context} the step's speed-up falls in {len(less)} of {len(beyond)}"
                    f" cells{_products_by_context(operations, context)}.")
    if {"bf16", "fp16"} <= set(precisions):
        pair = steps[steps["precision"] == "bf16"].merge(steps[steps["precision"] == "fp16"], on=["run_id"],
                                                         suffixes=("", "_fp16"))
        text.append(f"fp16's step takes {span(pair['median_ms_fp16'] / pair['median_ms'])} times as long as bf16's.")
    text.append(PARAGRAPH)
    counts = walls["change"].value_counts()
    text.append(f"Of {len(walls)} comparisons of a whole pass or step {counts.get('faster', 0)} are faster than fp32,"
                f" {counts.get('slower', 0)} slower, and"
                f" {counts.get('none', 0)} show no change (the interval holds 1, or the medians are within {percent(SAME)}).")
    again = same_as_benchmark(mixed, times)
    if len(again):
        text.append("fp32 is measured here again, in other processes than the benchmark's. Its medians are apart by " + " and by ".join(
            f"{percent(own['off'].max(), 1)} at most {'in cells with launch-bound phases' if bound else 'in the others'}"
            f" ({len(own)})"
            for bound, own in again.groupby("bound", sort=False)) + "; every ratio here is of two medians from one process.")
    missing = mixed["times"][mixed["times"]["status"] != "ok"]
    for (precision, cause), own in missing.groupby(["precision", "cause"]):
        where = "" if len(own) == len(pick(mixed["times"], precision=precision)) else " in " + listing(
            f"{MODE_WORDS[r['mode']]} of {r['size']} at {r.context_length}" for _, r in own.iterrows())
        text.append(f"Not measured: {precision}{where} ({cause}).")
    low = pick(steps, precision="bf16") if "bf16" in precisions else pick(steps, precision=precisions[0]) if precisions else steps
    finding = ""
    if len(low):
        name, least, most = low["precision"].iloc[0], low.loc[low["speedup"].idxmin()], low.loc[low["speedup"].idxmax()]
        ends = [f"{number(r.speedup)} times ({r['size']}, context {r.context_length})"
                for r in ((least, most) if len(low) > 1 else (most,))]
        finding = (f"**A full step in {name} is {' to '.join(ends)} as fast as in fp32**"
                   + (f", and slower than fp32 in {count(int((low['change'] == 'slower').sum()), 'case')} of {len(low)}."
                      if (low["change"] == "slower").any() else "."))
    tables = []
    for mode, words in MODE_WORDS.items():
        own = pick(walls, mode=mode)
        if len(own):
            wide = own.assign(cell=[factor(r) for r in own.itertuples()])
            wide = wide.pivot(index=["size", "context_length"], columns="precision", values="cell")
            wide = wide.reindex(columns=precisions).fillna("–")
            wide.insert(0, "fp32 (ms)", own.groupby(["size", "context_length"],
                                                    observed=True)["fp32_ms"].first().map(number))
            tables.append((f"{words.capitalize()}: fp32's median wall time over the other's [95% bootstrap interval of the"
                           " ratio].",
                           wide.rename_axis(["size", "context"]).reset_index()))
    phases = rows[(rows["mode"] == "step") & (rows["phase"] != WHOLE) & (rows["context_length"] == context)]
    wide = phases.assign(cell=[factor(r) for r in phases.itertuples()])
    wide = wide.pivot(index=["size", "precision"], columns="phase", values="cell")
    tables.append((f"The full step's phases at context {context}, likewise.",
                   wide[[phase for phase in PHASES if phase in wide]].reset_index()))
    return Answer("mixed-speed", question, joined(text), finding, numbers, tables,
                  [("mixed_speed", "How many times as fast as fp32, by size")], runs_of(rows))


def _products_by_context(operations: pd.DataFrame, context: int) -> str:
    """How the products' share of fp32's step changes from a context to its double, as the end of a sentence; empty without profiles."""
    rows = parts(operations)
    if rows.empty:
        return ""
    share = (rows["matrix products"] / rows[list(PARTS)].sum(axis=1)).groupby(rows["context_length"]).median()
    if not {context, 2 * context} <= set(share.index):
        return ""
    falls = "falls" if share[2 * context] < share[context] else "does not fall"
    return (f"; in fp32's profiles the products' share of the step {falls}, from {percent(share[context])} to"
            f" {percent(share[2 * context])} (medians over sizes)")


def same_as_benchmark(mixed: Tables, times: pd.DataFrame) -> pd.DataFrame:
    """fp32's cells that the benchmark study has too, with ``off`` (how many times the smaller median of wall time the larger is, less
    one) and ``bound`` (whether a phase of it is launch-bound here)."""
    other = matrix(times)
    if other.empty:
        return other
    keys = ["size", "context_length", "mode"]
    here, there = (pick(table, phase=WHOLE, status="ok", precision="fp32").astype({"size": str})
                   for table in (mixed["times"], other))
    both = here.merge(there[[*keys, "median_ms"]], on=keys, suffixes=("", "_benchmark"))
    bound = both["launch_bound_share"] > 0 if "launch_bound_share" in both else False
    medians = both[["median_ms", "median_ms_benchmark"]]
    return both.assign(off=medians.max(axis=1) / medians.min(axis=1) - 1, bound=bound)


def with_cause(mixed: Tables) -> pd.DataFrame:
    """``speedups`` with ``cause``: why that phase or step would be slower than in fp32, by its clocks."""
    times, keys = pick(mixed["times"], status="ok"), ["run_id", "precision", "mode", "phase"]
    if "launch_bound_share" not in times:
        return mixed["speedups"].assign(cause="the processor's own work")
    # How far the host is ahead of the GPU when a phase begins: at the end of the one before.
    following = dict(zip(PHASES, PHASES[1:]))
    ahead = times.assign(phase=times["phase"].map(following), ahead_ms=times["trailing_ms"]).dropna(subset=["phase"])
    ahead = ahead[[*keys, "ahead_ms"]]
    rows = mixed["speedups"].merge(times[[*keys, "launch_bound_share"]], on=keys).merge(ahead, on=keys, how="left")
    return rows.assign(cause=[_cause(row) for row in rows.itertuples()])


def _cause(row) -> str:
    if row.phase == "optimizer" and row.precision == "fp16":
        return "the gradient scaler's work"
    if row.launch_bound_share >= 0.5:
        return "limited by the host's launches"
    if row.ahead_ms < row.median_ms - row.fp32_ms:
        return "the GPU had caught up and waits for the phase's first launches"
    if row.phase == "loss":
        return "the loss's cast to fp32" if row.precision in LOW else "not told apart by these clocks"
    return "the GPU's own work"


def slower(mixed: Tables, times: pd.DataFrame, operations: pd.DataFrame) -> Answer:
    """``times`` is the benchmark's table, ``operations`` the nsys study's in fp32."""
    question = "Where is lower precision slower, and why?"
    if mixed["speedups"].empty:
        return no_data("mixed-slower", question, "mixed_precision")
    rows = with_cause(mixed)
    worse, text, tables, finding = rows[rows["change"] == "slower"], [], [], ""
    if worse.empty:
        text.append(f"Nowhere: of {len(rows)} comparisons of a phase, pass or step none is slower than fp32.")
    else:
        whole = worse[worse["phase"] == WHOLE]
        where = whole.groupby(["size", "context_length"],
                              observed=True)["precision"].agg(lambda p: "/".join(dict.fromkeys(p)))
        text.append(f"{count(len(whole), 'whole pass').replace('passs', 'passes')} or steps of"
                    f" {int((rows['phase'] == WHOLE).sum())}"
                    + (f" ({listing(f'{size} at {context}: {p}' for (size, context), p in where.items())})" if len(whole)
                       else "")
                    + f" and {count(len(worse) - len(whole), 'phase')} of {int((rows['phase'] != WHOLE).sum())} take longer"
                      " than in fp32.")
        if len(whole) and (whole["cause"] == "limited by the host's launches").all():
            finding = (f"**In each of the {len(whole)} of {int((rows['phase'] == WHOLE).sum())} passes and steps where lower precision is"
                       " slower, the host's launches set the time**, not the GPU.")
        again = same_as_benchmark(mixed, times)
        if len(whole) and len(again) and again["bound"].any():
            off = again.loc[again["bound"], "off"].max()
            beyond = int((1 / whole["speedup"] - 1 > off).sum())
            text.append(f"fp32's own launch-bound cells differ by up to {percent(off)} from one process to another, as the"
                        " host is faster or slower;"
                        f" {beyond or 'none'} of these {len(whole)} {'is' if beyond == 1 else 'are'} slower by more than"
                        " that.")
        lost = worse.assign(lost=worse["median_ms"] - worse["fp32_ms"], ratio=1 / worse["speedup"])
        table = lost.groupby(["cause", "phase", "precision"], sort=False).agg(
            cells=("ratio", "size"), sizes=("size", lambda s: ", ".join(dict.fromkeys(map(str, s)))),
            low=("ratio", "min"), high=("ratio", "max"), lost=("lost", "max")).reset_index()
        text.append(PARAGRAPH)
        for cause, own in table.groupby("cause", sort=False):
            what = own.groupby("phase", sort=False)["cells"].sum()
            text.append(f"{capital(cause)}:"
                        f" {listing(f'{phase_words(phase)} in {n}' for phase, n in what.items())},"
                        f" {span([own['low'].min(), own['high'].max()])} times"
                        f" fp32's time, {ms(own['lost'].max())} more at most.")
        tables.append(("Slower than fp32, by cause, phase and precision; cells are sizes, contexts and modes.", pd.DataFrame(
            {"cause": table["cause"], "phase": table["phase"].map(phase_words), "precision": table["precision"],
             "cells": table["cells"], "sizes": table["sizes"],
             "times as long": [span([a, b]) for a, b in zip(table["low"], table["high"])],
             "longer by at most": table["lost"].map(ms)})))
    text.append(PARAGRAPH)
    if "ahead_ms" in rows:
        optimizer = rows[(rows["phase"] == "optimizer") & (rows["precision"] != "fp16")]
        idle = optimizer["ahead_ms"] < 0.1 * optimizer["median_ms"]
        if idle.any() and (~idle).any():
            text.append("The optimizer's tensors are fp32 in every precision. Where the host is ahead of the GPU when it"
                        " begins, its time in TF32 and bf16 is"
                        f" {span(1 / optimizer.loc[~idle, 'speedup'], digits=4)} times fp32's ({int((~idle).sum())} cells);"
                        " where the GPU, faster now, has caught up,"
                        f" {span(1 / optimizer.loc[idle, 'speedup'])} times ({int(idle.sum())}), since it first waits for"
                        f" launches.{_same_kernels(mixed, operations)}")
        scaler = rows[(rows["phase"] == "optimizer") & (rows["precision"] == "fp16")].merge(
            rows[(rows["phase"] == "optimizer") & (rows["precision"] == "bf16")][["run_id", "median_ms"]], on="run_id", suffixes=("", "_bf16"))
        if len(scaler):
            extra = scaler["median_ms"] / scaler["median_ms_bf16"] - 1
            text.append("fp16's scaler (unscaling all gradients, looking for infinities, asking the GPU for the result)"
                        " makes the optimizer phase"
                        f" {shares(extra)} longer than bf16's.")
    low = mixed["profiles"]
    if len(low) and len(operations):
        more = (launches(low) / launches(operations)).dropna()
        if len(more):
            precision = low["precision"].iloc[0]
            verb = "launches" if "cuda" in set(mixed["times"]["device"]) else "runs"
            text.append(f"A step in {precision} {verb} {span(more)} times as many operations as in fp32 (profiles):"
                        " autocast's casts.")
    return Answer("mixed-slower", question, joined(text), finding,
                  {"slower": len(worse), "slower_whole": int((worse["phase"] == WHOLE).sum())}, tables, [],
                  runs_of(worse if len(worse) else rows))


def _same_kernels(mixed: Tables, operations: pd.DataFrame) -> str:
    """Whether the optimizer's kernels themselves take the same time in both profiles, as a sentence; empty without them."""
    low, base = parts(mixed["profiles"]), parts(operations)
    if low.empty or base.empty:
        return ""
    both = low.merge(base, on=["size", "context_length"], suffixes=("", "_fp32"))
    ratio = both["optimizer"] / both["optimizer_fp32"]
    if ratio.empty or (ratio - 1).abs().max() > SAME:
        return ""
    return f" Its kernels themselves take the same time in both profiles ({span(ratio, digits=4)} times)."


def launches(operations: pd.DataFrame) -> pd.Series:
    """Operations that one full step launches, by size and context."""
    steps = pick(operations, mode="step")
    return steps.assign(n=steps["count"] / steps["steps"]).groupby(["size", "context_length"], observed=True)["n"].sum()


def phase_words(phase: str) -> str:
    return "whole pass or step" if phase == WHOLE else phase


def casts(mixed: Tables) -> Answer:
    question = "Which operations of the Transformer run in which type, and what do the casts cost?"
    census, cost = mixed["census"], mixed["casts"]
    if census.empty and cost.empty:
        return no_data("mixed-casts", question, "mixed_precision")
    text, tables, finding, numbers = [], [], "", {}
    if len(census):
        size, context = census["size"].iloc[0], census["context_length"].iloc[0]
        census = census[census["operation"] != "zeros_like"]  # AdamW's state, made in the first step only
        named = census.assign(kind=[kind_of(r.operation, r.reads, r.writes) for r in census.itertuples()])
        for autocast, own in named.groupby("autocast", sort=False):
            n = own.groupby("kind")["count"].sum()
            counted = listing(f"{n[kind]:,} {words}" for kind, words in KINDS.items() if kind in n)
            text.append(f"One step of {size} at context {context}, under {autocast}: {counted}.")
        brain = pick(named, autocast="bf16")
        by_phase = brain[brain["kind"] == "cast"].groupby("phase", sort=False)["count"].sum()
        text.append(f"Its casts under bf16 by phase: {listing(f'{phase} {n}' for phase, n in by_phase.items())}.")
        lossy = [autocast for autocast, own in named[named["operation"] == "_log_softmax"].groupby("autocast", sort=False)
                 if (own["kind"] == "low").all()]
        if lossy:
            text.append(f"The loss's log-softmax itself runs in the low type ({listing(lossy)}): only its result is cast to"
                        " fp32. Softmax's exponentials and sums inside"
                        f" attention run {'in fp32' if (brain.loc[(brain['operation'] == 'exp'), 'kind'] == 'fp32').all() else 'in the low type'}.")
        numbers |= {"operations": int(brain["count"].sum()), "casts": int(by_phase.sum())}
        shown = brain[(brain["kind"] != "cast") & (brain["phase"] != "optimizer")]
        shown = shown.groupby(["phase", "kind", "operation"], sort=False)["count"].sum().reset_index()
        rows = [{"phase": phase, "types": KINDS[kind],
                 "operations (times)": ", ".join(f"`{r.operation}` {r.count_}" for r in own.rename(
            columns={"count": "count_"}).itertuples())} for (phase, kind),
                own in shown.groupby(["phase", "kind"], sort=False)]
        tables.append((f"Operations below autocast and autograd under bf16, {size} at context {context}, views and"
                       " allocations left out.", pd.DataFrame(rows)))
    if len(cost):
        cost = cost.assign(share=cost["casts_ms"] / cost["step_ms"])
        clock = "operations' time on the GPU" if "cuda" in set(cost["device"]) else "operators' time"
        for precision, own in cost.groupby("precision", sort=False):
            text.append(f"In {precision} casts take {shares(own['share'])} of a step's {clock} (torch.profiler),"
                        f" {span(own['casts_ms'], ' ms')}.")
        worst = cost.loc[cost["share"].idxmax()]
        finding = (f"**Changing types takes {shares(cost['share'])} of a full step's {clock} under autocast**, most for"
                   f" {worst['size']} in {worst.precision}.")
        numbers["worst"] = worst.share
        shown = cost.assign(a=cost["casts_ms"].map(number), b=cost["step_ms"].map(number),
                            c=[percent(v, 1) for v in cost["share"]])
        tables.append((f"Casts of one full step, context {listing(map(str, sorted(cost['context_length'].unique())))}.",
                       shown[["size", "precision", "casts", "a", "b",
                              "c"]].set_axis(["size", "autocast", "casts", "casts (ms)", "all (ms)", "share"], axis=1)))
    return Answer("mixed-casts", question, " ".join(text), finding, numbers, tables, [],
                  sorted({run for table in (census, cost) if len(table) for run in runs_of(table)}))


KINDS = {"low": "in the low type", "fp32": "in fp32", "both": "that take or give both", "cast": "casts"}


def kind_of(operation: str, reads: str, writes: str) -> str:
    """cast, low, both or fp32 (or wider, or no float at all), by the types that go in and come out."""
    if operation == "_to_copy":
        return "cast"
    given = set(f"{reads}, {writes}".split(", "))
    low, wide = given & set(LOW), given & {"fp32", "float64"}
    return "both" if low and wide else "low" if low else "fp32"


# What a step's device time goes into, of operations by phase, region and family: the first that fits.
PARTS = {"matrix products": lambda o: o["family"] == MATMUL,
         "optimizer": lambda o: o["phase"] == "optimizer",
         "casts and copies": lambda o: o["family"] == CASTS,
         "softmax, mask, scale": lambda o: o["region"].isin(["attention.softmax", "attention.mask", "attention.scores"]),
         "norms": lambda o: o["region"] == "norm",
         "summing gradients": lambda o: o["region"] == "gradient accumulation",
         "the rest": lambda o: o["family"].notna()}


def parts(operations: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of a full step, for each size, context and precision, by :data:`PARTS`."""
    rows = pick(operations, mode="step") if len(operations) else operations
    if rows.empty:
        return pd.DataFrame()
    part = pd.Series("", index=rows.index)
    for name, fits in PARTS.items():
        part = part.where((part != "") | ~fits(rows), name)
    rows = rows.assign(part=pd.Categorical(part, list(PARTS)), ms=rows["total_ns"] / rows["steps"] / 1e6)
    table = rows.groupby(["size", "context_length", "precision", "part"], observed=True)["ms"].sum().unstack(fill_value=0.0)
    return table.reindex(columns=list(PARTS), fill_value=0.0).reset_index()


def left(mixed: Tables, operations: pd.DataFrame) -> Answer:
    """``operations`` is the nsys study's table in fp32."""
    question = "What of the step does low precision not speed up, and how much could faster products still give?"
    low = parts(mixed["profiles"])
    low = low[low["precision"].isin(LOW)] if len(low) else low
    if low.empty:
        return no_data("mixed-left", question, "mixed_precision")
    names, precision = list(PARTS), low["precision"].iloc[0]
    total = low[names].sum(axis=1)
    products = low["matrix products"] / total
    limit = 1 / (1 - products)
    clock = "operations' time on the GPU" if "cuda" in set(mixed["profiles"]["device"]) else "operators' time"
    rest = low[names[1:]].div(total, axis=0)
    order = rest.mean().sort_values(ascending=False).index
    text = [f"In a full step in {precision} at context {low['context_length'].iloc[0]}, matrix products are"
            f" {listing(f'{percent(p)} ({size})' for p, size in zip(products, low['size']))} of the {clock}. If they cost"
            " nothing at all, the step's operations"
            f" would be 1 / (1 − share) = {span(limit)} times as fast (Amdahl), and no faster product can give more.",
            f"What is left: {listing(f'{name} {shares(rest[name])}' for name in order if rest[name].max() >= 0.01)}."]
    before, tables = parts(operations), []
    both = low.merge(before, on=["size", "context_length"], suffixes=("", "_fp32")) if len(before) else before
    if len(both):
        gains = pd.DataFrame({name: both[f"{name}_fp32"] / both[name] for name in names})
        text.append(f"fp32's time over {precision}'s, by part: {listing(f'{name} {span(gains[name])}' for name in names)}.")
        was = both["matrix products_fp32"] / both[[f"{name}_fp32" for name in names]].sum(axis=1)
        text.append(f"In fp32 the products were {shares(was)} of it.")
        none = [name for name in names[1:] if (gains[name] < 1 + SAME).all()]
        text.append(f"Low precision makes {listing(none)} no faster at any size." if none else "")
    waits = pick(mixed["times"], status="ok", phase=WHOLE, mode="step",
                 precision=precision) if len(mixed["times"]) else mixed["times"]
    if "launch_bound_share" in waits:
        waits = waits[waits["context_length"].isin(low["context_length"]) & (waits["launch_bound_share"] > 0)]
        text.append("It is less of the wall time where the host sets the pace: "
                    + listing(f"{percent(w['launch_bound_share'])} of {w['size']}'s step is in launch-bound phases" for _,
                              w in waits.iterrows()) + "." if len(waits) else
                    "At this context no phase of any size is launch-bound, so the wall time is the GPU's.")
    finding = (f"**However fast matrix products become, a {precision} step's operations get at most {span(limit)} times as"
               " fast**:"
               f" {shares(1 - products)} of their time is something else, {order[0]} most.")
    shown = low[["size", "context_length"]].assign(**{name: [f"{number(v)} ({percent(v / t)})" for v,
                                                             t in zip(low[name], total)] for name in names},
                                                   limit=[f"{number(v)} times" for v in limit])
    tables.append((f"A full step in {precision} by part: ms of {clock} (share), and the most that faster products could"
                   " give.",
                   shown.rename(columns={"context_length": "context", "limit": "at most"})))
    return Answer("mixed-left", question, " ".join(filter(None, text)), finding,
                  {"limit_low": limit.min(), "limit_high": limit.max()}, tables,
                  [("mixed_left", "A step by part, fp32 beside low precision")], runs_of(mixed["profiles"]))


def memory(mixed: Tables) -> Answer:
    question = "What does lower precision do to peak memory?"
    rows = mixed["times"]
    if rows.empty:
        return no_data("mixed-memory", question, "mixed_precision")
    rows = rows[(rows["phase"] == WHOLE) & rows["peak_allocated_mib"].notna()]
    if rows.empty:
        return Answer("mixed-memory", question, "Not measurable here: PyTorch counts allocations on a GPU only.",
                      runs=runs_of(mixed["times"]))
    keys = ["size", "context_length", "mode"]
    peaks, times = (rows.pivot_table(index=keys, columns="precision", values=column, observed=True)
                    for column in ("peak_allocated_mib", "median_ms"))
    ratio, text, ranges = (peaks["bf16"] / peaks["fp32"]).dropna(), [], {}
    for mode, words in MODE_WORDS.items():
        own = ratio[ratio.index.get_level_values("mode") == mode]
        if len(own):
            ranges[mode] = own
            text.append(f"{words} {change_words(own.min())} ({own.idxmin()[0]}, context {own.idxmin()[1]}) to"
                        f" {change_words(own.max())}"
                        f" ({own.idxmax()[0]}, context {own.idxmax()[1]})")
    text = [f"bf16's peak against fp32's: {'; '.join(text)}."]
    more, less = ratio[ratio > 1 + SAME], ratio[ratio < 1 - SAME]
    text.append(f"It takes less in {len(less)} of {len(ratio)} cells and more in {len(more)}"
                + (f" ({', '.join(f'{MODE_WORDS[mode]} {n}' for mode, n in more.groupby(level='mode', sort=False).size().items())})" if len(more) else "") + ".")
    weights = "The weights, their gradients and AdamW's moments stay in fp32. Autocast adds a low copy of each weight and keeps it until its context ends"
    text.append(weights + ("; forward alone saves no activations that could make up for it." if "forward" in ranges
                           and ranges["forward"].min() > 1 else "."))
    steps = pick(rows, mode="step")
    level = pick(steps, precision="bf16").merge(pick(steps, precision="fp32")[["run_id", "peak_allocated_mib"]],
                                                                                  on="run_id", suffixes=("", "_fp32"))
    level = level[(level["peak_allocated_mib"] / level["peak_allocated_mib_fp32"] - 1).abs() < SAME / 2]
    if len(level):
        times_weights = level["peak_allocated_mib_fp32"] * 2**20 / (4 * level["parameters"])
        text.append(f"Where the full step saves nothing ({len(level)} cells), its peak is {span(times_weights)} times the"
                    " fp32 weights: weights, gradients, two moments and what"
                    " AdamW needs beside them, all of it fp32, and not the activations.")
    same = [(peaks[p] / peaks[q] - 1).abs().max() < 0.001 for p,
            q in (("fp16", "bf16"), ("tf32", "fp32")) if {p, q} <= set(peaks.columns)]
    if same and all(same):
        text.append("fp16 takes what bf16 takes and TF32 what fp32 takes: types of the same width.")
    step = ranges.get("step", ratio)
    finding = (f"**bf16's full step takes {change_words(step.min())} ({step.idxmin()[0]}, context {step.idxmin()[1]}) to"
               f" {change_words(step.max())} memory than fp32's**"
               if step.max() < 1 - SAME else f"**bf16's full step saves at most {percent(1 - step.min())} of fp32's"
                                             f" memory** ({step.idxmin()[0]}, context {step.idxmin()[1]})")
    if "forward" in ranges and ranges["forward"].min() > 1 + SAME:
        finding += f", and its forward alone takes {span([100 * (r - 1) for r in ranges['forward']], '%', 2)} more."
    else:
        finding += "."
    table = pd.DataFrame({"size": [key[0] for key in peaks.index], "context": [key[1] for key in peaks.index],
                          "mode": [MODE_WORDS[key[2]] for key in peaks.index]})
    for precision in ("fp32", "bf16", "fp16"):
        if precision in peaks:
            table[precision] = [f"{number(mib / 1024)} GiB, {ms(time)}" if mib == mib else "–" for mib,
                                time in zip(peaks[precision], times[precision])]
    table["bf16 / fp32"] = [percent(value) if value == value else "–" for value in ratio.reindex(peaks.index)]
    return Answer("mixed-memory", question, " ".join(text), finding, {"low": ratio.min(), "high": ratio.max()},
                  [("Peak of allocated memory and median wall time.", table)],
                  [("mixed_memory", "bf16's peak memory against fp32's")], runs_of(rows))


def change_words(ratio: float) -> str:
    return "as much" if abs(ratio - 1) < SAME / 2 else f"{percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"


def health(mixed: Tables) -> Answer:
    question = "Are loss and gradients still right?"
    rows = health_rows(mixed)
    if rows.empty:
        return no_data("mixed-health", question, "mixed_precision")
    by_way = dict(list(rows.groupby("way", sort=False)))
    text = ["On the same fresh weights and batch, over all sizes and contexts, against fp32: the loss is off by at most "
            + listing(f"{tiny(own['loss_off'].max())} ({way})" for way, own in by_way.items()) + "; the gradient's norm by"
                                                                                                 " at most "
            + listing(f"{tiny(own['norm_off'].max())} ({way})" for way, own in by_way.items()) + "."]
    finding, numbers = "", {way: own["zero"].max() for way, own in by_way.items()}
    bare, scaled = by_way.get("fp16 unscaled"), by_way.get("fp16 scaled")
    if bare is not None and scaled is not None:
        text.append(f"Of the gradient's elements that are not zero in fp32, fp16 makes zero {lost_words(bare['zero'])}"
                    f" without scaling and {lost_words(scaled['zero'])} with the"
                    f" loss scaled by {scaled['scale'].iloc[0]:,.0f};"
                    f" {'none overflows' if scaled['nonfinite'].max() == 0 else lost_words(scaled['nonfinite']) + ' overflow'} at that scale.")
        longer = bare.groupby("context_length")["zero"].median()
        if len(longer) > 1 and longer.is_monotonic_increasing:
            text.append(f"The longer the context, the more is lost without scaling ({percent(longer.iloc[0], 3)} at"
                        f" {longer.index[0]}, {percent(longer.iloc[-1], 3)} at"
                        f" {longer.index[-1]}, medians over sizes): the loss is a mean over tokens, so each token's"
                        " gradient shrinks.")
        if bare["zero"].max() > FEW:
            finding = (f"**Without a gradient scaler fp16 loses up to {percent(bare['zero'].max(), 2)} of the gradient's"
                       " elements to zero, with it"
                       f" {lost_words(scaled['zero'])}**; the norm is off by up to {tiny(bare['norm_off'].max())} and"
                       f" {tiny(scaled['norm_off'].max())}.")
    if "bf16" in by_way:
        text.append(f"In bf16, with fp32's range and no scaler, {lost_words(by_way['bf16']['zero'])}"
                    f" {'become' if by_way['bf16']['zero'].max() else 'becomes'} zero.")
    _, context = reference(rows)
    shown = pick(rows, context_length=context)
    table = pd.DataFrame({"size": shown["size"], "precision": shown["way"], "loss": shown["loss"].map(lambda v: f"{v:.6f}"),
                          "loss off": shown["loss_off"].map(tiny),
                          "gradient norm off": shown["norm_off"].map(tiny), "became zero": shown["zero"].map(tiny),
                          "overflowed": shown["nonfinite"].map(tiny)})
    return Answer("mixed-health", question, " ".join(text), finding, numbers,
                  [(f"Against fp32 at context {context}; shares of the elements that are not zero in fp32.", table)],
                  [("mixed_health", "How far each precision's gradient norm is from fp32's, and what fp16 loses")],
                  runs_of(rows))


def health_rows(mixed: Tables) -> pd.DataFrame:
    """``health`` of the other precisions with loss_off and norm_off (relative, without sign) and way (``fp16 scaled``)."""
    rows = mixed["health"]
    if rows.empty:
        return rows
    base = rows.loc[rows["precision"] == "fp32", ["run_id", "loss", "gradient_norm"]]
    rows = rows[rows["precision"] != "fp32"].merge(base, on="run_id", suffixes=("", "_fp32"))
    ways = [f"fp16 {'scaled' if scale > 1 else 'unscaled'}" if precision == "fp16" else precision for precision,
            scale in zip(rows["precision"], rows["scale"])]
    return rows.assign(way=ways, loss_off=(rows["loss"] / rows["loss_fp32"] - 1).abs(),
                       norm_off=(rows["gradient_norm"] / rows["gradient_norm_fp32"] - 1).abs())


def lost_words(values: pd.Series) -> str:
    if values.max() == 0:
        return "none"
    if values.max() < FEW:
        return f"fewer than 1 in {10 ** int(-np.log10(values.max())):,}"
    return f"{percent(values.min(), 2)} to {percent(values.max(), 2)}"


def shares(values: pd.Series) -> str:
    low, high = percent(values.min()), percent(values.max())
    return low if low == high else f"{low} to {high}"


def published_pairs(published: pd.DataFrame) -> pd.DataFrame:
    """Printed times in lower precision with the fp32 time of the same report, size, context, pass and clock: a row a pair."""
    keys = ["source", "size", "context_length", "phase", "clock"]
    theirs = published.dropna(subset=["size", "phase", "precision"])
    theirs = theirs[~theirs["estimated"] & (theirs["warmup_steps"].isna() | (theirs["warmup_steps"] > 0))]
    known = theirs.assign(context_length=theirs["context_length"].fillna(-1), clock=theirs["clock"].fillna(""))
    return known[known["precision"].isin(OTHERS)].merge(pick(known, precision="fp32")[[*keys, "mean_ms", "as_printed"]],
                                                        on=keys, suffixes=("", "_fp32"))


def published_speedups(mixed: Tables, published: pd.DataFrame) -> Answer:
    question = "How do these speed-ups compare with published ones?"
    rows = mixed["speedups"]
    if rows.empty:
        return no_data("mixed-published", question, "mixed_precision")
    here_all = pd.concat([pick(rows, phase=WHOLE), pick(rows, mode="forward_backward",
                                                        phase="backward").assign(mode="backward")])
    found, used = [], set()
    for pair in published_pairs(published).to_dict("records"):
        here = pick(here_all, precision=pair["precision"], mode=pair["phase"])
        here = here[(here["size"].astype(str) == pair["size"])
                    & ((pair["context_length"] < 0) | (here["context_length"] == pair["context_length"]))]
        if len(here):
            used |= set(runs_of(here))
            theirs = pair["mean_ms_fp32"] / pair["mean_ms"]
            found.append({"report": source_name(pd.Series(pair)), "size": pair["size"],
                          "context_length": int(pair["context_length"]), "pass": pair["phase"].replace("_", " + "),
                          "precision": pair["precision"], "as printed, fp32 and low": f"{pair['as_printed_fp32']} and"
                                                                                      f" {pair['as_printed']}", "theirs": theirs,
                          "low": here["speedup"].min(), "high": here["speedup"].max()})
    if not found:
        return Answer("mixed-published", question, "None of the published pairs of times is of a size and pass measured"
                                                   " here.")
    table = by_size(pd.DataFrame(found))
    inside = ((table["theirs"] >= table["low"] * (1 - SAME)) & (table["theirs"] <= table["high"] * (1 + SAME))).sum()
    lower = (table["theirs"] < table["low"]).sum()
    text = (f"{count(len(table), 'pair')} of times printed elsewhere in fp32 and in bf16 or fp16, of a size and pass"
            f" measured here. Their speed-up is {span(table['theirs'])}; at the"
            " same size and context (at any, where none is stated) it lies between the least and the most measured here in"
            f" {inside or 'none'}, below it in {lower or 'none'}.")
    slow = table[table["theirs"] < 1]
    if len(slow):
        text += (f" Slower than fp32 {'is' if len(slow) == 1 else 'are'} {count(len(slow), 'pair')} of theirs"
                 f" ({listing(dict.fromkeys(slow['size'].astype(str)))}).")
    shown = table.assign(context=[str(c) if c > 0 else "not stated" for c in table["context_length"]],
                         a=table["theirs"].map(number),
                         b=[span([x, y]) for x, y in zip(table["low"], table["high"])])
    return Answer("mixed-published", question, text, "", {"inside": int(inside), "pairs": len(table)},
                  [("Published times in fp32 and lower precision, their speed-up, and this machine's (least to most over"
                    " contexts where none is stated).",
                    shown[["size", "context", "pass", "precision", "report", "as printed, fp32 and low", "a",
                           "b"]].rename(columns={"a": "their speed-up", "b": "here"}))],
                  [], sorted(used))
