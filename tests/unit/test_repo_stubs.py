"""The committed gRPC stubs are what proto/*.proto compiles to, and the runtime floors fit them."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from deepinfer.proto import generate

PING = """syntax = "proto3";
package deepinfer.v1;
message Ping { optional uint32 n = 1; }
service Pinger { rpc Say(Ping) returns (Ping); }
"""
needs_protoc = pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="needs grpcio-tools"
)


@needs_protoc
def test_committed_stubs_are_current(repo_root: Path) -> None:
    proto = repo_root / "proto"
    assert (
        generate.differences(generate.compile_stubs(proto), generate.committed_stubs(proto)) == []
    )


@needs_protoc
def test_generate_writes_and_check_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ping.proto").write_text(PING)
    (tmp_path / "gone_pb2.py").write_text("")
    where = ["--proto-dir", str(tmp_path)]

    assert generate.main(["--check", *where]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "proto/gone_pb2.py: its .proto file is gone",
        "proto/ping_pb2.py: missing",
        "proto/ping_pb2.pyi: missing",
        "proto/ping_pb2_grpc.py: missing",
        "run `make proto` and commit the result",
    ]
    assert generate.main(where) == 0
    assert {p.name for p in tmp_path.iterdir()} == {
        "ping.proto",
        "ping_pb2.py",
        "ping_pb2.pyi",
        "ping_pb2_grpc.py",
    }
    assert generate.main(["--check", *where]) == 0
    assert "from deepinfer.proto import ping_pb2" in (tmp_path / "ping_pb2_grpc.py").read_text()

    (tmp_path / "ping.proto").write_text(PING.replace("uint32", "uint64"))
    capsys.readouterr()
    assert generate.main(["--check", *where]) == 1
    assert "proto/ping_pb2.py: differs" in capsys.readouterr().err


@needs_protoc
def test_broken_source_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ping.proto").write_text(PING + "oops\n")
    with pytest.raises(SystemExit, match=r"cannot compile ping\.proto"):
        generate.compile_stubs(tmp_path)
    assert "ping.proto:5:1" in capfd.readouterr().err


def test_runtime_floors_are_what_the_stubs_were_made_with(repo_root: Path) -> None:
    """An older grpcio or protobuf would raise at import: pip has to refuse it first."""
    with (repo_root / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    floors = dict(re.findall(r"^(grpcio|protobuf)>=([\d.]+)", "\n".join(dependencies), re.M))
    for stub in sorted((repo_root / "proto").glob("*_pb2.py")):
        assert f"# Protobuf Python Version: {floors['protobuf']}\n" in stub.read_text("utf-8")
        rpc = stub.with_name(f"{stub.stem}_grpc.py")
        assert f"GRPC_GENERATED_VERSION = '{floors['grpcio']}'\n" in rpc.read_text("utf-8")
