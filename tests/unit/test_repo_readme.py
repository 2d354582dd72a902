"""What the README shows can be run: its Python names what there is, its commands parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import deepinfer.client
from deepinfer.client import Completion, Delta, Event, Finished
from deepinfer.deploy.cli import app

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^deepinfer (.+)$", README, re.MULTILINE)


class FakeClient(deepinfer.client.Client):
    """Takes what the real client takes and answers from memory."""

    def generate(self, prompt: Any, **options: Any) -> Completion:
        return completion("a generated text")

    def stream(self, prompt: Any, **options: Any) -> Any:
        deepinfer.client.request.build_request(prompt, options)  # type: ignore[arg-type]
        return iter(events())


def completion(text: str) -> Completion:
    return Completion(request_id="r", choices=(choice(text),))


def choice(text: str) -> deepinfer.client.Choice:
    return deepinfer.client.Choice(
        index=0,
        text=text,
        token_ids=(1,),
        finish_reason="stop",
        message="",
        matched_stop=None,
        logprobs=(),
        usage=deepinfer.client.Usage(prompt_tokens=1, completion_tokens=1),
        swaps=deepinfer.client.SwapStats(),
        timings=deepinfer.client.Timings(
            ttft_s=0.1,
            intervals_s=(),
            total_s=0.1,
            reconnects=0,
            gateway_ttft_s=None,
            gateway_tpot_s=None,
        ),
    )


def events() -> list[Event]:
    said = Delta(choice=0, position=0, token_ids=(1,), text="all of ", logprobs=())
    return [said, Finished(choice=choice("all of it"), text="it")]


def test_the_python_example_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / ".local" / "state" / "deepinfer" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("a-token-of-enough-characters\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(deepinfer.client, "Client", FakeClient)
    (example,) = CODE
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "a generated text\nall of it"


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_parse(line: str) -> None:
    command: Any = get_command(app)
    name, *arguments = shlex.split(line, comments=True)
    sub = command.commands[name]
    context = sub.make_context(name, arguments)
    assert context.args == []


def test_there_are_commands() -> None:
    assert {line.split()[0] for line in COMMANDS} >= {"up", "generate", "status", "down"}
