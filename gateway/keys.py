"""Request ids, resume keys and default seeds: functions of secrets and ids, so that any gateway
can check what another one has handed out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from deepinfer.kvstore.core.ids import GatewayId, RequestId

_RANDOM_BYTES = 12


def mint_request_id(gateway: GatewayId) -> RequestId:
    """A fresh id; the gateway's name in it is for people who read logs."""
    return RequestId(f"{gateway}-{secrets.token_hex(_RANDOM_BYTES)}")


def resume_key(secret: bytes, request: str) -> str:
    """HMAC-SHA256 of the request id under the cluster's secret, in hex."""
    return hmac.new(secret, request.encode(), hashlib.sha256).hexdigest()


def is_resume_key(secret: bytes, request: str, key: str) -> bool:
    """Whether ``key`` belongs to the request; takes the same time wherever the two differ."""
    return hmac.compare_digest(resume_key(secret, request).encode(), key.encode())


def seed_of(request: str) -> int:
    """The seed of a request that names none, in [0, 2**63): the same at every gateway."""
    digest = hashlib.blake2b(request.encode(), digest_size=8, person=b"deepinfer-seed").digest()
    return int.from_bytes(digest, "big") >> 1
