"""Compute a lower bound on a training step's time, from its matmuls and the optimizer's memory traffic.

    lower bound  = matmul FLOPs / bf16 matmul rate + bytes x parameters / copy rate

* Matmuls: backward runs two matmuls for each matmul in forward. For attention, only scores on and below the
  diagonal count, because a causal model doesn't need the rest. If the linear layers of the blocks use FP8, the
  matmuls of their forward pass and of their inputs' gradients count at the FP8 rate.
* Memory traffic: AdamW reads each parameter's bf16 gradient (2 bytes), fp32 weight (4) and two moments (8, or 4 in
  bf16). It writes the fp32 weight, the moments and the bf16 weight (2). The sum is 28 bytes, or 20 with bf16
  moments. Without bf16 weights, the sum is also 28: AdamW reads the weight, the gradient and two moments, and
  writes all of these except the gradient. The measured matmul rate already includes the time to read weights and
  activations.

The two times are added, because the optimizer can't start before it has all gradients. (The roofline model of
Williams, Waterman & Patterson 2009 takes the maximum instead.) Both rates are measured in the same process, with
matmuls and copies so large that launches and caches don't matter. These matmuls and copies take only milliseconds
and run at the highest clock, so no step exceeds their burst rates. The sustained rate of a large matmul, once the
GPU is power-limited, is only a reference and not a bound: a step draws less power and runs at a higher clock, so
its matmuls can be faster.
"""

import math

import torch

from stepscope.config import StepConfig
from stepscope.measure.power import PowerMonitor
from stepscope.measure.rates import MATRIX_SIZE, fastest_ms
from stepscope.measure.timing import back_to_back
from stepscope.model.fit import fully_optimized_bytes
from stepscope.model.flops import forward_flops, parameter_count
from stepscope.optimizations import fp8

MOVED_BYTES = {"fp32": 28, "bf16": 20}  # per parameter, by the type of the moments
MAX_MEMORY_SHARE = 0.92  # share of the memory that the memory-filling batch may need by formula
# Duration of each of two runs: the clock settles in the first, and power is read in the second.
SUSTAINED_S = 0.5


def needed_flops(config: StepConfig) -> float:
    """Return the FLOPs of one training step's matmuls, excluding attention's scores above the diagonal."""
    forward = forward_flops(config)
    attention = forward["attention.scores"] + forward["attention.value"]
    above_diagonal = (config.context_length - 1) / (2 * config.context_length)
    needed = sum(forward.values()) - attention * above_diagonal
    return 3 * needed


def fp8_flops(config: StepConfig) -> float:
    """Return the FLOPs of the FP8 matmuls: the FP8 layers' forward passes, and the gradients of their inputs."""
    forward = forward_flops(config)
    return 2 * sum(forward[region] for region in ("attention.qkv", "attention.output", "ffn"))


def fp8_ceiling(device: str) -> dict[str, float]:
    """Measure ``matmul_fp8``, the burst rate of a large FP8 matmul with row-wise scales, in TFLOP/s.

    Returns:
        A dictionary with the rate, or an empty dictionary if the device doesn't support such a matmul.
    """
    if not fp8.has_fp8(device):
        return {}
    size = MATRIX_SIZE[device]
    matrices = torch.randn(2, size, size, device=device)
    (a, a_scale), (b, b_scale) = map(fp8.quantize_rows, matrices)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_scale,
            scale_b=b_scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    flops = 2 * size**3
    return {"matmul_fp8": flops / fastest_ms(device, multiply) / 1e9}


def lower_bound(
    config: StepConfig,
    precision: str,
    moments: str,
    ceilings: dict[str, float],
) -> dict[str, float]:
    """Return a dictionary with ``matmul_ms``, ``memory_traffic_ms`` and their sum, ``lower_bound_ms``.

    Args:
        precision: "fp8" if the linear layers of the blocks use FP8. For any other value, all matmuls count at the
            bf16 rate.
        moments: the type of AdamW's moments, "fp32" or "bf16".
        ceilings: ``matmul_bf16`` and ``matmul_fp8`` in TFLOP/s and ``copy`` in TB/s, as measured in this run.
    """
    in_fp8 = fp8_flops(config) if precision == "fp8" else 0
    matmul_ms = (needed_flops(config) - in_fp8) / ceilings["matmul_bf16"] / 1e9
    if in_fp8:
        matmul_ms += in_fp8 / ceilings["matmul_fp8"] / 1e9
    moved_bytes = MOVED_BYTES[moments] * parameter_count(config)
    traffic_ms = moved_bytes / ceilings["copy"] / 1e9
    return {
        "matmul_ms": matmul_ms,
        "memory_traffic_ms": traffic_ms,
        "lower_bound_ms": matmul_ms + traffic_ms,
    }


def sustained_matmul_rate(device: str) -> dict[str, float]:
    """Repeat a large bf16 matmul for a second; return the rate, clock and power during the second half.

    Returns:
        A dictionary with ``sustained_tflops``, ``sustained_clock_mhz`` and ``sustained_power_w``. On a CPU, whose
        clock and power are not read, it is empty.
    """
    if device != "cuda":
        return {}
    size = MATRIX_SIZE[device]
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind()
    out = torch.empty_like(a)

    def multiply() -> torch.Tensor:
        return torch.mm(a, b, out=out)

    matmul_ms = back_to_back(multiply, device, 5)[-1]
    matmuls = math.ceil(SUSTAINED_S * 1e3 / matmul_ms)
    back_to_back(multiply, device, matmuls)
    with PowerMonitor() as monitor:
        times_ms = back_to_back(multiply, device, matmuls)
    flops = 2 * size**3 * matmuls
    return {
        "sustained_tflops": flops / sum(times_ms) / 1e9,
        "sustained_clock_mhz": monitor.sm_clock_mhz,
        "sustained_power_w": monitor.power_w,
    }


def filling_batch(config: StepConfig, memory_bytes: float) -> int:
    """Return the batch size that fills the memory.

    The result is the largest multiple of four sequences for which the fully optimized step is predicted to need at
    most :data:`MAX_MEMORY_SHARE` of the memory. If even four sequences need more, the result is four.
    """
    max_bytes = MAX_MEMORY_SHARE * memory_bytes
    batch = 4
    while True:
        next_batch = config.step(batch_size=batch + 4, device="cuda")
        if fully_optimized_bytes(next_batch) > max_bytes:
            return batch
        batch += 4
