"""Memory of a pass of attention and of FlexAttention's mask, as the allocator counts it."""
from collections.abc import Callable

import torch
from torch import Tensor

from stepscope.step.compiling import release
from stepscope.studies.attention.implementations import Inputs, mask_tensors


def available_bytes(device: str) -> dict[str, int]:
    """What the device has for tensors: what is free now, and what this process holds of it already."""
    if device == "cpu":
        return {}
    release(device)
    free, total = torch.cuda.mem_get_info()
    return {"available_bytes": free + torch.cuda.memory_reserved(), "device_bytes": total}


def mask_memory(inputs: Inputs, device: str) -> dict[str, float]:
    """Makes FlexAttention's mask. ``mask_peak_bytes``: the most in use meanwhile, with q, k, v and the
    output's gradient; ``mask_bytes`` of it are kept. Nothing without a mask, or where the allocator does not
    count."""
    if device == "cpu" or not inputs.causal:
        return {}
    held = inputs.held_bytes("none")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = sum(x.untyped_storage().nbytes() for x in mask_tensors(inputs.blocks))
    torch.cuda.synchronize()
    return {"mask_peak_bytes": torch.cuda.max_memory_allocated() - before + held, "mask_bytes": kept}


def memory_pass(call: Callable[[], Tensor], inputs: Inputs, held: int, device: str) -> dict[str, float]:
    """One more pass for its memory, in bytes; ``held`` is what is in use before it (``Inputs.held_bytes``).

    ``in_use_bytes``: before backward, with q, k, v, the output's gradient and the mask; ``saved_bytes``: of
    it, what forward made and keeps for backward, the output not counted; ``forward_peak_bytes`` and
    ``peak_bytes``: the most in use in forward and in the whole pass. A CPU's allocator counts nothing: there
    ``saved_bytes`` is the storages that autograd is handed, and the peaks are missing.
    """
    inputs.clear_gradients()
    if device == "cpu":
        output, saved = handed_to_autograd(call, inputs)
        return {"saved_bytes": saved, "in_use_bytes": held + output.untyped_storage().nbytes() + saved}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = call()
    torch.cuda.synchronize()
    after, forward_peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    output.backward(inputs.gradient)
    torch.cuda.synchronize()
    return {"in_use_bytes": after - before + held,
            "saved_bytes": after - before - output.untyped_storage().nbytes(),
            "forward_peak_bytes": forward_peak - before + held,
            "peak_bytes": torch.cuda.max_memory_allocated() - before + held}


def handed_to_autograd(call: Callable[[], Tensor], inputs: Inputs) -> tuple[Tensor, int]:
    """The output, and the bytes of the storages that autograd keeps for backward: q, k, v, the output and the
    boolean mask (which is made once, and not by forward) aside."""
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = call()
    for x in (inputs.q, inputs.k, inputs.v, output):
        saved.pop(x.untyped_storage().data_ptr(), None)
    return output, sum(x.untyped_storage().nbytes() for x in saved.values() if x.dtype != torch.bool)
