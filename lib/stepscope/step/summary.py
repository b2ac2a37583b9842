"""From samples to statements: location, spread, and whether the samples can carry a statement at all."""
import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95     # of intervals
NOISY = 0.05          # standard deviation over mean
DRIFT = 0.02          # change from the first sample to the last by Theil-Sen's slope, over the median
GAP = 0.05            # between two groups of samples, over the median


def summarize(samples: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row a group: n, mean, sample standard deviation, median and its bootstrap confidence interval,
    flags.

    Args:
        samples: timing rows (``timing.SAMPLE_COLUMNS``); only timed ones count.
        by: columns that tell the groups; ``phase`` among them.

    Returns columns: by, n, mean_ms, std_ms, median_ms, ci_low_ms, ci_high_ms, enqueue_ms (median),
    trailing_ms (median time by which the GPU ended after the host's last launch), flags (text, empty when
    there are none).
    """
    timed = samples[samples["timed"]].assign(trailing_ms=trailing_ms)
    rows = []
    for key, group in timed.groupby(by, sort=False, observed=True):
        times = group["time_ms"].to_numpy()
        low, high = median_interval(times)
        enqueue, trailing = group["enqueue_ms"].median(), group["trailing_ms"].median()
        rows.append({**dict(zip(by, key if isinstance(key, tuple) else (key,))), "n": len(times),
                     "mean_ms": times.mean(),
                     "std_ms": times.std(ddof=1) if len(times) > 1 else np.nan, "median_ms": np.median(times),
                     "ci_low_ms": low, "ci_high_ms": high, "enqueue_ms": enqueue, "trailing_ms": trailing,
                     "flags": "; ".join(flags(times))})
    return pd.DataFrame(rows)


def trailing_ms(samples: pd.DataFrame) -> pd.Series:
    """How long after the host had enqueued a row's work the GPU finished it, in ms.

    Both clocks start together at a synchronised step, so the lag at a phase's end is the difference of what
    each has summed up by then; the whole step's is its wall time less the time to enqueue it.
    """
    lag = samples["time_ms"] - samples["enqueue_ms"]
    groups = [column for column in ("study", "run_id", "step") if column in samples]
    phases = samples["phase"] != "step"
    return lag.where(~phases, lag.where(phases, 0.0).groupby([samples[column] for column in groups]).cumsum())


def median_interval(times: np.ndarray) -> tuple[float, float]:
    """Percentile bootstrap interval of the median, seeded: the same samples always give the same interval."""
    if len(times) < 2:
        return (np.nan, np.nan)
    interval = stats.bootstrap((times,), np.median, vectorized=True, n_resamples=2000,
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
        found.append(f"noisy: standard deviation is {spread:.0%} of the mean (sample {far + 1} of {len(times)} is"
                     f" {times[far] / median:.2f} times the median)")
    order = np.arange(len(times))
    drift = stats.theilslopes(times, order).slope * (len(times) - 1) / median
    if abs(drift) > DRIFT and stats.kendalltau(order, times).pvalue < 0.01:
        found.append(f"drifting: {drift:+.1%} from first to last sample")
    ordered = np.sort(times)
    gaps = np.diff(ordered)[1:-1]  # two samples at least on either side
    if len(gaps) and gaps.max() > GAP * median:
        split = gaps.argmax() + 2
        within = max(np.ptp(ordered[:split]), np.ptp(ordered[split:]))
        if gaps.max() > 2 * within:
            found.append(f"bimodal: {split} samples near {np.median(ordered[:split]):.4g} ms,"
                         f" {len(times) - split} near {np.median(ordered[split:]):.4g} ms")
    return found
