"""A whole training step as one CUDA graph: the host enqueues it with one call."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
WARMUPS = 3  # before a capture, on a stream of their own: kernels are loaded and chosen, and states made
FIRST = -1  # the stream's priority: what is captured of other streams only takes what it leaves idle


def captured(step: Callable[[], T], clear: Callable[[], None]) -> Callable[[], T]:
    """Capture ``step`` (its inputs in place, everything on the GPU); what is returned replays it and gives
    its loss.

    Args:
        clear: frees the gradients, so that the graph's own do not stand beside the warm-up's.

    The warm-up's steps change weights and optimizer; the capture itself changes nothing.
    """
    side = torch.cuda.Stream(priority=FIRST)
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

    def replay() -> T:
        graph.replay()
        return loss

    return replay
