"""Log-probabilities to protobuf."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.kvstore.core.messages import PromptDelta
from deepinfer.kvstore.core.requests import Token
from deepinfer.proto import inference_pb2


def logprobs_to(tokens: Sequence[Token]) -> inference_pb2.OutputLogProbs:
    """Write tokens with their log-probabilities; NaN for one that has none."""
    return inference_pb2.OutputLogProbs(
        token_ids=[token.id for token in tokens],
        token_logprobs=[float("nan") if t.logprob is None else t.logprob for t in tokens],
        top_logprobs=[
            inference_pb2.TopLogProbs(
                token_ids=[token_id for token_id, _ in token.top],
                values=[value for _, value in token.top],
            )
            for token in tokens
        ],
    )


def prompt_to(delta: PromptDelta) -> inference_pb2.GenerateResponse:
    """Write prompt tokens with their log-probabilities."""
    return inference_pb2.GenerateResponse(
        prompt=inference_pb2.PromptChunk(
            position=delta.position, logprobs=logprobs_to(delta.tokens)
        )
    )
