"""Every kernel compiles for the target and for the card at hand, in registers alone."""

from __future__ import annotations

import os

import pytest

from deepinfer.kernels.compiler import Compiled, Resources
from deepinfer.kernels.resources import ARCHS, all_specs, compile_all, occupancy

pytest.importorskip("cupy", reason="compiling kernels needs CuPy")


@pytest.fixture(scope="module", params=ARCHS)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Compiled]:
    # Not what an earlier run left: a kernel that no longer compiles must fail here. The processes
    # of one run of pytest-xdist share what they have compiled.
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "compiled"))
        return compile_all(request.param)


def test_every_kernel_stays_in_registers(compiled: list[Compiled]) -> None:
    assert compiled
    spilled = [
        f"{each.spec.name}: {each.resources}"
        for each in compiled
        if each.resources is None or each.resources.stack_bytes or each.resources.spill_bytes
    ]
    assert not spilled, "\n".join(spilled)


def test_every_kernel_fits_an_sm(compiled: list[Compiled]) -> None:
    for each in compiled:
        assert each.resources is not None
        fit = occupancy(ARCHS[each.arch], each.spec.threads, each.resources, each.spec.shared_bytes)
        assert fit.blocks >= 1, f"{each.spec.name} on {each.arch}: {fit}, {each.resources}"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_is_launched_in_one_way(arch: str) -> None:
    specs = set(all_specs(arch))
    assert len(specs) == len({(spec.source, spec.name) for spec in specs})


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "static", "dynamic", "blocks", "limit"),
    [
        # NVIDIA's occupancy calculator (the spreadsheet's formulas), worked by hand.
        ("sm_86", 128, 32, 0, 0, 12, "threads"),
        ("sm_86", 64, 32, 0, 0, 16, "blocks"),
        ("sm_86", 128, 144, 17156, 0, 3, "registers"),  # 4608 a warp: 14 -> 12 warps
        ("sm_86", 256, 64, 0, 48 * 1024, 2, "shared memory"),
        ("sm_86", 128, 64, 0, 100 * 1024, 0, "shared memory"),
        ("sm_90a", 128, 128, 0, 0, 4, "registers"),
        ("sm_90a", 1024, 33, 0, 0, 1, "registers"),  # 1280 a warp: 51 -> 48 warps
        ("sm_90a", 128, 32, 0, 99 * 1024, 2, "shared memory"),
    ],
)
def test_occupancy(
    arch: str, threads: int, registers: int, static: int, dynamic: int, blocks: int, limit: str
) -> None:
    needs = Resources(registers=registers, shared_bytes=static, stack_bytes=0, spill_bytes=0)
    fit = occupancy(ARCHS[arch], threads, needs, dynamic)
    assert (fit.blocks, fit.limit) == (blocks, limit)
    assert fit.share == blocks * threads / ARCHS[arch].threads
