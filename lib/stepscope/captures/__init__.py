"""Summaries of profiler captures: where a step's time goes, why the GPU is idle, and what to optimize.

``capture`` reads a capture, whoever made it (``files`` recognizes its kind, ``reports`` reads nsys's CSV) and
attributes its operations; ``steps`` decides which ranges are steps, by their ``range_names``. ``account``
divides each step of a GPU, ``causes`` explains its idle gaps, ``communication`` separates transfer from
waiting, and ``advice`` ranks what would leave the step. ``verdict`` and ``kernel_summary`` write the
``lines``. ``snapshot`` reads a memory snapshot instead. A comparison of two captures would stand beside
``verdict``, on two accounts.
"""

from pathlib import Path

# A toy Transformer (4 blocks, fp32), five steps on one H200, nsys 2025.3.1.
EXAMPLE = Path(__file__).with_name("example.sqlite.gz")
