"""The measurement protocol: compile, time, profile and replay a dictionary of training steps.

    subject = measure.Subject(model, (tokens, targets), optimizer=adamw)
    cases = {mode: partial(step, mode) for mode in ("step", "forward_backward", "forward")}
    results = measure.steps(subject, cases, config)
    results.times        one row per case and phase
    results.operations   GPU time by case, phase and kernel
    results.samples      every timed step

The order matters, because launches stay slower once a profiler has run in a process:

1. Compile every case, if the configuration uses torch.compile.
2. Time every case: warm up, then time steps until their median is reliable; also read peak memory and power.
3. Profile every case.
4. Replay the forward pass and the full step as CUDA graphs.
5. Check the readings. Cases with impossible readings are measured again, at most twice.
6. Measure the device's ceilings (the rates of a large matmul and of a copy), to compute utilization.

If a case runs out of memory, its row gives the reason, and the other cases continue. The learning rate is always
negligible, so that all steps run on the same weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from stepscope.config import PHASES, TOTAL, ConfigError, StepConfig, require_device
from stepscope.measure.compiler import fresh_compiler_cache, seconds_with_compiling
from stepscope.measure.graph import replay
from stepscope.measure.memory import allocated_memory, peak_memory, reset_peak_memory
from stepscope.measure.oom import error_text, out_of_memory
from stepscope.measure.power import Power, highest_clock_mhz, sustained_power
from stepscope.measure.profiler import StepProfiler
from stepscope.measure.rates import FROM_FLOPS, ceilings, sheet_tflops, with_rates
from stepscope.measure.sanity_checks import TRIES, is_power_limited
from stepscope.measure.subject import Subject, learning_rate, negligible_learning_rate
from stepscope.measure.times import key_columns, operations_by_name, step_times
from stepscope.measure.timing import SAMPLE_COLUMNS, run_for, synchronizer, time_steps, wall_times_ms
from stepscope.model.flops import formula_mismatch
from stepscope.model.training_step import grad_scaler, release
from stepscope.traces.profiled_steps import PROFILED_COLUMNS

Case = Any  # a mode, or a pair such as (precision, mode)
Step = Callable[..., Any]  # runs one step; takes an optional ``phase``
Clock = Callable[[Step, int, int, Callable[[], object]], pd.DataFrame]

LONG_MS = 1000.0  # longer steps are repeated fewer times
WARMUPS, WARMUPS_IF_LONG = 2, 1  # for all cases except the first, which starts in a cold process
PROFILED_STEPS, PROFILED_STEPS_IF_LONG = 3, 2
REPLAYS, REPLAYS_IF_LONG = 5, 3
REPLAYED_MODES = ("forward", "step")
# A power-limited step runs this long before it is profiled, so that the limit lowers the clock.
SETTLING_S = 0.5


@dataclass
class Results:
    """The measurements of all cases.

    times: one row per case and phase. A case that failed has one row, with its status and the reason.
    operations: counts and GPU times by case, phase and kernel, from each case's fastest profiled step.
    samples: every timed step. If the first case was measured again, its first measurement is kept.
    profiled: every operation of every profiled step, with start and end (columns case, number, ...).
    ceilings: the rates of a large matmul in each precision, in TFLOP/s, and of a copy, in TB/s, on this device.
    readings: keyed by case, a dict with memory, power, energy and clock, in GiB, W, J and MHz. On a GPU, the dict
        also contains ``state_gib``, the memory that was allocated before the case's first step. No table contains
        this value.
    learning_rate: the optimizer's learning rate during the measurement; None if no step uses an optimizer.
    formula_mismatch: the reason why the FLOPs formula doesn't apply to the model, or "" if it does. If it doesn't,
        ``times`` contains neither the achieved FLOP/s nor the MFU.
    """

    config: StepConfig
    times: pd.DataFrame
    operations: pd.DataFrame
    samples: pd.DataFrame
    profiled: pd.DataFrame
    ceilings: dict[str, float]
    readings: dict[Case, dict[str, Any]]
    learning_rate: float | None
    formula_mismatch: str

    @property
    def limits(self) -> dict[str, float | None]:
        """The device's limits in the configuration's precision, for a run's record. Unknown limits are None."""
        precision, device = self.config.precision, self.config.device
        limits = {
            "matmul_tflops": self.ceilings.get(f"matmul_{precision}", math.nan),
            "copy_tb_s": self.ceilings.get("copy", math.nan),
            "sheet_tflops": sheet_tflops(precision, device),
            "highest_clock_mhz": highest_clock_mhz(),
        }
        return {name: None if math.isnan(value) else float(value) for name, value in limits.items()}

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables that have at least one row, keyed by name."""
        tables = {"times": self.times, "operations": self.operations, "samples": self.samples}
        return {name: table for name, table in tables.items() if len(table)}


def steps(
    subject: Subject,
    cases: Mapping[Case, Step],
    config: StepConfig,
    *,
    clock: Clock | None = None,
    unsupported: Mapping[Case, str] | None = None,
    by: str = "precision",
    extras: bool = True,
) -> Results:
    """Measure every case according to this module's protocol.

    Args:
        subject: the model, batch and optimizer that the steps use.
        cases: the steps by mode, or by a pair such as (precision, mode), in the order in which they are timed.
            A step takes an optional ``phase``, and wraps each of its phases in ``with phase("forward"):``.
        clock: a timing loop to use instead of :func:`stepscope.measure.time_steps`. Its arguments are the step,
            the number of warm-up steps, the number of timed steps, and a function to call after each step. It
            returns a table with the columns of ``time_steps``.
        unsupported: the reasons why this device doesn't support certain cases, keyed by case. Each of these cases
            gets a row.
        by: the name of the column that contains the first element of each pair.
        extras: whether to measure sustained power, replays and ceilings, too. If False, the tables don't
            contain rates.

    Raises:
        ConfigError: If the mode of a case is unknown.

    If an error or an interrupt ends the call, the exception's attribute ``results`` contains the measurements so
    far. In a notebook, read ``sys.last_value.results``.
    """
    for case in cases:
        if mode_of(case) not in PHASES:
            raise ConfigError(
                f"cases: got {case!r}, but expected a mode ({', '.join(PHASES)}) or a pair ({by}, mode)"
            )
    status = {case: ("unsupported", reason) for case, reason in (unsupported or {}).items()}
    protocol = Protocol(subject, cases, config, clock, by, extras, status)
    with negligible_learning_rate(subject.optimizer):
        try:
            protocol.measure()
        except BaseException as error:
            protocol.end_early(type(error).__name__)
            vars(error)["results"] = protocol.results()
            error.add_note("sys.last_value.results contains the measurements so far: .times, .samples, ...")
            raise
        return protocol.results()


def supported_precisions(config: StepConfig) -> tuple[list[str], dict[str, str]]:
    """Return the supported low precisions, and the reason why each of the other low precisions is unsupported.

    On a CPU, only bf16 is considered, because CPUs don't support TF32, and fp16 is far slower than fp32 there.
    """
    supported, missing = [], {}
    for precision in ("tf32", "bf16", "fp16") if config.device == "cuda" else ("bf16",):
        try:
            require_device(config.step(precision=precision, mode="step"))
            supported.append(precision)
        except ConfigError as error:
            missing[precision] = str(error)
    return supported, missing


@dataclass
class Protocol:
    """The state of one call of :func:`steps`."""

    subject: Subject
    cases: Mapping[Case, Step]
    config: StepConfig
    clock: Clock | None = None
    by: str = "precision"
    extras: bool = True
    status: dict[Case, tuple[str, str]] = field(default_factory=dict)  # only for cases without times
    unprofiled: dict[Case, tuple[str, str]] = field(default_factory=dict)  # ran out of memory after timing
    samples: dict[Case, pd.DataFrame] = field(default_factory=dict)
    first_samples: dict[Case, pd.DataFrame] = field(default_factory=dict)  # only for the first case
    readings: dict[Case, dict[str, Any]] = field(default_factory=dict)
    compile_s: dict[Case, float] = field(default_factory=dict)
    completed: dict[Case, int] = field(default_factory=dict)  # number of completed profiled steps
    profiled: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=PROFILED_COLUMNS))
    profiler_error: str = ""
    ceilings: dict[str, float] = field(default_factory=dict)

    def measure(self) -> None:
        self.compile_cases()
        self.time_cases()
        self.profile_cases(self.remaining)
        self.replay_cases(self.remaining)
        self.check_and_repeat()
        if self.extras:
            self.measure_ceilings()

    @property
    def device(self) -> str:
        return self.config.device

    @property
    def remaining(self) -> list[Case]:
        """The cases that have not failed, starting with those that need the least memory."""
        cases = [case for case in self.cases if case not in self.status]
        return sorted(cases, key=lambda case: [*PHASES].index(mode_of(case)))

    # Compile

    def compile_cases(self) -> None:
        """Compile each case by running it once, so that no compilation takes place during timing."""
        if self.config.compile == "none":
            return
        from torch._dynamo.exc import BackendCompilerFailed  # imported lazily: it loads the compiler

        try:
            with fresh_compiler_cache():
                for case in self.cases:
                    self.compile_case(case)
        except BackendCompilerFailed as error:
            self.status |= dict.fromkeys(self.cases, ("unsupported", error_text(error)))

    def compile_case(self, case: Case) -> None:
        failed: dict[Any, tuple[str, str]] = {}  # a case that runs out of memory here may still fit later
        self.compile_s[case] = math.nan
        self.subject.reset()
        with out_of_memory(failed, case):
            self.compile_s[case] = seconds_with_compiling(self.cases[case], self.device)
        if failed:
            self.subject.forget_moments()
        print(f"{label(case)}: the first step took {self.compile_s[case]:.1f} s, including compilation")

    # Time

    def time_cases(self) -> None:
        warmups = self.config.warmup_steps
        for case in self.cases:
            if case in self.status:
                continue
            with out_of_memory(self.status, case, f"timing {label(case)}"):
                self.time_case(case, warmups)
                walls = wall_times_ms(self.samples[case])
                print(f"{label(case)}: {walls.median():.4g} ms, the median of {len(walls)} steps")
            self.tidy(failed=case in self.status)
            is_any_long = any(map(self.is_long, self.cases))
            warmups = min(self.config.warmup_steps, WARMUPS_IF_LONG if is_any_long else WARMUPS)
        first = next(iter(self.cases), None)
        if first in self.samples:
            self.first_samples = {first: self.samples[first]}

    def time_case(self, case: Case, warmups: int) -> None:
        step, mode = self.cases[case], mode_of(case)
        self.subject.reset()
        if mode != "step":
            self.subject.forget_moments()  # so that this mode's memory doesn't include the moments
        reset_peak_memory(self.device)
        state = allocated_memory(self.device)
        self.readings[case] = self.readings.get(case, {}) | state  # stored first, in case memory runs out
        power = Power(self.device)  # read between steps, outside the timed intervals
        self.samples[case] = self.run_clock(step, warmups, power.read)
        timed_steps = len(wall_times_ms(self.samples[case]))
        readings = state | peak_memory(self.device) | power.per_step(timed_steps)
        if self.extras and mode == "step" and math.isnan(readings.get("power_w", 0)):
            readings |= sustained_power(step, self.device, self.subject.reset)
        self.readings[case] = readings

    def run_clock(self, step: Step, warmups: int, after: Callable[[], object]) -> pd.DataFrame:
        timed_steps = self.config.timed_steps
        if self.clock:
            return self.clock(step, warmups, timed_steps, after)
        before = self.subject.reset
        return time_steps(
            step, timed_steps, warmups, self.device, before=before, after=after, until_enough=True
        )

    def is_long(self, case: Case) -> bool:
        return case in self.samples and wall_times_ms(self.samples[case]).min() > LONG_MS

    # Profile and replay

    def profile_cases(self, cases: Sequence[Case]) -> None:
        """Profile these cases. Their operations replace any operations from an earlier profile."""
        self.completed.update(dict.fromkeys(cases, 0))
        with StepProfiler(self.device) as profile:
            for case in cases:
                with out_of_memory(self.unprofiled, case, "profiling"):
                    self.profile_case(case, profile)
                self.tidy(failed=case in self.unprofiled)
        operations, self.profiler_error = profile.operations, profile.reason
        numbered = zip(operations["case"], operations["number"])
        is_complete = [number < self.completed[case] for case, number in numbered]
        is_other = [case not in cases for case in self.profiled["case"]]
        tables = [self.profiled[is_other], operations.loc[is_complete]]
        kept = [table for table in tables if len(table)]
        self.profiled = pd.concat(kept, ignore_index=True) if kept else operations.loc[[]]

    def profile_case(self, case: Case, profile: StepProfiler) -> None:
        step, synchronize = self.cases[case], synchronizer(self.device)
        self.subject.reset()
        release(self.device)
        optimizer = self.subject.optimizer
        if mode_of(case) == "step" and optimizer is not None and not optimizer.state:
            step()  # creates AdamW's moments
        if is_power_limited(self.readings[case]):  # only sustained work lowers the clock again
            run_for(step, self.device, SETTLING_S, self.subject.reset)
        for number in range(PROFILED_STEPS_IF_LONG if self.is_long(case) else PROFILED_STEPS):
            self.subject.reset()
            synchronize()
            step(profile.phases(case, number))
            synchronize()
            self.completed[case] = number + 1  # only now, so that an unfinished step is left out

    def replay_cases(self, cases: Sequence[Case]) -> None:
        for case in cases:
            if self.extras and mode_of(case) in REPLAYED_MODES:
                self.replay_case(case)

    def replay_case(self, case: Case) -> None:
        self.subject.reset()
        self.subject.forget_moments()
        mode = mode_of(case)
        replayed_ms, reason = replay(
            self.cases[case],
            self.device,
            scaler=grad_scaler(self.key(case)["precision"], self.device),
            clear=self.subject.reset,
            optimizer=self.subject.optimizer if mode == "step" else None,
            replays=REPLAYS_IF_LONG if self.is_long(case) else REPLAYS,
        )
        if reason:
            self.readings[case]["replay_reason"] = reason
        else:
            self.readings[case]["replayed_ms"] = pd.Series(replayed_ms).median()

    # Check

    def check_and_repeat(self) -> None:
        """Measure cases with impossible readings again. Readings that stay impossible are marked, not removed."""
        columns = key_columns(self.keys)
        for _ in range(TRIES - 1):
            times = self.times()
            inconsistent = times[times["inconsistent"] != ""]
            keys = inconsistent[columns].to_dict("records")
            again = [case for case in self.remaining if self.key(case) in keys]
            if not again:
                return
            print("measuring again:", inconsistent[[*columns, "inconsistent"]].to_string(header=False))
            for case in again:
                with out_of_memory(self.unprofiled, case, "measuring again"):
                    self.time_case(case, min(self.config.warmup_steps, WARMUPS))
                self.subject.reset()
            self.profile_cases(again)
            self.replay_cases(again)

    def times(self) -> pd.DataFrame:
        outcomes = dict(self.status)
        for case, (_, reason) in self.unprofiled.items():
            outcomes[case] = "ok", f"not profiled: {reason}"
        times = step_times(
            self.keys,
            self.samples,
            self.profiled,
            self.readings,
            outcomes,
            self.profiler_error,
            self.device,
        )
        for case, seconds in self.compile_s.items():
            rows = times["phase"] == TOTAL
            for column, value in self.key(case).items():
                rows &= times[column] == value
            times.loc[rows, "compile_s"] = seconds
        return times

    def measure_ceilings(self) -> None:
        """Measure the device's ceilings.

        They stay unknown if the large matmul and the weights don't fit into memory together.
        """
        failed: dict[Any, tuple[str, str]] = {}
        self.tidy(failed=True)
        with out_of_memory(failed, "ceilings"):
            self.ceilings = ceilings(self.device, self.precisions)

    # Helpers

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(self.key(case)["precision"] for case in self.cases))

    def key(self, case: Case) -> dict[str, str]:
        """Return the values of the key columns for a case."""
        key = {"precision": self.config.precision, "mode": mode_of(case)}
        return key | {self.by: case[0]} if isinstance(case, tuple) else key

    @property
    def keys(self) -> dict[Case, dict[str, str]]:
        """The key of each case, including unsupported cases."""
        return {case: self.key(case) for case in [*self.cases, *self.status]}

    def tidy(self, failed: bool) -> None:
        """Free a case's gradients and the cached memory, and also the optimizer's state if the case failed."""
        self.subject.reset()
        if failed:
            self.subject.forget_moments()
        release(self.device)

    def end_early(self, reason: str) -> None:
        """Set the status of each case that has not been timed to "failed", with the reason."""
        for case in self.cases:
            if case not in self.samples:
                self.status.setdefault(case, ("failed", f"not measured: {reason}"))

    def results(self) -> Results:
        times = self.times()
        if self.extras:
            rates = {name: self.ceilings.get(f"matmul_{name}", math.nan) for name in self.precisions}
            times = with_rates(times, self.config, rates)
        mismatch = formula_mismatch(self.subject.model, self.config)
        if mismatch and self.extras:
            times[FROM_FLOPS] = math.nan
        operations = operations_by_name(self.keys, self.profiled)
        samples = self.all_samples()
        has_pairs = any(isinstance(case, tuple) for case in self.cases)
        if self.by != "precision" or not has_pairs:  # the configuration contains the precision
            times = times.drop(columns="precision")
            operations = operations.drop(columns="precision")
            samples = samples.drop(columns="precision")
        return Results(
            self.config,
            times,
            operations,
            samples,
            self.profiled,
            self.ceilings,
            self.readings,
            learning_rate(self.subject.optimizer),
            mismatch,
        )

    def all_samples(self) -> pd.DataFrame:
        """Return every timed step.

        For the first case, return the steps of its first measurement, even if the case was measured again.
        """
        columns, tables = [*key_columns(self.keys), *SAMPLE_COLUMNS], []
        for case, samples in (self.samples | self.first_samples).items():
            table = samples.assign(**self.keys[case])
            tables.append(table[columns])
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def mode_of(case: Case) -> str:
    return case[-1] if isinstance(case, tuple) else str(case)


def label(case: Case) -> str:
    return " ".join(case) if isinstance(case, tuple) else str(case)
