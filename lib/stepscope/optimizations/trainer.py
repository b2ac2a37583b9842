"""The same model and step with more and more optimizations, each built from the set of them.

A set's model and compiled code (:class:`Program`) are made once. Its weights, optimizer and batch are there
only while it is measured (:class:`Trainer`), since a GPU need not hold them for all at once.

Shapes in comments: B batch, T context length, C d_model, V vocabulary.
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from timeit import default_timer
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope import StepscopeError
from stepscope.config import StepConfig
from stepscope.measure.clocks import synchronizer
from stepscope.measure.compiler import allow_recompiling
from stepscope.measure.graph import graph_of
from stepscope.model.transformer import TransformerLM
from stepscope.optimizations import fp8
from stepscope.optimizations.cross_entropy import chunked_cross_entropy
from stepscope.optimizations.optimizer import MasterAdamW

RATE = 3e-4  # AdamW's learning rate
# Of these a program is made; the others are the trainer's.
OF_MODEL = {"tf32", "bf16", "sdpa", "blocks", "bf16_weights", "chunked", "fp8"}
BASELINES = ("hugging_face", "hugging_face_graphs")  # another library's model in place of ours
COMPILED = {"blocks", *BASELINES}
WARMUPS = 3  # before a capture: kernels are loaded and chosen, and states made
RECOMPILES = 256  # for how many shapes one function may be compiled


class Unsupported(StepscopeError, RuntimeError):
    """This device or environment lacks what an optimization needs."""


def lacking(device: str) -> dict[str, str]:
    """The optimizations that a device lacks, with the reason."""
    found = {}
    if device == "cpu":
        found = {"tf32": "a CPU has no TF32", "cuda_graph": "a CPU has no CUDA graphs"}
        found |= {"hugging_face_graphs": "a CPU has no CUDA graphs"}
    if not fp8.has_fp8(device):
        found["fp8"] = "FP8 matmuls with row-wise scales need a GPU of compute capability 9.0"
    return found


@dataclass
class Program:
    """A model without its weights, its loss, and what compiling took."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    shapes: dict[str, torch.Size]
    compiled: bool
    compile_s: float | None = None


def empty_out(model: nn.Module) -> dict[str, torch.Size]:
    """Free the model's weights and gradients; their shapes. Compiled code does not mind: it asks for shapes
    when it runs."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad, parameter.data = None, torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return shapes


def build_program(config: StepConfig, optimizations: frozenset[str]) -> Program:
    """The model with those of the optimizations that are the model's."""
    with torch.device(config.device):
        model = TransformerLM(config.step(attention="sdpa" if "sdpa" in optimizations else "naive"))
    if "fp8" in optimizations:
        fp8.use_fp8(model.blocks)
    if "bf16_weights" in optimizations:  # and RoPE's tables, which each block would cast
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.bfloat16()
        model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    low = torch.bfloat16 if "bf16" in optimizations else torch.float32
    autocast = "bf16" in optimizations and "bf16_weights" not in optimizations

    def head_loss(x: Tensor, targets: Tensor) -> Tensor:  # (B, T, C), (B, T) -> ()
        if "chunked" in optimizations:
            return chunked_cross_entropy(model.final_norm(x), model.head.weight, targets, low)
        return functional.cross_entropy(model.read_out(x).flatten(0, 1).float(), targets.flatten())

    if "blocks" in optimizations:
        model.embedding.compile(dynamic=False)
        for block in model.blocks:
            block.compile(dynamic=False)
        head_loss = torch.compile(head_loss, dynamic=False)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:  # (B, T) each -> mean over tokens, ()
        with torch.autocast(config.device, dtype=torch.bfloat16, enabled=autocast):
            x = model.embed(tokens)
            for block in model.blocks:
                x = block(x, model.cos, model.sin, model.future)
            return head_loss(x, targets)

    return Program(model, loss, empty_out(model), "blocks" in optimizations)


def hugging_face_program(config: StepConfig, name: str) -> Program:
    """Hugging Face's Llama of the same shape, compiled whole, under bf16 autocast; ``hugging_face_graphs``
    with mode="reduce-overhead", which makes CUDA graphs of forward and backward.

    Raises:
        Unsupported: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise Unsupported("transformers is not installed") from None
    shape = LlamaConfig(hidden_size=config.d_model, intermediate_size=config.d_ff,
                        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
                        vocab_size=config.vocab_size, max_position_embeddings=config.context_length,
                        tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
                        bos_token_id=None, eos_token_id=None)
    with torch.device(config.device):
        model = LlamaForCausalLM(shape).train()
    fast = torch.compile(model, mode="reduce-overhead" if name == "hugging_face_graphs" else None)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:  # (B, T) each -> mean over tokens, ()
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(config.device, dtype=torch.bfloat16):
            return fast(input_ids=tokens, labels=targets).loss

    return Program(model, loss, empty_out(model), True)


class Trainer:
    """One set of optimizations while it is measured: weights, optimizer and batch, ready to step.

        trainer = Trainer(config, {"bf16", "sdpa", "fused"})
        loss = trainer.step()

    Args:
        optimizations: what differs from the plain fp32 step; those that the device lacks are left out.
        programs: made so far, by what tells them apart; this one's is added where it is missing.
        batch: if not the configuration's.
        required: the one of them without which there is nothing to measure.

    Raises:
        Unsupported: the device or the environment lacks what ``required`` needs.
        torch.OutOfMemoryError: it does not fit.
    """

    def __init__(self, config: StepConfig, optimizations: Iterable[str],
                 programs: dict[Any, Program] | None = None, batch: int | None = None, required: str = ""):
        lack = lacking(config.device)
        self.baseline = next((name for name in BASELINES if name in optimizations), "")
        if reason := lack.get(required) or lack.get(self.baseline):
            raise Unsupported(reason)
        self.config, self.batch = config, batch or config.batch_size
        self.optimizations = frozenset(optimizations) - set(lack)
        programs = {} if programs is None else programs
        key = self.baseline or (self.optimizations & OF_MODEL, self.batch)
        if key not in programs:
            allow_recompiling(RECOMPILES)
            programs[key] = (hugging_face_program(config, self.baseline) if self.baseline
                             else build_program(config, self.optimizations))
        self.program = programs[key]
        self.named = dict(self.program.model.named_parameters())
        try:
            self._load()
        except BaseException:
            self.unload()
            raise

    @torch.no_grad()
    def _load(self) -> None:
        torch.set_float32_matmul_precision("high" if "tf32" in self.optimizations else "highest")
        for name, parameter in self.named.items():
            parameter.data = torch.empty(
                self.program.shapes[name], dtype=parameter.dtype, device=parameter.device)
        if "bf16_weights" in self.optimizations:
            moments = torch.bfloat16 if "bf16_moments" in self.optimizations else torch.float32
            self.optimizer: Any = MasterAdamW(self.program.model, RATE, moments)
        else:
            fused = "fused" in self.optimizations or bool(self.baseline)
            # a fused step's count is on the GPU anyway, so that it can be captured
            self.optimizer = torch.optim.AdamW(self.named.values(), lr=RATE, fused=fused, foreach=not fused,
                                               capturable=fused and self.config.device == "cuda")
        generator = torch.Generator(self.config.device).manual_seed(self.config.seed)
        self.tokens, self.targets = torch.randint(self.config.vocab_size,
                                                  (2, self.batch, self.config.context_length),
                                                  generator=generator, device=self.config.device).unbind()
        self.step: Callable[[], Tensor] = self.plain_step
        self.reset(self.config.seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Weights drawn from a seed, the same ones whatever the optimizations, and an optimizer that has not
        stepped; in place."""
        ours = isinstance(self.optimizer, MasterAdamW)
        places = self.optimizer.masters() if ours else self.named
        generator = torch.Generator(self.config.device).manual_seed(seed)
        for name in sorted(places):
            if (place := places[name]).dim() == 2:
                place.copy_(torch.empty_like(place).normal_(std=0.02, generator=generator))
            else:
                place.fill_(1)
        if ours:
            self.optimizer.reset()
            return
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def clear_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def gradients(self) -> Tensor:
        """Forward, loss and backward; the loss. The first call of a compiled program compiles it."""
        self.clear_gradients()
        start = default_timer()
        loss = self.program.loss(self.tokens, self.targets)
        loss.backward()
        if self.program.compile_s is None:
            synchronizer(self.config.device)()
            self.program.compile_s = default_timer() - start if self.program.compiled else 0.0
        return loss.detach()

    def plain_step(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def capture(self) -> None:
        """From here on a step is one CUDA graph, where that is among the optimizations. Weights have moved on
        by some steps after it."""
        if "cuda_graph" in self.optimizations:
            self.step = graph_of(self.plain_step, self.clear_gradients, WARMUPS)
            if isinstance(self.optimizer, MasterAdamW):
                self.optimizer.bind()

    def unload(self) -> None:
        """Give back all memory but the program's."""
        for name in ("step", "optimizer", "tokens", "targets"):
            self.__dict__.pop(name, None)
        empty_out(self.program.model)
        if self.config.device == "cuda":
            torch.cuda.empty_cache()
