"""A real cluster that is used, misused and killed: what it wrote, where it listens, who gets in."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from deepinfer.client import Client, TlsOptions, Unauthenticated
from deepinfer.deploy import actors as actors_module
from deepinfer.deploy.access import CONTROLLER
from deepinfer.deploy.cluster import Cluster
from deepinfer.proto.access import RULES, Access
from deepinfer.proto.bearer import bearer
from support.certificates import Authority
from support.cluster import processes_with, tiny_cluster

CLUSTER_TOKEN = "the-cluster-token-of-this-very-test"
HUB_TOKEN = "hf_the-hub-token-of-this-very-test"
LISTENING = "0A"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def used(folder: Path) -> Iterator[Cluster]:
    """A cluster with TLS, after a good client, a bad one, and the death of its worker."""
    authority = Authority(folder / "certificates")
    pair = authority.issue("gateway")
    # What its processes prove themselves with; otherwise it is as random as it should be.
    numbers = itertools.count()
    known = SimpleNamespace(**{name: getattr(secrets, name) for name in secrets.__all__})
    known.token_urlsafe = lambda _: f"{CLUSTER_TOKEN}-{next(numbers)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors_module, "secrets", known)
        patch.setenv("HF_TOKEN", HUB_TOKEN)
        tls = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
        with tiny_cluster(folder, max_cache="32 blocks", log_level="info", **tls) as cluster:
            trusted = TlsOptions(ca=authority.root)
            with Client(cluster.endpoints[0], token=cluster.token, tls=trusted) as client:
                assert client.generate("hello", max_tokens=4).token_ids
                with (
                    Client(cluster.endpoints[0], token="x" * 40, tls=trusted) as stranger,
                    pytest.raises(Unauthenticated),
                ):
                    stranger.generate("hello", max_tokens=4)
                os.kill(cluster.pid("worker-0"), signal.SIGKILL)
                assert client.generate("hello again", max_tokens=4).token_ids
            yield cluster


def test_no_secret_is_in_any_log(used: Cluster, folder: Path) -> None:
    assert used.ray.session is not None
    logs = [path for path in (used.ray.session / "logs").rglob("*") if path.is_file()]
    written = {path: path.read_bytes() for path in logs}
    assert sum(map(len, written.values())) > 1_000
    assert any(path.name.startswith("worker-") for path in logs)
    key = (folder / "certificates" / "gateway.key").read_text().splitlines()[1]
    wanted = {"token": used.token, "cluster": CLUSTER_TOKEN, "hub": HUB_TOKEN, "key": key}
    found = [
        f"{name} in {path.name}"
        for path, data in written.items()
        for name, secret in wanted.items()
        if secret.encode() in data
    ]
    assert not found, found


def test_no_secret_is_in_a_command_line(used: Cluster, folder: Path) -> None:
    lines = processes_with("XDG_STATE_HOME", str(folder / "state")).values()
    assert len(lines) > 4
    assert not [line for line in lines if used.token in line or CLUSTER_TOKEN in line]


def test_the_token_file_is_its_owners_alone(used: Cluster) -> None:
    assert used.token_file.stat().st_mode & 0o077 == 0


def test_everything_listens_on_loopback(used: Cluster, folder: Path) -> None:
    listening = _listening()
    found = []
    for pid, line in processes_with("XDG_STATE_HOME", str(folder / "state")).items():
        for inode in _sockets(pid) & listening.keys():
            address, port = listening[inode]
            if not address.is_loopback:
                found.append(f"{address}:{port} of {line[:60]}")
    assert len(listening) > 4
    assert not found, found


def test_a_clients_token_opens_nothing_inside(used: Cluster) -> None:
    """The real processes': their addresses are in the status document."""
    import ray

    status = ray.get(used.actors[CONTROLLER].status.remote())
    inside = {*status["addresses"].values(), ray.get(used.actors[CONTROLLER].address.remote())}
    assert len(inside) == 3  # store, controller, and the gateway's port for workers
    metadata = bearer(used.token)
    tried = 0
    for address in inside:
        with grpc.insecure_channel(address) as channel:
            for method, access in RULES.items():
                if access is Access.OPEN:
                    continue
                call = channel.stream_stream(method, None, None)(
                    iter([b""]), metadata=metadata, timeout=5
                )
                assert call.code() is grpc.StatusCode.UNAUTHENTICATED, (address, method)
                tried += 1
    assert tried == 3 * (len(RULES) - 1)


def test_ray_lets_nobody_in_without_its_token(used: Cluster) -> None:
    import ray

    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", None, None)
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"", timeout=5)
    code = refused.value.code()
    assert code is grpc.StatusCode.UNAUTHENTICATED


def _listening() -> dict[str, tuple[IPv4Address | IPv6Address, int]]:
    """Every TCP socket of this machine that listens, by its inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                address = ip_address(b"".join(words))
                mapped = getattr(address, "ipv4_mapped", None)
                found[fields[9]] = mapped or address, int(port, 16)
    return found


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found
