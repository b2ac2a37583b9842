"""What attention's memory has to be, tensor by tensor, without any memory.

What torch's own operators return is found by running them on fake tensors, which have shapes and lifetimes
but no data, and following each storage from its making to its end. What an operator allocates inside itself
is not seen by that; it is written down in :mod:`stepscope.studies.attention.unseen`.
"""
import weakref

import pandas as pd
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.studies.attention.config import WRITTEN, Config
from stepscope.studies.attention.implementations import Implementations, Inputs, block_mask
from stepscope.studies.attention.unseen import INSIDE


class LiveStorages(TorchDispatchMode):
    """Every storage that operators make inside, for as long as something holds it, and those alive at the
    peak.

    ``inside`` names, by operator, what it makes itself besides its result, as large, and drops when it is
    done.
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
        dtype = str(x.dtype).removeprefix("torch.")
        named = f"{self.phase}: {name}" if self.phase else name
        return named, f"{tuple(x.shape)} {dtype}", x.untyped_storage().nbytes()

    def peak(self, more: list[tuple[str, str, int]]) -> None:
        """Look whether what is alive, and ``more``, is the most so far."""
        total = self.bytes + sum(size for *_, size in more)
        if total > self.peak_bytes:
            self.peak_bytes, self.at_peak = total, [*self.live.values(), *more]

    def _gone(self, key: int) -> None:
        self.bytes -= self.live.pop(key)[2]


def follow_pass(name: str, config: Config, sequence: int, causal: bool) -> dict:
    """Forward and backward of one cell on fake tensors.

    Returns ``saved_bytes`` (made by forward and kept for backward, without the output),
    ``forward_peak_bytes``, ``peak_bytes`` (both with inputs and mask) and ``tensors``: what is alive at the
    peak, as (name, shape and type, bytes).
    """
    on_cpu = config.model_copy(update={"device": "cpu"})  # needs no GPU: the operators are the same
    with FakeTensorMode(), LiveStorages(INSIDE if config.device == "cuda" else None) as storages:
        inputs = Inputs(on_cpu, sequence, causal)
        labels = ("q", "k", "v", "gradient of the output")
        for label, x in zip(labels, (inputs.q, inputs.k, inputs.v, inputs.gradient)):
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
    """FlexAttention's causal mask made on fake tensors: ``mask_peak_bytes`` meanwhile
    (:data:`MASK_INSIDE_BYTES` a pair comes to it), ``mask_bytes`` kept."""
    with FakeTensorMode(), LiveStorages() as storages:
        mask = block_mask(sequence, "cpu")  # held while its bytes are read
        found = {"mask_peak_bytes": storages.peak_bytes, "mask_bytes": storages.bytes}
        del mask
    return found


def predicted(config: Config, sequences: list[int]) -> pd.DataFrame:
    """Bytes of the implementations made of torch's operators, a row for each sequence and causal; and of
    FlexAttention's mask (:func:`follow_mask`)."""
    rows = [{"implementation": "flex", "causal": True, "sequence": sequence} | follow_mask(sequence)
            for sequence in sequences if "flex" in config.causal]
    for name in WRITTEN:
        for causal in (True, False):
            if name not in (config.causal if causal else config.unmasked):
                continue
            for sequence in sequences:
                found = follow_pass(name, config, sequence, causal)
                found.pop("tensors")
                rows.append({"implementation": name, "causal": causal, "sequence": sequence} | found)
    return pd.DataFrame(rows, columns=["implementation", "causal", "sequence", "saved_bytes",
                                       "forward_peak_bytes", "peak_bytes", "mask_peak_bytes", "mask_bytes"])


def accounting(name: str, config: Config, sequence: int, causal: bool = True) -> pd.DataFrame:
    """Every tensor alive at the peak of one cell: columns implementation, sequence, tensor, shape, bytes;
    largest first."""
    tensors = follow_pass(name, config, sequence, causal)["tensors"]
    table = pd.DataFrame(tensors, columns=["tensor", "shape", "bytes"])
    table = table.sort_values("bytes", ascending=False, kind="stable")
    table.insert(0, "sequence", sequence)
    table.insert(0, "implementation", name)
    return table.reset_index(drop=True)


def accountings(config: Config, ends: pd.DataFrame) -> pd.DataFrame:
    """:func:`accounting` of the smallest sequence that failed, of each implementation made of torch's
    operators."""
    failed = ends[(ends["status"] == "oom") & ends["implementation"].isin(WRITTEN)
                  & ~ends["expandable"].astype(bool)]
    shortest = failed.groupby("implementation", sort=False)["sequence"].min()
    tables = [accounting(name, config, int(sequence)) for name, sequence in shortest.items()]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(
        columns=["implementation", "sequence", "tensor", "shape", "bytes"])
