"""A module of one's own on quantized weights, through ``torch.compile``.

    python examples/own_module.py

A GGUF file whose tensors have the names of a module's parameters is a checkpoint of that module.
This example writes one with gguf-py, 4 bits in blocks of 32, and never holds the floats again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import torch
from torch import nn

import qcompile


class Classifier(nn.Module):
    """Any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.inner = nn.Linear(256, 1024)
        self.outer = nn.Linear(1024, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, 10]`` of ids ``[B, T]``."""
        hidden = self.embed(ids).mean(1)
        return self.outer(torch.relu(self.inner(hidden)))


def write(path: Path, module: nn.Module) -> None:
    """Write a module's matrices as Q4_0, everything else as float32."""
    writer = gguf.GGUFWriter(str(path), "classifier")
    for name, parameter in module.named_parameters():
        kinds = gguf.GGMLQuantizationType
        kind = kinds.Q4_0 if parameter.dim() == 2 else kinds.F32
        writer.add_tensor(name, gguf.quantize(parameter.detach().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write a checkpoint, plan it, run it, compare with the decoded weights."""
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (4, 16))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "classifier.gguf")
        write(path, Classifier())

        model = Classifier()  # other weights: those of the file count
        print(qcompile.plan(model, checkpoint=path))
        compiled = torch.compile(
            model, backend="qcompile", options={"checkpoint": str(path), "emitter": "eager"}
        )
        with torch.no_grad():
            found = compiled(ids)

        plain, checkpoint = Classifier(), qcompile.open(path)
        plain.load_state_dict({n: checkpoint.dequantize(n) for n in checkpoint.tensors})
        difference = (found - plain(ids)).norm() / plain(ids).norm()
        print(f"relative L2 difference from the decoded weights: {difference:.1e}")


if __name__ == "__main__":
    main()
