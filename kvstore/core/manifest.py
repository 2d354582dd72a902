"""What a payload says about itself: enough to refuse it wherever it does not belong.

The shell carries a manifest as a msgpack map of ``to_dict``; it caps the bytes at
``MANIFEST_BYTES_MAX`` before it decodes them, and ``from_dict`` trusts nothing in the result.

Hashes are xxh3-64. The payload is hashed in groups of ``group_blocks`` blocks (the last one may be
shorter), so that a chunk can be checked when it arrives; ``payload_hash`` is the hash of all the
rest of the manifest as msgpack, group hashes and token ids included. One pass over the payload
gives both, and no bit of either can change unseen.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final, TypeVar

from deepinfer.kvstore.core.ids import Run
from deepinfer.kvstore.core.layout import KV_DTYPE_NAMES, resolve_kv_dtype
from deepinfer.kvstore.core.states import State

VERSION: Final = 1
TOKENS_MAX: Final = 1 << 17
BLOCKS_MAX: Final = 1 << 17
GROUPS_MAX: Final = 1 << 15
BLOCK_BYTES_MAX: Final = 1 << 28
TEXT_MAX: Final = 512
MANIFEST_BYTES_MAX: Final = 1 << 20
"""Above this a manifest is refused unread; the largest legal one is smaller."""

GROUP_BYTES: Final = 1 << 20
"""Groups of a drafted manifest are about this long: a second pass still finds them in cache."""

ENCODINGS: Final = ("native", "offset-binary")
"""How an element's bits are stored; offset-binary is for int8 only."""
ORDERS: Final = ("block-major",)
"""``[blocks, layers, 2, kv_heads, block_size, head_dim]``, scales inside the block."""
STATES: Final = (State.PREFILL, State.DECODE)

_U32: Final = 1 << 32
_U64: Final = 1 << 64
_T = TypeVar("_T")


class ManifestError(ValueError):
    """A manifest that cannot be what it claims: names the field, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"manifest.{name} = {shown}: must be {allowed}")
        self.name = name
        self.allowed = allowed


class TokenIds(tuple[int, ...]):
    """Token ids that are known to fit, with the bytes that the wire has for them.

    A manifest is made several times over before its payload is committed, and a long sequence takes
    longer to check and to pack than everything else in it.
    """

    packed: bytes
    """Little-endian, 32 bits each."""

    @classmethod
    def check(cls, token_ids: tuple[int, ...]) -> TokenIds:
        """Raises ManifestError unless each is within 0 to 2**32 - 1."""
        try:
            return cls._of(token_ids, struct.pack(f"<{len(token_ids)}I", *token_ids))
        except struct.error:
            raise ManifestError(
                "token_ids", (min(token_ids), max(token_ids)), "within 0 to 2**32 - 1"
            ) from None

    @classmethod
    def unpack(cls, packed: bytes) -> TokenIds:
        """``packed``: a multiple of 4 bytes."""
        return cls._of(struct.unpack(f"<{len(packed) // 4}I", packed), packed)

    @classmethod
    def _of(cls, token_ids: tuple[int, ...], packed: bytes) -> TokenIds:
        made = cls(token_ids)
        made.packed = packed
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One payload's description. Checked on construction (ManifestError)."""

    version: int = VERSION
    dtype: str
    """Canonical KV dtype: fp16, int8, fp8, fp8_e5m2 or k16v8."""
    encoding: str = "native"
    order: str = "block-major"
    layout: str
    """``KvLayout.fingerprint()``, with what else K's bytes depend on."""
    block_bytes: int
    blocks: int
    payload_bytes: int
    """``blocks * block_bytes``: keys, values and scales."""
    token_ids: tuple[int, ...]
    """The tokens whose KV this is, from position 0."""
    state: State
    """PREFILL or DECODE: where the sequence was."""
    precision: str
    """The worst weight mode in the prefix chain, a ``Precision``'s value; readers know which."""
    model: str
    """Fingerprint of the weights that computed it."""
    run: Run
    """The run that wrote it."""
    group_blocks: int
    group_hashes: tuple[int, ...]
    """xxh3-64 of each group of ``group_blocks`` blocks."""
    payload_hash: int
    """xxh3-64 of the rest of the manifest."""

    def __post_init__(self) -> None:
        _need(self.version == VERSION, "version", self.version, f"{VERSION}")
        _need(
            self.dtype in KV_DTYPE_NAMES and resolve_kv_dtype(self.dtype).name == self.dtype,
            "dtype",
            self.dtype,
            "fp16, int8, fp8, fp8_e5m2 or k16v8",
        )
        _need(self.encoding in ENCODINGS, "encoding", self.encoding, f"one of {ENCODINGS}")
        _need(
            self.encoding == "native" or self.dtype == "int8",
            "encoding",
            self.encoding,
            f"native for dtype {self.dtype}",
        )
        _need(self.order in ORDERS, "order", self.order, f"one of {ORDERS}")
        for name in ("layout", "precision", "model"):
            text = getattr(self, name)
            _need(0 < len(text) <= TEXT_MAX, name, text, f"1 to {TEXT_MAX} characters")
        _range("block_bytes", self.block_bytes, 1, BLOCK_BYTES_MAX)
        _range("blocks", self.blocks, 1, BLOCKS_MAX)
        _need(
            self.payload_bytes == self.blocks * self.block_bytes,
            "payload_bytes",
            self.payload_bytes,
            f"blocks * block_bytes = {self.blocks * self.block_bytes}",
        )
        tokens = len(self.token_ids)
        _need(
            self.blocks <= tokens <= TOKENS_MAX,
            "token_ids",
            f"{tokens} tokens",
            f"{self.blocks} (one a block) to {TOKENS_MAX} tokens",
        )
        if type(self.token_ids) is not TokenIds:
            object.__setattr__(self, "token_ids", TokenIds.check(self.token_ids))
        _need(self.state in STATES, "state", self.state, "prefill or decode")
        _need(min(self.run) >= 0 and max(self.run) < _U64, "run", self.run, "two 64-bit counts")
        _range("group_blocks", self.group_blocks, 1, BLOCKS_MAX)
        groups = -(-self.blocks // self.group_blocks)
        _need(
            len(self.group_hashes) == groups <= GROUPS_MAX,
            "group_hashes",
            f"{len(self.group_hashes)} hashes",
            f"{groups} (of at most {GROUPS_MAX}), one for each {self.group_blocks} blocks",
        )
        low, high = min(self.group_hashes), max(self.group_hashes)
        _need(low >= 0 and high < _U64, "group_hashes", (low, high), "within 0 to 2**64 - 1")
        _range("payload_hash", self.payload_hash, 0, _U64 - 1)

    @classmethod
    def draft(
        cls,
        *,
        dtype: str,
        layout: str,
        block_bytes: int,
        blocks: int,
        token_ids: tuple[int, ...],
        state: State,
        precision: str,
        model: str,
        run: Run,
        encoding: str = "native",
    ) -> Manifest:
        """A manifest whose hashes are still zeros: whoever copies the payload fills them in."""
        group_blocks = min(max(1, GROUP_BYTES // max(1, block_bytes)), max(1, blocks))
        return cls(
            dtype=dtype,
            encoding=encoding,
            layout=layout,
            block_bytes=block_bytes,
            blocks=blocks,
            payload_bytes=blocks * block_bytes,
            token_ids=token_ids,
            state=state,
            precision=precision,
            model=model,
            run=run,
            group_blocks=group_blocks,
            group_hashes=(0,) * -(-blocks // group_blocks),
            payload_hash=0,
        )

    @property
    def tokens(self) -> int:
        """Tokens with KV in the payload."""
        return len(self.token_ids)

    @property
    def group_bytes(self) -> int:
        """Bytes of every group but perhaps the last."""
        return self.group_blocks * self.block_bytes


def to_dict(manifest: Manifest) -> dict[str, object]:
    """Return what a msgpack encoder takes; lists of numbers are packed little-endian."""
    token_ids = manifest.token_ids
    assert isinstance(token_ids, TokenIds), type(token_ids)
    return {
        "version": manifest.version,
        "dtype": manifest.dtype,
        "encoding": manifest.encoding,
        "order": manifest.order,
        "layout": manifest.layout,
        "block_bytes": manifest.block_bytes,
        "blocks": manifest.blocks,
        "payload_bytes": manifest.payload_bytes,
        "token_ids": token_ids.packed,
        "state": manifest.state.value,
        "precision": manifest.precision,
        "model": manifest.model,
        "run": struct.pack("<2Q", *manifest.run),
        "group_blocks": manifest.group_blocks,
        "group_hashes": struct.pack(f"<{len(manifest.group_hashes)}Q", *manifest.group_hashes),
        "payload_hash": manifest.payload_hash,
    }


def from_dict(raw: object) -> Manifest:
    """Check everything about a decoded map. Raises ManifestError and nothing else."""
    if not isinstance(raw, Mapping):
        raise ManifestError("(all)", type(raw).__name__, "a map")
    unknown = [name for name in raw if name not in _NAMES]
    if unknown:
        raise ManifestError("(all)", unknown[0], f"a map with only the fields {', '.join(_NAMES)}")
    for name in _NAMES:
        if name not in raw:
            raise ManifestError(name, "absent", "present")
    return Manifest(
        version=_integer(raw, "version"),
        dtype=_text(raw, "dtype"),
        encoding=_text(raw, "encoding"),
        order=_text(raw, "order"),
        layout=_text(raw, "layout"),
        block_bytes=_integer(raw, "block_bytes"),
        blocks=_integer(raw, "blocks"),
        payload_bytes=_integer(raw, "payload_bytes"),
        token_ids=TokenIds.unpack(_packed(raw, "token_ids", "I", TOKENS_MAX)),
        state=_state(raw),
        precision=_text(raw, "precision"),
        model=_text(raw, "model"),
        run=_run(raw),
        group_blocks=_integer(raw, "group_blocks"),
        group_hashes=_unpacked(raw, "group_hashes", "Q", GROUPS_MAX),
        payload_hash=_integer(raw, "payload_hash"),
    )


_NAMES: Final = tuple(field.name for field in fields(Manifest))


def _need(legal: bool, name: str, value: object, allowed: str) -> None:
    if not legal:
        raise ManifestError(name, value, allowed)


def _range(name: str, value: int, low: int, high: int) -> None:
    _need(low <= value <= high, name, value, f"between {low} and {high}")


def _integer(raw: Mapping[object, object], name: str) -> int:
    return _typed(raw, name, "an integer", lambda v: v if type(v) is int else None)


def _text(raw: Mapping[object, object], name: str) -> str:
    return _typed(raw, name, "text", lambda v: v if type(v) is str else None)


def _state(raw: Mapping[object, object]) -> State:
    legal = {state.value: state for state in STATES}
    return _typed(
        raw, "state", "prefill or decode", lambda v: legal.get(v) if type(v) is str else None
    )


def _packed(raw: Mapping[object, object], name: str, code: str, count_max: int) -> bytes:
    size = struct.calcsize(f"<{code}")
    allowed = f"a whole number of {size}-byte integers, 1 to {count_max} of them"
    data = _typed(raw, name, allowed, lambda v: v if type(v) is bytes else None)
    count, rest = divmod(len(data), size)
    _need(rest == 0 and 1 <= count <= count_max, name, f"{len(data)} bytes", allowed)
    return data


def _unpacked(
    raw: Mapping[object, object], name: str, code: str, count_max: int
) -> tuple[int, ...]:
    data = _packed(raw, name, code, count_max)
    return struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)


def _run(raw: Mapping[object, object]) -> Run:
    epoch_counter = _unpacked(raw, "run", "Q", 2)
    _need(len(epoch_counter) == 2, "run", epoch_counter, "two 64-bit integers")
    return Run(*epoch_counter)


def _typed(
    raw: Mapping[object, object], name: str, allowed: str, convert: Callable[[object], _T | None]
) -> _T:
    value = convert(raw[name])
    if value is None:
        raise ManifestError(name, raw[name], allowed)
    return value
