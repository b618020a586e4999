"""Configurations of Gemma 3n and Gemma 4: what transformers and the hub write, in and out."""

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from yocolm.config import (
    AttentionConfig,
    ExpertsConfig,
    Gemma3nConfig,
    Gemma4Config,
    RopeConfig,
    parse_config,
)
from yocolm.errors import ConfigError
from yocolm.models.presets import preset

FULL, SLIDING = "full_attention", "sliding_attention"
HUB = Path(__file__).parent / "hub_configs"
NAMES = ("gemma-3n-E2B", "gemma-3n-E4B", "gemma-4-E2B", "gemma-4-E4B")
EVEN = st.integers(1, 8).map(lambda n: 2 * n)
many = settings(max_examples=150, deadline=None)


def hub(name: str) -> dict[str, Any]:
    """A config.json as published."""
    return json.loads((HUB / f"{name}.json").read_text())


def changed(name: str, **fields: Any) -> dict[str, Any]:
    data = hub(name)
    data["text_config"].update(fields)
    return data


def known(name: str) -> Gemma3nConfig | Gemma4Config:
    config = parse_config(hub(name))
    assert isinstance(config, (Gemma3nConfig, Gemma4Config))
    return config


# --- as published ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_what_the_hub_publishes(name: str) -> None:
    assert preset(name) == known(name)


@pytest.mark.parametrize(
    ("name", "layers", "writers", "full_layers", "hidden"),
    [
        ("gemma-3n-E2B", 30, 20, 6, 2048),
        ("gemma-3n-E4B", 35, 20, 7, 2048),
        ("gemma-4-E2B", 35, 15, 7, 1536),
        ("gemma-4-E4B", 42, 24, 7, 2560),
    ],
)
def test_sizes(name: str, layers: int, writers: int, full_layers: int, hidden: int) -> None:
    config = known(name)
    assert (config.num_layers, config.num_writers, config.hidden_size) == (layers, writers, hidden)
    assert config.layer_types.count(FULL) == full_layers and config.layer_types[-1] == FULL
    assert (config.per_layer_size, config.final_softcap) == (256, 30.0)
    assert config.sliding.window == 512 and config.tie_word_embeddings


def test_gemma_4_e2b() -> None:
    config = known("gemma-4-E2B")
    assert isinstance(config, Gemma4Config)
    assert (config.full.head_dim, config.sliding.head_dim) == (512, 256)
    assert config.full.rope == RopeConfig(1e6, False, False, fraction=0.25)
    assert config.sliding.rope == RopeConfig(1e4, False, False)
    assert [config.mlp_width(i) for i in (0, 14, 15, 34)] == [6144, 6144, 12288, 12288]
    assert config.eos_token_id == (1, 106)
    assert dict(config.media_token_ids) == {"image": 258880, "audio": 258881, "video": 258884}
    assert config.max_position_embeddings == 131_072 and config.experts is None


def test_gemma_3n_e4b() -> None:
    config = known("gemma-3n-E4B")
    assert isinstance(config, Gemma3nConfig)
    assert set(config.mlp_widths) == {16_384} and config.vocab_size == 262_400
    assert config.activation_sparsity == (0.95,) * 10 + (0.0,) * 25
    assert config.full.rope.theta == 1e6 and config.sliding.rope.theta == 1e4
    assert dict(config.media_token_ids) == {"image": 262145, "audio": 262273}


def test_the_mixture_of_experts() -> None:
    config = preset("gemma-4-26B-A4B")
    assert isinstance(config, Gemma4Config)
    assert config.experts == ExpertsConfig(128, 8, 704)
    assert config.full.k_is_v and not config.sliding.k_is_v
    assert (config.full.num_kv_heads, config.sliding.num_kv_heads) == (2, 8)
    assert (config.num_layers, config.num_kv_shared_layers, config.per_layer_size) == (30, 0, 0)


# --- there and back -------------------------------------------------------------------------------


def ropes() -> st.SearchStrategy[RopeConfig]:
    build = partial(RopeConfig, interleaved=False, inclusive=False)
    return st.builds(
        build,
        theta=st.sampled_from([1e4, 5e5, 1e6]),
        fraction=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        factor=st.sampled_from([1.0, 2.0, 8.0]),
    )


def layer_types(draw: Any, last: str | None) -> tuple[tuple[Any, ...], int]:
    """Types of layers, and how many of the last may share."""
    types = draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=9))
    if last:
        types.append(last)
    needed = max(types.index(kind) for kind in set(types)) + 1
    return tuple(types), draw(st.integers(0, len(types) - needed))


def common(draw: Any, last: str | None) -> dict[str, Any]:
    types, shared = layer_types(draw, last)
    return {
        "vocab_size": draw(st.integers(3, 999)),
        "hidden_size": 48,
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "per_layer_vocab_size": draw(st.integers(1, 999)),
        "attention_bias": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": draw(st.integers(1, 9999)),
        "eos_token_id": draw(st.sampled_from([None, 1, (1, 2)])),
        "media_token_ids": draw(st.sampled_from([(), (("image", 5), ("video", 7))])),
    }


@st.composite
def gemma4_configs(draw: Any) -> Gemma4Config:
    heads, groups = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (6, 3)]))
    k_is_v = draw(st.booleans())
    full_kv = draw(st.sampled_from([1, 2, groups]))
    experts = ExpertsConfig(draw(st.integers(2, 4)), draw(st.integers(1, 2)), draw(EVEN))
    return Gemma4Config(
        **common(draw, FULL),
        full=AttentionConfig(heads, full_kv, draw(EVEN), draw(ropes()), k_is_v=k_is_v),
        sliding=AttentionConfig(
            heads, groups, draw(EVEN), draw(ropes()), window=draw(st.integers(1, 99))
        ),
        per_layer_size=draw(st.sampled_from([0, 4])),
        final_softcap=draw(st.sampled_from([0.0, 30.0])),
        mlp_size=draw(EVEN),
        wide_mlp=draw(st.booleans()),
        experts=draw(st.sampled_from([None, experts])),
    )


@st.composite
def gemma3n_configs(draw: Any) -> Gemma3nConfig:
    fields = common(draw, None)
    layers = len(fields["layer_types"])
    heads, groups, head_dim = draw(st.sampled_from([(4, 1), (4, 2), (6, 3)])) + (draw(EVEN),)
    streams = draw(st.integers(2, 4))
    shares = st.sampled_from([0.0, 0.5, 0.95])
    return Gemma3nConfig(
        **fields,
        full=AttentionConfig(heads, groups, head_dim, draw(ropes())),
        sliding=AttentionConfig(
            heads, groups, head_dim, draw(ropes()), window=draw(st.integers(1, 99))
        ),
        per_layer_size=4,
        final_softcap=draw(st.sampled_from([1.0, 30.0])),
        mlp_widths=tuple(draw(st.lists(EVEN, min_size=layers, max_size=layers))),
        activation_sparsity=tuple(draw(st.lists(shares, min_size=layers, max_size=layers))),
        altup_num_inputs=streams,
        altup_active=draw(st.integers(0, streams - 1)),
        altup_coef_clip=draw(st.sampled_from([1.0, 120.0])),
        altup_correct_scale=draw(st.booleans()),
        laurel_rank=draw(st.integers(1, 9)),
    )


configs = st.one_of(gemma4_configs(), gemma3n_configs())


def read_by_transformers(data: dict[str, Any], folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoConfig.from_pretrained(folder)


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(data))


@many
@given(configs)
def test_reading_what_was_written_gives_the_same(config: Gemma3nConfig | Gemma4Config) -> None:
    assert parse_config(through_json(config.to_hf())) == config


@many
@given(configs)
def test_transformers_reads_and_writes_the_same(
    tmp_path_factory: pytest.TempPathFactory, config: Gemma3nConfig | Gemma4Config
) -> None:
    folder = tmp_path_factory.getbasetemp() / "read"
    theirs = read_by_transformers(config.to_hf(), folder)
    assert parse_config(through_json(theirs.to_dict())) == config
    theirs.save_pretrained(folder)
    assert parse_config(json.loads((folder / "config.json").read_text())) == config
    again = read_by_transformers(theirs.to_dict(), folder)
    assert again.to_dict() == theirs.to_dict()


@many
@given(gemma4_configs())
def test_transformers_sees_the_sizes_of_each_layer(
    tmp_path_factory: pytest.TempPathFactory, config: Gemma4Config
) -> None:
    theirs = read_by_transformers(config.to_hf(), tmp_path_factory.getbasetemp() / "sizes")
    for layer in range(config.num_layers):
        ours, view = config.attention(layer), theirs.per_layer_config[layer]
        assert (view.head_dim, view.num_key_value_heads) == (ours.head_dim, ours.num_kv_heads)


@many
@given(gemma4_configs())
def test_the_hubs_own_spelling_where_it_can_say_it(config: Gemma4Config) -> None:
    """Readers older than transformers 5.20 know only `global_head_dim` and its like."""
    data = config.to_hf()
    old = {key: value for key, value in data.items() if key != "per_layer_config"}
    expressible = config.full.k_is_v or config.full.num_kv_heads == config.sliding.num_kv_heads
    assert expressible == ("per_layer_config" not in data)
    assert (parse_config(old) == config) == expressible


@pytest.mark.parametrize("name", NAMES)
def test_transformers_agrees_on_the_published_files(name: str, tmp_path: Path) -> None:
    if "3n" in name:  # the vision part of Gemma 3n needs timm
        text = {**hub(name)["text_config"], "model_type": "gemma3n_text"}
        theirs = read_by_transformers(text, tmp_path).to_dict()
        expected = replace(known(name), media_token_ids=(), eos_token_id=1)
    else:
        theirs, expected = read_by_transformers(hub(name), tmp_path).to_dict(), known(name)
        theirs["eos_token_id"] = hub(name)["eos_token_id"]
    assert parse_config(through_json(theirs)) == expected


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (transformers.Gemma3nTextConfig, {}),
        (transformers.Gemma3nTextConfig, {"num_hidden_layers": 7, "num_kv_shared_layers": 2}),
        (transformers.Gemma4TextConfig, {}),
        (transformers.Gemma4TextConfig, {"num_hidden_layers": 8}),
        (transformers.Gemma4UnifiedTextConfig, {}),
    ],
)
def test_absent_fields_take_transformers_defaults(family: Any, fields: dict[str, Any]) -> None:
    given_only = {"model_type": family.model_type, **fields}
    assert parse_config(given_only) == parse_config(through_json(family(**fields).to_dict()))


# --- spellings ------------------------------------------------------------------------------------


def test_the_old_rope_of_gemma_3n() -> None:
    data = changed(
        "gemma-3n-E2B",
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"type": "linear", "factor": 8.0},
    )
    config = parse_config(data)
    assert isinstance(config, Gemma3nConfig)
    assert config.full.rope == RopeConfig(5e5, False, False, factor=8.0)
    assert config.sliding.rope == RopeConfig(2e4, False, False)


def test_sparsity_may_be_one_number() -> None:
    config = parse_config(changed("gemma-3n-E2B", activation_sparsity_pattern=0.5))
    assert isinstance(config, Gemma3nConfig) and set(config.activation_sparsity) == {0.5}


def test_the_last_layer_of_gemma_4_is_full() -> None:
    config = parse_config(
        changed("gemma-4-E2B", layer_types=[SLIDING] * 4 + [FULL] + [SLIDING] * 30)
    )
    assert isinstance(config, Gemma4Config)
    assert [i for i, kind in enumerate(config.layer_types) if kind == FULL] == [4, 34]


def test_per_layer_config_goes_before_the_hubs_spelling() -> None:
    full = [i for i, kind in enumerate(known("gemma-4-E2B").layer_types) if kind == FULL]
    entry = {"head_dim": 128, "num_key_value_heads": 4}
    config = parse_config(changed("gemma-4-E2B", per_layer_config={f"{i:02}": entry for i in full}))
    assert isinstance(config, Gemma4Config)
    assert (config.full.head_dim, config.full.num_kv_heads) == (128, 4)
    assert (config.sliding.head_dim, config.sliding.num_kv_heads) == (256, 1)
    for nothing in ({}, None):
        config = parse_config(changed("gemma-4-E2B", per_layer_config=nothing))
        assert isinstance(config, Gemma4Config) and config.full.head_dim == 256


def test_kv_heads_of_full_layers_count_only_where_keys_are_values() -> None:
    data = changed("gemma-4-E4B", num_global_key_value_heads=1)
    assert known("gemma-4-E4B") == parse_config(data)
    config = parse_config(
        {**data, "text_config": {**data["text_config"], "attention_k_eq_v": True}}
    )
    assert isinstance(config, Gemma4Config)
    assert (config.full.num_kv_heads, config.full.k_is_v) == (1, True)


def test_what_the_multimodal_level_says_goes_first() -> None:
    data = changed("gemma-4-E2B", tie_word_embeddings=True, eos_token_id=3)
    data["tie_word_embeddings"] = False
    config = parse_config(data)
    assert not config.tie_word_embeddings and config.eos_token_id == (1, 106)
    del data["eos_token_id"], data["tie_word_embeddings"]
    config = parse_config(data)
    assert config.tie_word_embeddings and config.eos_token_id == 3


def test_gemma_4_unified() -> None:
    data = {"model_type": "gemma4_unified", "text_config": {"num_hidden_layers": 12}}
    config = parse_config(data)
    assert isinstance(config, Gemma4Config)
    assert (config.per_layer_size, config.sliding.window) == (0, 1024)
    assert config.max_position_embeddings == 262_144
    data["text_config"]["hidden_size_per_layer_input"] = 8
    with pytest.raises(ConfigError, match="no per-layer inputs"):
        parse_config(data)


# --- what is refused ------------------------------------------------------------------------------

WRONG_ROPE = {SLIDING: {"rope_type": "default"}, FULL: {"rope_type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gemma-4-E2B", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("gemma-4-E2B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is"),
        ("gemma-4-E2B", {"rope_parameters": WRONG_ROPE}, "RoPE of type 'yarn' is not supported"),
        ("gemma-4-E2B", {"rope_parameters": {"rope_theta": 1.0}}, "one entry per type of layer"),
        ("gemma-4-E2B", {"rope_parameters": 3}, "rope_parameters is 3"),
        ("gemma-4-E2B", {"rope_parameters": {FULL: {"rope_type": "linear"}}}, "needs a factor"),
        ("gemma-4-E2B", {"rope_parameters": {FULL: {"factor": 2.0}}}, "factor is 2.0"),
        (
            "gemma-4-E2B",
            {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor is 0.5",
        ),
        ("gemma-4-E2B", {"layer_types": [FULL]}, "1 values for num_hidden_layers 35"),
        ("gemma-4-E2B", {"layer_types": ["linear_attention"] * 35}, "holds 'linear_attention'"),
        ("gemma-4-E2B", {"layer_types": 5}, "layer_types is 5"),
        ("gemma-4-E2B", {"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35 of 35"),
        ("gemma-4-E2B", {"num_kv_shared_layers": 31}, "no full_attention layer comes before"),
        ("gemma-4-E2B", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("gemma-4-E2B", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ("gemma-4-E2B", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma-4-E2B", {"head_dim": 7}, "head_dim is 7"),
        ("gemma-4-E2B", {"num_key_value_heads": 3}, "3 KV heads do not divide 8"),
        ("gemma-4-E2B", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ("gemma-4-E2B", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ("gemma-4-E2B", {"final_logit_softcapping": 0.0}, "above 0, or null"),
        ("gemma-4-E2B", {"attn_logit_softcapping": 50.0}, "unknown field attn_logit_softcapping"),
        ("gemma-4-E2B", {"quantization_config": {"bits": 4}}, "quantised"),
        ("gemma-4-E2B", {"enable_moe_block": True}, "num_experts, top_k_experts, moe_intermediate"),
        (
            "gemma-4-E2B",
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 5,
                "moe_intermediate_size": 8,
            },
            "top_k_experts is 5 of num_experts 4",
        ),
        ("gemma-4-E2B", {"per_layer_config": {"35": {"head_dim": 2}}}, "an entry for layer '35'"),
        ("gemma-4-E2B", {"per_layer_config": {"x": {}}}, "an entry for layer 'x'"),
        ("gemma-4-E2B", {"per_layer_config": {"4": {"head_dim": 2}}}, "full_attention layer 9"),
        ("gemma-4-E2B", {"per_layer_config": {"3": {"head_dim": 2}}}, "sliding_attention layer 3"),
        ("gemma-4-E2B", {"per_layer_config": {"4": {"sliding_window": 2}}}, "sets sliding_window"),
        ("gemma-4-E2B", {"model_type": "llama"}, "text_config is of model_type 'llama'"),
        ("gemma-3n-E2B", {"intermediate_size": [8, 8]}, "intermediate_size has 2 values"),
        ("gemma-3n-E2B", {"intermediate_size": [0] * 30}, "intermediate_size is 0"),
        ("gemma-3n-E2B", {"activation_sparsity_pattern": 1.0}, "holds 1.0"),
        ("gemma-3n-E2B", {"activation_sparsity_pattern": [0.5]}, "has 1 values"),
        ("gemma-3n-E2B", {"altup_active_idx": 4}, "altup_active_idx is 4 of 4 streams"),
        ("gemma-3n-E2B", {"altup_num_inputs": 1}, "altup_num_inputs is 1"),
        ("gemma-3n-E2B", {"laurel_rank": 0}, "laurel_rank is 0"),
        ("gemma-3n-E2B", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0"),
        ("gemma-3n-E2B", {"rope_scaling": {"rope_type": "dynamic"}}, "type 'dynamic'"),
    ],
)
def test_refusals_name_the_value(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(name, **fields))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_refusals_at_the_multimodal_level(name: str) -> None:
    with pytest.raises(ConfigError, match="quantised"):
        parse_config({**hub(name), "quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ConfigError, match="unknown field quantization"):
        parse_config({**hub(name), "quantization": {"bits": 4}})
    with pytest.raises(ConfigError, match="text_config is missing"):
        parse_config({"model_type": hub(name)["model_type"]})


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gemma3n, gemma3n_text, gemma4, gemma4_text"):
        parse_config({"model_type": "gemma2"})


def test_what_the_files_cannot_say() -> None:
    config = known("gemma-4-E2B")
    assert isinstance(config, Gemma4Config)
    turned = RopeConfig(1e4, interleaved=True, inclusive=False)
    with pytest.raises(ConfigError, match="turns halves"):
        replace(config.full, rope=turned)
    with pytest.raises(ConfigError, match="keys as values"):
        replace(config, sliding=replace(config.sliding, k_is_v=True))
    with pytest.raises(ConfigError, match="query heads"):
        replace(config, full=replace(config.full, num_heads=4))
    with pytest.raises(ConfigError, match="no window"):
        replace(config, full=replace(config.full, window=4))
