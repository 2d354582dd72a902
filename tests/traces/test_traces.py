"""Golden traces: each ``*.story`` here is told by the production cores, and must go as written.

The language is described in ``deploy/sim/story.py``. ``hole_*`` are the holes that an earlier
draft of the protocol had.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.deploy.sim.given import StoryError
from deepinfer.deploy.sim.story import Story, tell

STORIES = sorted(Path(__file__).parent.glob("*.story"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    tell(path)


def test_every_hole_has_a_story() -> None:
    assert len([path for path in STORIES if path.stem.startswith("hole_")]) >= 18


LIFE = (Path(__file__).parent / "life_swap_and_resume.story").read_text()


@pytest.mark.parametrize(
    ("line", "wrong", "says"),
    [
        ("expect c0 tokens == 6", "expect c0 tokens == 7", "tokens is 6"),
        ("see k1 -> w0 SwapOut c0", "see k1 -> w0 SwapOut c1", "not seen within"),
        ("come c1", "never k1 -> s0 Reserve\n    come c1", "must never be"),
        ("expect w0 has c0 decode", "expect w0 lacks c0", "it has c0 in"),
        ("see w0 -> g0 Attach c0", "see w0 g0 Attach c0", "a message is written: a -> b"),
    ],
)
def test_a_wrong_story_fails(line: str, wrong: str, says: str) -> None:
    assert line in LIFE
    with pytest.raises(StoryError, match=says):
        Story(LIFE.replace(line, wrong, 1)).tell()
