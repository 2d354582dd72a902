"""What one streamed request showed, folded from the SDK's events; shared by demo and benches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from deepinfer.client import Choice, Delta, Event, Finished, Notice


@dataclass(slots=True)
class Watched:
    """One request as it unfolds. ``choice`` is set when it has ended."""

    name: str
    text: str = ""
    tokens: int = 0
    path: list[str] = field(default_factory=list)
    """Workers and stores in the order in which they held its KV."""
    notices: list[Notice] = field(default_factory=list)
    choice: Choice | None = None

    def copy_s(self, kind: str) -> float:
        """Seconds in copies, hashing and the store's calls over all notices of a kind."""
        return sum(n.copy_s for n in self.notices if n.kind == kind)


async def watch(
    events: AsyncIterator[Event],
    watched: Watched,
    tell: Callable[[Watched, Event], None],
) -> Choice:
    """Fold a stream into ``watched`` until its first choice ends; ``tell`` sees every event.

    Raises what the SDK raises.
    """
    async for event in events:
        if isinstance(event, Delta):
            watched.text += event.text
            watched.tokens += len(event.token_ids)
        elif isinstance(event, Notice):
            watched.notices.append(event)
            place = event.store if event.kind == "swapped_out" else event.worker
            if event.kind != "swap_failed" and watched.path[-1:] != [place]:
                watched.path.append(place)
        elif isinstance(event, Finished):
            watched.text += event.text
            watched.choice = event.choice
        tell(watched, event)
    assert watched.choice is not None, "the SDK raises or ends every choice"
    return watched.choice
