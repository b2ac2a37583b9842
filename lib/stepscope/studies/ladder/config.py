"""What a run of the ladder has: which rungs it climbs, and what it measures beside them."""

from typing import Literal

from pydantic import Field

from stepscope.config import StepConfig

# In their order, each one change on the last. "graph" is a branch where rungs.STANDS_ON is "blocks"; "fill"
# is the finished step at the batch that fills the memory.
RUNGS = (
    "fp32",
    "tf32",
    "bf16",
    "sdpa",
    "fused",
    "blocks",
    "graph",
    "cuda_graphs",
    "no_casts",
    "wide",
    "chunked",
    "overlap",
    "fp8",
    "fill",
)
BESIDE = ("hugging_face", "hugging_face_bf16")


class Config(StepConfig):
    """One training step from the assignment's to the fastest, a change at a time, all rungs in one process in
    turns."""

    study: Literal["ladder"] = "ladder"
    # Each rung sets these for itself.
    mode: Literal["step"] = "step"
    precision: Literal["fp32"] = "fp32"
    attention: Literal["eager"] = "eager"
    compile: Literal[False] = False
    optimizer: Literal["foreach"] = "foreach"
    rungs: list[Literal[RUNGS]] = Field([*RUNGS], min_length=1)  # type: ignore[valid-type]
    beside: list[Literal[BESIDE]] = Field(["hugging_face"])  # type: ignore[valid-type]
    leave_out: bool = False  # also measure the finished step without each of its changes
    rounds: int = Field(2, ge=1, le=100)  # turns: all are measured once in each
    training_steps: int = Field(
        0, ge=0, le=10**6
    )  # of every rung and of three fp32 seeds, on real text; 0: none
    process: int = Field(0, ge=0, le=10**6)  # which repetition; the first compiles with an empty cache
    budget_s: int = Field(0, ge=0, le=10**6)  # after so many seconds the optional is skipped; 0: nothing is
