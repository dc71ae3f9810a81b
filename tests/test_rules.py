"""Who may import whom, and who may ask what device there is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TYPES = ("errors", "spec", "layout", "weight", "edge", "site", "kernel", "target")
FACE = ("api", "cli", "dynamo", "bench", "pipeline")
VENDORS = ("torch_npu", "triton", "torch.cuda", "torch.npu", "torch.xpu", "torch.mps")
PROBES = ("is_cuda", "is_npu", "is_xpu", "is_mps")


def files(folder: str) -> list[Path]:
    """The real files of a folder: links to other folders are not followed."""
    found = list((ROOT / folder).rglob("*.py"))
    linked = [p for p in found if any(q.is_symlink() for q in p.parents if q != ROOT)]
    return sorted(set(found) - set(linked))


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere but under TYPE_CHECKING."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            if node.level and path.parent.name == "workers":
                continue  # other interpreters run these, as a package without qcompile
            assert not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        pending += ast.iter_child_nodes(node)
    return found


def offending(path: Path, banned: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for name in sorted(imports(path))
        if any(name == b or name.startswith(f"{b}.") for b in banned)
    ]


def all_offending(paths: list[Path], *banned: str) -> list[str]:
    assert paths
    return [line for path in paths for line in offending(path, banned)]


def test_passes_never_import_backends() -> None:
    face = [f"qcompile.{name}" for name in (*FACE, "session", "schemes", "verify")]
    assert not all_offending(files("passes"), "qcompile.backends", "backends", *face)


def test_backends_know_the_types_only() -> None:
    frame = [f"qcompile.{name}" for name in (*FACE, "session", "passes", "schemes", "verify")]
    assert not all_offending(files("backends"), *frame, "passes")


def test_schemes_know_no_device_and_no_pass() -> None:
    frame = [f"qcompile.{name}" for name in (*FACE, "session", "passes", "backends", "verify")]
    assert not all_offending(files("qcompile/schemes"), *frame)


def test_types_know_nobody() -> None:
    allowed = {f"qcompile.{name}" for name in TYPES}
    for name in TYPES:
        for imported in imports(ROOT / "qcompile" / f"{name}.py"):
            if imported.startswith("qcompile"):
                assert imported.rpartition(".")[0] in allowed, (name, imported)


def test_only_the_top_imports_the_face() -> None:
    # What users call: the functions, a command, and the plug-in of transformers.
    top = {
        *("__init__.py", "__main__.py", "dynamo.py", "api.py", "exporting.py", "support.py"),
        "hf_quantizer.py",
    }
    rest = [
        path
        for path in files("qcompile")
        if path.name not in top and not {"cli", "bench"} & set(path.parts)
    ]
    assert not all_offending(rest, "qcompile.api", "qcompile.cli", "qcompile.bench")


def test_the_package_is_imported_by_its_own_name() -> None:
    paths = [
        path for folder in ("qcompile", "passes", "backends", "tests") for path in files(folder)
    ]
    assert not all_offending(paths, "passes", "backends")


def is_of_a_backend(path: Path) -> bool:
    """Tests of a backend, what only they use, and this file."""
    place = path.relative_to(ROOT)
    own = ("test_rules.py", "interpreted.py", "plain_lines.py", "plain_bfloat16.py")
    return place.parts[:2] == ("tests", "backends") or (
        place.parts[0] == "tests" and place.name in own
    )


@pytest.mark.parametrize("folder", ["qcompile", "passes", "tests"])
def test_no_vendor_and_no_probe_outside_backends(folder: str) -> None:
    paths = [path for path in files(folder) if not is_of_a_backend(path)]
    assert not all_offending(paths, *VENDORS)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert node.attr not in PROBES, path
                assert not ast.unparse(node).startswith(VENDORS), path


def test_only_a_probe_touches_a_device() -> None:
    for path in files("backends"):
        if path.name == "probe.py":
            continue
        assert "is_available" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("folder", ["qcompile", "passes", "backends"])
def test_files_say_what_they_are(folder: str) -> None:
    for path in files(folder):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_this_test_sees_what_is_banned(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import torch_npu\ndef f():\n    from triton import jit\n", encoding="utf-8")
    assert imports(bad) == {"torch_npu", "triton.jit"}
    assert len({p.name for p in files("backends")}) > 3
    assert not any("backends" in p.parts for p in files("qcompile"))
