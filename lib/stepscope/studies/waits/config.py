"""What a run of the study of waiting has."""
from typing import Annotated, Literal

from pydantic import Field

from stepscope.config import PHASES, StepConfig

Microseconds = Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)]


class Config(StepConfig):
    """One step of one size and context: as it is, with its host slowed, and with its GPU given more to do."""

    study: Literal["waits"] = "waits"
    mode: Literal[tuple(PHASES)] = "forward_backward"  # type: ignore[valid-type]
    host_delays_us: list[Microseconds] = Field([0, 20, 100], max_length=100)  # added to each operator's call
    gpu_loads_us: list[Microseconds] = Field([200, 1500], max_length=100)     # added to each block, each way
