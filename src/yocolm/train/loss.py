"""Next-token cross-entropy whose logits never exist whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 1024  # rows of logits that exist at once


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over blocks of rows; only the gradients are kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool
    ) -> Tensor:
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), ROWS):
            block, target = hidden[start : start + ROWS], targets[start : start + ROWS]
            scores = torch.matmul(block, head.T).float()
            log_norm = scores.logsumexp(-1, keepdim=True)
            total += (log_norm - scores.gather(1, target[:, None])).sum()
            if grad_hidden is not None and grad_weight is not None:
                grad = scores.sub_(log_norm).exp_()
                grad.scatter_add_(1, target[:, None], grad.new_full((len(block), 1), -1.0))
                grad = grad.to(hidden.dtype)
                grad_hidden[start : start + ROWS] = torch.matmul(grad, head)
                grad_weight += torch.matmul(grad.T, block)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In float32: a factor rounded to bfloat16 would put the same error on every entry.
        scaled = (grad_hidden.float() * grad_output).to(grad_hidden.dtype)
        return scaled, grad_weight * grad_output, None, None


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy, in nats, of ``hidden`` [N, D] against ``targets`` [N] int64.

    ``weight`` is the output head [V, D]. Products run in hidden's dtype, softmax and
    sum in float32.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden, weight, targets, needs_grad)
