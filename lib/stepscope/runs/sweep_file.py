"""Read sweep files, which consist of YAML blocks, and expand the blocks into configurations."""

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

ACROSS = PACKAGE / "sweeps"  # sweeps over several studies
STUDIES = PACKAGE / "studies"  # sweeps of single studies
LARGEST = "LARGEST"  # a placeholder for the largest size that is predicted to fit
MAX_RUNS_PER_BLOCK = 100_000  # more runs (ten axes with ten values each, for example) are probably a mistake
MAX_MEMORY_FRACTION = 0.9  # maximum fraction of the GPU's memory that the step at LARGEST may use


class SweepError(StepscopeError, ValueError):
    """Raised if a sweep can't start. The message names the file, the block and the problem."""


class Block(BaseModel):
    """A block of a sweep file: the Cartesian product of its axes, combined with its fixed fields.

    Args:
        study: the study to run.
        fixed: the fields with a single value. If ``size`` is among them, ``edition`` may be, too: the year of the
            handout that defines the size's name. ``edition`` isn't a field of the configuration.
        axes: the fields with several values, as lists. The last axis varies fastest.
        skip_too_large: whether to omit a run if not even its smallest measurement is predicted to fit into the
            GPU's memory.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    study: str
    fixed: dict[str, Any] = {}
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    skip_too_large: bool = False

    @model_validator(mode="after")
    def check_block(self) -> Self:
        names = Counter(["study", *self.fixed, *self.axes])
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(
                f"{truncated_repr(twice[0])}: given more than once; specify each field once, in fixed or in axes"
            )
        if math.prod(map(len, self.axes.values())) > MAX_RUNS_PER_BLOCK:
            raise ValueError(f"axes: got too many combinations; expected at most {MAX_RUNS_PER_BLOCK:,} runs")
        return self


@dataclass
class SweepPlan:
    """The configurations to run (``configs``, without duplicates) and the omitted ones (``too_large``)."""

    configs: list[RunConfig] = field(default_factory=list)
    too_large: list[RunConfig] = field(default_factory=list)


def find_sweeps(name: str, device: str = "cuda") -> list[Path]:
    """Return a sweep's files, given the path of a sweep file or the name of a built-in sweep.

    ``reference``, ``tour`` and ``2026`` run all studies on a GPU, and ``cpu`` runs all studies with tiny models.
    A study's name selects its GPU sweep, or its part of ``cpu`` if ``device`` is "cpu".

    Args:
        device: the device on which the sweep will run, "cuda" or "cpu".

    Raises:
        SweepError: If the sweep doesn't exist, or it requires a GPU and ``device`` is "cpu".
    """
    on_cpu = _sweeps_of_studies("sweep_cpu.yaml")
    on_gpu = {file.stem: [file] for file in sorted(ACROSS.glob("*.yaml"))} | _sweeps_of_studies("sweep.yaml")
    shipped = on_gpu | {"cpu": [path for paths in on_cpu.values() for path in paths]}
    if device == "cpu":
        shipped |= on_cpu
    if name in shipped:
        if device == "cpu" and shipped[name] == on_gpu.get(name):
            raise SweepError(
                f"{name} needs a CUDA GPU, but this machine has none; the sweep 'cpu' runs tiny models"
            )
        return shipped[name]
    with suppress(OSError):  # raised if the name is too long for a path
        if (path := Path(name)).is_file():
            return [path]
    raise SweepError(
        f"{name:.200}: expected a sweep file or the name of a built-in sweep: {', '.join(shipped)}"
    )


def _sweeps_of_studies(file: str) -> dict[str, list[Path]]:
    """Return the path of each study's sweep file named ``file``, as a one-element list keyed by study."""
    return {study: [path] for study in studies() if (path := STUDIES / study / file).is_file()}


def load_sweeps(sources: list[Path | dict], device: str, gpu_gib: float | None = None) -> SweepPlan:
    """Return the configurations of all sweeps, in order and without duplicates.

    Args:
        sources: sweep files, each containing one :class:`Block` or a list of blocks; or single blocks as dicts.
        device: the device that ``auto`` stands for on the machines that will execute the runs.
        gpu_gib: the memory in GiB of the smallest GPU on these machines, or None if they have no GPU.

    Raises:
        YamlFileError: If a file is missing or isn't plain YAML.
        SweepError: If a block or configuration is invalid, two configurations have the same run id, or there is
            nothing to run.
    """
    configs: dict[tuple[str, str], RunConfig] = {}
    too_large: dict[tuple[str, str], RunConfig] = {}
    for source in sources:
        content = source if isinstance(source, dict) else load_yaml(source)
        for number, block in enumerate(content if isinstance(content, list) else [content], start=1):
            try:
                block_model = Block.model_validate(block)
                for config in _expand(block_model, device, gpu_gib):
                    skip = block_model.skip_too_large and gpu_gib and min_peak_gib(config) > gpu_gib
                    group = too_large if skip else configs
                    if group.setdefault((config.study, config.run_id), config) != config:
                        raise SweepError(
                            f"two configurations have the run id {config.run_id}; run them in separate runs"
                            " folders"
                        )
            except (ConfigError, SweepError, ValidationError) as error:
                message = format_errors(error, Block) if isinstance(error, ValidationError) else error
                place = "" if isinstance(source, dict) else f"{source}, block {number}: "
                raise SweepError(f"{place}{message}") from None
    if not configs:
        raise SweepError(f"{', '.join(map(str, sources))}: no configurations")
    return SweepPlan(list(configs.values()), list(too_large.values()))


def _expand(block: Block, device: str, gpu_gib: float | None) -> Iterator[RunConfig]:
    for values in itertools.product(*block.axes.values()):
        fields = block.fixed | dict(zip(block.axes, values, strict=True))
        if fields.get("device", "auto") == "auto":
            fields["device"] = device
        if fields.get("size") == LARGEST:
            fields["size"] = largest_that_fits(fields, gpu_gib)
        yield configure(block.study, **fields)


def peak_gib(config: RunConfig) -> float:
    """Predict the peak memory in GiB of an fp32 baseline step of the run's model.

    If the run has no training step, return 0.
    """
    if not isinstance(config, StepConfig):
        return 0.0
    step = config.step(
        mode="step", precision="fp32", attention="naive", compile="none", optimizer="foreach", device="cuda"
    )
    return peak(step).allocated / 2**30


def min_peak_gib(config: RunConfig) -> float:
    """Predict the peak memory in GiB of a run's smallest measurement; return 0 if the run has no training step.

    The run's other modes and precisions may still be too large. In that case, their rows have the status "oom".
    """
    if not isinstance(config, StepConfig):
        return 0.0
    modes = getattr(config, "modes", list(PHASES) if config.mode == "all" else [config.mode])
    # The forward pass needs less memory in fp32 or TF32 than in bf16, because bf16 requires copies of the weights.
    precision = "tf32" if config.precision == "all" else config.precision
    steps = [config.step(mode=mode, precision=precision, compile="none", device="cuda") for mode in modes]
    return min(peak(step, step.mode).allocated for step in steps) / 2**30


def largest_that_fits(fields: dict, gpu_gib: float | None) -> str:
    """Return the handout's largest size whose step is predicted to fit into the GPU's memory.

    If not even the smallest size fits, or there is no GPU, return the smallest size.
    """

    def fits(size: str) -> bool:
        config = configure(
            "benchmark", size=size, context_length=fields.get("context_length", 512), device="cpu"
        )
        return peak_gib(config) <= MAX_MEMORY_FRACTION * (gpu_gib or 0.0)

    sizes = list(EDITIONS[2025])
    return next((size for size in reversed(sizes) if fits(size)), sizes[0])


def sweep_description(path: Path) -> str | None:
    """Return the comment in a sweep file's first line, or None if there is no such comment.

    In built-in sweeps, this comment says, for example, how long the sweep takes on an H200.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = file.readline(500).strip()
    except OSError:  # load_sweeps reports the error later
        return None
    return first.lstrip("# ").strip() if first.startswith("#") else None
