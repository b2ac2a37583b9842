"""Small experiments on number formats: sums, what autocast casts, and which part of a norm needs how many
bits."""
import re
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.config import SIZES, Dimensions, StepConfig
from stepscope.step.training_step import AUTOCAST_DTYPES, build_step
from stepscope.studies.mixed_precision.config import Config

TERM, ADDITIONS = 0.01, 1000
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
SCALES = [10.0**exponent for exponent in range(-6, 6)]
FEATURES, ROWS = 1024, 64
FIVE = ("small", "medium", "large", "xl", "2.7B")  # sizes over whose widths a norm's sum is measured
SUMMED = 12    # rows whose sums are looked at: few enough that PyTorch takes one thread for each step of them
TRAINED = 10   # steps of two layers, before their residual stream is looked at


# Sums

def sums(device: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """0.01 added a thousand times, in every combination of types: the handout's four loops, and others beside
    them.

    Returns:
        results: a row for each way: way, sum_type, term_type, handout (whether it is one of the handout's),
            result (exact, in decimal), printed (as torch prints it, 4 decimals), bits (hexadecimal), error
            (result - 10), error_of_term (1000 times the term as it is stored - 10), error_of_adding (the
            rest). Exact arithmetic, given as text.
        running: way, additions, error (sum so far less the exact sum), for every tenth addition.
    """
    results, running = [], []
    for way, sum_type, term_type, handout, sums_so_far in _ways(device):
        total = sums_so_far[-1]
        exact, term = Fraction(total.item()), Fraction(torch.tensor(TERM, dtype=term_type).item())
        of_term = ADDITIONS * term - 10
        results.append({"way": way, "sum_type": _name(sum_type), "term_type": _name(term_type),
                        "handout": handout, "result": _decimal(exact), "printed": f"{total.item():.4f}",
                        "bits": _bits(total), "error": float(exact - 10), "error_of_term": float(of_term),
                        "error_of_adding": float(exact - 10 - of_term)})
        values = torch.stack(sums_so_far).double().cpu().numpy()
        at = np.arange(10, ADDITIONS + 1, 10)
        running += [(way, int(n), error) for n, error in zip(at, values[at - 1] - at * TERM)]
    return pd.DataFrame(results), pd.DataFrame(running, columns=["way", "additions", "error"])


def _ways(device: str):
    """Each way of summing: name, type of the sum, type of the term, whether the handout asks for it, the
    sum after each addition."""
    def plain(sum_type: torch.dtype, term_type: torch.dtype, upcast: bool = False) -> list[Tensor]:
        total, so_far = torch.tensor(0, dtype=sum_type, device=device), []
        for _ in range(ADDITIONS):
            term = torch.tensor(TERM, dtype=term_type, device=device)
            total = total + (term.type(torch.float32) if upcast else term)
            so_far.append(total)
        return so_far

    def kahan(dtype: torch.dtype) -> list[Tensor]:
        """Compensated summation: what an addition rounds off is carried into the next (Kahan, CACM 8(1),
        1965)."""
        total, carry = torch.zeros(2, dtype=dtype, device=device).unbind()
        term, so_far = torch.tensor(TERM, dtype=dtype, device=device), []
        for _ in range(ADDITIONS):
            y = term - carry
            t = total + y
            carry, total = (t - total) - y, t
            so_far.append(total)
        return so_far

    def pairwise(dtype: torch.dtype) -> list[Tensor]:
        """Halves are summed by themselves and then added; after each n, the sum of n terms."""
        term, cache = torch.tensor(TERM, dtype=dtype, device=device), {}

        def of(n: int) -> Tensor:
            if n not in cache:
                cache[n] = term if n == 1 else of(n // 2) + of(n - n // 2)
            return cache[n]
        return [of(n) for n in range(1, ADDITIONS + 1)]

    fp32, fp16, bf16 = DTYPES.values()
    yield "fp32 into fp32", fp32, fp32, True, plain(fp32, fp32)
    yield "fp16 into fp16", fp16, fp16, True, plain(fp16, fp16)
    yield "fp16 into fp32", fp32, fp16, True, plain(fp32, fp16)
    yield "fp16 cast to fp32, into fp32", fp32, fp16, True, plain(fp32, fp16, upcast=True)
    yield "bf16 into bf16", bf16, bf16, False, plain(bf16, bf16)
    yield "bf16 into fp32", fp32, bf16, False, plain(fp32, bf16)
    for name, dtype in DTYPES.items():
        yield f"{name}, pairwise", dtype, dtype, False, pairwise(dtype)
    for name, dtype in DTYPES.items():
        yield f"{name}, Kahan", dtype, dtype, False, kahan(dtype)


def steps_between_numbers(device: str) -> pd.DataFrame:
    """How fine each type is, and where adding 0.01 stops doing anything.

    Returns a row for each type: dtype, term (0.01 as stored, exact), step_at_10 (from 10 to the next number),
    stops_at (the smallest power of two that adding the term leaves as it is: tried, not derived), stops_after
    (additions until the running sum no longer changes; NaN beyond 10,000).
    """
    rows = []
    for name, dtype in DTYPES.items():
        term, ten = (torch.tensor(value, dtype=dtype, device=device) for value in (TERM, 10.0))
        step = torch.finfo(dtype).eps * 8  # eps is the step at 1; 10 lies between 8 and 16
        assert (ten + torch.tensor(step, dtype=dtype, device=device) != ten).item()
        powers = torch.tensor([2.0**e for e in range(40)], dtype=torch.float64).to(dtype).to(device)
        stops_at = powers[powers + term == powers].double().min().item()
        total, after = torch.tensor(0.0, dtype=dtype), np.nan
        for n in range(10_000):
            grown = total + term.cpu()
            if grown == total:
                after = n
                break
            total = grown
        rows.append((name, _decimal(Fraction(term.item())), step, stops_at, after))
    return pd.DataFrame(rows, columns=["dtype", "term", "step_at_10", "stops_at", "stops_after"])


def _name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def _decimal(value: Fraction) -> str:
    """Every digit of a binary fraction."""
    return f"{Decimal(value.numerator) / Decimal(value.denominator):f}"


def _bits(value: Tensor) -> str:
    integer = BITS[value.dtype]
    bits = torch.iinfo(integer).bits
    return f"0x{value.view(integer).item() & (2**bits - 1):0{bits // 4}x}"


# Autocast

class ToyModel(nn.Module):
    """The handout's: Linear without bias, ReLU, LayerNorm, Linear without bias."""

    def __init__(self, features: int = 20, classes: int = 5):
        super().__init__()
        self.fc1 = nn.Linear(features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


def toy_dtypes(device: str) -> pd.DataFrame:
    """The type of every tensor of the running ToyModel under autocast, noted by hooks.

    Returns columns device, autocast, tensor, dtype.
    """
    rows = []
    for autocast in AUTOCAST_DTYPES:
        torch.manual_seed(0)
        model, seen = ToyModel().to(device), dict[str, torch.dtype]()
        for name, layer in model.named_children():
            layer.register_forward_hook(partial(_note, seen, f"output of {name}"))
        x, y = torch.randn(8, 20, device=device), torch.randint(5, (8,), device=device)
        with torch.autocast(device, AUTOCAST_DTYPES[autocast]):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        (parameters,) = {p.dtype for p in model.parameters()}
        (gradients,) = {p.grad.dtype for p in model.parameters()}
        seen = {"parameters": parameters} | seen | {"logits": logits.dtype, "loss": loss.dtype,
                                                    "gradients": gradients}
        rows += [(device, autocast, tensor, _name(dtype)) for tensor, dtype in seen.items()]
    return pd.DataFrame(rows, columns=["device", "autocast", "tensor", "dtype"])


def _note(seen: dict[str, torch.dtype], name: str, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
    seen[name] = output.dtype


class Census(TorchDispatchMode):
    """Counts each operation by its name and the types it reads and writes.

    Not counted is what computes nothing: views, allocations, questions about types, a number handed to the
    host.
    """

    NO_WORK = re.compile("empty|_unsafe_view|promote_types|_local_scalar_dense")

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str, str], int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and not self.NO_WORK.search(func.name()):
            flat_in = torch.utils._pytree.tree_leaves((args, kwargs))
            reads, writes = (", ".join(sorted({_name(t.dtype) for t in leaves if isinstance(t, Tensor)}))
                             for leaves in (flat_in, torch.utils._pytree.tree_leaves(result)))
            key = func.name().removeprefix("aten::").split(".")[0], reads, writes
            self.counts[key] = self.counts.get(key, 0) + 1
        return result


def census(config: Config) -> pd.DataFrame:
    """Every operation of one full step of the Transformer under autocast, by the types it reads and writes.

    Returns columns autocast, phase, operation, reads, writes, count.
    """
    rows = []
    for autocast in AUTOCAST_DTYPES:
        modes: dict[str, Census] = defaultdict(Census)
        build_step(config.step(precision=autocast, mode="step"))(modes.__getitem__)
        rows += [(autocast, phase, *key, count)
                 for phase, mode in modes.items() for key, count in mode.counts.items()]
    return pd.DataFrame(rows, columns=["autocast", "phase", "operation", "reads", "writes", "count"])


# Norms

def norm_errors(device: str) -> pd.DataFrame:
    """Each quantity inside LayerNorm and RMSNorm against float64 on the same inputs, every operation's result
    in one type. (Within one operation torch may be wider: its means accumulate in fp32, see
    :func:`reduction_errors`.)

    Inputs are standard normal, times a scale from 1e-6 to 1e5; each type gets them rounded to it, and so does
    float64, so that the error is the computation's and not the input's.

    Returns columns norm, dtype, scale, quantity, relative_error (median over elements, of the finite ones
    whose true value is not 0), nonfinite, zero (shares of elements that are inf or NaN, or 0 where they
    should not be).
    """
    torch.manual_seed(0)
    x, rows = torch.randn(ROWS, FEATURES, dtype=torch.float64), []
    for name, dtype in DTYPES.items():
        for scale in SCALES:
            rounded = (x * scale).to(dtype)
            if not rounded.isfinite().all():
                overflows = (~rounded.isfinite()).double().mean().item()
                rows += [(norm, name, scale, "input", np.nan, overflows, 0.0) for norm in NORMS]
                continue
            for norm, quantities in NORMS.items():
                truth = quantities(rounded.double())
                for quantity, value in quantities(rounded.to(device)).items():
                    errors = _errors(value.double().cpu(), truth[quantity])
                    rows.append((norm, name, scale, quantity, *errors))
    return pd.DataFrame(rows, columns=["norm", "dtype", "scale", "quantity", "relative_error", "nonfinite",
                                       "zero"])


def _errors(value: Tensor, true: Tensor) -> tuple[float, float, float]:
    """relative_error, nonfinite and zero of one quantity (see norm_errors)."""
    finite, nonzero = value.isfinite(), true != 0
    errors = ((value - true) / true).abs()[finite & nonzero]
    return (errors.median().item() if errors.numel() else np.nan, (~finite).double().mean().item(),
            ((value == 0) & nonzero).double().mean().item())


EPS = 1e-5  # PyTorch's LayerNorm's and this model's RMSNorm's


def _layer_norm(x: Tensor) -> dict[str, Tensor]:
    mean = x.mean(-1, keepdim=True)
    squares = (x - mean).square()
    variance = squares.mean(-1, keepdim=True)
    root = (variance + EPS).rsqrt()
    return {"mean": mean, "squares": squares, "variance": variance, "reciprocal root": root,
            "output": (x - mean) * root}


def _rms_norm(x: Tensor) -> dict[str, Tensor]:
    squares = x.square()
    mean_square = squares.mean(-1, keepdim=True)
    root = (mean_square + EPS).rsqrt()
    return {"squares": squares, "mean square": mean_square, "reciprocal root": root, "output": x * root}


NORMS = {"LayerNorm": _layer_norm, "RMSNorm": _rms_norm}


def sequential_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, one term after another, each partial sum in the type of ``x``."""
    total = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        total = total + term
    return total


def pairwise_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension by adding halves, each partial sum in the type of ``x``."""
    while (n := x.shape[-1]) > 1:
        odd = x[..., n - n % 2:]  # the last term of an odd number waits for the next round
        x = torch.cat((x[..., :n // 2] + x[..., n // 2:n - n % 2], odd), dim=-1)
    return x[..., 0]


WAYS = {"torch": lambda x: x.mean(-1, keepdim=True),
        "pairwise": lambda x: (pairwise_sum(x) / x.shape[-1]).unsqueeze(-1),
        "sequential": lambda x: (sequential_sum(x) / x.shape[-1]).unsqueeze(-1)}
FUSED = {"LayerNorm": lambda x: functional.layer_norm(x, x.shape[-1:], eps=EPS),
         "RMSNorm": lambda x: functional.rms_norm(x, x.shape[-1:], eps=EPS)}


def reduction_errors(device: str, inputs: dict[str, Tensor]) -> pd.DataFrame:
    """What a norm's own sums lose: torch's mean, and sums kept in the type, pairwise and one term after
    another; and the fused norm's output beside the written-out one's.

    Args:
        inputs: float64, (rows, width), by name. Each type gets them rounded to it, and so does float64.

    Returns columns input, width, norm, dtype, quantity (mean square, mean, variance, output), way (of
    :data:`WAYS`, or ``fused``), error (relative, median over rows; of the mean in standard deviations;
    of an output over its elements), worst (the largest), rounded (share that is float64's result rounded to
    the type).
    """
    rows = []
    for name, x in inputs.items():
        for dtype_name, dtype in DTYPES.items():
            given = x.to(dtype)
            wide = given.double()
            spread = wide.std(-1, correction=0, keepdim=True)
            for norm in NORMS:
                truth = _reduced(wide, norm, WAYS["torch"])
                found = {way: _reduced(given.to(device), norm, mean) for way, mean in WAYS.items()}
                found["fused"] = {"output": FUSED[norm](given.to(device))}
                for way, quantities in found.items():
                    for quantity, value in quantities.items():
                        true, got = truth[quantity], value.double().cpu()
                        errors = ((got - true) / (spread if quantity == "mean" else true)).abs()
                        rounded = (value.cpu() == true.to(dtype)).double().mean().item()
                        rows.append((name, x.shape[-1], norm, dtype_name, quantity, way,
                                     errors.median().item(), errors.max().item(), rounded))
    return pd.DataFrame(rows, columns=["input", "width", "norm", "dtype", "quantity", "way", "error", "worst",
                                       "rounded"])


def _reduced(x: Tensor, norm: str, mean: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A norm's reductions and its output, by one way of taking a mean."""
    if norm == "RMSNorm":
        square = mean(x.square())
        return {"mean square": square, "output": x * (square + EPS).rsqrt()}
    middle = mean(x)
    variance = mean((x - middle).square())
    return {"mean": middle, "variance": variance, "output": (x - middle) * (variance + EPS).rsqrt()}


def norm_inputs(config: Config) -> dict[str, Tensor]:
    """What norms are measured on, (:data:`SUMMED`, width) in float64 on the CPU: normal numbers of the widths
    of :data:`FIVE`, and the residual stream before the final norm of two layers of these widths after
    :data:`TRAINED` steps (on a CPU, of the run's own width)."""
    torch.manual_seed(0)
    found = {f"normal {size}": torch.randn(SUMMED, SIZES[size].d_model, dtype=torch.float64) for size in FIVE}
    shapes = {size: SIZES[size] for size in FIVE}
    if config.device == "cpu":
        shapes = {config.size: Dimensions(config.d_model, config.d_ff, config.num_layers, config.num_heads)}
    for size, shape in shapes.items():
        found[f"stream {size}"] = _stream(config, shape._replace(num_layers=2))
    return found


def _stream(config: Config, shape: Dimensions) -> Tensor:
    """The residual stream of a model of this shape, trained for a few steps on one batch."""
    fields = config.model_dump(include={"vocab_size", "batch_size", "device", "seed"})
    step = build_step(StepConfig(**fields, **shape._asdict(), context_length=ROWS, mode="step"))
    for _ in range(TRAINED):
        step.clear_gradients()
        step()
    kept: list[Tensor] = []
    hook = step.model.final_norm.register_forward_pre_hook(lambda layer, given: kept.append(given[0]))
    with torch.no_grad():
        step.model(step.tokens)
    hook.remove()
    return kept[0][0, -SUMMED:].double().cpu()  # later tokens attend to more


def all_devices(config: Config) -> dict[str, pd.DataFrame]:
    """Every experiment's table: sums, running, steps, norms and reductions on the CPU and, where there is
    one, the GPU; toy; census."""
    devices, inputs = list(dict.fromkeys(["cpu", config.device])), norm_inputs(config)
    tables: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for device in devices:
        results, running = sums(device)
        for name, table in (("sums", results), ("running", running), ("steps", steps_between_numbers(device)),
                            ("norms", norm_errors(device)), ("toy", toy_dtypes(device)),
                            ("reductions", reduction_errors(device, inputs))):
            tables[name].append(table.assign(device=device))
    whole = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
    return whole | {"census": census(config)}
