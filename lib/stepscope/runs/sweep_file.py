"""Sweep files: YAML that becomes configurations."""
import itertools
import math
import reprlib
from collections.abc import Iterator
from pathlib import Path

from stepscope import PACKAGE, StepscopeError
from stepscope.config import ConfigError, RunConfig, configure, needs_edition, studies
from stepscope.step.accounting import MIB, on_gpu, peak
from stepscope.yaml_files import YamlFileError, load_yaml

SHIPPED = PACKAGE / "studies"
ACROSS = ("cpu", "reference", "2026")  # names of sweeps that are of several studies
BLOCK_KEYS = ("study", "fixed", "axes")
TOUR_SIZES = ("small", "medium", "large", "xl", "2.7B")  # one of them is the tour's largest
MOST_USED = 0.9  # of a GPU's memory by what is predicted; the CUDA context and the allocator's gaps are not
MOST_RUNS = 100_000  # of a block: ten values on each of ten axes are a slip of the hand


class SweepError(StepscopeError, ValueError):
    """A sweep that cannot start; the text names the file, the place in it, and what was expected."""


def load_sweep(path: Path, device: str = "auto") -> list[RunConfig]:
    """All configurations of a sweep file, in its order, each once.

    The file is one block or a list of blocks, a block being ``study`` (a name), ``fixed`` (field: value) and
    ``axes`` (field: list of values); the block stands for the product of its axes, the last axis varying
    fastest. ``edition`` beside ``size`` says which edition of the handout's names it has, and is no field.

    Args:
        device: what ``auto`` means where they will run.

    Raises:
        SweepError: no such file, not YAML, another shape than this, or a configuration that is not valid.
    """
    content = _read(Path(path))
    configs: dict[tuple[str, str], RunConfig] = {}
    for number, block in enumerate(content if isinstance(content, list) else [content], start=1):
        try:
            for config in _expand(block, device):
                if configs.setdefault((config.study, config.run_id), config) != config:
                    raise SweepError(f"two of its configurations have the run id {config.run_id};"
                                     " put them into different runs folders")
        except (ConfigError, SweepError) as error:
            raise SweepError(f"{path}, block {number}: {error}") from None
    if not configs:
        raise SweepError(f"{path}: asks for no run")
    return list(configs.values())


def _read(path: Path) -> object:
    if not path.exists():
        shipped = ", ".join(sorted({sweep_name(file) for file in SHIPPED.glob("*/sweep.yaml")} | {*ACROSS}))
        raise SweepError(f"{path}: cannot be read (No such file or directory);"
                         f" sweeps that ship with stepscope: {shipped}")
    try:
        return load_yaml(path)
    except YamlFileError as error:
        raise SweepError(str(error)) from None


def _expand(block: object, device: str) -> Iterator[RunConfig]:
    if not isinstance(block, dict) or not isinstance(block.get("study"), str):
        raise SweepError("expected a mapping with study (a name), fixed (field: value) and axes"
                         " (field: list)")
    for key in block:
        if key not in BLOCK_KEYS:
            raise SweepError(f"{key!s:.40}: unknown key; known are {', '.join(BLOCK_KEYS)}")
    fixed, axes = block.get("fixed") or {}, block.get("axes") or {}
    for key, mapping in (("fixed", fixed), ("axes", axes)):
        if not isinstance(mapping, dict):
            raise SweepError(f"{key}: got {reprlib.repr(mapping)}, but expected a mapping from field names")
        for name in mapping:
            if not isinstance(name, str) or name == "study":
                raise SweepError(f"{key}: got {name!r:.40}, but expected names of fields"
                                 " (study stands beside fixed and axes)")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SweepError(f"axes.{name}: got {reprlib.repr(values)}, but expected a list of one or more"
                             " values")
        if name in fixed:
            raise SweepError(f"{name}: given both in fixed and in axes; leave one of them out")
    if math.prod(map(len, axes.values())) > MOST_RUNS:
        raise SweepError(f"axes: their product is more than {MOST_RUNS:,} runs, but expected at most so many")
    for values in itertools.product(*axes.values()):
        fields = fixed | dict(zip(axes, values, strict=True))
        if fields.get("device", "auto") == "auto":
            fields["device"] = device
        yield configure(block["study"], **fields)


def sizes_of_two_editions(path: Path) -> list[str]:
    """Names of sizes that editions of the handout differ about, in the blocks of a sweep file that say no
    ``edition``: they are 2025's.

    Raises:
        SweepError: the file cannot be read.
    """
    content, found = _read(path), []
    for block in content if isinstance(content, list) else [content]:
        parts = [block.get(key) for key in ("fixed", "axes")] if isinstance(block, dict) else []
        fields = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
        sizes = fields.get("size", [])
        if "edition" not in fields:
            found += sizes if isinstance(sizes, list) else [sizes]
    return list(dict.fromkeys(size for size in found if isinstance(size, str) and needs_edition(size)))


def find_sweeps(name: str) -> list[Path]:
    """A sweep's files by its path, or by the name of one that ships with the project: a study's,
    ``reference``, all studies' on a GPU, ``2026``, what that edition of the handout asks beyond the first, or
    ``cpu``, all studies' over tiny models, the soonest done first.
    """
    if Path(name).is_file():  # a folder is none: runs folders have one by each study's name
        return [Path(name)]
    listed = sorted(studies(), key=lambda study: name == "cpu" and study != "benchmark")
    kind = "sweep.yaml" if name == "reference" else f"sweep_{name}.yaml"
    paths = [SHIPPED / name / "sweep.yaml", *(SHIPPED / study / kind for study in listed)]
    return [path for path in paths if path.exists()] or [Path(name)]


def largest_that_fits(memory_mib: float) -> str:
    """Of the tour's sizes the largest whose step at context 512, as the assignment writes it, is predicted
    to fit into a GPU's memory."""
    def peak_mib(size: str) -> float:
        return peak(on_gpu(size=size, context_length=512)).allocated / MIB

    return max((size for size in TOUR_SIZES if peak_mib(size) <= MOST_USED * memory_mib), key=peak_mib,
               default=TOUR_SIZES[0])


def tour(memory_mib: float) -> str:
    """The sweep file of the tour: all studies, on the small model and the largest that fits such a GPU."""
    text = (SHIPPED / "tour.yaml").read_text(encoding="utf-8")
    return text.replace("LARGEST", largest_that_fits(memory_mib))


def sweep_name(path: Path) -> str:
    """What a sweep's file is called where it is kept: by its study, if it lies in a study's folder."""
    if SHIPPED in path.parents:
        return path.parent.name + path.stem.removeprefix("sweep").replace("_", "-")
    return path.stem
