"""What several test files need: tiny configurations, and ways to make records and sweep files of them."""
import os
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml
from stepscope.config import RunConfig, configure
from stepscope.runs.store import Record, Store

# No test may depend on how many cores it gets, nor take them all from the one beside it.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Inductor tries the processor's vector instructions, 15 CPU seconds of each process that compiles: here what the
# processor says of itself is believed.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# The least that is still a run: a few thousand parameters, two timed steps, no warm-up.
TINY = {"device": "cpu", "size": "nano", "vocab_size": 50, "context_length": 8, "batch_size": 1, "warmup_steps": 0,
        "timed_steps": 2}
# A context that no machine holds and no address space spans (its mask alone is 144 TB), of a model so small that nothing
# else takes long.
HUGE = {"device": "cpu", "d_model": 2, "d_ff": 1, "num_layers": 1, "num_heads": 1, "vocab_size": 2, "batch_size": 1,
        "context_length": 12_000_000, "warmup_steps": 0, "timed_steps": 1}


@pytest.fixture
def tiny():
    """Make a tiny configuration, with any field replaced."""
    def make(**fields) -> RunConfig:
        return configure(**{"study": "benchmark"} | TINY | fields)
    return make


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def write_sweep(tmp_path):
    """Write a sweep file: a string as it is, anything else as YAML."""
    def write(content: object, name: str = "some.yaml") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return path
    return write


def record_of(config: RunConfig, **fields) -> Record:
    """A record as a run of this configuration would leave it."""
    whole = {"run_id": config.run_id, "study": config.study, "status": "ok", "config": config.model_dump(mode="json"),
             "started_at": datetime(2025, 1, 2, tzinfo=timezone.utc), "duration_s": 1.0}
    return Record(**whole | fields)
