"""Provide a training text that every machine has: the documentation topics in Python's standard library.

The text is the file ``pydoc_data/topics.py``, about 0.7 MB under the PSF license. Each byte is one token.
"""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from stepscope import StepscopeError


def text_batches(
    steps: int,
    batch_size: int,
    context_length: int,
) -> Tensor:
    """Return token ids below 256 as an int64 tensor (steps, B, T + 1) on the CPU. Every call returns the same ids.

    Raises:
        StepscopeError: If this Python installation doesn't include ``pydoc_data``.
    """
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise StepscopeError("this Python lacks the package pydoc_data, which contains the training text")
    content = bytearray(Path(spec.origin).read_bytes())
    text = torch.frombuffer(content, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    num_starts = len(text) - context_length
    starts = torch.randint(num_starts, (steps * batch_size,), generator=generator)
    windows = text.unfold(0, context_length + 1, 1)
    return windows[starts].view(steps, batch_size, -1).long()
