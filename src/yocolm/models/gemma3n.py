"""Gemma 3n, the text decoder: Gemma's shared keys and values below AltUp's parallel streams.

As in ``models/gemma4.py``, of the last layer that owns keys and values only these are computed for
every token. Hidden states are [T, D, S] between the layers: S streams, of which a layer computes
one and moves the others along (AltUp, Baykal et al., arXiv 2301.13310)::

    tokens -> S streams -> layers 0 .. W-2 -> K, V of layer W-1           every token
                                      |
              +-> rows -> rest of layer W-1 -> readers -> one stream -> norm -> logits

Tensor names are transformers', up to the stacking of projections of one input.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yocolm.configs.gemma import LayerType
from yocolm.configs.gemma3n import Gemma3nConfig
from yocolm.models.base import KV, Batch, State
from yocolm.models.gemma import (
    GegluMLP,
    GemmaAttention,
    KVs,
    PerLayerInputs,
    gelu,
    gemma_ropes,
)
from yocolm.models.layers import (
    Decoder,
    Embedding,
    Linear,
    RMSNorm,
    init_weights,
    own_dtype,
    rounded,
    soft_cap,
)
from yocolm.ops.rope import Rotation

MIN_MAGNITUDE = 1e-5**0.5


class Laurel(nn.Module):
    """A low-rank addition to the residual path (LAuReL, Menghani et al., arXiv 2411.07501)."""

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        self.left = Linear(config.hidden_size, config.laurel_rank)
        self.right = Linear(config.laurel_rank, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.right(self.left(x)))


class SparseMLP(GegluMLP):
    """Gated MLP in which about ``sparsity`` of a token's gates are cut to zero.

    The cut is the quantile of a normal distribution with the mean and deviation of these gates.
    """

    def __init__(self, size: int, width: int, sparsity: float) -> None:
        super().__init__(size, width)
        self.quantile = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        std, mean = torch.std_mean(gate, dim=-1, correction=0, keepdim=True)
        cut = mean + std * rounded(self.quantile, x.dtype)
        return self.down(gelu(F.relu(gate - cut)) * up)


class Prediction(NamedTuple):
    """What AltUp expects of a layer: the active stream [T, D], and how streams mix [T, S, S]."""

    active: Tensor
    mixing: Tensor


class AltUp(nn.Module):
    """Predicts what a layer makes of S streams, and corrects that by what it made of one of them.

    Both are linear in the streams: one pass over them behind the layer, in ``correct``, does both.
    Before the layer, only the active stream is needed. The streams are the residual path, so all of
    this is computed in their dtype, under autocast too.
    """

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        size, self.streams = config.hidden_size, config.altup_num_inputs
        self.active, self.clip = config.altup_active, config.altup_coef_clip
        self.router_norm = RMSNorm(size, config.norm_eps)
        self.router = Linear(size, self.streams)
        self.prediction = Linear(self.streams, self.streams**2)
        self.correction = Linear(self.streams, self.streams)
        self.output_scale = nn.Parameter(torch.empty(size))
        self.use_output_scale = config.altup_correct_scale

    def predict(self, x: Tensor) -> Prediction:
        active = x[..., self.active].contiguous()
        mixing = self._coefficients(self.prediction, active)
        mixing = mixing.unflatten(-1, (self.streams, self.streams)).transpose(1, 2)  # from, to
        with own_dtype(x):
            moved = torch.bmm(x, mixing[..., self.active, None]).squeeze(-1)
        return Prediction(active + moved, mixing)

    def gains(self, output: Tensor) -> Tensor:
        """The share of the active stream's error that is added to each stream, [T, S]."""
        return self._coefficients(self.correction, output) + 1

    def correct_active(self, active: Tensor, error: Tensor, gains: Tensor) -> Tensor:
        """The active stream corrected, [T, D], as the per-layer input's gate sees it."""
        corrected = active + error * gains[:, self.active, None]
        return corrected * self.output_scale if self.use_output_scale else corrected

    def correct(
        self, x: Tensor, mixing: Tensor, error: Tensor, gains: Tensor, own: Tensor
    ) -> Tensor:
        """All streams behind the layer; ``own`` [T, D] is added to all but the first."""
        others = F.pad(gains.new_ones(len(gains), self.streams - 1), (1, 0))
        added = torch.stack((error, own), -1)
        with own_dtype(x):
            x = torch.baddbmm(x, x, mixing)
            return x.baddbmm_(added, torch.stack((gains, others), 1))

    def _coefficients(self, linear: Linear, x: Tensor) -> Tensor:
        """Outputs of ``linear`` for each token, by way of a router that sees ``x`` [T, D]."""
        weight = linear.weight
        if self.training and self.clip is not None:
            weight = weight.clamp(-self.clip, self.clip)
        with own_dtype(x):
            routed = self.router(self.router_norm(x)) / x.shape[-1]
            wide = routed if routed.dtype == torch.float64 else routed.float()
            return F.linear(wide.tanh().to(x.dtype), weight)


class DecoderLayer(nn.Module):
    """A layer of Gemma on the active stream, LAuReL beside attention, AltUp around everything.

    ``write`` is what it stores of every token, ``read`` what it computes of a row; calling it does
    both for all tokens.
    """

    def __init__(self, config: Gemma3nConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        width, sparsity = config.mlp_width(layer), config.activation_sparsity[layer]
        self.kind: LayerType = config.layer_types[layer]
        self.altup = AltUp(config)
        self.attn_norm = RMSNorm(size, eps)
        self.attn = GemmaAttention(config, layer)
        self.post_attn_norm = RMSNorm(size, eps)
        self.laurel = Laurel(config)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = SparseMLP(size, width, sparsity) if sparsity else GegluMLP(size, width)
        self.post_mlp_norm = RMSNorm(size, eps)
        self.per_layer_gate = Linear(size, config.per_layer_size)
        self.per_layer_up = Linear(config.per_layer_size, size)
        self.per_layer_norm = RMSNorm(size, eps)

    def forward(
        self, x: Tensor, own: Tensor, rope: Rotation, batch: Batch, state: State
    ) -> tuple[Tensor, KV]:
        expected = self.altup.predict(x)
        normed = self.attn_norm(expected.active)
        kv = self.attn.write(normed, rope, batch, state)
        attended = self.attn.read(normed, rope, kv, batch)
        return self._finish(x, expected, normed, attended, own), kv

    def write(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> KV:
        normed = self.attn_norm(self.altup.predict(x).active)
        return self.attn.write(normed, rope, batch, state)

    def read(self, x: Tensor, own: Tensor, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        expected = self.altup.predict(x)
        normed = self.attn_norm(expected.active)
        attended = self.attn.read(normed, rope, kv, batch)
        return self._finish(x, expected, normed, attended, own)

    def _finish(
        self, x: Tensor, expected: Prediction, normed: Tensor, attended: Tensor, own: Tensor
    ) -> Tensor:
        active, mixing = expected
        h = active + self.post_attn_norm(attended)
        h = (h + self.laurel(normed)) / 2**0.5
        h = h + self.post_mlp_norm(self.mlp(self.mlp_norm(h)))
        error, gains = h - active, self.altup.gains(h)
        gate = self.per_layer_gate(self.altup.correct_active(active, error, gains))
        own = self.per_layer_norm(self.per_layer_up(gelu(gate) * own))
        return self.altup.correct(x, mixing, error, gains, own)


class Gemma3n(Decoder):
    """The whole model; see ``models/base.py`` for the contract of its four methods."""

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        self.config = config
        size, others = config.hidden_size, config.altup_num_inputs - 1
        self.embed_tokens = Embedding(config.vocab_size, size, config.embed_scale, round_scale=True)
        self.per_layer = PerLayerInputs(config)
        self.altup_in = Linear(size, others * size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.altup_out = Linear(size, others * size)
        self.norm = RMSNorm(size, config.norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(size, config.vocab_size)

    def init_weights(self, seed: int) -> None:
        """Seeded random weights; the scales of AltUp's outputs start at 0."""
        init_weights(self, self.config.initializer_range, self.config.num_layers, seed)
        for module in self.modules():
            if isinstance(module, AltUp):
                nn.init.zeros_(module.output_scale)

    def forward(self, batch: Batch, state: State) -> Tensor:
        """Final hidden states [R, D] of the batch's rows."""
        x, kvs = self.write(self.embed(batch), batch, state)  # T tokens
        x, batch = batch.select_rows(x)  # T tokens -> R rows that are needed
        return self.read(x, kvs, batch)  # reads kvs, writes nothing

    def embed(self, batch: Batch) -> Tensor:
        return self.embed_tokens(batch.tokens)

    def write(self, x: Tensor, batch: Batch, state: State) -> tuple[Tensor, KVs]:
        last = self.config.num_writers - 1
        ropes, kvs = gemma_ropes(self.config, batch, x.dtype), KVs()
        layers = self._layers(0, last, x, batch)
        x = self._spread(x)  # [T, D] -> [T, D, S]
        for layer, own in layers:
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
        return self.norm(self._merge(x))  # [R, D, S] -> [R, D]

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return soft_cap(F.linear(hidden, head.weight), self.config.final_softcap)

    def _spread(self, x: Tensor) -> Tensor:
        """Streams [T, D, S]: ``x`` [T, D], and projections of it that are as large."""
        others = self.altup_in(x).unflatten(-1, (-1, x.shape[-1]))
        others = _as_large(others, x.unsqueeze(1))
        return torch.stack((x, *others.unbind(1)), dim=-1)

    def _merge(self, x: Tensor) -> Tensor:
        """Mean [R, D] of the first stream and of projections of the others that are as large."""
        first, *others = x.unbind(-1)
        size = x.shape[1]
        for i, stream in enumerate(others):
            others[i] = _as_large(self.altup_out.part(stream, i * size, (i + 1) * size), first)
        return torch.stack((first, *others)).mean(0)

    def _layers(
        self, first: int, stop: int, embedded: Tensor, batch: Batch
    ) -> list[tuple[DecoderLayer, Tensor]]:
        """Layers ``first`` to ``stop - 1`` with the inputs that each one has of its own."""
        own = self.per_layer(embedded, batch.tokens, first, stop)
        layers: list[Any] = list(self.layers)[first:stop]
        return list(zip(layers, own, strict=True))


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """``x`` scaled, token by token, to the root mean square of ``like``."""
    scale = _magnitude(like) / _magnitude(x).clamp(min=MIN_MAGNITUDE)
    return x * scale.to(like.dtype)


def _magnitude(x: Tensor) -> Tensor:
    """Root mean square over the last dimension, which is kept, in float32 or wider."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide) * x.shape[-1] ** -0.5
