"""Profile steps with torch.profiler, to find which operations each phase launched and when they ran.

Under the profiler, launches take longer, but kernels hardly do: on an H200, the kernels of naive attention took
up to 2% longer (``python -m bench.profiler_cost``). Launches stay slower afterwards, so everything that the host
times is timed before anything is profiled.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, record_function

from stepscope.measure.oom import error_text
from stepscope.traces.attribution import ConservationError, TraceError
from stepscope.traces.profiled_steps import PROFILED_COLUMNS, RANGE, CaptureError, profiled_operations


@contextmanager
def profiled(activities: Sequence[ProfilerActivity] | None = None) -> Iterator[torch.profiler.profile]:
    """Profile the block of a ``with`` statement, using ``torch.profiler.profile``.

    PyTorch 2.11 warns about multiple profiling cycles even if there is only one. We ignore this warning.

    Args:
        activities: the activities to record, or None to record all available activities.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        with torch.profiler.profile(activities=activities) as profiler:
            yield profiler


class StepProfiler:
    """A context manager that profiles a GPU's kernels, or a CPU's operators.

        with StepProfiler("cuda") as profile:
            for number in range(3):
                step(profile.phases("step", number))
                synchronize()
        profile.operations, profile.reason

    Read ``operations`` before the process profiles again, because the next profile makes PyTorch lose the GPU's
    part of this profile.
    """

    def __init__(self, device: str):
        self.activities = [ProfilerActivity.CPU]  # records the ranges
        if device == "cuda":
            self.activities.append(ProfilerActivity.CUDA)
        self.cases: list[Hashable] = []
        self.profiler: Any = None
        self.reason = ""  # the reason why there is no profile

    def __enter__(self) -> Self:
        try:
            self.session = profiled(self.activities)
            self.profiler = self.session.__enter__()
        except RuntimeError as error:  # from CUPTI
            self.reason = f"torch.profiler: {error_text(error)}"
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.profiler is None:
            return
        try:
            self.session.__exit__(*exception)
        except RuntimeError as error:
            self.profiler = None
            self.reason = f"torch.profiler: {error_text(error)}"

    def phases(self, case: Hashable, number: int) -> Callable[[str], AbstractContextManager]:
        """Return a function that opens a range for each phase. Pass this function to a step as ``phase``.

        Args:
            case: the case of the step.
            number: the step's number within its case.
        """
        if case not in self.cases:
            self.cases.append(case)
        index = self.cases.index(case)
        return lambda phase: record_function(f"{RANGE}/{index}/{number}/{phase}")

    @cached_property
    def operations(self) -> pd.DataFrame:
        """One row per operation, with the columns case, number, phase, name, kernel_category, start_ns and end_ns.

        The table is empty if the profiler failed; ``reason`` then says why.
        """
        try:
            if self.profiler is None:
                raise CaptureError(self.reason or "nothing was profiled")
            operations = read(self.profiler, ProfilerActivity.CUDA in self.activities)
        except (CaptureError, ConservationError, TraceError, OSError) as error:
            self.reason = str(error)
            return pd.DataFrame(columns=PROFILED_COLUMNS)
        finally:
            self.profiler = None  # frees its memory
        case_by_index = dict(enumerate(self.cases))
        return operations.assign(case=operations["case"].map(case_by_index))


def read(profiler: torch.profiler.profile, on_gpu: bool) -> pd.DataFrame:
    """Return the GPU's operations in this process's last profile, or the CPU's if ``on_gpu`` is False.

    Raises:
        CaptureError: If the GPU's part of the profile is lost.
        CaptureError, ConservationError, TraceError: For the same reasons as in
            :func:`stepscope.traces.profiled_steps.profiled_operations`.
    """
    with TemporaryDirectory(prefix="stepscope-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        operations = profiled_operations(trace)
    has_cpu_operators = operations["name"].str.startswith("aten::").any()
    if on_gpu and has_cpu_operators:
        raise CaptureError("the profile contains CPU operators, but no GPU operations")
    return operations
