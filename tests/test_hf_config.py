"""``from_pretrained(..., quantization_config=qcompile.HFConfig(...))``: what it loads, what not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import BOUND
from support.llama import IDS, exact_llama, llama_config, llama_layers, write_llama
from support.pack_awq import Awq, awq
from support.pack_compressed import Compressed, compressed_config, integer_weights, pack_quantized
from support.pack_gptq import Gptq, auto_round_config, gptq
from support.packers import Layers, Packed
from support.zoo import DATA, relative_l2
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTQConfig,
    LlamaForCausalLM,
    modeling_utils,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import qcompile
from qcompile.errors import OptionError, PlanError, SchemeError
from qcompile.hf_quantizer import QCompileQuantizer
from qcompile.hf_register import register

BASE = Gptq(4, 32)
ROUND = Gptq(4, 32, zeros="v2")
PACKED = Compressed(4, 32)
WHOLE = DATA / "gptq-w2-g32-asym"


@pytest.fixture(autouse=True)
def _apart() -> None:
    torch._dynamo.reset()


def load(folder: Path, *, dtype: Any = torch.float32, more: Any = None, **options: Any) -> Any:
    config = qcompile.HFConfig(**{"emitter": "eager", **options})
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=dtype, **(more or {})
    )


def folder_of(kind: str, folder: Path, **changes: Any) -> tuple[Path, Any, Layers]:
    """A quantized Llama of a scheme: folder, configuration, layers."""
    config = llama_config(**{"num_hidden_layers": 1, **changes})
    packed: Callable[[int, int, int], Packed] = {
        "gptq": lambda n, k, seed: gptq(n, k, BASE, seed),
        "awq": lambda n, k, seed: awq(n, k, Awq(32), seed),
        "auto_round": lambda n, k, seed: gptq(n, k, ROUND, seed),
        "compressed_tensors": lambda n, k, seed: pack_quantized(n, k, PACKED, seed),
    }[kind]
    said = {
        "gptq": BASE.config,
        "awq": Awq(32).config,
        "auto_round": auto_round_config("auto_round", ROUND),
        "compressed_tensors": compressed_config(
            "pack-quantized", {"group_0": (["Linear"], integer_weights(PACKED))}, ("lm_head",)
        ),
    }[kind]
    layers = llama_layers(
        config, lambda name, n, k, seed: None if name == "lm_head" else packed(n, k, seed)
    )
    return write_llama(folder, config, layers, said), config, layers


@pytest.mark.parametrize("kind", ["gptq", "awq", "auto_round", "compressed_tensors"])
def test_a_quantized_folder(kind: str, tmp_path: Path) -> None:
    folder, config, layers = folder_of(kind, tmp_path / "model")
    model = load(folder)
    assert type(model) is LlamaForCausalLM
    assert model.qcompile.plan.scheme == kind
    assert relative_l2(model(IDS).logits, exact_llama(config, layers)(IDS).logits) < BOUND
    # The folder's word on its weights stays as it is.
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert model.config.quantization_config == stored
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_it_is_what_load_makes() -> None:
    model, other = load(WHOLE), qcompile.load(WHOLE, emitter="eager")[0]
    assert torch.equal(model(IDS).logits, other(IDS).logits)
    buffers = dict(other.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, values in model.named_buffers():
        assert torch.equal(values, buffers[name])
    assert model.generation_config.to_dict() == other.generation_config.to_dict()  # type: ignore[operator, union-attr]


class Made(TorchDispatchMode):
    """Notes the shapes of floats with values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for out in tree_leaves(result):
            if not isinstance(out, torch.Tensor) or isinstance(out, FakeTensor):
                continue
            if out.is_floating_point() and not out.is_meta:
                self.shapes.add(tuple(out.shape))
        return result


def test_no_float_copy_of_a_quantized_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads of their own are not watched
    folder, config, _ = folder_of("gptq", tmp_path / "model")
    linears = {
        tuple(m.weight.shape)
        for m in LlamaForCausalLM(config).model.layers[0].modules()
        if isinstance(m, torch.nn.Linear)
    }
    with Made() as made:
        load(folder)
    assert not linears & made.shapes
    plain = LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path / "floats")
    with Made() as made:  # and the watch sees what it should
        load(tmp_path / "floats", scheme="rtn", group_size=32)
    assert linears <= made.shapes


def test_dtypes(tmp_path: Path) -> None:
    folder, config, layers = folder_of("gptq", tmp_path / "model", dtype="bfloat16")
    exact = exact_llama(config, layers)(IDS).logits
    for dtype, found, bound in (
        ("auto", torch.bfloat16, 0.02),
        ("float32", torch.float32, BOUND),
    ):
        model = load(folder, dtype=dtype)
        assert model.dtype == model.qcompile.dtype == found
        assert relative_l2(model(IDS).logits.float(), exact) < bound
    old = load(folder, dtype=None, more={"torch_dtype": torch.float32})
    assert old.dtype == torch.float32
    with pytest.raises(OptionError, match="float64"):
        load(folder, dtype=torch.float64)


@pytest.mark.parametrize("place", ["auto", "cpu", torch.device("cpu"), {"": "cpu"}])
def test_device_maps_that_say_the_same(tmp_path: Path, place: Any) -> None:
    folder, _, _ = folder_of("gptq", tmp_path / "model")
    assert load(folder, more={"device_map": place}).device == torch.device("cpu")


@pytest.mark.parametrize("place", ["balanced", {"": "disk"}, {"model": "cpu", "lm_head": "cpu"}, 0])
def test_device_maps_that_say_something_else(tmp_path: Path, place: Any) -> None:
    folder, _, _ = folder_of("gptq", tmp_path / "model")
    with pytest.raises(OptionError, match="device_map"):
        load(folder, more={"device_map": place})


def test_a_device_without_hardware(tmp_path: Path) -> None:
    folder, config, layers = folder_of("gptq", tmp_path / "model")
    model = load(folder, device="npu:910b", emulate=True, dtype=torch.float16)
    exact = exact_llama(config, layers)(IDS).logits
    assert relative_l2(model(IDS).logits.float(), exact) < 5e-3
    model = load(folder, device="npu:910b", emulate="float32", dtype=torch.float16)
    assert model.dtype == torch.float32
    assert relative_l2(model(IDS).logits, exact) < 1e-5
    with pytest.raises(OptionError, match="device_map"):
        load(folder, device="npu:910b", more={"device_map": "cpu"})


def test_a_site_without_kernel_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = llama_config()
    layers = llama_layers(config, lambda name, n, k, seed: gptq(n, k, Gptq(3, 16), seed))
    folder = write_llama(tmp_path / "model", config, layers, Gptq(3, 16).config)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(LlamaForCausalLM, "_load_pretrained_model", refuse)
    with pytest.raises(PlanError):
        load(folder, device="npu:310p")


def test_tied_heads_go_by_what_the_folder_stores(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    layers = llama_layers(config, lambda name, n, k, seed: gptq(n, k, BASE, seed), head=False)
    folder = write_llama(tmp_path / "tied", config, layers, BASE.config)
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert relative_l2(model(IDS).logits, exact_llama(config, layers)(IDS).logits) < BOUND
    own = {**layers, "lm_head.weight": torch.randn(128, 64).bfloat16()}
    folder = write_llama(tmp_path / "own", config, own, BASE.config)
    model = load(folder)
    assert not model.config.tie_word_embeddings
    free = llama_config(tie_word_embeddings=False)
    assert relative_l2(model(IDS).logits, exact_llama(free, own)(IDS).logits) < BOUND


# **** floats ****


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(num_hidden_layers=1)).save_pretrained(folder)
    return folder


def test_floats_are_quantized_while_they_are_loaded(floats: Path) -> None:
    model = load(floats, scheme="rtn", bits=8, group_size=32, lm_head=True)
    plain = AutoModelForCausalLM.from_pretrained(floats)
    with torch.no_grad():
        assert 0 < relative_l2(model(IDS).logits, plain(IDS).logits) < 0.02
    specs = {str(weight.spec) for weight in model.qcompile.catalogue.values()}
    assert all(spec.startswith("uint8 g32") for spec in specs)
    assert model.config.quantization_config.to_dict()["bits"] == 8


def test_calibration_data(floats: Path) -> None:
    batches = [torch.randint(0, 128, (4, 16)) for _ in range(4)]
    model = load(floats, scheme="gptq", bits=4, group_size=32, calibration=batches)
    assert model.qcompile.plan.scheme == "gptq"
    json.loads(model.config.to_json_string())  # data for calibration is not part of it


def test_a_folder_that_is_configured_already(floats: Path, tmp_path: Path) -> None:
    folder = tmp_path / "configured"
    model = AutoModelForCausalLM.from_pretrained(floats)
    model.config.quantization_config = qcompile.HFConfig(
        scheme="rtn", bits=8, group_size=32, emitter="eager"
    ).to_dict()
    model.save_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    expected = load(floats, scheme="rtn", bits=8, group_size=32)(IDS).logits
    assert torch.equal(loaded(IDS).logits, expected)
    # The argument says how to run it, the folder what to quantize.
    fast = load(folder, numerics="fast")
    assert fast.qcompile.plan.numerics == "fast"
    assert 0 < relative_l2(fast(IDS).logits, expected) < 0.05
    written = AutoConfig.from_pretrained(folder).quantization_config
    assert written["quant_method"] == "qcompile"


# **** what is refused ****


def refused(match: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(OptionError, match=match) as caught:
        load(*arguments, **options)
    assert all((caught.value.where, caught.value.found, caught.value.needed, caught.value.fix))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bits": 3}, "quantized already|has no meaning"),
        ({"scheme": "rtn"}, "quantized already"),
        ({"scheme": "nf4"}, "unknown scheme"),
        ({"device": "tpu"}, "tpu"),
        ({"dtpye": 1}, "unknown option"),
        ({"checkpoint": "x"}, "already names"),
        ({"numerics": "loose"}, "numerics"),
        ({"on_unsupported": "ignore"}, "unknown policy"),
        ({"emitter": "tvm"}, "emitter"),
        ({"emulate": "yes"}, "emulate"),
        ({"keep": "x"}, "one text"),
        ({"progress": 3}, "progress"),
    ],
)
def test_options(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder, _, _ = folder_of("gptq", tmp_path / "model")
    refused(match, folder, **options)


def test_dtype_belongs_to_from_pretrained() -> None:
    with pytest.raises(OptionError, match=r"from_pretrained\(\.\.\., dtype="):
        qcompile.HFConfig(dtype=torch.float32)  # type: ignore[call-arg]


def test_arguments_of_from_pretrained(tmp_path: Path, floats: Path) -> None:
    folder, _, _ = folder_of("gptq", tmp_path / "model")
    refused("use_kernels", folder, more={"use_kernels": True})
    refused(r"distributed_config[\s\S]*one device", folder, more={"tp_plan": "auto"})
    refused("holds floats", floats)
    with pytest.raises(SchemeError, match="gptq"):
        load(folder, scheme="awq")
    with pytest.raises(OptionError, match=r"qcompile\.load\('gguf-q2_k\.gguf'"):
        load(DATA, more={"gguf_file": "gguf-q2_k.gguf"})


def test_a_folder_that_does_not_fit_its_model(tmp_path: Path) -> None:
    folder, config, layers = folder_of("gptq", tmp_path / "model")
    missing = {k: v for k, v in layers.items() if k != "model.norm.weight"}
    write_llama(folder, config, missing, BASE.config)
    with pytest.raises(SchemeError, match=r"model\.norm\.weight"):
        load(folder)


def test_transformers_itself_goes_on_as_before(tmp_path: Path, floats: Path) -> None:
    """Other settings meet the same choice, and the same words, as without us."""
    assert qcompile.HFConfig is qcompile.HFConfig
    folder, _, _ = folder_of("gptq", tmp_path / "model")
    plain: Any = AutoModelForCausalLM.from_pretrained(floats)
    assert not hasattr(plain, "qcompile")
    config = GPTQConfig(bits=4)
    with pytest.warns(UserWarning, match="already has"), pytest.raises(ImportError, match="GPTQ"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def test_another_transformers_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils, "get_hf_quantizer", lambda config: None)
    with pytest.raises(OptionError, match="in a way of its own"):
        register()


def test_it_is_registered_once() -> None:
    assert AUTO_QUANTIZER_MAPPING["qcompile"] is QCompileQuantizer
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["qcompile"] is qcompile.HFConfig
    assert register() is qcompile.HFConfig
    with pytest.raises(AttributeError, match="HfConfig"):
        qcompile.HfConfig  # noqa: B018
