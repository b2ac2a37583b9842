"""What a run of the benchmarking study has."""

from typing import Literal

from pydantic import Field

from stepscope.config import StepConfig


class Config(StepConfig):
    """One shape's forward, forward + backward and full step, end to end."""

    study: Literal["benchmark"] = "benchmark"
    mode: Literal["all"] = "all"
    repeat: int = Field(0, ge=0, le=1000)  # another run of the same
