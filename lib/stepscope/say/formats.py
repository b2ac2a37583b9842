"""An answer is made from tables: its words, the numbers in it, the tables beside it and the runs it stands on.

This module has the type, and the wording that all answers share; a study's answers are in the module of its name. An
adjective is a decision on data: it is made by a function here or there, never written into a sentence as it stands.
"""
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pandas as pd


NEARLY = 0.05  # two figures this close count as the same in words
MODE_WORDS = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


@dataclass
class Answer:
    """The answer to one question.

    ``text`` and ``finding`` are markdown; ``finding`` is the one sentence for the first page, empty when there is none.
    ``tables`` are (caption, table) with text ready to print; ``figures`` are (file stem, caption); ``runs`` are the
    run folders, relative to the runs folder, that the numbers were computed from.
    """

    key: str
    question: str
    text: str
    finding: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)


def no_data(key: str, question: str, sweep: str) -> Answer:
    """What stands in a question's place while nothing has been measured for it."""
    return Answer(key, question, f"Not answered here: this runs folder has no records for it. `stepscope sweep {sweep}`"
                                 " measures them.")


def runs_of(frame: pd.DataFrame) -> list[str]:
    """Run folders of a table's rows."""
    return sorted(set(frame["study"] + "/" + frame["run_id"]))


def number(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, with no exponent and a comma for thousands; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def ms(value: float) -> str:
    return f"{number(value)} ms" if abs(value) < 1e4 else f"{number(value / 1e3)} s"


def percent(share: float, decimals: int = 0) -> str:
    return f"{share:.{decimals}%}"


def plus_minus(mean: float, std: float) -> str:
    """Mean and standard deviation, both to the decimals of the deviation's second digit (two at most, three below 10)."""
    if not math.isfinite(mean):
        return "–"
    decimals = 3 if mean < 10 else 2
    return f"{mean:,.{decimals}f} ± {std:,.{decimals}f}" if math.isfinite(std) else f"{mean:,.{decimals}f}"


def span(values: Iterable[float], unit: str = "", digits: int = 3) -> str:
    """"a to b", or one number where both print the same."""
    low, high = number(min(values), digits), number(max(values), digits)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def listing(items: Iterable[str]) -> str:
    items = list(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def capital(words: str) -> str:
    """The words with a capital first letter, the others as they are."""
    return words[0].upper() + words[1:]


def count(n: int, noun: str) -> str:
    """"no runs", "1 run", "2 runs"."""
    return f"{n or 'no'} {noun}{'' if n == 1 else 's'}"


def neighbours_words(frame: pd.DataFrame, effect: str) -> str:
    """A sentence on the runs of a table that had others beside them on their machine, and what that may do; empty if none had."""
    runs = frame.drop_duplicates("run_id")
    busy = int((runs["beside"] > 0).sum()) if "beside" in runs else 0
    which = f"each of the {count(len(runs), 'run')}" if busy == len(runs) > 1 else f"{busy} of {count(len(runs), 'run')}"
    return f"Beside {which} others went on on the same machine, {effect}." if busy else ""


def apart(a: pd.Series, b: pd.Series) -> bool:
    """Whether two medians differ by more than both their confidence intervals allow (the intervals do not overlap)."""
    return bool(a["ci_low_ms"] > b["ci_high_ms"] or b["ci_low_ms"] > a["ci_high_ms"])


def interval_cells(rows: pd.DataFrame) -> list[str]:
    """"median [low, high]" of each row."""
    return [f"{number(row.median_ms)} [{number(row.ci_low_ms)}, {number(row.ci_high_ms)}]" for row in rows.itertuples()]


def plural(n: int, one: str, many: str) -> str:
    """The word for one thing, or for several or none."""
    return one if n == 1 else many


def either(condition: bool, this: str, that: str) -> str:
    """One of two words, by a named condition."""
    return this if condition else that


def or_none(n: int) -> str:
    """A number of things; "none" for 0."""
    return str(n) if n else "none"


def percent_span(shares: Iterable[float], decimals: int = 0) -> str:
    """"a% to b%", or one where both print the same."""
    low, high = percent(min(shares), decimals), percent(max(shares), decimals)
    return low if low == high else f"{low} to {high}"


def percent_range(shares: Iterable[float], decimals: int = 0) -> str:
    """"a% to b%", also where both print the same."""
    return f"{percent(min(shares), decimals)} to {percent(max(shares), decimals)}"


def precision(name: str) -> str:
    """A precision as it is written: fp32, TF32, bf16, fp16."""
    return name.upper() if name == "tf32" else name


def percent_change(share: float) -> str:
    """A change in whole percent, with its sign unless it rounds to none."""
    return "0%" if abs(share) < 0.005 else f"{share:+.0%}"


def comma(loop) -> str:
    """In a template's loop: what stands between an item and the next, so that a list reads "a, b and c"."""
    return "" if loop.last else " and " if loop.revindex == 2 else ", "


FILTERS = {function.__name__: function for function in
           (number, ms, percent, plus_minus, span, listing, capital, count, plural, either, or_none, percent_span,
            percent_range, precision, percent_change, comma)}
FILTERS["mode"] = lambda mode: MODE_WORDS.get(mode, mode)
