"""The command line as people run it, from ``up`` to ``down`` or Ctrl-C; nothing is left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepinfer.client import Accepted, Client, RequestFailed
from deepinfer.controller.core.planes import Planes
from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.snapshot import _planes
from deepinfer.deploy.leftovers import sweep
from deepinfer.kvstore.core.ids import WorkerId
from deepinfer.kvstore.core.precision import PrecisionLevel
from deepinfer.kvstore.core.shed import ShedLevel, ShedState
from support.cluster import Oracle, processes_with, tiny_model
from support.docs_blocks import ROOT

MARK = "XDG_STATE_HOME"
"""Set for every command here, and so inherited by every process of the cluster."""
START_S = 120.0
STOP_S = 40.0


@dataclass(frozen=True, slots=True)
class Home:
    """A folder with a model and the state of one machine's clusters."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from deepinfer.deploy.cli import main; main()", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, MARK: str(self.folder), "COLUMNS": "200", "NO_COLOR": "1"}

    def run(self, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            input=input,
            timeout=START_S,
            check=False,
        )

    def ray_session(self) -> Path:
        """The folder of the Ray that runs for this home."""
        commands = " ".join(self.processes().values())
        found = re.search(r"/[^ =]*/session_[0-9_-]+", commands)
        assert found is not None, commands
        return Path(found[0])

    def refused(self, *arguments: str) -> str:
        """Run a command that must fail with one message and no traceback; return the message."""
        done = self.run(*arguments)
        said = " ".join(done.stderr.split())
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert said.startswith("error: "), done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return said

    def processes(self) -> dict[int, str]:
        """Every process of this home's clusters."""
        return processes_with(MARK, str(self.folder))

    def assert_no_process(self, patience_s: float = 15.0) -> None:
        deadline = time.monotonic() + patience_s
        while found := self.processes():
            assert time.monotonic() < deadline, f"still there after {patience_s:g} s: {found}"
            time.sleep(0.1)
        assert not list((self.folder / "deepinfer").glob("*.json")), "a cluster is remembered"


@dataclass(frozen=True, slots=True)
class Up:
    """A running ``deepinfer up``."""

    home: Home
    process: subprocess.Popen[str]
    log: Path

    def wait_for(self, text: str, timeout_s: float = START_S) -> str:
        """Wait until it has printed ``text``; return all that it has printed."""
        deadline = time.monotonic() + timeout_s
        while text not in (said := self.log.read_text()):
            assert self.process.poll() is None, f"it has ended:\n{said}"
            assert time.monotonic() < deadline, f"no {text!r} after {timeout_s:g} s:\n{said}"
            time.sleep(0.05)
        return said

    @property
    def endpoint(self) -> str:
        found = re.search(r"at (127\.0\.0\.1:\d+)", self.wait_for("Ctrl-C stops"))
        assert found is not None
        return found[1]

    def send(self, number: signal.Signals) -> None:
        """SIGINT goes to all of the process group, as a terminal does it."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def end(self) -> int:
        """Wait until it ends by itself; return its exit code."""
        return self.process.wait(timeout=STOP_S)


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, home: Home, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(rows=30, columns=100)
        environment = {k: v for k, v in home.environment.items() if k not in ("COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            home.command(*arguments),
            env=environment | {"TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            start_new_session=True,
        )
        os.close(theirs)
        self._said = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def resize(self, *, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, *, more: int = 0) -> None:
        """Read until ``text`` has come, and so many characters behind it; forget all of that."""
        deadline = time.monotonic() + STOP_S
        while (at := self._said.find(text)) < 0 or len(self._said) < at + len(text) + more:
            assert time.monotonic() < deadline, f"no {text!r} in {self._said!r}"
            self._read(0.1)
        self._said = self._said[at + len(text) :]

    def end(self) -> int:
        """Wait until it ends by itself; return its exit code."""
        deadline = time.monotonic() + STOP_S
        while (code := self._process.poll()) is None:
            assert time.monotonic() < deadline, self._said
            self._read(0.1)
        return code

    def _read(self, timeout_s: float) -> None:
        ready, _, _ = select.select([self._ours], [], [], timeout_s)
        if ready:
            with contextlib.suppress(OSError):  # it has ended
                self._said += os.read(self._ours, 65536).decode(errors="replace")


@contextlib.contextmanager
def up(home: Home, *arguments: str) -> Iterator[Up]:
    """Run ``deepinfer up`` in the background; whatever it leaves is killed after the test."""
    log = home.folder / f"up-{time.monotonic_ns()}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            home.command("up", *arguments),
            env=home.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a Ctrl-C of the person who runs the tests is not meant for it
        )
    try:
        yield Up(home, process, log)
    finally:
        for pid in [process.pid, *home.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def config(home: Home) -> Path:
    """The YAML file; flags are laid over it."""
    file = home.folder / "cluster.yaml"
    values = {
        "model": str(tiny_model(home.folder)),
        "port": 0,
        "max_cache": "64 blocks",
        "kv_cache_dtype": "int8",
        "kv_quality": "off",
        "workers": 2,
        "max_cpu_offload_mb": 3,
    }
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("wokers: 2", "unknown key 'wokers': must be one of block_size"),
        ("workers: 0", "workers = 0: "),
        ("kv_cache_dtype: fp7", "fp7"),
        ("max_cache: plenty", "max_cache = 'plenty': must be auto, a size"),
        ("cpu_offload: false\nmax_cpu_offload_mb: 7", "no meaning with cpu_offload = false"),
        (
            "prefill_chunk_tokens: 600\nmax_batch_tokens: 512",
            "prefill_chunk_tokens = 600: must not exceed max_batch_tokens = 512",
        ),
        ("block_size: 0", "block_size = 0: "),
        ("model: demo\nmodel: [", "not YAML"),
        ("token_file: {folder}", "token file {folder}: cannot be read"),
        ("token_file: {folder}/short", "must hold one line of 16 to 4096"),
        ("port: {taken}", "cannot listen on 127.0.0.1:{taken}: Address already in use"),
        ("port: 65535\ngateways: 2", "the last port would be 65536"),
        ("model: nowhere/at/all", "nowhere/at/all"),
        ("max_cache: 10 bytes", "max_cache"),
        ("host: 198.51.100.1\nport: 0", "cannot listen on 198.51.100.1"),
        ("- a\n- list", "must be a mapping"),
    ],
    ids=lambda text: text.split(":")[0].replace(" ", "-"),
)
def test_bad_configuration_is_one_message(
    home: Home, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "short").write_text("short\n")
    file = tmp_path / "cluster.yaml"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        known = {"{folder}": str(tmp_path), "{taken}": str(other.getsockname()[1])}
        for name, value in known.items():
            line, message = line.replace(name, value), message.replace(name, value)
        file.write_text(line)
        assert message in home.refused("up", "--config", str(file))
    home.assert_no_process()


@pytest.mark.slow
def test_a_kv_dtype_that_wrecks_the_model_is_refused_by_its_figures(
    home: Home, config: Path
) -> None:
    said = home.refused("up", "--config", str(config), "--kv-quality", "strict")
    for part in ("kv_cache_dtype = 'int8'", "K channel scales: KL ", "take --kv-cache-dtype fp16"):
        assert part in said
    home.assert_no_process()


def test_a_missing_file_is_one_message_and_a_wrong_flag_is_the_command_lines(home: Home) -> None:
    assert "cannot be read" in home.refused("up", "--config", "nowhere.yaml")
    assert home.run("up", "--wokers", "2").returncode == 2
    assert home.run("generate", "hello", "--n", "2").returncode == 2


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("up --kv-cache-dtype fp", {"fp16", "fp8", "fp8_e5m2"}),
        ("up --victim-policy ", {"lru", "youngest", "cost"}),
        ("st", {"status"}),
        ("bench off", {"offload"}),
    ],
)
def test_a_shell_completes_commands_and_values(home: Home, typed: str, offered: set[str]) -> None:
    words = f"deepinfer {typed}"
    done = subprocess.run(
        home.command(),
        env=home.environment
        | {
            "_DEEPINFER_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        },
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_commands_without_a_cluster_say_so(home: Home) -> None:
    for command in (("down",), ("status",), ("generate", "hello")):
        assert "no cluster runs here" in home.refused(*command)


def test_from_up_to_down(home: Home, config: Path, tmp_path: Path) -> None:
    with up(home, "--config", str(config), "--workers", "1", "--max-swapped-requests", "5") as one:
        endpoint = one.endpoint
        _check_status(home)
        _check_generate(home, config)
        _check_who_may_ask(home, endpoint, tmp_path)
        port = endpoint.rpartition(":")[2]
        said = home.refused("up", "--config", str(config), "--port", port)
        assert f"a cluster already serves at {endpoint}" in said
        assert "deepinfer down" in said
        _check_chat_and_top(home)
        _check_terminals(home)
        members = home.processes()
        assert sum("WorkerActor" in command for command in members.values()) == 1, members
        assert any("raylet" in command for command in members.values()), members
        session = home.ray_session()
        assert session.is_dir()
        token = (home.folder / "deepinfer" / "token").read_text().strip()
        with (
            Client(endpoint, token=token) as client,
            client.stream("once upon", max_tokens=480, ignore_eos=True) as stream,
        ):
            assert isinstance(next(stream), Accepted)
            down = home.run("down")
            assert (down.returncode, down.stdout.strip()) == (0, "stopped"), down.stderr
            # It had the grace time.
            assert len(stream.completion().choices[0].token_ids) == 480
        assert not session.exists()
        assert one.end() == 0
        said = one.log.read_text()
        assert re.search(r"^worker-0: [\d.]+ MiB loaded$", said, re.MULTILINE), said
        assert "Traceback" not in said
        home.assert_no_process()


def _check_status(home: Home) -> None:
    """S9, for people and for programs."""
    shown = home.run("status")
    assert shown.returncode == 0, shown.stderr
    for text in ("worker-0", "store-local", "0 / 64", "swapped now", "budget"):
        assert text in shown.stdout
    document = json.loads(home.run("status", "--json").stdout)
    assert document["swapped"] == 0
    assert document["cpu_offload"] == {
        "enabled": True,
        "payload_bytes": 0,
        "budget_bytes": 3 * 2**20,
        "max_swapped_requests": 5,
    }
    documented = _documented_status()
    assert documented.pop("workers.precision") == set(PrecisionLevel._fields)
    planes = Planes(ShedLevel(ShedState.HELD, 64, 8, 100), 0)
    assert documented.pop("workers.planes") == _planes(Worker(WorkerId("w")), planes).keys()
    assert documented.keys() == document.keys()
    for kind in ("workers", "stores", "gateways"):
        for each in document[kind].values():
            assert documented[kind] == each.keys(), kind
    assert list(document["workers"]) == ["worker-0"]
    assert document["workers"]["worker-0"]["blocks_total"] == 64


def _documented_status() -> dict[str, set[str]]:
    """The keys that docs/operating.md lists, and for each what is said to stand below it."""
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    table = text.partition("## The status document")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = {}
    for names, what in re.findall(r"^\| (`[^|]+`) \| (.+) \|$", table, re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", names):
            found[name.replace(".NAME", "")] = set(re.findall(r"`(\w+)`", what))
    return found


def _check_generate(home: Home, config: Path) -> None:
    """What it prints is the text of the oracle's ids, for a prompt and for a chat."""
    from deepinfer.text.load import load_tokenizer

    model = tiny_model(home.folder)
    tokenizer = load_tokenizer(model)
    oracle = Oracle(model, "int8")
    for flag, ids in (
        ("--no-chat", tokenizer.encode("once upon")),
        ("--chat", tokenizer.encode_chat([{"role": "user", "content": "once upon"}])),
    ):
        done = home.run("generate", "once upon", flag, "--max-tokens", "12")
        assert done.returncode == 0, done.stderr
        right = tokenizer.decode(oracle.answer(tuple(ids), temperature=0.0, max_tokens=12))
        assert done.stdout == right + "\n"


def _check_chat_and_top(home: Home) -> None:
    done = home.run("generate", "hi", "--json", "--n", "2", "--logprobs", "1", "--max-tokens", "3")
    answer = json.loads(done.stdout)
    assert [len(choice["logprobs"]) for choice in answer["choices"]] == [
        len(choice["token_ids"]) for choice in answer["choices"]
    ]
    chat = home.run("chat", "--max-tokens", "5", "--temperature", "0", input="hi\n/stats\nyou\n")
    assert chat.returncode == 0, chat.stderr
    assert "all: 1 answers, " in chat.stderr
    assert chat.stderr.count(" tok/s") == 3
    top = home.run("top", "--once", "--interval", "0.1")
    assert top.returncode == 0, top.stderr
    for text in ("worker-0", "store-local", "0 / 64", "0 requests", "no requests"):
        assert text in top.stdout


def _check_terminals(home: Home) -> None:
    """Chat and top where there is a terminal: Ctrl-C keeps the chat, q ends top."""
    with Terminal(home, "chat", "--max-tokens", "400") as chat:
        chat.wait_for("> ")
        chat.type("tell me all of it\n")
        chat.wait_for("tell me all of it\r\n", more=1)
        chat.type("\x03")
        chat.wait_for("[aborted]")
        chat.wait_for("> ")
        chat.type("/stats\n")
        chat.wait_for("no answer yet")
        chat.wait_for("> ")  # before it, Ctrl-D would reach a terminal that is not yet asking
        chat.type("\x04")
        assert chat.end() == 0
    with Terminal(home, "top", "--interval", "0.2") as top:
        top.wait_for("no requests")
        top.resize(rows=12, columns=60)
        top.wait_for("worker-0")
        top.type("q")
        assert top.end() == 0


def _check_who_may_ask(home: Home, endpoint: str, folder: Path) -> None:
    wrong = folder / "token"
    wrong.write_text("a-token-of-somebody-else\n")
    said = home.refused("status", "--endpoint", endpoint, "--token-file", str(wrong))
    assert "token" in said
    said = home.refused("generate", "hello", "--endpoint", endpoint, "--token-file", str(wrong))
    assert "token" in said
    missing = str(folder / "missing")
    assert missing in home.refused("status", "--endpoint", endpoint, "--token-file", missing)


@pytest.mark.parametrize(
    ("said", "signals"),
    [
        ("opening the model", (signal.SIGINT, signal.SIGINT)),
        pytest.param("starting Ray", (signal.SIGTERM,), marks=pytest.mark.slow),
        ("starting controller", (signal.SIGINT,)),
        ("waiting for", (signal.SIGINT, signal.SIGTERM)),
        pytest.param("Ctrl-C stops", (signal.SIGINT, signal.SIGINT), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else str(len(value)),
)
def test_it_stops_at_any_moment(
    home: Home, config: Path, said: str, signals: tuple[signal.Signals, ...]
) -> None:
    """As it goes through its start, and while it serves; one signal or two at once."""
    with up(home, "--config", str(config)) as one:
        one.wait_for(said)
        time.sleep(0.2)  # into the step, not at its first instruction
        for number in signals:
            one.send(number)
        assert one.end() == 0
        log = one.log.read_text()
        assert "Traceback" not in log
        if said in ("starting controller", "waiting for", "Ctrl-C stops"):
            assert log.splitlines()[-1] == "stopping"
        home.assert_no_process()


def test_a_token_file_that_others_can_read_is_warned_of(
    home: Home, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of a launcher that is killed outright nothing stays, once the next one begins."""
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters\n")
    token.chmod(0o644)
    with up(home, "--config", str(config), "--token-file", str(token)) as one:
        assert f"warning: token file {token}: others can read it" in one.wait_for("Ctrl-C stops")
        session = home.ray_session()
        one.process.kill()
        one.process.wait()
        # Two agents of Ray's would try for a minute to reach what is gone. The next `up` begins so:
        monkeypatch.setenv(MARK, str(home.folder))
        [said] = sweep()
        assert str(session) in said
        home.assert_no_process()
        assert not session.exists()
    assert "no cluster runs here" in home.refused("status")


@pytest.mark.slow
def test_the_next_start_removes_what_a_killed_one_left(home: Home, config: Path) -> None:
    """At once, at the same port; whatever of it was killed, and however far it had come."""
    swept = "removed what a cluster that was killed has left"
    with up(home, "--config", str(config)) as one:
        one.wait_for("waiting for")
        for pid, command in home.processes().items():
            if pid == one.process.pid or "raylet" in command:
                os.kill(pid, signal.SIGKILL)
        one.process.wait()
        with up(home, "--config", str(config)) as two:
            port = two.endpoint.rpartition(":")[2]
            assert two.log.read_text().startswith(swept)
            two.process.kill()
            two.process.wait()
            with up(home, "--config", str(config), "--port", port) as three:
                assert three.endpoint == two.endpoint
                assert three.log.read_text().startswith(swept)
                three.send(signal.SIGTERM)
                assert three.end() == 0
        home.assert_no_process()


@pytest.mark.slow
def test_drain_and_restart_by_the_command_line(home: Home, config: Path) -> None:
    """A request goes on through all of it; what cannot end in the grace time is told."""
    with up(home, "--config", str(config), "--gateways", "2") as one:
        said = one.wait_for("Ctrl-C stops").partition("serving ")[2].splitlines()[0]
        token = (home.folder / "deepinfer" / "token").read_text().strip()
        endpoints = re.findall(r"127\.0\.0\.1:\d+", said)
        prompt = list(range(5, 30))
        options: dict[str, Any] = {"max_tokens": 480, "temperature": 0.0, "ignore_eos": True}
        right = Oracle(tiny_model(home.folder), "int8").answer(prompt, **options)
        with Client(endpoints, token=token) as client:
            with client.stream(prompt, **options) as stream:
                assert isinstance(next(stream), Accepted)
                done = home.run("restart", "--all", "--grace", "0")
                assert done.returncode == 0, done.stdout + done.stderr
                assert done.stdout.count("serves again after") == 4, done.stdout
                assert stream.completion().choices[0].token_ids == right
            done = home.run("drain", "worker-1")
            assert (done.returncode, done.stdout) == (0, "worker-1: drained\n"), done.stderr
            assert client.status()["workers"]["worker-1"]["state"] == "draining"
            assert "there is no worker or gateway 'worker-7'" in home.refused("drain", "worker-7")
            with client.stream(prompt, **options) as stream:
                assert isinstance(next(stream), Accepted)
                down = home.run("down", "--grace", "0")
                assert down.returncode == 0, down.stderr
                with pytest.raises(RequestFailed, match="the cluster was stopped"):
                    stream.completion()
        assert one.end() == 0
        home.assert_no_process()
