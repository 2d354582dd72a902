"""Secrets that a process must never log, whatever it logs: they are replaced in every line.

Nothing here logs a secret on purpose. This is for what somebody else formats: an exception's words,
a library's debug line, an argument that was passed by mistake.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any, Final

HIDDEN: Final = "[hidden]"
SECRET_CHARS_MIN: Final = 8
"""Shorter ones would turn up in words that say nothing of them."""

_secrets: set[str] = set()
_plain = logging.getLogRecordFactory()


def hide(*secrets: str | None) -> None:
    """From now on these are replaced in whatever this process logs through ``logging``."""
    _secrets.update(s for s in secrets if s is not None and len(s) >= SECRET_CHARS_MIN)
    if logging.getLogRecordFactory() is not _record:
        logging.setLogRecordFactory(_record)


def redacted(text: str) -> str:
    """``text`` without secrets."""
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


def _record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _plain(*args, **kwargs)
    if not _secrets:
        return record
    message = record.getMessage()
    if (said := redacted(message)) != message:
        record.msg, record.args = said, None
    if record.exc_info and record.exc_info[1] is not None:
        # What a formatter would make of it; one that finds the text made uses it.
        record.exc_text = redacted("".join(traceback.format_exception(record.exc_info[1])).rstrip())
    return record
