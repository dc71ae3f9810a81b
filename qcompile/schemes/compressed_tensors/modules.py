"""The quantized weights of a compressed-tensors folder.

Comes in: stored tensors and the group of each module. Goes out: weights ``[N, K]`` in the layouts
``ct.*`` and ``scaled``.
Always holds: the shapes of the tensors agree with the group, or the call fails and names both;
scales of activations are accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qcompile.layout import QuantizedTensor
from qcompile.schemes.compressed_tensors.groups import Group
from qcompile.schemes.compressed_tensors.module import Module
from qcompile.schemes.folder.checkpoint import quantized_modules, ruled_modules
from qcompile.schemes.folder.stored import StoredTensor
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
_MARKS = ("weight_scale", "weight_packed", "weight_shape", "weight_global_scale")
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")


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
    for module, tensors, group in ruled_modules(quantized_modules(stored, _marks), group_of):
        weights[f"{module}.weight"] = _weight(module, tensors, group, version)
        # A float weight beside a packed one is nobody's: it is refused as a second weight.
        unread = ("weight",) if "weight_packed" in tensors else ()
        used.update(f"{module}.{name}" for name in _TENSORS if name not in unread)
    return weights, used


def _marks(last: str, tensor: StoredTensor) -> bool:
    """Whether a tensor belongs to a quantized module: its name says so, or one-byte numbers."""
    return last in _MARKS or (last == "weight" and tensor.dtype.itemsize == 1)


def _weight(
    module: str, tensors: Mapping[str, StoredTensor], group: Group, version: tuple[int, ...]
) -> WeightRef:
    spec, layout, shape, parts = Module(module, tensors, group, version).made()

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
