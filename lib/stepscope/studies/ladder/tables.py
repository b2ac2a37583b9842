"""The ladder's tables: of one run, and over all of its records."""

import math
from collections.abc import Mapping

import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame
from stepscope.step.summary import flags, median_interval, ratio_interval
from stepscope.studies.ladder.config import BESIDE, RUNGS, Config
from stepscope.studies.ladder.floor import data_sheet, floor_ms, utilisations
from stepscope.studies.ladder.names import snippet
from stepscope.studies.ladder.rungs import products_of

PER_RUN = ("rungs", "samples", "bursts", "ceilings")
SHAPE = ["size", "context_length", "vocab_size"]


def kind_of(rung: str) -> str:
    return "beside" if rung in BESIDE else "left_out" if rung.startswith("without_") else "rung"


def rung_times(tables: Mapping[str, pd.DataFrame], config: Config, device_name: str) -> pd.DataFrame:
    """A row a rung of one run: columns of its table ``rungs`` and what its times amount to.

    Added: kind (``rung``, ``beside``, ``left_out``), n, median_ms and its interval, wall_ms, flags,
    tokens_per_s, clock, power and joules_per_token, the floor's columns with ``floor_share`` (floor over
    median), utilisations, ``gain`` with its interval (the rung before over this one; ``one_change``
    tells whether no rung is left out between them), ``times_as_fast``
    (fp32's over this one), ``over_finished`` (this one over the finished step), lines.
    """
    sheet, rows = data_sheet(device_name), []
    samples = {name: own["time_ms"].to_numpy() for name, own in tables["samples"].groupby("rung")}
    bursts = tables["bursts"].groupby("rung") if len(tables["bursts"]) else None
    climbed = [name for name in RUNGS if name in samples and name != "fill"]
    lacking = set(tables["rungs"].loc[tables["rungs"]["status"] == "unsupported", "rung"])
    finished = next((name for name in reversed(climbed) if name != "fp8"), None)
    for row in tables["rungs"].to_dict("records"):
        name = row["rung"]
        row |= {"kind": kind_of(name), "lines": len(snippet(name))}
        if row["status"] == "ok" and bursts is not None and name in samples:
            own, turns = samples[name], bursts.get_group(name)
            low, high = median_interval(own)
            median = pd.Series(own).median()
            step = config.step(batch_size=int(row["batch"]))
            tokens = step.batch_size * step.context_length
            joules = turns["energy_j"].sum(min_count=1) / turns["steps"].sum()
            row |= {
                "n": len(own),
                "median_ms": median,
                "ci_low_ms": low,
                "ci_high_ms": high,
                "flags": "; ".join(flags(own)),
                "wall_ms": turns["wall_ms"].median(),
                "tokens_per_s": tokens / median * 1e3,
                "sm_clock_mhz": turns["sm_clock_mhz"].median(),
                "power_w": turns["power_w"].median(),
                "joules_per_token": joules / tokens,
                "throttle": "; ".join(sorted({*turns["throttle"].dropna()} - {""})),
            }
            row |= utilisations(step, median, products_of(name), tables["ceilings"], sheet)
            row |= floor_ms(step, tables["ceilings"])
            row["floor_share"] = row["floor_ms"] / median
            row |= _against(name, samples, climbed, finished)
            row["one_change"] = name in climbed[1:] and _is_next(name, climbed, lacking)
        rows.append(row)
    return pd.DataFrame(rows)


def _against(name: str, samples: dict, climbed: list[str], finished: str | None) -> dict[str, float]:
    """A rung's times against those of the rung before it, of fp32 and of the finished step."""
    found = {"gain": math.nan, "gain_low": math.nan, "gain_high": math.nan}
    own, median = samples[name], pd.Series(samples[name]).median()
    if name in climbed[1:]:
        before = samples[climbed[climbed.index(name) - 1]]
        low, high = ratio_interval(before, own)
        found = {"gain": pd.Series(before).median() / median, "gain_low": low, "gain_high": high}
    if "hugging_face" in samples:
        found["over_hugging_face"] = pd.Series(samples["hugging_face"]).median() / median
    if "fp32" in samples:
        found["times_as_fast"] = pd.Series(samples["fp32"]).median() / median
    if finished:
        found["over_finished"] = median / pd.Series(samples[finished]).median()
    return found


def _is_next(name: str, climbed: list[str], lacking: set[str]) -> bool:
    """Whether only one change, or more that the device lacks, is between a rung and the one measured before
    it."""
    before, own = RUNGS.index(climbed[climbed.index(name) - 1]), RUNGS.index(name)
    return set(RUNGS[before + 1 : own]) <= lacking


def all_times(store: Store, records: list[Record]) -> pd.DataFrame:
    """:func:`rung_times` of every run, each row with its run's configuration."""
    if not records:
        return pd.DataFrame()
    stacked, frames = {name: load_table(store, records, name) for name in PER_RUN}, []
    for record in records:
        own = {name: table[table["run_id"] == record.run_id] for name, table in stacked.items()}
        own["rungs"] = own["rungs"].drop(columns="study")
        frames.append(rung_times(own, Config(**record.config), record.machine.get("device_name", "")))
    runs = runs_frame(records).drop(columns=["status", "rungs"])
    return pd.concat(frames, ignore_index=True).merge(runs, on="run_id")


def with_runs(table: pd.DataFrame, records: list[Record]) -> pd.DataFrame:
    """A stacked table with the shape of each row's run."""
    return table.merge(runs_frame(records)[["run_id", *SHAPE]], on="run_id") if len(table) else table


def typical(times: pd.DataFrame) -> pd.DataFrame:
    """A row for each shape and rung over all runs: medians of what is measured, the widest interval, how many
    runs. Gains are of one change each."""
    keys = [*SHAPE, "rung"]
    gains = ["gain", "gain_low", "gain_high"]
    times = times.assign(
        **{gain: times[gain].where(times["one_change"].eq(True)) for gain in gains if gain in times}
    )
    spread = {"ci_low_ms": "min", "gain_low": "min", "ci_high_ms": "max", "gain_high": "max"}
    numeric = [column for column in times.select_dtypes("number") if column not in (*keys, *spread)]
    ok = times[times["status"] == "ok"]
    numbers = (
        ok.groupby(keys, observed=True)
        .agg(
            dict.fromkeys(numeric, "median")
            | {column: how for column, how in spread.items() if column in times}
        )
        .reset_index()
    )
    # what ran in one process and not in another counts as run
    first = times.assign(bad=times["status"] != "ok").sort_values("bad", kind="stable").drop_duplicates(keys)
    texts = first[
        [*keys, "status", "reason", "kind", *(["attention_kernel"] if "attention_kernel" in times else [])]
    ]
    counted = ok.groupby(keys, observed=True)["run_id"].nunique().rename("runs").reset_index()
    merged = texts.merge(numbers, on=keys, how="left").merge(counted, on=keys, how="left")
    order = {name: index for index, name in enumerate([*RUNGS, *BESIDE])}
    return merged.assign(order=merged["rung"].map(order).fillna(len(order))).sort_values(
        [*SHAPE, "order"], kind="stable", ignore_index=True
    )
