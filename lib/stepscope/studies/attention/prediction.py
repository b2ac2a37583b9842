"""Bytes as polynomials of the sequence, and the sequence at which they reach what a device has."""
import numpy as np
import pandas as pd
from scipy import optimize

from stepscope.studies.attention.config import QUADRATIC, WRITTEN
from stepscope.studies.attention.unseen import MASK_INSIDE_BYTES, fused_tensors

LONG = 1024  # from this sequence on, what grows with the square stands out from the rest


def growth(rows: pd.DataFrame, column: str = "peak_bytes") -> np.ndarray:
    """Bytes as c0 + c1 T + c2 T², none negative, by least squares of the relative error; from sequences of
    :data:`LONG` on where there are three."""
    if (rows["sequence"] >= LONG).sum() >= 3:
        rows = rows[rows["sequence"] >= LONG]
    sequence, peak = rows["sequence"].to_numpy(dtype=float), rows[column].to_numpy(dtype=float)
    scale = sequence.max()
    powers = np.stack([np.ones_like(sequence), sequence / scale, (sequence / scale) ** 2], axis=1)
    coefficients, _ = optimize.nnls(powers / peak[:, None], np.ones_like(peak))
    return coefficients / scale ** np.arange(3)


def longest_fitting(coefficients: np.ndarray, available: float) -> float:
    """The sequence at which c0 + c1 T + c2 T² reaches what is available."""
    roots = np.roots((coefficients - np.array([available, 0, 0]))[::-1])
    real = [root.real for root in roots if abs(root.imag) < 1e-6 * abs(root) and root.real > 0]
    return max(real) if real else float("nan")


def end(parts: list[np.ndarray], available: float) -> float:
    """The longest sequence at which every part fits; nan where none is known."""
    return min((longest_fitting(coefficients, available) for coefficients in parts), default=float("nan"))


def by_code(name: str, known: pd.DataFrame, first: pd.Series) -> list[np.ndarray]:
    """Polynomials of peak bytes in the sequence, of the pass and, for FlexAttention, of its mask's making:
    from operators followed (``known``), and from the list for what runs inside one. Empty for what
    torch.compile makes of the code."""
    if name in WRITTEN:
        return [growth(known)] if len(known) else []
    if name in QUADRATIC:
        return []
    item = number_bytes(first["precision"])
    tensors = fused_tensors(name, int(first["batch_size"]), 1, int(first["d_model"]), item)
    linear = np.array([0.0, sum(tensors.values()), 0.0])
    if name != "flex" or known.empty:
        return [linear]
    inputs = np.array([0.0, sum(tensors[x] for x in ("q", "k", "v", "gradient of the output")),
                       MASK_INSIDE_BYTES])
    return [linear + growth(known, "mask_bytes"), inputs + growth(known, "mask_peak_bytes")]


def by_fit(peaks: pd.DataFrame) -> list[np.ndarray]:
    """The same from the peaks measured."""
    made = peaks["mask_peak_bytes"].notna().any() if "mask_peak_bytes" in peaks else False
    return [growth(peaks)] + ([growth(peaks, "mask_peak_bytes")] if made else [])


def number_bytes(precision: str) -> int:
    """Bytes of one number of the tensors that attention is given."""
    return 2 if precision in ("bf16", "fp16") else 4
