"""No secret is in a line of a log, however it got there."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from deepinfer.controller.actor import _redact_structlog
from deepinfer.proto import redaction
from deepinfer.proto.redaction import HIDDEN, hide, redacted

SECRET = "s3cr3t-of-some-length"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(redaction, "_secrets", set())
    factory, config = logging.getLogRecordFactory(), structlog.get_config()
    hide(SECRET)
    yield
    logging.setLogRecordFactory(factory)
    structlog.configure(**config)


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream = io.StringIO()
    log = logging.getLogger("of a test of redaction")
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    yield log, stream
    log.removeHandler(handler)


def fail() -> None:
    raise ValueError(f"the token {SECRET} is wrong")


def test_messages_arguments_and_tracebacks(logged: tuple[logging.Logger, io.StringIO]) -> None:
    log, stream = logged
    log.info("a %s and %d", f"Bearer {SECRET}", 7)
    log.debug(f"metadata {SECRET!r}")  # noqa: G004 - as somebody else might
    try:
        fail()
    except ValueError:
        log.exception("it failed")
    said = stream.getvalue()
    assert SECRET not in said
    assert said.startswith(f"a Bearer {HIDDEN} and 7\nmetadata '{HIDDEN}'\nit failed\nTraceback")
    assert f"ValueError: the token {HIDDEN} is wrong" in said
    assert "in fail" in said


def test_other_lines_are_as_they_were(logged: tuple[logging.Logger, io.StringIO]) -> None:
    log, stream = logged
    log.warning("%s of %s", 1, {"a": "short"})
    assert stream.getvalue() == "1 of {'a': 'short'}\n"


def test_structlog_too(capsys: pytest.CaptureFixture[str]) -> None:
    _redact_structlog()
    _redact_structlog()  # each controller of a process does it
    log = structlog.get_logger()
    log.warning("illegal report", error=f"token = {SECRET}")
    try:
        fail()
    except ValueError:
        log.exception("metrics")
    said = capsys.readouterr().out
    assert SECRET not in said
    assert said.count(HIDDEN) >= 2
    assert "illegal report" in said


def test_what_is_too_short_to_be_a_secret_is_left_alone() -> None:
    hide("abc", "", None)
    assert redacted(f"abc {SECRET}") == f"abc {HIDDEN}"
