"""Describe the machine and the software of a measurement, without host names, addresses or paths."""

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import stepscope

# Sources that can change a measured number: the modules that measure, and their dependencies. Sweeps and reports
# can't change a number. The script that the writeup quotes can, because the ladder measures that script.
MEASURING = (
    "config.py",
    "stats.py",
    "model",
    "measure",
    "optimizations",
    "ladder",
    "traces",
    "studies",
)
OF_REPORT = ("tables.py", "figures.py")  # a study's files that only the report uses
# We report GPU use by other processes only above these limits, which exclude idle CUDA contexts and the low
# utilization that NVML may still show after a process has ended.
MIN_FOREIGN_GIB, MIN_FOREIGN_SHARE = 1.0, 0.1
PACKAGES = ("torch", "triton", "nvtx", "papermill", "ipykernel", "pandas", "numpy", "scipy", "transformers")


def machine(device: str) -> dict[str, Any]:
    """Describe the hardware: the processor, the memory, and, if ``device`` is "cuda", the GPU."""
    cpu = {
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if device == "cpu":
        return {"device_name": cpu["cpu"]} | cpu
    import torch  # imported lazily, here and below, because the command line starts faster without torch

    gpu = torch.cuda.get_device_properties(0)
    return {
        "device_name": gpu.name,
        "gpu_memory_gib": round(gpu.total_memory / 2**30, 2),
        "multiprocessors": gpu.multi_processor_count,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "l2_cache_mib": round(gpu.L2_cache_size / 2**20),
    } | cpu


def _cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def software() -> dict[str, str | int | None]:
    """Describe the software that can change a number: its versions, NCCL's settings, and a digest of our code."""
    versions: dict[str, str | int | None] = {"python": platform.python_version(), "os": platform.system()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    import torch

    versions["torch"] = torch.__version__
    if torch.version.cuda:
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
    return versions | nccl_settings() | {"stepscope_source": source_digest(stepscope.PACKAGE)}


def nccl_settings() -> dict[str, str]:
    """Return NCCL's environment variables, except those that may contain a host, an address or a path."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("NCCL_") and name != "NCCL_HOSTID" and re.fullmatch(r"[\w,^-]+", value)
    }


def source_digest(package: Path) -> str:
    """Return a digest of the :data:`MEASURING` sources in a package's folder, as twelve hexadecimal digits.

    The sources of reports are excluded, because changing a report doesn't change a measurement.
    """
    digest = hashlib.sha256()
    for name in MEASURING:
        room = package / name
        for source in [room] if room.is_file() else sorted(room.rglob("*.py")):
            if not (name == "studies" and source.name in OF_REPORT):
                digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _driver() -> str | None:
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    return None


def foreign_gpu_use() -> str:
    """Describe how other processes use this process's first GPU, or return "" if none of them uses it.

    NVML reports a GPU's memory and utilization even if the processes are hidden, as in a container. The result is
    also "" if this process has already used the GPU (for example, when a notebook is run again), because we can't
    tell its own use from that of other processes.
    """
    import pynvml
    import torch

    if torch.cuda.memory_reserved():
        return ""
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(0).uuid
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        used_gib = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).used / 2**30
        shares = []
        for _ in range(3):  # a single reading may come from a process that has just ended
            shares.append(pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
            time.sleep(0.2)
    except pynvml.NVMLError:
        return ""
    uses = []
    if used_gib >= MIN_FOREIGN_GIB:
        uses.append(f"hold {used_gib:.1f} GiB of this GPU's memory")
    if min(shares) >= MIN_FOREIGN_SHARE:
        uses.append(f"keep this GPU {min(shares):.0%} busy")
    return f"other processes {' and '.join(uses)}" if uses else ""


@functools.cache
def gpus_here() -> list[dict[str, Any]]:
    """Return the GPUs that this process may use, or an empty list if there are none.

    Each GPU's dict contains ``visible`` (its name in ``CUDA_VISIBLE_DEVICES``: an index or the UUID of a GPU or
    MIG instance), ``name``, and ``gib`` (memory in GiB). A subprocess runs the query, so this process neither
    creates a CUDA context nor imports torch.
    """
    import pynvml

    try:
        pynvml.nvmlInit()  # fails fast without a driver, in which case there is no GPU
    except pynvml.NVMLError:
        return []
    command = [sys.executable, "-c", "import stepscope.runs.machine as m; m.print_gpus()"]
    listing = subprocess.run(command, capture_output=True, text=True)
    if listing.returncode != 0 or not listing.stdout:
        return []
    return json.loads(listing.stdout.splitlines()[-1])


def print_gpus() -> None:
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [name.strip() for name in named.split(",")] if named else [str(index) for index in range(count)]
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    print(
        json.dumps(
            [
                {"visible": name, "name": gpu.name, "gib": gpu.total_memory / 2**30}
                for name, gpu in zip(visible, properties)
            ]
        )
    )
