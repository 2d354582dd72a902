"""Calls to the stores' gRPC service, over one channel a store."""

from __future__ import annotations

import grpc
import structlog

from deepinfer.controller import wire
from deepinfer.kvstore.core.messages import Release, Reserve, StoreReply, StoreStatus
from deepinfer.proto import kvstore_pb2_grpc
from deepinfer.proto.bearer import bearer

log = structlog.get_logger(__name__)

TIMEOUT_S = 1.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class GrpcStores:
    """Implements ``ports.StoreCalls``. Make and use it in one event loop."""

    def __init__(self, token: str) -> None:
        self._metadata = bearer(token)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def call(self, address: str, call: Reserve | Release) -> StoreReply:
        """Return the store's answer; ``StoreStatus.UNREACHABLE`` if there was none in time."""
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
            self._channels[address] = channel
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        try:
            if isinstance(call, Reserve):
                said = await stub.Reserve(
                    wire.reserve_to(call), timeout=TIMEOUT_S, metadata=self._metadata
                )
            else:
                said = await stub.Release(
                    wire.release_to(call), timeout=TIMEOUT_S, metadata=self._metadata
                )
            return wire.store_reply_from(said)
        except grpc.aio.AioRpcError as error:
            log.info("store call failed", address=address, code=error.code().name)
        except wire.WireError as error:
            log.warning("store answered nonsense", address=address, error=str(error))
        return StoreReply(call.ticket, StoreStatus.UNREACHABLE, 0, 0)

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()
