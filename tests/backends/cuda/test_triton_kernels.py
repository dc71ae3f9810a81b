"""What the Triton kernels say to sites, and what their operators say where nothing can run them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.weights import random_weight, reference
from torch import nn

import qcompile
from qcompile.backends import cuda, load
from qcompile.backends.cuda import configs, tiles
from qcompile.backends.cuda.coding import Coding, coding_of
from qcompile.backends.cuda.configs import Config
from qcompile.backends.cuda.layouts import DTYPES, layout_name
from qcompile.edge import find_route
from qcompile.errors import LowerError, OptionError
from qcompile.kernel import Accept, Kernel, Reject
from qcompile.ops import encode_meaning
from qcompile.site import EmbeddingSite, LinearSite, Site
from qcompile.spec import ActivationSpec, AffineSpec, BlockSpec, FloatSpec, LookupSpec, ScaledSpec
from qcompile.target import Target

load("cuda").prepare()
SM90 = Target("cuda", "sm90")
Spec = AffineSpec | LookupSpec | ScaledSpec


def kernel(kind: str, dtype: torch.dtype = torch.float16) -> Kernel:
    return next(k for k in cuda.kernels(dtype) if k.name == f"cuda.triton_{kind}")


def answer(
    spec: Spec,
    n: int = 64,
    k: int = 128,
    kind: str = "linear",
    target: Target = SM90,
    dtype: torch.dtype = torch.float16,
) -> Accept | Reject:
    weight = random_weight(spec, n, k)
    one = kernel(kind, dtype)
    assert one.layout is not None
    route = find_route(weight.layout, spec, one.layout)
    if route is None:
        return Reject("no edge")
    routed = replace(reference(weight), spec=route.spec, layout=one.layout)
    site: Site = LinearSite("p", routed, True) if kind == "linear" else EmbeddingSite("p", routed)
    return one.accepts(site, target)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_what_is_refused_and_why(kind: str) -> None:
    w4 = AffineSpec(4, 32, "zero", torch.float16)
    for given, said in (
        ({"spec": replace(w4, group=24)}, "groups of 24 columns; a matrix unit takes 16"),
        ({"spec": replace(w4, group=8)}, "groups of 8 columns"),
        ({"spec": w4, "target": Target("cpu")}, "the target is cpu"),
        ({"spec": w4, "target": Target("cuda", "sm75")}, "needs sm80 or newer"),
        ({"spec": w4, "dtype": torch.float32}, "activations in torch.float32"),
        ({"spec": replace(w4, order="indexed")}, "no edge"),
        ({"spec": LookupSpec(5, 32, tuple(range(32)))}, "no edge"),
        ({"spec": ScaledSpec(torch.float8_e5m2, 128)}, "no edge"),
    ):
        arguments: dict[str, Any] = given
        found = answer(kind=kind, **arguments)
        assert isinstance(found, Reject), given
        assert said in found.reason


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", None])
def test_what_is_accepted(arch: str | None) -> None:
    for bits in range(1, 9):
        for group in (16, 48, 64, 4096):
            for dtype in DTYPES:
                found = answer(
                    AffineSpec(bits, group, "offset"), target=Target("cuda", arch), dtype=dtype
                )
                assert isinstance(found, Accept)
                assert "from 1024 rows on, runs of up to 128 MiB are decoded" in found.note
    assert isinstance(answer(ScaledSpec(torch.float8_e4m3fn, 64)), Accept)


def test_permuted_columns_are_for_products_only() -> None:
    one = kernel("linear")
    spec = AffineSpec(4, 32, "zero", torch.float16, "permuted")
    ref = replace(reference(random_weight(spec, 4, 64)), layout=str(one.layout))
    assert isinstance(one.accepts(LinearSite("p", ref), SM90), Accept)
    found = kernel("embedding").accepts(EmbeddingSite("p", ref), SM90)
    assert isinstance(found, Reject)
    assert "act-order" in found.reason


def test_activations_that_a_checkpoint_would_quantize_are_mentioned() -> None:
    one = kernel("linear")
    ref = reference(random_weight(AffineSpec(8, 128, "symmetric"), 4, 128))
    asked = replace(ref, activations=ActivationSpec(torch.int8, "token"))
    found = one.accepts(LinearSite("p", asked), SM90)
    assert isinstance(found, Accept)
    assert "activations stay floats" in found.note


def test_blocks_without_a_table_have_no_edge() -> None:
    for spec in (BlockSpec("iq1_s", 256, 50), FloatSpec(torch.float16)):
        assert find_route("affine", spec, layout_name(torch.float16)) is None


def test_an_operator_without_a_device_says_so() -> None:
    weight = random_weight(AffineSpec(4, 32, "zero", torch.float16), 48, 64)
    route = find_route("affine", weight.spec, "cuda.p16.float16")
    assert route is not None
    packed = route.apply(weight)
    parts, meaning = list(packed.parts.values()), encode_meaning(packed)
    ops: Any = torch.ops.qcompile
    said = "no CUDA device runs this graph"
    with pytest.raises(LowerError, match=said):
        ops.triton_linear(torch.zeros(2, 64).half(), parts, meaning)
    with pytest.raises(LowerError, match=said):
        ops.triton_embedding(torch.tensor([1]), parts, meaning, torch.float16)
    meta = [part.to("meta") for part in parts]
    y = ops.triton_linear(torch.zeros(2, 3, 64, device="meta").half(), meta, meaning)
    assert y.shape == (2, 3, 48)


def test_emulation_needs_a_process_of_its_own() -> None:
    with pytest.raises(OptionError, match=r"TRITON_INTERPRET=1|triton is not installed"):
        qcompile.optimize(
            nn.Sequential(nn.Linear(64, 32)), scheme="rtn", device="cuda:sm90", emulate=True
        )


def test_importing_the_backend_imports_no_triton() -> None:
    code = (
        "import sys, qcompile; from qcompile.backends import load; load('cuda').prepare();"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


# **** tiles ****


def coding(bits: int, group: int, form: Any, k: int) -> Coding:
    found = coding_of(AffineSpec(bits, group, form), k)
    assert isinstance(found, Coding)
    return found


def test_tiles_hold_the_rows_and_fill_the_device() -> None:
    for arch in ("sm80", "sm89", "sm90", "sm100", "sm75"):
        for bits, group in ((4, 128), (4, 32), (6, 16), (8, 4096), (5, 32)):
            c = coding(bits, group, "zero", 4096)
            for rows in (1, 2, 8, 9, 16, 17, 64, 65, 1000):
                found = configs.choose(arch, c, 4096, 4096, rows)
                assert found.rows >= min(rows, 16)
                assert found.parts <= c.blocks(4096)
                assert found.parts * -(-4096 // found.outputs) <= 4 * 170
    assert configs.choose("sm90", coding(4, 128, "offset", 4096), 4096, 4096, 4).on_sum is False
    assert configs.choose("sm90", coding(4, 128, "zero", 4096), 1 << 17, 4096, 4).parts == 1


def test_a_measured_tile_replaces_that_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, path = coding(4, 128, "zero", 4096), tmp_path / "tiles.json"
    measured = Config(16, 64, 4, 4, True, 8)
    tiles.save(path, {tiles.key("sm90", c, 8192, 4096, 13): measured})
    assert tiles.tile("sm90", c, 8192, 4096, 13) == configs.choose("sm90", c, 8192, 4096, 13)
    monkeypatch.setenv(tiles.VARIABLE, str(path))
    assert tiles.tile("sm90", c, 8192, 4096, 9) == measured
    for arch, n, rows in (("sm80", 8192, 9), ("sm90", 4096, 9), ("sm90", 8192, 8)):
        assert tiles.tile(arch, c, n, 4096, rows) == configs.choose(arch, c, n, 4096, rows)


def test_a_file_of_tiles_that_is_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = coding(4, 128, "zero", 4096)
    good = dataclasses.asdict(Config(16, 64, 4, 4, True, 8))
    for i, content in enumerate(
        (
            "[]",
            "{",
            json.dumps({"x": {**good, "rows": "16"}}),
            json.dumps({"x": {**good, "on_sum": 1}}),
            json.dumps({"x": {**good, "parts": True}}),
            json.dumps({"x": {**good, "warps": -4}}),
            json.dumps({"x": {"rows": 16}}),
        )
    ):
        path = tmp_path / f"{i}.json"
        path.write_text(content)
        monkeypatch.setenv(tiles.VARIABLE, str(path))
        with pytest.raises(OptionError, match=tiles.VARIABLE):
            tiles.tile("sm90", c, 8192, 4096, 13)
    monkeypatch.setenv(tiles.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(OptionError, match="No such file"):
        tiles.tile("sm90", c, 8192, 4096, 13)
