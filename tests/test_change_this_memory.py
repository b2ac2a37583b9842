"""Test the "Change this" hints about memory, with notebooks run on a CPU and with formulas for a GPU."""

import ast
import json
import re

import pandas as pd
import pytest
import torch

from cells import run_cells
from stepscope import PACKAGE
from stepscope.config import configure
from stepscope.model import accounting, transformer

SMALL = {
    "size": "custom",
    "d_model": 16,
    "d_ff": 64,
    "num_layers": 4,
    "num_heads": 2,
    "warmup_steps": 0,
    "timed_steps": 1,
}


pytestmark = pytest.mark.usefixtures("threads_of_torch")


def hints(notebook: str) -> list[dict]:
    """Return the parameters that each hint in a notebook sets, as one dictionary per hint."""
    cells = json.loads((PACKAGE / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    (text,) = ("".join(cell["source"]) for cell in cells if "## Change this" in "".join(cell["source"]))
    lines = [line for line in text.splitlines() if line.startswith("* ")]
    found = [dict(re.findall(r"`(\w+) = ([^`]+)`", line)) for line in lines]
    return [{name: ast.literal_eval(value) for name, value in fields.items()} for fields in found]


def memory(**fields):
    """Return the MiB that the blocks save in each region, and a step's predicted CPU and GPU memory peaks."""
    names = run_cells("memory", "is_copy = ", device="cpu", **fields)
    rows = names["tables"]["allocations"].query("what == 'saved by a block'")
    on_gpu = accounting.peak(names["config"].model_copy(update={"device": "cuda"}), "step")
    return rows.assign(mib=rows["mib"] * rows["count"]).groupby("region")["mib"].sum(), [
        names["predictions"]["step"],
        on_gpu,
    ]


def test_short_context_moves_the_peak_to_the_optimizer():
    assert [top.phase for top in memory()[1]] == ["backward"] * 2
    assert [top.phase for top in memory(context_length=8)[1]] == ["optimizer"] * 2


def test_fused_adamw_moves_the_peak_back_to_backward():
    peaks = memory(context_length=8, optimizer="fused")[1]
    assert [top.phase for top in peaks] == ["backward"] * 2


def test_fused_attention_stores_no_scores():
    naive, fused = memory()[0], memory(attention="sdpa")[0]
    assert "attention.softmax" in naive.index and "attention.softmax" not in fused.index


def test_doubled_batch_doubles_activations_but_not_weights():
    for before, after in zip(memory()[1], memory(batch_size=8)[1], strict=True):
        assert after.kinds["weights"] == before.kinds["weights"]
        assert after.kinds["optimizer state"] == before.kinds["optimizer state"]
        for kind in ("saved for backward", "temporaries", "other"):
            assert after.kinds[kind] == pytest.approx(2 * before.kinds[kind], rel=0.02)


def checkpoints(**fields) -> pd.DataFrame:
    return run_cells("checkpointing", "names = ", device="cpu", **SMALL, **fields)["table"]


def predicted_gib(device: str, per_checkpoint: int, **fields) -> float:
    """Return the predicted peak memory in GiB at the notebook's default size."""
    shape = {"size": "tiny", "vocab_size": 1000, "context_length": 64, "batch_size": 4}
    config = configure("memory", device="cpu", **shape | fields).model_copy(update={"device": device})
    return accounting.peak(config, "forward_backward", per_checkpoint).allocated / accounting.GIB


def saved_share(peak_with: float, peak_without: float) -> float:
    return 1 - peak_with / peak_without


def test_longer_context_makes_a_checkpoint_save_a_larger_share_of_memory():
    shares = []
    for length in (64, 256):
        table = checkpoints(context_length=length, blocks_per_checkpoint=[1, 0])
        shares.append(saved_share(*table["predicted_gib"]))
    assert shares[1] > 1.1 * shares[0]
    for device in ("cpu", "cuda"):
        short, long = (
            saved_share(*(predicted_gib(device, k, context_length=length) for k in (1, 0)))
            for length in (64, 256)
        )
        assert long > 1.1 * short


def test_peak_grows_linearly_with_blocks_per_checkpoint():
    table = checkpoints(blocks_per_checkpoint=[1, 2, 3, 4], vocab_size=50)
    gpu = [predicted_gib("cuda", k) for k in range(1, 5)]
    for peaks in (table["predicted_gib"], pd.Series(gpu)):
        steps = peaks.diff().dropna()
        assert (steps > 0).all() and steps.max() == pytest.approx(steps.min(), rel=0.01)


def test_recomputing_from_the_input_more_than_triples_block_runs_when_blocks_double():
    table = checkpoints(blocks_per_checkpoint=[], nested_blocks=[4, 8])
    ran = table.pivot(index="checkpoint_policy", columns="blocks", values="block_runs")
    ratio = ran[8] / ran[4]
    assert (ratio[["none", "square root", "every block"]] == 2).all() and ratio["from the input"] > 3


def test_every_hint_is_tested():
    assert hints("memory") == [
        {"context_length": 8},
        {"context_length": 8, "optimizer": "fused"},
        {"attention": "sdpa"},
        {"batch_size": 8},
    ]
    assert hints("checkpointing") == [
        {"context_length": 256},
        {"blocks_per_checkpoint": [1, 2, 3, 4]},
        {"blocks_per_checkpoint": [], "nested_blocks": [4, 8]},
    ]


@pytest.mark.parametrize("changed", [False, True])
def test_memory_notebook_reports_when_its_formula_does_not_describe_the_model(monkeypatch, changed):
    def reglu(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))

    if changed:
        monkeypatch.setattr(transformer.SwiGLU, "forward", reglu)
    sentence = run_cells("memory", device="cpu")["sentence"]
    assert ("doesn't describe this model" in sentence) == changed
