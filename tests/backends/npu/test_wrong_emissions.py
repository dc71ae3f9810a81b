"""Mistakes in what a kernel emits, each made once in its own graph, are caught."""

from __future__ import annotations

import pytest
import torch
from support.lowered import emulated_call, relative
from support.npu_experts import HALF, case, documented, kernel, layer, lowered, packed_for
from support.npu_mutations import MUTATIONS
from support.weights import random_weight
from torch import fx

from qcompile import backends
from qcompile.backends import npu
from qcompile.backends.npu import nibbles
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.edge import find_route
from qcompile.errors import LowerError
from qcompile.spec import AffineSpec

backends.load("npu").prepare()
FOUR = AffineSpec(4, 32, "zero", HALF)


def right(kind: str) -> tuple[fx.GraphModule, torch.Tensor, torch.Tensor, float]:
    """A kernel's graph, an input, the result that is due, and how far it may be off."""
    torch.manual_seed(0)
    if kind == "experts":
        weight, given = layer(FOUR, FOUR), case(HALF, 9)
        graph = lowered(HALF, packed_for(HALF, weight), given)
        bound = kernel(HALF).tolerance.relative_l2
        return graph, given["x"], documented(weight, given), bound
    name = "npu.linear_int4" if kind == "plain" else "npu.linear_int4_t"
    made = next(k for k in npu.kernels(HALF) if k.name == name)
    stored, x = random_weight(FOUR, 48, 96), torch.randn(5, 96).half()
    assert made.layout is not None
    route = find_route(stored.layout, stored.spec, made.layout)
    assert route is not None
    graph = emulated_call(made, route.apply(stored), None, x)
    expected = x.double() @ stored.dequantize().double().T
    return graph, x, expected, made.tolerance.relative_l2


def run(graph: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    graph.recompile()
    with emulating(Mode("910b")):
        found: torch.Tensor = graph(x)
    return found


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_emission_is_caught(name: str) -> None:
    mutation = MUTATIONS[name]
    graph, x, expected, bound = right(mutation.kind)
    assert relative(run(graph, x), expected) <= bound
    mutation.apply(graph)
    if mutation.says is None:
        assert relative(run(graph, x), expected) > 100 * bound
        return
    with pytest.raises(LowerError, match=mutation.says):
        run(graph, x)


def test_a_packer_that_is_handed_experts_is_caught() -> None:
    """The device packs the first expert alone and says nothing."""
    values = torch.randint(-8, 8, (2, 16, 24), dtype=torch.int32)
    with emulating(Mode("910b")):
        flat = torch.ops.npu.npu_convert_weight_to_int4pack(values.flatten(0, 1))
        assert torch.equal(flat.view(2, 16, 3), nibbles.pack(values.to(torch.int8)))
        with pytest.raises(LowerError, match="two dimensions"):
            torch.ops.npu.npu_convert_weight_to_int4pack(values)
