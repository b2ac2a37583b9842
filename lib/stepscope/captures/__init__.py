"""What anybody's capture says: where a step's time goes, why the GPU waits, and what is worth doing.

``capture`` reads one, whoever wrote it (``files`` says what it is, ``reports`` reads nsys's CSV); ``account``
sums a GPU's steps; ``causes`` says what the host did in its pauses; ``advice`` ranks what would leave the
step; ``verdict`` says it all. A comparison of two captures would stand beside ``verdict``, on two accounts.
"""

from pathlib import Path

# A toy Transformer (4 blocks, fp32), five steps on one H200, nsys 2025.3.1.
EXAMPLE = Path(__file__).with_name("example.sqlite.gz")
