"""Gemma 3n (E2B, E4B): the text decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yocolm.configs.gemma import GemmaConfig


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(GemmaConfig):
    """`activation_sparsity` is, per layer, the share of MLP activations that a Gaussian estimate
    sets to zero (0: none). AltUp keeps `altup_num_inputs` streams, of which a layer computes the
    `altup_active`-th and predicts the others."""

    model_type: ClassVar[str] = "gemma3n_text"

    mlp_widths: tuple[int, ...]
    activation_sparsity: tuple[float, ...]
    altup_num_inputs: int = 4
    altup_active: int = 0
    altup_coef_clip: float | None = 120.0
    altup_correct_scale: bool = True
    laurel_rank: int = 64

    def mlp_width(self, layer: int) -> int:
        return self.mlp_widths[layer]
