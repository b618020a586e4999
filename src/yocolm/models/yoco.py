"""YOCO, the decoder-decoder of "You Only Cache Once" (Sun et al., arXiv 2405.05254).

The self-decoder (gated retention, or sliding-window attention) keeps state of constant size. Its
output is projected once into the global KV, which the cross-decoder's layers only read::

    tokens -> self-decoder -> global KV            every token
                    |             |
                    +-> rows -> cross-decoder -> norm -> logits    needed rows only

Tensor names follow flash-linear-attention's YOCO, up to the stacking of projections of one input
(``models/weights.py``).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from yocolm.config import CrossConfig, RetentionConfig, YocoConfig
from yocolm.models.base import KV, Batch, State
from yocolm.models.layers import (
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    WindowAttention,
    init_weights,
    rope_tables,
)
from yocolm.ops.heads import KeyForm, finish_heads
from yocolm.ops.linear import linear
from yocolm.ops.norm import add_rms_norm, gated_norm
from yocolm.ops.rope import Rotation

QUERY_NORM_EPS = 1e-5  # flash-linear-attention leaves this norm at its default


class GatedRetention(nn.Module):
    """Equations 3 to 6 of the paper: retention whose decay is computed from the token itself."""

    def __init__(self, config: YocoConfig, mixer: RetentionConfig, store: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.store, self.num_heads, self.head_dim = store, mixer.num_heads, mixer.head_dim
        self.gate_logit_normalizer = mixer.gate_logit_normalizer
        self.norm_eps = config.norm_eps
        self.qkvg = Linear(size, 4 * size)
        self.gk = Linear(size, mixer.num_heads)
        self.o = Linear(size, size)

    def forward(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> Tensor:
        heads = self.qkvg(x).view(len(x), 4, self.num_heads, self.head_dim)
        q, k, v, gate = heads.unbind(1)
        q, k = finish_heads(q, None, None, rope), finish_heads(k, None, None, rope)
        decay_logits = self.gk(x).to(rope.cos.dtype)  # decays stay in float32
        log_decay = F.logsigmoid(decay_logits) / self.gate_logit_normalizer
        o = state.retain(self.store, q, k, v, log_decay, batch)
        return self.o(gated_norm(o, gate, self.norm_eps).flatten(1))  # a norm per head


class GlobalKV(nn.Module):
    """The one growing cache: keys and values from a norm of their own, keys rotated once, here."""

    def __init__(self, config: YocoConfig) -> None:
        super().__init__()
        cross = config.cross
        self.head_dim = cross.head_dim
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.kv = Linear(
            config.hidden_size, 2 * cross.num_kv_heads * cross.head_dim, cross.qkv_bias
        )

    def forward(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> KV:
        k, v = self.kv(self.norm(x)).view(len(x), 2, -1, self.head_dim).unbind(1)
        return state.append_global(0, k, v, batch, KeyForm(rope=rope))


class CrossAttention(nn.Module):
    """Queries of its own on the shared keys and values; writes nothing."""

    def __init__(self, config: YocoConfig, cross: CrossConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = cross.head_dim
        self.q = Linear(size, size, cross.qkv_bias)
        self.q_norm = RMSNorm(cross.head_dim, QUERY_NORM_EPS) if cross.qk_norm else None
        self.o = Linear(size, size)

    def forward(self, x: Tensor, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        norm, q = self.q_norm, self.q(x).view(len(x), -1, self.head_dim)
        q = finish_heads(q, *((None, None) if norm is None else (norm.weight, norm.eps)), rope)
        return self.o(kv.attend(q, batch).flatten(1))


class SelfDecoderLayer(nn.Module):
    """Pre-norm block around a mixer with constant-size state."""

    def __init__(self, config: YocoConfig, store: int) -> None:
        super().__init__()
        mixer, size = config.mixer, config.hidden_size
        self.attn_norm = RMSNorm(size, config.norm_eps)
        if isinstance(mixer, RetentionConfig):
            self.attn: nn.Module = GatedRetention(config, mixer, store)
        else:
            self.attn = WindowAttention(
                size, mixer.num_heads, mixer.num_kv_heads, mixer.window, store, mixer.qkv_bias
            )
        self.mlp_norm = RMSNorm(size, config.norm_eps)
        self.mlp = GatedMLP(size, config.intermediate_size, "silu")

    def forward(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> Tensor:
        mixed, norm = self.attn(self.attn_norm(x), rope, batch, state), self.mlp_norm
        x, normed = add_rms_norm(x, mixed, norm.weight, norm.eps)
        return self.mlp(normed, x)


class CrossDecoderLayer(nn.Module):
    """Pre-norm block around cross-attention."""

    def __init__(self, config: YocoConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.attn_norm = RMSNorm(size, config.norm_eps)
        self.attn = CrossAttention(config, config.cross)
        self.mlp_norm = RMSNorm(size, config.norm_eps)
        self.mlp = GatedMLP(size, config.intermediate_size, "silu")

    def forward(self, x: Tensor, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        attended, norm = self.attn(self.attn_norm(x), rope, kv, batch), self.mlp_norm
        x, normed = add_rms_norm(x, attended, norm.weight, norm.eps)
        return self.mlp(normed, x)


class Yoco(Decoder):
    """The whole model; see ``models/base.py`` for the contract of its four methods."""

    def __init__(self, config: YocoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embed_scale)
        self.self_layers = nn.ModuleList(
            SelfDecoderLayer(config, store) for store in range(config.num_self_layers)
        )
        self.global_kv = GlobalKV(config)
        self.cross_layers = nn.ModuleList(
            CrossDecoderLayer(config) for _ in range(config.num_cross_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size)

    def init_weights(self, seed: int) -> None:
        """Seeded random weights; embeddings too have std ``initializer_range``, before scaling."""
        init_weights(self, self.config.initializer_range, self.config.num_layers, seed)

    def forward(self, batch: Batch, state: State) -> Tensor:
        """Final hidden states [R, D] of the batch's rows."""
        x, kv = self.write(self.embed(batch), batch, state)  # T tokens
        x, batch = batch.select_rows(x)  # T tokens -> R rows that are needed
        return self.read(x, kv, batch)  # reads kv, writes nothing

    def embed(self, batch: Batch) -> Tensor:
        return self.embed_tokens(batch.tokens)

    def write(self, x: Tensor, batch: Batch, state: State) -> tuple[Tensor, KV]:
        x = self.self_decoder(x, batch, state)  # [T, D]; state of constant size
        rope = rope_tables(self.config.cross.rope, self.config.cross.head_dim, batch, x.dtype)
        return x, self.global_kv(x, rope, batch, state)  # the only cache that grows

    def read(self, x: Tensor, kv: KV, batch: Batch) -> Tensor:
        return self.norm(self.cross_decoder(x, kv, batch))

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None:
            return linear(hidden, self.embed_tokens.weight)
        return self.lm_head(hidden)

    def self_decoder(self, x: Tensor, batch: Batch, state: State) -> Tensor:
        mixer = self.config.mixer
        rope = rope_tables(mixer.rope, mixer.head_dim, batch, x.dtype)
        for layer in self.self_layers:
            x = self._run(layer, x, rope, batch, state)
        return x

    def cross_decoder(self, x: Tensor, kv: KV, batch: Batch) -> Tensor:
        cross = self.config.cross
        rope = rope_tables(cross.rope, cross.head_dim, batch, x.dtype)
        for layer in self.cross_layers:
            x = self._run(layer, x, rope, kv, batch)
        return x
