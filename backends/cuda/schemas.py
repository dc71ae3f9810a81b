"""The operators of other packages that kernels here may call, as data.

Comes in: nothing. Goes out: for each operator its schema, word for word, the release that it was
read from, and what its documentation or source says that it takes.
Always holds: an operator is called only when the schema that torch has for it is one of these; the
same name with other arguments is another operator.

All of them multiply by weights in the layout of ``marlin_layout``. A type of weights is named by a
number: ``1 << 50 | bias << 17 | bits << 8``, the bias being what is subtracted from a code; 0 says
that the call brings zero points.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HALVES = (torch.float16, torch.bfloat16)


def type_id(bits: int, bias: int) -> int:
    """The number of a type of unsigned codes (``vllm/scalar_type.py``).

    >>> type_id(4, 8)
    1125899907892224
    """
    return 1 << 50 | bias << 17 | bits << 8


@dataclass(frozen=True)
class Operator:
    """One operator, as one release of a package registers it.

    Attributes:
        name: ``namespace::name``.
        package: what has to be installed, by its name for ``pip``.
        module: the importable name of the package.
        version: the release that the schema was read from.
        schema: arguments and result, without the name.
        dtypes: of activations.
        zero_bits: widths of stored codes for which zero points may be given.
        bias: whether the call takes a bias.
        libraries: patterns of the shared libraries of the package that register the operator; none
            where the package has to be asked.
        remedy: what registers it where no library does.
    """

    name: str
    package: str
    module: str
    version: str
    schema: str
    dtypes: tuple[torch.dtype, ...] = HALVES
    zero_bits: tuple[int, ...] = (4,)
    bias: bool = True
    libraries: tuple[str, ...] = ()
    remedy: str = ""

    def takes(self, dtype: torch.dtype, bits: int, zero: bool) -> bool:
        """Whether activations of a dtype and codes of a width, with zero points or without, fit."""
        return dtype in self.dtypes and (not zero or bits in self.zero_bits)


def _gptqmodel(dtype: torch.dtype, short: str) -> Operator:
    return Operator(
        f"gptqmodel_marlin_{short}::gptq_marlin_gemm_{short}",
        "gptqmodel",
        "gptqmodel",
        "7.7.0",
        "(Tensor a, Tensor(a!)? c, Tensor b_q_weight, Tensor? b_bias, Tensor b_scales, "
        "Tensor? global_scale, Tensor? b_zeros, Tensor? g_idx, Tensor? perm, Tensor(b!) workspace, "
        "int b_q_type_id, int size_m, int size_n, int size_k, bool is_k_full=True, "
        "bool use_atomic_add=False, bool use_fp32_reduce=False, bool is_zp_float=False, "
        "Tensor(c!)? c_tmp=None, Tensor(d!)? a_tmp=None) -> Tensor",
        dtypes=(dtype,),
        zero_bits=(4, 8),
        remedy=f"gptqmodel compiles it on request: extension.load(name='marlin_{short}')",
    )


# In the order of preference.
LINEAR: tuple[Operator, ...] = (
    Operator(
        "_C::marlin_gemm",
        "vllm",
        "vllm",
        "0.33.0",
        "(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, "
        "Tensor b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, "
        "Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, "
        "bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor",
        libraries=("_C_stable_libtorch*.so", "_C.*.so"),
    ),
    Operator(
        "sgl_kernel::gptq_marlin_gemm",
        "sgl-kernel",
        "sgl_kernel",
        "0.3.21",
        "(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor! b_scales, "
        "Tensor? global_scale_or_none, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, "
        "Tensor? perm_or_none, Tensor! workspace, int b_q_type_id, int size_m, int size_n, "
        "int size_k, bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, "
        "bool is_zp_float) -> Tensor",
        bias=False,
        libraries=("common_ops*.so", "sm*/common_ops*.so"),
    ),
    _gptqmodel(torch.float16, "fp16"),
    _gptqmodel(torch.bfloat16, "bf16"),
)
EXPERTS: tuple[Operator, ...] = (
    Operator(
        "_moe_C::moe_wna16_marlin_gemm",
        "vllm",
        "vllm",
        "0.33.0",
        "(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, "
        "Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, "
        "Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, "
        "Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k, "
        "bool mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k, "
        "bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, "
        "int blocks_per_sm) -> Tensor",
        libraries=("_moe_C_stable_libtorch*.so", "_moe_C.*.so"),
    ),
)
