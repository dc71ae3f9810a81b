"""Mistakes in what a kernel emits, each made once in its own graph, are caught."""

from __future__ import annotations

import pytest
import torch
from support.lowered import relative
from support.npu_mutations import MUTATIONS, right_graph
from torch import fx

from qcompile import backends
from qcompile.backends.npu import nibbles
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.errors import LowerError

backends.load("npu").prepare()


def run(graph: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    graph.recompile()
    with emulating(Mode("910b")):
        found: torch.Tensor = graph(x)
    return found


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_emission_is_caught(name: str) -> None:
    mutation = MUTATIONS[name]
    graph, x, expected, bound = right_graph(mutation.kind)
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
