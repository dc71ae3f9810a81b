"""The real package over the pretended device, ready for tests; elsewhere they are skipped.

Comes in: the environment that ``.ci/npu`` makes. Goes out: the package with the device's operators
installed, and a log that is empty at the start of every test.
Always holds: importing this without that environment skips the module that imports it.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if os.environ.get("QC_FAKE_NPU") != "1" or importlib.util.find_spec("torch_npu") is None:
    pytest.skip("needs torch_npu over a pretended device: run .ci/npu", allow_module_level=True)

from npu_package.device import LOG, install
from npu_package.handlers import handlers
from qcompile import backends
from qcompile.backends.npu.emulation import Mode

install(handlers(Mode("910b")))
backends.load("npu").prepare()
OPS = torch.ops.npu


@pytest.fixture(autouse=True)
def log() -> None:
    """Nothing is carried from test to test."""
    LOG.calls.clear()
    LOG.error = None
    torch._dynamo.reset()


def away(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device."""
    return tensor.to("npu")
