from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support import gguf_mixtures
from support.gguf_writer import CONFIGS, map_of, quantize, tiny_model, write_model
from torch import nn

from qcompile.errors import SchemeError
from qcompile.schemes.gguf.architectures import KNOWN
from qcompile.schemes.gguf.entries import GLOBAL, OUTPUT
from qcompile.schemes.gguf.model import catalogue, model_sites, model_weights
from qcompile.schemes.gguf.reader import GGUFFile
from qcompile.schemes.gguf.transforms import row_order
from qcompile.site import EmbeddingSite, LinearSite

ZOO = Path(__file__).parents[4] / "shared" / "zoo"
BIASED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "qwen3moe": {"attention_bias": True},
}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _bound(file: GGUFFile, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: ref.dequantize() for name, ref in catalogue(file, _shapes(model)).items()}


def test_the_writer_knows_every_architecture() -> None:
    assert set(CONFIGS) == set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_names_agree_with_the_tensor_map_of_gguf_py(name: str) -> None:
    architecture = KNOWN[name]
    names = gguf.get_tensor_name_map(map_of(name), 4)
    real = {n for n, _ in tiny_model(name, **BIASED.get(name, {})).named_parameters()}
    mixture = architecture.mixture
    stems = [*architecture.layer, *(mixture.stems if mixture else ())]
    table = {
        f"model.layers.2.{stem.module}.{part}": f"blk.2.{stem.tensor}.{part}"
        for stem in stems
        for part in ("weight", *(["bias"] if stem.bias else []))
        # A tensor that is no module of its own; the query matrix of models without q_lora_rank.
        if stem.part is None and stem.lacks is None
    }
    table |= {f"{stem.module}.weight": f"{stem.tensor}.weight" for stem in GLOBAL}
    for parameter, tensor in table.items():
        # gguf-py lists no output for gemma2, which ties; files may have one all the same.
        if parameter != f"{OUTPUT.module}.weight":
            assert names.get_name(parameter, try_suffixes=(".weight", ".bias")) == tensor
    alone = {f"model.layers.2.{stem.module}" for stem in stems if stem.part}
    one_layer = {n for n in real if "layers." not in n or "layers.2." in n} - alone
    one_layer = {n for n in one_layer if ".mlp.experts." not in n}
    tied = set() if "lm_head.weight" in real else {"lm_head.weight"}
    assert set(table) - tied == one_layer


@pytest.mark.parametrize("name", KNOWN)
def test_weights_are_the_source_models(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, **BIASED.get(name, {}))
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", name, model))
    source = dict(model.state_dict())
    bound = _bound(file, model)
    assert set(bound) == set(source) - (set() if "lm_head.weight" in bound else {"lm_head.weight"})
    for parameter, values in bound.items():
        # Gemma's norms went through a float32 sum and back.
        torch.testing.assert_close(values, source[parameter], rtol=0, atol=1.2e-7)
    assert set(model_weights(file)) == set(bound)


def test_rows_of_queries_and_keys_move_as_bytes(tmp_path: Path) -> None:
    model = tiny_model("llama")
    types = {"blk.0.attn_q.weight": "Q8_0", "blk.0.attn_k.weight": "Q5_1"}
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "llama", model, types=types))
    bound = catalogue(file, _shapes(model))
    for part, heads in (("q", 4), ("k", 2)):
        stored = file.weight(f"blk.0.attn_{part}.weight")
        weight = bound[f"model.layers.0.self_attn.{part}_proj.weight"]
        assert weight.layout == stored.layout
        order = row_order(stored.shape[0], heads)
        assert torch.equal(weight.load().parts["data"], stored.load().parts["data"][order])
        assert torch.equal(weight.read(slice(3, 9)).dequantize(), stored.dequantize()[order[3:9]])


def test_row_order_is_the_inverse_of_the_converters() -> None:
    marks = np.arange(16).reshape(2, 2, 4).swapaxes(1, 2).reshape(16)
    assert marks[row_order(16, 2).numpy()].tolist() == list(range(16))


@pytest.mark.parametrize(("name", "expected"), [("gemma2", 0.5), ("gemma3", 0.5), ("llama", 1.5)])
def test_norms_lose_the_converters_one(name: str, expected: float, tmp_path: Path) -> None:
    def half_more(tensor: str, array: Any) -> Any:
        return np.full_like(array, 1.5) if tensor == "blk.0.attn_norm.weight" else array

    model = tiny_model(name)
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", name, model, change=half_more))
    norm = catalogue(file, _shapes(model))["model.layers.0.input_layernorm.weight"]
    assert set(norm.dequantize().tolist()) == {expected}
    assert norm.layout == "float"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "MXFP4", "Q4_K", "Q6_K"])
def test_each_tensor_has_its_own_type(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=256, head_dim=64)
    types = {"token_embd.weight": kind, "blk.1.ffn_up.weight": kind, "blk.0.ffn_up.weight": "Q4_1"}
    path = write_model(
        tmp_path / "m.gguf",
        "llama",
        model,
        types=types,
        # The type of the file as a whole says Q4_0 and means nothing.
        metadata={"general.file_type": 2},
    )
    bound = _bound(GGUFFile.open(path), model)
    source = dict(model.named_parameters())
    for parameter, tensor in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"),
    ):
        type_id = gguf.GGMLQuantizationType[types[tensor]]
        blocks = quantize(source[parameter].numpy(), type_id)
        expected = gguf.quants.dequantize(blocks, type_id)
        assert np.array_equal(bound[parameter].numpy(), expected), tensor
    assert torch.equal(bound["lm_head.weight"], source["lm_head.weight"])


def test_sites_carry_the_modules_names(tmp_path: Path) -> None:
    model = tiny_model("qwen2", hidden_size=256, tie_word_embeddings=True)
    types = {
        "token_embd.weight": "Q8_0",
        "blk.2.attn_q.weight": "Q8_0",
        "blk.0.ffn_up.weight": "Q4_0",
    }
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "qwen2", model, types=types))
    sites = model_sites(file)
    assert [(type(site), site.name, site.weight.name) for site in sites] == [
        (EmbeddingSite, "model.embed_tokens", "model.embed_tokens.weight"),
        (LinearSite, "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj.weight"),
        (LinearSite, "model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.q_proj.weight"),
        (LinearSite, "lm_head", "model.embed_tokens.weight"),
    ]
    assert [site.bias for site in sites if isinstance(site, LinearSite)] == [False, True, False]


def test_a_physical_head_is_used_even_where_the_family_ties(tmp_path: Path) -> None:
    model = tiny_model("gemma3", tie_word_embeddings=False)
    double = 2 * model.get_parameter("model.embed_tokens.weight").numpy()
    dropped = ("output.weight",)
    tied = GGUFFile.open(write_model(tmp_path / "m.gguf", "gemma3", model, drop=dropped))
    assert "lm_head.weight" not in catalogue(tied, _shapes(model))
    untied = GGUFFile.open(
        write_model(
            tmp_path / "n.gguf",
            "gemma3",
            model,
            change=lambda name, array: double if name == "output.weight" else array,
        )
    )
    assert np.array_equal(_bound(untied, model)["lm_head.weight"].numpy(), double)


@pytest.mark.parametrize(
    ("drop", "extra", "words"),
    [
        (("blk.1.ffn_up.weight",), {}, ["missing in the checkpoint: model.layers.1.mlp.up_proj"]),
        (("blk.1.attn_q.bias",), {}, ["missing in the checkpoint: model.layers.1.self_attn.q_p"]),
        ((), {"blk.1.adapter.weight": (2, 2)}, ["unused in the checkpoint:  blk.1.adapter.weight"]),
        ((), {"blk.3.ffn_up.weight": (2, 2)}, ["unused in the checkpoint:  model.layers.3.mlp.up"]),
        ((), {"blk.1.ffn_up.bias": (96,)}, ["unused in the checkpoint:  model.layers.1.mlp.up"]),
        (
            ("output_norm.weight",),
            {"blk.0.ffn_gate_exps.weight": (2, 2, 2)},
            ["model.norm.weight", "blk.0.ffn_gate_exps.weight"],
        ),
    ],
)
def test_what_does_not_match_is_named(
    drop: tuple[str, ...],
    extra: dict[str, tuple[int, ...]],
    words: list[str],
    tmp_path: Path,
) -> None:
    model = tiny_model("qwen2")
    arrays = {name: np.ones(shape, dtype=np.float32) for name, shape in extra.items()}
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "qwen2", model, drop=drop, extra=arrays))
    for call in (lambda: catalogue(file, _shapes(model)), lambda: model_sites(file)):
        with pytest.raises(SchemeError) as caught:
            call()
        for word in words:
            assert word in str(caught.value)


def test_a_shape_that_differs_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    path = write_model(
        tmp_path / "m.gguf",
        "qwen2",
        model,
        change=lambda name, array: array.T if name == "blk.0.ffn_up.weight" else array,
    )
    with pytest.raises(SchemeError) as caught:
        catalogue(GGUFFile.open(path), _shapes(model))
    for word in ("blk.0.ffn_up.weight", "(64, 96)", "(96, 64)"):
        assert word in str(caught.value)


def test_layers_written_twice_are_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    extra = {"blk.00.ffn_up.weight": np.ones((96, 64), dtype=np.float32)}
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "qwen2", model, extra=extra))
    with pytest.raises(SchemeError, match=r"second tensor for model\.layers\.0\.mlp\.up_proj"):
        model_sites(file)


def test_rotary_frequencies_of_old_files_are_passed_over(tmp_path: Path) -> None:
    model = tiny_model("llama")
    extra = {"blk.0.attn_rot_embd.weight": np.ones(8, dtype=np.float32)}
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", "llama", model, extra=extra))
    assert set(catalogue(file, _shapes(model))) == set(_shapes(model))


def test_parameters_named_like_the_tensors_are_bound_verbatim(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "anything")
    first = np.arange(12, dtype=np.float32).reshape(4, 3)
    writer.add_tensor("0.weight", first)
    writer.add_tensor("0.bias", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    bound = _bound(file, nn.Sequential(nn.Linear(3, 4)))
    assert np.array_equal(bound["0.weight"].numpy(), first)
    with pytest.raises(SchemeError, match="unused in the checkpoint"):
        catalogue(file, {"0.weight": (4, 3)})


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "m.gguf")
    for call in (lambda: model_sites(file), lambda: catalogue(file, {"model.norm.weight": (4,)})):
        with pytest.raises(SchemeError) as caught:
            call()
        assert "'mamba' is not supported" in str(caught.value)
        listed = [name for name in KNOWN if name not in gguf_mixtures.WRITTEN]
        assert ", ".join(listed) in str(caught.value)
