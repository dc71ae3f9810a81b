"""Zero points as GPTQ files store them.

Comes in: packed words. Goes out: true zero points.
Always holds: the convention is the file's own: v2 stores the zero point, v1 stores it minus one.

The trap of v1 is a zero point of 0. Two kinds of writers exist, and a file does not say which
wrote it except by ``meta.quantizer``:

*word*
    GPTQModel subtracts one from all fields of a word in a single 32-bit subtraction (widths of 2,
    4 and 8 bits), so that a zero point of 0 borrows from the field above. One 32-bit addition is
    the exact inverse.
*field*
    Everybody else packs ``zero - 1`` field by field; 0 becomes all ones. Adding one to each field
    and dropping the carry is the inverse.

Some packers of the second kind let the ones of a -1 run over the rest of the word, which destroys
the fields above. That cannot be undone; ``looks_damaged`` tells.

>>> words = torch.tensor([[0x77777776]], dtype=torch.int32)
>>> read_zeros(words, 4, "field", 8).tolist()
[[7, 8, 8, 8, 8, 8, 8, 8]]
>>> read_zeros(words, 4, "stored", 3).tolist()
[[6, 7, 7]]
"""

from __future__ import annotations

from typing import Literal

import torch

from qcompile.schemes.words import unpack_words

ZeroRule = Literal["stored", "field", "word"]
_WHOLE_WORD = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def read_zeros(words: torch.Tensor, bits: int, rule: ZeroRule, count: int) -> torch.Tensor:
    """True zero points.

    Args:
        words: int32 ``[G, W]``, packed along the second dimension.
        bits: width of a field.
        rule: how the file stores them: ``stored`` as they are, else minus one, see above.
        count: zero points in a row.

    Returns:
        uint8 ``[G, count]``.
    """
    if rule == "word" and bits in _WHOLE_WORD:
        words = words + _WHOLE_WORD[bits]  # int32 wraps, as the subtraction did
        return unpack_words(words, bits, 1, count)
    fields = unpack_words(words, bits, 1, count)
    return fields if rule == "stored" else (fields + 1) & ((1 << bits) - 1)


def looks_damaged(words: torch.Tensor, bits: int, rule: ZeroRule) -> bool:
    """Whether a field of -1 seems to have run over the fields above it in its word.

    Such a word is, from some field on, all ones up to its end, in two fields or more, below which
    other values stand. Only widths that divide a word are judged.
    """
    if rule != "field" or 32 % bits:
        return False
    fields = unpack_words(words.reshape(-1, 1), bits, 1, 32 // bits)
    ones = (fields == (1 << bits) - 1).to(torch.int32)
    run = ones.flip(1).cumprod(1).sum(1)  # fields of ones at the top of the word
    return bool(((run >= 2) & (run < ones.shape[1])).any())
