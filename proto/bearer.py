"""The bearer tokens on every RPC between the cluster's processes and its clients.

It lives beside the contracts because it is part of each of them, and needs nothing of ours but
their table of rules (``proto.access``).
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import grpc.aio

from deepinfer.proto.access import RULES, Access

HEADER = "authorization"
MISSING = "the metadata need authorization: Bearer <token>"
WRONG = "the bearer token is not this cluster's"
NO_RULE = "no rule lets anyone make this call"
OTHER_ROLE: Final[Mapping[Access, str]] = {
    Access.CLIENT: "this call is made by clients: the cluster's own token is not for it",
    Access.CLUSTER: "this call is made between the cluster's processes: the clients' token is not "
    "for it",
    Access.OPERATOR: "this call is made by the cluster's operator: no other token is for it",
}
"""By what the call would need."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    """Metadata that carry the token.

    Raises:
        ValueError: the token is empty, or has what no header may have.
    """
    if not token:
        raise ValueError("token = '': must not be empty")
    if token != token.strip() or not all(" " <= c <= "~" for c in token):
        # Not shown: all but one character may be right.
        raise ValueError("token: must be printable ASCII; what was read from a file needs .strip()")
    return ((HEADER, f"Bearer {token}"),)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Refuses every call, known or not, that no rule grants to the bearer of its token.

    UNAUTHENTICATED without a token of this server, PERMISSION_DENIED with one of another role and
    for calls that have no rule: a method that is added to a service starts out closed.

    Args:
        client: the clients' token; None where no client has anything to ask.
        cluster: the cluster's own token; None where none of its processes has.
        operator: the operator's token; None where there is nothing to operate.
        rules: what each method needs.

    Raises:
        ValueError: as ``bearer``; or no token is given, or two are the same.
    """

    def __init__(
        self,
        *,
        client: str | None = None,
        cluster: str | None = None,
        operator: str | None = None,
        rules: Mapping[str, Access] = RULES,
    ) -> None:
        named = {Access.CLIENT: client, Access.CLUSTER: cluster, Access.OPERATOR: operator}
        given = [token for token in named.values() if token is not None]
        if not given or len(set(given)) < len(given):
            raise ValueError("client, cluster and operator: must be different tokens, at least one")
        self._expected = tuple(
            (access, bearer(token)[0][1].encode())
            for access, token in named.items()
            if token is not None
        )
        self._rules = rules
        unauthenticated, denied = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
        self._missing = _refusing(unauthenticated, MISSING)
        self._wrong = _refusing(unauthenticated, WRONG)
        self._no_rule = _refusing(denied, NO_RULE)
        self._other_role = {a: _refusing(denied, why) for a, why in OTHER_ROLE.items()}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Let a call through that a rule grants."""
        rule = self._rules.get(handler_call_details.method)
        if rule is Access.OPEN:
            return await continuation(handler_call_details)
        refused = self._missing
        for key, value in handler_call_details.invocation_metadata or ():
            if key != HEADER:
                continue
            role = self._role(value.encode() if isinstance(value, str) else value)
            if role is not None and role is rule:
                return await continuation(handler_call_details)
            if role is None:
                refused = self._wrong
            else:
                refused = self._no_rule if rule is None else self._other_role[rule]
        return refused

    def _role(self, said: bytes) -> Access | None:
        """Whose token it is; every one is compared, so that the time taken tells nothing."""
        found = None
        for access, expected in self._expected:
            if hmac.compare_digest(said, expected):
                found = access
        return found


def _refusing(code: grpc.StatusCode, why: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that answers unary and streaming calls alike, and waits for no message."""

    async def refuse(
        _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> NoReturn:
        await context.abort(code, why)

    return grpc.stream_stream_rpc_method_handler(refuse)
