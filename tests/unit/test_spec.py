"""The cost formulas against known numbers, and against the modules that they describe."""

from typing import Any

import pytest
import torch

from references import ALL, DATA
from yocolm.config import LlamaConfig, ModelConfig, YocoConfig
from yocolm.models.presets import PRESETS, llama_twin, preset
from yocolm.models.registry import build_model, load_config
from yocolm.models.spec import Mixer, model_spec

SIZES = [name for name in PRESETS if not name.startswith("gemma")]
GIVEN = [load_config(DATA / name) for name in ALL] + [preset(name) for name in SIZES]


def meta(config: ModelConfig) -> dict[str, Any]:
    model = build_model(config, "meta", torch.float32)
    return {name: parameter for name, parameter in model.named_parameters()}


def is_write(config: ModelConfig, name: str) -> bool:
    """Whether a parameter belongs to the first half, by the rule of select at the last write."""
    if isinstance(config, YocoConfig):
        return name.startswith(("self_layers.", "global_kv."))
    return name.startswith("layers.") and not name.startswith(f"layers.{config.num_layers - 1}.")


@pytest.mark.parametrize("config", GIVEN, ids=[*ALL, *SIZES])
def test_parameters_equal_the_module(config: ModelConfig) -> None:
    spec, parameters = model_spec(config), meta(config)
    assert spec.num_params == sum(p.numel() for p in parameters.values())
    assert spec.embed_params == parameters["embed_tokens.weight"].numel()
    assert spec.tied == ("lm_head.weight" not in parameters)
    write = sum(p.numel() for name, p in parameters.items() if is_write(config, name))
    flops = 2 * sum(
        p.numel() for name, p in parameters.items() if is_write(config, name) and p.dim() == 2
    )
    if isinstance(config, LlamaConfig):
        # The last layer's norm and K, V are written as well.
        kv = 2 * config.num_kv_heads * config.head_dim
        write += config.hidden_size * (kv + 1) + (kv if config.attention_bias else 0)
        flops += 2 * config.hidden_size * kv
    assert (spec.write_params, spec.write_flops_per_token) == (write, flops)
    matrices = sum(p.numel() for p in parameters.values() if p.dim() == 2)
    outside = spec.embed_params + (0 if spec.tied else spec.head_params)
    assert spec.write_flops_per_token + spec.read_flops_per_row == 2 * (matrices - outside)


def test_yoco_3b_at_a_million_tokens() -> None:
    config = preset("3B")
    assert isinstance(config, YocoConfig)
    spec, twin = model_spec(config), model_spec(llama_twin(config))
    tokens = 1_048_576
    kv = spec.bytes(tokens, 64, 2) - spec.slot_bytes(2)
    assert kv == 4_294_967_296
    assert spec.slot_bytes(2) == 20_447_232
    assert twin.bytes(tokens, 64, 2) == 26 * kv


def test_footprint_of_a_short_request_is_a_page_and_a_slot() -> None:
    spec = model_spec(preset("3B"))
    assert spec.bytes(12, 64, 2) == spec.page_bytes(64, 2) + spec.slot_bytes(2)
    assert spec.bytes(65, 64, 2) == 2 * spec.page_bytes(64, 2) + spec.slot_bytes(2)
    assert spec.bytes(0, 64, 2) == spec.slot_bytes(2)


def test_recurrent_state_is_float32_whatever_the_dtype() -> None:
    spec = model_spec(preset("160M"))
    assert spec.slot_bytes(2) == spec.slot_bytes(4) == 6 * 12 * 64 * 64 * 4


def test_stores_in_layer_order() -> None:
    yoco = model_spec(load_config(DATA / "yoco-fla-swa-tiny"))
    assert [store.kind for store in yoco.stores] == ["window_kv"] * 2 + ["global_kv"]
    assert yoco.window_stores[0].bytes_per_slot(4) == 48 * 2 * 32 * 4
    assert yoco.window_stores[0].bytes_per_token(4) == 0
    assert yoco.global_stores[0].readers == 3
    llama = model_spec(load_config(DATA / "llama-tiny"))
    assert [store.kind for store in llama.stores] == ["global_kv"] * 2
    assert llama.slot_bytes(4) == 0


@pytest.mark.parametrize("kind", ["global_kv", "window_kv", "recurrent"])
def test_closed_form_equals_the_sum_over_tokens(kind: Any) -> None:
    mixer = Mixer(kind, num_heads=3, k_dim=8, v_dim=4, window=5 if kind == "window_kv" else 0)
    for start, stop in [(0, 1), (0, 20), (3, 7), (4, 5), (6, 31)]:
        total = sum(mixer.flops(position + 1, chunk=4) for position in range(start, stop))
        assert mixer.span_flops(start, stop, chunk=4) == total


def test_prefill_is_the_first_half_and_one_row() -> None:
    spec = model_spec(preset("160M"))
    one_row = spec.read_flops_per_row + spec.logits_flops_per_row + spec.read_attention_flops(500)
    assert spec.prefill_flops(500) == spec.write_flops(0, 500) + one_row
    everything = spec.write_flops(0, 500) + spec.read_flops(range(1, 501))
    assert spec.prefill_flops(500) < everything
    assert spec.decode_flops(500) == (
        spec.write_flops_per_token + spec.write_attention_flops(500) + one_row
    )


def test_blocks_of_retention_are_no_longer_than_the_tokens() -> None:
    spec = model_spec(preset("160M"))
    assert spec.write_flops(0, 40) == spec.write_flops(0, 40, 40) < spec.write_flops(0, 41)
    assert spec.write_flops(0, 512, 64) < spec.write_flops(0, 512, 128)
    mixing = sum(mixer.span_flops(0, 40, 40) for mixer in spec.write_mixers)
    assert spec.write_flops(0, 40) == 40 * spec.write_flops_per_token + mixing


def test_presets_are_of_the_size_that_they_are_called() -> None:
    for name in SIZES:
        unit = {"M": 1e6, "B": 1e9}[name[-1]]
        called = float(name.removeprefix("llama-")[:-1]) * unit
        spec = model_spec(preset(name))
        # The 3B's name leaves its untied embeddings out.
        counted = spec.num_params if spec.tied else spec.write_params + spec.read_params
        assert 0.85 < counted / called < 1.08, name


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gemma")])
def test_parameters_of_gemma_equal_the_module(name: str) -> None:
    config = preset(name)
    spec, parameters = model_spec(config), meta(config)
    assert spec.num_params == sum(p.numel() for p in parameters.values())
    table = parameters.get("per_layer.table.weight")
    assert spec.table_params == (0 if table is None else table.numel())


def test_gemma4_e2b_stores_what_15_of_its_layers_write() -> None:
    spec = model_spec(preset("gemma-4-E2B"))
    assert [store.kind for store in spec.stores] == (["window_kv"] * 4 + ["global_kv"]) * 3
    assert [store.readers for store in spec.global_stores] == [1, 1, 1 + 4]
    assert [store.readers for store in spec.window_stores] == [1] * 11 + [1 + 16]
    # Keys and values of one head of 512 in 3 layers; of 256 for 512 tokens in 12.
    assert spec.bytes(32_768, 64, 2) == 32_768 * 3 * 2 * 512 * 2 + 512 * 12 * 2 * 256 * 2
    assert spec.unshared_bytes(32_768, 64, 2) == 32_768 * 7 * 2 * 512 * 2 + 512 * 28 * 2 * 256 * 2


@pytest.mark.parametrize(("name", "least"), [("gemma-4-E2B", 20 / 35), ("gemma-4-E4B", 18 / 42)])
def test_fast_prefill_skips_more_than_the_layers_that_share(name: str, least: float) -> None:
    spec = model_spec(preset(name))
    for tokens in (512, 32_768, 131_072):
        rows = range(1, tokens + 1) if tokens < 1000 else None
        share = spec.skipped_share(tokens)
        assert least < share < 0.75
        if rows is not None:  # by its definition
            logits = (tokens - 1) * spec.logits_flops_per_row
            whole = spec.write_flops(0, tokens) + spec.read_flops(rows) - logits
            assert share == pytest.approx(1 - spec.prefill_flops(tokens) / whole, abs=1e-12)
