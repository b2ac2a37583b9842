"""The subject of a measurement: a model, a batch, a loss and an optimizer, which a notebook's steps share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class Subject:
    """A model on its device, with its batch, loss and optimizer.

        subject = Subject(model, (tokens, targets), optimizer=adamw)

    model: the model; :meth:`reset` frees its gradients.
    batch: the tensors that a step reads, for example tokens and targets, each (B, T).
    loss: ``loss(model, *batch)`` returns the mean loss, a 0-dim tensor; None if the steps compute their
        loss themselves.
    optimizer: the optimizer of the model's parameters; None if no step uses one.
    """

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None = None
    optimizer: Any = None

    def reset(self) -> None:
        """Free the gradients. Call this before timing a step, because freeing memory isn't part of the step."""
        self.model.zero_grad(set_to_none=True)

    def forget_moments(self) -> None:
        """Free the optimizer's state, which the next full step will create again."""
        if self.optimizer is not None:
            self.optimizer.state.clear()


# This rate is so small that no fp32 weight of at least 1e-13 changes. It is not 0, because PyTorch's fused AdamW
# divides the product of the rate and the first moment, and a GPU takes a slow path to divide 0. With a rate of 0,
# the kernel takes 8% longer than in training (H200, PyTorch 2.11); with this rate, it takes the same time.
NEGLIGIBLE_RATE = 1e-20


@contextmanager
def negligible_learning_rate(optimizer: Any) -> Iterator[None]:
    """Set the learning rate to :data:`NEGLIGIBLE_RATE` while steps are measured, and restore it afterwards.

    The optimizer does all of its work, but the weights don't change. With the real rate, a model that trains on
    the same batch many times becomes slower: the model's attention becomes sharp, so naive softmax divides
    denormal numbers. If the learning rate is a tensor, the tensor is updated in place, because a kernel or a CUDA
    graph reads it.

    Args:
        optimizer: the optimizer of the steps, or None if no step uses one.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    rates = [float(group["lr"]) for group in groups]
    try:
        for group in groups:
            set_learning_rate(group, NEGLIGIBLE_RATE)
        yield
    finally:
        for group, rate in zip(groups, rates):
            set_learning_rate(group, rate)


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of the optimizer's first parameter group, or None if there is no optimizer."""
    return None if optimizer is None else float(optimizer.param_groups[0]["lr"])
