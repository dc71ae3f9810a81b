"""Run what ``qcompile.export`` saved: no model class, no tracing, no compiler of graphs.

Comes in: the folder of an artifact. Goes out: logits, and texts as ids.
Always holds: an artifact runs on the release and the processor that it was made for, or is
refused; transformers is imported only when the tokenizer is asked for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from qcompile.artifact_code import load_runs
from qcompile.artifact_header import Header, read_header
from qcompile.errors import OptionError, SchemeError
from qcompile.memory import return_pages

Choose = Callable[[torch.Tensor], int]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def greedy(logits: torch.Tensor) -> int:
    """The id of the largest of ``[V]`` logits."""
    return int(logits.max(0).indices)  # argmax takes six times as long for bfloat16


class Artifact:
    """A language model that was compiled ahead of time, for one text at a time.

    Args:
        path: its folder. Its code is run: open only what comes from a place that you trust.

    Attributes:
        path: the folder.
        header: what was compiled, and for what.
        length: tokens that were read since the last ``clear``.

    Raises:
        ArtifactError: something is missing or damaged, or was made for another machine, torch or
            release.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()
        self.header: Header = read_header(self.path)
        self._runs = load_runs(self.path, self.header)
        dtype = getattr(torch, self.header.cache_dtype)
        shapes = self.header.caches
        self._caches = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
        # Again by the same thread: ``choose`` may ask for what it likes.
        self._lock = threading.RLock()
        self._texts, self._last = 0, torch.zeros(1, device="cpu")
        self.length = 0

    def __repr__(self) -> str:
        header = self.header
        return f"Artifact({self.path.name}: {header.dtype}, {header.numerics}, {header.target})"

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, by transformers.

        Raises:
            SchemeError: the checkpoint had none.
        """
        return load_tokenizer(self.path)

    def clear(self) -> None:
        """Begin a new text."""
        with self._lock:
            if self._last.isnan().any():
                # The keys and values of an earlier text have no weight in a later one, but a NaN
                # times nothing is a NaN.
                for cache in self._caches:
                    cache.zero_()
                self._last = torch.zeros(1, device="cpu")
            self._texts += 1
            self.length = 0

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Read tokens after those that were read before.

        Args:
            ids: int64 ``[T]`` or ``[1, T]``, one or more.

        Returns:
            logits ``[V]`` of the token after them, in the artifact's dtype.

        Raises:
            OptionError: they are no ids of the vocabulary, or the context has no room for them.
        """
        ids = self._checked(ids)
        with self._lock, torch.inference_mode():
            self._check_room(self.length + len(ids))
            for part in self._parts(ids):
                self._last = self._run(part)
            return self._last

    def generate(
        self,
        ids: torch.Tensor,
        max_new_tokens: int = 64,
        *,
        choose: Choose = greedy,
        ends: bool = True,
    ) -> torch.Tensor:
        """Continue a text from its beginning; threads that ask at once are served in turn.

        Args:
            ids: int64 ``[T]`` or ``[1, T]``, one or more.
            max_new_tokens: tokens to add at most.
            choose: the next id, given its ``[V]`` logits.
            ends: whether the model's own ids of an end do end the text.

        Returns:
            int64 ``[T + n]``: the ids and what follows them, the end's id included.

        Raises:
            OptionError: as ``read``; it is asked before anything is read whether all will fit.
        """
        with self._lock:
            more = list(self.stream(ids, max_new_tokens, choose=choose, ends=ends))
        return torch.cat([self._checked(ids), torch.tensor(more, device="cpu")])

    def stream(
        self,
        ids: torch.Tensor,
        max_new_tokens: int = 64,
        *,
        choose: Choose = greedy,
        ends: bool = True,
    ) -> Iterator[int]:
        """The ids that ``generate`` adds, one by one; the arguments are the same.

        Raises:
            OptionError: as ``generate``; while it runs, that another text was begun meanwhile.
        """
        if not _is_count(max_new_tokens):
            raise OptionError(
                f"max_new_tokens={max_new_tokens!r}", "no number of tokens", "1 or more", "pass one"
            )
        ids = self._checked(ids)
        self._check_room(len(ids) + max_new_tokens - 1)  # the last one is not read
        return self._more(ids, max_new_tokens, choose, self.header.ends if ends else ())

    # **** parts of the above ****

    def _more(
        self, ids: torch.Tensor, count: int, choose: Choose, ends: Collection[int]
    ) -> Iterator[int]:
        with self._lock:
            self.clear()
            place = self._texts, 0
        for number in range(count):
            with self._lock:
                if place != (self._texts, self.length):
                    raise OptionError(
                        "the text of a stream",
                        "another text was begun, or more was read, before it ended",
                        "one text at a time",
                        "take all of it first, or open the artifact once more",
                    )
                logits = self.read(ids)
                place = self._texts, self.length
            found = int(choose(logits))
            yield found
            if found in ends or number + 1 == count:
                return
            ids = torch.tensor([found], device="cpu")

    def _parts(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """The ids in runs that the code of prompts takes, and singles."""
        few, many = self.header.rows
        while len(ids):
            count = min(len(ids), many) if len(ids) >= few else 1
            yield ids[:count]
            ids = ids[count:]

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        name = "step" if len(ids) == 1 else "prompt"
        positions = torch.arange(self.length, self.length + len(ids), device="cpu")
        given = {"ids": ids[None], "positions": positions}
        inputs = [
            given[place] if place in given else self._caches[int(place)]
            for place in self.header.graphs[name].inputs
        ]
        (logits,) = self._runs[name](inputs)
        self.length += len(ids)
        return logits[0, -1]

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids as int64 ``[T]``, one after the other in memory: code takes that for granted."""
        good = isinstance(ids, torch.Tensor) and ids.dtype in _INTEGERS and not ids.is_meta
        if not good or ids.dim() not in (1, 2) or not ids.numel() == ids.shape[-1] > 0:
            found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else repr(ids)
            raise OptionError(
                "ids", found, "int64 [T] or [1, T], T of 1 or more", "pass such a tensor"
            )
        ids = ids.reshape(-1).to(device="cpu", dtype=torch.int64).contiguous()
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= self.header.vocabulary:
            raise OptionError(
                "ids",
                f"{low if low < 0 else high}",
                f"0 to {self.header.vocabulary - 1}, the model's vocabulary",
                "use the artifact's own tokenizer",
            )
        return ids

    def _check_room(self, tokens: int) -> None:
        if tokens > self.header.context:
            raise OptionError(
                "the text",
                f"{tokens} tokens",
                f"{self.header.context} at most, for which {self.path.name} was exported",
                "pass fewer, or export with a larger context",
            )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in the folder of an artifact; reading a large one takes memory for a while.

    Raises:
        SchemeError: there is none, because the checkpoint had none.
    """
    from qcompile.hf import need_transformers

    if not (folder / "tokenizer_config.json").is_file():
        raise SchemeError(
            str(folder),
            "no tokenizer: the checkpoint had none",
            "tokenizer.json and tokenizer_config.json",
            "put them into the folder, or pass ids",
        )
    found = need_transformers("Artifact.tokenizer").AutoTokenizer.from_pretrained(folder)
    return_pages()
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def open_artifact(path: str | Path) -> Artifact:
    """Open what ``qcompile.export`` saved; see ``Artifact``."""
    return Artifact(path)
