"""Summarize profiler captures: show where a step's time goes, why the GPU is idle, and what to optimize.

``capture`` reads captures of any program (``files`` recognizes the kind of file, and ``reports`` reads nsys's CSV
reports), and assigns the operations to steps and phases; ``steps`` decides which ranges are steps, based on
``range_names``. ``step_breakdown`` breaks each GPU's step down into parts, ``idle_time`` explains the idle gaps,
``communication`` separates transfer from waiting, and ``advice`` ranks possible optimizations. ``summary`` and
``kernel_summary`` turn the results into ``lines``, and ``ranks`` compares the ranks of a distributed step.
``snapshot`` summarizes memory snapshots instead of captures.
"""

from pathlib import Path

# A toy Transformer (4 blocks, fp32), five steps on one H200, nsys 2025.3.1.
EXAMPLE = Path(__file__).with_name("example.sqlite.gz")
