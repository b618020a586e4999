"""`config.json` of Gemma 3n and Gemma 4: the fields that both families share, in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from yocolm.configs.gemma import FULL, SLIDING, GemmaConfig, LayerType
from yocolm.configs.rope import RopeConfig
from yocolm.errors import ConfigError
from yocolm.fields import (
    Fields,
    check_positive,
    ids_to_json,
    parse_mapping,
    parse_number,
    parse_token_id,
    parse_token_ids,
)

ACTIVATION = "gelu_pytorch_tanh"
_MEDIA = ("image", "audio", "video")
_EITHER_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
# Of a multimodal config.json: none of these is about the text model.
_MULTIMODAL = ("vision_config", "audio_config", "initializer_range")
_MULTIMODAL_ENDINGS = (
    "_token_id",
    "_token_index",
    "_tokens_per_image",
    "_per_video_frame",
    "_ms_per_token",
)
_QUANTISED = "quantised weights are not supported"

Value = TypeVar("Value")


def text_data(data: Mapping[str, Any], default: str, media: Mapping[str, int]) -> dict[str, Any]:
    """The text model's fields; those of a multimodal model are its `text_config`.

    What the multimodal level says of token ids and tying goes before what the text level says.
    `default` is the model type where none is given, `media` are the family's default ids of the
    tokens that stand for an image, a sound and a video.
    """
    name = data.get("model_type", default)
    if name.endswith("_text"):
        return {"model_type": name, **data}
    fields = Fields(name, data)
    fields.refuse_set("quantization_config", _QUANTISED)
    inner = fields.take("text_config", None)
    if inner is None:
        raise ConfigError(f"{name}: text_config is missing; it describes the text model")
    text = {"model_type": f"{name}_text", **parse_mapping("text_config", inner)}
    if text["model_type"] != f"{name}_text":
        raise ConfigError(
            f"{name}: text_config is of model_type {text['model_type']!r}; it must be {name}_text"
        )
    for key in _EITHER_LEVEL:
        if (value := fields.take(key, None)) is not None:
            text[key] = value
    for kind, token in media.items():
        text[f"{kind}_token_id"] = fields.take(f"{kind}_token_id", token)
    fields.skip(*_MULTIMODAL, *(key for key in data if key.endswith(_MULTIMODAL_ENDINGS)))
    fields.finish()
    return text


def read_common(fields: Fields, defaults: Mapping[str, int], softcap: float | None) -> dict:
    """Keyword arguments of GemmaConfig that both families spell alike.

    `defaults` are transformers' for the whole numbers, `softcap` is that of the logits.
    """
    fields.refuse_set("quantization_config", _QUANTISED)
    fields.expect("hidden_activation", ACTIVATION, (ACTIVATION,))
    fields.expect("hidden_act", ACTIVATION, (ACTIVATION,))
    cap = fields.take("final_logit_softcapping", softcap)
    if cap is not None and not parse_number("final_logit_softcapping", cap) > 0:
        raise ConfigError(f"final_logit_softcapping is {cap}; give a number above 0, or null")
    media = {
        kind: parse_token_id(f"{kind}_token_id", fields.take(f"{kind}_token_id", None))
        for kind in _MEDIA
    }
    return {
        "vocab_size": fields.integer("vocab_size", defaults["vocab_size"]),
        "hidden_size": fields.integer("hidden_size", defaults["hidden_size"]),
        "num_kv_shared_layers": fields.integer(
            "num_kv_shared_layers", defaults["num_kv_shared_layers"]
        ),
        "per_layer_vocab_size": fields.integer("vocab_size_per_layer_input", 262_144),
        "final_softcap": 0.0 if cap is None else parse_number("final_logit_softcapping", cap),
        "attention_bias": fields.boolean("attention_bias", False),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", True),
        "max_position_embeddings": fields.integer(
            "max_position_embeddings", defaults["max_position_embeddings"]
        ),
        "initializer_range": fields.number("initializer_range", 0.02),
        "bos_token_id": parse_token_id("bos_token_id", fields.take("bos_token_id", 2)),
        "eos_token_id": parse_token_ids("eos_token_id", fields.take("eos_token_id", 1)),
        "pad_token_id": parse_token_id("pad_token_id", fields.take("pad_token_id", 0)),
        "media_token_ids": tuple((kind, id) for kind, id in media.items() if id is not None),
    }


def read_num_layers(fields: Fields, default: int) -> int:
    """Number of layers, at least 1: lists of one value per layer are built from it."""
    layers = fields.integer("num_hidden_layers", default)
    check_positive("gemma", num_hidden_layers=layers)
    return layers


def read_layer_types(fields: Fields, layers: int, period: int) -> tuple[LayerType, ...]:
    """`layer_types`, or else full attention in every `period`-th layer."""
    given = fields.take("layer_types", None)
    if given is None:
        return tuple(SLIDING if (i + 1) % period else FULL for i in range(layers))
    fields.skip("sliding_window_pattern")  # some writers add it; layer_types says it all
    known: tuple[LayerType, ...] = (FULL, SLIDING)
    for kind in (types := read_list("layer_types", given, layers)):
        if kind not in known:
            raise ConfigError(
                f"layer_types holds {kind!r}; supported types of layers: {', '.join(known)}"
            )
    return tuple(types)


def read_list(name: str, value: Any, layers: int) -> list[Any]:
    """A list of one value per layer."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} is {value!r}; it must be a list of one value per layer")
    if len(value) != layers:
        raise ConfigError(
            f"{name} has {len(value)} values for num_hidden_layers {layers}; give one per layer"
        )
    return list(value)


def read_each(
    name: str, value: Any, layers: int, parse: Callable[[str, Any], Value]
) -> tuple[Value, ...]:
    """One value for all layers, or a list of one per layer."""
    if isinstance(value, (list, tuple)):
        return tuple(parse(name, item) for item in read_list(name, value, layers))
    return (parse(name, value),) * layers


def read_ropes(
    given: Mapping[str, Any], defaults: Mapping[LayerType, Mapping[str, Any]]
) -> dict[LayerType, RopeConfig]:
    """RoPE by type of layer, from `rope_parameters`; an absent type takes its default."""
    if unknown := sorted(given.keys() - defaults.keys()):
        raise ConfigError(
            f"rope_parameters holds {', '.join(map(str, unknown))}; it must have one entry per "
            f"type of layer: {', '.join(defaults)}"
        )
    entries = {kind: parse_mapping(f"rope_parameters of {kind}", given.get(kind)) for kind in given}
    return {
        kind: _read_rope(f"rope_parameters of {kind}", entries.get(kind) or default, default)
        for kind, default in defaults.items()
    }


def _read_rope(owner: str, data: Mapping[str, Any], default: Mapping[str, Any]) -> RopeConfig:
    fields = Fields(owner, data)
    old_kind = fields.take("type", None)
    kind = fields.take("rope_type", None) or old_kind or "default"
    if kind not in ("default", "linear", "proportional"):
        raise ConfigError(
            f"{owner}: RoPE of type {kind!r} is not supported; known types: default, linear, "
            "proportional"
        )
    theta = fields.number("rope_theta", default["rope_theta"])
    fraction = fields.number("partial_rotary_factor", 1.0)
    factor = fields.number("factor", 1.0)
    fields.finish()
    if kind == "linear" and data.get("factor") is None:
        raise ConfigError(f"{owner}: RoPE of type 'linear' needs a factor, which is not given")
    if kind == "default" and factor != 1.0:
        raise ConfigError(f"{owner}: factor is {factor}, but RoPE of type 'default' has none")
    if kind != "proportional" and fraction != 1.0:
        raise ConfigError(
            f"{owner}: partial_rotary_factor is {fraction}; only RoPE of type 'proportional' may "
            f"leave pairs unturned, not {kind!r}"
        )
    return RopeConfig(theta, interleaved=False, inclusive=False, fraction=fraction, factor=factor)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    kind = "proportional" if rope.fraction != 1 else "linear" if rope.factor != 1 else "default"
    entry: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.theta}
    if rope.fraction != 1:
        entry["partial_rotary_factor"] = rope.fraction
    if rope.factor != 1:
        entry["factor"] = rope.factor
    return entry


def write_common(config: GemmaConfig) -> dict[str, Any]:
    """The fields of the text model that both families spell alike."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hidden_activation": ACTIVATION,
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "num_attention_heads": config.full.num_heads,
        "num_key_value_heads": config.sliding.num_kv_heads,
        "head_dim": config.sliding.head_dim,
        "sliding_window": config.sliding.window,
        "rope_parameters": {
            FULL: write_rope(config.full.rope),
            SLIDING: write_rope(config.sliding.rope),
        },
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "hidden_size_per_layer_input": config.per_layer_size,
        "vocab_size_per_layer_input": config.per_layer_vocab_size,
        "final_logit_softcapping": config.final_softcap or None,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ids_to_json(config.eos_token_id),
        "pad_token_id": config.pad_token_id,
        **{f"{kind}_token_id": id for kind, id in config.media_token_ids},
    }


def read_heads(fields: Fields, head_dim: int, kv_heads: int) -> tuple[int, int, int]:
    """Query heads, KV heads and head size that hold where no layer says otherwise."""
    return (
        fields.integer("num_attention_heads", 8),
        fields.integer("num_key_value_heads", kv_heads),
        fields.integer("head_dim", head_dim),
    )
