"""Configuration of the distributed study: the strategies that a run measures, and the number of GPUs."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stepscope.config import StepConfig


@dataclass(frozen=True)
class Strategy:
    """A strategy: a function of :mod:`stepscope.optimizations.distributed_step` with its options.

    Args:
        control: the strategy that does the same computation without communication; "" if this strategy doesn't
            communicate.
        is_compiled: whether the model's blocks are compiled.
    """

    function: str
    options: dict[str, Any] = field(default_factory=dict)
    control: str = ""
    is_compiled: bool = True

    @property
    def is_graph(self) -> bool:
        return self.function.endswith("_graph")

    @property
    def needs_gpu(self) -> bool:
        return self.is_graph or "bf16_gradients" in self.options


# The buckets are compared in CUDA graphs, because without a graph the host may set the pace of every strategy.
GRAPH_BUCKETS_MIB = {"ddp_graph": 100} | {f"ddp_graph_{mib}_mib": mib for mib in (1, 10, 25, 1000)}
STRATEGIES = {
    "alone": Strategy("alone"),
    "alone_eager": Strategy("alone", is_compiled=False),
    "naive": Strategy("naive", control="alone"),
    "flat": Strategy("flat", control="alone"),
    "overlapped": Strategy("overlapped", control="alone"),
    "ddp_alone": Strategy("ddp", {"communicate": False}),
    "ddp_default": Strategy("ddp", {"bucket_mib": None}, "ddp_alone"),
    "ddp_25_mib": Strategy("ddp", {"bucket_mib": 25}, "ddp_alone"),
    "ddp_1000_mib": Strategy("ddp", {"bucket_mib": 1000}, "ddp_alone"),
    "ddp_eager": Strategy("ddp", control="alone_eager", is_compiled=False),
    "ddp_bf16_gradients": Strategy("ddp", {"bf16_gradients": True}, "ddp_alone"),
    "zero1": Strategy("zero1", control="ddp_alone"),
    "fsdp_alone": Strategy("fsdp", {"communicate": False}),
    "fsdp": Strategy("fsdp", control="fsdp_alone"),
    "fsdp_no_reshard": Strategy("fsdp", {"reshard": False}, "fsdp_alone"),
    "fsdp_4_blocks": Strategy("fsdp", {"blocks_per_group": 4}, "fsdp_alone"),
    "fsdp_separate_group": Strategy("fsdp", {"separate_group": True}, "fsdp_alone"),
    "fsdp_bf16_reduction": Strategy("fsdp", {"bf16_reduction": True}, "fsdp_alone"),
    "alone_graph": Strategy("alone_graph"),
    "naive_graph": Strategy("naive_graph", control="alone_graph"),
    "flat_graph": Strategy("flat_graph", control="alone_graph"),
    "overlapped_graph": Strategy("overlapped_graph", control="alone_graph"),
    "ddp_alone_graph": Strategy("ddp_graph", {"communicate": False}),
    **{
        name: Strategy("ddp_graph", {"bucket_mib": mib}, "ddp_alone_graph")
        for name, mib in GRAPH_BUCKETS_MIB.items()
    },
    "ddp_graph_bf16_gradients": Strategy("ddp_graph", {"bf16_gradients": True}, "ddp_alone_graph"),
    "ddp_graph_gradient_copies": Strategy("ddp_graph", {"gradient_views": False}, "ddp_alone_graph"),
}
ON_CPU = tuple(name for name, strategy in STRATEGIES.items() if not strategy.needs_gpu)
StrategyName = Literal[tuple(STRATEGIES)]  # type: ignore[valid-type]


class Config(StepConfig):
    """A run that measures a training step under several strategies, on several GPUs of one machine."""

    study: Literal["distributed"] = "distributed"
    # The step is the one in fast_step.py, with bf16 autocast.
    mode: Literal["step"] = "step"
    precision: Literal["bf16"] = "bf16"
    attention: Literal["sdpa"] = "sdpa"
    optimizer: Literal["fused"] = "fused"
    compile: Literal["none", "blocks"] = "blocks"
    warmup_steps: int = Field(12, ge=3, le=10**6)  # DDP rearranges its buckets during the first steps
    timed_steps: int = Field(10, ge=1, le=50)
    gpus: int = Field(2, ge=2, le=64)  # number of ranks (also on a CPU), each with batch_size sequences
    strategies: list[StrategyName] = Field([], min_length=0)  # type: ignore[valid-type] # empty for all strategies
    collectives: bool = False  # also time collectives on their own, from 1 MiB to 1 GiB
    numerics: bool = False  # also compare losses and gradients with those of gradient accumulation on one GPU
    repeat: int = Field(0, ge=0, le=1000)  # distinguishes repeated runs of one configuration

    @model_validator(mode="after")
    def check_strategies(self) -> Self:
        for name in self.strategies:
            if self.device == "cpu" and name not in ON_CPU:
                raise ValueError(
                    f"strategies: got {name}, but CUDA graphs and DDP's bf16 gradients need a GPU"
                )
        return self

    @property
    def names(self) -> list[str]:
        """The strategies to measure; by default, all strategies that the device can run."""
        return list(self.strategies) or list(STRATEGIES if self.device == "cuda" else ON_CPU)

    @property
    def gpus_needed(self) -> int:
        return self.gpus if self.device == "cuda" else 1

    def words_of_id(self) -> list[str]:
        return [*super().words_of_id(), f"gpus{self.gpus}"]
