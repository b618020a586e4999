"""Layers that the families share. Every matrix product goes through ``Linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from yocolm.config import RopeConfig
from yocolm.models.base import Batch, Half, State
from yocolm.ops.dtypes import rounded
from yocolm.ops.gated import gelu_glu, gelu_mul, silu_glu
from yocolm.ops.heads import KeyForm, finish_heads
from yocolm.ops.linear import (
    PackedWeight,
    linear,
    pack,
    packed_linear,
    unpack,
    unpack_bias,
)
from yocolm.ops.native.library import fits
from yocolm.ops.norm import rms_norm
from yocolm.ops.rope import Rotation, rotation

Activation = Literal["gelu", "silu"]  # gelu: its tanh form


class Decoder(nn.Module):
    """A model whose layers, or halves of one, can be recomputed in the backward pass."""

    gradient_checkpointing = False

    def look_up(self, batch: Batch, half: Half) -> Tensor | None:
        """Nothing; see ``CausalLM.look_up``."""
        return None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """What moves or casts a module: a model that is packed for serving is not so any more."""
        for module in self.modules():
            for name in (*module._parameters, *module._modules):
                module.__dict__.pop(name, None)
            if isinstance(module, Linear):
                module.unpack()
        return super()._apply(fn, recurse)

    def _run(self, part: Callable[..., Any], *args: object) -> Any:
        """Call a layer or half of one, without keeping its activations if so set."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(part, *args, use_reentrant=False)
        return part(*args)


class Linear(nn.Module):
    """``x @ weight.T + bias``; ``out_features`` may stack several projections of one input.

    With an ``activation`` the outputs are gates and, behind them, as many values: the result is
    ``activation(gates) * values`` (Shazeer, arXiv 2002.05202), half as wide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: PackedWeight | None = None

    def pack(self) -> None:
        """Keep the weights in the form of the native kernels, and in no other.

        They cannot be trained until ``unpack``; saving a state unpacks what it saves.
        """
        bias = None if self.bias is None else self.bias.detach()
        self.packed = pack(self.weight, bias, self.activation is not None)
        del self.weight, self.bias

    def unpack(self) -> None:
        """Undo ``pack``."""
        if self.packed is not None:
            bias = unpack_bias(self.packed)
            self.weight = nn.Parameter(unpack(self.packed))
            self.bias = None if bias is None else nn.Parameter(bias)
            self.packed = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packed is not None:
            destination[f"{prefix}weight"] = unpack(self.packed)
            bias = unpack_bias(self.packed)
            if bias is not None:
                destination[f"{prefix}bias"] = bias

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in_features] to [T, out_features], plus ``residual``; to half of that if gated."""
        assert residual is None or self.activation is None
        if self.packed is not None:
            return packed_linear(x, self.packed, activation=self.activation, other=residual)
        y = linear(x, self.weight, self.bias)
        if self.activation is not None:
            return gelu_glu(y) if self.activation == "gelu" else silu_glu(y)
        return y if residual is None else residual + y

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Only the output features ``start`` to ``stop``: one of several stacked projections."""
        if self.packed is not None:
            return packed_linear(x, self.packed, start, stop)
        bias = None if self.bias is None else self.bias[start:stop]
        return linear(x, self.weight[start:stop], bias)

    def gelu_times(self, x: Tensor, other: Tensor) -> Tensor:
        """``gelu(x @ weight.T + bias) * other``, with the tanh form of GELU."""
        if self.packed is not None:
            return packed_linear(x, self.packed, activation="gelu", other=other)
        return gelu_mul(linear(x, self.weight, self.bias), other)


def pack_weights(model: nn.Module) -> None:
    """Pack every ``Linear`` of a model that only serves, where native kernels take it.

    See ``Linear.pack``. Elsewhere (no kernels, CUDA, float64) this changes nothing.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Linear) and module.packed is None and fits(module.weight):
                module.pack()
            # Found by Python itself, not by nn.Module's search: half a millisecond of a step.
            module.__dict__.update(module._parameters | module._modules)


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


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, and a residual added to it if one is given."""

    def __init__(self, size: int, width: int, activation: Activation, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * width, bias, activation)
        self.down = Linear(width, size, bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(self.gate_up(x), residual)


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
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        kv = state.append_window(self.store, k, v, batch, self.window, KeyForm(rope=rope))
        return self.o(kv.attend(finish_heads(q, None, None, rope), batch).flatten(1))


def rope_tables(config: RopeConfig, head_dim: int, batch: Batch, dtype: torch.dtype) -> Rotation:
    """Rotary tables for a batch, made once: float32, or float64 for a float64 model."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def build() -> Rotation:
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

    return batch.memo(("rope", config, head_dim, wide), build)


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
