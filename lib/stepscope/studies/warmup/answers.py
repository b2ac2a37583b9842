"""The warm-up questions, answered from the tables of ``stepscope.warmup``."""
import pandas as pd

from stepscope.say.formats import Answer, capital, count, listing, no_data, number, percent, plus_minus, runs_of, span
from stepscope.runs.tables import by_size
from stepscope.step.timing import WHOLE

SETTLED = 0.02  # of the steady median


def whole_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """Whole steps of processes where nothing ran before, with ``steady_ms`` (median of the last half of a run's) and ``beyond`` it, as a share."""
    if samples.empty:
        return samples
    steps = by_size(samples[(samples["phase"] == WHOLE) & ~samples["profile"].astype(bool) & ~samples["one_layer_first"].astype(bool)])
    if steps.empty:
        return steps
    last_half = steps[steps["step"] >= steps.groupby("run_id")["step"].transform("max") / 2]
    steady = last_half.groupby("run_id")["time_ms"].median()
    steps = steps.assign(steady_ms=steps["run_id"].map(steady)).sort_values(["size", "warmup_steps", "step"], kind="stable")
    return steps.assign(beyond=steps["time_ms"] / steps["steady_ms"] - 1)


def what_changes(samples: pd.DataFrame) -> Answer:
    question = "What changes with 0, 1, 2 or 5 warm-up steps?"
    steps = whole_steps(samples)
    if steps.empty:
        return no_data("warmup", question, "warmup")
    timed = steps[steps["timed"]]
    keys = ["size", "context_length", "warmup_steps", "run_id"]
    runs = timed.groupby(keys, observed=True).agg(mean=("time_ms", "mean"), std=("time_ms", "std"), median=("time_ms", "median"),
                                                  steady=("steady_ms", "first")).reset_index()
    runs["error"] = runs["mean"] / runs["steady"] - 1
    by_warmups = runs.groupby("warmup_steps")["error"]
    parts = [f"with {count(w, 'warm-up step')} the mean is {_off(errors)} the steady median" for w, errors in by_warmups]
    text = listing(parts)
    text = capital(text) + "."
    cold = runs[runs["warmup_steps"] == 0]
    finding = ""
    if len(cold):
        spread = cold["std"] / cold["mean"]
        text += (f" Without a warm-up the standard deviation is {percent(spread.min())} to {percent(spread.max())} of the mean, and the"
                 f" median of the same samples is still within {percent((cold['median'] / cold['steady'] - 1).abs().max(), 1)} of steady:"
                 f" one slow sample moves a mean, not a median.")
        finding = (f"**Without a warm-up a mean of {int(timed.groupby('run_id').size().max())} steps is"
                   f" {_off(cold['error'])} the truth**; the median barely notices.")
    runs["cell"] = [plus_minus(r.mean, r.std) for r in runs.itertuples()]
    table = runs.pivot(index=["size", "context_length"], columns="warmup_steps", values="cell")
    table.columns = [count(w, "warm-up") if w else "no warm-up" for w in table.columns]
    table["steady median"] = runs.groupby(["size", "context_length"], observed=True)["steady"].median().map(number)
    return Answer("warmup", question, text, finding, {f"error_{w}": e.max() for w, e in by_warmups},
                  [("Full step in ms, mean ± standard deviation of the timed steps, each cell a fresh process.",
                    table.rename_axis(["size", "context"]).reset_index())],
                  [("warmup_steps", "Every sample of the first steps of a process")], runs_of(steps))


def _off(errors: pd.Series) -> str:
    """How far means are from steady, in words decided by their sign."""
    low, high = errors.min(), errors.max()
    if max(abs(low), abs(high)) < SETTLED:
        return f"within {percent(max(abs(low), abs(high)), 1)} of"
    if low > 0:
        return f"{percent(low)} to {percent(high)} above" if percent(low) != percent(high) else f"{percent(low)} above"
    return f"{percent(low, 1)} to {percent(high, 1)} off"


def what_it_pays_for(costs: pd.DataFrame, calls: pd.DataFrame) -> Answer:
    question = "What does the first step pay for?"
    first = "first step beyond steady"  # only of processes whose first step is the first
    if costs.empty or not ((costs["part"] == first) & ~costs["profile"].astype(bool) & ~costs["one_layer_first"].astype(bool)).any():
        return no_data("first-step", question, "warmup")
    plain = by_size(costs[~costs["profile"].astype(bool)])
    primed, plain = plain[plain["one_layer_first"].astype(bool)], plain[~plain["one_layer_first"].astype(bool)]
    parts = ["size", "context_length"]
    table = plain.pivot_table(index=parts, columns="part", values="time_ms", observed=True, sort=False, aggfunc="median")
    beyond = table[first]
    before = list(plain.loc[plain["when"] == "before", "part"].unique())
    text = (f"The first step takes {span(beyond, ' ms')} longer than a steady one (by size, medians over fresh processes). Before it, a process"
            " has already paid for " + listing(f"{part} ({span(table[part], ' ms')})" for part in before) + ".")
    again = [part for part in plain.loc[plain["when"] == "in", "part"].unique()
             if part not in (first, "not told apart")]
    if again:
        text += (" Of the first step's own extra, as undoing each afterwards shows: "
                 + listing(f"{part} {span(table[part], ' ms')}" for part in again) + ".")
    finding, numbers = "", {"beyond_low_ms": beyond.min(), "beyond_high_ms": beyond.max()}
    table = table.drop(columns="not told apart")
    if len(primed):
        after = primed[primed["part"] == first].groupby(parts, observed=True)["time_ms"].median()
        loading = (beyond - after).dropna()
        share = (loading / beyond).dropna()
        clear = share.min() > 0  # on a noisy machine the difference can be either way
        text += (f" After a one-layer model of the same shapes has launched the same kernels through the same libraries, the first step takes"
                 f" {span(after, ' ms')} longer than a steady one"
                 + (f": loading kernels and libraries at their first use is {span(loading, ' ms')}, {percent(share.min())} to"
                    f" {percent(share.max())} of the extra." if clear else ": what loading costs does not stand out from the noise here."))
        table["first step after a one-layer model"], table["loading at first use"] = after, loading
        numbers |= {"loading_low": share.min(), "loading_high": share.max()}
        most = "mostly" if share.min() > 0.5 else "partly"
        finding = (f"**The first step's extra {span(beyond, ' ms')} is {most} the loading of kernels and libraries at their first use**"
                   f" ({percent(share.min())} to {percent(share.max())}); before it, importing torch and making a context took"
                   f" {span(table[before].sum(axis=1) / 1e3, ' s')}.") if clear else ""
    tables = [("What a fresh process pays, in ms: before the first step, and in it beyond a steady one.",
               table.map(number).rename_axis(["size", "context"]).reset_index())]
    runs = runs_of(pd.concat([plain, primed]))
    if len(calls):
        sums = by_size(calls).groupby([*parts, "purpose"], observed=True)[["first_calls", "first_ms", "steady_calls", "steady_ms"]].sum().reset_index()
        memory = sums[sums["purpose"] == "device memory"]
        if len(memory):
            text += (f" Under the profiler a first step makes {span(memory['first_calls'])} calls for device memory of {span(memory['first_ms'], ' ms')}"
                     f" together, a steady one {span(memory['steady_calls'])}; the GPU has work queued meanwhile, which is why the step itself is"
                     " hardly longer for them." if again and table["allocator"].max() < memory["first_ms"].max() else
                     f" Under the profiler a first step makes {span(memory['first_calls'])} calls for device memory, a steady one"
                     f" {span(memory['steady_calls'])}.")
        shown = sums.assign(**{c: sums[c].map(number) for c in ("first_ms", "steady_ms")},
                            **{c: sums[c].astype(int) for c in ("first_calls", "steady_calls")})
        tables.append(("Host time inside CUDA API calls of a first and of a steady step under torch.profiler, by purpose. A launch also waits"
                       " inside its call when the queue is full, so calls of a GPU-bound step last longer than they cost.", shown.rename(columns={
                           "context_length": "context", "first_calls": "calls, first", "first_ms": "ms, first", "steady_calls": "calls, steady",
                           "steady_ms": "ms, steady"})))
        runs = sorted(set(runs) | set(runs_of(calls)))
    return Answer("first-step", question, text, finding, numbers, tables,
                  [("warmup_costs", "What a fresh process pays before and in its first step")], runs)


def enough(samples: pd.DataFrame) -> Answer:
    question = "Why may 1 or 2 warm-up steps still not be enough?"
    steps = whole_steps(samples)
    if steps.empty:
        return no_data("enough", question, "warmup")
    total = steps["run_id"].nunique()
    off = steps[(steps["step"] > 0) & (steps["beyond"].abs() > SETTLED)]
    second, third = (steps[(steps["step"] == i)] for i in (1, 2))
    late = off[off["step"] >= 2]
    slow = second[second["beyond"] > SETTLED]
    text = (f"Of {count(total, 'fresh process')[:-1] + 'es' if total != 1 else '1 fresh process'}, the second step is more than"
            f" {percent(SETTLED)} slower than steady in {len(slow) or 'none'}, and the third in"
            f" {int((third['beyond'] > SETTLED).sum()) or 'none'}; the furthest second step is {percent(second['beyond'].abs().max(), 1)} off"
            f" and the furthest third {percent(third['beyond'].abs().max(), 1)}. ")
    if late.empty:
        text += ("Here one warm-up step would therefore have been enough for a step like this. That is this machine's and this model's"
                 " result: what a first step leaves undone (a kernel for another shape, a clock still rising, an allocator still"
                 " splitting) shows only in the samples, which is why each is kept." if slow.empty else
                 "Here two warm-up steps would have been enough.")
    else:
        text += (f"From the third step on, {count(len(late), 'sample')} in {count(late['run_id'].nunique(), 'process').replace('processs', 'processes')}"
                 f" {'is' if len(late) == 1 else 'are'} still more than {percent(SETTLED)} off, the last of them step {int(late['step'].max()) + 1}.")
    clocks = steps.dropna(subset=["sm_clock_mhz"])
    if len(clocks):
        first, rest = clocks[clocks["step"] == 0]["sm_clock_mhz"], clocks[clocks["step"] > 0]["sm_clock_mhz"]
        text += (f" The SM clock read {span(first, ' MHz', 4)} after the first step and {span(rest, ' MHz', 4)} after later ones.")
    return Answer("enough", question, text, "", {"late": len(late), "second_off": second["beyond"].abs().max()}, runs=runs_of(steps))
