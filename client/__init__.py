"""The Python SDK: ``Client`` and ``AsyncClient``, one implementation.

``core/`` decides when to reconnect and what has been received; the modules beside it talk gRPC.
Nothing here may import another part of DeepInfer except ``proto`` and the shared vocabulary in
``kvstore.core``.

    with Client("127.0.0.1:7470", token=token) as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        for event in client.stream("Once upon a time", temperature=0.0):
            if isinstance(event, Delta | Finished):
                print(event.text, end="")
"""

from deepinfer.client.aio import AsyncClient
from deepinfer.client.core.config import ClientConfig
from deepinfer.client.errors import (
    Aborted,
    ClientClosed,
    DeadlineExceeded,
    DeepInferError,
    InvalidRequest,
    ModelNotFound,
    ProtocolError,
    Replaced,
    RequestFailed,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Untrusted,
)
from deepinfer.client.request import Options
from deepinfer.client.results import (
    Accepted,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    Model,
    Notice,
    PromptDelta,
    Retrying,
    SwapStats,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from deepinfer.client.stream import AsyncStream
from deepinfer.client.sync import Client, Stream
from deepinfer.client.tls import TlsOptions

__all__ = [
    "Aborted",
    "Accepted",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "ClientClosed",
    "ClientConfig",
    "Completion",
    "DeadlineExceeded",
    "DeepInferError",
    "Delta",
    "Event",
    "Finished",
    "InvalidRequest",
    "Model",
    "ModelNotFound",
    "Notice",
    "Options",
    "PromptDelta",
    "ProtocolError",
    "Replaced",
    "RequestFailed",
    "ResourceExhausted",
    "Retrying",
    "Stream",
    "SwapStats",
    "Timings",
    "TlsOptions",
    "TokenLogprob",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "Untrusted",
    "Usage",
]
