"""Number formats: what the notebook's experiments on them need beside their cells. What becomes of gradients,
and whether training stays the same.

Every experiment gives rows of one long table, :data:`COLUMNS`: ``case`` is the format or the way, ``at`` the
place on an experiment's axis (a scale, a step; 0 where it has none), and what was found is a number
(``value``) or a type's name (``dtype``). Of ``norm error`` it is the median relative error, where a value
that is inf or NaN counts as 1; of ``norm lost`` the share of values that are inf or NaN, or wrongly 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from stepscope.config import StepConfig
from stepscope.model.text import text_batches
from stepscope.model.training_step import Step, build_step

COLUMNS = ["experiment", "case", "quantity", "at", "value", "dtype"]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

FEATURES = 1024  # of the norm's inputs
SEEDS, STEPS = 3, 200  # of training: what another draw of the weights alone changes; steps of each
LAYERS, CONTEXT, BYTES = 4, 128, 256  # of training, at most: enough to learn, and seconds a precision


def table(rows: Sequence[tuple]) -> pd.DataFrame:
    """Experiments' rows as the record's table; what overflowed has no number."""
    found = pd.DataFrame(rows, columns=COLUMNS).astype({"at": "float64", "value": "float64"})
    return found.replace({"value": {float("inf"): float("nan")}})


# A norm


def running_sum(x: Tensor) -> Tensor:
    """(rows, features) to (rows, 1): one term after another, each partial sum in the type of ``x``."""
    total = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        total = total + term
    return total.unsqueeze(-1)


def error_and_lost(value: Tensor, true: Tensor) -> tuple[float, float]:
    """The median relative error of values, and the share of them that is lost."""
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
        norm_error = _norm(found) / step.scaler.get_scale() / true_norm - 1
        values = {"zero": zero / nonzero, "norm off": abs(norm_error), "loss off": abs(loss / true_loss - 1)}
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
        step = build_step(
            config.step(
                mode="step",
                precision=precision,
                seed=config.seed + seed,
                num_layers=min(config.num_layers, LAYERS),
                context_length=context,
                vocab_size=BYTES,
            )
        )
        case = f"fp32, seed {seed}" if precision == "fp32" else precision
        losses = []
        for batch in batches:
            step.tokens.copy_(batch[:, :-1])
            step.targets.copy_(batch[:, 1:])
            step.clear_gradients()
            losses.append(step())
        for at, loss in enumerate(torch.stack(losses).tolist()):
            yield "training", case, "loss", at, loss, ""
