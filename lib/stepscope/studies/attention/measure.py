"""Attention by itself: implementations side by side, each checked against float64 before it is timed.

Shapes in comments: B batch, T sequence, d head dimension. There is one head, so the tensors are (B, 1, T, d).
"""
import warnings
from collections.abc import Callable
from functools import cached_property
from math import inf, isfinite
from timeit import default_timer

import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from stepscope.studies.attention.config import ATTENTIONS, Config
from stepscope.step.compiling import Compiles, allow_recompiling, reason, release
from stepscope.step.model import Attention
from stepscope.step.training_step import AUTOCAST_DTYPES, out_of_memory_names
from stepscope.runs.store import Record, Store, load_table, runs_frame
from stepscope.step.summary import flags, median_interval
from stepscope.step.timing import PhaseClock

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
# The largest error that still is this precision: relative, in the Frobenius norm, of the output and each gradient. TF32
# keeps 10 bits of a factor (2^-11 = 5e-4) and bf16 7 (2^-9 = 2e-3); fp32's is far below one product in TF32.
TOLERANCE = {"fp32": 2e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}
MASKED = ("eager", "compiled")  # given the mask as a tensor; the others are told that attention is causal
QUANTITIES = ("output", "dq", "dk", "dv")
LEAST_WARMUPS = 2
SUMMARY = ["passes", "enqueue_ms", *(f"{phase}_{part}" for phase in ("forward", "backward", "pass")
                                     for part in ("median_ms", "ci_low_ms", "ci_high_ms", "mean_ms", "std_ms", "flags"))]


class Inputs:
    """Queries, keys, values and the output's gradient of one cell, drawn from the seed, and their causal mask."""

    def __init__(self, config: Config, sequence: int, causal: bool):
        generator = torch.Generator(config.device).manual_seed(config.seed)
        shape = (config.batch_size, 1, sequence, config.d_model)
        self.q, self.k, self.v, self.gradient = (
            torch.randn(shape, generator=generator, device=config.device, dtype=AUTOCAST_DTYPES.get(config.precision))
            for _ in range(4))
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.causal = causal

    def clear_gradients(self) -> None:
        for x in (self.q, self.k, self.v):
            x.grad = None

    @cached_property
    def future(self) -> Tensor | None:
        """What a query must not see, (T, T), as the model holds it; None without a causal mask."""
        sequence, device = self.q.shape[-2], self.q.device
        return torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu_(1) if self.causal else None

    @cached_property
    def blocks(self) -> BlockMask | None:
        """The same for FlexAttention; None without a causal mask."""
        return block_mask(self.q.shape[-2], self.q.device) if self.causal else None

    def held_bytes(self, name: str) -> int:
        """What is in use before forward: q, k, v, the output's gradient and, for the implementations that take one, the mask."""
        masks = [self.future] if name in MASKED and self.causal else mask_tensors(self.blocks) if name == "flex" else []
        return sum(x.untyped_storage().nbytes() for x in (self.q, self.k, self.v, self.gradient, *masks))


with torch.device("meta"):
    PARTS = Attention(2, 1, "eager")  # for its parts, which have no weights


def written_out(q: Tensor, k: Tensor, v: Tensor, future: Tensor | None) -> Tensor:  # three of (B, 1, T, d) -> the same
    """The model's own attention between its projections: product, scale, mask, max, subtract, exp, sum, divide, product."""
    scores = PARTS.scores(q, k)
    if future is not None:
        scores = PARTS.mask(scores, future)
    return PARTS.value(PARTS.softmax(scores), v)


class Implementations:
    """Calls by name. One compiled function serves all cells, as in a program: for another sequence torch compiles again.

    ``compiled`` is compiled for each shape (static), ``flex`` once for any sequence (dynamic).
    """

    def __init__(self) -> None:
        self.compiled = torch.compile(written_out, dynamic=False)
        self.flex = torch.compile(flex_attention, dynamic=True)

    def prepare(self, name: str, inputs: Inputs) -> Callable[[], Tensor]:
        """The forward pass of one cell as a call without arguments; masks are made here, outside any clock."""
        q, k, v, causal = inputs.q, inputs.k, inputs.v, inputs.causal
        if name in MASKED:
            future, call = inputs.future, written_out if name == "eager" else self.compiled
            return lambda: call(q, k, v, future)
        if name == "flex":
            mask = inputs.blocks
            return lambda: self.flex(q, k, v, block_mask=mask)

        def fused() -> Tensor:
            with sdpa_kernel(BACKENDS[name]):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)
        return fused


def seen(batch, head, query, key):
    """FlexAttention's rule of the causal mask; one function, since another would have to be compiled again."""
    return query >= key


def block_mask(sequence: int, device: torch.device) -> BlockMask:
    """FlexAttention's causal mask. What is kept is of blocks, and grows with the square of T / 128 only; but while it is
    made, uncompiled as is torch's default, there is a whole (T, T)."""
    return create_block_mask(seen, None, None, sequence, sequence, device=device)


def mask_tensors(mask: BlockMask | None) -> list[Tensor]:
    return [x for x in tree_leaves(mask.as_tuple()) if isinstance(x, Tensor)] if mask else []


def reference(inputs: Inputs) -> list[Tensor]:
    """Output and gradients of q, k, v in float64, by textbook softmax, one batch element at a time."""
    rows = []
    for q, k, v, gradient in zip(*(x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.gradient))):
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if inputs.causal:
            scores.masked_fill_(inputs.future, float("-inf"))
        output = torch.softmax(scores, dim=-1) @ v
        del scores
        rows.append((output.detach(), *torch.autograd.grad(output, (q, k, v), gradient)))
    return [torch.stack(column) for column in zip(*rows)]


def errors(output: Tensor, inputs: Inputs, expected: list[Tensor]) -> dict[str, float]:
    """Relative error of the output and of each gradient: Frobenius norm of the difference over that of the reference.

    What is not a number counts as infinite, since NaN would be lost in a ``max``.
    """
    found = (output.detach(), inputs.q.grad, inputs.k.grad, inputs.v.grad)
    relative = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected)]
    return {f"{name}_error": error if isfinite(error) else inf for name, error in zip(QUANTITIES, relative)}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def first_pass(call: Callable[[], Tensor], inputs: Inputs, device: str) -> tuple[Tensor, dict[str, float]]:
    """A forward and backward pass by the host's clock, compiling whatever has to be compiled."""
    started = default_timer()
    output = call()
    synchronize(device)
    middle = default_timer()
    output.backward(inputs.gradient)
    synchronize(device)
    return output, {"first_forward_ms": (middle - started) * 1e3, "first_backward_ms": (default_timer() - middle) * 1e3}


def mask_memory(inputs: Inputs, device: str) -> dict[str, float]:
    """Makes FlexAttention's mask. ``mask_peak_bytes``: the most in use meanwhile, with q, k, v and the output's gradient;
    ``mask_bytes`` of it are kept. Nothing without a mask, or where the allocator does not count."""
    if device == "cpu" or not inputs.causal:
        return {}
    own = inputs.held_bytes("none")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = sum(x.untyped_storage().nbytes() for x in mask_tensors(inputs.blocks))
    torch.cuda.synchronize()
    return {"mask_peak_bytes": torch.cuda.max_memory_allocated() - before + own, "mask_bytes": kept}


def memory_pass(call: Callable[[], Tensor], inputs: Inputs, own: int, device: str) -> dict[str, float]:
    """One more pass for its memory, in bytes; ``own`` is what is in use before it (``Inputs.held_bytes``).

    ``in_use_bytes``: before backward, with q, k, v, the output's gradient and the mask; ``saved_bytes``: of it, what forward made and
    keeps for backward, the output not counted; ``forward_peak_bytes`` and ``peak_bytes``: the most in use in forward and in
    the whole pass. A CPU's allocator counts nothing: there ``saved_bytes`` is the storages that autograd is handed, and the
    peaks are missing.
    """
    inputs.clear_gradients()
    if device == "cpu":
        saved: dict[int, Tensor] = {}

        def keep(x: Tensor) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = call()
        for x in (inputs.q, inputs.k, inputs.v, output):
            saved.pop(x.untyped_storage().data_ptr(), None)
        # A boolean mask is made once and not by forward.
        bytes_saved = sum(x.untyped_storage().nbytes() for x in saved.values() if x.dtype != torch.bool)
        return {"saved_bytes": bytes_saved, "in_use_bytes": own + output.untyped_storage().nbytes() + bytes_saved}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = call()
    torch.cuda.synchronize()
    after, forward_peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    output.backward(inputs.gradient)
    torch.cuda.synchronize()
    return {"in_use_bytes": after - before + own, "saved_bytes": after - before - output.untyped_storage().nbytes(),
            "forward_peak_bytes": forward_peak - before + own, "peak_bytes": torch.cuda.max_memory_allocated() - before + own}


def timed_passes(call: Callable[[], Tensor], inputs: Inputs, config: Config) -> pd.DataFrame:
    """Warm-up, then the timed passes; columns forward_ms, backward_ms, enqueue_ms (the host's part of both)."""
    clock = PhaseClock(config.device, phases=2)

    def once() -> tuple[float, float, float, float]:
        inputs.clear_gradients()
        clock.start()
        with clock("forward"):
            output = call()
        with clock("backward"):
            output.backward(inputs.gradient)
        (_, forward, enqueued), (_, backward, enqueued_too), (_, wall, _) = clock.stop()
        return forward, backward, enqueued + enqueued_too, wall

    spent_ms, warmups, wall_ms = 0.0, 0, 0.0
    while warmups < config.warmup_steps and (warmups < LEAST_WARMUPS or spent_ms < config.cell_seconds * 1e3 / 4):
        *_, wall_ms = once()
        spent_ms, warmups = spent_ms + wall_ms, warmups + 1
    affordable = int(config.cell_seconds * 1e3 / wall_ms) if wall_ms else config.timed_steps
    passes = min(config.timed_steps, max(config.least_passes, affordable))
    return pd.DataFrame([once()[:3] for _ in range(passes)], columns=["forward_ms", "backward_ms", "enqueue_ms"])


def measure_cell(name: str, implementations: Implementations, inputs: Inputs, expected: list[Tensor],
                 config: Config) -> tuple[dict, pd.DataFrame]:
    """One implementation at one sequence: a row of what it is (status ``ok``, ``oom``, ``unsupported`` or ``wrong``, and
    the reason), and the timed passes, none unless its status is ``ok``."""
    row = {"implementation": name, "sequence": inputs.q.shape[-2], "causal": inputs.causal, "error": float("nan")}
    compiles = Compiles()
    samples = pd.DataFrame(columns=["forward_ms", "backward_ms", "enqueue_ms"])
    inputs.clear_gradients()
    try:
        with warnings.catch_warnings(record=True) as warned, out_of_memory_names(f"running {name}"):
            warnings.simplefilter("always")
            if name == "flex":
                row |= mask_memory(inputs, config.device)
            call = implementations.prepare(name, inputs)
            output, first = first_pass(call, inputs, config.device)
    except torch.OutOfMemoryError as error:
        return row | {"status": "oom", "reason": reason(error, [])}, samples
    except Exception as error:  # torch says in many types of error what it cannot do; the reason is kept
        if "CUDA error" in str(error):
            raise  # the process is spoilt: nothing after it would be a measurement
        return row | {"status": "unsupported", "reason": reason(error, warned)}, samples
    if any(x.grad is None for x in (inputs.q, inputs.k, inputs.v)):
        return row | {"status": "wrong", "reason": "no gradient of q, k or v"}, samples
    try:
        row |= first | dict(zip(("graphs", "graph_breaks"), compiles.read())) | errors(output, inputs, expected)
        del output
        row["error"] = max(row[f"{quantity}_error"] for quantity in QUANTITIES)
        if not row["error"] < TOLERANCE[config.precision]:
            return row | {"status": "wrong", "reason": f"relative error {row['error']:.2g}, and {config.precision} is"
                                                       f" allowed"
                                                       f" {TOLERANCE[config.precision]:.2g}"}, samples
        row |= memory_pass(call, inputs, inputs.held_bytes(name), config.device)
        samples = timed_passes(call, inputs, config)
        row |= {"status": "ok", "reason": "", "later_graphs": compiles.read()[0]}
    except torch.OutOfMemoryError as error:
        row |= {"status": "oom", "reason": reason(error, [])}
    return row, samples


def measure_attention(config: Config) -> dict[str, pd.DataFrame]:
    """The whole grid of one run, compiled into an empty cache, so that compile times are no other run's savings.

    Returns:
        cells: a row for each implementation, sequence and causal; see :func:`measure_cell`, and :func:`summarized`.
        samples: every timed pass; ``cell`` is the row's number in ``cells``.
    """
    from torch._inductor.utils import fresh_cache
    with fresh_cache():
        return _measure(config)


def _measure(config: Config) -> dict[str, pd.DataFrame]:
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    allow_recompiling()
    implementations, rows, samples = Implementations(), [], []
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
                release(config.device, after_error=row["status"] == "oom")
                inputs.clear_gradients()
                samples.append(passes.assign(cell=len(rows)))
                rows.append(row)
            del inputs, expected
    samples = pd.concat(samples, ignore_index=True).astype({"cell": "int16"})
    samples = samples.astype({column: "float32" for column in samples if column.endswith("_ms")})
    return {"cells": summarized(pd.DataFrame(rows), samples), "samples.parquet": samples}


def summarized(cells: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Cells with ``passes`` and, of forward, backward and both (``pass``), median, 95% interval, mean, std and flags."""
    rows = {}
    for cell, own in samples.groupby("cell"):
        row = {"passes": len(own), "enqueue_ms": own["enqueue_ms"].median()}
        whole = own["forward_ms"] + own["backward_ms"]
        for phase, times in (("forward", own["forward_ms"]), ("backward", own["backward_ms"]), ("pass", whole)):
            times = times.to_numpy(dtype=float)
            low, high = median_interval(times)
            row |= {f"{phase}_median_ms": pd.Series(times).median(), f"{phase}_ci_low_ms": low, f"{phase}_ci_high_ms": high,
                    f"{phase}_mean_ms": times.mean(), f"{phase}_std_ms": times.std(ddof=1) if len(times) > 1 else float("nan"),
                    f"{phase}_flags": "; ".join(flags(times))}
        rows[cell] = row
    return cells.join(pd.DataFrame(rows.values(), index=list(rows), columns=SUMMARY))


def cell_flops(cells: pd.DataFrame) -> pd.Series:
    """Forward's matrix products, 4 B T T d: the whole square, causal or not, as written-out attention computes it.

    Backward is counted as twice that for every implementation, though flash-like kernels compute the scores again.
    """
    return 4 * cells["batch_size"] * cells["sequence"].astype(float) ** 2 * cells["d_model"]


def _runs(records: list[Record]) -> pd.DataFrame:
    """What a run's rows share. A row has its own causal and status; the run's fields of these names are what was asked for."""
    return runs_frame(records).drop(columns=["study", "causal", "status", "unmasked", "sequences"])


def all_cells(store: Store, records: list[Record]) -> pd.DataFrame:
    """Every cell of every run with the run's configuration, its ``flops``, ``forward_tflops``, ``backward_tflops``,
    ``pass_tflops`` and ``utilisation``: the pass's share of the matrix-product rate measured in the same run."""
    records = [record for record in records if record.study == "attention" and record.status == "ok"]
    cells = load_table(store, records, "cells")
    if cells.empty:
        return cells
    cells = cells.merge(_runs(records), on="run_id")
    ceilings = load_table(store, records, "ceilings").set_index(["run_id", "ceiling"])["value"]
    cells["flops"] = cell_flops(cells)
    for phase, factor in (("forward", 1), ("backward", 2), ("pass", 3)):
        cells[f"{phase}_tflops"] = factor * cells["flops"] / cells[f"{phase}_median_ms"] / 1e9
    ceiling = [ceilings.get((run, f"matmul_{precision}")) for run, precision in zip(cells["run_id"], cells["precision"])]
    return cells.assign(utilisation=cells["pass_tflops"] / pd.Series(ceiling, index=cells.index, dtype=float)).copy()  # in one block


def reading(cells: pd.DataFrame) -> str:
    """What one run says, in a sentence or two of markdown."""
    ok = cells[(cells["status"] == "ok") & cells["causal"]]
    if ok.empty:
        return "Nothing could be timed."
    last = ok[ok["sequence"] == ok["sequence"].max()].sort_values("pass_median_ms")
    text = (f"At sequence {last['sequence'].iloc[0]}, causal, a forward and backward pass takes "
            + ", ".join(f"{row.pass_median_ms:.4g} ms ({row.implementation})" for row in last.itertuples()) + ".")
    left_out = cells[cells["status"] != "ok"].groupby(["implementation", "status"], sort=False).size()
    return text + (" Not timed: " + ", ".join(f"{name}: {count}"
                                              f" {status}" for (name, status), count in left_out.items()) + "."
                   if len(left_out) else "")


def all_tables(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """:func:`all_cells`, and the tables ``ends``, ``predicted`` and ``accounting`` of every run with its configuration."""
    records = [record for record in records if record.study == "attention" and record.status == "ok"]
    tables = {"cells": all_cells(store, records)}
    for name in ("ends", "predicted", "accounting"):
        rows = load_table(store, records, name)
        tables[name] = rows.merge(_runs(records), on="run_id") if len(rows) else rows
    return tables
