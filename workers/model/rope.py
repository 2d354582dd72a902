"""RoPE scalings: what each divides the inverse frequencies by, one divisor a pair of dimensions."""

from __future__ import annotations

import math


def llama3_divisors(
    *,
    theta: float,
    head_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_positions: int,
) -> tuple[float, ...]:
    """What Llama 3's RoPE scaling divides each inverse frequency by.

    Wavelengths shorter than ``original_positions / high_freq_factor`` keep their frequency,
    those longer than ``original_positions / low_freq_factor`` are slowed by ``factor``, and those
    between are blended linearly in the number of turns (Llama 3.1's reference code).
    """
    divisors = []
    for pair in range(head_dim // 2):
        turns = original_positions / (2 * math.pi * theta ** (2 * pair / head_dim))
        blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return tuple(divisors)


def longrope_magnitude(*, factor: float, original_positions: int) -> float:
    """What LongRoPE multiplies cos and sin by for a context ``factor`` times the original's.

    1 up to a factor of 1, else sqrt(1 + ln factor / ln original) (arXiv:2402.13753, as
    published with Phi-3).
    """
    if factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(original_positions))
