"""Opens the tokenizer of a model on disk."""

from __future__ import annotations

from pathlib import Path

from deepinfer.text.errors import TokenizerError
from deepinfer.text.from_gguf import load_gguf_tokenizer
from deepinfer.text.from_huggingface import load_huggingface_tokenizer
from deepinfer.text.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open the tokenizer of a Hugging Face folder or of a GGUF file.

    Raises :class:`TokenizerError` if there is none or it is damaged, and its subclass
    :class:`UnsupportedTokenizerError`, naming the kind, if it is of one not implemented.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return load_huggingface_tokenizer(path)
        if path.is_file():
            return load_gguf_tokenizer(path)
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror or error}") from error
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise TokenizerError(f"{path}: a token has no UTF-8 form: {error.reason}") from error
    raise TokenizerError(f"{path}: no such file or folder: no tokenizer to load")
