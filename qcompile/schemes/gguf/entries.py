"""The words in which architectures of GGUF files are described.

Comes in: nothing. Goes out: the types of an entry, and the modules that many entries share.
Always holds: an entry is data. Sources: gguf-py's tensor map for names, llama.cpp's converter for
transforms, llama.cpp's loader for defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qcompile.schemes.gguf.transforms import PermuteRows, Transform

Kind = Literal["linear", "embedding", "norm"]
RopeStyle = Literal["plain", "unrounded", "local_global", "long", "latent"]


@dataclass(frozen=True)
class Stem:
    """One module and its tensors ``<tensor>.weight`` and, where it has one, ``<tensor>.bias``.

    Attributes:
        tensor: name in the file; of a layer's tensors, the part after ``blk.N.``.
        module: path in the model; of a layer's modules, the part after ``model.layers.N.``.
        kind: what the module does.
        bias: a value of the configuration that switches its bias on, ``always`` or None.
        part: ``weight`` or ``bias`` where ``module`` is the name of a single tensor of the model,
            stored as that part; None for a module.
        needs: a value of the configuration without which the module is not there.
        lacks: a value of the configuration with which the module is not there.
    """

    tensor: str
    module: str
    kind: Kind = "linear"
    bias: str | None = None
    part: str | None = None
    needs: str | None = None
    lacks: str | None = None


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
class Mixture:
    """The mixture of experts of an architecture. Defaults are those of llama.cpp's loader.

    Attributes:
        module: path of the experts, after ``model.layers.N.``.
        stems: further modules of a layer with experts: the router, experts for every token.
        dense: modules of a layer without experts; such layers come first.
        count: configuration value: how many experts there are.
        size: configuration value: width of an expert.
        gating: llama.cpp's number of the function over the router's outputs: 1 is a softmax over
            all of them, 2 a sigmoid, 3 a softmax over the chosen ones.
        norm: configuration value: whether the chosen weights are divided by their sum; None where
            the model has no choice.
        normed: whether they are, where the file does not say.
        scale: configuration value: a factor on the weights; None where there is none.
        groups: whether experts are chosen within the best groups of them.
        shared: configuration value: width of the expert that sees every token.
        leading: configuration value: how many layers come before those with experts.
        biased: whether experts have biases.
        turned: whether the model keeps each matrix with input rows first, and gate and up in turns.
    """

    stems: tuple[Stem, ...]
    module: str = "mlp.experts"
    dense: tuple[Stem, ...] = ()
    count: str = "num_experts"
    size: str = "moe_intermediate_size"
    gating: int = 1
    norm: str | None = "norm_topk_prob"
    normed: bool = False
    scale: str | None = None
    groups: bool = False
    shared: str | None = None
    leading: str | None = None
    biased: bool = False
    turned: bool = False


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        name: value of ``general.architecture``, or a name of ours for one that shares it.
        model_type: Hugging Face's name for the configuration class.
        layer: modules that every layer has.
        transforms: what the converter did.
        values: values beyond those that every architecture has (``VALUES``).
        constants: values of the configuration that no file says.
        rope: how rotary embeddings are described.
        biases: values that say whether linears have a bias, and the tensor that tells.
        sliding_every: every how many layers attention is global instead of sliding, where the
            file does not say; None when all layers are alike.
        wide_layers: number of layers of the one size whose attention scale is
            ``hidden_size / heads`` instead of ``head_dim``. Source: llama.cpp's loader.
        mixture: the experts, where it has some.
        latent: whether keys and values come from a latent vector (DeepSeek's attention).
    """

    name: str
    model_type: str
    layer: tuple[Stem, ...]
    transforms: tuple[Transform, ...] = ()
    values: tuple[Value, ...] = ()
    constants: tuple[tuple[str, object], ...] = ()
    rope: RopeStyle = "plain"
    biases: tuple[tuple[str, str], ...] = ()
    sliding_every: int | None = None
    wide_layers: int | None = None
    mixture: Mixture | None = None
    latent: bool = False


EMBEDDING = Stem("token_embd", "model.embed_tokens", "embedding")
OUTPUT = Stem("output", "lm_head")
GLOBAL = (EMBEDDING, Stem("output_norm", "model.norm", "norm"), OUTPUT)

# Tensors that describe the rotary embedding; they become part of the configuration.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
HELPERS: dict[RopeStyle, tuple[str, ...]] = {
    "plain": (ROPE_FREQS,),
    "unrounded": (),
    "local_global": (),
    "long": (ROPE_LONG, ROPE_SHORT),
    "latent": (),
}
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


def attention(bias: str | None = None, output_bias: str | None = None) -> tuple[Stem, ...]:
    """Queries, keys and values from the hidden state, and the output."""
    return (
        Stem("attn_q", "self_attn.q_proj", bias=bias),
        Stem("attn_k", "self_attn.k_proj", bias=bias),
        Stem("attn_v", "self_attn.v_proj", bias=bias),
        Stem("attn_output", "self_attn.o_proj", bias=output_bias),
    )


def gated(bias: str | None = None, suffix: str = "", module: str = "mlp") -> tuple[Stem, ...]:
    """Two linears, one of them behind a function, multiplied, and a third one."""
    return (
        Stem(f"ffn_gate{suffix}", f"{module}.gate_proj", bias=bias),
        Stem(f"ffn_up{suffix}", f"{module}.up_proj", bias=bias),
        Stem(f"ffn_down{suffix}", f"{module}.down_proj", bias=bias),
    )


NORMS = (
    Stem("attn_norm", "input_layernorm", "norm"),
    Stem("ffn_norm", "post_attention_layernorm", "norm"),
)
HEAD_NORMS = (
    Stem("attn_q_norm", "self_attn.q_norm", "norm"),
    Stem("attn_k_norm", "self_attn.k_norm", "norm"),
)
INTERLEAVED = (
    PermuteRows("attn_q", heads="num_attention_heads"),
    PermuteRows("attn_k", heads="num_key_value_heads"),
)
SLIDING_WINDOW = Value(
    "sliding_window",
    "attention.sliding_window",
    default=0,
    why="converters leave the key out for full attention",
    off=0,
)
ATTENTION_BIAS = ("attention_bias", "blk.0.attn_q.bias")
