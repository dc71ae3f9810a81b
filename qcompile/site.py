"""A place in a model that uses a weight and may be swapped.

Comes in: a graph node, or a name from a checkpoint's headers. Goes out: a frozen record of shapes
and types. Always holds: a site holds no tensor, so kernels are chosen without one.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.weight import WeightRef


@dataclass(frozen=True)
class LinearSite:
    """``y[..., N] = x[..., K] @ w[N, K].T (+ bias[N])``.

    Attributes:
        name: module path, for instance ``model.layers.0.self_attn.q_proj``.
        weight: the weight, named by its canonical parameter name.
        bias: whether a bias is added.
    """

    name: str
    weight: WeightRef
    bias: bool = False

    kind = "linear"


@dataclass(frozen=True)
class EmbeddingSite:
    """``y[..., K] = w[ids[...], :]`` with ``w`` of shape ``[N, K]``.

    Attributes:
        name: module path, for instance ``model.embed_tokens``.
        weight: the weight, named by its canonical parameter name.
    """

    name: str
    weight: WeightRef

    kind = "embedding"


@dataclass(frozen=True)
class ExpertsSite:
    """``y[t] = sum over chosen e of share[t, e] * down[e] @ act(up[e] @ x[t])``.

    Attributes:
        name: module path, for instance ``model.layers.0.mlp.experts``.
        weight: the matrices of all experts, in the layout ``experts``.
        bias: whether the products have biases.
        activation: text of ``qcompile.activation.Activation``; empty when only headers are known.
    """

    name: str
    weight: WeightRef
    bias: bool = False
    activation: str = ""

    kind = "experts"


Site = LinearSite | EmbeddingSite | ExpertsSite
# Kind of site, name of its weight, whether a bias is added.
SiteKey = tuple[str, str, bool]


def key_of(site: Site) -> SiteKey:
    """What tells the uses of one weight apart: a kernel may take one of them and refuse another."""
    return site.kind, site.weight.name, not isinstance(site, EmbeddingSite) and site.bias
