"""What a run of the ladder has: which changes it measures, and what it measures beside them."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from stepscope.config import StepConfig

Optimization = Literal[
    "fp32",
    "tf32",
    "bf16",
    "sdpa",
    "fused_adamw",
    "compiled_blocks",
    "cuda_graph",
    "bf16_weights",
    "bf16_moments",
    "chunked_loss",
    "fp8",
]
# In their order, each one change on the last.
LADDER_OPTIMIZATIONS: tuple[Optimization, ...] = get_args(Optimization)[:9]
# On top of the last, where they may pay: a large vocabulary, a large batch.
BEYOND: tuple[Optimization, ...] = get_args(Optimization)[9:]
FILLED = "filled"  # the last with the chunked loss, at the batch that fills the memory
# What can be left out of the last step, in rows named "without_...": its matmuls are bf16 and its AdamW is
# one kernel whatever came before, so the other changes are no part of it.
ABLATABLE: tuple[Optimization, ...] = (
    "sdpa",
    "compiled_blocks",
    "cuda_graph",
    "bf16_weights",
    "bf16_moments",
)
WITHOUT = tuple(f"without_{change}" for change in ABLATABLE)
Baseline = Literal[
    "hugging_face",
    "hugging_face_reduce_overhead",
    "hugging_face_no_mask",
    "hugging_face_no_mask_cuda_graph",
    "fast_step",
]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
FAIR = BASELINES[2:4]  # without a mask; the latter as one CUDA graph, as ours is

# Columns of the table of steps, one row a change and batch.
MEASURES = (
    "steps",
    "wall_ms",
    "wall_std_ms",
    "gpu_ms",
    "operations",
    "busy",
    "replayed_ms",
    "peak_gib",
    "reserved_gib",
    "sm_clock_mhz",
    "power_w",
    "energy_per_step_j",
    "tokens_per_s",
    "mfu",
    "mfu_vs_measured_peak",
    "mfu_clock_adjusted",
    "loss_error",
    "gradient_error",
    "compile_s",
    "matmul_ms",
    "memory_traffic_ms",
    "lower_bound_ms",
)
# and how the steps spread, who waits for whom, and how far a trained model's gradient is off
ADDED = ("wall_q1_ms", "wall_q3_ms", "wall_min_ms", "enqueue_ms", "trained_gradient_error")


class Config(StepConfig):
    """One training step from the assignment's to the fastest, a change at a time, all in one process."""

    study: Literal["ladder"] = "ladder"
    # Each change sets these for itself.
    mode: Literal["step"] = "step"
    precision: Literal["fp32"] = "fp32"
    attention: Literal["naive"] = "naive"
    compile: Literal["none"] = "none"
    optimizer: Literal["foreach"] = "foreach"
    optimizations: list[Optimization] = Field([*LADDER_OPTIMIZATIONS], min_length=1)
    ablations: list[Optimization] = Field([])  # the last step without each of these
    baselines: list[Baseline] = Field([])
    # the changes at each of these; empty: at batch_size
    batch_sizes: list[Annotated[int, Field(ge=1, le=2**20)]] = Field([])
    fill_memory: bool = False  # also the last step at the batch that fills the memory
    # of every change, and of three seeds of the first, on text; 0: none
    training_steps: int = Field(0, ge=0, le=10**6)

    @field_validator("ablations")
    @classmethod
    def can_be_left_out(cls, asked: list[Optimization]) -> list[Optimization]:
        if wrong := [change for change in asked if change not in ABLATABLE]:
            raise ValueError(
                f"ablations: got {', '.join(wrong)}, but what can be left out of the last step is"
                f" {', '.join(ABLATABLE)}; its matmuls are bf16, and its AdamW is one kernel"
            )
        return asked
