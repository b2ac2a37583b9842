"""What a run of the warm-up study has."""
from typing import Literal

from stepscope.config import StepConfig


class Config(StepConfig):
    """The first steps of a fresh process, and what the first of them pays for."""

    study: Literal["warmup"] = "warmup"
    profile: bool = False  # run the first step under torch.profiler, to see which calls it waits in
    one_layer_first: bool = False  # run a one-layer model of the same shapes first: it uses the same kernels
