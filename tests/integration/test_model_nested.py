"""Nested models on the CPU: FP16 bit for bit, FP8 as torch rounds it, and levels between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.kvstore.core.layout import KvDtype, KvLayout, resolve_kv_dtype
from deepinfer.proto.failpoints import Failpoints
from deepinfer.workers.actor import WorkerSettings
from deepinfer.workers.assembly import UPPER_ONLY, open_device
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.model.config import UnsupportedModelError
from deepinfer.workers.model.costs import ROWS, measure_costs
from deepinfer.workers.model.decoder import Decoder, kv_layout
from deepinfer.workers.model.key_scales import KeyScales, with_key_scales
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.nested import nest, nestable_names
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.model.weights import CheckpointError, LoadedModel
from deepinfer.workers.pool import PagedPool
from support.nested_models import (
    FAMILIES,
    LLAMA,
    fp8_values,
    half_model,
    with_matrices,
    write_nested_folder,
)
from support.packed_models import gptq, gptq_config, packed_model
from support.tiny_model import write_tiny_llama

TOKENS = [7, 3, 40, 21, 21, 9, 0, 33, 5, 45, 12, 6, 2, 17, 40, 11, 8, 1, 30]
FP16 = resolve_kv_dtype("fp16")
EXACT = resolve_kv_dtype("fp16", compute_dtype="bf16")
"""bfloat16 storage: no power of two rounds anything."""
HEAD = "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def runner_of(
    model: LoadedModel, dtype: KvDtype = FP16, levels: int = 2, w8a8_rows: int = 0
) -> ModelRunner:
    config = model.config
    layout = KvLayout(dtype, config.layers, config.kv_heads, config.head_dim, block_size=8)
    backend = CpuBackend()
    decoder = Decoder(model, backend, levels, w8a8_rows=w8a8_rows)
    return ModelRunner(decoder, PagedPool(layout, layout.blocks_for(len(TOKENS))), backend)


def logits(runner: ModelRunner, level: int = 0) -> Tensor:
    """Of every position, computed in two chunks."""
    table = tuple(range(runner.pool.num_blocks))
    parts = [(TOKENS[:11], 0), (TOKENS[11:], 11)]
    return torch.cat(
        [runner.forward_all([SequenceSlice(ids, at, table, False)], level) for ids, at in parts]
    )


def in_fp8(model: LoadedModel, layers: set[int], head: bool) -> LoadedModel:
    """A plain model with the FP8 values in some layers (and the head, not the embedding)."""

    def change(name: str, weight: Tensor) -> Tensor:
        if "layers" not in name:
            return fp8_values(weight) if head and name == HEAD else weight
        return fp8_values(weight) if int(name.split(".")[2]) in layers else weight

    return with_matrices(model, change)


def test_w8a8_rounds_every_rows_activations_by_itself() -> None:
    """The same rows in other company have the same bits; the head's input is not rounded."""
    plain = half_model(LLAMA)
    runner = runner_of(nest(plain), w8a8_rows=1)
    assert (runner.levels, runner.w8a8_rows) == (2, 1)
    found = logits(runner, level=2)
    wanted, none = in_fp8(plain, set(range(4)), head=True), runner_of(nest(plain))
    reference = runner_of(wanted)
    linear, layers = reference.backend.linear, {id(reference.decoder._heads[0])}

    def rounded(x: Tensor, weight: Any) -> Tensor:
        if id(weight) in layers:
            return linear(x, weight)
        scale = x.abs().amax(1, keepdim=True) / 448
        scale[scale == 0] = 1
        return linear((x / scale).to(torch.float8_e4m3fn).float() * scale, weight)

    reference.backend.linear = rounded  # type: ignore[method-assign]
    assert torch.equal(found, logits(reference))
    assert not torch.equal(found, logits(runner, level=1))
    assert none.w8a8_rows == 0
    with pytest.raises(ValueError, match=r"precision level 2: this model has 0\.\.1"):
        logits(none, level=2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loaded", ["from a nested folder", "nested on reading"])
def test_fp16_is_the_plain_model_and_fp8_the_rounded_one(
    family: str, loaded: str, tmp_path: Path
) -> None:
    plain = half_model(FAMILIES[family])
    nested = nest(plain)
    if loaded == "from a nested folder":
        nested = load_model(write_nested_folder(plain, tmp_path / "m"))
    assert nested.nested
    runner = runner_of(nested)
    assert runner.levels == 2
    assert torch.equal(logits(runner), logits(runner_of(plain)))
    rounded = in_fp8(plain, set(range(4)), head=not plain.config.tied_embeddings)
    wanted = runner_of(rounded)
    got = logits(runner, level=1)
    if plain.config.tied_embeddings:  # the embedding stays exact where the head is rounded
        embedding = fp8_values(plain.weights.read("model.embed_tokens.weight"))
        wanted.decoder._heads = (wanted.backend.pack_linear(embedding, None),)
    assert torch.equal(got, logits(wanted))
    assert not torch.equal(got, logits(runner))
    for call in (logits, lambda r, level: r.forward([SequenceSlice([1], 0, [0], True)], level)):
        with pytest.raises(ValueError, match=r"level 2: this model has 0\.\.1"):
            call(runner, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_was_there(family: str, tmp_path: Path) -> None:
    plain = half_model(FAMILIES[family])
    on_disk, on_reading = load_model(write_nested_folder(plain, tmp_path / "m")), nest(plain)
    nestable = nestable_names(plain.config)
    assert len(nestable) == (4 * (4 if plain.config.fused_projections else 7)) + 1
    shifted = listed = 0
    for name in plain.weights.shapes():
        right = plain.weights.read(name)
        for model in (on_disk, on_reading):
            assert model.weights.shapes()[name] == tuple(right.shape)
            assert torch.equal(model.weights.read(name), right), name
            found = model.weights.read_nested(name)
            assert (found is not None) == (name in nestable)
            if found is not None:
                assert torch.equal(found.decode_fp8().float(), fp8_values(right)), name
                assert model.weights.read_quantized(name) is None
                shifted += found.row_shift is not None
                listed += found.outliers > 0
    assert shifted == listed == 2 * len(nestable)
    numbers = torch.tensor([2, 2, 0, 47, 1])
    for model in (on_disk, on_reading):
        rows = model.weights.rows("model.embed_tokens.weight")(numbers)
        assert torch.equal(rows, plain.weights.read("model.embed_tokens.weight")[numbers].float())


def test_levels_between_take_layers_in_the_measured_order(tmp_path: Path) -> None:
    plain = half_model(LLAMA)
    order = [2, 0, 3, 1]
    model = load_model(write_nested_folder(plain, tmp_path / "m", layer_order=order))
    assert model.layer_order == tuple(order)
    runner = runner_of(model, levels=4)
    assert runner.levels == 4
    assert torch.equal(logits(runner, 1), logits(runner_of(in_fp8(plain, {0, 2}, head=False))))
    for level, head in ((2, False), (3, True)):
        rounded = runner_of(in_fp8(plain, {0, 1, 2, 3}, head=head))
        assert torch.equal(logits(runner, level), logits(rounded))
    # By default those in the middle come first.
    runner = runner_of(nest(plain), levels=4)
    assert torch.equal(logits(runner, 1), logits(runner_of(in_fp8(plain, {1, 2}, head=False))))
    assert runner_of(plain, levels=3).levels == 1
    with pytest.raises(ValueError, match=r"precision levels: 7, must be 1 to 6"):
        runner_of(model, levels=7)


def test_a_step_at_one_level_reads_what_one_at_another_wrote() -> None:
    """KV is shared between levels: what comes back from FP8 is FP16 over FP8 history."""
    runner = runner_of(nest(half_model(LLAMA)))
    table = tuple(range(runner.pool.num_blocks))
    prompt = SequenceSlice(TOKENS[:11], 0, table, False)
    last = SequenceSlice(TOKENS[11:], 11, table, True)
    found = []
    for levels in ((0, 0), (1, 0), (1, 1), (0, 0)):
        runner.forward([prompt], levels[0])
        found.append(runner.forward([last], levels[1]))
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    seen: list[Tensor] = []
    runner.forward_and_score([last], [range(8)], lambda _, __, part: seen.append(part), 1)
    assert torch.equal(torch.cat(seen)[-1], runner.forward([last], 1)[0])


def test_the_published_rule_leaves_matrices_out(tmp_path: Path) -> None:
    plain = half_model(LLAMA)
    tensors = {name: plain.weights.read(name) for name in plain.weights.shapes()}
    tensors[UP].clamp_(-1.75, 1.75)
    model = load_model(write_nested_folder(plain, tmp_path / "m", row_scaling=False))
    assert [n for n in tensors if model.weights.read_nested(n) is not None] == [UP]
    assert all(torch.equal(model.weights.read(name), tensor) for name, tensor in tensors.items())
    runner = runner_of(model)
    rounded = with_matrices(plain, lambda n, w: fp8_values(w) if n == UP else w)
    assert torch.equal(logits(runner, 1), logits(runner_of(rounded)))
    assert torch.equal(logits(runner), logits(runner_of(plain)))


@pytest.mark.parametrize("family", FAMILIES)
def test_key_scales_change_no_bit_at_any_level(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    model = load_model(write_nested_folder(half_model(config), tmp_path / "m"))
    generator = torch.Generator().manual_seed(1)
    shape = (config.layers, 1, config.head_dim)
    found = torch.randint(-4, 5, shape, generator=generator)
    half = config.rope_dim // 2
    found[..., half : 2 * half] = found[..., :half]
    scales = KeyScales(found.expand(-1, config.kv_heads, -1).to(torch.int8))
    scaled = with_key_scales(model, scales)
    assert scaled.nested
    plain_runner, scaled_runner = runner_of(model, EXACT), runner_of(scaled, EXACT)
    for level in (0, 1):
        assert torch.equal(logits(scaled_runner, level), logits(plain_runner, level))
        assert not torch.equal(scaled_runner.pool.storage, plain_runner.pool.storage)
    taken = runner_of(model, EXACT)
    taken.decoder.take_projections(scaled.weights)
    assert torch.equal(logits(taken, 1), logits(scaled_runner, 1))
    assert torch.equal(taken.pool.storage, scaled_runner.pool.storage)


def test_bfloat16_weights_are_rounded_once() -> None:
    plain = half_model(LLAMA, dtype=torch.bfloat16)
    tiny = plain.weights.read(UP)
    tiny[0, 0] = 2.0**-24 * 0.75
    model = nest(plain)
    assert float(model.weights.read(UP)[0, 0]) == 2.0**-24
    halves = with_matrices(plain, lambda _, weight: weight.half())
    assert torch.equal(logits(runner_of(model)), logits(runner_of(halves)))


def test_fingerprints_tell_nested_models_apart(tmp_path: Path) -> None:
    plain = half_model(LLAMA)
    on_disk = load_model(write_nested_folder(plain, tmp_path / "m"))
    assert on_disk.fingerprint == load_model(tmp_path / "m").fingerprint
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors[f"{UP}.lower"][0, 0] ^= 1
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    changed = load_model(tmp_path / "m")
    names = {m.fingerprint for m in (plain, on_disk, changed, nest(plain))}
    assert len(names) == 4


def test_progress_counts_planes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = write_nested_folder(half_model(LLAMA), tmp_path / "m")
    model = load_model(folder, progress=lambda done, total: seen.append((done, total)))
    Decoder(model, CpuBackend())
    total = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert total <= seen[-1][1] < 1.1 * total  # with the words that say what the bytes mean


def test_moved_blocks_hold_what_was_there() -> None:
    runner = runner_of(half_model(LLAMA))
    pool = runner.pool
    pool.storage[:] = torch.randint(0, 256, pool.storage.shape, dtype=torch.uint8)
    before = pool.storage.clone()
    runner.move_blocks([(0, 2), (2, 1)])
    assert torch.equal(pool.storage, before[[0, 2, 0]])
    runner.move_blocks([])


def test_costs_are_those_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nest(half_model(replace(LLAMA, max_positions=400)))
    backend = CpuBackend()
    decoder = Decoder(model, backend, 3)
    layout = decoder.kv_layout(FP16, 8)
    runner = ModelRunner(decoder, PagedPool(layout, 40), backend)
    now = [0.0]
    forward = runner.forward

    def timed(slices: list[SequenceSlice], level: int = 0) -> Tensor:
        (part,) = slices
        rows = len(part.token_ids)
        now[0] += 1e-3 + 2e-5 * rows + 1e-6 * (part.start + rows)
        return forward(slices, level)

    monkeypatch.setattr(runner, "forward", timed)
    costs = measure_costs(runner, clock=lambda: now[0])
    assert len(costs) == 3
    assert costs[0] == costs[2]
    assert costs[0].rows == ROWS
    assert costs[0].us_per_context_token == pytest.approx(1.0)
    assert costs[0].predict(100, 250) == pytest.approx(1000 + 2000 + 250)


def damage(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def configured(folder: Path, **changes: object) -> Path:
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def plain_instead(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{UP}.")]:
        del tensors[name]
    tensors[UP] = torch.zeros(72, 48)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no lower plane": (
        lambda m: damage(m, lambda t: t.pop(f"{UP}.lower")), rf"missing tensors: {UP}.lower$",
    ),
    "no upper plane": (
        lambda m: damage(m, lambda t: t.pop(f"{UP}.upper")), rf"missing tensors: {UP}.upper$",
    ),
    "some of the list": (
        lambda m: damage(m, lambda t: t.pop(f"{UP}.outlier_values")),
        rf"missing tensors: {UP}.outlier_values$",
    ),
    "planes of different shapes": (
        lambda m: damage(m, lambda t: t.update({f"{UP}.lower": t[f"{UP}.lower"][:, :-1].clone()})),
        rf"tensor {UP}.lower has shape \[72, 47\]; beside an upper plane \[72, 48\] it would be",
    ),
    "a list of different lengths": (
        lambda m: damage(m, lambda t: t.update({f"{UP}.outlier_values": torch.zeros(9).half()})),
        rf"tensor {UP}.outlier_values has shape \[9\]; .* it would be \[1\]",
    ),
    "a list without a length": (
        lambda m: damage(m, lambda t: t.update({f"{UP}.outlier_columns": torch.tensor(1).int()})),
        rf"tensor {UP}.outlier_columns has shape \[\]; .* it would be \[0\]",
    ),
    "integers where nothing nests": (
        lambda m: damage(m, lambda t: t.update({NORM: t[NORM].to(torch.int32)})),
        rf"tensor {NORM} is torch.int32: what does not nest must be floats",
    ),
    "another dtype": (
        lambda m: damage(m, lambda t: t.update({f"{UP}.lower": t[f"{UP}.lower"].to(torch.int8)})),
        rf"tensor {UP}.lower is torch.int8, it must be torch.uint8",
    ),
    "both": (
        lambda m: damage(m, lambda t: t.update({UP: torch.zeros(72, 48)})),
        rf"tensor {UP} is there beside {UP}.upper",
    ),
    "a NaN": (
        lambda m: damage(m, lambda t: t[f"{UP}.upper"][5].fill_(0xFF)),
        rf"tensor {UP}: upper holds a code that is NaN",
    ),
    "a list that points elsewhere": (
        lambda m: damage(m, lambda t: t[f"{UP}.outlier_columns"].fill_(48)),
        rf"tensor {UP}: outlier_columns must be 0 to 47",
    ),
    "truncated": (
        lambda m: (m / "model.safetensors").write_bytes(
            (m / "model.safetensors").read_bytes()[:-100]
        ),
        r"model.safetensors: tensor .*: truncated: ends at byte",
    ),
    "not listed": (
        lambda m: configured(m, modules_to_not_convert=["lm_head"]),
        r"tensor lm_head.weight is nested, but quantization_config: modules_to_not_convert has it",
    ),
    "listed": (
        lambda m: damage(m, plain_instead),
        rf"tensor {UP} is not nested, but quantization_config: modules_to_not_convert lacks it",
    ),
    "version": (lambda m: configured(m, version=2), r"config: version must be 1, got 2"),
    "method": (
        lambda m: configured(m, quant_method="deepinfer_nest"),
        r"quant_method must be .* or 'deepinfer_nested', got 'deepinfer_nest'",
    ),
    "scaling": (lambda m: configured(m, row_scaling="yes"), r"row_scaling must be True or False"),
    "order": (
        lambda m: configured(m, layer_order=[0, 1, 2, 2]),
        r"layer_order must name each of 0\.\.3 once, got \[0, 1, 2, 2\]",
    ),
    "order of texts": (
        lambda m: configured(m, layer_order=["a"]), r"layer_order must be a list of whole numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    change, message = DAMAGE[case]
    folder = write_nested_folder(half_model(LLAMA), tmp_path / "m")
    change(folder)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_model(folder).weights.read(UP)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 70_000.0])
def test_weights_that_do_not_nest_are_named(value: float) -> None:
    model = half_model(LLAMA, dtype=torch.bfloat16)
    model.weights.read(UP)[3, 4] = value
    for read in (nest(model).weights.read_nested, nest(model).weights.read):
        with pytest.raises(CheckpointError, match=rf"tensor {UP}: .*\[3, 4\] = "):
            read(UP)


def test_what_does_not_nest_must_be_numbers_too(tmp_path: Path) -> None:
    folder = write_nested_folder(half_model(LLAMA), tmp_path / "m")
    damage(folder, lambda t: t[NORM][3:].fill_(float("nan")))
    plain = half_model(LLAMA)
    plain.weights.read(NORM)[3] = float("inf")
    for model, value in ((load_model(folder), "nan"), (nest(plain), "inf")):
        with pytest.raises(CheckpointError, match=rf"tensor {NORM}: \[3\] = {value}: must be"):
            Decoder(model, CpuBackend())


def test_four_bits_are_refused_by_name(tmp_path: Path) -> None:
    config = replace(LLAMA, hidden_size=64, intermediate_size=96, head_dim=16, heads=4, layers=2)
    folder = packed_model(config, gptq, symmetric=True).write(tmp_path / "m", gptq_config())
    with pytest.raises(UnsupportedModelError, match=r"m: model.layers.0.*q_proj.weight has 4 bits"):
        load_model(folder, weights="nested")
    with pytest.raises(ValueError, match=r"weights = 'fp8': must be auto or nested"):
        load_model(folder, weights="fp8")


def settings(folder: Path, **changes: object) -> WorkerSettings:
    layout = kv_layout(load_model(folder).config, FP16, 8)
    limits = WorkerConfig(blocks_total=6, block_size=8, block_bytes=layout.block_bytes)
    told: dict[str, Any] = {"weights": "nested", "precision_levels": 3} | changes
    return WorkerSettings(
        worker="w", node="n", model_path=str(folder), token="t", config=limits, **told
    )


def test_a_worker_opens_a_plain_checkpoint_nested(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    device = open_device(settings(folder), Failpoints())
    assert device.engine.levels == 3
    assert len(device.engine.costs) == 3
    assert any("no faster" in note or "8 rows" in note for note in device.notes)
    upper = open_device(settings(folder, start_shed=True), Failpoints())
    assert upper.notes == (UPPER_ONLY,)
    assert device.identity.model != load_model(folder).fingerprint
    plain = open_device(settings(folder, weights="auto"), Failpoints())
    assert plain.engine.levels == 1
    assert plain.engine.costs == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "fp8"}, "weights = 'fp8': must be auto or nested"),
        ({"precision_levels": 0}, "precision_levels = 0: must be 1 to 6"),
        ({"fp8_products": "w4a8"}, "fp8_products = 'w4a8': must be w8a16 or w8a8"),
        ({"precision_levels": 7}, "precision_levels = 7: must be 1 to 6"),
    ],
)
def test_a_worker_refuses_settings_that_there_are_not(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(write_tiny_llama(tmp_path / "m"), **changes)
