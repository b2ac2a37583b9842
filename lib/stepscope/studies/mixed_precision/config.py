"""What a run of the mixed-precision study has."""
from typing import Literal

from stepscope.config import StepConfig


class Config(StepConfig):
    """Every precision and mode of one size and context, one after another in one process."""

    study: Literal["mixed_precision"] = "mixed_precision"
    mode: Literal["all"] = "all"
    precision: Literal["all"] = "all"
    count_casts: bool = False  # profile a step of fp16 and of bf16 for what changing types costs
    experiments: bool = False  # the small experiments on number formats, too
