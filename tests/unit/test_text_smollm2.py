"""The demo model's own tokenizer, rebuilt from its GGUF file, against golden ids and texts.

Skips unless the model is in the cache already (`deepinfer model get demo` puts it there).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.text.load import load_tokenizer
from deepinfer.text.stream import TextStream
from deepinfer.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(demo_model)


@pytest.fixture(scope="module")
def cases(shared_data: Path) -> list[dict[str, Any]]:
    goldens = json.loads((shared_data / "goldens.json").read_text(encoding="utf-8"))
    found = goldens["smollm2"]["cases"]
    assert isinstance(found, list)
    return found


def test_ids_of_prompts(tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]


def test_texts_of_answers(tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        stream = TextStream(tokenizer, skip_special_tokens=False)
        assert stream.extend(case["output_ids"]) + stream.finish() == case["output_text"]


def test_the_chat_template_writes_the_golden_prompt(
    tokenizer: Tokenizer, cases: list[dict[str, Any]]
) -> None:
    for case in cases:
        question = case["prompt"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        assert tokenizer.encode_chat([{"role": "user", "content": question}]) == case["prompt_ids"]


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.eos_ids == (0, 2)
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.vocab_size == 49_152
    assert not tokenizer.adds_bos


def test_shakespeare_round_trips(tokenizer: Tokenizer, shared_data: Path) -> None:
    text = (shared_data / "prompts" / "shakespeare_300k.txt").read_text(encoding="utf-8")[:50_000]
    tokens = tokenizer.encode(text)
    assert TextStream(tokenizer).extend(tokens) == text
    assert len(tokens) < len(text) / 3
