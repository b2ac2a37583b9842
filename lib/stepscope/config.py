"""One run's configuration: typed, validated, and named by what it says.

:class:`RunConfig` holds what every run has, :class:`StepConfig` what a run of the model's training step has.
A study subclasses one of them as ``Config`` in its ``config.py`` and adds what only it needs. All that a run
depends on is a field, so that the run id, made from the fields, names it completely.
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
    """A model's shape: what tells one size from another."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


# The handout's five sizes, the 2026 edition's 10B, and three that a laptop's CPU runs in milliseconds.
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
# What each year's handout calls which of them; records, sweeps and tables have the names above.
EDITIONS = {
    2025: {name: name for name in ("small", "medium", "large", "xl", "2.7B")},
    2026: {"small": "small", "medium": "medium", "large": "large", "xl": "2.7B", "10B": "10B"},
}
PHASE_NAMES = ("forward", "loss", "backward", "optimizer")
# What each mode runs, in order.
PHASES = {"forward": [*PHASE_NAMES[:1]], "forward_backward": [*PHASE_NAMES[:3]], "step": [*PHASE_NAMES]}
TOTAL = "total"  # the row of a mode as a whole, beside its phases
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# As documents write them.
PRECISION_NAMES = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "fp16": "fp16"}
MODE_NAMES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


class ConfigError(StepscopeError, ValueError):
    """A configuration that cannot be run; its text is a sentence: the field, what it was, what is allowed."""


def resolve_size(name: Any, edition: Any = None) -> str:
    """The name in :data:`SIZES` of what that year's handout calls ``name``; without a year it is one of them.

    Raises:
        ConfigError: there is no such edition or size, or the edition has none of that name.
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
    """``auto`` becomes the device this machine has; anything else is left for the field's type to judge."""
    if asked == "auto":
        import torch  # not above: Dask's workers configure runs as well, and start sooner without it

        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


# A configuration's numbers are refused beyond these bounds: no machine reaches them, every table holds them.
Dimension = Annotated[int, Field(ge=1, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=10**6)]
SHAPE = re.compile(r"d([0-9]{1,7}) f([0-9]{1,7}) l([0-9]{1,7}) h([0-9]{1,7})")  # of a size without a name
MAX_SHOWN = 100  # characters of a wrong value that an error repeats


def truncated_repr(value: Any) -> str:
    """A value as an error repeats it: on one line, and cut where it is long."""
    short = reprlib.Repr()  # also of what is nested deeply, or stands for gigabytes
    short.maxstring = short.maxother = MAX_SHOWN
    try:
        text = short.repr(value)
    except ValueError:  # thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class RunConfig(BaseModel):
    """What every study's run has in common. Build one through :func:`configure`, which words the errors."""

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
        """The fields that can have more than one value: the parameters of the study's notebook."""
        return [
            name
            for name, field in cls.model_fields.items()
            if get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) > 1
        ]

    @classmethod
    def notebook_for(cls, fields: Mapping[str, Any]) -> str:
        """The name of the notebook that a run with these fields executes: the study's, where it has one
        only."""
        return fields["study"]

    @property
    def notebook(self) -> str:
        return self.notebook_for(dict(self))

    def digest(self) -> str:
        """Of the fields that are not at their default, so that a field added later renames no run.

        A record holds every field, and one whose fields differ from the configuration's is not taken for it.
        """
        return digest_of(self.fields_of_id())

    def fields_of_id(self) -> dict[str, Any]:
        return self.model_dump(exclude_defaults=True, exclude={"size"})

    @property
    def shape(self) -> str:
        """What is run, by its dimensions or their name."""
        return f"d{self.d_model}"

    def words_of_id(self) -> list[str]:
        """Shape, context, and of mode and precision those that are free to choose in this study."""
        free = [name for name in ("mode", "precision") if name in self.tunable_fields()]
        return [
            self.shape.replace(" ", "-"),
            f"ctx{self.context_length}",
            *(getattr(self, name) for name in free),
        ]

    @property
    def run_id(self) -> str:
        """Readable, and the same for the same configuration whatever spelled it."""
        return "-".join([*self.words_of_id(), self.digest()])

    @property
    def label(self) -> str:
        """What tells a reader this run from another: the run id's words, and each other field that is not at
        its default."""
        said = {"study", "device", "size", "mode", "precision", "context_length", *Dimensions._fields}
        others = self.model_dump(exclude_defaults=True, exclude=said)
        return ", ".join(
            [
                " ".join([self.study, *self.words_of_id()]),
                *(f"{name} {_value(value)}" for name, value in others.items()),
            ]
        )


def digest_of(fields: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that name a configuration's fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


def _value(value: Any) -> str:
    return "/".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


class StepConfig(RunConfig):
    """A run of the model's training step, or of a part of it."""

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
        """A size stands for its dimensions, and dimensions that a size has are given its name.

        Tables call a shape without a name by its dimensions, "d512 f2048 l8 h8", which is a size here, too.

        ``edition``, which is no field, says which year's handout the size's name is of.
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
        """The plain step of this run: its own fields, less what its study has added, with changes."""
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
    """The configuration class of every study, by name, in the report's order.

    They are listed in :mod:`stepscope.studies`, above this module, and found by name: nothing here needs one.
    """
    listed = importlib.import_module("stepscope.studies").STUDIES
    return {name: importlib.import_module(f"stepscope.studies.{name}.config").Config for name in listed}


def configure(study: str, **values: Any) -> Any:
    """One run's fields, validated: the study's ``Config``. A field given as None counts as not given;
    ``device`` defaults to ``auto``.

    Raises:
        ConfigError: one sentence for each field that is wrong: its name, what it was, what is allowed.
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
    """What is wrong with the input of a model, a sentence for each field, such as ``tables.samples.rows``."""
    return "; ".join(_sentence(item, model) for item in error.errors())


def _sentence(item: Any, model: type[BaseModel]) -> str:
    plain = (
        str(part) if re.fullmatch(r"[\w./-]{1,50}", str(part)) else truncated_repr(part)
        for part in item["loc"]
    )
    field = ".".join(plain) or "all"
    if item["type"] == "value_error":  # our own validators word their errors whole
        return str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        return f"{field}: no such field; {_known(str(item['loc'][-1]), model.model_fields)}"
    if item["type"] == "missing":
        return f"{field}: not given, and it has no default"
    return f"{field}: got {truncated_repr(item['input'])}, but {item['msg'][0].lower()}{item['msg'][1:]}"


def _known(name: str, known: Iterable[str]) -> str:
    """Which name may be meant by one that is none, and all that there are."""
    close = difflib.get_close_matches(name[:MAX_SHOWN], known := list(known), 1)
    return f"{f'{close[0]} may be meant; ' if close else ''}known are {', '.join(known)}"


def from_notebook(study: str, names: dict[str, Any]) -> Any:
    """The configuration that a notebook's parameters cell spells: its variables have the names of the fields.

    Args:
        names: the notebook's ``globals()``; what is no field of the study is passed over.

    Raises:
        ConfigError: a value, or a parameter's name that papermill was given, is wrong.
    """
    free = studies()[study].tunable_fields()
    require_parameters(names, free)
    return configure(study, **{field: names[field] for field in free if field in names})


def require_parameters(names: Mapping[str, Any], free: Iterable[str] = ()) -> None:
    """Refuse what papermill was given and the notebook does not know: papermill itself only warns.

    Args:
        names: the notebook's ``globals()``. Its history has the cell that papermill adds.
        free: names that may be given beside those of the parameters cell.

    Raises:
        ConfigError: the name, and those that are known.
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
    """The names that a notebook's cell sets to constants, where it does nothing else but import."""
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
    """Check, before anything starts, that this machine has what the configuration asks for.

    Raises:
        ConfigError: no such device, or a precision that the device lacks.
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
