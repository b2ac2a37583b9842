"""The attention study's tables: what is in a run's files, what follows from it, and what is printed."""
from collections.abc import Callable
from itertools import product

import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, measured, tidy, word
from stepscope.report.tables import number, ratio, table
from stepscope.studies.attention.checking import QUANTITIES
from stepscope.studies.attention.config import IMPLEMENTATIONS, PASSES, Config
from stepscope.studies.attention.memory import peak_parts

Tables = dict[str, pd.DataFrame]

CONFIG = ("d_model", "precision", "batch_size")
CELL = ("implementation", "sequence")
KEY = {"implementation": word(*IMPLEMENTATIONS),
       "sequence": pa.Column(int, pa.Check.in_range(1, 2**24), coerce=True)}
MEASURES = ("wall_ms", "wall_std_ms", "passes", "gpu_ms", "operations", "saved_mib", "in_use_mib", "peak_mib",
            "asked_gib", "allocated_gib", "device_gib")
SCHEMAS = {
    "cells": tidy((*CELL, "phase"), **KEY, phase=word(*PASSES), status=word(*STATUSES), reason=word(),
                  kernel=word(), **{name: measured() for name in MEASURES}),
    "checks": tidy(CELL, **KEY, **{f"{quantity}_error": measured() for quantity in QUANTITIES},
                   allowed_error=measured(nullable=False)),
}
KEYS = {"cells": (*CONFIG, *CELL, "phase"), "checks": (*CONFIG, *CELL), "passes": (*CONFIG, *CELL)}
LABELS = {"naive": "naive", "compiled": "compiled", "flash": "flash", "efficient": "memory-efficient",
          "cudnn": "cuDNN", "math": "math", "flex": "FlexAttention"}
HEAD, PRECISION = 64, "bf16"  # what sentences and tables are about, where it was measured
GRID_ENDS = max(Config.model_fields["sequences"].default)  # the longest of the handout's sequences
PRECISION_LABELS = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "fp16": "fp16"}


def tables(frames: Tables) -> Tables:
    """``passes``: forward and backward together, a row for each implementation and sequence: ``wall_ms``,
    ``gpu_ms``, memory, and ``predicted_mib``, the peak by formula."""
    cells = frames["cells"]
    key = [*CONFIG, *CELL]
    times = cells.groupby(key, sort=False)[["wall_ms", "gpu_ms"]].sum(min_count=len(PASSES))
    others = cells[cells["phase"] == "backward"].set_index(key)
    passes = times.join(others[["status", "reason", "saved_mib", "in_use_mib", "peak_mib", "device_gib"]])
    passes = passes.reset_index()
    shapes = passes[["implementation", "batch_size", "d_model", "sequence", "precision"]]
    predicted = [sum(peak_parts(*shape).values()) / 2**20 for shape in shapes.itertuples(index=False)]
    return {"passes": passes.assign(predicted_mib=predicted)}


def of_run(config: Config, frames: Tables) -> Tables:
    """One run's tables as those of all runs are, for its notebook."""
    fields = {field: getattr(config, field) for field in CONFIG}
    own = {name: frame.assign(**fields) for name, frame in frames.items()}
    return {f"attention.{name}": frame for name, frame in (own | tables(own)).items()}


def chosen(rows: pd.DataFrame, precision: str = PRECISION, d: int = HEAD) -> pd.DataFrame:
    """The rows of one head dimension and precision: these, or the first there are."""
    for column, value in (("d_model", d), ("precision", precision)):
        if len(rows):
            rows = rows[rows[column] == (value if (rows[column] == value).any() else rows[column].iloc[0])]
    return rows


def some(rows: pd.DataFrame) -> pd.DataFrame:
    """These rows.

    Raises:
        LookupError: there are none.
    """
    if rows.empty:
        raise LookupError("no such cell was measured")
    return rows


def where(rows: pd.DataFrame) -> str:
    """What was measured in these rows, in words."""
    batch, d, precision = rows[["batch_size", "d_model", "precision"]].iloc[0]
    return f"batch {batch}, d {d}, {PRECISION_LABELS[precision]}, causal"


def finding(config: Config, cells: pd.DataFrame) -> str:
    """What one run says, in a sentence."""
    timed = of_run(config, {"cells": cells})["attention.passes"].dropna(subset="gpu_ms")
    if timed.empty:
        return "Nothing could be timed."
    last = timed[timed["sequence"] == timed["sequence"].max()].sort_values("gpu_ms")
    times = ", ".join(f"{number(row.gpu_ms, 'ms')} {LABELS[row.implementation]}" for row in last.itertuples())
    return (f"Attention at {last['sequence'].iloc[0]:,} positions ({where(last)}), GPU time of forward and"
            f" backward: {times}.")


def attention_times(tables: Tables) -> pd.DataFrame:
    return _pivot(tables, "gpu_ms", "ms", "GPU time of forward and backward, ms", ("min", "row"))


def attention_memory(tables: Tables) -> pd.DataFrame:
    return _pivot(tables, "saved_mib", "MiB", "Saved for backward besides q, k, v and the output, MiB")


def _pivot(tables: Tables, value: str, unit: str, words: str, bold: tuple | None = None) -> pd.DataFrame:
    """A row a sequence, a column an implementation, at the d and precision that are spoken of."""
    rows = some(chosen(tables["attention.passes"]).dropna(subset=value))
    pivot = rows.pivot(index="sequence", columns="implementation", values=value)
    pivot = pivot[[name for name in IMPLEMENTATIONS if name in pivot]].rename(columns=LABELS)
    return table(pivot.rename_axis(columns=None), unit, bold, note=f"{words} ({where(rows)}).")


def handout_attention(tables: Tables) -> pd.DataFrame:
    """The assignment's table at one d: naive attention and the same compiled, in fp32, by wall time."""
    cells = chosen(tables["attention.cells"], "fp32")
    cells = cells[cells["implementation"].isin(["naive", "compiled"]) & (cells["sequence"] <= GRID_ENDS)]
    cells = some(cells[cells["wall_ms"].notna()])
    wide = cells.pivot(index="sequence", columns=["implementation", "phase"], values="wall_ms")
    wide = wide[[key for key in product(("naive", "compiled"), PASSES) if key in wide]]
    wide.columns = [f"{name} {phase}, ms" for name, phase in wide.columns]
    naive = cells[(cells["implementation"] == "naive") & (cells["phase"] == "backward")].set_index("sequence")
    wide.insert(1, "in use before backward, MiB", naive["in_use_mib"])
    return table(wide, note=f"Wall time ({where(cells)}).")


def attention_dimensions(tables: Tables) -> pd.DataFrame:
    """All of the assignment's points: naive attention in fp32, wall time, and the memory before backward."""
    cells = tables["attention.cells"]
    cells = cells[(cells["precision"] == "fp32") & (cells["implementation"] == "naive")]
    cells = some(cells[cells["wall_ms"].notna() & (cells["sequence"] <= GRID_ENDS)])
    forward, backward = (cells[cells["phase"] == phase] for phase in PASSES)
    parts = {"forward, ms": (forward, "wall_ms"), "in use before backward, MiB": (backward, "in_use_mib"),
             "backward, ms": (backward, "wall_ms")}
    pivots = [rows.pivot(index="sequence", columns="d_model", values=value) for rows, value in parts.values()]
    wide = pd.concat(pivots, keys=parts, names=["naive, fp32"]).rename(columns=lambda d: f"d {d}")
    return table(wide.rename_axis(columns=None))


def attention_compiled(tables: Tables) -> pd.DataFrame:
    """What compiling naive attention gains, by GPU time of forward and backward."""
    passes = tables["attention.passes"]
    passes = passes[passes["gpu_ms"].notna() & (passes["sequence"] <= GRID_ENDS)]
    wide = passes.pivot(index=["precision", "d_model", "sequence"], columns="implementation", values="gpu_ms")
    wide = some(wide[["naive", "compiled"]].dropna())
    gains = pd.Series([ratio(a, b) for a, b in wide.itertuples(index=False)], wide.index, dtype=float)
    gains = gains.unstack(["precision", "d_model"]).sort_index(axis=1)
    gains.columns = [f"{PRECISION_LABELS[precision]} d {d}, x" for precision, d in gains.columns]
    return table(gains, note="Compiled against naive attention, GPU time of forward and backward.")


def attention_precisions(tables: Tables) -> pd.DataFrame:
    """GPU time at the longest sequence of the grid, by precision."""
    rows = tables["attention.passes"]
    rows = rows[(rows["d_model"] == chosen(rows)["d_model"].min()) & (rows["sequence"] <= GRID_ENDS)]
    rows = some(rows[(rows["sequence"] == rows["sequence"].max()) & rows["gpu_ms"].notna()])
    wide = rows.pivot(index="implementation", columns="precision", values="gpu_ms")
    wide = wide.reindex([name for name in IMPLEMENTATIONS if name in wide.index]).rename(index=LABELS)
    wide = wide[[name for name in PRECISION_LABELS if name in wide]].rename(columns=PRECISION_LABELS)
    at = f"sequence {rows['sequence'].iloc[0]:,}, d {rows['d_model'].iloc[0]}"
    return table(wide.rename_axis(columns=None), "ms", ("min", "column"),
                 note=f"GPU time of forward and backward, ms, {at}.")


def attention_account(tables: Tables) -> pd.DataFrame:
    """The bytes of the shortest sequence that ran out of memory, by formula."""
    row, parts = first_out_of_memory(tables)
    parts = parts | {"together": sum(parts.values())}
    frame = pd.DataFrame({"part": parts.keys(), "at the peak, GiB": parts.values()})
    return table(frame, note=f"Naive attention, {PRECISION_LABELS[row['precision']]}, sequence"
                             f" {row['sequence']:,}, of {row['device_gib']:.0f} GiB.")


def first_out_of_memory(tables: Tables) -> tuple[pd.Series, dict[str, float]]:
    """The shortest sequence, of those measured, at which naive attention runs out of memory, of several
    precisions the one that needs most; and the parts of its peak by formula, in GiB.

    Raises:
        LookupError: it never does.
    """
    rows = tables["attention.passes"]
    rows = some(rows[(rows["status"] == "oom") & (rows["implementation"] == "naive")])
    row = rows.sort_values(["sequence", "predicted_mib"], ascending=[True, False]).iloc[0]
    parts = peak_parts(*row[["implementation", "batch_size", "d_model", "sequence", "precision"]])
    return row, {part: size / 2**30 for part, size in parts.items()}


def attention_checks(tables: Tables) -> pd.DataFrame:
    """The largest relative error of an output or a gradient against float64."""
    checks = some(tables["attention.checks"])
    worst = checks.assign(error=checks[[f"{quantity}_error" for quantity in QUANTITIES]].max(axis=1))
    wide = worst.pivot_table(index="implementation", columns="precision", values="error", aggfunc="max")
    wide = wide[[name for name in PRECISION_LABELS if name in wide]]
    wide.loc["allowed"] = checks.groupby("precision")["allowed_error"].first()
    wide = wide.reindex([name for name in (*IMPLEMENTATIONS, "allowed") if name in wide.index])
    shown = wide.map(lambda value: None if pd.isna(value) else f"{value:.1e}")
    return table(shown.rename(index=LABELS, columns=PRECISION_LABELS).rename_axis(columns=None),
                 note=f"Largest of {len(checks):,} cells, each checked before it was timed.")


PRINTED: dict[str, Callable[[Tables], pd.DataFrame]] = {one.__name__: one for one in (
    attention_times, attention_memory, handout_attention, attention_dimensions, attention_compiled,
    attention_precisions, attention_account, attention_checks)}
