"""Architectures with a mixture of experts in a layer, as lists.

Comes in: nothing. Goes out: entries for ``architectures``.
Always holds: an entry is data. How tokens are given to experts is the model's own code; an entry
names the values of its configuration, and a file that asks for more is refused.
"""

from __future__ import annotations

from qcompile.schemes.gguf.entries import (
    ATTENTION_BIAS,
    HEAD_NORMS,
    INTERLEAVED,
    NORMS,
    SLIDING_WINDOW,
    Architecture,
    Mixture,
    Stem,
    Value,
    attention,
    gated,
)
from qcompile.schemes.gguf.transforms import AsRow

# llama.cpp's numbers of the functions over a router's outputs.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3

_ROUTER = Stem("ffn_gate_inp", "mlp.gate")
_LATENT_ATTENTION = (
    Stem("attn_q", "self_attn.q_proj", lacks="q_lora_rank"),
    Stem("attn_q_a", "self_attn.q_a_proj", needs="q_lora_rank"),
    Stem("attn_q_a_norm", "self_attn.q_a_layernorm", "norm", needs="q_lora_rank"),
    Stem("attn_q_b", "self_attn.q_b_proj", needs="q_lora_rank"),
    Stem("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    Stem("attn_kv_a_norm", "self_attn.kv_a_layernorm", "norm"),
    Stem("attn_kv_b", "self_attn.kv_b_proj"),
    Stem("attn_output", "self_attn.o_proj"),
)
_SHARED = gated(suffix="_shexp", module="mlp.shared_experts")
_SCORE_BIAS = Stem("exp_probs_b", "mlp.gate.e_score_correction_bias", "norm", part="bias")
_SHARED_COUNT = Value("n_shared_experts", "expert_shared_count")

MIXTURES = (
    Architecture(
        "mixtral",
        "mixtral",
        (*NORMS, *attention()),
        transforms=INTERLEAVED,
        values=(SLIDING_WINDOW,),
        mixture=Mixture(
            (_ROUTER,), count="num_local_experts", size="intermediate_size", norm=None, normed=True
        ),
    ),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        (*NORMS, *attention("always")),
        transforms=(AsRow("ffn_gate_inp_shexp"),),
        mixture=Mixture(
            (
                _ROUTER,
                *gated(suffix="_shexp", module="mlp.shared_expert"),
                Stem("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
            ),
            shared="shared_expert_intermediate_size",
        ),
    ),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        (*NORMS, *HEAD_NORMS, *attention("attention_bias", "attention_bias")),
        biases=(ATTENTION_BIAS,),
        mixture=Mixture((_ROUTER,), normed=True),
    ),
    Architecture(
        "olmoe",
        "olmoe",
        (*NORMS, *HEAD_NORMS, *attention()),
        values=(
            Value(
                "clip_qkv",
                "attention.clamp_kqv",
                "float",
                default=0,
                why="converters leave the key out where nothing is clamped",
                off=0,
            ),
        ),
        mixture=Mixture((_ROUTER,), size="intermediate_size"),
    ),
    Architecture(
        "deepseek2",
        "deepseek_v2",
        (*NORMS, *_LATENT_ATTENTION),
        values=(_SHARED_COUNT,),
        rope="latent",
        mixture=Mixture(
            (_ROUTER, *_SHARED),
            dense=gated(),
            count="n_routed_experts",
            norm=None,
            scale="routed_scaling_factor",
            groups=True,
            leading="first_k_dense_replace",
        ),
        latent=True,
    ),
    Architecture(
        "deepseek3",
        "deepseek_v3",
        (*NORMS, *_LATENT_ATTENTION),
        values=(_SHARED_COUNT,),
        constants=(("num_mtp_layers", 0),),
        rope="latent",
        mixture=Mixture(
            (_ROUTER, _SCORE_BIAS, *_SHARED),
            dense=gated(),
            count="n_routed_experts",
            gating=SIGMOID,
            scale="routed_scaling_factor",
            groups=True,
            leading="first_k_dense_replace",
        ),
        latent=True,
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        (
            Stem("attn_norm", "input_layernorm", "norm"),
            Stem("post_attention_norm", "post_attention_layernorm", "norm"),
            *attention("always", "always"),
            Stem("attn_sinks", "self_attn.sinks", "norm", part="weight"),
        ),
        values=(Value("sliding_window", "attention.sliding_window"),),
        rope="unrounded",
        sliding_every=2,
        mixture=Mixture(
            (Stem("ffn_gate_inp", "mlp.router", bias="always"),),
            count="num_local_experts",
            size="intermediate_size",
            gating=SOFTMAX_OF_CHOSEN,
            norm=None,
            biased=True,
            turned=True,
        ),
    ),
)
