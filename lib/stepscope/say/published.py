"""Published reports on the same questions: the figures they print, as data, and what in those figures is in
doubt.
"""
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from stepscope import StepscopeError
from stepscope.config import PRECISIONS, SIZES
from stepscope.yaml_files import YamlFileError, load_yaml

SHIPPED = Path(__file__).with_name("published.yaml")
# Kinds of doubt, in the order in which they are told.
KINDS = ("spread", "rate", "clocks", "flat", "ratios", "monotone", "estimates")  # of doubts, in the order they are told



def _one_of(known: Collection[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return value
    return AfterValidator(check)


Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


class PublishedError(StepscopeError, ValueError):
    """A file of figures that cannot be used; the text names the file, the entry, and what is wrong with
    it.
    """


INTEGERS = ["assumed_batch_size", "context_length", "batch_size", "warmup_steps", "timed_steps"]
FLOATS = ["mean_ms", "std_ms", "tokens_per_s", "peak_allocated_mib"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Doubt(Strict):
    """What is in doubt about a figure, in words; ``beside``, as printed, are the others that the doubt rests
    on.
    """

    kind: Annotated[str, _one_of(KINDS)]
    beside: list[str] = []
    says: str


class Figure(Strict):
    """One printed time and what is printed beside it."""

    size: Annotated[str, _one_of(SIZES)] | None = None
    context_length: Count | None = None
    batch_size: Count | None = None
    phase: Literal["forward", "backward", "forward_backward", "step"] | None = None
    precision: Annotated[str, _one_of(PRECISIONS)] | None = None
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
    doubts: list[Doubt] = []

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


class Published(Strict):
    sources: list[Source]


COLUMNS = ["source", "gpu", "kernels", "assumed_batch_size", *Figure.model_fields]
DTYPES = {**dict.fromkeys(COLUMNS, "string"), **dict.fromkeys(INTEGERS, "Int64"),
          **dict.fromkeys(FLOATS, "float64"),
          "estimated": "bool", "doubts": "object"}


def printed(text: str) -> list[float]:
    """The numbers in a text."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def _checked(model: type[Strict], content: Any, place: str) -> Any:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.80}"
                    for e in error.errors()]
        raise PublishedError(f"{place}: {'; '.join(problems)}") from None


def load_published(path: Path = SHIPPED) -> pd.DataFrame:
    """One row a figure, NA where nothing is stated: source (its id), gpu, kernels, assumed_batch_size, then
    Figure's fields.

    Raises:
        PublishedError: no such file, not YAML, unknown keys, values out of range, numbers that as_printed
            does not show.
    """
    try:
        sources = _checked(Published, load_yaml(path), str(path)).sources
    except YamlFileError as error:
        raise PublishedError(str(error)) from None
    rows = [{"source": source.id, **source.model_dump(exclude={"id", "entries"}),
             **_checked(Figure, entry, f"{path}, source {source.id}, entry {number}").model_dump()}
            for source in sources for number, entry in enumerate(source.entries, start=1)]
    return pd.DataFrame(rows, columns=COLUMNS).astype(DTYPES)


def doubts(figures: pd.DataFrame) -> pd.DataFrame:
    """What is in doubt about the figures, in the order of :data:`KINDS`.

    Args:
        figures: rows of load_published's table.

    Returns columns source, gpu, figure (as printed, with those beside it), doubt (a sentence), kind.
    """
    found = [(row["source"], row["gpu"], " vs ".join([row["as_printed"], *doubt["beside"]]),
              f"{_setting(row)}: {doubt['says']}", doubt["kind"])
             for row in figures.to_dict("records") for doubt in row["doubts"]]
    found.sort(key=lambda row: KINDS.index(row[-1]))
    return pd.DataFrame(found, columns=["source", "gpu", "figure", "doubt", "kind"])


def _setting(row: dict[str, Any]) -> str:
    """What the report states about a figure, in words."""
    stated = {name: value for name, value in row.items() if name != "doubts" and pd.notna(value)}
    parts = [stated.get("size")]
    if "context_length" in stated:
        parts.append(f"context {stated['context_length']}")
    parts += [stated.get(name) for name in ("phase", "precision", "clock")]
    if "warmup_steps" in stated:
        parts.append(f"{stated['warmup_steps']} warm-up step{'s' * (stated['warmup_steps'] != 1)}")
    return ", ".join(part for part in parts if part)


def source_name(row: Mapping | pd.Series) -> str:
    """A report in words: its letter and its GPU."""
    return f"{row['source']}: {row['gpu'] if row['gpu'] != 'not stated' else 'GPU not stated'}"
