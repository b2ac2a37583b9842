"""Define the memory study's views: memory at its peaks by kind, the code that allocates it, and checkpoints."""

from collections.abc import Callable

import pandas as pd

from stepscope.config import EDITIONS, MODE_NAMES, PRECISION_NAMES, SIZES, StepConfig
from stepscope.model.accounting import BLOCK_GRADIENTS, GIB, KINDS, MIB, formulas_of, peak, value
from stepscope.model.flops import parameter_count
from stepscope.report.tables import digits
from stepscope.studies.memory.tables import CONFIG, LIVE, column
from stepscope.studies.memory.tables import predicted as written_step
from stepscope.views import Views, in_order, view

STEP = [*CONFIG]
KIND_COLUMNS = [column(kind) for kind in KINDS]
STAGES = ["forward", "loss", "backward", "optimizer"]
PREDICTED_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Bytes that each operation of a block saves for backward, in fp32 with naive attention. The letters are defined in
# :func:`stepscope.model.accounting.terms`. If several operations save the same tensor, it counts for the first of
# them.
OPERATION_FORMULAS = {
    "second multiplication of SwiGLU (by up_proj's output)": "8G",
    "attention weights @ v": "4S + 4X",
    "exponentials of softmax": "4S",
    "sigmoid of SwiGLU": "4G",
    "first multiplication of SwiGLU (gate by sigmoid)": "4G",
    "down_proj": "4G",
    "norms: input by scale": "8X + 8r",
    "norms: multiplication by the weight": "8X",
    "q @ k": "8X",
    "q_proj, k_proj and v_proj": "4X",
    "gate_proj and up_proj": "4X",
    "o_proj": "4X",
    "division of softmax": "4n",
}
# Columns computed from a configuration's dimensions.
BLOCK_FORMULAS = [
    "num_layers",
    "num_heads",
    "d_model",
    "d_ff",
    "block_parameters",
    "formula_saved_mib",
    "formula_gradients_mib",
    "residual_mib",
    "scores_mib",
]
CHECKPOINT_FORMULAS = ["input_mib", "block_saved_mib", "block_gradients_mib"]
TRAINING_BYTES = 16  # per parameter: its weight, gradient and two AdamW moments in fp32


@view(
    key=[*STEP, "mode", "phase"],
    columns=[
        "mode_name",
        "mode_precision",
        "status",
        "peak_gib",
        "requested_gib",
        "reserved_gib",
        "reserved_ratio",
        "predicted_gib",
        "predicted_requested_gib",
        "beyond_formula_bytes",
        *KIND_COLUMNS,
        "peak_in",
        "begins_backward",
    ],
    studies=["memory"],
)
def peaks(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode and phase, with the allocated peak and its contents by kind.

    The phase "total" gives the mode's highest peak; it is the only phase with a prediction. ``reserved_ratio`` is
    the reserved memory divided by the peak. ``beyond_formula_bytes`` is the requested memory minus the formula's
    prediction. ``begins_backward`` is true if the peak occurs in the backward pass of the loss or of the last
    block.
    """
    frame = _ordered(data.table("memory.peaks"), ["mode"])
    last_layer = frame["size"].map({size: shape.num_layers - 1 for size, shape in SIZES.items()})
    at_top = frame["layer"].isna() | (frame["layer"] == last_layer)
    beyond_gib = frame["requested_gib"] - frame["predicted_requested_gib"]
    mode_name = frame["mode"].map(MODE_NAMES)
    return frame.assign(
        mode_name=mode_name,
        mode_precision=mode_name + ", " + frame["precision"].map(PRECISION_NAMES),
        reserved_ratio=frame["reserved_gib"] / frame["peak_gib"],
        beyond_formula_bytes=(beyond_gib * GIB).round(),
        begins_backward=(frame["peak_in"] == "backward") & at_top,
    )


@view(
    key=[*STEP, "mode", "phase", "kind"],
    columns=["stage", "held_gib"],
    studies=["memory"],
)
def peak_kinds(data: Views) -> pd.DataFrame:
    """Return one row per peak and kind of tensor, with the memory in GiB; the kind "all" is the complete peak."""
    frame = data["peaks"]
    stage = frame["phase"].where(frame["mode"] != "forward", frame["phase"] + " alone")
    names = dict(zip(KIND_COLUMNS, KINDS)) | {"peak_gib": "all"}
    key = [*STEP, "mode", "phase"]
    long = frame.assign(stage=stage).melt([*key, "stage"], [*names], "kind", "held_gib")
    return in_order(long.assign(kind=long["kind"].map(names)))


@view(
    key=[*STEP, "mode"],
    columns=[f"{stage}_gib" for stage in STAGES] + ["peak_in", "rounding_gib", "reserved_gib"],
    studies=["memory"],
)
def stage_peaks(data: Views) -> pd.DataFrame:
    """Return one row per configuration and mode that fits into memory, with each stage's peak.

    For the highest peak, the row also gives the stage in which it occurs, the memory that the allocator's rounding
    adds, and the reserved memory.
    """
    frame = data["peaks"]
    frame = frame[frame["status"] == "ok"]
    total = frame[frame["phase"] == "total"]
    key = [*STEP, "mode"]
    stages = frame[frame["phase"] != "total"].pivot(index=key, columns="phase", values="peak_gib")
    stages = stages.reindex(columns=STAGES).add_suffix("_gib").reset_index()
    return total.merge(stages, on=key, validate="one_to_one")


@view(
    key=[*STEP, "mode", "event"],
    columns=["phase", *(column(kind) for kind in LIVE)],
    studies=["memory"],
)
def timeline(data: Views) -> pd.DataFrame:
    """Return one row per event of a recorded step, with the live requested memory of each kind in GiB.

    An event's number is the count of earlier allocations and frees.
    """
    return data.table("memory.timeline")


@view(
    key=[*STEP, "what", "rank"],
    columns=["region", "line", "source", "each_mib", "count", "together_gib", "sum_share"],
    studies=["memory"],
)
def allocations(data: Views) -> pd.DataFrame:
    """Return one row per group of equally large tensors that the same line of code allocates.

    ``what`` is "allocated in forward" (only the largest groups are recorded), "saved by a block" or "gradients of
    a block" (all groups are recorded). ``sum_share`` is the group's share of all tensors that a block saves, or of
    its gradients; it is missing for forward, whose small groups aren't recorded.
    """
    frame = data.table("memory.allocations")
    together_mib = frame["mib"] * frame["count"]
    sums = together_mib.groupby([frame[name] for name in (*STEP, "what")]).transform("sum")
    is_complete = frame["what"] != "allocated in forward"
    return frame.assign(
        each_mib=frame["mib"],
        together_gib=together_mib / 1024,
        sum_share=(together_mib / sums).where(is_complete),
    )


@view(
    key=STEP,
    columns=[
        *BLOCK_FORMULAS,
        "saved_mib",
        "saved_tensors",
        "gradients_mib",
        "saved_ratio",
    ],
    studies=["memory"],
)
def block_memory(data: Views) -> pd.DataFrame:
    """Return one row per configuration, with the memory of one block's saved tensors and gradients.

    ``formula_...`` is computed from the dimensions (:mod:`stepscope.model.accounting`); ``saved_ratio`` is the
    saved memory divided by the gradients' memory. ``residual_mib`` is the size of one fp32 residual stream tensor,
    4 B T C bytes; ``scores_mib`` is the size of one fp32 T x T matrix per head and sequence, 4 B H T T bytes.
    """
    groups = data["allocations"]
    saved = groups[groups["what"] == "saved by a block"]
    gradients = groups[groups["what"] == "gradients of a block"]
    by_step = saved.groupby(STEP, sort=False)
    sums = pd.DataFrame(
        {
            "saved_mib": by_step["together_gib"].sum() * 1024,
            "saved_tensors": by_step["count"].sum(),
            "gradients_mib": gradients.groupby(STEP, sort=False)["together_gib"].sum() * 1024,
        }
    ).reset_index()
    expected = _by_formula(sums, _block_by_formula, BLOCK_FORMULAS)
    frame = in_order(sums.join(expected))
    return frame.assign(saved_ratio=frame["saved_mib"] / frame["gradients_mib"])


@view(
    key=[*STEP, "operation"],
    columns=["saved_mib", "saved_share", "rank"],
    studies=["memory"],
)
def block_operations(data: Views) -> pd.DataFrame:
    """Return the memory that each operation saves for backward, for fp32 configurations with naive attention.

    :data:`OPERATION_FORMULAS` predicts the memory; the view adds the operation's share of all memory that the
    block saves, and the operation's rank by size. Records don't contain the memory by operation, because they name
    only the line of code that saved a tensor, and a line can contain several operations.
    """
    blocks = data["block_memory"]
    is_covered = (blocks["precision"] == "fp32") & (blocks["attention"] == "naive")
    blocks = blocks[is_covered & blocks["formula_saved_mib"].notna()]
    rows = [
        {**step, "operation": operation, "saved_mib": value(formula, config) / MIB}
        for step, config in zip(blocks[[*STEP, "formula_saved_mib"]].to_dict("records"), _configs(blocks))
        for operation, formula in OPERATION_FORMULAS.items()
    ]
    frame = pd.DataFrame(rows)
    rank = frame.groupby(STEP, sort=False)["saved_mib"].rank(method="first", ascending=False)
    share = frame["saved_mib"] / frame["formula_saved_mib"]
    return frame.assign(rank=rank.astype(int), saved_share=share).sort_values("rank", kind="stable")


def _block_by_formula(config: StepConfig) -> dict[str, float]:
    """Return a block's dimensions, and the sizes in MiB computed from them."""
    gradient_bytes = value(BLOCK_GRADIENTS, config)
    naive = config.model_copy(update={"attention": "naive"})
    return {
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "formula_saved_mib": _saved_bytes(config) / MIB,
        "block_parameters": gradient_bytes // 4,
        "formula_gradients_mib": gradient_bytes / MIB,
        "residual_mib": value("4X", config) / MIB,
        "scores_mib": value("4S", naive) / MIB,
    }


def _by_formula(
    frame: pd.DataFrame, compute: Callable[[StepConfig], dict[str, float]], columns: list[str]
) -> pd.DataFrame:
    """Compute columns from each row's configuration; the values are missing for rows with an unnamed size."""
    named = frame[frame["size"].isin([*SIZES])]
    computed = pd.DataFrame([compute(config) for config in _configs(named)], named.index, columns)
    return computed.reindex(frame.index)


def _configs(frame: pd.DataFrame) -> list[StepConfig]:
    """Return each row's configuration, with a GPU as the device."""
    fields = [name for name in STEP if name != "expandable_segments"]
    configs = [StepConfig(**row, device="cpu") for row in frame[fields].to_dict("records")]
    return [config.model_copy(update={"device": "cuda"}) for config in configs]


@view(
    key=[*STEP, "mode", "blocks", "checkpoint_policy"],
    columns=[
        "mode_name",
        "status",
        "blocks_per_checkpoint",
        "per_checkpoint",
        "peak_gib",
        "peak_ratio",
        "predicted_gib",
        "reserved_gib",
        "beyond_state_gib",
        "formula_saved_gib",
        "block_runs",
        "gpu_ms",
        "gpu_ratio",
        "gpu_wall_ratio",
        "wall_ms",
        "wall_std_ms",
        "steps",
        *CHECKPOINT_FORMULAS,
        "best_group",
        "added_gib",
        "formula_added_gib",
    ],
    studies=["memory"],
)
def checkpoints(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode, number of blocks and checkpoint policy, with peak memory and time.

    ``peak_ratio`` and ``gpu_ratio`` are relative to the same case without checkpointing. ``gpu_wall_ratio`` is GPU
    time divided by wall time. ``beyond_state_gib`` is the peak minus the state (weights and gradients).

    ``best_group`` is the number of blocks per checkpoint, k (a real number), that minimizes the total memory of
    N/k checkpoint inputs (``input_mib`` each) and of the tensors that k blocks save (``block_saved_mib`` per
    block): k = sqrt(N x input / saved). ``added_gib`` is the memory that each block beyond a checkpoint's first
    block adds to the peak. According to the formula, it is the memory that a block saves minus its gradients'
    memory, because the peak occurs when backward reaches the first checkpoint, and by then the gradients of all
    later blocks are allocated.
    """
    frame = data.table("memory.checkpoints")
    frame = frame.rename(columns={"expected_saved_gib": "formula_saved_gib"})
    key = [*STEP, "mode", "blocks"]
    without = frame.loc[frame["checkpoint_policy"] == "none", [*key, "peak_gib", "gpu_ms"]]
    frame = frame.merge(without, on=key, how="left", suffixes=("", "_without"), validate="many_to_one")
    single = frame.loc[frame["blocks_per_checkpoint"] == 1, [*key, "peak_gib"]]
    frame = frame.merge(single, on=key, how="left", suffixes=("", "_single"), validate="many_to_one")
    sizes = _by_formula(frame, _checkpoint_by_formula, CHECKPOINT_FORMULAS)
    group_squared = frame["blocks"] * sizes["input_mib"] / sizes["block_saved_mib"]
    groups = frame["blocks_per_checkpoint"]
    more_blocks = (groups - 1).where(groups > 1)
    added_mib = sizes["block_saved_mib"] - sizes["block_gradients_mib"]
    frame = frame.join(sizes).assign(
        mode_name=frame["mode"].map(MODE_NAMES),
        per_checkpoint=groups.map(_group_text),
        peak_ratio=frame["peak_gib"] / frame["peak_gib_without"],
        gpu_ratio=frame["gpu_ms"] / frame["gpu_ms_without"],
        gpu_wall_ratio=frame["gpu_ms"] / frame["wall_ms"],
        beyond_state_gib=frame["peak_gib"] - frame["state_gib"],
        best_group=group_squared**0.5,
        added_gib=(frame["peak_gib"] - frame["peak_gib_single"]) / more_blocks,
        formula_added_gib=added_mib / 1024,
        place=groups.replace(0, float("inf")),
    )
    return _ordered(frame.sort_values("place", kind="stable"), ["blocks", "mode"])


def _group_text(blocks: float) -> str:
    """Format the number of blocks per checkpoint ("none" for 0, "" for nested policies)."""
    if pd.isna(blocks):
        return ""
    return digits(blocks, "n") if blocks else "none"


def _checkpoint_by_formula(config: StepConfig) -> dict[str, float]:
    """Return the sizes of a block's input, saved tensors and gradients, in MiB."""
    return {
        "input_mib": value("4X", config) / MIB,
        "block_saved_mib": _saved_bytes(config) / MIB,
        "block_gradients_mib": value(BLOCK_GRADIENTS, config) / MIB,
    }


def _saved_bytes(config: StepConfig) -> int:
    """Return the bytes that a block saves for backward, including the weight copies that autocast caches."""
    formulas = formulas_of(config)
    return value(formulas.saved, config) + value(formulas.weight_cache, config)


@view(
    key=[*STEP, "change"],
    columns=["measure", "before_gib", "after_gib", "less_share"],
    studies=["memory"],
)
def memory_savings(data: Views) -> pd.DataFrame:
    """Return one row per configuration and measured change, with the memory before and after the change.

    The key is the configuration before the change. ``measure`` names the memory that is compared: the full
    step's peak, the full step's reserved memory, or the peak of forward and backward. ``less_share`` is 1 -
    after / before.
    """
    totals = data["peaks"]
    steps = totals[(totals["mode"] == "step") & (totals["phase"] == "total")]
    settings = data["checkpoints"]
    settings = settings[settings["mode"] == "forward_backward"]
    size_blocks = settings["size"].map({size: shape.num_layers for size, shape in SIZES.items()})
    settings = settings[settings["blocks"] == size_blocks]
    written = {"attention": "naive", "optimizer": "foreach"}
    fused = {"attention": "sdpa", "optimizer": "fused"}
    changes = [
        _saving(steps, "bf16 autocast", {"precision": "fp32"}, {"precision": "bf16"}),
        _saving(steps, "fused attention and AdamW", written, fused),
        _saving(
            steps,
            "expandable segments",
            {"expandable_segments": False},
            {"expandable_segments": True},
            "reserved_gib",
        ),
        _saving(
            settings,
            "a checkpoint around each block",
            {"checkpoint_policy": "none"},
            {"checkpoint_policy": "every 1"},
        ),
    ]
    frame = pd.concat(changes, ignore_index=True)
    return in_order(frame.assign(less_share=1 - frame["after_gib"] / frame["before_gib"]))


def _saving(
    frame: pd.DataFrame, change: str, before: dict, after: dict, measured: str = "peak_gib"
) -> pd.DataFrame:
    """Pair rows that match ``before`` with rows that match ``after`` and agree in all remaining fields."""
    alike = [name for name in (*STEP, "mode") if name not in before]
    changed = frame[_have(frame, after)][[*alike, measured]]
    pairs = frame[_have(frame, before)].merge(
        changed, on=alike, suffixes=("", "_after"), validate="one_to_one"
    )
    measure = "reserved" if measured == "reserved_gib" else "peak"
    return pairs.assign(
        change=change,
        measure=f"{measure}, " + pairs["mode_name"],
        before_gib=pairs[measured],
        after_gib=pairs[f"{measured}_after"],
    ).dropna(subset=["before_gib", "after_gib"])


def _have(frame: pd.DataFrame, values: dict) -> pd.Series:
    """Return a mask of the rows that contain all the given values."""
    return (frame[[*values]] == pd.Series(values)).all(axis=1)


@view(
    key=STEP,
    columns=[
        "num_layers",
        "num_heads",
        "d_model",
        "d_ff",
        "parameters",
        "state_gib",
        "predicted_gib",
        "peak_in",
        "growing_share",
        *KIND_COLUMNS,
        "runs_out",
    ],
    studies=["memory"],
)
def predictions(data: Views) -> pd.DataFrame:
    """Return one row per handout size, context length and precision, with the predicted peak of the full step.

    The step is the one in the assignment, with naive attention and PyTorch's default AdamW. ``state_gib`` is the
    memory for weights, gradients and AdamW's two moments in fp32, 16 bytes per parameter. ``growing_share`` is the
    share of the peak that grows with the context length: saved tensors, and temporaries except AdamW's.
    ``runs_out`` is true if the step was measured and ran out of memory.
    """
    steps = [
        written_step(size, context_length=context, precision=precision)  # type: ignore[arg-type]
        for size in dict.fromkeys([*EDITIONS[2025], "10B"])
        for context in PREDICTED_CONTEXTS
        for precision in ("fp32", "bf16")
    ]
    frame = pd.DataFrame([_prediction(step) for step in steps])
    totals = data["peaks"]
    totals = totals[(totals["mode"] == "step") & (totals["phase"] == "total")]
    frame = frame.merge(totals[[*STEP, "status"]], on=STEP, how="left", validate="one_to_one")
    is_activation = frame["peak_in"] != "optimizer"
    growing = frame[column("saved for backward")] + frame[column("temporaries")] * is_activation
    return frame.assign(
        growing_share=growing / frame["predicted_gib"],
        runs_out=frame["status"] == "oom",
    )


def _prediction(config: StepConfig) -> dict:
    """Return a step's configuration, dimensions and predicted peak as a row's columns."""
    top = peak(config)
    fields = {name: getattr(config, name, False) for name in STEP}
    dimensions = SIZES[config.size]._asdict()
    parameters = parameter_count(config)
    kinds = {column(kind): size / GIB for kind, size in top.kinds.items()}
    sums = {
        "parameters": parameters,
        "state_gib": TRAINING_BYTES * parameters / GIB,
        "predicted_gib": top.allocated / GIB,
        "peak_in": top.phase,
    }
    return fields | dimensions | sums | kinds


@view(
    key=STEP,
    columns=["path"],
    studies=["memory"],
)
def snapshots(data: Views) -> pd.DataFrame:
    """Return one row per run that saved a snapshot for PyTorch's memory viewer.

    ``path`` is the snapshot's path in the runs folder.
    """
    runs = data.table("runs")
    kept = (runs["study"] == "memory") & runs["save_snapshot"].eq(True)
    frame = runs[kept & (runs["status"] == "ok")]
    return frame.assign(path="memory/" + frame["run_id"] + "/snapshot.pickle")


def _ordered(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Sort rows by size and context length, then by precision (fp32 first) and the named columns."""
    ranks = {name: rank for rank, name in enumerate((*PRECISION_NAMES, *MODE_NAMES))}
    ranked = frame.sort_values(
        ["precision", *names], kind="stable", key=lambda values: values.map(ranks).fillna(values)
    )
    return in_order(ranked)
