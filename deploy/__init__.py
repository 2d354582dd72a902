"""The composition root: command line, launcher, benches, kernel checks and the simulator.

The only code that knows two actors at once. Nothing here decides anything about requests, and
nothing outside this folder imports it.
"""

from __future__ import annotations

import os

# Read when gRPC is imported. Ray starts its processes by a real fork: with gRPC's fork handlers a
# child dies before it has become Ray's if other threads call into gRPC at that moment, as in a
# process that has used a client already. Nothing here forks without becoming another program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
