"""What a checkpoint's ``quantization_config`` says: which packing, and how each module is packed.

Read are 4-bit weights with 16-bit activations (W4A16) in three packings, whose tensors
``packed_weights`` knows, and nested ones (``nested``). Everything else is refused here, by field
and value, before a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from deepinfer.workers.model.config import UnsupportedModelError
from deepinfer.workers.model.fields import Fields, shown

GROUPS: Final = (32, 64, 128, 256, 512, 1024)
"""Sizes of a group that are computed with."""

KEYS: Final = ("quantization_config", "compression_config")
"""Where ``config.json`` may have it; the second is how compressed-tensors first called it."""

FALLBACK_FILES: Final[Mapping[str, str]] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Where a folder may have it instead, and what an old one without ``quant_method`` is."""


NESTED: Final = "deepinfer_nested"
"""``quant_method`` of nested weights."""

NESTED_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedFormat:
    """A checkpoint of nested weights: all linear layers but the modules called ``plain``.

    ``row_scaling`` False: by the published rule. ``layer_order`` names the decoder layers, those
    first that suffer least from FP8; empty: nobody measured it.
    """

    row_scaling: bool = True
    plain: tuple[str, ...] = ()
    layer_order: tuple[int, ...] = ()
    where: str = field(default=KEYS[0], compare=False)

    def to_hf(self) -> dict[str, Any]:
        """The object that is read back as this."""
        return {
            "quant_method": NESTED,
            "version": NESTED_VERSION,
            "row_scaling": self.row_scaling,
            "modules_to_not_convert": list(self.plain),
            "layer_order": list(self.layer_order),
        }


class Packing(Enum):
    """Whose tensors a checkpoint has."""

    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one linear layer is packed: ``group`` inputs a scale (None: all of a row's)."""

    group: int | None
    symmetric: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that ``matches`` are packed by ``scheme``, or not at all (None), ``because``."""

    matches: Callable[[str], object]
    scheme: Scheme | None
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A checkpoint's packing. The first rule that matches a module holds.

    ``zero_offset`` is added to stored zero points: GPTQ's first format stores them less one.
    """

    packing: Packing
    rules: tuple[Rule, ...]
    zero_offset: int = 0
    where: str = field(default=KEYS[0], compare=False)

    def rule(self, module: str) -> Rule:
        """What holds for ``module``, a name such as ``model.layers.0.mlp.up_proj``."""
        for rule in self.rules:
            if rule.matches(module):
                return rule
        return Rule(bool, None, "no config_groups has it among its targets")


def quantization_from_hf(values: Mapping[str, Any]) -> Quantization | NestedFormat | None:
    """Read it from a ``config.json``; None: the weights are not quantised.

    Raises UnsupportedModelError naming field, value and what is allowed: another method, format,
    number of bits, group, order of inputs (``desc_act``, ``actorder``) or quantised activations.
    """
    for name in KEYS:
        if found := values.get(name):
            return parse_quantization(found, where=name)
    return None


def parse_quantization(
    values: object, *, where: str, method_default: str | None = None
) -> Quantization | NestedFormat:
    """Read one such object, called ``where`` in errors; they are those of quantization_from_hf."""
    if not isinstance(values, Mapping):
        raise UnsupportedModelError(f"{where} must be an object, got {shown(values)}")
    fields = Fields(values, f"{where}: ")
    methods = (*(packing.value for packing in Packing), NESTED)
    method = fields.one_of("quant_method", *methods, default=method_default)
    if method == NESTED:
        return _nested(fields, where)
    match Packing(method):
        case Packing.GPTQ:
            return _gptq(fields, where)
        case Packing.AWQ:
            return _awq(fields, where)
        case Packing.COMPRESSED_TENSORS:
            return _compressed_tensors(fields, where)


def _nested(fields: Fields, where: str) -> NestedFormat:
    fields.one_of("version", NESTED_VERSION)
    return NestedFormat(
        row_scaling=fields.one_of("row_scaling", True, False),
        plain=fields.texts("modules_to_not_convert"),
        layer_order=fields.naturals("layer_order"),
        where=where,
    )


def _gptq(fields: Fields, where: str) -> Quantization:
    form = fields.one_of(
        "checkpoint_format", "gptq", "gptq_v2", default=fields.values.get("format") or "gptq"
    )
    fields.one_of("is_marlin_format", False, default=False)
    fields.one_of("pack_dtype", "int32", default="int32")
    usual = _gptq_scheme(fields)
    rules: list[Rule] = []
    for pattern, changes in fields.object("dynamic").items():
        named = f"dynamic {shown(pattern)}"
        matches = _regex(pattern.removeprefix("-:").removeprefix("+:"), f"{where}: {named}")
        if pattern.startswith("-:"):
            rules.append(Rule(matches, None, named))
            continue
        if not isinstance(changes, Mapping):
            raise UnsupportedModelError(f"{where}: {named} must be an object, got {shown(changes)}")
        changed = Fields({**fields.values, **changes}, f"{where}: {named}: ")
        rules.append(Rule(matches, _gptq_scheme(changed), named))
    rules.append(Rule(_any, usual, "it is quantised"))
    return Quantization(
        packing=Packing.GPTQ,
        rules=tuple(rules),
        zero_offset=1 if form == "gptq" else 0,
        where=where,
    )


def _gptq_scheme(fields: Fields) -> Scheme:
    fields.one_of("bits", 4)
    group = _group(fields, "group_size")
    # With one group a row the order changes nothing that is stored.
    if group is not None:
        fields.one_of("desc_act", False, default=False)
    return Scheme(group=group, symmetric=fields.one_of("sym", True, False))


def _awq(fields: Fields, where: str) -> Quantization:
    values = fields.values
    fields.one_of("w_bit" if "w_bit" in values else "bits", 4)
    # The last two are where GPTQModel writes it.
    names = ("version", "checkpoint_format", "format")
    version = next((values[name] for name in names if values.get(name) is not None), None)
    lowered = version.lower() if isinstance(version, str) else version
    Fields({"version": lowered}, f"{where}: ").one_of("version", "gemm", default="gemm")
    fields.one_of("backend", "autoawq", default="autoawq")
    fields.one_of("zero_point", True)
    group = _group(fields, "q_group_size" if "q_group_size" in values else "group_size")
    excluded = fields.texts("modules_to_not_convert")
    rules = [
        Rule(_containing(text), None, f"modules_to_not_convert has {shown(text)}")
        for text in excluded
    ]
    rules.append(Rule(_any, Scheme(group=group, symmetric=False), "it is quantised"))
    return Quantization(packing=Packing.AWQ, rules=tuple(rules), where=where)


def _compressed_tensors(fields: Fields, where: str) -> Quantization:
    fields.one_of("format", "pack-quantized")
    fields.one_of("quantization_status", "compressed", default="compressed")
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.object(name):
            fields.one_of(name, None)
    sparsity = Fields(fields.object("sparsity_config"), f"{where}: sparsity_config: ")
    sparsity.one_of("format", "dense", default="dense")
    rules = [
        Rule(_target(text, where), None, f"ignore has {shown(text)}")
        for text in fields.texts("ignore")
    ]
    classes: list[Rule] = []
    groups = fields.object("config_groups")
    if not groups:
        raise UnsupportedModelError(f"{where}: config_groups is missing")
    for name in groups:
        inside = f"{where}: config_groups.{name}"
        group = Fields(Fields(groups, f"{where}: config_groups.").object(name), f"{inside}: ")
        group.one_of("format", "pack-quantized", default="pack-quantized")
        for quantised in ("input_activations", "output_activations"):
            group.one_of(quantised, None)
        weights = Fields(group.object("weights"), f"{inside}.weights: ")
        scheme = _compressed_scheme(weights)
        for text in group.texts("targets"):
            rule = Rule(_target(text, where), scheme, f"config_groups.{name}")
            (classes if text == "Linear" else rules).append(rule)
    # A module's name counts for more than its class.
    rules += classes
    return Quantization(packing=Packing.COMPRESSED_TENSORS, rules=tuple(rules), where=where)


def _compressed_scheme(weights: Fields) -> Scheme:
    weights.one_of("num_bits", 4)
    weights.one_of("type", "int", default="int")
    weights.one_of("dynamic", False, default=False)
    weights.one_of("actorder", None, False, "weight", "static")
    strategy = weights.one_of("strategy", "group", "channel")
    return Scheme(
        group=_group(weights, "group_size") if strategy == "group" else None,
        symmetric=weights.one_of("symmetric", True, False, default=True),
    )


def _group(fields: Fields, name: str) -> int | None:
    value: int = fields.one_of(name, -1, *GROUPS)
    return None if value == -1 else value


def _regex(pattern: str, where: str) -> Callable[[str], object]:
    try:
        return re.compile(pattern).match
    except re.error as error:
        raise UnsupportedModelError(f"{where} is no regular expression: {error}") from error


def _target(text: str, where: str) -> Callable[[str], object]:
    """As compressed-tensors names modules: by class, by name, or ``re:`` and an expression."""
    if text.startswith("re:"):
        return _regex(text.removeprefix("re:"), f"{where}: {shown(text)}")
    return _any if text == "Linear" else lambda module: module == text


def _containing(text: str) -> Callable[[str], object]:
    return lambda module: text in module


def _any(module: str) -> bool:
    return True
