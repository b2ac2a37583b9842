"""Published reports on the same questions: the figures they print, as data, and how far they lie from the
figures here. Nothing of their text is kept.
"""
import io
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from stepscope import StepscopeError
from stepscope.config import SIZES
from stepscope.say.formats import NEARLY, number, to
from stepscope.yaml_files import YamlFileError, load_yaml

SHIPPED = Path(__file__).with_name("published.yaml")
PLACES = ("below", "within", "above")
PASSES = ["forward", "backward", "forward_backward"]


class PublishedError(StepscopeError, ValueError):
    """A file of figures that cannot be used; the text names the file, the entry, and what is wrong with it.
    """


def _known(value: str) -> str:
    if value not in SIZES:
        raise ValueError(f"expected one of {', '.join(SIZES)}")
    return value


def _table(value: Any) -> Any:
    """The rows of a CSV text, None where a cell is empty."""
    if not isinstance(value, str):
        raise ValueError("expected CSV text")
    rows = pd.read_csv(io.StringIO(value))
    return rows.astype(object).where(rows.notna(), None).to_dict("records")


Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1, max_length=100)]
Size = Annotated[str, AfterValidator(_known)]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Printed = Annotated[str, Field(pattern=r"^~?\d+(\.\d+)?( ± \d+(\.\d+)?)?$")]  # a time, and perhaps its spread


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Times(Strict):
    """Times of passes in ms, as printed."""

    size: Size
    context_length: Count | None = None
    precision: Precision | None = None
    clock: Literal["wall", "range"] | None = None
    forward: Printed | None = None
    backward: Printed | None = None
    forward_backward: Printed | None = None


class Of(Strict):
    """Operations of a mode: those of a phase, of regions (and those within them), of a family, and those with
    ``kernel`` in their names; None stands for all."""

    mode: Literal["forward", "forward_backward", "step"] = "forward"
    phase: Literal["forward", "backward", "optimizer"] | None = "forward"
    precision: Precision = "fp32"
    regions: list[Text] | None = None
    family: Text | None = None
    kernel: Text | None = None

    @property
    def whole(self) -> "Of":
        """All operations of this mode and phase; of a full step all of its phases."""
        return Of(mode=self.mode, phase=None if self.mode == "step" else self.phase, precision=self.precision)


class Claim(Strict):
    """What a report says of its profiles. ``size`` and ``context_length`` are None where it does not say."""

    question: Literal["a", "b", "c", "d", "e"]
    as_printed: Text
    measure: Text
    of: Of = Of()
    to: Of | None = None
    printed: float | Annotated[list[float], Field(min_length=2, max_length=2)]
    size: Size | None = None
    context_length: Count | None = None
    reason: Text | None = None
    values: dict[Text, float] = {}

    @property
    def theirs(self) -> float:
        """The number printed, or the ratio of the two."""
        return self.printed[0] / self.printed[1] if isinstance(self.printed, list) else self.printed


class Cell(Strict):
    """Attention of one head dimension and sequence: ms of all passes together; ``mib`` before backward."""

    d_model: Count
    sequence: Count
    forward: Positive
    backward: Positive | None
    mib: Positive
    compiled_forward: Positive
    tf32_forward: Positive
    compiled_backward: Positive
    tf32_backward: Positive


class Report(Strict):
    """``what`` it is, in words; ``gpu`` is None where it names none."""

    title: Text
    what: Text
    gpu: Text | None = None
    times: list[Times] = []
    claims: list[Claim] = []
    attention_passes: Count | None = None
    attention: Annotated[list[Cell], BeforeValidator(_table)] = []

    @property
    def name(self) -> str:
        return f"{self.title} ({self.gpu or 'names no GPU'})"


class Published(Strict):
    reports: list[Report]


def load_published(path: Path = SHIPPED) -> list[Report]:
    """The reports of a file.

    Raises:
        PublishedError: no such file, not YAML, unknown keys, values out of range.
    """
    try:
        return Published.model_validate(load_yaml(path)).reports
    except YamlFileError as error:
        raise PublishedError(str(error)) from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.80}"
                    for e in error.errors()]
        raise PublishedError(f"{path}: {'; '.join(problems)}") from None


def published_times(reports: list[Report]) -> pd.DataFrame:
    """A row a printed time: report (its name), size, context_length (NA: not stated), precision, clock, phase
    (one of PASSES), as_printed, theirs (ms)."""
    rows = [{"report": report.name, **times.model_dump(exclude=set(PASSES)), "phase": phase,
             "as_printed": text, "theirs": float(text.lstrip("~").split(" ")[0])}
            for report in reports for times in report.times for phase in PASSES
            if (text := getattr(times, phase)) is not None]
    columns = ["report", "size", "context_length", "precision", "clock", "phase", "as_printed", "theirs"]
    return pd.DataFrame(rows, columns=columns).astype({"context_length": "Int64"})


def beside(theirs: pd.DataFrame, here: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Published figures that something here can be set beside.

    Args:
        theirs: columns ``keys``, context_length (NA: any) and theirs.
        here: columns ``keys``, context_length and here.

    Returns theirs with ``low`` and ``high``, the least and the most here, ``place`` and ``ratio`` (placed).
    """
    both = theirs.rename_axis("row").reset_index().merge(
        here[[*keys, "context_length", "here"]], on=keys, suffixes=("", "_here"))
    both = both[both["context_length"].isna() | (both["context_length"] == both["context_length_here"])]
    table = theirs.join(both.groupby("row")["here"].agg(low="min", high="max"), how="inner")
    return placed(table)


def placed(table: pd.DataFrame) -> pd.DataFrame:
    """A table of theirs, low and high, with ``ratio``, theirs over the nearest here (1 between low and high),
    and ``place``, one of PLACES: off by at most 5% is within."""
    nearest = table["theirs"].clip(table["low"], table["high"])
    off = (table["theirs"] - nearest) / nearest.abs()
    place = off.map(lambda share: "below" if share < -NEARLY else "above" if share > NEARLY else "within")
    return table.assign(place=place.astype("string"), ratio=table["theirs"] / nearest)


def counts(table: pd.DataFrame) -> dict[str, int]:
    """How many figures are below, within and above those here."""
    return {place: int((table["place"] == place).sum()) for place in PLACES}


def by_report(table: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """A row a report (and key): its ``figures``, the ratios' ``median``, ``least`` and ``most``, and how many
    are in each of PLACES."""
    grouped = table.groupby(["report", *keys], sort=False, dropna=False)
    found = grouped["ratio"].agg(figures="size", median="median", least="min", most="max")
    return found.join(pd.DataFrame([counts(rows) for _, rows in grouped], index=found.index)).reset_index()


def printed_by_report(table: pd.DataFrame, what: str) -> pd.DataFrame:
    """by_report's table as text; ``what`` is what the ratios are of."""
    numbers = {"figures", "median", "least", "most", *PLACES}
    names = table[[column for column in table if column not in numbers]].fillna("not stated").astype(str)
    ends = [to(number(row.least), number(row.most)) for row in table.itertuples()]
    medians = table["median"].map(number)
    ratios = [median if span == median else f"{median} ({span})" for median, span in zip(medians, ends)]
    return names.assign(**{"figures": table["figures"], f"{what}, theirs / here (least to most)": ratios},
                        **{place: table[place] for place in PLACES})
