"""``deepinfer up`` with certificates both ways, and the commands beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deepinfer.client import TlsOptions
from deepinfer.gateway.health import INFERENCE
from support.certificates import Authority
from support.cluster import processes_with, tiny_model

MARK = "XDG_STATE_HOME"
START_S = 120.0


def test_commands_find_what_they_need(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    # No name in it is that of the endpoint: only who has the very certificate can tell.
    pair, mine = authority.issue("gateway", ("gw.example",)), authority.issue("me", ())
    environment = {**os.environ, MARK: str(tmp_path), "COLUMNS": "200", "NO_COLOR": "1"}
    with_certificate = environment | {
        "DEEPINFER_TLS_CERT": str(mine.cert),
        "DEEPINFER_TLS_KEY": str(mine.key),
    }

    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-c", "from deepinfer.deploy.cli import main; main()", *arguments]

    def run(environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            command(*arguments), env=environment, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    flags = [
        *("--model", str(tiny_model(tmp_path)), "--port", "0", "--max-cache", "32 blocks"),
        *("--tls-cert", str(pair.cert), "--tls-client-ca", str(authority.root)),
    ]
    code, _, said = run(environment, "up", *flags, "--tls-key", str(mine.key))
    assert code == 1
    assert said.startswith(f"error: tls_key = '{mine.key}': must be the key of tls_cert"), said

    log = tmp_path / "up.log"
    with log.open("w") as file:
        up = subprocess.Popen(
            command("up", *flags, "--tls-key", str(pair.key)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while "Ctrl-C stops" not in log.read_text():
            assert up.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        code, out, said = run(with_certificate, "generate", "hello", "--max-tokens", "4")
        assert (code, said) == (0, ""), said
        assert out.strip()
        code, out, said = run(with_certificate, "status", "--json")
        assert code == 0, said
        assert json.loads(out)["gateway"]["counters"]["deepinfer_requests_accepted_total"] == 1
        code, _, said = run(environment, "status")
        assert code == 1
        assert "may want a client certificate that it trusts" in said
        remembered = json.loads(next((tmp_path / "deepinfer").glob("*.json")).read_text())
        endpoint = remembered["endpoints"][0]
        # What a prober does: it has a certificate and no token.
        tls = TlsOptions(ca=authority.root, cert=mine.cert, key=mine.key, server_name="gw.example")
        with grpc.secure_channel(endpoint, tls.credentials(), tls.channel_options()) as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            health = probe.Check(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        # By another machine's eyes: the root and the name.
        stranger = with_certificate | {
            MARK: str(tmp_path / "elsewhere"),
            "DEEPINFER_TLS_CA": str(authority.root),
        }
        arguments = ("status", "--endpoint", endpoint, "--token-file")
        token_file = str(tmp_path / "deepinfer" / "token")
        code, _, said = run(stranger, *arguments, token_file)
        assert code == 1
        assert "Hostname Verification Check failed" in said
        named = stranger | {"DEEPINFER_TLS_SERVER_NAME": "gw.example"}
        assert run(named, *arguments, token_file)[0] == 0
        assert run(environment, "down")[0] == 0
        assert up.wait(timeout=40) == 0
    finally:
        for pid in [up.pid, *processes_with(MARK, str(tmp_path))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        up.wait()
