"""Layers that the families share. Every matrix product goes through ``Linear``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from yocolm.config import RopeConfig
from yocolm.models.base import Batch, State
from yocolm.ops.norm import rms_norm
from yocolm.ops.rope import Rotation, rotate, rotation


class Decoder(nn.Module):
    """A model whose layers, or halves of one, can be recomputed in the backward pass."""

    gradient_checkpointing = False

    def _run(self, part: Callable[..., Any], *args: object) -> Any:
        """Call a layer or half of one, without keeping its activations if so set."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(part, *args, use_reentrant=False)
        return part(*args)


class Linear(nn.Module):
    """``x @ weight.T + bias``; ``out_features`` may stack several projections of one input."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Only the output features ``start`` to ``stop``: one of several stacked projections."""
        bias = None if self.bias is None else self.bias[start:stop]
        return F.linear(x, self.weight[start:stop], bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Token embeddings, multiplied by ``scale``; ``round_scale``: as the weights' dtype has it."""

    def __init__(
        self, vocab_size: int, size: int, scale: float = 1.0, round_scale: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size))
        self.scale, self.round_scale = scale, round_scale

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)
        if self.scale == 1.0:
            return x
        return x * (rounded(self.scale, x.dtype) if self.round_scale else self.scale)


class SwiGLU(nn.Module):
    """Gated MLP: ``down(silu(gate(x)) * up(x))`` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, size: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * width, bias)
        self.down = Linear(width, size, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class WindowAttention(nn.Module):
    """Sliding-window attention with grouped-query heads; owns one window store."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        window: int,
        store: int,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = size // num_heads
        self.window, self.store = window, store
        self.qkv = Linear(size, (num_heads + 2 * num_kv_heads) * self.head_dim, bias)
        self.o = Linear(num_heads * self.head_dim, size)

    def forward(self, x: Tensor, rope: Rotation, batch: Batch, state: State) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = rotate(q, rope), rotate(k, rope)
        kv = state.append_window(self.store, k, v, batch, self.window)
        return self.o(kv.attend(q, batch).flatten(1))


def own_dtype(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the dtypes of their operands, whatever autocast says."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def rounded(value: float, dtype: torch.dtype) -> float:
    """A number as ``dtype`` has it."""
    return float(torch.tensor(value, dtype=dtype))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` in float32 or wider; a ``cap`` of 0 changes nothing."""
    if not cap:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.tanh(wide / cap) * cap


def rope_tables(config: RopeConfig, head_dim: int, batch: Batch, dtype: torch.dtype) -> Rotation:
    """Rotary tables for a batch: float32, or float64 for a float64 model."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return rotation(
        batch.positions,
        head_dim,
        config.theta,
        interleaved=config.interleaved,
        inclusive=config.inclusive,
        fraction=config.fraction,
        factor=config.factor,
        dtype=wide,
    )


def init_weights(model: nn.Module, std: float, depth: int, seed: int) -> None:
    """Normal weights, smaller by ``sqrt(2 * depth)`` where they add to the residual stream.

    Norm weights and scales become one, biases zero. The same seed gives the same weights on every
    device.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif name.endswith(("norm.weight", "scale")):
                parameter.fill_(1.0)
            else:
                residual = name.endswith((".o.weight", ".down.weight"))
                spread = std / (2 * depth) ** 0.5 if residual else std
                values = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(values.normal_(0.0, spread, generator=generator))
