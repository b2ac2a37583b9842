"""Simulate the CUDA allocator and CUDA's autocast on a CPU, to test how memory is recorded."""

import weakref

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Storages(TorchDispatchMode):
    """A context manager that records which storages are allocated and freed.

    Allocated sizes are rounded up to multiples of 512 bytes.
    """

    def __init__(self):
        super().__init__()
        self.trace, self.live = [], {}
        self.counts = {"allocated": 0, "freed": 0}
        self.bytes = {
            name: {"current": 0, "peak": 0}
            for name in ("allocated_bytes", "requested_bytes", "reserved_bytes")
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() and storage.data_ptr() not in self.live:
                    self.live[storage.data_ptr()] = storage.nbytes()
                    self._note("alloc", storage.data_ptr(), storage.nbytes(), 1)
                    weakref.finalize(storage, self._drop, storage.data_ptr(), storage.nbytes())
        return out

    def _drop(self, address, size):
        del self.live[address]
        self._note("free_requested", address, size, -1)

    def _note(self, action, address, size, sign):
        self.trace.append({"action": action, "addr": address, "size": size, "frames": []})
        self.counts["allocated" if sign > 0 else "freed"] += 1
        for name, level in self.bytes.items():
            level["current"] += sign * (size if name == "requested_bytes" else -(-size // 512) * 512)
            level["peak"] = max(level["peak"], level["current"])

    def stats(self):
        return {"allocation": {"all": dict(self.counts)}} | {
            name: {"all": dict(level)} for name, level in self.bytes.items()
        }

    def reset_peak(self):
        for level in self.bytes.values():
            level["peak"] = level["current"]

    def record(self, enabled=None, **options):
        if enabled:
            self.trace.clear()

    def snapshot(self):
        return {"device_traces": [list(self.trace)], "segments": []}


def stand_in(monkeypatch) -> Storages:
    """Make torch.cuda's memory functions report CPU storages; return a recorder to enter around the step."""
    storages = Storages()
    for name, answer in {
        "synchronize": lambda: None,
        "memory_stats_as_nested_dict": storages.stats,
        "reset_peak_memory_stats": storages.reset_peak,
        "memory_allocated": lambda: storages.bytes["allocated_bytes"]["current"],
        "max_memory_allocated": lambda: storages.bytes["allocated_bytes"]["peak"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", storages.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", storages.snapshot)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return storages


class CudaAutocast(TorchFunctionMode):
    """A context manager that applies CUDA's bf16 autocast rules on a CPU, where autocast's rules differ.

    Matmuls run in bf16, and the bf16 copy of each weight is kept until the context exits. Exponentials, powers,
    inverse roots, sums and the loss run in fp32 (PyTorch's "CUDA Ops that can autocast to float16 / float32").
    """

    def __init__(self):
        super().__init__()
        self.copies = {}

    def __exit__(self, *exception):
        self.copies.clear()
        return super().__exit__(*exception)

    def cast(self, value, dtype):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if value.is_leaf and value.requires_grad and dtype == torch.bfloat16:
            if id(value) not in self.copies:
                self.copies[id(value)] = value.to(dtype)
            return self.copies[id(value)]
        return value.to(dtype)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (functional.linear, torch.Tensor.__matmul__, torch.Tensor.matmul):
            args = [self.cast(value, torch.bfloat16) for value in args]
        elif func in (torch.exp, torch.Tensor.pow, torch.rsqrt):
            args = [self.cast(value, torch.float32) for value in args]
        elif func is torch.Tensor.sum and args[0].dtype == torch.bfloat16:
            kwargs = kwargs | {"dtype": torch.float32}
        elif func is functional.cross_entropy:
            # log_softmax runs in the logits' dtype; autocast changes only the dtype of nll_loss.
            return functional.nll_loss(functional.log_softmax(args[0], -1).float(), args[1])
        return func(*args, **kwargs)
