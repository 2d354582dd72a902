"""Regenerate the committed gRPC stubs from ``proto/*.proto``, or check that they are up to date.

    python proto/generate.py            rewrite proto/*_pb2.py, *_pb2.pyi and *_pb2_grpc.py
    python proto/generate.py --check    exit 1 and name each stub that differs; write nothing

The sources are compiled under the virtual path ``deepinfer/proto``, so that the stubs import one
another as ``deepinfer.proto.<name>_pb2``. Stubs whose source is gone are removed (or reported).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO_DIR = Path(__file__).resolve().parent
IMPORT_ROOT = "deepinfer/proto"
STUB_PATTERN = "*_pb2*.py*"
# What strict type checking has to overlook: grpc's plugin writes no annotations at all, protoc's
# says ``Mapping`` without arguments where a message takes another one as a dict.
MYPY_HEADERS = {
    "_pb2_grpc.py": "# mypy: ignore-errors\n",
    "_pb2.pyi": '# mypy: disable-error-code="type-arg"\n',
}


def compile_stubs(proto_dir: Path) -> dict[str, str]:
    """Return the stub files that the sources in ``proto_dir`` compile to, by file name.

    Raises:
        SystemExit: a source does not compile (protoc's own messages name the line), or
            grpcio-tools is not installed.
    """
    sources = sorted(path.name for path in proto_dir.glob("*.proto"))
    if not sources:
        return {}
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I",
            f"{IMPORT_ROOT}={proto_dir}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *(f"{IMPORT_ROOT}/{name}" for name in sources),
        ]
        # Run elsewhere: with the repository root on sys.path its folders hide installed packages.
        if subprocess.run(command, cwd=out, check=False).returncode != 0:
            sys.exit(f"cannot compile {', '.join(sources)}: see protoc's messages above")
        return {
            path.name: _finish(path) for path in sorted((Path(out) / IMPORT_ROOT).glob("*_pb2*"))
        }


def _finish(stub: Path) -> str:
    headers = (head for suffix, head in MYPY_HEADERS.items() if stub.name.endswith(suffix))
    return next(headers, "") + stub.read_text(encoding="utf-8")


def committed_stubs(proto_dir: Path) -> dict[str, str]:
    """Return the stub files that lie in ``proto_dir``, by file name."""
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(proto_dir.glob(STUB_PATTERN))}


def differences(wanted: dict[str, str], present: dict[str, str]) -> list[str]:
    """Name every stub that is missing, out of date or left over, with which of these it is."""
    found = []
    for name in sorted(wanted.keys() | present.keys()):
        if name not in present:
            found.append(f"{name}: missing")
        elif name not in wanted:
            found.append(f"{name}: its .proto file is gone")
        elif wanted[name] != present[name]:
            found.append(f"{name}: differs from what its .proto file compiles to")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Regenerate or check the gRPC stubs.")
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    parser.add_argument("--proto-dir", type=Path, default=PROTO_DIR, help="default: %(default)s")
    options = parser.parse_args(argv)
    proto_dir: Path = options.proto_dir.resolve()

    wanted, present = compile_stubs(proto_dir), committed_stubs(proto_dir)
    changes = differences(wanted, present)
    if options.check:
        for change in changes:
            print(f"proto/{change}", file=sys.stderr)
        if changes:
            print("run `make proto` and commit the result", file=sys.stderr)
        return 1 if changes else 0
    for name in present.keys() - wanted.keys():
        (proto_dir / name).unlink()
    for name, text in wanted.items():
        if present.get(name) != text:
            (proto_dir / name).write_text(text, encoding="utf-8")
    print("\n".join(f"proto/{change}" for change in changes) or "the stubs are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
