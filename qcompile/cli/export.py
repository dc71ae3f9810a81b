"""``qcompile export``: compile a checkpoint's language model ahead of time and save it.

Comes in: a checkpoint and a place. Goes out: the folder of an artifact; how it went on stderr.
Always holds: every step is named before it begins, with the seconds since the start.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import qcompile
from qcompile.cli.generate import Bar, dtype_of
from qcompile.cli.ready import peak_memory
from qcompile.cli.screen import say


def run_export(arguments: argparse.Namespace) -> int:
    """Export a checkpoint's model."""
    begin = time.perf_counter()

    def step(what: str) -> None:
        say(f"{time.perf_counter() - begin:6.1f} s  {what}")

    artifact = qcompile.export(
        arguments.file,
        arguments.out,
        arguments.device,
        dtype_of(arguments.dtype),
        context=arguments.context,
        scheme=arguments.scheme,
        on_unsupported=arguments.on_unsupported,
        numerics=arguments.numerics,
        overwrite=arguments.overwrite,
        progress=Bar(),
        step=step,
    )
    seconds, header = time.perf_counter() - begin, artifact.header
    stored = sum(file.stat().st_size for file in Path(artifact.path).iterdir())
    if arguments.json:
        facts = {key: value for key, value in header.as_json().items() if key != "graphs"}
        print(
            json.dumps(
                {
                    "path": str(artifact.path),
                    "seconds": seconds,
                    "bytes": stored,
                    "peak_bytes": peak_memory(),
                    **facts,
                },
                indent=2,
            )
        )
        return 0
    say(f"{seconds:6.1f} s  done")
    print(
        f"{artifact.path}\n"
        f"  {header.scheme}, {header.dtype}, numerics {header.numerics}, {header.target},"
        f" context {header.context}\n"
        f"  {stored / 2**20:.0f} MiB, of them weights {header.weight_bytes / 2**20:.0f} MiB\n"
        f"  logits differ from the traced model's by at most {header.error:.1e}, relative L2\n"
        f"run it: qcompile generate {arguments.out} --prompt TEXT"
    )
    return 0
