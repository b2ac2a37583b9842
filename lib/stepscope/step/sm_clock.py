"""The clock that the GPU runs at, which NVML reads."""
import functools
from contextlib import suppress

import pynvml
import torch


@functools.cache
def nvml_device():
    """NVML's handle of torch's first device, found by its UUID since CUDA_VISIBLE_DEVICES may renumber."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def sm_clock_mhz() -> float | None:
    """The GPU's SM clock now, None where NVML does not say.

    Also None in a process that uses no GPU: there may be one, whose clock is none of its steps'."""
    if not torch.cuda.is_initialized():
        return None
    with suppress(pynvml.NVMLError):
        return float(pynvml.nvmlDeviceGetClockInfo(nvml_device(), pynvml.NVML_CLOCK_SM))
    return None
