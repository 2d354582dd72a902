"""Philox 4x32-10: random numbers as a function of (key, counter), with no state to lose.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. The constants are those of the paper's section 3 (and of curand and torch on CUDA).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint32)
_ROUNDS = 10


def philox4x32(counters: Words, keys: Words) -> Words:
    """Return the four 32-bit words of each counter under its key.

    ``counters`` uint32 [n, 4], ``keys`` uint32 [n, 2]; returns uint32 [n, 4].
    """
    if counters.dtype != np.uint32 or counters.ndim != 2 or counters.shape[1] != 4:
        raise ValueError(f"counters: {counters.dtype} {counters.shape}: must be uint32 [n, 4]")
    if keys.dtype != np.uint32 or keys.shape != (len(counters), 2):
        raise ValueError(f"keys: {keys.dtype} {keys.shape}: must be uint32 [{len(counters)}, 2]")
    words, key = counters, keys
    for _ in range(_ROUNDS):
        products = words[:, (0, 2)].astype(np.uint64) * _MULTIPLIERS
        high = (products >> np.uint64(32)).astype(np.uint32)
        low = products.astype(np.uint32)
        words = np.stack(
            (
                high[:, 1] ^ words[:, 1] ^ key[:, 0],
                low[:, 1],
                high[:, 0] ^ words[:, 3] ^ key[:, 1],
                low[:, 0],
            ),
            axis=1,
        )
        key = key + _WEYL  # wraps, as it should
    return words


def uniforms(counters: Words, keys: Words) -> npt.NDArray[np.float64]:
    """Return one number of [0, 1) for each counter: float64 [n], of 53 random bits."""
    words = philox4x32(counters, keys).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
