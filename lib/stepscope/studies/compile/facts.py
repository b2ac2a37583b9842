"""What the tables of the study of the compiled model say, in numbers: times and memory. Pairs are dicts of
the columns of :func:`stepscope.studies.compile.pairs.paired`."""
import pandas as pd

from stepscope.config import PHASES, PRECISIONS
from stepscope.runs.tables import by_size
from stepscope.say.formats import NEARLY, percent_change, runs_of
from stepscope.say.selections import beside as runs_beside
from stepscope.studies.compile.pairs import (
    MAIN,
    VARIANTS,
    beside,
    both_ends,
    by_attention,
    gain,
    gains,
    marks,
    shape,
)


def whole_model(times: pd.DataFrame) -> dict | None:
    """Eager against compiled by mode: the :func:`gains`, the pairs that are ``slower``, and full steps'
    :func:`energy`. Without a pair (``pairs`` is None) what was not timed."""
    both = beside(times)
    untimed = not_timed(times)
    if both.empty:
        if not any(untimed.values()):
            return None
        return {"pairs": None, "runs": runs_of(times)} | untimed
    slower = both[both["sure"] & (both["speedup"] < 1)]
    return untimed | {
        "gains": gains(both), "slower": slower.to_dict("records"), "pairs": both, "optimizer": MAIN,
        "neighbours": runs_beside(both), "timed": in_turns(both), "energy": energy(both),
        "shape": shape(both), "marks": marks(both), "runs": runs_of(both)}


def in_turns(both: pd.DataFrame) -> dict:
    """In how many of the pairs' ``runs`` the sides took turns (``turned``; ``all``, ``none``), else one after
    another."""
    runs = both.drop_duplicates("run_id")
    turned = int((runs["turns"] > 1).sum()) if "turns" in runs else 0
    return {"runs": len(runs), "turned": turned, "all": turned == len(runs), "none": turned == 0}


def energy(both: pd.DataFrame) -> dict | None:
    """Energy and power of full steps kept up, eager and compiled: the ``pairs``, how many times ``less`` the
    compiled one takes, and whether each takes less; None where no counter told."""
    if "step_energy_j" not in both:
        return None
    pairs = both.dropna(subset=["step_energy_j", "step_energy_j_after"])
    if pairs.empty:
        return None
    less = pairs["step_energy_j"] / pairs["step_energy_j_after"]
    return {"pairs": pairs, "less": less, "all_less": bool((less > 1).all())}


def not_timed(times: pd.DataFrame) -> dict[str, list[dict]]:
    """What has no time because it ran ``out_of_memory`` or was ``not_compiled``."""
    rows = by_size(times[times["optimizer"] == MAIN])
    return {name: rows[rows["status"] == status].to_dict("records")
            for name, status in (("out_of_memory", "oom"), ("not_compiled", "unsupported"))}


def sdpa(times: pd.DataFrame) -> dict | None:
    """Written-out attention against SDPA: the gains of the full step by variant and of both changes
    ``together``; ``losses`` of any mode; what SDPA has :func:`taken`."""
    both = by_attention(times)
    if both.empty:
        return None
    steps, ends = both[both["mode"] == "step"], both_ends(times)
    ends = ends[ends["mode"] == "step"] if len(ends) else ends
    slower = both[both["sure"] & (both["speedup"] < 1)]
    return {"by_variant": [{"variant": variant} | gain(rows) for variant in VARIANTS
                           if len(rows := steps[steps["variant"] == variant])],
            "together": gain(ends) if len(ends) else None, "losses": slower.to_dict("records"),
            "shape": shape(both), "steps": steps, "marks": marks(steps),
            "taken": taken(times),
            "runs": runs_of(both)}


def taken(times: pd.DataFrame) -> list[dict]:
    """Which ``implementation`` SDPA took in which ``precisions``, eager or compiled (``variants``), where its
    kernels were captured."""
    if "sdpa_taken" not in times:
        return []
    rows = times[times["sdpa_taken"].notna()]
    return [{"implementation": name, "precisions": [p for p in PRECISIONS if (of["precision"] == p).any()],
             "runs": of["run_id"].nunique()} for name, of in rows.groupby("sdpa_taken", sort=False)]


def peak_memory(times: pd.DataFrame) -> dict | None:
    """The allocator's peak, eager against compiled, of the modes in ``by_mode``; the pairs in which it grows;
    and what compiling and SDPA change ``together``. ``measured`` is False where no peak was kept."""
    both = beside(times)
    if both.empty:
        return None
    if "peak_allocated_mib" not in both or both["peak_allocated_mib"].isna().all():
        return {"measured": False, "backward": None, "pairs": None, "shape": shape(both),
                "runs": runs_of(both)}
    # Forward alone was measured after full steps, with AdamW's moments still in memory.
    both = with_peaks(both[both["mode"] != "forward"])
    ends = both_ends(times)
    ends = with_peaks(ends[ends["mode"] == "forward_backward"]) if len(ends) else ends
    by_mode = [{"mode": mode} | changes(rows) for mode in PHASES if len(rows := both[both["mode"] == mode])]
    backward = next((rows for rows in by_mode if rows["mode"] == "forward_backward" and rows["falls"]), None)
    more = both[both["change"] > NEARLY]
    return {"measured": True, "shape": shape(both),
            "by_mode": by_mode, "backward": backward,
            "nearly": NEARLY, "more": more.to_dict("records"),
            "together": changes(ends) if len(ends) else None,
            "pairs": both, "runs": runs_of(both)}


def with_peaks(both: pd.DataFrame) -> pd.DataFrame:
    """Pairs with both peaks in GiB, and the ``change`` from one to the other as a share."""
    before, after = both["peak_allocated_mib"], both["peak_allocated_mib_after"]
    return both.assign(change=after / before - 1, peak_gib=before / 1024, peak_gib_after=after / 1024)


def changes(rows: pd.DataFrame) -> dict:
    """The pairs whose peak changes ``least`` (falls furthest) and ``most``; whether both changes print
    ``alike``; how much ``lower_percent`` each is."""
    least, most = (rows.loc[at].to_dict() for at in (rows["change"].idxmin(), rows["change"].idxmax()))
    return {"least": least, "most": most, "falls": most["change"] < 0, "lower_percent": -100 * rows["change"],
            "alike": percent_change(least["change"]) == percent_change(most["change"])}
