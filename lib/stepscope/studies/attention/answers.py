"""The attention questions, answered from the tables of ``stepscope.attention``."""
import textwrap

import numpy as np
import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.say.formats import (
    Answer,
    count,
    listing,
    ms,
    neighbours_words,
    no_data,
    number,
    percent,
    runs_of,
    span,
)
from stepscope.say.selections import precisions
from stepscope.studies.attention.config import ATTENTIONS
from stepscope.studies.attention.measure import TOLERANCE

WORDS = {"eager": "written out", "compiled": "compiled", "flash": "SDPA flash", "efficient": "SDPA memory-efficient",
         "cudnn": "SDPA cuDNN", "math": "SDPA math", "flex": "FlexAttention"}
STATUS_WORDS = {"oom": "out of memory", "unsupported": "not supported", "wrong": "wrong"}
HEAD = 64             # the head dimension that sentences speak of, where it was measured
HOST_BOUND = 1.1      # a pass that takes at most this many times as long as enqueuing it waits for the host
KERNEL_NUMBER = r"(?<=_attention)_\d+"  # torch numbers the kernels it makes; one reason is one reason
NEARLY = 0.05         # shares this close count as the same in words


def timed(cells: pd.DataFrame, causal: bool = True, **values) -> pd.DataFrame:
    """Cells that were timed, with the causal mask or without."""
    if cells.empty:
        return cells
    rows = cells[(cells["status"] == "ok") & (cells["causal"] == causal)]
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def head(cells: pd.DataFrame) -> int:
    """The head dimension that sentences speak of."""
    found = sorted(cells["d_model"].unique())
    return int(HEAD if HEAD in found else found[0])


def names(cells: pd.DataFrame) -> list[str]:
    return [name for name in ATTENTIONS if (cells["implementation"] == name).any()]


def is_cpu(cells: pd.DataFrame) -> bool:
    return bool((cells["device"] == "cpu").all())


def same_result(cells: pd.DataFrame) -> Answer:
    question = "Which implementations run here, and do they compute the same?"
    if cells.empty:
        return no_data("attention-same", question, "attention")
    table = []
    for name in names(cells):
        row = {"implementation": WORDS[name]}
        for precision in precisions(cells):
            own = cells[(cells["implementation"] == name) & (cells["precision"] == precision)]
            ok, wrong = own[own["status"] == "ok"], own[own["status"] == "wrong"]
            row[precision] = ("–" if own.empty else f"{ok['error'].max():.1e} ({len(ok)} of {len(own)})" if len(ok) else
                              f"{wrong['error'].max():.1e}, wrong" if len(wrong) else STATUS_WORDS[own["status"].iloc[0]])
        table.append(row)
    ok, wrong, refused = (cells[cells["status"] == status] for status in ("ok", "wrong", "unsupported"))
    text = ("Side by side are the model's own written-out attention, the same under torch.compile (compiled), the backends of"
            " scaled_dot_product_attention (SDPA) and FlexAttention. Before a cell is timed, its output and the gradients of q, k and v are compared with float64 (textbook softmax,"
            " every batch"
            f" element, every row), at that very sequence: {len(ok)} of {count(len(cells), 'cell')} passed"
            + (f", {len(refused)} are not supported" if len(refused) else "") + ". The error is the largest of the"
            " four, relative, in the Frobenius norm; allowed are " + listing(f"{TOLERANCE[p]:g}"
                                                                             f" in {p}" for p in precisions(cells)) + ".")
    if len(wrong):
        text += (" Wrong, and therefore not timed: " + listing(
            f"{WORDS[name]} in {precision} ({count(len(own), 'cell')}, error up to {own['error'].max():.1e})"
            for (name, precision), own in wrong.groupby(["implementation", "precision"], sort=False)) + ".")
    else:
        text += " None was wrong."
    for precision, same in exact(ok).items():
        text += f" Asked for {precision}, {listing(WORDS[name] for name in same)} stay{'s' if len(same) == 1 else ''} at the error of fp32 and so do{'es' if len(same) == 1 else ''} not use it."
    missing = untried(cells)
    if missing:
        text += f" Not tried: {listing(missing)}."
    reasons = refused.assign(d=refused["d_model"], reason=refused["reason"].astype(str).str.replace(KERNEL_NUMBER, "", regex=True)).groupby(["implementation", "precision", "reason"], sort=False).agg(
        cells=("d", "size"), heads=("d", lambda d: ", ".join(map(str, sorted(set(d)))))).reset_index()
    tables = [("Largest error against float64 over all cells that passed, by precision (cells that passed, of those"
               " tried).", pd.DataFrame(table))]
    if len(reasons):
        # The reason names dtypes or sizes; one line for each kind of it is enough.
        lines = reasons.groupby(["implementation", "reason"], sort=False).agg(
            precision=("precision", lambda p: ", ".join(x for x in PRECISIONS if x in set(p))), d=("heads", "first"),
            cells=("cells", "sum"))
        lines = lines.reset_index()
        lines["implementation"] = lines["implementation"].map(WORDS)
        lines["reason"] = [textwrap.shorten(reason, 200, placeholder=" …").replace("|", "\\|") for reason in lines["reason"]]
        tables.append(("Not supported here, in torch's own words.",
                       lines[["implementation", "precision", "d", "cells", "reason"]]))
    worst = [f"{own['error'].max():.0e} in {precision}" for precision in precisions(ok)
             for own in [ok[ok["precision"] == precision]]]
    finding = (f"**{len(names(ok))} of {count(len(names(cells)), 'attention implementation')} run here and agree with float64** wherever"
               f" they are supported, in {len(ok)} of {count(len(cells), 'cell')} (relative error at worst {listing(worst)})"
               + (f"; {count(len(wrong), 'cell')} {'is' if len(wrong) == 1 else 'are'} wrong for the precision asked for and"
                  f" not timed." if len(wrong) else ".") if len(ok) else "")
    return Answer("attention-same", question, text, finding, {"ok": len(ok), "wrong": len(wrong)}, tables,
                  runs=runs_of(cells))


def untried(cells: pd.DataFrame) -> list[str]:
    """What the grid leaves out: implementations that were not tried at a head dimension and precision that others were."""
    tried = set(zip(cells["implementation"], cells["d_model"], cells["precision"], cells["causal"]))
    left = pd.DataFrame([(name, d, precision, causal) for d, precision in sorted(set(zip(cells["d_model"], cells["precision"])))
                         for causal in (True, False) for name in names(cells) if (name, d, precision, causal) not in tried],
                        columns=["name", "d", "precision", "causal"])
    where: dict[str, list[str]] = {}  # what was left out at the same places is named together
    for (causal, name), own in left.groupby(["causal", "name"], sort=False):
        place = (f"{'with' if causal else 'without'} the mask at d {listing(map(str, sorted(set(own['d']))))} in"
                 f" {listing(p for p in PRECISIONS if p in set(own['precision']))}")
        where.setdefault(place, []).append(name)
    return [f"{'any' if missing == names(cells) else listing(WORDS[name] for name in missing)} {place}" for place, missing in where.items()]


def exact(ok: pd.DataFrame) -> dict[str, list[str]]:
    """Implementations that stay as exact as fp32 though asked for TF32: fp32's tolerance would still pass them."""
    worst = ok[ok["precision"] == "tf32"].groupby("implementation")["error"].max()
    same = [name for name in ATTENTIONS if name in worst.index and worst[name] < TOLERANCE["fp32"]]
    return {"TF32": same} if same else {}


def how_long(cells: pd.DataFrame) -> Answer:
    question = "How long do attention's forward and backward take, and how much memory is in use between them?"
    rows = timed(cells)
    if rows.empty:
        return no_data("attention-time", question, "attention")
    d = head(rows)
    own = rows[(rows["d_model"] == d)]
    longest = own["sequence"].max()
    measured: dict[str, list[str]] = {}  # precisions by the head dimensions they were measured at
    for precision in precisions(rows):
        measured.setdefault(listing(map(str, sorted(rows.loc[rows["precision"] == precision, "d_model"].unique()))), []).append(precision)
    heads = listing(f"{dimensions} in {listing(shown)}" for dimensions, shown in measured.items())
    text = [f"The grid has d {heads}, and sequences from {rows['sequence'].min()} to {rows['sequence'].max()}.",
            f"With the causal mask, d {d}, sequence {longest}, forward and backward: " + "; ".join(
        f"{precision}: " + listing(f"{WORDS[row.implementation]} {ms(row.pass_median_ms)}" for row in
                                   own[(own["precision"] == precision) & (own["sequence"] == longest)].sort_values("pass_median_ms").itertuples())
        for precision in precisions(own)) + "."]
    best = fastest(rows)
    finding = ""
    if len(best):
        at = best[(best["d_model"] == d) & (best["sequence"] == longest)].sort_values("speedup", ascending=False)
        if len(at):
            top = at.iloc[0]
            finding = (f"**At sequence {longest}, d {d}, {WORDS[top.implementation]} in {top.precision} takes"
                       f" {ms(top.pass_median_ms)} where the written-out attention takes {ms(top.eager_ms)}**,"
                       f" {number(top.speedup)} times as long; over the whole grid the fastest implementation is"
                       f" {span(best['speedup'])} times as fast as the written-out one of its precision.")
            text.append(f"\n\nOver all {len(best)} points, the fastest implementation is {span(best['speedup'])} times as fast"
                        f" as the written-out one; it is "
                        + listing(f"{WORDS[name]} in {n}" 
                                  for name, n in best["implementation"].value_counts().items()) + ".")
    short = rows[rows["passes"] < rows["timed_steps"]]
    slower = losers(rows)
    if len(slower):
        worst = slower.loc[slower["speedup"].idxmin()]
        by_name = slower.groupby(["implementation", "precision"], sort=False).size()
        text.append(f"Not everything is a gain: {len(slower)} of {count(len(rows) - int((rows['implementation'] == 'eager').sum()), 'cell')}"
                    f" are slower than written out by more than the intervals allow"
                    f" ({listing(f'{WORDS[name]} in {precision} in {n}' for (name, precision), n in by_name.sort_values(ascending=False).items())});"
                    f" the worst is {WORDS[worst.implementation]} in {worst.precision} at d {worst.d_model}, sequence {worst.sequence}:"
                    f" {ms(worst.pass_median_ms)} where written out takes {ms(worst.eager_ms)}.")
    text.append("\n\nIn use before backward, at the same d and sequence: " + "; ".join(
        f"{precision}: " + listing(f"{WORDS[row.implementation]} {number(row.in_use_bytes / 2**20)} MiB" for row in
                                   own[(own["precision"] == precision) & (own["sequence"] == longest)].sort_values("in_use_bytes").itertuples())
        for precision in precisions(own)[:1]) + ".")
    text.append(f"\n\nEach point is the median of up to {int(rows['timed_steps'].max())} passes after a warm-up, all of one d and"
                " precision in one process. Masks are made before, outside the clocks."
                + ("" if is_cpu(cells) else " A pass is a forward and its backward with an event between them; the device is waited for"
                   " before and after a pass, not within it, so that where the host sets the time backward is enqueued while forward"
                   " still runs."))
    short = rows[rows["passes"] < rows["timed_steps"]]
    if len(short):
        wide = (pd.concat([short["pass_ci_high_ms"] - short["pass_median_ms"], short["pass_median_ms"] - short["pass_ci_low_ms"]], axis=1).max(axis=1)
                / short["pass_median_ms"]).max()
        longest_s = (short["passes"] * short["pass_median_ms"]).max() / 1e3
        text.append(f"In {count(len(short), 'cell')} of {len(rows)}, where a pass is long, there are fewer passes ({_whole(short['passes'])}),"
                    f" so that a cell takes about {span(rows['cell_seconds'], ' s', 2)}, or as long as {int(rows['least_passes'].max())} passes do"
                    f" (up to {number(longest_s, 2)} s); at the widest a 95% interval of those reaches {percent(wide, 2)} from its median.")
    text.append(neighbours_words(rows, "and what waits for the host may have taken longer for it"))
    noisy = rows["pass_flags"].fillna("") != ""
    hosts = waits_for_host(rows)
    text.append((f"Of the {int(hosts.sum())} cells that wait for the host, {int((noisy & hosts).sum())} have samples that drift,"
                 f" fall into two groups or scatter by more than 5%, of the {int((~hosts).sum())} others {int((noisy & ~hosts).sum())}"
                 if hosts.any() else f"{int(noisy.sum())} of {count(len(rows), 'cell')} have samples that drift, fall into two groups or"
                                     " scatter by more than 5%") + "; medians and their intervals are compared for that reason.")
    tables = [(f"Every implementation at d {d}, sequence {longest}, causal: medians in ms [95% interval], memory in MiB. The other points"
               " are in each run's `cells.csv`.", implementations_table(cells, d, longest)),
              ("Written-out attention, causal: medians in ms [95% interval], memory in MiB.", handout_table(cells))]
    compiled = compiled_table(rows)
    if len(compiled):
        tables.append((f"The same eager and compiled, {compiled_in(rows)}: medians in ms and how many times as fast (* the intervals"
                       " overlap), memory in use before backward in MiB.", compiled))
    if len(best):
        tables.append(("The fastest implementation of each point, causal: forward + backward in ms, and in brackets how many"
                       " times as fast as written out in the same precision (* the interval of the second fastest overlaps).",
                       best_table(best)))
    return Answer("attention-time", question, " ".join(filter(None, text)), finding,
                  {"best": best["speedup"].max() if len(best) else float("nan")}, tables,
                  [("attention_time", "Time and memory over the sequence, by implementation"),
                   ("attention_speedup", "How many times as fast as written-out attention, over the grid")], runs_of(cells))


def handout_table(cells: pd.DataFrame) -> pd.DataFrame:
    """The handout's table: precision, d and sequence down; forward, memory before backward, backward, peak; how it ended."""
    rows = _by_precision(cells[(cells["implementation"] == "eager") & cells["causal"]], ["d_model", "sequence"])
    return _measured(rows, {"precision": rows["precision"], "d": rows["d_model"], "sequence": rows["sequence"]})


def implementations_table(cells: pd.DataFrame, d: int, sequence: int) -> pd.DataFrame:
    """The same at one point: precision and implementation down."""
    rows = cells[cells["causal"] & (cells["d_model"] == d) & (cells["sequence"] == sequence)]
    rows = _by_precision(rows.assign(rank=rows["implementation"].map(ATTENTIONS.index)), ["rank"])
    return _measured(rows, {"precision": rows["precision"], "implementation": rows["implementation"].map(WORDS)})


def _by_precision(rows: pd.DataFrame, then: list[str]) -> pd.DataFrame:
    return rows.sort_values(["precision", *then], key=lambda column: column.map(PRECISIONS.index) if column.name == "precision" else column)


def _measured(rows: pd.DataFrame, columns: dict[str, pd.Series]) -> pd.DataFrame:
    """Columns, and what was measured: both times, memory before backward and at the peak, passes."""
    def cell(row, phase):
        if row["status"] != "ok":
            return STATUS_WORDS[row["status"]]
        return f"{number(row[f'{phase}_median_ms'])} [{number(row[f'{phase}_ci_low_ms'])}, {number(row[f'{phase}_ci_high_ms'])}]"
    table = pd.DataFrame(columns | {"forward": [cell(r, "forward") for _, r in rows.iterrows()],
                                    "in use before backward": _mib(rows, "in_use_bytes"),
                                    "backward": [cell(r, "backward") for _, r in rows.iterrows()],
                                    "peak": _mib(rows, "peak_bytes"),
                                    "passes": [f"{p:.0f}" if p == p else "–" for p in rows["passes"]]})
    return table.drop(columns="peak") if (table["peak"] == "–").all() else table


def _mib(rows: pd.DataFrame, column: str) -> list[str]:
    return [number(value / 2**20) for value in rows[column]] if column in rows else ["–"] * len(rows)


def compiled_in(rows: pd.DataFrame) -> str:
    """The precision of the table of eager beside compiled: the first that was measured."""
    return precisions(rows)[0]


def compiled_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The handout's other table: eager and compiled beside each other, forward and backward, over d and sequence."""
    rows = rows[rows["precision"] == compiled_in(rows)]
    keys = ["d_model", "sequence"]
    both = rows[rows["implementation"] == "eager"].merge(rows[rows["implementation"] == "compiled"], on=keys, suffixes=("", "_compiled"))
    table = both[keys].rename(columns={"d_model": "d"})
    for phase in ("forward", "backward"):
        low, high = (both[f"{phase}_ci_{end}_ms"] for end in ("low", "high"))
        same = (low <= both[f"{phase}_ci_high_ms_compiled"]) & (both[f"{phase}_ci_low_ms_compiled"] <= high)
        before, after = both[f"{phase}_median_ms"], both[f"{phase}_median_ms_compiled"]
        table[f"{phase}, eager"], table[f"{phase}, compiled"] = before.map(number), after.map(number)
        table[f"{phase}, times as fast"] = [number(ratio) + " *" * bool(none) for ratio, none in zip(before / after, same)]
    table["in use, eager"], table["in use, compiled"] = (_mib(both, f"in_use_bytes{suffix}") for suffix in ("", "_compiled"))
    return table.sort_values(["d", "sequence"])


def against_eager(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with ``eager_ms``, ``speedup`` and the interval of the written-out attention of the same precision, d and sequence."""
    keys, columns = ["precision", "d_model", "sequence"], ["pass_median_ms", "pass_ci_low_ms", "pass_ci_high_ms"]
    eager = rows[rows["implementation"] == "eager"].set_index(keys)[columns].set_axis(["eager_ms", "eager_low_ms", "eager_high_ms"], axis=1)
    both = rows.join(eager, on=keys, how="inner")
    return both.assign(speedup=both["eager_ms"] / both["pass_median_ms"])


def losers(rows: pd.DataFrame) -> pd.DataFrame:
    """Cells that are slower than written out by more than both intervals allow."""
    both = against_eager(rows)
    return both[both["pass_ci_low_ms"] > both["eager_high_ms"]]


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each precision, d and sequence the fastest implementation, with ``eager_ms`` and ``speedup`` against it; ``sure``:
    whether the second fastest's interval is apart."""
    keys = ["precision", "d_model", "sequence"]
    ranked = against_eager(rows).sort_values("pass_median_ms").groupby(keys, sort=False)
    best, second = ranked.nth(0).set_index(keys), ranked.nth(1).set_index(keys)
    sure = second["pass_ci_low_ms"].reindex(best.index) > best["pass_ci_high_ms"]
    return best.assign(sure=sure).reset_index().sort_values(keys, ignore_index=True)


def best_table(best: pd.DataFrame) -> pd.DataFrame:
    cells = best.assign(cell=[f"{WORDS[row.implementation]} {number(row.pass_median_ms)}"
                              f" ({number(row.speedup, 2)}){'' if row.sure else ' *'}" for row in best.itertuples()])
    table = cells.pivot(index=["d_model", "sequence"], columns="precision", values="cell").fillna("–")
    return table[[p for p in PRECISIONS if p in table]].rename_axis(["d", "sequence"]).reset_index()


def against_ceiling(cells: pd.DataFrame) -> Answer:
    question = "How much of the device's arithmetic does attention reach?"
    rows = timed(cells, causal=False)
    if rows.empty or rows["utilisation"].isna().all():
        return no_data("attention-ceiling", question, "attention")
    longest = rows[rows["sequence"] == rows.groupby("d_model")["sequence"].transform("max")]
    table = longest.pivot_table(index=["precision", "implementation"], columns="d_model", values="utilisation")
    tflops = longest.pivot_table(index=["precision", "implementation"], columns="d_model", values="pass_tflops")
    text = ["Without the mask, since only there every implementation has the same arithmetic to do: 4 B T² d for forward,"
            " twice that for backward (what a"
            " kernel computes again in backward is not counted for it), over the matrix-product rate that the same run"
            " measured."]
    d, sequence = head(longest), longest["sequence"].max()
    parts = []
    for precision in precisions(longest):
        at = longest[(longest["precision"] == precision) & (longest["d_model"] == d)].sort_values("utilisation",
                                                                                                  ascending=False)
        if len(at):
            top, last = at.iloc[0], at.iloc[-1]
            parts.append(f"{precision}: {WORDS[top.implementation]} {percent(top.utilisation)} ({number(top.pass_tflops)}"
                         f" TFLOP/s)"
                         + (f", {WORDS[last.implementation]} {percent(last.utilisation, 1)}" if len(at) > 1 else ""))
    text.append(f"The highest and lowest share at d {d}, sequence {sequence}: " + "; ".join(parts) + ".")
    several = longest[longest.groupby(["precision", "implementation"])["d_model"].transform("nunique") > 1]
    if len(several):
        grows = [own.sort_values("d_model")["utilisation"].is_monotonic_increasing
                 for _, own in several.groupby(["precision", "implementation"])]
        text.append(f"Of the {len(grows)} combinations of implementation and precision that were measured at several d, each d in a"
                    f" process of its own, the share grows with d throughout in {sum(grows)}.")
    ceilings = longest["pass_tflops"] / longest["utilisation"]
    text.append("The rates measured are " + listing(f"{span(ceilings[longest['precision'] == precision], ' TFLOP/s')} in {precision}"
                                                    for precision in precisions(longest)) + ".")
    finding = ("**Of the measured matrix-product rate attention reaches at most " + listing(
        f"{percent(best.utilisation)} in {best.precision} ({WORDS[best.implementation]}, d {best.d_model})"
        for best in _tops(rows)) + "**, without a mask; written out, at most " + listing(
        f"{percent(best.utilisation, 1 if best.utilisation < 0.1 else 0)} in {best.precision}"
        for best in _tops(rows[rows["implementation"] == "eager"])) + ".")
    top = rows.loc[rows["utilisation"].idxmax()]
    shown = table.copy().astype(object)
    for index in table.index:
        for column in table:
            share = table.loc[index, column]
            shown.loc[index, column] = "–" if np.isnan(share) else f"{number(tflops.loc[index, column])} ({percent(share, 1 if share < 0.1 else 0)})"
    shown = shown.reset_index()
    shown["order"] = shown["precision"].map(PRECISIONS.index) * 10 + shown["implementation"].map(ATTENTIONS.index)
    shown = shown.sort_values("order").drop(columns="order")
    shown["implementation"] = shown["implementation"].map(WORDS)
    shown.columns = [f"d {column}" if not isinstance(column, str) else column for column in shown]
    return Answer("attention-ceiling", question, " ".join(text), finding, {"best": top.utilisation},
                  [("Forward + backward without mask at the longest sequence: TFLOP/s (share of the precision's"
                    " ceiling).", shown)],
                  [("attention_ceiling", "Share of the measured ceiling over the sequence")], runs_of(cells))


def _tops(rows: pd.DataFrame) -> list[pd.Series]:
    """Of each precision the row with the highest share of its ceiling."""
    return [rows.loc[rows.loc[rows["precision"] == precision, "utilisation"].idxmax()] for precision in precisions(rows)]


def the_mask(cells: pd.DataFrame) -> Answer:
    question = "What does the causal mask cost or save?"
    keys = ["implementation", "precision", "d_model", "sequence"]
    masked, plain = timed(cells), timed(cells, causal=False)
    if masked.empty or plain.empty:
        return no_data("attention-causal", question, "attention")
    both = masked.merge(plain, on=keys, suffixes=("", "_plain"))
    both["ratio"] = both["pass_median_ms"] / both["pass_median_ms_plain"]
    longest = both[both["sequence"] == both["sequence"].max()]
    by_name = longest.groupby("implementation")["ratio"]
    parts, skips = [], []
    for name in names(longest):
        ratio = by_name.get_group(name)
        parts.append(f"{WORDS[name]} {span(ratio, digits=2)}")
        if ratio.max() < 1 - 4 * NEARLY:
            skips.append(WORDS[name])
    text = (f"Time with the mask over time without, at sequence {longest['sequence'].max()}, over d and"
            f" precisions: " + "; ".join(parts) + ". Half of"
            " the square lies behind the mask: a kernel that skips it would come to a half, one that computes it first and"
            " masks it afterwards to 1 or more. "
            + (f"By this, {listing(skips)}"
               f" skip{'s' if len(skips) == 1 else ''} it." if skips else "By this, none skips it."))
    return Answer("attention-causal", question, text, "",
                  {name: by_name.get_group(name).median() for name in names(longest)}, runs=runs_of(cells))


def compile_cost(cells: pd.DataFrame) -> Answer:
    question = "What does compiling attention cost, apart from running it?"
    rows = cells[cells["implementation"].isin(["compiled", "flex"]) & (cells["status"] == "ok")] if len(cells) else cells
    if rows.empty:
        return no_data("attention-compile", question, "attention")
    rows = rows.assign(first_s=(rows["first_forward_ms"] + rows["first_backward_ms"] - rows["pass_median_ms"]) / 1e3)
    text, table = [], []
    started = rows[rows["graphs"] > 0].groupby("run_id").head(1).index  # the first compiled in a process starts the compiler too
    for name in names(rows):
        own = rows[rows["implementation"] == name]
        cold = own[own["graphs"] > 0]
        first, later = cold[cold.index.isin(started)], cold[~cold.index.isin(started)]
        recompiled = (own.groupby("run_id")["graphs"].sum() - 1).clip(lower=0)
        masked, plain = (later.loc[later["causal"] == causal, "first_s"] for causal in (True, False))
        warm = own.loc[own["graphs"] == 0, "first_s"]
        table.append({"implementation": WORDS[name], "runs": own["run_id"].nunique(), "cells": len(own),
                      "graphs a run": _whole(own.groupby("run_id")["graphs"].sum()),
                      "recompilations a run": _whole(recompiled), "in timed passes": f"{own['later_graphs'].sum():.0f}",
                      "first of a process (s)": _seconds(first["first_s"]), "others, masked (s)": _seconds(masked),
                      "others, without (s)": _seconds(plain),
                      "first pass without compiling (ms), at most": number(max(warm.max() * 1e3, 0)) if len(warm) else "–"})
        took = [f"{_seconds(values)} s {words} (median {number(values.median())} s)"
                for values, words in ((masked, "with the mask"), (plain, "without")) if len(values)]
        text.append(f"\n\n{'Written-out attention' if name == 'compiled' else WORDS[name]}: compiled again {_whole(recompiled)} time{'s' * (_whole(recompiled) != '1')} in a run"
                    + (f", each taking {listing(took)}" if took else "")
                    + (f"; the first of a process, which also starts the compiler, {_seconds(first['first_s'])} s." if len(first) else "."))
    failed = cells[cells["implementation"].isin(["compiled", "flex"]) & (cells["status"] == "unsupported")]
    if len(failed):
        text.append(f"What could not be compiled ({count(len(failed), 'cell')}) is not counted here.")
    text.append(neighbours_words(rows, "which may make compiling take longer"))
    text.insert(0, "The written-out attention is compiled for each shape (static), FlexAttention for any sequence (dynamic),"
                   " which torch still compiles again where a shape or the mask is of another kind. Torch's limit of 8"
                   " recompilations was raised, and going beyond it made an error, so that nothing ran uncompiled unnoticed."
                   " Times are of the first pass,"
                   " forward and backward, less a steady one; each run began with torch's caches on disk empty.")
    total = rows["later_graphs"].sum()
    text.append("No graph was compiled during the timed passes." if total == 0 else f"{count(int(total), 'graph')} compiled"
                                                                                    f" during timed passes.")
    finding = ""
    pay = _pays_off(cells)
    if len(pay):
        sure = pay[pay["passes_to_pay"] < np.inf]
        d, sequence = head(pay), pay["sequence"].max()
        at = pay[(pay["d_model"] == d) & (pay["sequence"] == sequence)]
        never = int((pay["passes_to_pay"] == np.inf).sum())
        text.append(f"\n\nCompiling the written-out attention for d {d}, sequence {sequence} has paid for itself"
                    f" after " + listing(
            f"{number(row.passes_to_pay, 2)} passes in"
            f" {row.precision}" if row.passes_to_pay < np.inf else f"no number of passes in {row.precision}"
            for row in at.itertuples()) + f"; over the grid the number is {span(sure['passes_to_pay'], digits=2)}"
            + (f", and in {count(never, 'cell')} of {len(pay)} the compiled one is no faster"
               f" ({_why_never(pay)})." if never else ".") if len(sure) else
            "Nowhere is the compiled attention faster than the eager one.")
        finding = (f"**Compiling the written-out attention makes it {span(sure['gain'], digits=2)} times as fast where"
                   f" it helps"
                   f" ({len(sure)} of {count(len(pay), 'cell')})** and costs"
                   f" {number(rows.loc[rows['implementation'] == 'compiled', 'first_s'].median(), 2)} s"
                   " a shape (median).") if len(sure) else ""
    return Answer("attention-compile", question, " ".join(filter(None, text)), finding, {"later_graphs": float(total)},
                  [("Compilations and their time.", pd.DataFrame(table))], runs=runs_of(cells))


def _seconds(values: pd.Series) -> str:
    return span(values) if len(values) else "–"


def _why_never(pay: pd.DataFrame) -> str:
    """Of the cells that compiling does not make faster: how many cannot be told apart, are slower, wait for the host."""
    never = pay[pay["passes_to_pay"] == np.inf]
    slower = int((never["pass_ci_low_ms"] > never["pass_ci_high_ms_eager"]).sum())
    hosts = int((waits_for_host(never) & waits_for_host(never, "_eager")).sum())
    return (f"{len(never) - slower} within the intervals, {slower} slower"
            + (f"; {hosts} wait for the host, eager and compiled" if hosts else ""))


def _whole(counts: pd.Series) -> str:
    """"a to b" of counts, or the one that they all are."""
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low} to {high}"


def _pays_off(cells: pd.DataFrame) -> pd.DataFrame:
    """Causal cells of the compiled attention that were compiled there, with ``gain`` over eager and after how many passes
    the compile time is made up (infinite where it is no faster)."""
    keys = ["precision", "d_model", "sequence"]
    rows = timed(cells)
    compiled = rows[(rows["implementation"] == "compiled") & (rows["graphs"] > 0)]
    eager = rows[rows["implementation"] == "eager"][[*keys, "pass_median_ms", "pass_ci_low_ms", "pass_ci_high_ms", "enqueue_ms", "device"]]
    both = compiled.merge(eager, on=keys, suffixes=("", "_eager"))
    both["gain"] = both["pass_median_ms_eager"] / both["pass_median_ms"]
    cost = both["first_forward_ms"] + both["first_backward_ms"] - both["pass_median_ms"]
    saved = both["pass_median_ms_eager"] - both["pass_median_ms"]
    both["passes_to_pay"] = np.where(both["pass_ci_high_ms"] < both["pass_ci_low_ms_eager"], cost / saved, np.inf)
    return both


def waits_for_host(rows: pd.DataFrame, suffix: str = "") -> pd.Series:
    """Cells whose pass takes hardly longer than the host needs to enqueue it (on a CPU: none, as it does the work itself)."""
    return ((rows[f"pass_median_ms{suffix}"] < HOST_BOUND * rows[f"enqueue_ms{suffix}"])
            & (rows[f"device{suffix}"] == "cuda"))


def tf32_change(cells: pd.DataFrame) -> pd.DataFrame:
    """Compiled attention with TF32 against without, a row a phase, d and sequence: ``change`` with its interval, and
    ``none``, why it counts as no change (empty where it is one).

    The interval is the widest that both medians' 95% intervals allow. A pass that the host is as slow to enqueue as the
    device to run, in either precision, says nothing of the device.
    """
    rows = timed(cells, implementation="compiled")
    if rows.empty:
        return pd.DataFrame()
    keys = ["d_model", "sequence"]
    both = rows[rows["precision"] == "fp32"].merge(rows[rows["precision"] == "tf32"], on=keys, suffixes=("_fp32", "_tf32"))
    frames = []
    for phase in ("forward", "backward"):
        median, low, high = (both[f"{phase}_{part}_ms_tf32"] for part in ("median", "ci_low", "ci_high"))
        before, before_low, before_high = (both[f"{phase}_{part}_ms_fp32"] for part in ("median", "ci_low", "ci_high"))
        host = waits_for_host(both, "_fp32") | waits_for_host(both, "_tf32")
        overlap = (low <= before_high) & (before_low <= high)
        none = np.where(host, "host", np.where(overlap, "noise", ""))
        frames.append(both[keys].assign(phase=phase, fp32_ms=before, tf32_ms=median, change=median / before - 1,
                                        low=low / before_high - 1,
                                        high=high / before_low - 1, none=none))
    return pd.concat(frames, ignore_index=True)


def tf32(cells: pd.DataFrame) -> Answer:
    question = "What does TF32 change for the compiled attention?"
    if len(cells) and is_cpu(cells):
        return Answer("attention-tf32", question, "Does not arise here: a CPU has no TF32.", runs=runs_of(cells))
    changes = tf32_change(cells) if len(cells) else pd.DataFrame()
    if changes.empty:
        return no_data("attention-tf32", question, "attention")
    real = changes[changes["none"] == ""]
    text = [f"Of {count(len(changes), 'pair')} (phase, d, sequence), {len(real)} differ. "
            f"{int((changes['none'] == 'host').sum())} wait for the host, in one precision or both, and"
            f" {int((changes['none'] == 'noise').sum())} lie within each other's 95%"
            " interval; their change is shown as none. The intervals are of one process each; that processes differ among"
            " themselves is not in them."]
    finding = ""
    if len(real):
        d = real.groupby("d_model")["change"].median()
        text.append("The change by d (median of the pairs that"
                    " differ): " + listing(f"{percent(v, 0)} at {k}" for k, v in d.items()) + ".")
        best, worst = real.loc[real["change"].idxmin()], real.loc[real["change"].idxmax()]
        text.append(f"The largest saving is {percent(best.change, 1)} ({best.phase}, d {best.d_model}, sequence"
                    f" {best.sequence}); "
                    + (f"the largest loss {percent(worst.change, 1)} ({worst.phase}, d {worst.d_model}, sequence"
                       f" {worst.sequence})." if worst.change > 0 else
                       "none of the changes is a loss."))
        finding = (f"**TF32 makes a phase of the compiled attention take up to {percent(-best.change)} less time** (d {best.d_model},"
                   f" sequence {best.sequence}, {best.phase}); in {len(changes) - len(real)} of {len(changes)} pairs no change can be told.")
    cell = {}
    for row in changes.itertuples():
        words = {"host": "none (host)", "noise": "none"}.get(row.none) or f"{row.change:+.1%} [{row.low:+.1%}, {row.high:+.1%}]"
        of_point = cell.setdefault((row.d_model, row.sequence), {})
        of_point.update({f"{row.phase}, fp32": number(row.fp32_ms), f"{row.phase}, TF32": number(row.tf32_ms),
                         f"Δ {row.phase}": words})
    table = pd.DataFrame([{"d": d, "sequence": sequence} | values for (d, sequence), values in sorted(cell.items())])
    return Answer("attention-tf32", question, " ".join(text), finding, {"differ": len(real), "of": len(changes)},
                  [("Compiled written-out attention, causal, medians in ms without and with TF32, and the change [95%"
                    " bounds].", table)],
                  runs=runs_of(cells))
