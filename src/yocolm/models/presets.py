"""Named model sizes: the YOCO paper's scaling curve and its 3B model, each with a Llama twin, and
the sizes of Gemma 3n and Gemma 4 as published.

Widths, layers and heads are those of the paper's scaling curve; FFN width is 8/3 of the width,
rounded up to a multiple of 256. Choices that the paper leaves open are made here once:

* KV heads: 8 of 24 for 3B as published; a third of the heads where there are 12, else a quarter.
* Embeddings are tied on the scaling curve, so that "160M" counts everything; 3B is untied.
* The vocabulary is cl100k_base behind four special tokens, padded to a multiple of 8.
* Context is a limit that requests are checked against; RoPE itself has none.

A twin ("llama-160M") has the same width, layers, heads, KV heads, FFN, vocabulary and tying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from yocolm.config import (
    CrossConfig,
    LlamaConfig,
    ModelConfig,
    RetentionConfig,
    RopeConfig,
    YocoConfig,
    parse_config,
)
from yocolm.errors import ConfigError

CL100K_VOCAB_SIZE = 100288
BOS_ID, PAD_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True)
class _Size:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = True
    context: int = 131_072


_SIZES = {
    "160M": _Size(768, 12, 12, 4, 2048),
    "400M": _Size(1024, 24, 16, 4, 2816),
    "830M": _Size(1536, 24, 12, 4, 4096),
    "1.4B": _Size(2048, 24, 16, 4, 5632),
    "2.7B": _Size(2560, 32, 20, 5, 6912),
    "3B": _Size(3072, 26, 24, 8, 8192, tied=False, context=1_048_576),
    "6.8B": _Size(4096, 32, 32, 8, 11008),
    "13B": _Size(5120, 40, 40, 10, 13824),
}
_TWIN = "llama-"


def _gemma_3n(layers: int, width: int, shared: int) -> dict[str, Any]:
    """What differs from the defaults of transformers' Gemma3nTextConfig."""
    return {
        "model_type": "gemma3n_text",
        "num_hidden_layers": layers,
        "intermediate_size": width,
        "num_kv_shared_layers": shared,
        "eos_token_id": [1, 106],
        "image_token_id": 262_145,
        "audio_token_id": 262_273,
    }


def _gemma_4(hidden: int, width: int, **fields: Any) -> dict[str, Any]:
    """What differs from the defaults of transformers' Gemma4TextConfig."""
    return {
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "intermediate_size": width,
        "final_logit_softcapping": 30.0,
        "eos_token_id": [1, 106],
        "image_token_id": 258_880,
        "audio_token_id": 258_881,
        "video_token_id": 258_884,
        **fields,
    }


def _large_gemma_4(hidden: int, width: int, **fields: Any) -> dict[str, Any]:
    """The sizes without shared layers and per-layer inputs, whose full layers use keys as
    values."""
    return _gemma_4(
        hidden,
        width,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=1024,
        max_position_embeddings=262_144,
        **fields,
    )


_FOUR_TO_ONE = ["sliding_attention"] * 4 + ["full_attention"]
_GEMMA = {
    "gemma-3n-E2B": _gemma_3n(30, 8192, 10),
    "gemma-3n-E4B": _gemma_3n(35, 16_384, 15),
    "gemma-4-E2B": _gemma_4(
        1536,
        6144,
        num_hidden_layers=35,
        layer_types=_FOUR_TO_ONE * 7,
        num_kv_shared_layers=20,
        num_key_value_heads=1,
        use_double_wide_mlp=True,
    ),
    "gemma-4-E4B": _gemma_4(
        2560, 10_240, num_hidden_layers=42, num_kv_shared_layers=18, num_key_value_heads=2
    ),
    "gemma-4-26B-A4B": _large_gemma_4(
        2816,
        2112,
        num_hidden_layers=30,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31B": _large_gemma_4(
        5376,
        21_504,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
    ),
}

PRESETS = (*_SIZES, *(_TWIN + name for name in _SIZES), *_GEMMA)


def preset(name: str) -> ModelConfig:
    """The configuration called `name` (any case), e.g. "160M" or "llama-160M".

    Raises ConfigError listing the known names.
    """
    known = {known.lower(): known for known in PRESETS}.get(name.lower())
    if known is None:
        raise ConfigError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
    if known in _GEMMA:
        return parse_config(_GEMMA[known])
    if known.startswith(_TWIN):
        return _llama(_SIZES[known.removeprefix(_TWIN)])
    return _yoco(_SIZES[known])


def llama_twin(config: YocoConfig) -> LlamaConfig:
    """The Transformer of the same layout, whose every layer owns its KV."""
    cross = config.cross
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=cross.num_heads,
        num_kv_heads=cross.num_kv_heads,
        head_dim=cross.head_dim,
        rope=RopeConfig(cross.rope.theta, interleaved=False, inclusive=False),
        norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _yoco(size: _Size) -> YocoConfig:
    rope = RopeConfig(theta=10000.0, interleaved=True, inclusive=True)
    head_dim = size.hidden // size.heads
    return YocoConfig(
        vocab_size=CL100K_VOCAB_SIZE,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_layers=size.layers,
        num_self_layers=size.layers // 2,
        mixer=RetentionConfig(size.heads, head_dim, rope),
        cross=CrossConfig(size.heads, size.kv_heads, head_dim, rope),
        norm_eps=1e-5,
        tie_word_embeddings=size.tied,
        max_position_embeddings=size.context,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def _llama(size: _Size) -> LlamaConfig:
    return llama_twin(_yoco(size))
