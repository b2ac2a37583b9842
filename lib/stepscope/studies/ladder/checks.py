"""Check, on the device of a ladder run, that the optimizer matches AdamW, and that bf16 moments can decrease."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from stepscope.optimizations.adamw import GOLDEN, MIX1, MIX2, random_bits, stochastic_round
from stepscope.optimizations.optimizer import BETAS, EPS, WEIGHT_DECAY, MasterAdamW

# A bf16 matrix and an fp32 vector, neither of which fills the last block of the optimizer's kernel.
SHAPES = {
    "matrix": (130, 70),
    "vector": (130,),
}
RATE = 1e-3
FORMULA_STEPS = 5
DECAY_STEPS = 2000
DECAYING_NUMBERS = 4096
# Tolerance, relative to a weight plus its changes. It is 4 to 8 ulp, the largest error of approximate divisions.
APPROXIMATE = 2.0**-21


def stochastic_bf16(
    x: np.ndarray,
    index: np.ndarray,
    step: int,
) -> np.ndarray:
    """Round fp32 values stochastically to bf16 values; return them as fp32.

    The random bits come from the optimizer's hash, which is computed with NumPy's 32-bit integers.

    Args:
        x: fp32, of any shape.
        index: the index of each element among all elements that the optimizer updates; integers of the same shape.
        step: the step's number, starting from 1.
    """
    seed = np.uint32(step * GOLDEN & 0xFFFFFFFF)
    h = index.astype(np.uint32)
    h ^= seed
    h ^= h >> 16
    h *= np.uint32(MIX1)
    h ^= h >> 13
    h *= np.uint32(MIX2)
    h ^= h >> 16
    random_low_bits = h & 0xFFFF
    bits = x.view(np.uint32) + random_low_bits
    high_bits = bits & np.uint32(0xFFFF0000)
    return high_bits.view(np.float32)


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Round fp32 values to the nearest bf16 values; return them as fp32."""
    return torch.from_numpy(x).bfloat16().float().numpy()


def numpy_adamw(
    weight: np.ndarray,
    gradients: list[np.ndarray],
    first: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run AdamW (Loshchilov & Hutter 2019, algorithm 2) in NumPy, rounding each operation's result to fp32.

    Args:
        weight: the weights before the first step; fp32, of any shape.
        gradients: one gradient per step, fp32 of the same shape.
        first: for bf16 moments, the index of the first weight among all elements that the optimizer updates; None
            for fp32 moments.

    Returns:
        The weights and both moments after the last step.
    """
    f = np.float32
    beta1, beta2 = BETAS
    decay = f(1 - RATE * WEIGHT_DECAY)
    m = np.zeros_like(weight)
    v = np.zeros_like(weight)
    for t, gradient in enumerate(gradients, start=1):
        rate = f(RATE / (1 - beta1**t))
        correction = f(1 / math.sqrt(1 - beta2**t))
        squared = gradient * gradient
        m = m * f(beta1) + gradient * f(1 - beta1)
        v = v * f(beta2) + squared * f(1 - beta2)
        root = np.sqrt(v) * correction
        update = m / (root + f(EPS))
        weight = weight * decay - rate * update
        if first is not None:
            index = first + np.arange(weight.size).reshape(weight.shape)
            m = nearest_bf16(m)
            v = stochastic_bf16(v, index, t)
    return weight, m, v


def make_parameters() -> nn.ParameterDict:
    """Return a matrix and a vector of random numbers that are the same in every call."""
    generator = torch.Generator().manual_seed(0)
    parameters = nn.ParameterDict()
    for name, shape in SHAPES.items():
        parameters[name] = torch.randn(shape, generator=generator)
    return parameters


def run_steps(
    device: str,
    steps: int,
    moments: torch.dtype,
) -> tuple[MasterAdamW, dict[str, list[Tensor]]]:
    """Run the optimizer on random gradients; return the optimizer, and each parameter's list of gradients."""
    model = make_parameters().to(device)
    optimizer = MasterAdamW(model, RATE, moments)
    generator = torch.Generator().manual_seed(1)
    gradients: dict[str, list[Tensor]] = {}
    for name, parameter in optimizer.named.items():
        drawn = [torch.randn(SHAPES[name], generator=generator) for _ in range(steps)]
        gradients[name] = [gradient.to(device, parameter.dtype) for gradient in drawn]
    for step in range(steps):
        for name, parameter in optimizer.named.items():
            parameter.grad = gradients[name][step]
        optimizer.step()
    return optimizer, gradients


def against_formula(device: str, moments: torch.dtype) -> tuple[int, int]:
    """Run the optimizer for some steps, and compare its results with those of :func:`numpy_adamw`.

    The results are the fp32 master weights, the model's copies of them, and both moments. With bf16 moments, the
    optimizer divides approximately, so weights may differ by the error of a division.

    Returns:
        The number of elements that were compared, and the number of elements that differ.
    """
    optimizer, gradients = run_steps(device, FORMULA_STEPS, moments)
    masters = optimizer.masters()
    is_exact = moments == torch.float32
    relative_tolerance = 0 if is_exact else APPROXIMATE
    compared = unequal = 0
    for index, (name, weight) in enumerate(make_parameters().named_parameters()):
        first = None if is_exact else optimizer.offsets[index]
        gradient_arrays = [gradient.float().cpu().numpy() for gradient in gradients[name]]
        initial_weight = weight.detach().numpy()
        arrays = numpy_adamw(initial_weight, gradient_arrays, first)
        tensors = [torch.from_numpy(array) for array in arrays]
        expected_weight, m, v = (tensor.to(device) for tensor in tensors)
        parameter = optimizer.named[name]
        state = optimizer.state[parameter]
        master = masters[name]
        scale = expected_weight.abs() + FORMULA_STEPS * RATE
        error = (master - expected_weight).abs()
        is_off = error > relative_tolerance * scale
        unequal += int(is_off.sum())
        for ours, theirs in (
            (state["exp_avg"], m),
            (state["exp_avg_sq"], v),
            (parameter.detach(), master.to(parameter.dtype)),
        ):
            unequal += int((ours != theirs).sum())
        compared += 4 * master.numel()
    return compared, unequal


def falling_moment() -> dict[str, float]:
    """Let second moments decay from 1, with gradients of standard deviation 0.5; return the final means.

    Returns:
        A dictionary with the mean for each way of storing the moments: ``v_fp32`` without rounding,
        ``v_stochastic`` rounded stochastically to bf16, and ``v_nearest`` rounded to the nearest bf16.
    """
    generator = torch.Generator().manual_seed(2)
    index = torch.arange(DECAYING_NUMBERS)
    beta2 = BETAS[1]
    exact = torch.ones(DECAYING_NUMBERS)
    stochastic = torch.ones(DECAYING_NUMBERS)
    nearest = torch.ones(DECAYING_NUMBERS)
    for step in range(1, DECAY_STEPS + 1):
        gradient = torch.randn(DECAYING_NUMBERS, generator=generator) / 2
        squared = (1 - beta2) * gradient.square()
        bits = random_bits(index, torch.tensor(step))
        exact = exact * beta2 + squared
        stochastic = stochastic_round(stochastic * beta2 + squared, bits).float()
        nearest = (nearest * beta2 + squared).bfloat16().float()
    return {
        "v_fp32": exact.mean().item(),
        "v_stochastic": stochastic.mean().item(),
        "v_nearest": nearest.mean().item(),
    }


def check_optimizer(device: str) -> dict[str, float]:
    """Run all checks; return their results for the record.

    The prefix ``low_`` marks results with bf16 moments.
    """
    compared, unequal = against_formula(device, torch.float32)
    low_compared, low_unequal = against_formula(device, torch.bfloat16)
    results: dict[str, float] = {
        "compared": compared,
        "unequal": unequal,
        "low_compared": low_compared,
        "low_unequal": low_unequal,
    }
    return results | falling_moment()
