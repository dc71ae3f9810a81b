"""A GGUF file of a real model's shape with random weights, to time what cannot be downloaded.

``python -m qcompile.bench.synthetic OUT.gguf`` writes Qwen2 1.5B's shape with the types of Q4_K_M.

Comes in: a shape. Goes out: a file that llama.cpp and qcompile load.
Always holds: the same shape and seed give the same bytes; weights have a mean of nearly zero and a
deviation of about 0.02; one tensor is in memory at a time; texts are bytes, one token each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from qcompile.errors import OptionError

Bytes = npt.NDArray[np.uint8]
_BLOCK = 256  # values of a block of Q4_K and Q6_K
# Factors with which random codes and steps give values of a deviation of 0.02.
_Q4_FACTOR, _Q6_FACTOR = 7.7e-5, 1.2e-4
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # token types


@dataclass(frozen=True)
class Shape:
    """A model of the architecture qwen2, its head tied to the embedding. Defaults: Qwen2 1.5B."""

    layers: int = 28
    hidden: int = 1536
    inner: int = 8960
    heads: int = 12
    shared_heads: int = 2
    vocabulary: int = 151936
    context: int = 32768


def write(path: str | Path, shape: Shape, seed: int = 0) -> None:
    """Write the file.

    Raises:
        OptionError: rows are no whole blocks, or the vocabulary does not hold all bytes.
    """
    if shape.hidden % _BLOCK or shape.inner % _BLOCK or shape.vocabulary < 258:
        raise OptionError(
            f"{shape}",
            "rows that are no whole blocks, or fewer than 258 tokens",
            f"widths that are multiples of {_BLOCK}, and a token for each byte",
            "choose another shape",
        )
    writer = gguf.GGUFWriter(str(path), "qwen2")
    _describe(writer, shape)
    planned = list(_tensors(shape))
    for name, rows, columns, kind in planned:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        if kind is Kind.F32:
            dims = (rows, columns) if rows else (columns,)
            writer.add_tensor_info(name, dims, np.dtype(np.float32), 4 * (rows or 1) * columns)
            continue
        width = columns // elements * size
        writer.add_tensor_info(name, (rows, width), np.dtype(np.uint8), rows * width, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(seed)
    for name, rows, columns, kind in planned:
        writer.write_tensor_data(_values(draw, name, rows, columns, kind))
    writer.close()


def _tensors(shape: Shape) -> Iterator[tuple[str, int, int, Kind]]:
    """Name, rows (0 for a vector), columns and type; types as llama.cpp's Q4_K_M has them."""
    yield "token_embd.weight", shape.vocabulary, shape.hidden, Kind.Q6_K
    shared = shape.hidden // shape.heads * shape.shared_heads
    for layer in range(shape.layers):
        eighth = shape.layers // 8
        more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        wide = Kind.Q6_K if more else Kind.Q4_K
        prefix = f"blk.{layer}"
        for name, rows, columns, kind in (
            ("attn_q", shape.hidden, shape.hidden, Kind.Q4_K),
            ("attn_k", shared, shape.hidden, Kind.Q4_K),
            ("attn_v", shared, shape.hidden, wide),
            ("attn_output", shape.hidden, shape.hidden, Kind.Q4_K),
            ("ffn_gate", shape.inner, shape.hidden, Kind.Q4_K),
            ("ffn_up", shape.inner, shape.hidden, Kind.Q4_K),
            ("ffn_down", shape.hidden, shape.inner, wide),
        ):
            yield f"{prefix}.{name}.weight", rows, columns, kind
            if name in ("attn_q", "attn_k", "attn_v"):
                yield f"{prefix}.{name}.bias", 0, rows, Kind.F32
        for name in ("attn_norm", "ffn_norm"):
            yield f"{prefix}.{name}.weight", 0, shape.hidden, Kind.F32
    yield "output_norm.weight", 0, shape.hidden, Kind.F32


def _values(
    draw: np.random.Generator, name: str, rows: int, columns: int, kind: Kind
) -> npt.NDArray[Any]:
    if kind is Kind.F32:
        if name.endswith("bias"):
            return draw.normal(0, 0.02, columns).astype(np.float32)
        return np.ones(columns, dtype=np.float32)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rows * columns // elements
    data = np.frombuffer(draw.bytes(blocks * size), dtype=np.uint8).reshape(blocks, size).copy()
    factors = draw.uniform(0.7, 1.3, blocks)
    if kind is Kind.Q4_K:
        # d, then the factor of the minima: codes average 7.5, which the minima take away.
        _put_half(data, 0, factors * _Q4_FACTOR)
        _put_half(data, 2, factors * _Q4_FACTOR * 7.5)
    else:
        steps = draw.integers(-16, 17, (blocks, 16), dtype=np.int8)
        data[:, 192:208] = steps.view(np.uint8)
        _put_half(data, 208, factors * _Q6_FACTOR)
    made: Bytes = data.reshape(rows, -1)
    return made


def _put_half(data: Bytes, at: int, values: npt.NDArray[np.float64]) -> None:
    data[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random weights, {shape.layers} layers of {shape.hidden}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.shared_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    letters = _letters()
    # One merge, because a list in a GGUF file cannot be empty.
    special = [f"{letters[32]}{letters[116]}", "<|endoftext|>"]
    left = shape.vocabulary - len(letters) - len(special)
    tokens = [*letters, *special, *(f"[unused{i}]" for i in range(left))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    kinds = [_NORMAL] * (len(letters) + 1) + [_CONTROL] + [_UNUSED] * left
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{letters[32]} {letters[116]}"])
    writer.add_eos_token_id(len(letters) + 1)
    writer.add_bos_token_id(len(letters) + 1)
    writer.add_add_bos_token(False)


def _letters() -> list[str]:
    """A printable character for each byte, as GPT-2's vocabulary has them."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = vars(parser.parse_args())
    out, seed = given.pop("out"), given.pop("seed")
    write(out, Shape(**given), seed)
    print(f"{out}: {Path(out).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
