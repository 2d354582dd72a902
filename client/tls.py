"""TLS: what a client trusts, what it proves itself with, and how to read that it did not work."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import grpc

PemFile: TypeAlias = "str | PathLike[str]"

# What gRPC says of a connection on which this side ended the handshake.
_HANDSHAKE = (
    "Tls handshake failed",
    "Ssl handshake failed",
    "Custom verification check failed",
)
# And of one that the other side closed before it said a word of HTTP/2.
_CLOSED = ("Socket closed", "Connection reset by peer", "recvmsg:Connection reset")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Files are PEM, and are read when the client is made.

    Raises:
        ValueError: a certificate without its key, a key without its certificate, an unreadable
            file, or one that holds no such thing; names the field.
    """

    ca: PemFile | None = None
    """The roots to trust, or the very certificate of the gateways; None: what the system trusts."""
    cert: PemFile | None = None
    """This client's certificate, for gateways that ask for one (mTLS)."""
    key: PemFile | None = None
    server_name: str | None = None
    """The name that the gateways' certificate must have; None: the endpoint's host."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise ValueError(f"tls.{given} is given without tls.{missing}: must be both or none")
        if self.server_name == "":
            raise ValueError("tls.server_name = '': must not be empty")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files."""
        return grpc.ssl_channel_credentials(
            _read("ca", self.ca, "CERTIFICATE"),
            _read("key", self.key, "PRIVATE KEY"),
            _read("cert", self.cert, "CERTIFICATE"),
        )

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """What a channel has to be told besides."""
        if self.server_name is None:
            return ()
        return (("grpc.ssl_target_name_override", self.server_name),)


def _read(name: str, file: PemFile | None, holds: str) -> bytes | None:
    if file is None:
        return None
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"tls.{name} = {str(file)!r}: cannot be read: {error}") from error
    if f"{holds}-----".encode() not in data:
        raise ValueError(f"tls.{name} = {str(file)!r}: must be a PEM file with a {holds}")
    return data


def handshake_failed(error: grpc.aio.AioRpcError) -> bool:
    """Whether this side refused the connection: wrong certificate, wrong name, or no TLS there."""
    return any(words in (error.details() or "") for words in _HANDSHAKE)


def closed_at_once(error: grpc.aio.AioRpcError) -> bool:
    """Whether the other side closed the connection before it said anything.

    So does one that speaks TLS to a client that does not, and one that wants a certificate from a
    client that has none or another's; and one that is just going down.
    """
    details = error.details() or ""
    return "failed to connect" in details and any(words in details for words in _CLOSED)


def advice(error: grpc.aio.AioRpcError, *, secure: bool) -> str:
    """What to do about a connection that did not come about, to be put behind what gRPC says."""
    if handshake_failed(error):
        return " (the gateway's certificate or name is not trusted, or it speaks no TLS: see `tls`)"
    if closed_at_once(error) and secure:
        return " (the gateway may want a client certificate that it trusts: TlsOptions.cert, .key)"
    if closed_at_once(error):
        return " (the gateway may want TLS: grpcs://host:port, or `tls`)"
    return ""
