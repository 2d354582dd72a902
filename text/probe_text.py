"""A text that models are tried on: what it is about matters less than that it never changes."""

from __future__ import annotations

from typing import Final

PROBE_TEXT: Final = """\
The harbour of Lindal lies at the end of a long, narrow bay. In summer the ferries leave every \
hour, and the people who wait on the pier buy bread, cherries and cold tea from the small shop \
beside the lighthouse. In winter only two ships a day dare to cross.

Question: A baker sells 24 loaves in the morning and half as many in the afternoon, for 3 euros \
each. How much money does she take?
Answer: In the afternoon she sells 24 / 2 = 12 loaves. Together that is 36 loaves, and 36 x 3 = 108.

def running_mean(values):
    total, means = 0.0, []
    for count, value in enumerate(values, start=1):
        total += value
        means.append(total / count)
    return means

User: Which planet of the solar system is the largest?
Assistant: The largest planet is Jupiter. It takes almost twelve years for one orbit.

{"name": "pump-7", "status": "ok", "pressure": [2.1, 2.0, 2.2], "next": null}

1. Water the plant an hour before, so that the roots come out of the old pot in one piece.
2. Fill a third of the new pot with fresh soil, and set the plant in the middle.

The committee met on Tuesday to discuss the budget for the coming year. After a debate of three \
hours it was agreed that the library would stay open on Saturdays, that the bridge would be \
repaired before the autumn, and that the remaining money would go to the school.
"""
"""Prose, a calculation, code, a conversation, data and a list: about 350 tokens of most models."""
