"""What is watched where things are compiled or may be refused: graphs, torch's reasons, memory given back."""
import gc
import re

import torch


class Compiles:
    """Counts what torch.compile does between two readings: graphs compiled, and graph breaks."""

    def __init__(self) -> None:
        self.read()

    def read(self) -> tuple[int, int]:
        """Graphs and graph breaks since the last reading."""
        from torch._dynamo.utils import counters
        now = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        since = tuple(a - b for a, b in zip(now, getattr(self, "last", now)))
        self.last = now
        return since


def allow_recompiling(times: int = 256) -> None:
    """Let one function be compiled for so many shapes (torch's limit is 8), and fail beyond it."""
    import torch._dynamo.config as dynamo
    dynamo.recompile_limit, dynamo.accumulated_recompile_limit = times, 4 * times
    dynamo.fail_on_recompile_limit_hit = True


def release(device: str, after_error: bool = False) -> None:
    """Give freed memory back to the driver, so that one cell's blocks do not shape the next one's.

    After an error tensors may hang in cycles, which only the collector frees; it takes a third of a second,
    so not otherwise.
    """
    if after_error:
        gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def reason(error: Exception, warned: list) -> str:
    """Why an implementation does not run, in torch's own words.

    Where no kernel of a backend fits, torch says in the error that none does, and why in warnings, one for
    each backend; of those, the ones for backends that were switched off say nothing.
    """
    words = str(error) or type(error).__name__
    if "No available kernel" in words:
        said = [str(warning.message).split(" (Triggered")[0] for warning in warned]
        told = [text for text in said if not re.search("not used because|runtime disabled", text)]
        words = " ".join(dict.fromkeys(told)) or words
    return re.sub(r"/\S*/", "", " ".join(words.split()))[:400]  # no paths of this machine
