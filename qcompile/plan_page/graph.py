"""The model as boxes: what runs after what, and as which kernel.

Comes in: the sites' records. Goes out: HTML.
Always holds: every site is in one box; sites that differ only in their layer share one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from qcompile.collapse import LAYER, ranges
from qcompile.plan_page.sites import Record
from qcompile.plan_text import shape_text, size_text

_MOST_BITS = 9.0  # a weight of 8 bits with its scales


@dataclass
class _Block:
    """Sites whose names agree up to the layer; one site where a name has none.

    Attributes:
        name: ``model.layers``, or the site's name.
        sites: by what is behind the layer and how it runs; each with its layer.
    """

    name: str
    sites: dict[tuple[str, ...], list[tuple[int, Record]]] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """All numbers of layers."""
        return sorted({layer for found in self.sites.values() for layer, _ in found})


def _blocks(sites: Sequence[Record]) -> list[_Block]:
    blocks: dict[str, _Block] = {}
    for site in sites:
        name, layer = site["site"], LAYER.search(site["site"])
        head = name[: layer.start()].rstrip(".") if layer else name
        tail = name[layer.end() :].lstrip(".") if layer else ""
        facts = (site["kind"], site["spec"], str(site["shape"]), site["runs_as"])
        found = blocks.setdefault(head, _Block(head)).sites.setdefault((tail, *facts), [])
        found.append((int(layer.group()) if layer else -1, site))
    return list(blocks.values())


def flow(sites: Sequence[Record], colours: dict[str, str]) -> str:
    """The boxes from the first site to the last. ``colours`` holds a style for each kernel."""
    boxes = []
    for block in _blocks(sites):
        layers = block.layers
        many = f" x {len(layers)} ({ranges(layers)})" if layers != [-1] else ""
        chips = "".join(
            _chip(key[0], found, len(layers), colours) for key, found in block.sites.items()
        )
        boxes.append(
            f'<div class="block"><b>{escape(block.name or "layers")}'
            f'<span class="soft">{many}</span></b><div class="chips">{chips}</div></div>'
        )
    return '<div class="arrow" aria-hidden="true">&darr;</div>'.join(boxes)


def _chip(
    tail: str, found: Sequence[tuple[int, Record]], layers: int, colours: dict[str, str]
) -> str:
    site = found[0][1]
    ran = site["runs_as"] != "no kernel"
    sizes = [r["bytes_after"] if ran else r["bytes_before"] for _, r in found]
    size = size_text(sum(sizes) // len(sizes)) + (" each" if len(sizes) > 1 else "")
    numbers = sorted({number for number, _ in found})
    word = "layer" if len(numbers) == 1 else "layers"
    some = f"{word} {ranges(numbers)}" if len(numbers) < layers else ""
    lines = [
        f"<b>{escape(tail)}</b>" if tail else "",
        f'<span class="soft">{some}</span>' if some else "",
        f"<span>{escape(site['spec'])} {escape(shape_text(tuple(site['shape'])))}</span>",
        f'<span class="{"" if ran else "bad"}">{escape(site["runs_as"])}, {size}</span>',
    ]
    style = "" if ran else " none"
    return f'<div class="chip{style}" style="{colours[site["runs_as"]]}">{"".join(lines)}</div>'


def layer_map(sites: Sequence[Record]) -> str:
    """Bits of a stored weight in every layer, darker for more; nothing where there is one layer."""
    maps = []
    for block in _blocks(sites):
        layers = block.layers
        if len(layers) < 2:
            continue
        rows: dict[str, dict[int, Record]] = {}
        for (tail, *_), found in block.sites.items():
            rows.setdefault(tail, {}).update(dict(found))
        lines = [_map_row(tail, row, layers) for tail, row in rows.items()]
        maps.append(
            f"<h3>Bits of a stored weight in {escape(block.name)}</h3>"
            f'<div class="map">{"".join(lines)}<span></span><span class="axis">'
            f"<span>layer {layers[0]}</span><span>layer {layers[-1]}</span></span></div>"
        )
    return "".join(maps)


def _map_row(tail: str, row: dict[int, Record], layers: Sequence[int]) -> str:
    bits = {layer: _bits(site) for layer, site in row.items()}
    texts = sorted({f"{number:.3g}" for number in bits.values()}, key=float)
    spread = texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
    cells = "".join(_cell(layer, row.get(layer), bits.get(layer, 0.0)) for layer in layers)
    return (
        f'<span class="name">{escape(tail)} <span class="soft">{spread}</span></span>'
        f'<span class="cells">{cells}</span>'
    )


def _cell(layer: int, site: Record | None, bits: float) -> str:
    if site is None:
        return f'<i class="absent" title="layer {layer}: no such site"></i>'
    text = f"layer {layer}: {bits:.3g} bits, {site['spec']}, {site['runs_as']}"
    refused = ' class="none"' if site["runs_as"] == "no kernel" else ""
    share = min(max(bits / _MOST_BITS, 0.12), 1.0)
    return f'<i{refused} style="--a:{share:.2f}" title="{escape(text)}"></i>'


def _bits(site: Record) -> float:
    return float(8 * site["bytes_before"] / max(math.prod(site["shape"]), 1))
