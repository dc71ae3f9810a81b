"""Tiles that somebody measured, before those of the table.

Comes in: the file that ``QCOMPILE_CUDA_TILES`` names, if it does. Goes out: a ``Config``.
Always holds: nothing is measured here, and no file is read that nobody named; a file that is not
what ``save`` writes is an error.

The file is a JSON object: an architecture, a coding, sizes and rows as one text, and a tile:

    {"sm90 code 4+0 zero g128 w64 8192x4096 M16": {"rows": 16, "outputs": 64, "warps": 4,
      "stages": 4, "on_sum": true, "parts": 8, "registers": null}}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcompile.backends.cuda.coding import Coding
from qcompile.backends.cuda.configs import Config, choose
from qcompile.errors import OptionError

VARIABLE = "QCOMPILE_CUDA_TILES"
_TYPES = {"on_sum": (bool,), "registers": (int, type(None))}


def key(arch: str, coding: Coding, n: int, k: int, rows: int) -> str:
    """What tells products apart; rows count up to the next power of two."""
    c, most = coding, 1 << max(0, rows - 1).bit_length()
    bits = f"{c.kind} {c.low}+{c.high} {c.form} g{c.group} w{c.width}"
    return f"{arch} {bits} {n}x{k} M{most}"


def tile(arch: str, coding: Coding, n: int, k: int, rows: int) -> Config:
    """The measured tile of a product where there is one, else the table's."""
    path = os.environ.get(VARIABLE)
    if path:
        found = read(path).get(key(arch, coding, n, k, rows))
        if found is not None:
            return found
    return choose(arch, coding, n, k, rows)


def save(path: str | Path, tiles: Mapping[str, Config]) -> None:
    """Write tiles by their ``key``."""
    plain = {name: dataclasses.asdict(config) for name, config in sorted(tiles.items())}
    Path(path).write_text(json.dumps(plain, indent=1) + "\n")
    read.cache_clear()


@functools.lru_cache(maxsize=4)
def read(path: str) -> Mapping[str, Config]:
    """The tiles of a file.

    Raises:
        OptionError: it cannot be read, or is not what ``save`` writes.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise _wrong(path, str(error)) from None
    if not isinstance(content, dict):
        raise _wrong(path, f"a JSON {type(content).__name__}")
    return {name: _config(path, name, plain) for name, plain in content.items()}


def _config(path: str, name: str, plain: Any) -> Config:
    fields = {field.name: field for field in dataclasses.fields(Config)}
    if not isinstance(plain, dict) or set(plain) != set(fields):
        raise _wrong(path, f"{name!r} is {plain!r}")
    for field, value in plain.items():
        wanted = _TYPES.get(field, (int,))
        whole = isinstance(value, wanted) and isinstance(value, bool) == (bool in wanted)
        if not whole or (value is not None and value < 0):
            raise _wrong(path, f"{field} of {name!r} is {value!r}")
    return Config(**plain)


def _wrong(path: str, found: str) -> OptionError:
    return OptionError(
        f"{VARIABLE}={path}",
        found,
        f"an object of tiles with {', '.join(f.name for f in dataclasses.fields(Config))}",
        "measure tiles again, or unset the variable",
    )
