"""A GGUF file's tokenizer, written as a Hugging Face folder's files, is the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from deepinfer.text.errors import TokenizerError
from deepinfer.text.load import load_tokenizer
from deepinfer.text.to_huggingface import write_huggingface_tokenizer
from deepinfer.text.tokenizer import Tokenizer
from text_samples import CHATML, CORPUS, sentencepiece_spec, write_folder, write_gguf

TEXTS = (
    CORPUS,
    "\n\n  12 345<|im_end|> <think><tool call>",
    "<s>the</s> a  the",
    "",
    " leading and trailing ",
)


def exported(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    folder.mkdir()
    write_huggingface_tokenizer(tokenizer, folder)
    return load_tokenizer(folder)


def assert_same(one: Tokenizer, other: Tokenizer) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = one.encode(text, add_special_tokens=special)
            assert other.encode(text, add_special_tokens=special) == ids, text
            assert other.decode(ids) == one.decode(ids), text


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level(pre: str, adds_bos: bool, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", pre=pre, add_bos_token=adds_bos)
    tokenizer = load_tokenizer(file)
    other = exported(tokenizer, tmp_path / "hf")
    assert_same(tokenizer, other)
    assert other.eos_ids == tokenizer.eos_ids == (0, 2)
    assert other.adds_bos == adds_bos
    message = [{"role": "user", "content": "naïve"}]
    assert other.encode_chat(message) == tokenizer.encode_chat(message)


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", sentencepiece_spec()))
    assert_same(tokenizer, exported(tokenizer, tmp_path / "hf"))


def test_transformers_reads_it_the_same(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", add_bos_token=True))
    exported(tokenizer, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text), text
    assert theirs.chat_template == CHATML
    assert theirs.eos_token == "<|im_end|>"


def test_the_demo_models(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(demo_model)
    assert_same(tokenizer, exported(tokenizer, tmp_path / "hf"))


def test_a_tokenizer_that_would_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    spec = json.loads(tokenizer.to_json())
    spec["added_tokens"] = spec["added_tokens"][1:]
    monkeypatch.setattr(Tokenizer, "to_json", lambda self: json.dumps(spec))
    (tmp_path / "hf").mkdir()
    with pytest.raises(TokenizerError, match=r"cannot be written .*: special_ids would differ"):
        write_huggingface_tokenizer(tokenizer, tmp_path / "hf")
