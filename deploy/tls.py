"""Certificates: the gateways', checked before anything is started, and what commands here trust.

The check is the handshake that clients will do, in memory: the files are served to a client that
trusts nothing but them.
"""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from deepinfer.deploy.config import ClusterConfig, ConfigError

if TYPE_CHECKING:
    from deepinfer.client import TlsOptions
    from deepinfer.deploy.running import Running
    from deepinfer.gateway.tls import ServerTls

EXPIRY_WARNING_DAYS = 14.0
ENVIRONMENT = {
    "ca": "DEEPINFER_TLS_CA",
    "cert": "DEEPINFER_TLS_CERT",
    "key": "DEEPINFER_TLS_KEY",
    "server_name": "DEEPINFER_TLS_SERVER_NAME",
}
"""What commands that connect read for the field of ``TlsOptions``."""
_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The gateways' certificate as a client sees it."""

    file: str
    """Absolute."""
    name: str | None
    """A name that it is for; None: it says none."""
    warnings: tuple[str, ...]


def check_server_tls(config: ClusterConfig) -> Certificate | None:
    """Make sure that clients can be served with the files that ``config`` names.

    Returns:
        The certificate; None without TLS.

    Raises:
        ConfigError: a file cannot be read or holds something else, the key is encrypted or
            another certificate's, or the certificate is not valid now; names the setting.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = _readable("tls_cert", config.tls_cert), _readable("tls_key", config.tls_key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _trust(server, "tls_cert", cert)
    try:
        server.load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _bad("tls_key", key, f"must be the key of tls_cert = {str(cert)!r}") from error
        raise _bad("tls_key", key, f"must be a PEM file with a private key: {error}") from error
    except _EncryptedKeyError as error:
        raise _bad("tls_key", key, "is encrypted: must be a key without a password") from error
    if config.tls_client_ca is not None:
        client_ca = _readable("tls_client_ca", config.tls_client_ca)
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "tls_client_ca", client_ca)
    return _certificate(cert, _handshake(server, cert))


def server_tls(config: ClusterConfig) -> ServerTls | None:
    """What a gateway is told; None without TLS."""
    from deepinfer.gateway.tls import ServerTls

    if config.tls_cert is None or config.tls_key is None:
        return None
    client_ca = config.tls_client_ca
    return ServerTls(
        cert_file=str(_absolute(config.tls_cert)),
        key_file=str(_absolute(config.tls_key)),
        client_ca_file=None if client_ca is None else str(_absolute(client_ca)),
    )


def client_tls(local: Running | None) -> TlsOptions | Literal[False]:
    """How a command connects: as the environment says, else trusting a local cluster's very file.

    Raises:
        ConfigError: the environment names a certificate without its key, or the reverse.
    """
    from deepinfer.client import TlsOptions

    options: dict[str, Any] = {}
    if local is not None and local.tls_cert is not None:
        options = {"ca": local.tls_cert, "server_name": local.tls_server_name}
    for field, variable in ENVIRONMENT.items():
        if value := os.environ.get(variable):
            options[field] = value
    try:
        if not options:
            return False
        tls = TlsOptions(**options)
        tls.credentials()
    except ValueError as error:
        names = ", ".join(ENVIRONMENT.values())
        raise ConfigError(f"{error} (from the environment: {names})") from error
    return tls


class _EncryptedKeyError(Exception):
    """OpenSSL asks for a password."""


def _refuse_password() -> NoReturn:
    raise _EncryptedKeyError


def _bad(name: str, path: Path, what: str) -> ConfigError:
    return ConfigError(f"{name} = {str(path)!r}: {what}")


def _absolute(file: str) -> Path:
    return Path(file).expanduser().absolute()


def _readable(name: str, file: str) -> Path:
    path = _absolute(file)
    try:
        with path.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        raise _bad(name, path, f"cannot be read: {error.strerror}") from error
    return path


def _trust(context: ssl.SSLContext, name: str, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise _bad(name, path, f"must be a PEM file with a certificate: {error}") from error


def _handshake(server: ssl.SSLContext, cert: Path) -> dict[str, Any]:
    """What a client that trusts this file alone reads in it.

    Raises:
        ConfigError: the client refuses it.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # which names clients use is not known here
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cafile=cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for _ in range(4):  # TLS 1.3 takes two of them
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        read: dict[str, Any] | None = ends[0].getpeercert()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            raise _bad("tls_cert", cert, "has expired") from error
        if error.verify_code == _NOT_YET_VALID:
            raise _bad("tls_cert", cert, "is not valid yet") from error
        raise _bad("tls_cert", cert, f"no client would take it: {error}") from error
    except (ssl.SSLError, ValueError) as error:
        raise _bad("tls_cert", cert, f"no handshake is possible: {error}") from error
    assert read is not None, "a client always sees a certificate"
    return read


def _certificate(cert: Path, read: dict[str, Any]) -> Certificate:
    names = read.get("subjectAltName", ())
    found = [name for kind, name in names if kind == "DNS"]
    found += [name for kind, name in names if kind == "IP Address"]
    warnings = []
    if not found:
        found = [v for part in read["subject"] for k, v in part if k == "commonName"]
        warnings.append(
            f"tls_cert = {str(cert)!r} has no subject alternative name: many clients refuse that"
        )
    days = (ssl.cert_time_to_seconds(read["notAfter"]) - time.time()) / 86_400
    if days < EXPIRY_WARNING_DAYS:
        warnings.append(f"tls_cert = {str(cert)!r} expires in {days:.1f} days")
    name = found[0].replace("*", "any", 1) if found else None
    return Certificate(file=str(cert), name=name, warnings=tuple(warnings))
