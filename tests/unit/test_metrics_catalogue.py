"""The catalogue of metrics: what peers report fits it, and documents and board fit it too."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as _open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse

from deepinfer.controller import metrics
from deepinfer.controller.catalogue import FAMILIES, SECTIONS, family_of, reference
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.counters import Counters as ControllerCounters
from deepinfer.controller.core.events import Peer, PeerKind
from deepinfer.controller.tally import Tally
from deepinfer.gateway.core.measures import Measures
from deepinfer.gateway.metrics import samples as gateway_samples
from deepinfer.kvstore.core.ids import Incarnation
from deepinfer.workers.core.core import SWAP_COUNTERS
from deepinfer.workers.core.roster import Counters as WorkerCounters
from deepinfer.workers.model.quantization import NESTED

S8 = frozenset(
    {
        "cpu_offload_budget_bytes",
        "cpu_offload_bytes",
        "cpu_offload_enabled",
        "cpu_offload_seconds",
        "cpu_reload_seconds",
        "kv_cpu_offload_blocks_total",
        "kv_cpu_offload_bytes_total",
        "kv_cpu_offload_failed_total",
        "kv_cpu_offload_rejected_total",
        "kv_cpu_reload_blocks_total",
        "max_swapped_requests",
        "requests_resumed_total",
        "requests_swapped_total",
        "swapped_requests",
    }
)
"""Names that others' tools know; they have no prefix."""
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
parse_open_metrics: Callable[[str], Iterator[Metric]] = _open_metrics  # has no types
SHELL = {"live_requests": 1, "kept_requests": 2, "streams": 3, "worker_links": 4}
EVERY_SELECTOR = frozenset({"job", "le"})
"""Labels that Prometheus or a histogram adds."""


def gateway(name: str, incarnation: int) -> Peer:
    return Peer(PeerKind.GATEWAY, name, Incarnation(incarnation))


def rendered(tally: Tally, **status: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Value by sample name and labels."""
    document = ControllerCore(1_500, ControllerConfig()).summary() | status
    body, _ = metrics.render(document, tally.peers())
    strict, _ = metrics.render(document, tally.peers(), accept=OPEN_METRICS)
    assert len(list(parse_open_metrics(strict.decode()))) == len(FAMILIES)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(body.decode())
        for sample in family.samples
    }


# ---- names ---------------------------------------------------------------------------------


def test_the_names_that_were_promised_stand_first_and_alone() -> None:
    assert {family.name for family in SECTIONS["Swaps"]} == S8
    others = set(FAMILIES) - S8
    assert [name for name in others if not name.startswith("deepinfer_")] == []


def test_names_follow_the_rules() -> None:
    """Of Prometheus: base units last, counters alone end in ``_total``, words in lower case."""
    listed = Counter(family.name for part in SECTIONS.values() for family in part)
    assert [name for name, times in listed.items() if times > 1] == []
    # OpenMetrics names a counter without its ending.
    bare = Counter(name.removesuffix("_total") for name in listed)
    assert [name for name, times in bare.items() if times > 1] == []
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]+", name)
        assert name.endswith("_total") == (family.kind == "counter"), name
        for unit in ("seconds", "bytes"):
            if family.unit == unit:
                assert name.removesuffix("_total").endswith(unit), name
        assert family.help.endswith("."), name
        assert "|" not in family.help, name
        assert set(family.labels) <= {
            *(kind.value for kind in PeerKind),
            *("state", "reason", "direction", "precision", "model", "kv_cache_dtype"),
        }


def test_a_samples_name_leads_to_its_family() -> None:
    ttft = "deepinfer_time_to_first_token_seconds"
    for part in ("_bucket", "_count", "_sum"):
        assert family_of(ttft + part) is FAMILIES[ttft]
    assert family_of("swapped_requests") is FAMILIES["swapped_requests"]
    for name in (ttft, "swapped_requests_sum", "deepinfer_unheard_of", "_sum", ""):
        assert family_of(name) is None


# ---- what the cores count is in it ---------------------------------------------------------


def test_whatever_a_worker_counts_is_in_it() -> None:
    from deepinfer.kvstore.core.ids import NodeId, WorkerId, WorkerRef
    from deepinfer.workers.core.config import WorkerConfig
    from deepinfer.workers.core.core import WorkerCore
    from deepinfer.workers.shell import exported

    ref = WorkerRef(WorkerId("w"), Incarnation(1))
    config = WorkerConfig(blocks_total=1, block_size=1, block_bytes=1, levels=2)
    counted = WorkerCore(ref, NodeId("n"), config).metrics()
    assert len(counted) > len(fields(WorkerCounters)) > len(SWAP_COUNTERS)
    names = {exported(name).partition("{")[0] for name in (*counted, "kv_saturations")}
    assert names == {n for n, f in FAMILIES.items() if "worker" in f.labels and f.kind != "gauge"}


def test_whatever_a_store_counts_is_in_it() -> None:
    from deepinfer.kvstore.core.config import StoreConfig
    from deepinfer.kvstore.core.ids import NodeId, StoreId
    from deepinfer.kvstore.runtime import StoreRuntime

    runtime = StoreRuntime(
        store=StoreId("s"),
        incarnation=Incarnation(1),
        node=NodeId("n"),
        budget_bytes=0,
        page_bytes=1,
        config=StoreConfig(),
    )
    names = set(runtime.counters())
    runtime.close()
    assert names == {n for n, f in FAMILIES.items() if "store" in f.labels and f.kind != "gauge"}


def test_whatever_a_gateway_tells_is_in_it() -> None:
    told = {family_of(name.partition("{")[0]) for name in gateway_samples({}, Measures(), SHELL)}
    assert told == {
        family
        for name, family in FAMILIES.items()
        if "gateway" in family.labels and name != "deepinfer_gateway_up"
    }


def test_whatever_the_controller_knows_is_in_it() -> None:
    status = ControllerCore(1, ControllerConfig(max_swapped_requests=7)).summary()
    counted = status["counters"]
    assert isinstance(counted, dict)
    assert len(counted) == len(asdict(ControllerCounters())) + 5
    assert [name for name in counted if name not in FAMILIES] == []


# ---- rendering -----------------------------------------------------------------------------


def test_each_peer_is_a_series_and_buckets_are_in_order() -> None:
    tally = Tally()
    measures = Measures()
    for ms in (3, 40):
        measures.ttft_ms.observe(ms)
    samples = gateway_samples({"tokens_total": 9}, measures, SHELL)
    tally.take(gateway("gateway-1", 1), dict(reversed(samples.items())))
    tally.take(gateway("gateway-0", 1), {"deepinfer_generation_tokens_total": 4.0})
    body, content_type = metrics.render(
        ControllerCore(1, ControllerConfig()).summary(), tally.peers()
    )
    assert content_type.startswith("text/plain; version=0.0.4")
    [ttft] = [f for f in parse(body.decode()) if f.name == "deepinfer_time_to_first_token_seconds"]
    bounds = [float(s.labels["le"]) for s in ttft.samples if s.name.endswith("_bucket")]
    assert bounds == sorted(bounds)
    assert bounds[-1] == math.inf
    seen = rendered(tally)
    tokens = "deepinfer_generation_tokens_total"
    assert seen[tokens, (("gateway", "gateway-0"),)] == 4
    assert seen[tokens, (("gateway", "gateway-1"),)] == 9
    bucket = "deepinfer_time_to_first_token_seconds_bucket"
    assert seen[bucket, (("gateway", "gateway-1"), ("le", "0.005"))] == 1
    assert seen[bucket, (("gateway", "gateway-1"), ("le", "0.05"))] == 2
    total = "deepinfer_time_to_first_token_seconds_sum"
    assert seen[total, (("gateway", "gateway-1"),)] == 0.043


def test_gauges_of_whoever_is_gone_are_not_served_but_its_counters_are() -> None:
    tally = Tally()
    peer = gateway("gateway-0", 5)
    tally.take(peer, gateway_samples({"tokens_total": 9}, Measures(), SHELL))
    streams = ("deepinfer_gateway_streams", (("gateway", "gateway-0"),))
    tokens = ("deepinfer_generation_tokens_total", (("gateway", "gateway-0"),))
    alive = {"gateway-0": {"alive": True, "incarnation": 5}}
    assert rendered(tally, gateways=alive)[streams] == 3
    for here in ({"alive": False, "incarnation": 5}, {"alive": True, "incarnation": 6}):
        seen = rendered(tally, gateways={"gateway-0": here})
        assert streams not in seen
        assert seen[tokens] == 9


def test_workers_pools_and_stores_in_numbers() -> None:
    worker = {
        "state": "serving",
        "blocks_total": 8,
        "blocks_free": 2,
        "blocks_short": 1,
        "block_bytes": 100,
        "block_size": 16,
        "precision": {"level": 1, "levels": 3, "remark": ""},
        "residents": 3,
        "pending": 1,
        "swapped_from_here": 4,
    }
    store = {"alive": True, "budget_bytes": 9, "used_bytes": 7, "payload_bytes": 5, "tickets": 2}
    seen = rendered(
        Tally(),
        workers={"w": worker, "lost": worker | {"state": "gone"}},
        stores={"s": store, "lost": store | {"alive": False}},
    )
    assert seen["deepinfer_kv_cache_usage_ratio", (("worker", "w"),)] == 0.75
    assert seen["deepinfer_worker_requests_swapped", (("worker", "w"),)] == 4
    assert seen["deepinfer_worker_precision_level", (("worker", "w"),)] == 1
    assert seen["deepinfer_worker_precision_pays", (("worker", "w"),)] == 1
    assert seen["deepinfer_workers", (("state", "serving"),)] == 1
    assert seen["deepinfer_workers", (("state", "gone"),)] == 1
    assert seen["deepinfer_workers", (("state", "draining"),)] == 0
    assert ("deepinfer_kv_blocks", (("worker", "lost"),)) not in seen
    assert seen["deepinfer_store_used_bytes", (("store", "s"),)] == 7
    assert seen["deepinfer_store_up", (("store", "lost"),)] == 0
    assert ("deepinfer_store_budget_bytes", (("store", "lost"),)) not in seen
    assert seen["deepinfer_controller_start_time_seconds", ()] == 1.5
    assert seen["max_swapped_requests", ()] == math.inf


@pytest.mark.parametrize(
    "name",
    [
        "deepinfer_unheard_of_total",
        'deepinfer_requests_accepted_total{reason="a"',
        'deepinfer_requests_accepted_total{reason="a\n"} 1\nforged 1',
        'deepinfer_requests_accepted_total{reason="a\\"}',
        'deepinfer_requests_accepted_total{="a"}',
        "deepinfer_requests_accepted_total 1\nforged",
        "",
    ],
)
def test_what_is_no_sample_of_the_catalogue_is_not_served(name: str) -> None:
    tally = Tally()
    tally.take(gateway("gateway-0", 1), {name: 1.0, "deepinfer_requests_accepted_total": 2.0})
    seen = rendered(tally)
    assert [key for key in seen if "forged" in key[0] or "unheard" in key[0]] == []
    assert seen["deepinfer_requests_accepted_total", (("gateway", "gateway-0"),)] == 2


# ---- lives ---------------------------------------------------------------------------------


def test_totals_grow_over_lives_and_gauges_do_not_add_up() -> None:
    tally = Tally()
    first, second = gateway("gateway-0", 1), gateway("gateway-0", 2)
    counted = "deepinfer_requests_accepted_total"
    assert tally.take(first, {counted: 3.0, "deepinfer_gateway_streams": 2.0})
    assert tally.take(first, {counted: 5.0}), "what is not named is as it was"
    assert tally.totals() == {counted: 5.0}
    assert tally.take(second, {counted: 1.0, "deepinfer_gateway_streams": 1.0})
    assert not tally.take(first, {counted: 9.0}), "an older life says nothing any more"
    assert tally.totals() == {counted: 6.0}
    assert [(peer.incarnation, dict(s)[counted]) for peer, s in tally.peers()] == [(2, 1.0)]


def test_totals_leave_out_buckets() -> None:
    tally = Tally()
    tally.take(gateway("g", 1), gateway_samples({}, Measures(), SHELL))
    names = tally.totals()
    assert 'deepinfer_requests_finished_total{reason="stop"}' in names
    assert "deepinfer_time_to_first_token_seconds_count" in names
    assert [name for name in names if "_bucket" in name or "gateway_" in name] == []


def test_peers_of_different_kinds_may_have_one_name() -> None:
    tally = Tally()
    tally.take(gateway("a", 1), {"deepinfer_requests_accepted_total": 1.0})
    tally.take(Peer(PeerKind.STORE, "a", Incarnation(9)), {"deepinfer_store_sealed_total": 2.0})
    assert tally.totals() == {
        "deepinfer_requests_accepted_total": 1.0,
        "deepinfer_store_sealed_total": 2.0,
    }


# ---- documents and board -------------------------------------------------------------------


def test_the_document_lists_all_of_it(repo_root: Path) -> None:
    assert reference() in (repo_root / "docs/metrics.md").read_text("utf-8")


def test_documents_name_metrics_that_exist(repo_root: Path) -> None:
    named = [
        (file.name, name)
        for file in [repo_root / "README.md", *(repo_root / "docs").glob("*.md")]
        for name in re.findall(r"\bdeepinfer_[a-z0-9_]+", file.read_text("utf-8"))
    ]
    others = {NESTED}  # a quantisation method
    strange = [n for n in named if n[1] not in FAMILIES and family_of(n[1]) is None]
    assert [n for n in strange if n[1] not in others] == []


def queries(board: Any) -> Iterator[str]:
    if isinstance(board, dict):
        for key, value in board.items():
            if key in ("expr", "definition", "query") and isinstance(value, str):
                yield value
            else:
                yield from queries(value)
    elif isinstance(board, list):
        for value in board:
            yield from queries(value)


def names_in(query: str) -> set[str]:
    """The metrics of a query; PromQL's words and labels are taken away first."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|without)\s*\([^)]*\)", " ", query)
    words = {"sum", "max", "rate", "histogram_quantile", "label_values", "job", "prometheus"}
    return set(re.findall(r"[a-zA-Z_]\w*", bare)) - words


def test_every_query_of_the_board_names_metrics_and_labels_that_exist(repo_root: Path) -> None:
    board = json.loads((repo_root / "deploy/grafana/deepinfer.json").read_text("utf-8"))
    asked = list(queries(board))
    assert len(asked) > 50
    shown = set()
    for query in asked:
        names = names_in(query)
        families = [family_of(name) for name in names]
        assert None not in families, f"{query}: {names}"
        known = EVERY_SELECTOR.union(*(family.labels for family in families if family))
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query))
        labels |= {word for group in re.findall(r"by \(([^)]*)\)", query) for word in group.split()}
        assert labels <= known, query
        for family in families:
            assert family is not None
            shown.add(family.name)
            counts = family.kind in ("counter", "histogram", "unknown")
            assert ("rate(" in query) == counts or "label_values" in query, query
    assert S8 - shown == {
        "kv_cpu_offload_blocks_total",
        "kv_cpu_reload_blocks_total",
        "cpu_offload_enabled",
        "max_swapped_requests",
    }


def test_the_boards_panels_have_their_own_ids_and_places(repo_root: Path) -> None:
    board = json.loads((repo_root / "deploy/grafana/deepinfer.json").read_text("utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
