"""Test the script docs/fast_step.py; the report quotes parts of this script."""

import copy
import importlib.util
import io
import os
import re
from pathlib import Path

# makes matmuls deterministic; cuBLAS reads this variable when CUDA starts
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from stepscope import PACKAGE
from stepscope.config import StepConfig
from stepscope.model.transformer import TransformerLM

SCRIPT = PACKAGE / "optimizations" / "fast_step.py"
CHAPTER = Path(__file__).parents[1] / "writeup" / "01-which-optimization.md.j2"
TINY = [
    "--width=32",
    "--hidden=64",
    "--layers=1",
    "--heads=2",
    "--vocabulary=50",
    "--context=16",
    "--batch=2",
    "--steps=2",
]
ON_GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fast_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = torch.get_float32_matmul_precision()
    spec.loader.exec_module(module)
    yield module
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request, monkeypatch):
    """Yield the step's device; disable compilation on a CPU, and use deterministic algorithms on a GPU."""
    if request.param == "cpu":
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
        yield request.param
        return
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)


def tokens_of(seed):
    """Return a random batch of tokens and targets."""
    return torch.randint(50, (2, 2, 16), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make(script, device):
    """Return a function that makes a model, a learning rate, a step on a fixed batch, and an optimizer."""

    def made(seed=0, clip=None, weights=None):
        torch.manual_seed(seed)
        model, rate = script.Model(32, 64, 1, 2, 50, 16).to(device), torch.tensor(3e-4, device=device)
        if weights:
            model.load_state_dict(weights)
        return model, rate, *script.make_step(model, *tokens_of(0).to(device), rate, clip)

    return made


def test_fast_step_script_runs(script, capsys):
    assert script.main(TINY) > 0
    assert "ms per step on" in capsys.readouterr().out


NAMES_IN_LIBRARY = {
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    "norm": "final_norm",
    "down": "ffn.down_proj",
    "gate": "ffn.gate_proj",
    "up": "ffn.up_proj",
    **{name: f"attention.{name}_proj" for name in "qkvo"},
}


def test_script_model_matches_the_library_model(script):
    torch.manual_seed(0)
    model = script.Model(32, 64, 2, 2, 50, 16)
    sizes = {
        "d_model": 32,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 50,
        "context_length": 16,
    }
    expected = TransformerLM(StepConfig(device="cpu", **sizes))
    for name, weight in model.named_parameters():  # large weights, so that the norms' eps is negligible
        torch.nn.init.normal_(weight, std=0.3 if "blocks" in name else 1)
        parts = [NAMES_IN_LIBRARY.get(part, part) for part in name.split(".")]
        expected.get_parameter(".".join(parts)).data = weight.data
    tokens = torch.randint(50, (3, 16))
    logits = model(tokens)
    torch.testing.assert_close(logits, expected(tokens), rtol=1e-4, atol=1e-4)
    # earlier logits don't depend on later tokens
    torch.testing.assert_close(logits[:, :5], model(tokens[:, :5]), rtol=1e-4, atol=1e-4)
    assert len([*model.parameters()]) == len([*expected.parameters()]) and logits.std() > 1


def test_step_compiles_blocks_and_logits(script, monkeypatch):
    compiled = []

    def compile(function, **options):
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append(module))
    model = script.Model(32, 64, 1, 2, 50, 16)
    script.make_step(model, *tokens_of(0), torch.tensor(3e-4))
    assert compiled == [*model.blocks, "to_logits"]


def test_first_step_matches_an_eager_bf16_step(make, device):
    """A weight may move in the opposite direction if its gradient is near zero.

    The first AdamW step moves each weight by the learning rate against the sign of its gradient, and the sign may
    differ because the two steps round differently on a GPU.
    """
    model, _, step, _ = make()
    eager = copy.deepcopy(model)
    tokens, targets = tokens_of(0).to(device)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=3e-4)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = eager(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    assert logits.dtype == torch.bfloat16
    assert step().item() == pytest.approx(loss.item(), rel=0 if device == "cpu" else 5e-3)
    for weight, expected in zip(model.parameters(), eager.parameters()):
        differs = (weight - expected).abs() > (1e-8 if device == "cpu" else 3e-5)
        assert differs.float().mean() <= (0 if device == "cpu" else 0.25)


def test_script_prints_mean_step_time_excluding_the_first_step(script, monkeypatch, capsys):
    now = [100.0]

    def make_step(model, tokens, targets, rate, clip):
        assert tokens.shape == targets.shape == (2, 16) and clip == 0.5

        def step():
            now[0] += 7.0 if now[0] == 100 else 0.5
            return torch.tensor(now[0])

        return step, None

    monkeypatch.setattr(script, "make_step", make_step)
    monkeypatch.setattr(script, "default_timer", lambda: now[0])
    assert script.main([*TINY, "--clip=0.5"]) == 500
    assert "500 ms per step on cpu; loss 107.0000 to 108.0000" in capsys.readouterr().out


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "masters"])
def test_step_reduces_the_loss(make, monkeypatch, ours):
    """Train with torch's AdamW, or with the optimizer that the report suggests instead of AdamW."""
    if ours:
        quoted = re.search(
            r"```python\n(from stepscope.*?)```", CHAPTER.read_text(encoding="utf-8"), re.DOTALL
        )

        def quoted_optimizer(parameters, lr, **options):
            names = {"model": list(parameters), "rate": lr, "torch": torch}
            exec(quoted[1], names)
            return names["optimizer"]

        monkeypatch.setattr(torch.optim, "AdamW", quoted_optimizer)
    model, rate, step, _ = make()
    weight = model.head.weight.detach().clone()
    rate.zero_()
    first = step().item()
    assert torch.equal(model.head.weight, weight), "the rate is read from its tensor"
    rate.fill_(3e-4)
    assert [step().item() for _ in range(50)][-1] < 0.9 * first
    assert model.head.weight.dtype == (torch.bfloat16 if ours else torch.float32)


def test_make_step_leaves_weights_and_optimizer_state_unchanged(script, make):
    model, rate, _, optimizer = make()
    assert rate == 3e-4
    assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())
    torch.manual_seed(0)
    for weight, expected in zip(model.parameters(), script.Model(32, 64, 1, 2, 50, 16).parameters()):
        assert torch.equal(weight.cpu(), expected)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_gradients_are_clipped_when_configured(make, clip):
    model, _, step, _ = make(clip=clip)
    step()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    assert norm > 0.1 if clip is None else norm == pytest.approx(clip, rel=1e-3)


def test_resumed_training_is_bit_identical(script, make):
    model, rate, step, optimizer = make()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for _ in range(4):
        step()
        schedule.step()
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    losses = [step().item() for _ in range(4)]
    other, other_rate, step, optimizer = make(seed=1, weights=weights)
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    script.resume(optimizer, saved)
    assert [step().item() for _ in range(4)] == losses
    assert other_rate == rate != 3e-4
    resumed = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(tensor is before for tensor, before in zip(resumed, tensors, strict=True))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_resume_rejects_invalid_state_without_changes(script, make):
    *_, step, optimizer = make()
    step()
    saved = copy.deepcopy(optimizer.state_dict())
    state, groups = saved["state"], saved["param_groups"]
    last = {key: torch.cat([tensor, tensor]) if tensor.dim() else tensor for key, tensor in state[0].items()}
    *_, optimizer = make()
    for wrong in (
        {"state": {0: state[0]}},
        {"param_groups": 2 * groups},
        {"state": state | {max(state): last}},
    ):
        with pytest.raises(ValueError):
            script.resume(optimizer, saved | wrong)
        assert not any(tensor.any() for each in optimizer.state.values() for tensor in each.values())


def test_step_copies_its_batch_and_rejects_different_shapes(make, device):
    *_, step, _ = make()
    first, second = tokens_of(0).to(device), tokens_of(1).to(device)
    losses = [step().item(), step(*second).item(), step().item()]
    *_, step, _ = make()
    assert [step(*batch).item() for batch in (first, second, second)] == losses
    for wrong in (first[:, :1], first[:, :, :5]):
        with pytest.raises(ValueError, match="but the step was made for"):
            step(*wrong)


class Images(torch.nn.Module):
    """A minimal model that ``make_step`` accepts, with batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))])

    def to_logits(self, x):
        return self.head(x)

    def forward(self, images):  # (B, 8) -> (B, 10)
        x = self.norm(images)
        for block in self.blocks:
            x = block(x)
        return self.to_logits(x)


def test_new_step_keeps_statistics_and_random_state_and_copies_have_separate_heads(script, device):
    torch.manual_seed(0)
    with torch.device(device):
        model, images = Images(), torch.randn(4, 8)
        classes, rate = torch.randint(10, (4,)), torch.tensor(1e-2)
    before = copy.deepcopy(model.state_dict())
    random = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    step, _ = script.make_step(model, images, classes, rate)
    assert all(map(torch.equal, random, [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]))
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    losses = [step().item() for _ in range(50)]
    assert losses[-1] < losses[0] and len({*losses[:5]}) == 5, "each step draws a new dropout mask"
    assert model.norm.num_batches_tracked == 50
    model.eval()
    copied = copy.deepcopy(model)
    expected = model(images)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    torch.testing.assert_close(copied(images), expected)
    assert not model(images).any()
    if device == "cpu":  # compiled code can't be pickled
        file = io.BytesIO()
        torch.save(copied, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(images), expected)
