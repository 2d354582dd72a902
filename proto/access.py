"""Who may call what: one rule for every RPC of every service, and nobody without one.

The table is part of the contracts: a test walks the descriptors of all of ``proto/*.proto`` and
fails for an RPC that has no rule here, and for a rule without an RPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class Access(Enum):
    """What a caller has to prove."""

    OPEN = "open"
    """Nothing."""
    CLIENT = "client"
    """The clients' token: the one in the token file, which users hand around."""
    CLUSTER = "cluster"
    """The cluster's own token: made at each start, told to its processes only, never written
    down. Who has it can speak as a worker, read anybody's KV and give tokens to any request."""
    OPERATOR = "operator"
    """The operator's token: made at each start, in the launcher's own file of the cluster. Who has
    it can empty and restart its processes, and nothing else."""


_V1: Final = "deepinfer.v1"
RULES: Final[Mapping[str, Access]] = {
    f"/{_V1}.Inference/Generate": Access.CLIENT,
    f"/{_V1}.Inference/Resume": Access.CLIENT,
    f"/{_V1}.Inference/Abort": Access.CLIENT,
    f"/{_V1}.Inference/GetStatus": Access.CLIENT,
    f"/{_V1}.Inference/ListModels": Access.CLIENT,
    f"/{_V1}.WorkerLink/Connect": Access.CLUSTER,
    f"/{_V1}.Control/WorkerReports": Access.CLUSTER,
    f"/{_V1}.Control/StoreReports": Access.CLUSTER,
    f"/{_V1}.Control/GatewayReports": Access.CLUSTER,
    f"/{_V1}.Control/Drain": Access.OPERATOR,
    f"/{_V1}.Control/GetDrain": Access.OPERATOR,
    f"/{_V1}.Control/Restart": Access.OPERATOR,
    f"/{_V1}.KVStore/Reserve": Access.CLUSTER,
    f"/{_V1}.KVStore/Put": Access.CLUSTER,
    f"/{_V1}.KVStore/Commit": Access.CLUSTER,
    f"/{_V1}.KVStore/Resolve": Access.CLUSTER,
    f"/{_V1}.KVStore/AbortPut": Access.CLUSTER,
    f"/{_V1}.KVStore/Get": Access.CLUSTER,
    f"/{_V1}.KVStore/Release": Access.CLUSTER,
    f"/{_V1}.KVStore/List": Access.CLUSTER,
    f"/{_V1}.KVStore/Stats": Access.CLUSTER,
    # Kubernetes and load balancers probe with Check and cannot send a token; it says a single bit,
    # and costs at most one question to the controller a second. Watch holds a stream open.
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/List": Access.CLIENT,
    "/grpc.health.v1.Health/Watch": Access.CLIENT,
    # It names everything there is.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.CLIENT,
}
"""``/package.Service/Method`` to what its caller has to prove."""
