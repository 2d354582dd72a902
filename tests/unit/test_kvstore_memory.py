"""Slabs, page runs, and copies between views that are cut differently."""

from __future__ import annotations

import fcntl
import os
import platform
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from deepinfer.kvstore.copying import SpreadWriter, byte_views, chunks
from deepinfer.kvstore.core.pages import PagePool
from deepinfer.kvstore.hashing import Follower, GroupHasher, Groups
from deepinfer.kvstore.host_pool import HostPool, PageMap, Slab
from kvstore_kit import draft, payload, ticket


def test_adjacent_pages_of_one_slab_are_one_run() -> None:
    pool = HostPool(page_bytes=100, slab_bytes=400, name="test")
    pool.grow_to(9)
    assert (pool.slab_pages, pool.pages_mapped) == (4, 12)
    for page in range(12):
        pool.page(page)[:] = bytes([page]) * 100
    runs = list(pool.runs((1, 2, 3, 4, 5, 8, 7)))
    assert [len(run) // 100 for run in runs] == [3, 2, 1, 1]
    assert b"".join(runs) == b"".join(bytes([p]) * 100 for p in (1, 2, 3, 4, 5, 8, 7))
    runs.clear()
    pool.close()


def test_what_one_process_writes_the_other_mapping_shows() -> None:
    pool = HostPool(page_bytes=5000, slab_bytes=10_000, name="test")
    pool.grow_to(1)
    other = PageMap(5000, pool.slab_pages)
    other.slabs.append(Slab.adopt(os.dup(pool.slabs[0].fd), pool.slab_bytes))
    other.page(1)[:] = b"x" * 5000
    assert bytes(pool.page(1)) == b"x" * 5000
    other.close()
    pool.close()


def test_a_slab_cannot_be_cut_short_under_a_mapping() -> None:
    slab = Slab.create("test", 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, 4096)
    assert fcntl.fcntl(slab.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    slab.close()


def test_a_descriptor_that_is_no_slab_is_refused_and_closed() -> None:
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    with pytest.raises(OSError, match="not a sealed memfd of 8192 bytes"):
        Slab.adopt(unsealed, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(unsealed)


def test_the_pool_of_pages_refuses_what_it_did_not_lend() -> None:
    pool = PagePool(4)
    held = pool.take(3)
    pool.check(list(held))
    with pytest.raises(AssertionError):
        pool.give_back((3,))
    pool.give_back(held[:1])
    with pytest.raises(AssertionError):
        pool.check(list(held))  # page 0 is free and held


@pytest.mark.parametrize("seed", range(30))
def test_any_pieces_fill_any_targets(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(1000)

    def cut() -> list[memoryview]:
        marks = sorted({0, 1000, *(rng.randrange(1000) for _ in range(rng.randint(0, 9)))})
        return [memoryview(bytearray(data[a:b])) for a, b in pairwise(marks)]

    targets = cut()
    for target in targets:
        target[:] = bytes(len(target))
    writer = SpreadWriter(targets)
    for pieces in chunks(cut(), rng.randint(1, 300)):
        for piece in pieces:
            writer.write(piece)
    assert b"".join(targets) == data


def test_chunks_are_of_one_length_but_the_last() -> None:
    views = [memoryview(bytes(n)) for n in (3, 0, 7, 5)]
    assert [sum(map(len, pieces)) for pieces in chunks(views, 4)] == [4, 4, 4, 3]


def test_views_must_be_contiguous_and_of_the_length() -> None:
    with pytest.raises(ValueError, match=r"into\[1\] is not contiguous"):
        byte_views("into", [memoryview(b"ab"), memoryview(b"abcd")[::2]], 4)
    with pytest.raises(ValueError, match="into: 2 bytes in total, must be 3"):
        byte_views("into", [memoryview(b"ab")], 3)


@pytest.mark.parametrize("seed", range(20))
def test_hashes_do_not_depend_on_how_the_payload_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    blocks = payload(seed, 7, block_bytes=64)
    manifest = draft(ticket(1), 7, block_bytes=64)
    whole = GroupHasher(manifest)
    whole.update(memoryview(b"".join(blocks)))
    cut = GroupHasher(manifest)
    rest = memoryview(b"".join(blocks))
    while len(rest):
        count = rng.randint(1, 200)
        cut.update(rest[:count])
        rest = rest[count:]
    full = whole.fill_in(manifest)
    assert cut.fill_in(manifest) == full
    assert full != manifest


def follower_of(blocks: list[memoryview], group_bytes: int) -> Follower:
    return Follower(list(blocks), Groups(sum(map(len, blocks)), group_bytes))


@pytest.mark.parametrize("seed", range(5))
def test_a_follower_hashes_every_byte_once_however_its_writer_goes_on(seed: int) -> None:
    rng = random.Random(seed)
    blocks = payload(seed, 7, block_bytes=64)
    hasher = GroupHasher(draft(ticket(1), 7, block_bytes=64))
    hasher.update(memoryview(b"".join(blocks)))
    full = hasher.fill_in(draft(ticket(1), 7, block_bytes=64))
    follower = follower_of(blocks, full.group_bytes)
    for _ in range(rng.randint(0, 9)):
        left = follower.left_bytes
        count = rng.randint(0, left)
        follower.follow(count)
        assert follower.left_bytes == left - count
    assert follower.matches(full)
    assert follower.left_bytes == 0
    for others in (blocks[::-1], blocks[:-1], [*blocks, memoryview(bytes(64))]):
        assert not follower_of(others, full.group_bytes).matches(full)
    assert not follower_of(blocks, full.group_bytes + 64).matches(full)
    assert not follower_of(blocks, full.group_bytes).matches(replace(full, token_ids=(1,) * 9))


def test_what_is_written_behind_a_follower_has_another_hash() -> None:
    data = bytearray(b"".join(payload(1, 7, block_bytes=64)))
    hasher = GroupHasher(draft(ticket(1), 7, block_bytes=64))
    follower = follower_of([memoryview(data)], draft(ticket(1), 7, block_bytes=64).group_bytes)
    follower.follow(100)
    data[99] ^= 1
    hasher.update(memoryview(data))
    assert not follower.matches(hasher.fill_in(draft(ticket(1), 7, block_bytes=64)))


FAULTS_OF_FRESH_CHUNKS = """
import resource, sys
from deepinfer.kvstore.heap import keep_freed_buffers

def use():
    buffers = [bytearray(2 << 20) for _ in range(4)]
    for buffer in buffers:
        buffer[::4096] = b"x" * 512

if sys.argv[1] == "keep":
    assert keep_freed_buffers()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's thresholds")
def test_memory_of_freed_chunks_stays_with_the_process() -> None:
    faults = {}
    for mode in ("keep", "leave"):
        command = [sys.executable, "-c", FAULTS_OF_FRESH_CHUNKS, mode]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] * 5 < faults["leave"], faults
