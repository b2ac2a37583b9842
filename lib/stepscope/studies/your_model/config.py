"""Configuration of the ladder on a user's model."""

import ast
import re
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from stepscope.config import RunConfig

Optimization = Literal[
    "fp32",
    "tf32",
    "channels_last",
    "bf16",
    "fused_adamw",
    "compiled_blocks",
    "compiled_model",
    "cuda_graph",
    "bf16_weights",
    "bf16_moments",
]
OPTIMIZATIONS: tuple[Optimization, ...] = get_args(Optimization)
# Words that every markdown renderer prints unchanged: letters and digits, with single separators between them.
WORD = r"[A-Za-z0-9]+(?:[_.+-][A-Za-z0-9]+)*"
ARGUMENT = rf"[A-Za-z_][A-Za-z0-9_]*=-?{WORD}"

# Columns of the table of steps.
MEASURES = (
    "speedup",
    "steps",
    "wall_ms",
    "wall_mean_ms",
    "wall_std_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "wall_min_ms",
    "enqueue_ms",
    "gpu_ms",
    "operations",
    "busy",
    "in_graph_share",
    "peak_gib",
    "reserved_gib",
    "sm_clock_mhz",
    "power_w",
    "energy_per_step_j",
    "mfu",
    "loss_error",
    "gradient_error",
    "compile_s",
)


class Config(RunConfig):
    """A run that optimizes the training step of a user's model, one optimization at a time, starting from fp32."""

    study: Literal["your_model"] = "your_model"
    # These fields describe the built-in model, and don't apply to a user's model.
    d_model: Literal[0] = 0
    context_length: Literal[0] = 0
    batch_size: Literal[1] = 1
    precision: Literal["fp32"] = "fp32"
    # The file's name and the function's name.
    model: Annotated[str, Field(pattern=f"^{WORD}:{WORD}$", max_length=100)]
    source: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]  # a digest of the file's text
    # Keyword arguments of the function, such as "batch=8 length=128".
    arguments: Annotated[str, Field(pattern=f"^(?:{ARGUMENT}(?: {ARGUMENT})*)?$", max_length=300)] = ""
    optimizations: list[Optimization] = Field([*OPTIMIZATIONS])  # fp32 is always measured
    limit_s: int = Field(600, ge=1, le=86_400)  # time limit for each optimization, including compilation
    warmup_steps: int = Field(2, ge=0, le=10**6)

    @property
    def shape(self) -> str:
        return re.sub("[^A-Za-z0-9]+", "-", self.model)

    def words_of_id(self) -> list[str]:
        return [self.shape]  # the digest covers the source and the arguments

    @property
    def keywords(self) -> dict[str, Any]:
        """The values of the function's keyword arguments, by name."""
        return dict(map(parse_argument, self.arguments.split()))


def parse_argument(text: str) -> tuple[str, Any]:
    """Split an argument such as "batch=8" into its name and its value.

    The value is a string unless it is true, false, or a Python literal such as 8.
    """
    name, _, value = text.partition("=")
    with suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value.capitalize() if value in ("true", "false") else value)
    return name, value
