"""What qcompile knows of each model architecture in GGUF files, as lists.

Comes in: what a file says of itself. Goes out: names of its tensors and of the model's modules,
what the converter changed, and where the configuration's values are.
Always holds: an entry is data; adding an architecture is adding an entry. The words are those of
``entries``; mixtures of experts are in ``mixtures``.
"""

from __future__ import annotations

from qcompile.errors import SchemeError, nearest
from qcompile.schemes.gguf.entries import (
    ATTENTION_BIAS,
    HEAD_NORMS,
    INTERLEAVED,
    NORMS,
    SLIDING_WINDOW,
    Architecture,
    Stem,
    Value,
    attention,
    gated,
)
from qcompile.schemes.gguf.keys import Keys
from qcompile.schemes.gguf.mixtures import MIXTURES, SIGMOID
from qcompile.schemes.gguf.transforms import AddToFloat

_SANDWICH_NORMS = (
    Stem("attn_norm", "input_layernorm", "norm"),
    Stem("post_attention_norm", "post_attention_layernorm", "norm"),
    Stem("ffn_norm", "pre_feedforward_layernorm", "norm"),
    Stem("post_ffw_norm", "post_feedforward_layernorm", "norm"),
)
# Gemma's norms multiply by 1 + weight; converters store 1 + weight.
_ONE_PLUS = (AddToFloat("norm", -1.0),)

ARCHITECTURES = (
    Architecture(
        "llama",
        "llama",
        (*NORMS, *attention("attention_bias", "attention_bias"), *gated("mlp_bias")),
        transforms=INTERLEAVED,
        biases=(ATTENTION_BIAS, ("mlp_bias", "blk.0.ffn_down.bias")),
    ),
    Architecture(
        "mistral",
        "mistral",
        (*NORMS, *attention(), *gated()),
        transforms=INTERLEAVED,
        values=(SLIDING_WINDOW,),
    ),
    Architecture("qwen2", "qwen2", (*NORMS, *attention("always"), *gated())),
    Architecture(
        "qwen3",
        "qwen3",
        (*NORMS, *HEAD_NORMS, *attention("attention_bias", "attention_bias"), *gated()),
        biases=(ATTENTION_BIAS,),
    ),
    Architecture(
        "gemma2",
        "gemma2",
        (*_SANDWICH_NORMS, *attention(), *gated()),
        transforms=_ONE_PLUS,
        values=(
            Value(
                "sliding_window",
                "attention.sliding_window",
                default=4096,
                why="llama.cpp's default for gemma2",
            ),
            Value(
                "attn_logit_softcapping",
                "attn_logit_softcapping",
                "float",
                default=50.0,
                why="llama.cpp's default for gemma2",
                off=0,
            ),
            Value(
                "final_logit_softcapping",
                "final_logit_softcapping",
                "float",
                default=30.0,
                why="llama.cpp's default for gemma2",
                off=0,
            ),
        ),
        sliding_every=2,
        wide_layers=46,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        (*_SANDWICH_NORMS, *HEAD_NORMS, *attention(), *gated()),
        transforms=_ONE_PLUS,
        values=(
            Value("sliding_window", "attention.sliding_window"),
            Value(
                "final_logit_softcapping",
                "final_logit_softcapping",
                "float",
                default=0,
                why="Gemma 3 has no cap",
                off=0,
            ),
            Value(
                "attn_logit_softcapping",
                "attn_logit_softcapping",
                "float",
                default=0,
                why="Gemma 3 has no cap",
                off=0,
            ),
        ),
        rope="local_global",
        sliding_every=6,
        wide_layers=62,
    ),
    Architecture(
        "phi3",
        "phi3",
        (
            *NORMS,
            Stem("attn_qkv", "self_attn.qkv_proj"),
            Stem("attn_output", "self_attn.o_proj"),
            Stem("ffn_up", "mlp.gate_up_proj"),
            Stem("ffn_down", "mlp.down_proj"),
        ),
        values=(
            Value(
                "sliding_window",
                "attention.sliding_window",
                default=0,
                why="old files have no key, and llama.cpp runs them with full attention",
                off=0,
            ),
        ),
        rope="long",
    ),
    *MIXTURES,
)
KNOWN = {entry.name: entry for entry in ARCHITECTURES}
# Entries that a file calls otherwise.
_VARIANTS = {"mixtral": "llama", "deepseek3": "deepseek2"}


def architecture_of(keys: Keys, name: object) -> Architecture:
    """The entry for an architecture.

    Args:
        keys: the file's metadata. A ``llama`` file with experts is a Mixtral model, one with a
            sliding window for all layers a Mistral model, which is the same but for the window. A
            ``deepseek2`` file whose router takes a sigmoid is a DeepSeek-V3 model.
        name: value of ``general.architecture``.

    Raises:
        SchemeError: unknown; lists the known ones.
    """
    listed = [known for known in KNOWN if known not in _VARIANTS]
    if not isinstance(name, str) or name not in listed:
        raise SchemeError(
            keys.where,
            f"architecture {name!r} is not supported",
            f"one of {', '.join(listed)}",
            "use a model of a listed architecture, or pass your own module with parameters named "
            f"like the file's tensors{nearest(str(name), listed)}",
        )
    if name == "llama" and keys.integer("expert_count", 0) > 0:
        return KNOWN["mixtral"]
    if name == "llama" and keys.integer("attention.sliding_window", 0) > 0:
        return KNOWN["mistral"]
    if name == "deepseek2" and keys.integer("expert_gating_func", 0) == SIGMOID:
        return KNOWN["deepseek3"]
    return KNOWN[name]
