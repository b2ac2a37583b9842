"""What a run of the mixed-precision study has."""
from typing import Any, Literal

from pydantic import Field, model_validator

from stepscope.config import StepConfig


class Config(StepConfig):
    """Every precision and mode of one size and context, one after another in one process."""

    study: Literal["mixed_precision"] = "mixed_precision"
    mode: Literal["all"] = "all"
    precision: Literal["all"] = "all"
    experiments: bool = False  # the small experiments on number formats, too
    captured_steps: int = Field(0, ge=0, le=100)  # of each cell, when all are timed; they tell who waits

    @model_validator(mode="before")
    @classmethod
    def drop_count_casts(cls, values: Any) -> Any:
        """Records of before have that field; what it measured is in the captures, for every size."""
        if not isinstance(values, dict):
            return values
        return {field: value for field, value in values.items() if field != "count_casts"}
