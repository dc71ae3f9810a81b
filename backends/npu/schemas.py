"""The vendor operators that lowered graphs call, as data.

Comes in: nothing. Goes out: the operators' schemas, word for word as the vendor's package registers
them. Always holds: the strings are those of the version named here; the tests that run the real
package compare them.

``VERSION`` says which release of torch_npu they were read from. Where the package is present its
own definitions are used, where it is absent ``qcompile.backends.npu.emulator`` defines these.
"""

from __future__ import annotations

VERSION = "2.13.0"

SCHEMAS: dict[str, str] = {
    "npu_convert_weight_to_int4pack": (
        "npu_convert_weight_to_int4pack(Tensor weight, int inner_k_tiles=0) -> Tensor"
    ),
    "npu_dynamic_quant": (
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
        'int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)'
    ),
    "npu_grouped_matmul": (
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
        "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
        "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? "
        "group_list=None, Tensor[]? activation_input=None, Tensor[]? "
        "activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? "
        "split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
        "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? "
        "weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> "
        "Tensor[]"
    ),
    "npu_moe_finalize_routing": (
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? "
        "skip2, Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? "
        "export_for_source_row, int? drop_pad_mode=0, int? k=1) -> Tensor"
    ),
    "npu_moe_init_routing_v2": (
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
        "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int "
        "expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, bool "
        "expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], "
        "int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_swiglu": ("npu_swiglu(Tensor input, int dim=-1) -> Tensor"),
    "npu_quant_matmul": (
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, "
        "int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, "
        "int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor"
    ),
    "npu_weight_quant_batchmatmul": (
        "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, "
        "Tensor? antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, "
        "Tensor? bias=None, int antiquant_group_size=0, int inner_precise=0, "
        "int? weight_dtype=None) -> Tensor"
    ),
}
