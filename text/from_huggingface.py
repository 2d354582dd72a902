"""Opens the tokenizer of a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from deepinfer.text.chat import ChatTemplate
from deepinfer.text.errors import TokenizerError, UnsupportedTokenizerError
from deepinfer.text.token_bytes import token_form
from deepinfer.text.tokenizer import Tokenizer

_Json = Mapping[str, object]

# Far beyond the largest: 34 MB for a vocabulary of 262,144 tokens.
_FILE_BYTES_MAX = 1 << 28
_ID_DIGITS_MAX = 10
"""Of a token id; Python itself reads no number of thousands of them."""

# Without tokenizer.json, what these files would need.
_OTHER_KINDS = {
    "tokenizer.model": "SentencePiece",
    "spiece.model": "SentencePiece",
    "tekken.json": "Tekken",
    "vocab.json": "vocab.json with merges.txt",
}


def load_huggingface_tokenizer(folder: Path) -> Tokenizer:
    """Open the tokenizer of a model folder.

    Read are ``tokenizer.json`` (required), ``tokenizer_config.json``, ``generation_config.json``
    (or else ``config.json``) for the ids that end a generation, and ``chat_template.jinja``. An
    added token keeps the id that the files declare; if it cannot, that is an error. Raises
    :class:`TokenizerError` or :class:`UnsupportedTokenizerError`; OSError if a file cannot be
    opened.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        for name, kind in _OTHER_KINDS.items():
            if (folder / name).is_file():
                raise UnsupportedTokenizerError(
                    f"{folder}: a {kind} tokenizer ({name}) is not supported: "
                    "tokenizer.json is needed (transformers' save_pretrained writes one)"
                )
        raise TokenizerError(f"{folder}: holds no tokenizer (no tokenizer.json)")
    spec = _read_json(file)
    config = _read_json(folder / "tokenizer_config.json", required=False)
    form = token_form(spec.get("decoder"), str(file))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the binding raises bare Exception
        raise TokenizerError(f"{file}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    special_ids = _add_declared_tokens(backend, spec, config, folder)

    bos_token, eos_token = (_token_name(config, name, folder) for name in ("bos", "eos"))
    bos_id = _known_id(backend, bos_token, "bos_token", folder)
    eos_id = _known_id(backend, eos_token, "eos_token", folder)
    if bos_id is None:
        bos_id = next(iter(_config_ids(folder, "bos_token_id")), None)
    prefix_ids, suffix_ids = _surroundings(backend)
    match config.get("add_bos_token"):
        case True if bos_id is not None:
            prefix_ids = [bos_id]
        case False:
            prefix_ids = [i for i in prefix_ids if i != bos_id]
    eos_ids = _config_ids(folder, "eos_token_id")
    return Tokenizer(
        backend,
        form=form,
        special_ids=special_ids,
        eos_ids=eos_ids if eos_id is None else [eos_id, *eos_ids],
        bos_id=bos_id,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        chat=_chat(folder, config, bos_token, eos_token),
    )


def _read_text(file: Path) -> str:
    if (size := file.stat().st_size) > _FILE_BYTES_MAX:
        raise TokenizerError(f"{file}: {size} bytes; at most {_FILE_BYTES_MAX} are read")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not UTF-8: {error}") from error


def _read_json(file: Path, *, required: bool = True) -> _Json:
    if not required and not file.is_file():
        return {}
    text = _read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: holds {type(value).__name__}, not an object")
    return value


def _add_declared_tokens(
    backend: tokenizers.Tokenizer, spec: _Json, config: _Json, folder: Path
) -> list[int]:
    """Make every declared added token known under its declared id; return the special ones."""
    declared: dict[int, tuple[str, bool]] = {}
    entries = spec.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TokenizerError(f"{folder}/tokenizer.json: added_tokens is not a list")
    for entry in entries:
        match entry:
            case {"id": int(token_id), "content": str(content)}:
                declared[token_id] = (content, bool(entry.get("special")))
            case _:
                raise TokenizerError(f"{folder}/tokenizer.json: added token {entry!r} is malformed")
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{folder}/tokenizer_config.json: added_tokens_decoder: no object")
    for key, entry in sorted(decoder.items(), key=lambda item: (len(item[0]), item[0])):
        match entry:
            case {"content": str(content)} if key.isdecimal() and len(key) <= _ID_DIGITS_MAX:
                special = bool(entry.get("special"))
                if int(key) not in declared:
                    flags = {f: bool(entry.get(f)) for f in ("single_word", "lstrip", "rstrip")}
                    token = AddedToken(
                        content, normalized=bool(entry.get("normalized", not special)), **flags
                    )
                    (backend.add_special_tokens if special else backend.add_tokens)([token])
                    declared[int(key)] = (content, special)
                elif declared[int(key)][0] != content:
                    raise TokenizerError(
                        f"{folder}: id {key} is {declared[int(key)][0]!r} in tokenizer.json and "
                        f"{content!r} in tokenizer_config.json"
                    )
            case _:
                raise TokenizerError(
                    f"{folder}/tokenizer_config.json: added_tokens_decoder: {key[:40]!r} is "
                    "malformed"
                )
    for token_id, (content, _) in sorted(declared.items()):
        if (got := backend.token_to_id(content)) != token_id:
            raise TokenizerError(
                f"{folder}: added token {content!r} is declared as id {token_id}, but is {got}"
            )
    return [token_id for token_id, (_, special) in declared.items() if special]


def _token_name(config: _Json, name: str, folder: Path) -> str | None:
    match config.get(f"{name}_token"):
        case None:
            return None
        case str(content) | {"content": str(content)}:
            return content
        case other:
            raise TokenizerError(f"{folder}/tokenizer_config.json: {name}_token = {other!r}")


def _known_id(
    backend: tokenizers.Tokenizer, token: str | None, field: str, folder: Path
) -> int | None:
    if token is None:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise TokenizerError(
            f"{folder}/tokenizer_config.json: {field} = {token!r} is not in the vocabulary"
        )
    return token_id


def _config_ids(folder: Path, field: str) -> list[int]:
    """Return an id, or list of them, of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        match _read_json(folder / name, required=False).get(field):
            case None:
                continue
            case int(token_id) if not isinstance(token_id, bool):
                return [token_id]
            case list(ids) if all(type(i) is int for i in ids):
                return ids
            case other:
                raise TokenizerError(f"{folder}/{name}: {field} = {other!r}: must be ids")
    return []


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer's own post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise TokenizerError(f"the post-processor changes the text it surrounds: {bare} to {full}")


def _chat(
    folder: Path, config: _Json, bos_token: str | None, eos_token: str | None
) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    source = config.get("chat_template")
    if file.is_file():
        source = _read_text(file)
    elif isinstance(source, list):  # several, by name
        named = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"{folder}/tokenizer_config.json: chat_template is not a string")
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)
