"""From samples to statements: location, spread, and whether the samples can carry a statement at all."""
import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from stepscope.step.timing import WHOLE

CONFIDENCE = 0.95     # of intervals
NOISY = 0.05          # standard deviation over mean
DRIFT = 0.02          # change from the first sample to the last by Theil-Sen's slope, over the median
GAP = 0.05            # between two groups of samples, over the median
GOES_ON = 0.10        # of a step: for how long the GPU goes on after the last launch in one of two kinds
UNLIKE_CLOCKS = 0.015  # difference of two median SM clocks over the larger: two of NVML's steps of 15 MHz


def summarize(samples: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row a group: n, mean, sample standard deviation, median and its bootstrap confidence interval,
    flags.

    Args:
        samples: timing rows (``timing.SAMPLE_COLUMNS``); only timed ones count.
        by: columns that tell the groups; ``phase`` among them.

    Returns columns: by, n, mean_ms, std_ms, median_ms, ci_low_ms, ci_high_ms, enqueue_ms (median),
    trailing_ms (median time by which the GPU ended after the host's last launch), sm_clock_mhz (median of the
    SM clock after each step; nan where it was not read) and sm_clock_least_mhz, flags (text, empty when there
    are none).
    """
    timed = samples[samples["timed"]].assign(trailing_ms=trailing_ms)
    rows = []
    for key, group in timed.groupby(by, sort=False, observed=True):
        times = group["time_ms"].to_numpy()
        low, high = median_interval(times)
        enqueue, trailing = group["enqueue_ms"].median(), group["trailing_ms"].median()
        clocks = group["sm_clock_mhz"]
        rows.append({**dict(zip(by, key if isinstance(key, tuple) else (key,))), "n": len(times),
                     "mean_ms": times.mean(),
                     "std_ms": times.std(ddof=1) if len(times) > 1 else np.nan, "median_ms": np.median(times),
                     "ci_low_ms": low, "ci_high_ms": high, "enqueue_ms": enqueue, "trailing_ms": trailing,
                     "sm_clock_mhz": clocks.median(), "sm_clock_least_mhz": clocks.min(),
                     "flags": "; ".join(flags(times))})
    return pd.DataFrame(rows)


def trailing_ms(samples: pd.DataFrame) -> pd.Series:
    """How long after the host had enqueued a row's work the GPU finished it, in ms.

    Both clocks start together at a synchronised step, so the lag at a phase's end is the difference of what
    each has summed up by then; the whole step's is its wall time less the time to enqueue it.
    """
    lag = samples["time_ms"] - samples["enqueue_ms"]
    groups = [column for column in ("study", "run_id", "step") if column in samples]
    phases = samples["phase"] != WHOLE
    return lag.where(~phases, lag.where(phases, 0.0).groupby([samples[column] for column in groups]).cumsum())


def median_interval(times: np.ndarray) -> tuple[float, float]:
    """Percentile bootstrap interval of the median, seeded: the same samples always give the same interval."""
    return (np.nan, np.nan) if len(times) < 2 else _bootstrapped(np.asarray(times, float).tobytes())


@functools.lru_cache(maxsize=2**15)  # several tables and answers ask of the same samples
def _bootstrapped(times: bytes) -> tuple[float, float]:
    interval = stats.bootstrap((np.frombuffer(times),), np.median, vectorized=True, n_resamples=2000,
                               confidence_level=CONFIDENCE,
                               method="percentile", rng=np.random.default_rng(0)).confidence_interval
    return float(interval.low), float(interval.high)


def ratio_interval(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Percentile bootstrap interval of the ratio of two medians, either side resampled on its own; seeded
    likewise.
    """
    if min(len(above), len(below)) < 2:
        return (np.nan, np.nan)
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(times, (2000, len(times))), axis=1) for times in (above, below)]
    low, high = np.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def unlike_clocks(first_mhz, second_mhz):
    """Whether two median SM clocks (numbers, arrays or columns; MHz) differ by more than
    :data:`UNLIKE_CLOCKS`, so that a ratio of times taken at them is partly one of clocks. False where a clock
    is not known.
    """
    larger = np.maximum(first_mhz, second_mhz)
    return abs(first_mhz - second_mhz) > UNLIKE_CLOCKS * larger


def columns_unlike(rows: pd.DataFrame, first: str, second: str) -> pd.Series:
    """:func:`unlike_clocks` of two columns, which may be missing."""
    clocks = rows.reindex(columns=[first, second]).astype(float)
    return unlike_clocks(clocks[first], clocks[second])


def pairs_of_clocks(first_mhz: pd.Series, second_mhz: pd.Series) -> dict[str, int] | None:
    """Of pairs of SM clocks (MHz, NaN where not read), how many were ``read`` on both sides and how many of
    these are ``unlike`` (:func:`unlike_clocks`); None where none was."""
    both = pd.DataFrame({"first": first_mhz, "second": second_mhz}, dtype=float).dropna()
    if both.empty:
        return None
    return {"read": len(both), "unlike": int(unlike_clocks(both["first"], both["second"]).sum())}


def spread_of_processes(times: Sequence[np.ndarray]) -> dict[str, float | int]:
    """How far medians of one cell are apart within a process and between processes.

    Args:
        times: timed steps of one cell in ms, an array for each process.

    Returns ``processes``; ``median_ms``, the median of their medians; ``within_share``, half the width of a
    process's own 95% interval over its median, the median of all; ``between_share``, the standard deviation
    of the medians' logarithms; ``range_share``, the largest median over the smallest, less 1.
    """
    medians = np.array([np.median(of_process) for of_process in times])
    halves = [(high - low) / 2 / np.median(of_process) for of_process in times
              for low, high in [median_interval(of_process)]]
    return {"processes": len(times), "median_ms": float(np.median(medians)),
            "within_share": float(np.median(halves)),
            "between_share": float(np.log(medians).std(ddof=1)) if len(times) > 1 else np.nan,
            "range_share": float(medians.max() / medians.min() - 1) if len(times) > 1 else np.nan}


def ratio_between_processes(above: Sequence[np.ndarray],
                            below: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """The ratio of two cells' times, each measured in several processes, and its 95% interval.

    A cell's time is the median over processes of a process's median. The interval is a percentile
    bootstrap's, hierarchical as the samples are: processes are drawn, then steps within each that was drawn
    (Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013; Davison and Hinkley, Bootstrap
    Methods and their Application, 1997, section 3.8). Seeded. nan for the interval where a side has fewer
    than two processes.
    """
    location = [float(np.median([np.median(times) for times in side])) for side in (above, below)]
    ratio = location[0] / location[1]
    if min(len(above), len(below)) < 2:
        return ratio, np.nan, np.nan
    rng = np.random.default_rng(0)
    ratios = np.divide(*(_redrawn_locations(side, rng) for side in (above, below)))
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return ratio, float(low), float(high)


def _redrawn_locations(times: Sequence[np.ndarray], rng: np.random.Generator,
                       draws: int = 2000) -> np.ndarray:
    # Medians of steps drawn anew from each process, for every place that a process may be drawn into.
    chosen = rng.integers(len(times), size=(draws, len(times)))
    medians = np.empty(chosen.shape)
    for process, of_process in enumerate(times):
        places = chosen == process
        drawn = rng.choice(np.asarray(of_process), (int(places.sum()), len(of_process)))
        medians[places] = np.median(drawn, axis=1)
    return np.median(medians, axis=1)


def ratio_of_two_processes(above: tuple[float, float, float], below: tuple[float, float, float],
                           between_share: float) -> tuple[float, float, float]:
    """The ratio of two cells' times, each measured in one process, and its 95% interval with the spread
    between processes that was measured elsewhere.

    The logarithms' half widths, both sides' own and the spread's (1.96 standard deviations, for either side),
    add up in squares (the law of propagation of uncertainty, JCGM 100:2008, 5.1.2).

    Args:
        above, below: median, low and high end of its 95% interval within the process, in ms.
        between_share: as :func:`spread_of_processes` gives it, of cells of this kind; nan if not measured,
            and then the ends are nan.
    """
    ratio = above[0] / below[0]
    halves = [np.log(high / low) / 2 for _, low, high in (above, below)]
    width = np.sqrt(sum(half**2 for half in halves) + 2 * (stats.norm.ppf(0.5 + CONFIDENCE / 2)
                                                          * between_share)**2)
    return ratio, float(ratio * np.exp(-width)), float(ratio * np.exp(width))


def borrowed_share(times: pd.DataFrame, spread: pd.DataFrame, same_cells: bool = True) -> pd.Series:
    """The spread between processes for each row of ``times``, measured in one process: that of the same cell
    and phase where it was measured in several, else the widest of whole steps of its kind, by whether the
    GPU goes on for over :data:`GOES_ON` of the step after the last launch. Every run tells that; who waits
    for whom only captures do (``traces.waits``).

    Args:
        times: columns size, context_length, mode, phase, median_ms, trailing_ms.
        spread: columns size, context_length, mode, phase, between_share, host_ahead_share; may be empty.
        same_cells: whether cells of the same names are the same work; if not, only the kind counts.

    Returns ``between_share`` by the index of ``times``; nan where nothing was measured.
    """
    if spread.empty:
        return pd.Series(np.nan, times.index)
    cell = ["size", "context_length", "mode", "phase"]
    exact = {tuple(row[column] for column in cell): row["between_share"] for _, row in spread.iterrows()
             if same_cells}
    whole = spread[spread["phase"] == WHOLE]
    widest = whole.groupby(whole["host_ahead_share"] > GOES_ON)["between_share"].max().to_dict()
    return pd.Series([exact.get(tuple(row[column] for column in cell),
                                widest.get(row["trailing_ms"] > GOES_ON * row["median_ms"], np.nan))
                      for _, row in times.iterrows()], times.index, dtype=float)


def flags(times: np.ndarray) -> list[str]:
    """Why these samples, in the order they were taken, do not stand for one steady state; empty when they
    do.
    """
    if len(times) < 4:
        return ["fewer than 4 samples"]
    found, median = [], np.median(times)
    spread = times.std(ddof=1) / times.mean()
    if spread > NOISY:
        far = np.abs(times - median).argmax()
        found.append(
            f"noisy: standard deviation is {spread:.0%} of the mean (sample {far + 1} of {len(times)} is"
            f" {times[far] / median:.2f} times the median)"
        )
    order = np.arange(len(times))
    drift = stats.theilslopes(times, order).slope * (len(times) - 1) / median
    if abs(drift) > DRIFT and stats.kendalltau(order, times).pvalue < 0.01:
        found.append(f"drifting: {drift:+.1%} from first to last sample")
    ordered = np.sort(times)
    gaps = np.diff(ordered)[1:-1]  # two samples at least on either side
    if len(gaps) and gaps.max() > GAP * median:
        split = gaps.argmax() + 2
        within: float = max(np.ptp(ordered[:split]), np.ptp(ordered[split:]))
        if gaps.max() > 2 * within:
            found.append(f"bimodal: {split} samples near {np.median(ordered[:split]):.4g} ms,"
                         f" {len(times) - split} near {np.median(ordered[split:]):.4g} ms")
    return found
