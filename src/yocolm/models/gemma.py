"""What Gemma 3n and Gemma 4 share: attention and per-layer inputs.

Shape letters as in ``models/base.py``; N layers, P width of the per-layer inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from yocolm.configs.gemma import FULL, SLIDING, GemmaConfig, LayerType
from yocolm.models.base import KV, Batch, State
from yocolm.models.layers import Linear, RMSNorm, rope_tables
from yocolm.ops.dtypes import rounded
from yocolm.ops.heads import KeyForm, finish_heads
from yocolm.ops.norm import mix_inputs
from yocolm.ops.rope import Rotation

Ropes = dict[LayerType, Rotation]
KVs = dict[LayerType, KV]  # what readers of each type of layer read
RELEASE_ROWS = 64  # a row of a mapped table may bring a whole large page of the file


class GemmaAttention(nn.Module):
    """Grouped-query attention with norms of queries, keys and values in place of a scale.

    A layer of the shared ones has queries only and reads what an earlier layer wrote. Writing and
    reading can be called apart.
    """

    def __init__(self, config: GemmaConfig, layer: int) -> None:
        super().__init__()
        heads, size, bias = config.attention(layer), config.hidden_size, config.attention_bias
        self.heads, self.norm_eps = heads, config.norm_eps
        self.q_size = heads.num_heads * heads.head_dim
        kv_size = heads.num_kv_heads * heads.head_dim
        self.q_norm = RMSNorm(heads.head_dim, config.norm_eps)
        self.owns_kv = layer < config.num_writers
        if self.owns_kv:
            self.store = config.store(layer)
            self.qkv_size = self.q_size + kv_size * (1 if heads.k_is_v else 2)
            self.qkv = Linear(size, self.qkv_size, bias)
            self.k_norm = RMSNorm(heads.head_dim, config.norm_eps)
        else:
            self.q = Linear(size, self.q_size, bias)
        self.o = Linear(self.q_size, size, bias)

    def write(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> KV:
        heads = self.heads
        kv = self.qkv.part(x, self.q_size, self.qkv_size).view(len(x), -1, heads.head_dim)
        k, v = kv[:, : heads.num_kv_heads], kv[:, -heads.num_kv_heads :]  # the same if k_is_v
        form = KeyForm(self.k_norm.weight, True, self.norm_eps, rope)
        if heads.window:
            return state.append_window(self.store, k, v, batch, heads.window, form)
        return state.append_global(self.store, k, v, batch, form)

    def read(self, x: Tensor, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        q = self.qkv.part(x, 0, self.q_size) if self.owns_kv else self.q(x)
        q = q.view(len(x), -1, self.heads.head_dim)
        q = finish_heads(q, self.q_norm.weight, self.norm_eps, rope)
        return self.o(kv.attend(q, batch, scale=1.0).flatten(1))


class LookupTable(nn.Module):
    """A table that is only looked up: it may be mapped from a file, and stays on the CPU then.

    Its dtype is the file's then; what is looked up comes in the dtype that is asked for. Pages of
    the file that were used are given back every ``RELEASE_ROWS`` rows, or they would add up to the
    whole table.
    """

    def __init__(self, rows: int, size: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))
        self.scale = scale
        self._release: Callable[[], None] | None = None
        self._rows = 0  # looked up since the last release

    def map(self, weight: Tensor, release: Callable[[], None]) -> None:
        """Use a table that lies in a file; ``release`` drops its pages that were used."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._release = release

    def forward(self, tokens: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Columns ``start`` to ``stop`` of ``tokens`` [R], not yet scaled: [R, stop - start].

        Tokens beyond the table use row 0.
        """
        tokens = torch.where(tokens < self.weight.shape[0], tokens, 0)
        found = self.weight[:, start:stop][tokens.to(self.weight.device)]
        if self._release is not None:
            self._rows += len(tokens)
            if self._rows >= RELEASE_ROWS:
                self._release()
                self._rows = 0
        return found.to(tokens.device, dtype)


class PerLayerInputs(nn.Module):
    """For every layer an input of its own: of the token, and of the token's embedding."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.size, self.scale = config.per_layer_size, config.hidden_size**-0.5
        width = config.num_layers * self.size
        self.table = LookupTable(config.per_layer_vocab_size, width, self.size**0.5)
        self.projection = Linear(config.hidden_size, width)
        self.norm = RMSNorm(self.size, config.norm_eps)

    def look_up(self, tokens: Tensor, first: int, stop: int, dtype: torch.dtype) -> Tensor:
        """What the table has of ``tokens`` [R] for those layers, [R, layers * P]."""
        return self.table(tokens, first * self.size, stop * self.size, dtype)

    def forward(self, x: Tensor, batch: Batch, first: int, stop: int) -> tuple[Tensor, ...]:
        """Inputs [R, P] of layers ``first`` to ``stop - 1``, from embeddings x [R, D] of tokens."""
        columns = first * self.size, stop * self.size
        found = batch.looked_up
        if found is None:
            found = self.look_up(batch.tokens, first, stop, x.dtype)
        projected, norm = self.projection.part(x, *columns), self.norm
        scale = rounded(self.table.scale, x.dtype)
        mixed = mix_inputs(projected, self.scale, norm.weight, norm.eps, found, scale)
        return mixed.unbind(1)


def gemma_ropes(config: GemmaConfig, batch: Batch, dtype: torch.dtype) -> Ropes:
    """Rotary tables of a batch for each type of layer."""
    return {
        kind: rope_tables(heads.rope, heads.head_dim, batch, dtype)
        for kind, heads in ((FULL, config.full), (SLIDING, config.sliding))
        if kind in config.layer_types
    }
