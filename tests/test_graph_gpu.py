"""Test CUDA graphs on a GPU.

python -m pytest tests/test_graph_gpu.py
"""

import pytest
import torch
from torch.nn import functional as F

from stepscope.measure.graph import graph_of
from stepscope.measure.timing import noop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_compiling_works_after_a_failed_capture():
    """After a failed capture, PyTorch leaves the random generator in capture mode, so ``graph_of`` resets it."""
    numbers = torch.ones(64, 64, device="cuda")

    def synchronizes():
        dropped = F.dropout(numbers, 0.5)
        return dropped * numbers.sum().item()

    with pytest.raises(RuntimeError):
        graph_of(synchronizes, noop, warmups=1)
    compiled = torch.compile(lambda x: F.dropout(x @ x, 0.5).sum())
    assert torch.isfinite(compiled(numbers))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_replays_draw_different_random_numbers_after_a_failed_capture():
    numbers = torch.ones(64, 64, device="cuda")
    with pytest.raises(RuntimeError):
        graph_of(lambda: F.dropout(numbers, 0.5).sum().item(), noop, warmups=1)
    replay = graph_of(lambda: F.dropout(numbers, 0.5), noop, warmups=1)
    first = replay().clone()
    assert not torch.equal(first, replay())
