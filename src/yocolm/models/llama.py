"""Llama-style Transformer with grouped-query attention: the twin that every comparison needs.

Every layer owns a global KV. By "select at the last write" the last layer computes keys and values
of all tokens, and its queries, attention and MLP for the needed rows only. Tensor names are
transformers', up to the stacking of projections of one input (``models/weights.py``).
"""

from __future__ import annotations

from torch import Tensor, nn

from yocolm.config import LlamaConfig
from yocolm.models.base import KV, Batch, State
from yocolm.models.layers import (
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    init_weights,
    rope_tables,
)
from yocolm.ops.heads import KeyForm, finish_heads
from yocolm.ops.linear import linear
from yocolm.ops.norm import add_rms_norm
from yocolm.ops.rope import Rotation


class Attention(nn.Module):
    """Causal attention whose writing (k, v) and reading (q, output) can be called apart."""

    def __init__(self, config: LlamaConfig, store: int) -> None:
        super().__init__()
        self.store, self.head_dim = store, config.head_dim
        self.q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.qkv = Linear(config.hidden_size, self.q_size + 2 * kv_size, bias)
        self.qkv_size = self.q_size + 2 * kv_size
        self.o = Linear(self.q_size, config.hidden_size, bias)

    def write(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> KV:
        kv = self.qkv.part(x, self.q_size, self.qkv_size)
        k, v = kv.view(len(x), 2, -1, self.head_dim).unbind(1)
        return state.append_global(self.store, k, v, batch, KeyForm(rope=rope))

    def read(self, x: Tensor, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        q = self.qkv.part(x, 0, self.q_size).view(len(x), -1, self.head_dim)
        return self.o(kv.attend(finish_heads(q, None, None, rope), batch).flatten(1))


class DecoderLayer(nn.Module):
    """Pre-norm block, in two parts: what it writes of every token, what it computes of a row."""

    def __init__(self, config: LlamaConfig, store: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, store)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, "silu", config.mlp_bias)

    def forward(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> Tensor:
        return self.read(x, rope, self.write(x, rope, batch, state), batch)

    def write(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> KV:
        return self.attn.write(self.attn_norm(x), rope, batch, state)

    def read(self, x: Tensor, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        attended, norm = self.attn.read(self.attn_norm(x), rope, kv, batch), self.mlp_norm
        x, normed = add_rms_norm(x, attended, norm.weight, norm.eps)
        return self.mlp(normed, x)


class Llama(Decoder):
    """The whole model; see ``models/base.py`` for the contract of its four methods."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, store) for store in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size)

    def init_weights(self, seed: int) -> None:
        """Seeded random weights."""
        init_weights(self, self.config.initializer_range, self.config.num_layers, seed)

    def forward(self, batch: Batch, state: State) -> Tensor:
        """Final hidden states [R, D] of the batch's rows."""
        x, kv = self.write(self.embed(batch), batch, state)
        x, batch = batch.select_rows(x)
        return self.read(x, kv, batch)

    def embed(self, batch: Batch) -> Tensor:
        return self.embed_tokens(batch.tokens)

    def write(self, x: Tensor, batch: Batch, state: State) -> tuple[Tensor, KV]:
        rope = rope_tables(self.config.rope, self.config.head_dim, batch, x.dtype)
        for layer in self.layers[:-1]:
            x = self._run(layer, x, rope, batch, state)
        return x, self._last.write(x, rope, batch, state)

    def read(self, x: Tensor, kv: KV, batch: Batch) -> Tensor:
        rope = rope_tables(self.config.rope, self.config.head_dim, batch, x.dtype)
        return self.norm(self._run(self._last.read, x, rope, kv, batch))

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None:
            return linear(hidden, self.embed_tokens.weight)
        return self.lm_head(hidden)

    @property
    def _last(self) -> DecoderLayer:
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer)
        return last
