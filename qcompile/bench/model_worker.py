"""One contender in a process of its own: ours, transformers, torchao, or the float32 reference.

Comes in: JSON lines on stdin: ``{"do": "load", ...}``, then ``run``, ``logits`` and ``memory`` with
the arguments of the methods here and of ``HfModel``. Goes out: one JSON line for each.
Always holds: a model is loaded once; only ``qcompile`` runs kernels, passes or packed layouts of
this package, the others start from decoded weights.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, cast

from qcompile.bench.workers.hf_model import HfModel
from qcompile.bench.workers.serve import Refused, memory, seconds_since_start, serve

if TYPE_CHECKING:
    from qcompile.session import Session

KINDS = ("qcompile", "transformers", "torchao-int4", "torchao-int8", "reference")


class Worker(HfModel):
    """A Hugging Face model, compiled by qcompile or with decoded weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers  # noqa: F401

        self.kind, self.imported = kind, seconds_since_start()

    def load(
        self, file: str, device: str, dtype: str, numerics: str, **unused: object
    ) -> dict[str, Any]:
        """Load the file."""
        from qcompile.bench.machine import versions
        from qcompile.prepare import backend_of

        baseline = memory("VmRSS")
        if self.kind == "qcompile":
            backend_of(device)[1].prepare()  # builds the kernels where nobody has done so yet
        begin = time.perf_counter()
        if self.kind == "qcompile":
            model, tokenizer, weights = self._own(file, device, dtype, numerics)
        else:
            model, tokenizer, weights = self._decoded(file)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "import_seconds": self.imported,
            "baseline": baseline,
            "weights": weights,
            "versions": versions("transformers", "torchao"),
            **self.hold(model, tokenizer),
        }

    def _own(self, file: str, device: str, dtype: str, numerics: str) -> tuple[Any, Any, int]:
        import qcompile
        from qcompile.cli.generate import dtype_of
        from qcompile.kernel import Numerics

        asked = cast("Numerics", numerics)  # load refuses any other
        model, tokenizer = qcompile.load(file, device, dtype_of(dtype), numerics=asked)
        session = cast("Session", model.qcompile)
        # The first graph would do this, and peers do it when they load.
        session.pack_all(session.plan.entries)
        floats = sum(weight.nbytes for weight in session.plan.floats)
        return model, tokenizer, session.plan.bytes_after + floats

    def _decoded(self, file: str) -> tuple[Any, Any, int]:
        import torch

        from qcompile.bench.models import decoded_model
        from qcompile.schemes import open_checkpoint

        wanted = torch.float32 if self.kind == "reference" else torch.bfloat16
        model, tokenizer = decoded_model(open_checkpoint(file), wanted)
        if self.kind.startswith("torchao"):
            weights = _by_torchao(model, self.kind.partition("-")[2])
        else:
            weights = sum(p.nbytes for p in model.parameters())
        if self.kind != "reference":
            self.plain = model.forward
            model.forward = torch.compile(model.forward)
        return model, tokenizer, weights


def _by_torchao(model: Any, kind: str) -> int:
    """Quantize the linears as torchao does on a CPU; bytes of all parameters afterwards."""
    from torch import nn
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from qcompile.bench.workers.torch_weights import nbytes

    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if kind == "int4":
        widths = {m.in_features for m in linears}
        group = next((g for g in (128, 64, 32) if all(w % g == 0 for w in widths)), None)
        if group is None:
            raise Refused(f"torchao has no groups for rows of {sorted(widths)} columns")
        config: Any = PrototypeInt4WeightOnlyConfig(group_size=group)
    else:
        config = Int8WeightOnlyConfig()
    quantize_(model, config)
    return sum(nbytes(parameter.data) for parameter in model.parameters())


def main(kind: str) -> None:
    """Serve one of the kinds."""
    serve(Worker(kind))


if __name__ == "__main__":
    main(sys.argv[1])
