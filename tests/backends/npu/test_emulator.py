"""The emulated operators: the documented formula, and every rule broken once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from qcompile import backends
from qcompile.backends.npu import emulation, emulator, nibbles
from qcompile.backends.npu.emulation import Mode, emulating
from qcompile.backends.npu.schemas import SCHEMAS
from qcompile.errors import LowerError

backends.load("npu").prepare()
NPU = torch.ops.npu
M, K, N, G = 5, 256, 64, 128
HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulating(Mode("910b")):
        yield


def call(dtype: torch.dtype = HALF, **given: Any) -> dict[str, Any]:
    """The arguments of a right call by groups, some of them replaced."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (K, N), generator=generator).to(torch.int8)
    right = {
        "x": torch.randn(M, K, generator=generator).to(dtype),
        "weight": nibbles.pack(values),
        "antiquant_scale": (torch.rand(K // G, N, generator=generator) + 0.1).to(dtype),
        "antiquant_offset": torch.randint(-8, 9, (K // G, N), generator=generator).to(dtype),
        "bias": torch.randn(N, generator=generator).to(HALF if dtype == HALF else torch.float32),
        "antiquant_group_size": G,
    }
    return {**right, **given}


def product(**arguments: Any) -> torch.Tensor:
    found: torch.Tensor = NPU.npu_weight_quant_batchmatmul(**arguments)
    return found


def turned(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with everything transposed."""
    values = nibbles.unpack(arguments["weight"])
    return {
        **arguments,
        "weight": nibbles.pack(values.t()).t(),
        "antiquant_scale": arguments["antiquant_scale"].t().contiguous().t(),
        "antiquant_offset": arguments["antiquant_offset"].t().contiguous().t(),
    }


def documented(arguments: dict[str, Any]) -> torch.Tensor:
    """The page's formula in float64, the offset added before the scale."""
    values = nibbles.unpack(arguments["weight"]).double()
    spread = [arguments[f"antiquant_{n}"].double() for n in ("offset", "scale")]
    offset, scale = (part.repeat_interleave(G, 0) for part in spread)
    exact: torch.Tensor = arguments["x"].double() @ ((values + offset) * scale)
    bias: torch.Tensor = arguments["bias"]
    return exact + bias.double()


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_products_follow_the_formula(dtype: torch.dtype) -> None:
    arguments = call(dtype)
    exact = documented(arguments)
    found = product(**arguments)
    assert found.dtype == dtype
    assert (found.double() - exact).norm() / exact.norm() < torch.finfo(dtype).eps
    assert torch.equal(found, product(**turned(arguments)))
    eight = {**arguments, "weight": nibbles.unpack(arguments["weight"])}
    assert torch.equal(found, product(**eight))
    eight = {**turned(arguments), "weight": eight["weight"].t().contiguous().t()}
    assert torch.equal(found, product(**eight))


def test_the_sign_of_the_offset_shows() -> None:
    arguments = call()
    exact = documented(arguments)
    wrong = product(**{**arguments, "antiquant_offset": -arguments["antiquant_offset"]})
    assert (wrong.double() - exact).norm() / exact.norm() > 0.5


def test_channels() -> None:
    values = nibbles.unpack(call()["weight"])
    for scale in (torch.rand(N).half(), torch.rand(1, N).half(), torch.rand(1).half()):
        found = product(x=call()["x"], weight=values, antiquant_scale=scale)
        exact = call()["x"].double() @ (values.double() * scale.double())
        assert (found.double() - exact).norm() / exact.norm() < 1e-3


def test_float32_rounds_nothing() -> None:
    arguments = call()
    wide = {**arguments, "x": arguments["x"].float(), "bias": arguments["bias"].float()}
    with emulating(Mode("910b", wide=True)):
        found = product(**wide)
    exact = documented(arguments)
    assert found.dtype == torch.float32
    assert (found.double() - exact).norm() / exact.norm() < 1e-6
    with pytest.raises(LowerError, match="x must be float16 or bfloat16"):
        product(**wide)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "group of 48": (lambda a: {"antiquant_group_size": 48}, "multiple of 32"),
    "group of 16": (lambda a: {"antiquant_group_size": 16}, "multiple of 32"),
    "group of K": (lambda a: {"antiquant_group_size": K}, "to K - 1; the group is 256"),
    "group of -1": (lambda a: {"antiquant_group_size": -1}, "the group is -1"),
    "scales of other groups": (lambda a: {"antiquant_group_size": 64}, r"scale is \(2, 64\)"),
    "three dimensions": (lambda a: {"x": a["x"][None]}, "two dimensions"),
    "no rows": (lambda a: {"x": a["x"][:0]}, "empty tensors are not taken"),
    "K of x": (lambda a: {"x": a["x"][:, :128].contiguous()}, "x has 128 columns"),
    "strides of x": (lambda a: {"x": torch.randn(M, 2 * K).half()[:, ::2]}, "must be contiguous"),
    "unsigned bytes": (
        lambda a: {"weight": nibbles.unpack(a["weight"]).view(torch.uint8)},
        "weight is uint8",
    ),
    "scale in another dtype": (
        lambda a: {"antiquant_scale": a["antiquant_scale"].bfloat16()},
        "scale must have the dtype of x",
    ),
    "shape of the offset": (
        lambda a: {"antiquant_offset": a["antiquant_offset"][:1].contiguous()},
        "shape of scale",
    ),
    "dtype of the offset": (
        lambda a: {"antiquant_offset": a["antiquant_offset"].float()},
        "offset is float32",
    ),
    "contiguous scales beside a transposed weight": (
        lambda a: {"weight": turned(a)["weight"]},
        "transposed exactly when weight is",
    ),
    "transposed scales beside a plain weight": (
        lambda a: {
            k: v for k, v in turned(a).items() if k in ("antiquant_scale", "antiquant_offset")
        },
        "transposed exactly when weight is",
    ),
    "transposed scale, contiguous offset": (
        lambda a: {**turned(a), "antiquant_offset": a["antiquant_offset"]},
        "offset .* has strides",
    ),
    "bias in float32 for float16": (lambda a: {"bias": a["bias"].float()}, "bias is float32"),
    "length of the bias": (lambda a: {"bias": a["bias"][:-1]}, r"bias is float16 \(63,\)"),
    "one output of a transposed int4 weight": (
        lambda a: {
            "weight": nibbles.pack(torch.zeros(1, K, dtype=torch.int8)).t(),
            "antiquant_scale": torch.ones(2, 1).half(),
            "antiquant_offset": None,
            "bias": None,
        },
        "N is 1",
    ),
    "precision that is not emulated": (lambda a: {"inner_precise": 1}, "inner_precise"),
    "quantized results": (lambda a: {"quant_scale": torch.ones(N)}, "quant_scale"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_with_its_rule(name: str) -> None:
    change, says = WRONG[name]
    right = call()
    product(**right)
    with pytest.raises(LowerError, match=says):
        product(**{**right, **change(right)})


def test_bias_for_bfloat16_is_float32() -> None:
    product(**call(BRAIN))
    with pytest.raises(LowerError, match="bias is bfloat16"):
        product(**call(BRAIN, bias=torch.zeros(N, dtype=BRAIN)))


def test_sizes_beyond_the_limit() -> None:
    weight = torch.zeros(32, 65536, dtype=torch.int8)
    with pytest.raises(LowerError, match="at most 65535; K is 32, N is 65536"):
        product(x=torch.ones(1, 32).half(), weight=weight, antiquant_scale=torch.ones(1).half())


def test_the_310p_takes_channels_of_int8_in_float16() -> None:
    eight = torch.zeros(K, N, dtype=torch.int8)
    x, scale = torch.ones(2, K).half(), torch.ones(1, N).half()
    with emulating(Mode("310p")):
        product(x=x, weight=eight, antiquant_scale=scale)
        for given, says in (
            ({"x": x.bfloat16(), "antiquant_scale": scale.bfloat16()}, "x is bfloat16 on 310p"),
            ({"weight": nibbles.pack(eight)}, "weight is int32 on 310p"),
            ({"antiquant_scale": scale.repeat(2, 1), "antiquant_group_size": G}, "channel only"),
        ):
            right = {"x": x, "weight": eight, "antiquant_scale": scale}
            with pytest.raises(LowerError, match=says):
                product(**{**right, **given})
        with pytest.raises(LowerError, match="needs an A2 or A3"):
            NPU.npu_dynamic_quant(x)


def test_int4pack() -> None:
    values = torch.randint(-8, 8, (16, 24), dtype=torch.int32)
    assert torch.equal(
        NPU.npu_convert_weight_to_int4pack(values), nibbles.pack(values.to(torch.int8))
    )
    for given, says in (
        (values[None], "two dimensions"),
        (values.to(torch.int8), "weight must be int32"),
        (values.t(), "contiguous"),
        (values[:, :12].contiguous(), "multiple of 8"),
        (values + 20, "values must be -8..7"),
    ):
        with pytest.raises(LowerError, match=says):
            NPU.npu_convert_weight_to_int4pack(given)


# **** eight bits by eight bits ****


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_quantized_activations(dtype: torch.dtype) -> None:
    x = torch.randn(M, K).to(dtype)
    x[1] = 0
    codes, scale = NPU.npu_dynamic_quant(x)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (M,))
    assert int(codes.abs().max()) == 127
    assert ((codes * scale[:, None] - x.float()).abs() <= scale[:, None] * 0.5001).all()
    weight, by_channel = torch.randint(-128, 128, (K, N)).to(torch.int8), torch.rand(N)
    bias = torch.randn(N)
    arguments: dict[str, Any] = {"pertoken_scale": scale, "bias": bias, "output_dtype": dtype}
    found = NPU.npu_quant_matmul(codes, weight, by_channel, **arguments)
    exact = (codes.double() @ weight.double()) * by_channel * scale[:, None] + bias
    assert found.dtype == dtype
    assert (found.double() - exact).norm() / exact.norm() < torch.finfo(dtype).eps
    for change, says in (
        ({"output_dtype": None}, "it is int8 unless asked"),
        ({"bias": bias.half()}, "bias is float16"),
        ({"pertoken_scale": scale.to(dtype)}, "scale per token"),
        ({"pertoken_scale": scale[:2]}, "x1 has 5 rows"),
        ({"offset": bias}, "offset is not emulated"),
    ):
        with pytest.raises(LowerError, match=says):
            NPU.npu_quant_matmul(codes, weight, by_channel, **{**arguments, **change})
    for first, second, third, says in (
        (codes, weight, by_channel.half(), "scale is float16"),
        (codes, weight, by_channel[:3], "scale is float32"),
        (codes.int(), weight, by_channel, "must be int8"),
        (codes[:, :8], weight, by_channel, "x1 is"),
        (codes, torch.zeros(K, 2 * N, dtype=torch.int8)[:, ::2], by_channel, "strides"),
    ):
        with pytest.raises(LowerError, match=says):
            NPU.npu_quant_matmul(first, second, third, **arguments)
    with pytest.raises(LowerError, match="x is float32"):
        NPU.npu_dynamic_quant(x.float())


# **** registration ****


def test_nothing_runs_unless_asked() -> None:
    token = emulation._mode.set(None)
    try:
        with pytest.raises(LowerError, match=r"no Ascend device[\s\S]*emulate=True"):
            product(**call())
    finally:
        emulation._mode.reset(token)


def test_every_schema_has_its_operator() -> None:
    assert SCHEMAS.keys() == emulator.OPERATORS.keys() == emulator._SHAPES.keys()
    for name, schema in SCHEMAS.items():
        found = str(getattr(NPU, name).default._schema)
        assert found.replace(" ", "") == f"npu::{schema}".replace(" ", "")


def test_shapes_for_tracing_are_those_of_results() -> None:
    arguments = call()
    order = ("x", "weight", "antiquant_scale", "antiquant_offset")
    for given in (arguments, turned(arguments)):
        torch.library.opcheck(
            NPU.npu_weight_quant_batchmatmul.default,
            tuple(given[name] for name in order),
            {"bias": given["bias"], "antiquant_group_size": G},
        )
    x = arguments["x"]
    torch.library.opcheck(NPU.npu_dynamic_quant.default, (x,))
    codes, scale = NPU.npu_dynamic_quant(x)
    torch.library.opcheck(
        NPU.npu_quant_matmul.default,
        (codes, nibbles.unpack(arguments["weight"]), torch.rand(N)),
        {"pertoken_scale": scale, "output_dtype": HALF},
    )
    values = torch.zeros(16, 24, dtype=torch.int32)
    torch.library.opcheck(NPU.npu_convert_weight_to_int4pack.default, (values,))
