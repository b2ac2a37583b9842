"""The attention study's tables as they are printed."""
import math
import textwrap

import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.say.formats import count, faster, gain, number, percent, positions, span, with_interval
from stepscope.studies.attention.config import ATTENTIONS
from stepscope.studies.attention.facts import SMALL_SHARE
from stepscope.studies.attention.facts_ends import CARDS_GIB
from stepscope.studies.attention.facts_time import WIDE
from stepscope.studies.attention.names import NAMES

STATUS_WORDS = {"oom": "out of memory", "unsupported": "not supported", "wrong": "wrong", "none": "–"}
NO_CHANGE = {"launching": "launching as long", "noise": "as fast", "processes": "within two processes"}
FEW_SQUARES = 0.05  # below it no digit is shown


def errors(facts: dict) -> pd.DataFrame:
    """Implementations down, precisions across: the largest error, and how many cells passed."""
    def cell(row) -> str:
        if row.status == "ok":
            return f"{row.error:.1e} ({row.passed} of {row.cells})"
        return f"{row.error:.1e}, wrong" if row.status == "wrong" else STATUS_WORDS[row.status]
    rows = facts["errors"]
    shown = rows.assign(cell=[cell(row) for row in rows.itertuples()])
    table = shown.pivot(index="implementation", columns="precision", values="cell")
    table = table.loc[rows["implementation"].unique(), rows["precision"].unique()].rename(index=NAMES)
    return table.rename_axis(columns=None).reset_index()


def refusals(facts: dict) -> pd.DataFrame | None:
    """A row for each implementation and reason; None where everything is supported."""
    rows = facts["refusals"]
    if rows.empty:
        return None
    return pd.DataFrame({
        "implementation": rows["implementation"].map(NAMES), "precision": rows["precisions"].map(", ".join),
        "d": [", ".join(map(str, heads)) for heads in rows["heads"]], "cells": rows["cells"],
        "reason": [textwrap.shorten(reason, 100, placeholder=" …") for reason in rows["reason"]]})


def at_one_point(facts: dict) -> pd.DataFrame:
    """Precision and implementation down."""
    rows = facts["at"]
    names = rows["implementation"].map(NAMES)
    table = measured(rows, {"precision": rows["precision"], "implementation": names})
    clocks = rows.get("sm_clock_mhz", pd.Series(dtype=float))
    mhz = clocks.map(lambda value: number(value, 4))
    return table.assign(**{"SM MHz": mhz}) if clocks.notna().any() else table


def long(facts: dict) -> pd.DataFrame | None:
    """Precision and implementation down, with d where there are several, of what ran; None where none did."""
    rows = facts["cells"]
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return None
    heads = {"d": rows["d_model"]} if len(facts["heads"]) > 1 else {}
    passes = ["–" if math.isnan(passes) else f"{passes:.0f}" for passes in rows["passes"]]
    return measured(rows, {"precision": rows["precision"], **heads,
                           "implementation": rows["implementation"].map(NAMES)}).assign(passes=passes)


def measured(rows: pd.DataFrame, columns: dict[str, pd.Series]) -> pd.DataFrame:
    """Columns, and what was measured: times or how it ended, memory in use and at the peak."""
    def cells(phase: str) -> list[str]:
        columns = ["status", *(f"{phase}_{part}_ms" for part in ("median", "ci_low", "ci_high"))]
        return [STATUS_WORDS.get(status) or interval(median, low, high)
                for status, median, low, high in rows[columns].itertuples(index=False)]
    table = pd.DataFrame(columns | {
        "forward": cells("forward"), "in use before backward": mib(rows, "in_use_bytes"),
        "backward": cells("backward"), "peak": mib(rows, "peak_bytes")})
    return table.drop(columns="peak") if (table["peak"] == "–").all() else table


def interval(median: float, low: float, high: float) -> str:
    """The median, with its interval where that reaches far."""
    wide = max(high - median, median - low) > WIDE * median
    return with_interval(median, low, high) if wide else number(median)


def mib(rows: pd.DataFrame, column: str) -> list[str]:
    return [number(value / 2**20) for value in rows[column]] if column in rows else ["–"] * len(rows)


def asked(facts: dict) -> pd.DataFrame:
    """The assignment's table: d and sequence down; written out, and compiled against it."""
    rows = facts["asked"]
    table = measured(rows, {"d": rows["d_model"], "sequence": rows["sequence"].map(positions)}).drop(
        columns="peak", errors="ignore")
    for phase in ("forward", "backward") if rows["pass_median_ms_compiled"].notna().any() else ():
        table[f"{phase}, compiled"] = [
            "–" if math.isnan(ms) else f"{number(ms)}: {faster(ratio)}" + " ‡" * overlaps + " †" * launching
            for ms, ratio, overlaps, launching in zip(
                rows[f"{phase}_median_ms_compiled"], rows[f"{phase}_ratio"], rows[f"{phase}_overlaps"],
                rows["launching"], strict=True)]
    return table


def ceilings(facts: dict) -> pd.DataFrame:
    """Precision and implementation down, d across: shares of the ceiling at the longest sequence."""
    rows = facts["longest"]
    means = rows.groupby(["precision", "implementation", "d_model"])[
        ["utilisation", "forward_utilisation"]].mean()

    def cell(*shares: float) -> str:
        return ", ".join(percent(share, 1 if share < SMALL_SHARE else 0) for share in shares)
    means["cell"] = [cell(*values) for values in means.itertuples(index=False)]
    table = means["cell"].unstack("d_model").fillna("–")
    order = [(p, name) for p in PRECISIONS for name in ATTENTIONS if (p, name) in table.index]
    table = table.loc[order].rename(columns=lambda d: f"d {d}").rename_axis(columns=None).reset_index()
    return table.assign(implementation=table["implementation"].map(NAMES))


def generations(facts: dict) -> pd.DataFrame:
    """Points down, fused implementations across."""
    rows = facts["table"]
    table = rows[["precision", "d_model", "sequence"]].rename(columns={"d_model": "d"})
    table["sequence"] = table["sequence"].map(positions)
    table["mask"] = rows["causal"].map({True: "causal", False: "none"})
    for name in facts["ran"]:
        table[NAMES[name]] = [
            "–" if math.isnan(ms) else number(ms) + ("" if causal else f" ({percent(share)})") + " †" * long
            for ms, share, long, causal in zip(rows[f"{name}_ms"], rows[f"{name}_forward"],
                                                  rows[f"{name}_launching"].eq(True), rows["causal"],
                                                  strict=True)]
    return table


def changes(facts: dict) -> pd.DataFrame | None:
    """d and sequence down, forward and backward across: with TF32, and against fp32, where launching
    took less than the pass in one of both; None on a CPU."""
    if facts["on_cpu"]:
        return None
    points: dict[tuple, dict] = {}
    rows = facts["changes"].sort_values(["d_model", "sequence"], kind="stable")
    told = rows["none"].ne("launching").groupby([rows["d_model"], rows["sequence"]]).transform("any")
    for row in rows[told].itertuples():
        change = faster(1 / (1 + row.change))
        change = NO_CHANGE.get(row.none) or (f"at least {change}" if row.at_least else change)
        change += "≠" * (row.unlike and not row.none)
        point = points.setdefault((row.d_model, row.sequence), {
            "d": row.d_model, "sequence": positions(row.sequence)})
        point |= {f"{row.phase}, TF32": number(row.tf32_ms), f"{row.phase}, against fp32": change}
    return pd.DataFrame(points.values()) if points else None


def saved(facts: dict) -> pd.DataFrame:
    """Implementations down: the exponent, and by precision what is saved at one point, in brackets in squares
    where that is not few."""
    fits, rows = facts["fits"], facts["saved"]
    ends = [span((least, most)) for least, most in zip(fits["least"], fits["most"])]
    table = pd.DataFrame({"exponent": [number(one) + (f" ({own})" if " to " in own else "")
                                       for one, own in zip(fits["exponent"], ends)]}, index=fits.index)
    for precision, of in rows.groupby("precision", sort=False):
        of = of.set_index("implementation")
        table[f"{precision}, MiB"] = of["mib"].map(number) + of["squares"].map(
            lambda value: f" ({number(value, 2)})" if value >= FEW_SQUARES else "")
    return table.fillna("–").rename(index=NAMES).reset_index()


def ends(facts: dict) -> pd.DataFrame | None:
    """Precisions (those with the same bytes in one row) and implementations down; None where no end was
    looked for."""
    if not facts["searched"]:
        return None
    rows = facts["table"]
    shown = pd.DataFrame({
        "precision": rows["precision"], "implementation": rows["implementation"].map(NAMES),
        "predicted": [f"{positions(fit)} †" if math.isnan(code) else positions(code)
                      + (" *" if corrected else "") for code, fit, corrected
                      in zip(rows["by_code"], rows["by_fit"], rows["corrected"])],
        "measured": fits_and_fails(rows["fits"], rows["fails_mask"].fillna(rows["fails"])),
        "expandable": fits_and_fails(rows["fits_expandable"], rows["fails_expandable"])}
        | {f"{card} GB": rows[f"gib_{card}"].map(positions) for card in CARDS_GIB})
    others = [column for column in shown if column != "precision"]
    return shown.groupby(others, sort=False)["precision"].agg(", ".join).reset_index()[["precision", *others]]


def fits_and_fails(fits: pd.Series, fails: pd.Series) -> list[str]:
    return ["–" if math.isnan(longest) else f"{positions(longest)} \\| {positions(shortest)}"
            for longest, shortest in zip(fits, fails)]


def account(facts: dict) -> pd.DataFrame | None:
    """The tensors of the shortest sequence that failed that make 1% of it or more, the others together, and
    the sum; None where none failed."""
    if not facts["searched"] or facts["account"].empty:
        return None
    rows = facts["account"]
    first = rows.iloc[0]
    whole = (f"all, {NAMES[first['implementation']]}, {first['precision']},"
             f" sequence {positions(first['sequence'])}")
    large = rows["bytes"] >= 0.01 * rows["bytes"].sum()
    big, small = rows[large], rows.loc[~large, "bytes"]
    shown = [*zip(big["tensor"], big["shape"], big["bytes"]),
             *([(f"{count(len(small), 'smaller tensor')}", "", small.sum())] if len(small) else []),
             (whole, "", rows["bytes"].sum())]
    return pd.DataFrame([{"tensor": tensor, "shape": shape, "GiB": number(size / 2**30)}
                         for tensor, shape, size in shown])


def published_ratios(facts: dict) -> pd.DataFrame:
    """d down, sequences across: forward's ratio, then backward's where it was printed; a dash where launching
    took as long as the pass here."""
    table = facts["table"]
    return _grid(table.assign(cell=[
        "–" if row.as_long else ", ".join(gain(ratio) for ratio in (row.forward_ratio, row.backward_ratio)
                                        if ratio > 0)
        for row in table.itertuples()]))


def published_tf32(facts: dict) -> pd.DataFrame | None:
    """d down, sequences across: fp32's time over TF32's of forward as printed, and here in brackets."""
    if not facts["tf32"]:
        return None
    table = facts["tf32"][0]["table"]
    cells = ["–" if row.as_long else f"{number(row.theirs)} ({number(row.here)}{'≠' * row.unlike})"
             for row in table.itertuples()]
    return _grid(table.assign(cell=cells))


def _grid(table: pd.DataFrame) -> pd.DataFrame:
    cells = table.pivot(index="d_model", columns="sequence", values="cell").fillna("–")
    cells = cells.loc[:, cells.ne("–").any() | cells.eq("–").all(axis=None)]  # no column that says nothing
    return cells.rename(columns=positions).rename_axis(index="d", columns=None).reset_index()
