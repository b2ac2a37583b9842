"""The records of a torch.profiler trace, in the shape of nsys's, so that one accounting reads both.

On a GPU its kernels come from CUPTI, as nsys's do. On a CPU there are none: the operators that do work and call
no other that does stand in their place, each launched by itself.
"""
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.traces.attribution import (
    CORRELATIONS,
    KINDS,
    LATEST,
    STEP,
    Records,
    TraceError,
    attribute,
    thread_columns,
    with_roles,
)
from stepscope.traces.families import families

# Operators that allocate, or look at the same numbers in another shape: they call for no work and hide what
# does it.
NO_WORK = re.compile(
    r"aten::(resolve_|as_strided|view|_unsafe_view|_reshape_alias|empty|result_type|promote_types"
    r"|expand|t$|transpose|lift_fresh|detach|to$|unsqueeze|select$|slice$|set_$|_local_scalar_dense"
    r"|unflatten|flatten|reshape$|chunk$|split"
    r"|item$)"
)
PROCESS_KEY = 1 << 48 | 7 << 24
# The categories of events that are read.
WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCHES, OPERATOR, RANGE = ("cuda_runtime", "cuda_driver"), "cpu_op", "user_annotation"


def load_torch_trace(path: Path | str, phases: Sequence[str] = PHASE_NAMES,
                     step: str = STEP) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """All operations of a trace of this process, its ranges, and what check_conservation compares with.

    Returns:
        operations, ranges: as ``export.load_trace`` of nsys's capture. torch's own ranges, which have a "#" in
            their names, are left out.
        totals: operations and duration_ns by kind, added up event by event.

    Raises:
        TraceError: the file is no such trace, or an event has no times or ids that can be used.
        ConservationError: two phases, or two steps, overlap.
    """
    events = [event for event in read_events(Path(path)) if "#" not in event["name"] or event["cat"] != RANGE]
    records = _records(str(path), events)
    totals = dict.fromkeys(KINDS, (0, 0))
    for event in work(events):
        kind = WORK.get(event["cat"], "kernel")
        totals[kind] = totals[kind][0] + 1, totals[kind][1] + event["end"] - event["start"]
    operations, ranges = attribute(with_roles(records, tuple(phases), step), tuple(phases))
    return operations, ranges, pd.DataFrame.from_dict(totals, orient="index",
                                                      columns=["operations", "duration_ns"])


def _records(path: str, events: list[dict[str, Any]]) -> Records:
    key = {tid: PROCESS_KEY | number for number, tid in enumerate(sorted({e["tid"] for e in events}), start=1)}
    found = work(events)
    if any(e["cat"] in WORK for e in found):
        launches = [e for e in events if e["cat"] in LAUNCHES and e["correlation"] is not None]
    else:
        launches = found = [e | {"correlation": i} for i, e in enumerate(found, start=1)]
    found = sorted(found, key=lambda e: e["start"])
    names, kinds = [e["name"] for e in found], [WORK.get(e["cat"], "kernel") for e in found]
    start = _integers(e["start"] for e in found)
    operations = pd.DataFrame({
        "kind": pd.Categorical(kinds, KINDS), "name": pd.Categorical(names), "family": families(names),
        "start_ns": start, "duration_ns": _integers(e["end"] for e in found) - start,
        "device": _integers(e["device"] for e in found), "stream": _integers(e["stream"] for e in found),
        "correlation_id": _integers(-1 if e["correlation"] is None else e["correlation"] for e in found),
        "row": np.arange(len(found))})
    opened = sorted((e for e in events if e["cat"] == RANGE),
                    key=lambda e: (key[e["tid"]], e["start"], -e["end"]))
    ranges = pd.DataFrame({
        "name": pd.Categorical([e["name"] for e in opened]),
        "start_ns": _integers(e["start"] for e in opened), "end_ns": _integers(e["end"] for e in opened),
        **thread_columns(_integers(key[e["tid"]] for e in opened))})
    calls = [_integers(values) for values in zip(*((key[e["tid"]], e["correlation"], e["start"], e["end"])
                                                   for e in launches))]
    return Records(path, operations, np.full(len(found), PROCESS_KEY),
                   np.stack(calls) if calls else np.zeros((4, 0), np.int64), ranges)


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def work(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels, copies and fills among events; where there are none, the operators that do work."""
    found = [e for e in events if e["cat"] in WORK]
    return found or _leaves([e for e in events if e["cat"] == OPERATOR and e["name"].startswith("aten::")
                             and not NO_WORK.match(e["name"])])


def _leaves(operators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators within which, on the same thread, no other one begins."""
    ordered = sorted(operators, key=lambda e: (e["tid"], e["start"], -e["end"]))
    return [e for e, after in zip(ordered, [*ordered[1:], None])
            if after is None or after["tid"] != e["tid"] or after["start"] >= e["end"]]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace: cat, name, tid (text), start and end in ns, correlation (None: none),
    device, stream.

    Raises:
        TraceError: as load_torch_trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        complete = [e for e in events if e.get("ph") == "X"
                    and e.get("cat") in (*WORK, *LAUNCHES, OPERATOR, RANGE)]
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read ({error.strerror}), expected torch.profiler's trace"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"{path}: {type(error).__name__} {error}, expected torch.profiler's trace: JSON with a list"
            " traceEvents of events"
        ) from None
    return [_event(e, f"{path}: the event {str(e.get('name'))[:80]!r}") for e in complete]


def _event(event: dict[str, Any], where: str) -> dict[str, Any]:
    """One of read_events; `where` begins the error."""
    args = event["args"] if isinstance(event.get("args"), dict) else {}
    start, duration = (_nanoseconds(event.get(key), f"{where} has {key}") for key in ("ts", "dur"))
    if duration < 0:
        raise TraceError(f"{where} lasts {duration} ns, expected no negative time")
    of_gpu = event["cat"] in WORK
    correlation = args.get("correlation")
    device, stream = (args.get(key, 0) if of_gpu else 0 for key in ("device", "stream"))
    for key, found, least in (("correlation", correlation, 0), ("device", device, 0), ("stream", stream, -1)):
        if found is not None and not (isinstance(found, int) and least <= found < CORRELATIONS):
            raise TraceError(
                f"{where} has {key} {found!r:.80}, expected a whole number from {least} to {CORRELATIONS}"
            )
    return {"cat": event["cat"], "name": str(event.get("name")), "tid": str(event.get("tid")), "start": start,
            "end": start + duration, "correlation": correlation, "device": device or 0, "stream": stream or 0}


def _nanoseconds(microseconds: Any, where: str) -> int:
    """A trace's time, which is in microseconds with decimals."""
    if isinstance(microseconds, int | float) and abs(microseconds) < LATEST / 1e3:
        return round(microseconds * 1e3)
    raise TraceError(f"{where} {microseconds!r:.80}, expected a time in microseconds")
