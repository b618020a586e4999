"""Gemma 3n (E2B, E4B): the text decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from yocolm.configs.gemma import FULL, SLIDING, AttentionConfig, GemmaConfig, LayerType
from yocolm.configs.gemma_fields import (
    read_common,
    read_each,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_ropes,
    text_data,
    write_common,
    write_rope,
)
from yocolm.configs.rope import RopeConfig
from yocolm.errors import ConfigError
from yocolm.fields import Fields, check_positive, parse_integer, parse_mapping, parse_number

_MEDIA = {"image": 262_145, "audio": 262_273}
_DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "num_kv_shared_layers": 15,
    "max_position_embeddings": 32_768,
}


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(GemmaConfig):
    """`activation_sparsity` is, per layer, the share of MLP activations that a Gaussian estimate
    sets to zero (0: none). AltUp keeps `altup_num_inputs` streams, of which a layer computes the
    `altup_active`-th and predicts the others."""

    model_type: ClassVar[str] = "gemma3n_text"

    mlp_widths: tuple[int, ...]
    activation_sparsity: tuple[float, ...]
    altup_num_inputs: int = 4
    altup_active: int = 0
    altup_coef_clip: float | None = 120.0
    altup_correct_scale: bool = True
    laurel_rank: int = 64

    def __post_init__(self) -> None:
        layers = self.num_layers
        if not len(self.mlp_widths) == len(self.activation_sparsity) == layers:
            raise ConfigError(
                f"gemma3n: {len(self.mlp_widths)} values of intermediate_size, "
                f"{len(self.activation_sparsity)} of activation_sparsity_pattern, {layers} layers"
            )
        super().__post_init__()
        for width in self.mlp_widths:
            check_positive("gemma3n", intermediate_size=width)
        for share in self.activation_sparsity:
            if not 0 <= share < 1:
                raise ConfigError(
                    f"activation_sparsity_pattern holds {share}; give 0 (none) to below 1"
                )
        check_positive(
            "gemma3n",
            laurel_rank=self.laurel_rank,
            hidden_size_per_layer_input=self.per_layer_size,
        )
        streams = self.altup_num_inputs
        if streams < 2:
            raise ConfigError(f"altup_num_inputs is {streams}; it must be at least 2")
        if not 0 <= self.altup_active < streams:
            raise ConfigError(
                f"altup_active_idx is {self.altup_active} of {streams} streams; give 0 to "
                f"{streams - 1}"
            )
        if (self.full.num_kv_heads, self.full.head_dim, self.full.k_is_v) != (
            self.sliding.num_kv_heads,
            self.sliding.head_dim,
            False,
        ):
            raise ConfigError("gemma3n: full and sliding layers must have the same heads")

    def mlp_width(self, layer: int) -> int:
        return self.mlp_widths[layer]

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Gemma3nConfig:
        """Reads transformers' Gemma3nTextConfig, or that inside a Gemma3nConfig.

        Raises ConfigError for kinds of RoPE, activations and whatever else would change the
        computation.
        """
        fields = Fields("gemma3n", text_data(data, cls.model_type, _MEDIA))
        fields.skip("query_pre_attn_scalar", "altup_lr_multiplier")  # never read by the model
        layers = read_num_layers(fields, 35)
        heads = read_heads(fields, 256, 2)
        ropes = _read_ropes(fields)
        clip = fields.take("altup_coef_clip", 120.0)
        config = cls(
            **read_common(fields, _DEFAULTS, 30.0),
            layer_types=read_layer_types(fields, layers, 5),
            full=AttentionConfig(*heads, ropes[FULL]),
            sliding=AttentionConfig(
                *heads, ropes[SLIDING], window=fields.integer("sliding_window", 512)
            ),
            per_layer_size=fields.integer("hidden_size_per_layer_input", 256),
            mlp_widths=read_each(
                "intermediate_size", fields.take("intermediate_size", 16_384), layers, parse_integer
            ),
            activation_sparsity=_read_sparsity(fields, layers),
            altup_num_inputs=fields.integer("altup_num_inputs", 4),
            altup_active=fields.integer("altup_active_idx", 0),
            altup_coef_clip=None if clip is None else parse_number("altup_coef_clip", clip),
            altup_correct_scale=fields.boolean("altup_correct_scale", True),
            laurel_rank=fields.integer("laurel_rank", 64),
        )
        fields.finish()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary, readable by transformers 4 (`rope_theta`) and 5."""
        full = write_rope(self.full.rope)
        scaling = {key: value for key, value in full.items() if key != "rope_theta"}
        return {
            "architectures": ["Gemma3nForCausalLM"],
            "model_type": self.model_type,
            **write_common(self),
            "intermediate_size": list(self.mlp_widths),
            "activation_sparsity_pattern": list(self.activation_sparsity),
            "altup_num_inputs": self.altup_num_inputs,
            "altup_active_idx": self.altup_active,
            "altup_coef_clip": self.altup_coef_clip,
            "altup_correct_scale": self.altup_correct_scale,
            "laurel_rank": self.laurel_rank,
            "rope_theta": self.full.rope.theta,
            "rope_local_base_freq": self.sliding.rope.theta,
            "rope_scaling": None if full["rope_type"] == "default" else scaling,
        }


def _read_ropes(fields: Fields) -> dict[LayerType, RopeConfig]:
    """RoPE in either spelling; the old one has a base per type and scales full layers only."""
    given = dict(parse_mapping("rope_parameters", fields.take("rope_parameters", None)))
    scaling = parse_mapping("rope_scaling", fields.take("rope_scaling", None))
    if scaling:
        entry = parse_mapping(f"rope_parameters of {FULL}", given.get(FULL))
        given[FULL] = {**entry, **scaling}
    defaults: dict[LayerType, dict[str, Any]] = {
        FULL: {"rope_theta": fields.number("rope_theta", 1e6)},
        SLIDING: {"rope_theta": fields.number("rope_local_base_freq", 1e4)},
    }
    return read_ropes(given, defaults)


def _read_sparsity(fields: Fields, layers: int) -> tuple[float, ...]:
    given = fields.take("activation_sparsity_pattern", None)
    if given is None:  # transformers': the first ten of more than ten layers
        sparse = 10 if layers > 10 else 0
        return (0.95,) * sparse + (0.0,) * (layers - sparse)
    return read_each("activation_sparsity_pattern", given, layers, parse_number)
