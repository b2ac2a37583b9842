"""How fast lower precision is, beside published figures."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.published import beside, by_report, counts, load_published, published_times
from stepscope.say.selections import pick
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import BASE

PAIR = ["report", "size", "context_length", "phase"]


def published_pairs() -> pd.DataFrame:
    """Printed times in lower precision beside the fp32 time of the same report, size, context and pass: a row
    a pair, ``theirs`` the speed-up."""
    times = published_times(load_published())
    base = pick(times[times["precision"].notna()], precision=BASE)[[*PAIR, "theirs"]]
    low = times[times["precision"].notna() & (times["precision"] != BASE)]
    pairs = low.merge(base, on=PAIR, suffixes=("_ms", "_fp32_ms"))  # NA meets NA: neither states a context
    return pairs.assign(theirs=pairs["theirs_fp32_ms"] / pairs["theirs_ms"])


def published(speedups: pd.DataFrame) -> dict | None:
    """Published pairs' speed-ups over those here of the same size, pass and context (of any context where
    theirs is not stated): ``reports`` has a row a report, ``places`` the counts. None without such pairs."""
    backward = pick(speedups, mode="forward_backward", phase="backward").assign(mode="backward")
    here = pd.concat([pick(speedups, phase=WHOLE), backward])
    here = here.assign(phase=here["mode"], here=here["speedup"], size=here["size"].astype(str))
    table = beside(published_pairs(), here, ["size", "phase", "precision"])
    if table.empty:
        return None
    return {"pairs": len(table), "theirs": table["theirs"], "places": counts(table),
            "unstated": bool(table["context_length"].isna().any()),
            "reports": by_report(table), "table": table,
            "runs": runs_of(here[here["size"].isin(table["size"])])}
