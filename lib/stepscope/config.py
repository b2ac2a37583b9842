"""Define run configurations, which are typed, validated, and identified by their fields.

:class:`RunConfig` has the fields of every run, and :class:`StepConfig` adds the fields of the model's training
step. Each study subclasses one of these classes as ``Config`` in the study's ``config.py``, and adds more fields.
Every input of a run is a field, and the run id is built from the fields, so the id identifies the run completely.
"""

import ast
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stepscope import StepscopeError


class Dimensions(NamedTuple):
    """The four dimensions that define a model's size."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


# The handout's five sizes, 10B from its 2026 edition, and three sizes that run in milliseconds on a laptop's CPU.
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
# Maps the size names in each year's handout to the names in SIZES. Records, sweeps and tables use the latter.
EDITIONS = {
    2025: {name: name for name in ("small", "medium", "large", "xl", "2.7B")},
    2026: {"small": "small", "medium": "medium", "large": "large", "xl": "2.7B", "10B": "10B"},
}
PHASE_NAMES = ("forward", "loss", "backward", "optimizer")
# The phases of each mode, in the order in which they run.
PHASES = {
    "forward": ["forward"],
    "forward_backward": ["forward", "loss", "backward"],
    "step": [*PHASE_NAMES],
}
TOTAL = "total"  # label of the row for all phases of a mode together
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Display names for documents.
PRECISION_NAMES = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "fp16": "fp16"}
MODE_NAMES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


class ConfigError(StepscopeError, ValueError):
    """Raised for an invalid configuration. The message names the field, its value and the expected values."""


def resolve_size(name: Any, edition: Any = None) -> str:
    """Convert the name of a model size to the corresponding name in :data:`SIZES`.

    Args:
        name: the size's name in the handout of ``edition``, or in :data:`SIZES` if ``edition`` is None.
        edition: the year of the handout, or None.

    Raises:
        ConfigError: If the edition is unknown, or has no size with this name.
    """
    if edition not in [None, *EDITIONS]:
        years = " and ".join(map(str, EDITIONS))
        raise ConfigError(f"edition: got {truncated_repr(edition)}, but the handout's editions are {years}")
    size_of = {size: size for size in SIZES}
    if edition:
        size_of = EDITIONS[edition] | {size: size for size in CPU_SIZES}
    if name in [*size_of]:
        return size_of[name]
    expected = f"the {edition} edition has" if edition else "known sizes are"
    message = f"size: got {truncated_repr(name)}, but {expected} {', '.join(size_of)}"
    for name_in_edition, size in size_of.items():
        if size == name:
            message += f"; it calls {name} {name_in_edition}"
    raise ConfigError(message)


def resolve_device(device: Any) -> Any:
    """Replace ``auto`` with this machine's device; return any other value unchanged."""
    if device == "auto":
        import torch  # imported lazily: Dask's workers also import this module, and start faster without torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


# Upper bounds of numeric fields: larger than any machine can run, but small enough for the columns of tables.
Dimension = Annotated[int, Field(ge=1, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=10**6)]
# Matches an unnamed size in the format that tables use.
SHAPE = re.compile(r"d([0-9]{1,7}) f([0-9]{1,7}) l([0-9]{1,7}) h([0-9]{1,7})")
MAX_SHOWN = 100  # maximum length of an invalid value in an error message


def truncated_repr(value: Any) -> str:
    """Return a value's repr for an error message, on one line and truncated if it is long."""
    short = reprlib.Repr()  # limits the output even for deeply nested or huge values
    short.maxstring = short.maxother = MAX_SHOWN
    try:
        text = short.repr(value)
    except ValueError:  # the value is or contains an int with thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class RunConfig(BaseModel):
    """The fields that every run has.

    Build configurations with :func:`configure`, which reports invalid fields in readable error messages.
    """

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
        """Return the names of the fields that allow more than one value.

        These fields are the parameters of the study's notebook.
        """
        names = []
        for name, field in cls.model_fields.items():
            is_literal = get_origin(field.annotation) is Literal
            if not is_literal or len(get_args(field.annotation)) > 1:
                names.append(name)
        return names

    @classmethod
    def notebook_for(cls, fields: Mapping[str, Any]) -> str:
        """Return the name of the notebook that a run with these fields executes.

        By default, a study has one notebook, with the study's name.
        """
        return fields["study"]

    @property
    def notebook(self) -> str:
        return self.notebook_for(dict(self))

    @property
    def gpus_needed(self) -> int:
        """The number of GPUs that the run uses, or, for a run on a CPU, the number of worker slots."""
        return 1

    def digest(self) -> str:
        """Return a digest of the fields that differ from their defaults.

        Defaults are excluded, so that the ids of existing runs don't change when a field is added. If a default
        changes, two configurations can share a digest, but a record contains every field, so it matches only one
        of them.
        """
        return digest_of(self.fields_of_id())

    def fields_of_id(self) -> dict[str, Any]:
        return self.model_dump(exclude_defaults=True, exclude={"size"})

    @property
    def shape(self) -> str:
        """The name of the model's size, or the model's dimensions if the size has no name."""
        return f"d{self.d_model}"

    def words_of_id(self) -> list[str]:
        """Return the words with which the run id begins.

        These are the shape, the context length, and the mode and precision if the study varies them.
        """
        words = [self.shape.replace(" ", "-"), f"ctx{self.context_length}"]
        tunable = self.tunable_fields()
        for name in ("mode", "precision"):
            if name in tunable:
                words.append(getattr(self, name))
        return words

    @property
    def run_id(self) -> str:
        """The run's readable id, which is the same whether you give a size's name or its dimensions."""
        return "-".join([*self.words_of_id(), self.digest()])

    @property
    def label(self) -> str:
        """A readable description: the words of the run id, and all other fields with non-default values."""
        in_id = {"study", "device", "size", "mode", "precision", "context_length", *Dimensions._fields}
        others = self.model_dump(exclude_defaults=True, exclude=in_id)
        parts = [" ".join([self.study, *self.words_of_id()])]
        for name, value in others.items():
            parts.append(f"{name} {_format_value(value)}")
        return ", ".join(parts)


def digest_of(fields: Mapping[str, Any]) -> str:
    """Return a digest of a configuration's fields, as eight hexadecimal digits."""
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(str, value)) or "none"
    return str(value)


class StepConfig(RunConfig):
    """The configuration of a run that executes the model's training step, or part of this step."""

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
        """Fill in the dimensions of a named size, or the name of the size that has the given dimensions.

        ``size`` can also be a string with the dimensions of an unnamed size, in the format that tables use, such
        as "d512 f2048 l8 h8". The optional ``edition``, which isn't a field, is the year of the handout that
        defines the size's name.

        Raises:
            ValueError: If ``edition`` is given without a size, or a dimension contradicts the size.
            ConfigError: If the size or the edition is unknown.
        """
        if not isinstance(values, dict):
            return values
        values = dict(values)
        size = values.get("size", "custom")
        edition = values.pop("edition", None)
        if size == "custom" and edition is not None:
            raise ValueError(
                f"edition: got {truncated_repr(edition)}, but an edition only applies to a named size;"
                " leave out the edition or add a size"
            )
        dimensions: dict[str, int] = {}
        unnamed = SHAPE.fullmatch(str(size))
        if unnamed:
            numbers = map(int, unnamed.groups())
            dimensions = Dimensions(*numbers)._asdict()
        elif size != "custom":
            name = resolve_size(size, edition)
            dimensions = SIZES[name]._asdict()
        for field, number in dimensions.items():
            if values.setdefault(field, number) != number:
                raise ValueError(
                    f"{field}: got {truncated_repr(values[field])}, but size {size!r} has {number};"
                    " leave one of them out"
                )
        values["size"] = "custom"
        final_dimensions = tuple(values.get(field) for field in Dimensions._fields)
        for name, named_dimensions in SIZES.items():
            if named_dimensions == final_dimensions:
                values["size"] = name
        return values

    @model_validator(mode="after")
    def check_heads(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: got {self.num_heads}, but it must divide d_model = {self.d_model}")
        head_dim = self.d_model // self.num_heads
        if head_dim % 2:
            raise ValueError(
                f"num_heads: got {self.num_heads}, but d_model / num_heads = {head_dim} must be even,"
                " because RoPE rotates pairs of dimensions"
            )
        return self

    def step(self, **changes: Any) -> "StepConfig":
        """Return this configuration, with ``changes`` applied, as a StepConfig without the study's own fields."""
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
    """Return each study's configuration class, keyed by the study's name, in the order of the report.

    The studies' modules are imported by name, because each of them imports this module.
    """
    names = importlib.import_module("stepscope.studies").STUDIES
    configs = {}
    for name in names:
        module = importlib.import_module(f"stepscope.studies.{name}.config")
        configs[name] = module.Config
    return configs


def configure(study: str, **values: Any) -> Any:
    """Validate the fields of a run, and return them as the study's ``Config``.

    A field that is None counts as omitted. ``device`` defaults to ``auto``.

    Raises:
        ConfigError: If a field is invalid. The message names all invalid fields, their values and the expected
            values.
    """
    known = studies()
    if not isinstance(study, str) or study not in known:
        raise ConfigError(f"study: got {truncated_repr(study)}, but known studies are {', '.join(known)}")
    fields: dict[str, Any] = {"device": "auto"}
    for field, value in values.items():
        if value is not None:
            fields[field] = value
    try:
        return known[study](**fields)
    except ValidationError as error:
        raise ConfigError(format_errors(error, known[study])) from None


def format_errors(error: ValidationError, model: type[BaseModel]) -> str:
    """Format a validation error with one sentence per invalid field, each beginning with the field's path."""
    sentences = [_format_error(item, model) for item in error.errors()]
    return "; ".join(sentences)


def _format_error(error: Any, model: type[BaseModel]) -> str:
    location = error["loc"]
    field = ".".join(map(_format_location, location)) or "all"
    if error["type"] == "value_error":  # our validators raise complete error messages
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return f"{field}: no such field; {_suggest(str(location[-1]), model.model_fields)}"
    if error["type"] == "missing":
        return f"{field}: not given, but it has no default"
    message = error["msg"]
    expected = message[0].lower() + message[1:]
    return f"{field}: got {truncated_repr(error['input'])}, but {expected}"


def _format_location(part: Any) -> str:
    is_short = re.fullmatch(r"[\w./-]{1,50}", str(part))
    return str(part) if is_short else truncated_repr(part)


def _suggest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is closest to an unknown name, and list all known names."""
    names = list(known)
    matches = difflib.get_close_matches(name[:MAX_SHOWN], names, 1)
    all_names = f"known names are {', '.join(names)}"
    return f"did you mean {matches[0]}? The {all_names}" if matches else f"the {all_names}"


def from_notebook(study: str, names: dict[str, Any]) -> Any:
    """Build a configuration from the variables of a notebook's parameters cell.

    Args:
        study: the study's name.
        names: the notebook's ``globals()``; names that aren't fields of the study are ignored.

    Raises:
        ConfigError: If a value is invalid, or papermill was given an unknown parameter.
    """
    tunable = studies()[study].tunable_fields()
    require_parameters(names, tunable)
    values = {field: names[field] for field in tunable if field in names}
    return configure(study, **values)


def require_parameters(names: Mapping[str, Any], more_names: Iterable[str] = ()) -> None:
    """Reject unknown papermill parameters, for which papermill itself only prints a warning.

    Args:
        names: the notebook's ``globals()``, whose history ``In`` includes the cell that papermill injects.
        more_names: names that are allowed in addition to the names in the parameters cell.

    Raises:
        ConfigError: If a parameter is unknown; the message lists the known parameters.
    """
    history = names.get("In", [])
    for defaults, cell in itertools.pairwise(history):
        if not cell.startswith("# Parameters\n"):
            continue
        known = dict.fromkeys([*assigned_constants(defaults), *more_names])
        known.pop("run_folder", None)  # only sweeps set it, so it isn't suggested
        for name in assigned_constants(cell):
            if name not in known and name != "run_folder":
                raise ConfigError(f"{name:.100}: no such parameter; {_suggest(name, known)}")


def assigned_constants(cell: str) -> list[str]:
    """Return the names of the variables to which a cell assigns constants.

    The result is empty if the cell does anything other than assign constants and import modules.
    """
    names: list[str] = []
    try:
        for statement in ast.parse(cell).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            is_plain_assignment = isinstance(statement, ast.Assign)
            targets = statement.targets if is_plain_assignment else [statement.target]  # type: ignore
            ast.literal_eval(statement.value)  # type: ignore
            names += [target.id for target in targets]
    except (SyntaxError, ValueError, AttributeError):
        return []
    return names


def require_device(config: RunConfig) -> None:
    """Check that this machine supports the configuration's device and precision.

    Raises:
        ConfigError: If this machine has no such device, or the device doesn't support the precision.
    """
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"device: got 'cuda', but torch {torch.__version__} finds no CUDA GPU here;"
                " use 'cpu' or 'auto'"
            )
        major, minor = torch.cuda.get_device_capability()
        if config.precision in ("tf32", "bf16") and major < 8:
            name = torch.cuda.get_device_name()
            raise ConfigError(
                f"precision: got {config.precision!r}, but {name} has compute capability {major}.{minor},"
                " which is below the required 8.0; use fp32 or fp16"
            )
    elif config.precision == "tf32":
        raise ConfigError("precision: got 'tf32', but CPUs don't support TF32; use fp32, bf16 or fp16")
