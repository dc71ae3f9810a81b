"""Direct edges from GGUF's blocks: nothing is unpacked on the way.

Comes in: rows of blocks in a ``gguf.*`` layout. Goes out: the same weight in ``cpu.panel``.
Always holds: decoded values are equal bit for bit. Types of 256 columns keep their small scales:
a float16 factor for 256 columns and a step of 8 bits a group, as the file has them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qcompile.backends.cpu.build import load_library
from qcompile.backends.cpu.edges import Parts, filled, table_of
from qcompile.backends.cpu.panel import CHUNK, NAME, arguments
from qcompile.edge import Edge, register_edge
from qcompile.layout import QuantizedTensor
from qcompile.spec import AffineSpec, BlockSpec, LookupSpec, Spec

PLAIN = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4")
NESTED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")


def _target(spec: Spec, name: str) -> AffineSpec | LookupSpec | None:
    if not isinstance(spec, BlockSpec) or spec.type != name or spec.exact is None:
        return None
    return replace(spec.exact, nested=CHUNK) if name in NESTED else spec.exact


def _fill(weight: QuantizedTensor, parts: Parts, name: str) -> None:
    spec = _target(weight.spec, name)
    assert spec is not None
    load_library()
    torch.ops.qcompile_cpu.panel_from_blocks(
        weight.parts["data"], name, arguments(spec, weight.shape), parts["blob"]
    )
    parts["table"].copy_(table_of(spec))


def _edge(name: str) -> Edge:
    def fill(weight: QuantizedTensor, parts: Parts) -> None:
        _fill(weight, parts, name)

    def apply(weight: QuantizedTensor) -> QuantizedTensor:
        spec = _target(weight.spec, name)
        assert spec is not None
        return filled(weight, spec, fill)

    return Edge(f"gguf.{name}", NAME, lambda spec: _target(spec, name), apply, fill=fill)


EDGES = tuple(register_edge(_edge(name)) for name in (*PLAIN, *NESTED))
