"""``qcompile generate --chat``: a conversation in the words of a checkpoint's own template.

Comes in: a checkpoint with a chat template, one question or lines of them. Goes out: the answers on
stdout, everything else on stderr.
Always holds: the template is rendered by transformers, in a sandbox; every answer is made from the
whole conversation, and one that no longer fits the model is refused rather than cut.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from qcompile.cli.generate import as_json, load, stream
from qcompile.cli.ready import Ready, Report
from qcompile.cli.screen import say
from qcompile.errors import OptionError, QCompileError, SchemeError

Messages = list[dict[str, str]]


def chat(arguments: argparse.Namespace) -> None:
    """Answer ``--prompt``, or one line of stdin after another.

    Raises:
        SchemeError: the checkpoint has no template, or its template refuses the messages.
        OptionError: nothing was asked, or the conversation is too long for the model.
    """
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise OptionError("--prompt", "empty", "a question", "write one, or leave --prompt out")
    ready = load(arguments.file, arguments)
    if not ready.tokenizer.chat_template:
        raise SchemeError(
            str(arguments.file),
            "no chat template: its model was not made for conversations, or it was left out",
            "tokenizer.chat_template in a GGUF file, chat_template.jinja or tokenizer_config.json",
            "leave --chat out to continue a text, or use the checkpoint of a model that chats",
        )
    said: Messages = []
    if arguments.system is not None:
        said.append({"role": "system", "content": arguments.system})
    asked = questions() if arguments.prompt is None else iter([arguments.prompt])
    reports = [_answer(ready, said, question, arguments) for question in asked]
    if not reports:
        raise OptionError("stdin", "no question", "a line of text", "write one, or use --prompt")
    if arguments.prompt is not None:
        say(reports[0].text)
        answer = said[-1]["content"]
        facts = {"prompt": arguments.prompt, "system": arguments.system, "text": answer}
        if arguments.json:
            print(as_json(arguments.file, ready, facts, reports[0]))
    elif arguments.json:
        turns = [report.facts for report in reports]
        print(json.dumps({"file": arguments.file, "messages": said, "turns": turns}, indent=2))


def _answer(ready: Ready, said: Messages, question: str, arguments: argparse.Namespace) -> Report:
    """Answer one question and add both to the conversation."""
    first = not any(message["role"] == "user" for message in said)
    said.append({"role": "user", "content": question})
    ids = _tokens(ready.tokenizer, said, str(arguments.file))
    _check_length(ready.limit, ids.shape[1] + arguments.tokens)
    compiled = ready.compile(ids) if first else 0.0
    clock, made = stream(ready, ids, arguments)
    said.append({"role": "assistant", "content": ready.text(made, ids)})
    return ready.report(clock, ids, compiled)


def questions() -> Iterator[str]:
    """The lines of stdin that say something, with a prompt where somebody types them."""
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    if not typed:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited once it is imported
    say("an empty line is passed over; end with Ctrl-D")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def _tokens(tokenizer: Any, said: Messages, file: str) -> torch.Tensor:
    """The conversation's ids up to where the model answers, int64 ``[1, T]``."""
    try:
        encoded = tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    except QCompileError:
        raise
    except Exception as error:  # whatever a template does
        roles = ", ".join(message["role"] for message in said)
        raise SchemeError(
            f"{file}: chat template",
            f"it cannot be rendered: {str(error).splitlines()[0] if str(error) else error!r}",
            f"a template that takes messages of {roles}",
            "leave --system out: some models know no such role; or correct the template",
        ) from error
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def _check_length(limit: int | None, tokens: int) -> None:
    if limit is not None and tokens > limit:
        raise OptionError(
            "the conversation",
            f"{tokens} tokens with the answer",
            f"{limit} at most, as many as the model has positions for",
            "begin a new one, or ask for fewer --tokens",
        )
