"""Small modules and the folders that hold their weights.

Comes in: packed layers by module name. Goes out: a folder, the module with the exact float32
weights, a refusal with its four parts checked.
Always holds: what is expected comes from the packers, never from a reader.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcompile
from qcompile.errors import SchemeError
from support.pack_gptq import Gptq, gptq
from support.packers import Layers, Packed
from support.zoo import relative_l2

BOUND = 1e-5


def pair() -> nn.Sequential:
    """Two linears with biases: 64 -> 64 -> 32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))


def gptq_pair(what: Gptq | None = None) -> dict[str, Packed | torch.Tensor]:
    """Layers of ``pair``, 4 bits in groups of 32 unless something else is said."""
    given = what or Gptq(4, 32, bias=True)
    return {"0": gptq(64, 64, given, seed=1), "1": gptq(32, 64, given, seed=2)}


def exact(module: nn.Module, layers: Layers) -> nn.Module:
    """Give a module the float32 values of packed layers and of plain tensors."""
    values: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        if isinstance(layer, torch.Tensor):
            values[name] = layer.float()
            continue
        values[f"{name}.weight"] = layer.exact
        if "bias" in layer.tensors:
            values[f"{name}.bias"] = layer.tensors["bias"].float()
    module.load_state_dict(values, strict=False)
    return module.eval().requires_grad_(False)


def rows(columns: int = 64, count: int = 5) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(3))


def compiled(folder: Path, module: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    settings = {"emitter": "eager", "verify": True, **options}
    return qcompile.optimize(module, checkpoint=folder, **settings)


def agrees(
    folder: Path,
    make: Callable[[], nn.Module],
    layers: Layers,
    *inputs: torch.Tensor,
    **options: Any,
) -> Any:
    """Compile a fresh module on a folder and compare with the exact one. Returns the module."""
    model = compiled(folder, make(), **options)
    difference = relative_l2(model(*inputs), exact(make(), layers)(*inputs))
    assert difference < BOUND, f"{difference:.2e}"
    return model


def refusal(
    folder: Path, *words: str, make: Callable[[], nn.Module] = pair, scheme: str = "auto"
) -> SchemeError:
    """The error of a folder that cannot be used, before the module was touched."""
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(SchemeError) as caught:
        compiled(folder, module, scheme=scheme, verify=False)(rows())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    return checked(caught.value, *words)


def checked(error: SchemeError, *words: str) -> SchemeError:
    """An error with its four parts, printable, that says these words."""
    assert all((error.where, error.found, error.needed, error.fix))
    text = str(error)
    assert all(char.isprintable() or char == "\n" for char in text)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return error


def right_or_refused(
    folder: Path, make: Callable[[], nn.Module], layers: Layers, *words: str
) -> SchemeError | None:
    """Either the exact result or an error that says these words: never another result."""
    try:
        agrees(folder, make, layers, rows(_columns(make())))
    except SchemeError as error:
        return checked(error, *words)
    return None


def _columns(module: nn.Module) -> int:
    return next(part.in_features for part in module.modules() if isinstance(part, nn.Linear))
