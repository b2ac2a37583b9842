"""Where attention runs out of memory, in numbers: predicted, measured, and tensor by tensor."""
import re

import numpy as np
import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.say.formats import NEARLY, runs_of
from stepscope.studies.attention.cells import implementations, is_cpu, timed
from stepscope.studies.attention.config import QUADRATIC
from stepscope.studies.attention.names import NAMES
from stepscope.studies.attention.prediction import by_code, by_fit, end, number_bytes
from stepscope.studies.attention.unseen import CORRECTED

CARDS_GIB = (24, 80)  # sold as GB; their memory is about as many GiB
SAME_CARD = 0.02  # a card whose name is this close to the memory of the device here is that device
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
SEARCHES = {"": ("pass", False), "_expandable": ("pass", True), "_mask": ("mask", False)}  # part, expandable


def where_it_ends(cells: pd.DataFrame, ends: pd.DataFrame, predicted: pd.DataFrame,
                  accounting: pd.DataFrame) -> dict:
    """Where each implementation stops fitting. On a CPU only what is followed (``squares``); where no end was
    ``searched`` only what ran ``out`` of memory on the grid.

    ``table`` is :func:`ends_table`; of its parts: ``known`` (measured peaks over predicted ones),
    ``allocator``, ``mask``, ``unreached`` and ``first`` (the shortest sequence that failed), each None where
    there is nothing of it.
    """
    if is_cpu(cells):
        return {"on_cpu": True, "searched": False, "first": None, "names": NAMES,
                "squares": squares_at_peak(predicted), "runs": runs_of(cells)}
    table = ends_table(cells, ends, predicted)
    out = cells.loc[cells["status"] == "oom", ["implementation", "precision", "d_model", "sequence"]]
    out_at = out.drop_duplicates().sort_values(list(out))
    found = {"on_cpu": False, "first": None, "names": NAMES, "cells": len(cells), "out": len(out),
             "out_at": out_at.to_dict("records"), "searched": len(table) > 0, "table": table,
             "account": smallest_failing(accounting), "runs": runs_of(table if len(table) else cells)}
    if table.empty:
        return found
    first = table.iloc[0]
    return found | {
        "d": first["d_model"], "batch": int(cells["batch_size"].iloc[0]),
        "has_compiled": "compiled" in set(table["implementation"]),
        "has_mask": table["fails_mask"].notna().any(),
        "known": known_peaks(table), "allocator": allocator(table[table["fails"].notna()], ends),
        "mask": mask_making(table), "unreached": unreached(table),
        "first": first_failing(accounting, cells)}


def squares_at_peak(predicted: pd.DataFrame) -> list[dict]:
    """What the code alone says, in squares of T x T numbers for the batch, at the longest sequence."""
    if predicted.empty:
        return []
    rows = predicted[predicted["causal"].astype(bool) & predicted["peak_bytes"].notna()]
    found = []
    for name, points in rows.groupby("implementation", sort=False):
        last = points.loc[points["sequence"].idxmax()]
        square = last["batch_size"] * last["sequence"] ** 2 * number_bytes(last["precision"])
        found.append({"implementation": name, "squares": last["peak_bytes"] / square})
    return found


def ends_table(cells: pd.DataFrame, ends: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """A row for each precision and implementation at the head dimension of which the end was looked for.

    Columns: ``by_code`` (the sequence predicted from the code alone; ``corrected``: after a first
    measurement), ``by_fit`` (from peaks measured at the
    sequences that were timed), ``fits`` and ``fails`` (the longest pass that did and the shortest that did
    not), the same with ``_expandable`` (the allocator's expandable segments) and with ``_mask``
    (FlexAttention's mask made), ``mask_pair_bytes`` (measured while
    that is made, for each pair of positions), ``overhead`` (what of the device no tensor can have), ``known``
    (the measured peak over the predicted one), and ``gib_24`` ...: the end by fit on a device of so much.
    """
    rows = []
    runs = cells[cells["find_end"].astype(bool)].groupby("run_id") if "available_bytes" in cells else ()
    for run_id, of_run in runs:
        for name in implementations(timed(of_run)):
            probes, known = (table[(table["run_id"] == run_id) & (table["implementation"] == name)]
                             if len(table) else table for table in (ends, predicted))
            known = known[known["causal"].astype(bool)] if len(known) else known
            rows.append(end_of(name, timed(of_run, implementation=name), probes, known))
    rows.sort(key=lambda row: PRECISIONS.index(row["precision"]))
    return pd.DataFrame(rows)


def end_of(name: str, peaks: pd.DataFrame, probes: pd.DataFrame, known: pd.DataFrame) -> dict:
    """One implementation of one run for :func:`ends_table`: timed cells, probes, predicted peaks."""
    first, last = peaks.iloc[0], peaks.loc[peaks["sequence"].idxmax()]
    device, available = first["device_bytes"], first["available_bytes"]
    # Probes that fit are measured too: the fit is from the timed cells alone, as a prediction has to be.
    fitted, coded = by_fit(peaks), by_code(name, known, first)
    predicted_peak = np.polynomial.Polynomial(coded[0])(last["sequence"]) if coded else float("nan")
    row = {"study": "attention", "run_id": first["run_id"], "precision": first["precision"],
           "d_model": first["d_model"], "implementation": name, "device_bytes": device,
           "overhead": device - available, "by_code": end(coded, available), "by_fit": end(fitted, available),
           "corrected": name in CORRECTED and len(coded) > 0,
           "mask_pair_bytes": fitted[1][2] if len(fitted) > 1 else float("nan"),
           "known": last["peak_bytes"] / predicted_peak}
    for suffix, (part, expandable) in SEARCHES.items():
        row |= searched(suffix, part, expandable, probes, last["sequence"])
    return row | {f"gib_{card}": end(fitted, card_bytes(card, device) - (device - available))
                  for card in CARDS_GIB}


def searched(suffix: str, part: str, expandable: bool, probes: pd.DataFrame, timed_to: int) -> dict:
    """The longest sequence that fits and the shortest that fails in one kind of search. A pass that was timed
    fits with the default settings, and counts for expandable segments where those were tried."""
    if len(probes):
        probes = probes[(probes["part"] == part) & (probes["expandable"].astype(bool) == expandable)]
    fits = list(probes.loc[probes["status"] == "ok", "sequence"]) if len(probes) else []
    if part == "pass" and (len(probes) or not expandable):
        fits.append(timed_to)
    fails = probes.loc[probes["status"] == "oom", "sequence"].min() if len(probes) else float("nan")
    return {f"fits{suffix}": max(fits, default=float("nan")), f"fails{suffix}": fails}


def same_card(card: int, here: float) -> bool:
    """Whether a card of so many GB is the device here, of so many bytes."""
    return abs(card * 2**30 / here - 1) < SAME_CARD


def card_bytes(card: int, here: float) -> float:
    return here if same_card(card, here) else card * 2**30


def known_peaks(table: pd.DataFrame) -> dict | None:
    """Measured peaks over those predicted from the code, and which are ``off``."""
    ratios = table["known"]
    if ratios.isna().all():
        return None
    off = table[(ratios - 1).abs() > NEARLY].groupby("implementation", sort=False)["known"].median()
    return {"low": ratios.min(), "high": ratios.max(),
            "off": [{"implementation": name, "ratio": ratio} for name, ratio in off.items()]}


def met(searches: pd.DataFrame, suffix: str) -> dict:
    """In how many searches the predicted end is between the longest that fits and the shortest that fails,
    and in how many of those it was ``corrected``."""
    rows = searches[searches[f"fails{suffix}"].notna() & searches["by_code"].notna()]
    between = (rows[f"fits{suffix}"] <= rows["by_code"]) & (rows["by_code"] < rows[f"fails{suffix}"])
    return {"met": int(between.sum()), "of": len(rows), "corrected": int((between & rows["corrected"]).sum())}


def allocator(measured: pd.DataFrame, probes: pd.DataFrame) -> dict | None:
    """Where the searches end against the predictions with the allocator's default settings: ``early`` are
    those in which it held much in no tensor; and, where tried, with ``expandable`` segments: ``later`` are
    those that end later."""
    searches = measured[measured["implementation"].isin(QUADRATIC)]
    if searches.empty:
        return None
    held = idle(probes, searches)
    early = held[held["share"] > NEARLY]
    again = searches[searches["fails_expandable"].notna()]
    later = again[again["fits_expandable"] > again["fits"]]
    return {"default": met(searches, ""), "early": in_precisions(early),
            "early_percent": early["share"] * 100,
            "expandable": met(again, "_expandable") if len(again) else None, "later": in_precisions(later)}


def in_precisions(rows: pd.DataFrame) -> list[dict]:
    return [{"implementation": name, "precisions": list(found)}
            for name, found in rows.groupby("implementation", sort=False)["precision"]]


def idle(probes: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Of the shortest failing pass of each search: implementation, precision and ``share``, what of the
    device's memory was reserved and in no tensor, by the allocator's words."""
    probes = probes[(probes["status"] == "oom") & (probes["part"] == "pass")
                    & ~probes["expandable"].astype(bool)]
    columns = ["run_id", "implementation", "fails", "device_bytes"]
    failed = measured[[*columns, "precision"]].merge(
        probes[["run_id", "implementation", "sequence", "reason"]], how="inner", left_on=columns[:3],
        right_on=["run_id", "implementation", "sequence"])
    held = pd.Series([reserved_bytes(words) for words in failed["reason"]], index=failed.index, dtype=float)
    return failed.assign(share=held / failed["device_bytes"])


def reserved_bytes(words: str) -> float:
    """What the allocator says it held in no tensor; nan where it says nothing of it."""
    held = re.search(r"and ([\d.]+) (GiB|MiB|KiB|bytes) is reserved", words)
    return float(held[1]) * UNITS[held[2]] if held else float("nan")


def mask_making(table: pd.DataFrame) -> dict | None:
    """What FlexAttention's mask ends: each of its numbers as the lowest and highest over precisions."""
    flex = table[table["fails_mask"].notna()]
    if flex.empty:
        return None
    spans = {column: {"low": flex[column].min(), "high": flex[column].max()}
             for column in ("fits_mask", "fails_mask")}
    return spans | {"pair_bytes": flex["mask_pair_bytes"]}


def unreached(table: pd.DataFrame) -> dict | None:
    """Implementations that still fit at the longest sequence tried."""
    rows = table[table["fails"].isna() & table["fails_mask"].isna()]
    if rows.empty:
        return None
    return {"implementations": list(dict.fromkeys(rows["implementation"])), "fits": rows["fits"]}


def smallest_failing(accounting: pd.DataFrame) -> pd.DataFrame:
    """The tensors of the shortest sequence that failed."""
    if accounting.empty:
        return accounting
    smallest = accounting.loc[accounting["sequence"].idxmin()]
    return accounting[(accounting["run_id"] == smallest["run_id"])
                      & (accounting["implementation"] == smallest["implementation"])]


def first_failing(accounting: pd.DataFrame, cells: pd.DataFrame) -> dict | None:
    """The shortest sequence that failed: what its tensors need, what was to be had, the largest of them."""
    tensors = smallest_failing(accounting)
    if tensors.empty:
        return None
    first = tensors.iloc[0]
    available = cells.loc[cells["run_id"] == first["run_id"], "available_bytes"].iloc[0]
    total, large = tensors["bytes"].sum(), tensors["bytes"].max()
    largest = tensors[tensors["bytes"] == large]
    return {"implementation": first["implementation"], "precision": first["precision"],
            "sequence": first["sequence"], "total_gib": total / 2**30, "available_gib": available / 2**30,
            "large_gib": large / 2**30, "largest": len(largest),
            "largest_share": len(largest) * large / total,
            "made_in": list(dict.fromkeys(text.split(":")[0] for text in largest["tensor"]))}
