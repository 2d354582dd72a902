"""gRPC ignores an option it does not know without a word: each of ours has to be one it knows."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from deepinfer.controller.service import SERVER_OPTIONS as CONTROLLER_OPTIONS
from deepinfer.gateway.service import SERVER_OPTIONS as GATEWAY_OPTIONS


def options(source: str) -> set[str]:
    """The names in all pairs ``("grpc.…", value)``."""
    return {
        node.elts[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Tuple) and len(node.elts) == 2
        if isinstance(node.elts[0], ast.Constant) and isinstance(node.elts[0].value, str)
        if node.elts[0].value.startswith("grpc.")
    }


def test_every_option_is_one_of_the_librarys(repo_root: Path) -> None:
    spec = find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).read_bytes()
    folders = [repo_root / link.name for link in (repo_root / "src/deepinfer").iterdir()]
    named = {
        option: path.relative_to(repo_root)
        for folder in folders
        for path in folder.rglob("*.py")
        for option in options(path.read_text("utf-8"))
    }
    assert {"grpc.so_reuseport", "grpc.keepalive_time_ms", "grpc.enable_retries"} <= named.keys()
    unknown = [
        f"{path}: {option}" for option, path in named.items() if option.encode() not in library
    ]
    assert not unknown, "\n".join(unknown)


def test_servers_bear_pings_as_often_as_their_peers_send_them() -> None:
    for server in (CONTROLLER_OPTIONS, GATEWAY_OPTIONS):
        assert dict(server)["grpc.http2.min_ping_interval_without_data_ms"] < 20_000
