"""Measure one row of the ladder, or the time per module, in a process that ends afterwards."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from timeit import default_timer
from typing import Any

import pandas as pd
import torch

from stepscope import measure
from stepscope.ladder.loop import Case, Loop
from stepscope.model.training_step import reseed
from stepscope.optimizations import any_model
from stepscope.optimizations.transforms import TrainedSubject, Transform, Unsupported, apply
from stepscope.studies.your_model.config import Config
from stepscope.studies.your_model.modules import time_by_module
from stepscope.studies.your_model.source import ModelError, Source, user_line
from stepscope.studies.your_model.subject import UserSubject, examine, make_subject, varying_line

FP32 = "fp32"
COMPILED_CODE = "compiled"  # a subfolder of the job's folder
PROFILED = (
    "gpu_ms",
    "operations",
    "busy",
    "in_graph_share",
)  # the columns of a row that come from its profile
SMALL = 10**6  # with fewer parameters, CPU threads take longer to synchronize than to compute


@dataclass
class Job:
    """A model with some optimizations, to be measured by one process.

    Args:
        folder: a folder that the processes share, for compiled code and the gradients of the fp32 step.
        name: the name of the row.
        stack: the optimizations to apply; the row fails if the last optimization doesn't apply.
        varies: whether the model's operators or shapes change between steps.
    """

    source: Source
    config: Config
    folder: Path
    name: str
    stack: tuple[str, ...]
    varies: bool = False

    @property
    def transforms(self) -> list[Transform]:
        return [getattr(any_model, name) for name in self.stack]

    @property
    def gradients(self) -> Path:
        return self.folder / "fp32.pt"

    def build(self, batch_size: int = 1) -> UserSubject:
        """Build the subject without optimizations.

        ``batch_size`` is unused, because the user's code makes the batch.
        """
        config = self.config
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / COMPILED_CODE / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(self.folder / COMPILED_CODE / "triton")
        measure.prepare(config.device)
        subject = make_subject(self.source, config.keywords, config.device, config.seed)
        subject.varies = self.varies
        parameters = sum(parameter.numel() for parameter in subject.parameters.values())
        if parameters < SMALL and config.device == "cpu":
            import torch._inductor.config as inductor  # imported lazily: it loads the compiler

            torch.set_num_threads(1)
            inductor.compile_threads = 1  # starting compile workers would take longer than compiling
        return subject


@dataclass
class Outcome:
    """The result of a job.

    Args:
        row: a row of the table of steps.
        kernels: the kernels of the profiled step; None if the step wasn't profiled.
        signature: a value that is equal for steps that do the same work; None if unknown.
        facts: facts about the model; None unless the row is fp32.
        varies: whether the steps do different work, so that the fastest step is not representative.
    """

    row: dict[str, Any]
    kernels: pd.DataFrame | None = None
    signature: Any = None
    facts: dict[str, Any] | None = None
    varies: bool = False

    @property
    def is_timed(self) -> bool:
        return "wall_ms" in self.row  # even if profiling failed


class RowLoop(Loop):
    """The ladder's loop for a single case of a user's model, whose code may raise any exception."""

    unsupported = (Unsupported,)  # a compiler that fails may fail because of the model

    def __init__(self, job: Job):
        super().__init__(job.config)
        self.job = job
        self.facts: dict[str, Any] | None = None
        if job.name != FP32 and job.gradients.is_file():
            self.fp32_gradients[1] = torch.load(job.gradients)

    def prepare(self, case: Case) -> TrainedSubject:
        subject = super().prepare(case)
        if "bf16_weights" in self.job.stack and 1 in self.fp32_gradients:
            # In a CUDA graph, MasterAdamW updates all parameters except frozen parameters, so parameters without a
            # gradient are frozen.
            _, gradients = self.fp32_gradients[1]
            for name, parameter in subject.parameters.items():
                parameter.requires_grad_(name in gradients)
        return subject

    def measure(self) -> Outcome:
        job = self.job
        case = Case(job.name, 1, job.build, job.transforms, needed=job.transforms[-1:])
        self.cases = [case]
        self.visit(case, self.first_step, self.time_eager)
        if "wall_ms" not in case.row:
            self.visit(case, self.time_steps)  # loaded again, because compiling fragments the memory
        self.visit(case, self.profile_steps)
        self.repeat_impossible()
        if case.row.get("inconsistent"):
            self.discard_profile(case)
        kernels = self.kernels.get((case.name, 1))
        signature = None
        if kernels is not None and (
            self.on_gpu or not case.compiles
        ):  # a CPU's profile doesn't show compiled code
            signature = case.numbers, [*zip(kernels["name"], kernels["count"])]
        sheet_tflops = measure.sheet_tflops(case.precision, self.device)
        varies = case.subject is not None and case.subject.varies
        return Outcome(case.row | {"sheet_tflops": sheet_tflops}, kernels, signature, self.facts, varies)

    def discard_profile(self, case: Case) -> None:
        """Keep only the unprofiled measurements of a case whose profile is inconsistent with them.

        A profiler slows down some steps, such as a CUDA graph of a thousand small kernels.
        """
        row = case.row
        row["reason"] = f"not profiled: {row['inconsistent']}"
        for name in PROFILED:
            row.pop(name, None)
        row["inconsistent"] = measure.find_inconsistencies(row)  # for example, an impossible power draw
        self.kernels.clear()

    def visit(self, case: Case, *parts: Any) -> None:
        try:
            super().visit(case, *parts)
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            if case.row.get("status", "ok") != "ok" or case.row.get("reason"):
                return  # keep the first error, which is the cause; after a CUDA error, every call raises
            reason = self.reason_of(error)
            is_timed = "wall_ms" in case.row
            case.row |= (
                {"reason": f"not profiled: {reason}"} if is_timed else {"status": "failed", "reason": reason}
            )

    def reason_of(self, error: BaseException) -> str:
        if isinstance(error, Unsupported):  # the transform's message is already complete
            return str(error)
        # Report the first error: ending a failed graph capture raises another error that doesn't name the cause.
        first = error
        while first.__context__ is not None and not first.__suppress_context__:
            first = first.__context__
        guard = re.search(r"guard failure\(s\):\s*- \S+ (.+?)\s+#", str(first))
        if guard and isinstance(first, torch._dynamo.exc.RecompileError):
            return f"{user_line(error)}compiled again in each step, because the code is only valid for {guard[1]}"
        return f"{user_line(error)}{type(first).__name__}: {super().reason_of(first)}"

    def first_step(self, case: Case, subject: TrainedSubject) -> None:
        assert isinstance(subject, UserSubject)
        is_fp32 = case.name == FP32
        # Each row makes one pass before the comparison, so that a model with a state is in the same state in all.
        if is_fp32:
            self.facts = examine(subject)
        else:
            self.compile_s[case.program] = self.time_first_call(subject)
        reseed(self.config.seed)  # some models skip layers or augment images at random
        super().first_step(case, subject)
        if is_fp32:
            torch.save(self.fp32_gradients[1], self.job.gradients)
        if self.facts is not None:
            self.facts["varying"] = varying_line(subject)
            subject.varies = bool(self.facts["varying"])
        loss, optimizer, moments, launch = case.numbers
        layouts = [
            tensor.stride() for tensor in subject.batch[0].values() if isinstance(tensor, torch.Tensor)
        ]
        case.numbers = loss, optimizer.__name__, moments, launch.__name__, layouts

    def settle(self, case: Case, subject: TrainedSubject) -> float:
        """Warm up, and check that the step isn't compiled again afterwards, which would count as the step's time.

        Steps that do different work may be compiled again, but only sometimes.
        """
        step_ms = super().settle(case, subject)
        if not subject.varies:
            with measure.refuse_recompiling():
                subject.step()
        return step_ms

    def time_first_call(self, subject: UserSubject) -> float:
        """Return the duration of the first call in s, with dropout enabled, as in the timed steps.

        The comparison with fp32 disables dropout, and therefore compiles different code.
        """
        start = default_timer()
        subject.gradients()
        measure.synchronizer(self.device)()
        return default_timer() - start


def measure_row(job: Job) -> Outcome:
    """Measure a job's row.

    Raises:
        ModelError: If the model can't be built or trained.
    """
    return RowLoop(job).measure()


def measure_modules(job: Job) -> pd.DataFrame:
    """Return the time per module in a job's eager step; see :func:`time_by_module`."""
    subject = job.build()
    apply(job.transforms, subject)
    subject.find_parameters()
    subject.load(job.config.seed)
    return time_by_module(subject, job.config.device)
