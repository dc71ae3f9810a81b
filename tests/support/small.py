"""Small checkpoints of plain modules, written with gguf-py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn

TYPES = gguf.GGMLQuantizationType


def write_module(path: Path, module: nn.Module, types: Mapping[str, str], default: str) -> Path:
    """Write a module's parameters under their own names.

    Args:
        path: the file to write.
        module: vectors are written as F32, matrices as their type.
        types: ggml type by parameter name.
        default: type of the matrices that ``types`` does not name.
    """
    writer = gguf.GGUFWriter(str(path), "plain")
    for name, parameter in module.named_parameters():
        values = parameter.detach().float().numpy()
        kind = TYPES[types.get(name, default)] if values.ndim > 1 else TYPES.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def exact_copy(path: Path, module: nn.Module) -> nn.Module:
    """Give a module the float32 values that gguf-py decodes from a file."""
    values = {}
    for tensor in gguf.GGUFReader(str(path)).tensors:
        decoded = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = tuple(int(extent) for extent in reversed(tensor.shape))
        values[tensor.name] = torch.from_numpy(decoded.reshape(shape).copy())
    module.load_state_dict(values, strict=False)
    return module.eval().requires_grad_(False)
