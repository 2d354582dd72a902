"""The simulator and the stories can find bugs: planted ones do not survive."""

from __future__ import annotations

import re

import pytest

from sim.mutants import MUTANTS, ROOT, STORIES, Mutant, hunt

QUICK = (
    "no_epoch_check_at_the_worker",
    "free_before_commit",
    "no_quarantine",
    "garbage_before_all_have_reported",
    "commit_keeps_the_difference",
)


def test_every_mutant_fits_its_file() -> None:
    for mutant in MUTANTS:
        count = (ROOT / mutant.file).read_text().count(mutant.old)
        assert count == 1, f"{mutant.name}: its text occurs {count} times in {mutant.file}"
        assert mutant.story is None or (STORIES / f"{mutant.story}.story").is_file(), mutant.name
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_caught(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert hunt(mutant, seeds=200) is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught(mutant: Mutant) -> None:
    assert hunt(mutant) is not None


def test_a_harmless_patch_survives() -> None:
    harmless = Mutant(
        "comment",
        "kvstore/core/budget.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations  # nothing else\n",
        "changes nothing",
    )
    assert hunt(harmless, seeds=5) is None


def test_a_patch_that_no_longer_fits_is_an_error() -> None:
    stale = Mutant("stale", "kvstore/core/budget.py", "no such text", "", "stale")
    with pytest.raises(ValueError, match=re.escape("stale: its text occurs 0 times")):
        hunt(stale)
