"""Turn a user's model into a subject for the ladder's transforms, and collect facts about its fp32 step."""

import inspect
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stepscope.model.training_step import is_out_of_memory
from stepscope.optimizations.any_model import default_adamw
from stepscope.optimizations.transforms import TrainedSubject
from stepscope.studies.your_model.source import ModelError, Source, build, is_users, raised

# Operators that wait for the GPU, because the CPU needs their result or the result's shape.
SYNCHRONIZING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")

# If each of twelve layers is skipped at random in a tenth of the steps, this many passes detect it 99% of the
# time.
VARYING_PASSES = 3


class UserSubject(TrainedSubject):
    """A subject whose weights and batch come from the user's function, and stay on the device."""

    def load(self, seed: int) -> None:
        torch.set_float32_matmul_precision(self.matmul_precision)
        # By default, PyTorch lets convolutions use TF32, but the fp32 row must use fp32. We don't use the public
        # flag, because it can't be set once a model's code has imported torch.testing._internal.
        torch._C._set_cudnn_allow_tf32(self.matmul_precision != "highest")
        self.optimizer = self.make_optimizer(self.model)
        self.batch = self.make_batch()
        self.step = self.eager_step

    def unload(self) -> None:
        self.optimizer = None
        self.__dict__.pop("step", None)
        self.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def without_randomness(self):
        return without_dropout(self.model)


def make_subject(source: Source, keywords: dict[str, Any], device: str, seed: int) -> UserSubject:
    """Build the user's model as a subject.

    Raises:
        ModelError: If :func:`build` raises it.
    """
    model, batch, loss = build(source, keywords, device, seed)
    compute = partial(given_loss, loss, accepted(model, batch)) if loss else own_loss
    return UserSubject(model.train(), (), compute, make_batch=lambda: (batch,), make_optimizer=default_adamw)


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the loss that a model computes itself: its output, or the output's entry or attribute ``loss``.

    If there is no such entry or attribute, return the output, so that an error can name its type.
    """
    output = model(**batch)
    if isinstance(output, Mapping):
        return output.get("loss", output)
    return getattr(output, "loss", output)


def given_loss(loss: Any, names: list[str], model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Run the model on the named entries of the batch, and return ``loss(output, batch)``.

    The loss gets a copy of the dict, because it may remove entries that the next step needs.
    """
    return loss(model(**{name: batch[name] for name in names}), dict(batch))


def accepted(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """Return the names of the batch's entries that the model's ``forward`` accepts."""
    parameters = inspect.signature(model.forward).parameters
    accepts_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in batch if accepts_all or name in parameters]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout rate of a model to 0 within the context.

    A rate is a float attribute with "drop" in its name, or the attribute ``p`` of a module with "drop" or
    "StochasticDepth" in its type's name.
    """
    rates = []
    for module in model.modules():
        type_name = type(module).__name__.lower()
        is_dropout = "drop" in type_name or "stochasticdepth" in type_name
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
                rates.append((module, name, value))
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)


def _grouped_matmul_flops(a, b, *_, out_shape=None, **options) -> int:
    """Return the FLOPs of a grouped matmul, as in a mixture of experts, from the shapes of its inputs."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _recurrent_flops(x, weights, second_weight, *_, **options) -> int:
    """Return the FLOPs of an LSTM, GRU or RNN from the shapes of its inputs.

    For each token, each weight matrix is multiplied by one vector.

    cuDNN's operator takes the weights of all layers as a list, and oneDNN's operator takes the two matrices of one
    layer.
    """
    shapes = weights if isinstance(weights, list) else [weights, second_weight]
    return 2 * math.prod(x[:-1]) * sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def _recurrent_backward_flops(*inputs, **options) -> int:
    return 2 * _recurrent_flops(*inputs)  # for the gradients of the inputs and of the weights


# Formulas for the FLOPs of operators that torch's counter doesn't know.
FLOPS = {
    getattr(torch.ops.aten, name): formula
    for name, formula in {
        "_grouped_mm": _grouped_matmul_flops,
        "_cudnn_rnn": _recurrent_flops,
        "_cudnn_rnn_backward": _recurrent_backward_flops,
        "mkldnn_rnn_layer": _recurrent_flops,
        "mkldnn_rnn_layer_backward": _recurrent_backward_flops,
    }.items()
    if hasattr(torch.ops.aten, name)  # older PyTorch versions lack some of these operators
}


class NoModules(nullcontext):
    """Replace the FLOP counter's tracker of modules, whose hooks fail in ``autograd.grad``.

    A model with a gradient penalty calls ``autograd.grad``. We only need the FLOPs of the complete model.
    """

    parents = ("Global",)


def examine(subject: UserSubject) -> dict[str, Any]:
    """Run forward and backward once, check the loss and the gradients, and return facts for the record.

    Returns:
        A dict with ``parameters`` (their number), ``flops`` (of forward and backward, as counted by
        ``torch.utils.flop_counter``) and ``synchronizing`` (lines of the user's code that wait for the GPU, such
        as "router.py:41").

    Raises:
        ModelError: If the step raises, the loss isn't a finite scalar, or a gradient is sparse or all are missing.
    """
    device = next(iter(subject.parameters.values())).device.type
    watch = SynchronizationWatch(device)
    counter = FlopCounterMode(display=False, custom_mapping=FLOPS)
    counter.mod_tracker = NoModules()
    try:
        with counter, watch:
            loss = subject.loss(subject.model, *subject.batch)  # type: ignore[misc]
            if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad:
                loss.backward()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise raised("the model", error) from None
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            f"loss: got {got}, but expected a scalar tensor, or an output with a scalar tensor as its loss;"
            " if the model doesn't compute its loss, return (model, batch, loss), where loss(output, batch) does"
        )
    if not loss.isfinite():
        raise ModelError(
            f"loss: got {loss.item()} in fp32, but expected a finite number, because the losses of all"
            " optimizations are compared with it"
        )
    gradients = {name: parameter.grad for name, parameter in subject.parameters.items()}
    if all(gradient is None for gradient in gradients.values()):
        raise ModelError("no parameter gets a gradient from the loss")
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout != torch.strided:
            raise ModelError(
                f"{name}: got a sparse gradient, but AdamW expects a dense one; use sparse=False"
            )
    subject.reset()
    return {
        "parameters": sum(parameter.numel() for parameter in subject.parameters.values()),
        "flops": counter.get_total_flops(),
        "synchronizing": ", ".join(watch.lines),
    }


def varying_line(subject: UserSubject) -> str:
    """Run forward a few more times, and return the first line of the user's code that doesn't repeat its work.

    The line's operators, or the shapes of their results, differ from those in the first of these passes. The
    cause may be a random number that is drawn in Python, as in layer dropping.

    Returns:
        The line, such as "crop.py:12", or "" if all passes call the same operators with the same shapes.
    """
    first = RepetitionWatch(None)
    with first:
        subject.loss(subject.model, *subject.batch)  # type: ignore[misc]
    for _ in range(VARYING_PASSES):
        watch = RepetitionWatch(first.calls)
        with watch:
            subject.loss(subject.model, *subject.batch)  # type: ignore[misc]
        if watch.line:
            return watch.line
    return ""


class SynchronizationWatch(TorchDispatchMode):
    """Collect the lines of the user's code that wait for the GPU.

    If the model is on a CPU, collect the lines that would wait if it were on a GPU.

    Args:
        device: the type of the model's device; reading tensors on other devices doesn't count as waiting.
    """

    supports_higher_order_operators = True  # FlexAttention uses one

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.lines: dict[str, None] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        packet = getattr(operator, "overloadpacket", operator)
        is_on_device = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == self.device
        if is_on_device and getattr(packet, "__name__", "") in SYNCHRONIZING:
            line = current_line()
            if line:
                self.lines[line] = None
        return operator(*args, **(kwargs or {}))


class RepetitionWatch(TorchDispatchMode):
    """Record a forward pass's operators and the shapes of their results, and compare both with another pass's.

    Args:
        expected: the calls of the other pass; None if this is the first pass.
    """

    supports_higher_order_operators = True

    def __init__(self, expected: list[tuple[str, Any]] | None) -> None:
        super().__init__()
        self.expected = expected
        self.calls: list[tuple[str, Any]] = []
        self.line = ""  # the first line of the user's code that differs

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        call = str(operator), shape
        if self.expected is not None and not self.line:
            index = len(self.calls)
            if index >= len(self.expected) or self.expected[index] != call:
                self.line = current_line() or "the model"
        self.calls.append(call)
        return result


def current_line() -> str:
    """Return the innermost running line of the user's code, such as "router.py:41" ("" if there is none)."""
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
