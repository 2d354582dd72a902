"""What a worker says of its weights' lower planes, which may leave the card for KV blocks.

::

    HELD --> SHEDDING --> OPEN --> CLOSING --> RESTORING --> HELD
     ^           |         ^ ^        |            |
     +-----------+         | +--------+            |  the copy failed
      not begun yet        +-----------------------+
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class ShedState(Enum):
    """Where the lower planes are, and whether their bytes are KV blocks."""

    HELD = "held"
    """On the card: steps run at any level."""
    SHEDDING = "shedding"
    """About to leave; steps run at the top level from here on."""
    OPEN = "open"
    """Away: the pool's tail is as good as any other block."""
    CLOSING = "closing"
    """Away; nothing more is put into the tail, and what is there moves or is swapped out."""
    RESTORING = "restoring"
    """On their way back into the empty tail."""
    LOCKED = "locked"
    """They were never loaded (``start_shed``): every step runs at the top level, for good."""

    @property
    def exact_runs(self) -> bool:
        """Whether ``exact`` requests can take steps."""
        return self is ShedState.HELD


class ShedLevel(NamedTuple):
    """The level of one worker."""

    state: ShedState
    ordinary_blocks: int
    """Blocks that are there in every state."""
    tail_blocks: int
    """Blocks gained while the planes are away; 0 where they cannot come or go."""
    return_ms: int
    """How long the planes' copy back takes: measured, or estimated from the bus."""
