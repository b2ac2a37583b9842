"""Sweep files: YAML that becomes configurations."""
import itertools
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stepscope import PACKAGE, StepscopeError
from stepscope.config import EDITIONS, ConfigError, RunConfig, StepConfig, configure, studies
from stepscope.step.accounting import peak
from stepscope.yaml_files import YamlFileError, load_yaml

ACROSS = PACKAGE / "sweeps"    # of several studies
STUDIES = PACKAGE / "studies"  # of one study each
BLOCK_KEYS = ("study", "fixed", "axes", "skip_too_large")
LARGEST = "LARGEST"  # as a size: the largest that is predicted to fit
MOST_RUNS = 100_000  # of a block: ten values on each of ten axes are a slip of the hand
# Of what a step takes as the assignment writes it, in fp32: what the allocator reserves beyond that, and
# CUDA's context with the kernels that are loaded.
RESERVED, CONTEXT_GIB = 1.25, 3.0
MOST_USED = 0.9  # of a GPU's memory, by the largest model's step


class SweepError(StepscopeError, ValueError):
    """A sweep that cannot start; the text names the file, the place in it, and what was expected."""


@dataclass
class Asked:
    """What sweep files ask for: ``configs``, each once, and ``too_large``, what they leave out."""

    configs: list[RunConfig] = field(default_factory=list)
    too_large: list[RunConfig] = field(default_factory=list)


def find_sweeps(name: str) -> list[Path]:
    """A sweep's files by its path, or by the name of one that ships with stepscope: ``reference``, ``tour``
    or ``2026``, of all studies on a GPU; ``cpu``, of all studies over tiny models; a study's.

    Raises:
        SweepError: there is none.
    """
    path = Path(name)
    shipped = {file.stem: [file] for file in sorted(ACROSS.glob("*.yaml"))}
    shipped |= {"cpu": [STUDIES / study / "sweep_cpu.yaml" for study in studies()]}
    shipped |= {study: [STUDIES / study / "sweep.yaml"] for study in studies()}
    try:
        if path.is_file():  # a folder is none: runs folders have one by each study's name
            return [path]
        if name not in shipped:
            there = "is no regular file" if path.exists() else "there is no such file"
            raise SweepError(f"{path}: {there}; sweeps that ship with stepscope: {', '.join(shipped)}")
    except (OSError, ValueError) as error:  # a name too long, a null byte
        if isinstance(error, SweepError):
            raise
        raise SweepError(f"{name:.80}: cannot be read ({getattr(error, 'strerror', error)})") from None
    return shipped[name]


def load_sweeps(sources: list[Path | dict], device: str, gpu_gib: float | None = None) -> Asked:
    """All configurations of sweep files (or of blocks as such files have them), in their order, each once.

    A file is one block or a list of blocks, a block being ``study`` (a name), ``fixed`` (field: value) and
    ``axes`` (field: list of values); the block stands for the product of its axes, the last axis varying
    fastest. ``edition`` beside ``size`` says which year's handout its names are of, and is no field. With
    ``skip_too_large: true`` what is predicted not to fit into the GPU is left out.

    Args:
        device: what ``auto`` means where they will run.
        gpu_gib: memory of the GPUs there.

    Raises:
        SweepError: no such file, not YAML, another shape than this, or a configuration that is not valid.
    """
    found: dict[tuple[str, str], RunConfig] = {}
    too_large: dict[tuple[str, str], RunConfig] = {}
    for source in sources:
        content = source if isinstance(source, dict) else _read(source)
        for number, block in enumerate(content if isinstance(content, list) else [content], start=1):
            try:
                for config in _expand(block, device, gpu_gib):
                    skip = block.get("skip_too_large") and gpu_gib and peak_gib(config) > gpu_gib
                    group = too_large if skip else found
                    if group.setdefault((config.study, config.run_id), config) != config:
                        raise SweepError(f"two of its configurations have the run id {config.run_id};"
                                         " put them into different runs folders")
            except (ConfigError, SweepError) as error:
                place = "" if isinstance(source, dict) else f"{source}, block {number}: "
                raise SweepError(f"{place}{error}") from None
    if not found:
        raise SweepError(f"{', '.join(map(str, sources))}: asks for no run")
    return Asked(list(found.values()), list(too_large.values()))


def _read(path: Path) -> object:
    try:
        return load_yaml(path)
    except YamlFileError as error:
        raise SweepError(str(error)) from None


def _expand(block: object, device: str, gpu_gib: float | None) -> Iterator[RunConfig]:
    if not isinstance(block, dict) or not isinstance(block.get("study"), str):
        raise SweepError("expected a mapping with study (a name), fixed (field: value) and axes"
                         " (field: list)")
    for key in block:
        if key not in BLOCK_KEYS:
            raise SweepError(f"{key!s:.40}: unknown key; known are {', '.join(BLOCK_KEYS)}")
    if not isinstance(block.get("skip_too_large", False), bool):
        raise SweepError(f"skip_too_large: got {block['skip_too_large']!r:.40}, but expected true or false")
    fixed, axes = block.get("fixed") or {}, block.get("axes") or {}
    _require_fields(fixed, axes)
    if math.prod(map(len, axes.values())) > MOST_RUNS:
        raise SweepError(f"axes: their product is more than {MOST_RUNS:,} runs, but expected at most so many")
    for values in itertools.product(*axes.values()):
        fields = fixed | dict(zip(axes, values, strict=True))
        if fields.get("device", "auto") == "auto":
            fields["device"] = device
        if fields.get("size") == LARGEST:
            fields["size"] = largest_that_fits(fields, gpu_gib)
        yield configure(block["study"], **fields)


def _require_fields(fixed: object, axes: object) -> None:
    for key, mapping in (("fixed", fixed), ("axes", axes)):
        if not isinstance(mapping, dict):
            raise SweepError(f"{key}: got {reprlib.repr(mapping)}, but expected a mapping from field names")
        for name, values in mapping.items():
            if not isinstance(name, str) or name == "study":
                raise SweepError(f"{key}: got {name!r:.40}, but expected names of fields"
                                 " (study stands beside fixed and axes)")
            if key == "axes" and (not isinstance(values, list) or not values):
                raise SweepError(f"axes.{name}: got {reprlib.repr(values)}, but expected a list of one or"
                                 " more values")
            if key == "axes" and name in fixed:  # type: ignore[operator]
                raise SweepError(f"{name}: given both in fixed and in axes; leave one of them out")


def peak_gib(config: RunConfig) -> float:
    """Predicted peak of a run's step as the assignment writes it, in fp32; 0 where a run is of no step."""
    if not isinstance(config, StepConfig):
        return 0.0
    step = config.step(mode="step", precision="fp32", attention="naive", compile="none",
                       optimizer="foreach", device="cuda")
    return peak(step).allocated / 2**30


def needed_gib(config: RunConfig) -> float:
    """GPU memory that a run is given: what fp32's step, which takes more than any other, is predicted to
    need, where its study says nothing else."""
    if config.gpu_gib is not None:
        return config.gpu_gib
    assert isinstance(config, StepConfig)
    return peak_gib(config) * RESERVED + CONTEXT_GIB


def largest_that_fits(fields: dict, gpu_gib: float | None) -> str:
    """Of the handout's sizes the largest whose step is predicted to fit; without a GPU, the smallest."""
    def fits(size: str) -> bool:
        config = configure("benchmark", size=size, context_length=fields.get("context_length", 512),
                           device="cpu")
        return peak_gib(config) <= MOST_USED * (gpu_gib or 0.0)

    sizes = list(EDITIONS[2025])
    return next((size for size in reversed(sizes) if fits(size)), sizes[0])


def said_before(path: Path) -> str | None:
    """What a sweep file's first line says of it, such as how long it took on an H200."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(500).strip()
    return first.lstrip("# ").strip() if first.startswith("#") else None
