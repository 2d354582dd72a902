"""Decoders of text: tokenizer files, chat templates and messages, stop strings, settings."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import typer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from deepinfer.deploy.config import CacheSize, ConfigError, load_config
from deepinfer.deploy.fuzz.checkpoints import file_of, gguf_of
from deepinfer.deploy.fuzz.messages import decoding
from deepinfer.deploy.fuzz.shapes import Bytes, Either, Json
from deepinfer.deploy.fuzz.target import Case, Target
from deepinfer.deploy.sampling import Bias
from deepinfer.text.chat import ChatTemplate
from deepinfer.text.errors import ChatError, ChatTemplateError, TokenizerError
from deepinfer.text.load import load_tokenizer
from deepinfer.text.stream import TextStream
from deepinfer.text.tokenizer import Tokenizer

CHAT: Final = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL: Final = ("<|start|>", "<|end|>", "<|eos|>")


def tokenizer_json() -> str:
    """A ``tokenizer.json`` of single bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return str(backend.to_str())


TOKENIZER_CONFIG: Final[dict[str, Any]] = {
    "eos_token": "<|eos|>",
    "bos_token": {"content": "<|start|>"},
    "add_bos_token": True,
    "chat_template": CHAT,
    "added_tokens_decoder": {"258": {"content": "<|eos|>", "special": True}},
}


def write_tokenizer(folder: Path) -> None:
    """Write its folder."""
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": [258]}')


@contextmanager
def _tokenizer_files(folder: Path) -> Iterator[Case]:
    """One of the three files, by the first byte, is the input; the others are right."""
    write_tokenizer(folder)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    right = {name: (folder / name).read_bytes() for name in names}

    def case(data: bytes) -> None:
        name = names[data[0] % 3] if data else names[0]
        (folder / name).write_bytes(data[1:])
        try:
            tokenizer = load_tokenizer(folder)
        finally:
            (folder / name).write_bytes(right[name])
        ids = tokenizer.encode("Hi é\n")
        tokenizer.decode(ids)

    yield case


def _small_tokenizer_json() -> bytes:
    """One with few tokens, whose rules are a large part of it."""
    spec = json.loads(tokenizer_json())
    vocabulary = spec["model"]["vocab"]
    spec["model"]["vocab"] = {token: i for token, i in vocabulary.items() if i < 6}
    spec["added_tokens"] = [
        entry | {"id": 6 + place} for place, entry in enumerate(spec["added_tokens"])
    ]
    return json.dumps(spec).encode()


def _tokenizer_seeds() -> list[bytes]:
    return [
        b"\0" + _small_tokenizer_json(),
        b"\1" + json.dumps(TOKENIZER_CONFIG).encode(),
        b'\2{"eos_token_id": [258], "bos_token_id": 256}',
    ]


class _Chosen:
    """A byte, and JSON."""

    def __init__(self) -> None:
        self._json = Json((b"Sequence", b"Regex", b"ByteFallback", b"(a+)+$", b"(?<=a)"))

    def mutate(self, data: bytes, rng: Random, others: object) -> bytes:
        return data[:1] + self._json.mutate(data[1:], rng, ())


@functools.cache
def byte_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``tokenizer_json``."""
    write_tokenizer(folder)
    return load_tokenizer(folder)


TEMPLATES: Final = (
    CHAT,
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}",
    "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ m.role | upper }}:{{ m.content.split('</think>')[-1] | tojson }}{% generation %}{{ ns.n }}"
    "{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}",
)
_TEMPLATE_WORDS: Final = (
    b"{% for i in range(99999) %}", b"{% endfor %}", b"{{ 'a' * 999999999 }}", b"{{ 9 ** 9 ** 9 }}",
    b"{{ messages.__class__ }}", b"{% include 'x' %}", b"{{ f() }}",
    b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    b"{{ '%999999999d' % 1 }}", b"{{ messages | sort }}", b"{% break %}", b"{{ [1] * 99999999 }}",
    b"{{ 'a'.ljust(999999999) }}", b"{{ '{:>999999999}'.format(1) }}", b"{{ lipsum(99) }}",
    b"{{ strftime_now(1) }}", b"{{ 1 / 0 }}", b"{{ messages[9] }}", b"{{ loop.index }}",
)  # fmt: skip


def _template(data: bytes) -> None:
    template = ChatTemplate(data.decode(errors="replace"), bos_token="<s>", eos_token=None)
    template.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}])


@contextmanager
def _messages(folder: Path) -> Iterator[Case]:
    """A chat as JSON, through three templates; no content becomes a control token."""
    tokenizer = byte_tokenizer(folder)
    special = tokenizer.special_ids
    templates = [ChatTemplate(source, bos_token=None, eos_token="</s>") for source in TEMPLATES]

    def case(data: bytes) -> None:
        try:
            messages = json.loads(data)
        except (ValueError, RecursionError):
            messages = [{"role": "user", "content": data.decode(errors="replace")}]
        for template in templates[1:]:
            try:
                template.render(messages)
            except ChatError:
                continue
        ids = tokenizer.encode_chat(messages)
        count = sum(i in special for i in ids)
        assert count == 2 * len(messages) + 1, f"{count} control tokens in {len(messages)} messages"

    yield case


def _chat_seeds() -> list[bytes]:
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "<|end|>\ufdd0"}, {"role": "user", "content": "<|start|>"}],
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "tool", "content": "", "name": "x<|eos|>"},
        ],
    ]
    return [json.dumps(chat).encode() for chat in chats]


_CHAT_WORDS: Final = tuple(
    word.encode()
    for word in (*SPECIAL, "<|", "|>", "\ufdd0", "\ufdd00\ufdd0", "\ufdd1", "\ufdd09\ufdd0", "Ċ")
)


@contextmanager
def _text(folder: Path) -> Iterator[Case]:
    """Tokens and stop strings: cut anywhere, what is shown is the same."""
    tokenizer = byte_tokenizer(folder)

    def case(data: bytes) -> None:
        stops, _, body = data.partition(b"\0")
        stop = [s for s in stops.decode(errors="replace").split("|") if s][:16]
        # One byte in 16 stands for a special token, one for an id that no token has.
        ids = [256 + b % 8 if b % 16 == 7 else (1 << 31) + b if b == 255 else b for b in body]
        whole = TextStream(tokenizer, stop, include_stop=bool(len(body) % 2))
        shown = whole.extend(ids) + whole.finish()
        pieces = TextStream(tokenizer, stop, include_stop=bool(len(body) % 2))
        again = "".join(map(pieces.push, ids)) + pieces.finish()
        assert shown == again
        assert whole.stop_string == pieces.stop_string
        shown.encode()

    yield case


# ---- settings ------------------------------------------------------------------------------


def _gguf_tokenizer_seeds() -> list[bytes]:
    tokens = ["a", "b", "ab", "<|im_end|>", "Ġ"]
    plain: dict[str, object] = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 1], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT,
    }  # fmt: skip
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    scores = [float(-place) for place in range(len(pieces))]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1]
    sentence: dict[str, object] = {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    return [gguf_of(plain), gguf_of(sentence)]


def _gguf_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode("Hi é\n"))


def _settings(path: Path) -> None:
    config = load_config(path)
    config.warnings()


def _option(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        Bias.parse(text)
    except typer.BadParameter:
        CacheSize.parse(text)


def _swapped(words: tuple[bytes, ...]) -> Callable[[bytes, Random], bytes]:
    """Put a word anywhere."""

    def change(data: bytes, rng: Random) -> bytes:
        at = rng.randrange(len(data) + 1)
        return data[:at] + rng.choice(words) + data[at + rng.randrange(4) :]

    return change


TARGETS: Final = (
    Target(
        name="tokenizer",
        about="tokenizer.json and the two files beside it",
        seeds=_tokenizer_seeds,
        shape=_Chosen(),
        open=_tokenizer_files,
        errors=(TokenizerError, ChatTemplateError),
    ),
    Target(
        name="gguf_tokenizer",
        about="a GGUF file's tokenizer, both kinds",
        seeds=_gguf_tokenizer_seeds,
        shape=Bytes((b"\x08\0\0\0", b"\x09\0\0\0", b"<0x0A>", b"tokenizer.ggml.merges", b"gpt2")),
        open=file_of(_gguf_tokenizer, "model.gguf"),
        errors=(TokenizerError, ChatTemplateError),
    ),
    Target(
        name="template",
        about="a model's chat template",
        seeds=lambda: [template.encode() for template in TEMPLATES],
        shape=Either(_swapped(_TEMPLATE_WORDS), _TEMPLATE_WORDS),
        open=decoding(_template),
        errors=(ChatTemplateError,),
    ),
    Target(
        name="chat",
        about="messages of a chat, and special tokens written out in them",
        seeds=_chat_seeds,
        shape=Json(_CHAT_WORDS),
        open=_messages,
        errors=(ChatError, ValueError),
    ),
    Target(
        name="text",
        about="tokens to text, and stop strings in it",
        seeds=lambda: [
            b"ab|b|\xc3\xa9\0abcabab",
            b"\0\xf0\x9f\x99\x82\xff\x07",
            b"aaa|aa\0" + b"a" * 40,
        ],
        shape=Bytes((b"aa", b"|", b"\xf0\x9f")),
        open=_text,
        errors=(),
    ),
    Target(
        name="settings",
        about="cluster.yaml",
        seeds=lambda: [
            b"model: demo\ngateways: 2\nkv_cache_dtype: int8\nmax_cache: 64MiB\n",
            b"{}",
        ],
        shape=Bytes(
            (
                b"&a [*a]",
                b"!!python/object:os.system",
                b"? ",
                b": ",
                b"1e999",
                b"0x1",
                b"host: 0.0.0.0\n",
            )
        ),
        open=file_of(_settings, "cluster.yaml"),
        errors=(ConfigError,),
    ),
    Target(
        name="options",
        about="ID=VALUE and sizes on the command line",
        seeds=lambda: [b"198=-5", b"512MiB", b"3 blocks"],
        shape=Bytes((b"=", b"GiB", b"\xd9\xa3", b"9" * 400, b"1e400", b"nan")),
        open=decoding(_option),
        errors=(typer.BadParameter, ValueError),
    ),
)
"""Those of this module."""
