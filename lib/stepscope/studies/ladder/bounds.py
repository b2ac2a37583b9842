"""The least time that the hardware needs for the step: what must be multiplied, plus what must be moved.

    lower bound  = matmul FLOPs / bf16 matmul rate + bytes x parameters / copy rate

* multiplied: forward and both of backward's, attention's only below the diagonal (a causal model needs no
  more); where the blocks' layers are FP8, their forward and their input's gradient at its matmul rate;
* moved: AdamW reads each parameter's bf16 gradient (2 bytes), fp32 weight (4) and two moments (8, in bf16 4),
  and writes the latter and the bf16 weight (2): 28 bytes, with bf16 moments 20. In fp32 it is 28, too:
  weight, gradient and two moments are read, all but the gradient written. Weights and activations that
  matmuls read are within the matmuls' own rate.

Both rates are measured in the same process, on matmuls and copies so large that launches and caches do not
count (the roofline of Williams, Waterman & Patterson 2009, with its two terms added: the optimizer needs all
gradients first). They last milliseconds, at the highest clock: bursts, whose rate no step beats. What one
large matmul keeps up, once its power has reached the cap and the clock has fallen, is a reference and no
bound: a step draws less, at a higher clock, and its own matmuls can beat it.
"""

import math

import torch

from stepscope.config import StepConfig
from stepscope.measure.power import PowerMonitor
from stepscope.measure.rates import MATRIX_SIZE, median_ms
from stepscope.measure.timing import back_to_back
from stepscope.model.flops import forward_flops, parameter_count
from stepscope.optimizations import fp8

MOVED_BYTES = {"fp32": 28, "bf16": 20}  # a parameter, by the moments' type
KEPT_UP_S = 0.5  # twice: first until clocks have settled, then with its power read


def needed_flops(config: StepConfig) -> float:
    """Of one training step's matmuls, the causal half of attention's square only."""
    forward = forward_flops(config)
    pairs = forward["attention.scores"] + forward["attention.value"]
    unneeded = pairs * (config.context_length - 1) / (2 * config.context_length)
    return 3 * (sum(forward.values()) - unneeded)


def fp8_flops(config: StepConfig) -> float:
    """Of these what FP8 layers multiply in 8 bits."""
    forward = forward_flops(config)
    return 2 * sum(forward[region] for region in ("attention.qkv", "attention.output", "ffn"))


def fp8_ceiling(device: str) -> dict[str, float]:
    """``matmul_fp8``: the burst rate of a large FP8 matmul with a scale a row, in TFLOP/s; empty where there
    is none."""
    if not fp8.has_fp8(device):
        return {}
    size = MATRIX_SIZE[device]
    matrices = torch.randn(2, size, size, device=device)
    (a, a_scale), (b, b_scale) = map(fp8.quantize_rows, matrices)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return {"matmul_fp8": 2 * size**3 / median_ms(device, multiply) / 1e9}


def lower_bound(
    config: StepConfig, precision: str, moments: str, ceilings: dict[str, float]
) -> dict[str, float]:
    """``matmul_ms``, ``memory_traffic_ms`` and their sum ``lower_bound_ms``.

    Args:
        precision: "fp8" where the blocks' layers multiply that; any other is bound by bf16's rate.
        moments: their type, "fp32" or "bf16".
        ceilings: ``matmul_bf16`` and ``matmul_fp8`` in TFLOP/s and ``copy`` in TB/s, as measured in this run.
    """
    in_fp8 = fp8_flops(config) if precision == "fp8" else 0
    matmul = (needed_flops(config) - in_fp8) / ceilings["matmul_bf16"] / 1e9
    if in_fp8:
        matmul += in_fp8 / ceilings["matmul_fp8"] / 1e9
    moved = MOVED_BYTES[moments] * parameter_count(config) / ceilings["copy"] / 1e9
    return {"matmul_ms": matmul, "memory_traffic_ms": moved, "lower_bound_ms": matmul + moved}


def sustained_matmul_rate(device: str) -> dict[str, float]:
    """A large bf16 matmul, one after another for a second: ``sustained_tflops``, ``sustained_clock_mhz`` and
    ``sustained_power_w`` of the second half; empty on a CPU, whose clock and power are not read."""
    if device != "cuda":
        return {}
    size = MATRIX_SIZE[device]
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind()
    out = torch.empty_like(a)

    def multiply() -> torch.Tensor:
        return torch.mm(a, b, out=out)

    matmuls = math.ceil(KEPT_UP_S * 1e3 / back_to_back(multiply, device, 5)[-1])
    back_to_back(multiply, device, matmuls)
    with PowerMonitor() as monitor:
        times = back_to_back(multiply, device, matmuls)
    return {
        "sustained_tflops": 2 * size**3 * matmuls / sum(times) / 1e9,
        "sustained_clock_mhz": monitor.sm_clock_mhz,
        "sustained_power_w": monitor.power_w,
    }
