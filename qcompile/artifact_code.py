"""The code of an artifact, where it may run.

Comes in: the folder of an artifact and its header. Goes out: callables with their weights.
Always holds: no file is given to a loader before everything it depends on was compared, and the
file with what was written: a loader may crash at one that was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from qcompile import backends
from qcompile.artifact_header import WEIGHTS, Graph, Header, digest_of
from qcompile.artifact_weights import read_weights
from qcompile.backends import SavesCode
from qcompile.errors import ArtifactError, OptionError

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
_AGAIN = "export the model again"


def load_runs(folder: Path, header: Header) -> dict[str, Run]:
    """The callable of each graph, by the graph's name.

    Raises:
        ArtifactError: something is missing, was changed, or was made for another machine, torch
            or release.
    """
    backend = _backend(folder, header)
    _check_facts(folder, header, backend)
    for graph in header.graphs.values():
        _check_files(folder, graph)
    weights = read_weights(folder / WEIGHTS, header.weight_bytes, header.mark)
    return {
        name: backend.load_code(folder / f"{name}.so", _constants(folder, graph, weights))
        for name, graph in header.graphs.items()
    }


def _backend(folder: Path, header: Header) -> SavesCode:
    try:
        backend = backends.load(header.device)
    except OptionError as error:
        raise _unfit(folder, f"made for {header.device}", error.needed) from None
    if not isinstance(backend, SavesCode):
        raise _unfit(folder, f"made for {header.device}", "a device that runs saved code")
    return backend


def _check_facts(folder: Path, header: Header, backend: SavesCode) -> None:
    import qcompile

    here = {"qcompile": qcompile.__version__, **backend.code_facts()}
    made = {"qcompile": header.qcompile, **header.code}
    for name in {**here, **made}:
        if here.get(name) != made.get(name):
            raise _unfit(folder, f"made for {name} {made.get(name)}", f"{name} {here.get(name)}")


def _unfit(folder: Path, found: str, needed: str) -> ArtifactError:
    return ArtifactError(str(folder), found, f"{needed}, as there is here", f"{_AGAIN}, here")


def _check_files(folder: Path, graph: Graph) -> None:
    for name, digest in graph.files.items():
        path = folder / name
        found = digest_of(path) if path.is_file() else None
        if found != digest:
            raise ArtifactError(
                str(path),
                "no such file" if found is None else f"a file with SHA-256 {found[:12]}...",
                f"the file as it was written, with {digest[:12]}...",
                _AGAIN,
            )


def _constants(
    folder: Path, graph: Graph, weights: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    absent = [n for n, number in graph.constants.items() if number not in weights]
    if absent:
        raise ArtifactError(
            str(folder / WEIGHTS),
            f"no tensor for {absent[0]}",
            "the file as it was written",
            _AGAIN,
        )
    return {name: weights[number] for name, number in graph.constants.items()}
