"""``npu.experts``: both products of every expert, rows sorted by expert in between.

Comes in: tokens, chosen experts and their shares. Goes out: the weighted sums, in the dtype of the
tokens. Always holds: the operators are ``npu_moe_init_routing_v2``, ``npu_grouped_matmul``,
``npu_swiglu`` (see ``activations``) and ``npu_moe_finalize_routing``, the last in the mode that
reads the first one's indices; an expert that no token chose costs nothing.

Experts with act-order have an order of columns each: the columns of a row are gathered in the order
of the row's expert, before each product; the index is int64, as many numbers as the rows have.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from qcompile.activation import Activation
from qcompile.backends.npu.activations import activated
from qcompile.backends.npu.contract import grouped
from qcompile.backends.npu.contract.grouped import GroupedCall
from qcompile.backends.npu.emit import has_no_rows
from qcompile.backends.npu.layouts import is_permuted
from qcompile.backends.npu.linear import arch_of, misfit
from qcompile.backends.npu.nibbles import PER_WORD
from qcompile.backends.npu.packed_experts import ORDER_OF, layout_name, shape_of
from qcompile.experts_layout import EXPERTS
from qcompile.kernel import Accept, Reject, Tolerance
from qcompile.layout import QuantizedTensor, layout_of
from qcompile.site import ExpertsSite, Site
from qcompile.spec import AffineSpec, ExpertsSpec, LookupSpec, RoleSpec
from qcompile.target import Target


@dataclass(frozen=True)
class PackedExperts:
    """See the module's text.

    Attributes:
        packed: dtype that weights are packed for.
        activations: dtype of the activations; the former, unless no operator takes it.
    """

    packed: torch.dtype
    activations: torch.dtype

    name = "npu.experts"
    kind = "experts"

    @property
    def layout(self) -> str | None:
        """The layout of its weights."""
        return layout_name(self.packed)

    @property
    def tolerance(self) -> Tolerance:
        """What decoding and the results of both products round to."""
        eps = torch.finfo(self.packed).eps
        return Tolerance(4 * eps, "weights, both products and the shares are in the dtype of x")

    def accepts(self, site: Site, target: Target) -> Accept | Reject:
        """Matrices that the grouped product takes, whatever function is between them."""
        if target.kind != "npu":
            return Reject(f"runs on an Ascend device; the target is {target}")
        spec = site.weight.spec
        assert isinstance(site, ExpertsSite)
        assert isinstance(spec, ExpertsSpec)
        for role in spec.roles:
            reason = self._unfit(site, role, target)
            if reason is not None:
                return Reject(f"{role.role}: {reason}")
        note = ", ".join(f"{role.role} {ORDER_OF[role.layout].width}" for role in spec.roles)
        note += "; rows by expert"
        if any(is_permuted(role.spec) for role in spec.roles):
            note += ", their columns in each expert's order (act-order)"
        return Accept(float(EXPERTS.nbytes(spec, site.weight.shape)), note)

    def _unfit(self, site: ExpertsSite, role: RoleSpec, target: Target) -> str | None:
        order, count = ORDER_OF[role.layout], site.weight.shape[0]
        reason = misfit(role.spec, shape_of(role), replace(order, halves=False))
        if reason is None and order.halves and role.rows % PER_WORD:
            reason = f"N is {role.rows}, no multiple of the {PER_WORD} codes in a word"
        if reason is not None:
            return reason
        assert isinstance(role.spec, (AffineSpec, LookupSpec))
        group = min(role.spec.group, role.columns)
        if role.columns % group:
            return f"{grouped.NAME} splits K evenly; groups of {group} do not divide {role.columns}"
        one = layout_of(role.layout).empty(role.spec, shape_of(role), device="meta")
        parts = {name: part.expand(count, *part.shape).contiguous() for name, part in one.items()}
        if _by_channel(role):
            parts = {n: p.squeeze(1) if n != "weight" else p for n, p in parts.items()}
        wide = torch.float32 if self.activations == torch.bfloat16 else self.activations
        bias = torch.empty(count, role.rows, dtype=wide, device="meta") if site.bias else None
        call = GroupedCall(
            arch_of(target),
            torch.empty(1, parts["weight"].shape[1], dtype=self.activations, device="meta"),
            parts["weight"],
            parts["scale"],
            parts.get("offset"),
            bias,
            torch.empty(count, dtype=torch.int64, device="meta"),
            2,
            0,
            1,
        )
        broken = grouped.violated(call)
        return None if broken is None else f"{grouped.NAME}: {broken}"

    def emit(
        self, graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node], weight: QuantizedTensor
    ) -> fx.Node:
        """Sort rows by expert, two grouped products, sum up by token."""
        x, _, _, ids, shares, up_bias, down_bias, text = node.args
        spec, ops = weight.spec, torch.ops
        assert isinstance(spec, ExpertsSpec)
        assert isinstance(x, fx.Node)
        if has_no_rows(x):
            return graph.call_function(ops.aten.zeros_like.default, (x,))
        named = dict(zip(weight.parts, parts, strict=True))
        choices = graph.call_function(ops.aten.to.dtype, (ids, torch.int32))
        routed = _routed(graph, x, choices, weight.shape[0])
        owners = None
        if any(is_permuted(role.spec) for role in spec.roles):
            owners = _owners(graph, choices)
        up = [role for role in spec.roles if role.role != "down"]
        [down] = [role for role in spec.roles if role.role == "down"]
        inner, start = [], 0
        for role in sorted(up, key=lambda role: role.role):  # gate before up
            bias = self._bias(graph, up_bias, start, role.rows)
            given = _arranged(graph, routed[0], named, role, owners)
            inner.append(_product(graph, given, named, role, bias, routed[2]))
            start += role.rows
        hidden = activated(graph, inner, down.columns, Activation.parse(str(text)))
        bias = self._bias(graph, down_bias, 0, down.rows)
        hidden = _arranged(graph, hidden, named, down, owners)
        rows = _product(graph, hidden, named, down, bias, routed[2])
        given = graph.call_method("type_as", (shares, rows))
        return graph.call_function(
            ops.npu.npu_moe_finalize_routing.default,
            (rows, None, None, None, given, routed[1], choices),
            {"drop_pad_mode": grouped.ROW_MAJOR},
        )

    def _bias(self, graph: fx.Graph, bias: object, start: int, rows: int) -> fx.Node | None:
        """The rows of a role in a bias ``[E, N]``, in the dtype that the operator wants."""
        if not isinstance(bias, fx.Node):
            return None
        aten = torch.ops.aten
        part = graph.call_function(aten.slice.Tensor, (bias, 1, start, start + rows))
        part = graph.call_function(aten.contiguous.default, (part,))
        if self.packed != torch.bfloat16:
            return part
        return graph.call_function(aten.to.dtype, (part, torch.float32))


def _routed(
    graph: fx.Graph, x: fx.Node, choices: fx.Node, count: int
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Rows sorted by expert, where each choice went, and rows an expert."""
    flat = graph.call_function(torch.ops.aten.contiguous.default, (x,))
    number = graph.call_method("numel", (choices,))
    found = graph.call_function(
        torch.ops.npu.npu_moe_init_routing_v2.default,
        (flat, choices),
        {
            "active_num": number,
            "expert_num": count,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "active_expert_range": [0, count],
            "quant_mode": -1,
        },
    )
    rows, places, counts = (graph.call_function(operator.getitem, (found, i)) for i in range(3))
    return rows, places, counts


def _owners(graph: fx.Graph, choices: fx.Node) -> fx.Node:
    """The expert of each sorted row."""
    aten = torch.ops.aten
    flat = graph.call_function(aten.reshape.default, (choices, [-1]))
    both = graph.call_function(aten.sort.default, (flat,))
    return graph.call_function(operator.getitem, (both, 0))


def _arranged(
    graph: fx.Graph,
    x: fx.Node,
    parts: dict[str, fx.Node],
    role: RoleSpec,
    owners: fx.Node | None,
) -> fx.Node:
    """The rows as the matrices of a role take them: columns in order, twice for halves."""
    aten = torch.ops.aten
    if is_permuted(role.spec):
        columns = parts[f"{role.role}.columns"]
        order = graph.call_function(aten.index_select.default, (columns, 0, owners))
        order = graph.call_function(aten.to.dtype, (order, torch.int64))
        x = graph.call_function(aten.gather.default, (x, 1, order))
    if ORDER_OF[role.layout].halves:
        x = graph.call_function(aten.cat.default, ([x, x], 1))
    return x


def _by_channel(role: RoleSpec) -> bool:
    assert isinstance(role.spec, (AffineSpec, LookupSpec))
    return role.spec.group >= role.columns and not ORDER_OF[role.layout].halves


def _product(
    graph: fx.Graph,
    x: fx.Node,
    parts: dict[str, fx.Node],
    role: RoleSpec,
    bias: fx.Node | None,
    counts: fx.Node,
) -> fx.Node:
    """One grouped product."""
    vectors = [parts[f"{role.role}.{name}"] for name in ("scale", "offset")]
    if _by_channel(role):
        squeeze = torch.ops.aten.squeeze.dim
        vectors = [graph.call_function(squeeze, (vector, 1)) for vector in vectors]
    found = graph.call_function(
        torch.ops.npu.npu_grouped_matmul.default,
        ([x], [parts[f"{role.role}.weight"]]),
        {
            "bias": None if bias is None else [bias],
            "antiquant_scale": [vectors[0]],
            "antiquant_offset": [vectors[1]],
            "group_list": counts,
            "split_item": 2,
            "group_type": 0,
            "group_list_type": 1,
        },
    )
    return graph.call_function(operator.getitem, (found, 0))
