"""What a measurement was taken on: the machine, the software, and the state of the GPU around it."""
import hashlib
import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pynvml

import stepscope
from stepscope.step.sm_clock import nvml_device

PACKAGES = ("torch", "triton", "nvtx", "papermill", "ipykernel", "pandas", "numpy", "scipy")


def machine(device: str) -> dict:
    """The hardware: GPU (if ``device`` is one), processor, memory. No host name, no address."""
    cpu = {"cpu": _cpu_name(), "cpu_cores": len(os.sched_getaffinity(0)),
           "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)}
    if device == "cpu":
        return {"device_name": cpu["cpu"]} | cpu
    import torch  # here and below, not above: see stepscope.config
    gpu = torch.cuda.get_device_properties(0)
    return {"device_name": gpu.name, "gpu_memory_mib": round(gpu.total_memory / 2**20),
            "multiprocessors": gpu.multi_processor_count, "compute_capability": f"{gpu.major}.{gpu.minor}",
            "l2_cache_mib": round(gpu.L2_cache_size / 2**20)} | cpu


def _cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def software() -> dict:
    """Versions of all that can change a figure, and a digest of this package's own source."""
    versions: dict[str, str | int | None] = {"python": platform.python_version(), "os": platform.system()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    import torch
    versions["torch"] = torch.__version__
    if torch.version.cuda:
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
    digest = hashlib.sha256()
    for source in sorted(Path(stepscope.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return versions | {"stepscope_source": digest.hexdigest()[:12]}


def _driver() -> str | None:
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    return None


def gpu_state(device: str) -> dict:
    """Clocks, power, temperature, throttle reasons and neighbours on the GPU now; {} on a CPU.

    A reading that the driver refuses is None, with NVML's reason under ``unread``.
    """
    if device == "cpu":
        return {}
    readings = {
        "sm_clock_mhz": lambda d: pynvml.nvmlDeviceGetClockInfo(d, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda d: pynvml.nvmlDeviceGetClockInfo(d, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda d: pynvml.nvmlDeviceGetPowerUsage(d) / 1e3,
        "power_limit_w": lambda d: pynvml.nvmlDeviceGetEnforcedPowerLimit(d) / 1e3,
        "temperature_c": lambda d: pynvml.nvmlDeviceGetTemperature(d, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda d: throttle_names(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(d)),
        "other_processes": lambda d: sum(process.pid != os.getpid()
                                         for process in pynvml.nvmlDeviceGetComputeRunningProcesses(d)),
    }
    state, unread = {}, {}
    for name, read in readings.items():
        try:
            state[name] = read(nvml_device())
        except pynvml.NVMLError as error:
            state[name], unread[name] = None, str(error)
    return state | ({"unread": unread} if unread else {})


def throttle_names(bits: int) -> list[str]:
    """NVML's bit mask of clock throttle reasons, as words; an idle GPU is not throttled."""
    names = {"SwPowerCap": "software power cap", "HwSlowdown": "hardware slowdown", "SyncBoost": "sync boost",
             "SwThermalSlowdown": "software thermal slowdown",
             "HwThermalSlowdown": "hardware thermal slowdown",
             "HwPowerBrakeSlowdown": "hardware power brake",
             "ApplicationsClocksSetting": "application clocks"}
    prefix = "nvmlClocksThrottleReason"
    return [words for name, words in names.items() if bits & getattr(pynvml, prefix + name)]
