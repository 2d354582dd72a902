"""Source inlining, the cache of binaries, and what a launch refuses; no GPU needed."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.kernels import compiler, overlapped, source
from deepinfer.kernels.compiler import (
    Argument,
    Compiled,
    CompileError,
    Grid,
    KernelError,
    KernelSpec,
    compile_kernel,
    launch,
    precompile,
    use_launcher,
)

SCALE = """#include "common.cuh"
#include "more.cuh"
template <int FACTOR> __global__ void scale(number* x) { x[threadIdx.x] *= FACTOR * MORE; }
"""
SPEC = KernelSpec("scale.cu", "scale<3>", 32, 1024)


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources and an empty cache of binaries."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE)
    (folder / "common.cuh").write_text("#pragma once\ntypedef float number;\n")
    (folder / "more.cuh").write_text('#pragma once\n#include "common.cuh"\n#define MORE 1\n')
    monkeypatch.setattr(source, "CSRC", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield folder
    forget()


def forget() -> None:
    source.inlined.cache_clear()
    source.digest.cache_clear()


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cupy", reason="compiling kernels needs CuPy")


def test_includes_are_written_in_once_and_lines_keep_their_numbers(csrc: Path) -> None:
    text = source.inlined("scale.cu")
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("typedef float number") == 1
    lines = text.splitlines()
    kernel = next(at for at, line in enumerate(lines) if "__global__" in line)
    directive = next(at for at in range(kernel, -1, -1) if lines[at].startswith("#line"))
    number = int(lines[directive].split()[1]) + kernel - directive - 1
    assert lines[directive].endswith('"scale.cu"')
    assert SCALE.splitlines()[number - 1] == lines[kernel]


def test_missing_include_is_named(csrc: Path) -> None:
    (csrc / "common.cuh").unlink()
    with pytest.raises(ValueError, match=r"'common\.cuh' is not in .*, included by scale\.cu"):
        source.inlined("scale.cu")


@pytest.mark.usefixtures("nvrtc")
def test_binaries_are_cached_by_everything_that_makes_them(csrc: Path) -> None:
    first = compile_kernel(SPEC, "sm_86")
    assert first.resources is not None
    assert first.resources.spill_bytes == first.resources.stack_bytes == 0
    assert b"ELF" in first.binary[:4]
    entries = compiler.cache_directory()
    assert len(list(entries.iterdir())) == 1
    assert compile_kernel(SPEC, "sm_86") == first
    assert len(list(entries.iterdir())) == 1
    compile_kernel(KernelSpec("scale.cu", "scale<4>", 32), "sm_86")
    compile_kernel(SPEC, "sm_90")
    (csrc / "more.cuh").write_text("#define MORE 2\n")
    forget()
    assert compile_kernel(SPEC, "sm_86").binary != first.binary
    assert len(list(entries.iterdir())) == 4


@pytest.mark.usefixtures("nvrtc", "csrc")
def test_damaged_entry_is_made_anew(caplog: pytest.LogCaptureFixture) -> None:
    first = compile_kernel(SPEC, "sm_86")
    (entry,) = compiler.cache_directory().iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"sha256", b"sha512"), b"\xff" + whole):
        entry.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert compile_kernel(SPEC, "sm_86") == first
        assert "made anew" in caplog.text
        caplog.clear()
        assert entry.read_bytes() == whole


@pytest.mark.usefixtures("nvrtc", "csrc")
def test_cache_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_kernel(SPEC, "sm_86").binary
    assert "cannot be written" in caplog.text


@pytest.mark.usefixtures("nvrtc", "csrc")
def test_ptx_for_other_cards() -> None:
    (made,) = precompile([SPEC], "compute_86")
    assert b".target sm_86" in made.binary
    assert made.resources is None


@pytest.mark.usefixtures("nvrtc", "csrc")
def test_what_nvrtc_refuses_is_told_with_its_log() -> None:
    with pytest.raises(CompileError, match=r"scale\.cu: wrong<3> for sm_86(.|\n)*wrong"):
        compile_kernel(KernelSpec("scale.cu", "wrong<3>", 32), "sm_86")
    with pytest.raises(CompileError, match="sm_11"):
        compile_kernel(SPEC, "sm_11")
    with pytest.raises(ValueError, match="arch '86' is not"):
        compile_kernel(SPEC, "86")


def test_without_cupy_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    compiler._cupy.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"need CuPy: install deepinfer-cluster\[cuda12\]"):
            compile_kernel(SPEC, "sm_86")
    finally:
        compiler._cupy.cache_clear()


def test_launch_refuses_what_no_kernel_can_take() -> None:
    calls: list[tuple[KernelSpec, Grid, int]] = []

    def record(spec: KernelSpec, grid: Grid, args: Sequence[Argument], shared_bytes: int) -> None:
        calls.append((spec, grid, shared_bytes))

    with use_launcher(record):
        launch(SPEC, (1, 2, 3), (), shared_bytes=1024)
        with pytest.raises(ValueError, match="1025 bytes of dynamic shared memory"):
            launch(SPEC, (1, 1, 1), (), shared_bytes=1025)
        with pytest.raises(ValueError, match="is empty"):
            launch(SPEC, (1, 0, 1), ())
    assert calls == [(SPEC, (1, 2, 3), 1024)]
    with pytest.raises(ValueError, match="argument 1 is a tensor on cpu"):
        launch(SPEC, (1, 1, 1), (None, torch.zeros(1)))
    with pytest.raises(ValueError, match="argument 0 is float64, not a tensor"):
        launch(SPEC, (1, 1, 1), (np.float64(1),))
    with pytest.raises(ValueError, match="threads must be in"):
        KernelSpec("scale.cu", "scale<3>", 2048)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_a_launch_says_so() -> None:
    with pytest.raises(KernelError, match="torch can use no CUDA device"):
        launch(SPEC, (1, 1, 1), (np.int32(1),))
    with pytest.raises(KernelError, match="torch sees no CUDA device"):
        precompile([SPEC])


class _Card:
    """As much of CuPy as loading a kernel uses: keeps what was allowed to which kernel."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self) -> None:
        self.allowed: dict[str, int] = {}
        self.cuda = self.driver = self.function = self.runtime = self

    def setDevice(self, device: int) -> None:
        assert device == 0

    def Device(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(attributes={"MaxSharedMemoryPerBlockOptin": 99 * 1024})

    def Module(self) -> SimpleNamespace:
        return SimpleNamespace(
            load=lambda binary: None, get_function=lambda name: SimpleNamespace(ptr=name)
        )

    def funcSetAttribute(self, function: str, attribute: int, value: int) -> None:
        assert attribute == self.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.allowed[function] = value


def test_dynamic_shared_memory_is_allowed_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 48 KB need no permission unless the kernel has static shared memory, too.
    card = _Card()
    monkeypatch.setattr(compiler, "_cupy", lambda: card)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    sizes = (0, 1024, 48 * 1024, 64 * 1024)
    for size in sizes:
        spec = KernelSpec("scale.cu", "scale<3>", 32, size)
        compiler._load(spec, 0, Compiled(spec, "sm_86", f"with_{size}", b"", None))
    assert card.allowed == {f"with_{size}": size for size in sizes if size}
    spec = KernelSpec("scale.cu", "scale<3>", 32, 100 * 1024)
    with pytest.raises(KernelError, match="needs 102400 bytes of shared memory a block, a card"):
        compiler._load(spec, 0, Compiled(spec, "sm_86", "too_much", b"", None))


def test_an_overlapped_launch_tells_the_driver_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Driver:
        @staticmethod
        def cuLaunchKernelEx(config: Any, function: Any, parameters: Any, extra: None) -> int:
            plan = config._obj
            attribute = overlapped._Attribute.from_address(plan.attributes)
            address = ctypes.c_void_p.from_address(parameters[0]).value
            number = ctypes.c_float.from_address(parameters[1]).value
            seen.extend([[*plan.grid], [*plan.block], plan.shared_bytes, plan.stream])
            seen.extend([plan.attribute_count, attribute.id, attribute.value])
            seen.extend([function.value, address, number])
            return len(seen) - 10

    monkeypatch.setattr(overlapped, "_driver", Driver)
    overlapped.launch(77, (1, 2, 3), 64, [4096, np.float32(0.5)], 512, 99)
    assert seen == [[1, 2, 3], [64, 1, 1], 512, 99, 1, 6, 1, 77, 4096, 0.5]
    assert (ctypes.sizeof(overlapped._Attribute), ctypes.sizeof(overlapped._Config)) == (72, 56)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx returned 10"):
        overlapped.launch(77, (1, 2, 3), 64, [4096, np.float32(0.5)], 512, 99)
