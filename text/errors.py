"""What can be wrong with a tokenizer, a chat template or messages.

::

    ValueError
    ├── TokenizerError              the files are missing, damaged or contradict each other
    │   └── UnsupportedTokenizerError   they are fine, but of a kind that is not implemented
    └── ChatError                   messages cannot be turned into a prompt
        ├── ChatTemplateError           the model's template is missing, broken or refused them
        └── ChatMessageError            the messages themselves are malformed
"""

from __future__ import annotations


class TokenizerError(ValueError):
    """Tokenizer files are missing, damaged, or contradict each other."""


class UnsupportedTokenizerError(TokenizerError):
    """The tokenizer is of a kind that is not implemented; the message names it."""


class ChatError(ValueError):
    """Messages cannot be turned into a prompt."""


class ChatTemplateError(ChatError):
    """The model has no chat template, it does not compile, or it refused these messages."""


class ChatMessageError(ChatError):
    """A message is malformed: names the field, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{name} = {shown}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed
