"""The plain Transformer: every layer owns its KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from yocolm.configs.rope import RopeConfig
from yocolm.fields import (
    Fields,
    TokenIds,
    check_even,
    check_grouped,
    check_positive,
    check_trunk,
    ids_to_json,
    parse_integer,
    parse_rope_theta,
    parse_token_id,
    parse_token_ids,
)


@dataclass(frozen=True)
class LlamaConfig:
    """The plain Transformer: every layer owns its KV (transformers' LlamaForCausalLM)."""

    model_type: ClassVar[str] = "llama"
    media_token_ids: ClassVar[tuple[tuple[str, int], ...]] = ()  # text only
    final_softcap: ClassVar[float] = 0.0  # none on the logits

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: TokenIds = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_trunk(self)
        check_positive("llama", num_attention_heads=self.num_heads, head_dim=self.head_dim)
        check_positive("llama", num_key_value_heads=self.num_kv_heads)
        check_even("llama", self.head_dim)
        check_grouped("llama", self.num_heads, self.num_kv_heads)

    @property
    def embed_scale(self) -> float:
        """Factor on the token embeddings before the first layer."""
        return 1.0

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """Reads transformers' LlamaConfig, with `rope_theta` or `rope_parameters`.

        Raises ConfigError for RoPE scaling and whatever else would change the computation.
        """
        fields = Fields("llama", data)
        fields.refuse_set("quantization_config", "quantised weights are not supported")
        fields.expect("hidden_act", "silu", ("silu", "swish"))
        hidden = fields.integer("hidden_size", 4096)
        heads = fields.integer("num_attention_heads", 32)
        head_dim = fields.take("head_dim", None)
        if head_dim is None:
            heads, head_dim = fields.heads("num_attention_heads", 32, hidden)
        kv_heads = fields.take("num_key_value_heads", None)
        rope = RopeConfig(parse_rope_theta(fields), interleaved=False, inclusive=False)
        config = cls(
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=fields.integer("num_hidden_layers", 32),
            num_heads=heads,
            num_kv_heads=heads
            if kv_heads is None
            else parse_integer("num_key_value_heads", kv_heads),
            head_dim=parse_integer("head_dim", head_dim),
            rope=rope,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            initializer_range=fields.number("initializer_range", 0.02),
            bos_token_id=parse_token_id("bos_token_id", fields.take("bos_token_id", 1)),
            eos_token_id=parse_token_ids("eos_token_id", fields.take("eos_token_id", 2)),
            pad_token_id=parse_token_id("pad_token_id", fields.take("pad_token_id", None)),
        )
        fields.finish()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary, readable by transformers 4 (`rope_theta`) and 5."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope.theta,
            "rope_parameters": {"rope_theta": self.rope.theta, "rope_type": "default"},
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.norm_eps,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "mlp_bias": self.mlp_bias,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": ids_to_json(self.eos_token_id),
            "pad_token_id": self.pad_token_id,
        }
