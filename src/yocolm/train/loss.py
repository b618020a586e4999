"""Next-token cross-entropy whose logits never exist whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 1024  # rows of logits that exist at once


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over blocks of rows; only the gradients are kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, needs_grad: bool
    ) -> Tensor:
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), ROWS):
            block, target = hidden[start : start + ROWS], targets[start : start + ROWS]
            scores = torch.matmul(block, head.T).to(wide)
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
            counts = (target >= 0)[:, None]
            target = target.clamp(min=0)[:, None]
            log_norm = scores.logsumexp(-1, keepdim=True)
            total += (log_norm - scores.gather(1, target)).mul_(counts).sum()
            if grad_hidden is not None and grad_weight is not None:
                slope = None
                if softcap:
                    slope = scores.div(softcap).square_().neg_().add_(1)
                # A row that does not count has probabilities and one-hot target of 0.
                grad = scores.sub_(log_norm.masked_fill_(~counts, math.inf)).exp_()
                grad.scatter_add_(1, target, -counts.to(grad.dtype))
                if slope is not None:
                    grad.mul_(slope)
                grad = grad.to(hidden.dtype)
                grad_hidden[start : start + ROWS] = torch.matmul(grad, head)
                grad_weight += torch.matmul(grad.T, block)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In float32: a factor rounded to bfloat16 would put the same error on every entry.
        scaled = (grad_hidden.to(grad_output.dtype) * grad_output).to(grad_hidden.dtype)
        return scaled, grad_weight * grad_output, None, None, None


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0
) -> Tensor:
    """Summed cross-entropy, in nats, of ``hidden`` [N, D] against ``targets`` [N] int64.

    Rows with a negative target do not count. ``weight`` is the output head [V, D]; logits are
    capped as ``softcap * tanh(x / softcap)``, with 0 not at all. Products run in hidden's dtype,
    cap, softmax and sum in float32 or wider.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden, weight, targets, softcap, needs_grad)
