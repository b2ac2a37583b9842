"""How long runs will take, said before they start: as long as the same ones took when the table was made,
less what they waited for others.

``python -m stepscope.runs.estimate FOLDER...`` writes the table from the runs in some folders, as `make
reference` does from the committed ones. Nothing in it is scaled to another machine.
"""
import csv
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from stepscope.config import SIZES, Dimensions, RunConfig, configure
from stepscope.runs.record import Record
from stepscope.runs.store import Store

TABLE = Path(__file__).with_name("seconds.csv")
COLUMNS = ("machine", "device", "study", "shape", "run_id", "seconds")
CPU = "a CPU with 2 cores"  # what the committed table's CPU runs had


def rows_of(records: Iterable[Record]) -> list[dict[str, str]]:
    """The table's rows of these records, as far as they are done."""
    return [{"machine": CPU if record.config["device"] == "cpu" else f"an {record.machine['device_name']}",
             "device": record.config["device"], "study": record.study,
             "shape": configure(**record.config).shape, "run_id": record.run_id,
             "seconds": f"{record.duration_s - waited_s(record):.0f}"}
            for record in records if record.done]


def waited_s(record: Record) -> float:
    """Seconds in which a run that shared its GPU by turns waited for the others: alone it would not."""
    return sum(float(record.results.get(name) or 0) for name in ("turn_s", "others_s"))


@cache
def table() -> tuple[dict[str, str], ...]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


@cache
def _known() -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Seconds by study and run id, and of a GPU's runs their mean by study and shape."""
    of_run, like = {}, defaultdict(list)
    for row in table():
        of_run[row["study"], row["run_id"]] = float(row["seconds"])
        if row["device"] == "cuda":
            like[row["study"], row["shape"]].append(float(row["seconds"]))
    return of_run, {key: fmean(seconds) for key, seconds in like.items()}


def expected_s(config: RunConfig) -> float | None:
    """Seconds of one run where the table was made: its own or, on a GPU, the mean of its study and shape;
    None where neither is known."""
    of_run, like = _known()
    own = of_run.get((config.study, config.run_id))
    if own is not None or config.device == "cpu":
        return own
    return like.get((config.study, config.shape))


def rough_s(config: RunConfig) -> float | None:
    """Seconds of a run whose shape the table does not have: what the least run of its study on such a device
    takes, which is mostly start-up, and what the run nearest by :func:`_work` takes beyond that, times the
    ratio of their work. None where its study was not measured on such a device."""
    rows = [row for row in table() if (row["study"], row["device"]) == (config.study, config.device)]
    if not rows:
        return None
    start_s = min(float(row["seconds"]) for row in rows)
    work = _work(config.shape, config.run_id)
    others = [_work(row["shape"], row["run_id"]) for row in rows]
    ratios = [work / other if work and other else 1.0 for other in others]
    nearest = min(abs(math.log(ratio)) for ratio in ratios)
    near = [(float(row["seconds"]), ratio) for row, ratio in zip(rows, ratios, strict=True)
            if abs(math.log(ratio)) == nearest]
    return start_s + fmean((seconds - start_s) * ratio for seconds, ratio in near)


def _work(shape: str, run_id: str) -> float | None:
    """Multiplications of the blocks' matrices over one sequence, by which runs of a study are like each
    other; None for what is no model."""
    numbers = SIZES.get(shape) or re.fullmatch(r"d(\d+) f(\d+) l(\d+) h(\d+)", shape)
    context = re.search(r"-ctx(\d+)-", run_id)
    if numbers is None or context is None:
        return None
    if isinstance(numbers, re.Match):
        numbers = Dimensions(*map(int, numbers.groups()))
    return numbers.num_layers * numbers.d_model * (4 * numbers.d_model + 3 * numbers.d_ff) * int(context[1])


def left_s(todo: Sequence[RunConfig], done: Sequence[tuple[RunConfig, float]]) -> float | None:
    """Seconds that these runs will take, by the pace of those done: ``done`` has each with its seconds.

    None where nothing is known of any of them.
    """
    both = [(seconds, known) for config, seconds in done if (known := expected_s(config)) is not None]
    pace = sum(took for took, _ in both) / sum(known for _, known in both) if both else 1.0
    mean = fmean(seconds for _, seconds in done) if done else None
    each = [(mean if mean is not None else rough_s(config)) if (known := expected_s(config)) is None
            else pace * known for config in todo]
    told = [seconds for seconds in each if seconds is not None]
    return sum(told) * len(each) / len(told) if told else None


def said_before(todo: Sequence[RunConfig]) -> str:
    """How many runs there are and how long they will take, as far as the table knows, in words."""
    runs = f"{len(todo)} run{'s' if len(todo) > 1 else ''}"
    known = [seconds for config in todo if (seconds := expected_s(config)) is not None]
    rough = [seconds for config in todo if expected_s(config) is None
             and (seconds := rough_s(config)) is not None]
    if not known and not rough:
        after = "; after the first the progress says it of the rest" if len(todo) > 1 else ""
        return f"{runs}: nothing is known yet of how long that takes{after}"
    where = next(row["machine"] for row in table() if row["device"] == todo[0].device)
    counted = len(known) + len(rough)
    which = "" if counted == len(todo) else f" for {counted} of them"
    how = "about"
    if rough:
        how = "roughly"
        which += (f", scaled from other shapes{'' if not known else f' for {len(rough)}'}:"
                  " it may be several times as long")
    return f"{runs}: {how} {minutes(sum(known) + sum(rough))} on {where}{which}"


def minutes(seconds: float) -> str:
    """A time as it is said: ``50 s``, ``12 min``, ``2 h 10 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 120 else f"{whole // 60} h {whole % 60} min"


def write(folders: Iterable[Path], to: Path = TABLE) -> None:
    """The table with the runs of some folders in it, in place of what it had of the same; others stay."""
    rows = [row for folder in folders for row in rows_of(Store(folder).records()[0])]
    made_anew = {(row["study"], row["run_id"]) for row in rows}
    kept = [row for row in table() if (row["study"], row["run_id"]) not in made_anew]
    with to.open("w", encoding="utf-8", newline="") as file:
        made = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        made.writeheader()
        made.writerows(sorted([*rows, *kept], key=lambda row: [row[name] for name in COLUMNS]))


if __name__ == "__main__":
    write(map(Path, sys.argv[1:]))
