"""How byte-level vocabularies cut text into words before merging.

Comes in: the name under ``tokenizer.ggml.pre``. Goes out: a regular expression and what goes with
it. Always holds: a name that is not listed is refused, because a wrong cut gives wrong tokens
without any other sign. Source of the expressions: the tokenizers of the model families.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.errors import SchemeError, nearest

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """Words with one leading mark, runs of ``digits``, runs of marks, line ends, spaces."""
    return rf"{_ENDINGS}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _cased(ending: str, digits: str) -> str:
    """As ``_words``, but a word ends where lower case turns to upper case."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{ending}|{_LEAD}{_UPPER}+{_LOWER}*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """A way to cut text.

    Attributes:
        pattern: regular expression of a word.
        digits: whether every digit is cut off first.
        whole_words: whether a word that is a token stays one whatever the merges say.
        nfc: whether text is composed (Unicode NFC) first.
        bos: whether a text starts with the begin token where the file does not say.
    """

    pattern: str
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False


_PLAIN = PreTokenizer(_GPT2)
_LLAMA3 = PreTokenizer(_words(r"\p{N}{1,3}"), whole_words=True, bos=True)
_QWEN2 = PreTokenizer(_words(r"\p{N}"), nfc=True)
_GPT4O = PreTokenizer(_cased(rf"{_ENDINGS}?", r"\p{N}{1,3}"))

PRE_TOKENIZERS = {
    # Also for files without a name: the oldest byte-level vocabularies are cut this way.
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "smollm": PreTokenizer(_GPT2, digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": PreTokenizer(_words(r"\p{N}{1,3}")),
    "smaug-bpe": PreTokenizer(_words(r"\p{N}{1,3}")),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O,
    "tekken": PreTokenizer(_cased("", r"\p{N}"), whole_words=True, bos=True),
}


def pre_tokenizer_of(name: str, where: str) -> PreTokenizer:
    """The entry of this name. Raises SchemeError, listing the known names."""
    if name not in PRE_TOKENIZERS:
        raise SchemeError(
            where,
            f"tokenizer.ggml.pre is {name!r}, which is not known",
            f"one of {', '.join(PRE_TOKENIZERS)}",
            f"use the tokenizer of the original model{nearest(name, PRE_TOKENIZERS)}",
        )
    return PRE_TOKENIZERS[name]
