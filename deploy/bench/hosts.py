"""What a bench of the cluster computes on, and what its results are called for that."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.deploy.config import Device, load_config
from deepinfer.deploy.devices import local_device


@dataclass(frozen=True, slots=True)
class Host:
    """The workers' device."""

    device: Device
    card: str = ""
    """The card's name, if it is one."""

    def stem(self, bench: str) -> str:
        """The name of a result's files: "offload" on a CPU, "offload_h200" on an NVIDIA H200."""
        if self.device == "cpu":
            return bench
        words = re.findall(r"[a-z0-9]+", self.card.lower().removeprefix("nvidia"))
        return "_".join([bench, *words])

    def facts(self) -> dict[str, Any]:
        """For a result's JSON: the card, if there is one."""
        return {} if self.device == "cpu" else {"card": self.card}


CPU: Final = Host("cpu")


def find_host(device: str, say: Callable[[str], None]) -> Host:
    """What ``device`` (auto, cpu or cuda) means on this machine.

    ``say`` is told why a card that is there cannot serve, if it is auto.

    Raises:
        ConfigError: it is none of them.
        LaunchError: it is cuda, and no card can serve.
    """
    found, _ = local_device(load_config(flags={"device": device}), say)
    if found == "cpu":
        return CPU
    from deepinfer.workers.gpu.card import find_card

    return Host(found, find_card().name)
