"""Checks of the sampling kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from deepinfer.deploy.validate import sampling_cases as cases
from deepinfer.deploy.validate.accuracy import Accuracy
from deepinfer.deploy.validate.checks import Check
from deepinfer.deploy.validate.scope import Scope
from deepinfer.kernels import sampling

_VOCAB = 4500
"""Two whole slices of the kernels' and a part."""


def sampling_checks(scope: Scope) -> Iterator[Check]:
    """Every cut, ties, penalties and rows without a choice; the tokens are compared."""
    device, specs = scope.device, tuple(sampling.specs())

    def check(name: str, run: Callable[[], None]) -> Check:
        def nothing_beside() -> Iterator[Accuracy]:
            run()
            yield from ()

        return Check("sampling", "", name, nothing_beside, specs)

    partial = functools.partial
    for vocab, rows in ((_VOCAB, 6), *(((49152, 16), (151936, 16)) if scope.thorough else ())):
        for name in cases.CUTS:
            run = partial(cases.check_cut, name, vocab, rows=rows, device=device)
            yield check(f"{name}, {vocab} tokens", run)
        for top_k in (0, 7, 2500):
            for top_p in (0.4, 1.0):
                run = partial(cases.check_ties, top_k, top_p, vocab, device=device)
                yield check(f"ties, top_k {top_k}, top_p {top_p}, {vocab} tokens", run)
        yield check(f"penalties, {vocab}", partial(cases.check_penalties, vocab, device=device))
        yield check(f"bad rows, {vocab}", partial(cases.check_bad_rows, vocab, device=device))
    yield check("rows of a batch", partial(cases.check_batch, _VOCAB, device=device))
    yield check("neighbouring floats", partial(cases.check_neighbours, device=device))
    for vocab in (1, 5, 2048, 2049):
        yield check(f"rows apart, {vocab}", partial(cases.check_strided, vocab, device=device))
