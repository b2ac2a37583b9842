"""The tables of the study of the compiled model as they are printed."""
from collections.abc import Iterable

import pandas as pd

from stepscope.say.formats import (
    MODE_WORDS,
    faster,
    gain_with_interval,
    number,
    percent,
    percent_change,
    span,
)

ATTENTION_WORDS = {"eager": "written-out", "sdpa": "SDPA"}
VARIANT_WORDS = {"eager": "eager", "block": "compiled", "model": "one graph", "cuda_graphs": "CUDA graphs"}
FLAGGED = " †"    # behind a pair of which a side's samples are not one steady state


def cells_of(both: pd.DataFrame) -> list[str]:
    """Of each pair: in ms, how many times faster or slower, and the SM clocks where they are unlike."""
    speedups = [faster(row.speedup) if row.sure else "not sure" for row in both.itertuples()]
    marks = [(FLAGGED if row.flagged else "") + (f" ({clocks(row)})" if row.unlike else "")
             for row in both.itertuples()]
    return [f"{times}: {speedup}{mark}"
            for times, speedup, mark in zip(from_to(both, "median_ms"), speedups, marks, strict=True)]


def clocks(row) -> str:
    """A pair's median SM clocks."""
    return f"{number(row.sm_clock_mhz, 4)}, {number(row.sm_clock_mhz_after, 4)} MHz"


def wide(both: pd.DataFrame, across: pd.Series, cells: Iterable[str]) -> pd.DataFrame:
    """Runs and attentions down, ``across`` over it."""
    table = both.assign(across=across, cell=cells, attention=both["attention"].map(ATTENTION_WORDS))
    contexts = ["context_length"] if table["context_length"].nunique() > 1 else []
    index = ["run_id", "size", *contexts, "precision", "attention"]
    order = table[index].drop_duplicates()
    table = table.pivot(index=index, columns="across", values="cell").reindex(pd.MultiIndex.from_frame(order))
    table = table[list(dict.fromkeys(across))].reset_index().drop(columns="run_id")
    table = table.rename(columns={"context_length": "context"}).rename_axis(None, axis=1)
    return table.astype(object).fillna("–")


def shape_columns(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """What a row of one run and attention begins with; the context where there are several."""
    contexts = {"context": rows["context_length"]} if rows["context_length"].nunique() > 1 else {}
    return {"size": rows["size"], **contexts, "precision": rows["precision"],
            "attention": rows["attention"].map(ATTENTION_WORDS)}


def by_mode(both: pd.DataFrame, cells: list[str]) -> pd.DataFrame:
    """Runs and attentions down, modes across."""
    table = wide(both, both["mode"].map(MODE_WORDS), cells)
    modes = [words for words in MODE_WORDS.values() if words in table]
    return table[[column for column in table if column not in modes] + modes]


def times(facts: dict) -> pd.DataFrame | None:
    """Median times and speedups of the pairs, by mode."""
    return None if facts["pairs"] is None else by_mode(facts["pairs"], cells_of(facts["pairs"]))


def energy(facts: dict) -> pd.DataFrame | None:
    """Energy of a full step and mean power, eager to each block compiled."""
    if facts["pairs"] is None or facts["energy"] is None:
        return None
    pairs = facts["energy"]["pairs"]
    return pd.DataFrame(shape_columns(pairs) | {
        "energy (J)": from_to(pairs, "step_energy_j"), "power (W)": from_to(pairs, "kept_up_power_w"),
        "SM clock (MHz)": from_to(pairs, "kept_up_sm_clock_median_mhz", 4)})


def busy(facts: dict) -> pd.DataFrame | None:
    """Busy share of forward + backward, variants across."""
    if facts["busy"] is None:
        return None
    rows = facts["busy"]["table"]
    table = pd.DataFrame(shape_columns(rows))
    for variant, words in VARIANT_WORDS.items():
        if variant in rows:
            table[words] = ["–" if share != share else percent(share) for share in rows[variant]]
    return table


def fused(facts: dict) -> pd.DataFrame | None:
    """Foreach to fused AdamW: the full step with its ratio's interval, and AdamW's phase."""
    if facts["fused"] is None:
        return None
    pairs = facts["fused"]["table"]
    return pd.DataFrame({
        "size": pairs["size"], "precision": pairs["precision"],
        "attention": pairs["attention"].map(ATTENTION_WORDS), "full step": cells_of(pairs),
        "x faster [95% interval]": [gain_with_interval(row.speedup, row.low, row.high)
                                    for row in pairs.itertuples()],
        "AdamW": from_to(pairs, "phase_ms")})


def from_to(both: pd.DataFrame, column: str, digits: int = 3) -> list[str]:
    """A column's numbers of both sides of each pair."""
    return [f"{number(before, digits)} → {number(after, digits)}"
            for before, after in zip(both[column], both[f"{column}_after"], strict=True)]


def peaks(facts: dict) -> pd.DataFrame | None:
    """Peaks in GiB and their change, by mode."""
    both = facts["pairs"]
    if both is None:
        return None
    cells = [f"{sizes}: {percent_change(change)}"
             for sizes, change in zip(from_to(both, "peak_gib"), both["change"], strict=True)]
    return by_mode(both, cells)


def seconds(facts: dict) -> pd.DataFrame:
    """Sizes down, what is compiled across: seconds to compile forward and backward, over precisions and
    attentions."""
    words = {"block": "block", "model": "whole forward", "cuda_graphs": "with CUDA graphs"}
    rows = facts["seconds"]
    rows = rows.assign(what=rows["variant"].map(words) + rows["first"].map({True: ", first", False: ""}))
    keys = ["size", "context_length"] if rows["context_length"].nunique() > 1 else ["size"]
    table = rows.pivot_table(index=keys, columns="what", values="training_s", aggfunc=span, observed=True,
                             sort=False)
    return table.fillna("–").rename(columns={"context_length": "context"}).reset_index()


def whole(facts: dict) -> pd.DataFrame | None:
    """Blocks to the whole forward as one graph, by mode."""
    return None if facts["whole"] is None else times(facts["whole"])


def steps(facts: dict) -> pd.DataFrame | None:
    """Full steps with written-out attention to SDPA, by variant."""
    both = facts["steps"]
    if both.empty:
        return None
    return wide(both, both["variant"].map(VARIANT_WORDS), cells_of(both)).drop(columns="attention")


def graphed(facts: dict) -> pd.DataFrame | None:
    """The whole forward as one graph to the same with CUDA graphs, by mode."""
    return None if facts["graphed"] is None else times(facts["graphed"])


def kernels(facts: dict) -> pd.DataFrame:
    """Kernels and their ms in forward + backward, a row for each run, attention and variant."""
    rows = facts["table"]
    table = pd.DataFrame(shape_columns(rows) | {"variant": rows["variant"].map(VARIANT_WORDS)})
    for group, words in {"products": "products", "attention": "fused attention", "rest": "all else",
                         "all": "together"}.items():
        table[words] = [f"{count:,.0f}: {number(ms)} ms" if count else "–"
                        for count, ms in zip(rows[f"{group}_count"], rows[f"{group}_ms"], strict=True)]
    if rows["saved_gib"].notna().any():
        table["kept for backward (GiB)"] = rows["saved_gib"].map(number)
    return table
