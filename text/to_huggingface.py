"""Writes a tokenizer as the files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer.text.errors import TokenizerError
from deepinfer.text.from_huggingface import load_huggingface_tokenizer
from deepinfer.text.tokenizer import Tokenizer


def write_huggingface_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    They are read back and compared. Raises :class:`TokenizerError` if they would not make the same
    tokenizer; OSError if they cannot be written.
    """
    chat = tokenizer.chat
    bos = None if tokenizer.bos_id is None else tokenizer.token(tokenizer.bos_id)
    eos = next((tokenizer.token(i) for i in tokenizer.eos_ids), None)
    if chat is not None and chat.eos_token is not None:
        eos = chat.eos_token
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(tokenizer.prefix_ids),
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": eos,
    }
    if chat is not None:
        config["chat_template"] = chat.source
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    for name, values in (("tokenizer_config", config), ("generation_config", generation)):
        text = json.dumps({k: v for k, v in values.items() if v is not None}, indent=2)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    before, after = (_meaning(t) for t in (tokenizer, load_huggingface_tokenizer(folder)))
    if differing := [name for name, value in before.items() if after[name] != value]:
        raise TokenizerError(
            f"this tokenizer cannot be written as tokenizer.json: {', '.join(differing)} would "
            "differ"
        )


def _meaning(tokenizer: Tokenizer) -> dict[str, object]:
    chat = tokenizer.chat
    return {
        "vocabulary": [tokenizer.token(i) for i in range(tokenizer.vocab_size)],
        "form": tokenizer.form,
        "special_ids": tokenizer.special_ids,
        "eos_ids": tokenizer.eos_ids,
        "bos_id": tokenizer.bos_id,
        "prefix_ids": tokenizer.prefix_ids,
        "suffix_ids": tokenizer.suffix_ids,
        "chat template": None if chat is None else (chat.source, chat.bos_token, chat.eos_token),
    }
