"""Measure the memory throughput of AdamW's step on this GPU, as a fraction of a memory copy's throughput.

    python -m bench.adamw [layers]    the weights of this many Transformer layers of width 1,280

The throughput counts only the bytes that a step must move: 28 bytes per parameter, or 20 with bf16 moments
(optimizer.py has the table). For comparison, we also measure PyTorch's fused AdamW. It also moves 28 bytes,
because its weights, gradients and moments are fp32.

**Experiments that didn't help**, with the fraction of a copy's throughput that each reached on an H200
(torch 2.11). The kernels that we kept reach 96% with bf16 moments, and 84% with bf16 moments and FP8 weights.

    bf16 moments, blocks of 2,048 elements instead of 512                  90%
    bf16 moments, evict-first or streaming stores                          95%
    bf16 moments, each program looks up the position of its block          83%
    FP8, tiles of 64 x 64 | 128 x 64 | 64 x 32 | 32 x 32, not 32 x 64      79% | 66% | 84% | 82%
    FP8, 4 | 16 warps instead of 8                                         66% | 77%
    FP8, 40 registers per thread, not 48, to fit six programs, not five    81%
    FP8, tiles ordered so that each transposed line is written at once     85%
    FP8, a lookup table of each program's elements                         82%
    FP8, without the transposed layout, to measure what it costs           96%

In a full step (2.7B, batch 4 x 512), Inductor's ``multi_kernel`` for long reductions gained 0.2%, and torchao's
tensorwise recipe, which also computes weight gradients in FP8, was 1.02 times as fast as our FP8 step.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from stepscope.measure import back_to_back
from stepscope.measure.rates import ceilings
from stepscope.optimizations import MasterAdamW, fp8
from stepscope.stats import location

WIDTH, WIDER, STEPS = 1280, 5120, 20


def matrices(layers: int, device: str) -> nn.Sequential:
    """Build the linear layers of ``layers`` Transformer blocks."""
    sides = [*[(WIDTH, WIDTH)] * 4, *[(WIDTH, WIDER)] * 2, (WIDER, WIDTH)] * layers
    return nn.Sequential(*(nn.Linear(*pair, bias=False, device=device) for pair in sides))


def shares(layers: int, device: str) -> dict[str, float]:
    """Print and return each optimizer's throughput as a fraction of a copy's throughput, keyed by optimizer."""
    copy, found = ceilings(device, [])["copy"], {}
    kinds: dict[str, tuple[int, bool, Callable[..., torch.optim.Optimizer]]] = {
        "PyTorch's fused AdamW": (28, False, lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
        "fp32 moments": (28, False, MasterAdamW),
        "bf16 moments": (20, False, lambda model: MasterAdamW(model, moments=torch.bfloat16)),
        "bf16 moments, FP8 weights": (20, True, lambda model: MasterAdamW(model, moments=torch.bfloat16)),
    }
    for name, (moved, eight_bits, make) in kinds.items():
        model = matrices(layers, device)
        if eight_bits:
            fp8.use_fp8(model)
        optimizer = make(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # warm up: compile the kernel, and let the CPU run ahead of the GPU
        back_to_back(optimizer.step, device, STEPS)
        step_ms = location(back_to_back(optimizer.step, device, STEPS))["median"]
        found[name] = moved * parameters / step_ms / 1e9 / copy
        print(f"  {name:<28}{found[name]:.1%} of the copy rate", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="?", type=int, default=36)
    if not torch.cuda.is_available():
        parser.exit(message="AdamW's kernel needs a GPU.\n")
    shares(parser.parse_args().layers, "cuda")
