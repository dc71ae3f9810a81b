"""A llama of any size with random weights, as a GGUF file that is never whole in memory.

Comes in: a path and sizes. Goes out: a file that a model and a tokenizer can be built from.
Always holds: every block decodes to small finite numbers; one tensor is in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

_BLOCK, _BYTES = 32, 18  # Q4_0: a float16 scale and 32 codes of 4 bits


@dataclass(frozen=True)
class Size:
    """Extents of a llama; about 1.1 billion parameters as they stand."""

    vocabulary: int = 32_000
    hidden: int = 2048
    inner: int = 5632
    layers: int = 22
    heads: int = 32
    groups: int = 8


def write_large(path: Path, size: Size) -> Path:
    """Write the file: Q4_0 matrices, float32 norms, a byte-level vocabulary with one merge."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.inner)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.groups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size.hidden // size.heads)
    writer.add_vocab_size(size.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(_tokens(size.vocabulary))
    writer.add_token_types([3] + [1] * (size.vocabulary - 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    shapes = _shapes(size)
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q4_0 if len(shape) == 2 else None
        count = int(np.prod(shape))
        nbytes = count // _BLOCK * _BYTES if kind else count * 4
        stored = (shape[0], shape[1] // _BLOCK * _BYTES) if kind else shape
        writer.add_tensor_info(name, stored, np.dtype("u1" if kind else "f4"), nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for shape in shapes.values():
        writer.write_tensor_data(_data(shape, random))
    writer.close()
    return path


def _shapes(size: Size) -> dict[str, tuple[int, ...]]:
    head = size.hidden // size.heads
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (size.vocabulary, size.hidden)}
    for layer in range(size.layers):
        for name, shape in (
            ("attn_norm", (size.hidden,)),
            ("attn_q", (size.hidden, size.hidden)),
            ("attn_k", (size.groups * head, size.hidden)),
            ("attn_v", (size.groups * head, size.hidden)),
            ("attn_output", (size.hidden, size.hidden)),
            ("ffn_norm", (size.hidden,)),
            ("ffn_gate", (size.inner, size.hidden)),
            ("ffn_up", (size.inner, size.hidden)),
            ("ffn_down", (size.hidden, size.inner)),
        ):
            shapes[f"blk.{layer}.{name}.weight"] = shape
    shapes["output_norm.weight"] = (size.hidden,)
    shapes["output.weight"] = (size.vocabulary, size.hidden)
    return shapes


def _data(
    shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8] | np.dtype[np.float32]]:
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    blocks = random.integers(0, 256, (shape[0], shape[1] // _BLOCK, _BYTES), dtype=np.uint8)
    scale = np.float16(0.25 / np.sqrt(shape[1]))
    blocks[:, :, :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return blocks.reshape(shape[0], -1)


def _tokens(count: int) -> list[str]:
    """Names for the 256 bytes, as byte-level tokenizers print them, and others."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [byte for byte in range(256) if byte not in plain]
    letters = [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(odd))]
    return ["<s>", *letters, "ab", *(f"token{index}" for index in range(count - 258))]
