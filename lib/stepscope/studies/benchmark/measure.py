"""What a run of the benchmarking study notes besides its samples, and how its table reads."""
import pandas as pd
import torch

from stepscope.say.formats import ms, number, percent
from stepscope.step.timing import WHOLE
from stepscope.step.training_step import Step


def peak_memory(step: Step) -> dict[str, float | int]:
    """Parameters, and on a GPU the allocator's peaks in MiB since the step was built."""
    results: dict[str, float | int] = {"parameters": sum(p.numel() for p in step.model.parameters())}
    if step.config.device == "cuda":
        results |= {"peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
                    "peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20}
    return results


def reading(times: pd.DataFrame) -> str:
    """What one run's table says, in a sentence or two of markdown."""
    whole = times[times["phase"] == WHOLE].iloc[0]
    text = (f"One step takes **{ms(whole.median_ms)}** (median of {whole.n}; 95% interval of the median"
            f" {number(whole.ci_low_ms)} to {ms(whole.ci_high_ms)}), {number(whole.tokens_per_s)} tokens/s,"
            f" {number(whole.tflops)} TFLOP/s.")
    phases = times[times["phase"] != WHOLE]
    if len(phases) > 1:
        longest = phases.loc[phases["median_ms"].idxmax()]
        share = longest.median_ms / phases["median_ms"].sum()
        text += f" Its longest phase is {longest.phase}, {percent(share)} of the phases' time."
    flagged = times[times["flags"] != ""]
    if len(flagged):
        unsteady = ", ".join(f"{row.phase} ({_kinds(row.flags)})" for row in flagged.itertuples())
        text += f" Not steady: {unsteady}."
    return text


def _kinds(flags: str) -> str:
    """``noisy and drifting`` of the flags' whole text."""
    return " and ".join(flag.partition(":")[0] for flag in flags.split("; "))
