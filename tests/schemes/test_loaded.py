"""Models that another library has already loaded from a quantized checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompile
from qcompile.errors import OptionError, SchemeError
from qcompile.schemes.words import pack_words, unpack_words

N, K, GROUP = 16, 64, 32
# Bits 0, 4, ... 28 of an AWQ word hold these rows.
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


class Packed(nn.Module):
    """A linear of another library: it holds packed tensors and cannot be traced."""

    def __init__(self, buffers: dict[str, torch.Tensor], zeros: int | None, **told: Any) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)
        if zeros is not None:
            self.qzero_format = lambda: zeros
        for name, value in told.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this library's own kernel")


def parts(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=generator).to(torch.uint8)
    zeros = torch.randint(1, 16, (N, K // GROUP), generator=generator).to(torch.uint8)
    scales = torch.rand(N, K // GROUP, generator=generator).half() + 0.5
    spread = torch.arange(K) // GROUP
    exact = scales.float()[:, spread] * (codes.float() - zeros.float()[:, spread])
    return codes, zeros, scales, exact


def gptq_module(zeros_minus: int, told: int | None, **more: Any) -> tuple[Packed, torch.Tensor]:
    codes, zeros, scales, exact = parts()
    buffers = {
        "qweight": pack_words(codes.t().contiguous(), 4, 0),
        "qzeros": pack_words((zeros - zeros_minus).t().contiguous(), 4, 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(K, dtype=torch.int32) // GROUP,
        "bias": torch.arange(N).half(),
    }
    return Packed(buffers, told, **more), exact


def awq_module() -> tuple[Packed, torch.Tensor]:
    codes, zeros, scales, exact = parts(1)

    def words(rows_last: torch.Tensor) -> torch.Tensor:
        ordered = rows_last.unflatten(1, (-1, 8))[:, :, list(AWQ_ROWS)].flatten(1)
        return pack_words(ordered.contiguous(), 4, 1)

    buffers = {
        "qweight": words(codes.t()),
        "qzeros": words(zeros.t()),
        "scales": scales.t().contiguous(),
    }
    return Packed(buffers, None, w_bit=4, group_size=GROUP), exact


def model_of(module: nn.Module, settings: dict[str, Any] | None = None) -> nn.Sequential:
    model = nn.Sequential(module, nn.LayerNorm(N))
    if settings is not None:
        model.config = type("Config", (), {"quantization_config": settings})()
    return model


SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}


@pytest.mark.parametrize("scheme", ["auto", "gptq"])
@pytest.mark.parametrize(("minus", "told"), [(1, None), (1, 1), (0, 2)])
def test_gptq_modules(minus: int, told: int | None, scheme: str) -> None:
    module, exact = gptq_module(minus, told)
    model = model_of(module, SETTINGS)
    norm = model[1]
    compiled: Any = qcompile.optimize(model, scheme=scheme, emitter="eager", verify=True)
    x = torch.randn(3, K)
    expected = norm(x @ exact.T + torch.arange(N))
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert [entry.site.name for entry in compiled.qcompile.plan.entries] == ["0"]


def test_awq_modules_that_describe_themselves() -> None:
    module, exact = awq_module()
    model = model_of(module)
    norm = model[1]
    compiled = qcompile.optimize(model, emitter="eager")
    x = torch.randn(3, K)
    torch.testing.assert_close(compiled(x), norm(x @ exact.T), rtol=1e-5, atol=1e-5)


def test_a_refused_model_is_as_it_was() -> None:
    module, _ = gptq_module(1, None)
    model = model_of(module, SETTINGS)
    with pytest.raises(OptionError, match="emulate"):
        qcompile.optimize(model, emulate=True)
    assert model[0] is module


def test_rearranged_tensors_are_refused() -> None:
    module, _ = gptq_module(1, None)
    module.qweight = module.get_buffer("qweight").reshape(K // 16, -1)
    with pytest.raises(SchemeError, match="qweight"):
        qcompile.optimize(model_of(module, SETTINGS))


def test_another_scheme_and_options_of_quantizers_are_refused() -> None:
    module, _ = gptq_module(1, None)
    for arguments in ({"scheme": "awq"}, {"scheme": "gguf"}, {"scheme": "gptq", "bits": 4}):
        with pytest.raises(OptionError):
            qcompile.optimize(model_of(module, SETTINGS), **arguments)


def test_modules_without_settings_are_refused() -> None:
    module, _ = gptq_module(1, None)
    with pytest.raises(SchemeError, match="without settings"):
        qcompile.optimize(model_of(module))


def test_the_order_of_rows_in_a_word() -> None:
    rows = torch.arange(8, dtype=torch.uint8)[None]
    word = pack_words(rows[:, list(AWQ_ROWS)].contiguous(), 4, 1)
    assert int(word) == 0x75316420
    assert torch.equal(unpack_words(word, 4, 1, 8)[0], rows[0, list(AWQ_ROWS)])
