"""docs/fast_step.py: the script that the report copies runs, and trains."""
import importlib.util
import re

import pytest
import torch

from stepscope import PACKAGE

SCRIPT = PACKAGE / "report" / "chapters" / "fast_step.py"
CHAPTER = SCRIPT.with_name("01-which-change.md")
SHAPE = {"width": 32, "hidden": 64, "layers": 1, "heads": 2, "vocabulary": 50, "context": 16, "batch": 2, "steps": 2}
TINY = [f"--{name}={value}" for name, value in SHAPE.items()]
CHANGES = ["TF32", "fused attention", "fused AdamW", "compiled blocks", "bf16 autocast", "CUDA graph of the step"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fast_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = torch.get_float32_matmul_precision()
    spec.loader.exec_module(module)
    yield module
    torch.set_float32_matmul_precision(before)


def block():
    """What the report copies."""
    text = SCRIPT.read_text(encoding="utf-8")
    return text.split("# <fast step>\n")[1].split("# </fast step>")[0]


def test_the_script_runs_and_says_milliseconds(script, capsys):
    assert script.main(TINY) > 0
    assert "ms a step on" in capsys.readouterr().out


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "masters"])
def test_its_step_trains(script, monkeypatch, ours):
    """With torch's AdamW, and with what the chapter shows in its place: weights are bf16 then."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    torch.manual_seed(0)
    model = script.Model(32, 64, 1, 2, 50, 16)
    if ours:
        shown = re.findall(r"```python\n(from stepscope.*?)```", CHAPTER.read_text(encoding="utf-8"), re.DOTALL)[0]
        names = {"model": model, "torch": torch}
        exec(shown, names)
        monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: names["optimizer"])
    tokens, targets = torch.randint(50, (2, 2, 16)).unbind()
    step = script.make_step(model, tokens, targets, torch.tensor(3e-4))
    first = step().item()
    assert [step().item() for _ in range(50)][-1] < 0.9 * first
    assert model.head.weight.dtype == (torch.bfloat16 if ours else torch.float32)


def test_the_copied_block_is_short_and_names_every_change():
    lines = block().rstrip().splitlines()
    assert 30 <= len(lines) <= 40 and max(map(len, lines)) <= 110
    for change in CHANGES:
        assert sum(line.endswith(f"  # {change}") for line in lines) == 1, change
    assert "stepscope" not in block()
