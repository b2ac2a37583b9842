"""The tables of sweeps side by side as they are printed."""
import pandas as pd

from stepscope.say.formats import change_with_interval, number, signed_percent, to, with_interval

GROUPS = {True: "phases that keep the GPU busy", False: "phases with more gaps"}


def sweeps(facts: dict) -> pd.DataFrame:
    """A row a sweep."""
    rows = facts["table"]
    return pd.DataFrame({"sweep": rows["condition"], "at once": rows["at_once"].astype(str),
                         "wall time (s)": rows["wall_s"].map(number),
                         "x faster": rows["times"].map(number),
                         "mean run (s)": rows["mean_run_s"].map(number),
                         "operations that differ": rows["different"].astype(str)})


def change(row: pd.Series) -> str:
    """How one group of phases changed."""
    if row["unchanged"]:
        return "none"
    return "not told apart" if row["untold"] else signed_percent(row["change_share"], 1)


def phases(facts: dict) -> pd.DataFrame:
    """A row a sweep and group of phases."""
    rows = facts["table"]
    ends = rows[["change_share", "low_share", "high_share"]].itertuples(index=False)
    groups = rows["busy"].map(GROUPS).str.removeprefix("phases ")
    return pd.DataFrame({
        "phases": groups + " (" + rows["phases"].astype(str) + ")", "sweep": rows["condition"],
        "others that overlapped": rows["beside"].map(number, digits=2),
        "longer by [95% interval]": [change_with_interval(*row) for row in ends],
        "single phases, 5% to 95%": [to(signed_percent(low, 1), signed_percent(high, 1)) for low, high
                                     in zip(rows["p5_share"], rows["p95_share"], strict=True)],
        "sum of operations": [signed_percent(value, 1) for value in rows["operations_share"]],
        "change": [change(row) for _, row in rows.iterrows()]})


def experiment(facts: dict) -> pd.DataFrame:
    """A row a configuration and condition."""
    rows = facts["table"]
    ends = rows[["median_ms", "ci_low_ms", "ci_high_ms"]].itertuples(index=False)
    return pd.DataFrame({
        "run": rows["size"] + ", context " + rows["context_length"].astype(str) + ", " + rows["mode"],
        "workers": rows["condition"], "runs": rows["runs"].astype(str),
        "median (ms)": [with_interval(*row) for row in ends],
        "longer than alone by": [signed_percent(value, 1) for value in rows["change_share"]],
        "agrees": rows["agrees"].map({True: "yes", False: "no"})})
