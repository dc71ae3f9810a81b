"""A small model with a chat template.

Comes in: a template. Goes out: the GGUF file of the tests with it.
Always holds: the tensors are those of the file without one.
"""

from __future__ import annotations

import struct
from pathlib import Path

from support.gguf_bytes import STRING, key, text
from support.zoo import DATA

FILE = DATA / "gguf-q2_k.gguf"


def with_template(path: Path, template: str) -> Path:
    """Write the file; a comment in the template keeps data aligned to 32 bytes."""
    data = FILE.read_bytes()
    [count] = struct.unpack_from("<Q", data, 16)
    name = "tokenizer.chat_template"
    padding = -len(key(name, STRING, text(f"{template}{{##}}"))) % 32
    entry = key(name, STRING, text(f"{template}{{#{' ' * padding}#}}"))
    path.write_bytes(data[:16] + struct.pack("<Q", count + 1) + entry + data[24:])
    return path
