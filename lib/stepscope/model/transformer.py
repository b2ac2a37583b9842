"""The model that the studies measure: a pre-norm decoder, with every part written out in PyTorch.

Shapes in comments: B batch, T context length, C d_model, H heads, D = C / H, F d_ff, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.config import StepConfig
from stepscope.model.ranges import region


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, eq. 4), computed in at least fp32 for any input dtype."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    @region("norm")
    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        x_fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)  # (B, T, 1)
        return (x_fp32 * scale * self.weight).to(x.dtype)


def rope_tables(context_length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE's angles (Su et al. 2021, eq. 15), each (T, D).

    At position t, pair i is rotated by t * 10,000^(-2i/D).
    """
    even = torch.arange(0, head_dim, 2, dtype=torch.float64)
    frequency = 10_000.0 ** (-even / head_dim)
    position = torch.arange(context_length, dtype=torch.float64)
    angle = torch.outer(position, frequency).repeat(1, 2)
    dtype = torch.get_default_dtype()
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention with RoPE, either naive (with its parts visible in profiles) or fused."""

    def __init__(self, d_model: int, num_heads: int, kind: str):
        super().__init__()
        self.num_heads = num_heads
        self.kind = kind
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    @region("attention")
    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        future: Tensor,
    ) -> Tensor:
        # (B, T, C), two tables (T, D), mask (T, T) -> (B, T, C)
        q, k, v = self.qkv(x)
        q, k = self.rope(q, k, cos, sin)
        if self.kind == "sdpa":
            return self.output(self.fused(q, k, v))
        return self.output(self.value(self.softmax(self.mask(self.scores(q, k), future)), v))

    @region("attention.qkv")
    def qkv(self, x: Tensor) -> list[Tensor]:  # (B, T, C) -> three of (B, H, T, D)
        return [
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        ]

    @region("attention.rope")
    def rope(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> list[Tensor]:
        # two of (B, H, T, D), tables (T, D) -> two of (B, H, T, D); pairs are (i, i + D/2)
        cos = cos.to(q.dtype)
        sin = sin.to(q.dtype)
        rotated = []
        for x in (q, k):
            first, second = x.chunk(2, dim=-1)
            rotated.append(x * cos + torch.cat((-second, first), dim=-1) * sin)
        return rotated

    @region("attention.scores")
    def scores(self, q: Tensor, k: Tensor) -> Tensor:  # two of (B, H, T, D) -> (B, H, T, T)
        return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5

    @region("attention.mask")
    def mask(self, scores: Tensor, future: Tensor) -> Tensor:  # (B, H, T, T), (T, T) -> (B, H, T, T)
        return scores.masked_fill(future, float("-inf"))

    @region("attention.softmax")
    def softmax(self, scores: Tensor) -> Tensor:  # (B, H, T, T) -> (B, H, T, T)
        # softmax is invariant to shifts of a row, so the maximum needs no gradient
        exponentials = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
        return exponentials / exponentials.sum(-1, keepdim=True)

    @region("attention.value")
    def value(self, weights: Tensor, v: Tensor) -> Tensor:  # (B, H, T, T), (B, H, T, D) -> (B, H, T, D)
        return weights @ v

    @region("attention.fused")
    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # three of (B, H, T, D) -> (B, H, T, D)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    @region("attention.output")
    def output(self, heads: Tensor) -> Tensor:  # (B, H, T, D) -> (B, T, C)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Feed-forward layer with three matrices (Shazeer 2020): down(silu(gate x) * up x)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    @region("ffn")
    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C), via two of (B, T, F)
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, attention: str):
        super().__init__()
        self.attention_norm = RMSNorm(d_model)
        self.ffn_norm = RMSNorm(d_model)
        self.attention = Attention(d_model, num_heads, attention)
        self.ffn = SwiGLU(d_model, d_ff)

    @region("block")
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, future: Tensor) -> Tensor:
        # (B, T, C), two tables (T, D), mask (T, T) -> (B, T, C)
        x = self.residual(x, self.attention(self.attention_norm(x), cos, sin, future))
        return self.residual(x, self.ffn(self.ffn_norm(x)))

    @region("residual")
    def residual(self, x: Tensor, change: Tensor) -> Tensor:  # two of (B, T, C) -> (B, T, C)
        return x + change


class TransformerLM(nn.Module):
    """Decoder-only language model, from token ids (B, T) to logits (B, T, V). Head and embedding are not tied."""

    def __init__(self, config: StepConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList()
        for _ in range(config.num_layers):
            block = Block(
                config.d_model,
                config.d_ff,
                config.num_heads,
                config.attention,
            )
            self.blocks.append(block)
        self.final_norm = RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        context_length = config.context_length
        head_dim = config.d_model // config.num_heads
        cos, sin = rope_tables(context_length, head_dim)
        future = torch.ones(context_length, context_length, dtype=torch.bool).triu(1)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("future", future, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.embed(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.future)
        return self.to_logits(x)

    def to_logits(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, V)
        return self.logits(self.final_norm(x))

    @region("embedding")
    def embed(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        return self.embedding(tokens)

    @region("head")
    def logits(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, V)
        return self.head(x)

    @region("cross_entropy")
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:  # (B, T, V), (B, T) -> mean over tokens, ()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
