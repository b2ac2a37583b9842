"""Define a training step that optimizations change one at a time: the subject, and how transforms change it.

A transform is a function that takes a :class:`TrainedSubject`. It changes the subject, or returns the reason
why it doesn't apply:

    def bf16(subject):
        subject.autocast, subject.precision = torch.bfloat16, "bf16"

    def blocks(subject):
        if not hasattr(subject.model, "blocks"):
            return "the model has no list of blocks"
        for block in subject.model.blocks:
            block.compile(dynamic=False)
        subject.compiles = True

The weights, the optimizer and the batch are on the device only between :meth:`TrainedSubject.load` and
:meth:`TrainedSubject.unload`, because those of all optimizations together may not fit into a GPU's memory.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stepscope import StepscopeError
from stepscope.measure.subject import Subject
from stepscope.optimizations.optimizer import MasterAdamW

Step = Callable[[], Tensor]


class Unsupported(StepscopeError, RuntimeError):
    """Raised when an optimization needs something that this device, environment or model doesn't have."""


def launch_eagerly(subject: "TrainedSubject") -> Step:
    """Return the eager step, whose kernels Python launches one by one."""
    return subject.eager_step


@dataclass
class TrainedSubject(Subject):
    """A subject with all attributes that an optimization of its training step may change.

    make_batch: draws a batch on the device.
    make_optimizer: creates the optimizer of the loaded model.
    launch: returns the step to measure, after the model has been called once. If the subject has no ``loss``,
        ``launch`` also creates its optimizer.
    autocast: the dtype of torch's autocast around forward and loss, or None.
    matmul_precision: the precision of fp32 matmuls, an argument of ``torch.set_float32_matmul_precision``.
    precision, moments: the number formats of matmuls and of AdamW's moments, which determine FLOP rates and lower
        bounds.
    compiles: whether the first call of the step compiles.
    varies: whether operators or shapes change between steps.
    """

    make_batch: Callable[[], tuple[Tensor, ...]] = field(kw_only=True)
    make_optimizer: Callable[[nn.Module], Any] = field(kw_only=True)
    launch: Callable[["TrainedSubject"], Step] = field(default=launch_eagerly, kw_only=True)
    autocast: torch.dtype | None = field(default=None, kw_only=True)
    matmul_precision: str = field(default="highest", kw_only=True)
    precision: str = field(default="fp32", kw_only=True)
    moments: str = field(default="fp32", kw_only=True)
    compiles: bool = field(default=False, kw_only=True)
    varies: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.find_parameters()

    def find_parameters(self) -> None:
        """Update ``parameters`` and ``shapes``, because a transform may have replaced some parameters."""
        self.parameters = dict(self.model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}

    def share_program(self, other: "TrainedSubject") -> None:
        """Use the model and the loss of an equivalent subject, so that both subjects share compiled code."""
        self.model = other.model
        self.loss = other.loss
        self.parameters = other.parameters

    @property
    def device(self) -> str:
        first = next(iter(self.parameters.values()))
        return first.device.type

    @torch.no_grad()
    def load(self, seed: int) -> None:
        """Create the weights (drawn from the seed), the optimizer and the batch on the device.

        Raises:
            torch.OutOfMemoryError: If the device's memory is too small for them.
        """
        torch.set_float32_matmul_precision(self.matmul_precision)
        for name, parameter in self.parameters.items():
            shape = self.shapes[name]
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        self.optimizer = self.make_optimizer(self.model)
        self.batch = self.make_batch()
        self.step: Step = self.eager_step
        self.draw_weights(seed)

    def unload(self) -> None:
        """Free the weights, the gradients, the optimizer and the batch.

        Compiled code stays valid, because it reads the shapes when it runs.
        """
        self.optimizer = None
        self.batch = ()
        self.__dict__.pop("step", None)
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def weights(self) -> dict[str, Tensor]:
        """Return the writable fp32 weights: the optimizer's masters or, if there are none, the parameters."""
        if isinstance(self.optimizer, MasterAdamW):
            return self.optimizer.masters()
        return self.parameters

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Draw the weights from a seed, so that they are the same for every optimization; reset the optimizer."""
        weights = self.weights()
        generator = torch.Generator(self.device).manual_seed(seed)
        for name in sorted(weights):
            weight = weights[name]
            if weight.dim() == 2:
                drawn = torch.empty_like(weight).normal_(std=0.02, generator=generator)
                weight.copy_(drawn)
            else:
                weight.fill_(1)
        self.restart_optimizer()

    @torch.no_grad()
    def restart_optimizer(self) -> None:
        """Reset the optimizer's state, and keep the current :meth:`weights`."""
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.reset()
            return
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def reset(self) -> None:
        """Free the gradients, without the CPU time that ``model.zero_grad()`` takes to visit every module."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def autocasting(self) -> AbstractContextManager:
        if self.autocast:
            return torch.autocast(self.device, dtype=self.autocast)
        return nullcontext()

    def without_randomness(self) -> AbstractContextManager:
        """Return a context in which steps draw no random numbers, for comparisons.

        The context does nothing here, because this model has no dropout.
        """
        return nullcontext()

    def gradients(self) -> Tensor:
        """Run forward, loss and backward; return the loss as a 0-dim tensor."""
        assert self.loss is not None
        self.reset()
        with self.autocasting():
            loss = self.loss(self.model, *self.batch)
        loss.backward()  # outside autocast, because backward uses the dtypes that forward chose
        return loss.detach()

    def eager_step(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        return loss


Transform = Callable[[TrainedSubject], str | None]


def keeps_program(transform: Transform) -> Transform:
    """Mark a transform that changes the optimizer or the launch, but neither the model nor its loss.

    Steps that differ only in such transforms share their compiled code.
    """
    setattr(transform, "keeps_program", True)  # noqa: B010
    return transform


def apply(transforms: Sequence[Transform], subject: TrainedSubject) -> dict[str, str]:
    """Apply transforms in order; return the reasons why some don't apply, keyed by transform name."""
    reasons = {}
    for transform in transforms:
        reason = transform(subject)
        if reason:
            reasons[transform.__name__] = reason
    return reasons
