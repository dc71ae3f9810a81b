import copy
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompile.errors import SchemeError
from qcompile.schemes.gguf import merges
from qcompile.schemes.gguf.merges import implied_merges
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.tokenizer import BYTE, CONTROL, NORMAL, USER_DEFINED, build_tokenizer

ZOO = Path(__file__).parents[4] / "shared" / "zoo"
SPACE = "\u2581"
TEXTS = (
    "",
    " ",
    "Hello",
    " Hello",
    "Hello world",
    "Hello  world",
    "   three leading and three trailing   ",
    "one\ntwo\n\nthree\n\n\n\nfour",
    "tab\tand\t\ttabs",
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x ** 2  # comment\n",
    "if (a != b) { c = d->e[0]; }",
    "3.14159 + 2.71828 = 5.85987; 1234567890",
    "naïve café, Ångström, señor, über",
    "日本語のテキストです。",
    "中文文本\uff0c没有空格。",
    "한국어 문장입니다.",
    "العربية من اليمين إلى اليسار",
    "עברית מימין לשמאל",
    "हिन्दी में एक वाक्य",
    "Кириллица и ещё немного",
    "emoji 🦙🎉👩‍👩‍👧 and flags 🇩🇪",
    "\x00\x07\x7f control",
    "private use \ue000 and astral \U0001d518\U0001d52b",
    "combining e\u0301 a\u0308",
    "====== ------ ______ ......",
    "aaaaaaaaaaaaaaaaaaaaaaa",
    "xyzzyxyzzyxyzzyxyzzy",
    "https://example.org/path?query=1&b=2#frag",
    "user@example.org",
    "<b>bold</b> <unknown> < not a tag",
    "<0x41> is text, not a byte",
    f"{SPACE}literal{SPACE}{SPACE}marks",
    "I'm you're they've we'll he'd it's",
    "ALLCAPS MixedCase snake_case kebab-case",
    "supercalifragilisticexpialidocious",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "\u200bzero width\u200b",
    "line\r\nend",
    "\"quoted\" and 'single' and `ticks`",
    "100% of $5.00 @ 50¢ each = €2,50",
    "∑∏∫√∞≠≤≥ mathematics",
    "a b c d e f g h i j k l m n o p",
    "\ufeffbom",
    "Mr. O'Neill thinks that the boys' stories about Chile's capital aren't amusing.",
    "   \n   \n   ",
    "🤖",
    "ﬁ ligature ﬀ",
    "Ωμέγα",
    "end",
)


def _spm(pieces: dict[str, float], **keys: Any) -> dict[str, object]:
    """Metadata of a scored vocabulary: special tokens, bytes, one user-defined token, pieces."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "<mark>", "  ", *pieces]
    types = [CONTROL] * 3 + [BYTE] * 256 + [USER_DEFINED] * 2 + [NORMAL] * len(pieces)
    types[0] = 2
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1000.0] * 2 + list(pieces.values()),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def _greedy(text: str, score: dict[str, float], ids: dict[str, int]) -> list[int]:
    """SentencePiece's BPE, slowly: join the neighbours with the best score, leftmost first."""
    symbols = list(text)
    while True:
        joints = [
            (-score[a + b], place)
            for place, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in score
        ]
        if not joints:
            break
        _, place = min(joints)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    found: list[int] = []
    for symbol in symbols:
        whole = [ids[symbol]] if symbol in ids else None
        found += whole or [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def _slow(metadata: dict[str, object], prefix: bool) -> Callable[[str], list[int]]:
    """Ids of a text: cut at user-defined tokens first, the longest at each place, then greedy."""
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    types: Any = metadata["tokenizer.ggml.token_type"]
    scores: Any = metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    score = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    cuts = {t for t, kind in zip(tokens, types, strict=True) if kind in (2, CONTROL, USER_DEFINED)}
    longest = max(map(len, cuts))

    def encode(text: str) -> list[int]:
        parts, place = [""], 0
        while place < len(text):
            sizes = range(min(longest, len(text) - place), 0, -1)
            candidates = (text[place : place + size] for size in sizes)
            hit = next((part for part in candidates if part in cuts), "")
            if hit:
                parts += [hit, ""]
            else:
                parts[-1] += text[place]
            place += len(hit) or 1
        found: list[int] = []
        for index, part in enumerate(parts):
            marked = (SPACE if prefix else "") + part.replace(" ", SPACE)
            if index % 2:
                found.append(ids[part])
            elif part:
                found += _greedy(marked, score, ids)
        return found

    return encode


def _pieces(seed: int) -> dict[str, float]:
    """Pieces in the order a trainer would find them: each joins two earlier ones."""
    chance = random.Random(seed)
    found = [*"abcdexyz.-=", SPACE, "é", "本"]
    chars = len(found)
    while len(found) < 400:
        joint = chance.choice(found) + chance.choice(found)
        if len(joint) < 9 and joint not in found:
            found.append(joint)
    joined, single = found[chars:], found[:chars]
    return {piece: -float(rank) for rank, piece in enumerate([*joined, *single])}


@pytest.mark.parametrize("prefix", [False, True])
def test_joins_are_the_greedy_ones(prefix: bool) -> None:
    for seed in range(4):
        metadata = _spm(_pieces(seed), add_space_prefix=prefix)
        tokenizer, slow = build_tokenizer(metadata), _slow(metadata, prefix)
        chance = random.Random(seed)
        lengths = [chance.randint(0, 40) for _ in range(60)]
        texts = ["".join(chance.choices("abcdexyz.-= é本語", k=length)) for length in lengths]
        texts += ["aaaaaaaaaaa", "abababababab", "  a  b   c", "<mark>a<mark> b", *TEXTS]
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert ids == slow(text), (seed, text)


def test_scores_decide_and_not_the_order_of_tokens() -> None:
    pieces = {"a": -9.0, "b": -8.0, "c": -7.0, "ab": -2.0, "bc": -1.0, "abc": -3.0}
    tokenizer = build_tokenizer(_spm(pieces, add_space_prefix=False))
    assert tokenizer.tokenize("abc") == ["abc"]
    del pieces["abc"]
    tokenizer = build_tokenizer(_spm(pieces, add_space_prefix=False))
    assert tokenizer.tokenize("abc") == ["a", "bc"]


def test_begin_and_end_tokens_follow_the_file() -> None:
    pieces = {SPACE: -2.0, "a": -1.0}
    assert build_tokenizer(_spm(pieces))("a").input_ids[0] == 1
    assert build_tokenizer(_spm(pieces, add_bos_token=False))("a").input_ids[0] != 1
    both = build_tokenizer(_spm(pieces, add_bos_token=True, add_eos_token=True))("a").input_ids
    assert (both[0], both[-1]) == (1, 2)
    assert len(both) == 4


def test_text_survives_a_round_trip() -> None:
    for prefix in (False, True):
        tokenizer = build_tokenizer(_spm(_pieces(0), add_space_prefix=prefix))
        for text in TEXTS:
            if SPACE in text:
                continue  # the mark stands for a space, so it comes back as one
            if prefix and "  " in text:
                continue  # a token of its own here, and a space goes before the text after it
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert tokenizer.decode(ids) == text


def test_without_types_bytes_and_special_tokens_are_still_known() -> None:
    metadata = _spm(_pieces(0), add_space_prefix=False)
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = build_tokenizer(metadata)
    assert tokenizer("語<s>", add_special_tokens=False).input_ids == [
        3 + 0xE8,
        3 + 0xAA,
        3 + 0x9E,
        1,
    ]


def test_implied_merges_are_every_cut_into_known_pieces() -> None:
    pieces = list(_pieces(1))
    known = set(pieces)
    expected = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    assert len(expected) > 386
    assert implied_merges(pieces) == expected
    assert implied_merges([]) == []


def test_implied_merges_are_right_where_pieces_share_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = list(_pieces(1))
    expected = implied_merges(pieces)
    monkeypatch.setattr(merges, "_TABLE_BITS", 2)
    assert implied_merges(pieces) == expected


def test_a_chat_template_is_kept_as_text(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    template = '{{ cycler.__init__.__globals__.os.popen("touch ' + str(marker) + '").read() }}'
    metadata = _spm({"a": -1.0}) | {"tokenizer.chat_template": template}
    assert build_tokenizer(metadata).chat_template == template
    assert not marker.exists()


def test_the_metadata_is_left_alone() -> None:
    metadata = _spm(_pieces(0))
    before = copy.deepcopy(metadata)
    build_tokenizer(metadata)
    assert metadata == before


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "t5", "tokenizer.ggml.model is 't5'"),
        ("model", None, "tokenizer.ggml.model is None"),
        ("tokens", ["a", 1], "tokenizer.ggml.tokens"),
        ("scores", [0.0], "tokenizer.ggml.scores has 1 entries"),
        ("scores", None, "tokenizer.ggml.scores is missing"),
        ("token_type", [1, 1], "tokenizer.ggml.token_type has 2 entries"),
        ("bos_token_id", 100000, "tokenizer.ggml.bos_token_id is 100000"),
    ],
)
def test_lists_that_do_not_fit_are_refused(key: str, value: object, words: str) -> None:
    metadata = _spm({"a": -1.0}) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(SchemeError, match=words):
        build_tokenizer(metadata, "model.gguf")


# **** byte-level ****


def _bytes(**keys: Any) -> dict[str, object]:
    tokens = [
        *"abcdefghijklmnopqrstuvwxyz0123456789'.",
        "\u0120",
        "\u010a",
        "ab",
        "abc",
        "12",
        "<s>",
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 1) + [CONTROL],
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


@pytest.mark.parametrize("entry", ["gguf-q4_k_m", "moe-gguf-q4_k_m"])
def test_zoo_tokens_are_those_of_the_source_tokenizer(entry: str) -> None:
    from tokenizers import Tokenizer

    path = ZOO / "gguf" / f"{entry}.gguf"
    source = ZOO / "models" / ("moe" if entry.startswith("moe") else "dense") / "tokenizer.json"
    if not path.exists() or not source.exists():
        pytest.skip(f"{path} or {source} is missing")
    tokenizer = build_tokenizer(GGUFFile.open(path).metadata)
    original = Tokenizer.from_file(str(source))
    texts = [(ZOO / "heldout.txt").read_text(), *TEXTS, "<|bos|>a<|eos|><|pad|>"]
    for text in texts:
        expected = original.encode(text, add_special_tokens=False).ids
        found = tokenizer(text, add_special_tokens=False).input_ids
        assert found == expected
        assert tokenizer.decode(found) == original.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        (
            "gpt-2",
            "ab 123 ab's\n\n x",
            ["ab", "\u0120123", "\u0120ab", "'s", "\u010a\u010a", "\u0120x"],
        ),
        ("llama-bpe", "ab 1234", ["ab", "\u0120", "123", "4"]),
        ("llama-bpe", "x.y I'M\n\n x", ["x", ".y", "\u0120I", "'M", "\u010a\u010a", "\u0120x"]),
        ("qwen2", "ab 123", ["ab", "\u0120", "1", "2", "3"]),
        ("smollm", "ab 123", ["ab", "\u0120", "1", "2", "3"]),
        ("gpt-4o", "abCd's 1234/", ["ab", "Cd's", "\u0120", "123", "4", "/"]),
        ("tekken", "abCd 12", ["ab", "Cd", "\u0120", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, text: str, words: list[str]) -> None:
    cut = build_tokenizer(_bytes(pre=pre)).backend_tokenizer.pre_tokenizer
    assert [word for word, _ in cut.pre_tokenize_str(text)] == words


def test_words_that_are_tokens_stay_whole_where_the_family_says_so() -> None:
    assert build_tokenizer(_bytes(pre="llama-bpe")).tokenize("abc") == ["abc"]
    assert build_tokenizer(_bytes(pre="dbrx")).tokenize("abc") == ["ab", "c"]


def test_the_default_of_the_begin_token_depends_on_the_family() -> None:
    begin = len(_bytes()["tokenizer.ggml.tokens"]) - 1  # type: ignore[arg-type]
    assert build_tokenizer(_bytes(pre="llama-bpe"))("a").input_ids == [begin, 0]
    assert build_tokenizer(_bytes(pre="qwen2"))("a").input_ids == [0]
    assert build_tokenizer(_bytes(pre="qwen2", add_bos_token=True))("a").input_ids == [begin, 0]


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(SchemeError, match="did you mean 'qwen2'"):
        build_tokenizer(_bytes(pre="qwen3"))


@pytest.mark.parametrize("merges", [["a b c"], ["ab"], ["a z9"], ["b a"]])
def test_merges_of_unknown_tokens_are_refused(merges: list[str]) -> None:
    with pytest.raises(SchemeError, match="the merge"):
        build_tokenizer(_bytes(merges=merges))


# **** a large vocabulary ****


@pytest.fixture(scope="module")
def gemma() -> dict[str, object]:
    path = os.environ.get("QCOMPILE_GEMMA")
    if not path or not Path(path).exists():
        pytest.skip("QCOMPILE_GEMMA does not name a Gemma 3 GGUF file")
    metadata = GGUFFile.open(path).metadata
    return {key: metadata[key] for key in metadata if key.startswith("tokenizer.")}


def test_gemma_tokens(gemma: dict[str, object]) -> None:
    tokenizer = build_tokenizer(gemma)
    assert tokenizer("a").input_ids[0] == 2
    turn = "<start_of_turn>user\nHi<end_of_turn>\n"
    assert tokenizer.tokenize(turn) == [
        "<start_of_turn>",
        "user",
        "\n",
        "Hi",
        "<end_of_turn>",
        "\n",
    ]
    assert len(tokenizer) == 262144
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if SPACE not in text:
            assert tokenizer.decode(ids) == text


def test_gemma_joins_are_the_greedy_ones(gemma: dict[str, object]) -> None:
    tokenizer, slow = build_tokenizer(gemma), _slow(gemma, False)
    tokens: Any = gemma["tokenizer.ggml.tokens"]
    chance = np.random.default_rng(0)
    mixed = ["".join(tokens[i] for i in chance.integers(494, 250000, 6)) for _ in range(20)]
    for text in [*TEXTS, *mixed]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == slow(text), text
