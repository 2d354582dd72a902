"""Ray forks its processes out of the launcher's: none may die of what gRPC does meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

CHILDREN = 60
PROGRAM = """
import asyncio, os, subprocess, sys, threading
import deepinfer.deploy
import grpc

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            return request
        return grpc.unary_unary_rpc_method_handler(answer)

async def calls(port):
    while True:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(20):
                await channel.unary_unary("/of/nobody")(b"")

async def busy(begun):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    asyncio.get_running_loop().call_later(0.3, begun.set)
    await asyncio.gather(*(calls(port) for _ in range(8)))

begun = threading.Event()
threading.Thread(target=lambda: asyncio.run(busy(begun)), daemon=True).start()
begun.wait()
# What Ray does: with a preexec_fn there is a fork, and Python code between it and the exec.
ends = [subprocess.Popen(["true"], preexec_fn=os.getpid).wait() for _ in range(int(sys.argv[1]))]
print(ends.count(0), flush=True)
os._exit(0)
"""


def test_children_that_are_forked_while_grpc_is_busy_live() -> None:
    chosen = {name: os.environ[name] for name in os.environ if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CHILDREN)],
        env=chosen,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(CHILDREN)], done.stderr[-2000:]
