"""Quantize a float model by GPTQ and write it as a checkpoint that other tools read too.

    python examples/quantize.py float-folder quantized-folder --text some-text.txt

The folder is that of a Hugging Face model in floats. Its weights are given up one by one, so the
peak is the float model and a layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

import qcompile


def main() -> None:
    """Calibrate on a text, quantize, verify, save, load again."""
    parser = argparse.ArgumentParser(description="Quantize a float model by GPTQ.")
    parser.add_argument("source", help="the folder of a model in floats")
    parser.add_argument("dest", help="the folder to write")
    parser.add_argument("--text", required=True, help="text like what the model will read")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a calibration sequence")
    arguments = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.source)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.source, dtype=torch.float32)
    text = Path(arguments.text).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text).input_ids)
    sequences = [run[None] for run in ids.split(arguments.tokens) if len(run) == arguments.tokens]

    qcompile.optimize(
        model,
        scheme="gptq",
        bits=arguments.bits,
        group_size=arguments.group_size,
        calibration=sequences[:64],
        verify=True,
        progress="bar",
    )
    print(model.qcompile.plan)
    qcompile.save_checkpoint(model, arguments.dest, tokenizer=tokenizer)

    again, _ = qcompile.load(arguments.dest, emitter="eager")
    size = sum(file.stat().st_size for file in Path(arguments.dest).iterdir())
    print(f"wrote {arguments.dest}: {size:,} bytes, {len(again.qcompile.plan.entries)} sites")


if __name__ == "__main__":
    main()
