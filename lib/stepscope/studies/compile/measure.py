"""The whole model eager and compiled, with both attentions and every mode in one process."""
import dataclasses

import pandas as pd
import torch

from stepscope.config import PHASES
from stepscope.runs.machine import sm_clock_mhz
from stepscope.step.compiling import Compiles, allow_recompiling, reason, release
from stepscope.step.timing import SAMPLE_COLUMNS, WHOLE, measure
from stepscope.step.training_step import Step, build_step
from stepscope.studies.compile.config import Config
from stepscope.studies.compile.tables import PART

# Training first: the graph that forward and backward share is compiled in its first step, inference's in
# forward's own.
MODES = ("forward_backward", "step", "forward")


def with_compiled(step: Step, variant: str) -> Step:
    """The same step with its model compiled: ``block`` compiles the code of a block, which all blocks share,
    ``model`` the whole forward. Loss and optimizer stay as they are."""
    if variant == "block":
        for block in step.model.blocks:
            block.compile(dynamic=False)
    if variant == "model":
        return dataclasses.replace(step, model=torch.compile(step.model, dynamic=False))
    return step


def measure_variants(config: Config) -> dict[str, pd.DataFrame]:
    """Every attention, variant and mode of one configuration, one after another.

    Each is compiled with caches on disk that are its own and empty at first, so that no compile time profits
    from another's or from an earlier run. What a process does once, the first to be compiled pays for.

    Returns:
        samples: the harness's, with columns attention, variant and mode.
        variants: a row for each attention, variant and mode, in the order they were run: status (``ok``,
            ``oom``, or ``unsupported`` where torch.compile finds no compiler that works) and its reason,
            graphs compiled, graph breaks, graphs that came out of a cache in place of being compiled, and the
            mode's peak memory.
    """
    from torch._inductor.utils import fresh_cache  # not above: it imports the compiler

    allow_recompiling()
    samples: list[pd.DataFrame] = []
    rows: list[dict] = []
    for attention in config.attentions:
        for variant in config.variants:
            torch._dynamo.reset()
            # A model's parameters and their gradients hang in cycles.
            release(config.device, after_error=True)
            step = None
            for mode in MODES:
                part: dict = {"attention": attention, "variant": variant, "mode": mode}
                row, compiles, cached = dict(part), Compiles(), _cached_graphs()
                with fresh_cache():
                    try:
                        if step is None:
                            built = build_step(config.step(mode="step", attention=attention))
                            step = with_compiled(built, variant)
                        step = dataclasses.replace(step, config=config.step(mode=mode, attention=attention))
                        if config.device == "cuda":
                            torch.cuda.reset_peak_memory_stats()
                        samples.append(measure(step, sm_clock_mhz).assign(**part))
                        graphs, breaks = compiles.read()
                        row |= {"status": "ok", "reason": "", "graphs": graphs, "graph_breaks": breaks,
                                "cached_graphs": _cached_graphs() - cached} | _peaks(config.device)
                    except torch.OutOfMemoryError as error:
                        row |= {"status": "oom", "reason": reason(error, [])}
                    except torch._dynamo.exc.BackendCompilerFailed as error:
                        row |= {"status": "unsupported", "reason": reason(error, [])}
                rows.append(row)
                if step is not None:
                    step.clear_gradients()
            del step
    release(config.device)
    none = pd.DataFrame(columns=[*SAMPLE_COLUMNS, *PART])
    return {"samples": pd.concat(samples, ignore_index=True) if samples else none,
            "variants": pd.DataFrame(rows)}


def _cached_graphs() -> int:
    """Graphs that this process has so far taken out of torch's caches: Inductor's own, and AOTAutograd's
    above it."""
    from torch._dynamo.utils import counters
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def _peaks(device: str) -> dict[str, float]:
    return {"peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20} if device == "cuda" else {}


def reading(times: pd.DataFrame) -> str:
    """What one run says, in a sentence or two of markdown."""
    whole = times[times["phase"] == WHOLE].set_index(["mode", "attention", "variant"])["median_ms"]
    parts = []
    for mode in PHASES:
        if mode in whole.index.get_level_values("mode"):
            parts.append(f"{mode}: " + ", ".join(f"{variant} with {attention} attention **{ms:.4g} ms**"
                                                 for (attention, variant), ms in whole[mode].items()))
    return "; ".join(parts) + "." if parts else "Nothing could be timed."
