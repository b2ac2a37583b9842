"""The rungs: the same model and step with more and more changes, each built from a set of them.

A rung's model and compiled code (:class:`Program`) are made once. Its weights, optimizer and batch are there
only while it has its turn (:class:`Rung`), since a GPU need not hold them for all rungs at once.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from timeit import default_timer
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope import StepscopeError
from stepscope.step.compiling import allow_recompiling
from stepscope.step.model import Attention, SwiGLU, TransformerLM
from stepscope.studies.ladder import fp8
from stepscope.studies.ladder.attention import preferring
from stepscope.studies.ladder.config import BESIDE, RUNGS, Config
from stepscope.studies.ladder.cross_entropy import chunked_cross_entropy
from stepscope.studies.ladder.graphs import captured
from stepscope.studies.ladder.optimizer import InBackward, MasterAdamW

RATE = 3e-4  # AdamW's learning rate, of every rung
# What the rungs after "graph" are compiled as: "blocks" (each alone, and the head with its loss), or "graph"
# (the whole forward as one). A CUDA graph spares the launches either way, and a changed block compiles in
# seconds where a graph of all blocks takes minutes; so the one graph is a branch, measured beside "blocks".
STANDS_ON = "blocks"
COMPILE_OPTIONS: dict[str, Any] = {}  # of the compiler; Hugging Face's model has torch's own
BRANCHES = {"graph"} if STANDS_ON == "blocks" else set()  # rungs on which no later one stands
CHANGES = RUNGS[1 : RUNGS.index("fp8") + 1]
MODEL_CHANGES = {"tf32", "bf16", "sdpa", "blocks", "graph", "no_casts", "wide", "chunked", "fp8"}
FINISHED = frozenset(CHANGES) - {"fp8"} - BRANCHES  # fp8 is another arithmetic
WITHOUT = {
    "sdpa": {"sdpa"},
    "compiling": {"blocks", "graph", "cuda_graphs"},
    "cuda_graphs": {"cuda_graphs"},
    "no_casts": {"no_casts", "overlap"},
    "wide": {"wide"},
    "chunked": {"chunked"},
    "overlap": {"overlap"},
    "bf16": {"bf16", "no_casts", "overlap"},
}  # what goes when one is left out: without bf16 there are no casts to spare, and so on
PRODUCTS = ("fp8", "bf16", "tf32", "fp32")  # of a rung's products, the first that it has


class Unsupported(StepscopeError, RuntimeError):
    """This device or environment lacks what a rung is."""


def changes_of(name: str) -> frozenset[str]:
    """The changes that a rung, or the finished step with one left out ("without_<change>"), consists of."""
    if name.startswith("without_"):
        return FINISHED - WITHOUT[name.removeprefix("without_")]
    if name == "with_graph":
        return FINISHED | {"graph"}
    if name in BESIDE or name == "fill":
        return FINISHED
    return frozenset(CHANGES[: RUNGS.index(name)]) - (BRANCHES - {name})


def before(name: str, among: Iterable[str]) -> str | None:
    """Of these rungs, the last that a rung is a change on; None for the first."""
    own, among = RUNGS.index(name), set(among)
    return next((rung for rung in reversed(RUNGS[:own]) if rung in among and rung not in BRANCHES), None)


def products_of(name: str) -> str:
    """The precision of a rung's products."""
    has = {"bf16"} if name in BESIDE else changes_of(name) | {"fp32"}
    return next(precision for precision in PRODUCTS if precision in has)


def lacking(device: str) -> dict[str, str]:
    """The changes that a device lacks, with the reason."""
    found = {}
    if device == "cpu":
        found = {
            "tf32": "a CPU has no TF32",
            "cuda_graphs": "a CPU has no CUDA graphs",
            "fill": "only a GPU's memory is filled",
        }
    if not fp8.has_fp8(device):
        found["fp8"] = "FP8 products with row-wise scales need a GPU of compute capability 9.0"
    return found


class WideAttention(Attention):
    """Queries, keys and values from one product."""

    def qkv(self, x: Tensor) -> list[Tensor]:
        return [
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, -1)
        ]


class WideSwiGLU(SwiGLU):
    """Gate and up from one product."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(gate * torch.sigmoid(gate) * up)


def widen(model: TransformerLM) -> None:
    """Replace q, k and v by one matrix, and gate and up by one, in every block."""
    for block in model.blocks:
        attention, ffn = block.attention, block.ffn
        width, d_ff = attention.q_proj.in_features, ffn.gate_proj.out_features
        attention.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        ffn.gate_up_proj = nn.Linear(width, 2 * d_ff, bias=False)
        del attention.q_proj, attention.k_proj, attention.v_proj, ffn.gate_proj, ffn.up_proj
        attention.__class__, ffn.__class__ = WideAttention, WideSwiGLU


def plain(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by the names that they have in the plain model: those of wide products in their parts."""
    for name, tensor in named:
        if "qkv_proj" in name:
            yield from (
                (name.replace("qkv_proj", f"{part}_proj"), view) for part, view in zip("qkv", tensor.chunk(3))
            )
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), tensor.chunk(2))
            yield from ((name.replace("gate_up_proj", f"{part}_proj"), view) for part, view in parts)
        else:
            yield name, tensor


@dataclass
class Program:
    """A model without its weights, its loss, and what compiling took."""

    model: nn.Module
    shapes: dict[str, torch.Size]
    loss: Callable[[Tensor, Tensor], Tensor]
    compiled: bool
    compile_s: float | None = None


def empty_out(model: nn.Module) -> dict[str, torch.Size]:
    """Free the model's weights and gradients; their shapes. Compiled code does not mind: it asks for shapes
    when it runs."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad, parameter.data = None, torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return shapes


def build_program(config: Config, changes: frozenset[str], batch: int) -> Program:
    """The model with those of the changes that are the model's. Batch sizes are compiled for."""
    allow_recompiling()
    settings = {"batch_size": batch, "attention": "sdpa" if "sdpa" in changes else "eager"}
    with torch.device(config.device):
        model = TransformerLM(config.step(**settings))
        if "wide" in changes:
            widen(model)
    if "fp8" in changes:
        fp8.use_fp8(model.blocks)
    if "no_casts" in changes:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.bfloat16()
    low = torch.bfloat16 if "bf16" in changes else torch.float32
    autocast = low if {"bf16", "no_casts"} & changes == {"bf16"} else None

    def head_loss(x: Tensor, targets: Tensor) -> Tensor:
        x = model.final_norm(x)
        if "chunked" in changes:
            return chunked_cross_entropy(x, model.head.weight, targets, low)
        return functional.cross_entropy(model.logits(x).flatten(0, 1).float(), targets.flatten())

    if "blocks" in changes and "graph" not in changes:
        for block in model.blocks:
            block.compile(dynamic=False, options=COMPILE_OPTIONS)
        head_loss = torch.compile(head_loss, dynamic=False, options=COMPILE_OPTIONS)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(config.device, dtype=autocast, enabled=autocast is not None):
            x = model.embed(tokens)
            for block in model.blocks:
                x = block(x, model.cos, model.sin, model.future)
            return head_loss(x, targets)

    shapes = empty_out(model)
    if "graph" in changes:
        loss = torch.compile(loss, dynamic=False, fullgraph=True, options=COMPILE_OPTIONS)
    return Program(model, shapes, loss, bool({"blocks", "graph"} & changes))


def hugging_face_program(config: Config, name: str) -> Program:
    """Hugging Face's Llama of the same shape, compiled: under bf16 autocast, or with bf16 weights (other
    training).

    Raises:
        Unsupported: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise Unsupported("transformers is not installed") from None
    allow_recompiling()
    shape = LlamaConfig(
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(config.device):
        model = LlamaForCausalLM(shape).train()
    pure = name == "hugging_face_bf16"
    model = model.bfloat16() if pure else model
    fast = torch.compile(model)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(config.device, dtype=torch.bfloat16, enabled=not pure):
            return fast(input_ids=tokens, labels=targets).loss

    return Program(model, empty_out(model), loss, True)


class Rung:
    """One rung while it has its turn: weights, optimizer and batch on the device, ready to step.

    Args:
        programs: made so far, by what tells them apart; this rung's is added where it is missing.
        kernel: of attention, to be taken before others (:func:`attention.preferring`).

    Raises:
        Unsupported: the device or the environment lacks what the rung is.
        torch.OutOfMemoryError: it does not fit.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        programs: dict[Any, Program],
        batch: int | None = None,
        kernel: str | None = None,
    ):
        lack = lacking(config.device)
        if name in lack:
            raise Unsupported(lack[name])
        self.config, self.name = config, name
        self.batch = batch or config.batch_size
        self.changes = frozenset() if name in BESIDE else changes_of(name) - set(lack)
        self.kernel = kernel if "sdpa" in self.changes else None
        key = (name in BESIDE and name, self.changes & MODEL_CHANGES, self.batch)
        if key not in programs:
            programs[key] = (
                hugging_face_program(config, name)
                if name in BESIDE
                else build_program(config, self.changes, self.batch)
            )
        self.program = programs[key]
        self.in_backward: InBackward | None = None
        self.saved_bytes = 0  # what forward leaves to backward, on a GPU
        try:
            self._load()
        except BaseException:
            self.unload()
            raise

    def _load(self) -> None:
        torch.set_float32_matmul_precision("high" if "tf32" in self.changes else "highest")
        self.named = dict(self.program.model.named_parameters())
        if "no_casts" in self.changes:
            self.optimizer: Any = MasterAdamW(self.named, self.program.shapes, RATE)
            if "overlap" in self.changes:
                self.in_backward = InBackward(self.optimizer)
        else:
            for name, parameter in self.named.items():
                parameter.data = torch.empty(
                    self.program.shapes[name], dtype=parameter.dtype, device=parameter.device
                )
            fused = "fused" in self.changes or self.name in BESIDE
            capturable = self.config.device == "cuda" and "cuda_graphs" in self.changes
            self.optimizer = torch.optim.AdamW(
                self.named.values(), lr=RATE, fused=fused, foreach=not fused, capturable=capturable
            )
        generator = torch.Generator(self.config.device).manual_seed(self.config.seed)
        self.tokens, self.targets = torch.randint(
            self.config.vocab_size,
            (2, self.batch, self.config.context_length),
            generator=generator,
            device=self.config.device,
        ).unbind()
        self.step: Callable[[], Tensor] = self.plain_step
        self.reset(self.config.seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Weights drawn from a seed, the same ones on every rung, and an optimizer that has not stepped; in
        place."""
        master = isinstance(self.optimizer, MasterAdamW)
        places = dict(plain(self.optimizer.masters().items() if master else self.named.items()))
        generator = torch.Generator(self.config.device).manual_seed(seed)
        # by name: models of the same parts may hold them in another order
        for place in (places[name] for name in sorted(places)):
            if place.dim() == 2:
                drawn = torch.empty(place.shape, device=place.device).normal_(std=0.02, generator=generator)
                place.copy_(drawn)
            else:
                place.fill_(1)
        if master:
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
        held = torch.cuda.memory_allocated() if self.config.device == "cuda" else 0
        with preferring(self.kernel):
            loss = self.program.loss(self.tokens, self.targets)
        if self.config.device == "cuda":
            self.saved_bytes = torch.cuda.memory_allocated() - held
        loss.backward()
        if self.program.compile_s is None:
            if self.config.device == "cuda":
                torch.cuda.synchronize()
            self.program.compile_s = default_timer() - start if self.program.compiled else 0.0
        return loss.detach()

    def plain_step(self) -> Tensor:
        if self.in_backward is None:
            loss = self.gradients()
            self.optimizer.step()
            return loss
        with self.in_backward:
            return self.gradients()

    def capture(self) -> None:
        """From here on, a step is one CUDA graph, where the rung is so. Weights have moved on by some steps
        after it."""
        if "cuda_graphs" in self.changes:
            self.step = captured(self.plain_step, self.clear_gradients)
            if isinstance(self.optimizer, MasterAdamW):
                self.optimizer.bind()

    def plain_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients by the plain model's names."""
        return plain((name, cast(Tensor, parameter.grad)) for name, parameter in self.named.items())

    def unload(self) -> None:
        """Give back all memory but the program's."""
        if self.in_backward is not None:
            self.in_backward.remove()
        for name in ("step", "optimizer", "in_backward", "tokens", "targets", "named"):
            self.__dict__.pop(name, None)
        empty_out(self.program.model)
        if self.config.device == "cuda":
            torch.cuda.empty_cache()
