"""The peers of `bench concurrency` compute the same model as we do, for every family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.errors import LaunchError
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import Decoder
from support.memory_weights import random_model
from support.tiny_model import write_tiny_llama

pytest.importorskip("transformers")

LLAMA = ModelConfig(
    family="llama", vocab_size=89, hidden_size=48, intermediate_size=96, layers=2, heads=6,
    kv_heads=2, head_dim=8, max_positions=256, rms_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip
CONFIGS = {
    "llama": replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama-scaled": replace(
        LLAMA, rope_divisors=(1.0, 1.5, 4.0, 8.0), rope_magnitude=1.25, tied_embeddings=True
    ),
    "mistral": replace(LLAMA, family="mistral"),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=16),
    "phi3": replace(LLAMA, family="phi3", fused_projections=True),
    "phi3-partial": replace(
        LLAMA, family="phi3", fused_projections=True, head_dim=16, rotary_dim=12,
        rope_divisors=(1.0, 1.5, 2.0, 4.0, 6.0, 8.0), rope_magnitude=1.25,
    ),
}  # fmt: skip
PROMPTS = [[7, 70, 11, 33, 12], [5, 6, 88], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CONFIGS)
def test_everybody_generates_the_same(name: str) -> None:
    from deepinfer.deploy.bench.peers import EnginePeer
    from deepinfer.deploy.bench.transformers_peer import TransformersPeer

    model = random_model(CONFIGS[name], seed=3)
    decoder = Decoder(model, CpuBackend(threads=1))
    engine = EnginePeer(decoder, kv_cache_dtype="fp16", blocks=32)
    ours = engine.together(PROMPTS, 12)
    peer = TransformersPeer(model)
    alone = [peer.generate([prompt], 12).token_ids[0] for prompt in PROMPTS]
    batch = peer.generate(PROMPTS, 12)
    assert [len(ids) for ids in ours.token_ids] == [12, 12, 12]
    # Their KV is float32 and ours float16: logits that almost tie may part them, late.
    for ids, theirs, padded in zip(ours.token_ids, alone, batch.token_ids, strict=True):
        assert ids[:3] == theirs[:3] == padded[:3]
    flat = [sum(streams, ()) for streams in (ours.token_ids, tuple(alone))]
    assert sum(a == b for a, b in zip(*flat, strict=True)) >= 30
    assert [len(times) for times in ours.token_times_s] == [12, 12, 12]
    for times in ours.token_times_s:
        assert times[0] > 0
        assert sorted(times) == list(times)
        assert times[-1] <= ours.seconds


def test_a_model_that_is_not_built_is_refused_by_name() -> None:
    from deepinfer.deploy.bench.transformers_peer import TransformersPeer

    model = random_model(replace(LLAMA, rotary_dim=4), seed=3)
    with pytest.raises(ConfigError, match=r"4 of 8.* in phi3 alone, not in llama: use --no"):
        TransformersPeer(model)


def test_the_process_of_the_peers_answers_and_says_what_fails(tmp_path: Path) -> None:
    from deepinfer.deploy.bench.peers import PeerProcess, PeerSettings

    settings = PeerSettings(
        model_path=str(write_tiny_llama(tmp_path / "model")),
        kv_cache_dtypes=("fp16", "int8"),
        blocks=16,
        threads=1,
        transformers=False,
    )
    with PeerProcess(settings) as peers:
        for dtype in settings.kv_cache_dtypes:
            timed = peers.engine(dtype, [[1, 2, 3], [4, 5]], 4)
            assert [len(ids) for ids in timed.token_ids] == [4, 4]
        peers._process.kill()
        with pytest.raises(LaunchError, match=r"has died \(exit code -9\)"):
            peers.engine("fp16", [[1]], 2)
    with (
        pytest.raises(FileNotFoundError, match="absent"),
        PeerProcess(replace(settings, model_path=str(tmp_path / "absent"))),
    ):
        pass
