"""Philox 4x32-10 against the vectors that its authors publish, and the numbers made from it."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.workers.philox import philox4x32, uniforms

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_published_vectors() -> None:
    counters = np.array([words(counter) for counter, _, _ in VECTORS], dtype=np.uint32)
    keys = np.array([words(key) for _, key, _ in VECTORS], dtype=np.uint32)
    assert philox4x32(counters, keys).tolist() == [words(result) for _, _, result in VECTORS]


def test_rows_are_independent() -> None:
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 2**32, (50, 4), dtype=np.uint32)
    keys = rng.integers(0, 2**32, (50, 2), dtype=np.uint32)
    together = philox4x32(counters, keys)
    for i in range(50):
        alone = philox4x32(counters[i : i + 1], keys[i : i + 1])
        assert alone.tolist() == together[i : i + 1].tolist()


def test_uniforms_use_the_first_53_bits() -> None:
    counters, keys = np.zeros((1, 4), dtype=np.uint32), np.zeros((1, 2), dtype=np.uint32)
    bits = (0x6627E8D5 << 21) | (0xE169C58D >> 11)
    assert uniforms(counters, keys).tolist() == [bits / 2**53]


def test_uniforms_are_uniform_over_consecutive_counters() -> None:
    n, bins = 20_000, 50
    counters = np.zeros((n, 4), dtype=np.uint32)
    counters[:, 0] = np.arange(n)
    keys = np.tile(np.array([[7, 0]], dtype=np.uint32), (n, 1))
    values = uniforms(counters, keys)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    observed, _ = np.histogram(values, bins=bins, range=(0, 1))
    chi_square = float(((observed - n / bins) ** 2 / (n / bins)).sum())
    # 49 degrees of freedom: 85.4 is the 99.9% point. The numbers are fixed: this cannot flake.
    assert chi_square < 85.4


@pytest.mark.parametrize(
    ("counters", "keys"),
    [
        (np.zeros((2, 3), dtype=np.uint32), np.zeros((2, 2), dtype=np.uint32)),
        (np.zeros((2, 4), dtype=np.uint32), np.zeros((1, 2), dtype=np.uint32)),
    ],
)
def test_wrong_shapes_are_named(counters: np.ndarray, keys: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"must be uint32 \[\d?n?, [24]\]"):
        philox4x32(counters, keys)
