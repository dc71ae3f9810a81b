"""The tokenizer inside a GGUF file.

Comes in: the metadata ``tokenizer.*``. Goes out: a Hugging Face fast tokenizer.
Always holds: token ids are the file's; a vocabulary of a kind that is not known is refused; a chat
template is kept as text and never rendered here.

Two kinds are known. ``llama``: scored pieces, joined best score first, with ``<0xNN>`` tokens for
bytes that no piece covers (SentencePiece's BPE). ``gpt2``: byte-level merges in the file's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from qcompile.errors import SchemeError
from qcompile.hf import need_transformers
from qcompile.memory import uncollected
from qcompile.schemes.gguf.merges import implied_merges
from qcompile.schemes.gguf.pre_tokenizers import PreTokenizer, pre_tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_KEY = "tokenizer.ggml."
# Values of ``token_type``.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class _HandOver:
    """Gives a tokenizer away where a deep copy is asked for: copying a large one takes seconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, object]) -> Tokenizer:
        return self._tokenizer


def build_tokenizer(
    metadata: Mapping[str, object], where: str = "tokenizer"
) -> PreTrainedTokenizerFast:
    """The tokenizer that a file's metadata describes.

    Args:
        metadata: the file's metadata.
        where: the file, for messages.

    Raises:
        SchemeError: no tokenizer, one of an unknown kind, or lists that do not fit together.
        OptionError: transformers is not installed.
    """
    transformers = need_transformers("build_tokenizer")
    kind = metadata.get(f"{_KEY}model")
    if kind not in ("llama", "gpt2"):
        raise _error(where, f"{_KEY}model is {kind!r}", "llama or gpt2")
    tokens = _tokens(metadata, where)
    types = _types(metadata, tokens, where)
    named = _named(metadata, tokens, where)
    # Hundreds of thousands of small objects live for a moment: collecting in between only costs.
    with uncollected():
        if kind == "llama":
            bos_default = True
            tokenizer = _scored(metadata, tokens, types, named.get("unk_token"), where)
        else:
            cut = pre_tokenizer_of(str(metadata.get(f"{_KEY}pre", "default")), where)
            bos_default = cut.bos
            tokenizer = _byte_level(metadata, tokens, cut, where)
        _add_tokens(tokenizer, tokens, types)
    template = metadata.get("tokenizer.chat_template")
    built = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_HandOver(tokenizer),
        add_bos_token=_flag(metadata, "add_bos_token", bos_default) and "bos_token" in named,
        add_eos_token=_flag(metadata, "add_eos_token", False) and "eos_token" in named,
        clean_up_tokenization_spaces=False,
        chat_template=template if isinstance(template, str) else None,
        **named,
    )
    return cast("PreTrainedTokenizerFast", built)


# **** the two kinds ****


def _scored(
    metadata: Mapping[str, object],
    tokens: list[str],
    types: np.ndarray[tuple[int], np.dtype[np.int64]],
    unknown: str | None,
    where: str,
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = np.asarray(_list(metadata, "scores", len(tokens), where), dtype=np.float32)
    best_first = np.argsort(-scores, kind="stable")
    # Only normal pieces take part in merging: SentencePiece keeps the others apart.
    normal = best_first[types[best_first] == NORMAL].tolist()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pieces = [tokens[index] for index in normal]
    if len(vocabulary) != len(tokens) or "" in vocabulary:
        pieces = [piece for piece in dict.fromkeys(pieces) if piece]
    model = models.BPE(
        vocab=vocabulary,
        merges=implied_merges(pieces),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=bool((types == BYTE).any()),
    )
    tokenizer = Tokenizer(model)
    # A space goes before the text and after every special token, as llama.cpp does.
    prefix = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * prefix)])
    return tokenizer


def _byte_level(
    metadata: Mapping[str, object], tokens: list[str], cut: PreTokenizer, where: str
) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(str(merge).split(" ")) for merge in _list(metadata, "merges", None, where)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise _error(where, f"the merge {' '.join(merge)!r}", "two tokens that join to a third")
    model = models.BPE(
        vocab=vocabulary,
        merges=cast("list[tuple[str, str]]", merges),
        ignore_merges=cut.whole_words,
    )
    tokenizer = Tokenizer(model)
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] * cut.digits),
            pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(
    tokenizer: Tokenizer, tokens: list[str], types: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> None:
    """Tokens that text is cut at before anything else."""
    from tokenizers import AddedToken

    for special, wanted in ((True, (CONTROL, UNKNOWN)), (False, (USER_DEFINED,))):
        chosen = np.flatnonzero(np.isin(types, wanted)).tolist()
        added = [
            AddedToken(tokens[index], normalized=False, special=special)
            for index in chosen
            if tokens[index]
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


# **** the metadata ****


def _tokens(metadata: Mapping[str, object], where: str) -> list[str]:
    tokens = _list(metadata, "tokens", None, where)
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise _error(where, f"{_KEY}tokens is not a list of texts", "the vocabulary")
    return cast("list[str]", tokens)


def _types(
    metadata: Mapping[str, object], tokens: list[str], where: str
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Kind of each token. Files without the list have named special tokens and bytes at least."""
    if f"{_KEY}token_type" in metadata:
        listed = _list(metadata, "token_type", len(tokens), where)
        return np.asarray(listed, dtype=np.int64)
    types = np.full(len(tokens), NORMAL, dtype=np.int64)
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = BYTE
    for key in _NAMED.values():
        named = metadata.get(f"{_KEY}{key}")
        if isinstance(named, int) and named < len(tokens):
            types[named] = CONTROL
    return types


def _named(metadata: Mapping[str, object], tokens: list[str], where: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for name, key in _NAMED.items():
        index = metadata.get(f"{_KEY}{key}")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise _error(where, f"{_KEY}{key} is {index!r}", f"0 to {len(tokens) - 1}")
        named[name] = tokens[index]
    return named


def _list(metadata: Mapping[str, object], key: str, length: int | None, where: str) -> list[object]:
    value = metadata.get(f"{_KEY}{key}")
    if not isinstance(value, list):
        raise _error(where, f"{_KEY}{key} is missing or no list", "a list")
    if length is not None and len(value) != length:
        raise _error(where, f"{_KEY}{key} has {len(value)} entries", f"{length}, one for a token")
    return value


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    return bool(metadata.get(f"{_KEY}{key}", default))


def _error(where: str, found: str, needed: str) -> SchemeError:
    return SchemeError(where, found, needed, "use the tokenizer of the original model")
