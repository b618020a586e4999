"""Rotary embedding, as far as a configuration describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from yocolm.errors import ConfigError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, pairing of the dimensions and spacing of the frequencies.

    `inclusive` spaces the exponents over [0, 1] with both ends (the YOCO authors' code, "yoco" in
    Hugging Face files); otherwise they are the usual `theta ** -(2 i / d)` ("fla", Llama). Only
    the first `fraction` of the pairs turn (Gemma's "proportional" RoPE), `factor` times slower.
    """

    theta: float
    interleaved: bool
    inclusive: bool
    fraction: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ConfigError(f"rope theta is {self.theta}; it must be finite and above 0")
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"partial_rotary_factor is {self.fraction}; it must be from 0 to 1")
        if not 0 < self.factor < math.inf:
            raise ConfigError(f"rope factor is {self.factor}; it must be finite and above 0")
