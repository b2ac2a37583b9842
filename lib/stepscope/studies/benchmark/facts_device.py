"""What the GPU's clock and power did while the benchmark's steps were timed, in numbers."""
import pandas as pd

from stepscope.runs.device_watch import THROTTLES
from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import pick
from stepscope.step.summary import unlike_clocks
from stepscope.step.timing import WHOLE

# What records of before do not have.
MEASURED = ["timed_watched_s", "kept_up_sm_clock_median_mhz", "kept_up_power_w", "kept_up_energy_s",
            "kept_up_energy_j", "kept_up_energy_polled_j", "step_energy_j", "kept_up_step_ms"]
LIKE = 0.05  # kept up, a step that takes this share more or less than timed alone is not quite the same


def device_state(times: pd.DataFrame) -> dict | None:
    """SM clock after each timed step, driver's throttle counters, power and energy of every eager fp32 run;
    None where no clock was read.

    ``held`` are the runs whose clock was below the highest of all, and unlike it (``unlike_clocks``), after
    some timed step, or in the median while the step was kept up, or during whose timed steps a counter grew;
    ``reasons``, those counters, each with its runs and the largest share of the timed steps.
    ``energy_check``: by how much the energy by polled power differs from that by NVML's counter, as a share
    of the latter, over the same time of each run: the ``median``, what ``nine_of_ten`` are within, and the
    ``furthest`` with its run.
    """
    steps = pick(times, phase=WHOLE, status="ok", precision="fp32", attention="eager", compile=False)
    steps = steps[steps["sm_clock_mhz"].notna()]
    if steps.empty:
        return None
    counters = {reason: f"timed_throttled_{reason}_us" for reason in THROTTLES}
    steps = by_size(steps.reindex(columns=list(dict.fromkeys([*steps, *MEASURED, *counters.values()]))))
    steps[[*MEASURED, *counters.values()]] = steps[[*MEASURED, *counters.values()]].astype(float)
    full_mhz = steps["sm_clock_mhz"].max()
    shares = pd.DataFrame({reason: steps[column] / 1e6 / steps["timed_watched_s"]
                           for reason, column in counters.items()})
    clocks = steps[["sm_clock_least_mhz", "kept_up_sm_clock_median_mhz"]]  # after a step, and within it
    slow = unlike_clocks(clocks.min(axis=1), full_mhz)
    held = slow | (shares > 0).any(axis=1)
    unlike_share = (steps["kept_up_step_ms"] / steps["median_ms"] - 1).abs()
    polled = steps.dropna(subset=["kept_up_energy_j", "kept_up_energy_polled_j"])
    return {"full_mhz": full_mhz, "total": len(steps), "held_runs": int(held.sum()),
            "slow_runs": int(slow.sum()), "held": steps[held],
            "lowest_mhz": clocks.min(axis=None),
            "reasons": [{"reason": reason, "runs": int((share > 0).sum()), "most": share.max()}
                        for reason, share in shares.items() if (share > 0).any()],
            "counted": bool(shares.notna().any(axis=None)),
            "power_w": steps["kept_up_power_w"].dropna() if steps["kept_up_power_w"].notna().any() else None,
            "unlike_timed": int((unlike_share > LIKE).sum()), "unlike_most": unlike_share.max(), "like": LIKE,
            "kept_up": int(steps["kept_up_step_ms"].notna().sum()),
            "energy_check": None if polled.empty else energy_check(polled),
            "table": steps.assign(held_ms=steps[list(counters.values())].max(axis=1) / 1e3)[
                held | (steps["mode"] == "step") & steps["kept_up_power_w"].notna()],
            "runs": runs_of(steps)}


def energy_check(polled: pd.DataFrame) -> dict:
    """Of :func:`device_state`: the counter against the integral of the power that was polled meanwhile."""
    off = (polled["kept_up_energy_polled_j"] / polled["kept_up_energy_j"] - 1).abs()
    return {"runs": len(off), "median": off.median(), "nine_of_ten": off.quantile(0.9), "furthest": off.max(),
            "most_s": polled["kept_up_energy_s"].max(),
            "at": polled.loc[off.idxmax(), ["size", "context_length", "mode"]].to_dict()}
