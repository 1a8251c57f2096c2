"""Names that existing scripts import, and that therefore never change."""

from __future__ import annotations

import importlib
import inspect
import operator

import pytest

NAMES = {
    "triton_dist": "jit tune autotuner language __version__",
    "triton_dist.autotuner": "contextual_autotune",
    "triton_dist.tune": "autotune to_hashable",
    "triton_dist.runner":
        "jit export load configure_jit_backend restore_jit_backend configure_autotune_backend "
        "restore_autotune_backend autotune get_file_dir torch_utils color_print",
    "triton_dist.runner.language": "dump dump_boundary dump_grids",
    "triton_dist.runner.tuning": "cubin_space",
    "triton_dist.utils":
        "initialize_distributed finalize_distributed dist_print rand_tensor is_cuda "
        "get_device_max_shared_memory_size sleep_async init_seed get_bool_env get_int_env "
        "generate_data has_tma is_fp8_dtype is_nvshmem_multimem_supported "
        "nvshmem_barrier_all_on_stream requires_p2p_native_atomic supports_p2p_native_atomic "
        "wait_until_max_gpu_clock_or_warning assert_allclose perf_func group_profile "
        "init_nvshmem_by_torch_process_group get_torch_prof_ctx cuda cudart",
    "triton_dist.jit": "jit",
    "triton_dist.profiler_utils":
        "perf_func perf_func_with_l2_reset get_torch_prof_ctx group_profile "
        "benchmark_latency_memory print_benchmark_comparison",
    "triton_dist.layers.nvidia":
        "GemmARLayer EPAll2AllLayer EPLowLatencyAllToAllLayer UlyssesSPAllToAllLayer "
        "SpGQAFlashDecodeAttention",
    "triton_dist.layers.nvidia.tp_mlp": "TP_MLP",
    "triton_dist.layers.nvidia.tp_attn": "TP_Attn _set_cos_sin_cache",
    "triton_dist.layers.nvidia.tp_moe": "TP_MoE",
    "triton_dist.layers.nvidia.ep_moe": "EP_MoE",
    "triton_dist.deep_ep": "Buffer Config EventHandle EventOverlap topk_idx_t",
    "triton_dist.deep_ep.utils": "EventHandle EventOverlap",
    "triton_dist.deep_ep.buffer": "Buffer",
    "triton_dist.function.nvidia.common":
        "init_triton_dist_ep_op deinit_triton_dist_ep_op",
    "triton_dist.function.nvidia.ep_moe_fused": "TritonDistFusedEpMoeFunction",
    "triton_dist.models": "AutoLLM",
    "triton_dist.models.config": "ModelConfig",
    "triton_dist.models.kv_cache": "KV_Cache",
    "triton_dist.models.utils": "init_model_cpu seed_everything",
    "triton_dist.kernels.allreduce": "AllReduceMethod get_allreduce_methods to_allreduce_method",
    "triton_dist.nv_utils": "get_intranode_max_speed_gbps",
    "triton_dist.test.utils": "LAYER_CONFIGS assert_allclose bitwise_equal assert_bitwise_equal",
    "triton_dist.kernels.nvidia":
        "ag_gemm create_ag_gemm_context gemm_rs create_gemm_rs_context gemm_ar "
        "create_gemm_ar_context all_reduce create_allreduce_ctx create_moe_rs_context "
        "create_all_to_all_context fast_all_to_all all_to_all_post_process gqa_fwd_batch_decode "
        "gqa_fwd_batch_decode_aot gqa_fwd_batch_decode_persistent "
        "gqa_fwd_batch_decode_persistent_aot fused_sp_ag_attn_intra_node "
        "create_sp_ag_attention_context_intra_node",
    "triton_dist.kernels.nvidia.sp_ulysess_qkv_gemm_all2all": "SpUlysessQKVGemmAll2AllKernel",
    "triton_dist.kernels.nvidia.sp_ulysess_o_all2all_gemm": "SpUlysessOAll2AllGemmKernel",
    "triton_dist.kernels.nvidia.all_to_all_vdev_2d_offset":
        "create_context all_to_all_v_offset_op all_to_all_v_offset_op_v2 all_to_all_vdev_2d "
        "all_to_all_vdev_2d_offset",
    "triton_dist.test.nvidia.ep_a2a_utils":
        "torch_ll_dispatch torch_ll_combine dequant_fp8_bf16 quant_bf16_fp8",
    "triton_dist.kernels.nvidia.moe_reduce_rs":
        "MoEReduceRSContext create_moe_rs_context run_moe_reduce_rs "
        "run_moe_reduce_rs_triton_non_overlap",
    "triton_dist.kernels.nvidia.moe_reduce_ar":
        "MoEReduceARContext create_moe_ar_context run_moe_reduce_ar "
        "run_moe_reduce_ar_triton_non_overlap",
    "triton_dist.kernels.nvidia.moe_utils": "calc_gather_scatter_index_triton",
    "triton_dist.kernels.nvidia.allreduce":
        "AllReduceMethod all_reduce create_allreduce_ctx get_allreduce_methods "
        "to_allreduce_method",
    "triton_dist.kernels.nvidia.allgather_gemm":
        "AllGatherGEMMTensorParallelContext create_ag_gemm_context ag_gemm gemm_persistent "
        "gemm_non_persistent local_copy_and_barrier_all kernel_consumer_gemm_persistent "
        "ag_gemm_persistent",
    "triton_dist.kernels.nvidia.allgather_group_gemm":
        "ag_group_gemm create_ag_group_gemm_context MoEAllGatherGroupGEMMTensorParallelContext "
        "kernel_consumer_m_parallel_scatter_group_gemm run_moe_ag_triton_non_overlap "
        "sort_topk_ids_align_block_size",
    "triton_dist.kernels.nvidia.gemm":
        "get_config_space matmul prune_fn_by_shared_memory prune_fn_by_group_size_m",
    "triton_dist.kernels.nvidia.gemm_perf_model": "get_tensorcore_tflops get_dram_gbps",
    "triton_dist.kernels.nvidia.comm_perf_model":
        "estimate_all_gather_time_ms estimate_reduce_scatter_time_ms get_nic_gbps_per_gpu",
}  # fmt: skip
# As scripts call them: positional ones in this order, the others by name.
PARAMETERS = {
    "triton_dist.utils.nvshmem_barrier_all_on_stream": ["stream"],
    "triton_dist.utils.wait_until_max_gpu_clock_or_warning": ["device_id", "timeout_sec"],
    "triton_dist.utils.rand_tensor": ["shape", "dtype", "device"],
    "triton_dist.profiler_utils.perf_func_with_l2_reset": ["func", "iters", "warmup_iters"],
    "triton_dist.test.utils.assert_allclose": [
        "x", "y", "rtol", "atol", "verbose", "allow_nan", "allow_inf", "fail_if_too_small",
    ],
    "triton_dist.kernels.nvidia.comm_perf_model.estimate_all_gather_time_ms": [
        "nbytes", "world_size", "local_world_size", "intranode_bw", "internode_bw",
    ],
    "triton_dist.kernels.nvidia.allgather_group_gemm.create_ag_group_gemm_context": [
        "max_ntokens", "N_per_rank", "K", "num_experts", "topk", "dtype", "rank", "num_ranks",
        "num_local_ranks", "ag_intranode_stream", "ag_internode_stream", "BLOCK_SIZE_M",
        "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "stages", "num_warps", "group",
    ],
    "triton_dist.kernels.nvidia.allgather_group_gemm.run_moe_ag_triton_non_overlap": [
        "x_shard", "weights", "chosen_experts", "persistent",
    ],
    "triton_dist.kernels.nvidia.moe_utils.calc_gather_scatter_index_triton": [
        "chosen_experts", "nexperts", "alignment_by_expert",
    ],
    "triton_dist.kernels.nvidia.moe_reduce_rs.create_moe_rs_context": [
        "rank", "world_size", "local_world_size", "max_token_num", "hidden_dim", "num_experts",
        "topk", "input_dtype", "n_chunks_max", "tp_group",
    ],
    "triton_dist.kernels.nvidia.moe_reduce_rs.run_moe_reduce_rs_triton_non_overlap": [
        "x", "weights", "chosen_experts", "expert_weight", "n_chunks", "persistent", "config",
    ],
    "triton_dist.layers.nvidia.GemmARLayer": [
        "tp_group", "max_M", "N", "K", "input_dtype", "output_dtype", "local_world_size",
        "persistent", "use_ll_kernel", "copy_to_local", "NUM_COMM_SMS", "NUM_SM_MARGIN",
        "TILE_MAP_LEVEL", "user_gemm_config", "has_weight", "has_bias",
    ],
    "triton_dist.kernels.nvidia.allgather_group_gemm.sort_topk_ids_align_block_size": [
        "topk_ids", "num_experts", "rank", "num_ranks", "num_local_ranks", "block_size",
    ],
    "triton_dist.models.config.ModelConfig": [
        "model_name", "max_length", "dtype", "local_only", "rank", "world_size",
    ],
    "triton_dist.models.kv_cache.KV_Cache": [
        "num_layers", "batch_size", "max_length", "kv_heads", "head_dim", "dtype", "world_size",
    ],
    "triton_dist.layers.nvidia.EPAll2AllLayer": [
        "ep_group", "max_tokens", "hidden", "topk", "rank", "num_tot_experts", "local_world_size",
        "world_size", "dtype", "weight_dtype", "num_sm", "enable_local_combine", "use_aot",
    ],
    "triton_dist.layers.nvidia.EPLowLatencyAllToAllLayer": [
        "max_m", "hidden", "topk", "online_quant_fp8", "rank", "num_experts", "local_world_size",
        "world_size", "fp8_gsize", "dtype", "enable_profiling",
    ],
    "triton_dist.function.nvidia.common.init_triton_dist_ep_op": [
        "ep_group", "max_tokens_per_rank", "hidden_size", "topk", "ep_rank", "num_experts",
        "ep_size", "dtype", "weight_dtype", "num_sm", "sm_margin", "num_buffers", "capacity",
        "ep_implementation",
    ],
    "triton_dist.function.nvidia.ep_moe_fused.TritonDistFusedEpMoeFunction.apply": [
        "num_experts", "routing_weights", "selected_experts", "hidden_states", "fc1_1", "fc1_2",
        "fc2", "ep_group",
    ],
    "triton_dist.kernels.nvidia.create_all_to_all_context": [
        "max_m", "hidden", "rank", "num_tot_experts", "WORLD_SIZE", "experts_per_rank", "dtype",
        "scale_dtype",
    ],
    "triton_dist.kernels.nvidia.all_to_all_vdev_2d_offset.create_context": [
        "rank", "world_size", "ne", "k", "token_len_elem", "token_dtype", "overflow_factor",
        "max_token_num_per_rank", "use_v2_kernel",
    ],
    "triton_dist.layers.nvidia.GemmARLayer.forward": [
        "self", "input", "weight", "bias", "scale_a", "scale_b",
    ],
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_are_those_of_scripts(path: str) -> None:
    module = max((name for name in NAMES if path.startswith(f"{name}.")), key=len)
    item = operator.attrgetter(path.removeprefix(f"{module}."))(importlib.import_module(module))
    assert list(inspect.signature(item).parameters) == PARAMETERS[path]
