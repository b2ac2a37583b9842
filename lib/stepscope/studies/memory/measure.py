"""The memory study: every allocation of the step with its phase, layer, region and category; peaks;
checkpointing."""
import tempfile
from pathlib import Path

import pandas as pd
import torch

from stepscope.step import annotate
from stepscope.step.accounting import peak, require_formulas, value
from stepscope.step.compiling import release
from stepscope.step.timing import SAMPLE_COLUMNS, measure
from stepscope.step.training_step import Step, build_step, out_of_memory_names
from stepscope.studies.memory import nesting
from stepscope.studies.memory.config import Config
from stepscope.studies.memory.history import Owners, Regions, classified, levels, peaks
from stepscope.studies.memory.snapshot import allocations, load_snapshot, portable
from stepscope.studies.memory.tables import ALLOCATIONS

MARK_COLUMNS = ["step", "phase", "begun_at", "allocations", "frees",
                "allocated_bytes", "requested_bytes", "reserved_bytes",
                "peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes"]
BETWEEN = "between steps"
SAMPLES = pd.DataFrame(columns=SAMPLE_COLUMNS)  # of what did not fit
SNAPSHOT = Path("snapshot.pickle")  # in the run folder, which is where its notebook runs


def counters() -> dict[str, int]:
    """The allocator's own numbers: how many allocations and frees so far, bytes now and at most since the
    last reset."""
    stats = torch.cuda.memory_stats_as_nested_dict()
    count = stats["allocation"]["all"]
    numbers = {"allocations": count["allocated"], "frees": count["freed"]}
    for name in ("allocated", "requested", "reserved"):
        numbers[f"{name}_bytes"] = stats[f"{name}_bytes"]["all"]["current"]
        numbers[f"peak_{name}_bytes"] = stats[f"{name}_bytes"]["all"]["peak"]
    return numbers


class Recorder:
    """Notes, in numbers of allocations so far, where each phase and region begins; the ``phase`` a
    :class:`Step` is called with.

    It stands in for the NVTX ranges of :mod:`stepscope.step.annotate`, so regions are known in backward, too,
    where the allocator's history has no Python stack.
    """

    step: Step  # both are set before the first phase is entered
    annotation: annotate.Annotation

    def __init__(self, config: Config) -> None:
        self.config = config
        self.regions: Regions = []
        self.marks: list[dict] = []  # the end of each phase
        self.owners: Owners = []
        self.index, self.begun_at = 0, 0

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, name: str) -> None:
        self.regions.append((counters()["allocations"], name))

    def pop_range(self) -> None:
        self.regions.append((counters()["allocations"], None))

    def __call__(self, name: str) -> "Recorder":
        self.name = name
        return self

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        now = counters()
        self.begun_at = now["allocations"] + now["frees"]

    def __exit__(self, error, *rest) -> None:
        if error:  # such as out of memory, which is to be told as it is
            return
        self.mark(self.name)
        if self.name == "loss":
            self.annotation.link_backward()
        elif self.name == "forward" and self.config.mode == "forward":
            self.annotation.made.clear()
            self.annotation.output = None
        elif self.name == "backward":
            self.own("gradients", [p.grad for p in self.step.model.parameters()])
        elif self.name == "optimizer" and self.step.optimizer:
            states = (t for state in self.step.optimizer.state.values() for t in state.values())
            self.own("optimizer state", [t for t in states if torch.is_tensor(t)
                                         and t.device.type == self.config.device])

    def mark(self, phase: str) -> None:
        self.marks.append({"step": self.index, "phase": phase, "begun_at": self.begun_at} | counters())

    def own(self, category: str, tensors: list[torch.Tensor]) -> None:
        """Say whose the memory is that these tensors lie in, now."""
        now = counters()
        addresses = {t.untyped_storage().data_ptr() for t in tensors}
        self.owners.append((now["allocations"], now["frees"], category, addresses))


def record(config: Config) -> tuple[Step, dict[str, pd.DataFrame], dict]:
    """Build the step in a fresh process and run it with the allocator's history on, from the first
    allocation.

    Returns the step, tables and scalars. ``allocations.parquet``: a row an allocation (see
    :func:`classified`). ``marks``: the allocator's own numbers at the end of each phase of each step, and its
    peaks within the phase. Scalars: peak MiB of the first and the last step, allocated, requested and
    reserved. With ``keep_snapshot``, a snapshot without this machine's paths is in the working
    folder.

    Raises:
        torch.OutOfMemoryError: names the step. StepscopeError: the history does not add up.
    """
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
    recorder = Recorder(config)
    recorder.mark("start")
    annotate.use_ranges(recorder)
    step = recorder.step = build_step(config)
    recorder.own("parameters", list(step.model.parameters()))
    recorder.own("other", [step.tokens, step.targets, *step.model.buffers()])
    recorder.mark("build")
    with annotate.annotated(step.model) as recorder.annotation:
        for recorder.index in range(config.warmup_steps + config.timed_steps):
            with out_of_memory_names(f"running step {recorder.index}"):
                step.clear_gradients()
                step(recorder)
                torch.cuda.synchronize()
            recorder.mark(BETWEEN)
    step.clear_gradients()
    recorder.mark("gradients cleared")
    torch._C._cuda_clearCublasWorkspaces()  # so that what is freed here is known to be one
    recorder.mark("workspaces cleared")
    with tempfile.TemporaryDirectory() as temporary:
        dumped = Path(temporary) / SNAPSHOT
        torch.cuda.memory._dump_snapshot(str(dumped))
        torch.cuda.memory._record_memory_history(enabled=None)
        snapshot = load_snapshot(dumped)
    if config.keep_snapshot:
        SNAPSHOT.write_bytes(portable(snapshot))
    marks = pd.DataFrame(recorder.marks, columns=MARK_COLUMNS)
    history = allocations(snapshot, torch.cuda.current_device())
    table = classified(history, marks, recorder.regions, recorder.owners, config)
    return step, {ALLOCATIONS: table, "marks": marks, "levels": levels(table, marks)}, peaks(marks)


def measure_checkpoints(config: Config) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Peak and time of each setting of ``checkpoints``, in one process; at each of ``contexts``, from the
    first on, until the setting does not fit.

    Returns samples (as ``timing.measure``'s, with columns ``context_length`` and ``blocks_per_checkpoint``)
    and a row a setting: these two, ``status`` (``ok`` or ``oom``), ``predicted_bytes`` (allocated), and on a
    GPU ``state_bytes`` before the step and ``peak_allocated_bytes``, ``peak_requested_bytes``,
    ``peak_reserved_bytes``.
    """
    samples, rows = [], []
    for context in sorted(config.contexts) or [config.context_length]:
        failed = {row["blocks_per_checkpoint"] for row in rows if row["status"] == "oom"}
        settings = [blocks for blocks in config.checkpoints or [0] if blocks not in failed]
        if settings:
            here = config.model_copy(update={"context_length": context})
            for row, times in settings_at(here, settings):
                rows.append(row)
                samples.append(times)
    return together(samples), pd.DataFrame(rows)


def settings_at(config: Config, settings: list[int]) -> list[tuple[dict, pd.DataFrame]]:
    """Rows and samples of :func:`measure_checkpoints` at one context; what was built is gone after it."""
    release(config.device, after_error=True)
    step, found = build_step(config), []
    for blocks in settings:
        layers, at = config.num_layers, {"context_length": config.context_length,
                                         "blocks_per_checkpoint": blocks}
        arrangement = nesting.every(layers, blocks) if blocks else nesting.unchecked(layers)
        row, times = measure_arranged(step, arrangement)
        found.append((at | {"predicted_bytes": peak(config, blocks).allocated} | row, times.assign(**at)))
    return found


def measure_stacks(config: Config) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Peak, time and runs of blocks of each arrangement of checkpoints (:data:`nesting.ARRANGEMENTS`), for
    each number of blocks in ``stacks``, in one process.

    Gradients are there from the start and are added to, so that what comes beyond ``state_bytes`` is
    activations and temporaries alone. Returns samples (as ``timing.measure``'s, with columns ``blocks`` and
    ``arrangement``) and a row for each of these: ``status`` (``ok`` or ``oom``), ``block_runs`` (forward runs
    of blocks in a step, counted), ``expected_runs``, ``expected_kept_bytes`` (:func:`nesting.kept`), and on a
    GPU ``state_bytes`` and the peaks, as :func:`measure_checkpoints`'s.
    """
    found = [one for blocks in config.stacks for one in arrangements_of(config, blocks)]
    return together([times for _, times in found]), pd.DataFrame([row for row, _ in found])


def arrangements_of(config: Config, blocks: int) -> list[tuple[dict, pd.DataFrame]]:
    """Rows and samples of :func:`measure_stacks` of one number of blocks; what was built is gone after it."""
    release(config.device, after_error=True)
    here = config.step(num_layers=blocks, mode="forward_backward")
    step = KeepingGradients(**vars(build_step(here)))
    with nesting.arranged(step.model, nesting.every(blocks, 1)):
        step()  # makes the gradients
    runs: list[None] = []
    for block in step.model.blocks:
        block.register_forward_pre_hook(lambda *called: runs.append(None))
    stream, saved = value("4X", here), value(require_formulas(here).saved, here)
    found = []
    for name, arrange in nesting.ARRANGEMENTS.items():
        runs.clear()
        arrangement, at = arrange(blocks), {"blocks": blocks, "arrangement": name}
        row, times = measure_arranged(step, arrangement)
        counts = {"block_runs": len(runs) // (config.warmup_steps + config.timed_steps),
                  "expected_runs": nesting.block_runs(arrangement),
                  "expected_kept_bytes": nesting.kept(arrangement, stream, saved)}
        found.append((at | counts | row, times.assign(**at)))
    return found


def together(samples: list[pd.DataFrame]) -> pd.DataFrame:
    """All samples; without a row where nothing fitted."""
    return pd.concat([some for some in samples if len(some)] or samples[:1], ignore_index=True)


class KeepingGradients(Step):
    """A step that adds to the gradients that there are."""

    def clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=False)


def measure_arranged(step: Step, arrangement: nesting.Arrangement) -> tuple[dict, pd.DataFrame]:
    """The step under an arrangement's checkpoints: its ``status`` and, on a GPU, ``state_bytes`` allocated
    before it and the allocator's peaks; and its samples, none where it did not fit."""
    device, samples = step.config.device, SAMPLES
    found: dict = {"status": "ok"}
    step.clear_gradients()
    release(device, after_error=True)  # else what the setting before left in cycles counts here
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found["state_bytes"] = torch.cuda.memory_allocated()
    try:
        with nesting.arranged(step.model, arrangement):
            samples = measure(step)
    except torch.OutOfMemoryError:
        found["status"] = "oom"
    if device == "cuda":
        found |= {name: number for name, number in counters().items() if name.startswith("peak")}
    return found, samples


def use_segments(config: Config) -> None:
    """Give the allocator the configuration's option; before anything is on the GPU."""
    if config.device == "cuda" and config.expandable_segments:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
