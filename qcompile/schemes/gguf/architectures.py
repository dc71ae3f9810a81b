"""What qcompile knows of each model architecture in GGUF files, as lists.

Comes in: the architecture a file names. Goes out: names of its tensors and of the model's modules,
what the converter changed, and where the configuration's values are.
Always holds: an entry is data; adding an architecture is adding an entry. Sources: gguf-py's tensor
map for names, llama.cpp's converter for transforms, llama.cpp's loader for defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qcompile.errors import SchemeError, nearest
from qcompile.schemes.gguf.transforms import AddToFloat, PermuteRows, Transform

Kind = Literal["linear", "embedding", "norm"]
RopeStyle = Literal["plain", "local_global", "long"]


@dataclass(frozen=True)
class Stem:
    """One module and its tensors ``<tensor>.weight`` and, where it has one, ``<tensor>.bias``.

    Attributes:
        tensor: name in the file; of a layer's tensors, the part after ``blk.N.``.
        module: path in the model; of a layer's modules, the part after ``model.layers.N.``.
        kind: what the module does.
        bias: a value of the configuration that switches its bias on, ``always`` or None.
    """

    tensor: str
    module: str
    kind: Kind = "linear"
    bias: str | None = None


@dataclass(frozen=True)
class Value:
    """One value of the configuration and the metadata key that holds it.

    Attributes:
        config: name in the Hugging Face configuration.
        key: metadata key after the architecture's prefix.
        type: ``int`` or ``float``.
        default: used when the file has no such key; None makes the key required.
        why: where the default comes from.
        off: the stored number that stands for None, if any.
    """

    config: str
    key: str
    type: Literal["int", "float"] = "int"
    default: float | None = None
    why: str = ""
    off: float | None = None


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        name: value of ``general.architecture``.
        model_type: Hugging Face's name for the configuration class.
        layer: modules of one layer.
        transforms: what the converter did.
        values: values beyond those that every architecture has (``VALUES``).
        rope: how rotary embeddings are described.
        biases: values that say whether linears have a bias, and the tensor that tells.
        sliding_every: every how many layers attention is global instead of sliding, where the
            file does not say; None when all layers are alike.
        wide_layers: number of layers of the one size whose attention scale is
            ``hidden_size / heads`` instead of ``head_dim``. Source: llama.cpp's loader.
    """

    name: str
    model_type: str
    layer: tuple[Stem, ...]
    transforms: tuple[Transform, ...] = ()
    values: tuple[Value, ...] = ()
    rope: RopeStyle = "plain"
    biases: tuple[tuple[str, str], ...] = ()
    sliding_every: int | None = None
    wide_layers: int | None = None


EMBEDDING = Stem("token_embd", "model.embed_tokens", "embedding")
OUTPUT = Stem("output", "lm_head")
GLOBAL = (EMBEDDING, Stem("output_norm", "model.norm", "norm"), OUTPUT)

# Tensors that describe the rotary embedding; they become part of the configuration.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
HELPERS = {"plain": (ROPE_FREQS,), "local_global": (), "long": (ROPE_LONG, ROPE_SHORT)}
# Tensors of a layer without a parameter, with the reason.
IGNORED_IN_LAYER = {
    "attn_rot_embd": "old files store the rotary frequencies, which follow from rope.freq_base",
}

VALUES = (
    Value("hidden_size", "embedding_length"),
    Value("intermediate_size", "feed_forward_length"),
    Value("num_hidden_layers", "block_count"),
    Value("num_attention_heads", "attention.head_count"),
    Value("rms_norm_eps", "attention.layer_norm_rms_epsilon", "float"),
    Value("max_position_embeddings", "context_length"),
)


def _attention(bias: str | None = None, output_bias: str | None = None) -> tuple[Stem, ...]:
    return (
        Stem("attn_q", "self_attn.q_proj", bias=bias),
        Stem("attn_k", "self_attn.k_proj", bias=bias),
        Stem("attn_v", "self_attn.v_proj", bias=bias),
        Stem("attn_output", "self_attn.o_proj", bias=output_bias),
    )


def _gated(bias: str | None = None) -> tuple[Stem, ...]:
    return (
        Stem("ffn_gate", "mlp.gate_proj", bias=bias),
        Stem("ffn_up", "mlp.up_proj", bias=bias),
        Stem("ffn_down", "mlp.down_proj", bias=bias),
    )


_NORMS = (
    Stem("attn_norm", "input_layernorm", "norm"),
    Stem("ffn_norm", "post_attention_layernorm", "norm"),
)
_SANDWICH_NORMS = (
    Stem("attn_norm", "input_layernorm", "norm"),
    Stem("post_attention_norm", "post_attention_layernorm", "norm"),
    Stem("ffn_norm", "pre_feedforward_layernorm", "norm"),
    Stem("post_ffw_norm", "post_feedforward_layernorm", "norm"),
)
_HEAD_NORMS = (
    Stem("attn_q_norm", "self_attn.q_norm", "norm"),
    Stem("attn_k_norm", "self_attn.k_norm", "norm"),
)
_INTERLEAVED = (
    PermuteRows("attn_q", heads="num_attention_heads"),
    PermuteRows("attn_k", heads="num_key_value_heads"),
)
# Gemma's norms multiply by 1 + weight; converters store 1 + weight.
_ONE_PLUS = (AddToFloat("norm", -1.0),)
_ATTENTION_BIAS = ("attention_bias", "blk.0.attn_q.bias")

ARCHITECTURES = (
    Architecture(
        "llama",
        "llama",
        (*_NORMS, *_attention("attention_bias", "attention_bias"), *_gated("mlp_bias")),
        transforms=_INTERLEAVED,
        biases=(_ATTENTION_BIAS, ("mlp_bias", "blk.0.ffn_down.bias")),
    ),
    Architecture(
        "mistral",
        "mistral",
        (*_NORMS, *_attention(), *_gated()),
        transforms=_INTERLEAVED,
        values=(
            Value(
                "sliding_window",
                "attention.sliding_window",
                default=0,
                why="converters leave the key out for full attention",
                off=0,
            ),
        ),
    ),
    Architecture("qwen2", "qwen2", (*_NORMS, *_attention("always"), *_gated())),
    Architecture(
        "qwen3",
        "qwen3",
        (*_NORMS, *_HEAD_NORMS, *_attention("attention_bias", "attention_bias"), *_gated()),
        biases=(_ATTENTION_BIAS,),
    ),
    Architecture(
        "gemma2",
        "gemma2",
        (*_SANDWICH_NORMS, *_attention(), *_gated()),
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
        (*_SANDWICH_NORMS, *_HEAD_NORMS, *_attention(), *_gated()),
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
            *_NORMS,
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
)
KNOWN = {entry.name: entry for entry in ARCHITECTURES}


def architecture_of(name: object, sliding: bool, where: str) -> Architecture:
    """The entry for an architecture.

    Args:
        name: value of ``general.architecture``.
        sliding: whether the file sets a sliding window for all layers. A ``llama`` file that does
            is a Mistral model, which is the same but for the window.
        where: the file, for messages.

    Raises:
        SchemeError: unknown; lists the known ones.
    """
    if not isinstance(name, str) or name not in KNOWN:
        raise SchemeError(
            where,
            f"architecture {name!r} is not supported",
            f"one of {', '.join(KNOWN)}",
            "use a model of a listed architecture, or pass your own module with parameters named "
            f"like the file's tensors{nearest(str(name), KNOWN)}",
        )
    return KNOWN["mistral"] if name == "llama" and sliding else KNOWN[name]
