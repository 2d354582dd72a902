"""A tokenizer whose tokens are single bytes, with a chat template, on disk."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 259
"""The bytes, and the three below."""
EOS = 258
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_byte_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's files to ``folder``, which is made; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|start|>", "<|end|>", "<|eos|>")]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|eos|>", "chat_template": _CHAT_TEMPLATE})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder
