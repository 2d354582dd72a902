"""What the contracts themselves say about their fields, so that no one lists them a second time."""

from __future__ import annotations

from typing import Final

from deepinfer.proto import inference_pb2

SAMPLING_SCALARS: Final[tuple[str, ...]] = tuple(
    field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields if not field.is_repeated
)
"""Fields of ``SamplingParams`` that hold one value and know whether they were set; the others are
``stop``, ``stop_token_ids`` and ``logit_bias``."""
