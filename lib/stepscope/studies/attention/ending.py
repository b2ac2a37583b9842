"""Where attention runs out of memory, measured."""
from collections.abc import Callable
from functools import partial
from math import inf

import pandas as pd
import torch

from stepscope.step.compiling import reason, release
from stepscope.studies.attention.config import QUADRATIC, Config
from stepscope.studies.attention.implementations import Implementations, Inputs
from stepscope.studies.attention.memory import mask_memory, memory_pass

PROBE_STEPS = 4  # halvings of the octave in which an implementation ends


def probe(name: str, implementations: Implementations, config: Config, sequence: int) -> dict:
    """Whether a causal forward and backward pass of this sequence fits: ``status``, ``reason`` and, where it
    fits, its memory.

    The pass is not timed, and its result not looked at: only its memory is.
    """
    def run() -> dict:
        inputs = Inputs(config, sequence, True)
        made = mask_memory(inputs, config.device) if name == "flex" else {}
        call = implementations.prepare(name, inputs)
        return made | memory_pass(call, inputs, inputs.held_bytes(name), config.device)
    return {"part": "pass"} | _tried(name, config, sequence, run)


def probe_mask(config: Config, sequence: int) -> dict:
    """Whether FlexAttention's mask of this sequence can be made, beside the inputs; its pass is not tried."""
    return {"part": "mask"} | _tried("flex", config, sequence,
                                     lambda: mask_memory(Inputs(config, sequence, True), config.device))


def _tried(name: str, config: Config, sequence: int, run: Callable[[], dict]) -> dict:
    release(config.device, after_error=True)
    row = {"implementation": name, "sequence": sequence}
    try:
        return row | run() | {"status": "ok", "reason": ""}
    except torch.OutOfMemoryError as error:
        return row | {"status": "oom", "reason": reason(error, [])}
    except Exception as error:  # a kernel's own limit at this length must not lose what was timed before
        if "CUDA error" in str(error):
            raise
        return row | {"status": "failed", "reason": reason(error, [])}


def search(attempt: Callable[[int], dict], fits: int, limit: float, halvings: int) -> list[dict]:
    """Probes from a sequence that fits: doubled until one fails or ``limit`` is reached, then the octave
    halved so often."""
    rows: list[dict] = []
    fails: int | None = None
    while fails is None and fits < limit:
        rows.append(attempt(2 * fits))
        if rows[-1]["status"] == "failed":
            return rows
        fits, fails = (2 * fits, None) if rows[-1]["status"] == "ok" else (fits, 2 * fits)
    if fails is None:
        return rows
    for _ in range(halvings):
        middle = (fits + fails) // 2
        rows.append(attempt(middle))
        fits, fails = (middle, fails) if rows[-1]["status"] == "ok" else (fits, middle)
    return rows


def find_ends(config: Config, cells: pd.DataFrame) -> pd.DataFrame:
    """Beyond the sequences timed: of the implementations that hold squares, the sequence where they stop
    fitting, found by doubling and halving, and once more with the allocator's expandable segments; of the
    others, twice and four times the longest, and where FlexAttention's mask can no longer be made. A row a
    probe, with ``part`` (``pass`` or ``mask``) and ``expandable``; empty on a CPU, whose memory is not the
    allocator's to give."""
    if config.device == "cpu" or not config.find_end:
        return pd.DataFrame(columns=["part", "implementation", "sequence", "status", "reason", "expandable"])
    implementations, frames, limit = Implementations(), [], 4 * max(config.sequences)
    ok = cells[(cells["status"] == "ok") & cells["causal"]]
    longest = ok.groupby("implementation", sort=False)["sequence"].max()
    for expandable in (False, True):
        release(config.device, after_error=True)
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
        rows = []
        for name, fits in longest.items():
            squares = name in QUADRATIC
            if squares or not expandable:
                halvings = PROBE_STEPS if squares else 0
                rows += search(partial(probe, name, implementations, config), int(fits), limit, halvings)
        if "flex" in longest and not expandable:
            rows += search(partial(probe_mask, config), limit, inf, PROBE_STEPS)
        frames.append(pd.DataFrame(rows).assign(expandable=expandable))
    release(config.device, after_error=True)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return pd.concat(frames, ignore_index=True)
