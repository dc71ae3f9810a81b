"""The grouped product and the routing around it: every rule broken once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.lowered import relative
from support.npu_experts import COUNT, HIDDEN, INNER

from qcompile import backends
from qcompile.backends.npu import nibbles
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.errors import LowerError

backends.load("npu").prepare()
NPU = torch.ops.npu


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulating(Mode("910b")):
        yield


def call(**given: Any) -> dict[str, Any]:
    values = torch.randint(-8, 8, (COUNT, HIDDEN, INNER)).to(torch.int8)
    return {
        "x": [torch.randn(11, HIDDEN).half()],
        "weight": [nibbles.pack(values)],
        "antiquant_scale": [torch.rand(COUNT, 2, INNER).half()],
        "antiquant_offset": [torch.zeros(COUNT, 2, INNER).half()],
        "group_list": torch.tensor([3, 0, 5, 3]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        **given,
    }


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no offset": (lambda a: {"antiquant_offset": None}, "antiquant_offset is missing"),
    "no scale": (lambda a: {"antiquant_scale": None}, "antiquant_scale is missing"),
    "shape of the offset": (
        lambda a: {"antiquant_offset": [a["antiquant_offset"][0][:, :1]]},
        "one shape",
    ),
    "dtype of the scale": (
        lambda a: {"antiquant_scale": [a["antiquant_scale"][0].float()]},
        "x is float32|dtype of x",
    ),
    "groups that do not divide K": (
        lambda a: {
            n: [torch.ones(COUNT, 3, INNER).half()] for n in ("antiquant_scale", "antiquant_offset")
        },
        "G divides K",
    ),
    "groups of int8": (lambda a: {"weight": [nibbles.unpack(a["weight"][0])]}, "int8 weight"),
    "transposed int4": (
        lambda a: {"weight": [a["weight"][0].transpose(1, 2).contiguous().transpose(1, 2)]},
        "contiguous",
    ),
    "no group_type": (lambda a: {"group_type": None}, "group_type is None"),
    "split_item": (lambda a: {"split_item": 0}, "split_item 0"),
    "rows that are not there": (
        lambda a: {"group_list": torch.tensor([3, 0, 5, 4])},
        "names 12 rows of 11",
    ),
    "running sums taken for counts": (
        lambda a: {"group_list": torch.tensor([3, 3, 8, 11])},
        "names 25 rows of 11",
    ),
    "int32 counts": (lambda a: {"group_list": a["group_list"].int()}, "group_list must be int64"),
    "bias": (lambda a: {"bias": [torch.zeros(COUNT, INNER)]}, "bias is float32"),
    "three dimensions": (lambda a: {"x": [a["x"][0][None]]}, "x must be"),
    "an activation": (lambda a: {"act_type": 1}, "act_type is not emulated"),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grouped_product_is_refused_with_its_rule(name: str) -> None:
    change, says = WRONG[name]
    right = call()
    NPU.npu_grouped_matmul(**right)
    with pytest.raises(LowerError, match=says):
        NPU.npu_grouped_matmul(**{**right, **change(right)})


@pytest.mark.usefixtures("emulated")
def test_the_wrong_mode_of_finalize_is_caught() -> None:
    x, ids = torch.randn(6, 16).half(), torch.randint(0, COUNT, (6, 2), dtype=torch.int32)
    shares = torch.rand(6, 2).half()
    routing = {
        "active_num": 12,
        "expert_num": COUNT,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, COUNT],
        "quant_mode": -1,
    }
    rows, places, counts, _ = NPU.npu_moe_init_routing_v2(x, ids, **routing)
    assert torch.equal(counts, torch.bincount(ids.flatten().long(), minlength=COUNT))
    found = NPU.npu_moe_finalize_routing(
        rows, None, None, None, shares, places, ids, drop_pad_mode=2
    )
    exact = x.double() * shares.double().sum(1, keepdim=True)
    assert relative(found, exact) < 1e-3
    with pytest.raises(LowerError, match="need drop_pad_mode 2; drop_pad_mode is 0"):
        NPU.npu_moe_finalize_routing(rows, None, None, None, shares, places, ids)
    # Where the indices come from elsewhere, the wrong mode shows in the result.
    wrong = NPU.npu_moe_finalize_routing(rows, None, None, None, shares, places.clone(), ids)
    assert relative(wrong, exact) > 0.1
    with pytest.raises(LowerError, match="scales are float32"):
        NPU.npu_moe_finalize_routing(
            rows, None, None, None, shares.float(), places, ids, drop_pad_mode=2
        )
    with pytest.raises(LowerError, match="active_num is 6"):
        NPU.npu_moe_init_routing_v2(x, ids, **{**routing, "active_num": 6})
    with pytest.raises(LowerError, match="must be int32"):
        NPU.npu_moe_init_routing_v2(x, ids.long(), **routing)


@pytest.mark.usefixtures("emulated")
def test_shapes_for_tracing_are_those_of_results() -> None:
    x, ids = torch.randn(6, 16).half(), torch.randint(0, COUNT, (6, 2), dtype=torch.int32)
    routing: dict[str, Any] = {"active_num": 12, "expert_num": COUNT, "expert_tokens_num_type": 1}
    routing |= {"expert_tokens_num_flag": True, "active_expert_range": [0, COUNT]}
    torch.library.opcheck(NPU.npu_moe_init_routing_v2.default, (x, ids), routing)
    rows, places, _, _ = NPU.npu_moe_init_routing_v2(x, ids, **routing)
    given = (rows, None, None, None, torch.rand(6, 2).half(), places, ids)
    torch.library.opcheck(NPU.npu_moe_finalize_routing.default, given, {"drop_pad_mode": 2})
    torch.library.opcheck(NPU.npu_swiglu.default, (x,))
    right = call()
    first, second = right.pop("x"), right.pop("weight")
    torch.library.opcheck(NPU.npu_grouped_matmul.default, (first, second), right)
