"""Requests that cannot be served as written, and what their senders must be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer.client import DeepInferError, InvalidRequest, ModelNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One request, in the SDK's words."""

    prompt: Any = "Hello"
    options: dict[str, Any] = field(default_factory=dict)
    names: str
    """The field that the error names."""
    says: str
    """The value and what is legal, as the error has it."""
    error: type[DeepInferError] = InvalidRequest


def option(name: str, value: object, says: str, *, sdk: bool = False, at: str = "") -> Bad:
    """A bad value of one option; ``sdk``: the SDK itself cannot write it."""
    field_name = name + at if sdk else f"sampling_params.{name}{at}"
    return Bad(options={name: value}, names=field_name, says=says)


INF, NAN = float("inf"), float("nan")
SURROGATE = "a\ud800b"

BAD: tuple[Bad, ...] = (
    option("temperature", -1, "-1.0: must be between 0 and 100"),
    option("temperature", 101.0, "101.0: must be between 0 and 100"),
    option("temperature", NAN, "nan: must be finite"),
    option("temperature", INF, "inf: must be finite"),
    option("temperature", 1e300, "inf: must be finite"),
    option("temperature", "hot", "'hot': must be a number", sdk=True),
    option("top_p", 2, "2.0: must be above 0 and at most 1"),
    option("top_p", 0, "0.0: must be above 0 and at most 1"),
    option("top_p", NAN, "nan: must be finite"),
    option("top_k", -1, "-1: must be a whole number from 0", sdk=True),
    option("min_p", -0.5, "-0.5: must be between 0 and 1"),
    option("min_p", 1.5, "1.5: must be between 0 and 1"),
    option("frequency_penalty", 2.5, "2.5: must be between -2 and 2"),
    option("presence_penalty", -3, "-3.0: must be between -2 and 2"),
    option("repetition_penalty", 0, "0.0: must be above 0"),
    option("repetition_penalty", 1000, "1000.0: must be above 0, at most 100"),
    option("max_tokens", 0, "0: must be 1 or more"),
    option("max_tokens", -5, "-5: must be 1 or more"),
    option("max_tokens", 2**31 - 1, "2147483647: must be at most 507: the prompt has 5 tokens"),
    option("max_tokens", 2**40, "1099511627776: must be a whole number", sdk=True),
    option("min_tokens", -1, "-1: must be between 0 and max_tokens"),
    option("min_tokens", 300, "300: must be between 0 and max_tokens, which is 128"),
    option("n", 0, "0: must be between 1 and 64"),
    option("n", 1000, "1000: must be between 1 and 64"),
    option("n", 2**32 - 1, "4294967295: must be between 1 and 64"),
    option("logprobs", 21, "21: must be between 0 and 20"),
    option("logprobs", -1, "-1: must be between 0 and 20"),
    option("prompt_logprobs", 21, "21: must be between 0 and 20"),
    option("prompt_logprobs", -1, "-1: must be between 0 and 20"),
    option("seed", -1, "-1: must be between 0 and 2**63 - 1"),
    option("stop", [""], "must be at most 16 non-empty strings"),
    option("stop", ["x"] * 17, "must be at most 16 non-empty strings"),
    option("stop", ["y" * 1_000_000] * 3, "1000000 characters': must be at most 1024", at="[0]"),
    option("stop", ["ok", "z" * 1025], "'1025 characters': must be at most 1024", at="[1]"),
    option("stop", [SURROGATE], "must be one of a list of strings", sdk=True, at="[0]"),
    option("stop_token_ids", [259], "259: must be from 0 to 258", at="[0]"),
    option("stop_token_ids", [-1], "-1: must be one of a list of whole", sdk=True, at="[0]"),
    option("stop_token_ids", [1] * 65, "must be at most 64 ids"),
    option("logit_bias", {1: 101.0}, "101.0: must be between -100 and 100", at="[1]"),
    option("logit_bias", {1: NAN}, "nan: must be between -100 and 100", at="[1]"),
    option("logit_bias", {259: 1.0}, "259: must be of ids from 0 to 258"),
    option("logit_bias", {-1: 1.0}, "must be of token ids to numbers", sdk=True),
    option("logit_bias", dict.fromkeys(range(1025), 1.0), "must be at most 1024 ids"),
    option("logit_bias", [1, 2], "[1, 2]: must be a mapping", sdk=True),
    Bad(
        options={"logprobs": 20, "n": 64, "max_tokens": 500, "prompt_logprobs": 1},
        names="sampling_params.logprobs",
        says="'672010 log-probabilities in all': must be fewer: 524288 at most",
    ),
    Bad(prompt="", names="text", says="[]: must be at least one token"),
    Bad(prompt=[], names="prompt", says="[]: must be text, a list of token ids"),
    Bad(prompt=SURROGATE, names="text", says="must be Unicode text"),
    Bad(prompt=[1, 300], names="tokenized.input_ids[1]", says="300: must be from 0 to 258"),
    Bad(prompt=[1, -1], names="prompt[1]", says="-1: must be one of a list of whole numbers"),
    Bad(prompt=[1, "a"], names="prompt[1]", says="'a': must be one of a list of whole numbers"),
    Bad(prompt="x" * 512, names="prompt", says="'512 tokens': must be at most 511 tokens"),
    Bad(
        prompt=[{"role": "king", "content": "Hi"}],
        names="chat.messages[0].role",
        says="'king': must be one of system, developer, user, assistant, tool",
    ),
    Bad(
        prompt=[{"role": "r" * 100_000, "content": "Hi"}],
        names="chat.messages[0].role",
        says="rrr...: must be one of system",
    ),
    Bad(
        prompt=[{"role": "user"}],
        names="messages[0]",
        says="{'role': 'user'}: must be of role and content",
    ),
    Bad(
        prompt=[{"role": "user", "content": SURROGATE}],
        names="messages[0].content",
        says="must be Unicode text",
    ),
    Bad(
        prompt=[{"role": "user", "content": ""}] * 4097,
        names="chat.messages",
        says="'4097 messages': must be at most 4096 messages",
    ),
    Bad(options={"priority": 10**7}, names="priority", says="10000000: must be from -1000000"),
    Bad(options={"deadline_s": 0}, names="deadline_s", says="0: must be a number of seconds above"),
    Bad(options={"deadline_s": -1}, names="deadline_s", says="-1: must be a number of seconds"),
    Bad(options={"deadline_s": 1e9}, names="deadline_ms", says="must be from 1 to 604800000"),
    Bad(options={"deadline_s": 1e300}, names="deadline_ms", says="must be a whole number"),
    Bad(
        options={"model": "other"},
        names="",
        says="model 'other' is not served; 'bytes' is",
        error=ModelNotFound,
    ),
    Bad(options={"model": "m" * 100_000}, names="", says="mmm' is not served", error=ModelNotFound),
)


def wrong(bad: Bad, error: DeepInferError | None) -> str | None:
    """What is wrong about what the sender was told, if anything is."""
    if type(error) is not bad.error:
        return f"{bad.names or bad.says}: got {error!r}, not {bad.error.__name__}"
    if bad.says not in str(error):
        return f"{bad.names}: {error} does not say {bad.says!r}"
    if len(str(error)) > 600:
        return f"{bad.names}: {len(str(error))} characters are no clear error"
    if isinstance(error, InvalidRequest) and list(error.fields) != [bad.names]:
        return f"{error}: names {list(error.fields)} and not {bad.names!r}"
    return None
