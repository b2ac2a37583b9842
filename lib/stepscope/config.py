"""One run's configuration: typed, validated, and named by what it says.

:class:`RunConfig` holds what every study shares; a study subclasses it, adds what only it needs, and is listed in
:data:`STUDIES`. Everything a run depends on is a field, so that the run id, made from the fields, names it completely.
"""
import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

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
# What each mode runs, in order.
PHASES = {"forward": ["forward"],
          "forward_backward": ["forward", "loss", "backward"],
          "step": ["forward", "loss", "backward", "optimizer"]}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class ConfigError(StepscopeError, ValueError):
    """A configuration that cannot be run; its text is one sentence: the field, what it was, what is allowed."""


def device_here(asked: Any) -> Any:
    """``auto`` becomes the device this machine has; anything else is left for the field's type to judge."""
    if asked == "auto":
        import torch  # not above: Dask's workers configure runs as well, and start sooner without it
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


class RunConfig(BaseModel):
    """What every study's run has in common. Build one through :func:`configure`, which words the errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    times_imports: ClassVar[bool] = False  # whether the notebook clocks its own imports, so that none may be done ahead

    study: str
    size: str = "custom"
    d_model: int = Field(ge=2)
    d_ff: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    vocab_size: int = Field(10_000, ge=2)
    context_length: int = Field(ge=1)
    batch_size: int = Field(4, ge=1)
    mode: Literal[tuple(PHASES)] = "step"
    precision: Literal[PRECISIONS] = "fp32"
    attention: Literal["eager", "sdpa"] = "eager"
    compile: bool = False
    optimizer: Literal["foreach", "fused", "forloop"] = "foreach"
    device: Annotated[Literal["cuda", "cpu"], BeforeValidator(device_here)]
    warmup_steps: int = Field(5, ge=0)
    timed_steps: int = Field(10, ge=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def fill_dimensions(cls, values: Any) -> Any:
        """A size stands for its dimensions, and dimensions that a size has are given its name."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        size = values.get("size", "custom")
        named = SIZES.get(size) if isinstance(size, str) else None
        if named is None and size != "custom":
            raise ValueError(f"size: got {size!r}, but known sizes are {', '.join(SIZES)}"
                             " (or give d_model, d_ff, num_layers and num_heads without a size)")
        for field, number in named._asdict().items() if named else ():
            if values.setdefault(field, number) != number:
                raise ValueError(f"{field}: got {values[field]!r}, but size {size!r} has {number}; leave one of them out")
        dimensions = tuple(values.get(field) for field in Dimensions._fields)
        values["size"] = next((name for name, known in SIZES.items() if known == dimensions), "custom")
        return values

    @model_validator(mode="after")
    def heads_divide(self) -> "RunConfig":
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: got {self.num_heads}, but it must divide d_model = {self.d_model}")
        if (self.d_model // self.num_heads) % 2:
            raise ValueError(f"num_heads: got {self.num_heads}, but RoPE turns pairs, so d_model / num_heads ="
                             f" {self.d_model // self.num_heads} must be even")
        return self

    @property
    def run_id(self) -> str:
        """Readable, and the same for the same configuration whatever spelled it.

        Fields left at their default are not hashed, so that a field added later renames no run; a record holds
        every field, and one whose fields differ from the configuration's is not taken for it (store.py).
        """
        fields = self.model_dump(exclude_defaults=True, exclude={"size"})
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.size}-ctx{self.context_length}-{self.mode}-{self.precision}-{digest}"


class BenchmarkConfig(RunConfig):
    """End-to-end timing of the step."""

    study: Literal["benchmark"] = "benchmark"


class WarmupConfig(RunConfig):
    """The first steps of a fresh process, and what the first of them pays for."""

    times_imports: ClassVar[bool] = True
    study: Literal["warmup"] = "warmup"
    profile: bool = False  # run the first step under torch.profiler, to see which calls it waits in
    one_layer_first: bool = False  # run a one-layer model of the same shapes first: it uses the same kernels


class NsysConfig(RunConfig):
    """Profiles of one size and context: every mode in a capture of its own, from one process."""

    study: Literal["nsys"] = "nsys"
    mode: Literal["all"] = "all"
    keep_export: bool = False  # keep the event-level export of each capture, scrubbed, beside the tables

    def of_mode(self, mode: str) -> "BenchmarkConfig":
        """The step that one of the captures runs; unprofiled, it is a run of the benchmark study."""
        shared = self.model_dump(exclude={"study", "mode", "keep_export"})
        return BenchmarkConfig(**shared, mode=mode)


class MixedPrecisionConfig(RunConfig):
    """Every precision and mode of one size and context, one after another in one process."""

    study: Literal["mixed_precision"] = "mixed_precision"
    mode: Literal["all"] = "all"
    precision: Literal["all"] = "all"
    count_casts: bool = False  # profile a step of fp16 and of bf16 for what changing types costs
    experiments: bool = False  # the small experiments on number formats, too

    def of(self, precision: str, mode: str) -> "BenchmarkConfig":
        """The step of one precision and mode."""
        return BenchmarkConfig(**self.model_dump(exclude={"study", "mode", "precision", "count_casts", "experiments"}), precision=precision, mode=mode)


# Attention by itself: written out, the same compiled, what scaled_dot_product_attention offers, and FlexAttention.
ATTENTIONS = ("eager", "compiled", "flash", "efficient", "cudnn", "math", "flex")


class AttentionConfig(RunConfig):
    """Attention alone, without projections and with one head of ``d_model`` dimensions: one precision, all implementations,
    all sequences. ``timed_steps`` are passes, each a forward and its backward; ``context_length`` is the longest sequence."""

    study: Literal["attention"] = "attention"
    d_ff: Literal[1] = 1
    num_layers: Literal[1] = 1
    num_heads: Literal[1] = 1
    mode: Literal["all"] = "all"
    attention: Literal["all"] = "all"
    batch_size: int = Field(8, ge=1)
    timed_steps: int = Field(100, ge=1)
    sequences: list[Annotated[int, Field(ge=1)]] = Field([64, 128, 256, 1024, 4096, 8192, 16384], min_length=1)
    causal: list[Literal[ATTENTIONS]] = Field(list(ATTENTIONS))      # what is timed with the causal mask
    unmasked: list[Literal[ATTENTIONS]] = Field(["eager", "flash", "efficient", "cudnn"])  # and without it
    unmasked_from: int = Field(256, ge=1)      # the shortest sequence that is timed without the mask
    cell_seconds: float = Field(0.5, gt=0)     # a cell that would take longer is timed fewer times,
    least_passes: int = Field(10, ge=1)        # but so often at least
    find_end: bool = False                     # beyond the sequences, look for the longest one that fits

    @model_validator(mode="before")
    @classmethod
    def longest(cls, values: Any) -> Any:
        sequences = values.get("sequences") or cls.model_fields["sequences"].default if isinstance(values, dict) else None
        if isinstance(sequences, list) and all(isinstance(sequence, int) for sequence in sequences):
            return values | {"context_length": max(sequences)}
        return values

    @property
    def run_id(self) -> str:
        return f"d{self.d_model}-{super().run_id.removeprefix('custom-')}"


class CompileConfig(RunConfig):
    """The whole model eager and compiled, with each attention: every mode of all in one process."""

    study: Literal["compile"] = "compile"
    mode: Literal["all"] = "all"
    attention: Literal["all"] = "all"
    attentions: list[Literal["eager", "sdpa"]] = Field(["eager", "sdpa"], min_length=1)
    # What torch.compile is given: nothing, each block (compiled once and used for all), or the whole model.
    variants: list[Literal["eager", "block", "model"]] = Field(["eager", "block"], min_length=1)

    def of_mode(self, mode: str, attention: str) -> BenchmarkConfig:
        """The step of one mode and attention; uncompiled, it is a run of the benchmark study."""
        return BenchmarkConfig(**self.model_dump(exclude={"study", "mode", "attention", "attentions", "variants"}), mode=mode,
                               attention=attention)


class MemoryConfig(RunConfig):
    """Every allocation of the first step and of a steady one; or, with ``checkpoints``, peak and time of each setting."""

    study: Literal["memory"] = "memory"
    warmup_steps: int = Field(1, ge=0)
    timed_steps: int = Field(1, ge=1)
    checkpoints: list[Annotated[int, Field(ge=0)]] = []  # blocks per checkpoint, each measured in turn; 0: none are made
    expandable_segments: bool = False  # the allocator's option of that name
    keep_snapshot: bool = False        # keep the pickle that PyTorch's memory viewer opens


STUDIES: dict[str, type[RunConfig]] = {"benchmark": BenchmarkConfig, "warmup": WarmupConfig, "nsys": NsysConfig,
                                       "mixed_precision": MixedPrecisionConfig, "attention": AttentionConfig,
                                       "compile": CompileConfig, "memory": MemoryConfig}


def configure(study: str, **values: Any) -> RunConfig:
    """Validate one run's fields. A field given as None counts as not given; ``device`` defaults to ``auto``.

    Raises:
        ConfigError: one sentence for each field that is wrong: its name, what it was, what is allowed.
    """
    if study not in STUDIES:
        raise ConfigError(f"study: got {study!r}, but known studies are {', '.join(STUDIES)}")
    values = {field: value for field, value in values.items() if value is not None}
    try:
        return STUDIES[study](**{"device": "auto"} | values)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(item, STUDIES[study]) for item in error.errors())) from None


def _sentence(item: dict, model: type[RunConfig]) -> str:
    field = ".".join(map(str, item["loc"]))
    if item["type"] == "value_error":  # our own validators word their errors whole
        return str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        return (f"{field}: no such field in study {model.model_fields['study'].default!r};"
                f" its fields are {', '.join(model.model_fields)}")
    if item["type"] == "missing":
        return f"{field}: not given, and it has no default"
    return f"{field}: got {item['input']!r}, but {item['msg'][0].lower()}{item['msg'][1:]}"


def from_notebook(study: str, names: dict[str, Any]) -> RunConfig:
    """The configuration that a notebook's parameters cell spells: its variables have the names of the fields.

    Args:
        names: the notebook's ``globals()``; what is no field of the study is passed over.
    """
    return configure(study, **{field: names[field] for field in STUDIES[study].model_fields if field in names})


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
            raise ConfigError(f"precision: got {config.precision!r}, but {torch.cuda.get_device_name()} has compute"
                              f" capability {capability[0]}.{capability[1]} and it needs 8.0; fp32 and fp16 are possible")
    elif config.precision == "tf32":
        raise ConfigError("precision: got 'tf32', but a CPU has no TF32; fp32, bf16 and fp16 are possible")
