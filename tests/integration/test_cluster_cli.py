"""``deepinfer up``, ``status``, ``generate`` and ``down`` as people run them; nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from support.cluster import Oracle, processes_with, tiny_model

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

    def ctrl_c(self) -> None:
        """What a terminal does: the signal goes to all of the process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        """Wait until it ends by itself; return its exit code."""
        return self.process.wait(timeout=STOP_S)


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
        ("max_cache: plenty", "max_cache = 'plenty': must be a size"),
        ("cpu_offload: false\nmax_cpu_offload_mb: 7", "no meaning with cpu_offload = false"),
        (
            "prefill_chunk_tokens: 600\nmax_batch_tokens: 512",
            "prefill_chunk_tokens = 600: must not exceed max_batch_tokens = 512",
        ),
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
    file = tmp_path / "cluster.yaml"
    file.write_text(line)
    assert message in home.refused("up", "--config", str(file))
    home.assert_no_process()


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
        members = home.processes()
        assert sum("WorkerActor" in command for command in members.values()) == 1, members
        assert any("raylet" in command for command in members.values()), members
        down = home.run("down")
        assert (down.returncode, down.stdout.strip()) == (0, "stopped"), down.stderr
        assert one.end() == 0
        assert "Traceback" not in one.log.read_text()
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
    assert list(document["workers"]) == ["worker-0"]
    assert document["workers"]["worker-0"]["blocks_total"] == 64


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


def _check_who_may_ask(home: Home, endpoint: str, folder: Path) -> None:
    wrong = folder / "token"
    wrong.write_text("a-token-of-somebody-else\n")
    said = home.refused("status", "--endpoint", endpoint, "--token-file", str(wrong))
    assert "token" in said
    said = home.refused("generate", "hello", "--endpoint", endpoint, "--token-file", str(wrong))
    assert "token" in said
    missing = str(folder / "missing")
    assert missing in home.refused("status", "--endpoint", endpoint, "--token-file", missing)


def test_ctrl_c_while_it_serves(home: Home, config: Path) -> None:
    with up(home, "--config", str(config)) as one:
        assert one.endpoint
        one.ctrl_c()
        assert one.end() == 0
        assert "Traceback" not in one.log.read_text()
        home.assert_no_process()


@pytest.mark.parametrize("member", ["raylet", "WorkerActor"])
def test_ctrl_c_while_it_starts(home: Home, config: Path, member: str) -> None:
    """Once Ray is there, and once a worker is."""
    with up(home, "--config", str(config)) as one:
        deadline = time.monotonic() + START_S
        while not any(member in command for command in home.processes().values()):
            assert one.process.poll() is None, one.log.read_text()
            assert time.monotonic() < deadline, home.processes()
            time.sleep(0.02)
        assert "Ctrl-C stops" not in one.log.read_text()
        one.ctrl_c()
        assert one.end() == 0
        assert "Traceback" not in one.log.read_text()
        home.assert_no_process()
