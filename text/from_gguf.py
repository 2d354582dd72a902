"""Rebuilds a tokenizer from the metadata of a GGUF file.

Of byte-level BPE a GGUF file lists tokens, their types and the merges, and only *names* the
pre-tokenizer (the regular expressions that cut text into words first): what the names mean is
written down here, after the tokenizer.json of the models that they were made from. What it has of
SentencePiece is read in ``from_gguf_pieces``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from deepinfer.text.chat import ChatTemplate
from deepinfer.text.errors import TokenizerError, UnsupportedTokenizerError
from deepinfer.text.from_gguf_pieces import Pieces
from deepinfer.text.gguf_metadata import Value, read_gguf_metadata
from deepinfer.text.token_bytes import TokenForm
from deepinfer.text.tokenizer import Tokenizer

_PREFIX = "tokenizer."
_ARCHITECTURE = "general.architecture"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types; 1 is normal, 5 unused, 6 a byte

# Files often declare one end id only, where the model's own generation_config has two. A control
# token of one of these names ends a generation too, as in llama.cpp.
_END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>")

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What a pre-tokenizer's name stands for, beyond the vocabulary."""

    steps: tuple[PreTokenizer, ...]
    compose: bool = False  # NFC before anything else
    ignore_merges: bool = False  # a word that is a token is taken whole, merges or not
    adds_bos: bool = False  # unless the file says otherwise


def _split(pattern: str) -> tuple[PreTokenizer, ...]:
    return (
        Split(Regex(pattern), behavior="isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    )


_RECIPES: Mapping[str, _Recipe] = {
    "gpt-2": _Recipe(steps=(ByteLevel(add_prefix_space=False),)),
    "smollm": _Recipe(steps=(Digits(individual_digits=True), ByteLevel(add_prefix_space=False))),
    "qwen2": _Recipe(steps=_split(_QWEN2_WORDS), compose=True),
    "llama-bpe": _Recipe(steps=_split(_LLAMA3_WORDS), ignore_merges=True, adds_bos=True),
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Rebuild the tokenizer of a GGUF file: SentencePiece, or BPE with a known pre-tokenizer.

    Every token keeps the id of its place in the file, control tokens included. Raises
    :class:`UnsupportedTokenizerError` naming any other kind, :class:`TokenizerError` for a file
    without a tokenizer or with one that contradicts itself, OSError if it cannot be opened.
    """
    metadata = read_gguf_metadata(path, prefixes=(_PREFIX, _ARCHITECTURE))
    pieces: Pieces | None = None
    if metadata.get("tokenizer.ggml.model") == "llama":
        pieces = _pieces(metadata, path)
        tokens, types = list(pieces.tokens), list(pieces.types)
        backend, form = _pieces_backend(pieces, path), pieces.form()
        adds_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", True, path)
    else:
        recipe = _recipe(metadata, path)
        tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
        types = _token_types(metadata, len(tokens), path)
        _refuse_twins(tokens, path)
        backend = _backend(tokens, _merges(metadata, path), recipe, path)
        form = TokenForm(byte_level=True)
        adds_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", recipe.adds_bos, path)
    special = [i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)]
    added = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
    # Already in the vocabulary, they keep their ids: only how text is searched for them changes.

    def written(token_id: int) -> AddedToken:
        if pieces is not None:
            return pieces.added(token_id)
        return AddedToken(tokens[token_id], normalized=False)

    backend.add_special_tokens([written(i) for i in special])
    backend.add_tokens([written(i) for i in added])
    for token_id in [*special, *added]:
        if (got := backend.token_to_id(tokens[token_id])) != token_id:
            raise TokenizerError(f"{path}: token {tokens[token_id]!r} is {token_id}, became {got}")

    bos_id = _id(metadata, "bos", len(tokens), path)
    if adds_bos and bos_id is None:
        raise TokenizerError(f"{path}: add_bos_token is set, but there is no bos_token_id")
    eos_id = _id(metadata, "eos", len(tokens), path)
    ends = {eos_id, *(_id(metadata, name, len(tokens), path) for name in ("eot", "eom"))}
    ends |= {i for i in special if types[i] == _CONTROL and tokens[i] in _END_NAMES}
    return Tokenizer(
        backend,
        form=form,
        special_ids=special,
        eos_ids=(i for i in ends if i is not None),
        bos_id=bos_id,
        prefix_ids=(bos_id,) if adds_bos and bos_id is not None else (),
        chat=_chat(metadata, tokens, bos_id, eos_id, path),
    )


def _pieces(metadata: Mapping[str, Value], path: Path) -> Pieces:
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    _refuse_twins(tokens, path)
    key = "tokenizer.ggml.scores"
    scores = metadata.get(key)
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError(f"{path}: {key} is missing or not a list of {len(tokens)} numbers")
    numbers = [float(score) for score in scores if isinstance(score, int | float)]
    if len(numbers) != len(tokens) or not all(map(math.isfinite, numbers)):
        raise TokenizerError(f"{path}: {key} holds other things than finite numbers")
    pieces = Pieces(
        tokens=tokens,
        scores=numbers,
        types=_token_types(metadata, len(tokens), path),
        space_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix", True, path),
        controls_eat_space=metadata.get(_ARCHITECTURE) == "phi3",
    )
    if (fault := pieces.fault()) is not None:
        raise TokenizerError(f"{path}: {fault}")
    return pieces


def _pieces_backend(pieces: Pieces, path: Path) -> tokenizers.Tokenizer:
    try:
        return pieces.backend()
    except Exception as error:  # the binding raises bare Exception
        raise TokenizerError(f"{path}: these pieces make no tokenizer: {error}") from error


def _flag(metadata: Mapping[str, Value], key: str, default: bool, path: Path) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{path}: {key} = {value!r}: must be true or false")
    return value


def _recipe(metadata: Mapping[str, Value], path: Path) -> _Recipe:
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise TokenizerError(f"{path}: holds no tokenizer (no tokenizer.ggml.model)")
    if model != "gpt2":
        raise UnsupportedTokenizerError(
            f"{path}: tokenizer model {model!r} is not supported (supported: 'gpt2', which is "
            "byte-level BPE, and 'llama', which is SentencePiece); use the model's Hugging Face "
            "folder with its tokenizer.json"
        )
    pre = metadata.get("tokenizer.ggml.pre", "not named")
    if not isinstance(pre, str) or pre not in _RECIPES:
        raise UnsupportedTokenizerError(
            f"{path}: pre-tokenizer {pre!r} is not supported (supported: "
            f"{', '.join(_RECIPES)}); use the model's Hugging Face folder with its tokenizer.json"
        )
    return _RECIPES[pre]


def _refuse_twins(tokens: list[str], path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise TokenizerError(f"{path}: token {twice!r} is listed twice: its id is ambiguous")


def _backend(
    tokens: list[str], merges: list[tuple[str, str]], recipe: _Recipe, path: Path
) -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocabulary, merges, ignore_merges=recipe.ignore_merges)
    except Exception as error:  # the binding raises bare Exception
        raise TokenizerError(f"{path}: merges do not fit the tokens: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    if recipe.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(recipe.steps))
    backend.decoder = decoders.ByteLevel()
    return backend


def _strings(metadata: Mapping[str, Value], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise TokenizerError(f"{path}: {key} is missing or not a list")
    strings = [item for item in value if isinstance(item, str)]
    if len(strings) != len(value):
        raise TokenizerError(f"{path}: {key} holds other things than strings")
    return strings


def _merges(metadata: Mapping[str, Value], path: Path) -> list[tuple[str, str]]:
    merges = []
    for line in _strings(metadata, "tokenizer.ggml.merges", path):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise TokenizerError(f"{path}: merge {line!r} is not two tokens and a space")
        merges.append((left, right))
    return merges


def _token_types(metadata: Mapping[str, Value], count: int, path: Path) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if not isinstance(value, list) or len(value) != count:
        raise TokenizerError(f"{path}: {key} is missing or not a list of {count} numbers")
    types = [item for item in value if isinstance(item, int)]
    if len(types) != count:
        raise TokenizerError(f"{path}: {key} holds other things than whole numbers")
    return types


def _id(metadata: Mapping[str, Value], name: str, count: int, path: Path) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise TokenizerError(f"{path}: {key} = {value!r}: must be between 0 and {count - 1}")
    return value


def _chat(
    metadata: Mapping[str, Value],
    tokens: list[str],
    bos_id: int | None,
    eos_id: int | None,
    path: Path,
) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"{path}: tokenizer.chat_template is not a string")
    return ChatTemplate(
        source,
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=None if eos_id is None else tokens[eos_id],
    )
