"""Certificates are checked before anything starts, and commands know what to trust."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from deepinfer.deploy.config import ClusterConfig, ConfigError, load_config
from deepinfer.deploy.launch import connect
from deepinfer.deploy.running import Running, process_ticks, remember
from deepinfer.deploy.tls import ENVIRONMENT, check_server_tls, client_tls, server_tls
from support.certificates import Authority, Pair


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for variable in ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def config(pair: Pair, client_ca: Path | None = None) -> ClusterConfig:
    ca = None if client_ca is None else str(client_ca)
    return ClusterConfig(tls_cert=str(pair.cert), tls_key=str(pair.key), tls_client_ca=ca)


def test_good_files_are_told_with_a_name_and_no_warning(authority: Authority) -> None:
    pair = authority.issue("gateway", ("10.1.2.3", "gw.example", "*.example"))
    found = check_server_tls(config(pair, authority.root))
    assert found is not None
    assert (found.file, found.name, found.warnings) == (str(pair.cert), "gw.example", ())
    told = server_tls(config(pair, authority.root))
    assert told is not None
    assert told.credentials() is not None
    assert (told.cert_file, told.client_ca_file) == (str(pair.cert), str(authority.root))


def test_without_tls_there_is_nothing_to_check() -> None:
    assert check_server_tls(ClusterConfig()) is None
    assert server_tls(ClusterConfig()) is None
    assert client_tls(None) is False


def test_a_chain_in_the_file_is_taken(authority: Authority) -> None:
    pair = authority.issue("gateway")
    pair.cert.write_bytes(pair.cert.read_bytes() + authority.root.read_bytes())
    found = check_server_tls(config(pair))
    assert found is not None
    assert found.name == "localhost"


def test_names_that_clients_may_not_take(authority: Authority) -> None:
    only_wildcard = check_server_tls(config(authority.issue("a", ("*.example",))))
    assert only_wildcard is not None
    assert only_wildcard.name == "any.example"
    nameless = check_server_tls(config(authority.issue("plain", ())))
    assert nameless is not None
    assert nameless.name == "plain"
    assert "no subject alternative name" in nameless.warnings[0]


def _expired(authority: Authority, _: Path) -> ClusterConfig:
    return config(authority.issue("gateway", days=(-9.0, -1.0)))


def _early(authority: Authority, _: Path) -> ClusterConfig:
    return config(authority.issue("gateway", days=(1.0, 9.0)))


def _anothers_key(authority: Authority, _: Path) -> ClusterConfig:
    return config(Pair(cert=authority.issue("a").cert, key=authority.issue("b").key))


def _encrypted(authority: Authority, _: Path) -> ClusterConfig:
    return config(authority.issue("gateway", password=b"secret"))


def _absent(authority: Authority, folder: Path) -> ClusterConfig:
    return config(Pair(cert=folder / "none.pem", key=authority.issue("a").key))


def _folder(authority: Authority, folder: Path) -> ClusterConfig:
    return config(Pair(cert=authority.issue("a").cert, key=folder))


def _noise(authority: Authority, folder: Path) -> ClusterConfig:
    (folder / "noise.pem").write_text("hello")
    return config(Pair(cert=folder / "noise.pem", key=authority.issue("a").key))


def _noise_as_key(authority: Authority, folder: Path) -> ClusterConfig:
    pair = authority.issue("a")
    return config(Pair(cert=pair.cert, key=pair.cert))


def _noise_as_roots(authority: Authority, folder: Path) -> ClusterConfig:
    pair = authority.issue("a")
    return config(pair, pair.key)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_expired, r"tls_cert = '.*gateway\.pem': has expired"),
        (_early, r"tls_cert = '.*gateway\.pem': is not valid yet"),
        (_anothers_key, r"tls_key = '.*b\.key': must be the key of tls_cert = '.*a\.pem'"),
        (_encrypted, r"tls_key = '.*gateway\.key': is encrypted"),
        (_absent, r"tls_cert = '.*none\.pem': cannot be read: No such file"),
        (_folder, r"tls_key = '.*': cannot be read: Is a directory"),
        (_noise, r"tls_cert = '.*noise\.pem': must be a PEM file with a certificate"),
        (_noise_as_key, r"tls_key = '.*a\.pem': must be a PEM file with a private key"),
        (_noise_as_roots, r"tls_client_ca = '.*a\.key': must be a PEM file with a certificate"),
    ],
)
def test_a_file_that_cannot_serve_is_named(
    authority: Authority,
    tmp_path: Path,
    make: Callable[[Authority, Path], ClusterConfig],
    words: str,
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_server_tls(make(authority, tmp_path))


def test_one_that_expires_soon_is_warned_of(authority: Authority) -> None:
    found = check_server_tls(config(authority.issue("gateway", days=(-1.0, 3.5))))
    assert found is not None
    assert "expires in 3.5 days" in found.warnings[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tls_cert": "c.pem"}, r"tls_cert = 'c\.pem' without tls_key: must be both or none"),
        ({"tls_key": "k.pem"}, r"tls_key = 'k\.pem' without tls_cert"),
        ({"tls_client_ca": "r.pem"}, r"tls_client_ca = 'r\.pem' has no meaning without tls_cert"),
        ({"tls_cert": ""}, "tls_cert = ''"),
    ],
)
def test_half_of_it_is_refused(values: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, values)


def test_the_outside_without_tls_is_warned_of() -> None:
    assert "not encrypted" in ClusterConfig(host="0.0.0.0").warnings()[0]
    [reachable] = ClusterConfig(host="0.0.0.0", tls_cert="c", tls_key="k").warnings()
    assert "not loopback" in reachable
    assert "not encrypted" not in reachable


def test_commands_trust_the_local_clusters_file(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = authority.issue("gateway", ("gw.example",))
    ticks = process_ticks(os.getpid())
    assert ticks is not None
    token_file = tmp_path / "token"
    token_file.write_text("a-token-of-some-length")
    here = Running(
        endpoints=("127.0.0.1:7470",),
        pid=os.getpid(),
        started_ticks=ticks,
        token_file=str(token_file),
        model="demo",
        tls_cert=str(pair.cert),
        tls_server_name="gw.example",
    )
    remember(here)
    tls = client_tls(here)
    assert tls
    assert (tls.ca, tls.server_name, tls.cert) == (str(pair.cert), "gw.example", None)
    for endpoint in (None, "127.0.0.1:7470", "grpcs://127.0.0.1:7470"):
        connect(endpoint, None).close()
    with pytest.raises(ConfigError, match="is without TLS, and tls was asked for"):
        connect("grpc://127.0.0.1:7470", None)

    monkeypatch.setenv("DEEPINFER_TLS_CERT", str(pair.cert))
    with pytest.raises(ConfigError, match=r"tls\.cert is given without tls\.key.*DEEPINFER"):
        connect(None, None)
    monkeypatch.setenv("DEEPINFER_TLS_KEY", str(pair.key))
    monkeypatch.setenv("DEEPINFER_TLS_CA", str(authority.root))
    tls = client_tls(here)
    assert tls
    assert (tls.ca, tls.cert) == (str(authority.root), str(pair.cert))
    shutil.rmtree(authority.root.parent)
    with pytest.raises(ConfigError, match=r"tls\.ca = .*cannot be read"):
        connect(None, None)


def test_another_key_type_and_format(authority: Authority) -> None:
    pair = authority.issue("gateway")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    assert check_server_tls(config(pair)) is not None
