"""The notebooks that explore: what their cells compare, sum and count of two configurations and of a capture."""
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from cells import covered_ms, executed, quickest, run_cells


def test_exploring_measures_two_by_their_own_steps(monkeypatch):
    monkeypatch.setattr("stepscope.report.load.load", lambda runs: {})
    explored = run_cells("explore", device="cpu")
    walls = {name: own.loc[(own["phase"] == "whole") & ~own["warmup"], "wall_ms"] for name, own in explored["samples"].items()}
    operations = explored["captured"].operations
    for row in explored["both"].to_dict("records"):
        own, one = walls[row["configuration"]], quickest(operations[operations["case"] == row["configuration"]])
        assert len(own) == 10 and row["operations"] == len(one)
        assert (row["wall_ms"], row["wall_std_ms"], row["operators_ms"]) == pytest.approx((np.median(own), np.std(own, ddof=1), covered_ms(one)))
    quicker, slower = sorted(walls.values(), key=np.median)
    for both in (explored["both"], explored["both"][::-1]):
        shown = executed("explore", "apart =", explored | {"both": both, "display": lambda *_: None})
        assert shown["apart"] == pytest.approx(np.median(slower) / np.median(quicker))
        assert shown["overlap"] == (max(quicker) >= min(slower))


def test_exploring_shows_the_largest_sizes_ladder():
    rows = [(size, context, change, wall) for size, context, least in (("small", 512, 5.0), ("2.7B", 512, 90.0), ("2.7B", 128, 9.0))
            for change, wall in (("fp32", 10 * least), ("bf16", least), ("fp8", None))]
    steps = pd.DataFrame(rows, columns=["size", "context_length", "optimization", "wall_ms"]).assign(
        gpu_ms=1.0, busy=1.0, peak_gib=1.0, tokens_per_s=1.0)
    own = executed("explore", "slowest = ", {"steps": steps, "brief": lambda *_: None, "display": lambda *_: None})["own"]
    assert own[["size", "context_length", "optimization", "wall_ms"]].values.tolist() == [
        ["2.7B", 512, "fp32", 900], ["2.7B", 512, "bf16", 90]]


def test_a_capture_is_shown_by_its_middle_step(monkeypatch):
    monkeypatch.setattr(plt, "show", plt.close)
    names = run_cells("profile", replaced={"display": lambda *_: None})
    gpu, accounts, operations = names["gpu"], names["accounts"], names["capture"].operations
    middle = accounts["wall"].sort_values().index[len(accounts) // 2]
    own = operations[operations["step"] == middle]
    table = names["table"].astype({"phase": str, "family": str}).set_index(["phase", "family"])["ms"]
    summed = own["duration_ns"].div(1e6).groupby([own["phase"].astype(str), own["family"].astype(str)]).sum()
    assert table.to_dict() == pytest.approx(summed.to_dict()) and table.is_monotonic_decreasing
    shares = own.groupby(own["name"].astype(str))["duration_ns"].sum().nlargest(15) / own["duration_ns"].sum()
    assert names["kernels"]["share"].tolist() == pytest.approx(shares.tolist())
    assert names["quicker"] == pytest.approx(accounts["wall"][middle] - accounts["compute"][middle] / 2)
    assert names["longest"]["ms"] == names["found"]["ms"].max() <= accounts["idle"][middle]
    gpus = [SimpleNamespace(number=number, all_operations=pd.DataFrame({"duration_ns": lasting}), accounts=gpu.accounts)
            for number, lasting in enumerate(([9, 1], [6, 6], [1, 1, 1]))]
    for asked, found in ((-1, 1), (2, 2)):
        assert executed("profile", "gpu = max(", names | {"devices": lambda capture: gpus, "device": asked})["gpu"].number == found
