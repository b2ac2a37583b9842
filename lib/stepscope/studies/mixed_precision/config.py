"""Configuration of the mixed-precision study."""

from typing import Literal

from pydantic import Field

from stepscope.config import StepConfig


class Config(StepConfig):
    """A run that measures one model at one context length in every precision and mode, in one process."""

    study: Literal["mixed_precision"] = "mixed_precision"
    mode: Literal["all"] = "all"
    precision: Literal["all"] = "all"
    compile: Literal["none"] = "none"
    warmup_steps: int = Field(2, ge=0, le=10**6)  # for each mode
    numerics: bool = False  # also run the experiments on number formats
