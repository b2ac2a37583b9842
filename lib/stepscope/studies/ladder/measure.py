"""All rungs of one configuration in one process, in turns: time, clocks, power, memory, and whether the
gradients agree."""

import gc
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from timeit import default_timer
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from stepscope.runs.device_watch import DeviceWatch
from stepscope.step.training_step import out_of_memory_names
from stepscope.studies.ladder.attention import backend_times, fastest
from stepscope.studies.ladder.config import BESIDE, RUNGS, Config
from stepscope.studies.ladder.rungs import (
    BRANCHES,
    WITHOUT,
    Program,
    Rung,
    Unsupported,
    before,
    changes_of,
    lacking,
)
from stepscope.studies.ladder.training import train
from stepscope.traces.families import family
from stepscope.traces.profiled import profiled

BURST_S = 0.4  # a GPU's steps are timed for at least so long in a turn
POLLED_S = 0.5  # and in the last turn kept up for so long beyond: the energy counter changes each 0.1 s
MOST_STEPS = 300  # of a turn
COMPARED = 2**18  # elements of a tensor's gradient that are compared with fp32's
FILLED = 0.92  # of the memory that is free before anything is built
STATE_BYTES = 14  # a parameter when backward begins: fp32 weight and moments, bf16 weight
# Said of other programs' defaults, by other programs, in the middle of the progress.
NOT_OURS = ("IProgress not found", "TensorFloat32 tensor cores")
SAMPLES = ["rung", "turn", "step", "time_ms"]
KERNELS = ["rung", "name", "family", "count", "time_ms"]


def device_state(rung: "Rung", watch: DeviceWatch, steps: int, poll: bool) -> dict[str, Any]:
    """Clocks held back while steps were timed; of the same step kept up for a moment longer, polled, also its
    clock, power and energy. Empty on a CPU."""
    if not watch.on:
        return {}
    held = {name: us for name, us in watch.readings.items() if name.startswith("throttled_")}
    reasons = [name.removeprefix("throttled_").removesuffix("_us") for name, us in held.items() if us]
    held_s = sum(us or 0 for us in held.values()) / 1e6  # may be brought up to date only after the steps
    state: dict[str, Any] = {
        "throttle": "; ".join(reasons),
        "throttled_share": min(1.0, held_s / watch.readings["watched_s"]),
    }
    if not poll:
        return state
    with DeviceWatch("cuda", poll=True) as kept_up:
        time_steps(rung.step, "cuda", steps)
    found, step_s = kept_up.readings, kept_up.readings["watched_s"] / steps
    joules, counted_s = found["energy_j"], found["energy_s"]
    return state | {
        "sm_clock_mhz": found["sm_clock_median_mhz"],
        "power_w": found["power_w"],
        "step_energy_j": joules / counted_s * step_s if joules is not None and counted_s else None,
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(step: Callable[[], Tensor], device: str, steps: int) -> tuple[list[float], float]:
    """Times of steps in ms, one after another as training runs them, and the wall time of one in ms.

    On a GPU by events between the steps: the host waits only for the last. On a CPU each by the host's clock.
    """
    synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if device == "cuda" else []
    start, clock = default_timer(), [default_timer()]
    if marks:
        marks[0].record()
    for index in range(steps):
        step()
        if marks:
            marks[index + 1].record()
        clock.append(default_timer())
    synchronize(device)
    wall_ms = (default_timer() - start) / steps * 1e3
    times = [first.elapsed_time(second) for first, second in itertools.pairwise(marks)] or [
        (second - first) * 1e3 for first, second in itertools.pairwise(clock)
    ]
    return times, wall_ms


def sampled(gradient: Tensor) -> Tensor:
    """At most :data:`COMPARED` elements of a gradient, evenly spread over it."""
    flat = gradient.detach().flatten()
    return flat[:: -(-flat.numel() // COMPARED)].float()


def reference_gradients(config: Config, programs: dict) -> tuple[float, dict[str, Tensor]] | None:
    """Loss and sampled gradients of the first step in fp32, kept in the host's memory; None where the step
    does not fit."""
    try:
        with out_of_memory_names("making the fp32 gradients"):
            rung = Rung(config, "fp32", programs)
            try:
                return rung.gradients().item(), {name: sampled(g).cpu() for name, g in rung.plain_gradients()}
            finally:
                rung.unload()
    except torch.OutOfMemoryError:
        return None


def difference(rung: Rung, loss: float, reference: tuple[float, dict[str, Tensor]]) -> dict[str, float]:
    """How far loss and gradients are from fp32's, relative: the whole gradient's norm, and the worst single
    tensor's. Of a large tensor a sample stands for all of it."""
    expected_loss, expected = reference
    missed, whole, worst = 0.0, 0.0, 0.0
    for name, gradient in rung.plain_gradients():
        there = expected[name].to(gradient.device)
        off, size = torch.stack([(sampled(gradient) - there).norm(), there.norm()]).tolist()
        weight = gradient.numel() / there.numel()
        missed, whole = missed + weight * off**2, whole + weight * size**2
        worst = max(worst, off / size if size else 0.0)
    return {
        "loss_off": abs(loss / expected_loss - 1),
        "gradient_off": math.sqrt(missed / whole),
        "gradient_worst": worst,
    }


@contextmanager
def compiler_cache(config: Config) -> Iterator[None]:
    """A folder of compiled code for the processes of one shape; the first of them finds it empty, and nothing
    in memory either, where this process has compiled before."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.utils import clear_caches

    shape = [config.shape, config.context_length, config.batch_size, config.vocab_size, torch.__version__]
    if config.device == "cpu" and any({"blocks", "graph"} & changes_of(rung) for rung in config.rungs):
        # torch tries which vector instructions compile and run: some ten seconds, which are the machine's and
        # no rung's. Where all may find it, it is done once. Where there is no compiler, the rung says so.
        with suppress(RuntimeError, OSError):
            valid_vec_isa_list()
    name = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
    folder = Path(default_cache_dir(), "stepscope", name)
    if not config.process:
        shutil.rmtree(folder, ignore_errors=True)
        torch.compiler.reset()
        clear_caches()
    folder.mkdir(parents=True, exist_ok=True)
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    found = {name: os.environ.get(name) for name in folders}
    os.environ |= folders
    try:
        yield
    finally:
        for name, value in found.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def attention_kernel(rung: Rung) -> str:
    """Which implementation scaled_dot_product_attention took, as the profiler names its operator."""
    with profiled(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        rung.gradients()
    names = {event.name for event in profiler.events()}
    found = {
        match[1] or match[2]
        for name in names
        if (
            match := re.fullmatch(
                r"aten::_scaled_dot_product_(?:(\w+?)_attention(?:_for_cpu)?|attention_(math))", name
            )
        )
    }
    return ", ".join(sorted(found))


def kernel_table(rung: Rung) -> pd.DataFrame:
    """What a step consists of on the GPU: each kernel's number and time in a step (mean of three)."""
    if rung.config.device != "cuda":
        return pd.DataFrame(columns=KERNELS)
    with profiled(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            rung.step()
        torch.cuda.synchronize()
    rows = [
        (event.name, event.time_range.elapsed_us() / 1e3)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    kernels = (
        pd.DataFrame(rows, columns=["name", "time_ms"]).groupby("name")["time_ms"].agg(["size", "sum"]) / 3
    )
    kernels = kernels.reset_index().set_axis(["name", "count", "time_ms"], axis=1)
    return kernels.assign(rung=rung.name, family=[str(family(name)) for name in kernels["name"]])[KERNELS]


class Ladder:
    """What is measured of one configuration, as it comes."""

    def __init__(self, config: Config, kernel: str | None = None):
        self.config, self.kernel = config, kernel
        self.started = default_timer()
        self.programs: dict[Any, Program] = {}
        self.rows: dict[str, dict] = {}
        self.samples: list[pd.DataFrame] = []
        self.bursts: list[dict] = []
        self.kernels = [pd.DataFrame(columns=KERNELS)]

    def begin(self, name: str, **given: Any) -> dict:
        """A rung's row, before anything is known of it."""
        row = {"rung": name, "status": "ok", "reason": "", "batch": self.config.batch_size}
        self.rows[name] = row | given
        return self.rows[name]

    def over_budget(self, *names: str) -> bool:
        """Whether the budget is spent; these rungs are then skipped, and their rows say so."""
        spent = bool(self.config.budget_s) and default_timer() - self.started > self.config.budget_s
        for name in names if spent else ():
            self.begin(name, status="skipped", reason=f"the budget of {self.config.budget_s} s was spent")
        return spent

    def attempt(self, name: str, turn: int, *args: Any, **more: Any) -> None:
        """:meth:`turn`. Where that cannot be, the rung's row says why, and the others go on."""
        row, start = self.rows[name], default_timer()
        try:
            with out_of_memory_names(f"measuring {name}"):
                self.turn(name, turn, *args, **more)
        except torch.OutOfMemoryError as error:
            row |= {"status": "oom", "reason": reason(error)}
        except (Unsupported, torch._dynamo.exc.BackendCompilerFailed) as error:
            row |= {"status": "unsupported", "reason": reason(error)}
        except (
            RuntimeError,
            torch._dynamo.exc.Unsupported,
        ) as error:  # of one rung: a kernel that is refused, a capture
            row |= {"status": "failed", "reason": reason(error)}
        if row["status"] != "ok":
            gc.collect()  # an error's tensors hang in cycles
            if self.config.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.synchronize()  # what has lost the device ends the run here
        self.tell(row, turn, default_timer() - start)

    def tell(self, row: dict, turn: int, took_s: float) -> None:
        """One line of progress."""
        if row["status"] == "ok":
            found = f"{self.samples[-1]['time_ms'].median():.4g} ms"
            found += f", first pass {row['compile_s']:.1f} s" if row.get("compile_s") and turn == 0 else ""
        else:
            found = f"{row['status']}: {row['reason']}"
        at_s = default_timer() - self.started
        print(
            f"{self.config.shape} {self.config.context_length}, {row['rung']}, turn {turn + 1}: {found}"
            f" (took {took_s:.1f} s, at {at_s:.0f} s)",
            flush=True,
        )

    def turn(
        self, name: str, turn: int, reference=None, batch: int | None = None, profile: bool = False
    ) -> None:
        """One turn of a rung: build, warm up, time, free. The first also compares its gradients with
        fp32's."""
        device, row = self.config.device, self.rows[name]
        rung = Rung(self.config, name, self.programs, batch, self.kernel)
        try:
            if turn == 0:
                if name in BESIDE or {"blocks", "graph"} & changes_of(name):
                    print(f"{self.config.shape} {self.config.context_length}, {name}: compiling", flush=True)
                loss = rung.gradients().item()
                row |= {"compile_s": rung.program.compile_s, "batch": rung.batch}
                if rung.saved_bytes:
                    row["saved_bytes"] = rung.saved_bytes
                if reference and name not in BESIDE:
                    row |= difference(rung, loss, reference)
                if not self.config.process and (name in BESIDE or "sdpa" in rung.changes):
                    row["attention_kernel"] = attention_kernel(rung)
            rung.clear_gradients()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            rung.capture()
            times, _ = time_steps(rung.step, device, max(self.config.warmup_steps, 1))
            steps = self.config.timed_steps
            if device == "cuda":
                steps = max(steps, min(MOST_STEPS, math.ceil(BURST_S * 1e3 / times[-1])))
            with DeviceWatch(device) as watch:
                times, wall_ms = time_steps(rung.step, device, steps)
            poll = turn == self.config.rounds - 1 or name.startswith("without_")
            state = device_state(rung, watch, math.ceil(POLLED_S * 1e3 / times[-1]), poll)
            self.samples.append(
                pd.DataFrame({"rung": name, "turn": turn, "step": range(steps), "time_ms": times})
            )
            self.bursts.append({"rung": name, "turn": turn, "steps": steps, "wall_ms": wall_ms} | state)
            if device == "cuda":
                row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
            if profile:
                self.kernels.append(kernel_table(rung))
        finally:
            rung.unload()

    def climb(self) -> None:
        """Every rung and what is beside it, one turn after another."""
        config = self.config
        names = [*[name for name in config.rungs if name != "fill"], *config.beside]
        for name in names:
            self.begin(name)
        # Repetitions repeat times: what does not change from process to process is the first one's.
        reference = None if config.process else reference_gradients(config, self.programs)
        last = self.finished()  # where kernels run at once, their times do not add up to the step's
        alone = before(last, config.rungs) if last == "overlap" else last
        # what fills the memory is read beside the same step at the small batch
        profiled = {*config.beside, alone or last} if not config.process or "fill" in config.rungs else set()
        for turn in range(config.rounds):
            for name in names:
                if self.rows[name]["status"] == "ok":
                    profile = turn == config.rounds - 1 and name in profiled
                    self.attempt(name, turn, reference, profile=profile)

    def finished(self) -> str | None:
        """The last rung asked for of the same arithmetic: it is filled, and changes are left out of it."""
        own = [name for name in self.config.rungs if name not in ("fill", "fp8", *BRANCHES)]
        return max(own, key=RUNGS.index, default=None)

    def leave_out(self) -> None:
        """The finished step again, and without each of its changes, in one turn."""
        finished, names = self.finished(), [f"without_{change}" for change in WITHOUT]
        if finished and self.rows[finished]["status"] == "ok":
            self.attempt(finished, self.config.rounds)
        for name in names:
            if not self.over_budget(name):
                self.begin(name)
                self.attempt(name, 0)

    def fill(self) -> None:
        """The finished step at the batch that fills the memory: predicted from what the smaller batch's
        forward leaves to backward, and less where that does not fit."""
        if self.over_budget("fill"):
            return
        row, known = self.begin("fill"), self.rows.get(self.finished() or "", {})
        if "fill" in (lacks := lacking(self.config.device)):
            row |= {"status": "unsupported", "reason": lacks["fill"]}
            return
        if "saved_bytes" not in known:
            row |= {"status": "unsupported", "reason": "no rung's memory is known to predict a batch from"}
            return
        parameters = max(
            sum(shape.numel() for shape in program.shapes.values()) for program in self.programs.values()
        )
        gc.collect()
        torch.cuda.empty_cache()
        free = FILLED * torch.cuda.mem_get_info()[0] - STATE_BYTES * parameters
        batch = int(free * self.config.batch_size / known["saved_bytes"])
        for smaller in (1, 0.85, 0.7, 0.5):
            most = max(self.config.batch_size, int(batch * smaller) // 4 * 4)
            row |= {"status": "ok", "reason": "", "batch": most}
            for turn in range(self.config.rounds):
                if row["status"] == "ok":
                    last = turn == self.config.rounds - 1
                    self.attempt("fill", turn, batch=row["batch"], profile=last)
            if row["status"] != "oom":
                return


def reason(error: Exception) -> str:
    """An error's own words on one line, without paths of this machine."""
    return re.sub(r"/\S*/", "", " ".join((str(error) or type(error).__name__).split()))[:400]


def measure_ladder(config: Config) -> dict[str, pd.DataFrame]:
    """Climb it.

    Returns:
        rungs: a row a rung: status (``ok``, ``oom``, ``unsupported``, ``failed``,
            ``skipped``) and its reason, batch,
            compile_s, peak_mib, attention_kernel (the implementation taken), and how far loss and gradients
            are from fp32's.
        samples: every timed step's time_ms, by rung and turn.
        bursts: a row a rung and turn: wall_ms of a step and, on a GPU, :func:`device_state`.
        kernels: of the finished step, at either batch, and what is beside it.
        curves: losses of training, see :func:`training.train`; no rows where none was asked for.
        backends: see :func:`attention.backend_times`.
    """
    with compiler_cache(config), warnings.catch_warnings():
        for message in NOT_OURS:
            warnings.filterwarnings("ignore", message)
        backends = backend_times(config)
        ladder = Ladder(config, fastest(backends))
        ladder.climb()
        if "fill" in config.rungs:
            ladder.fill()
        if config.leave_out:
            ladder.leave_out()
        trained = [name for name in config.rungs if name != "fill" and ladder.rows[name]["status"] == "ok"]
        curves = train(config, trained, ladder.programs, ladder.kernel)
    samples = (
        pd.concat(ladder.samples, ignore_index=True) if ladder.samples else pd.DataFrame(columns=SAMPLES)
    )
    kernels = [table for table in ladder.kernels if len(table)] or ladder.kernels[:1]
    return {
        "rungs": pd.DataFrame([*ladder.rows.values()]),
        "samples": samples,
        "bursts": pd.DataFrame(ladder.bursts),
        "kernels": pd.concat(kernels, ignore_index=True),
        "curves": curves,
        "backends": backends,
    }
