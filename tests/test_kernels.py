"""Families and short names of GPU kernels, on names as nsys and torch.profiler write them."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from stepscope.traces.families import FAMILIES, RULES, families, family, rules, short_name, short_names

SAMPLE = Path(__file__).parent / "data" / "nsys" / "sample.sqlite"
NAMES = {
    "matrix multiply": [
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(T1::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>, int>>(T1::Params)",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_sgemm_128x64_tn", "ampere_sgemm_64x32_sliced1x4_tn",
        "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT_splitK", "sm90_gemm_wgmma_f16",
        "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float>(cublasLt::cublasSplitKParams<T6>, const T4 *)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, (int)128>(T13, T6, T6)",
        "gemvx::kernel",
        "void dot_kernel<float, (int)128, (int)0, cublasDotParams<cublasGemvTensor<const float>>>(T4)",
    ],
    "fused attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>(Flash_fwd_params)",
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(flash::Flash_bwd_params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(T1::Params)",
    ],
    "softmax": [
        "void <unnamed>::softmax_warp_forward<float, float, float, (int)8, (bool)0, (bool)0>(T2 *, const T1 *, int, int, int)",
        "void (anonymous namespace)::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, 9, true, false>(int)",
        "void at::native::<unnamed>::cunn_SoftMaxForward<(int)4, float, float, float, at::native::SoftMaxForwardEpilogue>(int)",
        "void at::native::<unnamed>::cunn_SoftMaxBackwardSmem<(int)4, float, float, float, at::native::LogSoftMaxBackward>(int)",
    ],
    "reduction and norm": [
        "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(T3)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>, unsigned int, float, 4>>(T3)",
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
        "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>>>(T3)"),
        "void at::native::<unnamed>::vectorized_layer_norm_kernel<float, float, (bool)1>(int, T2, const T1 *)",
        "void at::native::<unnamed>::GammaBetaBackwardCUDAKernelTemplate<float, float, (unsigned int)32>(long, long)",
        "void at::native::<unnamed>::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(T1 *, T1 *)",
        "void at::native::<unnamed>::nll_loss_backward_reduce_cuda_kernel_2d<float, long>(T1 *, T1 *)",
    ],
    "copy and cast": [
        ("void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]>(int)>(int, T3)"),
        ("void at::native::vectorized_elementwise_kernel<(int)8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)"
        "::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3)"),
        "void at::native::<unnamed>::CatArrayBatchedCopy<at::native::<unnamed>::OpaqueType<(unsigned int)4>, (int)3>(T1 *)",
    ],
    "embedding and indexing": [
        "void at::native::index_elementwise_kernel<(int)128, (int)4, void at::native::gpu_index_kernel<int>(int)>(long, T3)",
        "void at::native::<unnamed>::indexSelectSmallIndex<float, long, unsigned int, (int)2, (int)2, (int)-2>(int)",
        "void at::native::<unnamed>::indexSelectLargeIndex<float, long, unsigned int, (int)2, (int)2, (int)-2, (bool)1>(int)",
        "void at::native::<unnamed>::embedding_backward_feature_kernel<float, float, long>(const T3 *, const T1 *, T1 *, int)",
        "void at::native::vectorized_gather_kernel<(int)16, long>(char *, char *, T2 *, int, long, long, long, long, bool)",
        "void at::native::_scatter_gather_elementwise_kernel<(int)128, (int)8, void at::native::<unnamed>::f>(int, T3)",
        "void at_cuda_detail::cub::CUB_200700_900_NS::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::Policy, (bool)0>(T7 *)",
        "void at_cuda_detail::cub::DeviceUniqueByKeySweepKernel<int>(int)",
        "void cub::DeviceCompactInitKernel<int>(T1, int)",
        "void at::native::<unnamed>::compute_grad_weight<float, long>(const T2 *, const T1 *, const T2 *, long)",
        "void at::native::<unnamed>::sum_and_scatter<float, long>(const T2 *, T1 *, const float *)",
        "void at::native::<unnamed>::krn_partials_per_segment<long>(T1 *, const T1 *, const long *, long)",
    ],
    "optimizer": [
        ("void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::FusedOptimizerTensorListMetadata<(int)4>, "
        "at::native::<unnamed>::FusedAdamMathFunctor<float, (int)4>>(T1, T2, T3...)"),
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<2>>",
        "at::native::amp_update_scale_cuda_kernel(float *, int *, const float *, double, double, int)",
    ],
    "random": [
        "void at::native::<unnamed>::distribution_elementwise_grid_stride_kernel<float, (int)4, void f>(long, at::PhiloxCudaState)",
        "void at::native::<unnamed>::fused_dropout_kernel_vec<float, float, unsigned int, (int)1, (int)4, (bool)1>(int)",
    ],
    "compiler-generated": ["triton_poi_fused_mul_silu_3", "triton_red_fused__softmax_add_5",
                           "triton_tem_fused_mm_7"],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
                      "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
                      "ncclKernel_AllGather_RING_LL_Sum_int8_t"],
    "memory": ["[CUDA memcpy Device-to-Device]", "[CUDA memset]", "[CUDA memcpy DtoD]",
               "Memcpy HtoD (Pageable -> Device)",
               "Memset (Device)"],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, std::array<char *, 3>>(int)",
        ("void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, at::native::memory::LoadWithCast<(int)2>, "
        "at::native::memory::StoreWithCast<(int)1>>(int, T1)"),  # an addition that casts is an addition
        "void <unnamed>::elementwise_kernel_with_index<int, at::native::arange_cuda_out(int)>(T1, T2, function_traits<T2> *)",
        "void at::native::triu_tril_kernel<bool, int, (bool)1, (int)8, (bool)0>(at::cuda::detail::TensorInfo<T1, T2>, long)",
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, std::array<char *, 1>>(int)",
    ],
    "other": ["my_own_kernel(float *)", "spin_kernel"],
}


@pytest.mark.parametrize(("expected", "name"), [(f, name) for f, names in NAMES.items() for name in names])
def test_family(expected, name):
    assert family(name) == expected


def test_every_family_has_a_rule_a_reason_and_a_tested_name():
    assert [f for f, _, _ in RULES] + ["other"] == FAMILIES
    assert set(NAMES) == set(FAMILIES)
    assert len(set(FAMILIES)) == len(FAMILIES)
    assert all(reason for reason in rules()["reason"])


def test_families_of_a_column_are_those_of_its_names():
    names = [name for names in NAMES.values() for name in names] * 2
    found = families(pd.Series(names, index=range(5, 5 + len(names))))
    assert list(found) == [family(name) for name in names]
    assert list(families([])) == []


def sample_names() -> list[str]:
    with closing(sqlite3.connect(SAMPLE.as_uri() + "?mode=ro", uri=True)) as connection:
        return [name for (name,) in connection.execute("SELECT value FROM StringIds")]


def test_no_kernel_of_the_sample_is_other():
    names = sample_names()
    assert len(names) == 39
    assert "other" not in list(families(names))


def test_short_names_never_merge_kernels():
    names = sample_names() + [name for names in NAMES.values() for name in names]
    assert len({name[:100] for name in names}) < len(set(names))  # cutting at 100 characters would merge some
    for width in (10, 40, 80):
        shown = short_names(names + names, width)
        assert set(shown) == set(names)
        assert len(set(shown.values())) == len(shown)


@pytest.mark.parametrize(("name", "short"), [
    (NAMES["matrix multiply"][0], "cutlass_80_simt_sgemm_128x256_8x4_nt_align1"),
    (NAMES["matrix multiply"][3],
     "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma"),
    (NAMES["softmax"][0], "softmax_warp_forward<float>"),
    (NAMES["softmax"][1], "softmax_warp_backward<BFloat16 float>"),
    (NAMES["copy and cast"][0], "elementwise_kernel<direct_copy_kernel_cuda>"),
    (NAMES["elementwise"][0], "vectorized_elementwise_kernel<CUDAFunctor_add float>"),
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
