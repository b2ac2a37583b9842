"""What a run of the profiling study has."""

from typing import Literal

from stepscope.config import StepConfig


class Config(StepConfig):
    """Profiles of one size and context: every mode in one capture, from one process."""

    study: Literal["nsys"] = "nsys"
    mode: Literal["all"] = "all"
    compile: Literal["none"] = "none"  # ranges within what is compiled would change it
    # The profiled process takes as many steps as their length asks for.
    warmup_steps: Literal[5] = 5
    timed_steps: Literal[10] = 10
