"""What a run of the profiling study has."""
from typing import ClassVar, Literal

from stepscope.config import StepConfig


class Config(StepConfig):
    """Profiles of one size and context: every mode in a capture of its own, from one process."""

    takes_turns: ClassVar[bool] = True

    study: Literal["nsys"] = "nsys"
    mode: Literal["all"] = "all"
    keep_export: bool = False  # keep the event-level export of each capture, scrubbed, beside the tables
