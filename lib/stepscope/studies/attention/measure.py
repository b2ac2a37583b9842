"""Attention by itself: implementations side by side, each checked against float64 before it is timed."""
import warnings
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from stepscope.say.formats import ms
from stepscope.step.compiling import Compiles, allow_recompiling, reason, release
from stepscope.step.sm_clock import sm_clock_mhz
from stepscope.step.training_step import out_of_memory_names
from stepscope.studies.attention.checking import QUANTITIES, errors, reference
from stepscope.studies.attention.config import ATTENTIONS, TOLERANCE, Config
from stepscope.studies.attention.implementations import Implementations, Inputs
from stepscope.studies.attention.memory import mask_memory, memory_pass
from stepscope.studies.attention.names import NAMES
from stepscope.studies.attention.timing import PASS_COLUMNS, first_pass, summarized, timed_passes
from stepscope.traces.in_process import KERNEL_COLUMNS, kernels


def measure_cell(name: str, implementations: Implementations, inputs: Inputs, expected: list[Tensor],
                 config: Config) -> tuple[dict, pd.DataFrame]:
    """One implementation at one sequence: a row of what it is (status ``ok``, ``oom``, ``unsupported`` or
    ``wrong``, and the reason; SM clock after the last pass), and the timed passes, none unless its status is
    ``ok``."""
    row: dict = {"implementation": name, "sequence": inputs.q.shape[-2], "causal": inputs.causal,
                 "error": float("nan")}
    compiles, no_passes = Compiles(), pd.DataFrame(columns=PASS_COLUMNS)
    inputs.clear_gradients()
    call, output, found = first_try(name, implementations, inputs, config)
    row |= found
    if call is None:
        return row, no_passes
    try:
        row |= dict(zip(("graphs", "graph_breaks"), compiles.read())) | errors(output, inputs, expected)
        del output
        row |= judged(row, config.precision)
        if row.get("status") == "wrong":
            return row, no_passes
        row |= memory_pass(call, inputs, inputs.held_bytes(name), config.device)
        samples = timed_passes(call, inputs, config)
        # Once: what a call of the driver between short passes does to the next one's launches is not known.
        row["sm_clock_mhz"] = sm_clock_mhz()
    except torch.OutOfMemoryError as error:
        return row | {"status": "oom", "reason": reason(error, [])}, no_passes
    return row | {"status": "ok", "reason": "", "later_graphs": compiles.read()[0]}, samples


def captured_passes(implementations: Implementations, rows: list[dict], config: Config) -> pd.DataFrame:
    """The kernels of a forward and its backward of each cell that was timed: ``cell`` and
    ``traces.in_process.KERNEL_COLUMNS``. After all timing: CUPTI stays in a process that it once watched."""
    found = [pd.DataFrame(columns=["cell", *KERNEL_COLUMNS])]
    for cell, row in enumerate(rows):
        if row["status"] != "ok":
            continue
        release(config.device)
        inputs = Inputs(config, row["sequence"], row["causal"])
        call = implementations.prepare(row["implementation"], inputs)

        def once(call=call, inputs=inputs) -> None:
            inputs.clear_gradients()
            call().backward(inputs.gradient)
        once()
        found.append(kernels(once, config.device, config.captured_passes).assign(cell=cell))
    return pd.concat(found[1:] or found, ignore_index=True)


def first_try(name: str, implementations: Implementations, inputs: Inputs,
              config: Config) -> tuple[Callable[[], Tensor] | None, Tensor | None, dict]:
    """The call, its output and the first pass's times; where it does not run, None, None, and status and
    reason."""
    found: dict = {}
    try:
        with warnings.catch_warnings(record=True) as warned, out_of_memory_names(f"running {name}"):
            warnings.simplefilter("always")
            if name == "flex":
                found |= mask_memory(inputs, config.device)
            call = implementations.prepare(name, inputs)
            output, first = first_pass(call, inputs, config.device)
    except torch.OutOfMemoryError as error:
        return None, None, found | {"status": "oom", "reason": reason(error, [])}
    except Exception as error:  # torch says in many types of error what it cannot do; it is kept
        if "CUDA error" in str(error):
            raise  # the process is spoilt: nothing after it would be a measurement
        return None, None, found | {"status": "unsupported", "reason": reason(error, warned)}
    if any(x.grad is None for x in (inputs.q, inputs.k, inputs.v)):
        return None, None, found | {"status": "wrong", "reason": "no gradient of q, k or v"}
    return call, output, found | first


def judged(row: dict, precision: str) -> dict:
    """The largest error of a row, and where it is too large for the precision the status ``wrong`` with the
    reason."""
    error, allowed = max(row[f"{quantity}_error"] for quantity in QUANTITIES), TOLERANCE[precision]
    if error < allowed:
        return {"error": error}
    return {"error": error, "status": "wrong",
            "reason": f"relative error {error:.2g}, and {precision} is allowed {allowed:.2g}"}


def measure_attention(config: Config) -> dict[str, pd.DataFrame]:
    """The whole grid of one run, compiled into an empty cache, so that compile times are no other run's
    savings.

    Returns:
        cells: a row for each implementation, sequence and causal; see :func:`measure_cell`, and
        :func:`summarized`.
        samples: every timed pass; ``cell`` is the row's number in ``cells``.
    """
    from torch._inductor.utils import fresh_cache
    torch.compiler.reset()  # a second run in one process finds nothing compiled either
    with fresh_cache():
        return _measure(config)


def _measure(config: Config) -> dict[str, pd.DataFrame]:
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    allow_recompiling()
    implementations, samples = Implementations(), []
    rows: list[dict] = []
    for causal in (True, False):
        names = config.causal if causal else config.unmasked
        for sequence in sorted(config.sequences) if names else ():
            if not causal and sequence < config.unmasked_from:
                continue
            release(config.device)
            inputs = Inputs(config, sequence, causal)
            expected = reference(inputs)
            for name in ATTENTIONS:
                if name not in names:
                    continue
                row, passes = measure_cell(name, implementations, inputs, expected, config)
                print(f"{sequence}{', causal' if causal else ''}, {name}: {row['status']}", flush=True)
                release(config.device, after_error=row["status"] == "oom")
                inputs.clear_gradients()
                samples.append(passes.assign(cell=len(rows)))
                rows.append(row)
            del inputs, expected
    samples = pd.concat(samples, ignore_index=True).astype({"cell": "int16"})
    samples = samples.astype({column: "float32" for column in samples if column.endswith("_ms")})
    tables = {"cells": summarized(pd.DataFrame(rows), samples), "samples.parquet": samples}
    if config.captured_passes:
        tables["kernels"] = captured_passes(implementations, rows, config)
    return tables


def reading(cells: pd.DataFrame) -> str:
    """What one run says, in a sentence or two of markdown."""
    ok = cells[(cells["status"] == "ok") & cells["causal"]]
    if ok.empty:
        return "Nothing could be timed."
    last = ok[ok["sequence"] == ok["sequence"].max()].sort_values("pass_median_ms")
    times = ", ".join(f"{ms(row.pass_median_ms)} ({NAMES[row.implementation]})" for row in last.itertuples())
    text = f"At sequence {last['sequence'].iloc[0]}, causal, a forward and backward pass takes {times}."
    left_out = cells[cells["status"] != "ok"].groupby(["implementation", "status"], sort=False).size()
    if left_out.empty:
        return text
    counts = ", ".join(f"{NAMES[name]} ({count} {status})" for (name, status), count in left_out.items())
    return f"{text} Not timed: {counts}."
