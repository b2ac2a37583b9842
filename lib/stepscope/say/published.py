"""Published reports on the same questions: the figures they print, as data, and what in those figures is in doubt."""
import math
import re
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stepscope.config import PHASES, PRECISIONS, SIZES, configure
from stepscope.step.flops import phase_flops
from stepscope.step.summary import NOISY

SHIPPED = Path(__file__).with_name("published.yaml")
NOT_STATED = "not stated"
FLAT = 0.05   # growth in time that counts as none
APART = 0.05  # what separately timed phases may miss their sum by, as a share of it

Positive, Count = Annotated[float, Field(gt=0)], Annotated[int, Field(gt=0)]
Row = dict[str, Any]  # a figure by column, None where nothing is stated; ``batch`` is the batch stated or else assumed
Doubts = Iterator[tuple[list[Row], str]]  # the figures in doubt, and the sentence


class PublishedError(ValueError):
    """A file of figures that cannot be used; the text names the file, the entry, and what is wrong with it."""


INTEGERS = ["assumed_batch_size", "context_length", "batch_size", "warmup_steps", "timed_steps"]
FLOATS = ["mean_ms", "std_ms", "tokens_per_s", "peak_allocated_mib"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Figure(Strict):
    """One printed time and what is printed beside it."""

    size: Literal[tuple(SIZES)] | None = None
    context_length: Count | None = None
    batch_size: Count | None = None
    phase: Literal["forward", "backward", "forward_backward", "step"] | None = None
    precision: Literal[PRECISIONS] | None = None
    clock: Literal["wall", "nvtx", "nsys", "kernels"] | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    timed_steps: Count | None = None
    mean_ms: Positive
    std_ms: Annotated[float, Field(ge=0)] | None = None
    tokens_per_s: Positive | None = None
    peak_allocated_mib: Positive | None = None
    estimated: bool = False
    as_printed: str
    note: str | None = None

    @model_validator(mode="after")
    def numbers_are_as_printed(self) -> "Figure":
        for field in FLOATS:
            if getattr(self, field) not in (None, *printed(self.as_printed)):
                raise ValueError(f"{field} = {getattr(self, field):g} does not stand in as_printed")
        return self


class Source(Strict):
    """One report. ``kernels`` is the architecture that its kernels' names tell."""

    id: str
    gpu: str
    kernels: str | None = None
    assumed_batch_size: Count | None = None
    entries: list[dict]


class Peak(Strict):
    """What a GPU can do at most; ``named`` is what the ``gpu`` of a report that used one says."""

    gpu: str
    named: str
    precision: Literal[PRECISIONS]
    tflops: Positive
    source: str


class Published(Strict):
    peaks: list[Peak]
    sources: list[Source]


COLUMNS = ["source", "gpu", "kernels", "assumed_batch_size", *Figure.model_fields]
DTYPES = {**dict.fromkeys(COLUMNS, "string"), **dict.fromkeys(INTEGERS, "Int64"), **dict.fromkeys(FLOATS, "float64"),
          "estimated": "bool"}


def printed(text: str) -> dict[float, float]:
    """The numbers in a text, each with half a unit of its last decimal: what rounding may have hidden."""
    numbers = (number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text))
    return {float(number): 0.5 * 10.0 ** -len(number.partition(".")[2]) for number in numbers}


def _checked(model: type[Strict], content: Any, place: str) -> Any:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.80}" for e in error.errors()]
        raise PublishedError(f"{place}: {'; '.join(problems)}") from None


def read(path: Path = SHIPPED) -> Published:
    """The file, its entries not looked at yet. Raises PublishedError, as load_published does."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PublishedError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    return _checked(Published, content, str(path))


def load_published(path: Path = SHIPPED) -> pd.DataFrame:
    """One row a figure, NA where nothing is stated: source (its id), gpu, kernels, assumed_batch_size, then Figure's fields.

    Raises:
        PublishedError: no such file, not YAML, unknown keys, values out of range, numbers that as_printed does not show.
    """
    rows = [{"source": source.id, **source.model_dump(exclude={"id", "entries"}),
             **_checked(Figure, entry, f"{path}, source {source.id}, entry {number}").model_dump()}
            for source in read(path).sources for number, entry in enumerate(source.entries, start=1)]
    return pd.DataFrame(rows, columns=COLUMNS).astype(DTYPES)


def doubts(figures: pd.DataFrame) -> pd.DataFrame:
    """What the figures say against themselves, each other and the data sheets: one row a finding of :data:`RULES`.

    Args:
        figures: as load_published gives them.

    Returns columns source, gpu, figure (as printed), doubt (a sentence), kind (the rule's name).
    """
    rows = figures.astype(object).where(figures.notna(), None).to_dict("records")
    rows = [row | {"batch": row["batch_size"] or row["assumed_batch_size"]} for row in rows]
    found = [(about[0]["source"], about[0]["gpu"], " vs ".join(row["as_printed"] for row in about),
              f"{_setting(about[0])}: {sentence}", rule.__name__)
             for rule in RULES for report in _by(rows, "source")
             for about, sentence in rule([row for row in report if rule is estimates or not row["estimated"]])]
    return pd.DataFrame(found, columns=["source", "gpu", "figure", "doubt", "kind"])


def _by(rows: list[Row], *columns: str, needs: tuple[str, ...] = ()) -> list[list[Row]]:
    """Rows that agree in the columns, None agreeing with None; rows without a value for each of ``needs`` are left out."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if None not in (row[column] for column in needs):
            groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return list(groups.values())


def _setting(row: Row) -> str:
    """What the report states about a figure, in words."""
    context, warmups = row["context_length"], row["warmup_steps"]
    parts = [row["size"], context and f"context {context}", row["phase"], row["precision"], row["clock"],
             None if warmups is None else f"{warmups} warm-up step{'s' * (warmups != 1)}"]
    return ", ".join(filter(None, parts))


def work_flops(row: Row) -> int | None:
    """FLOPs of what was timed, by flops.py's formula; None where size, context, batch or phase is missing."""
    fields = {"size": row["size"], "context_length": row["context_length"], "batch_size": row["batch"]}
    if None in (row["phase"], *fields.values()):
        return None
    by_phase = phase_flops(configure("benchmark", **fields, device="cpu"))
    return sum(by_phase[phase] for phase in PHASES.get(row["phase"], ["backward"]))


def one_outlier_ms(mean_ms: float, std_ms: float, n: int) -> tuple[float, float]:
    """One sample and what each other is, if those are equal and all n have this mean and sample (n - 1) deviation."""
    return mean_ms + std_ms * (n - 1) / math.sqrt(n), mean_ms - std_ms / math.sqrt(n)


def spread(rows: list[Row]) -> Doubts:
    """A mean that its standard deviation leaves uncertain, and whether one slow sample would explain it."""
    for row in rows:
        mean, std, n = row["mean_ms"], row["std_ms"], row["timed_steps"]
        if std and std > NOISY * mean:
            slow, rest = one_outlier_ms(mean, std, n) if n else (0, 0)
            cause = f", what one sample of {slow:.3g} ms and {n - 1} of {rest:.3g} ms would give" if rest > 0 else ""
            yield [row], f"the standard deviation is {std / mean:.0%} of the mean{cause}"


def rate(rows: list[Row]) -> Doubts:
    """Faster than the stated GPU's data sheet allows; where none is stated, the GPUs that the fastest figure rules out."""
    peaks = read().peaks
    for group in _by(rows, "gpu", "precision"):
        gpu, precision, stated = group[0]["gpu"], group[0]["precision"], group[0]["gpu"] != NOT_STATED
        could = [peak for peak in peaks if peak.precision == precision and (not stated or peak.named in gpu)]
        rated = [(flops / row["mean_ms"] / 1e9, row) for row in group if (flops := work_flops(row))]
        rated.sort(key=itemgetter(0))
        for tflops, row in rated if stated else rated[-1:]:
            above = [peak for peak in could if tflops > peak.tflops]
            if above and (not stated or above == could):  # a report that names no variant may have used the faster
                assumed = "" if row["batch_size"] else f" at an assumed batch of {row['batch']}"
                named = " or ".join(f"{peak.gpu} ({peak.tflops:g})" for peak in above)
                yield [row], (f"{tflops:.3g} TFLOP/s by formula{assumed}, more than {named} can do in {precision} by data"
                              f" sheet{': it cannot be' * stated}")


def arithmetic(rows: list[Row]) -> Doubts:
    """Tokens per second times the time is not the number of tokens, whatever rounding may have hidden."""
    for row in rows:
        speed, time, batch, context = (row[name] for name in ("tokens_per_s", "mean_ms", "batch", "context_length"))
        if speed and batch and context:
            half = printed(row["as_printed"])
            low, high = ((speed + sign * half[speed]) * (time + sign * half[time]) / 1e3 for sign in (-1, 1))
            if not low <= batch * context <= high:
                yield [row], (f"tokens/s times the time is {low:,.1f} to {high:,.1f} tokens,"
                              f" batch times context is {batch * context:,}")


def clocks(rows: list[Row]) -> Doubts:
    """Two clocks for one pass that differ by more than both spreads."""
    for group in _by(rows, "size", "context_length", "batch", "phase", "precision", needs=("phase", "clock")):
        for short, long in (sorted(pair, key=itemgetter("mean_ms")) for pair in combinations(group, 2)):
            apart, spreads = long["mean_ms"] - short["mean_ms"], [row["std_ms"] for row in (short, long) if row["std_ms"]]
            warmups = {short["warmup_steps"], long["warmup_steps"]} - {None}
            if short["clock"] != long["clock"] and len(warmups) < 2 and apart > sum(spreads):
                runs = "; nothing inside a synchronised pass outlasts it, so these are two runs" * (short["clock"] == "wall")
                yield [long, short], (f"{long['mean_ms'] / short['mean_ms']:.2f} times the {short['mean_ms']:.4g} ms of"
                                      f" {short['clock']}, {apart:.3g} ms more (spreads printed:"
                                      f" {' and '.join(f'{std:g}' for std in spreads) or 'none'}){runs}")


def flat(rows: list[Row]) -> Doubts:
    """Time that hardly grows where the tokens double or quadruple: the host's launches set it, not the GPU's work."""
    known = ("size", "phase", "context_length")
    for group in _by(rows, "size", "batch", "phase", "precision", "clock", "warmup_steps", needs=known):
        found = {(i["context_length"], j["context_length"]): (i, j) for i, j in product(group, group)
                 if j["context_length"] >= 2 * i["context_length"] and j["mean_ms"] < (1 + FLAT) * i["mean_ms"]}
        for (first, last), (i, j) in found.items():
            if sum(a <= first and last <= b for a, b in found) == 1:  # itself: it is not part of a longer stretch
                growth = j["mean_ms"] / i["mean_ms"] - 1
                yield [i, j], (f"{growth:+.1%} in time up to context {last}, for {last / first:g} times the tokens, as when"
                               " the host's launches set the time and not the GPU's work")


def ratios(rows: list[Row]) -> Doubts:
    """Forward and backward do not add up to what is printed for both."""
    phases = ("forward_backward", "forward", "backward")
    for group in _by(rows, "size", "context_length", "batch", "precision", needs=("size",)):
        for parts in product(*([row for row in group if row["phase"] == phase] for phase in phases)):
            both, forward, backward = (row["mean_ms"] for row in parts)
            if abs(both - forward - backward) > APART * both + sum(row["std_ms"] or 0 for row in parts):
                named = ", ".join(row["clock"] or NOT_STATED for row in parts)
                yield list(parts), (f"less forward it leaves {both - forward:.4g} ms, and backward is printed as"
                                    f" {backward:.4g} ms (clocks: {named})")


def monotone(rows: list[Row]) -> Doubts:
    """A larger model that is faster than a smaller one."""
    same = ("context_length", "batch", "phase", "precision", "clock", "warmup_steps")
    for group in _by(rows, *same, needs=("size", "phase")):
        sized = [(work_flops(row | {"context_length": 1, "batch": 1}), row) for row in group]
        for (less, small), (more, large) in pairwise(sorted(sized, key=itemgetter(0))):
            if large["mean_ms"] < small["mean_ms"] and less < more:
                layers = " against ".join(str(SIZES[row["size"]].num_layers) for row in (large, small))
                yield [large, small], (f"{large['mean_ms'] / small['mean_ms']:.2f} times the time of {small['size']} for"
                                       f" {more / less:.2f} times the matrix FLOPs a token (layers: {layers})")


def estimates(rows: list[Row]) -> Doubts:
    """Figures that their report did not measure."""
    for row in rows:
        if row["estimated"]:
            yield [row], f"{row['mean_ms']:.4g} ms is the report's estimate, not a measurement"


RULES = (spread, rate, arithmetic, clocks, flat, ratios, monotone, estimates)


def source_name(row: pd.Series) -> str:
    return f"{row['source']}: {row['gpu'] if row['gpu'] != 'not stated' else 'GPU not stated'}"
