"""Operators of the Marlin family on the CPU, under the schemas of the packages that bring them.

Comes in: what a package's operator would get. Goes out: what it would return.
Always holds: nothing is known here but the arguments: codes, scales and zero points are found in
the buffers by the indices of the matrix unit's operand, written apart from the packer's; a call
that the host code of the packages refuses, or that would race or read garbage, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qcompile.backends.cuda.schemas import EXPERTS, LINEAR, Operator

PROCESSORS = 132
# Types of codes by the numbers that the packages give them: bits, and what is subtracted.
TYPES = {
    1125899906843648: (4, None),
    1125899907892224: (4, 8),
    1125899906844672: (8, None),
    1125899923621888: (8, 128),
}


def check(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(f"marlin: {text}")


# **** buffers ****


def codes_of(words: torch.Tensor, bits: int, k: int, n: int) -> torch.Tensor:
    """Codes ``[K, N]`` of words ``[K / 16, N * 16 * bits / 32]``, field by field."""
    check(tuple(words.shape) == (k // 16, n * bits // 2), f"words {tuple(words.shape)}")
    check(words.dtype == torch.int32 and words.is_contiguous(), "words must be contiguous int32")
    codes = torch.full((k, n), -1, dtype=torch.int64)
    word, tile = torch.arange(words.shape[1])[None, :], torch.arange(k // 16)[:, None]
    for place in range(32 // bits):
        if bits == 4:
            element = (0, 2, 4, 6, 1, 3, 5, 7)[place]
            block, rest = word // 128, word % 128
            lane, column, half = rest // 4, rest % 4, torch.tensor(element // 4)
        else:
            element = (0, 2, 1, 3)[place]
            block, rest = word // 256, word % 256
            lane, column, half = rest // 8, rest % 8 // 2, rest % 2
        row = 16 * tile + 2 * (lane % 4) + (0, 1, 8, 9)[element % 4]
        found = words.to(torch.int64) >> (place * bits) & ((1 << bits) - 1)
        codes[row, 64 * block + 16 * column + lane // 4 + 8 * half] = found
    assert int(codes.min()) >= 0
    return codes


def source_column(n: int, grouped: bool) -> torch.Tensor:
    """For every stored column of scales, the column of the matrix that it belongs to."""
    column = torch.arange(n)
    if grouped:
        return column // 64 * 64 + column % 64 // 8 + 8 * (column % 8)
    pairs = torch.tensor([0, 1, 8, 9, 16, 17, 24, 25])
    return column // 32 * 32 + 2 * (column % 32 // 8) + pairs[column % 8]


def unordered(stored: torch.Tensor, grouped: bool) -> torch.Tensor:
    """``[..., N]`` in the order of the matrix's columns."""
    found = torch.empty_like(stored)
    found[..., source_column(stored.shape[-1], grouped)] = stored
    return found


def zeros_of(words: torch.Tensor, bits: int, groups: int, n: int) -> torch.Tensor:
    """Zero points ``[G, N]``."""
    check(tuple(words.shape) == (groups, n * bits // 32), f"zero points {tuple(words.shape)}")
    check(words.dtype == torch.int32 and words.is_contiguous(), "zero points must be int32")
    count = 32 // bits
    order = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
    stored = torch.empty((groups, n), dtype=torch.int64)
    for place in range(count):
        stored[:, order[place] :: count] = words >> (place * bits) & ((1 << bits) - 1)
    return unordered(stored, True)


def matrix_of(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, kind: int, k: int
) -> torch.Tensor:
    """The float64 matrix ``[K, N]`` behind the buffers."""
    check(kind in TYPES, f"unknown type {kind}")
    bits, bias = TYPES[kind]
    check((bias is None) == (zeros is not None), f"type {kind} with zeros {zeros is not None}")
    groups, n = scales.shape
    check(n % 64 == 0 and k % 64 == 0 and (n % 128 == 0 or k % 128 == 0), f"K {k}, N {n}")
    check(k % groups == 0, f"K {k} in {groups} groups")
    check(groups == 1 or k // groups in (32, 64, 128), f"a group of {k // groups}")
    check(scales.is_contiguous(), "scales must be contiguous")
    codes = codes_of(words, bits, k, n)
    middle: Any = bias if zeros is None else zeros_of(zeros, bits, groups, n)
    if zeros is not None:
        middle = middle.repeat_interleave(k // groups, 0)
    scale = unordered(scales, groups > 1).double().repeat_interleave(k // groups, 0)
    matrix: torch.Tensor = (codes - middle).double() * scale
    return matrix


def check_call(given: dict[str, Any]) -> None:
    a, workspace = given["a"], given["workspace"]
    check(a.dtype in (torch.float16, torch.bfloat16), f"a is {a.dtype}")
    check(a.dtype == given["b_scales"].dtype, f"a is {a.dtype}, scales {given['b_scales'].dtype}")
    check(tuple(a.shape) == (given["size_m"], given["size_k"]), f"a is {tuple(a.shape)}")
    check(a.stride(1) == 1 and a.stride(0) % 8 == 0, f"a has strides {a.stride()}")
    check(a.data_ptr() % 16 == 0, "a must be aligned to 16 bytes")
    check(given["b_scales"].shape[-1] == given["size_n"], f"size_n is {given['size_n']}")
    check(workspace.dtype == torch.int32, f"workspace is {workspace.dtype}")
    check(not bool(workspace.any()), "workspace must be zeros")
    check(workspace.numel() >= PROCESSORS * 4, f"workspace of {workspace.numel()}")
    check(given["use_fp32_reduce"] and not given["use_atomic_add"], "sums must have one order")
    check(not given["is_zp_float"], "zero points are integers")
    check(given.get("is_k_full", True), "K is whole")
    for name in ("c", "a_scales", "global_scale", "g_idx", "perm", "c_tmp", "a_tmp"):
        check(given.get(name) is None, f"{name} is not emulated")
    bias = given.get("b_bias")
    if bias is not None:
        check(bias.dtype == a.dtype and bias.is_contiguous(), f"bias is {bias.dtype}")
        check(bias.shape[-1] == given["size_n"], f"bias is {tuple(bias.shape)}")


# **** operators ****


def gemm(given: dict[str, Any]) -> torch.Tensor:
    check_call(given)
    kind, k = given["b_type_id"], given["size_k"]
    zeros = given["b_zeros"]
    matrix = matrix_of(given["b_q_weight"], given["b_scales"], zeros, kind, k)
    y: torch.Tensor = given["a"].double() @ matrix
    if given.get("b_bias") is not None:
        y = y + unordered(given["b_bias"], False).double()
    return y.to(given["a"].dtype)


def experts_gemm(given: dict[str, Any]) -> torch.Tensor:
    check_call(given)
    block, top, a = given["moe_block_size"], given["top_k"], given["a"]
    rows, used = given["sorted_token_ids"], given["num_tokens_past_padded"]
    shares, count = given["topk_weights"], a.shape[0] * top
    check(block == 8 or block in (16, 32, 48, 64), f"a block of {block}")
    indices = {"rows": rows, "experts": given["expert_ids"], "used": used}
    for name, index in indices.items():
        check(index.dtype == torch.int32 and index.is_contiguous(), f"{name} is {index.dtype}")
    check(shares.dtype == torch.float32 and shares.numel() == count, "topk_weights")
    check(len(rows) % block == 0 and int(used) % block == 0 and int(used) <= len(rows), "padding")
    check(len(given["expert_ids"]) >= int(used) // block, "expert_ids is too short")
    check(all(given[n] == -1 for n in ("thread_k", "thread_n", "blocks_per_sm")), "threads")
    out = torch.full((count, given["size_n"]), torch.nan, dtype=a.dtype)
    written = torch.zeros(count, dtype=torch.int64)
    for start in range(0, int(used), block):
        expert = int(given["expert_ids"][start // block])
        here = rows[start : start + block]
        here = here[here < count].long()
        y = a[here // top].double() @ _expert_matrix(given, expert)
        if given["b_bias"] is not None:
            y = y + unordered(given["b_bias"][expert], False).double()
        if given["mul_topk_weights"]:
            y = y * shares.flatten()[here, None].double()
        out[here] = y.to(a.dtype)
        written[here] += 1
    check(bool((written == 1).all()), "every row once")
    return out


def _expert_matrix(given: dict[str, Any], expert: int) -> torch.Tensor:
    zeros = None if given["b_zeros"] is None else given["b_zeros"][expert]
    weight, scales = given["b_q_weight"][expert], given["b_scales"][expert]
    return matrix_of(weight, scales, zeros, given["b_type_id"], given["size_k"])


def named(operator: Operator, values: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by their names, without the endings in which packages differ."""
    schema = torch._C.parse_schema(operator.name + operator.schema)
    given = {}
    for place, one in enumerate(schema.arguments):
        # Arguments that equal the schema's defaults do not arrive.
        value = values[place] if place < len(values) else one.default_value
        given[one.name.removesuffix("_or_none")] = value
    if "b_q_type_id" in given:
        given["b_type_id"] = given["b_q_type_id"]
    return given


@contextmanager
def installed(*operators: Operator, schema: str | None = None) -> Iterator[list[dict[str, Any]]]:
    """Operators, registered for CPU tensors as long as the context holds; their calls.

    Args:
        operators: some of ``schemas.LINEAR`` and ``schemas.EXPERTS``.
        schema: what to register them with, in place of their own.
    """
    calls: list[dict[str, Any]] = []
    libraries = []
    for one in operators:
        namespace, _, name = one.name.partition("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(name + (schema or one.schema))

        def run(*values: Any, one: Operator = one) -> torch.Tensor:
            given = named(one, values)
            calls.append(given)
            return experts_gemm(given) if one in EXPERTS else gemm(given)

        library.impl(name, run, "CPU")
        libraries.append(library)
    try:
        yield calls
    finally:
        for library in libraries:
            library._destroy()


__all__ = ["EXPERTS", "LINEAR", "installed"]
