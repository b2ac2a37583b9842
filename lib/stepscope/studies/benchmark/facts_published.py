"""This machine's timings beside those that other reports print."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.published import beside, by_report, counts, load_published, published_times
from stepscope.say.selections import matrix
from stepscope.step.timing import WHOLE


def measured(times: pd.DataFrame) -> pd.DataFrame:
    """The median of each pass in the published terms: ``phase`` (forward, backward, forward_backward, step)
    and ``here`` (ms); wall time, of backward GPU time."""
    times = matrix(times)
    if times.empty:
        return times
    times = times[times["status"] == "ok"]
    wall = times[times["phase"] == WHOLE].assign(phase=lambda t: t["mode"])
    backward = times[(times["phase"] == "backward") & (times["mode"] == "forward_backward")]
    both = pd.concat([wall, backward], ignore_index=True)
    return both.assign(here=both["median_ms"], size=both["size"].astype(str))


def timings(times: pd.DataFrame) -> dict | None:
    """Who published any of them (``sources``), and the fp32 times that they print over those here of the same
    size, pass and context (of any context where theirs is not stated): ``reports`` has a row a report and
    clock, ``places`` the counts over all, ``unstated`` whether some state no context. None without such
    times."""
    here = measured(times)
    reports = load_published()
    theirs = published_times(reports)
    theirs = theirs[theirs["precision"].isin(["fp32"]) | theirs["precision"].isna()]
    table = beside(theirs, here, ["size", "phase"]) if len(here) else here
    if table.empty:
        return None
    own = here[here["size"].isin(table["size"])]
    sources = [report.model_dump() for report in reports if report.name in set(table["report"])]
    return {"sources": sources, "figures": len(table), "places": counts(table),
            "unstated": bool(table["context_length"].isna().any()), "reports": by_report(table, "clock"),
            "table": table, "runs": runs_of(own)}
