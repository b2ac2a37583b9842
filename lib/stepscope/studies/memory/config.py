"""What a run of the memory study has."""
from typing import Annotated, Literal

from pydantic import Field

from stepscope.config import StepConfig, Steps


class Config(StepConfig):
    """Every allocation of the first step and of a steady one; or, with ``checkpoints``, peak and time of each
    setting."""

    study: Literal["memory"] = "memory"
    warmup_steps: int = Field(1, ge=0, le=10**6)
    timed_steps: Steps = 1
    # Blocks per checkpoint, each measured in turn; 0: none are made.
    checkpoints: list[Annotated[int, Field(ge=0, le=10_000)]] = Field([], max_length=1000)
    expandable_segments: bool = False  # the allocator's option of that name
    keep_snapshot: bool = False        # keep a pickle for PyTorch's memory viewer, without paths
