"""What comes in from a terminal or a pipe, and what goes out as JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deepinfer.client import Choice, Completion, InvalidRequest, SwapStats, Timings, Usage
from deepinfer.deploy import cli, generate
from deepinfer.deploy.chat import chat_lines
from deepinfer.deploy.cli import app
from deepinfer.deploy.console import check_utf8
from deepinfer.deploy.models import ModelUnavailableError


class FakeClient:
    """Answers everything with one completion."""

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def generate(self, prompt: Any, **_: Any) -> Completion:
        assert prompt == [{"role": "user", "content": "Grüße"}]
        choices = tuple(
            Choice(
                index=i,
                text="ok",
                token_ids=(1, 2),
                finish_reason="stop",
                message="",
                matched_stop=None,
                logprobs=(),
                usage=Usage(prompt_tokens=5, cached_tokens=3, completion_tokens=2),
                swaps=SwapStats(),
                timings=Timings(
                    ttft_s=0.1,
                    intervals_s=(0.1,),
                    total_s=0.2,
                    reconnects=0,
                    gateway_ttft_s=0.1,
                    gateway_tpot_s=0.1,
                ),
            )
            for i in range(2)
        )
        return Completion(request_id="r", choices=choices)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(generate, "connect", lambda *_: fake)
    return fake


def strict_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, encoding: str) -> None:
    """As Python makes it where the locale is not C: what is no text raises."""
    stream = io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdin", stream)


@pytest.mark.usefixtures("client")
def test_the_json_answer_counts_all_tokens() -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--json"], input="Grüße")
    document = json.loads(result.stdout)
    counts = {"prompt_tokens": 5, "cached_tokens": 3}
    assert document["usage"] == counts | {"completion_tokens": 4, "total_tokens": 9}
    for choice in document["choices"]:
        assert choice["usage"] == counts | {"completion_tokens": 2, "total_tokens": 7}


@pytest.mark.usefixtures("client")
def test_a_prompt_that_is_not_utf8_is_told_in_one_line() -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--json"], input=b"ab\xff\xfec")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: the prompt is not UTF-8: byte 0xff after 2 characters\n"
    with pytest.raises(InvalidRequest, match="byte 0x80 after 0 characters"):
        check_utf8("\udc80")
    assert check_utf8("Grüße") == "Grüße"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_standard_input_is_utf8_in_every_locale(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict_stdin(monkeypatch, b"Gr\xc3\xbc\xc3\x9fe\n\xff\nlast", encoding)
    lines = list(chat_lines(Console(file=io.StringIO())))
    assert lines == ["Grüße\n", "\udcff\n", "last"]


def test_a_refused_model_leaves_one_line(tmp_path: Path) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True)
    with pytest.raises(ModelUnavailableError):
        generate.get_model(str(tmp_path / "none"), console=console)
    assert shown.getvalue() == ""


@pytest.mark.parametrize("command", ["bench offload", "bench controller", "demo"])
def test_what_cannot_be_written_is_told_before_it_is_measured(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    output = tmp_path / "file" / "below"
    result = CliRunner().invoke(app, [*command.split(), "--output", str(output)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--output'" in result.stderr
    assert "cannot be written" in " ".join(result.stderr.split())


def test_ctrl_c_before_a_command_has_begun_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(prog_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
