"""The operators that exist on the pretended device.

Comes in: nothing. Goes out: the kinds of their arguments, and C source with their entry points.
Always holds: an operator that is not listed does not exist, so a graph that calls it fails.

Kinds: T tensor, L list of tensors, S scalar, A array of integers, i integer, d double, f float, s
text. The order of arguments is that of the vendor's headers.
"""

from __future__ import annotations

SPEC = {
    # What the package itself calls to fill and copy.
    "aclnnInplaceCopy": "TT",
    "aclnnCast": "TiT",
    "aclnnInplaceZero": "T",
    "aclnnInplaceOne": "T",
    "aclnnInplaceFillScalar": "TS",
    # Plain operators of lowered graphs.
    "aclnnAdd": "TTST",
    "aclnnAdds": "TSST",
    "aclnnBitwiseAndScalar": "TST",
    "aclnnBitwiseXorScalar": "TST",
    "aclnnCat": "LiT",
    "aclnnClamp": "TSST",
    "aclnnGather": "TiTT",
    "aclnnIndexSelect": "TiTT",
    "aclnnMatmul": "TTTi",
    "aclnnMm": "TTTi",
    "aclnnMul": "TTT",
    "aclnnMuls": "TST",
    "aclnnRepeatInterleaveIntWithDim": "TiiiT",
    "aclnnRightShift": "TTT",
    "aclnnSigmoid": "TT",
    "aclnnSort": "TiiiTT",
    "aclnnStack": "LiT",
    "aclnnSub": "TTST",
    "aclnnSubs": "TSST",
    # Operators with a contract.
    "aclnnDynamicQuant": "TTTT",
    "aclnnDynamicQuantV2": "TTTiTTT",
    "aclnnGroupedMatmulV4": "LLLLLLLLTLLLiiiiLLL",
    "aclnnGroupedMatmulV5": "LLLLLLLLTLLLiiiiALLL",
    "aclnnMoeFinalizeRoutingV2": "TTTTTTTiT",
    "aclnnMoeInitRoutingV3": "TTTTiiiiiiiAiTTTT",
    "aclnnQuantMatmulV5": "TTTTTTTTTiiiT",
    "aclnnSwiGlu": "TiT",
    "aclnnWeightQuantBatchMatmulV2": "TTTTTTTiT",
}
_TYPES = {
    "T": "aclTensor *",
    "L": "aclTensorList *",
    "S": "aclScalar *",
    "A": "aclIntArray *",
    "i": "int64_t ",
    "d": "double ",
    "f": "float ",
    "s": "char *",
}


def source() -> str:
    """C code of all entry points: for each one that asks for a workspace and one that runs."""
    return "\n".join(_entry(name, kinds) for name, kinds in SPEC.items()) + "\n"


def _entry(name: str, kinds: str) -> str:
    given = ", ".join(f"{_TYPES[kind]}a{i}" for i, kind in enumerate(kinds))
    stored = " ".join(_stored(kind, i) for i, kind in enumerate(kinds))
    count = len(kinds)
    return (
        f"X int {name}GetWorkspaceSize({given}, uint64_t *size, void **executor) {{\n"
        f"  argument row[{count}]; {stored}\n"
        f'  return go("{name}", "{kinds}", row, {count}, size, executor);\n}}\n'
        f"X int {name}(void *space, uint64_t size, void *executor, void *stream) {{ return 0; }}"
    )


def _stored(kind: str, place: int) -> str:
    if kind in "TLSAs":
        return f"row[{place}].pointer = (void *)a{place};"
    return f"row[{place}].{'whole' if kind == 'i' else 'real'} = a{place};"
