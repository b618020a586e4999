"""What Gemma 3n and Gemma 4 have in common: two kinds of attention layers, and shared KV.

The last `num_kv_shared_layers` layers own no keys and values: each reads those of the last layer
of its own type before them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from yocolm.configs.rope import RopeConfig
from yocolm.errors import ConfigError
from yocolm.fields import TokenIds, check_even, check_grouped, check_positive, check_trunk

LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"


@dataclass(frozen=True)
class AttentionConfig:
    """Heads of one type of layer; `window` is 0 for full attention, else it includes the token.

    `k_is_v`: values are the projected keys before their norm; there is no projection of values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int = 0
    k_is_v: bool = False

    def __post_init__(self) -> None:
        kind = SLIDING if self.window else FULL
        check_positive(kind, num_attention_heads=self.num_heads, head_dim=self.head_dim)
        check_positive(kind, num_key_value_heads=self.num_kv_heads)
        check_even(kind, self.head_dim)
        check_grouped(kind, self.num_heads, self.num_kv_heads)
        if self.rope.interleaved or self.rope.inclusive:
            raise ConfigError(f"{kind}: Gemma's RoPE turns halves, with the usual frequencies")


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ABC):
    """Fields of both families; layers are numbered from 0.

    `per_layer_size` is the width of the per-layer inputs (0: the model has none), looked up in a
    table of `per_layer_vocab_size` rows. `final_softcap` of 0 is none. `media_token_ids` are the
    tokens that stand for an image, a sound or a video, which text must not contain.
    """

    model_type: ClassVar[str]

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    num_kv_shared_layers: int
    full: AttentionConfig
    sliding: AttentionConfig
    per_layer_size: int
    per_layer_vocab_size: int
    final_softcap: float = 0.0
    attention_bias: bool = False
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 131_072
    initializer_range: float = 0.02
    bos_token_id: int | None = 2
    eos_token_id: TokenIds = 1
    pad_token_id: int | None = 0
    media_token_ids: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_positive(self.model_type, num_hidden_layers=self.num_layers)
        check_trunk(self)
        self._check_attention()
        shared, layers = self.num_kv_shared_layers, self.num_layers
        if not 0 <= shared < layers:
            raise ConfigError(
                f"num_kv_shared_layers is {shared} of {layers} layers; give 0 to {layers - 1}"
            )
        written = set(self.layer_types[: self.num_writers])
        for kind in self.layer_types[self.num_writers :]:
            if kind not in written:
                raise ConfigError(
                    f"num_kv_shared_layers is {shared}: no {kind} layer comes before the shared "
                    f"ones, so there is nothing for theirs to read; lower it"
                )
        if not self.final_softcap >= 0:
            raise ConfigError(f"final_logit_softcapping is {self.final_softcap}; give 0 or more")
        if self.per_layer_size < 0:
            raise ConfigError(
                f"hidden_size_per_layer_input is {self.per_layer_size}; give 0 (none) or more"
            )
        if self.per_layer_size:
            check_positive(self.model_type, vocab_size_per_layer_input=self.per_layer_vocab_size)

    def _check_attention(self) -> None:
        check_positive(self.model_type, sliding_window=self.sliding.window)
        if self.full.window:
            raise ConfigError(f"{FULL} layers have no window, not one of {self.full.window}")
        if self.full.num_heads != self.sliding.num_heads:
            raise ConfigError(
                f"{FULL} layers have {self.full.num_heads} query heads, {SLIDING} ones "
                f"{self.sliding.num_heads}; all layers must have the same number"
            )

    @property
    def intermediate_size(self) -> int:
        """Width of the first layer's MLP."""
        return self.mlp_width(0)

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_writers(self) -> int:
        """Layers that own keys and values; all later ones only read."""
        return self.num_layers - self.num_kv_shared_layers

    @property
    def embed_scale(self) -> float:
        """Factor on the token embeddings before the first layer."""
        return self.hidden_size**0.5

    def attention(self, layer: int) -> AttentionConfig:
        """Heads, RoPE and window of a layer."""
        return self.full if self.layer_types[layer] == FULL else self.sliding

    def store(self, layer: int) -> int:
        """Number of the store that a writing layer owns, among those of its kind."""
        assert layer < self.num_writers
        return self.layer_types[:layer].count(self.layer_types[layer])

    def num_readers(self, layer: int) -> int:
        """How many layers read what a writing layer owns: itself, and for the last one of its
        type all shared layers of that type."""
        kind = self.layer_types[layer]
        if kind in self.layer_types[layer + 1 : self.num_writers]:
            return 1
        return 1 + self.layer_types[self.num_writers :].count(kind)

    @abstractmethod
    def mlp_width(self, layer: int) -> int:
        """Width of a layer's (dense) MLP."""

    @abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dictionary of the text model alone."""
