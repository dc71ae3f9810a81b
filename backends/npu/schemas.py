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
