"""What clients write, read by the gateway, and the record that it makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.client.results import TokenLogprob, TopLogprob
from deepinfer.client.wire import logprobs_from
from deepinfer.gateway import client_wire
from deepinfer.gateway.intake import ModelCard, build_record
from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.messages import Delta, PromptDelta
from deepinfer.kvstore.core.requests import InvalidRequestError, Token
from deepinfer.proto import inference_pb2
from deepinfer.text.load import load_tokenizer
from support.byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer

FIELD_21 = b"\xa8\x01\x05"
"""Field number 21 as a varint 5; what smg's SamplingParams has there this contract does not."""


def test_what_is_unset_takes_its_default() -> None:
    ask = client_wire.ask_from(inference_pb2.GenerateRequest(text="x"))
    assert (ask.text, ask.input_ids, ask.messages, ask.max_tokens_given) == ("x", None, None, False)
    assert (ask.sampling.temperature, ask.sampling.top_k, ask.sampling.seed) == (1.0, 0, None)
    zero = inference_pb2.SamplingParams(temperature=0.0, seed=0, max_tokens=1)
    ask = client_wire.ask_from(inference_pb2.GenerateRequest(text="x", sampling_params=zero))
    assert (ask.sampling.temperature, ask.sampling.seed, ask.max_tokens_given) == (0.0, 0, True)


def test_a_field_that_would_be_ignored_is_refused() -> None:
    request = inference_pb2.GenerateRequest(text="x")
    request.sampling_params.MergeFromString(FIELD_21)
    with pytest.raises(InvalidRequestError, match=r"with field 21.*known fields: temperature") as e:
        client_wire.ask_from(request)
    assert e.value.name == "sampling_params"
    other = inference_pb2.GenerateRequest.FromString(FIELD_21)
    with pytest.raises(InvalidRequestError, match=r"with field 21.*known fields: model") as e:
        client_wire.ask_from(other)
    assert e.value.name == "request"


def test_a_dated_prompt_is_the_same_whenever_it_is_read_again(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path)
    config = folder / "tokenizer_config.json"
    dated = "{{ strftime_now('%d %b %Y %H:%M') }}|{{ messages[0].content }}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": dated}))
    tokenizer = load_tokenizer(folder)
    card = ModelCard(
        model="m",
        tokenizer=tokenizer,
        max_context_tokens=512,
        vocab_size=tokenizer.vocab_size,
        kv_cache_dtype="fp16",
        eos_token_ids=tokenizer.eos_ids,
    )
    request = inference_pb2.GenerateRequest()
    request.chat.messages.add(role="user", content="hi")
    # One minute before midnight UTC: a gateway that takes the request over later reads it again.
    record = build_record(
        client_wire.ask_from(request),
        card,
        RequestId("r"),
        arrival_ms=1_796_083_140_000,
        default_seed=0,
        lifetime_ms=1000,
    )
    assert tokenizer.decode(record.prompt_ids) == "30 Nov 2026 23:59|hi"


def test_log_probabilities_say_what_their_tokens_are_in_bytes(tmp_path: Path) -> None:
    """Parts of a character, a special token and an id beyond the vocabulary among them."""
    tokenizer = load_tokenizer(write_byte_tokenizer(tmp_path))
    first, second = tokenizer.encode("\u00fc")
    tokens = (
        Token(first, -0.5, ((EOS, -0.25), (first, -0.5))),
        Token(second, -1.0, ((VOCAB_SIZE, -0.75),)),
        Token(EOS, -2.0),
    )
    right = (
        TokenLogprob(
            first,
            -0.5,
            (TopLogprob(EOS, -0.25, b"<|eos|>"), TopLogprob(first, -0.5, b"\xc3")),
            b"\xc3",
        ),
        TokenLogprob(second, -1.0, (TopLogprob(VOCAB_SIZE, -0.75, b""),), b"\xbc"),
        TokenLogprob(EOS, -2.0, (), b"<|eos|>"),
    )
    delta = client_wire.delta_to(Delta(0, 7, tokens), "\u00fc", tokenizer.token_bytes)
    assert logprobs_from(delta.chunk.output_logprobs) == right
    prompt = client_wire.prompt_to(PromptDelta(1, tokens), tokenizer.token_bytes)
    assert logprobs_from(prompt.prompt.logprobs) == right
    assert [one.text for one in right] == ["\ufffd", "\ufffd", "<|eos|>"]
    assert b"".join(one.token_bytes for one in right[:2]).decode() == "\u00fc"
    unasked = client_wire.delta_to(Delta(0, 7, tokens), "\u00fc", None)
    assert not unasked.chunk.HasField("output_logprobs")
