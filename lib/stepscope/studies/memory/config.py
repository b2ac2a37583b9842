"""What a run of the memory study has."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stepscope.config import Layers, StepConfig, Steps

Mode = Literal["forward", "forward_backward", "step"]


class Config(StepConfig):
    """Every allocation of one step after a warm-up, of each of ``modes``; or, with ``checkpoints``, time and
    peak of each setting in each mode; or, with ``stacks``, of each checkpoint policy over so many
    blocks."""

    study: Literal["memory"] = "memory"
    mode: Literal["step"] = "step"  # the modes are measured in one run
    compile: Literal["none"] = "none"  # what is compiled has no formula
    warmup_steps: int = Field(1, ge=0, le=10)
    timed_steps: Steps = 2  # of checkpoints and stacks
    modes: list[Mode] = Field(["forward", "step"], min_length=1, max_length=3)
    # Blocks a checkpoint, each measured in turn; 0: no checkpoints.
    checkpoints: list[Annotated[int, Field(ge=0, le=10_000)]] = Field([], max_length=100)
    stacks: list[Layers] = Field([], max_length=20)  # numbers of blocks, in place of the size's
    expandable_segments: bool = False  # the allocator's option of that name
    keep_snapshot: bool = False  # keep a pickle of the last mode for PyTorch's memory viewer

    @classmethod
    def notebook_for(cls, fields: Mapping[str, Any]) -> str:
        return "checkpointing" if fields.get("checkpoints") or fields.get("stacks") else "memory"

    @model_validator(mode="after")
    def one_kind(self) -> "Config":
        if self.stacks and self.checkpoints:
            raise ValueError(
                f"stacks: got {self.stacks}, but checkpoints is given too, which is measured in"
                " a run of its own"
            )
        if more := [blocks for blocks in self.checkpoints if blocks > self.num_layers]:
            raise ValueError(f"checkpoints: got {more[0]}, but there are {self.num_layers} blocks")
        return self
