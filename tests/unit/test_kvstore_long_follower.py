"""Hashing a long payload behind its writer, in several threads."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.hashing import GroupHasher, Groups, LongFollower
from kvstore_kit import draft, ticket

BLOCK, BLOCKS, GROUP_BLOCKS = 1000, 11, 2
SIZE = BLOCK * BLOCKS


@pytest.fixture
def memory() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)


def manifest_of(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Manifest:
    made = replace(
        draft(ticket(1), BLOCKS, block_bytes=BLOCK),
        group_blocks=GROUP_BLOCKS,
        group_hashes=(0,) * 6,
    )
    hasher = GroupHasher(made)
    hasher.update(memory.data)
    return hasher.fill_in(made)


def follower_of(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], *cuts: int) -> LongFollower:
    edges = (0, *cuts, SIZE)
    runs = [memory.data[a:b] for a, b in itertools.pairwise(edges)]
    return LongFollower(runs, Groups(SIZE, GROUP_BLOCKS * BLOCK))


@pytest.mark.parametrize("cuts", [(), (5000,), (2000, 4000), (1, 1999, 2001, 7000, SIZE - 1)])
def test_runs_may_end_anywhere(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]], cuts: tuple[int, ...]
) -> None:
    follower = follower_of(memory, *cuts)
    assert follower.written(SIZE)
    follower.some()
    assert follower.left_bytes == 0
    assert follower.matches(manifest_of(memory))


def test_no_group_is_hashed_before_all_of_it_is_said_to_be_written(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> None:
    wanted, bytes_then = manifest_of(memory), memory.copy()
    memory[:] = 0
    follower = follower_of(memory, 3000)
    for count in range(0, SIZE, BLOCK):
        memory[:count] = bytes_then[:count]
        assert follower.written(count) is (count > 0 and count // BLOCK % GROUP_BLOCKS == 0)
        follower.some()
        assert follower.left_bytes == SIZE - count // (2 * BLOCK) * 2 * BLOCK
        assert not follower.written(0), "what was said is not taken back"
    memory[:] = bytes_then
    assert not follower.matches(wanted), "the last group is not hashed"
    assert follower.written(SIZE)
    follower.some()
    assert follower.matches(wanted)


def test_a_wrong_byte_in_any_group_and_other_groups_are_found(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> None:
    wanted = manifest_of(memory)
    for at in (0, 2 * BLOCK, SIZE - 1):
        memory[at] ^= 1
        follower = follower_of(memory, 3000)
        follower.written(SIZE)
        follower.some()
        assert not follower.matches(wanted)
        memory[at] ^= 1
    other = LongFollower([memory.data], Groups(SIZE, BLOCK))
    other.written(SIZE)
    other.some()
    assert not other.matches(wanted)
    assert not other.matches(replace(wanted, payload_hash=wanted.payload_hash ^ 1))


def test_threads_share_the_groups(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    follower = follower_of(memory, 2500, 6001)
    follower.written(SIZE)
    threads = [threading.Thread(target=follower.some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert follower.matches(manifest_of(memory))
