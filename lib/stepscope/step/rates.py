"""What a run's times amount to: rates, and utilisation of what was measured and of what a data sheet says."""
from pathlib import Path
from typing import Any

import pandas as pd

from stepscope.config import StepConfig
from stepscope.step.flops import phase_flops, step_flops
from stepscope.step.summary import summarize
from stepscope.step.timing import WHOLE
from stepscope.yaml_files import load_yaml


def data_sheet(device_name: str) -> dict[str, Any]:
    """What a GPU's data sheet says: TFLOP/s without sparsity by precision, ``tb_s`` of its memory, and its
    ``source``; empty for a GPU that is not listed."""
    sheets = load_yaml(Path(__file__).parent / "data_sheets.yaml")
    return next((sheet for sheet in sheets if all(word in device_name for word in sheet["words"])), {})


def with_rates(times: pd.DataFrame, config: StepConfig, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Add to one run's summary (a row a phase, see ``summary.summarize``) what its times amount to.

    Added columns: ``flops`` (matrix products of the phase), ``tflops`` (achieved, TFLOP/s), ``utilisation``
    (of the ceiling that the same run measured for its precision; the whole step's is the model FLOPs
    utilisation of the PaLM paper's appendix B, against the measured ceiling in place of a data sheet's) and
    ``tokens_per_s``.
    """
    flops = phase_flops(config)
    flops[WHOLE] = step_flops(config)
    ceiling = ceilings.set_index("ceiling")["value"].get(f"matmul_{config.precision}")
    times = times.assign(flops=times["phase"].map(flops))
    times["tflops"] = times["flops"] / times["median_ms"] / 1e9
    times["utilisation"] = times["tflops"] / ceiling if ceiling else float("nan")
    times["tokens_per_s"] = config.batch_size * config.context_length / times["median_ms"] * 1e3
    return times


def run_times(samples: pd.DataFrame, ceilings: pd.DataFrame, config: StepConfig) -> pd.DataFrame:
    """One run's table: a row a phase and one for the whole step, columns of ``summarize`` and of
    :func:`with_rates`."""
    return with_rates(summarize(samples, ["phase"]), config, ceilings)
