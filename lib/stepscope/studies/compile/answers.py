"""The whole model eager against compiled, answered from the table of ``stepscope.compiled.all_times``.

Two times are compared where one process measured both; AdamW's implementations are not, and there the text says so.
"""
from collections.abc import Callable, Iterable

import pandas as pd

from stepscope.say.formats import Answer, apart, count, listing, ms, neighbours_words, no_data, number, percent, runs_of, span
from stepscope.say.formats import MODE_WORDS, NEARLY
from stepscope.config import PRECISIONS
from stepscope.runs.tables import by_size
from stepscope.step.timing import WHOLE

ATTENTION_WORDS = {"eager": "written-out", "sdpa": "SDPA"}
WITH = {"eager": "with written-out attention", "sdpa": "with SDPA"}
VARIANT_WORDS = {"eager": "eager", "block": "compiled"}
MAIN = "foreach"  # AdamW's implementation in all tables but the one that compares two
INTERVAL = ["ci_low_ms", "ci_high_ms"]
FLAGGED = " †"    # behind a pair of which a side's samples are not one steady state


def whole_steps(times: pd.DataFrame, optimizer: str = MAIN) -> pd.DataFrame:
    """Rows of whole steps that were timed, with one implementation of AdamW."""
    if times.empty:
        return times
    return times[(times["phase"] == WHOLE) & (times["status"] == "ok") & (times["optimizer"] == optimizer)]


def paired(before: pd.DataFrame, after: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Two tables of whole steps side by side, the columns of the second with ``_after``.

    Added: ``speedup``; ``sure``, whether the medians' 95% intervals are apart; ``flagged``, whether a side's samples are not
    one steady state.
    """
    if before.empty or after.empty:
        return before.iloc[:0]
    both = before.merge(after, on=keys, suffixes=("", "_after"))
    both["speedup"] = both["median_ms"] / both["median_ms_after"]
    both["sure"] = [apart(row[INTERVAL], row[[f"{c}_after" for c in INTERVAL]].set_axis(INTERVAL)) for _, row in both.iterrows()]
    both["flagged"] = (both["flags"] != "") | (both["flags_after"] != "")
    return ordered(both)


def ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """By size, context, precision, attention and mode, each in its own order."""
    order = {name: rank for names in (PRECISIONS, ATTENTION_WORDS, MODE_WORDS) for rank, name in enumerate(names)}
    return by_size(rows).sort_values(["size", "context_length", "precision", "attention", "mode"], kind="stable", ignore_index=True,
                                     key=lambda column: column if column.name in ("size", "context_length") else column.map(order))


def beside(times: pd.DataFrame, before: str = "eager", after: str = "block", optimizer: str = MAIN) -> pd.DataFrame:
    """Two variants of one run, attention and mode in a row; see :func:`paired`."""
    steps = whole_steps(times, optimizer)
    return paired(*(steps[steps["variant"] == variant] for variant in (before, after)), ["run_id", "attention", "mode"]) \
        if len(steps) else steps


def by_attention(times: pd.DataFrame, optimizer: str = MAIN) -> pd.DataFrame:
    """Written-out attention and SDPA of one run, variant and mode in a row; see :func:`paired`."""
    steps = whole_steps(times, optimizer)
    return paired(*(steps[(steps["attention"] == attention) & steps["variant"].isin(VARIANT_WORDS)] for attention in ATTENTION_WORDS),
                  ["run_id", "variant", "mode"]) if len(steps) else steps


def both_ends(times: pd.DataFrame) -> pd.DataFrame:
    """Eager with written-out attention and compiled with SDPA of one run and mode in a row; see :func:`paired`."""
    steps = whole_steps(times)
    return paired(*(steps[(steps["attention"] == attention) & (steps["variant"] == variant)]
                    for attention, variant in zip(ATTENTION_WORDS, VARIANT_WORDS)), ["run_id", "mode"]) if len(steps) else steps


def relative(times: pd.DataFrame) -> pd.DataFrame:
    """Whole steps as multiples of eager with written-out attention in the same run and mode: ``relative`` with
    ``relative_low`` and ``relative_high``, the farthest that the ends of both 95% intervals allow; ``base_ms``."""
    steps = whole_steps(times)
    if steps.empty:
        return steps
    base = steps[(steps["attention"] == "eager") & (steps["variant"] == "eager")]
    base = base[["run_id", "mode", "median_ms", *INTERVAL]].set_axis(["run_id", "mode", "base_ms", "base_low", "base_high"], axis=1)
    both = steps.merge(base, on=["run_id", "mode"])
    return by_size(both.assign(relative=both["median_ms"] / both["base_ms"], relative_low=both["ci_low_ms"] / both["base_high"],
                               relative_high=both["ci_high_ms"] / both["base_low"]))


def _cell(row) -> str:
    """In ms, and how many times as fast."""
    return (f"{number(row.median_ms)} to {number(row.median_ms_after)}: {number(row.speedup) if row.sure else 'none'}"
            f"{FLAGGED if row.flagged else ''}")


def _legend(both: pd.DataFrame) -> str:
    """What the marks of :func:`_cell` mean, of those that there are."""
    kinds = sorted({flag.split(":")[0] for column in ("flags", "flags_after") for text in both[column] for flag in text.split("; ") if flag})
    parts = (["none: the 95% intervals overlap"] if not both["sure"].all() else []) \
        + ([f"{FLAGGED.strip()}: samples of a side are {', '.join(kinds[:-1])}{' or ' if kinds[1:] else ''}{kinds[-1]}"] if kinds else [])
    return "".join(f"; {part}" for part in parts)


def _name(row: pd.Series) -> str:
    return f"{row['size']} in {row['precision']} {WITH[row['attention']]}"


def _marked(row: pd.Series, words: str) -> str:
    """A pair in a sentence, with its mode, speedup and mark."""
    return f"{words} ({MODE_WORDS[row['mode']]}, {number(row['speedup'])}{FLAGGED if row['flagged'] else ''})"


def _gain(both: pd.DataFrame) -> str:
    """How many times as fast; where that is not so of all pairs or not one way, in how many of them."""
    faster, slower = (both[both["sure"] & way] for way in (both["speedup"] > 1, both["speedup"] < 1))
    none = len(both) - len(faster) - len(slower)
    if len(faster) == len(both):
        return f"{_span(both)} times as fast"
    parts = [f"{words} in {len(own)} ({_span(own)} times as fast)" for own, words in ((faster, "faster"), (slower, "slower"))
             if len(own)] + ([f"no change in {none}"] if none else [])
    return f"of {count(len(both), 'pair')} {listing(parts)}"


def _span(own: pd.DataFrame) -> str:
    """Lowest to highest speedup, each marked if its pair is."""
    ends = [own.loc[own["speedup"].idxmin()], own.loc[own["speedup"].idxmax()]]
    shown = [f"{number(row['speedup'])}{FLAGGED if row['flagged'] else ''}" for row in ends]
    return shown[0] if number(ends[0]["speedup"]) == number(ends[1]["speedup"]) else " to ".join(shown)


def _gains(both: pd.DataFrame) -> str:
    return "; ".join(f"{words}, {_gain(own)}" for mode, words in MODE_WORDS.items() if len(own := both[both["mode"] == mode]))


def _headline(steps: pd.DataFrame, what: str, name: Callable[[pd.Series], str]) -> str:
    """For the first page: what a change does to the full step, and where it does most; empty where it makes none faster."""
    sure = steps[steps["sure"]]
    if sure.empty or (best := sure.loc[sure["speedup"].idxmax()])["speedup"] < 1:
        return ""
    sentence = (f"**{what} a full step {span(sure['speedup'])} times as fast**"
                + (f" in {len(sure)} of {count(len(steps), 'pair')}" if len(sure) < len(steps) else "")
                + f"{', most' if len(steps) > 1 else ''} for {name(best)}" + f": {_from_to(best)}.")
    return sentence.replace(FLAGGED, " (samples not steady)")  # no mark is explained there


def _said(sentences: list[str]) -> str:
    """Sentences as one text, which explains the mark if it has it."""
    text = " ".join(filter(None, sentences))
    return text + (f" {FLAGGED.strip()} marks a pair in which a side's samples are not steady." if FLAGGED in text else "")


def _contexts(both: pd.DataFrame) -> str:
    """Context and batch that the pairs share, or all there are."""
    return listing(f"{field} {listing(str(n) for n in sorted(set(both[column])))}"
                   for field, column in (("context", "context_length"), ("batch", "batch_size")))


def _table(both: pd.DataFrame, across: pd.Series, cells: Iterable[str]) -> pd.DataFrame:
    """Runs and attentions down, ``across`` over it."""
    wide = both.assign(across=across, cell=cells, attention=both["attention"].map(ATTENTION_WORDS))
    index = ["run_id", "size", *(["context_length"] if wide["context_length"].nunique() > 1 else []), "precision", "attention"]
    order = wide[index].drop_duplicates()
    wide = wide.pivot(index=index, columns="across", values="cell").reindex(pd.MultiIndex.from_frame(order))
    wide = wide[list(dict.fromkeys(across))].reset_index().drop(columns="run_id").rename(columns={"context_length": "context"})
    return wide.rename_axis(None, axis=1).astype(object).fillna("–")


def _by_mode(both: pd.DataFrame, cells: list[str]) -> pd.DataFrame:
    table = _table(both, both["mode"].map(MODE_WORDS), cells)
    return table[[column for column in table if column not in MODE_WORDS.values()] + [words for words in MODE_WORDS.values() if words in table]]


# -- times -------------------------------------------------------------------------------------------------------------

def whole_model(times: pd.DataFrame) -> Answer:
    question = "What does torch.compile do for the whole model?"
    both = beside(times)
    if both.empty:
        told = _not_timed(times) if len(times) else []
        return Answer("compile-model", question, " ".join(["Nothing can be compared.", *told]), runs=runs_of(times)) if told \
            else no_data("compile-model", question, "compile")
    text = [f"Compiled is each block, its code compiled once and used by all; embedding, head, loss and AdamW ({MAIN}) stay eager."
            " Everything of one size and precision was measured in one process, one after another. A change counts as none where"
            f" the 95% intervals of the two medians overlap. Each is a median of {_whole(both['timed_steps'])} steps after"
            f" {_whole(both['warmup_steps'])} of warm-up.",
            neighbours_words(both, "and what waits for the host may have taken longer for it")]
    numbers = {}
    for mode, own in both.groupby("mode"):
        numbers |= {f"{mode}_low": own["speedup"].min(), f"{mode}_high": own["speedup"].max()}
    text.append(f"At {_contexts(both)}, compiled against eager: {_gains(both)}.")
    slower = both[both["sure"] & (both["speedup"] < 1)]
    if len(slower):
        text.append(f"Slower: {listing(_marked(row, _name(row)) for _, row in slower.iterrows())}.")
    steps = both[(both["mode"] == "step") & both["sure"]]
    if len(steps):
        best, least = steps.loc[steps["speedup"].idxmax()], steps.loc[steps["speedup"].idxmin()]
        text.append(f"The full step of {_name(best)} goes from {_from_to(best)}" + (
            f", which is the most; the least is for {_name(least)}: {_from_to(least)}." if len(steps) > 1 else "."))
    text += _not_timed(times)
    finding = _headline(both[both["mode"] == "step"], "Compiling each block makes", _name)
    return Answer("compile-model", question, _said(text), finding, numbers,
                  [(f"Median wall time in ms, eager to each block compiled, and how many times as fast{_legend(both)}.",
                    _by_mode(both, [_cell(row) for row in both.itertuples()]))],
                  [("compile_model", "Forward + backward and a full step, compiled and with SDPA, as multiples of eager with"
                                     " written-out attention in the same process, whose time stands under the size")], runs_of(both))


def _whole(counts: pd.Series) -> str:
    return listing(str(n) for n in sorted(set(counts.astype(int))))


def _from_to(row: pd.Series) -> str:
    return f"{ms(row['median_ms'])} to {ms(row['median_ms_after'])}{FLAGGED if row['flagged'] else ''}"


def _not_timed(times: pd.DataFrame) -> list[str]:
    """A sentence for each reason for which something has no time."""
    found = []
    for status, words in (("oom", "Out of memory"), ("unsupported", "Not compiled")):
        rows = by_size(times[(times["status"] == status) & (times["optimizer"] == MAIN)])
        if len(rows):
            found.append(f"{words}: " + listing(f"{_name(row)} ({MODE_WORDS[row['mode']]}, {VARIANT_WORDS.get(row['variant'], 'one graph')})"
                                                for _, row in rows.iterrows()) + ".")
    return found


# -- launches, and the optimizer ---------------------------------------------------------------------------------------

def launches(times: pd.DataFrame) -> Answer:
    question = "Does compiling end the wait for the host's launches, and what is the optimizer's part?"
    both = beside(times)
    if both.empty:
        return no_data("compile-launches", question, "compile")
    text, tables, columns, finding, numbers = [], [], [], "", {}
    optimizer, gpu = optimizer_phase(times), "launch_bound_share" in both
    for mode in ("forward_backward", "step") if gpu else ():
        own = both[both["mode"] == mode]
        if len(own):
            text.append("\n\n" * (mode == "step") + _moves(own))
            columns.append(_shares(own, "launch_bound_share", f"launch-bound, {MODE_WORDS[mode]}"))
            change = own["launch_bound_share_after"] - own["launch_bound_share"]
            numbers |= {f"{mode}_falls": int((change < -NEARLY).sum()), f"{mode}_rises": int((change > NEARLY).sum()),
                        f"{mode}_bound": int((own["launch_bound_share"] > NEARLY).sum())}
    if gpu:
        text.insert(0, "A phase is launch-bound where the GPU keeps up with the host and waits for its launches.")
        if "forward_backward_falls" in numbers:
            falls, rises = (numbers[f"forward_backward_{way}"] or "none" for way in ("falls", "rises"))
            bound, of = numbers["forward_backward_bound"], int((both["mode"] == "forward_backward").sum())
            finding = (f"**Where forward + backward is launch-bound when eager ({bound or 'none'} of {count(of, 'pair')}), compiling lowers the"
                       f" share of it that is in {falls}; it raises that share in {rises} of the {of}.**")
    else:
        text.append("Launches set no time here: on a CPU the host does the work itself.")
    if len(optimizer):
        text.append(f"\n\nAdamW, which is not compiled, takes {span(optimizer['median_ms_after'] / optimizer['median_ms'])} times as long in the"
                    f" compiled step as in the eager one; it is {_percents(optimizer['share'])} of the eager full step and"
                    f" {_percents(optimizer['share_after'])} of the compiled one." + (_dilution(both, optimizer) if gpu else ""))
        columns.append(_shares(optimizer, "share", "AdamW's part of the full step"))
    if columns:
        rows = pd.concat(columns)
        tables.append((("Share of the phases' time that is launch-bound, and AdamW's part of it," if gpu
                        else "AdamW's part of the full step's time,") + " eager to compiled.",
                       _table(rows, rows["column"], rows["cell"])))
    pairs = by_optimizer(times)
    if len(pairs):
        words, table = _fused(times, pairs)
        text.append(words)
        tables.append((f"Compiled, {MAIN} to fused AdamW, each in a process of its own: median wall time of the full step in ms and how many times as"
                       f" fast{_legend(pairs)}; its optimizer's phase in ms; and how many times as fast as eager it is in its own process.",
                       table))
    runs = set(runs_of(both)) | (set("compile/" + pairs["run_id_after"]) if len(pairs) else set())
    return Answer("compile-launches", question, _said(text), finding, numbers, tables, runs=sorted(runs))


def _percents(shares: pd.Series) -> str:
    return span(shares * 100, "%", 2)


def _shares(rows: pd.DataFrame, column: str, title: str) -> pd.DataFrame:
    """The rows with what is to stand in the table's column of that title."""
    return rows.assign(column=title, cell=[f"{percent(row[column])} to {percent(row[f'{column}_after'])}" for _, row in rows.iterrows()])


def _moves(own: pd.DataFrame) -> str:
    """Where one mode's launch-bound share falls and where it rises."""
    before, after = own["launch_bound_share"], own["launch_bound_share_after"]
    falls, rises = own[after < before - NEARLY], own[after > before + NEARLY]

    def named(rows: pd.DataFrame) -> str:
        return listing(f"{row['size']} in {row['precision']}, {ATTENTION_WORDS[row['attention']]} ({percent(row['launch_bound_share'])}"
                       f" to {percent(row['launch_bound_share_after'])}{FLAGGED if row['flagged'] else ''})" for _, row in rows.iterrows())
    text = (f"{MODE_WORDS[own['mode'].iloc[0]].capitalize()}: {_percents(before)} of the time is launch-bound when eager and {_percents(after)}"
            " when compiled.")
    text += f" Compiling lowers the share for {named(falls)}." if len(falls) else " Compiling lowers the share nowhere."
    if len(rises):
        text += f" It raises the share for {named(rises)}"
        # By the definition of launch-bound: it waits where it did not, and the step did not get longer.
        text += (": the GPU, with less to do, waits there for launches that it did not wait for before."
                 if (rises["sure"] & (rises["speedup"] > 1)).all() and not rises["flagged"].all() else ".")
    stay = own[(own["mode"] == "forward_backward") & (before > 0.5) & (after > 0.5)]
    if len(stay):
        text += (f" Where it is mostly launch-bound on both sides ({count(len(stay), 'pair')}), the host takes"
                 f" {span(stay['enqueue_ms_after'] / stay['enqueue_ms'])} times as long to enqueue it when compiled, and still sets the time.")
    return text


def optimizer_phase(times: pd.DataFrame, optimizer: str = MAIN) -> pd.DataFrame:
    """AdamW's phase of a run's full steps, eager and with blocks compiled in a row: ``share`` and ``share_after`` of the
    phases' time."""
    phases = times[(times["status"] == "ok") & (times["mode"] == "step") & (times["phase"] != WHOLE) & (times["optimizer"] == optimizer)]
    total = phases.groupby(["run_id", "attention", "variant"])["median_ms"].transform("sum")
    phases = phases.assign(share=phases["median_ms"] / total)
    phases = phases[phases["phase"] == "optimizer"]
    return paired(*(phases[phases["variant"] == variant] for variant in VARIANT_WORDS), ["run_id", "attention"])


def _dilution(both: pd.DataFrame, optimizer: pd.DataFrame) -> str:
    """Whether the full step's launch-bound share falls for more than AdamW's part in it growing."""
    bound = {side: int((optimizer[f"launch_bound_share{side}"] > 0.5).sum()) for side in ("", "_after")}
    text = (f" It is itself launch-bound in {bound[''] or 'none'} of {count(len(optimizer), 'eager step')} and in {bound['_after'] or 'none'} of"
            " the compiled ones.")
    rows = both[both["mode"] == "step"].merge(optimizer, on=["run_id", "attention"], suffixes=("", "_phase"))
    falls = rows[rows["launch_bound_share_after"] < rows["launch_bound_share"] - NEARLY]
    if falls.empty:
        return text

    def rest(side: str) -> pd.Series:  # the step's share is the mean of AdamW's phase (0 or 1) and of the rest, weighted by time
        share = falls[f"share{side}"]
        return (falls[f"launch_bound_share{side}"] - share * falls[f"launch_bound_share{side}_phase"]) / (1 - share)
    still = int((rest("_after") < rest("") - NEARLY).sum())
    return text + (f" Without its phase, the launch-bound share of the full step falls in {still or 'none'} of the {len(falls)} in which"
                   " it falls with it"
                   + (": there AdamW only takes a larger part of a shorter step."
                      if not still and (falls["share_after"] > falls["share"]).all() else "."))


def by_optimizer(times: pd.DataFrame) -> pd.DataFrame:
    """Compiled full steps with foreach and with fused AdamW in a row, of different runs; see :func:`paired`."""
    steps = [whole_steps(times, optimizer) for optimizer in (MAIN, "fused")]
    return paired(*(own[(own["variant"] == "block") & (own["mode"] == "step")] for own in steps),
                  ["size", "context_length", "batch_size", "precision", "attention", "mode"])


def _fused(times: pd.DataFrame, pairs: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Sentences and table on the pairs of :func:`by_optimizer`."""
    speedups, phases = {}, {}  # by run and attention; a run is of one implementation
    for optimizer in (MAIN, "fused"):
        steps, phase = beside(times, optimizer=optimizer), optimizer_phase(times, optimizer)
        speedups |= {(row.run_id, row.attention): row.speedup for row in steps.itertuples() if row.mode == "step"}
        phases |= {(row.run_id, row.attention): row.median_ms_after for row in phase.itertuples()}
    text = ("\n\nCompiled, a full step takes " + listing(
        f"{ms(row['median_ms_after'])} with fused AdamW and {ms(row['median_ms'])} with {MAIN} for {_name(row)}"
        f"{'' if row['sure'] else ' (no change)'}{FLAGGED if row['flagged'] else ''}" for _, row in pairs.iterrows())
        + ". These pairs are of two processes each, whose hosts need not be equally fast.")
    saved = [phases[row["run_id"], row["attention"]] - phases[row["run_id_after"], row["attention"]] for _, row in pairs.iterrows()
             if {(row["run_id"], row["attention"]), (row["run_id_after"], row["attention"])} <= set(phases)]
    if saved:
        text += f" AdamW's own phase is {listing(ms(value) for value in saved)} shorter; what a step gains besides is not AdamW's."
    own = [[speedups.get(key) for key in zip(pairs[run], pairs["attention"])] for run in ("run_id", "run_id_after")]
    if None not in own[0] + own[1]:
        text += (f" Each within its own process, the compiled step is {span(own[1])} times as fast as eager with fused AdamW and"
                 f" {span(own[0])} with {MAIN}.")
    rows = []
    for _, row in pairs.iterrows():
        foreach, fused = ((row[run], row["attention"]) for run in ("run_id", "run_id_after"))
        rows.append({"size": row["size"], "precision": row["precision"], "attention": ATTENTION_WORDS[row["attention"]],
                     "full step": _cell(row),
                     "AdamW": f"{number(phases.get(foreach))} to {number(phases.get(fused))}",
                     "times as fast as eager": f"{number(speedups.get(foreach))} to {number(speedups.get(fused))}"})
    return text, pd.DataFrame(rows)


# -- memory ------------------------------------------------------------------------------------------------------------

def peak_memory(times: pd.DataFrame) -> Answer:
    question = "What does compiling change in the peak of memory?"
    both = beside(times)
    if both.empty:
        return no_data("compile-memory", question, "compile")
    if "peak_allocated_mib" not in both or both["peak_allocated_mib"].isna().all():
        return Answer("compile-memory", question, "Not measured here: a CPU's allocator keeps no peak.", runs=runs_of(both))
    both = both[both["mode"] != "forward"]  # measured after full steps, with AdamW's moments still in memory
    both = both.assign(change=both["peak_allocated_mib_after"] / both["peak_allocated_mib"] - 1)
    text, parts, finding = [f"The most that the allocator had given out at once, at {_contexts(both)}. (Forward alone was measured after full steps,"
                            " with AdamW's moments in memory, and is not shown.)"], [], ""
    for mode, words in MODE_WORDS.items():
        own = both[both["mode"] == mode]
        if own.empty:
            continue
        least, most = own.loc[own["change"].idxmin()], own.loc[own["change"].idxmax()]
        parts.append(f"{words} by {_signed(least['change'])} ({_name(least)}, {_gib(least)})"
                     + (f" to {_signed(most['change'])}" if _signed(least["change"]) != _signed(most["change"]) else ""))
        if mode == "forward_backward" and most["change"] < 0:
            finding = (f"**Compiled, forward + backward peaks {_percents(-own['change'])} lower**, most for"
                       f" {_name(least)}: {_gib(least)}.")
    text.append(f"With each block compiled it changes: {'; '.join(parts)}.")
    more = both[both["change"] > NEARLY]
    if len(more):
        text.append(f"It grows by more than {percent(NEARLY)} for " + listing(f"{_name(row)} ({MODE_WORDS[row['mode']]}, {_gib(row)})"
                                                                             for _, row in more.iterrows()) + ".")
    ends = both_ends(times)
    ends = ends[ends["mode"] == "forward_backward"] if len(ends) else ends
    if len(ends):
        change = ends["peak_allocated_mib_after"] / ends["peak_allocated_mib"] - 1
        best = ends.loc[change.idxmin()]
        text.append(f"Compiling and SDPA together change forward + backward's by {_signed(change.min())} ({best['size']} in {best['precision']},"
                    f" {_gib(best)})" + (f" to {_signed(change.max())}." if _signed(change.min()) != _signed(change.max()) else "."))
    cells = [f"{_gib(row, '')}: {_signed(row['change'])}" for _, row in both.iterrows()]
    return Answer("compile-memory", question, " ".join(text), finding, {"least": both["change"].min(), "most": both["change"].max()},
                  [("Peak of allocated memory in GiB, eager to each block compiled.", _by_mode(both, cells))], runs=runs_of(both))


def _signed(change: float) -> str:
    """A change in whole percent, with its sign unless it rounds to none."""
    return "0%" if abs(change) < 0.005 else f"{change:+.0%}"


def _gib(row: pd.Series, unit: str = " GiB") -> str:
    return f"{number(row['peak_allocated_mib'] / 1024)} to {number(row['peak_allocated_mib_after'] / 1024)}{unit}"


# -- compiling itself --------------------------------------------------------------------------------------------------

def compile_seconds(times: pd.DataFrame) -> pd.DataFrame:
    """Of each run, attention and compiled variant: ``training_s`` and ``inference_s``, the first forward + backward and the
    first forward alone, each less a steady one; ``first``, whether nothing was compiled in its process before; ``graphs``,
    ``graph_breaks`` and ``cached_graphs`` of all modes."""
    whole = whole_steps(times)
    whole = whole[whole["variant"] != "eager"] if len(whole) else whole
    if whole.empty:
        return whole
    keys = ["run_id", "attention", "variant"]
    whole = whole.assign(seconds=(whole["first_ms"] - whole["median_ms"]) / 1e3)
    cost = whole[whole["mode"] == "forward_backward"].rename(columns={"seconds": "training_s"})
    cost = cost[[*keys, "mode", "size", "context_length", "precision", "study", "beside", "training_s"]]
    cost["first"] = ~cost["run_id"].duplicated()  # rows of a run are in the order they were run
    inference = whole[whole["mode"] == "forward"].rename(columns={"seconds": "inference_s"})
    counts = whole.groupby(keys)[["graphs", "graph_breaks", "cached_graphs"]].sum().reset_index()
    return ordered(cost.merge(inference[[*keys, "inference_s"]], on=keys, how="left").merge(counts, on=keys))


def cost(times: pd.DataFrame) -> Answer:
    question = "How long does compiling take, and does the whole forward as one graph do better than blocks?"
    seconds = compile_seconds(times)
    if seconds.empty:
        return no_data("compile-cost", question, "compile")
    cached, breaks = (int(seconds[column].sum()) for column in ("cached_graphs", "graph_breaks"))
    text = ["Compiling is in a first step and not in the times above. Torch's caches on disk were empty before each; "
            + ("no graph came out of one" if not cached else f"{count(cached, 'graph')} came out of one all the same") + "."]
    text.append(neighbours_words(seconds, "which may make compiling take longer"))
    blocks = seconds[seconds["variant"] == "block"]
    numbers = {}
    if len(blocks):
        first, later = (blocks[blocks["first"] == yes] for yes in (True, False))
        parts = []
        for own, words in ((first, "which comes first in its process and pays for starting the compiler as well"),
                           (later, "which comes after something else was compiled")):
            if len(own):
                attentions = listing(WITH[name] for name in ATTENTION_WORDS if name in set(own["attention"]))
                parts.append(f"{span(own['training_s'], ' s')} {attentions}, {words}" + (
                    f" (and {span(own['inference_s'], ' s')} for forward without gradients after it)" if own["inference_s"].notna().all() else ""))
        numbers = {name: own["training_s"].max() for name, own in (("first_s", first), ("later_s", later)) if len(own)}
        text.append(f"\n\nCompiling a block's forward and backward takes {'; '.join(parts)}.")
        text.append(("Each compiled two graphs, one with gradients and one without, and none again"
                     if (blocks["graphs"] == 2).all() else
                     f"Each compiled {span(blocks['graphs'], digits=1)} graphs, where two are needed, one with gradients and one without")
                    + f"; {count(breaks, 'graph break')}.")
    table = seconds.assign(attention=seconds["attention"].map(ATTENTION_WORDS),
                           compiled=seconds["variant"].map({"block": "block", "model": "whole forward"}),
                           a=seconds["training_s"].map(number), b=seconds["inference_s"].map(number),
                           first=seconds["first"].map({True: "yes", False: "no"}))
    table = table[["size", "precision", "attention", "compiled", "a", "first", "b"]].set_axis(
        ["size", "precision", "attention", "compiled", "forward + backward", "first of its process", "forward"], axis=1).astype(object)
    tables = [("Seconds of compiling: the first step less a steady one.", table)]
    both = beside(times, "block", "model")
    if len(both):
        text.append(f"\n\nThe whole forward as one graph against blocks, in the same process: {_gains(both)}.")
        more = both[(both["mode"] == "step") & both["sure"] & (both["speedup"] > 1 + NEARLY)]
        if len(more):
            text.append(f"By more than {percent(NEARLY)} it makes the full step faster for {listing(_name(row) for _, row in more.iterrows())}"
                        + (f"; with blocks, {int((more['launch_bound_share'] > 0.5).sum()) or 'none'} of these {len(more)} are mostly launch-bound."
                           if "launch_bound_share" in more else "."))
        own = seconds[~seconds["first"]]
        ratio = own[own["variant"] == "model"].merge(own[own["variant"] == "block"], on=["run_id", "attention"], suffixes=("", "_block"))
        if len(ratio):
            text.append(f"Compiling its forward and backward takes {span(ratio['training_s'] / ratio['training_s_block'])} times as long as a"
                        f" block's, where neither was the first of its process.")
        tables.append((f"Median wall time in ms, each block compiled to the whole forward compiled at once, and how many times as"
                       f" fast{_legend(both)}.", _by_mode(both, [_cell(row) for row in both.itertuples()])))
    return Answer("compile-cost", question, _said(text), "", numbers, tables, runs=runs_of(seconds))


def _part(row: pd.Series) -> str:
    return f"{row['size']} in {row['precision']}, {VARIANT_WORDS[row['variant']]}"


# -- SDPA --------------------------------------------------------------------------------------------------------------

def sdpa(times: pd.DataFrame) -> Answer:
    question = "And with scaled_dot_product_attention in place of the written-out attention?"
    both = by_attention(times)
    if both.empty:
        return no_data("compile-sdpa", question, "compile")
    steps = both[both["mode"] == "step"]
    parts = [f"{words}, {_gain(own)}" for variant, words in VARIANT_WORDS.items() if len(own := steps[steps["variant"] == variant])]
    text = [f"Both were measured in one process, at {_contexts(both)}; which of its kernels SDPA takes is left to torch."
            + (f" The full step with SDPA is: {'; '.join(parts)}." if parts else "")]
    ends = both_ends(times)
    ends = ends[ends["mode"] == "step"] if len(ends) else ends
    if len(ends):
        text.append(f"Both together against eager with written-out attention: {_gain(ends)}.")
    text.append(f"Over all modes: {_gain(both)}.")
    slower = both[both["sure"] & (both["speedup"] < 1)]
    losses = slower[~slower["flagged"]]
    if len(losses):
        text.append("It is slower for " + listing(_marked(row, _part(row)) for _, row in losses.iterrows()) + ".")
        bound = losses[losses[["launch_bound_share", "launch_bound_share_after"]].min(axis=1) > 0.5] if "launch_bound_share" in losses else losses[:0]
        if len(bound):
            text.append(f"Launches set the time in {len(bound)} of these, and with SDPA the host takes"
                        f" {span(bound['enqueue_ms_after'] / bound['enqueue_ms'])} times as long to enqueue them.")
    again = by_attention(times, "fused")
    for _, row in slower[slower["flagged"]].iterrows():
        same = again[(again["size"] == row["size"]) & (again["precision"] == row["precision"]) & (again["variant"] == row["variant"])
                     & (again["mode"] == row["mode"]) & (row["mode"] != "step")] if len(again) else again
        text.append(f"It measured slower for {_marked(row, _part(row))}, of whose samples one side is not steady"
                    + (f"; the same in the process with fused AdamW, which is not in this mode: {_gain(same)}." if len(same) else "."))
    cells = [_cell(row) for row in steps.itertuples()]
    tables = [(f"Full step, median wall time in ms, written-out attention to SDPA, and how many times as fast{_legend(steps)}.",
               _table(steps, steps["variant"].map(VARIANT_WORDS), cells).drop(columns="attention"))] if cells else []
    finding = _headline(ends, "Compiling and SDPA together make", lambda row: f"{row['size']} in {row['precision']}") if len(ends) else ""
    return Answer("compile-sdpa", question, _said(text), finding, {"best": both["speedup"].max()}, tables, runs=runs_of(both))
