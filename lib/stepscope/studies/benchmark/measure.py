"""End-to-end benchmarking: from the samples of one run, or of many, to one tidy table of times, rates and
utilisation.
"""
import pandas as pd
import torch

from stepscope.config import StepConfig
from stepscope.step.flops import phase_flops, step_flops
from stepscope.step.summary import summarize
from stepscope.step.timing import WHOLE
from stepscope.step.training_step import Step

LAUNCH_BOUND = 0.10  # of a phase's time: how soon after the host's last launch the GPU is done with it


def peak_memory(step: Step) -> dict[str, float | int]:
    """Parameters, and on a GPU the allocator's peaks in MiB since the step was built."""
    results: dict[str, float | int] = {"parameters": sum(p.numel() for p in step.model.parameters())}
    if step.config.device == "cuda":
        results |= {"peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
                    "peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20}
    return results


def with_rates(times: pd.DataFrame, config: StepConfig, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Add to one run's summary (a row a phase, see ``summary.summarize``) what its times amount to.

    Added columns: ``flops`` (matrix products of the phase), ``tflops`` (achieved, TFLOP/s), ``utilisation``
    (of the ceiling that the same run measured for its precision; the whole step's is the model FLOPs
    utilisation of the PaLM paper's appendix B, against the measured ceiling in place of a data sheet's) and
    ``tokens_per_s``.
    """
    flops = phase_flops(config)
    flops[WHOLE] = step_flops(config)
    ceiling = ceilings.set_index("ceiling")["value"].get(f"matmul_{config.precision}")
    times = times.assign(flops=times["phase"].map(flops))
    times["tflops"] = times["flops"] / times["median_ms"] / 1e9
    times["utilisation"] = times["tflops"] / ceiling if ceiling else float("nan")
    times["tokens_per_s"] = config.batch_size * config.context_length / times["median_ms"] * 1e3
    return times


def with_launch_bound(times: pd.DataFrame) -> pd.DataFrame:
    """Add ``launch_bound_share`` to one run's summary: 1 for a phase that is launch-bound, else 0; for the
    whole step the share of its phases' time that is so.

    A phase is launch-bound when the GPU is done with it less than 10% of its time after the host has enqueued
    it: the GPU kept up with the host and waited for its launches. (That the host was busy enqueuing all the
    while would not tell: a host far ahead blocks on the full launch queue, and then the GPU has that queue, a
    thousand launches, still to do.)
    """
    bound = (times["trailing_ms"] < LAUNCH_BOUND * times["median_ms"]).astype(float)
    phases = times["phase"] != WHOLE
    weights = times["median_ms"].where(phases, 0.0)
    return times.assign(launch_bound_share=bound.where(phases, (bound * weights).sum() / weights.sum()))


def run_times(samples: pd.DataFrame, ceilings: pd.DataFrame, config: StepConfig) -> pd.DataFrame:
    """One run's table: a row a phase and one for the whole step, columns of ``summarize`` and the two
    functions above.

    A CPU's host waits for each operation, so there nothing is launch-bound and the column is left out.
    """
    times = with_rates(summarize(samples, ["phase"]), config, ceilings)
    return with_launch_bound(times) if config.device == "cuda" else times


def reading(times: pd.DataFrame) -> str:
    """What one run's table says, in a sentence or two of markdown."""
    whole = times[times["phase"] == WHOLE].iloc[0]
    text = (f"One step takes **{whole.median_ms:.4g} ms** (median of {whole.n}; 95% interval of the median"
            f" {whole.ci_low_ms:.4g} to {whole.ci_high_ms:.4g} ms), {whole.tokens_per_s:,.0f} tokens/s,"
            f" {whole.tflops:.3g} TFLOP/s.")
    phases = times[times["phase"] != WHOLE]
    if len(phases) > 1:
        longest = phases.loc[phases["median_ms"].idxmax()]
        share = longest.median_ms / phases["median_ms"].sum()
        text += f" Its longest phase is {longest.phase}, {share:.0%} of the phases' time."
    flagged = times[times["flags"] != ""]
    if len(flagged):
        unsteady = "; ".join(f"{row.phase} ({row.flags})" for row in flagged.itertuples())
        text += f" Not steady: {unsteady}."
    return text
