"""Configuration of the memory study."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stepscope.config import Layers, StepConfig, Steps

Mode = Literal["forward", "forward_backward", "step"]


class Config(StepConfig):
    """A run that records every allocation of one step in each of ``modes``.

    If ``blocks_per_checkpoint`` is set, the run instead measures time and peak memory for each listed checkpoint
    size. If ``nested_blocks`` is set, it measures each checkpoint policy for each listed number of blocks.
    """

    study: Literal["memory"] = "memory"
    mode: Literal["step"] = "step"  # one run measures all modes
    compile: Literal["none"] = "none"  # there is no formula for the memory of compiled code
    warmup_steps: int = Field(1, ge=0, le=10)
    timed_steps: Steps = 2  # used only with checkpoints
    modes: list[Mode] = Field(["forward", "step"], min_length=1, max_length=3)
    # The checkpoint sizes to measure, in blocks; 0 for no checkpoints.
    blocks_per_checkpoint: list[Annotated[int, Field(ge=0, le=10_000)]] = Field([], max_length=100)
    nested_blocks: list[Layers] = Field([], max_length=20)  # numbers of blocks, instead of num_layers
    expandable_segments: bool = False  # the option of PyTorch's CUDA allocator
    save_snapshot: bool = False  # save the last mode's snapshot as a pickle for PyTorch's memory viewer

    @classmethod
    def notebook_for(cls, fields: Mapping[str, Any]) -> str:
        has_checkpoints = fields.get("blocks_per_checkpoint") or fields.get("nested_blocks")
        return "checkpointing" if has_checkpoints else "memory"

    @model_validator(mode="after")
    def check_checkpoints(self) -> "Config":
        if self.nested_blocks and self.blocks_per_checkpoint:
            raise ValueError(
                f"nested_blocks: got {self.nested_blocks}, but blocks_per_checkpoint is also set; use separate"
                " runs"
            )
        for blocks in self.blocks_per_checkpoint:
            if blocks > self.num_layers:
                raise ValueError(
                    f"blocks_per_checkpoint: got {blocks}, but the model has only {self.num_layers} blocks"
                )
        return self
