"""What a run of the memory study has."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stepscope.config import Layers, StepConfig, Steps

Mode = Literal["forward", "forward_backward", "step"]


class Config(StepConfig):
    """A run that records every allocation of one step in each of ``modes``.

    With ``blocks_per_checkpoint``, the run measures time and peak memory of each checkpoint size instead; with
    ``nested_blocks``, of each checkpoint policy over each of these numbers of blocks.
    """

    study: Literal["memory"] = "memory"
    mode: Literal["step"] = "step"  # the modes are measured in one run
    compile: Literal["none"] = "none"  # what is compiled has no formula
    warmup_steps: int = Field(1, ge=0, le=10)
    timed_steps: Steps = 2  # of checkpoints and stacks
    modes: list[Mode] = Field(["forward", "step"], min_length=1, max_length=3)
    # Blocks a checkpoint, each measured in turn; 0: no checkpoints.
    blocks_per_checkpoint: list[Annotated[int, Field(ge=0, le=10_000)]] = Field([], max_length=100)
    nested_blocks: list[Layers] = Field([], max_length=20)  # numbers of blocks, in place of the size's
    expandable_segments: bool = False  # the allocator's option of that name
    save_snapshot: bool = False  # keep a pickle of the last mode for PyTorch's memory viewer

    @classmethod
    def notebook_for(cls, fields: Mapping[str, Any]) -> str:
        has_checkpoints = fields.get("blocks_per_checkpoint") or fields.get("nested_blocks")
        return "checkpointing" if has_checkpoints else "memory"

    @model_validator(mode="after")
    def one_kind(self) -> "Config":
        if self.nested_blocks and self.blocks_per_checkpoint:
            raise ValueError(
                f"nested_blocks: got {self.nested_blocks}, but blocks_per_checkpoint is given too; they need"
                " separate runs"
            )
        if more := [blocks for blocks in self.blocks_per_checkpoint if blocks > self.num_layers]:
            raise ValueError(f"blocks_per_checkpoint: got {more[0]}, but there are {self.num_layers} blocks")
        return self
