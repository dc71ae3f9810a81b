"""Blocks of random bytes whose float16 fields hold chosen numbers."""

from __future__ import annotations

import numpy as np
import torch

from qcompile.schemes.gguf.blocks import BLOCKS

# Bytes at which a block holds float16 numbers.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q1_0": (0,),
    "q2_0": (0,), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
    "tq1_0": (52,), "tq2_0": (64,), "iq1_s": (0,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,),
    "iq3_xxs": (0,), "iq3_s": (0,), "iq4_nl": (0,), "iq4_xs": (0,), "iq1_m": (), "mxfp4": (),
    "nvfp4": (),
}  # fmt: skip
EDGE_CASES = (0.0, -0.0, 6e-8, -6e-8, 3.05e-5, 6.1e-5, 65504.0, -65504.0, 1.0, -0.333)


def random_bytes(name: str, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """Uniform bytes, so scales may be infinite or no number: uint8 ``[rows, blocks * bytes]``."""
    draw = np.random.default_rng(seed)
    width = blocks * BLOCKS[name].spec.bytes
    return torch.from_numpy(draw.integers(0, 256, (rows, width), dtype=np.uint8))


def finite_bytes(name: str, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """Random bytes with finite scales: the edge cases first, then ordinary ones."""
    draw = np.random.default_rng(seed)
    data = random_bytes(name, rows, blocks, seed).view(rows * blocks, -1).numpy()
    for place, at in enumerate(HALVES[name]):
        scales = draw.normal(0, 0.05, len(data)).astype(np.float16)
        cases = np.roll(np.array(EDGE_CASES, dtype=np.float16), place)[: len(data)]
        scales[: len(cases)] = cases
        data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "iq1_m":
        # The highest four bits of the last scale word are the float16's: keep its exponent low.
        data[:, 55] = data[:, 55] & 0xBF
    return torch.from_numpy(data).view(rows, -1)
