"""Time, profile and check training steps. This package knows nothing about runs and records.

    from stepscope import measure

    steps(subject, cases, config)           run the complete protocol on a dictionary of steps
    record_memory(subject, cases, config)   record every allocation of one step of each case
    Subject(model, batch, loss, optimizer)  a model and everything that its steps use; .reset() frees the gradients
    negligible_learning_rate(optimizer)     a context in which steps don't change the weights

    time_steps(step, steps, warmups, device, ...)  one row per step and phase: wall_ms, enqueue_ms
    Phases(device), .ms()                   a step's ``phase`` argument, which records wall and enqueue times
    has_enough_samples(rows, min_steps, device)    whether there are enough timed steps for a reliable median
    back_to_back(step, device, steps)       time steps in ms, synchronizing only after the last step
    run_for(step, device, seconds)          run a step repeatedly, synchronizing after each step
    synchronizer(device)                    a function that waits until the device is idle
    seconds_with_compiling(step, device)    duration of the first step, including its compilation

    StepProfiler(device)                    pass .phases(case, number) to steps, then read .operations
    fastest_step, median_step, complete_steps(operations)  one profiled step, or all complete profiled steps
    gpu_time_ms, gpu_time, by_name(operations)             statistics of a profiled step
    find_inconsistencies(row, profiled_ms), is_power_limited(row), TRIES   sanity checks of a row
    step_times, operations_by_name          the tables of a run

    out_of_memory(status, case, ...)        record that a case ran out of memory, free its memory, and continue
    asked_and_allocated(message)            the numbers in an out-of-memory message
    reset_peak_memory, peak_memory(device)  peak_gib and reserved_gib since the reset
    saved_for_backward(call, *inputs), storage_bytes(*tensors), pass_memory(...)   the memory that autograd uses
    ceilings(device, precisions)            measured peak rates: matmul TFLOP/s by precision, and copy TB/s
    sheet_tflops, sheet_clock_mhz(precision, device)   the data sheet's peak rate and the SM clock it assumes

Everything also works on a CPU, where results that need a GPU are empty, NaN, or replaced by an explanation.
"""

from stepscope.measure.compiler import (
    allow_recompiling,
    fresh_compiler_cache,
    refuse_recompiling,
    seconds_with_compiling,
)
from stepscope.measure.graph import graph_of
from stepscope.measure.memory import (
    device_bytes,
    pass_memory,
    peak_memory,
    reset_peak_memory,
    saved_for_backward,
    storage_bytes,
)
from stepscope.measure.memory_history import MemoryHistory, record_memory
from stepscope.measure.oom import asked_and_allocated, error_text, out_of_memory
from stepscope.measure.power import (
    PowerMonitor,
    power_limit_w,
    sm_clock_mhz,
)
from stepscope.measure.profiler import StepProfiler
from stepscope.measure.protocol import Results, steps, supported_precisions
from stepscope.measure.rates import ceilings, sheet_clock_mhz, sheet_tflops
from stepscope.measure.sanity_checks import TRIES, find_inconsistencies, is_power_limited
from stepscope.measure.subject import Subject, learning_rate, negligible_learning_rate
from stepscope.measure.times import operations_by_name, step_times
from stepscope.measure.timing import (
    Phases,
    back_to_back,
    has_enough_samples,
    looks_launch_bound,
    run_for,
    synchronizer,
    time_steps,
    wall_times_ms,
)
from stepscope.model.training_step import autocast, grad_scaler, prepare, release, show_compiled_loops
from stepscope.traces.profiled_steps import (
    by_name,
    complete_steps,
    fastest_step,
    gpu_time,
    gpu_time_ms,
    median_step,
)
