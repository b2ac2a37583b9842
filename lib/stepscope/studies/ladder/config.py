"""Configuration of the ladder: the optimizations, ablations and baselines that a run measures."""

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
# The ladder: each optimization is applied on top of the previous optimizations.
LADDER_OPTIMIZATIONS: tuple[Optimization, ...] = get_args(Optimization)[:9]
# Optimizations that are applied to the fully optimized step, one at a time. They may pay off with a large
# vocabulary or a large batch.
BEYOND: tuple[Optimization, ...] = get_args(Optimization)[9:]
FILLED = "filled"  # the fully optimized step with the chunked loss, at the batch size that fills memory
# Ablations: optimizations that can be left out of the fully optimized step, in rows named "without_...". Leaving
# out any other optimization would change nothing: the matmuls would still be bf16, and AdamW would still be one
# kernel.
ABLATABLE: tuple[Optimization, ...] = (
    "sdpa",
    "compiled_blocks",
    "cuda_graph",
    "bf16_weights",
    "bf16_moments",
)
WITHOUT = tuple(f"without_{name}" for name in ABLATABLE)
Baseline = Literal[
    "hugging_face",
    "hugging_face_reduce_overhead",
    "hugging_face_no_mask",
    "hugging_face_no_mask_cuda_graph",
    "fast_step",
]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
NO_MASK = BASELINES[2:4]  # baselines without a mask, as in our model; the second is a CUDA graph

# Columns of the table of steps, which has one row per optimization and batch size.
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
# More columns: the spread of step times, the time to enqueue a step, and the gradient error of a trained model.
ADDED = ("wall_q1_ms", "wall_q3_ms", "wall_min_ms", "enqueue_ms", "trained_gradient_error")


class Config(StepConfig):
    """A run that optimizes a training step in one process, one optimization at a time, starting from fp32."""

    study: Literal["ladder"] = "ladder"
    # These fields describe the first step, fp32. Optimizations then change the step itself, not the fields.
    mode: Literal["step"] = "step"
    precision: Literal["fp32"] = "fp32"
    attention: Literal["naive"] = "naive"
    compile: Literal["none"] = "none"
    optimizer: Literal["foreach"] = "foreach"
    optimizations: list[Optimization] = Field([*LADDER_OPTIMIZATIONS], min_length=1)
    # Optimizations to leave out of the fully optimized step, one at a time.
    ablations: list[Optimization] = Field([])
    baselines: list[Baseline] = Field([])
    # The batch sizes to measure; if empty, only batch_size.
    batch_sizes: list[Annotated[int, Field(ge=1, le=2**20)]] = Field([])
    fill_memory: bool = False  # also measure the batch size that fills the memory
    # The number of training steps on text for every optimization; the first optimization trains with three seeds.
    training_steps: int = Field(0, ge=0, le=10**6)

    @field_validator("ablations")
    @classmethod
    def check_ablations(cls, ablations: list[Optimization]) -> list[Optimization]:
        invalid = [name for name in ablations if name not in ABLATABLE]
        if invalid:
            raise ValueError(
                f"ablations: got {', '.join(invalid)}, but only {', '.join(ABLATABLE)} can be left out of the"
                " fully optimized step"
            )
        return ablations
