"""DeepSeek's attention: keys and values from a latent vector.

Comes in: metadata; the halves of the matrix that makes keys and values. Goes out: configuration
values; the whole matrix.
Always holds: both ways to store the matrix give the same model.

``kv_b_proj`` has, for each head, rows for the keys and then rows for the values. Old files hold it
as ``attn_kv_b``. Newer ones hold ``attn_k_b`` ``[heads, latent, key rows]``, transposed, and
``attn_v_b`` ``[heads, value rows, latent]``. Source: llama.cpp's converter for DeepSeek-V2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from qcompile.errors import SchemeError
from qcompile.layout import QuantizedTensor
from qcompile.schemes.gguf.keys import Keys
from qcompile.spec import FloatSpec
from qcompile.weight import Rows, WeightRef

WHOLE, KEYS, VALUES = "attn_kv_b", "attn_k_b", "attn_v_b"


def latent_values(keys: Keys, values: Mapping[str, object]) -> dict[str, object]:
    """The configuration values of the attention.

    Args:
        keys: the file's metadata.
        values: configuration values read before.

    Raises:
        SchemeError: a missing key, or sizes that contradict each other.
    """
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    assert isinstance(heads, int)
    assert isinstance(hidden, int)
    if hidden % heads:
        raise keys.wrong("attention.head_count", heads, f"a divisor of {hidden}")
    rank, turned = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    key, value = keys.integer("attention.key_length"), keys.integer("attention.value_length")
    if "attention.key_length_mla" in keys:
        # The file describes heads that share the latent vector; the _mla keys are the model's own.
        _need(keys, "attention.key_length", key, rank + turned)
        _need(keys, "attention.value_length", value, rank)
        _need(keys, "attention.head_count_kv", keys.integer("attention.head_count_kv", 1), 1)
        key = keys.integer("attention.key_length_mla")
        value = keys.integer("attention.value_length_mla")
    else:
        groups = keys.integer("attention.head_count_kv", heads)
        _need(keys, "attention.head_count_kv", groups, heads)
    if turned < 2 or turned % 2 or key <= turned:
        raise keys.wrong("rope.dimension_count", turned, f"an even number below {key}")
    return {
        "num_key_value_heads": heads,
        "head_dim": turned,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
    }


def _need(keys: Keys, key: str, value: int, needed: int) -> None:
    if value != needed:
        raise keys.wrong(key, value, str(needed))


def joined(
    name: str, keys: WeightRef, values: WeightRef, configuration: Mapping[str, object]
) -> WeightRef:
    """``kv_b_proj`` of its stored halves, as float32 ``[heads * (key + value rows), latent]``.

    Blocks run along a stored row, which the transposed half does not keep: it has to be decoded.

    Args:
        name: the parameter.
        keys: ``attn_k_b``.
        values: ``attn_v_b``.
        configuration: what ``latent_values`` gave, and the number of heads.

    Raises:
        SchemeError: a half has another shape.
    """
    heads, latent, nope, rows = (
        configuration[n]
        for n in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    )
    assert isinstance(heads, int)
    assert isinstance(latent, int)
    assert isinstance(nope, int)
    assert isinstance(rows, int)
    for half, shape in ((keys, (heads, latent, nope)), (values, (heads, rows, latent))):
        if half.shape != shape:
            raise SchemeError(
                half.source,
                f"shape {half.shape}",
                f"{shape}, from the metadata",
                "convert the file again; its shapes and its metadata disagree",
            )

    def read(wanted: Rows) -> QuantizedTensor:
        whole = torch.cat([keys.dequantize().transpose(1, 2), values.dequantize()], 1)
        data = whole.reshape(-1, latent)[wanted]
        return QuantizedTensor(spec, "float", tuple(data.shape), {"data": data})

    def release() -> None:
        keys.release()
        values.release()

    spec = FloatSpec(torch.float32)
    return replace(
        keys,
        name=name,
        spec=spec,
        layout="float",
        shape=(heads * (nope + rows), latent),
        read=read,
        release=release,
        facts=f"decoded from {keys.spec} and {values.spec}: stored transposed, as {KEYS}",
    )
