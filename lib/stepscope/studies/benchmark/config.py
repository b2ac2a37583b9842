"""What a run of the benchmarking study has."""
from typing import Literal

from stepscope.config import StepConfig


class Config(StepConfig):
    """End-to-end timing of the step."""

    study: Literal["benchmark"] = "benchmark"
