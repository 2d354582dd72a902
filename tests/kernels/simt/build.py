"""Runs kernels without a GPU: g++ compiles their text, and their threads are fibers.

``with emulator():`` sends every ``kernels.compiler.launch`` here, with tensors on the CPU. The
kernel works on copies of the tensors' whole storages, each followed and preceded by unmapped
memory, so that an access outside them is reported with the thread that made it; afterwards the
storages are copied back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor

from deepinfer.kernels import compiler, source
from deepinfer.kernels.compiler import Argument, Grid, KernelSpec

HERE: Final = Path(__file__).parent
COMPILER: Final = shutil.which("g++")
"""None where there is no g++: tests of kernels are skipped."""

_SHARED: Final = re.compile(r"extern\s+__shared__\s+([^;\[]*?)(\w+)\s*\[\s*\]\s*;")
_ALIGN: Final = re.compile(r"__align__\s*\([^)]*\)|alignas\s*\([^)]*\)")


class EmulationError(AssertionError):
    """A kernel did what would be undefined on a GPU, or was called with other arguments."""


@contextlib.contextmanager
def emulator(specs: Iterable[KernelSpec] = ()) -> Iterator[None]:
    """Run every launch in the block on the CPU; ``specs`` are compiled first, in parallel."""
    prebuild(specs)
    with compiler.use_launcher(_launch):
        yield


def prebuild(specs: Iterable[KernelSpec]) -> None:
    """Compile many kernels: one g++ a source file, two at a time."""
    wanted: dict[str, set[str]] = {}
    for spec in specs:
        if (spec.source, spec.name) not in _libraries:
            wanted.setdefault(spec.source, set()).add(spec.name)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda item: _build(item[0], sorted(item[1])), sorted(wanted.items())))


_libraries: dict[tuple[str, str], EmulatedKernels] = {}


def _launch(spec: KernelSpec, grid: Grid, args: Sequence[Argument], shared_bytes: int) -> None:
    if (spec.source, spec.name) not in _libraries:
        _build(spec.source, [spec.name])
    library = _libraries[spec.source, spec.name]
    library.run(spec.name, grid, spec.threads, args, shared_bytes=shared_bytes)


def _build(file: str, names: Sequence[str]) -> None:
    library = EmulatedKernels(file, source.inlined(file), names)
    for name in names:
        _libraries[file, name] = library


class EmulatedKernels:
    """Kernels of one text, as a shared object.

    ``text`` is CUDA C++ whose includes are written into it, ``names`` are name expressions.
    Raises EmulationError when there is no g++ or it refuses the text.
    """

    def __init__(self, title: str, text: str, names: Sequence[str]) -> None:
        self.title = title
        self._names = {name: index for index, name in enumerate(names)}
        library = ctypes.CDLL(str(_shared_object(title, text, names)))
        library.simt_kinds.restype = ctypes.c_char_p
        library.simt_run.restype = ctypes.c_char_p
        library.simt_run.argtypes = [
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_uint),
            ctypes.c_uint,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]
        library.simt_allocate.restype = ctypes.c_void_p
        library.simt_allocate.argtypes = [ctypes.c_size_t, ctypes.c_int]
        library.simt_release.restype = ctypes.c_int
        self._library = library

    def run(
        self,
        name: str,
        grid: Grid,
        threads: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Run a grid of kernel ``name``; the tensors of ``args`` hold the results.

        Raises EmulationError for arguments of other types than the kernel's, and for what the
        kernel did wrong: out of bounds, misaligned, diverged, deadlocked.
        """
        which, title = self._names[name], f"{self.title}: {name}"
        kinds = [kind for kind in self._library.simt_kinds(which).decode().split(",") if kind]
        given = [_kind(arg) for arg in args]
        if kinds != given:
            raise EmulationError(f"{title} takes ({', '.join(kinds)}), got ({', '.join(given)})")
        guarded: dict[int, tuple[int, int]] = {}  # storage address: (copy's address, bytes)
        values: list[ctypes.Array[ctypes.c_char] | ctypes.c_void_p] = []
        try:
            for at, arg in enumerate(args):
                if isinstance(arg, Tensor):
                    values.append(ctypes.c_void_p(_guard(self._library, arg, at, guarded)))
                elif arg is None:
                    values.append(ctypes.c_void_p(0))
                else:
                    values.append(ctypes.create_string_buffer(arg.tobytes()))
            pointers = (ctypes.c_void_p * max(len(values), 1))(
                *(ctypes.addressof(value) for value in values)
            )
            shape = (ctypes.c_uint * 3)(*grid)
            failure = self._library.simt_run(which, shape, threads, shared_bytes, pointers).decode()
            for address, (copy, size) in guarded.items():
                ctypes.memmove(address, copy, size)
        finally:
            damaged = self._library.simt_release()
        if failure:
            raise EmulationError(f"{title}: {failure}")
        if damaged >= 0:
            raise EmulationError(
                f"{title}: wrote just before or behind argument {damaged}'s storage"
            )


def _guard(
    library: ctypes.CDLL, tensor: Tensor, argument: int, guarded: dict[int, tuple[int, int]]
) -> int:
    if tensor.device.type != "cpu":
        raise EmulationError(f"argument {argument} is on {tensor.device}, not on the CPU")
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if size == 0:
        return int(library.simt_allocate(0, argument))
    if address not in guarded:
        copy = int(library.simt_allocate(size, argument))
        ctypes.memmove(copy, address, size)
        guarded[address] = (copy, size)
    return guarded[address][0] + tensor.data_ptr() - address


def _kind(arg: Argument) -> str:
    if arg is None or isinstance(arg, Tensor):
        return "pointer"
    return np.dtype(type(arg)).name


def _shared_object(title: str, text: str, names: Sequence[str]) -> Path:
    if COMPILER is None:
        raise EmulationError("g++ is not installed")
    text = _SHARED.sub(_dynamic_shared, text)
    entries = ", ".join(f"SIMT_KERNEL({name})" for name in names)
    text = f"{text}\nSIMT_ENTRIES({entries})\n"
    flags = [
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        "-w",
        "-fno-strict-aliasing",
        "-fno-gnu-unique",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-ffp-contract=fast",  # as NVRTC does
        "-DSIMT_EMULATION",
        f"-I{HERE}",
        *_machine_flags(),
    ]
    headers = "".join((HERE / header).read_text() for header in sorted(os.listdir(HERE)))
    key = hashlib.sha256("\0".join((COMPILER, text, headers, *flags)).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"deepinfer-simt-{os.getuid()}"
    path = folder / f"{key}.so"
    if path.exists():
        return path
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / "kernel.so"
        command = [COMPILER, *flags, "-x", "c++", "-", "-o", str(made)]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if result.returncode:
            raise EmulationError(f"g++ cannot compile {title}\n{result.stderr[:6000]}")
        made.rename(path)
    return path


def _dynamic_shared(match: re.Match[str]) -> str:
    element = _ALIGN.sub("", match[1]).strip()
    return f"{element}* {match[2]} = reinterpret_cast<{element}*>(simt::shared_memory);"


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    try:
        known = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    return tuple(f"-m{flag}" for flag in ("f16c", "fma") if flag in known)
