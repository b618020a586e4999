"""Gemma 4, the text decoder: sliding-window and full attention, late layers without own KV.

The layers that own keys and values come first; each later one reads those of the last owner of its
type. By "select at the last write", of the last owner only keys and values are for every token::

    tokens -> layers 0 .. W-2 -> K, V of layer W-1                        every token
                                      |
              +-> rows -> rest of layer W-1 -> readers -> norm -> logits  needed rows only

Tensor names are transformers', up to the stacking of projections of one input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from yocolm.configs.gemma import LayerType
from yocolm.configs.gemma4 import ExpertsConfig, Gemma4Config
from yocolm.models.base import KV, Batch, Half, State
from yocolm.models.gemma import (
    GemmaAttention,
    KVs,
    PerLayerInputs,
    gemma_ropes,
)
from yocolm.models.layers import (
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    init_weights,
)
from yocolm.ops.dtypes import own_dtype
from yocolm.ops.gated import gelu_glu
from yocolm.ops.linear import linear
from yocolm.ops.logits import soft_cap
from yocolm.ops.norm import add_norm, add_norm_norm, rms_norm
from yocolm.ops.rope import Rotation

FEW_TOKENS = 64  # so many go through all experts at once where nothing may be read on the host


class Router(nn.Module):
    """The experts of each token and their weights, which sum to 1 before their own scales."""

    def __init__(self, config: Gemma4Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.top_k, self.norm_eps = experts.top_k, config.norm_eps
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.expert_scale = nn.Parameter(torch.empty(experts.num_experts))
        self.proj = Linear(config.hidden_size, experts.num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert numbers and weights, [T, top_k] each."""
        x = rms_norm(x, None, self.norm_eps) * self.scale * x.shape[-1] ** -0.5
        with own_dtype(x):  # rounded scores would choose other experts
            scores = self.proj(x)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        weights, chosen = wide.softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights * self.expert_scale[chosen]


class Experts(nn.Module):
    """E gated MLPs; tokens are grouped by expert, so that each expert's weights are read once."""

    def __init__(self, size: int, experts: ExpertsConfig) -> None:
        super().__init__()
        count, width = experts.num_experts, experts.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, size))
        self.down = nn.Parameter(torch.empty(count, size, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum, [T, D], of the outputs of each token's ``chosen`` [T, top_k] experts."""
        if len(x) <= FEW_TOKENS and (x.is_cuda or torch.compiler.is_compiling()):
            return self.at_once(x, chosen, weights)
        top_k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.gate_up)).tolist()
        groups = x[order // top_k].split(counts)
        outputs = [self._expert(expert, group) for expert, group in enumerate(groups) if len(group)]
        by_token = torch.cat(outputs)[order.argsort()].unflatten(0, (-1, top_k))
        return (by_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def at_once(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same for few tokens, in shapes that do not depend on what is chosen.

        Nothing is read on the host, so that it can be captured. Each token's own matrices are
        collected while they are fewer than all.
        """
        if chosen.numel() < len(self.gate_up):
            gate_up, down = self.gate_up[chosen], self.down[chosen]  # [T, top_k, ., .]
            both = torch.matmul(gate_up, x[:, None, :, None]).squeeze(-1)
            inner = gelu_glu(both.flatten(0, 1)).unflatten(0, chosen.shape)
            outputs = torch.matmul(down, inner.unsqueeze(-1)).squeeze(-1)
            return (outputs * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        both = torch.matmul(x, self.gate_up.transpose(1, 2))  # [experts, T, 2 * width]
        inner = gelu_glu(both.flatten(0, 1)).unflatten(0, both.shape[:2])
        outputs = torch.matmul(inner, self.down.transpose(1, 2))
        shares = weights.new_zeros(len(x), len(both)).scatter(1, chosen, weights)
        return torch.einsum("etd,te->td", outputs.to(shares.dtype), shares).to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        return linear(gelu_glu(linear(x, self.gate_up[expert])), self.down[expert])


class DecoderLayer(nn.Module):
    """Norms before and after both parts, a per-layer input, and a scale on everything.

    ``write`` is what it stores of every token, ``read`` what it computes of a row; calling it does
    both for all tokens.
    """

    def __init__(self, config: Gemma4Config, layer: int) -> None:
        super().__init__()
        size, eps, experts = config.hidden_size, config.norm_eps, config.experts
        self.kind: LayerType = config.layer_types[layer]
        self.norm_eps = eps
        self.attn_norm = RMSNorm(size, eps)
        self.attn = GemmaAttention(config, layer)
        self.post_attn_norm = RMSNorm(size, eps)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.mlp_width(layer), "gelu")
        self.post_mlp_norm = RMSNorm(size, eps)
        self.has_experts = experts is not None
        if experts is not None:
            self.post_dense_norm = RMSNorm(size, eps)
            self.router = Router(config, experts)
            self.experts_norm = RMSNorm(size, eps)
            self.experts = Experts(size, experts)
            self.post_experts_norm = RMSNorm(size, eps)
        if config.per_layer_size:
            self.per_layer_gate = Linear(size, config.per_layer_size)
            self.per_layer_up = Linear(config.per_layer_size, size)
            self.per_layer_norm = RMSNorm(size, eps)
        self.scale = nn.Parameter(torch.empty(1), requires_grad=False)  # comes with checkpoints

    def forward(
        self, x: Tensor, own: Tensor | None, rope: Rotation, batch: Batch, state: State
    ) -> tuple[Tensor, KV]:
        normed = self.attn_norm(x)
        kv = self.attn.write(normed, rope, batch, state)
        return self._finish(x, self.attn.read(normed, rope, kv, batch), own), kv

    def write(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> KV:
        return self.attn.write(self.attn_norm(x), rope, batch, state)

    def read(self, x: Tensor, own: Tensor | None, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        return self._finish(x, self.attn.read(self.attn_norm(x), rope, kv, batch), own)

    def _finish(self, x: Tensor, attended: Tensor, own: Tensor | None) -> Tensor:
        eps = self.norm_eps
        x, normed = add_norm_norm(
            x, attended, self.post_attn_norm.weight, eps, self.mlp_norm.weight, eps
        )
        mixed, weight = self._feed_forward(x, normed), self.post_mlp_norm.weight
        if own is None:
            return add_norm(x, mixed, weight, eps, self.scale)
        x = add_norm(x, mixed, weight, eps)
        y = self.per_layer_up(self.per_layer_gate.gelu_times(x, own))
        return add_norm(x, y, self.per_layer_norm.weight, eps, self.scale)

    def _feed_forward(self, x: Tensor, normed: Tensor) -> Tensor:
        dense = self.mlp(normed)
        if not self.has_experts:
            return dense
        mixture = self.experts(self.experts_norm(x), *self.router(x))
        return self.post_dense_norm(dense) + self.post_experts_norm(mixture)


class Gemma4(Decoder):
    """The whole model; see ``models/base.py`` for the contract of its four methods."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size, config.embed_scale, round_scale=True)
        self.per_layer = PerLayerInputs(config) if config.per_layer_size else None
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(size, config.norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(size, config.vocab_size)

    def init_weights(self, seed: int) -> None:
        """Seeded random weights; all scales are 1."""
        init_weights(self, self.config.initializer_range, self.config.num_layers, seed)

    def forward(self, batch: Batch, state: State) -> Tensor:
        """Final hidden states [R, D] of the batch's rows."""
        x, kvs = self.write(self.embed(batch), batch, state)  # T tokens
        x, batch = batch.select_rows(x)  # T tokens -> R rows that are needed
        return self.read(x, kvs, batch)  # reads kvs, writes nothing

    def embed(self, batch: Batch) -> Tensor:
        return self.embed_tokens(batch.tokens)

    def look_up(self, batch: Batch, half: Half) -> Tensor | None:
        if self.per_layer is None:
            return None
        last, dtype = self.config.num_writers - 1, self.embed_tokens.weight.dtype
        first, stop = (0, last) if half == "write" else (last, self.config.num_layers)
        return self.per_layer.look_up(batch.tokens, first, stop, dtype)

    def write(self, x: Tensor, batch: Batch, state: State) -> tuple[Tensor, KVs]:
        last = self.config.num_writers - 1
        ropes, kvs = gemma_ropes(self.config, batch, x.dtype), {}
        for layer, own in self._layers(0, last, x, batch):
            x, kvs[layer.kind] = self._run(layer, x, own, ropes[layer.kind], batch, state)
        writer = self.layers[last]
        assert isinstance(writer, DecoderLayer)
        kvs[writer.kind] = writer.write(x, ropes[writer.kind], batch, state)
        return x, kvs

    def read(self, x: Tensor, kvs: KVs, batch: Batch) -> Tensor:
        first, stop = self.config.num_writers - 1, self.config.num_layers
        ropes = gemma_ropes(self.config, batch, x.dtype)
        for layer, own in self._layers(first, stop, self.embed(batch), batch):
            x = self._run(layer.read, x, own, ropes[layer.kind], kvs[layer.kind], batch)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None:
            return soft_cap(linear(hidden, self.embed_tokens.weight), self.config.final_softcap)
        return soft_cap(self.lm_head(hidden), self.config.final_softcap)

    def _layers(
        self, first: int, stop: int, embedded: Tensor, batch: Batch
    ) -> list[tuple[DecoderLayer, Tensor | None]]:
        """Layers ``first`` to ``stop - 1`` with the inputs that each one has of its own."""
        layers: list[Any] = list(self.layers)[first:stop]
        if self.per_layer is None:
            return [(layer, None) for layer in layers]
        own = self.per_layer(embedded, batch, first, stop)
        return list(zip(layers, own, strict=True))
