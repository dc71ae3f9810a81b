"""Run what ``qcompile.export`` saved: no model class, no tracing, no compiler of graphs.

Comes in: the folder of an artifact. Goes out: logits, and texts as ids.
Always holds: an artifact runs on the release and the processor that it was made for, or is
refused; transformers is imported only when the tokenizer is asked for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from qcompile import backends
from qcompile.artifact_header import WEIGHTS, Graph, Header, read_header
from qcompile.artifact_weights import read_weights
from qcompile.backends import SavesCode
from qcompile.errors import ArtifactError, OptionError, SchemeError
from qcompile.memory import return_pages

Choose = Callable[[torch.Tensor], int]


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
        backend = backends.load(self.header.device)
        if not isinstance(backend, SavesCode):
            raise self._unfit(f"it was made for {self.header.device}", "a device that runs code")
        self._check_facts(backend)
        weights = read_weights(self.path / WEIGHTS, self.header.weight_bytes)
        runs = {}
        for name, graph in self.header.graphs.items():
            constants = self._constants(graph, weights)
            runs[name] = backend.load_code(self.path / f"{name}.so", constants)
        self._runs = runs
        dtype = getattr(torch, self.header.cache_dtype)
        self._caches = [torch.zeros(shape, dtype=dtype) for shape in self.header.caches]
        self._lock = threading.Lock()
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
        self.length = 0

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Read tokens after those that were read before.

        Args:
            ids: int64 ``[T]``, one or more.

        Returns:
            logits ``[V]`` of the token after them, in the artifact's dtype.

        Raises:
            OptionError: they are no ids of the vocabulary, or the context has no room for them.
        """
        ids = self._checked(ids)
        with self._lock, torch.inference_mode():
            for part in self._parts(ids):
                logits = self._run(part)
        return logits

    def generate(
        self,
        ids: torch.Tensor,
        max_new_tokens: int = 64,
        *,
        choose: Choose = greedy,
        ends: bool = True,
    ) -> torch.Tensor:
        """Continue a text from its beginning.

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
        given = ids.reshape(-1) if ids.dim() == 2 and ids.shape[0] == 1 else ids
        more = list(self.stream(given, max_new_tokens, choose=choose, ends=ends))
        return torch.cat([given.to(torch.int64), torch.tensor(more, dtype=torch.int64)])

    def stream(
        self,
        ids: torch.Tensor,
        max_new_tokens: int = 64,
        *,
        choose: Choose = greedy,
        ends: bool = True,
    ) -> Iterator[int]:
        """The ids that ``generate`` adds, one by one; the arguments are the same."""
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise OptionError(
                f"max_new_tokens={max_new_tokens!r}", "no number of tokens", "1 or more", "pass one"
            )
        self.clear()
        ids = self._checked(ids)
        self._check_room(len(ids) + max_new_tokens - 1)  # the last one is not read
        stops = frozenset(self.header.ends) if ends else frozenset()
        for number in range(max_new_tokens):
            found = choose(self.read(ids))
            yield found
            if found in stops or number + 1 == max_new_tokens:
                return
            ids = torch.tensor([found])

    # **** parts of the above ****

    def _parts(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """The ids in runs that the code of prompts takes, and singles."""
        few, many = self.header.rows
        while len(ids):
            count = min(len(ids), many) if len(ids) >= few else 1
            yield ids[:count]
            ids = ids[count:]

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        name = "step" if len(ids) == 1 else "prompt"
        positions = torch.arange(self.length, self.length + len(ids))
        given = {"ids": ids[None], "positions": positions}
        inputs = [
            given[place] if place in given else self._caches[int(place)]
            for place in self.header.graphs[name].inputs
        ]
        (logits,) = self._runs[name](inputs)
        self.length += len(ids)
        return logits[0, -1]

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        good = isinstance(ids, torch.Tensor) and ids.dim() == 1 and len(ids) > 0
        if not good or ids.is_floating_point() or ids.dtype == torch.bool or ids.is_complex():
            found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else repr(ids)
            raise OptionError("ids", found, "int64 [T] with T of 1 or more", "pass such a tensor")
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= self.header.vocabulary:
            raise OptionError(
                "ids",
                f"{low if low < 0 else high}",
                f"0 to {self.header.vocabulary - 1}, the model's vocabulary",
                "use the artifact's own tokenizer",
            )
        self._check_room(self.length + len(ids))
        return ids.to(device="cpu", dtype=torch.int64)

    def _check_room(self, tokens: int) -> None:
        if tokens > self.header.context:
            raise OptionError(
                "the text",
                f"{tokens} tokens",
                f"{self.header.context} at most, for which {self.path.name} was exported",
                "pass fewer, or export with a larger context",
            )

    def _check_facts(self, backend: SavesCode) -> None:
        import qcompile

        here = {"qcompile": qcompile.__version__, **backend.code_facts()}
        for name, found in {"qcompile": self.header.qcompile, **self.header.code}.items():
            if here.get(name) != found:
                raise self._unfit(f"made for {name} {found}", f"{name} {here.get(name)}, used here")

    def _unfit(self, found: str, needed: str) -> ArtifactError:
        return ArtifactError(str(self.path), found, needed, "export the model again, on this one")

    def _constants(self, graph: Graph, weights: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        absent = [n for n, number in graph.constants.items() if number not in weights]
        if absent:
            raise ArtifactError(
                str(self.path / WEIGHTS),
                f"no tensor for {absent[0]}",
                "the file as it was written",
                "export the model again",
            )
        return {name: weights[number] for name, number in graph.constants.items()}


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


def open_artifact(path: str | Path) -> Artifact:
    """Open what ``qcompile.export`` saved; see ``Artifact``."""
    return Artifact(path)
