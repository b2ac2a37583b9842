"""What several test files need: tiny configurations, and ways to make records and sweep files of them."""
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from stepscope.config import RunConfig, configure
from stepscope.runs.record import Record
from stepscope.runs.store import Store

# No test may depend on how many cores it gets, nor take them all from the one beside it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor tries the processor's vector instructions, 15 CPU seconds of each process that compiles: here what
# the processor says of itself is believed.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Nor does it start processes to compile in: there is little to compile, and each imports torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# jsonschema imports it where JupyterLab brought it, for web addresses in notebooks: seconds of each process.
sys.modules.update(dict[str, Any](rfc3987_syntax=None))

# The least that is still a run: a few thousand parameters, two timed steps, no warm-up.
TINY: dict[str, Any] = {
    "device": "cpu", "size": "nano", "vocab_size": 50, "context_length": 8, "batch_size": 1,
    "warmup_steps": 0, "timed_steps": 2}
# A context that no machine holds and no address space spans (its mask alone is 144 TB), of a model so small
# that nothing else takes long.
HUGE: dict[str, Any] = {
    "device": "cpu", "d_model": 2, "d_ff": 1, "num_layers": 1, "num_heads": 1, "vocab_size": 2,
    "batch_size": 1, "context_length": 12_000_000, "warmup_steps": 0, "timed_steps": 1}


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory):
    """The processes of ``make test`` share tables that take long to make; see :func:`reference.tables`."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import reference
        reference.shared = tmp_path_factory.getbasetemp().parent


@pytest.fixture
def tiny():
    """Make a tiny configuration, with any field replaced."""
    def make(**fields) -> RunConfig:
        return configure(**{"study": "benchmark", **TINY, **fields})
    return make


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def fault_folder(tmp_path, monkeypatch):
    """The notebooks of :mod:`faults`, where all programs that this test starts look for them."""
    import faults  # not above: few tests need it, and papermill with it
    folder = tmp_path / "faults"
    folder.mkdir()
    faults.make_notebooks(folder)
    monkeypatch.setenv("STEPSCOPE_TEST_FAULTS", str(folder))
    return folder


@pytest.fixture
def program(tmp_path):
    """Start the command line as a program, as often as asked; see :class:`faults.Program`."""
    import faults
    made = []
    with TemporaryDirectory(
        ignore_cleanup_errors=True
    ) as short:  # socket paths are: not in the tests' folder

        def start(*arguments):
            made.append(faults.Program(tmp_path, short, *arguments))
            return made[-1]
        yield start
        for each in made:
            each.end()


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
    whole: dict[str, Any] = {
        "run_id": config.run_id, "study": config.study, "config": config.model_dump(mode="json"),
        "status": "ok", "started_at": datetime(2025, 1, 2, tzinfo=UTC), "duration_s": 1.0}
    return Record(**whole | fields)


HEAVY = ("test_report", "test_workers", "test_compiled", "test_package", "test_sweep", "test_attention", "test_ladder",
         "test_mixed_precision", "test_kill", "test_explore", "test_profiles")


def pytest_collection_modifyitems(items):
    """The files that take longest first, so that two processes end together."""
    items.sort(key=lambda item: HEAVY.index(item.module.__name__) if item.module.__name__ in HEAVY else len(HEAVY))
