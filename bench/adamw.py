"""What share of a copy's rate AdamW's step reaches, by the bytes that it must move, on this machine's GPU:

    python -m bench.adamw [layers]    the matrices of so many Transformer layers, of width 1,280

A step moves 28 bytes a parameter, with bf16 moments 20 (optimizer.py has the table). Beside ours stands
PyTorch's fused AdamW, whose weights, gradients and moments are fp32: 28 bytes, too.

**What did not work**, of a copy's rate on an H200 (torch 2.11), where bf16 moments reach 96% and with FP8
weights 84%:

    bf16 moments, blocks of 2,048 numbers for 512                        90%
    bf16 moments, stores that leave the cache first, or stream           95%
    bf16 moments, a program that looks up where its block lies           83%
    FP8, tiles of 64 x 64 | 128 x 64 | 64 x 32 | 32 x 32 for 32 x 64     79% | 66% | 84% | 82%
    FP8, 4 or 16 warps for 8                                             66% or 77%
    FP8, 40 registers a thread for 48, so that six programs fit for five 81%
    FP8, tiles ordered so that a transposed line is written at once      85%
    FP8, a table of where each program's numbers lie                     82%
    FP8, one layout alone: what the transposed one costs                 96%

Of a whole step (2.7B, batch 4 x 512): inductor's ``multi_kernel`` for long reductions gave 0.2%, and
torchao's tensorwise recipe, whose weight gradients are FP8, too, was 1.02 times as fast as ours.
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
    """Measure each optimizer's rate as a fraction of the copy rate; return the fractions by optimizer."""
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
        back_to_back(optimizer.step, device, STEPS)  # warm up: compile the kernel, and let the CPU get ahead
        step_ms = location(back_to_back(optimizer.step, device, STEPS))["median"]
        found[name] = moved * parameters / step_ms / 1e9 / copy
        print(f"  {name:<28}{found[name]:.1%} of a copy's rate", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="?", type=int, default=36)
    if not torch.cuda.is_available():
        parser.exit(message="AdamW's kernel needs a GPU.\n")
    shares(parser.parse_args().layers, "cuda")
