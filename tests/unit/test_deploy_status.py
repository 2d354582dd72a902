"""The status document as a person sees it."""

from __future__ import annotations

import io

from rich.console import Console

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.deploy.status import SWAP_COUNTERS, render_status


def test_a_document_becomes_tables_of_what_it_says() -> None:
    config = ControllerConfig(max_swapped_requests=9, deterministic=True)
    document = ControllerCore(1, config).snapshot()
    document["counters"] = {name: float(i + 1) for i, name in enumerate(SWAP_COUNTERS)}
    document["requests"] = {"decode": 3, "swapped": 2, "failed": 0}
    document["swapped"] = 2
    document["workers"] = {
        "worker-7": {
            "node": "here",
            "blocks_total": 10,
            "blocks_free": 4,
            "blocks_short": 1,
            "residents": 3,
            "state": "serving",
        }
    }
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_status(document))
    shown = {tuple(line.replace("│", " ").split()) for line in console.export_text().splitlines()}
    assert ("worker-7", "here", "6", "/", "10", "4", "1", "3", "serving") in shown
    assert ("decode", "3") in shown
    assert ("failed", "0") not in shown
    assert ("deterministic", "yes") in shown
    assert ("swapped", "now", "2") in shown
    assert ("most", "swapped", "requests", "9") in shown
    for i, name in enumerate(SWAP_COUNTERS):
        assert (name, str(i + 1)) in shown


def test_the_mode_of_nested_weights_is_shown() -> None:
    document = ControllerCore(1, ControllerConfig()).snapshot()
    document["counters"] = dict.fromkeys(SWAP_COUNTERS, 0.0)
    worker = {"node": "n", "blocks_total": 1, "blocks_free": 1, "blocks_short": 0, "residents": 0}
    precision = {"levels": 3, "remark": "", "switches": 4, "tokens": (1000, 20, 3)}
    document["workers"] = {
        name: worker | {"state": "serving", "precision": precision | {"level": level}}
        for level, name in enumerate(("a", "b", "c"))
    } | {"plain": worker | {"state": "serving", "precision": None}}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_status(document))
    shown = {tuple(line.replace("│", " ").split()) for line in console.export_text().splitlines()}
    assert ("a", "fp16", "1,000", "20", "3", "4") in shown
    assert ("b", "mixed", "1/2", "1,000", "20", "3", "4") in shown
    assert ("c", "fp8", "1,000", "20", "3", "4") in shown
    assert [line for line in shown if line[:1] == ("plain",)] == [
        ("plain", "n", "0", "/", "1", "1", "0", "0", "serving")
    ]


def test_an_idle_cluster_has_no_requests() -> None:
    document = ControllerCore(1, ControllerConfig()).snapshot()
    document["counters"] = dict.fromkeys(SWAP_COUNTERS, 0.0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_status(document))
    shown = console.export_text()
    assert "none" in shown
    assert "KV beside fp16" not in shown


def test_measured_kv_quality_is_shown() -> None:
    document = ControllerCore(1, ControllerConfig()).snapshot()
    document["counters"] = dict.fromkeys(SWAP_COUNTERS, 0.0)
    document["kv_quality"] = {
        "worker-0": {"kl_nats": 0.00123, "agreement": 0.975, "key_scales": 1.0},
        "worker-1": {"kl_nats": 0.00123, "agreement": 0.975, "key_scales": 0.0},
    }
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_status(document))
    shown = {tuple(line.replace("│", " ").split()) for line in console.export_text().splitlines()}
    assert ("worker-0", "0.0012", "97.5%", "yes") in shown
    assert ("worker-1", "0.0012", "97.5%", "no") in shown
