"""The measuring room: what more than one experiment needs to time, capture and weigh a step. It knows no run.

    from stepscope import measure

    out_of_memory(status, case, ...)   a failed case is noted, what it held is freed, and the others go on
    asked_and_allocated(words)         of an out-of-memory error's words
    Phases(device), .ms()              the ``phase`` that a step is called with: its time and enqueue time
    time_steps(step, steps, warmups, device, ...)   a row for each phase of each step: wall_ms, enqueue_ms
    enough(rows, least, device)        whether so many timed steps tell their time
    back_to_back(step, device, steps)  milliseconds of steps of which only the last is waited for
    keep_up(step, device, seconds)     the step again and again, each waited for
    synchronizer(device)               waits until the device has done all that it was given
    capture(device)                    .phases(case, number) to call a step with; then .operations, .reason
    quickest_step, middle_step, whole_steps(operations)   of captured steps one, or each
    gpu_time_ms, gpu_time, by_name(operations)   what is said of one of them
    unsteady(row, captured_ms), at_cap(row), TRIES   what cannot be, or does not repeat: to be measured again
    seconds_with_compiling(step, device)   of a first step
    forget_peaks, peak_memory(device)  peak_gib and reserved_gib since then
    saved_for_backward(call, *inputs), storage_bytes(*tensors), pass_memory(...)   what autograd keeps
    record_memory(subject, cases, config)   every allocation of a step of each case
    ceilings(device, precisions)       matmul TFLOP/s by precision and copy TB/s, measured here
    sheet_tflops, sheet_clock_mhz(precision, device)   what the data sheet says, and at which SM clock
    step_times, operations_by_name     the tables of a run, of all that
    steps(subject, cases, config)      the whole protocol, for a dictionary of steps
    Subject(model, batch, loss, optimizer)   what is measured; .reset() frees its gradients
    zero_learning_rate(optimizer)      a context in which steps leave the weights as they are

On a CPU all of them work: what only a GPU has is then empty, nan or a reason in words.
"""

from stepscope.measure.clocks import (
    Phases,
    back_to_back,
    enough,
    host_sets_pace,
    keep_up,
    synchronizer,
    time_steps,
    walls_ms,
)
from stepscope.measure.compiler import allow_recompiling, fresh_compiler_cache, seconds_with_compiling
from stepscope.measure.graph import graph_of
from stepscope.measure.guard import asked_and_allocated, error_text, out_of_memory
from stepscope.measure.memory import (
    device_bytes,
    forget_peaks,
    pass_memory,
    peak_memory,
    saved_for_backward,
    storage_bytes,
)
from stepscope.measure.memory_history import MemoryHistory, record_memory
from stepscope.measure.power import (
    PowerMonitor,
    power_limit_w,
    sm_clock_mhz,
)
from stepscope.measure.profiler import capture
from stepscope.measure.protocol import Results, steps, supported_precisions
from stepscope.measure.rates import ceilings, sheet_clock_mhz, sheet_tflops
from stepscope.measure.steady import TRIES, at_cap, unsteady
from stepscope.measure.subject import Subject, learning_rate, zero_learning_rate
from stepscope.measure.times import operations_by_name, step_times
from stepscope.model.training_step import autocast, grad_scaler, prepare, release, show_compiled_loops
from stepscope.traces.captured import (
    by_name,
    gpu_time,
    gpu_time_ms,
    middle_step,
    quickest_step,
    whole_steps,
)
