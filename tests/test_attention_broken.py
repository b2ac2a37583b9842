"""Attention and compile runs in which something is broken: nothing wrong is timed, and nothing measured is lost."""
import pytest
import torch
from stepscope.studies.attention import measure as attention
from stepscope.studies.compile import measure as compiled
from stepscope.studies.compile.tables import variant_times
from stepscope.config import configure
from torch._dynamo.exc import BackendCompilerFailed

WRITTEN_OUT = attention.written_out


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
    monkeypatch.setattr(attention, "written_out", broken)
    tables = attention.measure_attention(configure("attention", device="cpu", d_model=4, batch_size=2, sequences=[8], timed_steps=2, warmup_steps=0,
                                                   causal=["eager"], unmasked=[]))
    assert tables["cells"]["status"].tolist() == ["wrong"] and tables["samples.parquet"].empty


def test_where_nothing_can_be_timed_the_tables_are_whole():
    cells = attention.measure_attention(configure("attention", device="cpu", d_model=4, batch_size=2, sequences=[8], timed_steps=2, warmup_steps=0,
                                                  causal=["cudnn"], unmasked=[]))["cells"]
    assert cells["status"].tolist() == ["unsupported"]
    assert {"error", "passes", "pass_median_ms"} <= set(cells) and "Nothing" in attention.reading(cells)


def test_no_compiler_costs_the_compiled_variant_alone(monkeypatch, tiny):
    def no_compiler(step, variant):
        if variant == "eager":
            return step

        def fail(tokens):
            raise BackendCompilerFailed(lambda: None, RuntimeError("No working C++ compiler found"), None)
        monkeypatch.setattr(step.model, "forward", fail)
        return step
    monkeypatch.setattr(compiled, "with_compiled", no_compiler)
    variants = compiled.measure_variants(tiny(study="compile"))["variants"]
    assert variants.groupby("variant")["status"].unique().explode().to_dict() == {"eager": "ok", "block": "unsupported"}
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
