"""The profiling study's tables as they are printed."""
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from stepscope.say.formats import MODE_WORDS, code, number, percent, percent_span, plain, points, to
from stepscope.say.words import Words
from stepscope.studies.nsys.facts import PROFILE, STATES

REASONS = Path(__file__).parent / "words" / "reasons"
CLAIM_FORMATS: dict[str, Callable[[float], str]] = {
    "change": points, "first_launches": plain, "first_share": partial(percent, decimals=1)}


def by_profile(table: pd.DataFrame) -> pd.DataFrame:
    """A table with a row a profile, its size and context first."""
    return table.rename_axis(["size", "context"]).reset_index()


def clocks(facts: dict) -> pd.DataFrame:
    """A row for each profile: forward alone by every clock."""
    columns = {"projected_ms": "on the device", "operations_ms": "operations", "host_ms": "host range"}
    table = facts["by_clock"].set_index(PROFILE)[list(columns)].map(number).rename(columns=columns)
    return by_profile(_states(facts, "forward").join(table))


def slowdowns(facts: dict) -> pd.DataFrame | None:
    """Profiles down, the longer modes across: wall time of a step by state; None where there are none."""
    modes = [mode for mode in ("forward_backward", "step") if facts["slowdowns"].xs(mode, axis=1, level=1)
             .notna().any(axis=None)]
    return by_profile(pd.concat([_states(facts, mode, f"{MODE_WORDS[mode]}: ") for mode in modes],
                                axis=1)) if modes else None


def _states(facts: dict, mode: str, words: str = "") -> pd.DataFrame:
    """One mode's ms plain, annotated and captured, and by how much plain and captured steps differ."""
    times, spreads = (facts[name].xs(mode, axis=1, level=1) for name in ("slowdowns", "spreads"))
    spreads = spreads[["plain", "captured"]]
    return pd.DataFrame({
        f"{words}{' / '.join(STATES)}": [" / ".join(map(number, row)) for row in times.to_numpy()],
        f"{words}differ by": [" / ".join(map(share, row)) for row in spreads.to_numpy()],
    }, index=times.index)


def share(value: float) -> str:
    """A share in percent; a dash where it is not known."""
    return "–" if pd.isna(value) else percent(value, 1 if value < 0.1 else 0)


def phases(facts: dict) -> pd.DataFrame:
    """A row for each profile, a column for each phase: ms plain, ms back to back, and who waits."""
    rows = facts["by_phase"]
    rows = rows.assign(cell=[f"{number(row.plain_ms)}, {number(row.back_to_back_ms)}, {row.waits}"
                             for row in rows.itertuples()])
    wide = rows.pivot_table(index=PROFILE, columns="phase", values="cell", aggfunc="first", observed=True)
    return by_profile(wide[list(dict.fromkeys(rows["phase"]))])


def first_kernels(facts: dict) -> pd.DataFrame:
    """A row for each profile: forward's first kernel, and whether it is first over forward + backward."""
    return pd.DataFrame([{
        "size": row.size, "context": row.context_length, "kernel": code(row.kernel),
        "share": percent(row.share), "launches": plain(row.launches),
        "first in fwd + bwd": ("–" if pd.isna(row.kernel_both) else "same" if row.same
                               else code(row.kernel_both)),
    } for row in facts["first"].itertuples(index=False)])


def names(facts: dict) -> pd.DataFrame | None:
    """The whole names of kernels that are named shorter, as a profiler prints and a search finds them."""
    if not facts["names"]:
        return None
    return pd.DataFrame({"kernel": [code(short) for short in facts["names"]],
                         "whole name": [code(name) for name in facts["names"].values()]})


def kernels(facts: dict) -> pd.DataFrame:
    """The reference's kernels that are no matrix products, largest first."""
    return pd.DataFrame([{
        "kernel": code(row.kernel), "family": row.family, "regions": ", ".join(row.regions),
        "share": percent(row.share, 1), "launches": plain(row.launches), "ms": number(row.ms),
    } for row in facts["kernels"].itertuples(index=False)])


def step_families(facts: dict) -> pd.DataFrame:
    """Profiles down, families across: of forward only, and of the full step."""
    shares = facts["shares"]
    return by_profile(pd.DataFrame({
        family: [f"{percent(before, 1)} → {percent(after, 1)}" for before, after in shares[family].to_numpy()]
        for family in dict.fromkeys(family for family, _ in shares)}, index=shares.index))


def softmax(facts: dict) -> pd.DataFrame:
    """A row for each profile: softmax beside attention's two products."""
    parts = facts["parts"]
    return by_profile(pd.DataFrame({
        "softmax (ms)": parts["softmax_ms"].map(number), "QK^T and PV (ms)": parts["products_ms"].map(number),
        "time ratio": parts["time_ratio"].map(number),
        "with projections": parts["projected_ratio"].map(number),
        "FLOPs ratio": parts["flops_ratio"].map(lambda share: percent(share, 1)),
        "bytes ratio": parts["bytes_ratio"].map(number)}))


def by_operation(facts: dict) -> pd.DataFrame | None:
    """A row for each of softmax's operations: its share of the time, and its bytes a second over a copy's."""
    if facts["operations"] is None:
        return None
    return pd.DataFrame([{"operation": part["operation"], "of softmax's time": percent_span(part["time"]),
                          "of a copy's rate": percent_span(part["share"])} for part in facts["operations"]])


def fused(facts: dict) -> pd.DataFrame | None:
    """A row for each capture with SDPA: forward's attention written out, and by one kernel a layer."""
    rows = facts["fused"]
    if rows is None:
        return None
    return pd.DataFrame({
        "size": rows["size"], "context": rows["context_length"], "precision": rows["precision"],
        "SDPA's kernel": rows["kernel"], "written out (ms)": rows["replaced_ms"].map(number),
        "SDPA (ms)": rows["fused_ms"].map(number), "x faster": rows["times"].map(number)})


def regions(facts: dict) -> pd.DataFrame:
    """The reference's regions, longest first, each beside its floor."""
    rows = facts["regions"]
    return pd.DataFrame({"region": rows["region"], "time (ms)": rows["time_ms"].map(number),
                         "share": rows["share"].map(percent), "floor (ms)": rows["floor_ms"].map(number),
                         "floor / time": rows["of_floor"].map(percent)})


def rules(facts: dict) -> pd.DataFrame:
    """The families of kernels, what each holds, and its share of the time."""
    table = facts["families"]
    return table.assign(share=[percent(share, 2) for share in table["share"]])[["family", "reason", "share"]]


def reports(facts: dict) -> pd.DataFrame:
    """A row for each report: its claims, and how many are within."""
    return pd.DataFrame(facts["reports"])


def claims(facts: dict) -> pd.DataFrame | None:
    """A row for each claim that is off; its reasons are blocks of ``words/reasons/claims.md``."""
    words = Words(REASONS, "claims.md")
    rows = []
    for row in facts["claims"]:
        claim = row["claim"]
        a_share = claim.measure == "share" and claim.to is None
        said = CLAIM_FORMATS.get("first_share" if a_share else claim.measure, number)
        if row["place"] != "within":
            rows.append({
                "report": row["report"], "question": f"({claim.question})",
                "of": f"{claim.size}, {claim.context_length:,}" if claim.size else "all",
                "as printed": claim.as_printed,
                "theirs": said(row["theirs"]), "here": to(said(row["low"]), said(row["high"])),
                "why": (words.block(claim.reason, row["why"]) if claim.reason else "") or "not known"})
    return pd.DataFrame(rows) if rows else None
