"""The quantized weights of a compressed-tensors folder.

Comes in: stored tensors and the group of each module. Goes out: weights ``[N, K]`` in the layouts
``ct.*`` and ``scaled``.
Always holds: the shapes of the tensors agree with the group, or the call fails and names both;
scales of activations are accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qcompile.errors import SchemeError
from qcompile.layout import QuantizedTensor, Shape
from qcompile.schemes.compressed_tensors.groups import Group
from qcompile.schemes.compressed_tensors.layout import E2M1_DOUBLED, per_word, unpack_padded
from qcompile.schemes.folder.checkpoint import quantized_modules
from qcompile.schemes.folder.stored import StoredTensor
from qcompile.schemes.gptq.modules import group_order
from qcompile.schemes.words import unpack_words, words_for
from qcompile.spec import AffineSpec, GroupOrder, LookupSpec, ScaledSpec, Spec
from qcompile.weight import Rows, WeightRef

_TENSORS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")
_ALIGN = 32
Read = Callable[[int, int], dict[str, torch.Tensor]]


def read_modules(
    stored: Mapping[str, StoredTensor],
    group_of: Callable[[str], Group | None],
    version: tuple[int, ...] = (),
) -> tuple[dict[str, WeightRef], set[str]]:
    """Every quantized weight by name, and the names of the tensors they are made of.

    Args:
        stored: the folder's tensors.
        group_of: the group of a module, None when it should not be quantized.
        version: of the tool that wrote the folder, where it is known.

    Raises:
        SchemeError: tensors that are missing, or contradict the group or each other.
    """
    weights: dict[str, WeightRef] = {}
    used = {name for name in stored if name.rpartition(".")[2] in CACHE_SCALES}
    for module, tensors in quantized_modules(stored, "weight_scale").items():
        group = group_of(module)
        if group is None:
            raise SchemeError(
                tensors["weight_scale"].source,
                "quantized, though no target of the settings names this module or ignore does",
                "a group for every quantized module",
                "correct config_groups or ignore",
            )
        weights[f"{module}.weight"] = _weight(module, tensors, group, version)
        used.update(tensors[name].name for name in _TENSORS if name in tensors)
    return weights, used


def _weight(
    module: str, tensors: Mapping[str, StoredTensor], group: Group, version: tuple[int, ...]
) -> WeightRef:
    made = _Module(module, tensors, group, version)
    spec, layout, shape, parts = {
        "packed": made.packed,
        "int": made.int8,
        "float": made.scaled,
        "nvfp4": made.nvfp4,
        "mxfp4": made.mxfp4,
    }[group.format]()

    def read(rows: Rows) -> QuantizedTensor:
        if not isinstance(rows, slice):
            return read(slice(0, shape[0])).take_rows(rows)
        start, stop, _ = rows.indices(shape[0])
        return QuantizedTensor(spec, layout, (stop - start, shape[1]), parts(start, stop))

    scale = tensors["weight_scale"]
    return WeightRef(
        f"{module}.weight",
        spec,
        layout,
        shape,
        read,
        f"{scale.file}: {module}.weight",
        scale.release,
        str(group),
        group.activations,
    )


Made = tuple[Spec, str, tuple[int, int], Read]


@dataclass(frozen=True)
class _Module:
    """The tensors of one module, read as its group says."""

    name: str
    tensors: Mapping[str, StoredTensor]
    group: Group
    version: tuple[int, ...]

    def packed(self) -> Made:
        """Integers in 32-bit words."""
        words, bits = self._need("weight_packed", torch.int32), self.group.bits
        n, k = self._stored_shape(words)
        padded = self._is_padded(words, k)
        spec, shared = self._affine(n, k)

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            return {"packed": words.part(0, start, stop), **shared(start, stop)}

        wanted = -(-k // per_word(bits)) if padded else words_for(k, bits)
        self._check(words, (n, wanted), (n, k))
        return spec, "ct.padded" if padded else "ct.packed", (n, k), parts

    def int8(self) -> Made:
        """Integers, one a byte."""
        weight = self._need("weight", torch.int8)
        n, k = weight.shape
        spec, shared = self._affine(n, k)

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            return {"weight": weight.part(0, start, stop), **shared(start, stop)}

        return spec, "ct.int8", (n, k), parts

    def scaled(self) -> Made:
        """Floats of eight bits."""
        weight = self._need("weight", torch.float8_e4m3fn, torch.float8_e5m2)
        n, k = weight.shape
        group, scales = self._scales(n, k)
        exponents = self.tensors["weight_scale"].dtype == torch.uint8
        dtype = torch.float32 if exponents else self.tensors["weight_scale"].dtype

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            scale = scales(start, stop)
            if exponents:
                exponent = scale.to(torch.int32) - 127
                scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
            return {"data": weight.part(0, start, stop), "scale": scale}

        return ScaledSpec(weight.dtype, group, dtype), "scaled", (n, k), parts

    def nvfp4(self) -> Made:
        """Floats of four bits with two levels of scales."""
        overall = self._need("weight_global_scale", torch.float32)
        spec, shape, inner = self._fp4(torch.float8_e4m3fn)

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            return {**inner(start, stop), "global": overall.load().reshape(1)}

        return spec, "ct.nvfp4", shape, parts

    def mxfp4(self) -> Made:
        """Floats of four bits with powers of two for scales."""
        spec, shape, parts = self._fp4(torch.uint8)
        return spec, "ct.mxfp4", shape, parts

    def _fp4(self, scale_dtype: torch.dtype) -> tuple[LookupSpec, tuple[int, int], Read]:
        packed = self._need("weight_packed", torch.uint8)
        scale = self._need("weight_scale", scale_dtype)
        n, k = packed.shape[0], packed.shape[1] * 2
        self._check(scale, (n, -(-k // self.group.group)), (n, k))

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            return {"packed": packed.part(0, start, stop), "scale": scale.part(0, start, stop)}

        return LookupSpec(4, self.group.group, E2M1_DOUBLED), (n, k), parts

    # **** parts of the above ****

    def _affine(self, n: int, k: int) -> tuple[AffineSpec, Read]:
        """The spec of integers, and their scales, zero points and group index."""
        group, scales = self._scales(n, k)
        order, index = self._order(k, group)
        form = "symmetric" if self.group.sym else "zero"
        spec = AffineSpec(self.group.bits, group, form, self.tensors["weight_scale"].dtype, order)
        zeros = None if self.group.sym else self._zeros(n, k, group)

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            found = {"scale": scales(start, stop)}
            if zeros is not None:
                found["zeros"] = zeros(start, stop)
            if index is not None:
                found["g_idx"] = index
            return found

        return spec, parts

    def _scales(self, n: int, k: int) -> tuple[int, Callable[[int, int], torch.Tensor]]:
        """Columns of a group, and the scales ``[rows, G]`` of some rows."""
        stored, strategy = self.tensors["weight_scale"], self.group.strategy
        if strategy == "tensor":
            if stored.shape not in ((1,), (), (1, 1)):
                self._check(stored, (1,), (n, k))
            return k, lambda start, stop: stored.load().reshape(1, 1).repeat(stop - start, 1)
        if strategy == "block":
            assert self.group.block is not None
            rows, columns = self.group.block
            self._check(stored, (-(-n // rows), -(-k // columns)), (n, k))

            def blocks(start: int, stop: int) -> torch.Tensor:
                part = stored.part(0, start // rows, -(-stop // rows))
                first = start % rows
                return part.repeat_interleave(rows, 0)[first : first + stop - start].contiguous()

            return min(columns, k), blocks
        group = k if self.group.group == -1 else min(self.group.group, k)
        self._check(stored, (n, -(-k // group)), (n, k))
        return group, lambda start, stop: stored.part(0, start, stop)

    def _order(self, k: int, group: int) -> tuple[GroupOrder, torch.Tensor | None]:
        stored = self.tensors.get("weight_g_idx")
        if stored is None:
            return "sequential", None
        index = stored.load().to(torch.int32)
        # Older releases write -1 everywhere where no index is in use.
        if bool((index == -1).all()):
            return "sequential", None
        self._check(stored, (k,), (self.tensors["weight_scale"].shape[0], k))
        order = group_order(index, k, group, stored.source)
        return order, None if order == "sequential" else index

    def _zeros(self, n: int, k: int, group: int) -> Callable[[int, int], torch.Tensor]:
        """Unsigned zero points uint8 ``[rows, G]`` of some rows."""
        bits, groups = self.group.bits, -(-k // group)
        stored = self._need("weight_zero_point", torch.int32, torch.int8)
        if stored.dtype == torch.int8:
            whole = stored.shape in ((1,), (), (1, 1))
            if not whole:
                self._check(stored, (n, groups), (n, k))

            def signed(start: int, stop: int) -> torch.Tensor:
                part = stored.load().reshape(1, 1) if whole else stored.part(0, start, stop)
                zeros = (part.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
                return zeros.expand(stop - start, groups).contiguous()

            return signed
        padded = self._is_padded(self.tensors["weight_packed"], k)
        words = -(-n // per_word(bits)) if padded else words_for(n, bits)
        self._check(stored, (words, groups), (n, k))
        unpack = unpack_padded if padded else unpack_words

        def packed(start: int, stop: int) -> torch.Tensor:
            if padded:
                return unpack(stored.load(), bits, 0, n)[start:stop]
            first = start // _ALIGN * _ALIGN
            part = stored.part(0, words_for(first, bits), words_for(stop, bits))
            return unpack(part, bits, 0, stop - first)[start - first :]

        return packed

    def _is_padded(self, words: StoredTensor, k: int) -> bool:
        """Whether words hold whole codes only, as releases before 0.20 wrote them."""
        bits, found = self.group.bits, words.shape[1]
        dense, padded = words_for(k, bits), -(-k // per_word(bits))
        if 32 % bits == 0 or dense == 1 == padded:
            return False
        if dense != padded:
            return found == padded
        if not self.version:
            raise SchemeError(
                words.source,
                f"{found} words for {k} codes of {bits} bits, which fits two ways of packing",
                "the version of compressed-tensors in the settings",
                "write the checkpoint again with version 0.20 or newer",
            )
        return self.version < (0, 20)

    def _stored_shape(self, words: StoredTensor) -> tuple[int, int]:
        shape = self._need("weight_shape", torch.int64, torch.int32).load().tolist()
        if len(shape) != 2 or shape[0] != words.shape[0] or shape[1] < 1:
            raise SchemeError(
                self.tensors["weight_shape"].source,
                f"the shape {shape}",
                f"two numbers, the first {words.shape[0]} as in weight_packed",
                "download the checkpoint again",
            )
        return shape[0], shape[1]

    def _need(self, name: str, *dtypes: torch.dtype) -> StoredTensor:
        if name not in self.tensors:
            raise SchemeError(
                f"{self.tensors['weight_scale'].file}: {self.name}",
                f"weight_scale without {name} ({self.group})",
                f"the tensor {self.name}.{name}",
                "check the format in the settings, or download the checkpoint again",
            )
        found = self.tensors[name]
        if found.dtype not in dtypes:
            raise SchemeError(
                found.source,
                f"dtype {found.dtype} ({self.group})",
                " or ".join(map(str, dtypes)),
                "check the format in the settings against the tensors",
            )
        return found

    def _check(self, tensor: StoredTensor, needed: Shape, weight: tuple[int, int]) -> None:
        if tensor.shape != needed:
            raise SchemeError(
                tensor.source,
                f"shape {tensor.shape}",
                f"shape {needed} for a weight {weight}, {self.group}",
                "check the settings of the quantization against the tensors",
            )
