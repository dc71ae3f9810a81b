"""Compile a checkpoint's language model ahead of time and save it.

Comes in: a checkpoint. Goes out: the folder of an artifact, see ``artifact_header``.
Always holds: what was saved is opened again and answers as the model does before the folder takes
its place; a call that fails leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcompile.api import load
from qcompile.artifact import Artifact, open_artifact
from qcompile.artifact_header import FORMAT, HEADER, WEIGHTS, Graph, Header, digest_of
from qcompile.artifact_weights import Tensors
from qcompile.backends import SavesCode
from qcompile.errors import OptionError, VerifyError
from qcompile.kernel import Numerics
from qcompile.memory import release_freed
from qcompile.passes.select import Policy
from qcompile.prepare import backend_of
from qcompile.progress import Reporting
from qcompile.schemes.gguf.shards import shard_paths
from qcompile.session import Session, no_progress
from qcompile.stepping import ROWS, Say, check_rows, example, trace_graphs
from qcompile.writers.folder import check_place, new_folder, write_json

# Relative L2 of logits, saved against traced: the median of positions, and the worst. Both round,
# at other places, and a rounding changes the next ones. A wrong graph is off by one and more. Of
# random tokens, whose logits are flat, bfloat16 and 8 bits of an activation alone put Gemma 3 270M
# 0.06 from exact numbers by the median of 48 positions, and 0.4 at the worst.
_CLOSE = {torch.float32: (0.02, 0.02), torch.bfloat16: (0.2, 0.6), torch.float16: (0.05, 0.1)}
_CLOSE_FAST = (0.2, 0.6)


def _say_nothing(what: str) -> None:
    """Report nothing."""


def export(
    path: str | Path,
    out: str | Path,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    context: int = 4096,
    scheme: str = "auto",
    on_unsupported: Policy = "error",
    numerics: Numerics = "exact",
    overwrite: bool = False,
    progress: Reporting = no_progress,
    step: Say = _say_nothing,
) -> Artifact:
    """Compile a checkpoint's language model and save it, to run later without compiling.

    An artifact holds the packed weights and machine code for prompts and for single tokens. It
    runs one text at a time on the release of qcompile and torch, and on the kind of processor,
    that it was made with.

    Args:
        path: a GGUF file or a checkpoint folder.
        out: the folder to make.
        device: where it will run; ``cpu`` alone so far.
        dtype, scheme, on_unsupported, numerics, progress: as for ``qcompile.load``.
        context: tokens that a text may have, prompt and answer together; every layer keeps keys
            and values for as many.
        overwrite: replace a folder that is not empty.
        step: called with the name of each part before it begins.

    Returns:
        the artifact, opened.

    Raises:
        OptionError: an argument means nothing, or the backend cannot save code.
        SchemeError, PlanError: as ``qcompile.load``.
        CaptureError: the model is none of a text, or keeps more than keys and values.
        LowerError: it could not be compiled.
        VerifyError: what was saved computes something else than the model.
    """
    backend = backend_of(device)[1]
    if not isinstance(backend, SavesCode):
        raise OptionError(
            f"device={device!r}", "its code cannot be saved", "cpu", "use qcompile.load"
        )
    _check_context(context)
    _check_places(Path(path), out, overwrite)
    step("loading and packing the weights")
    model, tokenizer = load(
        path,
        device,
        dtype,
        scheme=scheme,
        on_unsupported=on_unsupported,
        emitter="eager",
        numerics=numerics,
        progress=progress,
    )
    with new_folder(out, overwrite) as folder:
        checks = _write(model, tokenizer, folder, context, backend, step)
        # Before all is loaded once more: both hold the weights.
        del model, tokenizer
        release_freed()
        step("checking what was written")
        _check(folder, checks)
    return open_artifact(out)


def _check_places(source: Path, out: str | Path, overwrite: bool) -> None:
    """Raise OptionError now for what ``new_folder`` refuses, and for the checkpoint's own place."""
    given, place = source.expanduser(), Path(out).expanduser().resolve()
    check_place(place, overwrite)
    # A link lies in one folder, and leads to another.
    if any(place in (path, *path.parents) for path in (given.absolute(), given.resolve())):
        raise OptionError(
            str(place),
            "it is or holds the checkpoint, and would be replaced",
            "a folder of its own",
            "name another place",
        )


def _check_context(context: object) -> None:
    if not isinstance(context, int) or isinstance(context, bool) or context < ROWS[1]:
        raise OptionError(
            f"context={context!r}",
            "no number of tokens, or too few",
            f"{ROWS[1]} or more",
            "pass the tokens that a text may have",
        )


@dataclass(frozen=True)
class _Checks:
    """What the model answers, before it goes.

    Attributes:
        model: its name.
        ids, logits: ``[T]`` and ``[T, V]``.
        bounds: median and largest difference that count as none.
        header: of the artifact, but for the error.
    """

    model: str
    ids: torch.Tensor
    logits: torch.Tensor
    bounds: tuple[float, float]
    header: Header


def _write(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    context: int,
    backend: SavesCode,
    step: Say,
) -> _Checks:
    """Write everything."""
    session: Session = model.qcompile  # type: ignore[assignment]
    step("running the model once")
    ids, expected, caches = example(model, context)
    traced = trace_graphs(model, session, ids, caches, step)
    graphs, tensors = {}, Tensors()
    for name, graph in traced.items():
        step(f"compiling {name}, {len(traced)} graphs in all")
        numbers = {n: tensors.number(value) for n, value in graph.constants.items()}
        backend.save_code(graph.module, graph.inputs, folder / f"{name}.so")
        check_rows(graph, name)
        files = {path.name: digest_of(path) for path in sorted(folder.glob(f"{name}.*"))}
        graphs[name] = Graph(graph.names, numbers, files)
    step("writing the weights")
    header = _header(model, session, backend, context, caches, expected.shape[-1])
    header = dataclasses.replace(header, graphs=graphs, weight_bytes=tensors.nbytes)
    tensors.write(folder / WEIGHTS, header.mark)
    plan = dataclasses.replace(session.plan, emitter="ahead of time")
    (folder / "plan.txt").write_text(plan.text() + "\n", encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_json(folder / HEADER, header.as_json())
    bounds = _CLOSE_FAST if session.plan.numerics == "fast" else _CLOSE[session.dtype]
    return _Checks(type(model).__name__, ids, expected, bounds, header)


def _check(folder: Path, checks: _Checks) -> None:
    """Hold what was written against the model, and note how close it is."""
    errors = _differences(open_artifact(folder), checks.ids, checks.logits)
    usual, worst = float(errors.median()), float(errors.max())  # NaN where one of them is
    if not (usual < checks.bounds[0] and worst < checks.bounds[1]):
        raise VerifyError(
            checks.model,
            f"saved and traced logits differ by {usual:.1e}, at the worst by {worst:.1e}"
            ", relative L2",
            "less than {:g} and {:g}".format(*checks.bounds),
            "use qcompile.load for this model, and report this",
        )
    write_json(folder / HEADER, dataclasses.replace(checks.header, error=worst).as_json())


def _header(
    model: Any,
    session: Session,
    backend: SavesCode,
    context: int,
    caches: Sequence[torch.Tensor],
    vocabulary: int,
) -> Header:
    """Everything that is known before something is written."""
    import qcompile

    plan = session.plan
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return Header(
        format=FORMAT,
        mark=uuid.uuid4().hex,
        qcompile=qcompile.__version__,
        device=plan.target.kind,
        target=str(plan.target),
        code=backend.code_facts(),
        scheme=plan.scheme,
        dtype=_name(session.dtype),
        numerics=plan.numerics,
        sources=_digests(Path(plan.source)),
        context=context,
        rows=ROWS,
        vocabulary=vocabulary,
        ends=tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,),
        caches=tuple(tuple(cache.shape) for cache in caches),
        cache_dtype=_name(caches[0].dtype),
        weight_bytes=0,
        graphs={},
        error=float("inf"),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digests(source: Path) -> dict[str, str]:
    """SHA-256 of a file, of all parts of a split one, or of the files of a folder, by name."""
    files = sorted(source.iterdir()) if source.is_dir() else shard_paths(source)
    return {path.name: digest_of(path) for path in files if path.is_file()}


def _differences(artifact: Artifact, ids: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative L2 differences; prompts at the beginning and after it, then single tokens."""
    half = len(ids) // 2
    ends = (ROWS[0], half, *range(half + 1, len(ids) + 1))
    errors = []
    for begin, end in zip((0, *ends), ends, strict=False):
        found = artifact.read(ids[begin:end]).float()
        errors.append((found - expected[end - 1]).norm() / expected[end - 1].norm())
    return torch.stack(errors)
