"""Which of scaled_dot_product_attention's kernels is fastest for a shape: tried, not believed."""

import functools
from contextlib import AbstractContextManager, nullcontext

import pandas as pd
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.config import StepConfig
from stepscope.step.ceilings import _median_ms
from stepscope.studies.ladder.graphs import captured

TRIED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
MANY = 10  # passes in a CUDA graph: launches are not what is compared
COLUMNS = ["kernel", "time_ms", "reason"]


def backend_times(config: StepConfig) -> pd.DataFrame:
    """Forward and backward of one layer's causal attention in bf16 by each kernel: columns kernel, time_ms
    (nan where it refuses) and its reason. No rows on a CPU, which has one."""
    if config.device != "cuda":
        return pd.DataFrame(columns=COLUMNS)
    shape = (config.batch_size, config.context_length, config.num_heads, config.d_model // config.num_heads)
    q, k, v, d_out = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(4)
    )

    def attend() -> torch.Tensor:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), d_out.detach())[0]

    rows = []
    for backend in TRIED:
        try:
            with sdpa_kernel(backend):
                many = captured(lambda: [attend() for _ in range(MANY)], lambda: None)
                rows.append((backend.name, _median_ms("cuda", many) / MANY, ""))
        except RuntimeError as error:
            rows.append((backend.name, float("nan"), str(error).splitlines()[0][:200]))
    return pd.DataFrame(rows, columns=COLUMNS)


def fastest(times: pd.DataFrame) -> str | None:
    """The kernel of the least time; None where none was timed."""
    timed = times.dropna(subset="time_ms")
    return None if timed.empty else timed.loc[timed["time_ms"].idxmin(), "kernel"]


@functools.cache
def order_of(kernel: str | None) -> tuple[SDPBackend, ...]:
    """Kernels in the order in which they should be taken: a kernel's name before what it may not support."""
    if kernel is None:
        return ()
    first = SDPBackend.__members__[kernel]
    rest = (*TRIED, SDPBackend.MATH)
    return (first, *[backend for backend in rest if backend != first])


def preferring(kernel: str | None) -> AbstractContextManager:
    """Within it, attention takes this kernel where it can; torch's own order where it is None."""
    order = order_of(kernel)
    return sdpa_kernel([*order], set_priority=True) if order else nullcontext()
