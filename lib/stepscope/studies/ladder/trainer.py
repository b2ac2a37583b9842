"""The same model and step with more and more changes, each built from the set of them.

A change's model and compiled code (:class:`Program`) are made once. Its weights, optimizer and batch are
there only while it is measured (:class:`Trainer`), since a GPU need not hold them for all at once.
"""
from collections.abc import Callable
from dataclasses import dataclass
from timeit import default_timer
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope import StepscopeError
from stepscope.step.model import TransformerLM
from stepscope.studies.ladder import fp8
from stepscope.studies.ladder.config import CHANGES, FILLED, PEERS, Config
from stepscope.studies.ladder.cross_entropy import chunked_cross_entropy
from stepscope.studies.ladder.optimizer import MasterAdamW

RATE = 3e-4  # AdamW's learning rate, of every change
MODEL_CHANGES = {"tf32", "bf16", "sdpa", "blocks", "bf16_weights", "chunked",
                 "fp8"}  # what a program is made of
COMPILED = {"blocks", *PEERS}
WARMUPS = 3  # before a capture, on a stream of their own: kernels are loaded and chosen, and states made
RECOMPILES = 256  # for how many shapes one function may be compiled; torch's limit is 8


class Unsupported(StepscopeError, RuntimeError):
    """This device or environment lacks what a change needs."""


def changes_of(name: str) -> frozenset[str]:
    """All changes that the step of this name consists of; of a peer only its name."""
    if name in PEERS:
        return frozenset({name})
    if name in CHANGES:
        return frozenset(CHANGES[1 : CHANGES.index(name) + 1])
    return frozenset({*CHANGES[1:], "chunked" if name == FILLED else name})


def precision_of(name: str) -> str:
    """The precision of its matmuls."""
    if name in PEERS:
        return "bf16"
    return next((one for one in ("fp8", "bf16", "tf32") if one in changes_of(name)), "fp32")


def lacking(device: str) -> dict[str, str]:
    """The changes that a device lacks, with the reason."""
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


def build_program(config: Config, changes: frozenset[str]) -> Program:
    """The model with those of the changes that are the model's."""
    with torch.device(config.device):
        model = TransformerLM(config.step(attention="sdpa" if "sdpa" in changes else "naive"))
    if "fp8" in changes:
        fp8.use_fp8(model.blocks)
    if "bf16_weights" in changes:  # and RoPE's tables, which each block would cast
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.bfloat16()
        model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    low = torch.bfloat16 if "bf16" in changes else torch.float32
    autocast = "bf16" in changes and "bf16_weights" not in changes

    def head_loss(x: Tensor, targets: Tensor) -> Tensor:
        if "chunked" in changes:
            return chunked_cross_entropy(model.final_norm(x), model.head.weight, targets, low)
        return functional.cross_entropy(model.read_out(x).flatten(0, 1).float(), targets.flatten())

    if "blocks" in changes:
        model.embedding.compile(dynamic=False)
        for block in model.blocks:
            block.compile(dynamic=False)
        head_loss = torch.compile(head_loss, dynamic=False)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(config.device, dtype=torch.bfloat16, enabled=autocast):
            x = model.embed(tokens)
            for block in model.blocks:
                x = block(x, model.cos, model.sin, model.future)
            return head_loss(x, targets)

    return Program(model, loss, empty_out(model), "blocks" in changes)


def hugging_face_program(config: Config, name: str) -> Program:
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

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(config.device, dtype=torch.bfloat16):
            return fast(input_ids=tokens, labels=targets).loss

    return Program(model, loss, empty_out(model), True)


def captured(step: Callable[[], Tensor], clear: Callable[[], None]) -> Callable[[], Tensor]:
    """Capture ``step`` (its inputs in place, everything on the GPU) as one CUDA graph, which the host
    enqueues with one call; what is returned replays it and gives its loss.

    Args:
        clear: frees the gradients, so that the graph's own do not stand beside the warm-up's.

    The warm-up's steps change weights and optimizer; the capture itself changes nothing.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # collects garbage and gives cached memory back first
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


class Trainer:
    """One change while it is measured: weights, optimizer and batch on the device, ready to step.

    Args:
        programs: made so far, by what tells them apart; this one's is added where it is missing.
        batch: if not the configuration's.

    Raises:
        Unsupported: the device or the environment lacks what the change needs.
        torch.OutOfMemoryError: it does not fit.
    """

    def __init__(self, config: Config, name: str, programs: dict[Any, Program], batch: int | None = None,
                 changes: frozenset[str] | None = None):
        lack = lacking(config.device)
        if name in lack:
            raise Unsupported(lack[name])
        self.config, self.name, self.batch = config, name, batch or config.batch_size
        self.changes = (changes_of(name) if changes is None else changes) - set(lack)
        self.peer = name in PEERS
        key = name if self.peer else (self.changes & MODEL_CHANGES, self.batch)
        if key not in programs:
            _allow_recompiling()
            programs[key] = (
                hugging_face_program(config, name) if self.peer else build_program(config, self.changes))
        self.program = programs[key]
        self.named = dict(self.program.model.named_parameters())
        try:
            self._load()
        except BaseException:
            self.unload()
            raise

    @torch.no_grad()
    def _load(self) -> None:
        torch.set_float32_matmul_precision("high" if "tf32" in self.changes else "highest")
        for name, parameter in self.named.items():
            parameter.data = torch.empty(
                self.program.shapes[name], dtype=parameter.dtype, device=parameter.device)
        if "bf16_weights" in self.changes:
            moments = torch.bfloat16 if "bf16_moments" in self.changes else torch.float32
            self.optimizer: Any = MasterAdamW(self.program.model, RATE, moments)
        else:
            fused = "fused" in self.changes or self.peer
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
        """Weights drawn from a seed, the same ones for every change, and an optimizer that has not stepped;
        in place."""
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
            if self.config.device == "cuda":
                torch.cuda.synchronize()
            self.program.compile_s = default_timer() - start if self.program.compiled else 0.0
        return loss.detach()

    def plain_step(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def capture(self) -> None:
        """From here on a step is one CUDA graph, where that is among the changes. Weights have moved on by
        some steps after it."""
        if "cuda_graph" in self.changes:
            self.step = captured(self.plain_step, self.clear_gradients)
            if isinstance(self.optimizer, MasterAdamW):
                self.optimizer.bind()

    def unload(self) -> None:
        """Give back all memory but the program's."""
        for name in ("step", "optimizer", "tokens", "targets"):
            self.__dict__.pop(name, None)
        empty_out(self.program.model)
        if self.config.device == "cuda":
            torch.cuda.empty_cache()


def _allow_recompiling() -> None:
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit, dynamo.accumulated_recompile_limit = RECOMPILES, 4 * RECOMPILES
    dynamo.fail_on_recompile_limit_hit = True
