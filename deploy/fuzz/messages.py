"""Decoders of what processes and clients send each other: protobuf, msgpack, frames, keys."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import xxhash
from google.protobuf.message import DecodeError, Message

from deepinfer.controller import wire as controller_wire
from deepinfer.deploy.fuzz.shapes import Bytes, Msgpack, Proto, Records, recorded, records
from deepinfer.deploy.fuzz.target import Case, Target
from deepinfer.gateway import client_wire, keys
from deepinfer.gateway import wire as gateway_wire
from deepinfer.gateway.malformed import why_malformed
from deepinfer.kvstore import wire as store_wire
from deepinfer.kvstore.core.ids import Run, WorkerId, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest, ManifestError
from deepinfer.kvstore.core.precision import PrecisionError
from deepinfer.kvstore.core.requests import InvalidRequestError
from deepinfer.kvstore.core.states import State
from deepinfer.kvstore.frames import FrameError, FrameSocket
from deepinfer.kvstore.hashing import payload_hash, with_hashes
from deepinfer.proto import control_pb2, inference_pb2, kvstore_pb2, link_pb2
from deepinfer.workers import wire as worker_wire

WORKER: Final = WorkerRef(WorkerId("worker-0"), 3)  # type: ignore[arg-type]
BLOCK_BYTES: Final = 64
SECRET: Final = b"the secret of fuzzed clusters"


def decoding(decode: Callable[[bytes], object]) -> Callable[[Path], Any]:
    """A target that needs nothing prepared."""

    @contextmanager
    def opened(_: Path) -> Iterator[Case]:
        yield decode

    return opened


# ---- the store's ---------------------------------------------------------------------------


def manifest(blocks: int = 3) -> Manifest:
    """A manifest of zeros whose hashes are right."""
    made = Manifest.draft(
        dtype="fp16",
        layout="a layout",
        block_bytes=BLOCK_BYTES,
        blocks=blocks,
        token_ids=tuple(range(blocks * 4)),
        state=State.DECODE,
        precision="fp16",
        model="a model",
        run=Run(1, 1),  # that of ``TICKET``
    )
    hashes = [xxhash.xxh3_64_intdigest(bytes(made.payload_bytes))]
    made = with_hashes(made, hashes)
    assert made.payload_hash == payload_hash(made)
    return made


def _manifest(data: bytes) -> object:
    read = store_wire.manifest_from_bytes(data)
    again = store_wire.manifest_to_bytes(read)
    assert store_wire.manifest_from_bytes(again) == read, "does not survive the wire"
    return read


def _chunk(data: bytes) -> None:
    """What the hand-written reader says must be what protobuf's own says."""
    for read, kind in (
        (store_wire.put_request_from_bytes, kvstore_pb2.PutRequest),
        (store_wire.get_response_from_bytes, kvstore_pb2.GetResponse),
    ):
        slow: Any = kind.FromString(data)
        quick = read(data)
        if isinstance(quick, memoryview):
            assert slow.WhichOneof("message") == "chunk"
            assert bytes(quick) == slow.chunk
        else:
            assert slow.WhichOneof("message") != "chunk"
            assert quick == slow.header


def _chunk_seeds() -> list[bytes]:
    header = kvstore_pb2.PutHeader(manifest=store_wire.manifest_to_bytes(manifest()))
    return [
        store_wire.chunk_to_bytes([memoryview(b"x" * size)]) for size in (0, 1, 127, 128, 300)
    ] + [kvstore_pb2.PutRequest(header=header).SerializeToString()]


@contextmanager
def _frames(_: Path) -> Iterator[Case]:
    """Bytes that come over the Unix socket, in pieces as long as the first byte says."""
    loop = asyncio.new_event_loop()

    async def read(data: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        frames = FrameSocket(ours)
        try:
            theirs.setblocking(False)
            piece = 1 + (data[0] if data else 0) * 16
            begin = min(len(data), 1 + 4 * piece)
            for at in range(1, begin, piece):
                theirs.send(data[at : min(begin, at + piece)])
                await asyncio.sleep(0)
            theirs.send(data[begin:])
            theirs.close()
            while (frame := await frames.receive()) is not None:
                assert isinstance(frame[0]["op"], str)
                store_wire.pack(frame[0])
        finally:
            theirs.close()
            frames.close()

    try:
        yield lambda data: loop.run_until_complete(read(data))
    finally:
        loop.close()


def _frame_seeds() -> list[bytes]:
    ticket = ["request-1", 0, 1, 2, 3, 4]
    frames: list[dict[str, object]] = [
        {"op": "hello", "version": 3, "worker": "worker-0", "incarnation": 5},
        {"op": "begin_put", "call": 1, "ticket": ticket, "payload_bytes": 192},
        {"op": "finish_put", "call": 2, "put": [5, 1], "manifest": b"x" * 40},
        {"op": "end_get", "read": [5, 2], "fds": 0},
    ]
    packed = [store_wire.pack(frame) for frame in frames]
    return [b"\x40" + b"".join(struct.pack("<I", len(p)) + p for p in packed)] + [
        b"\0" + struct.pack("<I", len(p)) + p for p in packed
    ]


# ---- links and reports ---------------------------------------------------------------------

SEQ: Final = {"request": "gateway-0-aa", "choice": 0}
RUN: Final = {"epoch": 1, "counter": 1}
TICKET: Final[dict[str, Any]] = {"seq": SEQ, "run": RUN, "order": {"epoch": 1, "counter": 2}}


def from_worker_messages() -> list[link_pb2.FromWorker]:
    """What a worker says."""
    token = {"id": 7, "logprob": -0.5, "top_ids": [7, 8], "top_logprobs": [-0.5, -1.5]}
    plain: dict[str, object] = {"id": 9, "precision": 1}
    said: list[dict[str, Any]] = [
        {"hello": {"worker": {"worker": "worker-0", "incarnation": 3}}},
        {"attach": {"seq": SEQ, "run": RUN}},
        {"tokens": {"seq": SEQ, "run": RUN, "index": 0, "tokens": [token, plain], "cached": 2}},
        {"tokens": {"seq": SEQ, "run": RUN, "index": 2, "finish_reason": "length"}},
        {"scores": {"seq": SEQ, "run": RUN, "position": 1, "tokens": [token]}},
        {"notice": {"seq": SEQ, "notice": {"kind": 2, "run_epoch": 1, "run_counter": 1}}},
    ]
    made = [link_pb2.FromWorker(**each) for each in said]
    return [*made, link_pb2.FromWorker(**said[1], more=made[2:])]


def _from_worker(data: bytes) -> None:
    for message in gateway_wire.link_messages(link_pb2.FromWorker.FromString(data)):
        gateway_wire.from_worker(message, WORKER)


def to_worker_messages() -> list[link_pb2.ToWorker]:
    """What a gateway answers."""
    record = {
        "request_id": "gateway-0-aa",
        "prompt_ids": [1, 2, 3],
        "sampling_params": {"temperature": 0.5, "max_tokens": 9, "stop": ["x"], "seed": 3},
        "arrival_ms": 5,
        "seed": 3,
        "deadline_ms": 900,
        "stop_token_ids": [2],
    }
    said: list[dict[str, Any]] = [
        {"attached": {"seq": SEQ, "run": RUN, "record": record, "tokens": [4, 5], "scored": 1}},
        {"refused": {"seq": SEQ, "run": RUN, "highest": RUN}},
        {"ack": {"seq": SEQ, "run": RUN, "next_index": 2, "finished": True}},
        {"drop": {"seq": SEQ, "run": RUN}},
    ]
    made = [link_pb2.ToWorker(**each) for each in said]
    return [*made, link_pb2.ToWorker(**said[0], more=made[1:])]


def _to_worker(data: bytes) -> None:
    for message in worker_wire.link_messages(link_pb2.ToWorker.FromString(data)):
        worker_wire.from_gateway(message)


def report_messages() -> list[tuple[int, Message]]:
    """A report of each kind, whole and as a difference, by the place of its RPC in ``Control``."""
    resident = {"seq": SEQ, "run": RUN, "state": "decode", "gateway": "gateway-0"}
    worker: dict[str, Any] = {
        "worker": "worker-0", "incarnation": 3, "node": "n", "number": 1, "complete": True,
        "block_bytes": 64, "block_size": 16, "blocks_total": 32, "blocks_free": 30,
        "residents": [resident], "address": "127.0.0.1:1",
        "usage": [{"seq": SEQ, "private_blocks": 2, "tokens": 20, "last_step": 4, "advanced": 1}],
        "counters": {"deepinfer_worker_tokens_computed_total": 5.0},
    }  # fmt: skip
    nested = {
        "shed": {"state": "held", "ordinary_blocks": 32, "tail_blocks": 8},
        "precision": {"levels": 2, "ratio": 0.6},
    }
    gone = {"seq": SEQ, "run": RUN, "why": "swapped", "ticket": TICKET, "blocks": 2}
    store: dict[str, Any] = {
        "store": "store-n", "incarnation": 4, "node": "n", "number": 1, "complete": True,
        "budget_bytes": 4096, "used_bytes": 128, "address": "127.0.0.1:2",
        "tickets": [{"ticket": TICKET, "state": "committed", "payload_bytes": 128, "tokens": 20}],
    }  # fmt: skip
    request = {"seq": SEQ, "prompt_tokens": 16, "max_tokens": 8, "arrival_ms": 5, "attached": RUN}
    gateway: dict[str, Any] = {
        "gateway": "gateway-0", "incarnation": 5, "number": 1, "complete": True,
        "requests": [request], "address": "127.0.0.1:3",
    }  # fmt: skip
    later: dict[str, Any] = {"number": 2, "complete": False}
    left: dict[str, Any] = {"residents": [], "usage": [], "blocks_free": 32}
    return [
        (0, control_pb2.WorkerReport(**worker)),
        (0, control_pb2.WorkerReport(**(worker | nested | later | left), departed=[gone])),
        (1, control_pb2.StoreReport(**store)),
        (1, control_pb2.StoreReport(**(store | later), gone=[TICKET])),
        (2, control_pb2.GatewayReport(**gateway)),
        (2, control_pb2.GatewayReport(**(gateway | later), gone=[SEQ])),
    ]


REPORTS: Final[tuple[type[Message], ...]] = (
    control_pb2.WorkerReport,
    control_pb2.StoreReport,
    control_pb2.GatewayReport,
    control_pb2.ReportReply,
)


def _report(data: bytes) -> None:
    for kind, message in records(data):
        said: Any = REPORTS[kind % len(REPORTS)].FromString(message)
        match kind % len(REPORTS):
            case 0:
                controller_wire.worker_report_from(said)
            case 1:
                controller_wire.store_report_from(said)
            case 2:
                controller_wire.gateway_report_from(said)
            case _:
                store_wire.report_reply_from_proto(said)
                gateway_wire.reply_from(said)
                worker_wire.reply_from(said)


def _report_seeds() -> list[bytes]:
    reply = control_pb2.ReportReply(
        epoch=4,
        number=2,
        disown=[{"seq": SEQ, "claim": 1}],
        reject=[{"seq": SEQ, "blocks_needed": 9, "blocks_total": 3}],
        precision={"policy": "slo", "level_max": 1, "ttft_target_ms": 9, "tpot_target_ms": 9},
    )
    return [recorded([(kind, m.SerializeToString())]) for kind, m in report_messages()] + [
        recorded([(3, reply.SerializeToString())])
    ]


# ---- the clients' --------------------------------------------------------------------------


def generate_messages() -> list[inference_pb2.GenerateRequest]:
    """Requests as clients make them."""
    sampling: dict[str, Any] = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 8, "stop": ["x", "yz"],
        "stop_token_ids": [4], "n": 2, "logprobs": 2, "prompt_logprobs": 1, "seed": 5,
        "logit_bias": {5: -3.0},
    }  # fmt: skip
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <|end|>"},
    ]
    said: list[dict[str, Any]] = [
        {"text": "Name a colour."},
        {"text": "Once", "sampling_params": sampling, "include_events": True, "deadline_ms": 500},
        {
            "tokenized": {"input_ids": [1, 2, 3]},
            "sampling_params": {"max_tokens": 4},
            "exact": True,
        },
        {"chat": {"messages": messages}, "model": "bytes", "priority": 3},
    ]
    return [inference_pb2.GenerateRequest(**each) for each in said]


def resume_messages() -> list[inference_pb2.ResumeRequest]:
    """Attempts to go on with one."""
    name = "gateway-0-" + "ab" * 12
    return [
        inference_pb2.ResumeRequest(
            request_id=name,
            resume_key=keys.resume_key(SECRET, name),
            claim=1,
            request=request,
            progress=[{"index": 0, "token_ids": [70, 71]}],
            arrival_ms=5,
            prompt_logprobs=4 if request.sampling_params.HasField("prompt_logprobs") else 0,
        )
        for request in generate_messages()
    ]


def _request(data: bytes) -> None:
    said = inference_pb2.ResumeRequest.FromString(data)
    ask = client_wire.ask_from(said.request)
    client_wire.received_from(said.progress, ask.sampling.n)


def _malformed(data: bytes) -> None:
    for kind in (inference_pb2.GenerateRequest, inference_pb2.ResumeRequest):
        message: Any = kind.DESCRIPTOR
        try:
            kind.FromString(data)
        except DecodeError:
            said = why_malformed(data, message)
            assert len(str(said)) < 1000


def _key(data: bytes) -> None:
    request, _, key = data.decode(errors="replace").partition("\n")
    right = keys.is_resume_key(SECRET, request, key)
    assert right == (key == keys.resume_key(SECRET, request)), "a key that belongs to no request"
    assert 0 <= keys.seed_of(request) < 1 << 63


def _bytes(messages: Sequence[Message]) -> list[bytes]:
    return [message.SerializeToString() for message in messages]


TARGETS: Final = (
    Target(
        name="manifest",
        about="a payload's manifest, as msgpack",
        seeds=lambda: [store_wire.manifest_to_bytes(manifest(n)) for n in (1, 3, 40)],
        shape=Msgpack(),
        open=decoding(_manifest),
        errors=(ManifestError,),
    ),
    Target(
        name="frames",
        about="the stream of a same-node connection",
        seeds=_frame_seeds,
        shape=Bytes((b"\xff\xff\xff\x7f", b"\x81\xa2op\xa1x", b"\xa3fds")),
        open=_frames,
        errors=(FrameError,),
    ),
    Target(
        name="chunks",
        about="PutRequest and GetResponse, read by hand and by protobuf",
        seeds=_chunk_seeds,
        shape=Bytes((b"\x12", b"\x0a", b"\x80\x80\x80\x80\x80\x01")),
        open=decoding(_chunk),
        errors=(DecodeError,),
    ),
    Target(
        name="from_worker",
        about="a worker's link messages and bundles, at the gateway",
        seeds=lambda: _bytes(from_worker_messages()),
        shape=Proto(link_pb2.FromWorker),
        open=decoding(_from_worker),
        errors=(DecodeError, gateway_wire.LinkError),
    ),
    Target(
        name="to_worker",
        about="a gateway's link messages and bundles, at the worker",
        seeds=lambda: _bytes(to_worker_messages()),
        shape=Proto(link_pb2.ToWorker),
        open=decoding(_to_worker),
        errors=(DecodeError, worker_wire.LinkError, InvalidRequestError),
    ),
    Target(
        name="reports",
        about="reports to the controller and its answers, everywhere",
        seeds=_report_seeds,
        shape=Records([Proto(kind) for kind in REPORTS]),
        open=decoding(_report),
        errors=(
            DecodeError,
            controller_wire.WireError,
            gateway_wire.LinkError,
            worker_wire.LinkError,
            PrecisionError,
        ),
    ),
    Target(
        name="requests",
        about="what a client asks for, first and when it resumes",
        seeds=lambda: _bytes(resume_messages()),
        shape=Proto(inference_pb2.ResumeRequest),
        open=decoding(_request),
        errors=(DecodeError, InvalidRequestError),
    ),
    Target(
        name="malformed",
        about="what is said of a request that does not decode",
        seeds=lambda: _bytes([*generate_messages(), *resume_messages()]),
        shape=Bytes((b"\x1a\x02\xff\xfe", b"\xff" * 10, b"\x0b" * 200)),
        open=decoding(_malformed),
        errors=(),
    ),
    Target(
        name="resume_keys",
        about="a request id and the key that belongs to it",
        seeds=lambda: [
            f"{name}\n{keys.resume_key(SECRET, name)}".encode()
            for name in ("gateway-0-aa", "", "é")
        ],
        shape=Bytes((b"\n", b"\xff", b"\0")),
        open=decoding(_key),
        errors=(),
    ),
)
"""Those of this module."""
