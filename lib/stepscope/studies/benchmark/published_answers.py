"""This machine's timings beside those that other reports print, and which of theirs cannot be right."""
import pandas as pd

from stepscope.say.formats import Answer, count, listing, no_data, number, percent, plus_minus, runs_of, source_name, span
from stepscope.say.formats import MODE_WORDS
from stepscope.say.selections import matrix
from stepscope.say.published import doubts
from stepscope.runs.store import by_size
from stepscope.step.timing import WHOLE


CLOCK_WORDS = {"wall": "wall clock", "nvtx": "NVTX range", "nsys": "Nsight Systems", "kernels": "sum of kernels"}


def measured(times: pd.DataFrame) -> pd.DataFrame:
    """Our figures in the published ones' terms: size, context_length, phase (forward, backward, forward_backward, step)."""
    times = matrix(times)
    if times.empty:
        return times
    times = times[times["status"] == "ok"]
    wall = times[times["phase"] == WHOLE].assign(phase=lambda t: t["mode"])
    backward = times[(times["phase"] == "backward") & (times["mode"] == "forward_backward")]
    return pd.concat([wall, backward], ignore_index=True)


def fp32_only(published: pd.DataFrame) -> pd.DataFrame:
    """Figures of plain fp32 steps, or that do not state their precision."""
    return published[published["precision"].isin(["fp32"]) | published["precision"].isna()]


def compared(times: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Published fp32 figures with a size and a context that was measured here too, joined with ours (``_here``)."""
    here = measured(times)
    if here.empty:
        return here
    theirs = fp32_only(published).dropna(subset=["size", "context_length", "phase"])
    theirs = theirs[~theirs["estimated"] & (theirs["warmup_steps"].isna() | (theirs["warmup_steps"] > 0))]
    both = theirs.merge(here.assign(size=here["size"].astype(str)), on=["size", "context_length", "phase"], suffixes=("", "_here"))
    both = both.assign(source_name=[source_name(row) for _, row in both.iterrows()], ratio=both["mean_ms"] / both["median_ms"])
    return by_size(both)


def beside(times: pd.DataFrame, published: pd.DataFrame) -> Answer:
    question = "How do these timings compare with published ones?"
    both = compared(times, published)
    if both.empty:
        where = "" if times.empty else " None of the published figures is of a size and context measured here."
        answer = no_data("published", question, "benchmark")
        return answer if not where else Answer("published", question, where.strip())
    per_source = both.groupby("source_name", sort=True)["ratio"]
    slower = [(name, ratios) for name, ratios in per_source]
    text = ("Published reports on the same questions are quoted by letter, as printed. Their times over the median here, same size, context and pass, fp32: "
            + listing(f"{name} {span(ratios)} times ({count(len(ratios), 'figure')})" for name, ratios in slower) + ".")
    same = both.groupby(["size", "context_length", "phase"], observed=True).filter(lambda g: g["source_name"].nunique() > 1)
    if len(same):
        spread = same.groupby(["size", "context_length", "phase"], observed=True)["mean_ms"].agg(lambda t: t.max() / t.min())
        (size, context, phase), worst = spread.idxmax(), spread.max()
        text += (f" Where several reports print the same pass they differ by up to {number(worst)} times"
                 f" ({MODE_WORDS.get(phase, phase)} of {size} at context {context}).")
    table = both.assign(here=[plus_minus(r.mean_ms_here, r.std_ms_here) for r in both.itertuples()],
                        pass_=both["phase"].replace(MODE_WORDS), times=both["ratio"].map(number),
                        clock=both["clock"].fillna("not stated").replace(CLOCK_WORDS))
    table = table[["size", "context_length", "pass_", "source_name", "clock", "as_printed", "here", "times"]].set_axis(
        ["size", "context", "pass", "report", "its clock", "as printed", "here (ms)", "printed / here"], axis=1)
    return Answer("published", question, text, "", per_source.median().to_dict(),
                  [("Published fp32 figures beside this machine's (mean ± standard deviation of wall time; backward: GPU time).", table)],
                  [("benchmark_published", "Forward pass: published figures beside this machine's")], runs_of(both))


def cannot_be(published: pd.DataFrame) -> Answer:
    question = "Which published timings cannot be right, or do not say what they seem to, and why?"
    found = doubts(fp32_only(published))
    kinds = {"spread": "a spread of more than 5%", "rate": "more arithmetic than a listed GPU has", "clocks": "two times for one pass",
             "flat": "no growth with the work", "ratios": "parts that do not add up", "monotone": "a larger model that is faster",
             "arithmetic": "a contradiction to its own tokens/s", "estimates": "an estimate, not a measurement"}
    counts = found["kind"].value_counts()
    text = (f"{count(len(found), 'doubt').capitalize()} about {len(fp32_only(published))} printed fp32 figures, each found by arithmetic on"
            " the figures themselves: " + listing(f"{words} ({counts[kind]})" for kind, words in kinds.items() if kind in counts) + ".")
    worst = fp32_only(published).assign(spread=lambda p: p["std_ms"] / p["mean_ms"]).nlargest(1, "spread")
    if len(worst):
        row = worst.iloc[0]
        text += f" The widest spread is {percent(row.spread)} of its mean ({source_name(row)}, printed as \"{row.as_printed}\")."
    table = found.assign(report=[source_name(row) for _, row in found.iterrows()])[["report", "figure", "doubt"]].set_axis(
        ["report", "as printed", "what is wrong"], axis=1)
    return Answer("published-doubts", question, text, "", counts.to_dict(), [("Each doubt with the figure as printed.", table)])
