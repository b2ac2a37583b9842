"""The whole model eager against compiled, answered from the table of ``stepscope.compiled.all_times``."""
import pandas as pd

from stepscope.answers import Answer, apart, count, listing, ms, no_data, number, percent, runs_of, span
from stepscope.answers.benchmark import MODE_WORDS, NEARLY
from stepscope.config import PRECISIONS
from stepscope.store import by_size
from stepscope.timing import WHOLE

ATTENTION_WORDS = {"eager": "written-out", "sdpa": "SDPA"}
VARIANT_WORDS = {"eager": "eager", "block": "compiled"}
KEYS = ["size", "context_length", "precision", "attention", "mode"]
INTERVAL = ["ci_low_ms", "ci_high_ms"]


def beside(times: pd.DataFrame) -> pd.DataFrame:
    """Whole steps of eager and with compiled blocks in a row each of :data:`KEYS`, with ``speedup`` and ``sure``:
    whether the two medians' intervals are apart."""
    if times.empty:
        return times
    whole = times[(times["phase"] == WHOLE) & (times["status"] == "ok")]
    both = whole[whole["variant"] == "eager"].merge(whole[whole["variant"] == "block"], on=KEYS, suffixes=("", "_compiled"))
    if both.empty:
        return both
    both["speedup"] = both["median_ms"] / both["median_ms_compiled"]
    both["sure"] = [apart(row[INTERVAL], row[[f"{c}_compiled" for c in INTERVAL]].set_axis(INTERVAL))
                    for _, row in both.iterrows()]
    return _ordered(both)


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """By size, precision, attention and mode, each in its own order."""
    order = {name: rank for names in (PRECISIONS, ATTENTION_WORDS, MODE_WORDS) for rank, name in enumerate(names)}
    return by_size(rows).sort_values(["size", "precision", "attention", "mode"],
                                     key=lambda column: column if column.name == "size" else column.map(order),
                                     kind="stable", ignore_index=True)


def whole_model(times: pd.DataFrame) -> Answer:
    question = "What does torch.compile do for the whole model?"
    both = beside(times)
    if both.empty:
        return no_data("compile-model", question, "compile")
    context, cpu = both["context_length"].iloc[0], (both["device"] == "cpu").all()
    optimizer = listing(sorted(set(both["optimizer"])))
    text = [f"Compiled is each block, its code compiled once and used by all; embedding, head, loss and AdamW ({optimizer})"
            f" stay eager. Both run in one"
            " process, one after the other."]
    numbers, parts = {}, []
    for mode, words in MODE_WORDS.items():
        own = both[both["mode"] == mode]
        if len(own):
            parts.append(f"{words} {span(own['speedup'])} times as fast")
            numbers |= {f"{mode}_low": own["speedup"].min(), f"{mode}_high": own["speedup"].max()}
    text.append(f"At context {context}, over the rows of the table: " + listing(parts) + ".")
    slower = both[both["sure"] & (both["speedup"] < 1)]
    same = both[~both["sure"]]
    if len(slower):
        text.append(f"Slower by more than the intervals allow: {listing(_names(slower))}.")
    if len(same):
        text.append(f"In {len(same)} of {count(len(both), 'pair')} the intervals overlap, so that nothing can be told.")
    steps = both[both["mode"] == "step"]
    finding = ""
    if len(steps):
        best, least = steps.loc[steps["speedup"].idxmax()], steps.loc[steps["speedup"].idxmin()]
        text.append(f"The full step of {_name(best)} goes from {ms(best.median_ms)} to {ms(best.median_ms_compiled)}"
                    + (f", which is the most; the least is for {_name(least)}: {ms(least.median_ms)} to"
                       f" {ms(least.median_ms_compiled)}." if len(steps) > 1 else "."))
        finding = (f"**With each block compiled, a full step is {span(steps['speedup'])} times as fast**, most for"
                   f" {_name(best)}: {ms(best.median_ms)} to"
                   f" {ms(best.median_ms_compiled)}.")
    if not cpu:
        text.append(_launch_words(both))
    text.append(_compile_words(times))
    model = _at_once(times)
    if len(model):
        text.append("Compiling the whole forward at once instead of one block takes " + listing(
            f"{number(row.compile_s)} s for {row.size} in place of {number(row.compile_s_block)} s and then"
            f" {ms(row.median_ms)} a step in place of {ms(row.median_ms_block)}"
            for row in model.itertuples()) + ".")
    tables = [(f"Median wall time in ms at context {context}, eager to each block compiled, and how many times as fast (*"
               f" the intervals overlap)"
               + ("." if cpu else "; the share of the step's time in launch-bound phases, before and after; and the compiled"
                                  " first pass of forward + backward in s."), table(both, times))]
    return Answer("compile-model", question, " ".join(filter(None, text)), finding, numbers, tables,
                  [("compile_model", "A full step eager and compiled, with written-out attention and"
                                     " with SDPA")], runs_of(times))


def _name(row: pd.Series) -> str:
    return f"{row['size']} in {row['precision']} with {ATTENTION_WORDS[row['attention']]} attention"


def _names(rows: pd.DataFrame) -> list[str]:
    return [f"{_name(row)} ({MODE_WORDS[row['mode']]}, {number(row['speedup'])})" for _, row in rows.iterrows()]


def _launch_words(both: pd.DataFrame) -> str:
    """Launch-bound before and after, of the full step."""
    steps = both[both["mode"] == "step"]
    before, after = (steps[f"launch_bound_share{suffix}"] for suffix in ("", "_compiled"))
    mostly = steps[before > 0.5]
    still = steps[after > 0.5]
    text = f"Of the full step's time, {span(before * 100, '%', 2)} is in launch-bound phases when eager and {span(after * 100, '%', 2)} when compiled."
    if len(mostly):
        text += (f" Mostly launch-bound when eager: {listing(_name(row) for _, row in mostly.iterrows())};"
                 f" {int((after[mostly.index] < before[mostly.index] - NEARLY).sum())} of these {len(mostly)} less so when"
                 f" compiled.")
    if len(still):
        text += f" Mostly launch-bound when compiled: {listing(_name(row) for _, row in still.iterrows())}."
    return text


def compile_seconds(times: pd.DataFrame) -> pd.DataFrame:
    """Of each compiled run the first forward + backward less a steady one, in s, with graphs, breaks and those of all modes."""
    whole = times[(times["phase"] == WHOLE) & (times["status"] == "ok")]
    keys = ["size", "context_length", "precision", "attention", "variant"]
    first = whole[(whole["mode"] == "forward_backward") & (whole["variant"] != "eager")].copy()
    first["compile_s"] = (first["first_ms"] - first["median_ms"]) / 1e3
    inference = whole[whole["mode"] == "forward"].assign(inference_s=(whole["first_ms"] - whole["median_ms"]) / 1e3)
    graphs = times[times["phase"] == WHOLE].groupby(keys, observed=True)[["graphs", "graph_breaks"]].sum().reset_index()
    return first[[*keys, "compile_s", "study", "run_id"]].merge(inference[[*keys, "inference_s"]], on=keys,
                                                                how="left").merge(graphs, on=keys)


def _compile_words(times: pd.DataFrame) -> str:
    cost = compile_seconds(times)
    own = cost[cost["variant"] == "block"]
    if own.empty:
        return ""
    breaks = int(own["graph_breaks"].sum())
    extra = own["graphs"] - 2
    return (f"Compiling is in the first step and not in the times above: {span(own['compile_s'], ' s')} for forward and"
            f" backward and {span(own['inference_s'], ' s')} for forward"
            f" without gradients."
            f" {'Each run compiled two graphs, one with gradients and one without, and none again' if (extra == 0).all() else f'Runs compiled {span(own.graphs)} graphs, where two are needed, one with gradients and one without'};"
            f" {count(breaks, 'graph break')}.")


def _at_once(times: pd.DataFrame) -> pd.DataFrame:
    """Full steps of the whole model compiled at once beside those of the block, which may be of another run."""
    keys = ["size", "context_length", "precision", "attention"]
    steps = times[(times["phase"] == WHOLE) & (times["status"] == "ok") & (times["mode"] == "step")]
    cost = compile_seconds(times)[[*keys, "variant", "compile_s"]]
    steps = steps.merge(cost, on=[*keys, "variant"])
    both = steps[steps["variant"] == "model"].merge(steps[steps["variant"] == "block"], on=keys, suffixes=("", "_block"))
    return by_size(both) if len(both) else both


def table(both: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Size, precision and attention down, modes across."""
    cost = compile_seconds(times).set_index(["size", "context_length", "precision", "attention", "variant"])["compile_s"]
    rows = []
    for key, own in both.groupby(["size", "precision", "attention"], sort=False, observed=True):
        row = dict(zip(("size", "precision", "attention"), (*key[:2], ATTENTION_WORDS[key[2]])))
        modes = own.set_index("mode")
        for mode, words in MODE_WORDS.items():
            if mode in modes.index:
                r = modes.loc[mode]
                row[words] = f"{number(r.median_ms)} to {number(r.median_ms_compiled)}: {number(r.speedup)}{'' if r.sure else ' *'}"
        if "launch_bound_share" in own and "step" in modes.index:
            row["launch-bound"] = f"{percent(modes.launch_bound_share['step'])} to {percent(modes.launch_bound_share_compiled['step'])}"
        row["compile (s)"] = number(cost.get((key[0], own["context_length"].iloc[0], key[1], key[2], "block"), float("nan")))
        rows.append(row)
    return pd.DataFrame(rows).fillna("–")


def sdpa(times: pd.DataFrame) -> Answer:
    question = "And with scaled_dot_product_attention in place of the written-out attention?"
    if times.empty:
        return no_data("compile-sdpa", question, "compile")
    whole = times[(times["phase"] == WHOLE) & (times["status"] == "ok") & times["variant"].isin(["eager", "block"])]
    keys = ["size", "context_length", "precision", "mode", "variant"]
    both = whole[whole["attention"] == "eager"].merge(whole[whole["attention"] == "sdpa"], on=keys, suffixes=("", "_sdpa"))
    if both.empty:
        return no_data("compile-sdpa", question, "compile")
    both["gain"] = both["median_ms"] / both["median_ms_sdpa"]
    both["sure"] = [apart(row[INTERVAL], row[[f"{c}_sdpa" for c in INTERVAL]].set_axis(INTERVAL))
                    for _, row in both.iterrows()]
    steps = by_size(both[both["mode"] == "step"])
    parts = []
    for variant, words in VARIANT_WORDS.items():
        own = steps[steps["variant"] == variant]
        if len(own):
            parts.append(f"{words}, the full step is {span(own['gain'])} times as fast with SDPA")
    text = f"At context {both['context_length'].iloc[0]}, which of its kernels SDPA takes being left to torch: " + listing(parts) + "."
    ends = _both_ends(times)
    finding = ""
    if len(ends):
        best = ends.loc[ends["gain"].idxmax()]
        text += f" Both together make the full step {span(ends['gain'])} times as fast as eager with written-out attention."
        finding = (f"**Compiling and SDPA together make the full step {span(ends['gain'])} times as fast**, most for"
                   f" {best['size']} in {best['precision']}:"
                   f" {ms(best.median_ms)} to {ms(best.median_ms_both)}.")
    losses = both[both["sure"] & (both["gain"] < 1)]
    if len(losses):
        text += (f" In {len(losses)} of {count(len(both), 'pair')} SDPA is the slower one: " + listing(
            f"{row['size']} in {row['precision']}, {MODE_WORDS[row['mode']]}, {VARIANT_WORDS[row['variant']]}"
            for _, row in losses.iterrows()) + ".")
        bound = losses[losses[["launch_bound_share", "launch_bound_share_sdpa"]].min(axis=1) > 0.5] if "launch_bound_share" in losses else losses[:0]
        if len(bound):
            text += (f" Launches set the time in {len(bound)} of these, and with SDPA the host takes"
                     f" {span(bound['enqueue_ms_sdpa'] / bound['enqueue_ms'])} times as long to enqueue them.")
    shown = steps.assign(cell=[f"{number(r.median_ms)} to {number(r.median_ms_sdpa)}:"
                               f" {number(r.gain)}{'' if r.sure else ' *'}" for r in steps.itertuples()])
    shown = shown.pivot(index=["size", "precision"], columns="variant", values="cell").rename(columns={"block": "compiled"})
    shown = shown[[c for c in ("eager", "compiled") if c in shown]].fillna("–").reset_index()
    return Answer("compile-sdpa", question, text, finding, {"best": both["gain"].max()},
                  [("Full step, median wall time in ms, written-out attention to SDPA, and how many times as fast (* the"
                    " intervals overlap).", shown)],
                  runs=runs_of(times))


def _both_ends(times: pd.DataFrame) -> pd.DataFrame:
    """Full steps: eager with written-out attention beside compiled with SDPA."""
    keys = ["size", "context_length", "precision"]
    steps = times[(times["phase"] == WHOLE) & (times["status"] == "ok") & (times["mode"] == "step")]
    start = steps[(steps["variant"] == "eager") & (steps["attention"] == "eager")]
    end = steps[(steps["variant"] == "block") & (steps["attention"] == "sdpa")]
    both = start.merge(end, on=keys, suffixes=("", "_both"))
    return both.assign(gain=both["median_ms"] / both["median_ms_both"])
