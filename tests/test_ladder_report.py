"""What the report says of the ladder, from a campaign's tables made here: each claim where it holds, and where not."""
import inspect

import numpy as np
import pandas as pd
import pytest

from reports import said
from stepscope.config import StepConfig
from stepscope.report.style import svg
from stepscope.report.tables import markdown
from stepscope.step.flops import parameter_count
from stepscope.studies.ladder import claims, figures, tables
from stepscope.studies.ladder.config import CHANGES, PEERS

# wall times in ms of the nine changes, Hugging Face's two, then GPU times of the first six
WALLS = {
    ("small", 512): ([58.5, 35.9, 37.9, 32.9, 26.7, 21.3, 6.45, 5.51, 5.22, 18.9, 6.8], [55.9, 29, 22, 13, 7.9, 6.2]),
    ("small", 1024): ([123, 63.8, 55.7, 47.4, 49.9, 26.6, 10.3, 9.22, 8.93, 21.5, 11.0], [122, 62, 54, 25, 14, 10]),
    ("2.7B", 512): ([1092, 334, 258, 196, 149, 111, 109, 95.1, 89.6, 114, 113], [1090, 333, 257, 195, 148, 110]),
}
SHEETS = {"fp32": 67.0, "tf32": 494.5}


def row(size, context, change, wall, gpu, batch=4, vocab=10_000):
    config = StepConfig(size=size, context_length=context, device="cpu", batch_size=batch, vocab_size=vocab)
    moved = {"bf16_moments": 20}.get(change, 28) * parameter_count(config) / 4.2e9
    step_j = 0.3 * wall if change == "fp32" else 0.69 * gpu
    clock = 1665.0 if size == "2.7B" and wall < 120 else 1980.0
    return {
        "size": size, "context_length": context, "vocab_size": vocab, "change": change, "batch_size": batch,
        "status": "ok", "reason": "", "steps": 4.0, "wall_ms": wall, "wall_std_ms": 0.1, "gpu_ms": gpu,
        "operations": 400.0, "busy": gpu / wall, "replayed_ms": np.nan, "peak_gib": 52.0, "reserved_gib": 60.0,
        "sm_clock_mhz": clock, "power_w": 690.0, "step_j": step_j, "tokens_per_s": batch * context / wall * 1e3,
        "mfu": 0.48, "mfu_measured": 0.6, "mfu_at_clock": 0.57, "loss_off": 1e-5, "gradient_off": 0.07,
        "compile_s": np.nan, "matmul_ms": 54.0, "moved_ms": moved, "bound_ms": 54.0 + moved,
        "energy_ms": step_j / 700 * 1e3}


@pytest.fixture
def campaign():
    rows = []
    for (size, context), (walls, gpus) in WALLS.items():
        gpus = [*gpus, *walls[6:9], walls[9] * 0.6, walls[10]]
        rows += [row(size, context, change, wall, gpu)
                 for change, wall, gpu in zip((*CHANGES, *PEERS), walls, gpus)]
    for batch, low, eight in ((4, 89.6, 89.9), (8, 165, 155), (16, 310, 270), (32, 600, 497)):
        if batch > 4:
            rows.append(row("2.7B", 512, "bf16_moments", low, low, batch))
        rows.append(row("2.7B", 512, "fp8", eight, eight, batch))
    rows.append(row("2.7B", 512, "filled", 920, 920, 52))
    rows += [row("small", 512, change, wall, wall, vocab=50257)
             for change, wall in (("fp32", 68), ("bf16_moments", 6.6), ("chunked", 6.7))]
    steps = pd.DataFrame(rows)
    steps.loc[steps["change"] == "chunked", "peak_gib"] = 51.0
    shape = {"size": "2.7B", "context_length": 512, "vocab_size": 10_000, "batch_size": 4}
    kernels = pd.DataFrame(
        [shape | {"change": change, "name": f"{family} kernel", "family": family, "count": 2.0, "gpu_ms": share}
         for change in ("fp32", "blocks")
         for family, share in (("matrix multiply", 60.0), ("optimizer", 25.0), ("elementwise", 15.0))])
    small = {"size": "small", "context_length": 512, "vocab_size": 10_000, "batch_size": 4}
    noise, curves = np.random.default_rng(0), []
    for change, seed, off in (("fp32", 0, 0), ("fp32", 1, 0.1), ("fp32", 2, -0.08),
                              *((change, 0, 0.01) for change in CHANGES[1:])):
        loss = 5 * np.exp(-np.arange(200) / 60) + 1.5 + off + 0.001 * noise.standard_normal(200)
        curves += [small | {"change": change, "seed": seed, "step": step, "loss": one} for step, one in enumerate(loss)]
    for change, off in (("bf16_moments", 0), ("fp8", 0.02)):
        curves += [shape | {"batch_size": 32, "change": change, "seed": 0, "step": step, "loss": 8 - 0.05 * step + off}
                   for step in range(50)]
    results = pd.DataFrame([{
        "size": size, "context_length": 512, "vocab_size": 10_000, "power_limit_w": 700.0, "sheet_bf16": 989.5,
        "kept_up_tflops": 667.0, "kept_up_clock_mhz": 1515.0, "kept_up_power_w": 695.0, "v_fp32": 0.3514,
        "v_by_chance": 0.3515, "v_nearest": 1.0, "compared": 18330, "unequal": 0, "low_unequal": 0,
        "parameters": parameter_count(StepConfig(size=size, context_length=512, device="cpu"))}
        for size in ("small", "2.7B")])
    return {"ladder.steps": steps, "ladder.kernels": kernels, "ladder.curves": pd.DataFrame(curves),
            "ladder.results": results, "runs": pd.DataFrame({"study": ["ladder"], "device": ["NVIDIA H200"]})}


def public(module):
    return [function for name, function in inspect.getmembers(module, inspect.isfunction)
            if function.__module__ == module.__name__ and [*inspect.signature(function).parameters] == ["tables"]]


@pytest.mark.parametrize("say", [*public(claims), *tables.PRINTED.values(), *public(figures)])
def test_all_is_said_of_a_campaign_and_nothing_without_data(campaign, say):
    found = say(campaign)
    if isinstance(found, dict):
        assert all(value == value for value in found.values()) and said(say.__name__, found)
    elif isinstance(found, pd.DataFrame):
        assert 0 < len(found) <= 15 and "nan" not in markdown(found).lower()
    else:
        assert "<svg" in svg(found) and found.message
    with pytest.raises(LookupError):
        say({})


def test_what_the_first_screen_says(campaign):
    assert claims.headline(campaign) == {"speedup": pytest.approx(1092 / 89.6), "gpu": "H200"}
    first = claims.first_ladder(campaign)
    assert (first["size"], first["plain"], first["lines"], first["last"]) == ("2.7B", 1092, 111, 89.6)
    assert first["tokens"] == pytest.approx(2048 / 0.0896)
    assert first["parameters"] == pytest.approx(3.41e9, rel=0.01)
    assert claims.first_peer(campaign)["gain"] == pytest.approx(113 / 89.6)
    assert claims.first_start(campaign)["left"] == pytest.approx(196 / 89.6)
    assert claims.graph_by_size(campaign) == {"small": "small", "small_gain": pytest.approx(21.3 / 6.45),
                                              "large": "2.7B", "large_gain": pytest.approx(111 / 109 - 1)}


def test_which_change_is_in_gpu_time_but_for_the_graph(campaign):
    found = tables.which_change(campaign)
    assert list(found.columns) == ["small", "2.7B"]
    assert found.loc["TF32", "small"] == pytest.approx(55.9 / 29)
    assert found.loc["CUDA graph of the step", "small"] == pytest.approx(21.3 / 6.45)
    assert np.isnan(found.loc["CUDA graph of the step", "2.7B"]), "under 2%"
    assert found.loc["bf16 moments", "2.7B"] == pytest.approx(95.1 / 89.6)


def test_what_the_evidence_says(campaign):
    assert claims.change_graph(campaign) == {"size": "small"}
    assert claims.change_matmul(campaign) == {"share": pytest.approx(0.6), "size": "2.7B"}
    assert claims.change_training(campaign) == {"steps": 200}
    distance, seeds = tables.moved(tables.trained(campaign)[1])
    assert distance[CHANGES[-1]] == pytest.approx(0.01, abs=5e-4) and seeds == pytest.approx(0.08, abs=5e-4)
    printed = tables.peers(campaign)["ours faster than the best, x"]
    assert list(printed) == pytest.approx([6.8 / 5.22, 11 / 8.93, 113 / 89.6])
    assert claims.fp8_small_batch(campaign) == {"size": "2.7B", "batch_size": 4, "bf16_ms": 89.6, "fp8_ms": 89.9}
    assert claims.fp8_large_batch(campaign) == {
        "tokens": 8 * 512, "batch": 32, "gain": pytest.approx(600 / 497), "joules": pytest.approx(1 - 497 / 600)}
    assert claims.fp8_training(campaign)["most"] == pytest.approx(0.02 / 5.55)
    found = claims.power(campaign)
    assert (found["size"], found["cap"], found["clock"], found["full"]) == ("2.7B", 700, 1665, 1980)
    assert found["bound"] == pytest.approx(found["joules"] / 0.7)
    assert claims.optimizer_exact(campaign)["numbers"] == 18330


def test_fp8_pays_from_where_it_gains_at_every_size():
    assert tables.pays_from(pd.DataFrame({"tokens": [1, 2, 4, 8], "gain": [1.1, 1.0, 1.2, 1.3]})) == 4
    assert tables.pays_from(pd.DataFrame({"tokens": [1, 2], "gain": [1.1, 1.0]})) is None


def test_a_loss_above_and_below_has_moved():
    off = pd.DataFrame({("fp32", 0): [0, 0], ("fp32", 1): [0.3, 0.3], ("fp32", 2): [0.5, 0.5], ("bf16", 0): [0.1, -0.1]})
    distance, nearest = tables.moved(off.rename_axis(columns=["change", "seed"]))
    assert distance.to_dict() == {"bf16": 0.1} and nearest == pytest.approx(0.2)


def test_fp8s_loss_is_beside_bf16s_of_the_same_step_above_or_below(campaign):
    curves = campaign["ladder.curves"]
    curves.loc[curves["change"] == "fp8", "loss"] -= 0.04
    other = curves[curves["change"] == "fp8"].assign(change="bf16", loss=9.0)
    found = claims.fp8_training(campaign | {"ladder.curves": pd.concat([curves, other])})
    assert found["most"] == pytest.approx(0.02 / 5.55)


def test_of_batches_that_fill_the_memory_the_best_is_told(campaign):
    steps = campaign["ladder.steps"]
    worse = steps[steps["change"] == "filled"].assign(size="small", batch_size=200, mfu=0.3)
    assert claims.filled(campaign | {"ladder.steps": pd.concat([steps, worse])})["batch"] == 52


STEPS, KERNELS, CURVES, RESULTS = (f"ladder.{name}" for name in ("steps", "kernels", "curves", "results"))


@pytest.mark.parametrize(("claim", "name", "column", "value", "which"), [
    ("headline", STEPS, "wall_ms", 2000, {"change": "bf16_moments"}), ("first_peer", STEPS, "wall_ms", 1, {"change": "hugging_face"}),
    ("first_bound", STEPS, "bound_ms", 95, {}), ("first_start", STEPS, "wall_ms", 90, {"change": "sdpa"}),
    ("change_matmul", KERNELS, "gpu_ms", 30, {"family": "matrix multiply"}),
    ("change_optimizer", KERNELS, "gpu_ms", 5, {"family": "optimizer"}),
    ("change_graph", STEPS, "wall_ms", 7, {"change": "blocks"}),
    ("graph_by_size", STEPS, "wall_ms", 7, {"change": "blocks"}), ("graph_by_size", STEPS, "busy", 0.99, {}),
    ("change_training", CURVES, "loss", 9, {"change": "bf16_moments"}),
    ("attention_step", STEPS, "gpu_ms", 257, {"change": "sdpa"}),
    ("precision_masters", STEPS, "gpu_ms", 109, {"change": "bf16_weights"}),
    ("moments_rounding", RESULTS, "v_nearest", 0.352, {}), ("moments_rounding", RESULTS, "v_by_chance", 0.4, {}),
    ("optimizer_exact", RESULTS, "low_unequal", 3, {"size": "2.7B"}),
    ("fp8_small_batch", STEPS, "wall_ms", 60, {"change": "fp8"}),
    ("fp8_large_batch", STEPS, "wall_ms", 900, {"change": "fp8"}), ("fp8_training", CURVES, "loss", 9, {"change": "fp8"}),
    ("power", STEPS, "power_w", 400, {}), ("power", STEPS, "sm_clock_mhz", 1980, {}),
    ("chunked_memory", STEPS, "peak_gib", 53, {"change": "chunked"})])
def test_a_claim_that_does_not_hold_is_not_said(campaign, claim, name, column, value, which):
    rows = campaign[name]
    at = np.logical_and.reduce([rows.index >= 0, *(rows[field] == wanted for field, wanted in which.items())])
    assert at.any()
    rows.loc[at, column] = value
    assert getattr(claims, claim)(campaign) is None


def test_of_one_size_nothing_is_compared(campaign):
    alone = {"ladder.steps": campaign["ladder.steps"].query("size == 'small'")}
    assert claims.change_graph(alone) is claims.graph_by_size(alone) is None


def test_figures_say_what_is_so(campaign):
    steps, curves = campaign["ladder.steps"], campaign["ladder.curves"]
    steps.loc[steps["change"] == "fp8", "wall_ms"] *= 1.5
    curves.loc[curves["change"] == "bf16_moments", "loss"] += 0.5
    assert figures.fp8(campaign).message.startswith("FP8 matmuls gain nothing")
    assert figures.ladder_training(campaign).message == "How far each change moves the loss"
    assert tables.training_check(campaign)["of another seed, %"].max() > 1
    campaign["ladder.steps"] = steps[~steps["change"].isin(PEERS)]
    assert tables.peers(campaign) is None


def test_a_ladder_that_ended_early_is_still_shown(campaign):
    """Of a CPU: no TF32, no CUDA graph, no energy, one size."""
    steps = campaign["ladder.steps"]
    own = steps[(steps["size"] == "small") & (steps["context_length"] == 512) & (steps["vocab_size"] == 10_000)]
    own = own[~own["change"].isin(PEERS)].copy()
    lacks = own["change"].isin(["tf32", "cuda_graph"])
    own.loc[lacks, "status"] = "unsupported"
    own.loc[lacks, list(tables.MEASURES)] = np.nan
    own[["step_j", "power_w", "energy_ms", "sm_clock_mhz", "mfu"]] = np.nan
    alone = {"ladder.steps": own, "runs": campaign["runs"]}
    assert len(tables.ladder_steps(alone)) == 7 and tables.mfu(alone) is None
    assert list(tables.fast_step(alone).columns) == ["small, ms"]
    assert tables.which_change(alone).loc["bf16 autocast", "small"] == pytest.approx(55.9 / 22)
    assert "small" in figures.ladder(alone).message


def test_schemas_hold_what_is_written(campaign):
    for name, schema in tables.SCHEMAS.items():
        frame = campaign[f"ladder.{name}"].drop(columns=[*tables.CONFIG])
        for _, own in frame.groupby([campaign[f"ladder.{name}"][column] for column in tables.CONFIG]):
            schema.validate(own)
        assert not campaign[f"ladder.{name}"].duplicated(list(tables.KEYS[name])).any()
    assert set(tables.SCHEMAS["steps"].columns) == {*tables.CELL, "status", "reason", *tables.MEASURES}
