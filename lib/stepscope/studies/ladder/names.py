"""What rungs are called in tables and pictures, and the code that each takes."""

from pathlib import Path

from stepscope.studies.ladder.config import BESIDE, RUNGS

NAMES = dict(
    zip(
        RUNGS,
        (
            "fp32, eager",
            "TF32 products",
            "bf16 autocast",
            "fused attention",
            "fused AdamW",
            "blocks compiled",
            "one compiled graph",
            "one CUDA graph of the step",
            "no casts",
            "wider products",
            "chunked cross-entropy",
            "optimizer in backward",
            "FP8 products",
            "batch fills memory",
        ),
    )
) | dict(zip(BESIDE, ("Hugging Face", "Hugging Face, bf16 weights")))
KERNEL_NAMES = {"cudnn": "cuDNN", "flash": "FlashAttention", "efficient": "the memory-efficient one"}
SNIPPETS = Path(__file__).parent / "snippets"
# What a rung is good against: kernels' launches, products, other kernels' memory traffic, the optimizer's.
AGAINST = {
    "launches": ("cuda_graphs",),
    "products": ("tf32", "bf16", "wide"),
    "memory": ("sdpa", "blocks", "chunked"),
    "optimizer": ("fused", "no_casts", "overlap"),
}


def name_of(rung: str) -> str:
    rung = rung.removeprefix("without_")
    return NAMES.get(rung, rung)


def snippet(rung: str) -> list[str]:
    """The lines that a user changes or adds for a rung; none for the first."""
    path = SNIPPETS / f"{rung}.py.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
