"""torch.profiler around some work of this process."""
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def profiled(**options: Any) -> Iterator[torch.profiler.profile]:
    """``torch.profiler.profile`` with these options. Its advice on several cycles, which torch 2.11 gives for
    one as well, is not said; every other warning is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        with torch.profiler.profile(**options) as profiler:
            yield profiler
