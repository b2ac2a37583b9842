"""Attention by itself: every implementation is checked against float64 at every sequence, then what passed is
timed, then captured for its GPU time."""
import re
import warnings

import pandas as pd
import torch
from torch import Tensor

from stepscope.step.training_step import out_of_memory_names, release
from stepscope.step.turn import turn
from stepscope.studies.attention.checking import errors, reference
from stepscope.studies.attention.config import COMPILED, PASSES, TOLERANCE, Config
from stepscope.studies.attention.implementations import Implementations, Inputs, each
from stepscope.studies.attention.memory import device_bytes, needed_bytes
from stepscope.studies.attention.tables import SCHEMAS
from stepscope.studies.attention.timing import KEY, capture_all, read_capture, time_all

SHAPES = 64  # for so many one function may be compiled; torch's own limit is 8


def measure_attention(config: Config) -> dict[str, pd.DataFrame]:
    """The whole grid of one run.

    Returns:
        checks: of every implementation and sequence that ran, relative errors against float64.
        cells: a row for each implementation, sequence and phase (forward, backward). ``wall_ms``: median of
            so many ``passes``, by the host's clock with the device waited for before and after; ``gpu_ms``:
            in which at least one kernel runs, median of the captured passes; ``operations`` and the longest
            ``kernel`` of a pass. ``saved_mib``: made by forward and kept for backward; ``in_use_mib``:
            before backward; ``peak_mib``: the most in use in forward, and in the whole pass. Where memory
            ran out, what was asked for and allocated.
    """
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch._dynamo.config.recompile_limit = SHAPES  # beyond it, fail rather than run what is not compiled
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    device_gib = device_bytes(config.device) / 2**30
    calls = Implementations()
    checked = check_all(calls, config, device_gib)  # torch compiles here, so that in the turn it need not
    passed = [(row["implementation"], row["sequence"]) for row in checked if row["status"] == "ok"]
    with turn():
        timed = time_all(calls, config, passed)
        profiler = capture_all(calls, config, passed)
    captured, why = read_capture(profiler, passed)
    outcomes = pd.DataFrame(checked).assign(device_gib=device_gib)
    cells = outcomes.merge(pd.DataFrame({"phase": PASSES}), how="cross")
    for found in (timed, captured):
        cells = cells.merge(found, on=KEY, how="left")
    cells = cells.reindex(columns=list(SCHEMAS["cells"].columns))
    cells.loc[(cells["status"] == "ok") & cells["gpu_ms"].isna(), "reason"] = why
    cells["kernel"] = cells["kernel"].fillna("").astype(str)
    checks = outcomes.reindex(columns=list(SCHEMAS["checks"].columns)).dropna(subset="allowed_error")
    return {"cells": cells, "checks": checks.reset_index(drop=True)}


def check_all(calls: Implementations, config: Config, device_gib: float) -> list[dict]:
    """A row for each cell: implementation, sequence, status, reason and, where it ran, its errors."""
    rows: list[dict] = []
    expected: list[Tensor] = []
    for name, inputs in each(config):
        if not rows or rows[-1]["sequence"] != inputs.sequence:
            expected = reference(inputs)
            release(config.device)
        shape = config.batch_size, config.d_model, inputs.sequence, config.precision
        needed = needed_bytes(name, *shape) / 2**30
        row = {"implementation": name, "sequence": inputs.sequence}
        if name in COMPILED and needed > device_gib:  # compiling it takes seconds, and tells no more
            row |= {"status": "oom", "reason": f"needs {needed:.0f} GiB by formula: not compiled"}
        else:
            row |= check(name, calls, inputs, expected, config.precision)
        print(f"{inputs.sequence}, {name}: {row['status']} {row['reason']}", flush=True)
        release(config.device, after_error=row["status"] == "oom")
        rows.append(row)
    return rows


def check(name: str, calls: Implementations, inputs: Inputs, expected: list[Tensor], precision: str) -> dict:
    """One cell's first forward and backward: its errors and status, ``ok``, ``oom``, ``unsupported``, or
    ``failed`` where an error is larger than the precision's tolerance."""
    warned: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as warned, out_of_memory_names(f"running {name}"):
            warnings.simplefilter("always")
            output = calls.prepare(name, inputs)()
            output.backward(inputs.gradient)
            found = errors(output, inputs, expected)
    except torch.OutOfMemoryError as error:
        return out_of_memory(error)
    except Exception as error:  # torch says in many types of error what it cannot do; it is kept
        if "CUDA error" in str(error):
            raise  # the process is spoilt: nothing after it would be a measurement
        return {"status": "unsupported", "reason": refusal(error, warned)}
    allowed = TOLERANCE[precision]
    wrong = [f"{name} {value:.2g}" for name, value in found.items() if not value < allowed]  # nor is NaN
    outcome = {"status": "ok", "reason": ""} if not wrong else {
        "status": "failed", "reason": f"{', '.join(wrong)}, and {precision} is allowed {allowed:.2g}"}
    return found | outcome | {"allowed_error": allowed}


def out_of_memory(error: torch.OutOfMemoryError) -> dict:
    """What was asked for, and what this process had allocated by then, in GiB, from torch's words."""
    words = str(error)

    def gib(pattern: str) -> float:
        found = re.search(pattern, words)
        return float(found[1]) * {"GiB": 1, "MiB": 2**-10}[found[2]] if found else float("nan")
    asked, allocated = gib(r"allocate ([\d.]+) ([GM]iB)"), gib(r"([\d.]+) ([GM]iB) is allocated by PyTorch")
    reason = f"asked for {asked:.4g} GiB with {allocated:.4g} GiB allocated"
    return {"status": "oom", "reason": reason if asked == asked else words[:200], "asked_gib": asked,
            "allocated_gib": allocated}


def refusal(error: Exception, warned: list[warnings.WarningMessage]) -> str:
    """Why an implementation does not run, in torch's own words.

    Where no kernel of a backend fits, the error says that none does, and warnings say why, one for each
    backend; those of backends that were switched off say nothing.
    """
    words = str(error) or type(error).__name__
    if "No available kernel" in words:
        said = [str(warning.message).split(" (Triggered")[0] for warning in warned]
        words = " ".join(dict.fromkeys(text for text in said if not re.search(
            "not used because|runtime disabled", text))) or words
    return re.sub(r"/\S*/", "", " ".join(words.split()))[:200]  # no paths of this machine
