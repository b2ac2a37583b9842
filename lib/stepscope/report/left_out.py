"""What a report leaves out, in a line a reason: of which pages, and for want of which runs."""
from collections.abc import Iterable, Iterator
from functools import cache

from stepscope import studies
from stepscope.report.claims import FAILS, HOLDS, NO_DATA, TagResult, collect
from stepscope.runs.record import Record
from stepscope.runs.sweep_file import find_sweeps, load_sweeps

Pages = dict[str, list[TagResult]]  # by a page's title, what became of its tags
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")  # which a size's name tells


def left_out(pages: Pages, records: list[Record]) -> list[str]:
    """What is not said of these runs, and why.

    A page of a study without a run lacks that study; any other lacks what the reference varies and these runs
    do not.
    """
    ran = {record.study for record in records}
    not_run: dict[str, set[str]] = {}
    too_alike: dict[str, set[str]] = {}
    for title, told in pages.items():
        lacking = {study for one in told if one.why == NO_DATA and (study := study_of(one.kind, one.name))}
        if lacking - ran:
            not_run[title] = lacking - ran
        elif lacking:
            too_alike[title] = lacking
    return [*_not_run(not_run), *_too_alike(too_alike, records), *_not_so(pages)]


def _not_run(pages: dict[str, set[str]]) -> Iterator[str]:
    if pages:
        names = _in_order(set.union(*pages.values()))
        yield (f"left out, whole or in part: {_some(pages)}. No run of {', '.join(names)} is here:"
               f" stepscope sweep {' '.join(names)}")


def _too_alike(pages: dict[str, set[str]], records: list[Record]) -> Iterator[str]:
    if pages:
        names = _in_order(set.union(*pages.values()))
        alike = {name: one for name in names if (one := _alike(name, records))}
        why = "; ".join(f"{name} in {_some(one, 3, ', ')}" for name, one in alike.items())
        among = f" where these are alike: {why}" if why else ""
        yield f"left out in part: {_some(pages)}. They need runs that differ{among}"


def _some(names: Iterable[str], most: int = 6, by: str = "; ") -> str:
    listed = [*names]
    return by.join([*listed[:most], *[f"and {len(listed) - most} more"] * (len(listed) > most)])


def _not_so(pages: Pages) -> Iterator[str]:
    """How many claims do not hold, and how many of all could not be made, by page."""
    whys = {title: [one.why for one in told if one.why not in (HOLDS, NO_DATA)]
            for title, told in pages.items()}
    for words, fails in (("that do not hold of these runs", True), ("that could not be made", False)):
        count = {title: sum((why == FAILS) is fails for why in own) for title, own in whys.items()}
        if found := [f"{number} of {title}" for title, number in count.items() if number]:
            yield f"left out, sentences {words}: {_some(found)}"


def study_of(kind: str, name: str) -> str | None:
    """The study whose function a claim, table or figure is; None where it joins studies."""
    place = _known(kind).get(name, "..").split(".")
    return place[2] if place[1] == "studies" else None


@cache
def _known(kind: str) -> dict[str, str]:
    return {name: function.__module__ for name, function in collect(kind).items()}


def _in_order(names: Iterable[str]) -> list[str]:
    return [name for name in studies.STUDIES if name in names]


def _alike(study: str, records: list[Record]) -> list[str]:
    """The fields that the reference varies and these runs of a study do not."""
    here = [record.config for record in records if record.study == study]
    asked = [config.model_dump() for config in load_sweeps([*find_sweeps("reference")], "cuda").configs
             if config.study == study]
    on_cpu = all(config["device"] == "cpu" for config in here)
    return ["device (cpu)"] * on_cpu + [
        name.replace("_", " ") for name in differing(asked) if name not in differing(here)]


def differing(configs: list[dict]) -> list[str]:
    """The fields in which configurations of one study differ; a size's name stands for its dimensions, and
    sequences for the longest of them."""
    names = [name for name in (configs[0] if configs else {})
             if len({str(config.get(name)) for config in configs}) > 1]
    if all(config.get("size", "custom") != "custom" for config in configs):
        names = [name for name in names if name not in DIMENSIONS]
    return [name for name in names if not (name == "context_length" and "sequences" in names)]
