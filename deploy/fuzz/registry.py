"""Every target by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deepinfer.deploy.fuzz import (
    checkpoints,
    client_calls,
    controller_calls,
    gateway_calls,
    messages,
    store_calls,
    texts,
)
from deepinfer.deploy.fuzz.target import Target

_MODULES: Final = (
    messages, checkpoints, texts, client_calls, gateway_calls, store_calls, controller_calls,
)  # fmt: skip
TARGETS: Final[Mapping[str, Target]] = {
    target.name: target for module in _MODULES for target in module.TARGETS
}
