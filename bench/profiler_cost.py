"""Compare the times of memory-bound steps with and without torch.profiler on a GPU (takes about a minute).

    python -m bench.profiler_cost

Each step runs naive attention at one context length. The profiler slows down the kernels themselves
if, at the same SM clock, the profiled steps take more wall time and their total kernel time exceeds the wall
time of the unprofiled steps.
"""

from collections.abc import Callable
from timeit import default_timer

import torch

from stepscope.measure.power import PowerMonitor
from stepscope.measure.profiler import StepProfiler

STEPS = 6
CONTEXT_LENGTHS = (1024, 2048, 4096)


def naive_attention(tokens: int, heads: int = 32, d_head: int = 80, batch: int = 4) -> Callable[[], None]:
    """Return a step that runs the forward and backward passes of naive causal attention in bf16 eight times."""
    shape = (batch, heads, tokens, d_head)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    future = torch.ones(tokens, tokens, device="cuda", dtype=torch.bool).triu(1)

    def step() -> None:
        for _ in range(8):
            scores = (q @ k.mT * d_head**-0.5).masked_fill(future, float("-inf"))
            exponentials = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
            output = exponentials / exponentials.sum(-1, keepdim=True) @ v
            output.sum().backward()
            q.grad = k.grad = v.grad = None

    return step


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Run :data:`STEPS` steps back to back; return their mean wall time in ms and median SM clock in MHz."""
    torch.cuda.synchronize()
    with PowerMonitor() as monitor:
        started = default_timer()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        seconds = default_timer() - started
    return seconds * 1e3 / STEPS, monitor.sm_clock_mhz


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; times of one step, SM clock in MHz")
    for tokens in CONTEXT_LENGTHS:
        step = naive_attention(tokens)
        for _ in range(3):
            step()
        wall_ms, clock_mhz = timed(step)
        with StepProfiler("cuda") as profiler, profiler.phases("step", 0)("steps"):
            profiled_ms, profiled_clock_mhz = timed(step)
        operations = profiler.operations  # all on one stream, so none of them overlap
        kernels_ms = (operations["end_ns"] - operations["start_ns"]).sum() / 1e6 / STEPS
        print(
            f"{tokens:>5} tokens: {wall_ms:.2f} ms at {clock_mhz:.0f} MHz; "
            f"profiled: {profiled_ms:.2f} ms ({profiled_ms / wall_ms - 1:+.2%}), "
            f"kernels {kernels_ms:.2f} ms ({kernels_ms / wall_ms - 1:+.2%}), at {profiled_clock_mhz:.0f} MHz",
            flush=True,
        )


if __name__ == "__main__":
    main()
