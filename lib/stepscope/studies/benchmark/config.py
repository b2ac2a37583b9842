"""Configuration of the benchmarking study."""

from typing import Literal

from pydantic import Field

from stepscope.config import StepConfig


class Config(StepConfig):
    """A run that times forward, forward + backward and the full step of one configuration, end to end."""

    study: Literal["benchmark"] = "benchmark"
    mode: Literal["all"] = "all"
    repeat: int = Field(0, ge=0, le=1000)  # distinguishes repeated runs of one configuration
