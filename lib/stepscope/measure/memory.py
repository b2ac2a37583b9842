"""What the allocator counts, and what autograd keeps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepscope.measure.timing import synchronizer

GIB = 2**30


def reset_peak_memory(device: str) -> None:
    """Reset a GPU's peak memory statistics, and free cached blocks, which would count as reserved."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated_memory(device: str) -> dict[str, float]:
    """Return ``state_gib``, the memory that tensors hold now; empty on a CPU."""
    return {"state_gib": torch.cuda.memory_allocated() / GIB} if device == "cuda" else {}


def peak_memory(device: str) -> dict[str, float]:
    """``peak_gib`` (in tensors) and ``reserved_gib`` (of the driver) since :func:`reset_peak_memory`; empty on a
    CPU, whose allocator counts nothing."""
    if device != "cuda":
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def device_bytes(device: str) -> float:
    """What the device has for this process's tensors; nan on a CPU, whose memory is not the allocator's."""
    if device != "cuda":
        return float("nan")
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def storage_bytes(*tensors: Any) -> int:
    """Bytes of the pieces of memory that tensors (or tuples, lists and dicts of them) lie in, each once."""
    storages = [x.untyped_storage() for x in tree_leaves(tensors) if isinstance(x, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def saved_for_backward(call: Callable[..., Any], *inputs: Any) -> tuple[Any, list[Tensor]]:
    """What ``call(*inputs)`` gives, and the tensors that autograd keeps for its backward, one for each piece
    of memory. Inputs and output are among them where backward needs them."""
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = call(*inputs)
    return output, list(saved.values())


def pass_memory(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor, own: int, device: str
) -> dict[str, float]:
    """One forward and backward for its memory, in bytes; ``own`` is what of it is in use before.

    ``saved``: what forward makes and keeps for backward, the output not counted; ``in_use``: before backward,
    with inputs, mask and output; ``forward``, ``backward``: the most in use in forward, and in the pass. A
    CPU's allocator counts nothing: there ``saved`` is the storages that autograd is handed, inputs, output
    and boolean masks (which are made once, and not by forward) aside, and the peaks are missing.

    Args:
        gradient: the output's.
    """
    for x in inputs:
        x.grad = None
    if device != "cuda":
        output, kept = saved_for_backward(call, *inputs)
        there = {x.untyped_storage().data_ptr() for x in (*inputs, output)}
        saved = storage_bytes(
            [x for x in kept if x.dtype != torch.bool and x.untyped_storage().data_ptr() not in there]
        )
        return {"saved": saved, "in_use": own + storage_bytes(output) + saved}
    synchronize = synchronizer(device)
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = call(*inputs)
    synchronize()
    after, forward_peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    output.backward(gradient)
    synchronize()
    return {
        "saved": after - before - storage_bytes(output),
        "in_use": after - before + own,
        "forward": forward_peak - before + own,
        "backward": torch.cuda.max_memory_allocated() - before + own,
    }
