"""The attention study's tables over all of its records."""
import pandas as pd

from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import load_table, runs_frame


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """:func:`all_cells`, and the tables ``ends``, ``predicted`` and ``accounting`` of every run with its
    configuration."""
    records = [record for record in records if record.study == "attention" and record.status == "ok"]
    tables = {"cells": all_cells(store, records)}
    for name in ("ends", "predicted", "accounting"):
        rows = load_table(store, records, name)
        tables[name] = rows.merge(_runs(records), on="run_id") if len(rows) else rows
    return tables


def all_cells(store: Store, records: list[Record]) -> pd.DataFrame:
    """Every cell of every run with the run's configuration, its ``flops``, ``forward_tflops``,
    ``backward_tflops``, ``pass_tflops`` and ``utilisation``: the pass's share of the matrix-product rate
    measured in the same run."""
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
    utilisation = cells["pass_tflops"] / pd.Series(ceiling, index=cells.index, dtype=float)
    return cells.assign(utilisation=utilisation).copy()  # in one block


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
