"""Configurations: what is read, what is written, what is refused by name."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from references import DATA, NATIVE
from yocolm.config import (
    LlamaConfig,
    RetentionConfig,
    RopeConfig,
    WindowConfig,
    YocoConfig,
    parse_config,
)
from yocolm.errors import ConfigError
from yocolm.models.presets import PRESETS, preset


def fields(name: str) -> dict[str, Any]:
    return json.loads((DATA / name / "config.json").read_text())


@pytest.mark.parametrize("name", NATIVE)
def test_reading_what_was_written_gives_the_same(name: str) -> None:
    config = parse_config(fields(name))
    assert parse_config(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_file(name: str) -> None:
    assert parse_config(preset(name).to_hf()) == preset(name)


def test_retention_facts() -> None:
    config = parse_config(fields("yoco-fla-gret-tiny"))
    assert isinstance(config, YocoConfig)
    assert (config.num_self_layers, config.num_cross_layers) == (2, 3)
    assert config.mixer == RetentionConfig(2, 32, RopeConfig(10000.0, True, True), 16.0)
    assert config.cross.rope == RopeConfig(640000.0, True, True)
    assert config.embed_scale == 8.0


def test_window_layers_rotate_halves_whatever_the_file_says_of_frequencies() -> None:
    data = fields("yoco-fla-swa-tiny")
    for inv_freq in ("fla", "yoco"):
        data["self_decoder_attn"]["rope_inv_freq"] = inv_freq
        config = parse_config(data)
        assert isinstance(config, YocoConfig) and isinstance(config.mixer, WindowConfig)
        assert config.mixer.rope == RopeConfig(10000.0, interleaved=False, inclusive=False)
        assert (config.mixer.num_kv_heads, config.mixer.window) == (2, 48)
        assert "rope_interleaved" not in config.to_hf()["self_decoder_attn"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_every_rotation_of_window_layers_can_be_stored(interleaved: bool, inclusive: bool) -> None:
    config = parse_config(fields("yoco-fla-swa-tiny"))
    assert isinstance(config, YocoConfig)
    rope = RopeConfig(500.0, interleaved, inclusive)
    config = replace(config, mixer=replace(config.mixer, rope=rope))
    assert parse_config(config.to_hf()) == config


def test_absent_fields_take_the_reference_implementations_defaults() -> None:
    config = parse_config(
        {
            "model_type": "yoco",
            "hidden_size": 1024,
            "self_decoder_attn": {"type": "gated_retention", "num_heads": 4, "num_v_heads": None},
        }
    )
    assert isinstance(config, YocoConfig)
    assert (config.num_layers, config.num_self_layers, config.vocab_size) == (21, 10, 32000)
    assert config.intermediate_size == 2816  # 8/3 of 1024, up to a multiple of 256
    assert (config.cross.num_heads, config.cross.num_kv_heads) == (32, 32)
    assert not config.cross.rope.inclusive
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba.*llama, yoco"),
        ({"model_type": None}, "None.*llama, yoco"),
        ({"attnres_block_size": 4}, "attnres_block_size is 4"),
        ({"hidden_act": "powlu"}, "hidden_act 'powlu'"),
        ({"num_self_decoder_layers": 5}, "num_self_decoder_layers is 5 of 5"),
        ({"num_self_decoder_layers": 0}, "num_self_decoder_layers is 0"),
        ({"hidden_size": 65}, "2 heads do not divide hidden_size 65"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .* at most 10000"),
        ({"num_self_decoder_layers": 10**9}, "num_self_decoder_layers is 1000000000; .*10000"),
        ({"hidden_size": 10**400}, "hidden_size is above 10.30; it must be at most 1000000"),
        ({"intermediate_size": 10**7}, "intermediate_size is 10000000; .* at most 1000000"),
        ({"vocab_size": 10**8}, "vocab_size is 100000000; it must be at most 10000000"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648; .*2147483647"),
        ({"norm_eps": 10**400}, "norm_eps is a number of more than 300 digits"),
        ({"norm_eps": float("inf")}, "norm_eps is inf; it must be finite"),
        ({"intermediate_size": None, "hidden_ratio": "x"}, "hidden_ratio is 'x'"),
        ({"intermediate_size": None, "hidden_ratio": 0}, "hidden_ratio is 0"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; it must be a whole number"),
        ({"eos_token_id": [2, True]}, "eos_token_id is True"),
        ({"bos_token_id": 1.5}, "bos_token_id is 1.5"),
        ({"norm_eps": "small"}, "norm_eps is 'small'"),
        ({"mystery": 3}, "unknown field mystery"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"self_decoder_attn": 7}, "self_decoder_attn is 7"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(fields("yoco-fla-gret-tiny") | change)


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("self_decoder_attn", {"type": "gated_deltanet"}, "gated_deltanet.*gated_retention, swa"),
        ("self_decoder_attn", {"type": "swa"}, "window_size"),
        ("self_decoder_attn", {"rope_inv_freq": "ntk"}, "rope_inv_freq 'ntk'"),
        ("self_decoder_attn", {"gate_logit_normalizer": 0}, "gate_logit_normalizer is 0"),
        ("self_decoder_attn", {"num_heads": 64}, "head_dim is 1;"),
        ("self_decoder_attn", {"num_heads": None}, "6 heads do not.*not given, and 6 is.*default"),
        ("self_decoder_attn", {"type": "swa", "window_size": 2**31}, "window_size is 2147483648"),
        ("cross_decoder_attn", {"num_heads": 10**7}, "num_heads is 10000000; .* at most 1000000"),
        ("cross_decoder_attn", {"num_kv_heads": 3}, "3 KV heads do not divide 4"),
        ("cross_decoder_attn", {"rope_theta": -1}, "theta is -1"),
        ("cross_decoder_attn", {"window": 5}, "unknown field window"),
    ],
)
def test_refused_inside_a_decoder(part: str, change: dict[str, Any], named: str) -> None:
    data = fields("yoco-fla-gret-tiny")
    data[part] |= change
    with pytest.raises(ConfigError, match=named):
        parse_config(data)


def test_default_mixer_of_the_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="gated_deltanet") as error:
        parse_config({"model_type": "yoco"})
    assert "type is not given, and gated_deltanet is the format's default" in str(error.value)
    assert "{type: gated_retention, num_heads: 4}" in str(error.value)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"num_hidden_layers": 4}, "num_self_decoder_layers is not given, and 10 is"),
        ({"num_self_decoder_layers": 30}, "num_hidden_layers is not given, and 21 is"),
    ],
)
def test_defaults_that_do_not_fit_say_that_they_are_defaults(
    given: dict[str, int], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"{missing} the format's default: give num_"):
        parse_config({"model_type": "yoco", **given})
    with pytest.raises(ConfigError) as error:
        parse_config({"model_type": "yoco", "num_self_decoder_layers": 4, "num_hidden_layers": 4})
    assert "default" not in str(error.value)
    with pytest.raises(ConfigError, match="32 heads.*num_attention_heads is not given, and 32"):
        parse_config({"model_type": "llama", "hidden_size": 80})


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 500000, "rope_scaling": {"type": "default"}},
    ],
)
def test_llama_rope_spellings(spelling: dict[str, Any]) -> None:
    config = parse_config({"model_type": "llama", **spelling})
    assert isinstance(config, LlamaConfig)
    assert config.rope == RopeConfig(5e5, interleaved=False, inclusive=False)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_scaled_rope_is_refused_by_name(scaling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="llama3|linear|yarn"):
        parse_config({"model_type": "llama", **scaling})


def test_llama_defaults_and_several_eos_ids() -> None:
    config = parse_config({"model_type": "llama", "eos_token_id": [2, 7], "hidden_size": 256})
    assert isinstance(config, LlamaConfig)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 8)
    assert config.eos_token_id == (2, 7)
    assert config.to_hf()["eos_token_id"] == [2, 7]


def test_unknown_presets_list_the_known_ones() -> None:
    assert preset("LLAMA-3b") == preset("llama-3B")
    with pytest.raises(ConfigError, match="'7T'.*160M.*llama-13B"):
        preset("7T")


def test_package_needs_no_torch_until_it_is_used() -> None:
    code = "import sys, yocolm, yocolm.config, yocolm.models.spec, yocolm.models.presets\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
