"""Sweeps on several workers, answered from the tables of ``stepscope.neighbours.load``: how long they take, and whether what
they measure is the same."""
import pandas as pd

from stepscope.say.formats import Answer, capital, count, listing, no_data, number, percent
from stepscope.studies.neighbours.measure import ALONE, verdict
from stepscope.step.summary import median_interval

SAME = 0.02      # ratios this close to 1 are no change
FAR = 0.05       # a phase whose ratio is further from 1 is named
KEPT_BUSY = 0.9  # a phase whose operations fill so much of its time on the GPU does not wait for the host
GROUPS = {True: "phases that keep the GPU busy", False: "phases in which the GPU waits for the host"}


def sooner(sweeps: pd.DataFrame) -> Answer:
    question = "How much sooner does a sweep end on several GPUs, and does it find the same?"
    timed = sweeps[sweeps["wall_s"].notna()] if len(sweeps) else sweeps
    if timed.empty:
        return _none("workers-time", question)
    first = timed.iloc[0]
    times = first["wall_s"] / timed["wall_s"]
    more = timed[timed["workers"] > first["workers"]]
    parts = [f"{number(row['wall_s'])} s with {int(row['workers'])} ({number(times[i])} times as fast)" for i, row in more.iterrows()]
    different = int(sweeps["different"].sum())
    text = [f"The same {count(int(first['runs']), 'profiling run')}: {number(first['wall_s'])} s with"
            f" {count(int(first['workers']), 'worker')}, a worker being a GPU with its own part of the cores"
            + (f", and {listing(parts)}." if parts else "."),
            _hosts(sweeps),
            f"Compared with the first by phase and kernel, {number(first['counted'])} numbers of operations a sweep: "
            + (f"{different} differ." if different else f"none differs in any of the {len(sweeps) - 1} others.")]
    best = more.loc[times[more.index].idxmax()] if len(more) else None
    finding = "" if best is None else (f"**On {int(best['workers'])} GPUs the profiling sweep ends {number(first['wall_s'] / best['wall_s'])} times as soon**"
                                       f" as on one, {'with' if not different else 'but not with'} the same operations in every profile.")
    table = pd.DataFrame({"sweep": sweeps["condition"], "at once": sweeps["at_once"].astype(str),
                          "wall time (s)": sweeps["wall_s"].map(number), "times as fast": (first["wall_s"] / sweeps["wall_s"]).map(number),
                          "mean run (s)": sweeps["mean_run_s"].map(number), "operations that differ": sweeps["different"].astype(str)})
    return Answer("workers-time", question, " ".join(filter(None, text)), finding, {"different": different} | {f"times_{int(row['workers'])}": times[i] for i, row in more.iterrows()},
                  [("The same sweep on more and fewer workers (– where it was not timed as a whole).", table)])


def ratios(timings: pd.DataFrame, first: str | None = None) -> pd.DataFrame:
    """Each phase of each profile against that of the condition ``first`` (default: the first one there is): gpu_ms and
    gpu_ms_first, ``ratio``, ``operations_ratio``, and ``busy``: whether the phase keeps the GPU busy there."""
    keys = ["run_id", "mode", "phase"]
    first = first or timings["condition"].iloc[0]
    both = timings[timings["condition"] != first].merge(timings[timings["condition"] == first], on=keys, suffixes=("", "_first"))
    both = both[both["phase"] != "loss"]  # of a few microseconds
    return both.assign(ratio=both["gpu_ms"] / both["gpu_ms_first"], operations_ratio=both["operations_ms"] / both["operations_ms_first"],
                       busy=both["busy_share_first"] >= KEPT_BUSY)


def summary(both: pd.DataFrame) -> pd.DataFrame:
    """Of :func:`ratios`, a row each condition and group: phases, median ratio, its bootstrap interval over the phases, the 5th and
    95th percentile of single phases, and ``change``: "none" (the interval lies within 2% of 1), "not told apart" from none (it holds 1), or how much."""
    rows = []
    for (busy, condition), own in both.groupby(["busy", "condition"], sort=False):
        low, high = median_interval(own["ratio"].to_numpy())
        rows.append({"busy": busy, "condition": condition, "phases": len(own), "ratio": own["ratio"].median(), "low": low, "high": high,
                     "p5": own["ratio"].quantile(0.05), "p95": own["ratio"].quantile(0.95), "operations_ratio": own["operations_ratio"].median(),
                     "beside": own["beside"].mean(), "change": "none" if max(abs(low - 1), abs(high - 1)) <= SAME
                     else "not told apart" if low <= 1 <= high else f"{own['ratio'].median() - 1:+.1%}"})
    return pd.DataFrame(rows).sort_values("busy", ascending=False, kind="stable", ignore_index=True)


def agree(timings: pd.DataFrame, sweeps: pd.DataFrame) -> Answer:
    question = "Do timings stay the same when other workers are busy?"
    if timings.empty or timings["condition"].nunique() < 2:
        return _none("workers-agree", question)
    first = timings["condition"].iloc[0]
    both = ratios(timings)
    rows = summary(both)
    text = [f"The same phases of the same profiles, medians of their steps, time on the GPU from the first operation to the last, over that in"
            f" the sweep “{first}”. There is no change where the 95% interval of the median ratio lies within {percent(SAME)} of 1, and it is not told apart from none where the interval holds 1."]
    for busy, own in rows.groupby("busy", sort=False):
        words = GROUPS[busy]
        text.append(f"{capital(words)} ({int(own['phases'].iloc[0])}): " + (
            f"no change in any sweep; single ones {number(own['p5'].min(), 4)} to {number(own['p95'].max(), 4)} times as long (5th to 95th percentile)."
            if (own["change"] == "none").all() else f"{'; '.join(f'{row.condition}, {_ratio(row)}' for row in own.itertuples())}."))
    far = both[both["busy"] & ((both["ratio"] - 1).abs() > FAR)]
    if len(far):
        text.append(f"Of those that keep the GPU busy, further than {percent(FAR)} from 1: " + listing(
            f"{row.size}, context {row.context_length}, {row.mode}, {row.phase} with {row.condition} ({number(row.ratio)}; busy for"
            f" {percent(row.busy_share)} of its time there, {percent(row.busy_share_first)} in “{first}”)" for row in far.itertuples()) + ".")
    host = sweeps.set_index("condition")["ram_gib"]
    elsewhere = [condition for condition in rows["condition"].unique() if host[condition] != host[first]]
    if elsewhere:
        text.append(f"{_hosts(sweeps)} Against it, a phase that waits for the host may change for that reason too.")
    for condition, other in zip(elsewhere[1:], elsewhere):
        if host[condition] == host[other]:
            pair = summary(ratios(timings[timings["condition"].isin([condition, other])], other))
            text.append(f"On that host, {condition} against {other}: " + "; ".join(f"{GROUPS[row.busy]}, {_ratio(row)}" for row in pair.itertuples()) + ".")
    slower = rows[rows["change"].str.startswith("+") & (rows["beside"] > 0)]
    waiting = rows[~rows["busy"]]
    alone = waiting[waiting["beside"] == 0]
    if len(alone):
        text.append("Between two sweeps with nothing beside them, single phases that wait for the host differ by"
                    f" {number(alone['p5'].min())} to {number(alone['p95'].max())} (5th to 95th percentile); each is a process of its own.")
    text.append("Affected by busy neighbours: " + ("; ".join(f"{GROUPS[row.busy]} with {row.condition} ({row.change})" for row in slower.itertuples())
                + ". `--exclusive` gives such runs the machine to themselves." if len(slower) else "neither group became slower.")
                + " What ran beside a run is in its record, whatever came of it.")
    busiest = rows[rows["busy"] & (rows["beside"] > 0)]
    finding = ""
    if len(busiest) and (busiest["change"] == "none").all():
        last = busiest.loc[busiest["beside"].idxmax()]
        finding = (f"**With {last['condition']} busy, phases that keep the GPU busy take {number(last['ratio'], 4)} times as long as with {first}**;"
                   f" single ones {number(last['p5'], 4)} to {number(last['p95'], 4)} times.")
    table = pd.DataFrame({"phases": [f"{GROUPS[row.busy].removeprefix('phases ')} ({row.phases})" for row in rows.itertuples()], "sweep": rows["condition"],
                          "runs beside": rows["beside"].map(lambda n: number(n, 2)),
                          "median ratio": [f"{number(row.ratio, 4)} [{number(row.low, 4)}, {number(row.high, 4)}]" for row in rows.itertuples()],
                          "single phases, 5% to 95%": [f"{number(row.p5, 4)} to {number(row.p95, 4)}" for row in rows.itertuples()],
                          "sum of operations": rows["operations_ratio"].map(lambda ratio: number(ratio, 4)),
                          "change": rows["change"]})
    return Answer("workers-agree", question, " ".join(text), finding, {"slower": len(slower)},
                  [(f"Times over those of “{first}” [95% interval of the median over the phases].", table)],
                  [("workers_agree", "Every phase's time with more workers busy over its time with one")])


def repeated(experiment: pd.DataFrame) -> Answer:
    question = "Does the same run, made again and again on one machine, time the same whatever its neighbours do?"
    if experiment.empty:
        return Answer("workers-again", question, "Not answered here: `stepscope neighbours --workers gpus --runs FOLDER` makes such runs, and this runs"
                                                 " folder does not hold what came of it (`neighbours/experiment.csv`).")
    ratios = experiment.loc[experiment["condition"] != ALONE, "ratio"]
    fewest = int(experiment["runs"].min())
    # An experiment of before has a condition more: kernels were made ready ahead then.
    ahead = " and with the next kernel made ready ahead or not" if experiment["condition"].str.contains("ahead").any() else ""
    text = (f"{count(int(experiment['runs'].sum()), 'run')}, each a process of its own, with more or fewer workers busy{ahead},"
            f" the conditions taking turns. {verdict(experiment)} The medians are {number(ratios.min(), 4)} to"
            f" {number(ratios.max(), 4)} times those of the runs alone." + (f" Where there are {fewest} runs their interval is their range." if fewest < 6 else ""))
    table = pd.DataFrame({"run": experiment["size"] + ", context " + experiment["context_length"].astype(str) + ", " + experiment["mode"],
                          "workers": experiment["condition"], "runs": experiment["runs"].astype(str),
                          "median (ms)": [f"{number(row['median_ms'], 4)} [{number(row['ci_low_ms'], 4)}, {number(row['ci_high_ms'], 4)}]"
                                          for _, row in experiment.iterrows()],
                          "ratio to alone": experiment["ratio"].map(lambda ratio: number(ratio, 4)),
                          "agrees": experiment["agrees"].map({True: "yes", False: "no"})})
    return Answer("workers-again", question, text, "", {"differ": int((~experiment["agrees"]).sum())},
                  [("Medians of the timed steps over the runs [95% interval], and whether it meets that of the runs alone (“1 busy”).", table)])


def _hosts(sweeps: pd.DataFrame) -> str:
    """Which sweeps were on another host than the first; nothing where all were on one."""
    first = sweeps.iloc[0]
    other = sweeps[sweeps["ram_gib"] != first["ram_gib"]]
    return "" if other.empty else (f"{listing(other['condition']).capitalize()} were on another host than {first['condition']} ({number(other['ram_gib'].iloc[0])} GiB"
                                   f" of memory against {number(first['ram_gib'])}).")


def _ratio(row) -> str:
    return f"{number(row.ratio, 4)} [{number(row.low, 4)}, {number(row.high, 4)}]" + {"none": ", no change", "not told apart": ", not told apart"}.get(row.change, "")


def _none(key: str, question: str) -> Answer:
    answer = no_data(key, question, "nsys")
    answer.text = ("Not answered here: `stepscope neighbours --of` compares folders of one sweep that ran on more and on fewer workers, and this runs"
                   " folder has no such comparison.")
    return answer
