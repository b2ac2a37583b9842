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
    walls = {
        name: own.loc[(own["phase"] == "whole") & ~own["warmup"], "wall_ms"]
        for name, own in explored["samples"].items()
    }
    operations = explored["captured"].operations
    for row in explored["both"].to_dict("records"):
        own, one = (
            walls[row["configuration"]],
            quickest(operations[operations["case"] == row["configuration"]]),
        )
        assert len(own) == 10 and row["operations"] == len(one)
        assert (row["wall_ms"], row["wall_std_ms"], row["operators_ms"]) == pytest.approx(
            (np.median(own), np.std(own, ddof=1), covered_ms(one))
        )
    quicker, slower = sorted(walls.values(), key=np.median)
    for both in (explored["both"], explored["both"][::-1]):
        shown = executed("explore", "apart =", explored | {"both": both, "display": lambda *_: None})
        assert shown["all_steps"]["wall_ms"].tolist() == [*pd.concat(walls.values())]
        assert shown["apart"] == pytest.approx(np.median(slower) / np.median(quicker))
        assert shown["overlap"] == (max(quicker) >= min(slower))


def test_exploring_counts_sizes_by_their_plain_runs_in_order_of_context(monkeypatch):
    """AdamW's share falls all the way in one size of three, and the others are busier at their longest context; large has one context."""
    plain = {
        "precision": "fp32",
        "attention": "naive",
        "compile": "none",
        "optimizer": "foreach",
        "repeat": 0,
    }
    rows = [
        plain
        | {
            "size": size,
            "context_length": context,
            "mode": "step",
            "phase": phase,
            "gpu_ms": gpu_ms,
            "busy": busy,
            "peak_gib": context / 100,
        }
        for size, context, forward_ms, busy in (
            ("small", 512, 20.0, 0.9),
            ("small", 1024, 40.0, 0.5),
            ("small", 128, 10.0, 0.6),
            ("medium", 1024, 20.0, 0.7),
            ("medium", 512, 40.0, 0.1),
            ("medium", 128, 10.0, 0.2),
            ("large", 128, 9.0, 0.9),
            ("xl", 512, 10.0, 0.8),
            ("xl", 128, 20.0, 0.7),
        )
        for phase, gpu_ms in (("forward", forward_ms), ("optimizer", 10.0), ("whole", forward_ms + 10))
    ]
    others = [
        row | {name: value} | {"gpu_ms": 1e3, "busy": 0.01 * row["context_length"], "peak_gib": 9.0}
        for row in rows
        for name, value in (
            {
                "precision": "bf16",
                "attention": "sdpa",
                "compile": "model",
                "optimizer": "fused",
                "repeat": 1,
                "mode": "forward",
            }
        ).items()
    ]
    monkeypatch.setattr("stepscope.report.load.load", lambda runs: {})
    names = run_cells("explore", until="plain =", device="cpu") | {
        "display": lambda shown: None,
        "brief": lambda frame, columns: frame,
    }
    names["tables"] = {
        "benchmark.times": pd.DataFrame(others + rows + [row | {"gpu_ms": 5.0} for row in rows])
    }
    for cell in ("plain =", "falls =", "longer =", "longest ="):
        names = executed("explore", cell, names)
    assert names["falls"].to_dict() == {"small": True, "medium": False, "large": False, "xl": False}
    shares = names["part"].set_index(["size", "context_length"])["share"]
    assert shares[[("small", 512), ("medium", 128), ("large", 128)]].tolist() == pytest.approx(
        [1e3 / 30, 50, 1e3 / 19]
    )
    assert (
        names["longer"] == 2
        and {*names["ends"].index} == {"small", "medium", "xl"}
        and names["ends"].loc["small", ["first", "last"]].tolist() == [0.6, 0.5]
    )
    assert {*names["longest"]["context_length"]} == {1024} and {*names["longest"]["phase"]} == {"whole"}


def test_exploring_shows_the_largest_sizes_ladder():
    rows = [
        (size, context, change, wall)
        for size, context, least in (("small", 512, 5.0), ("2.7B", 512, 90.0), ("2.7B", 128, 9.0))
        for change, wall in (("fp32", 10 * least), ("bf16", least), ("fp8", None))
    ]
    steps = pd.DataFrame(rows, columns=["size", "context_length", "optimization", "wall_ms"]).assign(
        gpu_ms=1.0, busy=1.0, peak_gib=1.0, tokens_per_s=1.0
    )
    own = executed(
        "explore", "slowest = ", {"steps": steps, "brief": lambda *_: None, "display": lambda *_: None}
    )["own"]
    assert own[["size", "context_length", "optimization", "wall_ms"]].values.tolist() == [
        ["2.7B", 512, "fp32", 900],
        ["2.7B", 512, "bf16", 90],
    ]


def test_a_capture_is_shown_by_its_middle_step(monkeypatch):
    monkeypatch.setattr(plt, "show", plt.close)
    names = run_cells("profile", replaced={"display": lambda *_: None})
    gpu, accounts, operations = names["gpu"], names["breakdowns"], names["capture"].operations
    middle = accounts["wall"].sort_values().index[len(accounts) // 2]
    own = operations[operations["step"] == middle]
    table = names["table"].astype({"phase": str, "family": str}).set_index(["phase", "family"])["ms"]
    summed = own["duration_ns"].div(1e6).groupby([own["phase"].astype(str), own["family"].astype(str)]).sum()
    assert table.to_dict() == pytest.approx(summed.to_dict()) and table.is_monotonic_decreasing
    shares = own.groupby(own["name"].astype(str))["duration_ns"].sum().nlargest(15) / own["duration_ns"].sum()
    assert names["kernels"]["share"].tolist() == pytest.approx(shares.tolist())
    assert names["quicker"] == pytest.approx(accounts["wall"][middle] - accounts["compute"][middle] / 2)
    assert names["longest"]["ms"] == names["gaps"]["ms"].max() <= accounts["idle"][middle]
    longest, placed = names["longest"], gpu.classified_ops
    reach = (
        2 * longest["end"] - longest["begin"],
        2 * longest["begin"] - longest["end"],
    )  # as long before and after
    assert (
        names["rows"].index.tolist()
        == placed.index[(placed["start_ns"] < reach[0]) & (placed["end_ns"] > reach[1])].tolist()[:2000]
    )
    gpus = [
        SimpleNamespace(
            number=number, all_operations=pd.DataFrame({"duration_ns": lasting}), breakdowns=gpu.breakdowns
        )
        for number, lasting in enumerate(([9, 1], [6, 6], [1, 1, 1]))
    ]
    for asked, found in ((-1, 1), (2, 2)):
        assert (
            executed("profile", "gpu = max(", names | {"devices": lambda capture: gpus, "device": asked})[
                "gpu"
            ].number
            == found
        )
