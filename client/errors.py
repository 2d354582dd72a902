"""What can go wrong for a caller.

::

    DeepInferError
    ├── InvalidRequest        the request cannot be served as written; .fields says what is wrong
    ├── ModelNotFound         another model is served
    ├── Unauthenticated       no token, a wrong one, or another request's resume key
    ├── ResourceExhausted     a gateway's bound, a message beyond its size, or no KV pool could
    │                         ever hold the request
    ├── Unavailable           nothing was heard from any endpoint for too long
    │   └── Untrusted             TLS: no endpoint has a certificate and name that this client
    │                             trusts, or they do not trust this client, or speak no TLS
    ├── RequestFailed         it has ended without an answer
    │   ├── DeadlineExceeded      its deadline passed; .completion is what there was by then
    │   ├── Aborted               this client aborted it
    │   └── Replaced              another client resumed it
    ├── ProtocolError         a gateway answered what no gateway should
    └── ClientClosed          the client was used after, or was in use during, close()

Lost connections are no errors: the SDK comes back by itself, to any of its endpoints. Arguments
that cannot be right on any cluster raise ValueError or TypeError where they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.client.results import Completion


class DeepInferError(Exception):
    """The root of the tree. ``code`` is the gRPC status name behind it, if there was one."""

    def __init__(self, message: str, *, code: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


class InvalidRequest(DeepInferError):
    """The request cannot be served as written."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "INVALID_ARGUMENT",
        request_id: str = "",
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, code=code, request_id=request_id)
        self.fields = dict(fields or {})
        """Field name to what is wrong with it, its value and what is legal."""


class ModelNotFound(DeepInferError):
    """Another model is served."""


class Unauthenticated(DeepInferError):
    """No token, a wrong one, or another request's resume key."""


class ResourceExhausted(DeepInferError):
    """A bound, or no KV pool could ever hold the request: the message has the numbers."""


class Unavailable(DeepInferError):
    """Nothing was heard from any endpoint for too long."""


class Untrusted(Unavailable):
    """TLS does not come about with any endpoint; the message says which side does not want it."""


class RequestFailed(DeepInferError):
    """A request has ended without an answer."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed."""

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message, code="DEADLINE_EXCEEDED", request_id=completion.request_id)
        self.completion = completion
        """What was received by then; without a request id if no gateway had accepted it."""


class Aborted(RequestFailed):
    """This client aborted the request."""


class Replaced(RequestFailed):
    """Another client resumed the request with its resume key."""


class ProtocolError(DeepInferError):
    """A gateway answered what no gateway should."""


class ClientClosed(DeepInferError):
    """The client was used after, or was in use during, ``close``."""
