"""Test which rows the explore and profile notebooks select, compare, sum and count."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from cells import covered_ms, edited, executed, fastest_complete_step, run_cells
from conftest import TINY
from stepscope import PACKAGE
from stepscope.model.training_step import build_step
from stepscope.report.tables import number
from stepscope.traces.kernel_names import short_name


@pytest.fixture
def no_tables(monkeypatch):
    """Replace the function that loads runs with one that loads no tables."""
    monkeypatch.setattr("stepscope.report.load.load", lambda runs, quiet: {})


def test_explore_notebook_measures_both_configurations(no_tables):
    explored = run_cells("explore", device="cpu")
    walls = {
        name: rows.loc[(rows["phase"] == "total") & ~rows["warmup"], "wall_ms"]
        for name, rows in explored["samples"].items()
    }
    operations = explored["profile"].operations
    for row in explored["both"].to_dict("records"):
        wall_times = walls[row["configuration"]]
        fastest_step = fastest_complete_step(operations[operations["case"] == row["configuration"]])
        assert len(wall_times) == 10 and row["operations"] == len(fastest_step)
        assert (row["wall_ms"], row["wall_std_ms"], row["operators_ms"]) == pytest.approx(
            (np.median(wall_times), np.std(wall_times, ddof=1), covered_ms(fastest_step))
        )
    quicker, slower = sorted(walls.values(), key=np.median)
    for both in (explored["both"], explored["both"][::-1]):
        shown = executed("explore", "ratio =", explored | {"both": both, "display": lambda *_: None})
        assert shown["every_step"]["wall_ms"].tolist() == [*pd.concat(walls.values())]
        assert shown["ratio"] == pytest.approx(np.median(slower) / np.median(quicker))
        assert shown["overlap"] == (max(quicker) >= min(slower))


def test_explore_notebook_compares_reference_fp32_baselines_by_context_length(monkeypatch):
    """AdamW's share decreases with context length only for ``small``.

    ``medium`` and ``xl`` keep the GPU busier at their longest context length than at their shortest.
    ``large`` isn't compared, because the table contains it at only one context length.
    """
    plain = {
        "precision": "fp32",
        "attention": "naive",
        "compile": "none",
        "optimizer": "foreach",
        "batch_size": 4,
        "vocab_size": 1000,
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
        for phase, gpu_ms in (("forward", forward_ms), ("optimizer", 10.0), ("total", forward_ms + 10))
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
                "batch_size": 8,
                "repeat": 1,
                "mode": "forward",
            }
        ).items()
    ]
    table = pd.DataFrame(others + rows).assign(reserved_gib=1.0, status="ok")
    loaded = {"benchmark.times": table}
    monkeypatch.setattr("stepscope.report.load.load", lambda runs, quiet: loaded)
    replaced = {"display": lambda shown: None}
    names = run_cells("explore", until="compared =", replaced=replaced, device="cpu")
    assert names["falls"].to_dict() == {"small": True, "medium": False, "xl": False}
    shares = names["share"].set_index(["configuration", "context_length"])["share"]
    assert shares[[("small", 512), ("medium", 128), ("large", 128)]].tolist() == pytest.approx(
        [1e3 / 30, 50, 1e3 / 19]
    )
    assert (
        names["busier"] == 2
        and {*names["ends"].index} == {"small", "medium", "xl"}
        and names["ends"].loc["small", ["first", "last"]].tolist() == [60, 50]
    )
    longest = names["longest"].set_index("configuration")["context_length"]
    assert longest.to_dict() == {"small": 1024, "medium": 1024, "large": 128, "xl": 512}
    assert {*names["longest"]["phase"]} == {"total"}


def explored(runs):
    """Run the notebook on a runs folder; return the displayed outputs and the notebook's variables."""
    shown = []
    replaced = {"display": shown.append, "brief": lambda frame: frame}
    return shown, run_cells("explore", until="compared =", replaced=replaced, device="cpu", runs=str(runs))


def pictures(shown):
    return [output for output in shown if hasattr(output, "message")]


@pytest.mark.filterwarnings("error::UserWarning:matplotlib")
def test_sweep_over_two_axes_shows_both_axes(tmp_path):
    for context_length in (8, 16):
        for batch_size in (1, 2):
            fields = {
                "context_length": context_length,
                "batch_size": batch_size,
                "runs": str(tmp_path / "runs"),
            }
            run_cells("benchmark", **TINY | fields)
    shown, names = explored(tmp_path / "runs")
    assert {*zip(names["share"]["configuration"], names["share"]["context_length"])} == {
        (f"batch_size {batch_size}", context_length) for batch_size in (1, 2) for context_length in (8, 16)
    }
    (picture,) = pictures(shown)  # there is no figure of GPU utilization, because these are CPU runs
    labels = [text.get_text() for text in picture.axes[0].get_legend().get_texts()]
    assert labels == ["batch_size 1", "batch_size 2"]
    lines = [line.get_xdata().tolist() for line in picture.axes[0].lines if len(line.get_xdata())]
    assert lines == [[8, 16], [8, 16]]
    assert {*shown[-1]["configuration"]} == {"batch_size 1", "batch_size 2"}


def test_sweep_without_context_lengths_shows_a_bar_for_each_configuration(tmp_path):
    for optimizer, attention in (("foreach", "naive"), ("fused", "naive"), ("fused", "sdpa")):
        fields = {"optimizer": optimizer, "attention": attention, "runs": str(tmp_path / "runs")}
        run_cells("benchmark", **TINY | fields)
    shown, _ = explored(tmp_path / "runs")
    (picture,) = pictures(shown)
    labels = {text.get_text() for text in picture.axes[0].get_yticklabels()}
    assert labels == {"naive, foreach", "naive, fused", "sdpa, fused"}


def test_explore_notebook_shows_the_ladder_with_the_slowest_step():
    rows = [
        (size, context, change, wall)
        for size, context, least in (("small", 512, 5.0), ("2.7B", 512, 90.0), ("2.7B", 128, 9.0))
        for change, wall in (("fp32", 10 * least), ("bf16", least), ("fp8", None))
    ]
    steps = pd.DataFrame(rows, columns=["size", "context_length", "optimization", "wall_ms"])
    steps["run_id"] = steps["size"] + steps["context_length"].astype(str)
    steps = steps.assign(batch_size=4, gpu_ms=1.0, busy=1.0, peak_gib=1.0, tokens_per_s=1.0)
    names = {"steps": steps, "brief": lambda *_: None, "display": lambda *_: None}
    ladder = executed("explore", "slowest = ", names)["ladder"]
    assert ladder[["run_id", "optimization", "wall_ms"]].values.tolist() == [
        ["2.7B512", "fp32", 900],
        ["2.7B512", "bf16", 90],
    ]


# Changes that the notebooks suggest


def compared(tmp_path, before, after):
    """Replace a piece of the notebook's code, run the notebook, and return its variables."""
    notebook = edited("explore", tmp_path, before, after)
    return run_cells(notebook, device="cpu")


FIELDS = '[{"attention": "naive"}, {"attention": "sdpa"}]'


def test_fused_optimizer_runs_fewer_operations_and_samples_cover_every_phase(tmp_path, no_tables):
    names = compared(tmp_path, FIELDS, '[{"optimizer": "foreach"}, {"optimizer": "fused"}]')
    operations = names["both"].set_index("configuration")["operations"]
    assert operations["optimizer fused"] < operations["optimizer foreach"]
    counts = [names["counts"][name] for name in ("optimizer foreach", "optimizer fused")]
    difference = counts[0].sub(counts[1], fill_value=0)
    assert f"{difference.max():+,.0f} {short_name(difference.idxmax())}" in names["answer"]
    for samples in names["samples"].values():
        assert {*samples["phase"]} == {"forward", "loss", "backward", "optimizer", "total"}


def test_explore_notebook_compares_batch_sizes(tmp_path, no_tables):
    names = compared(tmp_path, FIELDS, '[{"batch_size": 4}, {"batch_size": 8}]')
    assert names["both"]["configuration"].tolist() == ["batch_size 4", "batch_size 8"]
    assert [config.batch_size for config in names["configs"]] == [4, 8]
    assert "Both run the same operations" in names["answer"]


def test_compared_steps_do_not_change_the_weights(no_tables, monkeypatch):
    """At the usual learning rate, an AdamW step would change every weight."""
    built = []

    def build(config):
        step = build_step(config)
        built.append((step.model, [weight.clone() for weight in step.model.parameters()]))
        return step

    run_cells("explore", until="every_step =", replaced={"build_step": build}, device="cpu")
    assert len(built) == 4
    for model, weights in built:
        assert all(map(torch.equal, model.parameters(), weights))


def test_profile_notebook_shows_a_capture_without_launches(monkeypatch):
    monkeypatch.setattr(plt, "show", plt.close)
    other = PACKAGE.parents[1] / "tests" / "data" / "nsys" / "nsys_2026_3_cuda_gpu_trace.csv"
    names = run_cells("profile", replaced={"display": lambda *_: None}, file=str(other))
    assert len(names["gpu"].operations) == 8 and len(names["gpu"].breakdowns) == 1


def test_profile_notebook_shows_shares_of_the_median_step_and_its_longest_gap(monkeypatch):
    monkeypatch.setattr(plt, "show", plt.close)
    names = run_cells("profile", replaced={"display": lambda *_: None})
    gpu, accounts, operations = names["gpu"], names["breakdowns"], names["capture"].operations
    middle = accounts["wall"].sort_values().index[len(accounts) // 2]
    times = (
        operations[operations["step"] == middle].astype({"name": str}).groupby("name")["duration_ns"].sum()
    )
    shares = times.nlargest(15) / times.sum()
    assert names["kernels"]["share"].tolist() == pytest.approx(shares.tolist())
    longest, placed = names["longest"], gpu.classified_ops
    assert longest["ms"] == names["gaps"]["ms"].max() <= accounts["idle"][middle]
    # on each side of the gap, the plot also shows a period as long as the gap
    until = 2 * longest["end"] - longest["begin"]
    since = 2 * longest["begin"] - longest["end"]
    is_shown = (placed["start_ns"] < until) & (placed["end_ns"] > since)
    assert names["rows"].index.tolist() == placed.index[is_shown].tolist()[:2000]


def test_answer_of_the_profile_notebook_is_folded(monkeypatch):
    monkeypatch.setattr(plt, "show", plt.close)
    shown = []
    names = run_cells("profile", replaced={"display": shown.append})
    assert names["table"]["ms"].is_monotonic_decreasing
    answer = shown[-1].data
    start, end = answer.index("<summary>"), answer.index("</details>")
    median = names["gpu"].median
    for ms in (median["wall"], median["wall"] - median["compute"] / 2):
        assert start < answer.index(number(ms, "ms")) < end
