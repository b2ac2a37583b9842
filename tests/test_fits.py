"""What fits: the memory formulas of fused attention, fused AdamW and checkpoints against what storages live and
what an H200 measured; the allowance against the reference; the command's sentences."""
from pathlib import Path

import pandas as pd
import pytest
import yaml

from memory_recording import CudaAutocast, stand_in
from reference import tables
from stepscope.runs.record import read_record
from stepscope.runs.sweep_file import load_sweep, sizes_of_two_editions
from stepscope.step import accounting
from stepscope.step.accounting import ALLOWANCE, MIB
from stepscope.step.training_step import Step, build_step
from stepscope.studies.memory import facts_options, nesting, saved
from stepscope.studies.memory import measure as memory
from stepscope.studies.memory.facts import config_of as config_of_run
from test_cli import command  # noqa: F401 - a fixture
from test_memory import SHAPES, config_of

H200 = Path(__file__).parents[1] / "runs/h200"


def recorded(config, monkeypatch):
    """Peak bytes that a step's storages take, asked for."""
    if config.precision == "bf16":
        monkeypatch.setattr(Step, "autocast", lambda step: CudaAutocast())
    with stand_in(monkeypatch):
        _, _, found = memory.record(config)
    return found["steady_peak_requested_mib"] * MIB


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_with_fused_attention_saves_what_the_formula_says(shape, precision, monkeypatch):
    if precision == "bf16":
        monkeypatch.setattr(Step, "autocast", lambda step: CudaAutocast())
    config = config_of(shape, mode="forward_backward", precision=precision, attention="sdpa")
    _, found = saved.block_saved(build_step(config))
    formulas = accounting.FUSED_FORMULAS[precision]
    copies = accounting.value(formulas.copies, config)
    assert found["block_copies_bytes"] == copies
    assert found["block_saved_bytes"] == accounting.value(formulas.saved, config) + copies


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_predicted_peak_with_fused_attention(shape, precision, mode, monkeypatch):
    config = config_of(shape, mode=mode, precision=precision, attention="sdpa")
    assert recorded(config, monkeypatch) == accounting.peak(config).bytes


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_peak_of_a_step_with_the_fused_optimizer(shape, attention, monkeypatch):
    config = config_of(shape, mode="step", attention=attention, optimizer="fused")
    assert recorded(config, monkeypatch) == accounting.peak(config).bytes


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_predicted_peak_with_fused_attention_in_checkpoints(blocks, monkeypatch):
    config = config_of(SHAPES[0] | {"num_layers": 5}, mode="step", attention="sdpa", optimizer="fused")
    storages = stand_in(monkeypatch)
    with storages:
        step = build_step(config)
        with nesting.arranged(step.model, nesting.every(config.num_layers, blocks)):
            for _ in range(2):
                step.clear_gradients()
                storages.reset_peak()
                step()
    assert storages.bytes["requested_bytes"]["peak"] == accounting.peak(config, blocks).bytes


def test_h200_peaks_with_fused_attention_are_predicted():
    """Without cuBLAS's workspaces, which the written-out attention's steps had left; small tensors are those that
    are rounded."""
    workspaces = 2 * accounting.WORKSPACE
    off = {}
    for folder in (H200 / "compile").iterdir():
        record = read_record(folder)
        variants = pd.read_csv(folder / record.tables["variants"].file)
        rows = variants[(variants["variant"] == "eager") & (variants["mode"] == "forward_backward")
                        & (variants["attention"] == "sdpa") & (variants["status"] == "ok")]
        shape = {name: record.config[name] for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size",
                                                        "context_length", "batch_size", "precision")}
        config = accounting.on_gpu(**shape, mode="forward_backward", attention="sdpa")
        for peak_mib in rows["peak_allocated_mib"]:
            off[record.run_id] = (accounting.peak(config).allocated - workspaces) / MIB / peak_mib - 1
    assert len(off) >= 10 and max(map(abs, off.values())) < 0.04
    assert max(abs(share) for run, share in off.items() if "-fp32-" in run) < 0.001


def test_what_an_h200_asked_for_with_fused_attention_is_predicted():
    runs = tables("memory")["runs"]
    runs = runs[(runs["attention"] == "sdpa") & (runs["measured"] == "history") & (runs["status"] == "ok")]
    for _, run in runs.iterrows():
        off = accounting.peak(config_of_run(run)).bytes - run["steady_peak_requested_mib"] * MIB
        assert abs(off) <= 1024, run["run_id"]


def test_a_fused_kernels_workspace_is_a_gpus_alone():
    config = config_of(SHAPES[0], mode="forward_backward", attention="sdpa")
    on_gpu = config.model_copy(update={"device": "cuda"})
    at, beside = (next(one for one in accounting.instants(each) if one.operation == accounting.FUSED_BACKWARD)
                  for each in (config, on_gpu))
    difference = beside.categories["temporaries"] - at.categories["temporaries"]
    assert difference == accounting.value(accounting.FUSED_FORMULAS["fp32"].kernel, config) > 0


def test_the_allowance_is_what_the_reference_measured():
    worst = facts_options.fragmentation(tables("memory")["runs"])["most"]["idle_share"]
    assert worst <= ALLOWANCE < worst + 0.05


def test_what_fits_tightly_leaves_less_than_the_allowance():
    config = accounting.on_gpu(size="small", context_length=512)
    peak_mib = accounting.peak(config.model_copy(update={"precision": "fp32"})).allocated / MIB

    def row(memory_mib, **options):
        found = accounting.what_fits(config, memory_mib, **options)
        return found[(found["mode"] == "step") & (found["precision"] == "fp32")].iloc[0]

    for memory_mib, fits, tight in ((peak_mib - 1, False, False), (peak_mib + 1, True, True),
                                    (peak_mib / (1 - ALLOWANCE) + 1, True, False)):
        found = row(memory_mib)
        assert (found["fits"], found["tight"]) == (fits, tight)
        assert found["largest_context"] <= found["most_context"] and (found["most_batch"] >= 4) == fits
        assert (found["largest_batch"] >= 4) == (fits and not tight)
    assert not row(peak_mib + 1, allowance=0.0)["tight"]
    assert row(peak_mib, blocks_per_checkpoint=1)["peak_mib"] < peak_mib


def test_fit_refuses_a_name_of_two_sizes_and_takes_an_editions(command):  # noqa: F811
    status, out, error = command("fit", "xl")
    assert status == 2 and not out and "1600/6400/48/25" in error and "2560/10240/32/32" in error
    said = [command("fit", *name, "--memory", "80")[1] for name in (
        ("xl", "--edition", "2026"), ("2.7B",), ("xl", "--edition", "2025"))]
    assert said[0] == said[1] != said[2] and "2560/10240/32/32" in said[0]
    assert "forward in bf16" in said[0].lower() or "bf16 takes" in said[0]


def test_fit_takes_a_shape_of_ones_own_and_options(command):  # noqa: F811
    shape = ("--d-model", "512", "--d-ff", "1024", "--layers", "4", "--heads", "8")
    plain, lean = (command("fit", *shape, "--memory", "24", *more)[1] for more in (
        (), ("--attention", "sdpa", "--optimizer", "fused", "--checkpoint", "2", "--vocab", "50257")))
    assert "512/1024/4/8" in plain and "sdpa" not in plain
    assert all(words in " ".join(lean.split()) for words in ("fused AdamW", "every 2 blocks", "vocabulary 50257"))
    for wrong in (("fit",), ("fit", "huge"), ("fit", "small", "--d-model", "3"), ("fit", "small", "--checkpoint", "99"),
                  ("fit", "small", "--attention", "other"), ("fit", "small", "--allowance", "100"),
                  ("fit", *shape, "--edition", "2026"), ("fit", "small", "--edition", "1999"),
                  ("fit", "10B", "--edition", "2025"), ("fit", "2.7B", "--edition", "2026")):
        status, out, error = command(*wrong)
        assert (status, out) == (2, "") and error.count("\n") == 1 and "Traceback" not in error, wrong


def test_an_editions_size_climbs_no_ladder_unsaid(command):  # noqa: F811
    status, _, error = command("ladder", "--size", "xl")
    assert status == 2 and "--edition 2026" in error


def test_a_sweep_says_whose_size_it_measures(tmp_path, command):  # noqa: F811
    block = {"study": "benchmark", "fixed": {"size": "xl", "context_length": 8, "device": "cuda"}}
    for name, more in (("bare", {}), ("own", {"edition": 2026})):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(block | {"fixed": block["fixed"] | more}))
        assert sizes_of_two_editions(path) == (["xl"] if name == "bare" else [])
        config, = load_sweep(path)
        assert config.size == ("xl" if name == "bare" else "2.7B")
    axes = tmp_path / "axes.yaml"
    axes.write_text(yaml.safe_dump([{"study": "benchmark", "axes": {"size": ["small", "xl"]}}, 3]))
    assert sizes_of_two_editions(axes) == ["xl"]
    _, _, said = command("sweep", tmp_path / "bare.yaml", "--runs", tmp_path / "runs")
    assert "size: xl is 2025's, 1600/6400/48/25; with edition: 2026 beside it, 2560/10240/32/32" in said
