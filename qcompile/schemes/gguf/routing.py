"""What metadata says of a mixture of experts.

Comes in: the keys ``expert_*`` of a file. Goes out: Hugging Face's names and values.
Always holds: a routing that the Hugging Face model would do differently is refused; its own code
does the routing, nothing here changes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from qcompile.schemes.gguf.entries import Architecture, Mixture
from qcompile.schemes.gguf.keys import Keys


def mixture_values(
    architecture: Architecture, keys: Keys, values: Mapping[str, object]
) -> dict[str, object]:
    """The configuration values of the experts of an architecture.

    Args:
        architecture: the file's architecture, with experts.
        keys: its metadata.
        values: configuration values read before, with ``intermediate_size``.

    Raises:
        SchemeError: a missing key, numbers that contradict each other, or a routing that the model
            does not know.
    """
    mixture = architecture.mixture
    assert mixture is not None
    count, used = keys.integer("expert_count"), keys.integer("expert_used_count")
    if count < 1:
        raise keys.wrong("expert_count", count, "a positive number of experts")
    if not 1 <= used <= count:
        raise keys.wrong("expert_used_count", used, f"a number from 1 to {count} experts")
    found: dict[str, object] = {mixture.count: count, "num_experts_per_tok": used}
    found |= _sizes(mixture, keys, values, used)
    gating = keys.integer("expert_gating_func", mixture.gating)
    # 0 is written by nobody, and read by llama.cpp as a missing key.
    if gating not in (0, mixture.gating):
        raise keys.wrong("expert_gating_func", gating, f"{mixture.gating} for this architecture")
    found |= _weights(mixture, keys)
    if mixture.groups:
        found |= _groups(mixture, keys, count)
    if mixture.leading is not None:
        layers, dense = values["num_hidden_layers"], keys.integer("leading_dense_block_count")
        assert isinstance(layers, int)
        if not 0 <= dense <= layers:
            raise keys.wrong("leading_dense_block_count", dense, f"a number from 0 to {layers}")
        found[mixture.leading] = dense
    return found


def _sizes(
    mixture: Mixture, keys: Keys, values: Mapping[str, object], used: int
) -> dict[str, object]:
    inner, key = values["intermediate_size"], "expert_feed_forward_length"
    assert isinstance(inner, int)
    found: dict[str, object] = {}
    if mixture.size == "intermediate_size":
        size = keys.integer(key, inner)
        if size != inner:
            raise keys.wrong(key, size, f"{inner}, the feed_forward_length")
    else:
        # llama.cpp's loader: an old file shares feed_forward_length among the chosen experts.
        size = keys.integer(key, inner // used)
        if size < 1:
            raise keys.wrong(key, size, "a positive number")
        found[mixture.size] = size
    if mixture.shared is not None:
        # llama.cpp's loader: where there is no key, it is as wide as feed_forward_length.
        found[mixture.shared] = keys.integer("expert_shared_feed_forward_length", inner)
    return found


def _weights(mixture: Mixture, keys: Keys) -> dict[str, object]:
    """How the weights of the chosen experts come from the router's outputs."""
    found: dict[str, object] = {}
    normed = keys.flag("expert_weights_norm", mixture.normed)
    if mixture.norm is not None:
        found[mixture.norm] = normed
    elif normed != mixture.normed:
        raise keys.wrong("expert_weights_norm", normed, f"{mixture.normed} for this architecture")
    if mixture.scale is not None:
        # 0 means no factor: llama.cpp's loader.
        found[mixture.scale] = keys.number("expert_weights_scale", 0.0) or 1.0
    return found


def _groups(mixture: Mixture, keys: Keys, count: int) -> dict[str, object]:
    """Experts in groups, of which the best are searched; all of them where no key says so."""
    groups = keys.integer("expert_group_count", 0) or 1
    chosen = keys.integer("expert_group_used_count", 0) or groups
    if groups < 1 or count % groups:
        raise keys.wrong("expert_group_count", groups, f"a divisor of {count} experts")
    if not 1 <= chosen <= groups:
        raise keys.wrong("expert_group_used_count", chosen, f"a number from 1 to {groups}")
    found: dict[str, object] = {"n_group": groups, "topk_group": chosen}
    if mixture.gating == 1:
        found["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return found
