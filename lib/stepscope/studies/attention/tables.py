"""The attention study's tables over all of its records."""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame
from stepscope.studies.attention.config import Config
from stepscope.traces.families import families

GRID_ENDS = max(Config.model_fields["sequences"].default)  # the longest sequence of the handout's grid


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """:func:`all_cells` of the grid (``cells``), of runs of longer sequences only (``long``) and of runs with
    FlashAttention-4 (``generations``, see :func:`with_kernels`), and the tables ``ends``, ``predicted`` and
    ``accounting`` of every run of the grid with its configuration."""
    records = [record for record in records if record.study == "attention" and record.status == "ok"]
    kernels = load_table(store, records, "kernels")
    # Runs beside FlashAttention-4 measure some cells of the grid once more: they are a table of their own.
    beside_fa4 = [record for record in records
                  if "fa4" in (*record.config["causal"], *record.config["unmasked"])]
    records = [record for record in records if record not in beside_fa4]
    beyond = [record for record in records if min(record.config["sequences"]) > GRID_ENDS]
    records = [record for record in records if record not in beyond]
    tables = {"cells": all_cells(store, records), "long": all_cells(store, beyond),
              "generations": all_cells(store, beside_fa4)}
    if len(kernels) and len(tables["generations"]):
        tables["generations"] = with_kernels(tables["generations"], kernels)
    for name in ("ends", "predicted", "accounting"):
        rows = load_table(store, records, name)
        tables[name] = rows.merge(_runs(records), on="run_id") if len(rows) else rows
    return tables


def all_cells(store: Store, records: list[Record]) -> pd.DataFrame:
    """Every cell of every run with the run's configuration, its ``flops``, ``forward_tflops``,
    ``backward_tflops``, ``pass_tflops``, ``utilisation`` and ``forward_utilisation``: the pass's and
    forward's share of the matrix-product rate measured in the same run."""
    records = [record for record in records if record.study == "attention" and record.status == "ok"]
    cells = load_table(store, records, "cells")
    if cells.empty:
        return cells
    cells = cells.merge(_runs(records), on="run_id")
    ceilings = load_table(store, records, "ceilings").set_index(["run_id", "ceiling"])["value"]
    cells["flops"] = cell_flops(cells)
    for phase, factor in (("forward", 1), ("backward", 2), ("pass", 3)):
        cells[f"{phase}_tflops"] = factor * cells["flops"] / cells[f"{phase}_median_ms"] / 1e9
    ceiling = [ceilings.get((run, f"matmul_{precision}"))
               for run, precision in zip(cells["run_id"], cells["precision"])]
    ceiling = pd.Series(ceiling, index=cells.index, dtype=float)
    return cells.assign(utilisation=cells["pass_tflops"] / ceiling,
                        forward_utilisation=cells["forward_tflops"] / ceiling).copy()  # in one block


def with_kernels(cells: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Cells with ``kernel``: the fused attention kernel that takes longest in forward + backward; None where
    none was captured."""
    fused = kernels[families(kernels["name"]) == "fused attention"].sort_values("total_ms", ascending=False)
    longest = fused.drop_duplicates(["run_id", "cell"]).set_index(["run_id", "cell"])["name"]
    numbered = cells.assign(cell=cells.groupby("run_id").cumcount())
    names = [longest.get(key) for key in zip(numbered["run_id"], numbered["cell"])]
    return cells.assign(kernel=pd.Series(names, index=cells.index, dtype=object))


def _runs(records: list[Record]) -> pd.DataFrame:
    """What a run's rows share. A row has its own causal and status; the run's fields of these names are what
    was asked for."""
    return runs_frame(records).drop(columns=["study", "causal", "status", "unmasked", "sequences"])


def cell_flops(cells: pd.DataFrame) -> pd.Series:
    """Forward's matrix products, 4 B T T d: the whole square, causal or not, as written-out attention
    computes it.

    Backward is counted as twice that for every implementation, though flash-like kernels compute the scores
    again.
    """
    return 4 * cells["batch_size"] * cells["sequence"].astype(float) ** 2 * cells["d_model"]
