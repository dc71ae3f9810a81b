"""The tensor types of GGUF and their sizes.

Comes in: ggml's number of a type. Goes out: its name and the size of its block.
Always holds: a type is listed only when files hold it and its block is known byte by byte; the
numbers are those of ``ggml_type``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """A tensor type: ``elements`` neighbouring columns take ``bytes`` bytes."""

    id: int
    name: str
    elements: int
    bytes: int


_LISTED = (
    TensorType(0, "f32", 1, 4),
    TensorType(1, "f16", 1, 2),
    TensorType(2, "q4_0", 32, 18),
    TensorType(3, "q4_1", 32, 20),
    TensorType(6, "q5_0", 32, 22),
    TensorType(7, "q5_1", 32, 24),
    TensorType(8, "q8_0", 32, 34),
    TensorType(10, "q2_k", 256, 84),
    TensorType(11, "q3_k", 256, 110),
    TensorType(12, "q4_k", 256, 144),
    TensorType(13, "q5_k", 256, 176),
    TensorType(14, "q6_k", 256, 210),
    TensorType(16, "iq2_xxs", 256, 66),
    TensorType(17, "iq2_xs", 256, 74),
    TensorType(18, "iq3_xxs", 256, 98),
    TensorType(19, "iq1_s", 256, 50),
    TensorType(20, "iq4_nl", 32, 18),
    TensorType(21, "iq3_s", 256, 110),
    TensorType(22, "iq2_s", 256, 82),
    TensorType(23, "iq4_xs", 256, 136),
    TensorType(24, "i8", 1, 1),
    TensorType(25, "i16", 1, 2),
    TensorType(26, "i32", 1, 4),
    TensorType(27, "i64", 1, 8),
    TensorType(28, "f64", 1, 8),
    TensorType(29, "iq1_m", 256, 56),
    TensorType(30, "bf16", 1, 2),
    TensorType(34, "tq1_0", 256, 54),
    TensorType(35, "tq2_0", 256, 66),
    TensorType(39, "mxfp4", 32, 17),
    TensorType(40, "nvfp4", 64, 36),
    TensorType(41, "q1_0", 128, 18),
    TensorType(42, "q2_0", 64, 18),
)
TYPES = {kind.id: kind for kind in _LISTED}
BY_NAME = {kind.name: kind for kind in _LISTED}

# Known by name only: withdrawn from ggml, or used for activations and never written to files.
_UNSIZED = {4: "q4_2", 5: "q4_3", 9: "q8_1", 15: "q8_k", 31: "q4_0_4_4", 32: "q4_0_4_8",
            33: "q4_0_8_8", 36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8"}  # fmt: skip


def type_name(type_id: int) -> str:
    """Name of a tensor type.

    >>> type_name(12), type_name(77)
    ('q4_k', 'type 77')
    """
    if type_id in TYPES:
        return TYPES[type_id].name
    return _UNSIZED.get(type_id, f"type {type_id}")
