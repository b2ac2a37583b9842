"""What a run of the study of the compiled model has."""
from typing import Literal, Self

from pydantic import Field, model_validator

from stepscope.config import StepConfig, Steps


class Config(StepConfig):
    """The whole model eager and compiled, with each attention: every mode of all in one process."""

    study: Literal["compile"] = "compile"
    mode: Literal["all"] = "all"
    attention: Literal["all"] = "all"  # type: ignore[assignment]
    compile: Literal[False] = False
    attentions: list[Literal["eager", "sdpa"]] = Field(["eager", "sdpa"], min_length=1)
    # What torch.compile is given: nothing, each block (compiled once and used for all), the whole model, or
    # that with CUDA graphs of what it compiles to.
    variants: list[Literal["eager", "block", "model", "cuda_graphs"]] = Field(["eager", "block"],
                                                                              min_length=1)
    turns: Steps = 1  # the timed steps are taken in so many turns, of all variants one after another
    captured_steps: int = Field(0, ge=0, le=100)  # whose kernels are counted, after the timed ones; 0: none

    @model_validator(mode="after")
    def turns_have_steps(self) -> Self:
        if self.turns > self.timed_steps:
            raise ValueError(f"turns: got {self.turns}, but there are only {self.timed_steps} timed steps")
        return self
