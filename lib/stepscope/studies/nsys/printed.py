"""The profiling study's tables as they are printed."""
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from stepscope.say.formats import MODE_WORDS, code, number, percent, plain, points, to
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
    columns = {"unprofiled_ms": "wall, plain", "profiled_ms": "wall, captured", "host_ms": "host range",
               "projected_ms": "on the device", "operations_ms": "operations"}
    forward = facts["by_clock"].set_index(PROFILE)
    table = forward[list(columns)].map(number).rename(columns=columns)
    table["captured passes differ by"] = [share(value) for value in forward["spread"]]
    table["busy"] = [share(value) for value in forward["busy_share"]]
    return by_profile(table)


def share(value: float) -> str:
    """A share in percent; a dash where it is not known."""
    return "–" if pd.isna(value) else percent(value, 1 if value < 0.1 else 0)


def slowdowns(facts: dict) -> pd.DataFrame:
    """Profiles down, modes across: plain, annotated and captured wall time of a step, and how they differ."""
    cells = {}
    for mode, words in MODE_WORDS.items():
        for name, said, wide in ((words, number, facts["slowdowns"]),
                                 (f"{words}: steps differ by", share, facts["spreads"])):
            cells[name] = [" / ".join(said(row[kind, mode]) for kind in STATES) for _, row in wide.iterrows()]
    return by_profile(pd.DataFrame(cells, index=facts["slowdowns"].index))


def phases(facts: dict) -> pd.DataFrame:
    """A row for each profile and phase of a full step."""
    columns = {"size": "size", "context_length": "context", "phase": "phase", "plain_ms": "plain, on the GPU",
               "back_to_back_ms": "back to back", "operations_ms": "operations", "busy": "busy",
               "host_ms": "host range, captured", "projected_ms": "on the GPU, captured",
               "differ": "captured steps differ by", "pending": "launches pending", "waits": "who waits"}
    rows = facts["by_phase"]
    table = rows.assign(busy=[share(value) for value in rows["busy_share"]],
                        differ=[share(value) for value in rows["spread"]],
                        pending=["–" if pd.isna(n) else f"{n:.0f}" for n in rows["deepest"]])
    for column in ("plain_ms", "back_to_back_ms", "host_ms", "projected_ms", "operations_ms"):
        table[column] = table[column].map(number)
    return table[list(columns)].rename(columns=columns)


def first_kernels(facts: dict) -> pd.DataFrame:
    """A row for each profile: forward's first kernel, and whether it is first over forward + backward."""
    return pd.DataFrame([{
        "size": row.size, "context": row.context_length, "kernel": code(row.kernel),
        "share": percent(row.share), "launches": plain(row.launches), "ms": number(row.ms),
        "first in fwd + bwd": ("–" if pd.isna(row.kernel_both) else "same" if row.same
                               else code(row.kernel_both)),
    } for row in facts["first"].itertuples(index=False)])


def names(facts: dict) -> pd.DataFrame:
    """The whole names of kernels that are spoken of, as a profiler prints and a search finds them."""
    return pd.DataFrame({"kernel": [code(short) for short in facts["names"]],
                         "whole name": [code(name) for name in facts["names"].values()]})


def kernels(facts: dict) -> pd.DataFrame:
    """The reference's kernels that are no matrix products, largest first."""
    return pd.DataFrame([{
        "kernel": code(row.kernel), "family": row.family, "regions": ", ".join(row.regions),
        "share": percent(row.share, 1), "launches": plain(row.launches), "ms": number(row.ms),
    } for row in facts["kernels"].itertuples(index=False)])


def families(facts: dict) -> pd.DataFrame:
    """Profiles down, families across: shares of forward."""
    shares = facts["shares"]
    return by_profile(shares.map(lambda share: percent(share, 1)).where(shares.notna(), "–"))


def step_families(facts: dict) -> pd.DataFrame:
    """Profiles down; across the families, each in forward only and in the full step."""
    table = facts["shares"].map(lambda share: percent(share, 1))
    table.columns = [f"{family}, {mode}" for family, mode in table.columns]
    return by_profile(table)


def softmax(facts: dict) -> pd.DataFrame:
    """A row for each profile: softmax beside attention's two products."""
    parts = facts["parts"]
    return by_profile(pd.DataFrame({
        "softmax (ms)": parts["softmax_ms"].map(number), "QK^T and PV (ms)": parts["products_ms"].map(number),
        "time ratio": parts["time_ratio"].map(number),
        "with projections": parts["projected_ratio"].map(number),
        "FLOPs ratio": parts["flops_ratio"].map(lambda share: percent(share, 1)),
        "bytes ratio": parts["bytes_ratio"].map(number), "softmax TB/s": parts["softmax_tbs"].map(number),
        "products TFLOP/s": parts["products_tflops"].map(number)}))


def by_operation(facts: dict) -> pd.DataFrame | None:
    """Profiles down, softmax's operations across: each one's bytes a second over a large copy's."""
    rates = facts["rates"]
    if rates is None:
        return None
    table = rates.assign(cell=rates["of_copy"].map(percent)).pivot(index=PROFILE, columns="operation",
                                                                   values="cell")
    order = [part["operation"] for part in facts["operations"]]
    return by_profile(table[order].fillna("–"))


def regions(facts: dict) -> pd.DataFrame:
    """The reference's regions, longest first, each beside its floor."""
    rows = facts["regions"]
    return pd.DataFrame({
        "region": rows["region"], "ms a pass": rows["time_ms"].map(number),
        "share": rows["share"].map(percent),
        "floor (ms)": rows["floor_ms"].map(number), "floor / time": rows["of_floor"].map(percent),
        "TFLOP/s": rows["tflops"].map(number), "TB/s": rows["tbs"].map(number),
        "FLOP/byte": rows["intensity"].map(number)})


def rules(facts: dict) -> pd.DataFrame:
    """The families of kernels, what each holds, and its share of the time."""
    table = facts["families"]
    return table.assign(share=[percent(share, 2) for share in table["share"]])[["family", "reason", "share"]]


def claims(facts: dict) -> pd.DataFrame:
    """A row for each claim; its reasons are blocks of ``words/reasons/claims.md``."""
    words = Words(REASONS, "claims.md")
    rows = []
    for row in facts["claims"]:
        claim = row["claim"]
        a_share = claim.measure == "share" and claim.to is None
        said = CLAIM_FORMATS.get("first_share" if a_share else claim.measure, number)
        why = words.block(claim.reason, row["why"]) if claim.reason else ""
        unknown = "–" if row["place"] == "within" else "not known"
        rows.append({
            "report": row["report"], "question": f"({claim.question})", "as printed": claim.as_printed,
            "theirs": said(row["theirs"]), "here": to(said(row["low"]), said(row["high"])),
            "theirs is": row["place"],
            "profiles here": "all" if claim.size is None else f"{claim.size}, {claim.context_length}",
            "why": why or unknown})
    return pd.DataFrame(rows)
