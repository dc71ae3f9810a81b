"""Compressed-tensors layers of small floats: FP8, MXFP4 and NVFP4.

Comes in: bytes or nibbles ``[N, K]`` and scales. Goes out: a packed layer.
Always holds: every value is worked out from the bits of its sign, exponent and mantissa here, not
by a library's conversion. FP4 is 1 bit of sign, 2 of exponent (bias 1), 1 of mantissa; FP8 (e4m3)
is 1, 4 (bias 7) and 3, without infinities, 0x7f and 0xff are no numbers; an MXFP4 scale is a power
of two, its exponent plus 127.

``float-quantized``: ``weight`` e4m3 ``[N, K]``; ``weight_scale`` ``[N, 1]``, ``[1]`` or a number
for each block. ``mxfp4-pack-quantized``: ``weight_packed`` uint8 ``[N, K / 2]``, the even column in
the low nibble, ``weight_scale`` uint8 ``[N, K / 32]``. ``nvfp4-pack-quantized``: the same with e4m3
``weight_scale`` ``[N, K / 16]`` and float32 ``weight_global_scale`` ``[1]`` that divides it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from support.pack_compressed import compressed_config, dynamic_activations, weights_config
from support.packers import FLOATS, Config, Floats, Ints, Packed

Strategy = Literal["channel", "tensor", "block"]


def small_float(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a float of few bits: subnormals below exponent 1, no infinities.

    >>> [small_float(code, 2, 1) for code in range(8)]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    >>> small_float(0x7E, 4, 3), small_float(0x01, 4, 3), small_float(0xB8, 4, 3)
    (448.0, 0.001953125, -1.0)
    """
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    steps = mantissa + (1 << mantissa_bits if exponent else 0)
    value = steps * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
    return -value if code >> (exponent_bits + mantissa_bits) else value


FP4: Floats = np.array([small_float(code, 2, 1) for code in range(16)], np.float32)
FP8: Floats = np.array([small_float(code, 4, 3) for code in range(256)], np.float32)


def _bytes(n: int, k: int, seed: int) -> Ints:
    """Every e4m3 code that is a number, at random."""
    codes: Ints = np.random.default_rng([seed, n, k]).integers(0, 256, (n, k))
    codes[(codes & 0x7F) == 0x7F] = 0x80
    return codes


def _e4m3(codes: Ints) -> torch.Tensor:
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)


def fp8(
    n: int,
    k: int,
    strategy: Strategy = "channel",
    block: tuple[int, int] = (128, 128),
    scale: str = "BF16",
    activations: bool = False,
    seed: int = 0,
) -> Packed:
    """A ``float-quantized`` layer: ``e4m3 * scale`` in float32."""
    codes = _bytes(n, k, seed)
    shape = {
        "channel": (n, 1),
        "tensor": (1,),
        "block": (-(-n // block[0]), -(-k // block[1])),
    }[strategy]
    drawn = np.random.default_rng([seed, 9]).normal(0.01, 0.003, shape)
    scales = torch.from_numpy(drawn).to(FLOATS[scale])
    wide = scales.float().numpy()
    if strategy == "block":
        wide = wide[np.arange(n) // block[0]][:, np.arange(k) // block[1]]
    exact = torch.from_numpy(FP8[codes] * wide)
    keys: Config = {"block_structure": list(block)} if strategy == "block" else {}
    weights = weights_config(8, "float", strategy, **keys)
    config = compressed_config(
        "float-quantized",
        {"group_0": (["Linear"], weights)},
        activations=dynamic_activations("float") if activations else None,
    )
    return Packed({"weight": _e4m3(codes), "weight_scale": scales}, exact, config)


def nibbles(codes: Ints) -> torch.Tensor:
    """Codes ``[N, K]`` as uint8 ``[N, K / 2]``, even columns low."""
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def mxfp4(n: int, k: int, seed: int = 0, extremes: bool = False) -> Packed:
    """An ``mxfp4-pack-quantized`` layer: ``e2m1 * 2**(scale - 127)``, exact in float32."""
    draw = np.random.default_rng([seed, n, k])
    codes, scales = draw.integers(0, 16, (n, k)), draw.integers(110, 135, (n, k // 32))
    if extremes:
        scales.flat[:3] = 1, 0, 240
    powers = np.ldexp(np.float32(1), (scales - 127).astype(np.int32)).astype(np.float32)
    exact = torch.from_numpy(FP4[codes] * powers.repeat(32, axis=1))
    tensors = {
        "weight_packed": nibbles(codes),
        "weight_scale": torch.from_numpy(scales.astype(np.uint8)),
    }
    weights = weights_config(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
    groups = {"group_0": (["Linear"], weights)}
    return Packed(tensors, exact, compressed_config("mxfp4-pack-quantized", groups))


def nvfp4(n: int, k: int, seed: int = 0) -> Packed:
    """An ``nvfp4-pack-quantized`` layer: ``e2m1 * (e4m3 / global)``, both steps in float32."""
    draw = np.random.default_rng([seed, n, k])
    codes, scales = draw.integers(0, 16, (n, k)), draw.integers(1, 0x7F, (n, k // 16))
    total = np.float32(draw.uniform(500, 4000))
    small = (FP8[scales] / total).astype(np.float32)
    exact = torch.from_numpy(FP4[codes] * small.repeat(16, axis=1))
    tensors = {
        "weight_packed": nibbles(codes),
        "weight_scale": _e4m3(scales),
        "weight_global_scale": torch.tensor([total], dtype=torch.float32),
    }
    keys: Config = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    weights = weights_config(4, "float", "tensor_group", **keys)
    groups = {"group_0": (["Linear"], weights)}
    return Packed(tensors, exact, compressed_config("nvfp4-pack-quantized", groups))
