"""A training step with every optimization that works in stock PyTorch.

The file is self-contained: `python fast_step.py` trains the model below on random tokens and prints the
milliseconds per step. On a CPU, it runs without TF32, fused AdamW and the CUDA graph, which need a GPU.
`master_adamw.py` trains the same model with bf16 weights and fp32 master weights.
"""

import argparse
from timeit import default_timer
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """One pre-norm layer: causal attention with RoPE, then SwiGLU."""

    def __init__(self, width: int, hidden: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.norm2 = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        half = width // heads // 2
        frequency = 10_000.0 ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(context), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def apply_rope(self, x: torch.Tensor) -> torch.Tensor:  # (B, H, T, D) -> (B, H, T, D)
        first, second = x.chunk(2, -1)
        context = x.shape[-2]
        cos = self.cos[:context].to(x.dtype)
        sin = self.sin[:context].to(x.dtype)
        return x * cos + torch.cat((-second, first), -1) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        y = self.norm1(x.float()).to(x.dtype)
        q, k, v = (
            matrix(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for matrix in (self.q, self.k, self.v)
        )
        x = x + self.o(attend(self.apply_rope(q), self.apply_rope(k), v).transpose(1, 2).flatten(2))
        y = self.norm2(x.float()).to(x.dtype)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int, heads: int, vocabulary: int, context: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            self.blocks.append(Block(width, hidden, heads, context))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def to_logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x.float()).to(x.dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, V)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.to_logits(x)


# <fast step>
torch.set_float32_matmul_precision("high")  # TF32


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # fused attention


def make_step(model, tokens, targets, rate, clip=None):
    """Return a training step and its optimizer, without changing weights, buffers or random state.

    `model(tokens)` must return logits (..., classes) for `targets` (...). `model.blocks` must contain the
    layers, and `model.to_logits` must compute the logits. Pass each step a batch, or copy one into `tokens` and
    `targets`. Before each step, fill `rate`, a scalar tensor on the same device, or let a scheduler of the
    optimizer do so. The scheduler may warn that `optimizer.step()` was not called, because the graph calls it."""
    on_gpu = tokens.is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=on_gpu, capturable=on_gpu)  # fused AdamW
    for block in model.blocks:
        block.compile(dynamic=False)  # compiled blocks
    # bound as a method, so that a deep copy of the model computes with its own head
    model.to_logits = MethodType(torch.compile(type(model).to_logits, dynamic=False), model)

    def compute():
        optimizer.zero_grad(set_to_none=True)
        # gradient accumulation: run the lines up to backward for each of n micro-batches, with loss / n
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):  # bf16 autocast
            loss = F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    # DDP: wrap the model on the side stream, warm up 11 steps, and set TORCH_NCCL_ASYNC_ERROR_HANDLING=0
    side = torch.cuda.Stream() if on_gpu else None
    given, buffers = rate.clone(), [buffer.clone() for buffer in model.buffers()]
    rate.zero_()  # so that the warm-up changes no weights
    if on_gpu:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.random.fork_rng([tokens.device] if on_gpu else []):
        for _ in range(3):  # warm up: compile, and create AdamW's moments
            compute()
    if on_gpu:
        torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    for buffer, before in zip([rate, *model.buffers()], [given, *buffers]):
        buffer.copy_(before)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    if on_gpu:
        # activations and gradients move into the graph's own memory pool, which eager code cannot use
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # CUDA graph of the step
            loss = compute()

    def step(*batch):
        for place, new in zip((tokens, targets), batch):
            if new.shape != place.shape:  # copy_ would broadcast a single row
                raise ValueError(f"got a batch of {new.shape}, but the step was made for {place.shape}")
            place.copy_(new)
        if not on_gpu:
            return compute()
        graph.replay()
        return loss  # overwritten by the next replay

    return step, optimizer


def resume(optimizer, saved):
    """Load a saved optimizer state in place, where a graph reads it; load the model's weights separately.
    AdamW's `load_state_dict` would create new tensors, but the graph would keep reading the old ones."""
    states = list(zip(optimizer.state.values(), saved["state"].values(), strict=True))
    groups = list(zip(optimizer.param_groups, saved["param_groups"], strict=True))
    tensors = [(name, own[name], state[name]) for own, state in states for name in own]
    for name, tensor, given in tensors:  # check every shape before writing anything
        if given.shape != tensor.shape:
            raise ValueError(f"{name}: got {given.shape}, but expected {tensor.shape}")
    for _, tensor, given in tensors:
        tensor.copy_(given)
    for own, group in groups:
        own["lr"].copy_(torch.as_tensor(group["lr"]))


# </fast step>


def main(arguments: list[str] | None = None) -> float:
    """Train on random tokens; return the milliseconds per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {
        "width": 768,
        "hidden": 3072,
        "layers": 12,
        "heads": 12,
        "vocabulary": 10_000,
        "context": 512,
        "batch": 4,
        "steps": 20,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clip", type=float, help="maximum global norm of the gradients")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Model(
            options.width,
            options.hidden,
            options.layers,
            options.heads,
            options.vocabulary,
            options.context,
        )
        shape = (2, options.batch, options.context)
        tokens, targets = torch.randint(options.vocabulary, shape).unbind()
        rate = torch.tensor(3e-4)
    step, _ = make_step(model, tokens, targets, rate, options.clip)
    first = step().item()
    start = default_timer()
    for _ in range(options.steps):
        loss = step()
    last = loss.item()  # waits for the GPU
    ms = (default_timer() - start) / options.steps * 1e3
    print(f"{ms:.4g} ms per step on {device}; loss {first:.4f} to {last:.4f} on one batch")
    return ms


if __name__ == "__main__":
    main()
