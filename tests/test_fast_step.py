"""docs/fast_step.py: the script that the report copies runs, and trains."""

import copy
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch

from stepscope import PACKAGE
from stepscope.config import StepConfig
from stepscope.model.transformer import TransformerLM

SCRIPT = PACKAGE / "optimizations" / "fast_step.py"
CHAPTER = Path(__file__).parents[1] / "writeup" / "01-which-optimization.md.j2"
SHAPE = {
    "width": 32,
    "hidden": 64,
    "layers": 1,
    "heads": 2,
    "vocabulary": 50,
    "context": 16,
    "batch": 2,
    "steps": 2,
}
TINY = [f"--{name}={value}" for name, value in SHAPE.items()]
LADDER_OPTIMIZATIONS = [
    "TF32",
    "fused attention",
    "fused AdamW",
    "compiled blocks",
    "bf16 autocast",
    "CUDA graph of the step",
]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fast_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = torch.get_float32_matmul_precision()
    spec.loader.exec_module(module)
    yield module
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def make(script, monkeypatch):
    """A model of a seed, and its step, optimizer and rate on a batch of its own; nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)

    def made(seed=0, clip=None, weights=None):
        torch.manual_seed(seed)
        model, rate = script.Model(32, 64, 1, 2, 50, 16), torch.tensor(3e-4)
        if weights:
            model.load_state_dict(weights)
        tokens, targets = torch.randint(50, (2, 2, 16), generator=torch.Generator().manual_seed(0)).unbind()
        return model, rate, *script.make_step(model, tokens, targets, rate, clip)

    return made


def block():
    """What the report copies."""
    text = SCRIPT.read_text(encoding="utf-8")
    return text.split("# <fast step>\n")[1].split("# </fast step>")[0]


def test_the_script_runs_and_says_milliseconds(script, capsys):
    assert script.main(TINY) > 0
    assert "ms per step on" in capsys.readouterr().out


NAMES = {
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    "norm": "final_norm",
    "down": "ffn.down_proj",
    "gate": "ffn.gate_proj",
    "up": "ffn.up_proj",
    **{name: f"attention.{name}_proj" for name in "qkvo"},
}


def test_its_model_is_the_librarys(script):
    torch.manual_seed(0)
    model = script.Model(32, 64, 2, 2, 50, 16)
    other = TransformerLM(
        StepConfig(
            device="cpu", d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=50, context_length=16
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():  # large, so that the norms' eps is nothing
            weight.copy_(torch.randn_like(weight) * (0.3 if "blocks" in name else 1))
            other.get_parameter(".".join(NAMES.get(part, part) for part in name.split("."))).copy_(weight)
    tokens = torch.randint(50, (3, 16))
    torch.testing.assert_close(model(tokens), other(tokens), rtol=1e-4, atol=1e-4)
    assert len([*model.parameters()]) == len([*other.parameters()]) and model(tokens).std() > 1


def test_its_step_is_compiled_where_it_says_and_multiplies_in_bf16(script, make, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compiled.append(function.__name__) or function
    )
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: compiled.append(module))
    model, _, step, _ = make()
    assert compiled == [*model.blocks, "to_logits"]
    script.make_step(model, *torch.zeros(2, 2, 16, dtype=torch.int64), rate := torch.tensor(0.5))
    assert rate == 0.5, "the caller's is put back"
    tokens, targets = torch.randint(50, (2, 2, 16), generator=torch.Generator().manual_seed(0)).unbind()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert (
        step().item()
        == torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).item()
    )


def test_the_script_times_the_steps_after_the_first(script, monkeypatch, capsys):
    now, made = [100.0], []

    def make_step(*of):
        def step():
            now[0] += 7.0 if now[0] == 100 else 0.5
            return torch.tensor(now[0])

        return made.append(of) or step, None

    monkeypatch.setattr(script, "make_step", make_step)
    monkeypatch.setattr(script, "default_timer", lambda: now[0])
    assert script.main([*TINY, "--clip=0.5"]) == 500
    ((model, tokens, targets, rate, clip),) = made
    assert (
        tokens.shape == targets.shape == (2, 16)
        and not torch.equal(tokens, targets)
        and (rate.item(), clip) == (pytest.approx(3e-4), 0.5)
    )
    assert model.embedding.weight.shape == model.head.weight.shape == (50, 32) and model.blocks[
        0
    ].cos.shape == (16, 16)
    assert "loss 107.0000 to 108.0000" in capsys.readouterr().out


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "masters"])
def test_its_step_trains(script, make, monkeypatch, ours):
    """With torch's AdamW, and with what the chapter shows in its place: weights are bf16 then."""
    if ours:
        shown = re.findall(
            r"```python\n(from stepscope.*?)```", CHAPTER.read_text(encoding="utf-8"), re.DOTALL
        )[0]

        def shown_optimizer(parameters, lr, **options):
            names = {"model": list(parameters), "rate": lr, "torch": torch}
            exec(shown, names)
            return names["optimizer"]

        monkeypatch.setattr(torch.optim, "AdamW", shown_optimizer)
    model, rate, step, _ = make()
    weight = model.head.weight.detach().clone()
    rate.zero_()
    first = step().item()
    assert torch.equal(model.head.weight, weight), "the rate is read from its tensor: at 0 nothing moves"
    rate.fill_(3e-4)
    assert [step().item() for _ in range(50)][-1] < 0.9 * first
    assert model.head.weight.dtype == (torch.bfloat16 if ours else torch.float32)


def test_making_the_step_changes_nothing(make):
    torch.manual_seed(0)
    model, rate, step, optimizer = make()
    assert rate == 3e-4
    assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())
    fresh, _, _, _ = make()
    for own, other in zip(model.parameters(), fresh.parameters()):
        assert torch.equal(own, other)
    step()
    plain = torch.optim.AdamW(fresh.parameters(), lr=3e-4)
    for own, other in zip(model.parameters(), fresh.parameters()):
        other.grad = own.grad
    plain.step()
    for own, other in zip(model.parameters(), fresh.parameters()):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-8)


def test_gradients_are_clipped_where_it_is_asked_for(make):
    for clip in (None, 0.01):
        model, _, step, optimizer = make(clip=clip)
        norms = []
        optimizer.register_step_pre_hook(
            lambda *_, model=model, norms=norms: norms.append(
                torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            )
        )
        step()
        assert norms[0] > 0.1 if clip is None else norms == pytest.approx([0.01], rel=1e-4)


def test_a_resume_equals_no_interruption_to_the_bit(script, make):
    model, rate, step, optimizer = make()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for _ in range(4):
        step()
        schedule.step()
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    first = [step().item() for _ in range(4)]
    other, other_rate, step, optimizer = make(seed=1, weights=weights)
    places = [tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()]
    script.resume(optimizer, saved)
    assert [step().item() for _ in range(4)] == first
    assert other_rate == rate != 3e-4
    assert places == [tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()]
    for own, one in zip(model.parameters(), other.parameters()):
        assert torch.equal(own, one)


def test_what_is_not_this_optimizers_state_is_refused_before_anything_is_written(script, make):
    *_, optimizer = make()
    saved = copy.deepcopy(optimizer.state_dict())
    for name in saved["state"][0]:
        saved["state"][0][name].fill_(5)
    state, groups = saved["state"], saved["param_groups"]
    last = max(state)
    longer = {key: torch.cat([one, one]) if one.dim() else one for key, one in state[last].items()}
    assert longer["exp_avg"].shape != state[last]["exp_avg"].shape
    for wrong in ({"state": {0: state[0]}}, {"param_groups": 2 * groups}, {"state": state | {last: longer}}):
        with pytest.raises(ValueError):
            script.resume(optimizer, saved | wrong)
        assert not any(tensor.any() for one in optimizer.state.values() for tensor in one.values())
    script.resume(optimizer, saved)
    assert next(iter(optimizer.state.values()))["step"] == 5


def test_a_batch_is_copied_in_and_one_of_another_size_is_refused(script, make):
    torch.manual_seed(0)
    batches = [torch.randint(50, (2, 2, 16)) for _ in range(2)]
    *_, step, _ = make()
    losses = [step(*batch).item() for batch in batches]
    torch.manual_seed(0)
    model, rate = script.Model(32, 64, 1, 2, 50, 16), torch.tensor(3e-4)
    tokens, targets = batches[0].unbind()
    step, _ = script.make_step(model, tokens := tokens.clone(), targets := targets.clone(), rate)
    again = []
    for batch in batches:
        tokens.copy_(batch[0])
        targets.copy_(batch[1])
        again.append(step().item())
    assert again == losses
    for wrong in (batches[0][:, :1], batches[0][:, :, :5]):
        with pytest.raises(ValueError, match="but the step was made for"):
            step(*wrong)


class Images(torch.nn.Module):
    """What the step needs of a model and no more, with a statistic and random numbers of its own."""

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


def check_statistics_and_copies(script, device):
    """Check that making a step changes no statistic and no random state; return a copy with its own head."""
    torch.manual_seed(0)
    with torch.device(device):
        model, images = Images(), torch.randn(4, 8)
        classes, rate = torch.randint(10, (4,)), torch.tensor(1e-2)
    before = copy.deepcopy(model)
    random = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    step, _ = script.make_step(model, images, classes, rate)
    assert all(map(torch.equal, random, [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name]), name
    losses = [step().item() for _ in range(50)]
    assert losses[-1] < losses[0] and len({*losses[:5]}) == 5, "each step draws a dropout of its own"
    assert model.norm.num_batches_tracked == 50
    with pytest.raises(ValueError, match="but the step was made for"):
        step(images[:1], classes[:1])
    model.eval()
    copied = copy.deepcopy(model)
    expected = model(images)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    torch.testing.assert_close(copied(images), expected)
    assert not model(images).any()
    return copied, images, expected


def test_making_the_step_leaves_statistics_and_copies_have_their_heads(script, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    copied, images, expected = check_statistics_and_copies(script, "cpu")
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(images), expected)


def test_its_model_takes_fewer_tokens_than_it_was_made_for(script):
    model = script.Model(32, 64, 1, 2, 50, 16)
    tokens = torch.randint(50, (2, 16))
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]), rtol=1e-4, atol=1e-5)


def test_the_copied_block_is_short_and_names_every_change():
    lines = block().rstrip().splitlines()
    assert 50 <= len(lines) <= 82 and max(map(len, lines)) <= 110
    for change in LADDER_OPTIMIZATIONS:
        assert sum(line.endswith(f"  # {change}") for line in lines) == 1, change
    assert "stepscope" not in block()
