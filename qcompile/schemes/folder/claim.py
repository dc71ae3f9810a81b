"""Which scheme a folder belongs to.

Comes in: a folder and the names of a method. Goes out: whether it is of this method; its settings
and tensors. Always holds: a folder is opened as what its settings say, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from qcompile.errors import SchemeError, nearest
from qcompile.schemes.folder.files import has_tensors, open_tensors
from qcompile.schemes.folder.settings import Settings, method_of, quantization
from qcompile.schemes.folder.stored import StoredTensor


def claims_folder(path: Path, methods: Collection[str]) -> bool:
    """Whether a folder of tensors names one of the methods."""
    if not path.is_dir() or not has_tensors(path):
        return False
    settings = quantization(path)
    return settings is not None and method_of(settings) in methods


def open_folder(
    path: Path, scheme: str, methods: Collection[str]
) -> tuple[Settings, Mapping[str, StoredTensor]]:
    """Settings and tensors of a folder.

    Raises:
        SchemeError: no folder, no settings, settings of another method, or damaged files.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "no such folder"
        raise SchemeError(
            str(path), found, f"the folder of a {scheme} checkpoint", "check the path"
        )
    settings = quantization(path)
    if settings is None:
        raise SchemeError(
            str(path),
            "no settings of a quantization",
            "quantization_config in config.json, or quantize_config.json",
            "check that the download is complete and that the model is quantized",
        )
    method = method_of(settings)
    if method not in methods:
        raise SchemeError(
            settings.where,
            f"the method {method!r}",
            f"{' or '.join(methods)} for the scheme {scheme}",
            'use scheme="auto"',
        )
    return settings, open_tensors(path)


def unclaimed(path: Path, schemes: Iterable[str]) -> SchemeError:
    """Why no scheme opens a folder."""
    known, settings = tuple(schemes), quantization(path)
    if settings is not None:
        method = method_of(settings)
        return SchemeError(
            settings.where,
            f"quant_method {method!r}" if method != "unknown" else "no quant_method",
            f"one of the schemes {', '.join(known)}",
            f"convert the checkpoint to one of these{nearest(method, known)}",
        )
    if has_tensors(path):
        return SchemeError(
            str(path),
            "tensors, but no quantization_config: a model in floats",
            "a quantized checkpoint",
            'load the model and quantize it: qcompile.optimize(model, scheme="rtn")',
        )
    listed = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return SchemeError(
        str(path),
        f"a folder with {', '.join(listed[:5]) + more if listed else 'nothing in it'}",
        f"a checkpoint of one of the schemes {', '.join(known)}",
        "point to a .gguf file, or to the folder of a checkpoint",
    )
