"""The mixed-precision questions, answered from the tables of ``stepscope.mixed_precision`` and ``stepscope.numerics``."""
from fractions import Fraction

import numpy as np
import pandas as pd

from stepscope.answers import Answer, count, listing, ms, no_data, number, percent, runs_of, span
from stepscope.answers.benchmark import MODE_WORDS, pick, reference
from stepscope.answers.nsys import MATMUL
from stepscope.timing import WHOLE

LOW = ("bf16", "fp16")
SWEEP = "mixed_precision"
EXACT = 1e-12       # an error this small is of no type but of the float64 it is written in
CAST = "copy and cast"
FLOAT_FORMATS = {32: (23, 127, "fp32"), 16: (10, 15, "fp16")}  # of bits: mantissa bits, bias


def exact_value(bits: str, dtype: str) -> Fraction:
    """The number that these bits are in this type (IEEE 754; bf16 is the upper half of fp32)."""
    word, mantissa_bits, bias = int(bits, 16), *{"fp32": (23, 127), "fp16": (10, 15), "bf16": (7, 127)}[dtype]
    total = 32 if dtype == "fp32" else 16
    sign = -1 if word >> (total - 1) else 1
    exponent, mantissa = word >> mantissa_bits & (2 ** (total - 1 - mantissa_bits) - 1), word & (2**mantissa_bits - 1)
    significand = Fraction(mantissa, 2**mantissa_bits) + (1 if exponent else 0)
    return sign * significand * Fraction(2) ** (max(exponent, 1) - bias)


def accumulation(sums: pd.DataFrame, steps: pd.DataFrame) -> Answer:
    question = "0.01 added a thousand times: what comes out of each combination of types, and why?"
    if sums.empty:
        return no_data("mp-sums", question, SWEEP)
    devices = list(dict.fromkeys(sums["device"]))
    own = sums[sums["device"] == devices[-1]]
    exact = {(r.device, r.way): exact_value(r.bits, r.sum_type) for r in sums.itertuples()}
    same = all(len({exact[(device, way)] for device in devices}) == 1 for way in own["way"])
    handout = own[own["handout"]]
    fine = steps[steps["device"] == devices[-1]].set_index("dtype")
    text = ("The four loops give " + listing(f"{float(exact[(devices[-1], r.way)]):.4f} ({r.way})" for r in handout.itertuples()) + ".")
    if len(devices) > 1:
        text += " CPU and GPU give the same bits in every way." if same else " CPU and GPU do not give the same bits in every way."
    term = handout.set_index("way")
    parts = []
    for row in handout.itertuples():
        blame = "storing 0.01" if abs(row.error_of_term) > abs(row.error_of_adding) else "adding"
        parts.append(f"{row.way}: {row.error_of_term:+.2g} from storing 0.01 and {row.error_of_adding:+.2g} from adding, so it is {blame}"
                     if row.error_of_adding else f"{row.way}: {row.error_of_term:+.2g}, all from storing 0.01, since every addition is exact enough")
    text += " Their errors: " + "; ".join(parts) + "."
    into32 = [exact[(devices[-1], way)] for way in term.index if term["term_type"][way] == "fp16" and term["sum_type"][way] == "fp32"]
    if len(into32) == 2 and into32[0] == into32[1]:
        text += (" Casting the term up first changes nothing, as adding fp16 to fp32 casts it up anyway: the type of the sum decides, and"
                 " what the term lost when it was stored does not come back.")
    text += (" At 10 the next number is " + listing(f"{number(r.step_at_10, 2) if r.step_at_10 > 1e-3 else f'{r.step_at_10:.1e}'} away in {d}"
                                                    for d, r in fine.iterrows())
             + "; adding 0.01 does nothing any more at " + listing(f"{r.stops_at:g} in {d}" for d, r in fine.iterrows()))
    stopped = fine["stops_after"].dropna()
    text += ((", which the running sum reaches after " + listing(f"{n:,.0f} additions in {d}" for d, n in stopped.items())) if len(stopped) else "") + "."
    others = own[~own["handout"]]
    right = [r.way for r in others.itertuples() if abs(exact[(devices[-1], r.way)] - 10) < EXACT]
    if right:
        text += f" Exactly 10 comes out of {listing(right)}."
    worst = own.loc[own["error"].abs().idxmax()]
    finding = (f"**A thousand times 0.01 is {float(exact[(devices[-1], worst.way)]):g} in {worst.way}** and"
               f" {float(exact[(devices[-1], handout.iloc[1].way)]):.4f} in {handout.iloc[1].way}: the sum's type decides, not the term's.")
    table = pd.DataFrame([{"way": r.way, "result": _digits(exact[(devices[-1], r.way)]), "bits": f"`{r.bits}`",
                           "error": f"{float(exact[(devices[-1], r.way)] - 10):+.3g}" if exact[(devices[-1], r.way)] != 10 else "0",
                           "from storing 0.01": f"{r.error_of_term:+.3g}", "from adding": f"{r.error_of_adding:+.3g}" if r.error_of_adding else "0"}
                          for r in own.itertuples()])
    fine_table = pd.DataFrame([{"type": d, "0.01 as stored": _digits(Fraction(str(r.term))) if d != "fp32" else f"{r.term:.10f}",
                                "step at 10": f"{r.step_at_10:.3g}", "adding 0.01 does nothing from": f"{r.stops_at:g}"} for d, r in fine.iterrows()])
    return Answer("mp-sums", question, text, finding, {r.way: float(exact[(devices[-1], r.way)]) for r in own.itertuples()},
                  [("Results in full, on the " + ("GPU" if devices[-1] == "cuda" else "CPU") + "; errors against 10.", table),
                   ("How fine each type is.", fine_table)],
                  [("mp_running", "Error of the running sum over a thousand additions")], runs_of(own))


def _digits(value: Fraction) -> str:
    """Every digit of a binary fraction."""
    whole, digits = divmod(value.numerator, value.denominator)[0], ""
    rest = value - whole
    while rest and len(digits) < 30:
        rest *= 10
        digits += str(int(rest))
        rest -= int(rest)
    return f"{whole}.{digits}" if digits else str(whole)


def toy(toys: pd.DataFrame) -> Answer:
    question = "Which type has each tensor of the ToyModel under autocast?"
    if toys.empty:
        return no_data("mp-toy", question, SWEEP)
    wide = toys.pivot_table(index="tensor", columns=["device", "autocast"], values="dtype", aggfunc="first", sort=False)
    devices = list(dict.fromkeys(toys["device"]))
    own = wide[devices[-1]]
    text = []
    for autocast in own.columns:
        groups = own[autocast].groupby(own[autocast], sort=False).groups
        text.append(f"{autocast}: " + "; ".join(f"{dtype} for {listing(tensors)}" for dtype, tensors in groups.items()) + ".")
    ln = own.loc["output of ln"]
    text.append(f"LayerNorm's output is {listing(f'{ln[a]} under {a}' for a in own.columns)}"
                + (" on the GPU" if devices[-1] == "cuda" else "") + ".")
    if len(devices) > 1:
        differ = [t for t in wide.index if any(wide[devices[0]][a][t] != wide[devices[1]][a][t] for a in own.columns)]
        text.append("The CPU's autocast has the same types throughout." if not differ else
                    f"The CPU's autocast differs: " + listing(f"{t} is {wide[devices[0]][own.columns[0]][t] if wide[devices[0]][own.columns[0]][t] != own[own.columns[0]][t] else wide[devices[0]][own.columns[-1]][t]}" for t in differ)
                    + ", since its list of operations to keep in fp32 is another.")
    table = wide.copy()
    table.columns = [f"{autocast}, {'GPU' if device == 'cuda' else 'CPU'}" for device, autocast in table.columns]
    return Answer("mp-toy", question, " ".join(text), "", {}, [("Types noted by hooks on the running model.", table.reset_index())], [], runs_of(toys))


def model_types(census: pd.DataFrame, casts: pd.DataFrame) -> Answer:
    question = "Which operations of the Transformer run in which type, and what do the casts cost?"
    if census.empty:
        return no_data("mp-census", question, SWEEP)
    own = census[(census["autocast"] == "bf16")]
    is_cast = own["operation"] == "_to_copy"
    work = own[~is_cast]
    touches = work["reads"].fillna("").astype(str) + ", " + work["writes"].fillna("").astype(str)
    kind = np.select([touches.str.contains("bf16") & touches.str.contains("fp32"), touches.str.contains("bf16")], ["both", "bf16"], "fp32")
    by = work.assign(kind=kind).groupby("kind")["count"].sum()
    names = {k: listing(sorted(set(work.loc[(kind == k) & (work["phase"] == "forward"), "operation"]))) for k in ("bf16", "fp32", "both") if (kind == k).any()}
    total, cast_count = int(work["count"].sum()), int(own.loc[is_cast, "count"].sum())
    text = (f"One full step under bf16 autocast calls {total + cast_count:,} operations: {by.get('bf16', 0):,} in bf16, {by.get('fp32', 0):,} in fp32"
            f" (the optimizer's handle all parameters in one call), {by.get('both', 0):,} that read or write both, and {cast_count:,} casts"
            f" ({percent(cast_count / (total + cast_count))}). In forward, bf16: {names.get('bf16', 'none')}; fp32: {names.get('fp32', 'none')}.")
    tables = []
    if len(casts):
        share = casts["casts_ms"] / casts["step_ms"]
        bf = casts[casts["precision"] == "bf16"]
        text += (f" The casts take {percent((bf['casts_ms'] / bf['step_ms']).min(), 1)} to {percent((bf['casts_ms'] / bf['step_ms']).max(), 1)} of a bf16"
                 f" step's operation time, most for {bf.loc[(bf['casts_ms'] / bf['step_ms']).idxmax(), 'size']}.")
        shown = casts.assign(a=casts["casts_ms"].map(number), b=casts["step_ms"].map(number), c=share.map(lambda s: percent(s, 1)))
        tables.append((f"Casts of one full step under the profiler, context {casts['context_length'].iloc[0]}; ms of operations.",
                       shown[["size", "precision", "casts", "a", "b", "c"]].set_axis(["size", "autocast", "casts", "casts (ms)", "all (ms)", "share"], axis=1)))
    by_phase = own.assign(type=np.where(is_cast, "cast", pd.Series(kind, work.index).reindex(own.index).fillna("cast")))
    wide = by_phase.pivot_table(index="phase", columns="type", values="count", aggfunc="sum", fill_value=0, sort=False)
    tables.insert(0, ("Operations of one bf16 step by the types they read and write.", wide.reset_index()))
    return Answer("mp-census", question, text, "", {"casts": cast_count, "operations": total}, tables, [], runs_of(own))


def norm_sensitivity(norms: pd.DataFrame) -> Answer:
    question = "Which parts of LayerNorm and RMSNorm are sensitive, and is that still so in bf16?"
    if norms.empty:
        return no_data("mp-norms", question, SWEEP)
    device = norms["device"].iloc[-1]
    own = norms[(norms["device"] == device) & (norms["quantity"] != "input")]

    def scales(rows: pd.DataFrame) -> str:
        return ("inputs of " + ("scale " if rows["scale"].nunique() == 1 else "scales ") + span(rows["scale"], digits=1)) if len(rows) else "no inputs"
    half = own[own["dtype"] == "fp16"]
    text = []
    over, under = half[half["nonfinite"] > 0], half[(half["zero"] > 0.5)]
    first = {q: r["scale"].min() for q, r in over.groupby("quantity", sort=False)}
    if first:
        text.append("In fp16 what overflows is " + listing(f"the {q} (from scale {s:g})" for q, s in sorted(first.items(), key=lambda i: i[1]))
                    + ": squares pass 65,504 when an input passes 256, and a sum of them sooner.")
    lost = {q: r["scale"].max() for q, r in under.groupby("quantity", sort=False) if q in ("squares", "variance", "mean square")}
    if lost:
        text.append("Underflow to 0 takes more than half of " + listing(f"the {q} (up to scale {s:g})" for q, s in lost.items())
                    + "; then only the ε in the root is left.")
    wrong = half[(half["quantity"] == "output") & ((half["zero"] > 0.5) | (half["nonfinite"] > 0))]
    if len(wrong):
        text.append(f"The outputs are lost with {scales(wrong)}: the root of an infinite mean is infinite, and its reciprocal 0.")
    brain = own[own["dtype"] == "bf16"]
    broken = brain[(brain["nonfinite"] > 0) | (brain["zero"] > 0.01)]
    text.append(("In bf16 nothing overflows and nothing vanishes at any scale: it has fp32's exponent. " if broken.empty else
                 f"In bf16, too, {listing(sorted(set(broken['quantity'])))} leave the range. ")
                + f"It only rounds: outputs are off by {span(brain.loc[brain['quantity'] == 'output', 'relative_error'] * 100, '%', 2)} in the median"
                f" (fp32: {span(own.loc[(own['dtype'] == 'fp32') & (own['quantity'] == 'output'), 'relative_error'] * 1e6, ' millionths', 2)}).")
    mean = brain[(brain["norm"] == "LayerNorm") & (brain["quantity"] == "mean")]
    if len(mean):
        text.append(f"Most sensitive in bf16 is LayerNorm's mean, a sum in which large terms cancel: {percent(mean['relative_error'].median())} off in the median.")
    text.append("So fp16 needs the norm in fp32 for its range; bf16 needs it only for its digits.")
    rows = []
    for (norm, quantity), r in own.groupby(["norm", "quantity"], sort=False):
        cells = {"norm": norm, "quantity": quantity}
        for dtype in ("fp32", "fp16", "bf16"):
            t = r[r["dtype"] == dtype]
            good = t[(t["nonfinite"] == 0) & (t["zero"] < 0.01)]
            cells[f"{dtype}: good scales"] = f"{good['scale'].min():.0e} to {good['scale'].max():.0e}" if len(good) else "none"
            cells[f"{dtype}: error there"] = f"{good['relative_error'].median():.1e}" if len(good) else "–"
        rows.append(cells)
    return Answer("mp-norms", question, " ".join(text), "", {"bf16_output": brain.loc[brain["quantity"] == "output", "relative_error"].max()},
                  [("Where each quantity is neither infinite nor (in more than 1% of elements) wrongly 0, and its median relative error there.", pd.DataFrame(rows))],
                  [("mp_norms", "Error of each quantity inside RMSNorm over the inputs' scale")], runs_of(own))


def speedup(speedups: pd.DataFrame, times: pd.DataFrame) -> Answer:
    question = "How much faster is each precision than fp32, by phase and size?"
    if speedups.empty:
        return no_data("mp-speedup", question, SWEEP)
    whole = speedups[speedups["phase"] == WHOLE]
    size, context = reference(whole)
    own = pick(whole, size=size, context_length=context)
    text = (f"For {size} at context {context} against fp32: " + listing(
        f"{MODE_WORDS[mode]} " + ", ".join(f"{r.precision} {_times(r)}" for r in rows.itertuples())
        for mode, rows in own.groupby("mode", sort=False)) + ". ")
    steps = pick(whole, mode="step")
    parts = []
    for precision, rows in steps.groupby("precision", sort=False):
        low, high = rows.loc[rows["speedup"].idxmin()], rows.loc[rows["speedup"].idxmax()]
        parts.append(f"{precision} {number(low.speedup)} ({low['size']}, context {low.context_length}) to {number(high.speedup)}"
                     f" ({high['size']}, context {high.context_length})")
    text += f"Over all sizes and contexts, times as fast for the full step: {listing(parts)}."
    best = steps[steps["precision"] == "bf16"]
    finding = ""
    if len(best):
        growing = best.groupby("size", observed=True)["speedup"].median()
        low, high = best.loc[best["speedup"].idxmin()], best.loc[best["speedup"].idxmax()]
        finding = (f"**In bf16 autocast a full step is {number(low.speedup)} ({low['size']}, context {low.context_length}) to {number(high.speedup)}"
                   f" ({high['size']}, context {high.context_length}) times as fast as in fp32**")
        finding += ", more so the larger the model." if growing.is_monotonic_increasing and len(growing) > 2 else "."
    slower = speedups[(speedups["speedup_high"] < 1) & (speedups["phase"] != WHOLE)]
    text += " " + _why_slower(slower, times)
    none = speedups[(speedups["speedup_low"] <= 1) & (speedups["speedup_high"] >= 1)]
    text += f" No difference was measured in {len(none)} of {len(speedups)} cells: their interval holds 1."
    tables = []
    for mode, words in MODE_WORDS.items():
        rows = whole[whole["mode"] == mode].assign(cell=lambda t: [_times(r) for r in t.itertuples()])
        table = rows.pivot(index=["size", "context_length"], columns="precision", values="cell").reindex(
            columns=[p for p in ("tf32", "bf16", "fp16") if p in set(rows["precision"])])
        base = pick(times, mode=mode, phase=WHOLE, precision="fp32").set_index(["size", "context_length"])["median_ms"].map(number)
        table.insert(0, "fp32 (ms)", base.reindex(table.index))
        tables.append((f"{words.capitalize()}: median in fp32, and how many times as fast the others are [95% interval].",
                       table.rename_axis(["size", "context"]).fillna("–").reset_index()))
    phases = speedups[(speedups["mode"] == "step") & (speedups["phase"] != WHOLE) & (speedups["precision"] == "bf16")]
    if len(phases):
        table = phases.assign(cell=[_times(r) for r in phases.itertuples()]).pivot(index=["size", "context_length"], columns="phase", values="cell")
        tables.append(("The full step's phases in bf16, times as fast as in fp32 [95% interval].",
                       table[[p for p in ("forward", "loss", "backward", "optimizer") if p in table]].rename_axis(["size", "context"]).reset_index()))
    return Answer("mp-speedup", question, text, finding, {"step_low": steps["speedup"].min(), "step_high": steps["speedup"].max()}, tables,
                  [("mp_speedup", "Speed-up over fp32 by model size, mode and precision")], runs_of(whole))


def _times(row) -> str:
    mark = " (none)" if row.speedup_low <= 1 <= row.speedup_high else ""
    return f"{number(row.speedup)} [{number(row.speedup_low)}, {number(row.speedup_high)}]{mark}"


def _why_slower(slower: pd.DataFrame, times: pd.DataFrame) -> str:
    """Where a low precision is measurably slower, and whether the launches were the limit there."""
    if slower.empty:
        return "No phase is measurably slower in any precision."
    text = f"{count(len(slower), 'phase').capitalize()} of all runs are measurably slower: " + listing(
        f"{phase} in {precision} ({len(rows)}, down to {number(rows['speedup'].min())})" for (phase, precision), rows in
        slower.groupby(["phase", "precision"], sort=False)) + "."
    if "launch_bound_share" in times:
        keys = ["run_id", "precision", "mode", "phase"]
        bound = slower[keys].merge(times[[*keys, "launch_bound_share"]], on=keys)["launch_bound_share"] == 1
        if bound.any():
            text += (f" {int(bound.sum())} of them are launch-bound: the GPU waits for the host, which under autocast has more to launch (the"
                     " casts), and its arithmetic being faster does not show.")
        optimizer = int((slower["phase"] == "optimizer").sum())
        if optimizer:
            text += f" {count(optimizer, 'is' if False else 'phase')} {'is' if optimizer == 1 else 'are'} the optimizer, which runs in fp32 in every precision."
    return text


def what_is_left(operations: pd.DataFrame, fp32_operations: pd.DataFrame) -> Answer:
    question = "What of the step can low precision not speed up, and how much could faster matrix products still give?"
    if operations.empty:
        return no_data("mp-left", question, SWEEP)
    steps = operations[operations["mode"] == "step"]
    share = steps.pivot_table(index=["size", "context_length"], columns="family", values="total_ns", aggfunc="sum", observed=True, fill_value=0)
    total = share.sum(axis=1)
    ms_step = total / steps.groupby(["size", "context_length"], observed=True)["steps"].first() / 1e6
    parts = share.div(total, axis=0)
    limit = 1 / (1 - parts[MATMUL])
    size, context = reference(steps)
    families = parts.loc[(size, context)].drop(MATMUL).sort_values(ascending=False)
    text = (f"Of a bf16 step's operation time, {size} at context {context}, matrix products are {percent(parts[MATMUL][(size, context)])}; the rest is "
            + listing(f"{family} {percent(value)}" for family, value in families.items() if value >= 0.02) + ". "
            f"Were the products to cost nothing, the operations would take 1/(1 − {parts[MATMUL][(size, context)]:.2f}) ="
            f" {number(limit[(size, context)])} times less (Amdahl's law); over the sizes {span(limit)}.")
    base = fp32_operations[fp32_operations["mode"] == "step"] if len(fp32_operations) else fp32_operations
    tables = []
    if len(base):
        other = base.pivot_table(index=["size", "context_length"], columns="family", values="total_ns", aggfunc="sum", observed=True, fill_value=0)
        other_steps = base.groupby(["size", "context_length"], observed=True)["steps"].first()
        low_steps = steps.groupby(["size", "context_length"], observed=True)["steps"].first()
        both = [key for key in share.index if key in other.index]
        ratio = pd.DataFrame({family: [(other.loc[k].get(family, 0) / other_steps[k]) / (share.loc[k].get(family, 0) / low_steps[k])
                                       if share.loc[k].get(family, 0) else np.nan for k in both]
                              for family in share.columns if parts[family].max() >= 0.02}, index=pd.MultiIndex.from_tuples(both, names=share.index.names))
        gain = ratio.loc[(size, context)] if (size, context) in ratio.index else None
        if gain is not None:
            text += (" Against the fp32 profile of the same step: " + listing(
                f"{family} {number(value)} times as fast" for family, value in gain.sort_values(ascending=False).items() if np.isfinite(value)) + ".")
        tables.append(("Device time of each kernel family in fp32 over that in bf16, full step.",
                       ratio.map(number).rename_axis(["size", "context"]).reset_index()))
    table = parts[[f for f in parts if parts[f].max() >= 0.02]].map(lambda s: percent(s, 1))
    table.insert(0, "operations (ms)", ms_step.map(number))
    table["most that products could give"] = limit.map(lambda v: f"{number(v)}×")
    tables.insert(0, ("Share of a bf16 full step's operation time by kernel family, and Amdahl's limit.", table.rename_axis(["size", "context"]).reset_index()))
    return Answer("mp-left", question, text,
                  f"**In bf16 {percent(1 - parts[MATMUL].max())} to {percent(1 - parts[MATMUL].min())} of a step's operation time is no matrix product**: products that"
                  f" cost nothing would make it at most {span(limit)} times as fast.",
                  {"limit": limit[(size, context)]}, tables, [("mp_left", "What a bf16 step's device time goes into, beside fp32's")], runs_of(steps))


def memory(cells: pd.DataFrame) -> Answer:
    question = "What does each precision do to peak memory?"
    measured = cells[cells["peak_allocated_mib"].notna()] if len(cells) else cells
    if cells.empty:
        return no_data("mp-memory", question, SWEEP)
    if measured.empty:
        return Answer("mp-memory", question, "Not measurable here: PyTorch counts allocations on a GPU only.", runs=runs_of(cells))
    wide = measured[measured["status"] == "ok"].pivot_table(index=["size", "context_length", "mode"], columns="precision", values="peak_allocated_mib", observed=True)
    ratio = (wide["bf16"] / wide["fp32"]).dropna()
    more = ratio[ratio > 1.01]
    text = (f"In bf16 autocast the peak is {percent(ratio.min())} to {percent(ratio.max())} of fp32's: autocast keeps the parameters, gradients and"
            f" optimizer state in fp32 and halves what is saved of the products' and attention's tensors. "
            + (f"It is higher in {count(len(more), 'cell')} of {len(ratio)}, by up to {percent(more.max() - 1)} ({more.idxmax()[0]}, context {more.idxmax()[1]},"
               f" {MODE_WORDS[more.idxmax()[2]]}): beside the fp32 weights stand their bf16 copies, which autocast keeps until it ends, and where little"
               " else is in memory they show." if len(more) else "It is nowhere higher."))
    table = wide.map(lambda v: number(v / 1024) if np.isfinite(v) else "–").reindex(columns=[p for p in ("fp32", "tf32", "bf16", "fp16") if p in wide])
    table["bf16 / fp32"] = ratio.map(percent)
    table = table.reset_index()
    table["mode"] = table["mode"].map(MODE_WORDS)
    return Answer("mp-memory", question, text, "", {"low": ratio.min(), "high": ratio.max()},
                  [("Peak of allocated memory in GiB.", table.rename(columns={"context_length": "context"}).fillna("–"))],
                  [("mp_memory", "Peak memory in bf16 against fp32, by size, context and mode")], runs_of(measured))


def health(table: pd.DataFrame) -> Answer:
    question = "Are loss and gradients still right?"
    if table.empty:
        return no_data("mp-health", question, SWEEP)
    keys = ["run_id"]
    base = table[table["precision"] == "fp32"].set_index(keys)[["loss", "gradient_norm"]]
    rows = table[table["precision"] != "fp32"].join(base, on=keys, rsuffix="_fp32")
    rows = rows.assign(loss_off=(rows["loss"] / rows["loss_fp32"] - 1).abs(), norm_off=(rows["gradient_norm"] / rows["gradient_norm_fp32"] - 1).abs(),
                       way=[f"fp16, scaled by {r.scale:,.0f}" if r.scale > 1 else ("fp16, not scaled" if r.precision == "fp16" else r.precision)
                            for r in rows.itertuples()])
    text = []
    for way, own in rows.groupby("way", sort=False):
        text.append(f"{way}: loss within {_tiny(own['loss_off'].max())}, gradient norm within {_tiny(own['norm_off'].max())} of fp32's, "
                    f"{_share(own['zero'])} of the gradient's elements underflow to 0" + (f", {_share(own['nonfinite'])} are not finite" if own["nonfinite"].max() else ""))
    bare, scaled = (rows[(rows["precision"] == "fp16") & ((rows["scale"] > 1) == s)]["zero"].median() for s in (False, True))
    finding = (f"**Without loss scaling {percent(bare, 1)} of fp16's gradient elements underflow to 0 in the median run, with it {percent(scaled, 2)}.**"
               if np.isfinite(bare) and bare > 0.001 else "")
    shown = rows.assign(a=rows["loss_off"].map(_tiny), b=rows["norm_off"].map(_tiny), c=rows["zero"].map(lambda s: percent(s, 3)),
                        d=rows["nonfinite"].map(lambda s: percent(s, 3)))
    size_context = shown[["size", "context_length"]].drop_duplicates()
    context = 512 if (size_context["context_length"] == 512).any() else size_context["context_length"].max()
    table_ = shown[shown["context_length"] == context][["size", "way", "a", "b", "c", "d"]].set_axis(
        ["size", "precision", "loss off", "gradient norm off", "underflow", "not finite"], axis=1)
    return Answer("mp-health", question, "On the same fresh weights and batch, over all sizes and contexts: " + "; ".join(text) + ".", finding,
                  {"fp16_unscaled_zero": bare, "fp16_scaled_zero": scaled},
                  [(f"Against fp32, context {context}. Underflow: 0 in this precision, not 0 in fp32.", table_)], [], runs_of(rows))


def _tiny(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-4 else percent(value, 2)


def _share(values: pd.Series) -> str:
    low, high = percent(values.min(), 2), percent(values.max(), 2)
    return low if low == high else f"{low} to {high}"
