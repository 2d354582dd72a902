"""The prompts of the load benches: sentences of ours, cut to a number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.deploy.config import ConfigError

if TYPE_CHECKING:
    from deepinfer.text.tokenizer import Tokenizer

SPREAD = (1.0, 0.5, 1.5, 0.75, 1.25, 0.625, 1.375, 0.875)
"""Lengths of eight prompts in a row, as shares of what was asked for: no two are alike."""

TEXT = """\
The ferry leaves the island at six, when the lamps along the quay are still burning. A woman with
two suitcases is always the first on board, and nobody has ever seen her open one of them. In
winter the crossing takes forty minutes, in summer less than thirty, for then the captain does not
have to look out for ice. The bakery opposite the town hall sells its last loaf before noon. Whoever
comes later gets a biscuit and a friendly word. A good map leaves out nearly everything, and what it
keeps has to be in the right place. My grandfather repaired clocks, and he used to say that a clock
which is wrong by a steady amount is better than one which is right by chance. On the third day of
the storm the bridge began to hum, a low note that could be felt in the railing before it was heard.
The engineers measured for an hour, wrote down four numbers and closed the road. To boil an egg on a
mountain one needs patience rather than fire. The library keeps a book of complaints; the oldest
entry asks for more chairs, and the newest asks for fewer. When the river was moved, the old mill
stood beside a meadow and had nothing to do. Children built a raft of its floor and sailed it on the
pond behind the church. A sparrow weighs about as much as four sheets of paper, and yet the branch
moves when it leaves. The orchestra rehearsed with the windows open, so that the market below bought
and sold in three-four time. Rust begins where the paint was thin, and gossip where the news was. In
the museum of lost things there are nine hundred umbrellas and one wooden leg. The night train has a
carriage that is uncoupled in the middle of the journey; those who sleep in it wake up in a
different country. Before there were thermometers, bakers threw flour on the floor of the oven and
counted until it turned brown. The mayor planted an oak on the day of her election and an apple tree
on the day she lost. From the lighthouse one can see three villages, two of which do not speak to
each other. A letter that was posted forty years ago arrived this morning, with the right stamp and
the wrong name. The gardener says that moss is a kind of clock as well, only that it has no hands.
Every autumn the swallows hold a meeting on the wires, and every year they agree. The recipe asks
for a pinch of salt, a spoon of honey and an afternoon without visitors. Nobody could say who had
wound the tower clock during the night, but it was right for the first time in years.
"""


def make_prompts(
    tokenizer: Tokenizer, count: int, tokens: int, text: str = TEXT
) -> list[tuple[int, ...]]:
    """``count`` different prompts of about ``tokens`` tokens each, their lengths by ``SPREAD``.

    Each begins at another place of ``text``, which is repeated where it is too short.

    Raises:
        ConfigError: the text has fewer than two words.
    """
    words = text.split()
    if len(words) < 2:
        raise ConfigError(f"the prompts' text has {len(words)} words: must have at least 2")
    prompts = []
    for i in range(count):
        wanted = max(1, round(tokens * SPREAD[i % len(SPREAD)]))
        start = (37 * i) % len(words)  # a step that visits every place of a text of ours
        turned = words[start:] + words[:start]
        ids: list[int] = []
        while len(ids) < wanted:
            again = " " if ids else ""
            ids += tokenizer.encode(again + " ".join(turned), add_special_tokens=not ids)
        prompts.append(tuple(ids[:wanted]))
    return prompts


def read_text(path: Path | None) -> str:
    """The text of a file, or ours.

    Raises:
        ConfigError: the file cannot be read as UTF-8.
    """
    if path is None:
        return TEXT
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text {path}: {error}") from error
