"""Models with a mixture of experts from folders that store experts one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import folders
from support.experts import expert_name, folder_layers, four_bits, small, write_experts
from support.gguf_mixtures import CONFIGS
from support.pack_gptq import Gptq, gptq
from support.packers import Packed, write_folder
from support.zoo import relative_l2
from torch import nn

import qcompile
from qcompile.errors import SchemeError
from qcompile.site import ExpertsSite

BOUND = 1e-5


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(0, 96, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def _load(folder: Path, **options: Any) -> Any:
    torch._dynamo.reset()
    return qcompile.load(folder, **{"emitter": "eager", "verify": True, **options})[0]


def _agree(model: Any, exact: nn.Module, *lengths: int) -> None:
    for tokens in lengths:
        ids = _ids(tokens)
        with torch.no_grad():
            expected = exact(ids).logits
        difference = relative_l2(model(ids).logits, expected)
        assert difference < BOUND, f"{tokens} tokens: {difference:.2e}"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_eager_experts(name: str, tmp_path: Path) -> None:
    source = small(name)
    layers = folder_layers(name, source)
    folder = write_experts(tmp_path, source, layers)
    model = _load(folder)
    _agree(model, source, 1, 7, 512)
    sites = [e.site for e in model.qcompile.plan.entries if isinstance(e.site, ExpertsSite)]
    told = [site for site in qcompile.open(folder).sites() if isinstance(site, ExpertsSite)]
    assert [(s.weight.spec, s.bias, s.weight.nbytes) for s in told] == [
        (s.weight.spec, s.bias, s.weight.nbytes) for s in sites
    ]
    assert len(sites) == (1 if name.startswith("deepseek") else 2)


def test_a_router_keeps_its_correction(tmp_path: Path) -> None:
    source = small("deepseek3")
    folder = write_experts(tmp_path, source, folder_layers("deepseek3", source))
    model = _load(folder, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert source.get_buffer(name).abs().max() > 0.1
    assert torch.equal(model.get_buffer(name), source.get_buffer(name))


def test_one_matrix_of_gate_and_up_in_turns(tmp_path: Path) -> None:
    """GPTQModel's names for gpt-oss: the rows of one linear are gate and up in turns."""
    source = small("gpt-oss")
    layers: dict[str, Any] = {}
    state: dict[str, torch.Tensor] = {}
    for name, value in folder_layers("gpt-oss", source).items():
        if ".experts." not in name:
            layers[name] = value
    for n in range(2):
        path = f"model.layers.{n}.mlp.experts"
        inner, hidden = source.get_parameter(f"{path}.down_proj").shape[1:]
        for what, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            packed = [
                gptq(rows, columns, Gptq(4, 32, bias=True), 100 * n + 10 * e + rows)
                for e in range(4)
            ]
            layers |= {f"{path}.{what}_projs.{e}": one for e, one in enumerate(packed)}
            state[f"{path}.{what}_proj"] = torch.stack([p.exact.t() for p in packed])
            bias = torch.stack([p.tensors["bias"].float() for p in packed])
            state[f"{path}.{what}_proj_bias"] = bias
    source.load_state_dict(state, strict=False)
    _agree(_load(write_experts(tmp_path, source, layers)), source, 1, 7)


def test_biases_of_zeros_that_tools_add_are_left_out(tmp_path: Path) -> None:
    source = small("qwen3moe")
    layers = folder_layers("qwen3moe", source)
    for n in range(2):
        for e in range(4):
            for role, rows in (("gate", 32), ("up", 32), ("down", 64)):
                name = expert_name("qwen3moe", f"model.layers.{n}", e, role)
                layers[f"{name}.bias"] = torch.zeros(rows)
    model = _load(write_experts(tmp_path / "zeros", source, layers))
    _agree(model, source, 7)
    assert any("all zeros" in note for note in model.qcompile.plan.notes)
    layers["model.layers.1.mlp.experts.2.up_proj.bias"] = torch.ones(32)
    with pytest.raises(SchemeError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.bias"):
        _load(write_experts(tmp_path / "ones", source, layers))


# **** cases that users of other tools reported ****


def test_no_key_of_an_expert_is_left_over(tmp_path: Path) -> None:
    """B49: tensors of experts that match nothing; the model printed garbage."""
    source = small("qwen3moe")
    layers = folder_layers("qwen3moe", source)
    layers["model.layers.0.mlp.experts.4.up_proj"] = gptq(32, 64, Gptq(4, 32), 5)
    with pytest.raises(SchemeError, match=r"layers\.0\.mlp\.experts[\s\S]*expert 4"):
        _load(write_experts(tmp_path / "more", source, layers))
    del layers["model.layers.0.mlp.experts.4.up_proj"]
    layers["model.layers.0.mlp.expert.1.up_proj"] = gptq(32, 64, Gptq(4, 32), 5)
    with pytest.raises(SchemeError, match=r"unused in the checkpoint[\s\S]*mlp\.expert\.1"):
        _load(write_experts(tmp_path / "other", source, layers))


def test_a_list_of_layers_is_no_mixture_of_experts(tmp_path: Path) -> None:
    """Layers of their own widths in a list, with the names that experts have."""

    class Layer(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.up_proj = nn.Linear(64, inner, bias=False)
            self.down_proj = nn.Linear(inner, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down_proj(self.up_proj(x).relu())
            return result

    layers = {}
    for n, inner in enumerate((32, 96)):
        layers[f"{n}.up_proj"] = gptq(inner, 64, Gptq(4, 32), 2 * n)
        layers[f"{n}.down_proj"] = gptq(64, inner, Gptq(4, 32), 2 * n + 1)
    folder = write_folder(tmp_path, layers)
    folders.agrees(folder, lambda: nn.Sequential(Layer(32), Layer(96)), layers, folders.rows())
    names = [site.name for site in qcompile.open(tmp_path).sites()]
    assert sorted(names) == ["0.down_proj", "0.up_proj", "1.down_proj", "1.up_proj"]


@pytest.mark.parametrize("role", ["gate", "up", "down"])
def test_a_missing_expert_is_named(role: str, tmp_path: Path) -> None:
    source = small("qwen3moe")
    layers = folder_layers("qwen3moe", source)
    del layers[expert_name("qwen3moe", "model.layers.1", 2, role)]
    with pytest.raises(SchemeError) as caught:
        _load(write_experts(tmp_path, source, layers))
    for word in ("model.layers.1.mlp.experts", f"no {role} matrix of expert 2", "4 experts"):
        assert word in str(caught.value)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    source = small("gpt-oss")
    layers = folder_layers("gpt-oss", source)
    name = expert_name("gpt-oss", "model.layers.1", 2, "up")
    packed = layers[name]
    assert isinstance(packed, Packed)
    del packed.tensors["bias"]
    with pytest.raises(SchemeError, match=r"layers\.1[\s\S]*no up bias of expert 2"):
        _load(write_experts(tmp_path, source, layers))


@pytest.mark.parametrize(("name", "normed"), [("qwen3moe", False), ("olmoe", True)])
def test_routing_weights_are_normalized_as_the_model_says(
    name: str, normed: bool, tmp_path: Path
) -> None:
    """B51: with norm_topk_prob false the weights are those of a softmax over all experts."""
    source = small(name, norm_topk_prob=normed, num_experts=8)
    layers = folder_layers(name, source)
    _agree(_load(write_experts(tmp_path, source, layers)), source, 7)


def test_one_layer_of_floats_in_a_quantized_model(tmp_path: Path) -> None:
    """B55: the last layer's experts are floats, one by one; the configuration need not say so."""

    def pack(name: str, n: int, k: int, seed: int) -> Packed | None:
        return None if "layers.1.mlp.experts" in name else four_bits(name, n, k, seed)

    source = small("qwen3moe")
    layers = folder_layers("qwen3moe", source, pack)
    model = _load(write_experts(tmp_path, source, layers))
    _agree(model, source, 7)
    sites = [e.site for e in model.qcompile.plan.entries if isinstance(e.site, ExpertsSite)]
    assert [site.name for site in sites] == ["model.layers.0.mlp.experts"]
    for name in ("gate_up_proj", "down_proj"):
        full = f"model.layers.1.mlp.experts.{name}"
        assert torch.equal(model.get_parameter(full), source.get_parameter(full))


def test_experts_of_another_width_in_each_layer(tmp_path: Path) -> None:
    """B59: 4 bits in groups of 32 in one layer, 8 bits in groups of 64 in the next."""
    wide = Gptq(8, 64)

    def pack(name: str, n: int, k: int, seed: int) -> Packed | None:
        if "layers.1.mlp.experts" in name:
            return gptq(n, k, wide, seed)
        return four_bits(name, n, k, seed)

    source = small("qwen3moe", moe_intermediate_size=64)
    layers = folder_layers("qwen3moe", source, pack)
    dynamic = {r"+:model\.layers\.1\.mlp\.experts\..*": {"bits": 8, "group_size": 64}}
    quantization = {**Gptq(4, 32).config, "dynamic": dynamic}
    model = _load(write_experts(tmp_path, source, layers, quantization))
    _agree(model, source, 1, 7)
    specs = {
        e.site.name: str(e.site.weight.spec)
        for e in model.qcompile.plan.entries
        if isinstance(e.site, ExpertsSite)
    }
    assert specs["model.layers.0.mlp.experts"].startswith("uint4 g32")
    assert specs["model.layers.1.mlp.experts"].startswith("uint8 g64")


def test_experts_of_another_width_in_one_layer(tmp_path: Path) -> None:
    def pack(name: str, n: int, k: int, seed: int) -> Packed | None:
        if ".experts.2." in name:
            return gptq(n, k, Gptq(8, 32), seed)
        return four_bits(name, n, k, seed)

    source = small("qwen3moe")
    layers = folder_layers("qwen3moe", source, pack)
    dynamic = {r"+:.*\.experts\.2\..*": {"bits": 8, "group_size": 32}}
    quantization = {**Gptq(4, 32).config, "dynamic": dynamic}
    _agree(_load(write_experts(tmp_path, source, layers, quantization)), source, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_weights_are_not_rounded(dtype: torch.dtype) -> None:
    """B61: the weights stay float32 until the sum, whatever the dtype of the activations."""
    from qcompile.activation import Activation
    from qcompile.ops_experts import moe

    torch.manual_seed(0)
    x, ids = torch.randn(5, 16).to(dtype), torch.tensor([[0, 1]] * 5)
    shares = torch.tensor([[0.1234, 0.00001234]] * 5)
    up, down = torch.randn(2, 8, 16), torch.randn(2, 16, 4)
    found = moe(x, ids, shares, up, down, None, None, str(Activation("silu")), False)
    total = torch.zeros(5, 16)
    for expert in (0, 1):
        hidden = x.float() @ up[expert].t()
        gate, value = hidden.chunk(2, -1)
        total += shares[0, expert] * ((nn.functional.silu(gate) * value) @ down[expert].t())
    assert found.dtype is dtype
    assert torch.equal(found, total.to(dtype)) or relative_l2(found, total.to(dtype)) < 1e-3
