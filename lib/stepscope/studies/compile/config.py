"""What a run of the study of the compiled model has."""
from typing import Literal

from pydantic import Field

from stepscope.config import StepConfig


class Config(StepConfig):
    """The whole model eager and compiled, with each attention: every mode of all in one process."""

    study: Literal["compile"] = "compile"
    mode: Literal["all"] = "all"
    attention: Literal["all"] = "all"  # type: ignore[assignment]
    compile: Literal[False] = False
    attentions: list[Literal["eager", "sdpa"]] = Field(["eager", "sdpa"], min_length=1)
    # What torch.compile is given: nothing, each block (compiled once and used for all), or the whole model.
    variants: list[Literal["eager", "block", "model"]] = Field(["eager", "block"], min_length=1)
