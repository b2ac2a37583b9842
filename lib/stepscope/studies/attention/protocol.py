"""The measurement protocol of the attention study: check, time and profile a list of cases.

    cases = [("naive", 64), ("flash", 64)]
    results = measure_passes(cases, prepare, check, config)
    results.cases     one row per implementation, context length and phase
    results.checks    the errors of every case that ran

A pass is a forward pass followed by its backward pass. The order matters, because launches stay slower once a
profiler has run in a process:

1. Run every case once, and compare its output and gradients with a float64 reference.
2. Measure the memory that one pass of each correct case uses, then time passes for the configured number of
   seconds.
3. Profile a few passes of each case, and report the GPU time of the fastest pass.
4. Check the readings. Impossible readings are measured again, at most twice.

If a case is wrong, unsupported or out of memory, its rows contain the reason, and the other cases are still
measured.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

import pandas as pd
from torch import Tensor

from stepscope import measure
from stepscope.optimizations.attention import Inputs, attention_in_float64
from stepscope.stats import location
from stepscope.studies.attention.config import COMPILED, PASSES, QUANTITIES, TOLERANCE, Config
from stepscope.studies.attention.memory import needed_bytes
from stepscope.studies.attention.tables import SCHEMAS

Case = tuple[str, int]  # implementation and context length
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # from q, k and v to the output, (B, 1, T, d) each
Prepare = Callable[[str, Inputs], Call]
Check = Callable[[Call, Inputs, list[Tensor]], tuple[dict[str, float], str]]

LONG_MS = 5.0  # longer passes can be power-limited, so the clock has to settle before they are measured
SETTLING_S = 0.3  # time until the clock has settled
MAX_WARMUP_SHARE = 0.25  # warming up takes at most this share of the configured seconds per case
MAX_KERNEL_NAME = 160  # maximum number of characters of a kernel's name in the table
MIB = 2**20


@dataclass
class Results:
    """The measurements of all cases.

    Args:
        cases: one row per implementation, context length and phase. Rows without times have a status and a reason.
        checks: one row per case that ran, with the relative errors of its output and gradients.
    """

    cases: pd.DataFrame
    checks: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"cases": self.cases, "checks": self.checks}


def measure_passes(
    cases: Sequence[Case],
    prepare: Prepare,
    check: Check,
    config: Config,
) -> Results:
    """Check, time and profile every case, in the order that the module's docstring describes.

    Args:
        cases: pairs of implementation and context length, grouped by context length.
        prepare: called with an implementation's name and the inputs. It creates the mask, and returns the forward
            pass as a function of q, k and v.
        check: compares the forward pass with a float64 reference. ``check`` is called with this function, the
            inputs, and a list of the float64 output and the float64 gradients of q, k and v. It returns the errors
            by quantity, and the reason why the implementation is wrong ("" if it is correct). A wrong
            implementation is never timed.

    If an error or an interrupt ends the call, the exception's attribute ``results`` contains the measurements made
    so far; in a notebook, read ``sys.last_value.results``.
    """
    device_gib = measure.device_bytes(config.device) / 2**30
    protocol = Protocol(cases, prepare, check, config, device_gib)
    try:
        protocol.measure_all()
    except BaseException as error:
        protocol.end_early(type(error).__name__)
        vars(error)["results"] = protocol.results()
        error.add_note("sys.last_value.results has the measurements so far: .cases, .checks")
        raise
    return protocol.results()


@dataclass
class Protocol:
    """The state of one call of :func:`measure_passes`."""

    cases: Sequence[Case]
    prepare: Prepare
    check: Check
    config: Config
    device_gib: float
    status: dict[Case, tuple[str, str]] = field(default_factory=dict)
    errors: dict[Case, dict[str, float]] = field(default_factory=dict)
    requests: dict[Case, dict[str, Any]] = field(default_factory=dict)  # sizes, in GiB, of failed allocations
    memory: dict[Case, dict[str, float]] = field(default_factory=dict)
    walls: dict[Case, pd.DataFrame] = field(default_factory=dict)  # wall times in ms, one column per phase
    clocks_mhz: dict[Case, float] = field(default_factory=dict)
    # Profiled operations, by case and phase.
    operations: dict[tuple[Case, str], pd.DataFrame] = field(default_factory=dict)
    # Cases that were timed, but ran out of memory under the profiler.
    unprofiled: dict[Case, tuple[str, str]] = field(default_factory=dict)
    profiler_error: str = ""

    def measure_all(self) -> None:
        if any(name == "compiled" for name, _ in self.cases):
            measure.show_compiled_loops()
        self.check_cases()
        correct = [case for case, (outcome, _) in self.status.items() if outcome == "ok"]
        self.time_cases(correct)
        self.profile_cases(correct)
        self.repeat_impossible()

    @property
    def device(self) -> str:
        return self.config.device

    def with_inputs(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Inputs]]:
        """Yield each case with inputs of its context length; after each case, free gradients and cached memory."""
        cases_by_length: dict[int, list[Case]] = {}
        for case in cases:
            cases_by_length.setdefault(case[1], []).append(case)
        for context_length, same_length in cases_by_length.items():
            inputs = Inputs(self.config, context_length)
            for case in same_length:
                yield case, inputs
                inputs.clear_gradients()
                measure.release(self.device)
            del inputs

    # Check

    def check_cases(self) -> None:
        """Run every case once, compare its results with a float64 reference, and set its status."""
        expected: list[Tensor] = []
        expected_length = 0
        for case, inputs in self.with_inputs(self.cases):
            name, context_length = case
            if context_length != expected_length:  # one reference for all implementations
                expected = attention_in_float64(inputs)
                expected_length = context_length
                measure.release(self.device)
            self.check_unless_too_large(case, inputs, expected)
            outcome, reason = self.status[case]
            print(f"{name}, {context_length:,} tokens: {outcome} {reason}".rstrip(), flush=True)

    def check_unless_too_large(
        self,
        case: Case,
        inputs: Inputs,
        expected: list[Tensor],
    ) -> None:
        name, context_length = case
        config = self.config
        needed = needed_bytes(name, config.batch_size, config.d_model, context_length, config.precision)
        needed_gib = needed / 2**30
        if name in COMPILED and needed_gib > self.device_gib:  # compiling it would waste seconds
            self.status[case] = "oom", f"needs {needed_gib:.0f} GiB by formula: not compiled"
            return
        with measure.out_of_memory(self.status, case, f"running {name}", or_unsupported=True) as guard:
            self.check_case(case, inputs, expected)
        self.status.setdefault(case, ("ok", ""))
        if self.status[case][0] == "oom":
            self.requests[case] = measure.asked_and_allocated(guard.message)

    def check_case(self, case: Case, inputs: Inputs, expected: list[Tensor]) -> None:
        call = self.prepare(case[0], inputs)
        errors, reason = self.check(call, inputs, expected)
        self.errors[case] = {name: error if isfinite(error) else nan for name, error in errors.items()}
        if reason:
            self.status[case] = "failed", reason

    # Time

    def time_cases(self, cases: Sequence[Case]) -> None:
        for case, inputs in self.with_inputs(cases):
            self.time_case(case, inputs)

    def time_case(self, case: Case, inputs: Inputs) -> None:
        call = self.prepare(case[0], inputs)
        qkv = inputs.q, inputs.k, inputs.v
        held_bytes = inputs.held_bytes(case[0])
        self.memory[case] = measure.pass_memory(call, qkv, inputs.gradient, held_bytes, self.device)
        self.walls[case] = self.time_passes(call, inputs)
        self.clocks_mhz[case] = measure.sm_clock_mhz()

    def time_passes(self, call: Call, inputs: Inputs) -> pd.DataFrame:
        """Time as many passes as fit into the configured time; return each pass's times in ms by phase."""
        config = self.config
        budget_ms = config.max_seconds_per_case * 1e3
        phases = measure.Phases("cpu")  # use the host's clock, because each phase ends with a synchronization

        def timed_pass() -> list[float]:
            self.run_pass(call, inputs, phases)
            return [ms for _, ms, _ in phases.ms()]

        max_warmup_ms = MAX_WARMUP_SHARE * budget_ms
        warmups_ms = [sum(timed_pass())]
        while len(warmups_ms) < config.warmup_steps and sum(warmups_ms) < max_warmup_ms:
            warmups_ms.append(sum(timed_pass()))
        if self.device == "cuda" and warmups_ms[-1] > LONG_MS:
            measure.run_for(timed_pass, self.device, SETTLING_S)
        affordable = int(budget_ms / warmups_ms[-1])
        num_passes = min(config.timed_steps, max(config.min_passes, affordable))
        passes_ms = [timed_pass() for _ in range(num_passes)]
        return pd.DataFrame(passes_ms, columns=list(PASSES))

    def run_pass(self, call: Call, inputs: Inputs, phase: Callable[[str], Any] = nullcontext) -> None:
        synchronize = measure.synchronizer(self.device)
        inputs.clear_gradients()
        synchronize()  # so that the forward time doesn't include earlier work
        with phase("forward"):
            output = call(inputs.q, inputs.k, inputs.v)  # on a GPU, this only enqueues the work
            synchronize()
        with phase("backward"):
            output.backward(inputs.gradient)
            synchronize()

    # Profile

    def profile_cases(self, cases: Sequence[Case]) -> None:
        """Profile cases, replacing the recorded operations of cases that were profiled before."""
        with measure.StepProfiler(self.device) as profile:
            for case, inputs in self.with_inputs(cases):
                with measure.out_of_memory(self.unprofiled, case):
                    self.profile_case(case, inputs, profile)
        self.operations |= dict(list(profile.operations.groupby(["case", "phase"])))
        self.profiler_error = profile.reason or "the profile contains none of its kernels"

    def profile_case(self, case: Case, inputs: Inputs, profile: measure.StepProfiler) -> None:
        call = self.prepare(case[0], inputs)
        passes_ms = self.walls[case].sum(axis=1)
        if self.device == "cuda" and passes_ms.median() > LONG_MS:
            measure.run_for(lambda: self.run_pass(call, inputs), self.device, SETTLING_S)
        for number in range(self.config.profiled_passes):
            self.run_pass(call, inputs, profile.phases(case, number))

    # Check the readings

    def repeat_impossible(self) -> None:
        """Measure cases with impossible readings again, at most twice.

        Readings that stay impossible are marked in the rows.
        """
        for _ in range(measure.TRIES - 1):
            impossible: dict[Case, str] = {}
            for row in self.rows(self.walls):
                if row["inconsistent"]:
                    impossible[row["implementation"], row["context_length"]] = row["inconsistent"]
            if not impossible:
                return
            print("measuring again:", impossible)
            self.time_cases([*impossible])
            self.profile_cases([*impossible])

    # Results

    def rows(self, cases: Iterable[Case]) -> list[dict[str, Any]]:
        return [self.row(case, phase) for case in cases for phase in PASSES]

    def row(self, case: Case, phase: str) -> dict[str, Any]:
        outcome, reason = self.status[case]
        row = {
            "implementation": case[0],
            "context_length": case[1],
            "phase": phase,
            "status": outcome,
            "reason": reason,
            "kernel": "",
            "inconsistent": "",
            "device_gib": self.device_gib,
            **self.requests.get(case, {}),
        }
        if case in self.walls:
            row |= self.times_and_memory(case, phase) | self.gpu_times(case, phase)
            if self.device == "cuda" and (case, phase) in self.operations:
                profiled_passes = measure.complete_steps(self.operations[case, phase])
                profiled_ms = [measure.gpu_time_ms(operations) for operations in profiled_passes]
                row["inconsistent"] = measure.find_inconsistencies(row, profiled_ms)
        return row

    def times_and_memory(self, case: Case, phase: str) -> dict[str, Any]:
        walls = location(self.walls[case][phase])
        memory = self.memory[case]
        return {
            "passes": len(self.walls[case]),
            "wall_ms": walls["median"],
            "wall_std_ms": walls["std"],
            "wall_q1_ms": walls["q1"],
            "wall_q3_ms": walls["q3"],
            "wall_min_ms": walls["min"],
            "sm_clock_mhz": self.clocks_mhz[case],
            "saved_mib": memory["saved"] / MIB,
            "in_use_mib": memory["in_use"] / MIB,
            "peak_mib": memory.get(phase, nan) / MIB,
        }

    def gpu_times(self, case: Case, phase: str) -> dict[str, Any]:
        """Return the GPU time and operation count of the fastest profiled pass, and the name of a kernel.

        The kernel is the one that takes the most time in all profiled passes together.
        """
        if (case, phase) not in self.operations:
            return {"reason": self.profiler_error}
        operations = self.operations[case, phase]
        durations_ns = operations["end_ns"] - operations["start_ns"]
        kernel_ns = durations_ns.groupby(operations["name"]).sum()
        fastest = measure.gpu_time(measure.fastest_step(operations))
        return fastest | {"kernel": kernel_ns.idxmax()[:MAX_KERNEL_NAME]}

    def end_early(self, reason: str) -> None:
        """Set the status of cases that are still to be timed to "failed", and record the reason."""
        for case in self.cases:
            outcome, _ = self.status.get(case, ("ok", ""))
            if case not in self.walls and outcome == "ok":
                self.status[case] = "failed", f"not measured: {reason}"

    def results(self) -> Results:
        cases = pd.DataFrame(self.rows(self.status))
        return Results(cases.reindex(columns=list(SCHEMAS["cases"].columns)), self.checks())

    def checks(self) -> pd.DataFrame:
        types: dict[str, type] = {"context_length": int, "allowed_error": float}
        rows = []
        for (name, context_length), errors in self.errors.items():
            row: dict[str, Any] = {
                "implementation": name,
                "context_length": context_length,
                "allowed_error": TOLERANCE[self.config.precision],
            }
            for quantity, error in errors.items():
                row[f"{quantity}_error"] = error
            rows.append(row)
        for quantity in QUANTITIES:
            types[f"{quantity}_error"] = float
        return pd.DataFrame(rows, columns=list(SCHEMAS["checks"].columns)).astype(types)
