"""Where attention runs out of memory: predicted, tensor by tensor, without memory; and measured.

What torch's own operators return is found by running them on fake tensors, which have shapes and lifetimes but no data,
and following each storage from its making to its end. What an operator allocates inside itself is not seen by that; it is
written down (:data:`INSIDE`, and for the fused kernels :func:`fused_tensors`).
"""
import weakref
from collections.abc import Callable
from functools import partial
from math import inf

import pandas as pd
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.studies.attention.measure import Implementations, Inputs, block_mask, mask_memory, memory_pass
from stepscope.step.compiling import reason, release
from stepscope.studies.attention.config import Config

WRITTEN = ("eager", "math")               # made of torch's own operators
QUADRATIC = ("eager", "compiled", "math")  # keep whole T x T squares
PROBE_STEPS = 4                            # halvings of the octave in which an implementation ends
# What operators make inside on a GPU, as large as their result: softmax's backward multiplies gradient and output first.
INSIDE = {"_softmax_backward_data": "gradient times output, inside _softmax_backward_data"}
MASK_INSIDE_BYTES = 8  # for each pair of positions, in FlexAttention's mask: sum() of booleans makes int64 of them first


class LiveStorages(TorchDispatchMode):
    """Every storage that operators make inside, for as long as something holds it, and those alive at the peak.

    ``inside`` names, by operator, what it makes itself besides its result, as large, and drops when it is done.
    """

    def __init__(self, inside: dict[str, str] | None = None) -> None:
        super().__init__()
        self.inside = inside or {}
        self.live: dict[int, tuple[str, str, int]] = {}
        self.bytes = self.peak_bytes = self.made = 0
        self.at_peak: list[tuple[str, str, int]] = []
        self.phase = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        known = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        name = func._schema.name.removeprefix("aten::")
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in known:
                self.follow(x, name)
        if name in self.inside:
            self.peak([self.entry(result, self.inside[name])])
        return result

    def follow(self, x: Tensor, name: str) -> None:
        storage = x.untyped_storage()
        key = id(storage)
        if key in self.live or not storage.nbytes():
            return
        self.made += 1
        self.live[key] = self.entry(x, name)
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self._gone, key)
        self.peak([])

    def entry(self, x: Tensor, name: str) -> tuple[str, str, int]:
        return (f"{self.phase}: {name}" if self.phase else name, f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}",
                x.untyped_storage().nbytes())

    def peak(self, more: list[tuple[str, str, int]]) -> None:
        """Look whether what is alive, and ``more``, is the most so far."""
        total = self.bytes + sum(size for *_, size in more)
        if total > self.peak_bytes:
            self.peak_bytes, self.at_peak = total, [*self.live.values(), *more]

    def _gone(self, key: int) -> None:
        self.bytes -= self.live.pop(key)[2]


def follow_pass(name: str, config: Config, sequence: int, causal: bool) -> dict:
    """Forward and backward of one cell on fake tensors.

    Returns ``saved_bytes`` (made by forward and kept for backward, without the output), ``forward_peak_bytes``,
    ``peak_bytes`` (both with inputs and mask) and ``tensors``: what is alive at the peak, as (name, shape and type, bytes).
    """
    on_cpu = config.model_copy(update={"device": "cpu"})  # needs no GPU: the operators are the same
    with FakeTensorMode(), LiveStorages(INSIDE if config.device == "cuda" else None) as storages:
        inputs = Inputs(on_cpu, sequence, causal)
        for label, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("gradient of the output", inputs.gradient)):
            _, shape, size = storages.live[id(x.untyped_storage())]
            storages.live[id(x.untyped_storage())] = (label, shape, size)
        call = Implementations().prepare(name, inputs)
        storages.phase, storages.peak_bytes = "forward", 0
        before = storages.bytes
        output = call()
        saved, forward_peak = storages.bytes - before - output.untyped_storage().nbytes(), storages.peak_bytes
        storages.phase = "backward"
        output.backward(inputs.gradient)
    return {"saved_bytes": saved, "forward_peak_bytes": forward_peak, "peak_bytes": storages.peak_bytes,
            "tensors": storages.at_peak}


def follow_mask(sequence: int) -> dict[str, int]:
    """FlexAttention's causal mask made on fake tensors: ``mask_peak_bytes`` meanwhile (:data:`MASK_INSIDE_BYTES` a pair
    comes to it), ``mask_bytes`` kept."""
    with FakeTensorMode(), LiveStorages() as storages:
        mask = block_mask(sequence, "cpu")  # held while its bytes are read
        found = {"mask_peak_bytes": storages.peak_bytes, "mask_bytes": storages.bytes}
        del mask
    return found


def predicted(config: Config, sequences: list[int]) -> pd.DataFrame:
    """Bytes of the implementations made of torch's operators, a row for each sequence and causal; and of FlexAttention's
    mask (:func:`follow_mask`)."""
    rows = [{"implementation": "flex", "causal": True, "sequence": sequence} | follow_mask(sequence) for sequence in sequences
            if "flex" in config.causal]
    for name in WRITTEN:
        for causal in (True, False):
            if name not in (config.causal if causal else config.unmasked):
                continue
            for sequence in sequences:
                found = follow_pass(name, config, sequence, causal)
                found.pop("tensors")
                rows.append({"implementation": name, "causal": causal, "sequence": sequence} | found)
    return pd.DataFrame(rows, columns=["implementation", "causal", "sequence", "saved_bytes", "forward_peak_bytes",
                                       "peak_bytes", "mask_peak_bytes", "mask_bytes"])


def accounting(name: str, config: Config, sequence: int, causal: bool = True) -> pd.DataFrame:
    """Every tensor alive at the peak of one cell: columns implementation, sequence, tensor, shape, bytes; largest first."""
    tensors = follow_pass(name, config, sequence, causal)["tensors"]
    table = pd.DataFrame(tensors, columns=["tensor", "shape", "bytes"]).sort_values("bytes", ascending=False, kind="stable")
    table.insert(0, "sequence", sequence)
    table.insert(0, "implementation", name)
    return table.reset_index(drop=True)


def probe(name: str, implementations: Implementations, config: Config, sequence: int) -> dict:
    """Whether a causal forward and backward pass of this sequence fits: ``status``, ``reason`` and, where it fits, its memory.

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
    except Exception as error:  # what was timed before is not to be lost by a kernel's own limit at this length
        if "CUDA error" in str(error):
            raise
        return row | {"status": "failed", "reason": reason(error, [])}


def search(attempt: Callable[[int], dict], fits: int, limit: float, halvings: int) -> list[dict]:
    """Probes from a sequence that fits: doubled until one fails or ``limit`` is reached, then the octave halved so often."""
    rows, fails = [], None
    while fails is None and fits < limit:
        rows.append(attempt(2 * fits))
        if rows[-1]["status"] == "failed":
            return rows
        fits, fails = (2 * fits, None) if rows[-1]["status"] == "ok" else (fits, 2 * fits)
    for _ in range(halvings if fails else 0):
        middle = (fits + fails) // 2
        rows.append(attempt(middle))
        fits, fails = (middle, fails) if rows[-1]["status"] == "ok" else (fits, middle)
    return rows


def find_ends(config: Config, cells: pd.DataFrame) -> pd.DataFrame:
    """Beyond the sequences timed: of the implementations that hold squares, the sequence where they stop fitting, found by
    doubling and halving, and once more with the allocator's expandable segments; of the others, twice and four times the
    longest, and where FlexAttention's mask can no longer be made. A row a probe, with ``part`` (``pass`` or ``mask``) and
    ``expandable``; empty on a CPU, whose memory is not the allocator's to give."""
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
                rows += search(partial(probe, name, implementations, config), int(fits), limit, PROBE_STEPS * squares)
        if "flex" in longest and not expandable:
            rows += search(partial(probe_mask, config), limit, inf, PROBE_STEPS)
        frames.append(pd.DataFrame(rows).assign(expandable=expandable))
    release(config.device, after_error=True)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return pd.concat(frames, ignore_index=True)


def fused_tensors(name: str, batch: int, sequence: int, d: int, item: int) -> dict[str, tuple[int, str]]:
    """Bytes of what a fused kernel needs, as tensor: (bytes, ``held`` | ``saved`` | ``backward``); ``item`` bytes a number.

    Held throughout: q, k, v, the output and its gradient. Saved by forward besides them: a row's log-sum-exp in fp32
    (Dao et al. 2022, alg. 1). Made in backward: the three gradients, a row's sum of gradient times output in fp32 (Dao 2023,
    alg. 2), and for SDPA's backends, which add up dq over blocks of keys, an fp32 accumulator of it. FlexAttention's mask
    comes to it (:func:`follow_mask`).
    """
    hidden, rows = batch * sequence * d * item, batch * sequence * 4
    tensors = {f"{x}": (hidden, "held") for x in ("q", "k", "v", "output", "gradient of the output")}
    tensors |= {"log-sum-exp": (rows, "saved"), "rows' gradient times output": (rows, "backward")}
    tensors |= {f"d{x}": (hidden, "backward") for x in "qkv"}
    if name != "flex":
        tensors["dq, accumulated in fp32"] = (batch * sequence * d * 4, "backward")
    return tensors


def available_bytes(device: str) -> dict[str, int]:
    """What the device has for tensors: what is free now, and what this process holds of it already."""
    if device == "cpu":
        return {}
    release(device)
    free, total = torch.cuda.mem_get_info()
    return {"available_bytes": free + torch.cuda.memory_reserved(), "device_bytes": total}


def accountings(config: Config, ends: pd.DataFrame) -> pd.DataFrame:
    """:func:`accounting` of the smallest sequence that failed, of each implementation made of torch's operators."""
    failed = ends[(ends["status"] == "oom") & ends["implementation"].isin(WRITTEN) & ~ends["expandable"].astype(bool)]
    tables = [accounting(name, config, int(own["sequence"].min())) for name, own in failed.groupby("implementation", sort=False)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(
        columns=["implementation", "sequence", "tensor", "shape", "bytes"])
