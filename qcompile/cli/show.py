"""``qcompile inspect``: read headers, print.

Comes in: a path. Goes out: text or JSON on stdout. Always holds: no weight is read; text from a
file is printed with its control characters escaped, and a chat template is never rendered.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

import qcompile
from qcompile.plan_text import size_text
from qcompile.visible import one_line
from qcompile.weight import WeightRef

_LONGEST = 100


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what the headers say and every tensor."""
    with_tensors = qcompile.open(arguments.file, arguments.scheme)
    tensors = with_tensors.tensors.values()
    if arguments.json:
        print(
            json.dumps(
                {
                    "path": str(with_tensors.path),
                    "scheme": with_tensors.scheme,
                    "facts": {key: _plain(value) for key, value in with_tensors.facts().items()},
                    "tensors": [_tensor_json(tensor) for tensor in tensors],
                },
                indent=2,
            )
        )
        return 0
    print(f"{one_line(str(with_tensors.path))}  scheme {with_tensors.scheme}")
    for key, value in with_tensors.facts().items():
        print(f"  {one_line(key)} = {_short(value)}")
    print("\n".join(_table(tensors)))
    return 0


def _table(tensors: Iterable[WeightRef]) -> list[str]:
    rows = [
        (one_line(t.name), str(t.spec), " x ".join(map(str, t.shape)), t.nbytes) for t in tensors
    ]
    wide = max((len(row[0]) for row in rows), default=0)
    lines = [f"  {n.ljust(wide)}  {s:<10}  {shape:<16}  {size:>12,}" for n, s, shape, size in rows]
    by_spec: dict[str, int] = {}
    for _, spec, _, size in rows:
        by_spec[spec] = by_spec.get(spec, 0) + size
    total = ", ".join(f"{spec} {size_text(size)}" for spec, size in sorted(by_spec.items()))
    return [*lines, f"  {len(rows)} tensors: {total}"]


def _tensor_json(tensor: WeightRef) -> dict[str, object]:
    return {
        "name": tensor.name,
        "spec": str(tensor.spec),
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
    }


def _short(value: object) -> str:
    if isinstance(value, str):
        text = ascii(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(value)} characters)"
    plain = _plain(value)
    if isinstance(plain, str):  # told by its length
        return plain
    text = ascii(plain)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _plain(value: object) -> object:
    """A value that JSON can hold; long arrays are told by their length."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    items = list(value) if isinstance(value, Iterable) else [str(value)]
    return [_plain(item) for item in items] if len(items) <= 64 else f"array of {len(items)}"
