"""Attention and compile runs in which something is broken: nothing wrong is timed, nothing measured lost."""
import dataclasses

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from stepscope.config import configure
from stepscope.studies.attention import implementations
from stepscope.studies.attention.measure import measure_attention, reading
from stepscope.studies.compile import measure as compiled
from stepscope.studies.compile.tables import variant_times

WRITTEN_OUT = implementations.written_out
TINY = {"device": "cpu", "d_model": 4, "batch_size": 2, "sequences": [8], "timed_steps": 2, "warmup_steps": 0}


class NoNumber(torch.autograd.Function):
    """Its argument, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_gradient_that_is_not_a_number_is_wrong_and_not_timed(monkeypatch, place):
    def broken(*tensors):
        return WRITTEN_OUT(*(NoNumber.apply(x) if index == place else x for index, x in enumerate(tensors)))
    monkeypatch.setattr(implementations, "written_out", broken)
    tables = measure_attention(configure("attention", **TINY, causal=["eager"], unmasked=[]))
    assert tables["cells"]["status"].tolist() == ["wrong"] and tables["samples.parquet"].empty


def test_where_nothing_can_be_timed_the_tables_are_whole():
    cells = measure_attention(configure("attention", **TINY, causal=["cudnn"], unmasked=[]))["cells"]
    assert cells["status"].tolist() == ["unsupported"]
    assert {"error", "passes", "pass_median_ms"} <= set(cells) and "Nothing" in reading(cells)


def test_no_compiler_costs_the_compiled_variant_alone(monkeypatch, tiny):
    def no_compiler(step, variant):
        if variant == "eager":
            return step

        def fail(tokens):
            raise BackendCompilerFailed(lambda: None, RuntimeError("No working C++ compiler found"), None)
        model = compiled.twin(step.model)
        model.forward = fail
        return dataclasses.replace(step, model=model)
    monkeypatch.setattr(compiled, "with_compiled", no_compiler)
    variants = compiled.measure_variants(tiny(study="compile"))["variants"]
    found = variants.groupby("variant")["status"].unique().explode().to_dict()
    assert found == {"eager": "ok", "block": "unsupported"}
    assert variants.query("variant == 'block'")["reason"].str.contains("No working C\\+\\+ compiler").all()


def test_where_no_variant_fits_there_are_rows_and_no_times(monkeypatch, tiny):
    def full(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr(compiled, "build_step", full)
    config = tiny(study="compile")
    tables = compiled.measure_variants(config)
    assert tables["variants"]["status"].tolist() == ["oom"] * 12
    times = variant_times(tables["samples"], tables["samples"], config)
    assert times.empty and compiled.reading(times) == "Nothing could be timed."
