"""Edges from GGUF's blocks to the frame's layouts.

Comes in: a weight in a ``gguf.*`` layout, or a run of its rows. Goes out: the same weight in the
layout ``affine`` or ``lookup``, whichever its type's exact spec names.
Always holds: every quantized type has its edge; decoded values are equal bit for bit, except that
an infinite scale of IQ1_S or IQ1_M (no converter writes one) becomes NaN.

Blocks are taken apart in runs, so that the intermediate tensors of a large weight stay small.
"""

from __future__ import annotations

import torch

from qcompile.edge import Edge, register_edge
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.schemes.gguf.blocks import BLOCKS, TERNARY_ZERO, BlockType, layout_name
from qcompile.spec import AffineSpec, Spec

_COLUMNS_AT_ONCE = 1 << 21


def _edge_of(block: BlockType) -> Edge:
    dest = "affine" if isinstance(block.exact, AffineSpec) else "lookup"

    def target_spec(spec: Spec) -> Spec | None:
        return block.exact if spec == block.spec else None

    def apply(weight: QuantizedTensor) -> QuantizedTensor:
        return _unpack(weight, block, dest)

    return Edge(layout_name(block.spec), dest, target_spec, apply)


def _unpack(weight: QuantizedTensor, block: BlockType, dest: str) -> QuantizedTensor:
    size = block.spec
    blocks = weight.parts["data"].reshape(-1, size.bytes)
    parts = {
        part.name: torch.empty(part.shape, dtype=part.dtype, device=blocks.device)
        for part in layout_of(dest).fields(block.exact, weight.shape)
    }
    codes = parts["codes"].view(-1, size.elements)
    groups = size.elements // block.exact.group
    scale = parts["scale"].view(-1, groups)
    offset = parts["offset"].view(-1, groups) if "offset" in parts else None
    run = max(1, _COLUMNS_AT_ONCE // size.elements)
    for start in range(0, len(blocks), run):
        here = slice(start, start + run)
        unpacked = block.unpack(blocks[here])
        codes[here] = unpacked.codes
        scale[here] = unpacked.scale
        if offset is not None and unpacked.offset is not None:
            offset[here] = unpacked.offset
    if "zero" in parts:
        parts["zero"].fill_(TERNARY_ZERO)
    return QuantizedTensor(block.exact, dest, weight.shape, parts)


EDGES = tuple(register_edge(_edge_of(block)) for block in BLOCKS.values())
