"""What a run of the memory study has."""
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stepscope.config import Layers, Length, StepConfig, Steps


class Config(StepConfig):
    """Every allocation of the first step and of a steady one; or, with ``checkpoints``, peak and time of each
    setting, with ``contexts`` at each of these; or, with ``stacks``, of each arrangement of checkpoints over
    so many blocks."""

    study: Literal["memory"] = "memory"
    warmup_steps: int = Field(1, ge=0, le=10**6)
    timed_steps: Steps = 1
    # Blocks per checkpoint, each measured in turn; 0: none are made.
    checkpoints: list[Annotated[int, Field(ge=0, le=10_000)]] = Field([], max_length=1000)
    # Contexts at which each of them (without any: no checkpoint) is measured, until it does not fit;
    # context_length is the longest.
    contexts: list[Length] = Field([], max_length=100)
    stacks: list[Layers] = Field([], max_length=100)  # numbers of blocks, in place of the size's
    expandable_segments: bool = False  # the allocator's option of that name
    keep_snapshot: bool = False        # keep a pickle for PyTorch's memory viewer, without paths

    @model_validator(mode="before")
    @classmethod
    def longest(cls, values: Any) -> Any:
        contexts = values.get("contexts") if isinstance(values, dict) else None
        if contexts and isinstance(contexts, list) and all(isinstance(context, int) for context in contexts):
            return values | {"context_length": max(contexts)}
        return values

    @model_validator(mode="after")
    def one_kind(self) -> "Config":
        if self.stacks and (self.checkpoints or self.contexts):
            raise ValueError(f"stacks: got {self.stacks}, but checkpoints or contexts is given too, which are"
                             " measured in a run of their own")
        return self
