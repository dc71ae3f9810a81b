"""Where files that can be made again are kept.

Comes in: a purpose. Goes out: a folder that exists. Always holds: ``QCOMPILE_CACHE`` names the
root, else ``XDG_CACHE_HOME``, else ``~/.cache``; deleting it loses time and nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

from qcompile.errors import OptionError


def cache_folder(purpose: str) -> Path:
    """The cache folder for ``models``, ``kernels``, ...; made when it is missing."""
    root = os.environ.get("QCOMPILE_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "qcompile")
    folder = base.expanduser() / purpose
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"cache folder {folder}",
            f"cannot be made: {error.strerror}",
            "a folder to write to",
            "set QCOMPILE_CACHE to one",
        ) from None
    return folder
