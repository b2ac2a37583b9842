"""Compare the loss and the gradients of an optimized step with those of the fp32 baseline."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stepscope.optimizations.transforms import TrainedSubject

MAX_SAMPLED = 2**18  # maximum number of elements to compare per gradient

Gradients = Mapping[str, Tensor]


def sampled(gradient: Tensor) -> Tensor:
    """Return at most :data:`MAX_SAMPLED` evenly spaced elements of a gradient, in fp32 or complex64 on the CPU."""
    flat = gradient.detach().flatten()
    stride = max(1, -(-flat.numel() // MAX_SAMPLED))
    return flat[::stride].to(torch.complex64 if flat.is_complex() else torch.float32).cpu()


def gradients_of(subject: TrainedSubject) -> Gradients:
    """Return the sampled gradient of each parameter, keyed by the parameter's name."""
    gradients = {}
    for name, parameter in subject.parameters.items():
        if parameter.grad is not None:
            gradients[name] = sampled(parameter.grad)
    return gradients


def relative_errors(
    subject: TrainedSubject,
    loss: float,
    true_loss: float,
    true_gradients: Gradients,
) -> dict[str, float]:
    """Return ``loss_error`` and ``gradient_error``, relative to fp32 (absolute if the fp32 value is zero).

    ``gradient_error`` is the global norm of the differences between the gradients, divided by the global norm
    of the fp32 gradients.

    Args:
        subject: a subject after its backward pass.
        loss: the subject's loss.
        true_loss, true_gradients: the fp32 loss and gradients, computed from the same weights and batch.
    """
    squared_error = squared_norm = 0.0
    gradients, zero = gradients_of(subject), torch.zeros(1)
    for name, shape in subject.shapes.items():  # a router may choose different experts than in fp32
        true_gradient = true_gradients.get(name, zero)
        difference = gradients.get(name, zero) - true_gradient
        elements_per_sample = shape.numel() / max(1, difference.numel())
        error = difference.abs().square().sum()
        norm = true_gradient.abs().square().sum()
        squared_error += elements_per_sample * error.item()
        squared_norm += elements_per_sample * norm.item()
    return {
        "loss_error": abs(loss - true_loss) / (abs(true_loss) or 1.0),
        "gradient_error": math.sqrt(squared_error / (squared_norm or 1.0)),
    }


def gradient_at(
    subject: TrainedSubject,
    weights: Mapping[str, Tensor],
    text: Tensor,
) -> tuple[float, Gradients]:
    """Set a subject's weights, run both passes, and return the loss and the sampled gradients.

    Args:
        weights: the fp32 weights, keyed by parameter name.
        text: token ids, (B, T + 1); the targets are the next tokens.
    """
    with torch.no_grad():
        for name, weight in subject.weights().items():
            weight.copy_(weights[name])
    subject.restart_optimizer()
    tokens, targets = subject.batch
    tokens.copy_(text[:, :-1])
    targets.copy_(text[:, 1:])
    return subject.gradients().item(), gradients_of(subject)
