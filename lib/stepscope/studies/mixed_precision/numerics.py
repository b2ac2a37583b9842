"""Number formats: what sums, autocast and a norm do in fp16 and bf16, what becomes of gradients, and whether
training stays the same.

Every experiment returns rows of one long table, :data:`COLUMNS`: ``case`` is the format or the way, ``at``
the place on an experiment's axis (a scale, a step; 0 where it has none), and what was found is a number
(``value``) or a type's name (``dtype``).
"""
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.config import StepConfig
from stepscope.step.text import text_batches
from stepscope.step.training_step import AUTOCAST_DTYPES, Step, build_step

COLUMNS = ["experiment", "case", "quantity", "at", "value", "dtype"]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

TERM, ADDITIONS = 0.01, 1000
# Of the sum, of the term, and whether the term is cast up first. The handout's four, and bf16 beside them.
WAYS = {"fp32 into fp32": (torch.float32, torch.float32, False),
        "fp16 into fp16": (torch.float16, torch.float16, False),
        "fp16 into fp32": (torch.float32, torch.float16, False),
        "fp16 cast to fp32, into fp32": (torch.float32, torch.float16, True),
        "bf16 into bf16": (torch.bfloat16, torch.bfloat16, False)}

SCALES = [10.0**exponent for exponent in range(-6, 6)]  # of a norm's inputs
FEATURES, ROWS = 1024, 64
EPS = 1e-5  # PyTorch's LayerNorm's

SEEDS, STEPS = 3, 200  # of training: what another draw of the weights alone changes; steps of each
LAYERS, CONTEXT, BYTES = 4, 128, 256  # of training, at most: enough to learn, and seconds a precision


def numerics(config: StepConfig, precisions: Sequence[str]) -> pd.DataFrame:
    """Every experiment on the run's device: :data:`COLUMNS`, unique by the first four.

    Args:
        precisions: those that are compared with fp32 where a Transformer runs.
    """
    device = config.device
    rows = [*sums(device), *toy(device), *norm(device), *gradients(config, precisions),
            *training(config, precisions)]
    table = pd.DataFrame(rows, columns=COLUMNS)
    table = table.astype({"at": "float64", "value": "float64"})
    return table.replace({"value": {float("inf"): float("nan")}})  # what overflowed has no number


# Sums

def sums(device: str) -> Iterator[tuple]:
    """0.01 added a thousand times: the result, and its distance from 10 in two parts, computed exactly: what
    was lost in storing 0.01 (a thousand times over), and what in adding."""
    for way, (of_sum, of_term, upcast) in WAYS.items():
        result = Fraction(summed(of_sum, of_term, upcast, device).item())
        stored = ADDITIONS * Fraction(torch.tensor(TERM, dtype=of_term).item())
        for quantity, value in {"result": result, "storing": stored - 10, "adding": result - stored}.items():
            yield "sums", way, quantity, 0, float(value), ""


def summed(of_sum: torch.dtype, of_term: torch.dtype, upcast: bool, device: str) -> Tensor:
    """The handout's loop."""
    total = torch.tensor(0, dtype=of_sum, device=device)
    for _ in range(ADDITIONS):
        term = torch.tensor(TERM, dtype=of_term, device=device)
        total += term.type(torch.float32) if upcast else term
    return total


# Autocast

class ToyModel(nn.Module):
    """The handout's: Linear without bias, ReLU, LayerNorm, Linear without bias."""

    def __init__(self, features: int = 20, classes: int = 5):
        super().__init__()
        self.fc1 = nn.Linear(features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


def toy(device: str) -> Iterator[tuple]:
    """The type of every tensor of the running ToyModel under autocast; layers' outputs are noted by hooks."""
    for autocast, low in AUTOCAST_DTYPES.items():
        model, seen = ToyModel().to(device), dict[str, torch.dtype]()
        for layer, name in ((model.fc1, "first layer's output"), (model.ln, "LayerNorm's output")):
            layer.register_forward_hook(lambda layer, inputs, output, name=name, seen=seen: seen.update(
                {name: output.dtype}))
        x, y = torch.randn(8, 20, device=device), torch.randint(5, (8,), device=device)
        with torch.autocast(device, low):
            logits = model(x)
            loss = functional.cross_entropy(logits, y)
        loss.backward()
        (parameters,) = {p.dtype for p in model.parameters()}
        (grads,) = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        seen = {"parameters": parameters} | seen | {"logits": logits.dtype, "loss": loss.dtype,
                                                    "gradients": grads}
        for tensor, dtype in seen.items():
            yield "toy", autocast, tensor, 0, float("nan"), NAMES[dtype]


# A norm

def layer_norm(x: Tensor) -> dict[str, Tensor]:
    """LayerNorm without weights over the last dimension of (rows, features), every operation in the type of
    ``x`` (Ba, Kiros & Hinton 2016, eq. 4); its variance once more with a running sum in that type, and
    PyTorch's own norm.

    Inside one operation PyTorch may be wider: its mean adds up in fp32.
    """
    mean = x.mean(-1, keepdim=True)
    squares = (x - mean).square()
    variance = squares.mean(-1, keepdim=True)
    root = (variance + EPS).rsqrt()
    return {"mean": mean, "squares": squares, "variance": variance,
            "variance by a running sum": running_sum(squares) / x.shape[-1], "reciprocal root": root,
            "output": (x - mean) * root, "PyTorch's output": functional.layer_norm(x, x.shape[-1:], eps=EPS)}


def running_sum(x: Tensor) -> Tensor:
    """(rows, features) to (rows, 1): one term after another, each partial sum in the type of ``x``."""
    total = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        total = total + term
    return total.unsqueeze(-1)


def norm(device: str) -> Iterator[tuple]:
    """Each part of LayerNorm in fp16 and bf16 against float64, for normal inputs times a scale.

    float64 gets the inputs as the type rounds them, so that an error is the computation's and not the
    input's. ``norm error``: median relative error, where a value that is inf or NaN counts as 1. ``norm
    lost``: the share of values that are inf or NaN, or 0 where they should not be. Scales at which inputs
    overflow have no rows.
    """
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for low in AUTOCAST_DTYPES.values():
        for scale in SCALES:
            given = (x * scale).to(low)
            if not given.isfinite().all():
                continue
            truth = layer_norm(given.double())
            for part, value in layer_norm(given.to(device)).items():
                error, lost = _off(value.double().cpu(), truth[part])
                yield "norm error", NAMES[low], part, scale, error, ""
                yield "norm lost", NAMES[low], part, scale, lost, ""


def _off(value: Tensor, true: Tensor) -> tuple[float, float]:
    errors = ((value - true) / true).abs().where(value.isfinite(), 1.0)
    lost = ~value.isfinite() | ((value == 0) & (true != 0))
    return errors.median().item(), lost.double().mean().item()


# Gradients

def gradients(config: StepConfig, precisions: Sequence[str]) -> Iterator[tuple]:
    """The first step's gradients of the run's model in each precision on the same weights and batch, fp16's
    also without loss scaling.

    ``zero`` is the share of the elements that are not 0 in fp32 and are 0 here: underflow. ``norm off`` and
    ``loss off`` are relative distances from fp32's.
    """
    exact = build_step(config, "forward_backward", "fp32")
    true_loss, truth = _backward(exact)
    true_norm, nonzero = _norm(truth), sum(int(t.count_nonzero()) for t in truth)
    cases = {}
    for low in precisions:
        step = exact.of(precision=low)
        if step.scaler.is_enabled():
            cases[f"{low}, unscaled"] = replace(step, scaler=torch.amp.GradScaler(step.device, enabled=False))
        cases[f"{low}, scaled" if step.scaler.is_enabled() else low] = step
    for case, step in cases.items():
        loss, found = _backward(step)
        zero = sum(int(((g == 0) & (t != 0)).sum()) for g, t in zip(found, truth, strict=True))
        norm_off = _norm(found) / step.scaler.get_scale() / true_norm - 1
        values = {"zero": zero / nonzero, "norm off": abs(norm_off), "loss off": abs(loss / true_loss - 1)}
        for quantity, value in values.items():
            yield "gradients", case, quantity, 0, value, ""


def _backward(step: Step) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one forward and backward; the gradients with the scaler's scale."""
    loss = step()
    assert loss is not None  # by its mode
    found = [p.grad for p in step.model.parameters() if p.grad is not None]
    step.clear_gradients()
    return loss.item(), found


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.norm().double() for t in tensors]).norm())


# Training

def training(config: StepConfig, precisions: Sequence[str]) -> Iterator[tuple]:
    """The loss over :data:`STEPS` steps of the run's model with at most :data:`LAYERS` layers on the same
    text: fp32 from three seeds, the others from the first."""
    context = min(config.context_length, CONTEXT)
    batches = text_batches(STEPS, config.batch_size, context).to(config.device)
    for precision, seed in [*(("fp32", seed) for seed in range(SEEDS)), *((name, 0) for name in precisions)]:
        step = build_step(config.step(mode="step", precision=precision, seed=config.seed + seed,
                                      num_layers=min(config.num_layers, LAYERS), context_length=context,
                                      vocab_size=BYTES))
        case = f"fp32, seed {seed}" if precision == "fp32" else precision
        losses = []
        for batch in batches:
            step.tokens.copy_(batch[:, :-1])
            step.targets.copy_(batch[:, 1:])
            step.clear_gradients()
            losses.append(step())
        for at, loss in enumerate(torch.stack(losses).tolist()):
            yield "training", case, "loss", at, loss, ""
