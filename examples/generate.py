"""Continue a prompt with a quantized checkpoint, token by token as they come.

python examples/generate.py model.gguf "The capital of France is"
python examples/generate.py gptq-folder "def main():" --tokens 64

The first token compiles the model, which takes most of the time.
"""

from __future__ import annotations

import argparse

import transformers

import qcompile


def main() -> None:
    """Load, compile on the first token, stream."""
    parser = argparse.ArgumentParser(description="Continue a prompt with a quantized checkpoint.")
    parser.add_argument("checkpoint", help="a GGUF file, or the folder of a checkpoint")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--emitter", choices=("inductor", "eager"), help="eager compiles nothing")
    arguments = parser.parse_args()

    model, tokenizer = qcompile.load(arguments.checkpoint, emitter=arguments.emitter)
    inputs = tokenizer(arguments.prompt, return_tensors="pt")
    model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=arguments.tokens,
        do_sample=False,
        streamer=transformers.TextStreamer(tokenizer),
    )


if __name__ == "__main__":
    main()
