"""The whole model eager and compiled, with both attentions and every mode in one process."""
import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pandas as pd
import torch

from stepscope.runs.device_watch import DeviceWatch, keep_up_watched
from stepscope.say.formats import MODE_WORDS, capital, faster, listing, number
from stepscope.step.compiling import Compiles, allow_recompiling, reason, release
from stepscope.step.model import TransformerLM
from stepscope.step.sm_clock import sm_clock_mhz
from stepscope.step.timing import SAMPLE_COLUMNS, measure
from stepscope.step.training_step import Step, build_step
from stepscope.studies.compile.config import Config
from stepscope.studies.compile.printed import ATTENTION_WORDS, VARIANT_WORDS
from stepscope.studies.compile.tables import PART, fastest
from stepscope.traces.attention_kernels import sdpa_taken
from stepscope.traces.in_process import KERNEL_COLUMNS, kernels

# Training first: the graph that forward and backward share is compiled in its first step, inference's in
# forward's own. Kernels are captured of the first, which all that is compiled is in.
MODES = ("forward_backward", "step", "forward")


def with_compiled(step: Step, variant: str) -> Step:
    """The same step, on the same parameters, with its model compiled: ``block`` compiles the code of a block,
    which all blocks share, ``model`` the whole forward, ``cuda_graphs`` that and replays what it compiles to
    as CUDA graphs. Loss and optimizer stay as they are."""
    if variant == "eager":
        return step
    model = twin(step.model)
    if variant == "block":
        for block in model.blocks:
            block.compile(dynamic=False)
        return dataclasses.replace(step, model=model)
    if variant == "model":
        return dataclasses.replace(step, model=torch.compile(model, dynamic=False))
    compiled = torch.compile(model, dynamic=False, mode="reduce-overhead")
    return GraphedStep(**{**vars(step), "model": compiled})


def twin(model: TransformerLM) -> TransformerLM:
    """The same modules anew with the same tensors, so that compiling it leaves the other as it is."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class GraphedStep(Step):
    """A step whose CUDA graphs are told where it begins: what the last one made may be overwritten."""

    def __call__(self, phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext()) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        super().__call__(phase)


def measure_variants(config: Config) -> dict[str, pd.DataFrame]:
    """Every attention and mode of one configuration, one after another, each in all variants.

    All variants of an attention have one set of parameters. Each is compiled with caches on disk that are its
    own and empty at first, so that no compile time profits from another's or from an earlier run. What a
    process does once, the first to be compiled pays for. The timed steps are taken in turns, so that what is
    compared was as warm and had as much power. Kernels are captured when all is timed.

    Returns:
        samples: the harness's, with columns attention, variant and mode.
        variants: a row for each attention, variant and mode, in the order they were run: status (``ok``,
            ``oom``, or ``unsupported`` where torch.compile finds no compiler that works) and its reason,
            graphs compiled, graph breaks, graphs that came out of a cache in place of being compiled, the
            mode's peak memory, graphs that were not made CUDA graphs (``cudagraph_skips``), and what forward
            leaves in memory for backward (``saved_mib``; neither it nor the peak is known of CUDA graphs,
            which keep a pool of their own); ``sdpa_taken``, which kernels SDPA took, where captured; on a GPU
            ``power_capped_s``, for how long of the timed steps' ``watched_s`` the power cap held clocks back,
            and of full steps what :func:`stepscope.runs.device_watch.keep_up_watched` says.
        kernels: of captured steps (forward + backward), columns attention, variant, mode and
            ``traces.in_process.KERNEL_COLUMNS``.
    """
    allow_recompiling()
    torch._dynamo.reset()
    parts: list[Part] = []
    for attention in config.attentions:
        # A model's parameters and their gradients hang in cycles.
        release(config.device, after_error=True)
        steps: dict[str, Step] = {}  # kept by the parts, since kernels are captured when all are timed
        held = _allocated(config.device)
        for mode in MODES:
            of_mode: dict[str, Part] = {variant: Part(attention, variant, mode, steps, held)
                                        for variant in config.variants}
            for variant, warmup, timed in schedule(config):
                if variant != "eager" and of_mode[variant].samples.empty:
                    print(f"{attention}, {mode}, {variant}: compiling", flush=True)
                of_mode[variant].take(config, warmup, timed)
            print(f"{attention}, {mode}: " + ", ".join(
                f"{variant} {part.row['status']}" for variant, part in of_mode.items()), flush=True)
            if mode == "step":
                for part in of_mode.values():
                    part.keep_up(config)
            parts += of_mode.values()
        if "eager" in steps:
            steps["eager"].optimizer.state.clear()
    captures = [part.captured(config) for part in parts
                if config.captured_steps and part.key["mode"] == "forward_backward"]
    for part in parts:
        part.steps.clear()
    release(config.device, after_error=True)
    samples = [part.samples for part in parts if part.row["status"] == "ok"]
    return {"samples": stacked(samples, [*SAMPLE_COLUMNS, *PART]),
            "variants": pd.DataFrame([part.row for part in parts]),
            "kernels": stacked(captures, [*KERNEL_COLUMNS, *PART])}


def schedule(config: Config) -> list[tuple[str, int, int]]:
    """Which variant takes how many steps of warm-up and how many timed ones, in what order.

    In one turn each takes all of its own at once. In several all are compiled and warmed up first, and every
    turn begins with a step that is not timed, which finds the device as the one before left it.
    """
    variants: list[str] = [*config.variants]
    if config.turns == 1:
        return [(variant, config.warmup_steps, config.timed_steps) for variant in variants]
    each, more = divmod(config.timed_steps, config.turns)
    return [(variant, config.warmup_steps, 0) for variant in variants] + [
        (variant, 1, each + (turn < more)) for turn in range(config.turns) for variant in variants]


class Part:
    """One attention, variant and mode: its row of ``variants`` and its samples so far.

    Args:
        steps: those of its attention by variant, as far as they are built.
        held: bytes that were allocated before its attention's parameters.
    """

    def __init__(self, attention: str, variant: str, mode: str, steps: dict[str, Step], held: int):
        self.steps, self.held = steps, held
        self.key = dict(zip(PART, (attention, variant, mode)))
        self.row: dict = self.key | {"status": "ok", "reason": "", "graphs": 0, "graph_breaks": 0,
                                     "cached_graphs": 0}
        self.samples = pd.DataFrame(columns=SAMPLE_COLUMNS)

    def take(self, config: Config, warmup: int, timed: int) -> None:
        """So many more steps, built and compiled where they are not yet; nothing more once one did not
        run."""
        from torch._inductor.utils import fresh_cache  # not above: it imports the compiler

        if self.row["status"] != "ok":
            return
        compiles, before, first = Compiles(), _cached(), self.samples.empty
        with self.refusals(), fresh_cache():
            if first and config.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            step = self.step(config, warmup_steps=warmup, timed_steps=timed)
            watch = DeviceWatch(config.device)
            taken = measure(step, sm_clock_mhz, watch)
            taken["step"] += self.samples["step"].nunique()
            taken = taken.assign(**self.key)
            self.samples = taken if first else pd.concat([self.samples, taken], ignore_index=True)
            if first:
                self.row |= _peaks(step, self.held)
            if timed:
                self.watched(watch.readings)
        if self.key["variant"] in self.steps:
            self.steps[self.key["variant"]].clear_gradients()
        if self.row["status"] != "ok":
            release(config.device, after_error=True)
        counted = dict(zip(("graphs", "graph_breaks"), compiles.read())) | {
            name: now - before[name] for name, now in _cached().items()}
        self.row |= {name: self.row.get(name, 0) + times for name, times in counted.items()}

    def watched(self, readings: dict[str, Any]) -> None:
        """Add to the row how long the timed steps were watched, and how long the power cap held clocks back
        meanwhile."""
        capped_us = readings.get("throttled_power_cap_us")
        if capped_us is not None:
            for name, seconds in (("watched_s", readings["watched_s"]), ("power_capped_s", capped_us / 1e6)):
                self.row[name] = self.row.get(name, 0.0) + seconds

    def keep_up(self, config: Config) -> None:
        """Power and energy, in the row, when all of its mode is timed."""
        if self.row["status"] == "ok":
            with self.refusals():
                step = self.step(config)
                self.row |= keep_up_watched(step)
                step.clear_gradients()

    def step(self, config: Config, **fields: int) -> Step:
        """This part's step, from those of its attention, where it is left once it is built."""
        attention, variant, mode = self.key.values()
        if "eager" not in self.steps:
            self.steps["eager"] = build_step(config.step(mode="step", attention=attention))
        if variant not in self.steps:
            self.steps[variant] = with_compiled(self.steps["eager"], variant)
        own = config.step(mode=mode, attention=attention).model_copy(update=fields)
        return dataclasses.replace(self.steps[variant], config=own)

    def captured(self, config: Config) -> pd.DataFrame:
        """The kernels of some more steps; before that, what forward leaves for backward, in the row.

        Not to be called before anything is timed: CUPTI stays in a process that it once watched, and makes
        its launches slower.
        """
        found = pd.DataFrame(columns=KERNEL_COLUMNS)
        if self.row["status"] == "ok":
            with self.refusals():
                step = self.step(config)
                self.row |= _saved(step)

                def once() -> None:
                    step.clear_gradients()
                    step()
                found = kernels(once, config.device, config.captured_steps)
                step.clear_gradients()
                if self.key["attention"] == "sdpa":
                    self.row["sdpa_taken"] = sdpa_taken(found)
        return found.assign(**self.key)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """What does not run is noted in the row."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.row |= {"status": "oom", "reason": reason(error, [])}
        except torch._dynamo.exc.BackendCompilerFailed as error:
            self.row |= {"status": "unsupported", "reason": reason(error, [])}


def stacked(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    frames = [frame for frame in frames if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def _cached() -> dict[str, int]:
    """Graphs that this process has so far taken out of torch's caches (Inductor's own, and AOTAutograd's
    above it), and graphs that it could not make CUDA graphs."""
    from torch._dynamo.utils import counters
    return {"cached_graphs": counters["inductor"]["fxgraph_cache_hit"]
            + counters["aot_autograd"]["autograd_cache_hit"],
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"]}


def _allocated(device: str) -> int:
    """Bytes allocated now outside the pools of CUDA graphs; 0 where no allocator tells."""
    return torch.cuda.memory_allocated() - _pooled() if device == "cuda" else 0


def _pooled() -> int:
    """Bytes allocated now in the pools of CUDA graphs."""
    return sum(segment["allocated_size"] for segment in torch.cuda.memory_snapshot()
               if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0))


def _peaks(step: Step, held: int) -> dict[str, float]:
    """The peak of memory without what was ``held`` before and the pools of CUDA graphs, which are not this
    step's; nothing where no allocator tells."""
    if step.config.device == "cpu" or isinstance(step, GraphedStep):
        return {}
    return {"peak_allocated_mib": (torch.cuda.max_memory_allocated() - held - _pooled()) / 2**20}


def _saved(step: Step) -> dict[str, float]:
    """MiB that forward leaves allocated besides its output; nothing where no allocator tells."""
    if step.config.device == "cpu" or isinstance(step, GraphedStep):
        return {}
    step.clear_gradients()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with step.autocast():
        logits = step.model(step.tokens)
    kept = torch.cuda.memory_allocated() - before - logits.untyped_storage().nbytes()
    return {"saved_mib": kept / 2**20}


def reading(times: pd.DataFrame) -> str:
    """What one run says, a sentence a mode: the fastest variant of each attention beside its eager one."""
    said = []
    for mode, rows in fastest(times).groupby("mode", sort=False):
        parts = []
        for row in rows.itertuples():
            name = f"{ATTENTION_WORDS[row.attention]} {VARIANT_WORDS[row.variant]}"
            part = f"{name} **{number(row.median_ms)} ms**"
            if row.variant != "eager" and row.eager_ms > 0:
                than = faster(row.speedup) if row.sure else "not surely faster"
                part += f" ({than} than eager, {number(row.eager_ms)} ms)"
            parts.append(part)
        said.append(f"{capital(MODE_WORDS[mode])}, the fastest: {listing(parts)}.")
    return " ".join(said) or "Nothing could be timed."
