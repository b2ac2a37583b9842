"""Run configurations: typed, validated, and identified by their fields.

:class:`RunConfig` has the fields of every run, and :class:`StepConfig` adds those of the model's training step.
Each study subclasses one of them as ``Config`` in its ``config.py`` and adds its specific fields. Everything that
a run depends on is a field, so the run id, which is built from the fields, identifies the run completely.
"""

import ast
import difflib
import functools
import hashlib
import importlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stepscope import StepscopeError


class Dimensions(NamedTuple):
    """A model's dimensions, which define its size."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


# The handout's five sizes, the 2026 edition's 10B, and three that run in milliseconds on a laptop's CPU.
SIZES = {
    "small": Dimensions(768, 3072, 12, 12),
    "medium": Dimensions(1024, 4096, 24, 16),
    "large": Dimensions(1280, 5120, 36, 20),
    "xl": Dimensions(1600, 6400, 48, 25),
    "2.7B": Dimensions(2560, 10240, 32, 32),
    "10B": Dimensions(4608, 12288, 50, 36),
    "nano": Dimensions(32, 128, 2, 2),
    "micro": Dimensions(64, 256, 2, 4),
    "tiny": Dimensions(128, 512, 4, 4),
}
SIZE_RANKS = {name: shape.d_model * shape.num_layers for name, shape in SIZES.items()}  # smallest first
CPU_SIZES = ("nano", "micro", "tiny")
# Size names in each year's handout, mapped to ours; records, sweeps and tables use our names.
EDITIONS = {
    2025: {name: name for name in ("small", "medium", "large", "xl", "2.7B")},
    2026: {"small": "small", "medium": "medium", "large": "large", "xl": "2.7B", "10B": "10B"},
}
PHASE_NAMES = ("forward", "loss", "backward", "optimizer")
# The phases of each mode, in order.
PHASES = {"forward": [*PHASE_NAMES[:1]], "forward_backward": [*PHASE_NAMES[:3]], "step": [*PHASE_NAMES]}
TOTAL = "total"  # label of the row that sums up all phases of a mode
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Display names for documents.
PRECISION_NAMES = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "fp16": "fp16"}
MODE_NAMES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


class ConfigError(StepscopeError, ValueError):
    """An invalid configuration; the text has the field, the value that was given, and the expected values."""


def resolve_size(name: Any, edition: Any = None) -> str:
    """Return the name in :data:`SIZES` of a size.

    Args:
        name: the size's name in the handout of that edition, or in :data:`SIZES` without an edition.
        edition: the handout's year, or None.

    Raises:
        ConfigError: the edition is unknown, or has no size with this name.
    """
    if edition not in [None, *EDITIONS]:
        years = " and ".join(map(str, EDITIONS))
        raise ConfigError(f"edition: got {truncated_repr(edition)}, but the handout's editions are {years}")
    names = EDITIONS[edition] | dict(zip(CPU_SIZES, CPU_SIZES)) if edition else dict(zip(SIZES, SIZES))
    if name not in [*names]:
        ours = next((theirs for theirs, size in names.items() if size == name), None)
        calls = f", and calls {name} {ours}" if ours else ""
        whose = f"the {edition} edition has" if edition else "known sizes are"
        raise ConfigError(f"size: got {truncated_repr(name)}, but {whose} {', '.join(names)}{calls}")
    return names[name]


def resolve_device(asked: Any) -> Any:
    """Replace ``auto`` by this machine's device; return other values for the field's type to validate."""
    if asked == "auto":
        import torch  # imported lazily: Dask's workers also import this module, and start faster without it

        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


# Bounds of numeric fields: larger than any machine can run, but small enough for the columns of tables.
Dimension = Annotated[int, Field(ge=1, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=10**6)]
# An unnamed size, as it is written.
SHAPE = re.compile(r"d([0-9]{1,7}) f([0-9]{1,7}) l([0-9]{1,7}) h([0-9]{1,7})")
MAX_SHOWN = 100  # maximum length of an invalid value in an error message


def truncated_repr(value: Any) -> str:
    """Format a value for an error message: on one line, and truncated if long."""
    short = reprlib.Repr()  # limits the output even for deeply nested or huge values
    short.maxstring = short.maxother = MAX_SHOWN
    try:
        text = short.repr(value)
    except ValueError:  # an int with thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class RunConfig(BaseModel):
    """The fields of every run. Build configurations with :func:`configure`, which gives readable errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    study: str
    d_model: int = Field(ge=2, le=2**20)
    context_length: Length
    batch_size: Dimension = 4
    precision: Literal[PRECISIONS] = "fp32"  # type: ignore[valid-type]
    device: Annotated[Literal["cuda", "cpu"], BeforeValidator(resolve_device)]
    warmup_steps: int = Field(5, ge=0, le=10**6)
    timed_steps: Steps = 10
    seed: int = Field(0, ge=0, lt=2**63)

    @classmethod
    def tunable_fields(cls) -> list[str]:
        """Return the fields that allow more than one value, which are the parameters of the study's notebook."""
        return [
            name
            for name, field in cls.model_fields.items()
            if get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) > 1
        ]

    @classmethod
    def notebook_for(cls, fields: Mapping[str, Any]) -> str:
        """Return the name of the notebook that a run with these fields executes.

        By default, a study has one notebook, with the study's name.
        """
        return fields["study"]

    @property
    def notebook(self) -> str:
        return self.notebook_for(dict(self))

    def digest(self) -> str:
        """Return a digest of the fields that differ from their defaults.

        Defaults are excluded so that adding a field later doesn't rename existing runs. This is safe because a
        record holds every field, and doesn't match a configuration with other values.
        """
        return digest_of(self.fields_of_id())

    def fields_of_id(self) -> dict[str, Any]:
        return self.model_dump(exclude_defaults=True, exclude={"size"})

    @property
    def shape(self) -> str:
        """The model's size name or its dimensions."""
        return f"d{self.d_model}"

    def words_of_id(self) -> list[str]:
        """Return the words of the run id: shape, context length, and mode and precision if they can vary."""
        free = [name for name in ("mode", "precision") if name in self.tunable_fields()]
        return [
            self.shape.replace(" ", "-"),
            f"ctx{self.context_length}",
            *(getattr(self, name) for name in free),
        ]

    @property
    def run_id(self) -> str:
        """The readable id of the run, which is the same however the configuration was written."""
        return "-".join([*self.words_of_id(), self.digest()])

    @property
    def label(self) -> str:
        """A description for readers: the run id's words, and all other fields that differ from their defaults."""
        said = {"study", "device", "size", "mode", "precision", "context_length", *Dimensions._fields}
        others = self.model_dump(exclude_defaults=True, exclude=said)
        return ", ".join(
            [
                " ".join([self.study, *self.words_of_id()]),
                *(f"{name} {_value(value)}" for name, value in others.items()),
            ]
        )


def digest_of(fields: Mapping[str, Any]) -> str:
    """Return a digest of a configuration's fields, as eight hexadecimal digits."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


def _value(value: Any) -> str:
    return "/".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


class StepConfig(RunConfig):
    """The configuration of a run of the model's training step, or of part of it."""

    study: str = "step"
    size: str = "custom"
    d_ff: Dimension
    num_layers: Layers
    num_heads: Dimension
    vocab_size: int = Field(10_000, ge=2, le=2**24)
    mode: Literal[tuple(PHASES)] = "step"  # type: ignore[valid-type]
    attention: Literal["naive", "sdpa"] = "naive"
    compile: Literal["none", "blocks", "model"] = "none"
    optimizer: Literal["foreach", "fused"] = "foreach"

    @model_validator(mode="before")
    @classmethod
    def fill_dimensions(cls, values: Any) -> Any:
        """Fill in the dimensions of a named size, or the name of a size with known dimensions.

        ``size`` can also be an unnamed shape as tables write it, such as "d512 f2048 l8 h8". The optional
        ``edition``, which isn't a field, is the year of the handout that the size's name comes from.

        Raises:
            ValueError: ``edition`` is given without a size, or a dimension contradicts the size.
            ConfigError: the size or the edition is unknown.
        """
        if not isinstance(values, dict):
            return values
        values = dict(values)
        size, edition = values.get("size", "custom"), values.pop("edition", None)
        if size == "custom" and edition is not None:
            raise ValueError(f"edition: got {truncated_repr(edition)}, but no size whose name it would tell")
        if unnamed := SHAPE.fullmatch(str(size)):
            named = Dimensions(*map(int, unnamed.groups()))._asdict()
        else:
            named = SIZES[resolve_size(size, edition)]._asdict() if size != "custom" else {}
        for field, number in named.items():
            if values.setdefault(field, number) != number:
                raise ValueError(
                    f"{field}: got {truncated_repr(values[field])}, but size {size!r} has {number};"
                    " leave one of them out"
                )
        dimensions = tuple(values.get(field) for field in Dimensions._fields)
        values["size"] = next((name for name, known in SIZES.items() if known == dimensions), "custom")
        return values

    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: got {self.num_heads}, but it must divide d_model = {self.d_model}")
        if (self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"num_heads: got {self.num_heads}, but RoPE turns pairs, so d_model / num_heads"
                f" = {self.d_model // self.num_heads} must be even"
            )
        return self

    def step(self, **changes: Any) -> "StepConfig":
        """Return this run as a StepConfig, with changes and without the fields that its study adds."""
        names = StepConfig.model_fields.keys() - {"study", "size"}
        fields = {name: getattr(self, name) for name in names}
        return StepConfig(**fields | changes)

    @property
    def shape(self) -> str:
        if self.size != "custom":
            return self.size
        return f"d{self.d_model} f{self.d_ff} l{self.num_layers} h{self.num_heads}"


@functools.cache
def studies() -> dict[str, type[RunConfig]]:
    """Return the configuration class of each study by name, in the report's order.

    The classes are imported by name from the list in :mod:`stepscope.studies`, because that package is a
    layer above this module.
    """
    listed = importlib.import_module("stepscope.studies").STUDIES
    return {name: importlib.import_module(f"stepscope.studies.{name}.config").Config for name in listed}


def configure(study: str, **values: Any) -> Any:
    """Validate one run's fields and return the study's ``Config``.

    Fields that are None count as omitted, and ``device`` defaults to ``auto``.

    Raises:
        ConfigError: for each invalid field, the text has its name, its value and the expected values.
    """
    known = studies()
    if not isinstance(study, str) or study not in known:
        raise ConfigError(f"study: got {truncated_repr(study)}, but known studies are {', '.join(known)}")
    values = {field: value for field, value in values.items() if value is not None}
    try:
        return known[study](**{"device": "auto"} | values)
    except ValidationError as error:
        raise ConfigError(format_errors(error, known[study])) from None


def format_errors(error: ValidationError, model: type[BaseModel]) -> str:
    """Format a validation error: one sentence per invalid field, such as ``tables.samples.rows``."""
    return "; ".join(_sentence(item, model) for item in error.errors())


def _sentence(item: Any, model: type[BaseModel]) -> str:
    plain = (
        str(part) if re.fullmatch(r"[\w./-]{1,50}", str(part)) else truncated_repr(part)
        for part in item["loc"]
    )
    field = ".".join(plain) or "all"
    if item["type"] == "value_error":  # our validators raise complete error messages
        return str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        return f"{field}: no such field; {_known(str(item['loc'][-1]), model.model_fields)}"
    if item["type"] == "missing":
        return f"{field}: not given, and it has no default"
    return f"{field}: got {truncated_repr(item['input'])}, but {item['msg'][0].lower()}{item['msg'][1:]}"


def _known(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known name for an unknown one, and list all known names."""
    close = difflib.get_close_matches(name[:MAX_SHOWN], known := list(known), 1)
    return f"{f'{close[0]} may be meant; ' if close else ''}known are {', '.join(known)}"


def from_notebook(study: str, names: dict[str, Any]) -> Any:
    """Build a configuration from the variables of a notebook's parameters cell.

    Args:
        study: the study's name.
        names: the notebook's ``globals()``; names that aren't fields of the study are ignored.

    Raises:
        ConfigError: a value is invalid, or papermill was given an unknown parameter.
    """
    free = studies()[study].tunable_fields()
    require_parameters(names, free)
    return configure(study, **{field: names[field] for field in free if field in names})


def require_parameters(names: Mapping[str, Any], free: Iterable[str] = ()) -> None:
    """Reject unknown papermill parameters, for which papermill itself only prints a warning.

    Args:
        names: the notebook's ``globals()``, whose history ``In`` includes the cell that papermill injects.
        free: names that are allowed in addition to those of the parameters cell.

    Raises:
        ConfigError: a parameter is unknown; the text lists the known ones.
    """
    history = names.get("In", [])
    for at, cell in enumerate(history):
        if not at or not cell.startswith("# Parameters\n"):
            continue
        own = [name for name in assigned_constants(history[at - 1]) if name != "run_folder"]
        known = dict.fromkeys([*own, *free])
        for name in assigned_constants(cell):
            if name not in known and name != "run_folder":
                raise ConfigError(f"{name:.100}: no such parameter; {_known(name, known)}")


def assigned_constants(cell: str) -> list[str]:
    """Return the names that a cell assigns constants to; empty if it does anything else except importing."""
    names: list[str] = []
    try:
        for line in ast.parse(cell).body:
            if not isinstance(line, ast.Import | ast.ImportFrom):
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]  # type: ignore
                ast.literal_eval(line.value)  # type: ignore
                names += [target.id for target in targets]  # type: ignore
    except (SyntaxError, ValueError, AttributeError):
        return []
    return names


def require_device(config: RunConfig) -> None:
    """Check, before anything starts, that this machine supports the configuration's device and precision.

    Raises:
        ConfigError: this machine has no such device, or the device doesn't support the precision.
    """
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"device: got 'cuda', but torch {torch.__version__} sees no CUDA GPU here;"
                " 'cpu' and 'auto' are possible"
            )
        capability = torch.cuda.get_device_capability()
        if config.precision in ("tf32", "bf16") and capability < (8, 0):
            has = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
            raise ConfigError(
                f"precision: got {config.precision!r}, but {has} and it needs 8.0; fp32 and fp16 are possible"
            )
    elif config.precision == "tf32":
        raise ConfigError("precision: got 'tf32', but a CPU has no TF32; fp32, bf16 and fp16 are possible")
