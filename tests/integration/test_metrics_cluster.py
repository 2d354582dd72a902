"""``/metrics`` of a real cluster: everything there is, and moving when requests swap."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as _open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from deepinfer.controller.catalogue import FAMILIES
from deepinfer.controller.shell import KV_QUALITY
from deepinfer.deploy.cluster import Cluster
from support.cluster import controller_status, tiny_cluster
from support.cluster_stories import BLOCK_SIZE, BLOCKS, GREEDY, OUTPUT, Ask, prompt, story

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
parse_open_metrics: Callable[[str], Iterator[Metric]] = _open_metrics  # has no types
FIRST_WORDS_S = 20.0
"""How long a report may take to arrive on a busy machine."""

OF_NESTED_WEIGHTS = {
    "deepinfer_worker_precision_level",
    "deepinfer_worker_precision_levels",
    "deepinfer_worker_precision_pays",
    "deepinfer_worker_precision_switches_total",
    "deepinfer_worker_precision_tokens_total",
    "deepinfer_worker_precision_seconds_total",
    "deepinfer_worker_planes_away",
    "deepinfer_worker_kv_blocks_gained",
}

Samples = dict[str, float]
"""Value by sample name, summed over workers, gateways and every other label."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("metrics")
    with tiny_cluster(
        folder,
        workers=1,
        gateways=2,
        block_size=BLOCK_SIZE,
        max_cache=f"{BLOCKS} blocks",
        min_residency=4,
    ) as running:
        yield running


def scrape(cluster: Cluster, accept: str = "text/plain") -> str:
    request = urllib.request.Request(
        f"http://{cluster.metrics}/metrics",
        headers={"Authorization": f"Bearer {cluster.token}", "Accept": accept},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        body: bytes = response.read()
    return body.decode()


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in parse_text(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def scrape_until(cluster: Cluster, name: str, value: float) -> Samples:
    """Scrape until a sample has that value: what processes count comes with their reports."""
    deadline = time.monotonic() + FIRST_WORDS_S
    while (found := samples(scrape(cluster)))[name] != value:
        assert time.monotonic() < deadline, f"{name} = {found[name]}, not {value}"
        time.sleep(0.1)
    return found


def test_every_metric_is_there_from_the_start_and_swaps_move_them(cluster: Cluster) -> None:
    before = scrape_until(cluster, "deepinfer_controller_ready", 1)
    asks = [Ask(prompt(seed), GREEDY | {"max_tokens": OUTPUT}) for seed in (1, 2)]
    seen, counted = story(cluster, asks)
    after = scrape_until(cluster, "deepinfer_requests_finished_total", 2)
    usages = [one.choice.swaps for one in seen]
    swaps = sum(usage.swaps for usage in usages)
    assert swaps >= 1
    moved = {name: after[name] - before[name] for name in after}
    assert moved["requests_swapped_total"] == counted["requests_swapped_total"] == swaps
    assert moved["requests_resumed_total"] == sum(usage.resumes for usage in usages)
    for name in (
        "kv_cpu_offload_blocks_total",
        "kv_cpu_offload_bytes_total",
        "kv_cpu_reload_blocks_total",
        "cpu_offload_seconds",
        "cpu_reload_seconds",
    ):
        assert moved[name] == pytest.approx(counted[name])
        assert moved[name] > 0
    assert moved["kv_cpu_offload_failed_total"] == counted["kv_cpu_offload_failed_total"]
    assert after["swapped_requests"] == after["cpu_offload_bytes"] == 0
    assert after["cpu_offload_budget_bytes"] == 2048 * 2**20
    assert after["cpu_offload_enabled"] == 1
    assert after["max_swapped_requests"] == 1024
    assert moved["deepinfer_swap_stall_seconds_count"] >= 1
    assert moved["deepinfer_swap_copy_seconds_count"] == 2 * swaps
    assert moved["deepinfer_time_to_first_token_seconds_count"] == 2
    assert moved["deepinfer_request_queue_seconds_count"] == 2
    assert moved["deepinfer_request_seconds_count"] == 2
    assert moved["deepinfer_inter_token_seconds_count"] == 2 * (OUTPUT - 1)
    assert moved["deepinfer_generation_tokens_total"] == 2 * OUTPUT
    assert moved["deepinfer_prompt_tokens_total"] == 2 * len(asks[0].prompt)
    assert moved["deepinfer_store_committed_total"] == swaps
    assert after["deepinfer_kv_blocks"] == after["deepinfer_kv_blocks_free"] == BLOCKS


def test_all_of_the_catalogue_is_served_and_nothing_else(cluster: Cluster) -> None:
    names = set()
    for family in parse_text(scrape(cluster)):
        assert family.documentation, f"{family.name} has no help"
        name = family.name
        if family.type == "counter":
            name = family.samples[0].name if family.samples else f"{name}_total"
        # A pool of 16-bit KV has no quality to measure, and plain weights have one precision.
        rare = name in KV_QUALITY.values() or name in OF_NESTED_WEIGHTS
        assert family.samples or rare, f"{name} has no sample"
        names.add(name)
    assert names == set(FAMILIES)


def test_both_formats_say_the_same(cluster: Cluster) -> None:
    text, open_metrics = scrape(cluster), scrape(cluster, OPEN_METRICS)
    assert open_metrics.endswith("# EOF\n")
    told, also = (
        {(sample.name, *sorted(sample.labels)) for family in families for sample in family.samples}
        for families in (parse_text(text), parse_open_metrics(open_metrics))
    )
    assert told == also


def test_counters_are_those_of_status(cluster: Cluster) -> None:
    deadline = time.monotonic() + FIRST_WORDS_S
    while True:
        counters = asyncio.run(controller_status(cluster))["counters"]
        found = samples(scrape(cluster))
        wanted: Samples = {}
        for sample, value in counters.items():
            name = sample.partition("{")[0]
            wanted[name] = wanted.get(name, 0.0) + value
        # Processes go on counting orders and reports between the two.
        if (told := {name: found[name] for name in wanted}) == pytest.approx(wanted):
            break
        assert time.monotonic() < deadline, f"{told} is not {wanted}"
    assert len(wanted) > 60


def test_without_the_token_nothing_is_told(cluster: Cluster) -> None:
    for headers in ({}, {"Authorization": "Bearer not-the-token-of-this-cluster"}):
        request = urllib.request.Request(f"http://{cluster.metrics}/metrics", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        with refused.value as answer:
            assert answer.code == 401
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
            assert "requests_swapped_total" not in answer.read().decode()
