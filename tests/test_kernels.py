"""Families and short names of GPU kernels, on names as nsys and torch.profiler write them.

``data/kernels.csv`` holds names of real kernels, each with its family and where the name is from;
``data/kernels/`` the kernels of other people's captures that took 97% of their time (a name's first 300
characters).
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from stepscope.runs.store import Store
from stepscope.studies.nsys.figures import FAMILY_COLORS
from stepscope.studies.nsys.tables import all_runs
from stepscope.traces.families import ATTENTION_SOFTMAX, FAMILIES, LOSS_SOFTMAX, families, family, rules
from stepscope.traces.kernel_names import identifiers, short_name, short_names, split, words

DATA = Path(__file__).parent / "data"
RUNS = Path(__file__).parents[1] / "runs" / "h200"
SAMPLE = DATA / "nsys" / "sample.sqlite"
KERNELS = pd.read_csv(DATA / "kernels.csv")
EXTRACTS = sorted((DATA / "kernels").glob("*.csv"))


@pytest.mark.parametrize(("name", "expected", "source"), list(KERNELS.itertuples(index=False, name=None)))
def test_family(name, expected, source):
    assert family(name) == expected, source


def test_the_list_has_every_family_and_many_libraries():
    assert len(KERNELS) >= 200 and KERNELS["name"].is_unique
    assert set(KERNELS["family"]) == set(FAMILIES) - {"other"}
    assert KERNELS["source"].nunique() > 50


@pytest.mark.parametrize("name", ["my_kernel(float *)", "spin_kernel", "", "(x)", "kernel", "void f<int>()"])
def test_a_name_that_says_nothing_is_other(name):
    assert family(name) == "other"


@pytest.mark.parametrize("path", EXTRACTS, ids=lambda path: path.stem)
def test_little_of_a_capture_is_other(path):
    rows = pd.read_csv(path)
    other = rows[families(rows["name"]) == "other"]
    assert other["total_ns"].sum() <= 0.02 * rows["total_ns"].sum(), other["name"].tolist()


def test_a_name_is_split_where_its_parts_end():
    gemv = "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, cublasGemvParams<float> >(f<g>)"
    assert split(gemv) == ("internal::gemvx", "kernel", "int, cublasGemvParams<float> ")
    assert split("void <unnamed>::f<(int)8, (bool)0>(T1 *)") == ("", "f", "8, 0")
    assert split("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, 9, tr") == (
        "", "softmax_warp_forward", "BFloat16, 9, tr")
    assert split("_ZN5aiter24fmha_fwd_hd128_bf16_rtneE.kd") == ("aiter", "fmha_fwd_hd128_bf16_rtne", "")
    assert split("_ZN2at6native13reduce_kernelILi512ENS0_8ReduceOpIfEEEEvT1_").own == "reduce_kernel"
    for odd in ("_Z", "_ZN99999f", "f<<<(", ")))>>>", "operator<", "void ", "_ZN3abcIL"):
        assert family(odd) == "other"


def test_identifiers_leave_parameter_lists_out():
    template = "4, at::f<T>(at::TensorIteratorBase &, Dull)::[lambda(bool) (instance 1)], std::array<char *>"
    assert [name for name in identifiers(template) if name[0] != "l"] == ["at::f", "T", "std::array", "char"]
    assert words("indexSelectSmall_v2<x>") == "index select small v2 x"


@pytest.mark.parametrize(("name", "expected"), [
    # the same words as the kernel's own name, as a template argument, as a parameter
    ("void softmax_kernel<NormPolicy>(GemmParams)", "softmax"),
    ("void apply_kernel<NormPolicy, SoftmaxPolicy>(GemmParams)", "reduction and norm"),
    ("void apply_kernel<Policy>(GemmParams, PhiloxCudaState)", "other"),
    ("void cutlass::apply_kernel<Policy>(flash::Params)", "matrix multiply"),
    # what is applied to every element may copy; it does not reduce
    ("void elementwise_kernel<4, direct_copy_kernel_cuda(Iter &)::[lambda(float)]>(int)", "copy and cast"),
    ("void elementwise_kernel<4, cross_entropy_out_cuda(Iter &)::[lambda(float)]>(int)", "elementwise"),
])
def test_the_own_name_decides_before_the_template_and_parameters_never(name, expected):
    assert family(name) == expected


def test_every_family_has_a_rule_a_reason_and_a_colour():
    assert sorted(rules()["family"]) == sorted(set(FAMILIES) - {"other"})
    assert all(rules()["reason"])
    shown = {*FAMILIES, ATTENTION_SOFTMAX, LOSS_SOFTMAX}
    assert set(FAMILY_COLORS) == shown and len(set(FAMILY_COLORS.values())) == len(shown)


def test_families_of_a_column_are_those_of_its_names():
    names = KERNELS["name"].tolist() * 2
    found = families(pd.Series(names, index=range(5, 5 + len(names))))
    assert list(found) == [family(name) for name in names]
    assert list(families([])) == []


def test_a_name_is_matched_once_however_often_it_stands_there(monkeypatch):
    matched = []
    monkeypatch.setattr("stepscope.traces.families.family", lambda name: matched.append(name) or "other")
    assert len(families(KERNELS["name"].tolist() * 200)) == 200 * len(KERNELS)
    assert sorted(matched) == sorted(KERNELS["name"])


def test_operations_measured_under_older_rules_have_the_families_of_these(tmp_path):
    [run] = (RUNS / "nsys").glob("small-ctx128-all-fp32-*")
    folder = shutil.copytree(run, tmp_path / "nsys" / run.name)
    measured = pd.read_parquet(folder / "operations.parquet")
    measured.assign(family="of older rules").to_parquet(folder / "operations.parquet")
    store = Store(tmp_path)
    operations = all_runs(store, store.records()[0], "operations.parquet")
    assert len(operations) == len(measured)
    assert operations["family"].tolist() == [family(name) for name in operations["name"]]


def sample_names() -> list[str]:
    with closing(sqlite3.connect(SAMPLE.as_uri() + "?mode=ro", uri=True)) as connection:
        return [name for (name,) in connection.execute("SELECT value FROM StringIds")]


def test_no_kernel_of_the_sample_is_other():
    names = sample_names()
    assert len(names) == 39
    assert "other" not in list(families(names))


def test_short_names_never_merge_kernels():
    names = list(dict.fromkeys(sample_names() + KERNELS["name"].tolist()))
    assert len({name[:100] for name in names}) < len(names)  # cutting at 100 characters would merge some
    for width in (10, 40, 80):
        shown = short_names(names + names, width)
        assert set(shown) == set(names)
        assert len(set(shown.values())) == len(shown)


@pytest.mark.parametrize(("name", "short"), [
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)",
     "cutlass_80_simt_sgemm_128x256_8x4_nt_align1"),
    (("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4"
     "_execute_kernel__5x_cublas"),
     "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma"),
    (("void <unnamed>::softmax_warp_forward<float, float, float, (int)8, (bool)0, (bool)0>(T2 *, const"
     " T1 *, int, int, int)"),
     "softmax_warp_forward<float>"),
    (("void (anonymous namespace)::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, 9, true,"
     " false>(int)"),
     "softmax_warp_backward<BFloat16 float>"),
    (("void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<a"
     "t::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]>(int)>(in"
     "t, T3)"),
     "elementwise_kernel<direct_copy_kernel_cuda>"),
    (("void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, std:"
     ":array<char *, 3>>(int)"),
     "vectorized_elementwise_kernel<CUDAFunctor_add float>"),
    ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"), ("[CUDA memset]", "[CUDA memset]"), ("", ""),
    ("(x)", "(x)"), ("<int>", "<int>"),
])
def test_short_name(name, short):
    assert short_name(name) == short


def test_kernels_that_share_a_short_name_get_longer_ones():
    forward = "void softmax_warp_forward<float, float, float, (int){}, (bool)0>(T2 *, int)"
    names = [forward.format(8), forward.format(9), "void f(int)", "f"]
    assert len({short_name(name) for name in names}) == 2
    assert short_names(names) == {
        names[0]: "softmax_warp_forward<float, float, float, 8, 0>",
        names[1]: "softmax_warp_forward<float, float, float, 9, 0>",
        names[2]: names[2], names[3]: names[3]}


def test_a_short_name_that_is_another_kernels_full_name_stays_apart():
    names = ["a()", "a(int)", "void a()(int)"]  # the third is shown as the first's full name
    assert short_names(names) == {"a()": "a()'", "a(int)": "a(int)", "void a()(int)": "a()"}


@pytest.mark.parametrize("name", ["aten::div", "aten::pow", "aten::rsqrt", "aten::addcmul_", "aten::neg"])
def test_a_cpus_arithmetic_operators_are_elementwise(name):
    assert family(name) == "elementwise"
