"""The ladder's loop: measure a training step after each optimization, on top of the previous optimizations.

    ladder = Ladder(config, transformer, [tf32, bf16, ...], beyond=[chunked, fp8], baselines={...})
    ladder.measure()
    ladder.tables      steps, kernels and curves, for the record
    ladder.results     the device's rates and limits

For each optimization and batch size, :meth:`Ladder.measure`

1. builds the subject, applies the transforms, compiles, and compares the loss and gradients with those of fp32;
2. times steps back to back, and measures power, energy and clock during these steps;
3. trains on text, if the configuration asks for it.

The steps are profiled after everything has been timed, because launches stay slower once a profiler has run in a
process. Steps with impossible readings are measured again, at most twice. A transform that changes neither
operations nor numbers is rejected. Otherwise, a transform that has no effect, for example because it sets a
misspelled attribute, would get a plausible row.

The learning rate is negligible while steps are timed or profiled, so that all steps run on the same weights.

If an optimization doesn't apply, fails or runs out of memory, its row contains the reason. The loop then frees the
optimization's memory and continues with the next optimization. An optimization's weights are on the device only
while it is measured.
"""

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from stepscope import measure
from stepscope.ladder import numerics
from stepscope.ladder.loop import Build, Case, Loop, show
from stepscope.model.flops import parameter_count, step_flops
from stepscope.model.text import text_batches
from stepscope.optimizations import fp8
from stepscope.optimizations.transforms import TrainedSubject, Transform
from stepscope.report.schemas import LATER
from stepscope.studies.ladder import bounds, training
from stepscope.studies.ladder.config import ADDED, FILLED, MEASURES, Config

TRAINED_STEPS = 100  # number of training steps before gradients are compared again
LAST_EAGER = "fused_adamw"  # the last eager step of the ladder, which is also timed as a CUDA graph
KEEPS_MEMORY = "hugging_face_reduce_overhead"  # never frees its memory, so it is measured last

Baselines = Mapping[str, tuple[Build, Sequence[Transform]]]


class Ladder(Loop):
    """Measure optimizations, each on top of the previous ones.

    Args:
        config: selects the optimizations, ablations, baselines and batch sizes to measure.
        build: builds the subject without any optimization, for the row ``fp32``.
        optimizations: transforms, in the order in which they are applied.
        beyond: transforms that are each applied to the fully optimized step.
        baselines: for each name, a function that builds a third-party step, and the transforms that the step
            needs.
    """

    replayed = LAST_EAGER
    config: Config

    def __init__(
        self,
        config: Config,
        build: Build,
        optimizations: Sequence[Transform],
        beyond: Sequence[Transform] = (),
        baselines: Baselines | None = None,
    ):
        super().__init__(config)
        self.batch_sizes: list[int] = config.batch_sizes or [config.batch_size]
        self.curves: dict[str, pd.DataFrame] = {}
        self.ceilings: dict[str, float] = {}
        self.sustained: dict[str, float] = {}
        self.cases = self._ladder(build, optimizations, beyond)
        self.cases += self._filled(build, optimizations, beyond)
        self.cases += self._without(build, optimizations)
        self.cases += self._baselines(baselines or {})

    # The cases

    def _ladder(
        self,
        build: Build,
        optimizations: Sequence[Transform],
        beyond: Sequence[Transform],
    ) -> list[Case]:
        stacks: list[list[Transform]] = [[]]
        for transform in optimizations:
            stacks.append([*stacks[-1], transform])
        for transform in beyond:
            stacks.append([*optimizations, transform])
        cases = []
        for stack in stacks:
            name = stack[-1].__name__ if stack else "fp32"
            if name not in self.config.optimizations:
                continue
            for batch in self.batch_sizes:
                cases.append(Case(name, batch, build, stack, needed=stack[-1:]))
        return cases

    def _filled(
        self,
        build: Build,
        optimizations: Sequence[Transform],
        beyond: Sequence[Transform],
    ) -> list[Case]:
        """Return a list with the case that fills memory: the optimized step with chunked loss and a large batch.

        The list is empty if the configuration doesn't ask for this case.
        """
        if not self.config.fill_memory:
            return []
        memory = torch.cuda.get_device_properties(0).total_memory if self.on_gpu else 0
        batch = bounds.filling_batch(self.config, memory)
        chunked = [transform for transform in beyond if transform.__name__ == "chunked_loss"]
        stack = [*optimizations, *chunked]
        return [Case(FILLED, batch, build, stack, needed=chunked)]

    def _without(self, build: Build, optimizations: Sequence[Transform]) -> list[Case]:
        cases = []
        for left_out in optimizations:
            if left_out.__name__ not in self.config.ablations:
                continue
            name = f"without_{left_out.__name__}"
            stack = [transform for transform in optimizations if transform is not left_out]
            for batch in self.batch_sizes:
                cases.append(Case(name, batch, build, stack, left_out=left_out))
        return cases

    def _baselines(self, baselines: Baselines) -> list[Case]:
        cases = []
        for name, (build, stack) in baselines.items():
            if name not in self.config.baselines:
                continue
            for batch in self.batch_sizes:
                cases.append(Case(name, batch, build, stack, needed=stack, is_baseline=True))
        return sorted(cases, key=lambda case: case.name == KEEPS_MEMORY)

    # The loop

    def measure(self) -> None:
        """Measure all cases and the device's limits.

        After an interrupt, :attr:`tables` contains the measurements made so far.
        """
        first = [case for case in self.cases if case.name != KEEPS_MEMORY]
        last = [case for case in self.cases if case.name == KEEPS_MEMORY]
        compares_trained = any(case.name == "fp8" for case in first)
        for case in first:
            if compares_trained and case.name not in self.config.optimizations:
                self.compare_trained_gradients()
                compares_trained = False
            self.time(case)
        if compares_trained:
            self.compare_trained_gradients()
        for case in first:
            self.visit(case, self.profile_steps)
        for case in last:
            self.visit(case, self.first_step, self.time_steps, self.profile_steps)
            show(case)
        self.reject_unchanged()
        self.repeat_impossible()
        self.measure_limits()

    def compare_trained_gradients(self) -> None:
        """For bf16 moments and FP8, compare gradients with fp32 gradients again, after a hundred training steps.

        With random initial weights, the model amplifies the rounding errors of its first block in any number
        format; with trained weights, it doesn't.
        """
        batch = self.batch_sizes[0]
        by_name = {case.name: case for case in self.cases if case.batch_size == batch}
        compared = ["fp32", "bf16_moments", "fp8"]
        has_cases = {*compared} <= by_name.keys()
        has_room_for_bytes = self.config.vocab_size >= 256  # each byte of the text is a token
        if not (has_cases and has_room_for_bytes and fp8.has_fp8(self.device)):
            return
        text = text_batches(TRAINED_STEPS + 1, batch, self.config.context_length)
        weights: dict[str, torch.Tensor] = {}
        fp32: list[Any] = []  # the loss and gradients in fp32

        def train(case: Case, subject: TrainedSubject) -> None:
            training.losses(subject, text[:-1], self.config.seed)
            for name, weight in subject.weights().items():
                weights[name] = weight.cpu()

        def compare(case: Case, subject: TrainedSubject) -> None:
            loss, gradients = numerics.gradient_at(subject, weights, text[-1])
            if case.name == "fp32":
                fp32.extend((loss, gradients))
            elif fp32:
                errors = numerics.relative_errors(subject, loss, *fp32)
                case.row["trained_gradient_error"] = errors["gradient_error"]

        self.visit(by_name["bf16_moments"], train)
        for name in compared:
            self.visit(by_name[name], compare)

    def after_timing(self, case: Case, subject: TrainedSubject) -> None:
        """Train on text, if the configuration asks for it."""
        is_last_batch = case.batch_size == max(self.batch_sizes)
        is_trained = self.config.training_steps and case.name in self.config.optimizations
        if is_trained and is_last_batch and case.name not in self.curves:
            self.curves[case.name] = training.train(self.config, subject, case.name)

    def reject_unchanged(self) -> None:
        """Reject transforms that change nothing.

        A transform changes nothing if the operations, the first loss, the optimizer and its memory, and the launch
        are the same as without it.
        """
        ladder = [case for case in self.cases if case.name in self.config.optimizations]
        for case in ladder:
            for before in ladder:
                is_same_batch = before.batch_size == case.batch_size
                is_before = bool(case.applied) and before.applied == case.applied[:-1]
                if is_same_batch and is_before and self.is_equal(case, before):
                    self.reject(case, before)

    def reject(self, case: Case, before: Case) -> None:
        reason = (
            f"it changes nothing: operations, loss, optimizer and launch are the same as for {before.name}"
        )
        case.row = {
            "optimization": case.name,
            "batch_size": case.batch_size,
            "status": "failed",
            "reason": reason,
        }
        del self.kernels[case.name, case.batch_size]
        self.curves.pop(case.name, None)
        print(f"{case.name}, batch {case.batch_size}: {reason}")

    # The record

    def measure_limits(self) -> None:
        """Measure the device's peak and sustained rates, after freeing the memory of all cases."""
        for case in self.cases:
            case.subject = None
        self.programs.clear()
        gc.collect()
        measure.release(self.device)
        for _ in range(measure.TRIES):
            self.ceilings = measure.ceilings(self.device)
            self.sustained = bounds.sustained_matmul_rate(self.device)
            peak_tflops = self.ceilings["matmul_bf16"]
            sustained_tflops = self.sustained.get("sustained_tflops", 0)
            if peak_tflops >= sustained_tflops:
                break
            print(
                f"measuring the peak rates again: the bf16 matmul's peak is {peak_tflops:.0f} TFLOP/s, but it"
                f" sustained {sustained_tflops:.0f} TFLOP/s for a second"
            )
        self.ceilings |= bounds.fp8_ceiling(self.device)

    def rates(self, case: Case) -> dict[str, float]:
        """Return the throughput, utilization and lower bound of a timed case."""
        row = case.row
        precision = case.precision
        step = self.config.step(batch_size=case.batch_size)
        tokens = case.batch_size * self.config.context_length
        tflops = step_flops(step) / row["wall_ms"] / 1e9
        mfu = tflops / measure.sheet_tflops(precision, self.device)
        sheet_mhz = measure.sheet_clock_mhz(precision, self.device)
        rates = {
            "tokens_per_s": tokens / row["wall_ms"] * 1e3,
            "mfu": mfu,
            "mfu_vs_measured_peak": tflops / self.ceilings.get(f"matmul_{precision}", math.nan),
            "mfu_clock_adjusted": mfu * sheet_mhz / row.get("sm_clock_mhz", math.nan),
        }
        return rates | bounds.lower_bound(step, precision, case.moments, self.ceilings)

    @property
    def steps(self) -> pd.DataFrame:
        """One row per optimization and batch size, in the order of the configuration."""
        without = [f"without_{name}" for name in self.config.ablations]
        names = [*self.config.optimizations, *without, *self.config.baselines]
        order = [(name, batch) for batch in self.batch_sizes for name in names]
        by_key = {(case.name, case.batch_size): case for case in self.cases}
        order += [key for key in by_key if key[0] == FILLED]
        rows = []
        for name, batch in order:
            case = by_key[name, batch]
            row = dict(case.row)
            graph = by_key.get(("cuda_graph", batch))
            if name == "compiled_blocks" and graph and "wall_ms" in graph.row:
                row["replayed_ms"] = graph.row["wall_ms"]
            if "wall_ms" in row and self.ceilings:
                row |= self.rates(case)
            rows.append(row)
        columns = [
            "optimization",
            "batch_size",
            "status",
            "reason",
            *MEASURES,
            *ADDED,
            *LATER,
            "inconsistent",
        ]
        steps = pd.DataFrame(rows, columns=columns)
        inconsistent = steps["inconsistent"].astype(object).fillna("")
        steps["inconsistent"] = inconsistent.astype(str)
        return steps

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        tables = {"steps": self.steps}
        if self.kernels:
            tables["kernels"] = pd.concat(self.kernels.values(), ignore_index=True)
        if self.curves:
            tables["curves"] = pd.concat(self.curves.values(), ignore_index=True)
        return tables

    @property
    def results(self) -> dict[str, float]:
        """The device's known rates and limits, and the learning rate of the measured steps."""
        known: dict[str, float | None] = {**self.ceilings, **self.sustained}
        known |= {
            "parameters": parameter_count(self.config),
            "power_limit_w": measure.power_limit_w(),
            "learning_rate": self.learning_rate,
            "sheet_bf16": measure.sheet_tflops("bf16", self.device),
        }
        results = {}
        for name, value in known.items():
            if value is not None and not math.isnan(value):
                results[name] = value
        return results
