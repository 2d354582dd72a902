"""The load benches end to end on a tiny model and real clusters: what they write, not how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deepinfer.deploy.bench import concurrency, jitter
from deepinfer.deploy.bench.concurrency import CARD_SERVERS, SERVERS, Load, run_concurrency
from deepinfer.deploy.bench.memory import MOMENTS, run_memory
from support.cluster import tiny_model

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(autouse=True)
def own_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))


def written(folder: Path, name: str) -> Any:
    assert (folder / f"{name}.png").stat().st_size > 1000
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["command"].startswith("deepinfer bench ")
    assert {"date", "device", "versions"} <= set(found)
    return found


def test_concurrency_beside_its_peers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those that run on a card only run here, too: not as fast, and not compiled.
    everybody = tuple(dict.fromkeys(SERVERS + CARD_SERVERS))
    monkeypatch.setattr(concurrency, "SERVERS", everybody)
    model = str(tiny_model(folder))
    load = Load(levels=(2, 1), prompt_tokens=16, max_tokens=5, rounds=2)
    run_concurrency(model=model, load=load, text=None, output=folder, console=Console(quiet=True))
    found = written(folder, "concurrency")
    assert (
        f"--model {Path(model).name} --device cpu --levels 2,1 --kv-cache-dtype fp16"
        in found["command"]
    )
    assert found["prompt_tokens"] == [16, 8]
    levels = found["results"]["fp16"]
    assert list(levels) == ["1", "2"]
    for level, one in levels.items():
        for server in everybody:
            served = one[server]
            assert served["tokens"] == 2 * int(level) * 5
            assert len(served["seconds"]) == 2
            per_s = sorted(int(level) * 5 / seconds for seconds in served["seconds"])
            assert served["tokens_per_s"] == pytest.approx(sum(per_s) / 2)
        # The cluster's tokens are the engine's, bit for bit; transformers keeps float32 KV.
        assert one["cluster"]["tokens_as_engine"] == one["cluster"]["tokens"]
        assert one["one_by_one"]["tokens_as_engine"] >= int(level)
        assert one["cluster"]["ttft_p50_ms"] > 0
        assert one["engine"]["tpot_p50_ms"] > 0
        quotients = [
            engine / cluster
            for engine, cluster in zip(
                one["engine"]["seconds"], one["cluster"]["seconds"], strict=True
            )
        ]
        assert one["ratios"]["tokens_per_s_over_engine"] == pytest.approx(sum(quotients) / 2)
        for way in ("padded_batch", "static", "continuous"):
            assert one["ratios"][f"tokens_per_s_over_transformers_{way}"] > 0


@pytest.mark.slow
def test_jitter_with_swaps_changes_no_token(folder: Path) -> None:
    model = str(tiny_model(folder))
    load = jitter.Load(streams=4, prompt_tokens=24, max_tokens=72, rounds=1)
    ok = jitter.run_jitter(
        model=model, load=load, text=None, output=folder, console=Console(quiet=True)
    )
    found = written(folder, "jitter")
    assert found["tokens"] == found["same_tokens"] == 4 * 72
    roomy, pressed = found["pools"]["roomy"], found["pools"]["pressed"]
    assert roomy["swaps"] == 0
    assert pressed["swaps"] == pressed["resumes"] > 0
    assert ok
    for pool in (roomy, pressed):
        assert pool["intervals"]["count"] == 4 * 71
    around = (pressed["around_swaps"] or {"count": 0})["count"]
    assert pressed["between_swaps"]["count"] + around == 4 * 71
    for stream in pressed["swapped_streams"]:
        parts = stream["copy_out_ms"] + stream["copy_in_ms"] + stream["wait_ms"]
        assert parts >= stream["stall_ms"] - 1e-6


def test_memory_names_every_process(folder: Path) -> None:
    run_memory(model=str(tiny_model(folder)), workers=2, output=folder, console=Console(quiet=True))
    found = written(folder, "idle_memory")
    ours = {"controller", "gateway-0", "launcher", "store-local", "worker-0", "worker-1"}
    for moment in MOMENTS:
        processes = found["moments"][moment]["processes"]
        assert ours <= set(processes)
        assert {"ray: raylet", "ray: gcs_server"} <= set(processes)
        assert found["moments"][moment]["pss_bytes_total"] == sum(
            usage["pss_bytes"] for usage in processes.values()
        )
        for usage in processes.values():
            assert usage["peak_rss_bytes"] >= usage["rss_bytes"] >= usage["pss_bytes"] > 0
    # Neither routes tokens through torch: they must not pay for it.
    for name in ("gateway-0", "controller", "store-local"):
        assert found["moments"]["after_load"]["processes"][name]["rss_bytes"] < 200 << 20
