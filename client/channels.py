"""One channel to each endpoint, with the bearer token on every call."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from deepinfer.proto import inference_pb2_grpc
from deepinfer.proto.bearer import bearer

CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # the core retries, and knows what it has
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The least that a connection attempt is given, and no pause: a busy gateway, or one far away,
    # takes a while to answer.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 4 << 20),
)


class Channels:
    """Channels, made when first used.

    Raises:
        ValueError: no endpoint, or the token is empty.
    """

    def __init__(self, endpoints: str | Sequence[str], token: str) -> None:
        self.endpoints = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
        if not self.endpoints or not all(self.endpoints):
            raise ValueError(f"endpoints = {endpoints!r}: must be host:port, one or more")
        self.metadata = bearer(token)
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(self, endpoint: str) -> inference_pb2_grpc.InferenceStub:
        """The Inference service at an endpoint."""
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            self._channels[endpoint] = channel
        return inference_pb2_grpc.InferenceStub(channel)

    async def close(self) -> None:
        """Close every channel; calls under way end as cancelled."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)
