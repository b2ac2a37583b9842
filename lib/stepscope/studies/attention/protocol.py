"""The measurement protocol of the attention study: check, time and profile a list of cases.

    cases = [("naive", 64), ("flash", 64)]
    results = measure_passes(cases, prepare, check, config)
    results.cases     one row per implementation, sequence length and phase
    results.checks    the errors of every implementation that ran

A pass is a forward and its backward. The order matters, because launches stay slower once a profiler has run
in a process:

1. Run every case once and check its output and gradients against float64.
2. Measure the memory of one pass of each correct case, then time passes for the configured seconds.
3. Profile a few passes of each. GPU time is that of the fastest one.
4. Check the readings. Impossible ones are measured again, at most twice.

A case that is wrong, unsupported or out of memory has rows that say why, and the other cases continue.
"""

from collections.abc import Callable, Iterator, Sequence
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

Case = tuple[str, int]  # implementation and sequence length
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k and v to the output, (B, 1, T, d) each
Prepare = Callable[[str, Inputs], Call]
Check = Callable[[Call, Inputs, list[Tensor]], tuple[dict[str, float], str]]

LONG_MS, SETTLING_S = 5.0, 0.3  # under a power limit, the clock needs a while to settle in longer passes
WARMUP_SHARE = 0.25  # of a case's seconds
MAX_KERNEL_NAME = 160  # characters


@dataclass
class Results:
    """The measurements of all cases.

    cases: one row per implementation, sequence length and phase. Cases without times have a status and reason.
    checks: one row per case that ran, with the relative errors of its output and gradients.
    """

    cases: pd.DataFrame
    checks: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"cases": self.cases, "checks": self.checks}


def measure_passes(cases: Sequence[Case], prepare: Prepare, check: Check, config: Config) -> Results:
    """Measure every case by the protocol above.

    Args:
        cases: pairs of implementation and sequence length, grouped by sequence length.
        prepare: gets an implementation and the inputs, makes the mask, and returns the forward as a function
            of q, k and v.
        check: gets that function, the inputs, and the output and gradients of q, k, v in float64. It returns
            the errors by quantity, and why the implementation is wrong ("" if it is right). A wrong
            implementation is never timed.

    If an error or an interrupt ends the call, the exception's ``results`` hold what was measured until then:
    in a notebook, ``sys.last_value.results``.
    """
    device_gib = measure.device_bytes(config.device) / 2**30
    protocol = Protocol(cases, prepare, check, config, device_gib)
    try:
        protocol.measure_all()
    except BaseException as error:
        protocol.end_early(type(error).__name__)
        vars(error)["results"] = protocol.results()
        error.add_note("sys.last_value.results holds what was measured until then: .cases, .checks")
        raise
    return protocol.results()


@dataclass
class Protocol:
    """The state of one :func:`measure_passes` call."""

    cases: Sequence[Case]
    prepare: Prepare
    check: Check
    config: Config
    device_gib: float
    status: dict[Case, tuple[str, str]] = field(default_factory=dict)
    errors: dict[Case, dict[str, float]] = field(default_factory=dict)
    requests: dict[Case, dict[str, Any]] = field(default_factory=dict)  # of memory that was refused
    memory: dict[Case, dict[str, float]] = field(default_factory=dict)
    walls: dict[Case, pd.DataFrame] = field(default_factory=dict)  # ms, a column per phase
    clocks_mhz: dict[Case, float] = field(default_factory=dict)
    operations: dict[tuple[Case, str], pd.DataFrame] = field(default_factory=dict)  # profiled, by phase
    unprofiled: dict[Case, tuple[str, str]] = field(default_factory=dict)  # timed, but short of memory later
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
        """Yield each case with the inputs of its sequence length; free gradients and cached memory after it."""
        for context_length in dict.fromkeys(context_length for _, context_length in cases):
            inputs = Inputs(self.config, context_length)
            for case in cases:
                if case[1] == context_length:
                    yield case, inputs
                    inputs.clear_gradients()
                    measure.release(self.device)
            del inputs

    # Check

    def check_cases(self) -> None:
        expected: list[Tensor] = []
        expected_sequence = 0
        for case, inputs in self.with_inputs(self.cases):
            name, context_length = case
            if context_length != expected_sequence:  # one reference for all implementations
                expected, expected_sequence = attention_in_float64(inputs), context_length
                measure.release(self.device)
            self.check_unless_too_large(case, inputs, expected)
            print(f"{name}, {context_length:,} tokens:", *filter(None, self.status[case]), flush=True)

    def check_unless_too_large(self, case: Case, inputs: Inputs, expected: list[Tensor]) -> None:
        name, context_length = case
        config = self.config
        needed = (
            needed_bytes(name, config.batch_size, config.d_model, context_length, config.precision) / 2**30
        )
        if name in COMPILED and needed > self.device_gib:  # compiling takes seconds and would show no more
            self.status[case] = "oom", f"needs {needed:.0f} GiB by formula: not compiled"
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
        held = inputs.held_bytes(case[0])  # q, k, v, the output's gradient and the mask
        qkv = inputs.q, inputs.k, inputs.v
        self.memory[case] = measure.pass_memory(call, qkv, inputs.gradient, held, self.device)
        self.walls[case] = self.time_passes(call, inputs)
        self.clocks_mhz[case] = measure.sm_clock_mhz()

    def time_passes(self, call: Call, inputs: Inputs) -> pd.DataFrame:
        """Time as many passes as fit into the configured seconds; a column of ms for each phase."""
        config, budget_ms = self.config, self.config.max_seconds_per_case * 1e3
        phases = measure.Phases("cpu")  # the host's clock, since each phase ends with a wait for the device

        def timed_pass() -> list[float]:
            self.run_pass(call, inputs, phases)
            return [ms for _, ms, _ in phases.ms()]

        warmups_ms = [sum(timed_pass())]
        while len(warmups_ms) < config.warmup_steps and sum(warmups_ms) < WARMUP_SHARE * budget_ms:
            warmups_ms.append(sum(timed_pass()))
        if self.device == "cuda" and warmups_ms[-1] > LONG_MS:
            measure.run_for(timed_pass, self.device, SETTLING_S)
        affordable = int(budget_ms / warmups_ms[-1])
        passes = min(config.timed_steps, max(config.min_passes, affordable))
        return pd.DataFrame([timed_pass() for _ in range(passes)], columns=list(PASSES))

    def run_pass(self, call: Call, inputs: Inputs, phase: Callable[[str], Any] = nullcontext) -> None:
        synchronize = measure.synchronizer(self.device)
        inputs.clear_gradients()
        synchronize()  # the device has nothing left to do
        with phase("forward"):
            output = call(inputs.q, inputs.k, inputs.v)  # on a GPU this only enqueues the work
            synchronize()
        with phase("backward"):
            output.backward(inputs.gradient)
            synchronize()

    # Profile

    def profile_cases(self, cases: Sequence[Case]) -> None:
        """Profile some cases; their operations replace earlier ones."""
        with measure.capture(self.device) as captured:
            for case, inputs in self.with_inputs(cases):
                with measure.out_of_memory(self.unprofiled, case):
                    self.profile_case(case, inputs, captured)
        self.operations |= dict(list(captured.operations.groupby(["case", "phase"])))
        self.profiler_error = captured.reason or "its kernels are not in the capture"

    def profile_case(self, case: Case, inputs: Inputs, captured: measure.capture) -> None:
        call = self.prepare(case[0], inputs)
        if self.device == "cuda" and self.walls[case].sum(axis=1).median() > LONG_MS:
            measure.run_for(lambda: self.run_pass(call, inputs), self.device, SETTLING_S)
        for number in range(self.config.profiled_passes):
            self.run_pass(call, inputs, captured.phases(case, number))

    # Check the readings

    def repeat_impossible(self) -> None:
        """Measure cases with impossible readings again. Whatever stays impossible is marked, not removed."""
        for _ in range(measure.TRIES - 1):
            rows = [self.row(case, phase) for case in self.walls for phase in PASSES]
            odd = {
                (row["implementation"], row["context_length"]): row["inconsistent"]
                for row in rows
                if row["inconsistent"]
            }
            if not odd:
                return
            print("once more:", odd)
            self.time_cases([*odd])
            self.profile_cases([*odd])

    # Results

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
                profiled_ms = map(measure.gpu_time_ms, measure.complete_steps(self.operations[case, phase]))
                row["inconsistent"] = measure.find_inconsistencies(row, [*profiled_ms])
        return row

    def times_and_memory(self, case: Case, phase: str) -> dict[str, Any]:
        walls, memory = location(self.walls[case][phase]), self.memory[case]
        return {
            "passes": len(self.walls[case]),
            "wall_ms": walls["median"],
            "wall_std_ms": walls["std"],
            "wall_q1_ms": walls["q1"],
            "wall_q3_ms": walls["q3"],
            "wall_min_ms": walls["min"],
            "sm_clock_mhz": self.clocks_mhz[case],
            "saved_mib": memory["saved"] / 2**20,
            "in_use_mib": memory["in_use"] / 2**20,
            "peak_mib": memory.get(phase, nan) / 2**20,
        }

    def gpu_times(self, case: Case, phase: str) -> dict[str, Any]:
        """GPU time and operations of the fastest profiled pass, and the kernel that takes the most time."""
        if (case, phase) not in self.operations:
            return {"reason": self.profiler_error}
        operations = self.operations[case, phase]
        by_kernel = (operations["end_ns"] - operations["start_ns"]).groupby(operations["name"]).sum()
        fastest = measure.gpu_time(measure.fastest_step(operations))
        return fastest | {"kernel": by_kernel.idxmax()[:MAX_KERNEL_NAME]}

    def end_early(self, reason: str) -> None:
        """Mark the cases that have not been timed."""
        for case in self.cases:
            if case not in self.walls and self.status.get(case, ("ok",))[0] == "ok":
                self.status[case] = "failed", f"not measured: {reason}"

    def results(self) -> Results:
        rows = [self.row(case, phase) for case in self.status for phase in PASSES]
        cases = pd.DataFrame(rows).reindex(columns=list(SCHEMAS["cases"].columns))
        error_columns = {f"{quantity}_error": float for quantity in QUANTITIES}
        allowed = TOLERANCE[self.config.precision]
        checked = [
            {"implementation": name, "context_length": context_length, "allowed_error": allowed}
            | {f"{quantity}_error": error for quantity, error in errors.items()}
            for (name, context_length), errors in self.errors.items()
        ]
        checks = pd.DataFrame(checked, columns=list(SCHEMAS["checks"].columns))
        return Results(cases, checks.astype(error_columns | {"context_length": int, "allowed_error": float}))
