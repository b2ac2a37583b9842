"""Attention in float64, and how far an implementation is from it."""
from math import inf, isfinite, nan

import torch
from torch import Tensor

from stepscope.studies.attention.implementations import Inputs

QUANTITIES = ("output", "dq", "dk", "dv")
# Scores that are there at once, 2 GiB in float64: of a longer sequence those of some queries at a time.
SQUARE = 2**28


def reference(inputs: Inputs) -> list[Tensor]:
    """Output and gradients of q, k, v in float64, by textbook softmax, one batch element at a time."""
    batches = zip(*(x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.gradient)))
    rows = [_element(*tensors) for tensors in batches]
    return [torch.stack(column) for column in zip(*rows)]


def _element(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Output, dq, dk and dv of one batch element, (1, T, d) each."""
    sequence = q.shape[-2]
    queries = max(1, SQUARE // sequence)
    outputs, dqs = [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    places = torch.arange(sequence, device=q.device)
    for first in range(0, sequence, queries):
        these = slice(first, first + queries)
        leaves = [x.requires_grad_() for x in (q[:, these].clone(), k.clone(), v.clone())]
        some, keys, values = leaves
        scores = some @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores.masked_fill_(places > places[these, None], -inf)
        output = torch.softmax(scores, dim=-1) @ values
        del scores
        dq, its_dk, its_dv = torch.autograd.grad(output, leaves, gradient[:, these])
        outputs.append(output.detach())
        dqs.append(dq)
        dk += its_dk
        dv += its_dv
    return torch.cat(outputs, dim=1), torch.cat(dqs, dim=1), dk, dv


def errors(output: Tensor, inputs: Inputs, expected: list[Tensor]) -> dict[str, float]:
    """Relative error of the output and of each gradient: Frobenius norm of the difference over that of the
    reference. What is missing or not finite is NaN."""
    found = (output.detach(), inputs.q.grad, inputs.k.grad, inputs.v.grad)
    relative = [nan if a is None else float((a.double() - b).norm() / b.norm())
                for a, b in zip(found, expected, strict=True)]
    return {f"{name}_error": error if isfinite(error) else nan
            for name, error in zip(QUANTITIES, relative, strict=True)}
