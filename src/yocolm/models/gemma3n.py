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
from typing import Any

import torch
from torch import Tensor, nn

from yocolm.configs.gemma import LayerType
from yocolm.configs.gemma3n import Gemma3nConfig
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
from yocolm.ops.altup import (
    Correction,
    Prediction,
    Router,
    correct,
    correction,
    join,
    merge,
    predict,
    spread,
)
from yocolm.ops.gated import sparse_gelu_glu
from yocolm.ops.linear import linear
from yocolm.ops.logits import soft_cap
from yocolm.ops.rope import Rotation


class Laurel(nn.Module):
    """A low-rank addition to the residual path (LAuReL, Menghani et al., arXiv 2411.07501).

    Its norm and sum are made with those behind attention, see ``ops.altup.join``.
    """

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        self.left = Linear(config.hidden_size, config.laurel_rank)
        self.right = Linear(config.laurel_rank, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


class SparseMLP(nn.Module):
    """Gated MLP in which about ``sparsity`` of a token's gates are cut to zero.

    The cut is the quantile of a normal distribution with the mean and deviation of these gates.
    """

    def __init__(self, size: int, width: int, sparsity: float) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * width)
        self.down = Linear(width, size)
        self.quantile = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(sparse_gelu_glu(self.gate_up(x), self.quantile))


class Coefficients(nn.Module):
    """A small matrix [out, in]: its products are part of AltUp's own operations."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))


class AltUp(nn.Module):
    """Predicts what a layer makes of S streams, and corrects that by what it made of one of them.

    The streams are the residual path; see ``ops/altup.py``.
    """

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        size, self.streams = config.hidden_size, config.altup_num_inputs
        self.active, self.clip = config.altup_active, config.altup_coef_clip
        self.router_norm = RMSNorm(size, config.norm_eps)
        self.router = Coefficients(size, self.streams)
        self.prediction = Coefficients(self.streams, self.streams**2)
        self.correction = Coefficients(self.streams, self.streams)
        self.use_output_scale = config.altup_correct_scale  # else it comes with checkpoints, unused
        self.output_scale = nn.Parameter(torch.empty(size), requires_grad=self.use_output_scale)

    def predict(self, x: Tensor, norm: RMSNorm) -> Prediction:
        """The active stream of x [T, D, S] as expected of a layer, also normed for it."""
        weight = self._clipped(self.prediction)
        return predict(x, self._router(), weight, self.active, norm.weight, norm.eps)

    def correction_of(
        self, h: Tensor, y: Tensor, norm: RMSNorm, expected: Prediction
    ) -> Correction:
        """What a layer, whose output is ``h + norm(y)``, corrects of what was expected."""
        scale = self.output_scale if self.use_output_scale else None
        return correction(
            h,
            y,
            norm.weight,
            norm.eps,
            expected.active,
            self._router(),
            self._clipped(self.correction),
            self.active,
            scale,
        )

    def _router(self) -> Router:
        return Router(self.router_norm.weight, self.router_norm.eps, self.router.weight)

    def _clipped(self, of: Coefficients) -> Tensor:
        if self.training and self.clip is not None:
            return of.weight.clamp(-self.clip, self.clip)
        return of.weight


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
        self.mlp = SparseMLP(size, width, sparsity) if sparsity else GatedMLP(size, width, "gelu")
        self.post_mlp_norm = RMSNorm(size, eps)
        self.per_layer_gate = Linear(size, config.per_layer_size)
        self.per_layer_up = Linear(config.per_layer_size, size)
        self.per_layer_norm = RMSNorm(size, eps)

    def forward(
        self, x: Tensor, own: Tensor, rope: Rotation, batch: Batch, state: State
    ) -> tuple[Tensor, KV]:
        expected = self.altup.predict(x, self.attn_norm)
        kv = self.attn.write(expected.normed, rope, batch, state)
        attended = self.attn.read(expected.normed, rope, kv, batch)
        return self._finish(x, expected, attended, own), kv

    def write(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> KV:
        return self.attn.write(self.altup.predict(x, self.attn_norm).normed, rope, batch, state)

    def read(self, x: Tensor, own: Tensor, rope: Rotation, kv: KV, batch: Batch) -> Tensor:
        expected = self.altup.predict(x, self.attn_norm)
        attended = self.attn.read(expected.normed, rope, kv, batch)
        return self._finish(x, expected, attended, own)

    def _finish(self, x: Tensor, expected: Prediction, attended: Tensor, own: Tensor) -> Tensor:
        norm, low = self.post_attn_norm, self.laurel(expected.normed)
        h, normed = join(
            expected.active,
            attended,
            norm.weight,
            expected.normed,
            low,
            self.laurel.norm.weight,
            norm.eps,
            self.mlp_norm.weight,
        )
        made = self.altup.correction_of(h, self.mlp(normed), self.post_mlp_norm, expected)
        own = self.per_layer_up(self.per_layer_gate.gelu_times(made.corrected, own))
        norm = self.per_layer_norm
        return correct(x, expected.mixing, made.error, made.gains, own, norm.weight, norm.eps)


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

    def look_up(self, batch: Batch, half: Half) -> Tensor | None:
        last, dtype = self.config.num_writers - 1, self.embed_tokens.weight.dtype
        first, stop = (0, last) if half == "write" else (last, self.config.num_layers)
        return self.per_layer.look_up(batch.tokens, first, stop, dtype)

    def write(self, x: Tensor, batch: Batch, state: State) -> tuple[Tensor, KVs]:
        last = self.config.num_writers - 1
        ropes, kvs = gemma_ropes(self.config, batch, x.dtype), {}
        layers = self._layers(0, last, x, batch)
        x = spread(x, self.altup_in(x))  # [T, D] -> [T, D, S]
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
        if self.lm_head is None:
            return soft_cap(linear(hidden, self.embed_tokens.weight), self.config.final_softcap)
        return soft_cap(self.lm_head(hidden), self.config.final_softcap)

    def _merge(self, x: Tensor) -> Tensor:
        """Mean [R, D] of the first stream and of projections of the others that are as large."""
        size, others = x.shape[1], []
        for i, stream in enumerate(x.unbind(-1)[1:]):
            others.append(self.altup_out.part(stream.contiguous(), i * size, (i + 1) * size))
        return merge(x, torch.stack(others))

    def _layers(
        self, first: int, stop: int, embedded: Tensor, batch: Batch
    ) -> list[tuple[DecoderLayer, Tensor]]:
        """Layers ``first`` to ``stop - 1`` with the inputs that each one has of its own."""
        own = self.per_layer(embedded, batch, first, stop)
        layers: list[Any] = list(self.layers)[first:stop]
        return list(zip(layers, own, strict=True))
