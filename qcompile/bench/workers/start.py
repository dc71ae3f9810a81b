"""Start a worker of this folder with an interpreter that need not have qcompile.

Comes in: ``INTERPRETER start.py MODULE [ARGUMENT ...]``. Goes out: what the module's ``main`` does
with the arguments.
Always holds: neither this folder nor its parents are searched for imports, because some of their
files are called as packages are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "qcompile_workers"


def start(module: str, arguments: list[str]) -> None:
    """Run the module's ``main``."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != folder]
    place = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert place is not None
    assert place.loader is not None
    package = importlib.util.module_from_spec(place)
    sys.modules[NAME] = package
    place.loader.exec_module(package)
    importlib.import_module(f"{NAME}.serve").keep_for_answers()  # some print when imported
    importlib.import_module(f"{NAME}.{module}").main(*arguments)


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2:])
