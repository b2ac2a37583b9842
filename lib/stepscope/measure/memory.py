"""Read the allocator's statistics, and find the tensors that autograd saves for the backward pass."""

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
    """Return a dict with ``state_gib``, the memory in GiB that tensors occupy now; on a CPU, the dict is empty."""
    return {"state_gib": torch.cuda.memory_allocated() / GIB} if device == "cuda" else {}


def peak_memory(device: str) -> dict[str, float]:
    """Return the peak memory in GiB since :func:`reset_peak_memory`.

    ``peak_gib`` is the memory allocated to tensors, and ``reserved_gib`` is the memory reserved from the driver.
    The result is empty on a CPU, whose allocator doesn't keep statistics.
    """
    if device != "cuda":
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def device_bytes(device: str) -> float:
    """Return how many bytes this process's tensors can occupy in total.

    The result is NaN on a CPU, whose memory is shared with other programs.
    """
    if device != "cuda":
        return float("nan")
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def storage_bytes(*tensors: Any) -> int:
    """Return the total size of the tensors' storages in bytes. A storage that several tensors share counts once.

    Args:
        tensors: tensors, possibly nested in tuples, lists and dicts. Other values are ignored.
    """
    storages = [x.untyped_storage() for x in tree_leaves(tensors) if isinstance(x, Tensor)]
    bytes_by_address = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(bytes_by_address.values())


def saved_for_backward(call: Callable[..., Any], *inputs: Any) -> tuple[Any, list[Tensor]]:
    """Run ``call(*inputs)``; return its output, and the tensors that autograd saves for the backward pass.

    The list contains one tensor per storage. It includes the inputs and the output if the backward pass
    needs them.
    """
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = call(*inputs)
    return output, list(saved.values())


def pass_memory(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor, held: int, device: str
) -> dict[str, float]:
    """Run the forward and backward passes once; return the memory that they use, in bytes.

    Args:
        call: the forward pass, a function of ``inputs``.
        inputs: the tensors whose gradients the backward pass computes.
        gradient: the gradient of the output.
        held: the bytes in use before the call, for example for inputs and a mask. All results except ``saved``
            include them.
        device: "cuda" or "cpu".

    Returns:
        saved: the bytes that the forward pass creates and saves for the backward pass, excluding the output.
        in_use: the bytes in use between the two passes, including the output.
        forward, backward: the peak during the forward pass, and the peak during both passes. Both are missing on
            a CPU, whose allocator doesn't keep statistics.

        On a CPU, ``saved`` counts the storages that autograd saves, except those of the inputs, the output and
        boolean masks. Masks are excluded because the forward pass doesn't create them.
    """
    for x in inputs:
        x.grad = None
    if device != "cuda":
        return _pass_memory_on_cpu(call, inputs, held)
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
        "in_use": after - before + held,
        "forward": forward_peak - before + held,
        "backward": torch.cuda.max_memory_allocated() - before + held,
    }


def _pass_memory_on_cpu(call: Callable[..., Tensor], inputs: Sequence[Tensor], held: int) -> dict[str, float]:
    output, kept = saved_for_backward(call, *inputs)
    outer_addresses = {x.untyped_storage().data_ptr() for x in (*inputs, output)}
    saved = 0
    for x in kept:
        storage = x.untyped_storage()
        if x.dtype != torch.bool and storage.data_ptr() not in outer_addresses:
            saved += storage.nbytes()
    return {"saved": saved, "in_use": held + storage_bytes(output) + saved}
