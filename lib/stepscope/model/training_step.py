"""One training step, plain: forward, loss, backward and torch's AdamW.

The process that nsys profiles, the launch rate and explore.ipynb run this one; other notebooks have the step in a
cell. The ladder's, of which each optimization changes a part, is
:class:`stepscope.optimizations.transforms.TrainedSubject`. Nothing here is timed.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.config import PHASES, StepConfig
from stepscope.model.transformer import TransformerLM

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Step:
    """A model on its device with one batch, and what one step of a mode and precision does with them."""

    config: StepConfig
    model: TransformerLM
    optimizer: Any  # torch.optim.AdamW; None where it was built for a mode that does not use one
    scaler: torch.amp.GradScaler
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    mode: str = "step"
    precision: str = "fp32"

    @property
    def device(self) -> str:
        return self.config.device

    def of(self, mode: str | None = None, precision: str | None = None) -> "Step":
        """The same model, optimizer and batch in another mode or precision."""
        precision = precision or self.precision
        return dataclasses.replace(
            self, mode=mode or self.mode, precision=precision, scaler=grad_scaler(precision, self.device)
        )

    def clear_gradients(self) -> None:
        """Not part of the step, and called before its clocks start: freeing is the allocator's work."""
        self.model.zero_grad(set_to_none=True)

    def __call__(
        self, phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext()
    ) -> Tensor | None:
        """Run one step; each phase inside ``phase(name)``. Work is enqueued only: the caller synchronises.
        Returns the loss, None of a forward alone."""
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        with torch.set_grad_enabled(self.mode != "forward"):  # forward alone is inference
            with phase("forward"), self.autocast():
                logits = self.model(self.tokens)
            if self.mode == "forward":
                return None
            with phase("loss"), self.autocast():
                loss = self.model.loss(logits, self.targets)
            with phase("backward"):
                self.scaler.scale(loss).backward()
            if self.mode == "step":
                with phase("optimizer"):
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
            return loss.detach()

    def autocast(self) -> AbstractContextManager:
        return autocast(self.precision, self.device)


def autocast(precision: str, device: str) -> AbstractContextManager:
    """In bf16 and fp16 torch's autocast, which casts what matmuls read; else nothing."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device, dtype=dtype) if dtype else nullcontext()


def grad_scaler(precision: str, device: str) -> torch.amp.GradScaler:
    """Scales the loss in fp16, whose gradients would underflow; else it does nothing."""
    return torch.amp.GradScaler(device, enabled=precision == "fp16")


def prepare(device: str) -> None:
    """What takes seconds once in a process and needs no lock: the GPU's context, and what AdamW imports."""
    from torch import _dynamo  # noqa: F401  not above: who builds no optimizer need not wait for it

    torch.zeros(1, device=device)


def build_step(config: StepConfig, mode: str | None = None) -> Step:
    """One configuration's step, in its mode ("step" where a run has several) if no other is given: weights,
    batch and targets drawn from its seed, on its device. A GPU's peaks of memory count from here on.

    Raises:
        torch.OutOfMemoryError: the weights alone do not fit.
    """
    if config.device == "cuda":
        torch.cuda.empty_cache()  # what is kept for reuse would count as reserved
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(config.seed)
    mode = mode or (config.mode if config.mode in PHASES else "step")
    with out_of_memory_names("building the model"):
        with torch.device(config.device):
            model = TransformerLM(config)
            tokens, targets = torch.randint(
                config.vocab_size, (2, config.batch_size, config.context_length)
            ).unbind()
        optimizer = None  # making one imports torch._dynamo, seconds that the other modes need not spend
        if mode == "step":
            optimizer = torch.optim.AdamW(
                model.parameters(), fused=config.optimizer == "fused", foreach=config.optimizer == "foreach"
            )
    compile_parts(model, config.compile)
    scaler = grad_scaler(config.precision, config.device)
    return Step(config, model, optimizer, scaler, tokens, targets, mode, config.precision)


def show_compiled_loops() -> None:
    """Let torch.profiler see the loops that torch.compile makes on a CPU. Call it before anything is compiled."""
    from torch._inductor import config as inductor  # imported lazily: it loads the compiler

    inductor.cpp.enable_kernel_profile = True


def compile_parts(model: TransformerLM, parts: str) -> None:
    """Have torch.compile take the model in place: each of its ``blocks`` (their code is compiled once for
    all), the head and the loss; or the whole ``model`` as one, and the loss. Nothing is compiled before it is
    called.
    """
    if parts == "none":
        return
    show_compiled_loops()
    if parts == "blocks":
        for block in model.blocks:
            block.compile(dynamic=False)
        model.read_out = torch.compile(model.read_out, dynamic=False)  # type: ignore[method-assign]
    else:
        model.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)


def release(device: str, after_error: bool = False) -> None:
    """Give freed memory back to the driver, so that one measurement's blocks do not shape the next one's.

    After an error tensors may hang in cycles, which only the collector frees; it takes a third of a second,
    so not otherwise.
    """
    if after_error:
        gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def out_of_memory_names(doing: str) -> Iterator[None]:
    """Say what was being done when memory ran out, in the error itself; the CPU allocator's error becomes the
    GPU's type.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"while {doing}: {error}") from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, a GPU's or a CPU's."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)
