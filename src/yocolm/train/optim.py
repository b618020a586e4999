"""Optimisers, their parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from yocolm.models.gemma4 import Router
from yocolm.models.layers import Linear
from yocolm.train.settings import OptimSettings


def learning_rate_factor(step: int, s: OptimSettings) -> float:
    """Factor on the peak learning rate at ``step`` (0-based): linear warmup, then the schedule."""
    if step < s.warmup_steps:
        return (step + 1) / s.warmup_steps
    progress = (step - s.warmup_steps) / max(1, s.last_step - s.warmup_steps)
    if s.schedule == "constant":
        return 1.0
    if s.schedule == "wsd":  # warmup, stable, decay (arXiv 2404.06395)
        fall = max(0.0, (progress - (1 - s.decay_fraction)) / s.decay_fraction)
        return 1.0 - (1.0 - s.final_ratio) * min(1.0, fall)
    if s.schedule in ("linear", "polynomial"):
        left = max(0.0, 1.0 - progress)
        power = s.power if s.schedule == "polynomial" else 1.0
        return s.final_ratio + (1.0 - s.final_ratio) * left**power
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return s.final_ratio + (1.0 - s.final_ratio) * cosine


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear layers, but for the output head and for routers.

    No embeddings and tables, of which a token sees one row, and no experts, which lie stacked.
    """
    routers = [part for part in model.modules() if isinstance(part, Router)]
    excluded = {id(inner) for router in routers for inner in router.modules()}
    return [
        part.weight
        for name, part in model.named_modules()
        if isinstance(part, Linear) and name != "lm_head" and id(part) not in excluded
    ]


def build_optimizers(model: nn.Module, s: OptimSettings) -> list[torch.optim.Optimizer]:
    """AdamW over all that needs a gradient, or Muon for hidden matrices beside it. Only matrices
    decay.

    Muon: Jordan et al. 2024, with the update scaled to AdamW's size (arXiv 2502.16982), so that one
    learning rate serves both. Every group keeps its highest learning rate in ``peak_lr``.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen = {id(p) for p in _hidden_matrices(model)} if s.optimizer == "muon" else set()
    by_muon = [p for p in trained if id(p) in chosen]
    rest = [p for p in trained if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": s.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=s.learning_rate,
            betas=(s.beta1, s.beta2),
            eps=s.eps,
            fused=True,
        )
    ]
    if by_muon:
        lr = s.learning_rate if s.matrix_learning_rate is None else s.matrix_learning_rate
        optimizers.append(
            torch.optim.Muon(
                by_muon, lr=lr, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> float:
    """Scale every group's highest learning rate by ``factor``; return the first group's."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return optimizers[0].param_groups[0]["lr"]
