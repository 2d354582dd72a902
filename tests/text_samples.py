"""Small vocabularies of the kinds that models have, in memory and on disk, for tests of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from deepinfer.text.token_bytes import BYTE_OF_CHARACTER

CORPUS = (
    "Once upon a time there was a little girl named Lily. She didn't like the number 1234. "
    "Größe, naïve café, 東京は日本の首都です。 Привет мир! 🙂🙃🚀 the they them there then other"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<tool call>", "<think>")  # added tokens that are text, one of them with a space
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def byte_level_parts() -> tuple[list[str], list[tuple[str, str]]]:
    """Return (tokens by id, merges): specials first, 256 bytes, merged words, then ``WORDS``."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=list(BYTE_OF_CHARACTER),
        show_progress=False,
    )
    trained.train_from_iterator([CORPUS] * 3, trainer)
    spec = json.loads(trained.to_str())["model"]
    tokens = [token for token, _ in sorted(spec["vocab"].items(), key=lambda item: item[1])]
    return [*tokens, *WORDS], [(left, right) for left, right in spec["merges"]]


def write_gguf(path: Path, *, without: tuple[str, ...] = (), **changes: object) -> Path:
    """Write a GGUF file that holds a byte-level vocabulary and no tensors.

    ``changes`` replace, and ``without`` leaves out, entries of the metadata by their last word.
    """
    tokens, merges = byte_level_parts()
    entries: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [
            CONTROL if t in SPECIALS else USER_DEFINED if t in WORDS else NORMAL for t in tokens
        ],
        "merges": [f"{left} {right}" for left, right in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
        "chat_template": CHATML,
    }
    entries |= changes
    return write_metadata(path, {n: value for n, value in entries.items() if n not in without})


def write_metadata(
    path: Path, entries: Mapping[str, object], *, architecture: str = "llama"
) -> Path:
    """Write a GGUF file without tensors, of entries by their last word; None leaves one out."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in entries.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
            case None:
                pass
            case _:
                raise TypeError(f"{name}: {value!r}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_spec() -> dict[str, object]:
    """Return a tokenizer.json of the same vocabulary as ``write_gguf`` writes."""
    tokens, merges = byte_level_parts()
    ids = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIALS])
    backend.add_tokens([AddedToken(t, normalized=False) for t in WORDS])
    spec = json.loads(backend.to_str())
    assert isinstance(spec, dict)
    return spec


def sentencepiece_spec() -> dict[str, object]:
    """Return a tokenizer.json as Llama 2 has it: ``▁`` for spaces, ``<0x0A>`` for odd bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdehiLnoprtuy.,!", "é", "th", "the", "▁the", "▁a", "▁▁"]
    merges = ["t h", "th e", "▁ the", "▁ a", "▁ ▁"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(tokens[:3])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def write_folder(folder: Path, spec: Mapping[str, object], **files: Mapping[str, object]) -> Path:
    """Write a Hugging Face folder; ``files`` are the other JSON files by their stem."""
    folder.mkdir(exist_ok=True)
    for name, content in {"tokenizer": spec, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
