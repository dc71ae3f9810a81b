"""What a kernel tells the compiler about itself.

Comes in: a site and a target. Goes out: an acceptance with a cost, or a refusal with a reason.
Always holds: ``accepts`` looks at records only, never at a device or at tensor data, so a plan can
be made for a machine that is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import fx

from qcompile.layout import QuantizedTensor
from qcompile.site import Site
from qcompile.target import Target

# ``exact``: activations are used as they are. ``fast``: kernels may round them to 8 bits by groups.
Numerics = Literal["exact", "fast"]
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)


@dataclass(frozen=True)
class Accept:
    """The kernel can run the site.

    Attributes:
        cost: relative time for one call, smaller is better; comparable within a target.
        note: one line for the plan: what the kernel will do.
    """

    cost: float
    note: str = ""


@dataclass(frozen=True)
class Reject:
    """The kernel cannot run the site; ``reason`` names the number or fact that rules it out."""

    reason: str


@dataclass(frozen=True)
class Tolerance:
    """Largest relative L2 error against the reference, and why it is not zero."""

    relative_l2: float
    why: str


class Kernel(Protocol):
    """An implementation of one kind of site on some targets."""

    @property
    def name(self) -> str:
        """``backend.kernel``, for instance ``cpu.panel_linear``."""

    @property
    def kind(self) -> str:
        """The kind of site that it takes, ``linear``, ``embedding`` or ``experts``."""

    @property
    def layout(self) -> str | None:
        """Name of the layout it wants, or None when it takes a weight as the checkpoint has it."""

    @property
    def tolerance(self) -> Tolerance:
        """What the conformance tests and ``verify`` allow."""

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Whether the kernel can run the site on the target."""

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """Insert the kernel's call where ``node``, the canonical op, stands.

        Args:
            graph: the graph, with its insertion point before ``node``.
            node: the canonical op: ``qcompile::linear(x, parts, meaning, bias)``,
                ``qcompile::embedding(ids, parts, meaning, dtype)`` or ``qcompile::experts(x, parts,
                meaning, ids, weights, up_bias, down_bias, activation)``.
            parts: the packed weight's parts as graph nodes, in the order of the layout's fields.
            weight: the packed weight those nodes stand for: its spec, layout and shape.

        Returns:
            the node whose value replaces the canonical op's.
        """
