"""What a file is that should have been GGUF.

Comes in: the first bytes of a file. Goes out: one phrase for an error message.
Always holds: nothing is parsed, unpickled or executed; only leading bytes are compared.
"""

from __future__ import annotations

LEADING_BYTES = 64

_MAGICS = (
    (b"version https://git-lfs", "a git-lfs pointer: the model itself was not downloaded"),
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint (pickle), which is never loaded"),
    (b"\x80", "a Python pickle, which is never loaded"),
    (b"lmgg", "a GGML file, the format before GGUF"),
    (b"fmgg", "a GGMF file, the format before GGUF"),
    (b"tjgg", "a GGJT file, the format before GGUF"),
    (b"algg", "a GGLA adapter file"),
    (b"FUGG", "a GGUF file with its bytes swapped"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x89HDF", "an HDF5 file"),
)


def describe(head: bytes) -> str:
    """Name the kind of file that starts with ``head``.

    >>> describe(b"PK" + bytes([3, 4]))[:13]
    'a zip archive'
    >>> describe(b"hello, world")
    "an unknown file that starts with b'hello, w'"
    """
    if not head:
        return "an empty file"
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    start = head.lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML page, perhaps an error or a login page saved under the model's name"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file"
    if start.startswith(b"{"):
        return "a JSON text"
    return f"an unknown file that starts with {head[:8]!r}"
