"""What every test shares: the hypothesis profile, where data lies, and two guards.

* A test marked ``gpu`` skips itself where no CUDA device is visible.
* Only tests/integration and tests/chaos may start Ray: elsewhere ``ray.init`` raises.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO_ROOT = Path(__file__).resolve().parent.parent
RAY_FOLDERS = frozenset({"integration", "chaos"})

# No test talks to the outside: neither Ray's usage report nor a model hub.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests start Ray where clients run; deploy/__init__.py, which says why, is imported too late.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Shared machines make single examples slow at random: no deadline. Failures print the blob that
# replays them; CI draws the same examples each time.
settings.register_profile(
    "deepinfer",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("deepinfer")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout that holds these tests."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with golden outputs and tiny models; the test skips where there is none.

    It is ``$DEEPINFER_SHARED_DATA`` if that is set (then it has to exist), or else
    ``../shared/data`` beside the repository.
    """
    named = os.environ.get("DEEPINFER_SHARED_DATA")
    folder = Path(named) if named else REPO_ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        if named:
            pytest.fail(f"DEEPINFER_SHARED_DATA={named!r} is not a folder")
        pytest.skip("needs ../shared/data or DEEPINFER_SHARED_DATA")
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file; the test skips unless `deepinfer model get` has cached it."""
    from deepinfer.deploy.models import SMOLLM2, cache_folder

    path = cache_folder() / "models" / Path(SMOLLM2.member).name
    if not path.is_file():
        pytest.skip("needs the demo model in the cache: deepinfer model get")
    return path


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _has_cuda():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _no_ray_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = request.path.relative_to(REPO_ROOT / "tests").parts[0]
    ray = sys.modules.get("ray")
    if folder in RAY_FOLDERS or ray is None:
        return

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"tests/{folder} may not start Ray; put the test in integration")

    monkeypatch.setattr(ray, "init", refuse)
