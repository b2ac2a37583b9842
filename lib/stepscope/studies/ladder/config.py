"""What a run of the ladder has: which changes it measures, and what it measures beside them."""
import math
from typing import Annotated, Literal, get_args

from pydantic import Field

from stepscope.config import StepConfig

Rung = Literal[
    "fp32", "tf32", "bf16", "sdpa", "fused", "blocks", "cuda_graph", "bf16_weights", "bf16_moments",
    "chunked", "fp8"]
# In their order, each one change on the last.
RUNGS: tuple[Rung, ...] = get_args(Rung)[:9]
# On top of the last, where they may pay: a large vocabulary, a large batch.
BEYOND: tuple[Rung, ...] = get_args(Rung)[9:]
FILLED = "filled"  # the last with the chunked loss, at the batch that fills the memory
BASELINES = ("hugging_face", "hugging_face_graphs")
Baseline = Literal["hugging_face", "hugging_face_graphs"]

# Columns of the table of steps, one row a change and batch.
MEASURES = (
    "steps", "wall_ms", "wall_std_ms", "gpu_ms", "operations", "busy", "replayed_ms", "peak_gib",
    "reserved_gib", "sm_clock_mhz", "power_w", "step_j", "tokens_per_s", "mfu", "mfu_measured",
    "mfu_at_clock", "loss_off", "gradient_off", "compile_s", "matmul_ms", "moved_ms", "bound_ms")
SPREAD = ("wall_q1_ms", "wall_q3_ms", "wall_min_ms", "enqueue_ms")  # records of before lack them
OF_BEFORE = ("energy_ms",)  # only records of before have it, and nothing is said of it


class Config(StepConfig):
    """One training step from the assignment's to the fastest, a change at a time, all in one process."""

    study: Literal["ladder"] = "ladder"
    # Each change sets these for itself.
    mode: Literal["step"] = "step"
    precision: Literal["fp32"] = "fp32"
    attention: Literal["naive"] = "naive"
    compile: Literal["none"] = "none"
    optimizer: Literal["foreach"] = "foreach"
    changes: list[Rung] = Field([*RUNGS], min_length=1)
    peers: list[Baseline] = Field([])
    # the changes at each of these; empty: at batch_size
    batches: list[Annotated[int, Field(ge=1, le=2**20)]] = Field([])
    fill: bool = False  # also the last step at the batch that fills the memory
    # of every change, and of three fp32 seeds, on text; 0: none
    training_steps: int = Field(0, ge=0, le=10**6)

    @property
    def gpu_gib(self) -> float | None:  # type: ignore[override]
        """All of a GPU's where batches are large."""
        return math.inf if self.fill or self.batches else None
