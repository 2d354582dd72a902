"""Models by their hub name: a fake hub on the loopback, the real library between."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.deploy.hub import Choice, HubName, choose, fetch
from deepinfer.deploy.hub_library import HubError, Library, _bar_class
from deepinfer.deploy.hub_process import Downloads
from deepinfer.deploy.models import ModelUnavailableError, check_model, resolve_model
from support.fake_hub import OLD_SHA, SHA, FakeHub, serving
from support.tiny_model import write_tiny_llama

NAME = HubName("org/name")


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return files | {"README.md": b"#", "pytorch_model.bin": b"x", "original/params.json": b"{}"}


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is told by the environment it was imported in, which tests keep offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(model_files: dict[str, bytes]) -> Iterator[FakeHub]:
    with serving(FakeHub(model_files)) as hub:
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/na.me-3", HubName("org/na.me-3")),
        ("org/name@main", HubName("org/name", "main")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:Q4_K_M", HubName("org/name", None, "Q4_K_M")),
        ("org/name@v1:file.gguf", HubName("org/name", "v1", "file.gguf")),
        ("org/name/file.gguf", HubName("org/name", None, "file.gguf")),
        ("org/name/sub/file.GGUF@v1", HubName("org/name", "v1", "sub/file.GGUF")),
    ],
)
def test_names_of_a_hub(text: str, name: HubName) -> None:
    assert HubName.parse(text) == name


@pytest.mark.parametrize(
    "text",
    ["name", "/org/name", "./org/name", "~/org/name", "../name", "org/name/", "a/b/c", "org/name:",
     "org/name@", "org name/x", "org/name/file.gguf:Q4_K_M", "", "org/na\0me", "https://a/b"],
)  # fmt: skip
def test_what_is_no_name_of_a_hub(text: str) -> None:
    assert HubName.parse(text) is None


GGUFS = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "sub/a.q8_0.gguf", "big-F16-00001-of-00002.gguf"]
FOLDER = ["config.json", "tokenizer.json", "model.safetensors", "README.md"]


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("Q4_K_M", "a-Q4_K_M.gguf"),
        ("q4_k_s", "a-Q4_K_S.gguf"),
        ("Q8_0", "sub/a.q8_0.gguf"),
        ("a-Q4_K_M.gguf", "a-Q4_K_M.gguf"),
        ("a.q8_0.gguf", "sub/a.q8_0.gguf"),
        ("sub/a.q8_0.gguf", "sub/a.q8_0.gguf"),
    ],
)
def test_a_gguf_file_is_named_whole_or_by_its_type(file: str, found: str) -> None:
    assert choose(HubName("org/name", None, file), [*GGUFS, *FOLDER]) == Choice((), (found,), found)


def test_a_folder_needs_no_more_than_is_read() -> None:
    assert choose(NAME, FOLDER) == Choice(
        ("config.json", "tokenizer.json"), ("model.safetensors",), None
    )
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    others = ["consolidated.safetensors", "a.gguf", "x/model-1.safetensors"]
    files = [*FOLDER[:2], *shards, index, *others]
    choice = choose(NAME, files)
    assert choice.first == ("config.json", "tokenizer.json", index)
    assert choice.weights == tuple(shards)


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("org/name", GGUFS, "org/name has several GGUF files; name one, .* of: a-Q4_K_M.gguf, a-Q"),
        ("org/name:Q4_K", GGUFS, r"has 0 files 'Q4_K'; name one, as in org/name:file\.gguf, of: a"),
        ("org/name:F16", GGUFS, "is one of several parts: not supported"),
        ("org/name:Q4_K_M", FOLDER, "has 0 files 'Q4_K_M'; .* of: none"),
        ("org/name:Q8_0", [f"{i}-Q8_0.gguf" for i in range(20)], "has 20 files .* and 8 more"),
        ("org/name", ["config.json", "pytorch_model.bin"],
         "neither config.json with safetensors nor a GGUF file; its pickled weights are not read"),
        ("org/name", ["README.md"], "neither config.json with safetensors nor a GGUF file$"),
        ("org/name", ["config.json", "model.safetensors", "tokenizer.model"], "no tokenizer.json"),
        ("org/name@v1", ["config.json", "tokenizer.json", "consolidated.safetensors"],
         "org/name@v1 has neither model.safetensors nor model.safetensors.index.json"),
    ],
)  # fmt: skip
def test_repositories_without_a_model_say_what_they_lack(
    name: str, files: list[str], message: str
) -> None:
    parsed = HubName.parse(name)
    assert parsed is not None
    with pytest.raises(HubError, match=message):
        choose(parsed, files)


def test_a_model_is_fetched_once_and_then_used_without_the_network(
    hub: FakeHub, environment: dict[str, str], model_files: dict[str, bytes]
) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve_model(
        "org/name", environment=environment, progress=lambda done, total: seen.append((done, total))
    )
    needed = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
              "tokenizer_config.json"]  # fmt: skip
    assert hub.downloads() == needed
    assert path.name == SHA
    assert check_model(path).family == "llama"
    total = sum(len(model_files[name]) for name in needed)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    asked = len(hub.requests)
    assert resolve_model("org/name", environment=environment) == path
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    assert resolve_model("org/name", environment=offline) == path
    assert len(hub.requests) == asked


def test_a_revision_is_another_model(hub: FakeHub, environment: dict[str, str]) -> None:
    assert resolve_model("org/name", environment=environment).name == SHA
    assert resolve_model("org/name@v1", environment=environment).name == OLD_SHA
    with pytest.raises(ModelUnavailableError, match=r"^org/name has no revision 'v2'$"):
        resolve_model("org/name@v2", environment=environment)


def test_a_copy_that_is_not_whole_is_completed(hub: FakeHub, environment: dict[str, str]) -> None:
    path = resolve_model("org/name", environment=environment)
    (path / "model.safetensors").resolve().unlink()
    offline = environment | {"HF_HUB_OFFLINE": "yes"}
    with pytest.raises(ModelUnavailableError, match="not whole, and HF_HUB_OFFLINE forbids"):
        resolve_model("org/name", environment=offline)
    hub.requests.clear()
    assert resolve_model("org/name", environment=environment) == path
    assert hub.downloads() == ["model.safetensors"]
    assert check_model(path).family == "llama"


def test_one_gguf_file_is_fetched(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.files = {"m-Q4_0.gguf": b"GGUF four", "m-Q8_0.gguf": b"GGUF eight"}
    path = resolve_model("org/name:Q8_0", environment=environment)
    assert path.read_bytes() == b"GGUF eight"
    assert hub.downloads() == ["m-Q8_0.gguf"]
    asked = len(hub.requests)
    assert resolve_model("org/name/m-Q8_0.gguf", environment=environment) == path
    assert len(hub.requests) == asked


def test_an_unsupported_model_is_refused_before_its_weights_come(
    hub: FakeHub, environment: dict[str, str]
) -> None:
    hub.files["config.json"] = json.dumps({"architectures": ["GemmaForCausalLM"]}).encode()
    with pytest.raises(ModelUnavailableError, match=r"org/name: config.json: .*'GemmaForCausalLM'"):
        resolve_model("org/name", environment=environment)
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((404, {"X-Error-Code": "RepoNotFound"}), "the hub knows no model org/name .* HF_TOKEN"),
        ((401, {}), "the hub knows no model org/name|the hub says: .*401"),
        ((403, {"X-Error-Code": "GatedRepo"}), "org/name is gated: accept its terms .* HF_TOKEN"),
        ((503, {}), "org/name cannot be fetched: the hub says: .*503"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(
    hub: FakeHub, environment: dict[str, str], failure: tuple[int, dict[str, str]], message: str
) -> None:
    hub.failure = failure
    with pytest.raises(ModelUnavailableError, match=message) as caught:
        resolve_model("org/name", environment=environment)
    assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_says_what_to_do(tmp_path: Path) -> None:
    with serving(FakeHub({})) as gone:
        endpoint = gone.endpoint
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    with pytest.raises(ModelUnavailableError, match="check this machine's network") as caught:
        resolve_model("org/name", environment=environment)
    assert "\n" not in str(caught.value)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids to fetch it"):
        fetch(NAME, environment=environment | {"HF_HUB_OFFLINE": "1"})


def test_progress_never_goes_back() -> None:
    seen: list[int] = []
    other = threading.Thread(target=lambda: bar.update(1))

    def progress(done: int) -> None:
        if done == 10:
            other.start()
            other.join(0.2)  # it has to wait for this one
        seen.append(done)

    bar = _bar_class(progress)(unit="B")
    bar.update(10)
    other.join()
    assert seen == [10, 11]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where these tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_a_download_that_hangs(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.stall = lambda: os.kill(os.getpid(), signal.SIGINT)
    downloads = Downloads(Library.of("org/name", None, environment))
    with pytest.raises(KeyboardInterrupt), downloads:
        downloads.fetch(["model.safetensors"], lambda done: None)
    assert downloads._running().returncode == -signal.SIGKILL


def test_a_download_ends_with_its_parent(environment: dict[str, str]) -> None:
    with Downloads(Library.of("org/name", None, environment)) as downloads:
        child = downloads._running()
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=20) == 0


def test_a_download_that_dies_is_an_error(environment: dict[str, str]) -> None:
    with Downloads(Library.of("org/name", None, environment)) as downloads:
        downloads._running().kill()
        downloads._running().wait()
        with pytest.raises(HubError, match=r"cannot be fetched: .* ended with status -9"):
            downloads.fetch(["config.json"], lambda done: None)


def test_a_name_that_the_library_refuses_is_one_error(environment: dict[str, str]) -> None:
    with pytest.raises(ModelUnavailableError, match="org/na--me: not a name of a hub"):
        resolve_model("org/na--me", environment=environment)


def test_a_path_comes_before_a_name(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", environment=environment) == tmp_path / "org" / "name"
