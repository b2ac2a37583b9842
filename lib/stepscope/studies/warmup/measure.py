"""What the first step of a fresh process pays for: each part done by itself and timed."""
import re
import statistics
from collections.abc import Callable
from timeit import default_timer

import pandas as pd
import torch

from stepscope.say.formats import ms
from stepscope.step.timing import PhaseClock
from stepscope.step.training_step import Step, build_step
from stepscope.studies.warmup.config import Config
from stepscope.traces.profiled import profiled

REPEATS = 3
IMPORTED = "import torch"  # what only a fresh process does


def timed_ms(device: str, work: Callable[[], object]) -> float:
    """Host time of ``work`` in ms, the device synchronised at its end (and not before: it may not be in use
    yet).
    """
    started = default_timer()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (default_timer() - started) * 1e3


def first_uses(device: str) -> dict[str, float]:
    """On a GPU that this process has not touched yet, the cost in ms of each thing that has to exist before a
    step.
    """
    if device == "cpu":
        return {}
    return {"CUDA context": timed_ms(device, torch.cuda.init),
            "first allocation": timed_ms(device, lambda: torch.empty(1, device=device)),
            "cuBLAS handle": timed_ms(device, torch.cuda.current_blas_handle)}


def one_layer_twin(config: Config) -> dict[str, float]:
    """Run a model of one layer and otherwise the same shapes, and give its memory back; its first and steady
    step in ms.

    Its step launches the same kernels through the same libraries as the whole model's. What the whole model's
    first step costs afterwards is therefore without loading them.
    """
    twin = build_step(config.step(num_layers=1))
    clock, times_ms = PhaseClock(config.device), []
    for _ in range(REPEATS + 1):
        twin.clear_gradients()
        clock.start()
        twin(clock)
        times_ms.append(clock.stop()[-1][1])
    del twin
    if config.device == "cuda":
        torch.cuda.empty_cache()
    return {"first": times_ms[0], "steady": statistics.median(times_ms[1:])}


# Calls into CUDA's runtime and driver by what they are for. A kernel that is launched for the first time is
# loaded then, inside the call that launches it or asks about it (CUDA's lazy loading).
CALLS = {"kernel loading and launches": re.compile(r"Launch|FuncGet|FuncSet|Occupancy|Module|Library"),
         "device memory": re.compile(r"Malloc|Free|MemCreate|MemMap"),
         "waiting for the GPU": re.compile(r"Synchronize|EventQuery"),
         "other CUDA calls": re.compile("")}


def profiled_calls(step: Step) -> pd.DataFrame:
    """Time inside CUDA API calls of the first step, and of a steady one after it, under torch.profiler
    (CUPTI).

    Returns columns call, purpose (a key of :data:`CALLS`), first_calls, first_ms, steady_calls, steady_ms;
    empty on a CPU.
    """
    frames = []
    for which in ("first", "steady"):
        step.clear_gradients()
        with profiled() as profiler:
            step()
            if step.config.device == "cuda":
                torch.cuda.synchronize()
        rows = [(event.key, event.count, event.cpu_time_total / 1e3) for event in profiler.key_averages()
                if re.match(r"cu(da)?[A-Z]", event.key)]
        frames.append(pd.DataFrame(rows, columns=["call", f"{which}_calls", f"{which}_ms"]))
        for _ in range(REPEATS):
            step.clear_gradients()
            step()
    calls = frames[0].merge(frames[1], on="call", how="outer").fillna(0)
    purpose = [next(name for name, pattern in CALLS.items() if pattern.search(call))
               for call in calls["call"]]
    calls.insert(1, "purpose", purpose)
    return calls.sort_values("first_ms", ascending=False, ignore_index=True)


def again(step: Step) -> dict[str, float]:
    """Undo, one at a time, what the first step left behind; how much longer than a steady step the next one
    takes, in ms.

    Call it after steady steps. ``allocator``: memory was given back to the driver, so the step asks for it
    again. ``optimizer state``: AdamW's moments were dropped, so the step makes them again. Each the median of
    three.
    """
    def give_memory_back() -> None:
        step.clear_gradients()
        torch.cuda.empty_cache()

    undo = {}
    if step.config.device == "cuda":
        undo["allocator"] = give_memory_back
    if step.config.mode == "step":
        undo["optimizer state"] = step.optimizer.state.clear
    steady_ms = _step_ms(step, lambda: None)
    return {name: _step_ms(step, prepare) - steady_ms for name, prepare in undo.items()}


def _step_ms(step: Step, prepare: Callable[[], object]) -> float:
    clock, times_ms = PhaseClock(step.config.device), []
    for _ in range(REPEATS):
        step.clear_gradients()
        prepare()
        clock.start()
        step(clock)
        times_ms.append(clock.stop()[-1][1])
        step.clear_gradients()
        step()  # back to the steady state before the next
    return statistics.median(times_ms)


def first_costs(samples: pd.DataFrame, before: dict[str, float], undone: dict[str, float]) -> pd.DataFrame:
    """One table of it: columns part, when (``before`` or ``in`` the first step), time_ms.

    The first step's own row ``first step beyond steady`` is its wall time less the median of the last half of
    the steps; ``not told apart`` is what of it the parts measured again do not explain (kernels loaded at
    first use, autotuning, first-time work of Python and autograd).
    """
    whole = samples[samples["phase"] == "step"]["time_ms"].to_numpy()
    beyond = whole[0] - statistics.median(whole[len(whole) // 2:])
    rows = [(part, "before", time_ms) for part, time_ms in before.items()]
    rows += [("first step beyond steady", "in", beyond)] + [
        (part, "in", time_ms) for part, time_ms in undone.items()]
    rows += [("not told apart", "in", beyond - sum(undone.values()))]
    return pd.DataFrame(rows, columns=["part", "when", "time_ms"])


def reading(samples: pd.DataFrame, costs: pd.DataFrame) -> str:
    """What one run says, in two sentences of markdown, and one more where the process was not fresh."""
    whole = samples[samples["phase"] == "step"].reset_index(drop=True)
    steady = whole["time_ms"][len(whole) // 2:].median()
    beyond = costs.set_index("part")["time_ms"]["first step beyond steady"]
    settled = next((i for i in range(len(whole)) if (whole["time_ms"][i:] / steady - 1).abs().max() < 0.05),
                   None)
    text = (f"The first step takes {ms(whole['time_ms'][0])} where a steady one takes {ms(steady)}:"
            f" {ms(abs(beyond))} {'more' if beyond > 0 else 'less'}.")
    text += (" The steps do not settle within 5% of that." if settled is None else
             f" From step {settled + 1} on, all are within 5% of that.")
    return text if IMPORTED in set(costs["part"]) else (
        f"{text} This process was not fresh: restart its kernel to see what a first step pays for.")
