"""Text to train on, which every machine has: the Python documentation's topics as the standard library ships
them (``pydoc_data/topics.py``, about 0.7 MB, PSF licence), a byte a token."""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from stepscope import StepscopeError


def text_batches(steps: int, batch_size: int, context_length: int) -> Tensor:
    """(steps, B, T + 1) token ids below 256, int64 on the CPU: the same whoever asks.

    Raises:
        StepscopeError: this Python comes without pydoc_data.
    """
    found = importlib.util.find_spec("pydoc_data.topics")
    if found is None or found.origin is None:
        raise StepscopeError("this Python comes without pydoc_data, whose text is trained on")
    text = torch.frombuffer(bytearray(Path(found.origin).read_bytes()), dtype=torch.uint8)
    starts = torch.randint(
        len(text) - context_length, (steps * batch_size,), generator=torch.Generator().manual_seed(0)
    )
    return text.unfold(0, context_length + 1, 1)[starts].view(steps, batch_size, -1).long()
