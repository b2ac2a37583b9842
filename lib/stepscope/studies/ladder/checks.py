"""Is the optimizer of the rung without casts AdamW? Tried on the device that is measured, in the same run."""

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stepscope.studies.ladder.optimizer import BETAS, EPS, WEIGHT_DECAY, MasterAdamW

SHAPES = {
    "matrix": (130, 70),
    "vector": (130,),
}  # neither fills its last block; a matrix is bf16, a vector fp32
RATE = 1e-3
FORMULA_STEPS, TORCH_STEPS = 5, 200
COLUMNS = ["against", "kernel", "steps", "numbers", "unequal", "off"]


def numpy_adamw(weight: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) in numpy, each operation rounded to fp32 by itself."""
    f, (beta1, beta2) = np.float32, BETAS
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, gradient in enumerate(gradients, start=1):
        rate, correction = f(RATE / (1 - beta1**t)), f(1 / math.sqrt(1 - beta2**t))
        m = m * f(beta1) + gradient * f(1 - beta1)
        v = v * f(beta2) + gradient * gradient * f(1 - beta2)
        weight = weight * f(1 - RATE * WEIGHT_DECAY) - rate * (m / (np.sqrt(v) * correction + f(EPS)))
    return weight


def _made(device: str) -> tuple[MasterAdamW, dict[str, Tensor]]:
    """The optimizer over a small matrix and vector, and their first weights in fp32."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}
    named = {
        name: torch.nn.Parameter(
            torch.empty(0, device=device, dtype=torch.bfloat16 if weight.dim() == 2 else None)
        )
        for name, weight in weights.items()
    }
    made = MasterAdamW(named, {name: weight.shape for name, weight in weights.items()}, RATE)
    for name, master in made.masters().items():
        master.copy_(weights[name])
    made.reset()
    return made, weights


def check_optimizer(device: str) -> pd.DataFrame:
    """Steps on random gradients against numpy's formula, number by number, and against torch's AdamW in fp32.

    Returns columns against (``formula``, ``torch``), kernel (``Triton`` or ``torch``: what ran), steps,
    numbers compared (the bf16 copies among them), ``unequal`` of them, and ``off``, the largest difference of
    master weights over the largest weight.
    """
    rows = []
    for against, steps in (("formula", FORMULA_STEPS), ("torch", TORCH_STEPS)):
        own, weights = _made(device)
        generator = torch.Generator().manual_seed(1)
        drawn = {
            name: [
                torch.randn(SHAPES[name], generator=generator).to(device, parameter.dtype)
                for _ in range(steps)
            ]
            for name, parameter in own.named.items()
        }
        expected = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
        theirs = torch.optim.AdamW(
            expected.values(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False
        )
        for step in range(steps):
            for name, parameter in own.named.items():
                parameter.grad = drawn[name][step]
                expected[name].grad = drawn[name][step].float()
            own.step()
            if against == "torch":
                theirs.step()
        compared, unequal, off = 0, 0, 0.0
        for name, master in own.masters().items():
            there = expected[name].detach()
            if against == "formula":
                gradients = [one.float().cpu().numpy() for one in drawn[name]]
                there = torch.from_numpy(numpy_adamw(weights[name].cpu().numpy(), gradients)).to(device)
            pairs = [(master, there)]
            if own.named[name].dtype != torch.float32:
                pairs.append((own.named[name].detach(), there.bfloat16()))
            compared += sum(mine.numel() for mine, _ in pairs)
            unequal += sum(int((mine != other).sum()) for mine, other in pairs)
            off = max(off, ((master - there).abs().max() / there.abs().max()).item())
        kernel = "Triton" if device == "cuda" else "torch"
        rows.append((against, kernel, steps, compared, unequal, off))
    return pd.DataFrame(rows, columns=COLUMNS)
