"""End-to-end benchmarking: from the samples of one run, or of many, to one tidy table of times, rates and utilisation."""
import pandas as pd
import torch

from stepscope.config import RunConfig, configure
from stepscope.step.rates import with_launch_bound, with_rates
from stepscope.step.training_step import Step
from stepscope.runs.store import Record, Store, load_table, runs_frame
from stepscope.step.summary import summarize
from stepscope.step.timing import WHOLE


def peak_memory(step: Step) -> dict[str, float | int]:
    """Parameters, and on a GPU the allocator's peaks so far in MiB."""
    results: dict[str, float | int] = {"parameters": sum(p.numel() for p in step.model.parameters())}
    if step.config.device == "cuda":
        results |= {"peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
                    "peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20}
    return results


def run_times(samples: pd.DataFrame, ceilings: pd.DataFrame, config: RunConfig) -> pd.DataFrame:
    """One run's table: a row a phase and one for the whole step, columns of ``summarize`` and the two functions above.

    A CPU's host waits for each operation, so there nothing is launch-bound and the column is left out.
    """
    times = with_rates(summarize(samples, ["phase"]), config, ceilings)
    return with_launch_bound(times) if config.device == "cuda" else times


def all_times(store: Store, records: list[Record]) -> pd.DataFrame:
    """The tidy table of a whole store: a row for each run and phase with the run's configuration and results.

    Runs that ended out of memory have one row, phase ``step``, without times.
    """
    records = [record for record in records if record.study == "benchmark" and record.done]
    if not records:
        return pd.DataFrame()
    samples, ceilings = load_table(store, records, "samples"), load_table(store, records, "ceilings")
    runs, frames = runs_frame(records), []
    for record in records:
        if record.status == "ok":
            config = configure(**record.config)
            own = ceilings[ceilings["run_id"] == record.run_id]
            frames.append(run_times(samples[samples["run_id"] == record.run_id], own, config).assign(run_id=record.run_id))
        else:
            frames.append(pd.DataFrame([{"run_id": record.run_id, "phase": WHOLE}]))
    return runs.merge(pd.concat(frames, ignore_index=True), on="run_id", validate="one_to_many")


def reading(times: pd.DataFrame) -> str:
    """What one run's table says, in a sentence or two of markdown."""
    whole = times[times["phase"] == WHOLE].iloc[0]
    text = (f"One step takes **{whole.median_ms:.4g} ms** (median of {whole.n}; 95% interval of the median {whole.ci_low_ms:.4g}"
            f" to {whole.ci_high_ms:.4g} ms), {whole.tokens_per_s:,.0f} tokens/s, {whole.tflops:.3g} TFLOP/s.")
    phases = times[times["phase"] != WHOLE]
    if len(phases) > 1:
        longest = phases.loc[phases["median_ms"].idxmax()]
        text += f" Its longest phase is {longest.phase}, {longest.median_ms / phases['median_ms'].sum():.0%} of the phases' time."
    flagged = times[times["flags"] != ""]
    if len(flagged):
        text += " Not steady: " + "; ".join(f"{row.phase} ({row.flags})" for row in flagged.itertuples()) + "."
    return text
