"""The attention study's tables as they are printed."""
import math
import textwrap

import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.say.formats import number, percent, percent_change, positions, span, to, with_error
from stepscope.say.selections import precisions
from stepscope.studies.attention.config import ATTENTIONS
from stepscope.studies.attention.facts import SMALL_SHARE
from stepscope.studies.attention.facts_ends import CARDS_GIB
from stepscope.studies.attention.names import NAMES

STATUS_WORDS = {"oom": "out of memory", "unsupported": "not supported", "wrong": "wrong", "none": "–"}
NO_CHANGE = {"host": "not told (host)", "noise": "none", "processes": "not told (processes)"}
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
        "reason": [textwrap.shorten(reason, 200, placeholder=" …") for reason in rows["reason"]]})


def at_one_point(facts: dict) -> pd.DataFrame:
    """Precision and implementation down."""
    rows = facts["at"]
    names = rows["implementation"].map(NAMES)
    return measured(rows, {"precision": rows["precision"], "implementation": names})


def long(facts: dict) -> pd.DataFrame:
    """Precision, d and implementation down."""
    rows = facts["cells"]
    return measured(rows, {"precision": rows["precision"], "d": rows["d_model"],
                           "implementation": rows["implementation"].map(NAMES)})


def written_out(facts: dict) -> pd.DataFrame:
    """The handout's table: precision, d and sequence down."""
    rows = facts["written_out"]
    return measured(rows, {"precision": rows["precision"], "d": rows["d_model"],
                           "sequence": rows["sequence"]})


def measured(rows: pd.DataFrame, columns: dict[str, pd.Series]) -> pd.DataFrame:
    """Columns, and what was measured: times or how it ended, memory in use and at the peak, passes."""
    def cells(phase: str) -> list[str]:
        columns = ["status", *(f"{phase}_{part}_ms" for part in ("median", "ci_low", "ci_high"))]
        return [STATUS_WORDS.get(status) or f"{number(median)} [{number(low)}, {number(high)}]"
                for status, median, low, high in rows[columns].itertuples(index=False)]
    table = pd.DataFrame(columns | {
        "forward": cells("forward"), "in use before backward": mib(rows, "in_use_bytes"),
        "backward": cells("backward"), "peak": mib(rows, "peak_bytes"),
        "passes": ["–" if math.isnan(passes) else f"{passes:.0f}" for passes in rows["passes"]]})
    return table.drop(columns="peak") if (table["peak"] == "–").all() else table


def mib(rows: pd.DataFrame, column: str) -> list[str]:
    return [number(value / 2**20) for value in rows[column]] if column in rows else ["–"] * len(rows)


def compiled(facts: dict) -> pd.DataFrame | None:
    """The handout's other table, eager and compiled beside each other; None where there are not both."""
    both = facts["compiled"]
    if both.empty:
        return None
    table = both[["d_model", "sequence"]].rename(columns={"d_model": "d"})
    for phase in ("forward", "backward"):
        table[f"{phase}, eager"] = both[f"{phase}_median_ms"].map(number)
        table[f"{phase}, compiled"] = both[f"{phase}_median_ms_compiled"].map(number)
        table[f"{phase}, times as fast"] = [number(ratio) + (" *" if overlaps else "") for ratio, overlaps in
                                            zip(both[f"{phase}_ratio"], both[f"{phase}_overlaps"])]
    return table.assign(**{"in use, eager": mib(both, "in_use_bytes"),
                           "in use, compiled": mib(both, "in_use_bytes_compiled")})


def best(facts: dict) -> pd.DataFrame | None:
    """d and sequence down, precisions across: the fastest implementation; None where nothing is compared."""
    rows = facts["best"]
    if rows.empty:
        return None
    def cell(row) -> str:
        mark = "" if row.sure else " *"
        return f"{NAMES[row.implementation]} {number(row.pass_median_ms)} ({number(row.speedup, 2)}){mark}"
    cells = rows.assign(cell=[cell(row) for row in rows.itertuples()])
    table = cells.pivot(index=["d_model", "sequence"], columns="precision", values="cell").fillna("–")
    return table[precisions(rows)].rename_axis(["d", "sequence"]).reset_index()


def ceilings(facts: dict) -> pd.DataFrame:
    """Precision and implementation down, d across: rate and share of the ceiling at the longest sequence."""
    rows = facts["longest"]
    means = rows.groupby(["precision", "implementation", "d_model"])[
        ["pass_tflops", "utilisation", "forward_utilisation"]].mean()

    def cell(tflops: float, *shares: float) -> str:
        both = ", ".join(percent(share, 1 if share < SMALL_SHARE else 0) for share in shares)
        return f"{number(tflops)} ({both})"
    means["cell"] = [cell(*values) for values in means.itertuples(index=False)]
    table = means["cell"].unstack("d_model").fillna("–")
    order = [(p, name) for p in PRECISIONS for name in ATTENTIONS if (p, name) in table.index]
    table = table.loc[order].rename(columns=lambda d: f"d {d}").rename_axis(columns=None).reset_index()
    return table.assign(implementation=table["implementation"].map(NAMES))


def generations(facts: dict) -> pd.DataFrame:
    """Points down, fused implementations across."""
    rows = facts["table"]
    table = rows[["precision", "d_model", "sequence"]].rename(columns={"d_model": "d"})
    table["mask"] = rows["causal"].map({True: "causal", False: "none"})
    for name in facts["ran"]:
        table[NAMES[name]] = [f"{number(ms)} ({percent(share)})" if ms == ms else "–" for ms, share in
                              zip(rows[f"{name}_ms"], rows[f"{name}_forward"], strict=True)]
    return table


def compilations(facts: dict) -> pd.DataFrame:
    """A row for each implementation that is compiled."""
    def seconds(values: pd.Series | None) -> str:
        return "–" if values is None else span(values)
    return pd.DataFrame([{
        "implementation": NAMES[kind["implementation"]], "runs": kind["runs"], "cells": kind["cells"],
        "graphs a run": to(**kind["graphs"]), "recompilations a run": to(**kind["again"]),
        "in timed passes": str(kind["later_graphs"]), "first of a process (s)": seconds(kind["first_s"]),
        "others, masked (s)": seconds(kind["masked"] and kind["masked"]["s"]),
        "others, without (s)": seconds(kind["plain"] and kind["plain"]["s"]),
        "first pass without compiling (ms), at most": number(kind["warm_ms"])} for kind in facts["kinds"]])


def changes(facts: dict) -> pd.DataFrame | None:
    """d and sequence down, forward and backward across: without TF32, with it, the change; None on a CPU."""
    if facts["on_cpu"]:
        return None
    points: dict[tuple, dict] = {}
    for row in facts["changes"].sort_values(["d_model", "sequence"], kind="stable").itertuples():
        change = f"{row.change:+.1%} [{row.low:+.1%}, {row.high:+.1%}]"
        change = NO_CHANGE.get(row.none) or (f"at least {change}" if row.at_least else change)
        point = points.setdefault((row.d_model, row.sequence), {"d": row.d_model, "sequence": row.sequence})
        point |= {f"{row.phase}, fp32": number(row.fp32_ms), f"{row.phase}, TF32": number(row.tf32_ms),
                  f"Δ {row.phase}": change}
    return pd.DataFrame(points.values())


def saved(facts: dict) -> pd.DataFrame:
    """Implementations down: the exponent, and by precision what is saved at one point."""
    fits, rows = facts["fits"], facts["saved"]
    table = pd.DataFrame({"exponent": [with_error(fit.exponent, fit.error) for fit in fits.itertuples()],
                          "points": fits["points"].astype(str)}, index=fits.index)
    table["between the two longest"] = pd.Series({name: span(powers, digits=4) for name,
                                                  powers in facts["local"].items()})
    for precision, of in rows.groupby("precision", sort=False):
        of = of.set_index("implementation")
        table[f"{precision} (MiB)"] = of["mib"].map(number)
        table[f"{precision} (squares)"] = of["squares"].map(
            lambda value: number(value, 2) if value >= FEW_SQUARES else f"under {FEW_SQUARES}")
    return table.fillna("–").rename(index=NAMES).reset_index()


def ends(facts: dict) -> pd.DataFrame | None:
    """Precisions (those with the same bytes in one row) and implementations down; None where no end was
    looked for."""
    if not facts["searched"]:
        return None
    rows = facts["table"]
    shown = pd.DataFrame({
        "precision": rows["precision"], "implementation": rows["implementation"].map(NAMES),
        "code": [positions(end) + (" *" if corrected else "")
                 for end, corrected in zip(rows["by_code"], rows["corrected"])],
        "fit": rows["by_fit"].map(positions),
        "measured": fits_and_fails(rows["fits"], rows["fails_mask"].fillna(rows["fails"])),
        "expandable": fits_and_fails(rows["fits_expandable"], rows["fails_expandable"])}
        | {f"{card} GB": rows[f"gib_{card}"].map(positions) for card in CARDS_GIB})
    others = [column for column in shown if column != "precision"]
    return shown.groupby(others, sort=False)["precision"].agg(", ".join).reset_index()[["precision", *others]]


def fits_and_fails(fits: pd.Series, fails: pd.Series) -> list[str]:
    return ["–" if math.isnan(longest) else f"{positions(longest)} \\| {positions(shortest)}"
            for longest, shortest in zip(fits, fails)]


def account(facts: dict) -> pd.DataFrame | None:
    """Every tensor of the shortest sequence that failed, and their sum; None where none failed."""
    if not facts["searched"] or facts["account"].empty:
        return None
    rows = facts["account"]
    first = rows.iloc[0]
    whole = f"all, {NAMES[first['implementation']]}, {first['precision']}, sequence {first['sequence']}"
    shown = [*zip(rows["tensor"], rows["shape"], rows["bytes"]), (whole, "", rows["bytes"].sum())]
    return pd.DataFrame([{"tensor": tensor, "shape": shape, "bytes": f"{size:,}", "GiB": number(size / 2**30)}
                         for tensor, shape, size in shown])


def published_ratios(facts: dict) -> pd.DataFrame:
    """d down, sequences across: forward's ratio, then backward's where it was printed."""
    table = facts["table"]
    return _grid(table.assign(cell=[
        number(row.forward_ratio) + (f", {number(row.backward_ratio)}" if row.backward_ratio > 0 else "")
        for row in table.itertuples()]))


def published_tf32(facts: dict) -> pd.DataFrame | None:
    """d down, sequences across: TF32's change of forward's time as printed, and here in brackets."""
    if not facts["tf32"]:
        return None
    table = facts["tf32"][0]["table"]
    return _grid(table.assign(cell=[f"{percent_change(row.theirs - 1)} ({percent_change(row.here - 1)})"
                                    for row in table.itertuples()]))


def _grid(table: pd.DataFrame) -> pd.DataFrame:
    cells = table.pivot(index="d_model", columns="sequence", values="cell").fillna("–")
    return cells.rename(columns=str).rename_axis(index="d", columns=None).reset_index()
