"""Constants, sizes and the grid of each kernel.

Comes in: tensors, a coding, a tile. Goes out: the result.
Always holds: what a launch passes as constants is what ahead-of-time compilation passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qcompile.backends.cuda.coding import Coding
from qcompile.backends.cuda.configs import Config
from qcompile.backends.cuda.layouts import groups_of
from qcompile.layout import Shape

KINDS = {"code": 0, "table": 1, "float8": 2, "float4": 3}
FORMS = {"symmetric": 0, "zero": 1, "offset": 2}
# Products and sums in one instruction, which a later Triton switches off unless it is asked for.
OPTIONS = {"enable_fp_fusion": True}
# Outputs that one program of the reduction adds.
REDUCED = 512
# Rows that one program decodes: of a whole weight, and of a few looked-up ones.
DECODED = 32
GATHERED = 4


def coding_constants(coding: Coding) -> dict[str, Any]:
    """The constants of everything that decodes."""
    return {
        "LOW": coding.low,
        "HIGH": coding.high,
        "KIND": KINDS[coding.kind],
        "FORM": FORMS[coding.form],
        "CENTER": coding.center,
        "TABLE": coding.table or (0,) * 16,
        "WIDTH": coding.width,
        "GROUP": coding.group,
    }


def linear_constants(
    coding: Coding, config: Config, shape: Shape, bias: bool, asm: bool
) -> dict[str, Any]:
    """The constants of ``jit.linear.linear``."""
    n, k = shape
    return {
        "BM": config.rows,
        "BN": config.outputs,
        "PARTS": config.parts,
        "HAS_BIAS": bias and config.parts == 1,
        **coding_constants(coding),
        "RUN": coding.run,
        "ON_SUM": config.on_sum,
        "N_WHOLE": n % config.outputs == 0,
        "K_WHOLE": k % coding.block == 0,
        "ASM": asm,
    }


def tile_options(config: Config) -> dict[str, Any]:
    """How a tile is compiled."""
    found = {"num_warps": config.warps, "num_stages": config.stages, **OPTIONS}
    return found if config.registers is None else {**found, "maxnreg": config.registers}


def linear(
    x: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    coding: Coding,
    shape: Shape,
    bias: torch.Tensor | None,
    config: Config,
    asm: bool,
) -> torch.Tensor:
    """``x [M, K]``, columns in the stored order, times a planar weight ``[N, K]``."""
    from qcompile.backends.cuda.jit.linear import linear as kernel

    (m, _), (n, k) = x.shape, shape
    split = config.parts > 1
    y = x.new_empty((m, n))
    out = x.new_empty((config.parts, m, n), dtype=torch.float32) if split else y
    scale = parts["scale"]
    grid = (-(-n // config.outputs), -(-m // config.rows), config.parts)
    kernel[grid](
        x,
        parts["codes"],
        parts.get("high", parts["codes"]),
        scale,
        scale if coding.form == "symmetric" else parts[coding.form],
        scale if bias is None else bias,
        out,
        m,
        n,
        k,
        groups_of(coding, k),
        coding.blocks(k),
        x.stride(0),
        **linear_constants(coding, config, shape, bias is not None, asm),
        **tile_options(config),
    )
    return _reduced(out, y, bias) if split else y


def _reduced(parts: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add parts ``[P, M, N]`` into ``y [M, N]``."""
    from qcompile.backends.cuda.jit.linear import reduce_parts

    count, m, n = parts.shape
    reduce_parts[(-(-n // REDUCED), m)](
        parts,
        y if bias is None else bias,
        y,
        n,
        parts.stride(0),
        PARTS=count,
        HAS_BIAS=bias is not None,
        BN=REDUCED,
        **OPTIONS,
    )
    return y


def rows(
    parts: Mapping[str, torch.Tensor],
    coding: Coding,
    shape: Shape,
    wanted: range | torch.Tensor,
    dtype: torch.dtype,
    asm: bool,
) -> torch.Tensor:
    """Rows of a planar weight ``[N, K]`` as floats: a run of them, or those an index names."""
    from qcompile.backends.cuda.jit.rows import rows as kernel

    (n, k), count = shape, len(wanted)
    scale, gather = parts["scale"], isinstance(wanted, torch.Tensor)
    out = scale.new_empty((count, k), dtype=dtype)
    height = GATHERED if gather else DECODED
    kernel[(-(-count // height), coding.blocks(k))](
        wanted if gather else scale,
        parts["codes"],
        parts.get("high", parts["codes"]),
        scale,
        scale if coding.form == "symmetric" else parts[coding.form],
        out,
        count,
        n,
        k,
        groups_of(coding, k),
        0 if isinstance(wanted, torch.Tensor) else wanted.start,
        **rows_constants(coding, gather, asm),
        **OPTIONS,
    )
    return out


def rows_constants(coding: Coding, gather: bool, asm: bool) -> dict[str, Any]:
    """The constants of ``jit.rows.rows``."""
    return {
        "BR": GATHERED if gather else DECODED,
        "GATHER": gather,
        **coding_constants(coding),
        "ASM": asm,
    }
