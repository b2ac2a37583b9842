"""One run's configuration: typed, validated, and named by what it says.

:class:`RunConfig` holds what every run has, :class:`StepConfig` what a run of the model's training step has.
A study subclasses one of them as ``Config`` in its ``config.py`` and adds what only it needs. All that a run
depends on is a field, so that the run id, made from the fields, names it completely.
"""
import functools
import hashlib
import importlib
import json
import re
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

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
# The names above are 2025's, in records, sweeps and tables; what an edition of the handout calls otherwise.
EDITIONS: dict[int, dict[str, str]] = {2025: {}, 2026: {"xl": "2.7B"}}
# The sizes that each edition has, by its own names.
EDITION_SIZES = {2025: ("small", "medium", "large", "xl", "2.7B"),
                 2026: ("small", "medium", "large", "xl", "10B")}
PHASE_NAMES = ("forward", "loss", "backward", "optimizer")
# What each mode runs, in order.
PHASES = {"forward": [*PHASE_NAMES[:1]], "forward_backward": [*PHASE_NAMES[:3]], "step": [*PHASE_NAMES]}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class ConfigError(StepscopeError, ValueError):
    """A configuration that cannot be run; its text is a sentence: the field, what it was, what is allowed."""


def size_of(name: str, edition: int | None = None) -> str:
    """The name in :data:`SIZES` of what the handout's edition of that year calls ``name``.

    Raises:
        ConfigError: there is no such edition or size, the edition has none of that name, or no edition is
            given and editions differ about it.
    """
    if edition is not None and not (isinstance(edition, int) and edition in EDITIONS):
        raise ConfigError(f"edition: got {shown(edition)}, but the handout's editions are"
                          f" {' and '.join(map(str, EDITIONS))}")
    if not isinstance(name, str) or name not in SIZES:
        raise ConfigError(f"size: got {shown(name)}, but known sizes are {', '.join(SIZES)}"
                          " (or give d_model, d_ff, num_layers and num_heads without a size)")
    meant = {year: names.get(name, name) for year, names in EDITIONS.items()}
    if edition is None and needs_edition(name):
        each = (f"{'/'.join(map(str, SIZES[size]))} in the {year} edition" for year, size in meant.items())
        raise ConfigError(f"size: {name} means {' and '.join(each)}; say --edition"
                          f" {' or --edition '.join(map(str, meant))}")
    if edition is None:
        return name
    if name not in EDITION_SIZES[edition]:
        raise ConfigError(f"size: got {shown(name)}, but the {edition} edition has"
                          f" {', '.join(EDITION_SIZES[edition])}{_called_otherwise(name, edition)}")
    return meant[edition]


def _called_otherwise(name: str, edition: int) -> str:
    """Whose name a size that an edition lacks is, or what this edition calls it, for an error's end."""
    own = [theirs for theirs, size in EDITIONS[edition].items() if size == name]
    if own:
        return f", and calls this size {own[0]}"
    others = [f"the {year} edition's" for year, names in EDITION_SIZES.items() if name in names]
    return f" ({name} is {others[0] if others else 'of no edition: leave it out'})"


def needs_edition(name: str) -> bool:
    """Whether editions mean different sizes by a name."""
    return any(name in names for names in EDITIONS.values())


def size_label(name: str) -> str:
    """A size's name with the edition it is of, where editions differ: "2.7B (2026's xl)"."""
    other = [f"{year}'s {theirs}" for year, names in EDITIONS.items() for theirs, size in names.items()
             if size == name]
    if not other and needs_edition(name):
        other = [f"{min(EDITIONS)}'s"]
    return f"{name} ({', '.join(other)})" if other else name


def device_here(asked: Any) -> Any:
    """``auto`` becomes the device this machine has; anything else is left for the field's type to judge."""
    if asked == "auto":
        import torch  # not above: Dask's workers configure runs as well, and start sooner without it
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


# Bounds of what is believed of a configuration: far beyond any machine, and well within what tables can hold.
Dimension = Annotated[int, Field(ge=1, le=2**20)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=10**6)]
MOST_SHOWN = 100  # characters of a wrong value that an error repeats


def shown(value: Any) -> str:
    """A value as an error repeats it: on one line, and cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class RunConfig(BaseModel):
    """What every study's run has in common. Build one through :func:`configure`, which words the errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # Fields that records of before have and this study has no longer, with the only value they ever had.
    retired: ClassVar[dict[str, Any]] = {}
    # Whether runs time their steps in turns (see traces/turns.py), so that several may share a GPU.
    takes_turns: ClassVar[bool] = False

    study: str
    d_model: int = Field(ge=2, le=2**20)
    context_length: Length
    batch_size: Dimension = 4
    precision: Literal[PRECISIONS] = "fp32"  # type: ignore[valid-type]
    device: Annotated[Literal["cuda", "cpu"], BeforeValidator(device_here)]
    warmup_steps: int = Field(5, ge=0, le=10**6)
    timed_steps: Steps = 10
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def drop_retired(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {field: value for field, value in values.items()
                if field not in cls.retired or value != cls.retired[field]}

    def digest(self) -> str:
        """Of the fields that are not at their default, so that a field added later renames no run.

        A record holds every field, and one whose fields differ from the configuration's is not taken for it.
        """
        fields = self.model_dump(exclude_defaults=True, exclude={"size"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def run_id(self) -> str:
        """Readable, and the same for the same configuration whatever spelled it."""
        return f"ctx{self.context_length}-{self.precision}-{self.digest()}"

    @property
    def shape(self) -> str:
        """What is run, by its dimensions or their name."""
        return f"d{self.d_model}"

    @property
    def label(self) -> str:
        """What tells a reader this run from another: the shape, which a run id may not say, and no digest."""
        return f"{self.study} {self.shape} ctx{self.context_length} {self.precision}"


class StepConfig(RunConfig):
    """A run of the model's training step, or of a part of it."""

    study: str = "step"
    size: str = "custom"
    d_ff: Dimension
    num_layers: Layers
    num_heads: Dimension
    vocab_size: int = Field(10_000, ge=2, le=2**24)
    mode: Literal[tuple(PHASES)] = "step"  # type: ignore[valid-type]
    attention: Literal["eager", "sdpa"] = "eager"
    compile: bool = False
    optimizer: Literal["foreach", "fused", "forloop"] = "foreach"

    @model_validator(mode="before")
    @classmethod
    def fill_dimensions(cls, values: Any) -> Any:
        """A size stands for its dimensions, and dimensions that a size has are given its name.

        ``edition``, which is no field, says whose the size's name is; without it, it is 2025's.
        """
        if not isinstance(values, dict):
            return values
        values = dict(values)
        size, edition = values.get("size", "custom"), values.pop("edition", None)
        if size != "custom":
            if edition is None and isinstance(size, str) and needs_edition(size):
                edition = 2025
            size = size_of(size, edition)
        elif edition is not None:
            raise ValueError(f"edition: got {shown(edition)}, but no size whose name it would tell")
        named = None if size == "custom" else SIZES[size]
        for field, number in named._asdict().items() if named else ():
            if values.setdefault(field, number) != number:
                raise ValueError(f"{field}: got {shown(values[field])}, but size {size!r} has {number};"
                                 " leave one of them out")
        dimensions = tuple(values.get(field) for field in Dimensions._fields)
        values["size"] = next((name for name, known in SIZES.items() if known == dimensions), "custom")
        return values

    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: got {self.num_heads}, but it must divide d_model = {self.d_model}")
        if (self.d_model // self.num_heads) % 2:
            raise ValueError(f"num_heads: got {self.num_heads}, but RoPE turns pairs, so d_model / num_heads"
                             f" = {self.d_model // self.num_heads} must be even")
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

    @property
    def label(self) -> str:
        shape = self.shape.replace(" ", "-")
        return f"{self.study} {shape} ctx{self.context_length} {self.mode} {self.precision}"

    @property
    def run_id(self) -> str:
        return f"{self.size}-ctx{self.context_length}-{self.mode}-{self.precision}-{self.digest()}"


def varied(configs: Iterable[RunConfig]) -> dict[tuple[str, str], str]:
    """What tells configurations of one label apart, by study and run id: the fields in which they differ with
    the values of each, such as "attention sdpa, seed 1"; empty where no other has its label."""
    alike: dict[str, list[RunConfig]] = {}
    for config in configs:
        alike.setdefault(config.label, []).append(config)
    found = {}
    for group in alike.values():
        fields = [config.model_dump() for config in group]
        differ = [name for name in fields[0] if any(one.get(name) != fields[0][name] for one in fields)]
        for config, one in zip(group, fields, strict=True):
            found[config.study, config.run_id] = ", ".join(f"{name} {_value(one[name])}" for name in differ)
    return found


def _value(value: Any) -> str:
    return "/".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


@functools.cache
def studies() -> dict[str, type[RunConfig]]:
    """The configuration class of every study that is run, by name, in the report's order.

    They are listed in :mod:`stepscope.studies`, above this module, and found by name: nothing here needs one.
    """
    listed = importlib.import_module("stepscope.studies").STUDIES
    return {name: importlib.import_module(f"stepscope.studies.{name}.config").Config
            for name in listed if find_spec(f"stepscope.studies.{name}.config")}


def configure(study: str, **values: Any) -> Any:
    """One run's fields, validated: the study's ``Config``. A field given as None counts as not given;
    ``device`` defaults to ``auto``.

    Raises:
        ConfigError: one sentence for each field that is wrong: its name, what it was, what is allowed.
    """
    known = studies()
    if not isinstance(study, str) or study not in known:
        raise ConfigError(f"study: got {shown(study)}, but known studies are {', '.join(known)}")
    values = {field: value for field, value in values.items() if value is not None}
    try:
        return known[study](**{"device": "auto"} | values)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(item, known[study]) for item in error.errors())) from None


def place_of(item: Any) -> str:
    """Where in its input pydantic found an error, such as ``tables.samples.rows``; odd names are quoted."""
    plain = (str(part) if re.fullmatch(r"[\w./-]{1,50}", str(part)) else shown(part) for part in item["loc"])
    return ".".join(plain)


def _sentence(item: Any, model: type[RunConfig]) -> str:
    field = place_of(item)
    if item["type"] == "value_error":  # our own validators word their errors whole
        return str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        return (f"{field}: no such field in study {model.model_fields['study'].default!r};"
                f" its fields are {', '.join(model.model_fields)}")
    if item["type"] == "missing":
        return f"{field}: not given, and it has no default"
    return f"{field}: got {shown(item['input'])}, but {item['msg'][0].lower()}{item['msg'][1:]}"


def free_fields(study: str) -> list[str]:
    """The fields of a study that can have more than one value: its notebook's parameters.

    Raises:
        ConfigError: there is no such study.
    """
    if study not in studies():
        raise ConfigError(f"study: got {study!r}, but known studies are {', '.join(studies())}")
    fields = studies()[study].model_fields
    return [name for name, field in fields.items()
            if get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) > 1]


def from_notebook(study: str, names: dict[str, Any]) -> Any:
    """The configuration that a notebook's parameters cell spells: its variables have the names of the fields.

    Args:
        names: the notebook's ``globals()``; what is no field of the study is passed over.
    """
    return configure(study, **{field: names[field] for field in free_fields(study) if field in names})


def require_device(config: RunConfig) -> None:
    """Check, before anything starts, that this machine has what the configuration asks for.

    Raises:
        ConfigError: no such device, or a precision that the device lacks.
    """
    if config.device == "cuda":
        import torch
        if not torch.cuda.is_available():
            raise ConfigError(f"device: got 'cuda', but torch {torch.__version__} sees no CUDA GPU here;"
                              " 'cpu' and 'auto' are possible")
        capability = torch.cuda.get_device_capability()
        if config.precision in ("tf32", "bf16") and capability < (8, 0):
            has = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
            raise ConfigError(f"precision: got {config.precision!r}, but {has} and it needs 8.0;"
                              " fp32 and fp16 are possible")
    elif config.precision == "tf32":
        raise ConfigError("precision: got 'tf32', but a CPU has no TF32; fp32, bf16 and fp16 are possible")
