"""Is our optimizer AdamW, and do bf16 moments move? Tried on the device that is measured, in the same run."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from stepscope.optimizations.adamw import GOLDEN, MIX1, MIX2, random_bits, stochastic_round
from stepscope.optimizations.optimizer import BETAS, EPS, WEIGHT_DECAY, MasterAdamW

SHAPES = {
    "matrix": (130, 70),
    "vector": (130,),
}  # neither fills its last block; a matrix is bf16, a vector fp32
RATE = 1e-3
FORMULA_STEPS = 5
FALLING_STEPS, FALLING = 2000, 4096  # steps, numbers
APPROXIMATE = 2.0**-21  # of a weight and all its changes: 4 to 8 ulp, the most that approximate divisions do


def stochastic_bf16(x: np.ndarray, index: np.ndarray, step: int) -> np.ndarray:
    """fp32 rounded to bf16 stochastically, as fp32: the optimizer's hash in 32 bits of numpy.

    Args:
        x: fp32, of any shape.
        index: of each number among all the optimizer's; integers of the same shape.
        step: the step's number, from 1 on.
    """
    h = index.astype(np.uint32) ^ np.uint32(step * GOLDEN & 0xFFFFFFFF)
    h = (h ^ (h >> 16)) * np.uint32(MIX1)
    h = (h ^ (h >> 13)) * np.uint32(MIX2)
    bits = x.view(np.uint32) + ((h ^ (h >> 16)) & 0xFFFF)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def numpy_adamw(
    weight: np.ndarray, gradients: list[np.ndarray], first: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) in numpy, each operation rounded to fp32 by itself: the
    last weights and both moments.

    Args:
        weight: fp32, of any shape; the first step's.
        gradients: of each step, fp32 of the same shape.
        first: with bf16 moments: the index of the first number among all the optimizer's.
    """
    f, (beta1, beta2) = np.float32, BETAS
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, gradient in enumerate(gradients, start=1):
        rate, correction = f(RATE / (1 - beta1**t)), f(1 / math.sqrt(1 - beta2**t))
        m = m * f(beta1) + gradient * f(1 - beta1)
        v = v * f(beta2) + gradient * gradient * f(1 - beta2)
        weight = weight * f(1 - RATE * WEIGHT_DECAY) - rate * (m / (np.sqrt(v) * correction + f(EPS)))
        if first is not None:
            index = first + np.arange(weight.size).reshape(weight.shape)
            m, v = torch.from_numpy(m).bfloat16().float().numpy(), stochastic_bf16(v, index, t)
    return weight, m, v


def tried() -> nn.ParameterDict:
    """A matrix and a vector, always the same."""
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})


def stepped(device: str, steps: int, moments: torch.dtype) -> tuple[MasterAdamW, dict[str, list[Tensor]]]:
    """The optimizer after steps on random gradients, and these."""
    model = tried().to(device)
    own = MasterAdamW(model, RATE, moments)
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: [
            torch.randn(SHAPES[name], generator=generator).to(device, parameter.dtype) for _ in range(steps)
        ]
        for name, parameter in own.named.items()
    }
    for step in range(steps):
        for name, parameter in own.named.items():
            parameter.grad = drawn[name][step]
        own.step()
    return own, drawn


def against_formula(device: str, moments: torch.dtype) -> tuple[int, int]:
    """How many numbers were compared with numpy's after some steps, fp32 weights, their copies and moments;
    how many differ. With bf16 moments, whose divisions are approximate, a weight differs where it is further
    off than that explains."""
    own, drawn = stepped(device, FORMULA_STEPS, moments)
    exact, compared, unequal = moments == torch.float32, 0, 0
    for index, (name, weight) in enumerate(tried().named_parameters()):
        gradients = [gradient.float().cpu().numpy() for gradient in drawn[name]]
        found = numpy_adamw(weight.detach().numpy(), gradients, None if exact else own.offsets[index])
        there, m, v = (torch.from_numpy(numbers).to(device) for numbers in found)
        parameter, master = own.named[name], own.masters()[name]
        tolerance = (0 if exact else APPROXIMATE) * (there.abs() + FORMULA_STEPS * RATE)
        pairs = [
            (own.state[parameter]["exp_avg"], m),
            (own.state[parameter]["exp_avg_sq"], v),
            (parameter.detach(), master.to(parameter.dtype)),
        ]
        unequal += int(((master - there).abs() > tolerance).sum())
        unequal += sum(int((mine != other).sum()) for mine, other in pairs)
        compared += 4 * master.numel()
    return compared, unequal


def falling_moment() -> dict[str, float]:
    """A second moment of 1 after gradients of half the size, in fp32, in bf16 rounded stochastically and in
    bf16 rounded to nearest: its mean, ``v_fp32``, ``v_stochastic`` and ``v_nearest``."""
    generator = torch.Generator().manual_seed(2)
    exact, chance, nearest = (torch.ones(FALLING) for _ in range(3))
    for step in range(1, FALLING_STEPS + 1):
        squared = (1 - BETAS[1]) * (torch.randn(FALLING, generator=generator) / 2).square()
        bits = random_bits(torch.arange(FALLING), torch.tensor(step))
        exact = exact * BETAS[1] + squared
        chance = stochastic_round(chance * BETAS[1] + squared, bits).float()
        nearest = (nearest * BETAS[1] + squared).bfloat16().float()
    return {
        "v_fp32": exact.mean().item(),
        "v_stochastic": chance.mean().item(),
        "v_nearest": nearest.mean().item(),
    }


def check_optimizer(device: str) -> dict[str, float]:
    """All of the above: results of a run."""
    compared, unequal = against_formula(device, torch.float32)
    low_compared, low_unequal = against_formula(device, torch.bfloat16)
    return {
        "compared": compared,
        "unequal": unequal,
        "low_compared": low_compared,
        "low_unequal": low_unequal,
    } | falling_moment()
