"""Test that the changes suggested in the notebooks have the promised effects on a CPU.

test_benchmark.py, test_mixed_precision.py, test_notebooks.py and test_nsys.py cover the changes that aren't tested
here.
"""

import json
import re
import textwrap
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from cells import edited, executed, reference, run_cells
from conftest import TINY
from stepscope import PACKAGE, PROJECT
from stepscope.config import TOTAL, configure
from stepscope.model.transformer import TransformerLM
from stepscope.report.tables import number
from stepscope.traces.kernel_categories import MATMUL

QUICK = TINY | {"warmup_steps": 1}
PROFILE = {"context_length": 16, "vocab_size": 100, "device": "cpu"}
MIXED = TINY | {"numerics": False}

# The code in each hint, and the test that applies it.
HINTS = {
    "benchmark": {
        "context_length = 256": "test_longer_context_adds_tokens_without_changing_adamw",
        "batch_size = 16": "test_longer_context_adds_tokens_without_changing_adamw",
        "2 * (default_timer() - start) * 1e3": "test_benchmark.py",
        ".venv/bin/papermill lab/benchmark.ipynb doubled.ipynb -p runs runs/doubled": "test_benchmark.py, and test_notebooks.py with -p runs",
        "synchronize()": "test_step_without_synchronization_is_unchanged_on_a_cpu",
        'optimizer = "fused"': "test_fused_adamw_runs_fewer_operations",
    },
    "mixed_precision": {
        "TERM = Fraction(1, 128)": "test_mixed_precision.py",
        '[*low, "fp16"]': "test_mixed_precision.py",
        'size = "tiny"': "test_larger_model_runs_more_flops_per_operation",
        "context_length = 128": "test_larger_model_runs_more_flops_per_operation",
        "autocast(precision)": "test_loss_without_autocast_runs_fewer_operations",
    },
    "nsys": {
        "context_length = 256": "test_longer_context_shows_softmax_next_to_its_matmuls",
        'attention = "sdpa"': "test_nsys.py",
        "synchronize()": "test_wait_after_forward_leaves_operations_unchanged",
    },
}
# names that only say where to make a change
NAMES = {
    "step",
    "timed",
    "ranged",
    "low",
    "compare_gradients",
    "wall_ms = …",
    "logits = …",
}


def hints(notebook: str) -> str:
    """Return the changes that a notebook suggests, without the question that follows each of them."""
    cells = json.loads((PACKAGE / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    found = [
        re.search(r"Change this(.*?)(?=Predict, then open|^## |\Z)", text, re.S | re.M) for text in texts
    ]
    return "\n".join(match[1] for match in found if match)


@pytest.mark.parametrize("notebook", HINTS)
def test_every_suggested_change_is_tested(notebook):
    code = {*re.findall("`([^`]+)`", hints(notebook))}
    assert code - NAMES == HINTS[notebook].keys()


@pytest.mark.parametrize(("notebook", "fields"), [("benchmark", QUICK), ("mixed_precision", MIXED)])
def test_figures_are_shown_once(notebook, fields):
    """If a cell left its figure open, Jupyter would show an additional, empty figure below the cell."""
    plt.close("all")  # figures that other tests left open
    run_cells(notebook, **fields)
    assert plt.get_fignums() == []


# -- benchmark ------------------------------------------------------------------------------------------------


def operations(times, phase):
    return times.query("mode == 'step'").set_index("phase").loc[phase, "operations"]


@pytest.fixture(scope="module")
def plain():
    return run_cells("benchmark", **QUICK)["results"].times


@pytest.mark.parametrize("field", [{"context_length": 256}, {"batch_size": 16}])
def test_longer_context_adds_tokens_without_changing_adamw(plain, field):
    times = run_cells("benchmark", **QUICK | field)["results"].times
    assert operations(times, "optimizer") == operations(plain, "optimizer")
    step = times.query("mode == 'step' and phase == 'total'").iloc[0]
    tokens = (QUICK | field)["context_length"] * (QUICK | field)["batch_size"]
    assert step["tokens_per_s"] * step["wall_ms"] / 1e3 == pytest.approx(tokens)


def test_longer_context_on_a_gpu_raises_tokens_per_second_without_slowing_adamw():
    """The hint promises this effect only for GPUs, because only they have idle units to process more tokens."""
    times = reference(quiet=True)["benchmark.times"]
    baseline = (
        "mode == 'step' and size == 'small' and precision == 'fp32' and attention == 'naive'"
        " and compile == 'none' and optimizer == 'foreach' and batch_size == 4 and repeat == 0"
    )
    rows = times.query(baseline).sort_values("context_length").set_index("phase")
    assert rows.loc[TOTAL, "tokens_per_s"].iloc[:2].is_monotonic_increasing
    assert rows.loc["optimizer", "gpu_ms"].max() < 1.1 * rows.loc["optimizer", "gpu_ms"].min()
    (hint,) = [line for line in hints("benchmark").splitlines() if "tokens/s" in line]
    assert "On a GPU tokens/s rise" in hint


def test_fused_adamw_runs_fewer_operations(plain):
    fused = run_cells("benchmark", **QUICK | {"optimizer": "fused"})["results"].times
    assert operations(fused, "optimizer") < operations(plain, "optimizer")
    assert operations(fused, "forward") == operations(plain, "forward")


def test_step_without_synchronization_is_unchanged_on_a_cpu(plain, tmp_path):
    wait = "        synchronize()  # now the work is done\n"
    clock = "        wall_ms = (default_timer() - start) * 1e3\n"
    times = run_cells(edited("benchmark", tmp_path, wait + clock, clock + wait), **QUICK)["results"].times
    assert times["operations"].tolist() == plain["operations"].tolist() and (times["wall_ms"] > 0).all()


# -- another model --------------------------------------------------------------------------------------------


@pytest.mark.skipif(PROJECT is None, reason="not in a checkout")
def test_changed_feed_forward_is_measured_without_the_flops_formula(tmp_path, capsys):
    """Apply the example in docs/notebooks.md."""
    text = (PROJECT / "docs" / "notebooks.md").read_text()
    (block,) = re.findall(r"```python\n( +for block in model.blocks:.*?)```", text, re.S)
    build = "    model = TransformerLM(config)\n"
    path = edited("benchmark", tmp_path, build, build + textwrap.indent(textwrap.dedent(block), " " * 4))
    names = run_cells(path, **QUICK)
    results, output = names["results"], capsys.readouterr().out
    assert "our FLOPs formula doesn't apply" in output and "ffn.gate_proj.weight" in output
    assert results.times[["tflops", "mfu_vs_measured_peak"]].isna().all(axis=None)
    assert (results.times["status"] == "ok").all() and (results.times["wall_ms"] > 0).all()
    count = sum(parameter.numel() for parameter in names["model"].parameters())
    assert names["run"].outcome["results"]["parameters"] == count
    assert "aten::gelu" in {*results.operations["name"]}


# -- mixed_precision ------------------------------------------------------------------------------------------


def flops_per_operation(**fields):
    times = run_cells("mixed_precision", **MIXED | {"vocab_size": 1000} | fields)["results"].times
    step = times.query("mode == 'step' and precision == 'fp32' and phase == 'total'").iloc[0]
    return step["tflops"] * step["wall_ms"] / step["operations"]


@pytest.mark.slow
def test_larger_model_runs_more_flops_per_operation():
    """Compare FLOPs per operation rather than shares of time, because times depend on the machine."""
    assert flops_per_operation(size="tiny", context_length=128) > flops_per_operation(context_length=64)


def test_loss_without_autocast_runs_fewer_operations(tmp_path):
    loss = 'with phase("loss"), autocast(precision):'
    path = edited("mixed_precision", tmp_path, loss, 'with phase("loss"):')
    counts = []
    for notebook in ("mixed_precision", path):
        times = run_cells(notebook, **MIXED)["results"].times
        counts.append(times.query("mode == 'step' and phase == 'total'").set_index("precision")["operations"])
    before, after = counts
    assert after["bf16"] < before["bf16"] and after["fp32"] == before["fp32"]


# -- ladder ---------------------------------------------------------------------------------------------------


LADDER = QUICK | {"vocab_size": 300, "training_steps": 0}


def with_suggested_transform(name, tmp_path):
    """Return the path of a ladder notebook that contains a transform which the notebook suggests."""
    blocks = re.findall(r"```python\n(.*?)```", hints("ladder"), re.S)
    (transform,) = [textwrap.dedent(block) for block in blocks if f"def {name}(" in block]
    assert 2 <= len(transform.strip().splitlines()) <= 5
    return edited("ladder", tmp_path, "OPTIMIZATIONS = [", f"{transform}\n\nOPTIMIZATIONS = [")


def test_unfused_adamw_changes_nothing_on_a_cpu(tmp_path):
    path = with_suggested_transform("fused_adamw", tmp_path)
    steps = run_cells(path, optimizations=["sdpa", "fused_adamw"], **LADDER)["steps"]
    assert steps.set_index("optimization").loc["fused_adamw", "reason"].startswith("it changes nothing")


def test_custom_transform_affects_its_row_and_later_rows(tmp_path):
    path = with_suggested_transform("no_rope", tmp_path)
    path = edited(path, tmp_path, "sdpa, fused_adamw,", "sdpa, no_rope, fused_adamw,")
    optimizations = ["fp32", "bf16", "sdpa", "fused_adamw"]
    before, after = (
        run_cells(notebook, optimizations=optimizations, **LADDER)["steps"].set_index("optimization")
        for notebook in ("ladder", path)
    )
    assert list(after.index) == optimizations and (after["status"] == "ok").all()
    for column in ("operations", "gradient_error"):
        above, below = after[column].iloc[:3], after[column].iloc[3]
        assert above.tolist() == before[column].iloc[:3].tolist()
        assert below < before[column].iloc[3] if column == "operations" else below > before[column].iloc[3]


# -- your_model -----------------------------------------------------------------------------------------------


def test_suggested_feed_forward_replaces_swiglu():
    (block,) = re.findall(r"```python\n(.*?)```", hints("your_model"), re.S)
    net = TransformerLM(configure("benchmark", size="nano", context_length=16, device="cpu"))
    before = sum(parameter.numel() for parameter in net.parameters())
    exec(textwrap.dedent(block), {"net": net, "torch": torch})
    assert sum(parameter.numel() for parameter in net.parameters()) != before
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    assert net(tokens).shape[:2] == tokens.shape


# -- nsys -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_longer_context_shows_softmax_next_to_its_matmuls():
    names = run_cells("nsys", "by_range =", **PROFILE | {"context_length": 256})
    time_ms = names["time_ms"]
    assert time_ms[["attention.scores", "attention.softmax", "attention.value"]].gt(0).all()
    assert names["shares"]["forward"].sum() == pytest.approx(1)


@pytest.mark.slow
def test_wait_after_forward_leaves_operations_unchanged(tmp_path):
    line = "                logits = step.model(step.tokens)\n"
    path = edited("nsys", tmp_path, line, f"{line}                synchronize()\n")
    counts = []
    for notebook in ("nsys", path):
        profile = run_cells(notebook, "shares =", **PROFILE)["profile"]
        counts.append(profile.operations.groupby(["mode", "phase", "name"])["count"].sum())
    assert counts[0].equals(counts[1])


def test_answer_of_the_nsys_notebook_follows_from_the_measured_phases():
    """In these simulated times, the loss reduces the matmuls' share of the time more than AdamW does."""
    rows = [
        ("forward", "forward", "matrix multiply", 50),
        ("forward", "forward", "other", 50),
        ("step", "forward", "matrix multiply", 60),
        ("step", "forward", "other", 40),
        ("step", "loss", "softmax", 400),
        ("step", "backward", "matrix multiply", 154),
        ("step", "backward", "other", 66),
        ("step", "optimizer", "other", 80),
    ]
    table = pd.DataFrame(rows, columns=["mode", "phase", "kernel_category", "total_ns"])
    shown = []
    names = {"profile": SimpleNamespace(operations=table), "unit": "operators", "number": number}
    executed("nsys", "The answer of this run", names | {"MATMUL": MATMUL, "Markdown": shown.append})
    (answer,) = shown
    for words in (
        "take 50% of the time of a forward pass's operators, and 27% of a full step's",
        "60% of its forward and 70% of its backward",
        "loss (50% of the step) and the optimizer (10%)",
    ):
        assert words in answer
