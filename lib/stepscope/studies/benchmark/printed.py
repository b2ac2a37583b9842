"""The benchmarking study's tables as they are printed."""
import math

import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.say.formats import MODE_WORDS, number, percent, plus_minus
from stepscope.say.published import printed_by_report
from stepscope.say.selections import pick
from stepscope.step.timing import WHOLE


def walls(facts: dict) -> pd.DataFrame:
    return wall_table(facts["times"])


def wall_table(times: pd.DataFrame) -> pd.DataFrame:
    """Sizes and contexts down, modes across."""
    cells = pick(times, phase=WHOLE).copy()
    cells["cell"] = ["out of memory" if row.status != "ok"
                     else plus_minus(row.mean_ms, row.std_ms) + ("\\*" if row.flags else "")
                     for row in cells.itertuples()]
    table = cells.pivot(index=["size", "context_length"], columns="mode", values="cell")
    table = table.reindex(columns=list(MODE_WORDS))
    table = table.rename(columns=MODE_WORDS).rename_axis(["size", "context"])
    return table.astype(object).fillna("–").reset_index()


def phases(facts: dict) -> pd.DataFrame | None:
    """Median of each phase of the full step but the loss; None where no full step was run."""
    rows = pick(facts["times"], mode="step", status="ok")
    rows = rows[~rows["phase"].isin([WHOLE, "loss"])]
    if rows.empty:
        return None
    rows = rows.assign(cell=rows["median_ms"].map(number))
    table = rows.pivot(index=["size", "context_length"], columns="phase", values="cell")
    order = [phase for phase in PHASE_NAMES if phase in table]
    return table[order].rename_axis(["size", "context"]).reset_index()


def unsteady(facts: dict) -> pd.DataFrame | None:
    """Runs whose samples are not one steady state; None where there are none."""
    flagged = facts["flagged"]
    if flagged.empty:
        return None
    shown = flagged.assign(mode=flagged["mode"].map(MODE_WORDS), median=flagged["median_ms"].map(number),
                           mean=flagged["mean_ms"].map(number), std=flagged["std_ms"].map(number))
    columns = ["size", "context_length", "mode", "median", "mean", "std", "flags"]
    return shown[columns].rename(columns={"context_length": "context", "flags": "why"})


def launches(facts: dict) -> pd.DataFrame | None:
    """Sizes and contexts down, the phases of forward alone and of the full step across: who waits, and how
    busy the GPU is."""
    rows = facts["rows"]
    if rows is None:
        return None
    rows = rows[rows["mode"].isin(["forward", "step"])]
    cells = [f"{row.waits}, {percent(row.busy_share)}" if row.busy_share == row.busy_share
             else row.waits for row in rows.itertuples()]
    columns = ("forward alone" if mode == "forward" else phase
               for mode, phase in zip(rows["mode"], rows["phase"], strict=True))
    table = rows.assign(cell=cells, column=list(columns)).pivot(
        index=["size", "context_length"], columns="column", values="cell")
    order = [column for column in ("forward alone", *PHASE_NAMES) if column in table]
    return table[order].rename_axis(["size", "context"]).fillna("–").reset_index()


def states(facts: dict) -> pd.DataFrame | None:
    """A row a run: clock, time held back, power, energy; None where there is nothing of these to tell."""
    rows = facts["table"]
    if rows.empty:
        return None
    table = rows.assign(mode=rows["mode"].map(MODE_WORDS), time=rows["median_ms"].map(number),
                        clock=[number(value, 4) for value in rows["sm_clock_mhz"]],
                        least=[number(value, 4) for value in rows["sm_clock_least_mhz"]],
                        loaded=[number(value, 4) for value in rows["kept_up_sm_clock_median_mhz"]],
                        held=rows["held_ms"].map(number), power=rows["kept_up_power_w"].map(number),
                        energy=rows["step_energy_j"].map(number))
    names = {"size": "size", "context_length": "context", "mode": "pass", "optimizer": "AdamW",
             "time": "median (ms)", "clock": "SM clock, median (MHz)", "least": "least (MHz)",
             "loaded": "while kept up, median (MHz)", "held": "held back (ms)", "power": "power (W)",
             "energy": "energy of a step (J)"}
    unmeasured = [name for name in ("loaded", "held", "power", "energy")
                  if (table[name] == number(math.nan)).all()]
    return table[[*names]].drop(columns=unmeasured).rename(columns=names).reset_index(drop=True)


def rates(facts: dict) -> pd.DataFrame:
    """Tokens/s, achieved rate and utilisation of each run."""
    steps = facts["steps"]
    mark = steps["flags"].ne("").map({True: "\\*", False: ""})
    table = steps.assign(tokens=[number(value, 4) for value in steps["tokens_per_s"]],
                         rate=steps["tflops"].map(number) + mark,
                         share=steps["utilisation"].map(percent), sheet=steps["of_sheet"].map(percent))
    columns = {"size": "size", "context_length": "context", "tokens": "tokens/s", "rate": "TFLOP/s",
               "share": "of measured", "sheet": "of data sheet"}
    shown = list(columns) if facts["sheet"] else list(columns)[:-1]
    return table[shown].rename(columns=columns)


def adamw(facts: dict) -> pd.DataFrame:
    """The optimizer phase by implementation, and what fused saves of the step."""
    phase = facts["phases"]
    steps = facts["steps"]
    table = phase.assign(a=phase["median_ms"].map(number), b=phase["median_ms_fused"].map(number),
                         r=facts["foreach_over_fused"].map(number),
                         c=[f"{number(row.sm_clock_mhz, 4)}, {number(row.sm_clock_mhz_fused, 4)}"
                            for row in phase.itertuples()],
                         s=[f"{number(row.ratio, 4)} [{number(row.low, 4)}, {number(row.high, 4)}]"
                            for row in steps.itertuples()])
    return table[["size", "context_length", "a", "b", "r", "c", "s"]].set_axis(
        ["size", "context", "foreach (ms)", "fused (ms)", "foreach / fused", "SM clocks (MHz)",
         "whole steps: foreach / fused"], axis=1)


def published(facts: dict) -> pd.DataFrame:
    """A row a report and clock."""
    clocks = {"range": "profiler's range", "wall": "wall clock"}
    return printed_by_report(facts["reports"].replace({"clock": clocks}), "time")
