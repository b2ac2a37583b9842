"""Sweep files: YAML that becomes configurations."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stepscope import PACKAGE, StepscopeError
from stepscope.config import (
    EDITIONS,
    PHASES,
    ConfigError,
    RunConfig,
    StepConfig,
    configure,
    format_errors,
    studies,
    truncated_repr,
)
from stepscope.model.accounting import peak
from stepscope.yaml_files import load_yaml

ACROSS = PACKAGE / "sweeps"  # of several studies
STUDIES = PACKAGE / "studies"  # of one study each
LARGEST = "LARGEST"  # as a size: the largest that is predicted to fit
MOST_RUNS = 100_000  # of a block: ten values on each of ten axes are a slip of the hand
MOST_USED = 0.9  # of a GPU's memory, by the largest model's step


class SweepError(StepscopeError, ValueError):
    """A sweep that cannot start; the text names the file, the place in it, and what was expected."""


class Block(BaseModel):
    """A block of a sweep file: the product of its ``axes`` (field: list of values), the last varying fastest,
    each with the ``fixed`` fields. ``edition`` beside ``size`` says which year's handout its names are of,
    and is no field. With ``skip_too_large`` a run is left out where not even the smallest of what it measures
    is predicted to fit into the GPU."""

    model_config = ConfigDict(extra="forbid", strict=True)

    study: str
    fixed: dict[str, Any] = {}
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    skip_too_large: bool = False

    @model_validator(mode="after")
    def plausible(self) -> Self:
        names = Counter(["study", *self.fixed, *self.axes])
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(
                f"{truncated_repr(twice[0])}: given more than once, as study, in fixed or in axes"
            )
        if math.prod(map(len, self.axes.values())) > MOST_RUNS:
            raise ValueError(f"axes: their product is more than {MOST_RUNS:,} runs")
        return self


@dataclass
class SweepPlan:
    """What sweep files ask for: ``configs``, each once, and ``too_large``, what they leave out."""

    configs: list[RunConfig] = field(default_factory=list)
    too_large: list[RunConfig] = field(default_factory=list)


def find_sweeps(name: str, device: str = "cuda") -> list[Path]:
    """Return a sweep's files, by its path or by the name of one that ships with stepscope.

    ``reference``, ``tour`` and ``2026`` run all studies on a GPU, and ``cpu`` runs all studies over tiny
    models. A study's name stands for that study's sweep on a GPU, or for its part of ``cpu``.

    Args:
        device: where the sweep will run, "cuda" or "cpu".

    Raises:
        SweepError: there is no such sweep, or it needs a GPU and ``device`` is "cpu".
    """
    on_cpu = _sweeps_of_studies("sweep_cpu.yaml")
    on_gpu = {file.stem: [file] for file in sorted(ACROSS.glob("*.yaml"))} | _sweeps_of_studies("sweep.yaml")
    shipped = on_gpu | {"cpu": [path for paths in on_cpu.values() for path in paths]}
    if device == "cpu":
        shipped |= on_cpu
    if name in shipped:
        if device == "cpu" and shipped[name] == on_gpu.get(name):
            raise SweepError(f"{name}: needs a CUDA GPU, but this machine has none; cpu runs tiny models")
        return shipped[name]
    with suppress(OSError):  # a name too long
        if (path := Path(name)).is_file():
            return [path]
    raise SweepError(
        f"{name:.200}: is no file, and none of the sweeps that ship with stepscope, which are"
        f" {', '.join(shipped)}"
    )


def _sweeps_of_studies(file: str) -> dict[str, list[Path]]:
    """Return the studies that have such a sweep file."""
    return {study: [path] for study in studies() if (path := STUDIES / study / file).is_file()}


def load_sweeps(sources: list[Path | dict], device: str, gpu_gib: float | None = None) -> SweepPlan:
    """All configurations of sweep files (or of blocks as such files have them), in their order, each once.

    A file is one :class:`Block` or a list of them.

    Args:
        device: what ``auto`` means where they will run.
        gpu_gib: memory of the GPUs there.

    Raises:
        YamlFileError: no such file, or not YAML. SweepError: another shape than this, or a configuration that
            is not valid.
    """
    found: dict[tuple[str, str], RunConfig] = {}
    too_large: dict[tuple[str, str], RunConfig] = {}
    for source in sources:
        content = source if isinstance(source, dict) else load_yaml(source)
        for number, block in enumerate(content if isinstance(content, list) else [content], start=1):
            try:
                asked = Block.model_validate(block)
                for config in _expand(asked, device, gpu_gib):
                    skip = asked.skip_too_large and gpu_gib and min_peak_gib(config) > gpu_gib
                    group = too_large if skip else found
                    if group.setdefault((config.study, config.run_id), config) != config:
                        raise SweepError(
                            f"two of its configurations have the run id {config.run_id};"
                            " put them into different runs folders"
                        )
            except (ConfigError, SweepError, ValidationError) as error:
                what = format_errors(error, Block) if isinstance(error, ValidationError) else error
                place = "" if isinstance(source, dict) else f"{source}, block {number}: "
                raise SweepError(f"{place}{what}") from None
    if not found:
        raise SweepError(f"{', '.join(map(str, sources))}: asks for no run")
    return SweepPlan(list(found.values()), list(too_large.values()))


def _expand(block: Block, device: str, gpu_gib: float | None) -> Iterator[RunConfig]:
    for values in itertools.product(*block.axes.values()):
        fields = block.fixed | dict(zip(block.axes, values, strict=True))
        if fields.get("device", "auto") == "auto":
            fields["device"] = device
        if fields.get("size") == LARGEST:
            fields["size"] = largest_that_fits(fields, gpu_gib)
        yield configure(block.study, **fields)


def peak_gib(config: RunConfig) -> float:
    """Predicted peak of a run's step as the assignment writes it, in fp32; 0 where a run is of no step."""
    if not isinstance(config, StepConfig):
        return 0.0
    step = config.step(
        mode="step", precision="fp32", attention="naive", compile="none", optimizer="foreach", device="cuda"
    )
    return peak(step).allocated / 2**30


def min_peak_gib(config: RunConfig) -> float:
    """Predicted peak of the smallest of what a run measures, whose other modes and precisions become rows of
    status "oom" where they do not fit; 0 where a run is of no step."""
    if not isinstance(config, StepConfig):
        return 0.0
    modes = getattr(config, "modes", list(PHASES) if config.mode == "all" else [config.mode])
    # The forward of fp32 and TF32 is smaller than bf16's, which casts its weights.
    precision = "tf32" if config.precision == "all" else config.precision
    steps = [config.step(mode=mode, precision=precision, compile="none", device="cuda") for mode in modes]
    return min(peak(step, step.mode).allocated for step in steps) / 2**30


def largest_that_fits(fields: dict, gpu_gib: float | None) -> str:
    """Of the handout's sizes the largest whose step is predicted to fit; without a GPU, the smallest."""

    def fits(size: str) -> bool:
        config = configure(
            "benchmark", size=size, context_length=fields.get("context_length", 512), device="cpu"
        )
        return peak_gib(config) <= MOST_USED * (gpu_gib or 0.0)

    sizes = list(EDITIONS[2025])
    return next((size for size in reversed(sizes) if fits(size)), sizes[0])


def sweep_description(path: Path) -> str | None:
    """What a sweep file's first line says of it, such as how long it took on an H200."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = file.readline(500).strip()
    except OSError:  # load_sweeps will say why it cannot be read
        return None
    return first.lstrip("# ").strip() if first.startswith("#") else None
