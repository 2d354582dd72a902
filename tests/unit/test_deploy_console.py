"""What comes in from a terminal or a pipe, and what goes out as JSON."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deepinfer.client import (
    Choice,
    ClientConfig,
    Completion,
    Delta,
    Event,
    Finished,
    InvalidRequest,
    Retrying,
    SwapStats,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from deepinfer.client.request import build_request
from deepinfer.deploy import cli, generate, launch
from deepinfer.deploy.chat import chat_lines
from deepinfer.deploy.cli import app
from deepinfer.deploy.console import check_utf8
from deepinfer.deploy.models import ModelUnavailableError
from deepinfer.gateway.client_wire import sampling_from
from deepinfer.proto.fields import SAMPLING_SCALARS
from deepinfer.proto.inference_pb2 import SamplingParams


class FakeClient:
    """Answers everything with one completion, after trying for a while; its own stream."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stream(self, prompt: Any, **options: Any) -> FakeClient:
        assert prompt == [{"role": "user", "content": "Grüße"}]
        self.options = options
        return self

    def __iter__(self) -> Iterator[Event]:
        yield Retrying(accepted=False, patience_s=2.5, detail="[::1]:1: refused")
        yield Delta(choice=0, position=0, token_ids=(1, 2), text="o", logprobs=())
        yield Finished(choice=self.completion().choices[0], text="k")

    def completion(self) -> Completion:
        part = TopLogprob(2, -0.5, b"\xc3")
        choices = tuple(
            Choice(
                index=i,
                text="ok",
                token_ids=(1, 2),
                finish_reason="stop",
                message="",
                matched_stop=None,
                logprobs=(TokenLogprob(1, -0.25, (part,), b" o"),),
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
        scored = (None, TokenLogprob(7, -1.0, (), b"<|eos|>"))
        return Completion(request_id="r", choices=choices, prompt_logprobs=scored)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(launch, "connect", lambda *_, **__: fake)
    return fake


def strict_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, encoding: str) -> None:
    """As Python makes it where the locale is not C: what is no text raises."""
    stream = io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdin", stream)


@pytest.mark.usefixtures("client")
def test_the_json_answer_counts_all_tokens() -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--json"], input="Grüße")
    document = json.loads(result.stdout)
    shares = {"fp16": 1.0, "mixed": 0.0, "fp8": 0.0, "w8a8": 0.0}
    counts: dict[str, object] = {"prompt_tokens": 5, "cached_tokens": 3}
    counts |= {"mixed_tokens": 0, "fp8_tokens": 0, "w8a8_tokens": 0, "precision_shares": shares}
    assert document["usage"] == counts | {"completion_tokens": 4, "total_tokens": 9}
    for choice in document["choices"]:
        assert choice["usage"] == counts | {"completion_tokens": 2, "total_tokens": 7}


@pytest.mark.usefixtures("client")
def test_the_json_answer_has_every_tokens_text_and_bytes() -> None:
    arguments = ["generate", "-", "--json", "--logprobs", "1", "--prompt-logprobs", "0"]
    result = CliRunner().invoke(app, arguments, input="Grüße")
    document = json.loads(result.stdout)
    part = {"token_id": 2, "text": "\ufffd", "bytes": [0xC3], "logprob": -0.5}
    first = {"token_id": 1, "text": " o", "bytes": [32, 111], "logprob": -0.25, "top": [part]}
    assert [choice["logprobs"] for choice in document["choices"]] == [[first]] * 2
    scored = {"token_id": 7, "text": "<|eos|>", "bytes": list(b"<|eos|>"), "logprob": -1.0}
    assert document["prompt_logprobs"] == [None, scored | {"top": []}]


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("command", "stdout"),
    [("generate -", "ok\n"), ("generate - --json", "{"), ("chat", "ok\n")],
)
def test_a_cluster_that_does_not_answer_is_told_of_at_once(command: str, stdout: str) -> None:
    result = CliRunner().invoke(app, command.split(), input="Grüße")
    assert result.stdout.startswith(stdout)
    assert result.stderr.splitlines()[0] == (
        "no answer yet: [::1]:1: refused; trying again for up to 2.5 s"
    )


def test_every_sampling_field_of_the_contract_is_an_option(client: FakeClient) -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--json"], input="Grüße")
    assert result.exit_code == 0
    contract = {field.name for field in SamplingParams.DESCRIPTOR.fields}
    assert contract | {"deadline_s", "include_events", "exact"} == set(client.options)
    unset = SamplingParams()
    for name in SAMPLING_SCALARS:
        if name != "temperature" and client.options[name] is not None:
            default = getattr(sampling_from(unset), name)
            assert client.options[name] == default, f"{name}: not what is in the contract"


def test_options_reach_the_request(client: FakeClient) -> None:
    words = (
        "--logit-bias 5=-1.5 --logit-bias 7=100 --min-tokens 3 --frequency-penalty -0.5 "
        "--presence-penalty 2 --stop a --stop b --stop-token-id 9 --ignore-eos "
        "--include-stop-str-in-output --no-skip-special-tokens --exact"
    )
    for command in ("generate -", "chat"):
        result = CliRunner().invoke(app, [*command.split(), *words.split()], input="Grüße")
        assert result.exit_code == 0, result.output
        asked = {
            "exact": True,
            "logit_bias": {5: -1.5, 7: 100.0},
            "min_tokens": 3,
            "frequency_penalty": -0.5,
            "presence_penalty": 2.0,
            "stop": ("a", "b"),
            "stop_token_ids": (9,),
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        assert {name: client.options[name] for name in asked} == asked
        build_request("x", client.options)  # type: ignore[arg-type]


def test_a_conversation_has_defaults_of_its_own(client: FakeClient) -> None:
    for command, right in (("generate -", (128, 0.0, 1.0)), ("chat", (512, 0.7, 0.95))):
        CliRunner().invoke(app, command.split(), input="Grüße")
        names = ("max_tokens", "temperature", "top_p")
        assert tuple(client.options[name] for name in names) == right


@pytest.mark.parametrize("bias", ["5", "=1", "5=", "5=x", "-5=1", "a=1"])
def test_what_is_no_bias_is_told(bias: str) -> None:
    result = CliRunner().invoke(app, ["generate", "x", f"--logit-bias={bias}"])
    assert (result.exit_code, result.stdout) == (2, "")
    said = " ".join(result.stderr.split())
    assert f"Invalid value for '--logit-bias': {bias!r}: must be ID=VALUE" in said


def test_two_biases_of_one_token_are_refused() -> None:
    result = CliRunner().invoke(app, ["chat", "--logit-bias", "5=1", "--logit-bias", "05=2"])
    assert result.exit_code == 2
    assert "--logit-bias: 5 is named more than once" in " ".join(result.stderr.split())


def test_what_only_json_can_hold_is_refused_without_it() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--n", "2", "--prompt-logprobs", "0"])
    assert result.exit_code == 2
    assert "--n, --prompt-logprobs: only with --json" in " ".join(result.stderr.split())


@pytest.mark.parametrize("flags", [[], ["--connect-timeout", "0.3"]])
def test_the_connect_timeout_is_the_sdks(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    given: list[ClientConfig] = []

    def refuse(*_: object, config: ClientConfig, **__: object) -> None:
        given.append(config)
        raise ValueError("seen")

    monkeypatch.setattr("deepinfer.client.Client", refuse)
    where = ["--endpoint", "127.0.0.1:1", "--token-file", str(token)]
    CliRunner().invoke(app, ["generate", "x", *where, *flags])
    waits = {"connect_give_up_ms": 300, "accept_timeout_ms": 300} if flags else {}
    assert given == [replace(ClientConfig(), **waits)]


def test_a_dead_endpoint_is_told_of_and_given_up(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    with socket.socket() as bound:  # without listening: what connects is refused
        bound.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{bound.getsockname()[1]}"
        arguments = ["generate", "x", "--endpoint", where, "--token-file", str(token)]
        result = CliRunner().invoke(app, [*arguments, "--connect-timeout", "0.4"])
    assert (result.exit_code, result.stdout) == (1, "")
    told, error = result.stderr.splitlines()
    assert told.startswith(f"no answer yet: {where}: ")
    assert told.endswith("; trying again for up to 0.4 s")
    assert error.startswith(f"error: {where}: ")


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
