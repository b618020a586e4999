"""Gated retention (YOCO, arXiv 2405.05254, section 3.1) in its three equivalent forms.

For one head with query, key, value ``q_t, k_t, v_t`` and decay ``d_t = exp(log_decay_t)``::

    S_t = d_t * S_{t-1} + k_t v_t^T            recurrent, S is [K, V]
    o_t = scale * q_t S_t

    O = (scale * Q K^T * D) V,  D_ij = prod_{j < l <= i} d_l for j <= i, else 0     parallel

and chunkwise: parallel within a chunk, recurrent from chunk to chunk. State, decays and products
are float32 (float64 for float64 inputs) whatever the dtype of the inputs; log-decays are cumulated
within a chunk only, and masked before ``exp``.

Shapes: T packed tokens, S sequences, H heads, K and V head sizes; N blocks of C tokens
(``chunk_size`` here is retention's own and has nothing to do with the chunks of a prefill).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from yocolm.ops.blocks import Blocks, cut_blocks

CHUNK_SIZE = 256


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _zero_state(q: Tensor, v: Tensor, sequences: int) -> Tensor:
    shape = (sequences, q.shape[1], q.shape[2], v.shape[2])
    return torch.zeros(shape, dtype=_wide(q.dtype), device=q.device)


def retention_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    lengths: list[int],
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference: one token after another. Arguments and results as in ``gated_retention``."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    state = _zero_state(q, v, len(lengths)) if initial_state is None else initial_state
    wide = state.dtype
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    token = 0
    for seq, length in enumerate(lengths):
        s = state[seq]
        for _ in range(length):
            kv = k[token].to(wide)[:, :, None] * v[token].to(wide)[:, None, :]
            s = log_decay[token].to(wide).exp()[:, None, None] * s + kv
            outputs.append(scale * torch.einsum("hk,hkv->hv", q[token].to(wide), s))
            token += 1
        finals.append(s)
    out = torch.stack(outputs) if outputs else v.new_zeros(v.shape)
    return out.to(v.dtype), torch.stack(finals)


def retention_parallel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float | None = None
) -> Tensor:
    """Reference: one sequence [T, H, K] at once, by its T x T decay matrix. Returns [T, H, V]."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    wide = _wide(q.dtype)
    total = log_decay.to(torch.float64).cumsum(0).T  # [H, T]
    gap = total[:, :, None] - total[:, None, :]
    causal = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).tril()
    decay = gap.masked_fill(~causal, float("-inf")).exp().to(wide)
    scores = torch.einsum("ihk,jhk->hij", q.to(wide), k.to(wide)) * (scale * decay)
    return torch.einsum("hij,jhv->ihv", scores, v.to(wide)).to(v.dtype)


def retention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float | None = None
) -> Tensor:
    """Advance S sequences by a token each, ``state`` [S, H, K, V] in place (inference only).

    q, k are [S, H, K], v is [S, H, V], log_decay [S, H]. Returns [S, H, V] in the dtype of ``v``.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    wide = state.dtype
    state.mul_(log_decay.to(wide).exp()[:, :, None, None])
    state.addcmul_(k.to(wide)[:, :, :, None], v.to(wide)[:, :, None, :])
    with torch.autocast(q.device.type, enabled=False):  # the product stays in float32
        out = torch.matmul((scale * q.to(wide)).unsqueeze(2), state)
    return out.squeeze(2).to(v.dtype)


class _Chunks:
    """What forward and backward both need of one layer's blocks: [N, H, C, .] in float32."""

    def __init__(self, tensors: tuple[Tensor, ...], blocks: Blocks, scale: float) -> None:
        q, k, v, log_decay = tensors
        wide = _wide(q.dtype)
        self.q, self.k, self.v = (
            blocks.spread(x).transpose(1, 2).to(wide).contiguous() for x in (q, k, v)
        )
        self.total = blocks.spread(log_decay).transpose(1, 2).to(wide).cumsum(-1)  # [N, H, C]
        self.last = self.total[..., -1:]  # [N, H, 1]: padding decays nothing
        self.carry = self.last.exp().unsqueeze(-1)  # [N, H, 1, 1] decay over the whole block
        self.from_start = self.total.exp().mul_(scale).unsqueeze(-1)  # [N, H, C, 1]
        self.to_end = (self.last - self.total).exp().unsqueeze(-1)  # [N, H, C, 1]

    def decay(self, scale: float) -> Tensor:
        """The causal decay matrices within blocks, times ``scale``: [N, H, C, C]."""
        size = self.total.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=self.total.device).triu(1)
        gap = self.total.unsqueeze(-1) - self.total.unsqueeze(-2)
        return gap.masked_fill_(later, float("-inf")).exp_().mul_(scale)


def _scan(update: Tensor, carry: Tensor, state: Tensor, blocks: Blocks) -> Tensor:
    """Run ``state = carry * state + update`` over levels; ``state`` ends final, in place.

    Returns the state before each block, [N, H, K, V].
    """
    before = torch.empty_like(update)
    start = 0
    for size in blocks.level_sizes:
        level = slice(start, start + size)
        before[level] = state[:size]
        state[:size].mul_(carry[level]).add_(update[level])
        start += size
    return before


def _scan_back(update: Tensor, carry: Tensor, grad: Tensor, blocks: Blocks) -> Tensor:
    """The same scan from the last level to the first; returns the gradient after each block."""
    after = torch.empty_like(update)
    stop = blocks.count
    for size in reversed(blocks.level_sizes):
        level = slice(stop - size, stop)
        after[level] = grad[:size]
        grad[:size].mul_(carry[level]).add_(update[level])
        stop -= size
    return after


def _chunk_forward(
    tensors: tuple[Tensor, ...], initial_state: Tensor, blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output [T, H, V], final state [S, H, K, V] and the states before each block."""
    c = _Chunks(tensors, blocks, scale)
    state = initial_state.index_select(0, blocks.order)
    before = _scan(torch.matmul((c.k * c.to_end).transpose(-1, -2), c.v), c.carry, state, blocks)
    scores = torch.matmul(c.q, c.k.transpose(-1, -2)).mul_(c.decay(scale))
    out = torch.matmul(scores, c.v).add_(torch.matmul(c.q * c.from_start, before))
    packed = blocks.pack(out.transpose(1, 2)).to(tensors[2].dtype)
    return packed, state.index_select(0, blocks.inverse), before


class _ChunkwiseRetention(torch.autograd.Function):
    """Chunkwise form with a backward of its own: keeps the inputs and one state a block."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        initial_state: Tensor,
        blocks: Blocks,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out, final, before = _chunk_forward((q, k, v, log_decay), initial_state, blocks, scale)
        ctx.save_for_backward(q, k, v, log_decay, before)
        ctx.blocks, ctx.scale = blocks, scale
        return out, final

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_out: Tensor, grad_final: Tensor
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_out.device.type, enabled=False):
            return _chunk_backward(ctx, grad_out, grad_final)


def _chunk_backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, before = ctx.saved_tensors
    blocks: Blocks = ctx.blocks
    c = _Chunks((q, k, v, log_decay), blocks, ctx.scale)
    do = blocks.spread(grad_out).transpose(1, 2).to(before.dtype).contiguous()

    grad_state = grad_final.to(before.dtype).index_select(0, blocks.order)
    into_state = torch.matmul((c.q * c.from_start).transpose(-1, -2), do)
    after = _scan_back(into_state, c.carry, grad_state, blocks)

    decay = c.decay(ctx.scale)
    grad_scores = torch.matmul(do, c.v.transpose(-1, -2)).mul_(decay)
    scores = torch.matmul(c.q, c.k.transpose(-1, -2)).mul_(decay)
    dq = torch.matmul(grad_scores, c.k)
    dq.add_(torch.matmul(do, before.transpose(-1, -2)).mul_(c.from_start))
    dk_state = torch.matmul(c.v, after.transpose(-1, -2)).mul_(c.to_end)
    dk = torch.matmul(grad_scores.transpose(-1, -2), c.q).add_(dk_state)
    dv = torch.matmul(scores.transpose(-1, -2), do)
    dv.add_(torch.matmul(c.k * c.to_end, after))

    # The cumulated log-decay enters as exp(+total) beside q and exp(-total) beside k; the block's
    # last one also scales everything that leaves the block.
    d_total = (c.q * dq).sum(-1) - (c.k * dk).sum(-1)
    d_total[..., -1] += (c.k * dk_state).sum((-1, -2))
    d_total[..., -1] += (after * before).sum((-1, -2)) * c.carry[..., 0, 0]
    d_decay = d_total.flip(-1).cumsum(-1).flip(-1)

    def packed(x: Tensor, like: Tensor) -> Tensor:
        return blocks.pack(x.transpose(1, 2)).to(like.dtype)

    return (
        packed(dq, q),
        packed(dk, k),
        packed(dv, v),
        packed(d_decay, log_decay),
        grad_state.index_select(0, blocks.inverse),
        None,
        None,
    )


def retention_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    blocks: Blocks,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Fast form over sequences cut by ``cut_blocks(lengths, chunk_size)``; differentiable.

    Arguments and results as in ``gated_retention``. Memory is linear in T: C x C scores a block,
    one state a block, no T x T matrix.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    if initial_state is None:
        initial_state = _zero_state(q, v, len(blocks.order))
    tensors = (q, k, v, log_decay)
    with torch.autocast(q.device.type, enabled=False):  # products stay in float32
        if not torch.is_grad_enabled() or not any(
            t.requires_grad for t in (*tensors, initial_state)
        ):
            return _chunk_forward(tensors, initial_state, blocks, scale)[:2]
        return _ChunkwiseRetention.apply(*tensors, initial_state, blocks, scale)


def gated_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    lengths: list[int],
    initial_state: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Gated retention over packed sequences, in the fastest form for their lengths.

    Args:
        q, k: [T, H, K]; v: [T, H, V]; any floating dtype.
        log_decay: [T, H] logarithms of the decays, <= 0, float32 or float64.
        lengths: tokens of each of the S sequences; they sum to T. Empty sequences keep their state.
        initial_state: [S, H, K, V] float32 (float64), or None for zeros.
        scale: factor on the scores, ``K ** -0.5`` if None.
        chunk_size: tokens a block of the chunkwise form.

    Returns:
        Output [T, H, V] in the dtype of ``v``, final state [S, H, K, V] in float32 (float64).
    """
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"lengths sum to {sum(lengths)}, but there are {q.shape[0]} tokens")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    blocks = cut_blocks(lengths, min(chunk_size, max(lengths, default=1) or 1), q.device)
    return retention_chunkwise(q, k, v, log_decay, blocks, initial_state, scale)
