"""From a kernel's source to a launch: NVRTC, a cache of binaries on disk, and the call.

NVRTC and the driver are reached through CuPy, which is imported on first use: a machine without a
GPU can import this module, and with CuPy also compile, but not launch. Launches go to torch's
current stream of the current device, so that CUDA graphs capture them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import overlapped, source

TARGET_VARIABLE: Final = "DEEPINFER_KERNEL_TARGET"
"""Overrides what kernels are compiled for: ``compute_86`` runs the SM86 code on newer cards."""

CAPABILITY_MIN: Final = (8, 0)
"""The oldest cards with ``mma.m16n8k16`` of halves and ``cp.async``."""

_FLAGS: Final = (
    "-std=c++17",
    "-ftz=true",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
)
_SCALARS: Final = frozenset({np.int32, np.uint32, np.int64, np.uint64, np.float32})
_ARCH: Final = re.compile(r"(sm|compute)_(\d+)[af]?")

_log = logging.getLogger(__name__)


class KernelError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched here; the message says why."""


class CompileError(KernelError):
    """NVRTC refused a source; the message ends in its log."""


Argument = Tensor | np.generic | None
"""A kernel argument: a tensor (its address), a sized numpy scalar, or a null pointer."""

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One instance of a kernel.

    ``source`` is a file of ``csrc``, ``name`` a C++ name expression in it
    (``paged_decode<KV_E4M3, 128, 1>``), ``threads`` the size of a block, ``shared_bytes`` the most
    dynamic shared memory it may be launched with. With ``overlaps`` a launch may begin before the
    kernel ahead of it in the stream has ended, on cards that can: see ``kernels.overlapped`` for
    what such a kernel must do.
    """

    source: str
    name: str
    threads: int
    shared_bytes: int = 0
    overlaps: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"KernelSpec.threads must be in 1..1024, got {self.threads}")
        if self.shared_bytes < 0:
            raise ValueError(f"KernelSpec.shared_bytes is negative: {self.shared_bytes}")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread and one block of a kernel need, as ptxas reports it."""

    registers: int
    shared_bytes: int
    """Static shared memory of a block."""
    stack_bytes: int
    spill_bytes: int
    """Bytes of spill stores and spill loads together."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A binary: a cubin for ``sm_*``, PTX for ``compute_*`` (which has no ``resources`` yet)."""

    spec: KernelSpec
    arch: str
    lowered_name: str
    binary: bytes
    resources: Resources | None


class Launcher(Protocol):
    """Stands in for the GPU; see ``use_launcher``."""

    def __call__(
        self, spec: KernelSpec, grid: Grid, args: Sequence[Argument], shared_bytes: int
    ) -> None: ...


_launcher: Launcher | None = None
_functions: dict[tuple[KernelSpec, int], Any] = {}
_streams: dict[int, Any] = {}


def launch(
    spec: KernelSpec, grid: Grid, args: Sequence[Argument], *, shared_bytes: int = 0
) -> None:
    """Launch on torch's current stream of the current device; returns at once.

    Tensors must be on that device; they are passed as their address, so the caller has checked
    shapes and strides. Raises ValueError for a tensor on the CPU, a scalar without a size, an
    empty grid, or more ``shared_bytes`` than the spec allows; KernelError where no GPU is usable.
    """
    if shared_bytes > spec.shared_bytes:
        raise ValueError(
            f"{spec.name}: {shared_bytes} bytes of dynamic shared memory, its spec allows "
            f"{spec.shared_bytes}"
        )
    if 0 in grid:
        raise ValueError(f"{spec.name}: grid {grid} is empty")
    if _launcher is not None:
        _launcher(spec, grid, args, shared_bytes)
        return
    values: list[int | np.generic] = []
    for at, value in enumerate(args):
        if isinstance(value, Tensor):
            if not value.is_cuda:
                raise ValueError(
                    f"{spec.name}: argument {at} is a tensor on {value.device}; kernels take "
                    f"tensors on a CUDA device"
                )
            values.append(value.data_ptr())
        elif value is None:
            values.append(0)
        elif type(value) in _SCALARS:
            values.append(value)
        else:
            raise ValueError(
                f"{spec.name}: argument {at} is {type(value).__name__}, not a tensor, None or a "
                f"numpy scalar of 32 or 64 bits"
            )
    device = _current_device()
    function = _functions.get((spec, device)) or _load(spec, device)
    if spec.overlaps and _can_overlap(device):
        stream: int = torch._C._cuda_getCurrentRawStream(device)
        overlapped.launch(function.ptr, grid, spec.threads, values, shared_bytes, stream)
    else:
        function(grid, (spec.threads, 1, 1), values, shared_bytes, _stream(device))


@contextlib.contextmanager
def use_launcher(launcher: Launcher) -> Iterator[None]:
    """Send every launch to ``launcher`` inside the block. For tests; not thread-safe."""
    global _launcher
    before = _launcher
    _launcher = launcher
    try:
        yield
    finally:
        _launcher = before


def precompile(
    specs: Iterable[KernelSpec], arch: str | None = None, *, workers: int | None = None
) -> list[Compiled]:
    """Compile (or find in the cache) many kernels in ``workers`` threads, in the order given.

    Without ``arch`` it is the current device's, and the kernels are also loaded, so that later
    launches do nothing but launch (a stream capture allows no loading). With ``arch`` (``sm_86``,
    or ``compute_86`` for PTX) no GPU is needed.
    """
    wanted = list(specs)
    target = device_target() if arch is None else arch
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        compiled = list(pool.map(lambda spec: compile_kernel(spec, target), wanted))
    if arch is None:
        device = torch.cuda.current_device()
        for each in compiled:
            _load(each.spec, device, each)
    return compiled


def compile_kernel(spec: KernelSpec, arch: str) -> Compiled:
    """Compile one kernel, or take it from the cache; a damaged cache entry is made anew.

    Raises CompileError with NVRTC's log, ValueError for a malformed ``arch``.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"arch {arch!r} is not sm_N or compute_N")
    _cupy()
    path = cache_directory() / f"{_key(spec, arch)}.kernel"
    found = _read(path, spec, arch)
    if found is not None:
        return found
    made = _compile(spec, arch, "cubin" if match[1] == "sm" else "ptx")
    _write(path, made)
    return made


def device_target() -> str:
    """What to compile for: ``TARGET_VARIABLE`` if set, else the current device's ``sm_*``.

    A card newer than the installed NVRTC knows gets PTX for the newest it does know. Raises
    KernelError where torch sees no CUDA device, or one older than ``CAPABILITY_MIN``.
    """
    if not torch.cuda.is_available():
        raise KernelError(
            "torch sees no CUDA device; the GPU kernels need one (and a CUDA build of torch)"
        )
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY_MIN:
        raise KernelError(
            f"{torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need "
            f"{CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]} or newer"
        )
    forced = os.environ.get(TARGET_VARIABLE)
    if forced:
        if _ARCH.fullmatch(forced) is None:
            raise KernelError(f"{TARGET_VARIABLE}={forced!r} is not sm_N or compute_N")
        return forced
    wanted = capability[0] * 10 + capability[1]
    newest = max(_supported_archs())
    if wanted not in _supported_archs():
        return f"compute_{min(wanted, newest)}"
    # sm_90a is sm_90 with Hopper's warpgroup products.
    return "sm_90a" if wanted == 90 else f"sm_{wanted}"


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/deepinfer/kernels``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deepinfer" / "kernels"


def _current_device() -> int:
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # AssertionError: a torch without CUDA
        raise KernelError(f"torch can use no CUDA device: {error}") from error


def _load(spec: KernelSpec, device: int, compiled: Compiled | None = None) -> Any:
    """The loaded function of ``spec`` on the current device ``device``, dynamic memory raised."""
    known = _functions.get((spec, device))
    if known is not None:
        return known
    cupy = _cupy()
    compiled = compiled or compile_kernel(spec, device_target())
    cupy.cuda.runtime.setDevice(device)  # makes the device's context this thread's
    module = cupy.cuda.function.Module()
    module.load(compiled.binary)
    function = module.get_function(compiled.lowered_name)
    if spec.shared_bytes:
        opt_in = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
        if spec.shared_bytes > opt_in:
            raise KernelError(
                f"{spec.name} needs {spec.shared_bytes} bytes of shared memory a block, "
                f"{torch.cuda.get_device_name(device)} has {opt_in}"
            )
        # Whatever the size: what a kernel has of static shared memory counts too.
        driver = cupy.cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, attribute, spec.shared_bytes)
    _functions[spec, device] = function
    return function


@functools.cache
def _can_overlap(device: int) -> bool:
    """Whether kernels compiled for ``device``, the current one, can wait for others."""
    match = _ARCH.fullmatch(device_target())
    return match is not None and int(match[2]) >= overlapped.TARGET_MIN


class _ForeignStream:
    """A stream of torch's, by the protocol that CuPy takes streams with."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _stream(device: int) -> Any:
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    stream = _streams.get(handle)
    if stream is None:
        stream = _cupy().cuda.Stream.from_external(_ForeignStream(handle))
        _streams[handle] = stream
    return stream


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
        from cupy.cuda import compiler  # noqa: F401  (makes cupy.cuda.compiler an attribute)
    except ImportError as error:
        raise KernelError(
            "the GPU kernels need CuPy: install deepinfer-cluster[cuda12] or "
            f"deepinfer-cluster[cuda13], whichever torch was built for ({error})"
        ) from error
    return cupy


@functools.cache
def _nvrtc() -> Any:
    _cupy()
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc


@functools.cache
def _nvrtc_version() -> str:
    try:
        major, minor = _nvrtc().getVersion()
    except (RuntimeError, OSError) as error:
        raise KernelError(
            f"CuPy finds no NVRTC: install nvidia-cuda-nvrtc of CuPy's CUDA version ({error})"
        ) from error
    return f"{major}.{minor}"


@functools.cache
def _supported_archs() -> frozenset[int]:
    return frozenset(_nvrtc().getSupportedArchs())


@functools.cache
def _includes() -> tuple[str, ...]:
    from cuda import pathfinder

    found = pathfinder.find_nvidia_header_directory("cudart")
    if found is None:
        raise KernelError(
            "cuda_fp16.h is nowhere to be found: install nvidia-cuda-runtime of CuPy's CUDA version"
        )
    own = Path(_cupy().__file__).parent
    return (f"-I{found}", f"-I{own / '_cccl' / 'libcudacxx'}", f"-I{own / '_core' / 'include'}")


def _key(spec: KernelSpec, arch: str) -> str:
    parts = (source.digest(spec.source), spec.name, arch, _nvrtc_version(), *_FLAGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _compile(spec: KernelSpec, arch: str, method: str) -> Compiled:
    compiler = _cupy().cuda.compiler
    log = io.StringIO()
    program = compiler._NVRTCProgram(
        source.inlined(spec.source), spec.source, name_expressions=(spec.name,), method=method
    )
    try:
        binary, names = program.compile((f"-arch={arch}", *_FLAGS, *_includes()), log)
    except compiler.CompileException as error:
        raise CompileError(f"{spec.source}: {spec.name} for {arch}:\n{error}") from error
    except _nvrtc().NVRTCError as error:
        raise CompileError(f"{spec.source}: {spec.name} for {arch}: {error}") from error
    if not isinstance(binary, bytes):
        binary = binary.encode()
    resources = _resources(log.getvalue()) if method == "cubin" else None
    return Compiled(spec, arch, names[spec.name], binary, resources)


def _resources(log: str) -> Resources | None:
    """What ptxas said; None when NVRTC kept it back, as 13.0 was seen to do."""

    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, log)), default=0)

    if "registers" not in log:
        return None
    return Resources(
        registers=largest(r"Used (\d+) registers"),
        shared_bytes=largest(r"(\d+)(?:\+\d+)? bytes smem"),
        stack_bytes=largest(r"(\d+) bytes stack frame"),
        spill_bytes=largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads"),
    )


def _write(path: Path, compiled: Compiled) -> None:
    header = {
        "lowered_name": compiled.lowered_name,
        "resources": None if compiled.resources is None else asdict(compiled.resources),
        "sha256": hashlib.sha256(compiled.binary).hexdigest(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(json.dumps(header).encode() + b"\n" + compiled.binary)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("kernel cache %s cannot be written: %s", path.parent, error)


def _read(path: Path, spec: KernelSpec, arch: str) -> Compiled | None:
    try:
        head, _, binary = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if hashlib.sha256(binary).hexdigest() != header["sha256"]:
            raise ValueError("checksum")
        resources = header["resources"]
        return Compiled(
            spec,
            arch,
            str(header["lowered_name"]),
            binary,
            None if resources is None else Resources(**resources),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("kernel cache entry %s is unusable and made anew: %s", path, error)
        return None
