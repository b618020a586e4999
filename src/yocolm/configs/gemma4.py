"""Gemma 4 (E2B, E4B, 12B, 26B-A4B, 31B): the text decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from yocolm.configs.gemma import FULL, SLIDING, AttentionConfig, GemmaConfig, LayerType
from yocolm.configs.gemma_fields import (
    read_common,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_ropes,
    text_data,
    write_common,
)
from yocolm.errors import ConfigError
from yocolm.fields import Fields, check_positive, parse_integer, parse_mapping

_MEDIA = {"image": 258_880, "audio": 258_881, "video": 258_884}
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "num_kv_shared_layers": 0,
    "max_position_embeddings": 131_072,
}
_ROPES: dict[LayerType, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_ABSENT = object()


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of `num_experts` MLPs of `intermediate_size`, `top_k` of them for each token."""

    num_experts: int
    top_k: int
    intermediate_size: int

    def __post_init__(self) -> None:
        check_positive(
            "experts", num_experts=self.num_experts, moe_intermediate_size=self.intermediate_size
        )
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top_k_experts is {self.top_k} of num_experts {self.num_experts}; give 1 to "
                f"{self.num_experts}"
            )


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """`wide_mlp` doubles the MLP of shared layers; `experts` run beside the MLP of every layer."""

    model_type: ClassVar[str] = "gemma4_text"

    mlp_size: int
    wide_mlp: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types[-1] != FULL:
            raise ConfigError(
                f"gemma4: the last layer is {self.layer_types[-1]}; it must be {FULL}"
            )
        if self.sliding.k_is_v:
            raise ConfigError("gemma4: only full layers may use their keys as values")

    def mlp_width(self, layer: int) -> int:
        return self.mlp_size * (2 if self.wide_mlp and layer >= self.num_writers else 1)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Gemma4Config:
        """Reads transformers' Gemma4TextConfig, or that inside a Gemma4Config, likewise
        Gemma4Unified's; sizes of full layers as on the hub or in `per_layer_config`.

        Raises ConfigError for kinds of RoPE, activations and whatever else would change the
        computation.
        """
        text = text_data(data, cls.model_type, _MEDIA)
        unified = text["model_type"].startswith("gemma4_unified")
        fields = Fields("gemma4", text)
        if (direction := fields.take("use_bidirectional_attention", None)) not in (None, "vision"):
            raise ConfigError(
                f"use_bidirectional_attention is {direction!r}; text is read causally: only "
                "'vision' and null are supported"
            )
        layers = read_num_layers(fields, 30)
        types = (*read_layer_types(fields, layers, 6)[:-1], FULL)  # as transformers does
        full, sliding = _read_attention(fields, types, 1024 if unified else 512)
        config = cls(
            **read_common(
                fields,
                {**_DEFAULTS, "max_position_embeddings": 262_144} if unified else _DEFAULTS,
                None,
            ),
            layer_types=types,
            full=full,
            sliding=sliding,
            per_layer_size=_read_per_layer_size(fields, unified),
            mlp_size=fields.integer("intermediate_size", 9216),
            wide_mlp=fields.boolean("use_double_wide_mlp", False),
            experts=_read_experts(fields),
        )
        fields.finish()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary, with the hub's `global_head_dim`; only what that spelling
        cannot say (full layers with their own KV heads, yet values of their own) is written as
        `per_layer_config`."""
        full, experts = self.full, self.experts
        fields = {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": self.model_type,
            **write_common(self),
            "intermediate_size": self.mlp_size,
            "use_double_wide_mlp": self.wide_mlp,
            "global_head_dim": full.head_dim,
            "num_global_key_value_heads": full.num_kv_heads if full.k_is_v else None,
            "attention_k_eq_v": full.k_is_v,
            "use_bidirectional_attention": None,
            "enable_moe_block": experts is not None,
            "num_experts": experts.num_experts if experts else None,
            "top_k_experts": experts.top_k if experts else None,
            "moe_intermediate_size": experts.intermediate_size if experts else None,
        }
        if not full.k_is_v and full.num_kv_heads != self.sliding.num_kv_heads:
            entry = {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
            fields["per_layer_config"] = {
                str(i): dict(entry) for i, kind in enumerate(self.layer_types) if kind == FULL
            }
        return fields


def _read_attention(
    fields: Fields, types: Sequence[LayerType], window: int
) -> tuple[AttentionConfig, AttentionConfig]:
    """Attention of full and of sliding layers."""
    heads, kv_heads, head_dim = read_heads(fields, 256, 4)
    k_is_v = fields.boolean("attention_k_eq_v", False)
    full_dim = fields.integer("global_head_dim", 512)
    full_kv = fields.take("num_global_key_value_heads", None)
    ropes = read_ropes(
        parse_mapping("rope_parameters", fields.take("rope_parameters", None)), _ROPES
    )
    sizes: dict[LayerType, tuple[int, int]] = {
        SLIDING: (kv_heads, head_dim),
        FULL: (kv_heads, full_dim),
    }
    if k_is_v and full_kv is not None:
        sizes[FULL] = (parse_integer("num_global_key_value_heads", full_kv), full_dim)
    by_layer = fields.take("per_layer_config", _ABSENT)
    if by_layer is not _ABSENT:
        sizes = _read_by_layer(by_layer, types, kv_heads, head_dim)
    return (
        AttentionConfig(heads, *sizes[FULL], ropes[FULL], k_is_v=k_is_v),
        AttentionConfig(
            heads, *sizes[SLIDING], ropes[SLIDING], window=fields.integer("sliding_window", window)
        ),
    )


def _read_by_layer(
    given: Any, types: Sequence[LayerType], kv_heads: int, head_dim: int
) -> dict[LayerType, tuple[int, int]]:
    """KV heads and head size by type of layer, from transformers' overrides by layer."""
    overrides: dict[int, Mapping[str, Any]] = {}
    for key, entry in parse_mapping("per_layer_config", given).items():
        if not str(key).isdecimal() or not int(key) < len(types):
            raise ConfigError(
                f"per_layer_config has an entry for layer {key!r}; the layers are 0 to "
                f"{len(types) - 1}"
            )
        entry = parse_mapping(f"per_layer_config[{key!r}]", entry)
        if other := sorted(entry.keys() - {"head_dim", "num_key_value_heads"}):
            raise ConfigError(
                f"per_layer_config[{key!r}] sets {', '.join(other)}; only head_dim and "
                "num_key_value_heads may differ by layer"
            )
        overrides[int(key)] = entry
    sizes: dict[LayerType, tuple[int, int]] = {}
    for layer, kind in enumerate(types):
        entry = overrides.get(layer, {})
        size = (
            parse_integer("num_key_value_heads", entry.get("num_key_value_heads", kv_heads)),
            parse_integer("head_dim", entry.get("head_dim", head_dim)),
        )
        if sizes.setdefault(kind, size) != size:
            raise ConfigError(
                f"per_layer_config gives {kind} layer {layer} {size[0]} KV heads of {size[1]}, "
                f"but earlier ones {sizes[kind][0]} of {sizes[kind][1]}; all layers of a type "
                "must agree"
            )
    return {SLIDING: (kv_heads, head_dim), **sizes}


def _read_per_layer_size(fields: Fields, unified: bool) -> int:
    """Width of the per-layer inputs, 0 for none; Gemma 4 Unified has none."""
    size = fields.take("hidden_size_per_layer_input", 0 if unified else 256)
    size = 0 if size is None else parse_integer("hidden_size_per_layer_input", size)
    if unified and size:
        raise ConfigError(
            f"hidden_size_per_layer_input is {size}; Gemma 4 Unified has no per-layer inputs"
        )
    return size


def _read_experts(fields: Fields) -> ExpertsConfig | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    values = {name: fields.take(name, None) for name in names}
    fields.skip("expert_intermediate_size")  # an old name of the last, null where it is written
    if not fields.boolean("enable_moe_block", False):
        return None
    if absent := [name for name, value in values.items() if value is None]:
        raise ConfigError(f"enable_moe_block is true, but {', '.join(absent)} is not given")
    experts = [parse_integer(name, value) for name, value in values.items()]
    return ExpertsConfig(*experts)
