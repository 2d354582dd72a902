"""One channel to each endpoint, with the bearer token on every call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from deepinfer.client.tls import TlsOptions
from deepinfer.proto import inference_pb2_grpc
from deepinfer.proto.bearer import bearer

MESSAGE_BYTES_MAX = 4 << 20
"""Of a request as it is first sent, and of any message from a gateway."""
_ADDRESS = re.compile(r"[^/\s]+:\d{1,5}")
CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # the core retries, and knows what it has
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # or gRPC waits a minute for the answer
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The least that a connection attempt is given, and no pause: a busy gateway, or one far away,
    # takes a while to answer.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)


class Place(NamedTuple):
    """What an endpoint's spelling says."""

    address: str
    secure: bool

    @classmethod
    def parse(cls, endpoint: str, *, tls: bool) -> Place:
        """Read ``host:port``, ``grpc://host:port`` or ``grpcs://host:port``.

        ``tls``: what the client was told; then the endpoints that do not say use TLS too.

        Raises:
            ValueError: another scheme, no host or port, or ``grpc://`` though ``tls`` was asked.
        """
        scheme, separator, address = endpoint.partition("://")
        if not separator:
            scheme, address = ("grpcs" if tls else "grpc"), endpoint
        if scheme not in ("grpc", "grpcs") or not _ADDRESS.fullmatch(address):
            raise ValueError(
                f"endpoint {endpoint!r}: must be host:port, grpc://host:port or grpcs://host:port"
            )
        if tls and scheme == "grpc":
            raise ValueError(f"endpoint {endpoint!r}: is without TLS, and tls was asked for")
        return cls(address, scheme == "grpcs")


class Channels:
    """Channels, made when first used.

    Args:
        endpoints: ``host:port``, ``grpc://host:port``, or ``grpcs://host:port`` for TLS.
        token: the cluster's bearer token.
        tls: how; True, or an endpoint with ``grpcs://`` alone, trusts what the system does.

    Raises:
        ValueError: no endpoint, one that cannot be read, an empty token, or bad ``tls``.
    """

    def __init__(
        self, endpoints: str | Sequence[str], token: str, tls: bool | TlsOptions = False
    ) -> None:
        self.endpoints = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
        if not self.endpoints or not all(self.endpoints):
            raise ValueError(f"endpoints = {endpoints!r}: must be host:port, one or more")
        self.metadata = bearer(token)
        self._places = {e: Place.parse(e, tls=bool(tls)) for e in self.endpoints}
        self._tls = tls if isinstance(tls, TlsOptions) else TlsOptions()
        secure = any(place.secure for place in self._places.values())
        self._credentials = self._tls.credentials() if secure else None
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(self, endpoint: str) -> inference_pb2_grpc.InferenceStub:
        """The Inference service at an endpoint."""
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = self._open(self._places[endpoint])
        return inference_pb2_grpc.InferenceStub(channel)

    def secure(self, endpoint: str) -> bool:
        """Whether an endpoint is spoken to by TLS."""
        return self._places[endpoint].secure

    def _open(self, place: Place) -> grpc.aio.Channel:
        if not place.secure:
            return grpc.aio.insecure_channel(place.address, options=CHANNEL_OPTIONS)
        assert self._credentials is not None, "read for the first secure endpoint"
        options = CHANNEL_OPTIONS + self._tls.channel_options()
        return grpc.aio.secure_channel(place.address, self._credentials, options=options)

    async def close(self) -> None:
        """Close every channel; calls under way end as cancelled."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)
