"""The tensors of one compressed-tensors module.

Comes in: the stored tensors of a module and its group. Goes out: spec, layout, shape, and a
function that reads the parts of some rows.
Always holds: every shape and dtype is checked against the group before a weight is promised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from qcompile.errors import SchemeError
from qcompile.layout import Shape
from qcompile.schemes.compressed_tensors.groups import Group
from qcompile.schemes.compressed_tensors.layout import E2M1_DOUBLED, per_word, unpack_padded
from qcompile.schemes.folder.checkpoint import SCALES, need_tensor
from qcompile.schemes.folder.stored import StoredTensor
from qcompile.schemes.gptq.modules import group_order
from qcompile.schemes.words import unpack_words, words_for
from qcompile.spec import AffineForm, AffineSpec, GroupOrder, LookupSpec, ScaledSpec, Spec

_ALIGN = 32  # rows after which zero points of any width start a word
# The parts of rows start..stop by name.
Read = Callable[[int, int], dict[str, torch.Tensor]]
Made = tuple[Spec, str, tuple[int, int], Read]


@dataclass(frozen=True)
class Module:
    """The tensors of one module, read as its group says.

    Attributes:
        name: path of the module.
        tensors: its stored tensors by last component.
        group: how the settings say they are stored.
        version: of the tool that wrote them, where it is known.
    """

    name: str
    tensors: Mapping[str, StoredTensor]
    group: Group
    version: tuple[int, ...]

    def made(self) -> Made:
        """Spec, layout, shape and reader, by the group's format."""
        return {
            "packed": self.packed,
            "int": self.int8,
            "float": self.scaled,
            "nvfp4": self.nvfp4,
            "mxfp4": self.mxfp4,
        }[self.group.format]()

    def packed(self) -> Made:
        """Integers in 32-bit words."""
        words, bits = self._need("weight_packed", (torch.int32,)), self.group.bits
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
        weight = self._need("weight", (torch.int8,))
        n, k = weight.shape
        spec, shared = self._affine(n, k)

        low, high = -(1 << (self.group.bits - 1)), (1 << (self.group.bits - 1)) - 1

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            codes = weight.part(0, start, stop)
            if self.group.bits < 8 and codes.numel() and not _between(codes, low, high):
                raise SchemeError(
                    weight.source,
                    f"values from {int(codes.min())} to {int(codes.max())} ({self.group})",
                    f"values from {low} to {high}",
                    "check num_bits against the tensors",
                )
            return {"weight": codes, **shared(start, stop)}

        return spec, "ct.int8", (n, k), parts

    def scaled(self) -> Made:
        """Floats of eight bits."""
        weight = self._need("weight", (torch.float8_e4m3fn, torch.float8_e5m2))
        n, k = weight.shape
        group, scales = self._scales(n, k)
        exponents = self._scale.dtype == torch.uint8
        dtype = torch.float32 if exponents else self._scale.dtype

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            scale = scales(start, stop)
            if exponents:
                exponent = scale.to(torch.int32) - 127
                scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
            return {"data": weight.part(0, start, stop), "scale": scale}

        return ScaledSpec(weight.dtype, group, dtype), "scaled", (n, k), parts

    def nvfp4(self) -> Made:
        """Floats of four bits with two levels of scales."""
        overall = self._need("weight_global_scale", (torch.float32,), (0, 1))
        spec, shape, inner = self._fp4(torch.float8_e4m3fn)
        if overall.shape:
            self._check(overall, (1,), shape)

        def parts(start: int, stop: int) -> dict[str, torch.Tensor]:
            return {**inner(start, stop), "global": overall.load().reshape(1)}

        return spec, "ct.nvfp4", shape, parts

    def mxfp4(self) -> Made:
        """Floats of four bits with powers of two for scales."""
        spec, shape, parts = self._fp4(torch.uint8)
        return spec, "ct.mxfp4", shape, parts

    def _fp4(self, scale_dtype: torch.dtype) -> tuple[LookupSpec, tuple[int, int], Read]:
        packed = self._need("weight_packed", (torch.uint8,))
        scale = self._need("weight_scale", (scale_dtype,))
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
        form: AffineForm = "symmetric" if self.group.sym else "zero"
        if self.group.sym and "weight_zero_point" in self.tensors:
            self._check_no_zeros(n, k, group)
        spec = AffineSpec(self.group.bits, group, form, self._scale.dtype, order)
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
        stored, strategy = self._scale, self.group.strategy
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
        if "weight_g_idx" not in self.tensors and not self.group.indexed:
            return "sequential", None
        stored = self._need("weight_g_idx", (torch.int32, torch.int64), (1,))
        index = stored.load().to(torch.int32)
        # Older releases write -1 everywhere where no index is in use.
        if bool((index == -1).all()):
            return "sequential", None
        self._check(stored, (k,), (self._scale.shape[0], k))
        order = group_order(index, k, group, stored.source)
        return order, None if order == "sequential" else index

    def _zeros(self, n: int, k: int, group: int) -> Callable[[int, int], torch.Tensor]:
        """Unsigned zero points uint8 ``[rows, G]`` of some rows."""
        bits, groups = self.group.bits, -(-k // group)
        stored = self._need("weight_zero_point", (torch.int32, torch.int8), (0, 1, 2))
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

    def _check_no_zeros(self, n: int, k: int, group: int) -> None:
        """Old writers store the zero points of symmetric weights: they have to be the middle."""
        zeros, middle = self._zeros(n, k, group)(0, n), 1 << (self.group.bits - 1)
        stored = self.tensors["weight_zero_point"]
        # Packed or not, a stored 0 was written as it is by some of them.
        plain = stored.load()
        if bool((zeros == middle).all()) or not bool(plain.any()):
            return
        raise SchemeError(
            stored.source,
            f"zero points that are not zero ({self.group})",
            "none, since the settings say symmetric",
            "set symmetric to false if the tensors are right",
        )

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
        shape = self._need("weight_shape", (torch.int64, torch.int32), (1,)).load().tolist()
        if len(shape) != 2 or shape[0] != words.shape[0] or shape[1] < 1:
            raise SchemeError(
                self.tensors["weight_shape"].source,
                f"the shape {shape}",
                f"two numbers, the first {words.shape[0]} as in weight_packed",
                "download the checkpoint again",
            )
        return shape[0], shape[1]

    def _need(
        self, name: str, dtypes: Collection[torch.dtype], dimensions: Collection[int] = (2,)
    ) -> StoredTensor:
        return need_tensor(self.tensors, name, self.name, dtypes, dimensions)

    @property
    def _scale(self) -> StoredTensor:
        """The scales, of a dtype that the group's format has."""
        dtypes = (*SCALES, torch.uint8) if self.group.format == "float" else SCALES
        return self._need("weight_scale", dtypes, (0, 1, 2))

    def _check(self, tensor: StoredTensor, needed: Shape, weight: tuple[int, int]) -> None:
        if tensor.shape != needed:
            raise SchemeError(
                tensor.source,
                f"shape {tensor.shape}",
                f"shape {needed} for a weight {weight}, {self.group}",
                "check the settings of the quantization against the tensors",
            )


def _between(codes: torch.Tensor, low: int, high: int) -> bool:
    return low <= int(codes.min()) and int(codes.max()) <= high
