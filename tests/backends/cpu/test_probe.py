"""Which kernels a machine gets."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from qcompile.backends.cpu import probe

AVX2 = {"sse4_2", "avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
ARM = {"fp", "asimd", "fphp", "asimdhp", "asimddp"}


@pytest.mark.parametrize(
    ("machine", "flags", "asked", "variant", "arch"),
    [
        ("x86_64", AVX512 | {"amx_int8", "amx_bf16"}, None, "avx512", "amx"),
        ("x86_64", AVX512, None, "avx512", "avx512_vnni"),
        ("AMD64", AVX512 - {"avx512_vnni"}, None, "avx2", "avx512"),
        ("x86_64", AVX512, "avx2", "avx2", "avx512_vnni"),
        ("x86_64", AVX512, "neon", "avx512", "avx512_vnni"),
        ("x86_64", AVX512, "generic", "generic", "generic"),
        ("x86_64", AVX2, None, "avx2", "avx2"),
        ("x86_64", {"sse4_2"}, None, "generic", "generic"),
        ("aarch64", ARM, None, "neon", "neon"),
        ("arm64", {"asimddp"}, None, "neon", "neon"),
        ("aarch64", ARM, "avx2", "neon", "neon"),
        ("aarch64", ARM, "generic", "generic", "generic"),
        ("aarch64", ARM - {"asimddp"}, None, "generic", "generic"),
    ],
)
def test_the_variant_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    flags: set[str],
    asked: str | None,
    variant: str,
    arch: str,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(probe, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.delenv("QCOMPILE_CPU_ISA", raising=False)
    if asked:
        monkeypatch.setenv("QCOMPILE_CPU_ISA", asked)
    assert (probe.variant(), probe.host_arch()) == (variant, arch)


@pytest.mark.parametrize(("said", "flags"), [("1", {"asimddp"}), ("0", set()), ("", set())])
def test_what_macos_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, flags: set[str]
) -> None:
    tool = tmp_path / "sysctl"
    tool.write_text(
        f'#!/bin/sh\ntest "$2" = hw.optional.arm.FEAT_DotProd && echo "{said}"\n', encoding="utf-8"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert probe.cpu_flags.__wrapped__() == flags


def test_macos_without_the_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert probe.cpu_flags.__wrapped__() == frozenset()
