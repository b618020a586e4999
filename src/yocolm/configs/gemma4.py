"""Gemma 4 (E2B, E4B, 26B-A4B, 31B): the text decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yocolm.configs.gemma import GemmaConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of `num_experts` MLPs of `intermediate_size`, `top_k` of them for each token."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """`wide_mlp` doubles the MLP of shared layers; `experts` run beside the MLP of every layer."""

    model_type: ClassVar[str] = "gemma4_text"

    mlp_size: int
    wide_mlp: bool = False
    experts: ExpertsConfig | None = None

    def mlp_width(self, layer: int) -> int:
        return self.mlp_size * (2 if self.wide_mlp and layer >= self.num_writers else 1)
