"""What a report leaves out, in a reader's words: for want of which runs, and what could not be made."""

from collections.abc import Iterable, Iterator
from functools import cache

from stepscope import studies
from stepscope.config import EDITIONS
from stepscope.report.claims import FAILS, HOLDS, NO_DATA, TagResult, collect
from stepscope.report.tables import listed
from stepscope.runs.record import Record

Pages = dict[str, list[TagResult]]  # by a page's title, what became of its tags
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")  # which a size's name tells
# What the reference measures beyond a tour, by the table or sentence that is missing without it.
TOPICS = {
    ("table", "baselines"): "Hugging Face's Llama beside the step",
    ("table", "training_check"): "whether the changes train alike",
    ("table", "which_optimization_longer"): "the changes at a longer context",
    ("figure", "fp8"): "FP8 and larger batches",
    ("claim", "attention_fp32"): "attention in fp32",
    ("table", "attention_long"): "attention at longer sequences",
    ("table", "compiled_model"): "the whole model compiled",
    ("claim", "answer_mixed_memory"): "memory's peaks in bf16",
    ("table", "checkpoint_settings"): "checkpoints",
    ("table", "reach_10b"): "10B on one GPU",
    ("table", "repeats"): "how well times repeat in other processes",
}


def not_measured(pages: Pages, records: list[Record]) -> list[str]:
    """What the reference measures and these runs do not, of the studies that have runs here: sizes, then
    topics."""
    ran = {record.study for record in records}
    lacking = {(one.kind, one.name) for own in pages.values() for one in own if one.why == NO_DATA}
    there = sizes(records)
    return [
        f"the size{'s' * (len(others) > 1)} {listed(others)}"
        for others in [[size for size in EDITIONS[2025] if size not in there]]
        if there and others
    ] + [words for tag, words in TOPICS.items() if tag in lacking and study_of(*tag) in ran]


def sizes(records: list[Record]) -> list[str]:
    """The handout's sizes that were measured, in its order."""
    there = {record.config.get("size") for record in records}
    return [size for size in EDITIONS[2025] if size in there]


def left_out(pages: Pages, records: list[Record]) -> list[str]:
    """What is not said of these runs, and why, in a line a reason."""
    rest = not_measured(pages, records)
    on_cpu = all(record.config["device"] == "cpu" for record in records)
    more = [f"not measured here: {'; '.join(rest)}. stepscope sweep reference measures what is missing"]
    return [*_not_run(pages, records, on_cpu), *more * bool(rest and not on_cpu), *_broken(pages)]


def _not_run(pages: Pages, records: list[Record], on_cpu: bool) -> Iterator[str]:
    """The studies without a run, and of which pages that is some or all."""
    ran = {record.study for record in records}
    lacking = {
        title: {study_of(one.kind, one.name) for one in told if one.why == NO_DATA} - {None} - ran
        for title, told in pages.items()
    }
    if titles := [title for title, missing in lacking.items() if missing]:
        names = [name for name in studies.STUDIES if name in set.union(*lacking.values())]
        sweeps = "cpu" if on_cpu else " ".join(names)
        yield (
            f"left out, whole or in part: {_some(titles)}. No run of {', '.join(names)} is here:"
            f" stepscope sweep {sweeps}"
        )


def _some(names: Iterable[str], most: int = 6, by: str = "; ") -> str:
    shown = [*names]
    return by.join([*shown[:most], *[f"and {len(shown) - most} more"] * (len(shown) > most)])


def _broken(pages: Pages) -> Iterator[str]:
    """How many sentences, tables and pictures could not be made, by page."""
    count = {
        title: sum(one.why not in (HOLDS, NO_DATA, FAILS) for one in told) for title, told in pages.items()
    }
    if found := [f"{number} of {title}" for title, number in count.items() if number]:
        yield f"left out, what could not be made: {_some(found)}"


def study_of(kind: str, name: str) -> str | None:
    """The study whose function a claim, table or figure is; None where it joins studies."""
    place = _known(kind).get(name, "..").split(".")
    return place[2] if place[1] == "studies" else None


@cache
def _known(kind: str) -> dict[str, str]:
    return {name: function.__module__ for name, function in collect(kind).items()}


def differing(configs: list[dict]) -> list[str]:
    """The fields in which configurations of one study differ; a size's name stands for its dimensions, and
    sequences for the longest of them."""
    names = [
        name
        for name in (configs[0] if configs else {})
        if len({str(config.get(name)) for config in configs}) > 1
    ]
    if all(config.get("size", "custom") != "custom" for config in configs):
        names = [name for name in names if name not in DIMENSIONS]
    return [name for name in names if not (name == "context_length" and "sequences" in names)]
