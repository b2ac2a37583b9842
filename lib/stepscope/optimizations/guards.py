"""Check MasterAdamW's arguments: parameters must fit into the buffers, and options must be supported.

A failed check raises a ValueError. Without the checks, training would continue with wrong results, because an
option would be ignored, or because another library shards or averages the parameters.
"""

import gc
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

DDP = "DistributedDataParallel"
WRAPPERS = {DDP, "FullyShardedDataParallel", "ZeroRedundancyOptimizer"}
UNSUPPORTED = ("maximize", "amsgrad", "differentiable")  # options of torch's AdamW


def find_wrapper(parameters: Iterable[Tensor]) -> Any:
    """Return the DDP, FSDP or ZeRO object that holds one of these parameters, or None.

    PyTorch doesn't mark wrapped parameters, so this function searches all live objects if there is a process
    group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    gc.collect()  # removes wrappers that are no longer referenced
    wanted = set(map(id, parameters))
    for candidate in gc.get_objects():
        kind = type(candidate)
        if not issubclass(kind, (nn.Module, torch.optim.Optimizer)):
            continue
        if WRAPPERS.isdisjoint(base.__name__ for base in kind.__mro__):
            continue
        if isinstance(candidate, nn.Module):
            held = candidate.parameters()
        else:
            held = chain.from_iterable(group["params"] for group in candidate.param_groups)
        if not wanted.isdisjoint(map(id, held)):
            return candidate
    return None


def check_group(group: dict[str, Any], moments: torch.dtype) -> None:
    """Check a parameter group's options.

    Raises:
        ValueError: If an option is out of range (the message is torch's), or if MasterAdamW doesn't support it.
    """
    rate, beta1 = group["lr"], group["betas"][0]
    if isinstance(rate, Tensor):
        if rate.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    elif not rate >= 0:
        raise ValueError(f"Invalid learning rate: {rate}")
    for index, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not group["eps"] >= 0:
        raise ValueError(f"Invalid epsilon value: {group['eps']}")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
    if moments == torch.bfloat16 and 1 - beta1 < 2**-8:
        raise ValueError(
            f"betas: got {beta1} with bf16 moments, but expected at most 1 - 2^-8:"
            " with a larger beta1, the mean of the gradients would round back to itself and never fall"
        )
    for name in UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"{name}: got {group[name]}, but MasterAdamW doesn't support this option")


def check_parameters(named: Mapping[str, Tensor]) -> None:
    """Check that the parameters can become views of one buffer.

    Raises:
        ValueError: If parameters are sharded, already wrapped by DDP, on several devices, or neither fp32 nor
            bf16.
    """
    first, *_ = named
    device = named[first].device
    for name, parameter in named.items():
        kind = type(parameter.data)
        if kind is not Tensor:
            raise ValueError(
                f"{name}: got a {kind.__name__}, but expected a plain tensor: MasterAdamW works on one GPU or"
                f" under {DDP}, without sharding"
            )
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{name}: got {parameter.dtype}, but expected torch.float32 or torch.bfloat16")
        if parameter.device != device:
            raise ValueError(
                f"{name}: got a parameter on {parameter.device}, but expected {device}, the device of {first}"
            )
    wrapper = find_wrapper(named.values())
    if wrapper is None:
        return
    kinds = [base.__name__ for base in type(wrapper).__mro__]
    if DDP in kinds:
        raise ValueError(
            f"create MasterAdamW before you wrap the model in {DDP}, because {DDP} fixes the weights' dtypes"
        )
    raise ValueError(f"MasterAdamW works on one GPU or under {DDP}, but {kinds[0]} shards its parameters")


def has_strides(x: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether a tensor has these strides, except in dimensions of size 1, whose strides don't matter."""
    if x.stride() == strides:
        return True
    return all(size == 1 or own == other for size, own, other in zip(x.shape, x.stride(), strides))


def recurrent_weights(modules: Iterable[nn.Module]) -> set[Tensor]:
    """Return the parameters of recurrent layers, which stay fp32.

    cuDNN needs all weights of such a layer in one dtype, and biases stay fp32.
    """
    layers = [module for module in modules if isinstance(module, nn.RNNBase)]
    return {parameter for layer in layers for parameter in layer.parameters()}
