"""Measure the GPU time that each module of a user's model takes.

In the forward pass, a range around each module determines which operations belong to the module. In the backward
pass, autograd's sequence numbers determine this.
"""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from stepscope.measure.profiler import profiled
from stepscope.measure.subject import negligible_learning_rate
from stepscope.measure.timing import synchronizer
from stepscope.model import ranges
from stepscope.studies.your_model.subject import UserSubject
from stepscope.traces.torch_trace import load_torch_trace

WARMUPS = 2
PREFIX = "module/"  # prefix of range names, so that no module's range has the name of a phase
ELSEWHERE = "(outside of modules)"
MODEL = "(model)"
PHASES = ("forward", "backward", "optimizer")


def folded_paths(model: nn.Module) -> dict[str, str]:
    """Return a name for each module, by path; repeated layers of one type share a name ("layers.*.attention")."""
    names = {"": MODEL}
    for path, _ in model.named_modules():
        parent, _, name = path.rpartition(".")
        types = {type(layer) for layer in model.get_submodule(parent).children()}
        shown = "*" if name.isdigit() and len(types) == 1 else name
        if path:
            names[path] = ".".join(filter(None, [names[parent].removeprefix(MODEL), shown]))
    return names


def time_by_module(subject: UserSubject, device: str) -> pd.DataFrame:
    """Profile an eager step; return one row per module, with the longest total time first.

    A module's time excludes the time of the modules inside it, so the times add up to the step's time. Repeated
    layers share a row.

    Returns:
        A table with these columns:

        * ``module``: the module's folded path; ELSEWHERE for the loss function and the optimizer;
        * ``type``, ``modules``: the name of the module's type, and the number of modules in the row;
        * ``forward_ms``, ``backward_ms``, ``optimizer_ms``, ``total_ms``: sums of the durations of kernels.
    """
    names = folded_paths(subject.model)
    ranges.use_ranges(ranges.ProfilerRanges())
    with negligible_learning_rate(subject.optimizer):
        for _ in range(WARMUPS):
            subject.eager_step()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    with (
        negligible_learning_rate(subject.optimizer),
        ranges.annotated_modules(subject.model, lambda path: PREFIX + names[path]) as annotation,
        profiled(activities) as profiler,
        record_function("step"),
    ):
        subject.reset()
        with record_function("forward"), subject.autocasting():
            annotation.output = loss = subject.loss(subject.model, *subject.batch)  # type: ignore[misc]
        annotation.link_backward()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            subject.optimizer.step()
        synchronizer(device)()
    with TemporaryDirectory(prefix="stepscope-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        operations, _, _ = load_torch_trace(trace)
    return by_module(operations[operations["step"] == 0], subject.model, names)


def by_module(operations: pd.DataFrame, model: nn.Module, names: dict[str, str]) -> pd.DataFrame:
    """Sum the operations of a step by module and phase."""
    types = {names[path]: type(module).__name__ for path, module in model.named_modules()}
    counts = Counter(names[path] for path, _ in model.named_modules())
    region = operations["region"].astype(str)
    module = region.str.removeprefix(PREFIX).where(region.str.startswith(PREFIX), ELSEWHERE)
    phase = operations["phase"].astype(str)
    sums = operations["duration_ns"].groupby([module, phase]).sum().unstack(fill_value=0) / 1e6
    table = (
        sums.reindex(columns=PHASES, fill_value=0.0)
        .add_suffix("_ms")
        .rename_axis(index="module", columns=None)
    )
    table["total_ms"] = table.sum(axis="columns")
    table = table.sort_values("total_ms", ascending=False).reset_index()
    table.insert(1, "type", table["module"].map(types).fillna(""))
    table.insert(2, "modules", table["module"].map(counts).fillna(0).astype(int))
    return table
