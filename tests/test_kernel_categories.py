"""Test categories and short names of GPU kernels that nsys and torch.profiler report.

``data/kernels.csv`` lists the names, categories and sources of real kernels. ``data/kernels/`` lists the kernels
that account for 97% of the time in third-party captures; each name is truncated to 300 characters.
"""

from pathlib import Path

import pandas as pd
import pytest

from stepscope.traces.kernel_categories import (
    KERNEL_CATEGORIES,
    detailed_category,
    family,
    is_cast,
    kernel_categories,
)
from stepscope.traces.kernel_names import identifiers, short_name, short_names, split_name, words

DATA = Path(__file__).parent / "data"
KERNELS = pd.read_csv(DATA / "kernels.csv")
EXTRACTS = sorted((DATA / "kernels").glob("*.csv"))


def test_known_kernels_are_categorized_correctly():
    found = [family(name) for name in KERNELS["name"]]
    wrong = KERNELS.assign(found=found)[KERNELS["kernel_category"] != found]
    assert wrong.empty, wrong.to_string()
    assert set(KERNELS["kernel_category"]) == set(KERNEL_CATEGORIES) - {"other"}


@pytest.mark.parametrize("name", ["my_kernel(float *)", "spin_kernel", "", "(x)", "kernel", "void f<int>()"])
def test_uninformative_name_is_categorized_as_other(name):
    assert family(name) == "other"


@pytest.mark.parametrize("path", EXTRACTS, ids=lambda path: path.stem)
def test_at_most_one_percent_of_the_time_in_a_capture_is_uncategorized(path):
    rows = pd.read_csv(path)
    other = rows[kernel_categories(rows["name"]) == "other"]
    assert other["total_ns"].sum() <= 0.01 * rows["total_ns"].sum(), other["name"].tolist()


def test_split_name_returns_namespace_function_and_template():
    gemv = "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, cublasGemvParams<float> >(f<g>)"
    assert split_name(gemv) == ("internal::gemvx", "kernel", "int, cublasGemvParams<float> ")
    assert split_name("void <unnamed>::f<(int)8, (bool)0>(T1 *)") == ("", "f", "8, 0")
    assert split_name("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, 9, tr") == (
        "",
        "softmax_warp_forward",
        "BFloat16, 9, tr",
    )
    assert split_name("_ZN5aiter24fmha_fwd_hd128_bf16_rtneE.kd") == ("aiter", "fmha_fwd_hd128_bf16_rtne", "")
    assert (
        split_name("_ZN2at6native13reduce_kernelILi512ENS0_8ReduceOpIfEEEEvT1_").function == "reduce_kernel"
    )
    for odd in ("_Z", "_ZN99999f", "f<<<(", ")))>>>", "operator<", "void ", "_ZN3abcIL"):
        assert family(odd) == "other"


def test_identifiers_exclude_parameter_lists():
    template = "4, at::f<T>(at::TensorIteratorBase &, Dull)::[lambda(bool) (instance 1)], std::array<char *>"
    assert [name for name in identifiers(template) if name[0] != "l"] == ["at::f", "T", "std::array", "char"]
    assert words("indexSelectSmall_v2<x>") == "index select small v2 x"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # the same words can occur in a function's name, a template argument or a parameter
        ("void softmax_kernel<NormPolicy>(GemmParams)", "softmax"),
        ("void apply_kernel<NormPolicy, SoftmaxPolicy>(GemmParams)", "reduction and norm"),
        ("void apply_kernel<Policy>(GemmParams, PhiloxCudaState)", "other"),
        ("void cutlass::apply_kernel<Policy>(flash::Params)", "matrix multiply"),
        # an elementwise kernel may be a copy, but never a reduction
        (
            "void elementwise_kernel<4, direct_copy_kernel_cuda(Iter &)::[lambda(float)]>(int)",
            "copy and cast",
        ),
        ("void elementwise_kernel<4, cross_entropy_out_cuda(Iter &)::[lambda(float)]>(int)", "elementwise"),
        # multi-tensor kernels also run without an optimizer: during inference, one may be a copy
        ("void multi_tensor_apply_kernel<TensorListMetadata<2>, Copy<float, float>>(x)", "copy and cast"),
        (
            "void multi_tensor_apply_kernel<TensorListMetadata<2>, FusedAdamMathFunctor<float>>(x)",
            "optimizer",
        ),
        ("aten::rsqrt", "elementwise"),
        ("aten::addcmul_", "elementwise"),
    ],
)
def test_function_name_takes_precedence_over_template_arguments(name, expected):
    assert family(name) == expected


@pytest.mark.parametrize("name", ["broadcast", "gather", "scatter", "reduce", "send", "recv", "all_reduce"])
def test_gloo_operation_is_communication(name):
    assert family(f"gloo:{name}") == "communication"


def test_softmax_category_depends_on_its_region():
    rows = pd.DataFrame(
        {
            "kernel_category": ["softmax", "elementwise", "softmax", "elementwise"],
            "region": ["cross_entropy", "attention.softmax", "other", "cross_entropy"],
        }
    )
    assert detailed_category(rows).tolist() == ["loss softmax", "attention softmax", "softmax", "elementwise"]


def test_is_cast_matches_copies_to_a_different_dtype():
    names = pd.Series(
        [
            "void vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>(x)",
            "aten::_to_copy",
            "void unrolled_elementwise_kernel<direct_copy_kernel_cuda, 4, LoadWithCast<1>>(x)",
            "void unrolled_elementwise_kernel<at::native::float8_e4m3fn_copy_kernel_cuda>(x)",
            "aten::copy_",
            "void elementwise_kernel<direct_copy_kernel_cuda>(x)",
        ],
        index=range(5, 11),
    )
    assert is_cast(names).tolist() == [True, True, True, True, False, False] and is_cast(names).index[0] == 5


def test_short_names_are_distinct():
    names = KERNELS["name"].tolist()
    # some names differ only after 100 characters
    assert len({name[:100] for name in names}) < len(names)
    for width in (10, 40, 80):
        shown = short_names(names + names, width)
        assert set(shown) == set(names)
        assert len(set(shown.values())) == len(shown)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)",
            "cutlass_80_simt_sgemm_128x256_8x4_nt_align1",
        ),
        (
            (
                "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4"
                "_execute_kernel__5x_cublas"
            ),
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma",
        ),
        (
            (
                "void (anonymous namespace)::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, 9, true,"
                " false>(int)"
            ),
            "softmax_warp_backward<BFloat16 float>",
        ),
        (
            (
                "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<a"
                "t::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]>(int)>(in"
                "t, T3)"
            ),
            "elementwise_kernel<direct_copy_kernel_cuda>",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, std:"
                ":array<char *, 3>>(int)"
            ),
            "vectorized_elementwise_kernel<CUDAFunctor_add float>",
        ),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("[CUDA memset]", "[CUDA memset]"),
        ("", ""),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("(x)", "(x)"),
        ("<int>", "<int>"),
    ],
)
def test_short_name_abbreviates_known_kernel_names(name, short):
    assert short_name(name) == short


def test_duplicate_short_names_are_numbered():
    forward = "void softmax_warp_forward<float, float, float, (int){}, (bool)0>(T2 *, int)"
    names = [forward.format(8), forward.format(9), "void f(int)", "f"]
    assert list(short_names(names).values()) == [
        "softmax_warp_forward<float>",
        "softmax_warp_forward<float> (2)",
        "f",
        "f (2)",
    ]
