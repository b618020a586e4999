"""YOCO: a self-decoder with constant-size state, one shared KV, a cross-decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from yocolm.configs.rope import RopeConfig
from yocolm.errors import ConfigError
from yocolm.fields import (
    Fields,
    TokenIds,
    check_even,
    check_grouped,
    check_positive,
    check_trunk,
    default_width,
    ids_to_json,
    parse_halves,
    parse_integer,
    parse_mapping,
    parse_token_id,
    parse_token_ids,
    refuse_mixer,
)


@dataclass(frozen=True)
class RetentionConfig:
    """Gated retention, the recurrent token mixer of a self-decoder layer."""

    num_heads: int
    head_dim: int
    rope: RopeConfig
    gate_logit_normalizer: float = 16.0

    def __post_init__(self) -> None:
        check_positive("retention", num_heads=self.num_heads, head_dim=self.head_dim)
        check_even("retention", self.head_dim)
        if not self.rope.interleaved:
            raise ConfigError(
                "retention RoPE is not interleaved; the architecture rotates neighbouring pairs"
            )
        if not self.gate_logit_normalizer > 0:
            raise ConfigError(
                f"gate_logit_normalizer is {self.gate_logit_normalizer}; it must be above 0"
            )


@dataclass(frozen=True)
class WindowConfig:
    """Sliding-window attention: a token sees itself and the `window - 1` before it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    rope: RopeConfig
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        check_positive("sliding window", num_heads=self.num_heads, head_dim=self.head_dim)
        check_positive("sliding window", num_kv_heads=self.num_kv_heads, window_size=self.window)
        check_even("sliding window", self.head_dim)
        check_grouped("sliding window", self.num_heads, self.num_kv_heads)


@dataclass(frozen=True)
class CrossConfig:
    """Cross-decoder attention over the shared KV; `qk_norm` normalises the queries only."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        check_positive("cross-decoder", num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        check_even("cross-decoder", self.head_dim)
        check_grouped("cross-decoder", self.num_heads, self.num_kv_heads)
        if not self.rope.interleaved:
            raise ConfigError(
                "cross-decoder RoPE is not interleaved; the architecture rotates neighbouring pairs"
            )


@dataclass(frozen=True)
class YocoConfig:
    """A decoder-decoder: `num_self_layers` mixers, one shared KV, then cross-attention layers."""

    model_type: ClassVar[str] = "yoco"
    media_token_ids: ClassVar[tuple[tuple[str, int], ...]] = ()  # text only
    final_softcap: ClassVar[float] = 0.0  # none on the logits

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_self_layers: int
    mixer: RetentionConfig | WindowConfig
    cross: CrossConfig
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: TokenIds = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_trunk(self)
        if not 1 <= self.num_self_layers < self.num_layers:
            raise ConfigError(
                f"num_self_decoder_layers is {self.num_self_layers} of {self.num_layers} layers; "
                "both decoders need at least one layer"
            )
        for half in (self.mixer, self.cross):
            if half.num_heads * half.head_dim != self.hidden_size:
                raise ConfigError(
                    f"{half.num_heads} heads of {half.head_dim} do not make "
                    f"hidden_size {self.hidden_size}"
                )

    @property
    def num_cross_layers(self) -> int:
        return self.num_layers - self.num_self_layers

    @property
    def embed_scale(self) -> float:
        """Factor on the token embeddings before the first layer."""
        return math.sqrt(self.hidden_size)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> YocoConfig:
        """Reads flash-linear-attention's YOCO fields (absent ones take its defaults).

        Raises ConfigError for `gated_deltanet`, `attnres_block_size` and whatever else would
        change the computation.
        """
        fields = Fields("yoco", data)
        fields.refuse_set("attnres_block_size", "residual attention is not supported yet")
        fields.refuse_set("rope_scaling", "scaled RoPE is not supported")
        fields.refuse_set("quantization_config", "quantised weights are not supported")
        fields.expect("hidden_act", "swish", ("swish", "silu"))
        fields.skip("hidden_ratio", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "use_l2warp")
        hidden = fields.integer("hidden_size", 2048)
        layers, self_layers = parse_halves(fields)
        config = cls(
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden,
            intermediate_size=default_width(
                fields.take("intermediate_size", None), data.get("hidden_ratio"), hidden
            ),
            num_layers=layers,
            num_self_layers=self_layers,
            mixer=_mixer_from_hf(fields.take("self_decoder_attn", None), hidden),
            cross=_cross_from_hf(fields.take("cross_decoder_attn", None), hidden),
            norm_eps=fields.number("norm_eps", 1e-6),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            initializer_range=fields.number("initializer_range", 0.02),
            bos_token_id=parse_token_id("bos_token_id", fields.take("bos_token_id", 1)),
            eos_token_id=parse_token_ids("eos_token_id", fields.take("eos_token_id", 2)),
            pad_token_id=parse_token_id("pad_token_id", fields.take("pad_token_id", None)),
        )
        fields.finish()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary, with every key of flash-linear-attention's YOCOConfig."""
        cross = self.cross
        return {
            "architectures": ["YOCOForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "hidden_ratio": 4,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "swish",
            "num_hidden_layers": self.num_layers,
            "num_self_decoder_layers": self.num_self_layers,
            "self_decoder_attn": _mixer_to_hf(self.mixer),
            "cross_decoder_attn": {
                "num_heads": cross.num_heads,
                "num_kv_heads": cross.num_kv_heads,
                "qkv_bias": cross.qkv_bias,
                "qk_norm": cross.qk_norm,
                "rope_theta": cross.rope.theta,
                "rope_inv_freq": "yoco" if cross.rope.inclusive else "fla",
            },
            "max_position_embeddings": self.max_position_embeddings,
            "norm_eps": self.norm_eps,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attnres_block_size": None,
            "fuse_norm": True,
            "fuse_swiglu": True,
            "fuse_cross_entropy": True,
            "use_l2warp": False,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": ids_to_json(self.eos_token_id),
            "pad_token_id": self.pad_token_id,
        }


def _mixer_from_hf(value: Any, hidden: int) -> RetentionConfig | WindowConfig:
    fields = Fields("self_decoder_attn", parse_mapping("self_decoder_attn", value))
    kind = fields.take("type", "gated_deltanet")
    if kind not in ("gated_retention", "swa"):
        refuse_mixer(fields, kind)
    heads, head_dim = fields.heads("num_heads", 6, hidden)
    theta = fields.number("rope_theta", 10000.0)
    inclusive = _inclusive("self_decoder_attn", fields.take("rope_inv_freq", "fla"))
    kv_heads, bias = fields.integer("num_v_heads", heads), fields.boolean("qkv_bias", False)
    window, interleaved = fields.take("window_size", None), fields.take("rope_interleaved", None)
    normalizer = fields.number("gate_logit_normalizer", 16.0)
    # These belong to gated_deltanet and to its kernels; the other two mixers do not read them.
    fields.skip("mode", "use_gate", "expand_v", "use_short_conv", "allow_neg_eigval")
    fields.skip("conv_size", "head_dim")
    fields.finish()
    if kind == "gated_retention":
        rope = RopeConfig(theta, interleaved=True, inclusive=inclusive)
        return RetentionConfig(heads, head_dim, rope, normalizer)
    if window is None:
        raise ConfigError("self_decoder_attn type 'swa' needs window_size, which is not set")
    # flash-linear-attention's swa always rotates halves with the usual frequencies, whatever
    # rope_inv_freq says; our own key rope_interleaved marks a layer that follows rope_inv_freq.
    if interleaved is None:
        rope = RopeConfig(theta, interleaved=False, inclusive=False)
    else:
        rope = RopeConfig(theta, interleaved=bool(interleaved), inclusive=inclusive)
    return WindowConfig(heads, kv_heads, head_dim, parse_integer("window_size", window), rope, bias)


def _mixer_to_hf(mixer: RetentionConfig | WindowConfig) -> dict[str, Any]:
    retention = isinstance(mixer, RetentionConfig)
    fields: dict[str, Any] = {
        "type": "gated_retention" if retention else "swa",
        "mode": "chunk",
        "num_heads": mixer.num_heads,
        "num_v_heads": mixer.num_heads if retention else mixer.num_kv_heads,
        "window_size": None if retention else mixer.window,
        "qkv_bias": False if retention else mixer.qkv_bias,
        "rope_theta": mixer.rope.theta,
        "rope_inv_freq": "yoco" if mixer.rope.inclusive else "fla",
        "gate_logit_normalizer": mixer.gate_logit_normalizer if retention else 16.0,
        # Read by gated_deltanet only; kept so that the file is complete for its other readers.
        "use_gate": True,
        "expand_v": 2.0,
        "use_short_conv": True,
        "allow_neg_eigval": False,
        "conv_size": 4,
        "head_dim": 256,
    }
    if not retention and (mixer.rope.interleaved or mixer.rope.inclusive):
        fields["rope_interleaved"] = mixer.rope.interleaved
    return fields


def _cross_from_hf(value: Any, hidden: int) -> CrossConfig:
    fields = Fields("cross_decoder_attn", parse_mapping("cross_decoder_attn", value))
    heads, head_dim = fields.heads("num_heads", 32, hidden)
    config = CrossConfig(
        num_heads=heads,
        num_kv_heads=fields.integer("num_kv_heads", heads),
        head_dim=head_dim,
        rope=RopeConfig(
            fields.number("rope_theta", 10000.0),
            interleaved=True,
            inclusive=_inclusive("cross_decoder_attn", fields.take("rope_inv_freq", "fla")),
        ),
        qkv_bias=fields.boolean("qkv_bias", False),
        qk_norm=fields.boolean("qk_norm", False),
    )
    fields.finish()
    return config


def _inclusive(owner: str, name: Any) -> bool:
    if name not in ("fla", "yoco"):
        raise ConfigError(f"{owner}: rope_inv_freq {name!r} is not supported; allowed: fla, yoco")
    return name == "yoco"
