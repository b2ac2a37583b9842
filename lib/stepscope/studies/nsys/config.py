"""Configuration of the profiling study."""

from typing import Literal

from stepscope.config import StepConfig


class Config(StepConfig):
    """A run that profiles all modes of one model at one context length, in one process and one capture."""

    study: Literal["nsys"] = "nsys"
    mode: Literal["all"] = "all"
    compile: Literal["none"] = "none"  # ranges around modules would change what is compiled
    # These numbers are fixed, because the profiled process chooses the number of steps from their duration.
    warmup_steps: Literal[5] = 5
    timed_steps: Literal[10] = 10
