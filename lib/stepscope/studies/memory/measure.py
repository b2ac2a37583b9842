"""The memory study: every allocation of the step with its phase, layer, region and category; peaks; checkpointing."""
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.checkpoint import checkpoint

from stepscope import StepscopeError
from stepscope.step import annotate
from stepscope.step.accounting import CATEGORIES, MIB, at_rest, instants, peak, require_formulas, value
from stepscope.config import configure
from stepscope.studies.memory.config import Config
from stepscope.studies.memory.snapshot import allocations, load_snapshot
from stepscope.step.training_step import Step, build_step, out_of_memory_names
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.step.timing import measure

MARK_COLUMNS = ["step", "phase", "begun_at", "allocations", "frees", "allocated_bytes", "requested_bytes", "reserved_bytes",
                "peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes"]
BETWEEN = "between steps"
SNAPSHOT = Path("snapshot.pickle")  # in the run folder, which is where its notebook runs


def counters() -> dict[str, int]:
    """The allocator's own numbers: how many allocations and frees so far, bytes now and at most since the last reset."""
    stats = torch.cuda.memory_stats_as_nested_dict()
    count = stats["allocation"]["all"]
    numbers = {"allocations": count["allocated"], "frees": count["freed"]}
    for name in ("allocated", "requested", "reserved"):
        numbers[f"{name}_bytes"] = stats[f"{name}_bytes"]["all"]["current"]
        numbers[f"peak_{name}_bytes"] = stats[f"{name}_bytes"]["all"]["peak"]
    return numbers


class Recorder:
    """Notes, in numbers of allocations so far, where each phase and region begins; the ``phase`` a :class:`Step` is called with.

    It stands in for the NVTX ranges of :mod:`stepscope.annotate`, so regions are known in backward, too, where the
    allocator's history has no Python stack.
    """

    def __init__(self) -> None:
        self.regions: list[tuple[int, str | None]] = []  # (allocations so far, region opened; None: one was closed)
        self.marks: list[dict] = []                      # the end of each phase
        self.owners: list[tuple[int, int, str, set[int]]] = []  # (allocations, frees, category, addresses alive then)
        self.annotation: annotate.Annotation | None = None
        self.index, self.step, self.begun_at = 0, None, 0

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
        elif self.name == "forward" and self.step.config.mode == "forward":
            self.annotation.made.clear()
            self.annotation.output = None
        elif self.name == "backward":
            self.own("gradients", [p.grad for p in self.step.model.parameters()])
        elif self.name == "optimizer":
            self.own("optimizer state", [t for state in self.step.optimizer.state.values() for t in state.values()
                                         if torch.is_tensor(t) and t.device.type == self.step.config.device])

    def mark(self, phase: str) -> None:
        self.marks.append({"step": self.index, "phase": phase, "begun_at": self.begun_at} | counters())

    def own(self, category: str, tensors: list[torch.Tensor]) -> None:
        """Say whose the memory is that these tensors lie in, now."""
        now = counters()
        self.owners.append((now["allocations"], now["frees"], category, {t.untyped_storage().data_ptr() for t in tensors}))


def record(config: Config) -> tuple[Step, dict[str, pd.DataFrame], dict]:
    """Build the step in a fresh process and run it with the allocator's history on, from the first allocation.

    Returns the step, tables and scalars. ``allocations.parquet``: a row an allocation (see :func:`classified`). ``marks``: the
    allocator's own numbers at the end of each phase of each step, and its peaks within the phase. Scalars: peak MiB of the
    first and the last step, allocated, requested and reserved. With ``keep_snapshot``, the pickle is in the working folder.

    Raises:
        torch.OutOfMemoryError: names the step. StepscopeError: the history does not add up.
    """
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
    recorder = Recorder()
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
        place = SNAPSHOT if config.keep_snapshot else Path(temporary) / SNAPSHOT
        torch.cuda.memory._dump_snapshot(str(place))
        torch.cuda.memory._record_memory_history(enabled=None)
        snapshot = load_snapshot(place)
    marks = pd.DataFrame(recorder.marks, columns=MARK_COLUMNS)
    table = classified(allocations(snapshot, torch.cuda.current_device()), marks, recorder.regions, recorder.owners, config)
    return step, {"allocations.parquet": table, "marks": marks, "levels": levels(table, marks)}, peaks(marks)


def peaks(marks: pd.DataFrame) -> dict[str, float]:
    """Peaks in MiB of the first and of the last step."""
    steps = marks[marks["phase"].isin(["forward", "loss", "backward", "optimizer"])]
    found = {}
    for when, index in (("first", steps["step"].min()), ("steady", steps["step"].max())):
        own = steps[steps["step"] == index]
        found |= {f"{when}_peak_{name}_mib": own[f"peak_{name}_bytes"].max() / MIB for name in ("allocated", "requested", "reserved")}
    return found


def classified(table: pd.DataFrame, marks: pd.DataFrame, regions: list[tuple[int, str | None]],
               owners: list[tuple[int, int, str, set[int]]], config: Config) -> pd.DataFrame:
    """An allocation history (see ``snapshot.allocations``) with what each allocation was for; addresses are dropped.

    Columns beside ``size`` (bytes asked for), ``allocated_at``, ``freed_at``, ``line`` and ``function``: ``step``, ``phase``,
    ``region``, ``layer`` (missing outside the blocks), ``category``. Parameters, gradients and optimizer state are the
    tensors of that name; a workspace of cuBLAS is what clearing those frees; an activation is made in forward or loss and
    freed in backward; what those phases leave behind without autograd's need (logits, which the step's frame holds) is
    other; an autocast copy has a weight's bytes, is made by that weight's region and outlives the product. (Where batch times
    context is one of the weight's sides, the copy of an input has the same bytes and is taken for one.)

    Raises:
        StepscopeError: the live bytes differ from the allocator's own number at some mark.
    """
    table, first = table.copy(), int(marks["allocations"].iloc[0])
    order = pd.Series(range(len(table)), index=table.index) + first  # how many allocations there were before
    begun = first + int(marks["frees"].iloc[0])
    places = [m.allocations + m.frees - begun for m in marks.itertuples()]
    marks = marks.assign(event=places)
    which = marks["allocations"].searchsorted(order, side="right").clip(max=len(marks) - 1)
    table["step"], table["phase"] = marks["step"].to_numpy()[which], marks["phase"].to_numpy()[which]
    table["region"], table["layer"] = _regions(order, regions, table["step"], table["phase"], config.num_layers)
    freed = table["freed_at"].astype("float64").fillna(float("inf"))
    table["category"] = "temporaries"
    table.loc[freed >= places[-1], "category"] = "other"
    ends = {(m.step, m.phase): m.event for m in marks.itertuples()}
    training = config.mode != "forward"
    if training:
        for index in marks.loc[marks["phase"] == "backward", "step"].unique():
            own = (table["step"] == index) & table["phase"].isin(["forward", "loss"]) & (freed >= ends[index, "loss"])
            table.loc[own, "category"] = "activations"
            table.loc[own & (freed >= ends[index, "backward"]), "category"] = "other"
    if config.precision in ("bf16", "fp16"):
        size_of = {"attention.qkv": 2 * config.d_model**2, "attention.output": 2 * config.d_model**2,
                   "ffn": 2 * config.d_model * config.d_ff, "head": 2 * config.d_model * config.vocab_size}
        own = (table["phase"] == "forward") & (table["size"] == table["region"].map(size_of))
        if training:
            own &= table["category"] == "activations"
        else:  # they live until autocast ends, after the last allocation of their forward
            own &= freed > table["step"].map(table[table["phase"] == "forward"].groupby("step")["allocated_at"].max())
        table.loc[own, "category"] = "autocast copies"
    for count, frees, category, addresses in owners:
        event = count + frees - begun
        alive = (table["allocated_at"] < event) & (freed >= event) & table["address"].isin(addresses)
        table.loc[alive, "category"] = category
    cleared = marks.set_index("phase")["event"]
    table.loc[(freed >= cleared["gradients cleared"]) & (freed < cleared["workspaces cleared"]), "category"] = "cuBLAS workspace"
    for mark in marks.itertuples():
        live = int(table.loc[(table["allocated_at"] < mark.event) & (freed >= mark.event), "size"].sum())
        if live + int(marks["requested_bytes"].iloc[0]) != mark.requested_bytes:
            raise StepscopeError(f"allocations recorded by the end of step {mark.step}, {mark.phase}: {live} bytes live, but the"
                                 f" allocator says {mark.requested_bytes}")
    return table.drop(columns="address")


def _regions(order: pd.Series, regions: list[tuple[int, str | None]], steps: pd.Series, phases: pd.Series, layers: int) -> tuple[list, pd.Series]:
    """Region and layer of each allocation. Blocks are counted as they open, in backward by the two sums that each ends in."""
    names, numbers, stack, at = [], [], [], 0
    blocks = sums = -1
    phase_of, last = phases.to_numpy(), None
    for position, (number, now) in enumerate(zip(order, zip(steps, phases))):
        if now != last:
            blocks, sums, last = -1, -1, now
        while at < len(regions) and regions[at][0] <= number:
            name = regions[at][1]
            at += 1
            if name is None:
                stack.pop()
                continue
            stack.append(name)
            blocks += name == "block"
            sums += name == "residual"
        inside = phase_of[position] == "forward" and "block" in stack
        names.append(stack[-1] if stack else "")
        behind = phase_of[position] == "backward" and sums >= 0 and names[-1] != "embedding"
        numbers.append(blocks if inside else layers - 1 - sums // 2 if behind else None)
    return names, pd.array(numbers, dtype="Int64")


def levels(table: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Bytes by category at the end of each phase and at its peak: columns step, phase, moment, category, bytes; and of a peak
    ``layer``, ``region``, ``line`` and ``size`` of the allocation that made it.

    What the allocator's rounding adds at a peak is the difference of its two peaks, allocated and requested.

    Raises:
        StepscopeError: a phase's peak in the history is not the allocator's own.
    """
    begun = int(marks["allocations"].iloc[0] + marks["frees"].iloc[0])
    freed, rows = table["freed_at"].astype("float64").fillna(float("inf")), []
    for mark in marks.itertuples():
        end = int(mark.allocations + mark.frees - begun)
        if mark.phase in ("forward", "loss", "backward", "optimizer"):
            live = live_bytes(table, int(mark.begun_at) - begun, end)
            peak_event = int(live.idxmax())
            if int(live.max()) + int(marks["requested_bytes"].iloc[0]) != mark.peak_requested_bytes:
                raise StepscopeError(f"step {mark.step}, {mark.phase}: the history peaks at {int(live.max())} bytes, the allocator says"
                                     f" {mark.peak_requested_bytes}")
            made = table[table["allocated_at"] == peak_event - 1]
            what = {name: made[name].iloc[0] if len(made) else None for name in ("layer", "region", "line", "size")}
            for moment, event, rounding in (("end", end, mark.allocated_bytes - mark.requested_bytes),
                                            ("peak", peak_event, mark.peak_allocated_bytes - mark.peak_requested_bytes)):
                own = table[(table["allocated_at"] < event) & (freed >= event)].groupby("category")["size"].sum()
                own["allocator rounding"] = rounding
                for category in CATEGORIES:
                    rows.append({"step": mark.step, "phase": mark.phase, "moment": moment, "category": category,
                                 "bytes": int(own.get(category, 0))} | (what if moment == "peak" else {}))
    return pd.DataFrame(rows)


def live_bytes(table: pd.DataFrame, first: int, end: int) -> pd.Series:
    """Live bytes after so many events, by number of events from ``first`` to ``end``."""
    freed = table.dropna(subset="freed_at")
    changes = np.zeros(end + 1)
    for at, sizes in ((table["allocated_at"], table["size"]), (freed["freed_at"], -freed["size"])):
        at = at.to_numpy(dtype=int) + 1
        np.add.at(changes, at[at <= end], sizes.to_numpy()[at <= end])
    return pd.Series(changes.cumsum()[first:], range(first, end + 1))


def predicted(config: Config) -> pd.DataFrame:
    """The accounting's bytes by category: columns moment (``at rest``, ``after loss``, ``peak``), category, bytes.

    After loss, what is saved for backward is complete; without gradients there is no such moment.
    """
    moments = {"at rest": at_rest(config), "peak": peak(config).categories}
    if config.mode != "forward":
        f, at = require_formulas(config), at_rest(config)
        logits = value(f.logits, config)
        copies = config.num_layers * value(f.copies, config) + value(f.head_copies, config)
        saved = config.num_layers * value(f.saved, config) + value(f.end, config) - value(f.head_copies, config) - logits
        workspace = next(i for i in instants(config) if i.phase == "loss").categories["cuBLAS workspace"]
        # Logits and loss are held by the step.
        moments["after loss"] = at | {"activations": saved + value(f.loss_saved, config), "autocast copies": copies,
                                      "other": at["other"] + logits + 4, "cuBLAS workspace": workspace}
    return pd.DataFrame([(moment, category, size) for moment, sizes in moments.items() for category, size in sizes.items()],
                        columns=["moment", "category", "bytes"])


@contextmanager
def checkpointed(model: torch.nn.Module, blocks: int) -> Iterator[None]:
    """Keep only the input of every ``blocks`` blocks; backward runs them again from there. 0 changes nothing."""
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x = model.embed(tokens)
        for first in range(0, len(model.blocks), blocks):
            x = checkpoint(run, first, x, use_reentrant=False, preserve_rng_state=False)  # there is no dropout
        return model.logits(model.final_norm(x))

    def run(first: int, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks[first:first + blocks]:
            x = block(x, model.cos, model.sin, model.future)
        return x

    if not blocks:
        yield
        return
    model.forward = forward  # shadows the class's; deleting it brings that back
    try:
        yield
    finally:
        del model.forward


def measure_checkpoints(config: Config) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Peak and time of each setting of ``checkpoints``, in one process, on the same model.

    Returns samples (as ``timing.measure``'s, with a column ``blocks_per_checkpoint``) and a row a setting:
    ``blocks_per_checkpoint``, ``status`` (``ok`` or ``oom``), ``predicted_bytes`` (allocated), and on a GPU
    ``peak_allocated_bytes``, ``peak_requested_bytes``, ``peak_reserved_bytes``.
    """
    step, samples, rows = build_step(config), [], []
    for blocks in config.checkpoints:
        if config.device == "cuda":
            step.clear_gradients()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row = {"blocks_per_checkpoint": blocks, "status": "ok", "predicted_bytes": peak(config, blocks).allocated}
        try:
            with checkpointed(step.model, blocks):
                samples.append(measure(step).assign(blocks_per_checkpoint=blocks))
        except torch.OutOfMemoryError:
            row["status"] = "oom"
        if config.device == "cuda":
            row |= {name: number for name, number in counters().items() if name.startswith("peak")}
        rows.append(row)
    return pd.concat(samples, ignore_index=True) if samples else pd.DataFrame(), pd.DataFrame(rows)


def use_segments(config: Config) -> None:
    """Give the allocator the configuration's option; before anything is on the GPU."""
    if config.device == "cuda" and config.expandable_segments:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def at_peak(table: pd.DataFrame) -> pd.DataFrame:
    """When exactly each phase of each step peaks: step, phase, ``requested_mib``, ``allocated_mib``, layer, region, line, and
    ``size_mib`` of the allocation that made the peak."""
    own = table[table["moment"] == "peak"]
    keys = ["run_id", "step", "phase"] if "run_id" in own else ["step", "phase"]
    sums = own.groupby(keys, sort=False)["bytes"].sum() / MIB
    without = own[own["category"] != "allocator rounding"].groupby(keys, sort=False)["bytes"].sum() / MIB
    first = own.drop_duplicates(keys).set_index(keys)
    return pd.DataFrame({"requested_mib": without, "allocated_mib": sums, "layer": first["layer"], "region": first["region"],
                         "line": first["line"], "size_mib": first["size"] / MIB}).reset_index()


TABLES = ("allocations.parquet", "levels", "saved", "checkpoints", "samples")


def all_runs(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """The study's tables over all records, each row with its run's configuration; ``runs`` has a row a run, the ones that ended
    out of memory too, with ``predicted_mib``, the accounting's peak of its configuration. Empty tables where nothing was run."""
    records = [record for record in records if record.study == "memory" and record.done]
    if not records:
        return dict.fromkeys(("runs", "predicted", *TABLES), pd.DataFrame())
    runs = runs_frame(records)
    configs = [configure(**record.config | {"device": "cpu"}).model_copy(update={"device": record.config["device"]}) for record in records]
    runs["predicted_mib"] = [peak(config).allocated / MIB for config in configs]
    runs["parameters_bytes"] = [at_rest(config)["parameters"] for config in configs]
    runs["measured"] = ["checkpointing" if config.checkpoints else "history" for config in configs]
    runs["gpu_memory_mib"] = [record.machine.get("gpu_memory_mib", float("nan")) for record in records]
    tables = {name: load_table(store, records, name) for name in TABLES}
    # What a record says was predicted is what the formulas said then.
    tables["predicted"] = pd.concat([predicted(config).assign(run_id=config.run_id) for config in configs], ignore_index=True)
    if len(tables["checkpoints"]):
        tables["checkpoints"] = tables["checkpoints"].merge(runs[["run_id", "size", "context_length"]], on="run_id")
    return {"runs": by_size(runs)} | tables


def largest_allocations(table: pd.DataFrame, number: int = 8) -> pd.DataFrame:
    """The largest allocations of one run's last forward pass by line of code and size: line, region, size (bytes), times, layers."""
    own = table[(table["phase"] == "forward") & (table["step"] == table["step"].max())]
    grouped = own.groupby(["line", "region", "size"], sort=False).agg(times=("size", "size"), layers=("layer", "nunique")).reset_index()
    return grouped.sort_values(["size", "times"], ascending=False, kind="stable", ignore_index=True).head(number)
