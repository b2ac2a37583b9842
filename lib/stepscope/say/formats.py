"""How numbers, lists and counts are written, in words and in tables alike: the filters of templates."""
import math
import re
from collections.abc import Callable, Iterable, Mapping

import pandas as pd

EXACT = 1e-12  # an error that is none, but for the arithmetic that computes it
NEARLY = 0.05  # two figures this close count as the same in words
MODE_WORDS = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


def runs_of(frame: pd.DataFrame) -> list[str]:
    """Run folders of a table's rows."""
    return sorted(set(frame["study"] + "/" + frame["run_id"]))


def number(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, with no exponent and a comma for thousands; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 is 10.0, with one decimal
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def ms(value: float) -> str:
    return f"{number(value)} ms" if abs(value) < 1e4 else f"{number(value / 1e3)} s"


def percent(share: float, decimals: int = 0) -> str:
    """A share in percent, to so many decimals: 0% only of none, and what would print as that to its first
    digit."""
    return _no_false_zero(f"{share:.{decimals}%}", share)


def _no_false_zero(printed: str, share: float) -> str:
    """A share as it was printed, but where that is 0 to its first digit, with a + if there was one."""
    if not re.fullmatch(r"[-+]?[0.]+%", printed):
        return printed
    return "0%" if abs(share) < EXACT else f"{'+' * printed.startswith('+')}{number(100 * share, 1)}%"


def share(value: float, digits: int = 2) -> str:
    """A share in percent, to so many significant digits; a dash for none."""
    return f"{number(100 * value, digits)}%" if math.isfinite(value) else number(value)


def plus_minus(mean: float, std: float) -> str:
    """Mean, and standard deviation to two digits."""
    return f"{number(mean)} ± {number(std, 2)}" if math.isfinite(std) else number(mean)


def span(values: Iterable[float], unit: str = "", digits: int = 3) -> str:
    """"a to b", or one number where both print the same."""
    low, high = number(min(values), digits), number(max(values), digits)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def listing(items: Iterable[str | int]) -> str:
    """"a, b and c"; whole numbers with a comma for thousands."""
    words = [f"{int(item):,}" if str(item).isdecimal() else str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"


def capital(words: str) -> str:
    """The words with a capital first letter, the others as they are."""
    return words[0].upper() + words[1:]


def count(n: int, noun: str) -> str:
    """"no runs", "1 run", "2 runs", "2 processes"."""
    return f"{f'{n:,}' if n else 'no'} {noun}{'' if n == 1 else 'es' if noun.endswith('s') else 's'}"


def apart(a: pd.Series, b: pd.Series) -> bool:
    """Whether two medians differ by more than both their confidence intervals allow (the intervals do not
    overlap)."""
    return bool(a["ci_low_ms"] > b["ci_high_ms"] or b["ci_low_ms"] > a["ci_high_ms"])


def with_interval(value: float, low: float, high: float, form: Callable[[float], str] = number) -> str:
    """"value [low, high]", or one where all three print the same; a dash for none."""
    said, ends = form(value), (form(low), form(high))
    return said if ends == (said, said) or not math.isfinite(value) else f"{said} [{ends[0]}, {ends[1]}]"


def interval_cells(rows: pd.DataFrame) -> list[str]:
    """"median [low, high]" of each row."""
    return [with_interval(row.median_ms, row.ci_low_ms, row.ci_high_ms) for row in rows.itertuples()]


def plural(n: int, one: str, many: str) -> str:
    """The word for one thing, or for several or none."""
    return one if n == 1 else many


def either(condition: bool, this: str, that: str) -> str:
    """One of two words, by a named condition."""
    return this if condition else that


def or_none(n: int) -> str:
    """A number of things; "none" for 0."""
    return f"{n:,}" if n else "none"


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


def fixed(value: float, decimals: int = 1) -> str:
    """A number to so many decimals, with a comma for thousands; a dash for none."""
    return f"{value:,.{decimals}f}" if math.isfinite(value) else "–"


def comma(loop) -> str:
    """In a template's loop: what stands between an item and the next, so that a list reads "a, b and c"."""
    return "" if loop.last else " and " if loop.revindex == 2 else ", "


def plain(value: float) -> str:
    """A number as short as it can be said: 61, 60.5."""
    return f"{value:g}"


def thousands(n: int) -> str:
    """A whole number with a comma for thousands."""
    return f"{n:,}"


def points(value: float) -> str:
    """A change of a share, in percentage points with their sign."""
    return f"{value:+.1f}"


def signed_percent(share: float, decimals: int = 0) -> str:
    """A share with its sign, also where that is +; as :func:`percent` where it is small."""
    return _no_false_zero(f"{share:+.{decimals}%}", share)


def change_with_interval(share: float, low: float, high: float) -> str:
    """A change with its interval, or one where all three print the same: "+1.2% [-0.3%, +2.0%]"."""
    return with_interval(share, low, high, lambda value: f"{value:+.1%}".replace("-0.0", "+0.0"))


def percent_change(share: float) -> str:
    """A change in whole percent, with its sign unless it rounds to none."""
    return "0%" if abs(share) < 0.005 else f"{share:+.0%}"


def code(text: str) -> str:
    """A name as code, in which nothing is taken for markup."""
    return f"`{text.replace('`', '')}`"


def signed(value: float) -> str:
    """An error with its sign, to three digits; 0 below what the arithmetic that computes it misses."""
    return "0" if abs(value) < EXACT else f"{value:+.3g}".replace("e-0", "e-")


def tiny(value: float, digits: int = 1) -> str:
    """Three digits, or scientific, with so many decimals, where that is shorter."""
    if value == 0 or 0.001 <= abs(value) < 1e4:
        return format(float(format(value, ".3g")), "g")
    return scientific(value, digits)


def scientific(value: float, digits: int) -> str:
    """With so many decimals, and an exponent without its first 0: "1.5e-7"."""
    return f"{value:.{digits}e}".replace("e-0", "e-").replace("e+0", "e")


def called(keys: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """What some things are called."""
    return [names[key] for key in keys]


def positions(value: float) -> str:
    """A length of sequence: whole below 100,000, then to three digits, from a million on in millions."""
    if math.isnan(value):
        return "–"
    if value < 1e5:
        return f"{int(value):,}"
    return number(value) if value < 1e6 else f"{number(value / 1e6)} million"


def to(low: object, high: object) -> str:
    """"a to b", or one where both print the same."""
    return f"{low}" if f"{low}" == f"{high}" else f"{low} to {high}"


def faster(ratio: float, digits: int = 3) -> str:
    """What a ratio of times, before over after, says: "2.10x faster", "1.30x slower", or "as fast"."""
    low = ratio < 1
    times = number(1 / ratio if low else ratio, digits)
    return "as fast" if times == number(1, digits) else f"{times}x {'slower' if low else 'faster'}"


def gain(ratio: float, digits: int = 3) -> str:
    """:func:`faster` for a table whose header has the word: "2.10x", "1.30x slower", "as fast"."""
    return faster(ratio, digits).removesuffix(" faster") if math.isfinite(ratio) else "–"


def gain_with_interval(ratio: float, low: float, high: float, digits: int = 3) -> str:
    """:func:`gain` with its interval, which has no words where both ends go the same way: "1.30x slower
    [1.20, 1.40]"."""
    if not (math.isfinite(ratio) and math.isfinite(low) and math.isfinite(high)):
        return gain(ratio, digits)
    if low < 1 < high:
        ends = [gain(low, digits), gain(high, digits)]
    else:
        ends = [number(end, digits) for end in sorted((low, high) if low >= 1 else (1 / high, 1 / low))]
    alike = number(max(ratio, 1 / ratio), digits)
    return gain(ratio, digits) if set(ends) <= {alike} else f"{gain(ratio, digits)} [{ends[0]}, {ends[1]}]"


def faster_span(ratios: Iterable[float], digits: int = 3) -> str:
    """"1.12 to 1.17x faster", both ends in full where they go different ways, or one where both print the
    same; "about as fast" where all are within 2% of 1."""
    ends = sorted((min(ratios), max(ratios)), key=lambda ratio: max(ratio, 1 / ratio))
    if ends[1] < 1.02 and ends[1] > 1 / 1.02:
        return "about as fast"
    low, high = (faster(ratio, digits) for ratio in ends)
    return high if low == high else f"{low.removesuffix(high[high.find('x '):])} to {high}"


FILTERS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (number, ms, percent, plus_minus, span, listing, capital, count, plural, either, or_none,
                     percent_span, percent_range, precision, fixed, comma, plain, thousands, points,
                     signed_percent, code, signed, tiny, called, positions, to,
                     percent_change, share, faster, faster_span, gain, with_interval,
                     change_with_interval)
}
FILTERS["mode"] = lambda mode: str(MODE_WORDS.get(mode, mode))
