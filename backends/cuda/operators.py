"""The operators that lowered graphs call: opaque to compilers, with shapes for tracing.

Comes in: activations, a weight's parts, its meaning as text. Goes out: the product.
Always holds: an operator needs a device, or kernels that are interpreted on CPU tensors; elsewhere
it is an error that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.nn import functional

from qcompile.backends.cuda import emulation, launch, probe
from qcompile.backends.cuda.coding import Coding
from qcompile.backends.cuda.configs import DECODE_ROWS, DECODED_AT_ONCE, DEFAULT_ARCH
from qcompile.backends.cuda.layouts import coded
from qcompile.backends.cuda.tiles import tile
from qcompile.errors import LowerError
from qcompile.layout import Shape, layout_of
from qcompile.ops import decode_meaning

_library = torch.library.Library("qcompile", "FRAGMENT")
_library.define(
    "triton_linear(Tensor x, Tensor[] parts, str meaning, Tensor? bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "triton_embedding(Tensor ids, Tensor[] parts, str meaning, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.lru_cache(maxsize=4096)
def _facts(meaning: str) -> tuple[Coding, Shape, tuple[str, ...]]:
    """Coding, shape and the names of the parts that kernels read."""
    spec, layout, shape = decode_meaning(meaning)
    names = [part.name for part in layout_of(layout).fields(spec, shape)]
    return coded(spec, shape), shape, tuple(name for name in names if name != "columns")


def arch_at(x: torch.Tensor, operator: str) -> str:
    """The architecture that runs a call on this tensor."""
    if x.device.type == "cuda":
        return probe.host_arch() or DEFAULT_ARCH
    if probe.interprets():
        return emulation.arch.get()
    raise LowerError(
        f"torch.ops.qcompile.{operator}",
        f"tensors on {x.device}: no CUDA device runs this graph",
        "a CUDA device, or Triton's interpreter",
        "run on a machine with a GPU, or pass emulate=True in a process started with "
        "TRITON_INTERPRET=1",
    )


def _linear(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    coding, shape, names = _facts(meaning)
    arch = arch_at(x, "triton_linear")
    flat = x.reshape(-1, shape[1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows = flat.shape[0]
    if rows == 0:
        return x.new_empty((*x.shape[:-1], shape[0]))
    named, asm = dict(zip(names, parts, strict=True)), probe.takes_ptx(x.device)
    with torch.cuda.device_of(x):
        if rows >= DECODE_ROWS:
            y = _decoded_linear(flat, named, coding, shape, bias, asm)
        else:
            config = tile(arch, coding, shape[0], shape[1], rows)
            y = launch.linear(flat, named, coding, shape, bias, config, asm)
    return y.reshape(*x.shape[:-1], shape[0])


def _decoded_linear(
    x: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    coding: Coding,
    shape: Shape,
    bias: torch.Tensor | None,
    asm: bool,
) -> torch.Tensor:
    """The product on decoded runs of outputs, for so many rows that decoding costs little."""
    n, step = shape[0], max(1, DECODED_AT_ONCE // shape[1])
    y = x.new_empty((x.shape[0], n))
    for start in range(0, n, step):
        run = range(start, min(start + step, n))
        weight = launch.rows(parts, coding, shape, run, x.dtype, asm)
        piece = None if bias is None else bias[run.start : run.stop]
        product = functional.linear(x, weight, piece)
        if len(run) == n:
            return product
        y[:, run.start : run.stop] = product
    return y


def _linear_shape(
    x: torch.Tensor, parts: list[torch.Tensor], meaning: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    _, (n, k), _ = _facts(meaning)
    torch._check(x.shape[-1] == k, lambda: f"triton_linear: x has {x.shape[-1]} columns, w {k}")
    return x.new_empty((*x.shape[:-1], n))


def _embedding(
    ids: torch.Tensor, parts: list[torch.Tensor], meaning: str, dtype: torch.dtype
) -> torch.Tensor:
    coding, shape, names = _facts(meaning)
    arch_at(parts[0], "triton_embedding")
    flat, here = ids.reshape(-1).contiguous(), ids.device.type == "cpu"
    # On a device that would wait for it: there such a row is NaN.
    if here and flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < shape[0]):
        raise IndexError(f"triton_embedding: an id is outside 0..{shape[0] - 1}")
    named = dict(zip(names, parts, strict=True))
    if flat.numel() == 0:
        return parts[0].new_empty((*ids.shape, shape[1]), dtype=dtype)
    with torch.cuda.device_of(ids):
        found = launch.rows(named, coding, shape, flat, dtype, probe.takes_ptx(ids.device))
    return found.reshape(*ids.shape, shape[1])


def _embedding_shape(
    ids: torch.Tensor, parts: list[torch.Tensor], meaning: str, dtype: torch.dtype
) -> torch.Tensor:
    _, (_, k), _ = _facts(meaning)
    return ids.new_empty((*ids.shape, k), dtype=dtype)


_library.impl("triton_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile::triton_linear", _linear_shape, lib=_library)
_library.impl("triton_embedding", _embedding, "CompositeExplicitAutograd")
torch.library.register_fake("qcompile::triton_embedding", _embedding_shape, lib=_library)
