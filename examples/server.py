"""Serve a quantized checkpoint over HTTP, with one thread a request and one model for all.

    python examples/server.py model.gguf --port 8000
    curl localhost:8000 -d '{"prompt": "The sea is", "tokens": 20}'
    curl -N localhost:8000 -d '{"prompt": "The sea is", "tokens": 20, "stream": true}'

Threads take turns, token by token; the same holds for a FastAPI app whose handlers are plain
functions, which it runs in threads. The server compiles before it listens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import transformers

import qcompile


class Texts:
    """A model that continues texts, called from any thread."""

    def __init__(self, checkpoint: str, emitter: str | None = None) -> None:
        self.model: Any
        self.model, self.tokenizer = qcompile.load(checkpoint, emitter=emitter)
        "".join(self.pieces("Once", 3))  # compiles

    def pieces(self, prompt: str, tokens: int) -> Iterator[str]:
        """The continuation, piece by piece as it comes."""
        given = self.tokenizer(prompt, return_tensors="pt")
        if not given.input_ids.numel():
            raise ValueError("the prompt is empty")
        text = transformers.TextIteratorStreamer(
            self.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        options = {**given, "max_new_tokens": tokens, "do_sample": False, "streamer": text}
        options.pop("token_type_ids", None)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self.model.generate(**options)
            except BaseException as failure:
                failures.append(failure)
                text.end()  # or the reader would wait for ever

        thread = threading.Thread(target=work)
        thread.start()
        yield from text
        thread.join()
        if failures:
            raise failures[0]


def handler(texts: Texts) -> type[BaseHTTPRequestHandler]:
    """The class that answers requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """``{"prompt": ..., "tokens": ..., "stream": ...}``."""
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pieces = texts.pieces(str(asked["prompt"]), int(asked.get("tokens", 32)))
                first = next(pieces, "")
            except (ValueError, KeyError, TypeError) as error:
                self.begin(400, "application/json")
                self.wfile.write(json.dumps({"error": str(error)}).encode())
                return
            if asked.get("stream"):
                self.begin(200, "text/plain; charset=utf-8")
                for piece in itertools.chain([first], pieces):
                    self.wfile.write(piece.encode())
                    self.wfile.flush()
                return
            self.begin(200, "application/json")
            self.wfile.write(json.dumps({"text": "".join([first, *pieces])}).encode())

        def begin(self, code: int, kind: str) -> None:
            """The head of an answer; the end of the connection is the end of the text."""
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Be quiet."""

    return Handler


def main() -> None:
    """Load, compile, serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve a quantized checkpoint over HTTP.")
    parser.add_argument("checkpoint", help="a GGUF file, or the folder of a checkpoint")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--emitter", choices=("inductor", "eager"), help="eager compiles nothing")
    arguments = parser.parse_args()
    texts = Texts(arguments.checkpoint, arguments.emitter)
    with ThreadingHTTPServer(("127.0.0.1", arguments.port), handler(texts)) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
