"""A worker process for tests: it stops in the middle of a put until a line comes on its stdin.

Run as a script with the store's address and the number of blocks. Prints ``parked`` when one block
is written and the rest is not, then the put's status.
"""

from __future__ import annotations

import asyncio
import sys

from deepinfer.kvstore.client import StoreClient
from kvstore_kit import PAGE, TOKEN, WRITER, draft, ticket

BYTE = 0xEE


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def fill(first: int, buffer: memoryview) -> None:
    buffer[:PAGE] = bytes([BYTE]) * PAGE
    if first == 0:
        say("parked")
        sys.stdin.readline()
    buffer[PAGE:] = bytes([BYTE]) * (len(buffer) - PAGE)


async def main(address: str, blocks: int) -> None:
    client = StoreClient(address, WRITER, token=TOKEN, path="memfd")
    put = await client.put(ticket(1), draft(ticket(1), blocks), fill)
    say(put.status.value)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
