"""The cluster's configuration: what is legal, and that every error names what it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.deploy.config import CacheSize, ClusterConfig, ConfigError, load_config, reference


def test_flags_lie_over_the_file_and_those_not_given_do_not(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("workers: 2\nkv_cache_dtype: int8\nmax_cache: 3 blocks\n")
    config = load_config(file, {"workers": 4, "block_size": None})
    assert (config.workers, config.kv_cache_dtype, config.block_size) == (4, "int8", 16)
    assert config.cache_size("cpu") == CacheSize(blocks=3)
    assert config.cache_size("cuda") == CacheSize(blocks=3)


@pytest.mark.parametrize(
    ("values", "needles"),
    [
        ({"wrokers": 2}, ["'wrokers'", "workers"]),
        ({"workers": 0}, ["workers", "0", "greater than or equal to 1"]),
        ({"block_size": 0}, ["block_size", "0"]),
        ({"kv_cache_dtype": "int4"}, ["kv_cache_dtype", "int4", "int8", "k16v8"]),
        ({"max_cache": "lots"}, ["max_cache", "'lots'", "512MiB"]),
        ({"max_cache": "0 blocks"}, ["max_cache", "'0 blocks'"]),
        ({"max_cache": "5 parsec"}, ["max_cache", "parsec", "gib"]),
        ({"port": 70000}, ["port", "70000"]),
        ({"port": 65535, "gateways": 2}, ["port", "gateways", "65536"]),
        ({"reserve": "some"}, ["reserve", "some", "growth", "full"]),
        ({"victim_policy": "oldest"}, ["victim_policy", "oldest", "lru"]),
        (
            {"prefill_chunk_tokens": 600, "max_batch_tokens": 500},
            ["prefill_chunk_tokens", "600", "max_batch_tokens", "500"],
        ),
        (
            {"cpu_offload": False, "max_cpu_offload_mb": 5},
            ["max_cpu_offload_mb", "5", "cpu_offload"],
        ),
        ({"threads": "many"}, ["threads", "many"]),
        ({"workers": True}, ["workers", "True", "integer"]),
        ({"workers": "2"}, ["workers", "'2'", "integer"]),
        ({"cpu_offload": "yes"}, ["cpu_offload", "'yes'", "boolean"]),
        ({"token_file": ""}, ["token_file", "''"]),
        ({"max_cache": 512}, ["max_cache", "512", "string"]),
    ],
)
def test_an_illegal_value_is_named(values: dict[str, object], needles: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, values)
    assert [n for n in needles if n not in str(caught.value)] == []


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"workers": 0, "block_size": 0})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [1,", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_sizes() -> None:
    assert CacheSize.parse("1.5GiB").bytes == 3 * 2**29
    assert CacheSize.parse("512 MB").bytes == 512 * 10**6
    assert CacheSize.parse("1 block").blocks == 1
    assert CacheSize.parse("64KiB").blocks_of(4096) == 16
    with pytest.raises(ConfigError, match=r"1,024.*4,096"):
        CacheSize.parse("1KiB").blocks_of(4096)


def test_loopback_is_recognised() -> None:
    assert ClusterConfig(host="127.0.0.1").loopback
    assert ClusterConfig(host="localhost").loopback
    assert ClusterConfig(host="::1").loopback
    assert not ClusterConfig(host="0.0.0.0").loopback
    assert not ClusterConfig(host="gpu-3.example").loopback


def test_the_documented_settings_are_the_real_ones(repo_root: Path) -> None:
    text = (repo_root / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert reference() in text


def test_what_should_be_known_at_start_up_is_said() -> None:
    assert ClusterConfig().warnings() == ()
    assert ClusterConfig(kv_cache_dtype="int8").warnings() == ()
    [exposed] = ClusterConfig(host="0.0.0.0").warnings()
    [encrypted] = ClusterConfig(host="0.0.0.0", tls_cert="c.pem", tls_key="k.pem").warnings()
    assert exposed.startswith(encrypted)
    assert "is not loopback" in encrypted
    assert "not encrypted" not in encrypted
    assert "0.0.0.0" in exposed
    for dtype in ("fp8", "e4m3", "e5m2", "k16v8"):
        assert ClusterConfig(kv_cache_dtype=dtype).warnings() == (), "it is measured"
        [cast] = ClusterConfig(kv_cache_dtype=dtype, kv_quality="off").warnings()
        assert dtype in cast
        assert "kv_saturations" in cast
