"""Checkpoints that other tools wrote, compiled for an Ascend device and run under emulation."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.routing import last_place, recorded_choices, with_choices
from support.zoo import Entry, folder_entry, gemma, relative_l2, zoo_entry
from torch import nn

import qcompile
from qcompile.backends import npu
from qcompile.backends.npu import emulator, emulator_experts
from qcompile.plans import Plan
from qcompile.schemes import open_checkpoint

GGUF = ("gguf-iq4_xs", "gguf-mxfp4-mixed", "gguf-potpourri", "gguf-q2_k", "gguf-q4_k_m")
FOLDERS = (
    "gptq-w2-g32-asym",
    "gptq-w4-chan-asym",
    "gptq-w4-g128-dynamic-mixed",
    "gptq-w4-g128-lmhead",
    "gptq-w4-g128-sym",
    "gptq-w4-g32-asym-actorder",
    "gptq-w8-chan-sym",
    "gptqv2-w2-g64-sym-actorder",
    "awq-gemm-w4-g128",
    "ar-w2g32-asym",
    "ar-w4g128-asym-autoawq",
    "ar-w4g128-sym-autogptq",
    "ct-fp8-dynamic",
    "ct-mxfp4a16",
    "ct-nvfp4a16",
    "ct-w4a16-g128-sym",
)
MOE = ("moe-gguf-q4_k_m", "moe-gptq-w4-g128-sym", "moe-ct-w4a16-g128-sym")
ALL = (*GGUF, *FOLDERS, *MOE)
DEVICE = "npu:910b"
# The largest relative L2 error of logits.
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
# Groups of 8, and floats of 8 bits, are what no product of the device takes.
REASONS = (
    "a multiple of 32 from 32 to K - 1; the group is 8",
    "no edge leads from scaled (float8_e4m3fn",
)
# What a refusal quotes: a rule of the operator, or what the layout or the checkpoint demands.
RULES = (
    "npu_weight_quant_batchmatmul: ",
    "no edge leads from ",
    "codes of ",
    "values of a table need 8 bits",
    "need not be doubled",
    "for groups of a multiple of 16 that divides K",
    "the checkpoint wants activations",
    "columns permuted (act-order)",
)
REFUSED = {"gguf-potpourri": 1, "ct-fp8-dynamic": 28}
# Tokens from which on texts differ in bfloat16, where the plain model's two best logits are less
# than two units of their last place apart.
SPLITS = {"ar-w2g32-asym": 13, "gguf-q2_k": 6}
# 32 tokens take the emulator ten seconds an entry: every third, one of each family, and the two
# that split; QCOMPILE_LARGE=1 compares the texts of all.
TEXTS = ALL if os.environ.get("QCOMPILE_LARGE") else {*ALL[::3], *SPLITS}


@pytest.fixture(autouse=True)
def decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator decodes a weight on its first call alone; rules are asked on every call."""
    known: dict[tuple[object, ...], Any] = {}

    def remembering(decoded: Callable[..., Any]) -> Callable[..., Any]:
        def decode(call: Any, *rest: Any) -> Any:
            key = (call.weight.data_ptr(), call.weight.shape, *rest)
            if key not in known:
                known[key] = call, decoded(call, *rest)
            return known[key][1]

        return decode

    for module in (emulator, emulator_experts):
        monkeypatch.setattr(module, "_decoded", remembering(module._decoded))


def entry_of(name: str) -> Entry:
    if "gguf" in name:
        return zoo_entry(name, "gguf", "moe" if name in MOE else "dense")
    return folder_entry(name, whole=True)


def expected_logits(entry: Entry, length: str) -> torch.Tensor:
    exact, peer = f"exact_logits_{length}", f"peer_logits_{length}"
    references = entry.references
    return torch.from_numpy(references[exact if exact in references.files else peer])


def load(path: Path, verify: bool = True, **options: Any) -> Any:
    options.setdefault("on_unsupported", "dequantize")
    return qcompile.load(path, device=DEVICE, verify=verify, **options)[0]


def errors(model: Any, entry: Entry) -> list[float]:
    """The relative error of the last 16 logits of both sequences."""
    found = {n: model(torch.tensor([entry.sequences[n]])).logits[0, -16:] for n in ("128", "16")}
    return [relative_l2(logits, expected_logits(entry, n)) for n, logits in found.items()]


def plain_model(path: Path, dtype: torch.dtype) -> Any:
    """The Hugging Face model on the decoded weights, in a dtype, with nothing of the compiler."""
    checkpoint: Any = open_checkpoint(path)
    model = checkpoint.build(dtype)[0]
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    for name, weight in checkpoint.catalogue(shapes).items():
        owner, _, key = name.rpartition(".")
        values = weight.dequantize().to(dtype).clone()
        setattr(model.get_submodule(owner), key, nn.Parameter(values, requires_grad=False))
    return model


def check_reasons(plan: Plan, refused: int) -> None:
    """Every site has its verdicts, and every refusal a reason with a number or a fact."""
    assert sum(entry.dequantize for entry in plan.entries) == refused
    for entry in plan.entries:
        asked = [kernel.name for kernel in npu.KERNELS if kernel.kind == entry.site.kind]
        assert [verdict.kernel for verdict in entry.verdicts] == asked
        said = plan.explain(entry.site.name)
        for verdict in entry.verdicts:
            assert verdict.text in said
            taken = verdict.cost is not None
            assert taken or any(rule in verdict.text for rule in RULES), verdict.text
        if entry.dequantize:
            assert any(reason in said for reason in REASONS), said
        else:
            assert entry.kernel is not None
            assert f"[x] {entry.kernel.name}" in said


@pytest.mark.parametrize("name", ALL)
def test_logits_on_packed_operands_without_rounding(name: str) -> None:
    """What packing for float16 loses, seen alone."""
    entry = entry_of(name)
    model = load(entry.path, emulate="float32")
    assert max(errors(model, entry)) < 1e-3
    assert "in float32 throughout" in str(model.qcompile.plan)
    check_reasons(model.qcompile.plan, REFUSED.get(name, 0))


@pytest.mark.parametrize("name", ALL)
def test_logits_in_float16(name: str) -> None:
    entry = entry_of(name)
    model = load(entry.path, dtype=torch.float16, emulate=True)
    assert max(errors(model, entry)) < BOUNDS[torch.float16]


@pytest.mark.parametrize("name", ALL)
def test_logits_and_text_in_bfloat16(name: str) -> None:
    """The default dtype: logits as the exact ones, text as the plain model's in bfloat16."""
    entry = entry_of(name)
    with recorded_choices() as choices:
        model = load(entry.path, verify=False, emulate=True)
        assert model.dtype == torch.bfloat16
        found = chosen_errors(model, entry, choices) if name in MOE else errors(model, entry)
    assert max(found) < BOUNDS[torch.bfloat16]
    if name in TEXTS:
        check_text(model, entry, SPLITS.get(name))


def chosen_errors(model: Any, entry: Entry, choices: list[torch.Tensor]) -> list[float]:
    """As ``errors``, against the exact model with the same experts chosen.

    Other choices than the exact model's are only allowed between experts that bfloat16 does not
    tell apart; see ``support.routing``.
    """
    exact, found = plain_model(entry.path, torch.float32), []
    for length in ("128", "16"):
        ids = torch.tensor([entry.sequences[length]])
        choices.clear()
        logits = model(ids).logits[0, -16:]
        expected, gaps = with_choices(exact, ids, choices)
        assert max(gaps, default=0.0) < 1.0
        assert len(gaps) < 0.01 * len(choices) * ids.numel() + 1
        if not gaps:
            stored = expected_logits(entry, length)
            assert relative_l2(expected[0, -16:], stored) < 1e-3
        found.append(relative_l2(logits, expected[0, -16:]))
    return found


def check_text(model: Any, entry: Entry, split: int | None, tokens: int = 32) -> None:
    """Greedy text equals the plain model's in the same dtype, token by token.

    Where a split is known, the token there must be a near tie of the plain model's, and the text
    equal again from that model's own token on.
    """
    ids, plain = torch.tensor([entry.sequences["16"]]), plain_model(entry.path, model.dtype)
    expected = generated(plain, ids, tokens)
    found = generated(model, ids, tokens).sequences[0, ids.shape[1] :]
    text = expected.sequences[0, ids.shape[1] :]
    assert len(text) == tokens
    if torch.equal(found, text):
        assert split is None
        return
    place = int((found != text).nonzero()[0])
    logits = expected.logits[place][0].float()
    gap = float(logits[text[place]] - logits[found[place]]) / last_place(logits.max())
    assert place == split, f"token {place} is another: the plain model's are {gap} units apart"
    assert gap < 2
    before = expected.sequences[:, : ids.shape[1] + split + 1]
    rest = generated(model, before, tokens - split - 1).sequences
    assert torch.equal(rest, expected.sequences)


def generated(model: Any, ids: torch.Tensor, tokens: int) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("name", ["gguf-q4_k_m", "moe-gguf-q4_k_m"])
def test_text_in_float16(name: str) -> None:
    entry = entry_of(name)
    check_text(load(entry.path, False, dtype=torch.float16, emulate=True), entry, None)


def test_requantized_weights_are_measured_and_verified() -> None:
    entry = entry_of("ct-fp8-dynamic")
    plan = qcompile.plan(entry.path, device=DEVICE, on_unsupported="requantize")
    assert "28 sites requantized to 8 bits: measured when packed" in str(plan)
    model = load(entry.path, dtype=torch.float16, emulate=True, on_unsupported="requantize")
    packed = model.qcompile.plan
    measured = [e.error for e in packed.entries if e.requantized]
    assert len(measured) == 28
    assert all(error is not None and 1e-3 < error < 1e-2 for error in measured)
    assert f"worst relative L2 error {max(e or 0.0 for e in measured):.1e}" in str(packed)
    assert not any(e.dequantize for e in packed.entries)
    assert max(errors(model, entry)) < 2e-2


def test_the_demo_model_stays_small() -> None:
    plan = qcompile.plan(gemma(), device=DEVICE)
    assert not plan.refused
    assert plan.bytes_after <= 0.6 * plan.bytes_as_halves
    assert f"{plan.bytes_after / plan.bytes_as_halves:.0%} of 16-bit floats" in str(plan)
    assert "in 5 runs of outputs" in plan.explain("lm_head")
