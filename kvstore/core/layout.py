"""KV cache dtypes and the byte layout of one block: the one resolver for budgets and pools.

A block holds ``block_size`` tokens of every layer. Its bytes are contiguous, so that a swap is
one copy a block (or a run of adjacent blocks)::

    byte 0                                                       payload_end      block_bytes
    | layer 0: K [kv_heads, block_size, head_dim] | V [same] | layer 1: K | V | ... | scales |

    scales (int8 only): float16 [layers, 2, kv_heads, block_size], 2 = (K, V)

When K and V have elements of one size, the payload is ``[layers, 2, kv_heads, block_size,
head_dim]``; a run of blocks prepends ``blocks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

ComputeDtype = Literal["fp16", "bf16", "fp32"]
"""What the model computes in; decides the 16-bit storage type of unquantised K and V."""

StorageType = Literal["float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"]
"""Element types by the names torch and numpy/ml_dtypes use."""

_ELEMENT_BYTES: Final[dict[StorageType, int]] = {
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

_ALIASES: Final[dict[str, str]] = {
    "fp16": "fp16",
    "auto": "fp16",
    "int8": "int8",
    "i8": "int8",
    "fp8": "fp8",
    "e4m3": "fp8",
    "fp8_e5m2": "fp8_e5m2",
    "e5m2": "fp8_e5m2",
    "k16v8": "k16v8",
}

KV_DTYPE_NAMES: Final[tuple[str, ...]] = tuple(_ALIASES)
"""Every name ``resolve_kv_dtype`` accepts, aliases included."""

SCALE_BYTES: Final = 2
"""One int8 scale is a float16."""


@dataclass(frozen=True, slots=True)
class KvDtype:
    """How K and V are stored.

    ``name`` is canonical (``fp16``, ``int8``, ``fp8``, ``fp8_e5m2`` or ``k16v8``); ``k_storage``
    and ``v_storage`` are element types; ``scaled`` says that every token and KV head has one
    float16 scale for K and one for V.
    """

    name: str
    k_storage: StorageType
    v_storage: StorageType
    scaled: bool

    @property
    def k_bytes(self) -> int:
        """Bytes of one K element."""
        return _ELEMENT_BYTES[self.k_storage]

    @property
    def v_bytes(self) -> int:
        """Bytes of one V element."""
        return _ELEMENT_BYTES[self.v_storage]


def resolve_kv_dtype(name: str, *, compute_dtype: ComputeDtype = "fp16") -> KvDtype:
    """Turn a ``--kv-cache-dtype`` name into its storage.

    Unquantised K and V are 16 bits wide whatever the model computes in: bfloat16 for ``bf16``,
    float16 for ``fp16`` and also for ``fp32`` (the CPU backend computes in float32 and stores
    float16), so that a block has the same size on every device.

    Raises ValueError for any name not in ``KV_DTYPE_NAMES``.
    """
    canonical = _ALIASES.get(name)
    if canonical is None:
        raise ValueError(f"KV cache dtype {name!r} is not one of {', '.join(KV_DTYPE_NAMES)}")
    if compute_dtype not in get_args(ComputeDtype):
        raise ValueError(
            f"compute_dtype {compute_dtype!r} is not one of {', '.join(get_args(ComputeDtype))}"
        )
    half: StorageType = "bfloat16" if compute_dtype == "bf16" else "float16"
    match canonical:
        case "fp16":
            return KvDtype("fp16", half, half, scaled=False)
        case "int8":
            return KvDtype("int8", "int8", "int8", scaled=True)
        case "fp8":
            return KvDtype("fp8", "float8_e4m3fn", "float8_e4m3fn", scaled=False)
        case "fp8_e5m2":
            return KvDtype("fp8_e5m2", "float8_e5m2", "float8_e5m2", scaled=False)
        case _:
            return KvDtype("k16v8", half, "float8_e4m3fn", scaled=False)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes and byte offsets of a paged KV pool's blocks.

    Offsets are in bytes from the start of a block; divide by the element size for a typed view
    (every offset and ``block_bytes`` are multiples of the element sizes they serve).

    Raises ValueError for a field that is not a positive integer, or an odd ``head_dim`` (RoPE
    rotates pairs).
    """

    dtype: KvDtype
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "block_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"KvLayout.{field} must be a positive integer, got {value!r}")
        if self.head_dim % 2:
            raise ValueError(f"KvLayout.head_dim must be even, got {self.head_dim}")

    @property
    def elements(self) -> int:
        """Elements of K (and of V) in one layer of one block."""
        return self.kv_heads * self.block_size * self.head_dim

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer's K to the next layer's K."""
        return self.elements * (self.dtype.k_bytes + self.dtype.v_bytes)

    @property
    def payload_end(self) -> int:
        """Bytes of K and V of all layers: where the scales begin."""
        return self.layers * self.layer_stride

    @property
    def scale_elements(self) -> int:
        """Scales of K (and of V) in one layer of one block; 0 when the dtype has none."""
        return self.kv_heads * self.block_size if self.dtype.scaled else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, scales included."""
        return self.payload_end + self.layers * 2 * self.scale_elements * SCALE_BYTES

    def k_offset(self, layer: int) -> int:
        """Byte offset of layer ``layer``'s K, ``[kv_heads, block_size, head_dim]``."""
        self._check_layer(layer)
        return layer * self.layer_stride

    def v_offset(self, layer: int) -> int:
        """Byte offset of layer ``layer``'s V, ``[kv_heads, block_size, head_dim]``."""
        return self.k_offset(layer) + self.elements * self.dtype.k_bytes

    def k_scale_offset(self, layer: int) -> int:
        """Byte offset of layer ``layer``'s K scales, float16 ``[kv_heads, block_size]``.

        Raises ValueError when the dtype stores no scales.
        """
        self._check_layer(layer)
        if not self.dtype.scaled:
            raise ValueError(f"KV dtype {self.dtype.name} stores no scales")
        return self.payload_end + layer * 2 * self.scale_elements * SCALE_BYTES

    def v_scale_offset(self, layer: int) -> int:
        """Byte offset of layer ``layer``'s V scales, float16 ``[kv_heads, block_size]``.

        Raises ValueError when the dtype stores no scales.
        """
        return self.k_scale_offset(layer) + self.scale_elements * SCALE_BYTES

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` cached tokens occupy: ceil(tokens / block_size)."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        return -(-tokens // self.block_size)

    def payload_bytes(self, blocks: int) -> int:
        """Bytes of ``blocks`` blocks in the pool, on the wire and in the store alike."""
        if blocks < 0:
            raise ValueError(f"blocks must not be negative, got {blocks}")
        return blocks * self.block_bytes

    def fingerprint(self) -> str:
        """A stable name of the byte layout: payloads are exchanged only between equal ones.

        It states the encoding and order in full, so that two versions that disagree about
        either can never produce the same string.
        """
        scales = "+tail_fp16_scales" if self.dtype.scaled else ""
        return (
            f"kv1:{self.dtype.name}:k={self.dtype.k_storage},v={self.dtype.v_storage}{scales}"
            f":block,layer,kv,head,token,dim"
            f":{self.layers}x{self.kv_heads}x{self.block_size}x{self.head_dim}"
        )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} is outside 0..{self.layers - 1}")
