"""What sweeps side by side say, in numbers: how long they take, and whether what they measure is the same."""
import pandas as pd

from stepscope.step.summary import median_interval

ALONE = "1 busy"  # the experiment's condition that all else is compared with
SAME = 0.02       # ratios this close to 1 are no change
FAR = 0.05        # a phase whose ratio is further from 1 is named
KEPT_BUSY = 0.9   # of a captured phase's time on the GPU: operations that fill so much of it keep it busy
ENOUGH = 6        # of fewer runs, the interval of the median is their range


def sooner(sweeps: pd.DataFrame) -> dict | None:
    """Wall times of the same sweep: of the ``first`` and of those on ``more`` workers (``times``: how many
    times as fast), and how many numbers of operations are ``different``; ``table`` has a row a sweep."""
    timed = sweeps[sweeps["wall_s"].notna()]
    if timed.empty:
        return None
    first = timed.iloc[0]
    times, workers = first["wall_s"] / timed["wall_s"], timed["workers"].fillna(0).astype(int)
    table = pd.DataFrame({"workers": workers, "wall_s": timed["wall_s"], "times": times})
    more = table[workers > workers.iloc[0]].to_dict("records")
    different = int(sweeps["different"].sum())
    return {"first": {"runs": int(first["runs"]), "wall_s": first["wall_s"], "workers": int(workers.iloc[0]),
                      "counted": first["counted"]},
            "more": more, "different": different, "same": not different, "hosts": hosts(sweeps),
            "table": sweeps.assign(times=first["wall_s"] / sweeps["wall_s"]), "runs": []}


def hosts(sweeps: pd.DataFrame) -> dict | None:
    """Which sweeps were on another host than the first, and the memory of both; None where all were on
    one."""
    first, ram_gib = sweeps.iloc[0], sweeps["ram_gib"].fillna(0)
    other = sweeps[ram_gib != ram_gib.iloc[0]]
    return None if other.empty else {"others": other["condition"].tolist(), "first": first["condition"],
                                     "others_gib": other["ram_gib"].iloc[0], "first_gib": first["ram_gib"]}


def ratios(timings: pd.DataFrame, first: str | None = None) -> pd.DataFrame:
    """Each phase of each profile against that of the condition ``first`` (default: the first one there is):
    gpu_ms and gpu_ms_first, ``ratio``, ``operations_ratio``, and ``busy``: whether the phase keeps the GPU
    busy there."""
    keys = ["run_id", "mode", "phase"]
    is_first = timings["condition"] == (first or timings["condition"].iloc[0])
    both = timings[~is_first].merge(timings[is_first], on=keys, suffixes=("", "_first"))
    both = both[both["phase"] != "loss"]  # of a few microseconds
    return both.assign(ratio=both["gpu_ms"] / both["gpu_ms_first"],
                       operations_ratio=both["operations_ms"] / both["operations_ms_first"],
                       busy=both["busy_share_first"] >= KEPT_BUSY)


def summary(both: pd.DataFrame) -> pd.DataFrame:
    """Of :func:`ratios`, a row each condition and group, phases that keep the GPU busy first: phases, median
    ratio, its bootstrap interval over the phases (low, high), the 5th and 95th percentile of single phases,
    median operations_ratio, mean beside; ``unchanged`` (the interval lies within 2% of 1), else ``untold``
    from no change (it holds 1)."""
    rows = []
    for (busy, condition), part in both.groupby(["busy", "condition"], sort=False):
        low, high = median_interval(part["ratio"].to_numpy())
        unchanged = max(abs(low - 1), abs(high - 1)) <= SAME
        rows.append(
            {
                "busy": busy,
                "condition": condition,
                "phases": len(part),
                "ratio": part["ratio"].median(),
                "low": low,
                "high": high,
                "p5": part["ratio"].quantile(0.05),
                "p95": part["ratio"].quantile(0.95),
                "operations_ratio": part["operations_ratio"].median(),
                "beside": part["beside"].mean(),
                "unchanged": unchanged,
                "untold": not unchanged and low <= 1 <= high,
            }
        )
    table = pd.DataFrame(rows).sort_values("busy", ascending=False, kind="stable", ignore_index=True)
    ends = {"change_share": "ratio", "low_share": "low", "high_share": "high", "p5_share": "p5",
            "p95_share": "p95", "operations_share": "operations_ratio"}
    return table.assign(**{share: table[column] - 1 for share, column in ends.items()})


def agree(timings: pd.DataFrame, sweeps: pd.DataFrame) -> dict | None:
    """Times of the same phases against those of the first sweep, by whether they keep the GPU busy.

    ``groups``: each with its ``rows`` of :func:`summary`; ``far``: phases that keep the GPU busy and still
    changed; ``hosts``, ``pairs``: sweeps on another host than the first, and those compared with each other;
    ``slower``: groups that became slower beside others; ``kept_busy`` is what tells the groups apart.
    """
    if timings["condition"].nunique() < 2:
        return None
    first, both = timings["condition"].iloc[0], ratios(timings)
    if both.empty:
        return None
    rows = summary(both)
    far = both[both["busy"] & ((both["ratio"] - 1).abs() > FAR)]
    host = sweeps.set_index("condition")["ram_gib"].fillna(0)
    elsewhere = [condition for condition in rows["condition"].unique() if host[condition] != host[first]]
    pairs = [{"condition": condition, "other": other, "rows": pair_rows(timings, condition, other)}
             for condition, other in zip(elsewhere[1:], elsewhere) if host[condition] == host[other]]
    changed = ~rows["unchanged"] & ~rows["untold"]
    return {"first": first, "same_share": SAME, "far_share": FAR, "kept_busy": KEPT_BUSY,
            "groups": [group(part) for _, part in rows.groupby("busy", sort=False)],
            "far": far.assign(change_share=far["ratio"] - 1).to_dict("records"),
            "hosts": hosts(sweeps) if elsewhere else None, "pairs": pairs,
            "slower": rows[changed & (rows["ratio"] > 1) & (rows["beside"] > 0)].to_dict("records"),
            "table": rows, "runs": []}


def pair_rows(timings: pd.DataFrame, condition: str, other: str) -> list[dict]:
    """:func:`summary`'s rows of one condition against another."""
    both = timings[timings["condition"].isin([condition, other])]
    return summary(ratios(both, other)).to_dict("records")


def group(rows: pd.DataFrame) -> dict:
    """The rows of one group of phases, over sweeps, and the spread of single ones."""
    return {"busy": bool(rows["busy"].iloc[0]), "phases": int(rows["phases"].iloc[0]),
            "all_unchanged": bool(rows["unchanged"].all()),
            "p5_share": rows["p5_share"].min(), "p95_share": rows["p95_share"].max(),
            "rows": rows.to_dict("records")}


def repeated(experiment: pd.DataFrame) -> dict | None:
    """Medians of the same run made again and again: those that ``differ`` from the runs' alone, and the least
    and the greatest ratio to them."""
    fewest = int(experiment["runs"].min())
    ratios_to_alone = experiment.loc[experiment["condition"] != ALONE, "ratio"]
    return {"all_runs": int(experiment["runs"].sum()), "differ": differing(experiment),
            "ratio_low": ratios_to_alone.min(), "ratio_high": ratios_to_alone.max(),
            "low_share": ratios_to_alone.min() - 1, "high_share": ratios_to_alone.max() - 1,
            "fewest": fewest, "few": fewest < ENOUGH,
            "table": experiment.assign(change_share=experiment["ratio"] - 1), "runs": []}


def differing(experiment: pd.DataFrame) -> list[dict]:
    """The rows of the experiment's table that do not agree with the runs alone."""
    return experiment.assign(change_share=experiment["ratio"] - 1)[~experiment["agrees"]].to_dict("records")
